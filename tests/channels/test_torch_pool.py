"""`Communicator.memory_pool`: its requirements on torch, and the lifetime of a device's pool.

These tests use a stand-in for torch. tests/gpu uses torch itself, and tests/collectives tests the use of the pool's
memory.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from proxyccl import Array, ClosedError, Communicator, RuntimeUnavailableError
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.memory.memory_pool import MemoryPool
from proxyccl.torch_tensors.pools import PoolUse, require_torch
from support.cases.memory import registered
from support.devices import RUNTIME, world_sizes
from support.fakes.torch import MemPool, install, make_torch
from support.running import run_ranks, wait_for


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = make_torch(RUNTIME)
    install(monkeypatch, module)
    yield module
    assert not PoolUse._pools


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (None, "memory_pool: torch can't be imported: "),
        (make_torch("cpu"), "memory_pool: torch 2.11.0 is built for the CPU alone; the communicator uses cuda"),
        (make_torch("hip"), "memory_pool: torch 2.11.0 is built for hip; the communicator uses cuda"),
        (make_torch("cuda", "2.4.1", MemPool=None), "memory_pool: this is torch 2.4.1; torch 2.8 or later is needed"),
        (make_torch("cuda", "2.7.1", MemPoolContext=object), "memory_pool: this is torch 2.7.1; torch 2.8 or later"),
    ],
    ids=["none", "for-the-cpu", "for-another-vendor", "without-pools", "with-pools-freed-otherwise"],
)
def test_a_torch_without_such_pools_is_named(monkeypatch: pytest.MonkeyPatch, module: Any, message: str) -> None:
    monkeypatch.setitem(sys.modules, "torch", module)
    with pytest.raises(RuntimeUnavailableError) as caught:
        require_torch("cuda")
    assert str(caught.value).startswith(message)


@pytest.mark.host_only("where torch has no pools")
def test_the_host_runtime_has_none(torch: Any) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(RuntimeUnavailableError, match="memory_pool: the communicator uses the host runtime"):
            comm.memory_pool()

    run_ranks(1, body)


class Tensor:
    """A tensor in a pool's memory."""

    def __init__(self, pool: MemPool, nbytes: int) -> None:
        self._pool, self.nbytes, self.closed = pool, nbytes, False
        self.ptr, self._size = pool.allocate(nbytes)

    def array(self, comm: Communicator) -> Array:
        return Array(comm.runtime, self, (self.nbytes // 4,), as_dtype("float32"))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._pool.free(self.ptr, self._size)


def left(comm: Communicator) -> int:
    """Returns the number of segments in the device's pool."""
    return len(MemoryPool(comm.runtime).segments())


@pytest.mark.gpu_only
@pytest.mark.hip
def test_tensors_of_the_pool_are_registered(torch: Any) -> None:
    def body(comm: Communicator) -> None:
        with comm.memory_pool() as pool:
            assert isinstance(pool, MemPool)
            assert pool.device == comm.runtime.device
            assert pool.use_count() == 2
            tensor = Tensor(pool, 4000)
        assert pool.use_count() == 1
        x = tensor.array(comm).fill(comm.rank + 1)
        comm.all_reduce(x)
        wait_for(lambda: comm.world_size == 1 or registered(comm, x.view()), "the peers have replied")
        comm.all_reduce(x)
        comm.synchronize()
        total = comm.world_size * (comm.world_size + 1) // 2
        assert (x.numpy() == comm.world_size * total).all()
        comm.barrier()
        comm.synchronize()
        x.free()
        with comm.memory_pool() as again:
            assert again is pool
            reused = Tensor(pool, 100)
        assert reused.ptr == tensor.ptr
        reused.close()

    run_ranks(max(world_sizes(1, 2)), body)


@pytest.mark.gpu_only
@pytest.mark.hip
def test_the_pool_goes_with_the_last_communicator_that_used_it(torch: Any) -> None:
    kept: list[Any] = []

    def body(comm: Communicator) -> None:
        with comm.memory_pool() as pool:
            kept.append(weakref.ref(pool))
            Tensor(pool, 100).close()
            tensor = Tensor(pool, 100)
        assert left(comm) == 1
        del pool

        def other(second: Communicator) -> None:
            with second.memory_pool() as same:
                assert same is kept[0]()
                kept.append(Tensor(same, 5 << 20))

        run_ranks(1, other)
        assert kept[0]() is not None, "a communicator still uses it"
        assert left(comm) == 2
        kept[1].close()
        kept.pop()
        tensor.close()
        kept.append(comm)

    run_ranks(1, body)
    gc.collect()
    assert kept[0]() is None
    assert left(kept[1]) == 0
    with pytest.raises(ClosedError):
        kept[1].memory_pool()


@pytest.mark.gpu_only
@pytest.mark.hip
def test_a_pool_that_a_graph_uses_outlives_its_communicators(torch: Any) -> None:
    """If a pool is destroyed while a graph uses it, torch ends the process."""
    kept: list[Any] = []

    def body(comm: Communicator) -> None:
        with comm.memory_pool() as pool:
            pool.graphs += 1
            kept.append(weakref.ref(pool))

    run_ranks(1, body)
    gc.collect()
    assert kept[0]() is not None
    PoolUse._outlived.clear()
    gc.collect()
    assert kept[0]() is None
