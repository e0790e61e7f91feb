"""Memory that its owner may free at any time, lent to peers because calls meet it repeatedly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from proxyccl import ArgumentError, Array, Communicator
from proxyccl.channels.collectives.request import CtaPolicy
from proxyccl.channels.lent_memory import LentMemory
from support.cases.memory import registered, room_for
from support.cases.reference import Call
from support.device_arrays import barrier
from support.fakes.foreign_memory import ForeignMemory
from support.ranks import Ranks
from support.running import wait_for

CALL = Call("all_gather", count=1 << 18, in_place=False)  # of 4 bytes: arrays from 1 MiB on are lent
ROOM = 64 << 20


@pytest.fixture(scope="module", params=(2, 3), ids=lambda n: f"{n}-ranks")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as group:
        yield group


def lender(comm: Communicator, limit: int | None = ROOM) -> LentMemory:
    lent = LentMemory(comm.runtime, comm.group.symmetric)
    lent.limit = limit
    return lent


def memory_for(comm: Communicator) -> ForeignMemory:
    return ForeignMemory(comm.runtime, room_for(CALL, comm.world_size) - 256)


def lend(comm: Communicator, lent: LentMemory, array: Array) -> None:
    assert [lent.meet(array.view()), lent.meet(array.view())] == [False, True]
    wait_for(lambda: registered(comm, array.view()), "the peers have mapped it")


def gather(comm: Communicator, seed: int, source: Array, target: Array, algorithm: str | None = None) -> None:
    call = replace(CALL, seed=seed)
    source.upload(call.input(comm.rank, comm.world_size))
    target.fill(-1)
    barrier(comm)
    comm.all_gather(source, out=target, algorithm=algorithm)
    comm.synchronize()
    call.check(target.numpy(), comm.rank, comm.world_size)


def unmapped_by_all(comm: Communicator) -> Callable[[], bool]:
    symmetric = comm.group.symmetric
    return lambda: not symmetric.lent_sizes and not symmetric._withdrawn


def mapped_handles(comm: Communicator) -> set[bytes]:
    return {handled.handle for handled in comm.group.symmetric._handled.values() if handled.mapped is not None}


def test_memory_is_lent_when_it_is_met_again(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        source, lent, memory = comm.empty(CALL.count, CALL.dtype), lender(comm), memory_for(comm)
        target = memory.array(CALL.dtype)
        assert not lent.meet(target.view())
        gather(comm, 1, source, target)
        assert not registered(comm, target.view())
        assert lent.meet(target.view())
        wait_for(lambda: registered(comm, target.view()), "the peers have mapped it")
        for seed in (2, 3, 4):
            gather(comm, seed, source, target)
        barrier(comm)
        memory.close()
        wait_for(unmapped_by_all(comm), "it is withdrawn")

    ranks.run(body)


@pytest.mark.parametrize("algorithm", [None, "proxy"])
def test_what_its_owner_frees_is_withdrawn_without_a_call(ranks: Ranks, algorithm: str | None) -> None:
    """And its mappings are closed, which would keep it occupied."""

    def body(comm: Communicator) -> None:
        source, lent, memory = comm.empty(CALL.count, CALL.dtype), lender(comm), memory_for(comm)
        target = memory.array(CALL.dtype)
        lend(comm, lent, target)
        for seed in (1, 2, 3):
            gather(comm, seed, source, target, algorithm)
        comm.all_gather_bytes(b"")
        before = mapped_handles(comm)
        comm.all_gather_bytes(b"")
        memory.close()
        wait_for(unmapped_by_all(comm), "it is withdrawn")
        comm.all_gather_bytes(b"")
        withdrawn = before - mapped_handles(comm)
        assert len(withdrawn) >= comm.world_size - 1
        for cache in (comm.group.mappings, comm.group._mapped):
            assert not withdrawn & cache._mappings._entries.keys()

    ranks.run(body)


def test_other_memory_at_its_address_is_lent_anew(ranks: Ranks) -> None:
    """Also if it comes before anybody has noticed the end of the first."""

    def body(comm: Communicator) -> None:
        source, lent, memory = comm.empty(CALL.count, CALL.dtype), lender(comm), memory_for(comm)
        lend(comm, lent, memory.array(CALL.dtype))
        gather(comm, 1, source, memory.array(CALL.dtype))
        for turn in range(comm.world_size):
            comm.all_gather_bytes(b"")  # ranks are threads: while one frees memory, another may allocate
            if turn == comm.rank:
                memory.close()
                memory = memory.replaced()
        comm.all_gather_bytes(b"")
        target = memory.array(CALL.dtype)
        assert not registered(comm, target.view())
        gather(comm, 2, source, target)
        lend(comm, lent, target)
        gather(comm, 3, source, target)
        gather(comm, 4, source, target, "proxy")
        barrier(comm)
        memory.close()
        wait_for(unmapped_by_all(comm), "it is withdrawn")

    ranks.run(body)


def test_calls_by_proxy_use_it_when_peers_have_added_it(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        source, lent, memory = comm.empty(CALL.count, CALL.dtype), lender(comm), memory_for(comm)
        gather(comm, 1, source, comm.empty(CALL.count * comm.world_size, CALL.dtype), "proxy")  # it makes the proxies
        target = memory.array(CALL.dtype)
        lend(comm, lent, target)
        symmetric = comm.group.symmetric
        found = symmetric.find(target.ptr, target.nbytes)
        assert found is not None
        assert found.for_proxies, "no call needs to ask"
        wait_for(lambda: symmetric.is_settled(target.view()), "the peers' proxies have it")
        stages = {side: len(made) for side, made in comm.collectives.by_proxy().memories._stages.items()}
        gather(comm, 2, source, target, "proxy")
        assert stages == {side: len(made) for side, made in comm.collectives.by_proxy().memories._stages.items()}
        barrier(comm)
        memory.close()
        wait_for(unmapped_by_all(comm), "it is withdrawn")

    ranks.run(body)


@pytest.mark.slow
@pytest.mark.parametrize(
    "modules",
    [
        pytest.param(["channels.symmetric", "channels.lent_memory", "channels.collectives.call_cache"], id="channels"),
        pytest.param(
            ["proxy.service", "proxy.memory_table", "proxy.daemon.client", "proxy.daemon.connection"],
            marks=pytest.mark.daemon,
            id="proxy",
        ),
    ],
)
def test_an_array_may_end_at_any_line(ranks: Ranks, modules: list[str]) -> None:
    traced = {sys.modules[f"proxyccl.{name}"].__file__ for name in modules}

    def body(comm: Communicator) -> None:
        lent = lender(comm)
        small, source = comm.empty(256, CALL.dtype), comm.empty(CALL.count, CALL.dtype)
        arrays = [comm.empty(256 * comm.world_size, CALL.dtype) for _ in range(300)]
        for array in arrays:
            comm.all_gather(small, out=array, algorithm="proxy")  # so proxies know it too
        comm.synchronize()
        lines: set[tuple[str, int]] = set()

        def trace(frame: FrameType, event: str, _: Any) -> Any:  # as garbage, which may be collected there
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
                lent.is_in_place(target.ptr, target.nbytes)
                gather(comm, seed, source, target, "proxy" if seed % 2 else None)
                target.free()
            finally:
                sys.settrace(tracing)
            barrier(comm)
        assert arrays, "one for each line"

    ranks.run(body)


def test_only_so_much_is_lent(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        memories = [memory_for(comm) for _ in range(3)]
        lent = lender(comm, limit=2 * memories[0].nbytes + 100)
        for memory in memories:
            lent.meet(memory.array().view())
            assert lent.meet(memory.array().view())
        assert [comm.group.symmetric.find(memory.ptr, memory.nbytes) is not None for memory in memories] == [
            True,
            True,
            False,
        ]
        for memory in memories:
            memory.close()
        wait_for(unmapped_by_all(comm), "they are withdrawn")

    ranks.run(body)


def test_nothing_is_lent_that_is_small_or_scarce_or_not_to_be_lent(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        memory, small = memory_for(comm), ForeignMemory(comm.runtime, 4096)
        for lent, array in ((lender(comm, 0), memory.array()), (lender(comm), small.array())):
            assert lent.meet(array.view()), "at once: no later call changes it"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comm.runtime, "memory_left", lambda: (memory.nbytes - 1, 1 << 40))
            scarce = lender(comm)
            scarce.meet(memory.array().view())
            assert scarce.meet(memory.array().view())
        assert not comm.group.symmetric.lent_sizes
        for each in (memory, small):
            each.close()

    ranks.run(body)


def test_memory_is_lent_though_many_arrays_are_met_in_turn(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        lent, memory = lender(comm), memory_for(comm)
        whole = memory.array().view()
        views = [replace(whole, ptr=whole.ptr + 256 * i, shape=(1 << 20,)) for i in range(1000)]
        for view in views:
            assert not lent.meet(view)
        assert lent.meet(views[0])
        wait_for(lambda: registered(comm, views[0]), "the peers have mapped it")
        comm.all_gather_bytes(b"")
        memory.close()
        wait_for(unmapped_by_all(comm), "it is withdrawn")

    ranks.run(body)


def test_memory_that_is_registered_too_stays_lent_after_that(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        source, lent, memory = comm.empty(CALL.count, CALL.dtype), lender(comm), memory_for(comm)
        target = memory.array(CALL.dtype)
        lend(comm, lent, target)
        registration = comm.register(target)
        gather(comm, 1, source, target, "proxy")
        comm.deregister(registration)
        gather(comm, 2, source, target)
        assert registered(comm, target.view())
        barrier(comm)
        memory.close()
        wait_for(unmapped_by_all(comm), "it is withdrawn")

    ranks.run(body)


def test_the_limit_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_LEND_BYTES", "64")
    with Ranks(1) as ranks:
        ranks.run(lambda comm: _require_limit(comm, 64))
    monkeypatch.setenv("PROXYCCL_LEND_BYTES", "1 GiB")
    with pytest.raises(ArgumentError, match="PROXYCCL_LEND_BYTES: must be a number of bytes, 0 for none, not '1 GiB'"):
        Communicator(runtime="host").close()


def _require_limit(comm: Communicator, limit: int) -> None:
    assert comm.collectives.lent_memory.limit == limit


@pytest.mark.parametrize(
    ("collective", "policy", "lent"),
    [
        ("all_gather", None, "output"),
        ("all_reduce", None, "output"),
        ("reduce_scatter", None, ""),
        ("reduce_scatter", "zero", "input"),  # proxies send from it
    ],
)
def test_calls_of_tensors_lend_what_peers_touch(
    ranks: Ranks, collective: str, policy: CtaPolicy | None, lent: str
) -> None:
    op = None if collective == "all_gather" else "sum"

    def body(comm: Communicator) -> None:
        comm.collectives.lent_memory.limit = ROOM
        call = replace(CALL, collective=collective)
        memories = [ForeignMemory(comm.runtime, 4 * size) for size in call.sizes(comm.world_size)]
        source, target = (memory.array(CALL.dtype) for memory in memories)
        for _ in range(2):
            arguments = {} if op is None else {"op": op}
            getattr(comm, collective)(source, out=target, cta_policy=policy, **arguments)
            comm.tensor_calls.keep((collective,), source, target, collective, source, target, op, None, policy)
        found = [comm.group.symmetric.find(memory.ptr, memory.nbytes) is not None for memory in memories]
        assert found == [lent == "input", lent == "output"]
        barrier(comm)
        for memory in memories:
            memory.close()
        wait_for(unmapped_by_all(comm), "it is withdrawn")

    ranks.run(body)


def test_gathers_go_by_proxy_once_peers_proxies_have_the_output() -> None:
    """On all ranks, if the first to come wishes it; and no longer when its owner has freed it."""

    def body(comm: Communicator) -> None:
        calls, rank = comm.tensor_calls, comm.rank
        lent = comm.collectives.lent_memory
        source, memory = comm.empty(CALL.count, CALL.dtype), memory_for(comm)
        target = memory.array(CALL.dtype)
        found = []

        def turn(*, wish: bool) -> None:
            found.append(calls.gathers_beside(wish, target.ptr, target.nbytes))
            gather(comm, len(found), source, target, "proxy" if found[-1] else None)

        turn(wish=False)
        assert not comm.collectives.has_by_proxy, "nobody needs it"
        turn(wish=rank == 0)
        turn(wish=True)
        assert not any(found)
        lend(comm, lent, target)
        wait_for(lambda: comm.group.symmetric.is_settled(target.view()), "the peers' proxies may have it")
        comm.all_gather_bytes(b"")
        for _ in range(6):
            turn(wish=True)
        assert found[-1]
        assert lent.is_in_place(target.ptr + 4096, CALL.count), "the whole allocation is"
        turn(wish=False)
        assert not found[-1]
        everyone = [list(each) for each in comm.all_gather_bytes(bytes(found))]
        assert everyone == [everyone[0]] * comm.world_size
        barrier(comm)
        memory.close()
        wait_for(unmapped_by_all(comm), "it is withdrawn")
        assert not calls.gathers_beside(wish=True, ptr=memory.ptr, nbytes=memory.nbytes)

    with Ranks(2, cta_policy="efficiency") as ranks:
        ranks.run(body)


def test_gathers_into_memory_that_is_not_lent_stay_kernels() -> None:
    def body(comm: Communicator) -> None:
        comm.collectives.by_proxy()
        memory = memory_for(comm)
        for _ in range(40):
            assert not comm.collectives.lent_memory.is_in_place(memory.ptr, memory.nbytes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comm.group.symmetric, "find", None)
            assert not comm.collectives.lent_memory.is_in_place(memory.ptr, memory.nbytes), "without a look"
        memory.close()

    with Ranks(2, cta_policy="efficiency") as ranks:
        ranks.run(body)
