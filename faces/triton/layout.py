"""The constants of C, and the offsets of the fields of the structs that kernels share with the host (handles.h,
control.h, trigger.h), as the C compiler reports them.

A constant has its name in C without the prefix. A field's name is the name of its struct, here ``PROXY``, ``SM``,
``CONTROL`` or ``WAIT``, and its path in it. A field's offset counts in words of 32 bits (``_4``) or 64 bits (``_8``),
for pointers to such words: ``CONTROL_ERROR_STATE_4``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import triton.language as tl
from proxyccl.device._native import ffi, lib

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


def _offsets(name: str, struct: Any, start: int = 0) -> Iterator[tuple[str, int]]:
    for field, found in struct.fields:
        path, offset = f"{name}_{field.upper()}", start + found.offset
        if found.type.kind == "struct":
            yield from _offsets(path, found.type, offset)
        else:
            word = 4 if found.type.kind == "primitive" and ffi.sizeof(found.type) == 4 else 8
            yield f"{path}_{word}", offset // word


def _numbers() -> Iterator[tuple[str, int]]:
    for name in dir(lib):
        if isinstance(value := getattr(lib, name), int):
            yield name.removeprefix("PROXYCCL_"), value
    for name, struct in (("PROXY", "ProxyChannel"), ("SM", "SmChannel"), ("CONTROL", "Control"), ("WAIT", "Wait")):
        found = ffi.typeof(f"Proxyccl{struct}")
        yield f"{name}_WORDS", ffi.sizeof(found) // 8
        yield from _offsets(name, found)


globals().update((name, tl.constexpr(value)) for name, value in _numbers())

OP_MASK = tl.constexpr((1 << lib.PROXYCCL_OP_BITS) - 1)
# The memory ids after the last real one stand for values of 1, 2, 4 and 8 bytes.
VALUE_1_BYTE = tl.constexpr(lib.PROXYCCL_MAX_MEMORIES)

# A grid barrier (grid_barrier.py), which only Triton's kernels use.
BARRIER_ARRIVED_8 = tl.constexpr(0)
BARRIER_GENERATION_8 = tl.constexpr(1)
BARRIER_CONTROL_8 = tl.constexpr(2)
BARRIER_BYTES = 24
