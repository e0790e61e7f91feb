"""Lent memory: the library gives peers access to memory that calls use often, although the memory's owner may free it
at any time.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from proxyccl import ArgumentError, Array, Communicator
from proxyccl.channels import lent_memory
from proxyccl.channels.calls._calls import LEAST_LENT_BYTES, RECEIVED_BY_PROXIES
from proxyccl.channels.collectives.request import CtaPolicy
from support.cases.memory import gather_and_check, recorded_mappings, registered, room_for
from support.cases.reference import Call
from support.device_arrays import barrier
from support.fakes.foreign_memory import ForeignMemory
from support.ranks import Ranks
from support.running import run_ranks, wait_for

# The input has 1 MiB; the library lends no shorter array.
CALL = Call("all_gather", count=1 << 18, in_place=False)
ROOM = 64 << 20
OFTEN = lent_memory._OFTEN


@pytest.fixture(autouse=True)
def _enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts calls in a window of a minute, because a busy machine may need more than a second for the calls."""
    monkeypatch.setattr(lent_memory, "_WINDOW_SECONDS", 60.0)


@pytest.fixture(params=(2, 3), ids=lambda n: f"{n}-ranks")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Opens new ranks for each test, because ranks remember the addresses of freed memory."""
    with Ranks(request.param) as group:
        yield group


def memory_for(comm: Communicator, limit: int | None = ROOM, call: Call = CALL) -> ForeignMemory:
    comm.group.lent_memory.limit = limit
    return ForeignMemory(comm.runtime, room_for(call, comm.world_size) - 256)


def meet(
    comm: Communicator, source: Array, target: Array, times: int = 1, collective: str = "all_gather", **options: Any
) -> None:
    """Calls the collective `times` times through the path of torch's tensors. After OFTEN such calls on the same
    memory, the library announces the memory to the peers unasked ("lends" it).
    """
    calls = comm.tensor_calls
    for _ in range(times):
        calls.make(calls.options(collective, **options), source, target)
    comm.synchronize()


def lend(comm: Communicator, source: Array, target: Array) -> None:
    """Makes calls with the array `target` until all ranks' peers have mapped it."""

    def lent() -> bool:
        meet(comm, source, target, OFTEN)
        comm.group.symmetric.update()
        return all(map(any, comm.all_gather_bytes(bytes([registered(comm, target.view())]))))

    wait_for(lent, "it is lent")


def withdrawn(comm: Communicator, *memories: ForeignMemory) -> None:
    """Frees memory, and waits until peers have unmapped it."""
    barrier(comm)
    comm.all_gather_bytes(b"")
    for memory in memories:
        memory.close()
    symmetric = comm.group.symmetric
    wait_for(lambda: not symmetric.lent_sizes and not symmetric.withdrawn, "it is withdrawn")


def exports(comm: Communicator, patch: pytest.MonkeyPatch, *memories: ForeignMemory) -> list[int]:
    """Returns a list to which each later export of one of the memories adds the id of its thread."""
    made: list[int] = []
    export = comm.runtime.export

    def noted(ptr: int, nbytes: int) -> bytes:
        if any(memory.ptr == ptr for memory in memories):
            made.append(threading.get_ident())
        return export(ptr, nbytes)

    patch.setattr(comm.runtime, "export", noted)
    return made


def gather(
    comm: Communicator, seed: int, source: Array, target: Array, algorithm: str | None = None, of: Call = CALL
) -> None:
    gather_and_check(comm, replace(of, seed=seed), source, target, algorithm)


