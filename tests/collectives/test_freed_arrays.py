"""If a registered array is freed, the library must not mistake a new array at the same address for the freed array.

The tests' arrays are not in a memory pool that delays the freeing of memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from proxyccl import ArgumentError, Array, Communicator
from proxyccl.device.memory.allocation_guard import AllocationGuard
from proxyccl.device.runtimes import open_runtime
from support.cases.memory import gather_and_check, registered, room_for
from support.cases.reference import Call
from support.device_arrays import barrier
from support.devices import RUNTIME, world_sizes
from support.fakes.foreign_memory import ForeignMemory
from support.ranks import Ranks
from support.running import wait_for

pytestmark = pytest.mark.hip

LONG = open_runtime().launch_defaults.meeting_bytes


@pytest.fixture(scope="module", params=world_sizes(2, 3), ids=lambda n: f"{n}-ranks")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, make_runtime=lambda rank: open_runtime(RUNTIME, rank)) as group:
        yield group


def used(comm: Communicator, call: Call, source: Array) -> tuple[Any, ForeignMemory]:
    """Registers an array and uses it in calls. Returns the registration and the array's memory."""
    memory = ForeignMemory(comm.runtime, room_for(call, comm.world_size) - 256)
    array = memory.array(call.dtype)
    registration = comm.register(array)
    assert registered(comm, array.view())
    for seed in (1, 2, 3):  # the library prepares a launch in the second call and uses it in the third
        gather_and_check(comm, replace(call, seed=seed), source, array)
    return registration, memory


def replaced(comm: Communicator, memory: ForeignMemory, *, here: bool = True) -> ForeignMemory:
    """Frees the memory and returns new memory at the same address, on one rank after another. A rank with `here=False`
    keeps and returns the given memory.
    """
    found = memory
    for turn in range(comm.world_size):
        barrier(comm)  # one rank at a time, because another rank (a thread) might allocate the freed memory
        comm.all_gather_bytes(b"")
        if here and turn == comm.rank:
            memory.close()
            found = memory.replaced()
    comm.all_gather_bytes(b"")
    return found


@pytest.mark.parametrize("rank", ["the first rank's", "every rank's"])
def test_an_array_at_a_freed_arrays_address_is_not_taken_for_it(ranks: Ranks, rank: str) -> None:
    """Peers must not write to the freed memory, which they still map."""
    call = Call("all_gather", count=LONG // 4, in_place=False)

    def body(comm: Communicator) -> None:
        source, here = comm.empty(call.count, call.dtype), rank == "every rank's" or comm.rank == 0
        registration, memory = used(comm, call, source)
        target = replaced(comm, memory, here=here).array(call.dtype)
        for seed in (4, 5):
            gather_and_check(comm, replace(call, seed=seed), source, target)
        assert registered(comm, target.view()) != here
        comm.deregister(registration)
        barrier(comm)
        target.free()

    ranks.run(body)


def test_it_may_be_registered_itself(ranks: Ranks) -> None:
    call = Call("all_gather", count=LONG // 4, in_place=False)

    def body(comm: Communicator) -> None:
        source = comm.empty(call.count, call.dtype)
        old, memory = used(comm, call, source)
        target = replaced(comm, memory).array(call.dtype)
        new = comm.register(target)
        wait_for(lambda: registered(comm, target.view()), "the peers have replied")
        gather_and_check(comm, replace(call, seed=4), source, target)
        comm.deregister(old)
        assert registered(comm, target.view()), "the end of the old registration does not end the new one"
        gather_and_check(comm, replace(call, seed=5), source, target)
        comm.deregister(new)
        assert not registered(comm, target.view())
        gather_and_check(comm, replace(call, seed=6), source, target)
        barrier(comm)
        target.free()

    ranks.run(body)


def test_other_memory_is_not_taken_for_an_array_that_may_have_been_freed(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread without a CUDA context, the driver may be unable to say whether memory was freed. Calls of such a
    thread copy the array through scratch memory, as if the array were not registered.
    """
    unknown = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 0)
    address = ctypes.cast(unknown, ctypes.c_void_p).value
    monkeypatch.setattr(AllocationGuard, "addresses", property(lambda _: (address, 0)))
    call = Call("all_gather", count=1000, in_place=False)

    def body(comm: Communicator) -> None:
        sources = [ForeignMemory(comm.runtime, 4 * call.count) for _ in range(2)]
        targets = [ForeignMemory(comm.runtime, 4 * call.count * comm.world_size) for _ in range(2)]
        registrations = [comm.register(memory.array(call.dtype)) for memory in (sources[0], targets[0])]
        for seed, number in enumerate((0, 0, 0, 1, 1, 0)):
            arrays = sources[number].array(call.dtype), targets[number].array(call.dtype)
            gather_and_check(comm, replace(call, seed=seed), *arrays, algorithm="proxy")
        for registration in registrations:
            comm.deregister(registration)
        barrier(comm)
        for memory in (*sources, *targets):
            memory.close()

    ranks.run(body)


def test_channels_refuse_what_was_freed(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        memory = ForeignMemory(comm.runtime, 4096)
        registration = comm.register(memory.array())
        comm.register(registration)
        barrier(comm)
        memory.close()
        with pytest.raises(ArgumentError, match=r"memory: the array at 0x\w+ was freed; expected it to be deregist"):
            comm.proxy_channels(registration)
        comm.deregister(registration)

    ranks.run(body)


def test_empty_memory_stays_while_it_is_registered(ranks: Ranks) -> None:
    """If a registered array is freed, its memory stays allocated until the array is deregistered."""

    def body(comm: Communicator) -> None:
        array = comm.empty(1000)
        part, registration = array.view(), comm.register(array)
        array.free()
        allocations = comm.runtime.allocations(part.ptr, part.nbytes)
        barrier(comm)
        assert registered(comm, part)
        assert comm.runtime.allocations(part.ptr, part.nbytes) == allocations
        comm.deregister(registration)
        assert not registered(comm, part)

    ranks.run(body)
