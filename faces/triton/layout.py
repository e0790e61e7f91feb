"""Defines constants for kernels: the constants of the C headers, and the offsets of fields in structs that kernels
share with the host (handles.h, control.h, trigger.h). The C compiler reports the values.

The name of a C constant lacks the prefix ``PROXYCCL_``. The name of an offset, such as ``CONTROL_ERROR_STATE_4``,
consists of the struct (``PROXY``, ``SM``, ``CONTROL`` or ``WAIT``), the field's path in the struct, and the offset's
unit: ``_4`` for words of 32 bits, ``_8`` for words of 64 bits. Kernels add the offset to a pointer to such words.
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
# In a trigger, the four memory ids after the last real id mean that the trigger contains a value of 1, 2, 4 or 8 bytes.
VALUE_1_BYTE = tl.constexpr(lib.PROXYCCL_MAX_MEMORIES)

# The layout of a grid barrier (grid_barrier.py), which only Triton's kernels use.
BARRIER_ARRIVED_8 = tl.constexpr(0)
BARRIER_GENERATION_8 = tl.constexpr(1)
BARRIER_CONTROL_8 = tl.constexpr(2)
BARRIER_BYTES = 24
