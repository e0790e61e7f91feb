"""Makes ``torch.compile`` run code of this package untraced."""

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo import eval_frame

_Class = TypeVar("_Class", bound=type)
_AS_IT_STANDS = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def untraced(cls: _Class) -> _Class:
    """Decorates a class so that Dynamo runs its methods and all that they call untraced; each call breaks the graph.

    Tracing would fail at objects that Dynamo does not support, and end the program. Besides, most work of the methods
    is in C and in kernels, which Dynamo can't trace. When a compiled function calls a method, Dynamo looks for a mark
    on the method's function object. When torch's C++ code calls the method, as DDP's reducer does, Dynamo looks for a
    mark on the code object. So this function marks both objects. ``torch.compiler.disable`` would have the same effect,
    but would take a microsecond per call and import Dynamo into each process.
    """
    for attribute in vars(cls).values():
        if isinstance(attribute, FunctionType):
            attribute._torchdynamo_disable = True  # type: ignore[attr-defined]  # Dynamo reads it before inlining
            eval_frame.set_code_exec_strategy(attribute.__code__, _AS_IT_STANDS)
        elif isinstance(attribute, property) and isinstance(attribute.fget, FunctionType):
            eval_frame.set_code_exec_strategy(attribute.fget.__code__, _AS_IT_STANDS)
    return cls
