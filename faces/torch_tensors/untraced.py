"""Keeps ``torch.compile`` out of the code of this package."""

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo import eval_frame

_Class = TypeVar("_Class", bound=type)
_AS_IT_STANDS = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def untraced(cls: _Class) -> _Class:
    """Decorates a class whose methods Dynamo is to run, with all that they call, as they stand: a call breaks graphs.

    Their work is in C and in kernels, which Dynamo cannot trace; on its way there it meets objects that it does not
    support, which ends the program. Methods are entered from a compiled function, or by torch's C++ code below one
    (DDP's reducer calls the process group), so both the function and its code are marked. ``torch.compiler.disable``
    has the same effect by a wrapper around each method, which takes a microsecond a call and imports Dynamo into each
    process.
    """
    for attribute in vars(cls).values():
        if isinstance(attribute, FunctionType):
            attribute._torchdynamo_disable = True  # type: ignore[attr-defined]  # read where Dynamo would inline a call
            eval_frame.set_code_exec_strategy(attribute.__code__, _AS_IT_STANDS)
        elif isinstance(attribute, property) and isinstance(attribute.fget, FunctionType):
            eval_frame.set_code_exec_strategy(attribute.fget.__code__, _AS_IT_STANDS)
    return cls