def test_memory_is_lent_when_it_is_met_often(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call exports the memory once. The watcher thread announces the export to the peers."""

    def body(comm: Communicator) -> None:
        source, memory = comm.empty(CALL.count, CALL.dtype), memory_for(comm)
        target, announced = memory.array(CALL.dtype), []
        meet(comm, source, target)
        with monkeypatch.context() as patch:
            exported, announce = exports(comm, patch, memory), comm.group.symmetric.lend
            patch.setattr(
                comm.group.symmetric, "lend", lambda export: (announced.append(threading.get_ident()), announce(export))
            )
            lend(comm, source, target)
        assert exported == [threading.get_ident()]
        assert len(announced) == 1
        assert announced[0] != threading.get_ident()
        for seed in (2, 3, 4):
            gather(comm, seed, source, target)
        withdrawn(comm, memory)

    ranks.run(body)


def test_memory_that_is_met_once_is_never_exported(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: Communicator) -> None:
        source, memories = comm.empty(CALL.count, CALL.dtype), [memory_for(comm) for _ in range(8)]
        with monkeypatch.context() as patch:
            exported = exports(comm, patch, *memories)
            for _ in range(OFTEN - 1):
                for memory in memories:
                    meet(comm, source, memory.array(CALL.dtype))
                    comm.group.lent_memory.update()  # the watcher thread also calls update()
            assert not exported
        withdrawn(comm, *memories)

    ranks.run(body)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("algorithm", [None, "proxy"])
def test_what_its_owner_frees_is_withdrawn_without_a_call(
    size: int, algorithm: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers close their mappings of freed memory, because a mapping would keep the memory allocated."""
    mapped = recorded_mappings(monkeypatch)

    def body(comm: Communicator) -> None:
        source, memory = comm.empty(CALL.count, CALL.dtype), memory_for(comm)
        target = memory.array(CALL.dtype)
        lend(comm, source, target)
        for seed in (1, 2, 3):
            gather(comm, seed, source, target, algorithm)
        comm.all_gather_bytes(b"")
        used = [each for runtime, each in mapped if runtime is comm.runtime and not each.closed]
        withdrawn(comm, memory)
        wait_for(lambda: sum(each.closed for each in used) >= comm.world_size - 1, "its peers' memory is unmapped")

    run_ranks(size, body)


def test_other_memory_at_its_address_is_lent_anew_when_it_is_met_more_often(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New memory at a freed address is lent even if the library has not yet noticed that the old memory was freed."""

    def body(comm: Communicator) -> None:
        source, memory = comm.empty(CALL.count, CALL.dtype), memory_for(comm)
        lend(comm, source, memory.array(CALL.dtype))
        gather(comm, 1, source, memory.array(CALL.dtype))
        for turn in range(comm.world_size):
            # Only one rank at a time frees memory. Ranks are threads, so another rank might allocate the freed memory.
            comm.all_gather_bytes(b"")
            if turn == comm.rank:
                memory.close()
                memory = memory.replaced()
        comm.all_gather_bytes(b"")
        target = memory.array(CALL.dtype)
        assert not registered(comm, target.view())
        gather(comm, 2, source, target)
        comm.group.symmetric.update()
        comm.group.lent_memory.update()  # makes the library notice that the old memory was freed
        with monkeypatch.context() as patch:
            exported = exports(comm, patch, memory)
            meet(comm, source, target, 2 * OFTEN - 1)
            comm.group.lent_memory.update()
            assert not exported
        lend(comm, source, target)
        gather(comm, 3, source, target)
        gather(comm, 4, source, target, "proxy")
        withdrawn(comm, memory)

    ranks.run(body)


def test_calls_by_proxy_use_it_when_peers_have_added_it(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        source, memory = comm.empty(CALL.count, CALL.dtype), memory_for(comm)
        gather(comm, 1, source, comm.empty(CALL.count * comm.world_size, CALL.dtype), "proxy")  # makes the proxies
        target = memory.array(CALL.dtype)
        lend(comm, source, target)

        def received(ptr: int, nbytes: int) -> bool:
            return bool(comm.group.launches.calls.reach_of(ptr, nbytes) & RECEIVED_BY_PROXIES)

        wait_for(lambda: received(target.ptr, target.nbytes), "the peers' proxies have it")
        assert received(target.ptr + 4096, CALL.count), "the whole allocation is lent"
        staging = comm.memory_usage()["staging"]
        gather(comm, 2, source, target, "proxy")
        assert comm.memory_usage()["staging"] == staging
        withdrawn(comm, memory)
        assert not received(memory.ptr, memory.nbytes)

    ranks.run(body)


@pytest.mark.slow
@pytest.mark.parametrize(
    "modules",
    [
        pytest.param(["channels.symmetric", "channels.lent_memory", "channels.calls.launches"], id="channels"),
        pytest.param(
            ["proxy.service", "proxy.tables", "proxy.daemon.client", "proxy.daemon.connection"],
            marks=pytest.mark.daemon,
            id="proxy",
        ),
    ],
)
def test_an_array_may_end_at_any_line(ranks: Ranks, modules: list[str]) -> None:
    traced = {sys.modules[f"proxyccl.{name}"].__file__ for name in modules}

    def body(comm: Communicator) -> None:
        small, source = comm.empty(256, CALL.dtype), comm.empty(CALL.count, CALL.dtype)
        arrays = [comm.empty(256 * comm.world_size, CALL.dtype) for _ in range(300)]
        for array in arrays:
            comm.all_gather(small, out=array, algorithm="proxy")  # registers the array with the proxies
        comm.synchronize()
        lines: set[tuple[str, int]] = set()

        # Frees an array at each line of the library, because a garbage collection may run at any line.
        def trace(frame: FrameType, event: str, _: Any) -> Any:
            line = frame.f_code.co_filename, frame.f_lineno
            if line[0] not in traced:
                return None
            if event == "line" and line not in lines and arrays:
                lines.add(line)
                arrays.pop()
            return trace

        tracing = sys.gettrace()
        for seed in range(4):
            sys.settrace(trace)
            try:
                target = comm.empty(CALL.count * comm.world_size, CALL.dtype)
                comm.group.lent_memory.update()
                gather(comm, seed, source, target, "proxy" if seed % 2 else None)
                target.free()
            finally:
                sys.settrace(tracing)
            barrier(comm)
        assert arrays, "one for each line"

    ranks.run(body)


@pytest.mark.parametrize("why", ["small", "scarce", "limit", "full"])
def test_nothing_is_lent_that_is_small_or_scarce_or_not_to_be_lent(
    ranks: Ranks, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library does not ask at every call how much device memory is left."""

    def body(comm: Communicator) -> None:
        source = comm.empty(CALL.count, CALL.dtype)
        memory = memory_for(comm, {"limit": 0, "full": LEAST_LENT_BYTES}.get(why, ROOM))
        target, looks = memory.array(CALL.dtype), []
        if why == "small":
            source, target = source.view(), target.view()
            count = (LEAST_LENT_BYTES - 4) // 4 // comm.world_size
            source = replace(source, shape=(count,))
            target = replace(target, shape=(count * comm.world_size,))
        left = (memory.nbytes - 1 if why == "scarce" else 1 << 40, 1 << 40)
        with monkeypatch.context() as patch:
            patch.setattr(comm.runtime, "memory_left", lambda: (looks.append(1), left)[1])
            exported = exports(comm, patch, memory)
            for _ in range(40):
                meet(comm, source, target, OFTEN // 4)
                comm.group.lent_memory.update()
            assert not exported
        assert len(looks) <= 4
        withdrawn(comm, memory)

    ranks.run(body)


def test_only_so_much_is_lent(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        source, memories = comm.empty(CALL.count, CALL.dtype), [memory_for(comm) for _ in range(3)]
        comm.group.lent_memory.limit = 2 * memories[0].nbytes + 100
        for memory in memories[:2]:
            lend(comm, source, memory.array(CALL.dtype))
        for _ in range(3):
            meet(comm, source, memories[2].array(CALL.dtype), OFTEN)
            comm.group.lent_memory.update()
        assert comm.group.symmetric.find(memories[2].ptr, memories[2].nbytes) is None
        withdrawn(comm, *memories)

    ranks.run(body)


def test_what_a_call_has_exported_ends_with_the_communicator() -> None:
    """Closing a communicator also ends an export that the watcher has not yet announced to the peers."""
    exported: list[bytes] = []
    ended: list[bytes] = []

    def body(comm: Communicator) -> None:
        memory, runtime = memory_for(comm), comm.runtime
        export, end = runtime.export, runtime.end_export
        runtime.export = lambda *given: exported.append(export(*given)) or exported[-1]  # type: ignore[method-assign]
        runtime.end_export = lambda handle: ended.append(handle) or end(handle)  # type: ignore[method-assign]
        comm.group.lent_memory._export(memory.ptr, memory.nbytes)

    run_ranks(2, body)
    assert set(exported) <= set(ended)
    assert len(exported) >= 2


def test_memory_that_is_registered_too_stays_lent_after_that(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        source, memory = comm.empty(CALL.count, CALL.dtype), memory_for(comm)
        target = memory.array(CALL.dtype)
        lend(comm, source, target)
        registration = comm.register(target)
        gather(comm, 1, source, target, "proxy")
        comm.deregister(registration)
        gather(comm, 2, source, target)
        assert registered(comm, target.view())
        withdrawn(comm, memory)

    ranks.run(body)


def test_the_limit_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_LEND_BYTES", "64")
    with Ranks(1) as ranks:
        ranks.run(lambda comm: _require_limit(comm, 64))
    monkeypatch.setenv("PROXYCCL_LEND_BYTES", "1 GiB")
    with pytest.raises(
        ArgumentError, match="PROXYCCL_LEND_BYTES: must be a number of bytes, 0 to lend nothing, not '1 GiB'"
    ):
        Communicator(runtime="host").close()


def _require_limit(comm: Communicator, limit: int) -> None:
    assert comm.group.lent_memory.limit == limit


@pytest.mark.parametrize(
    ("collective", "policy", "lent"),
    [
        ("all_gather", None, "output"),
        ("all_reduce", None, "output"),
        ("reduce_scatter", None, ""),
        ("reduce_scatter", "zero", "input"),  # with this policy proxies send from the input array
    ],
)
def test_calls_of_tensors_lend_what_peers_touch(collective: str, policy: CtaPolicy | None, lent: str) -> None:
    op = None if collective == "all_gather" else "sum"

    def body(comm: Communicator) -> None:
        comm.group.lent_memory.limit = ROOM
        call = replace(CALL, collective=collective)
        memories = [ForeignMemory(comm.runtime, 4 * size) for size in call.sizes(comm.world_size)]
        source, target = (memory.array(CALL.dtype) for memory in memories)

        def found() -> list[bool]:
            meet(comm, source, target, OFTEN, collective, op=op)
            return [comm.group.symmetric.find(memory.ptr, memory.nbytes) is not None for memory in memories]

        if lent:
            expected = [lent == "input", lent == "output"]
            wait_for(lambda: all(map(any, comm.all_gather_bytes(bytes([found() == expected])))), "it is lent")
        for _ in range(2):
            assert found() == [lent == "input", lent == "output"]
        withdrawn(comm, *memories)

    with Ranks(2, cta_policy=policy) as ranks:
        ranks.run(body)
