"""Provides helpers for functions that kernels call: decorators, conversions, and loads from channels' handles.

Triton compiles functions with the decorator `jit`. If ``TRITON_INTERPRET`` is set when a function is decorated, the
function stays plain Python, for Triton's interpreter.

Offsets and sizes must be scalar integers. Floats raise an error, because in a kernel `n / 2` is a float32, which can't
represent every offset above 16 MiB.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from proxyccl.device.errors import RuntimeUnavailableError
from proxyccl.triton import layout as c

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
_OLDEST = (3, 4)
if VERSION < _OLDEST:
    raise RuntimeUnavailableError(f"proxyccl.triton needs Triton 3.4 or later, not {triton.__version__}")

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


def _plain(function: Any) -> Any:
    return function


# When a kernel calls a @triton.jit function, the interpreter replaces the functions of Triton's language, which takes 5
# ms. Plain functions avoid this cost, because the kernel's launch has already replaced the language's functions.
jit: Callable[[Any], Any] = _plain if INTERPRETED else triton.jit
out_of_line: Callable[[Any], Any] = _plain if INTERPRETED else triton.jit(noinline=True)
"""Decorates functions that rarely run but have many callers. To save compilation time, such functions are not inlined.
"""

if INTERPRETED:
    import numpy as np

    from triton.runtime.interpreter import TensorHandle

    def _number(x: Any, kind: Any, bits: int) -> Any:
        # Converts by one operation instead of Triton's three, because a push makes dozens of conversions.
        if isinstance(x, tl.tensor):
            tl.static_assert(x.dtype.is_int() and not x.type.is_block(), "expected an integer")
            return x.to(kind)
        number = operator.index(getattr(x, "value", x))
        tl.static_assert(-(1 << (bits - 1)) <= number < 1 << bits, f"expected an integer of {bits} bits")
        value = np.array([number & ((1 << bits) - 1)], np.dtype(f"u{bits // 8}"))
        return tl.tensor(TensorHandle(value, kind), kind)

    def u32(x: Any) -> Any:
        """Converts an integer to 32 bits."""
        return _number(x, tl.uint32, 32)

    def u64(x: Any) -> Any:
        """Converts an integer to 64 bits. A negative integer becomes a number above 2**63."""
        return _number(x, tl.uint64, 64)

else:

    @jit
    def _integer(x):
        number = tl.full([], 0, tl.int64) + x
        tl.static_assert(number.dtype.is_int() and not number.type.is_block(), "expected an integer")
        return number

    @jit
    def u32(x):
        """Converts an integer to 32 bits."""
        return _integer(x).to(tl.uint32)

    @jit
    def u64(x):
        """Converts an integer to 64 bits. A negative integer becomes a number above 2**63."""
        return _integer(x).to(tl.uint64)


@jit
def words_at(address):
    """Returns a pointer to words of 32 bits at an address."""
    return address.to(tl.pointer_type(tl.uint32))


@jit
def longs_at(address):
    """Returns a pointer to words of 64 bits at an address."""
    return address.to(tl.pointer_type(tl.uint64))


@jit
def long_at(channel, field: tl.constexpr):
    """Loads a 64-bit field of a channel's handle."""
    return tl.load(longs_at(channel) + field)


@jit
def pointer_at(channel, field: tl.constexpr):
    """Loads an address from a field of a channel's handle. Returns a pointer to words of 64 bits at this address."""
    return longs_at(tl.load(longs_at(channel) + field))


@jit
def number_at(channel, field: tl.constexpr):
    """Loads a 32-bit field of a channel's handle."""
    return tl.load(words_at(channel) + field)


@jit
def channel(channels, i):
    """Returns channel number `i` of a set of ProxyChannels or SmChannels, which is in the order of the peers."""
    if channels.dtype == tl.pointer_type(tl.uint64):
        return channels + i * c.PROXY_WORDS
    else:  # noqa: RET505  (Triton compiles only one branch)
        tl.static_assert(channels.dtype == tl.pointer_type(tl.int64), "expected a set of channels")
        return channels + i * c.SM_WORDS
