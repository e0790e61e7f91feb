"""Registered memory: exchange, ids, memory that can't be shared, and invalid handles."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxyccl import (
    AbortedError,
    ArgumentError,
    Array,
    ClosedError,
    Communicator,
    ResourceError,
    Runtime,
    RuntimeUnavailableError,
)
from proxyccl.channels.memory import allocate, register
from proxyccl.device.errors import AlreadyMappedError
from proxyccl.device.memory.handle_cache import HandleCache
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.device.runtime import Memory
from support.device_arrays import barrier, on_device, on_host
from support.devices import ON_HOST, rank_runtime
from support.ranks import Gate, Ranks, collect_garbage
from support.running import TIMEOUT, run_ranks

pytestmark = [pytest.mark.daemon, pytest.mark.hip]


def contents(runtime: Runtime, ptr: int, nbytes: int) -> np.ndarray:
    """Returns a copy of the bytes at an address that the runtime's device can access."""
    found = np.empty(nbytes, np.uint8)
    runtime.copy(found.ctypes.data, ptr, nbytes)
    return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as group:
        yield group


def test_ranks_may_register_different_sizes(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        memory = comm.register(comm.empty(100 * (comm.rank + 1), "uint8"))
        assert memory.nbytes == 100 * (comm.rank + 1)
        assert memory.peer_nbytes(1 - comm.rank) == 100 * (2 - comm.rank)
        assert "bytes" in repr(memory)
        assert comm.register(memory) is memory

    ranks.run(body)


def test_a_view_into_an_array_is_registered_where_it_lies(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        array = comm.empty(1000, "int32").fill(comm.rank)
        part = replace(array.view(), ptr=array.ptr + 400, shape=(100,))
        memory = comm.register(part)
        assert memory.ptr == array.ptr + 400
        peer = contents(comm.runtime, memory.peer_ptr(1 - comm.rank), 400)
        assert (peer.view(np.int32) == 1 - comm.rank).all()
        barrier(comm)

    ranks.run(body)


@pytest.mark.host_only(reason="of the machine's memory; a GPU's is in tests/gpu")
def test_an_array_larger_than_the_machine_is_refused_and_the_communicator_goes_on(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ResourceError, match=r"can't allocate \d+ bytes .*: .* \d+ bytes of memory and swap space"):
            comm.empty(1 << 46, "uint8")
        barrier(comm)

    ranks.run(body)


@pytest.mark.own_proxy(reason="the daemon refuses it even as a source")
@pytest.mark.host_only(reason="a GPU's memory is shared whoever allocated it")
def test_private_memory_is_refused_by_name_where_a_peer_wants_it(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        memory = comm.register(np.ones(16))
        assert memory.peer_ptr(comm.rank) == memory.ptr
        assert memory.peer_id(comm.rank) == memory.id
        with pytest.raises(
            ArgumentError, match=r"private to its process; allocate memory for peers with Communicator.empty"
        ):
            memory.peer_ptr(1 - comm.rank)
        with pytest.raises(ArgumentError, match="memory"):
            memory.peer_id(1 - comm.rank)

    ranks.run(body)


@pytest.mark.parametrize(
    ("transport", "refusal", "message"),
    [
        (
            "verbs",
            "no way",
            "memory: rank 1's memory can't be reached by RDMA: no way; "
            'transport="staged" takes data through pinned memory of the host',
        ),
        ("staged", "no room", "memory: rank 1's memory can't be staged: no room"),
    ],
)
def test_memory_out_of_a_transports_reach_is_refused_by_name(
    ranks: Ranks, transport: str, refusal: str, message: str
) -> None:
    def refuse(*arguments: Any) -> None:
        raise RuntimeUnavailableError(refusal)

    def body(comm: Communicator) -> None:
        array, links = comm.empty(8, "uint8"), comm.group.links
        with pytest.MonkeyPatch.context() as patch:
            if comm.rank == 1:
                remote = SimpleNamespace(transports=[transport], context=SimpleNamespace(expose=refuse))
                patch.setattr(links, "remote", remote)
            memory = comm.register(array)
            patch.setattr(links, "transport", lambda peer: transport)
            if comm.rank == 0:
                with pytest.raises(ArgumentError) as caught:
                    memory.peer_id(1)
                assert str(caught.value) == message

    ranks.run(body)


def test_empty_memory_has_nothing_to_share(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        memory = comm.register(comm.empty(0))
        assert memory.nbytes == 0
        with pytest.raises(ArgumentError, match="it is empty"):
            memory.peer_ptr(1 - comm.rank)

    ranks.run(body)


def test_closed_memory_is_refused(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        memory = comm.register(comm.empty(16))
        first = memory.id
        memory.peer_id(1 - comm.rank)
        barrier(comm)
        memory.close()
        memory.close()
        for use in (lambda: memory.id, lambda: memory.device_pointer, lambda: memory.peer_ptr(1 - comm.rank)):
            with pytest.raises(ClosedError):
                use()
        again = comm.register(comm.empty(16))
        assert again.id == first

    ranks.run(body)


@pytest.mark.hip_full
def test_forgotten_registered_memory_lives_until_close(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        forgotten, closed = comm.empty(16), comm.empty(16)
        memories = [weakref.ref(forgotten), weakref.ref(closed)]
        comm.proxy_channels(forgotten)
        comm.register(closed).close()
        del forgotten, closed
        collect_garbage()
        assert memories[0]() is not None
        assert memories[1]() is None

    ranks.run(body)


def test_a_closed_communicator_frees_what_was_registered_with_it() -> None:
    def body(comm: Communicator) -> weakref.ref[Array]:
        array = comm.empty(16)
        comm.register(array)
        return weakref.ref(array)

    with Ranks(2) as ranks:
        memories = ranks.run(body)
    collect_garbage()
    assert [memory() for memory in memories] == [None, None]


def test_a_closed_communicator_frees_scratch_memory() -> None:
    def body(comm: Communicator) -> Communicator:
        for algorithm in (None, "proxy"):
            on_host(comm.all_reduce(on_device(comm, np.ones(100_000, np.float32)), algorithm=algorithm))
        assert min(comm.memory_usage()[purpose] for purpose in ("scratch", "staging")) > 0
        return comm

    for comm in run_ranks(2, body):
        assert {comm.memory_usage()[purpose] for purpose in ("scratch", "staging")} == {0}


def test_memory_that_a_failed_rank_freed_is_not_to_blame() -> None:
    freed = threading.Event()

    def body(comm: Communicator) -> None:
        array = allocate(comm.group, 1000, "uint8")
        memory = register(comm.group, array)  # unlike comm.register, does not map peers' memory yet
        if comm.rank == 1:
            comm.abort("on purpose")
            memory.close()
            array.free()
            comm.close()
            freed.set()
        else:
            assert freed.wait(TIMEOUT)
            with pytest.raises(AbortedError, match="rank 1 ended the communicator"):
                memory.peer_ptr(1)

    run_ranks(2, body)


def test_a_memory_longer_than_4_gib_takes_consecutive_ids(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        before = comm.register(comm.empty(16))
        large = comm.register(comm.empty((8 << 30) + 1, "uint8"))
        after = comm.register(comm.empty(16))
        first = before.id  # an id is assigned when it is first read
        assert (large.id, after.id) == (first + 1, first + 4)
        large.close()
        small = [comm.register(comm.empty(16)) for _ in range(4)]
        assert [memory.id for memory in small] == [first + 1, first + 2, first + 3, first + 5]
        for memory in (before, after, *small):
            memory.close()

    ranks.run(body)


@pytest.mark.own_proxy(reason="registers addresses without memory")
def test_ids_that_are_free_but_not_consecutive_do_not_do(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        service, base = comm.proxy, comm.empty(16).ptr
        ids = [service.add_memory(base, 16) for _ in range(508)]
        for first in ids[::2]:
            service.remove_memory(first, 16)
        with pytest.raises(ResourceError, match="2 consecutive"):
            service.add_memory(base, 5 << 30)
        for first in ids[1::2]:
            service.remove_memory(first, 16)
        assert service.add_memory(base, 5 << 30) == ids[0]
        service.remove_memory(ids[0], 5 << 30)

    with Ranks(1) as one:
        one.run(body)
    assert ranks.world_size == 2


# -- handles ---


@dataclass(frozen=True)
class Exported:
    """A runtime, memory that it allocated, and the handle that exports a part of this memory."""

    runtime: Runtime
    memory: Memory
    handle: bytes


@pytest.fixture(scope="module")
def exported() -> Exported:
    runtime = rank_runtime(0)
    runtime.activate()
    memory = runtime.allocate(8192)
    return Exported(runtime, memory, runtime.export(memory.ptr + 100, 200))


def test_an_exported_range_is_opened_where_it_lies(exported: Exported) -> None:
    opened = exported.runtime.open(exported.handle)
    assert opened.nbytes == 200
    exported.runtime.fill(exported.memory.ptr + 100, 7, 200)
    assert (contents(exported.runtime, opened.ptr, 200) == 7).all()
    opened.close()
    opened.close()
    assert opened.closed
    assert not exported.memory.closed


@given(st.binary(max_size=128))
def test_foreign_bytes_are_no_handle(exported: Exported, data: bytes) -> None:
    with pytest.raises(ArgumentError, match="handle"):
        exported.runtime.open(data)


@given(st.data())
def test_a_truncated_handle_is_refused(exported: Exported, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(exported.handle) - 1))
    with pytest.raises(ArgumentError, match="handle"):
        exported.runtime.open(exported.handle[:length])


@settings(deadline=None)
@given(st.data())
def test_a_damaged_handle_is_refused_or_names_the_same_memory(exported: Exported, data: st.DataObject) -> None:
    position, change = data.draw(st.integers(0, len(exported.handle) - 1)), data.draw(st.integers(1, 255))
    damaged = bytearray(exported.handle)
    damaged[position] ^= change
    with contextlib.suppress(ArgumentError):
        opened = exported.runtime.open(bytes(damaged))
        assert 0 <= opened.nbytes <= 8192
        opened.close()


def test_a_handle_of_memory_that_is_gone_is_refused(exported: Exported) -> None:
    memory = exported.runtime.allocate(4096)
    handle = exported.runtime.export(memory.ptr, 4096)
    memory.close()
    with pytest.raises(ArgumentError, match="handle"):
        exported.runtime.open(handle)


@pytest.mark.host_only(reason="its handles name descriptors")
def test_a_reused_descriptor_is_refused(exported: Exported) -> None:
    memory = exported.runtime.allocate(4096)
    handle, descriptor = exported.runtime.export(memory.ptr, 4096), memory.descriptor
    memory.close()
    other = os.open("/dev/null", os.O_RDWR)
    os.dup2(other, descriptor)
    try:
        with pytest.raises(ArgumentError, match="closed the memory"):
            exported.runtime.open(handle)
    finally:
        os.close(descriptor)
        if other != descriptor:
            os.close(other)


def test_memory_that_was_not_allocated_here_is_not_exported(exported: Exported) -> None:
    array = np.ones(100)
    with pytest.raises(ArgumentError, match=r"private to its process|can't be shared"):
        exported.runtime.export(array.ctypes.data, array.nbytes)
    with pytest.raises(ArgumentError, match=r"private to its process|extend past their allocation"):
        exported.runtime.export(exported.memory.ptr + 8000, 400)


@pytest.mark.skipif(ON_HOST, reason="the host runtime pins nothing")
def test_a_forgotten_pin_makes_way_for_one_that_overlaps_it(exported: Exported) -> None:
    """If the caller drops a pin without closing it, a new pin may overlap the dropped pin."""
    array = np.zeros(1 << 16, np.uint8)
    exported.runtime.pin(array.ctypes.data, array.nbytes)
    overlapping = exported.runtime.pin(array.ctypes.data + 5000, 5000)
    assert overlapping is not None
    overlapping.close()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_allocation_has_a_positive_size(exported: Exported, nbytes: int) -> None:
    with pytest.raises(ArgumentError, match="nbytes"):
        exported.runtime.allocate(nbytes)


class Opened:
    def __init__(self) -> None:
        self.ptr, self.nbytes, self.closed = 0, 0, False

    def close(self) -> None:
        self.closed = True


def test_the_cache_maps_once_and_keeps_what_was_used_last() -> None:
    made: dict[bytes, Opened] = {}

    def open_handle(handle: bytes) -> Opened:
        assert handle not in made or made[handle].closed
        made[handle] = Opened()
        return made[handle]

    cache = HandleCache(open_handle, keep=2)
    assert cache.acquire(b"a") is cache.acquire(b"a")
    cache.release(b"a")
    assert not made[b"a"].closed
    for handle in (b"b", b"c"):
        cache.acquire(handle)
        cache.release(handle)
    cache.release(b"a")  # idle handles are now b, c, a, in this order
    assert [made[handle].closed for handle in (b"a", b"b", b"c")] == [False, True, False]
    assert cache.acquire(b"c") is made[b"c"]
    cache.close()
    assert all(memory.closed for memory in made.values())


def test_idle_mappings_make_way_for_new_memory() -> None:
    mapped: dict[bytes, Opened] = {}

    def open_handle(handle: bytes) -> Opened:
        if any(not memory.closed for memory in mapped.values()):
            raise ArgumentError("handle", "already mapped")
        mapped[handle] = Opened()
        return mapped[handle]

    one, other = HandleCache(open_handle), HandleCache(open_handle)
    one.acquire(b"old")
    with pytest.raises(ArgumentError):  # a handle in use can't be evicted
        other.acquire(b"new")
    one.release(b"old")
    assert other.acquire(b"new") is mapped[b"new"]
    assert mapped[b"old"].closed
    one.close()
    other.close()


def test_memory_whose_place_another_client_still_maps_is_waited_for() -> None:
    old = Opened()

    def open_handle(_: bytes) -> Opened:
        if not old.closed:
            raise AlreadyMappedError("handle", "already mapped")
        return Opened()

    cache = HandleCache(open_handle)
    with ThreadPoolExecutor(1) as pool:
        mapped = pool.submit(cache.acquire, b"new")
        assert not mapped.done()
        old.close()
        assert not mapped.result(TIMEOUT).closed
    cache.close()


def test_a_driver_that_takes_long_to_map_holds_up_no_other_cache() -> None:
    with Gate() as gate:

        def open_slowly(_: bytes) -> Opened:
            gate.wait()
            return Opened()

        slow, other = HandleCache(open_slowly), HandleCache(lambda _: Opened())
        mapping = threading.Thread(target=slow.acquire, args=(b"handle",))
        mapping.start()
        other.acquire(b"handle")  # `acquire` returns although `slow` is still mapping its handle
        assert mapping.is_alive()
        gate.open()
        mapping.join()
    slow.close()
    other.close()


@pytest.mark.host_only(reason="about the host's files")
def test_memory_that_its_owner_could_cut_short_is_refused(tmp_path: Path) -> None:
    """A process that read truncated shared memory would be killed, so the library refuses memory that can shrink."""
    memory = SharedMemory.allocate(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, 4096)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 8192)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    for descriptor in (unsealed, file):
        with pytest.raises(ArgumentError, match="not ProxyCCL's shared memory"):
            SharedMemory.adopt(descriptor, 4096)
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(descriptor)  # fstat fails because `adopt` has closed the descriptor
    with pytest.raises(ArgumentError, match="8192"):
        SharedMemory.adopt(os.dup(memory.descriptor), 8193)


@pytest.mark.host_only(reason="about the host's memory")
def test_a_part_of_a_part_is_exported_by_its_own_place() -> None:
    memory = SharedMemory.allocate(4096)
    part = SharedMemory.open(memory.export(memory.ptr + 1024, 2048))
    inner = SharedMemory.open(part.export(part.ptr + 512, 8))
    assert (inner.ptr, inner.nbytes) == (memory.ptr + 1536, 8)
