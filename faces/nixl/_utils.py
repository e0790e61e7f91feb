"""NIXL's helpers for tests, which allocate plain memory by address."""

from __future__ import annotations

import ctypes

_libc = ctypes.CDLL(None)
_libc.aligned_alloc.restype = ctypes.c_void_p
_libc.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
_libc.free.restype = None
_libc.free.argtypes = [ctypes.c_void_p]
_ALIGNMENT = 4096


def malloc_passthru(size: int) -> int:
    """Returns the address of new memory, in whole pages. The caller frees the memory."""
    address = _libc.aligned_alloc(_ALIGNMENT, -(-size // _ALIGNMENT) * _ALIGNMENT)
    if address is None:
        raise MemoryError(f"can't allocate {size} bytes")
    return int(address)


def free_passthru(buf: int) -> None:
    """Frees memory that `malloc_passthru` returned."""
    _libc.free(buf)


def ba_buf(addr: int, size: int) -> None:
    """Fills memory with 0xba."""
    ctypes.memset(addr, 0xBA, size)


def verify_transfer(addr1: int, addr2: int, size: int) -> None:
    """Raises AssertionError unless two ranges have the same contents."""
    if ctypes.string_at(addr1, size) != ctypes.string_at(addr2, size):
        raise AssertionError(f"the {size} bytes at {addr1:#x} and {addr2:#x} differ")
