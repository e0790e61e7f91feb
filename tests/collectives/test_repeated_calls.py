"""Calls that are repeated with the same arrays, which are issued without Python from the third on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from proxyccl import AbortedError, ArgumentError, ClosedError, Communicator, MismatchError
from support.cases.reference import Call
from support.ranks import Ranks
from support.running import run_ranks

pytestmark = pytest.mark.host_only(reason="on GPUs no call waits")

COUNT, OFTEN = 6, 5
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
ARRAYS: dict[str, Callable[[Communicator, int], Any]] = {
    "numpy's": lambda _, count: np.zeros(count, np.float32),
    "of empty": lambda comm, count: comm.empty(count, "float32"),
}


@pytest.fixture(scope="module", params=(1, 2, 3), ids=lambda n: f"{n}-ranks")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as group:
        yield group


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_each_call_is_right(ranks: Ranks, collective: str, kind: str) -> None:
    """A call on a stream comes in between: a call on a different stream than the last one waits for that."""
    call = Call(collective, count=COUNT, dtype="float32", in_place=False)

    def body(comm: Communicator) -> None:
        x, out = (ARRAYS[kind](comm, size) for size in call.sizes(comm.world_size))
        stream = comm.runtime.create_stream()
        for turn in range(2 * OFTEN):
            each = replace(call, seed=turn)
            np.asarray(x)[:] = each.input(comm.rank, comm.world_size)
            np.asarray(out)[:] = -1
            comm.all_gather_bytes(b"")  # ranks are threads: nobody writes to an array that its rank still fills
            each.issue(comm, x, out, stream if turn == OFTEN else None)
            comm.synchronize(stream)
            each.check(np.asarray(out), comm.rank, comm.world_size)

    ranks.run(body)


def repeated(comm: Communicator, x: Any) -> None:
    for _ in range(OFTEN):
        comm.all_reduce(x)


@pytest.mark.parametrize("kind", ARRAYS)
def test_the_call_cache_is_not_asked(kind: str) -> None:
    def body(comm: Communicator) -> None:
        x = ARRAYS[kind](comm, COUNT)
        repeated(comm, x)
        comm.group.symmetric.update(wait=True)
        comm.all_gather_bytes(b"")  # now all have mapped it, which may end what was kept before
        repeated(comm, x)
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(comm.collectives, "call_cache")
            comm.all_reduce(x)

    run_ranks(2, body)


def test_an_array_that_was_freed_is_refused(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        x = comm.empty(COUNT)
        repeated(comm, x)
        comm.all_gather_bytes(b"")
        x.free()
        with pytest.raises(ClosedError):
            comm.all_reduce(x)

    ranks.run(body)


def test_an_array_that_became_read_only_is_refused(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        x = np.zeros(COUNT, np.float32)
        repeated(comm, x)
        x.flags.writeable = False
        with pytest.raises(ArgumentError, match="read-only"):
            comm.all_reduce(x)

    ranks.run(body)


@pytest.mark.parametrize("kind", ARRAYS)
def test_a_closed_communicator_refuses_a_call_that_was_repeated(kind: str) -> None:
    kept: list[tuple[Communicator, Any]] = []

    def body(comm: Communicator) -> None:
        x = ARRAYS[kind](comm, COUNT)
        repeated(comm, x)
        kept.append((comm, x))

    run_ranks(2, body)
    for comm, x in kept:
        with pytest.raises(ClosedError, match="the communicator is closed"):
            comm.all_reduce(x)


def test_a_launch_that_overtakes_the_close_leaves_repeated_calls_refused() -> None:
    def body(comm: Communicator) -> None:
        x, group, stream = np.zeros(COUNT, np.float32), comm.collectives.group, comm.runtime.create_stream()
        repeated(comm, x)
        comm.all_reduce(x, stream=stream)
        stream.synchronize()
        group.failure.close()
        group.launches.end_repeats()
        with pytest.raises(ClosedError):
            group.launches.launch(lambda _: None, None, ())  # by a thread that found it open
        with pytest.raises(ClosedError):
            comm.all_reduce(x)
        group.failure.state = "open"
        stream.close()

    run_ranks(2, body)


def test_ranks_that_repeat_different_calls_are_told() -> None:
    def body(comm: Communicator) -> None:
        x, y = np.zeros(COUNT, np.float32), np.zeros(2 * COUNT, np.float32)
        repeated(comm, x)
        repeated(comm, y)
        with pytest.raises(MismatchError, match="different count"):
            comm.all_reduce(x if comm.rank == 0 else y)

    run_ranks(2, body)


def test_a_communicator_that_was_aborted_refuses_a_call_that_was_repeated() -> None:
    def body(comm: Communicator) -> None:
        x = np.zeros(COUNT, np.float32)
        repeated(comm, x)
        comm.all_gather_bytes(b"")
        if comm.rank == 0:
            comm.abort("enough")
        with pytest.raises(AbortedError, match="enough" if comm.rank == 0 else "rank 0 ended"):
            comm.all_reduce(x)

    run_ranks(2, body)
