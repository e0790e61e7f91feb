"""Numbers and pointers of 32 and 64 bits.

A number must be one integer: a kernel's `n / 2` is a float32, which holds no offset beyond 16 MiB exactly. A block of
integers is refused too.
"""

from __future__ import annotations

import operator
from typing import Any

import triton.language as tl
from proxyccl.triton.jit import INTERPRETED, jit

if INTERPRETED:
    import numpy as np

    from triton.runtime.interpreter import TensorHandle

    def _number(x: Any, kind: Any, bits: int) -> Any:
        # In one step of the language instead of three: a push has dozens of these.
        if isinstance(x, tl.tensor):
            tl.static_assert(x.dtype.is_int() and not x.type.is_block(), "expected an integer")
            return x.to(kind)
        number = operator.index(getattr(x, "value", x))
        tl.static_assert(-(1 << (bits - 1)) <= number < 1 << bits, f"expected an integer of {bits} bits")
        value = np.array([number & ((1 << bits) - 1)], np.dtype(f"u{bits // 8}"))
        return tl.tensor(TensorHandle(value, kind), kind)

    def u32(x: Any) -> Any:
        """A number of 32 bits."""
        return _number(x, tl.uint32, 32)

    def u64(x: Any) -> Any:
        """A number of 64 bits; a negative one becomes a huge one, larger than any memory."""
        return _number(x, tl.uint64, 64)

else:

    @jit
    def _integer(x):
        number = tl.full([], 0, tl.int64) + x
        tl.static_assert(number.dtype.is_int() and not number.type.is_block(), "expected an integer")
        return number

    @jit
    def u32(x):
        """A number of 32 bits."""
        return _integer(x).to(tl.uint32)

    @jit
    def u64(x):
        """A number of 64 bits; a negative one becomes a huge one, larger than any memory."""
        return _integer(x).to(tl.uint64)


@jit
def words_at(address):
    """A pointer to words of 32 bits."""
    return address.to(tl.pointer_type(tl.uint32))


@jit
def longs_at(address):
    """A pointer to words of 64 bits."""
    return address.to(tl.pointer_type(tl.uint64))
