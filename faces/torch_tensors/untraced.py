"""Makes ``torch.compile`` run code of this package untraced."""

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo import eval_frame

_Class = TypeVar("_Class", bound=type)
_AS_IT_STANDS = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def untraced(cls: _Class) -> _Class:
    """Decorates a class so that Dynamo runs its methods, and all functions that they call, untraced. A call of a method
    breaks the graph.

    Tracing would fail at objects that Dynamo does not support, and end the program. It would also gain nothing, because
    the methods' work is in C and in kernels, which Dynamo can't trace. A method may be called by a compiled function,
    or by torch's C++ code inside one (DDP's reducer calls the process group), so both the function object and its code
    object are marked. ``torch.compiler.disable`` would have the same effect, but its wrapper around each method takes a
    microsecond per call and imports Dynamo into each process.
    """
    for attribute in vars(cls).values():
        if isinstance(attribute, FunctionType):
            attribute._torchdynamo_disable = True  # type: ignore[attr-defined]  # Dynamo reads it before it inlines
            eval_frame.set_code_exec_strategy(attribute.__code__, _AS_IT_STANDS)
        elif isinstance(attribute, property) and isinstance(attribute.fget, FunctionType):
            eval_frame.set_code_exec_strategy(attribute.fget.__code__, _AS_IT_STANDS)
    return cls
