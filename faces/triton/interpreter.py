"""Runs kernels in Triton's interpreter, for the host runtime.

Triton's own launch replaces the functions of Triton's language for each launch and for each nested call of a
@triton.jit function, which takes milliseconds. This module replaces the language's functions once. Arrays are passed by
address, without torch. A launch waits for its stream, and returns when the kernel has run.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import triton.language as tl
from proxyccl.device.errors import KernelError
from proxyccl.triton.arguments import CONSTEXPR, Argument
from proxyccl.triton.grid_barrier import GridBarrier
from proxyccl.triton.turns import Grid, Launch
from triton.language import core  # noqa: F401  (the interpreter replaces functions only in modules that it finds here)
from triton.runtime import interpreter


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function.rewrite()(*args, **kwargs)


@functools.cache
def _prepare_language() -> object:
    """Puts the interpreter's functions in Triton's language for good, as Triton < 3.9 did. Keep the result alive."""
    interpreter.InterpretedFunction.__call__ = _call
    scope = interpreter._patch_lang(_call)
    # Older versions of Triton convert an array of one element to a number, for which numpy raises an error from 2.4 on.
    tl.tensor.__index__ = lambda tensor: int(tensor.handle.data.squeeze())
    return scope


def _tensor(argument: Argument) -> Any:
    if argument.type == CONSTEXPR:
        return argument.value
    kind = _type(argument.type)
    number = np.uint64 if kind.is_ptr() else interpreter._get_np_dtype(kind)
    return tl.tensor(interpreter.TensorHandle(np.array([argument.value], dtype=number), kind), kind)


@functools.cache
def _type(name: str) -> Any:
    if name.startswith("*"):
        return tl.pointer_type(_type(name[1:]))
    names = {"i1": "int1", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
    names |= {"fp8e4nv": "float8e4nv", "fp8e5": "float8e5"}
    return getattr(tl, names.get(name, name.replace("i", "int").replace("u", "uint")))


def run(kernel: Any, arguments: dict[str, Argument], grid: Grid) -> None:
    """Runs a kernel that was decorated under TRITON_INTERPRET.

    Raises:
        KernelError: a program raised an exception, which is the error's cause. The next launch can use the kernel's
            grid barriers.
    """
    _prepare_language()
    values = {name: _tensor(argument) for name, argument in arguments.items()}
    try:
        # Triton rewrites the kernel's source inside `_call`, when no other program runs, because CPython 3.11 can't
        # make syntax trees in two threads at the same time (https://github.com/python/cpython/issues/106905).
        Launch(functools.partial(_call, kernel, **values), grid).run()
    except BaseException as error:
        for argument in arguments.values():
            if isinstance(argument.owner, GridBarrier):
                argument.owner._reset()
        if isinstance(error, Exception):
            raise KernelError(f"kernel {kernel.__name__} raised {type(error).__name__}: {error}") from error
        raise
