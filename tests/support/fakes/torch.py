"""Fakes of the parts of torch that `Communicator.memory_pool` uses: pools that keep freed memory, and that call an
allocator's functions as torch does.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest


class PluggableAllocator:
    """Stands in for torch.cuda.memory.CUDAPluggableAllocator."""

    def __init__(self, path: str, allocate: str, free: str) -> None:
        functions = ctypes.CDLL(path)
        self.allocate, self.free = getattr(functions, allocate), getattr(functions, free)
        self.allocate.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.allocate.restype = ctypes.c_void_p
        self.free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.free.restype = None

    def allocator(self) -> PluggableAllocator:
        """Returns the allocator, to pass to `MemPool`."""
        return self


class MemPool:
    """Stands in for torch.cuda.MemPool, on the current device.

    Attributes:
        graphs: number of graphs that use the pool.
    """

    SEGMENT = 2 << 20

    def __init__(self, allocator: PluggableAllocator) -> None:
        self._allocator, self.device, self.graphs = allocator, _current[-1], 0
        self._unused: dict[int, list[int]] = {}

    def use_count(self) -> int:
        """Returns 1 for the pool itself, plus 1 for each block and each graph that uses it."""
        return 1 + [pool for pool, _ in _in_use].count(self) + self.graphs

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """Returns the address and the size of a segment for one tensor."""
        size = -(-nbytes // self.SEGMENT) * self.SEGMENT
        unused = self._unused.get(size)
        if unused:
            return unused.pop(), size
        ptr = self._allocator.allocate(size, self.device, None)
        assert ptr, "out of memory"
        return ptr, size

    def free(self, ptr: int, size: int) -> None:
        """Keeps a segment for the next tensor of the same size."""
        self._unused.setdefault(size, []).append(ptr)

    def __del__(self) -> None:
        for size, unused in self._unused.items():
            for ptr in unused:
                self._allocator.free(ptr, size, self.device, None)


_current = [0]
_in_use: list[tuple[MemPool, int]] = []


@contextlib.contextmanager
def _device(number: int) -> Iterator[None]:
    _current.append(number)
    try:
        yield
    finally:
        _current.pop()


@contextlib.contextmanager
def _use_mem_pool(pool: MemPool, device: int) -> Iterator[None]:
    assert device == pool.device
    _in_use.append((pool, device))
    try:
        yield
    finally:
        _in_use.remove((pool, device))


def make_torch(built_for: str, version: str = "2.11.0", **more: Any) -> Any:
    """Returns a module for ``sys.modules["torch"]``.

    Args:
        built_for: "cuda", "hip" or "cpu".
        version: torch's version.
        more: other attributes of torch.cuda; an attribute that is None is omitted.
    """
    torch: Any = types.ModuleType("torch")
    torch.__version__ = version
    torch.version = types.SimpleNamespace(
        cuda="13.0" if built_for == "cuda" else None, hip="7.0" if built_for == "hip" else None
    )
    attributes = {
        "MemPool": MemPool,
        "use_mem_pool": _use_mem_pool,
        "device": _device,
        "memory": types.SimpleNamespace(CUDAPluggableAllocator=PluggableAllocator),
        **more,
    }
    torch.cuda = types.SimpleNamespace(**{name: value for name, value in attributes.items() if value is not None})
    return torch


def install(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    """Makes `import torch` return this module. Because the module has no compiler, replaces `untraced`, which hides
    public classes from torch's compiler, by the identity.
    """
    untraced: Any = types.ModuleType("proxyccl.torch_tensors.untraced")
    untraced.untraced = lambda cls: cls
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, untraced.__name__, untraced)
