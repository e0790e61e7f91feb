"""Converts a kernel's arguments for Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from proxyccl.channels.handles import Channel, ChannelSet
from proxyccl.channels.proxy_channel import ProxyChannel
from proxyccl.channels.sm_channel import SmChannel
from proxyccl.device.arguments.integers import find_integer
from proxyccl.device.arrays.array import as_view
from proxyccl.device.errors import ArgumentError
from proxyccl.device.kernel import FLOAT, INTEGER, POINTER
from proxyccl.triton.grid_barrier import GridBarrier

PROXY_CHANNEL, SM_CHANNEL, GRID_BARRIER = "*u64", "*i64", "*u32"
"""The pointer types of handles in kernels. Each kind of handle has its own type, so that a kernel that gets a handle of
another kind fails to compile.
"""

_ELEMENTS = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float64": "fp64",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "bool": "i1",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
}
_DIVISIBILITY = 16
CONSTEXPR = "constexpr"


@dataclass(frozen=True)
class Argument:
    """An argument of a kernel."""

    type: str  # Triton's name of the type: "*fp32", "i32", "constexpr", …
    value: Any  # an address, a number, or a compile-time constant of any kind
    # The object whose memory the address points to; the launch keeps it alive. None if there is no such object.
    owner: object = None
    aligned: bool = False  # whether the compiler may assume that the address or integer is a multiple of 16

    @property
    def parameter(self) -> tuple[int, int]:
        """The size in bytes and the kind of the compiled kernel's parameter for this argument."""
        if self.type.startswith("*"):
            return 8, POINTER
        if self.type.startswith("fp"):
            return int(self.type[2:]) // 8, FLOAT
        return max(1, int(self.type[1:]) // 8), INTEGER

    @property
    def launched(self) -> Any:
        """The value to pass to a launch. A channel is passed as its object, because the launch wakes its proxy."""
        return self.owner if isinstance(self.owner, Channel | ChannelSet) else self.value

    @property
    def constant_key(self) -> tuple[str, str] | None:
        """A hashable key of a compile-time constant; None for other arguments. The key contains the constant's text,
        which differs between 1, 1.0 and True, and if the constant is a function, the hash of the source.
        """
        if self.type != CONSTEXPR:
            return None
        return repr(self.value), getattr(self.value, "cache_key", "")


def as_argument(value: Any, name: str, runtime: str, device: int) -> Argument:
    """Makes a value's `Argument`. Raises ArgumentError for types that kernels can't take, and for another device."""
    if value is None:
        return Argument(CONSTEXPR, None)
    if isinstance(value, np.generic):  # checked first, because numpy scalars also offer the buffer protocol
        value = value.item()
    if isinstance(value, bool):
        return Argument("i1", value)
    if isinstance(value, float):
        return Argument("fp32", value)
    if isinstance(value, Channel | ChannelSet):
        return _channel(value, name)
    if isinstance(value, GridBarrier):
        return _pointer(GRID_BARRIER, value.device_pointer, value)
    number = None if hasattr(value, "__dlpack__") else find_integer(value)
    if number is not None:
        return _integer(number, name)
    view = as_view(value, name, gpu=runtime)
    if view.device[0] != runtime or view.device[1] not in (-1, device):
        raise ArgumentError(name, f"the array lies on {view.place}, the kernel runs on {runtime}:{device}")
    if view.dtype.name not in _ELEMENTS:
        raise ArgumentError(name, f"Triton has no type {view.dtype}; expected one of {', '.join(_ELEMENTS)}")
    return _pointer(f"*{_ELEMENTS[view.dtype.name]}", view.ptr, value)


def annotated(argument: Argument, kind: str, name: str) -> Argument:
    """If the argument is a number, returns the argument with the type `kind`, as Triton does; otherwise returns the
    argument unchanged. `kind` is the type in the parameter's annotation, or "" without such a type. Raises
    ArgumentError if the value does not fit, or a launch can't pass numbers of this type.
    """
    if not kind or argument.type == CONSTEXPR or argument.type.startswith("*"):
        return argument
    value = argument.value
    if kind == "u1":
        return Argument("i1", bool(value))
    if kind in ("fp32", "fp64"):
        return Argument(kind, float(value))
    if kind[0] not in "iu" or isinstance(value, float):
        raise ArgumentError(name, f"{value!r} can't be passed as {kind}, the type in the parameter's annotation")
    signed, bits = kind[0] == "i", int(kind[1:])
    lowest = -(1 << (bits - 1)) if signed else 0
    if not lowest <= value < lowest + (1 << bits):
        raise ArgumentError(name, f"{value} does not fit in the annotation's {kind}")
    return Argument(kind, int(value), None, argument.aligned)


def _pointer(kind: str, address: int, owner: object) -> Argument:
    return Argument(kind, address, owner, address % _DIVISIBILITY == 0)


def _channel(value: Channel | ChannelSet[Any], name: str) -> Argument:
    kind = value.kind if isinstance(value, ChannelSet) else type(value)
    types = {ProxyChannel: PROXY_CHANNEL, SmChannel: SM_CHANNEL}
    if kind not in types:
        raise ArgumentError(name, f"expected a ProxyChannel, an SmChannel or a set of them, not a {kind.__name__}")
    return _pointer(types[kind], value.device_pointer, value)


def _integer(value: int, name: str) -> Argument:
    for kind, bits in (("i32", 31), ("i64", 63)):
        if -(1 << bits) <= value < 1 << bits:
            return Argument(kind, value, None, value % _DIVISIBILITY == 0)
    if 0 <= value < 1 << 64:
        return Argument("u64", value, None, value % _DIVISIBILITY == 0)
    raise ArgumentError(name, f"{value} does not fit in 64 bits")
