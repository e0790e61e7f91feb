"""Calls that differ only in their arrays are prepared once; each call gives the right result or is refused."""

from __future__ import annotations

import array
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from proxyccl import AbortedError, ArgumentError, ClosedError, Communicator, MismatchError
from proxyccl.channels.calls._calls import MOST_FORMS
from proxyccl.device.arrays.array import ArrayView
from support.cases.memory import symmetric, view_of
from support.cases.reference import Call
from support.ranks import Ranks
from support.running import TIMEOUT, run_ranks

pytestmark = pytest.mark.host_only(reason="on GPUs no call waits")

COUNT, OFTEN, DTYPE = 6, 5, "float32"
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")


def of_empty(comm: Communicator, values: Any) -> ArrayView:
    """Returns an array of `values`. All peers can access the array."""
    memory = symmetric(comm, values.nbytes) if comm.world_size > 1 else comm.empty(values.nbytes, "uint8")
    memory.upload(values.view(np.uint8))
    comm.group.symmetric.update()
    return view_of(memory, 0, values.size, DTYPE)


ARRAYS: dict[str, Callable[[Communicator, Any], Any]] = {
    "numpy's": lambda _, values: values.copy(),
    "of empty": of_empty,
}


def part(whole: Any, begin: int, count: int) -> Any:
    if isinstance(whole, np.ndarray):
        return whole[begin : begin + count]
    return replace(whole, ptr=whole.ptr + 4 * begin, shape=(count,))


def arrays_of(comm: Communicator, call: Call, kind: str) -> tuple[Any, Any]:
    """Returns new input and output arrays for a call. The input array holds the call's values."""
    values, sizes = call.input(comm.rank, comm.world_size), call.sizes(comm.world_size)
    if not call.in_place:
        return ARRAYS[kind](comm, values), ARRAYS[kind](comm, np.zeros(sizes[1], DTYPE))
    begin = comm.rank * COUNT
    contents = np.zeros(max(sizes), DTYPE)
    at = begin if call.collective == "all_gather" else 0
    contents[at : at + sizes[0]] = values
    whole = ARRAYS[kind](comm, contents)
    own = part(whole, begin, COUNT) if max(sizes) > COUNT else whole
    return (own if sizes[0] == COUNT else whole), (own if sizes[1] == COUNT else whole)


def content(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return x
    begin = (x.ptr - x.owner.ptr) // 4
    return x.owner.numpy().view(DTYPE)[begin : begin + x.shape[0]]


@pytest.fixture(scope="module", params=(1, 2, 3), ids=lambda n: f"{n}-ranks")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as group:
        yield group


@pytest.mark.parametrize("in_place", [True, False], ids=["in-place", "apart"])
@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_calls_with_new_arrays_are_right_and_prepared_once(
    ranks: Ranks, collective: str, kind: str, in_place: bool
) -> None:
    """One call uses a stream, and the next call, without a stream, must wait for that stream."""
    call = Call(collective, count=COUNT, in_place=in_place)

    def body(comm: Communicator) -> None:
        stream, kept, prepared = comm.runtime.create_stream(), [], 0
        for turn in range(2 * OFTEN):
            each = replace(call, seed=turn)
            x, out = arrays_of(comm, each, kind)
            kept.append((x, out))  # Keeps arrays, so that later arrays get new addresses.
            # Ranks are threads: no rank may write to an array that another rank still fills.
            comm.all_gather_bytes(b"")
            each.issue(comm, x, out, stream if turn == OFTEN else None)
            comm.synchronize(stream)
            each.check(content(out), comm.rank, comm.world_size)
            if turn == 2:  # the first calls may allocate memory, which invalidates prepared calls
                prepared = comm.calls.prepared
        assert comm.calls.prepared == prepared

    ranks.run(body)


def test_calls_that_are_queued_have_arrays_of_their_own(ranks: Ranks) -> None:
    """Queued calls share one prepared call. Each queued call must use its own arrays, although the prepared call holds
    only the addresses of the latest arrays.
    """

    def body(comm: Communicator) -> None:
        stream = comm.runtime.create_stream()
        for algorithm in (None, "two_shot", "proxy"):
            for collective in COLLECTIVES:
                calls = [
                    Call(collective, count=COUNT, algorithm=algorithm, seed=seed, in_place=False) for seed in range(8)
                ]
                if collective != "all_reduce" and algorithm == "two_shot":
                    continue
                given = [arrays_of(comm, call, "numpy's") for call in calls]
                for call, (x, out) in zip(calls, given, strict=True):
                    call.issue(comm, x, out, stream)
                comm.synchronize(stream)
                for call, (_, out) in zip(calls, given, strict=True):
                    call.check(out, comm.rank, comm.world_size)

    ranks.run(body)


# -- calls that differ from earlier calls in one argument ---


def numbers(comm: Communicator, shape: Any = COUNT, dtype: str = DTYPE) -> Any:
    return np.full(shape, comm.rank + 1, dtype)


def reduced(comm: Communicator, x: Any, expected: str | None = None, **given: Any) -> None:
    """Makes an all_reduce and checks its result. With `expected`, checks instead that the call raises an ArgumentError
    whose text matches `expected`.
    """
    out = given.get("out", x)
    if expected is not None:
        with pytest.raises(ArgumentError, match=expected):
            comm.all_reduce(x, **given)
        return
    ranks = range(1, comm.world_size + 1)
    assert comm.all_reduce(x, **given) is out
    assert np.all(np.asarray(out) == {"sum": sum(ranks), "max": max(ranks)}[given.get("op", "sum")])


def offset(comm: Communicator, nbytes: int) -> Any:
    """Returns an array that begins `nbytes` bytes after a multiple of 64 bytes."""
    memory = np.zeros(4 * COUNT + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + nbytes
    x = memory[begin : begin + 4 * COUNT].view(DTYPE)
    x[:] = comm.rank + 1
    return x


def read_only(comm: Communicator) -> Any:
    x = numbers(comm)
    x.flags.writeable = False
    return x


def freed(comm: Communicator) -> Any:
    x = comm.empty(COUNT).fill(comm.rank + 1)
    comm.all_gather_bytes(b"")
    x.free()
    return x


def elsewhere(comm: Communicator, *place: Any) -> ArrayView:
    return replace(comm.empty(COUNT).view(), device=place)


DIFFERENT: dict[str, Callable[[Communicator], None]] = {
    "size": lambda c: reduced(c, numbers(c, COUNT + 1)),
    "large": lambda c: reduced(c, numbers(c, 1 << 18)),
    "rows": lambda c: reduced(c, numbers(c, (2, 3))),
    "no dimensions": lambda c: reduced(c, numbers(c, ())),
    "many dimensions": lambda c: reduced(c, numbers(c, (1, 1, 1, 1, 1, 1, 1, 2, 3))),
    "no elements": lambda c: reduced(c, numbers(c, 0)),
    "type": lambda c: reduced(c, numbers(c, dtype="int32")),
    "byte order": lambda c: reduced(c, numbers(c, dtype=">f4"), "x: "),
    "bool": lambda c: reduced(c, numbers(c, dtype="bool"), "x: |op: "),
    "structures": lambda c: reduced(c, np.zeros(COUNT, "f2,f2"), "x: "),
    "operator": lambda c: reduced(c, numbers(c), op="max"),
    "unknown operator": lambda c: reduced(c, numbers(c), "op: ", op="maximum"),
    "algorithm": lambda c: reduced(c, numbers(c), algorithm="two_shot"),
    "unknown algorithm": lambda c: reduced(c, numbers(c), "algorithm: ", algorithm="three_shot"),
    "policy": lambda c: reduced(c, numbers(c), cta_policy="zero"),
    "unknown policy": lambda c: reduced(c, numbers(c), "cta_policy: ", cta_policy="one"),
    "symmetric": lambda c: reduced(c, numbers(c), symmetric=True),
    "alignment": lambda c: reduced(c, offset(c, 4)),
    "other alignment": lambda c: reduced(c, offset(c, 8)),
    "alignment to a byte": lambda c: reduced(c, offset(c, 1), "x: the array is not aligned"),
    "strides": lambda c: reduced(c, numbers(c, 2 * COUNT)[::2], "x: the array is not contiguous"),
    "order": lambda c: reduced(c, numbers(c, (3, 2)).T, "x: the array is not contiguous"),
    "mask": lambda c: reduced(c, np.ma.masked_array(numbers(c)), "x: the array is masked"),
    "read-only": lambda c: reduced(c, read_only(c), "x: the array is read-only"),
    "read-only out": lambda c: reduced(c, numbers(c), "out: the array is read-only", out=read_only(c)),
    "read-only input": lambda c: reduced(c, read_only(c), out=numbers(c)),
    "apart": lambda c: reduced(c, numbers(c), out=numbers(c)),
    "same memory": lambda c: (lambda x: reduced(c, x, out=x[:]))(numbers(c)),
    "overlap": lambda c: (lambda x: reduced(c, x[1:], "out: overlaps x", out=x[:-1]))(numbers(c, COUNT + 1)),
    "shape of out": lambda c: reduced(c, numbers(c), "out: has shape", out=numbers(c, COUNT + 1)),
    "type of out": lambda c: reduced(c, numbers(c), "out: has element type", out=numbers(c, dtype="int32")),
    "memory of empty": lambda c: reduced(c, c.empty(COUNT).fill(c.rank + 1)),
    "bytearray": lambda c: reduced(c, bytearray([c.rank + 1] * 4 * COUNT)),
    "array": lambda c: reduced(c, array.array("f", [c.rank + 1] * COUNT)),
    "bytes": lambda c: reduced(c, bytes(4 * COUNT), "x: the array is read-only"),
    "list": lambda c: reduced(c, [1.0] * COUNT, "x: expected an array"),
    "tuple": lambda c: reduced(c, (), "x: expected an array"),
    "place": lambda c: reduced(c, elsewhere(c, "cuda", 0), "x: the array lies on cuda:0"),
    "device": lambda c: reduced(c, elsewhere(c, "host", 1), "x: the array lies on host:1"),
    "stream": lambda c: reduced(c, numbers(c), "stream: ", stream="1"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_call_that_differs_is_not_taken_for_an_earlier_one(ranks: Ranks, what: str) -> None:
    def body(comm: Communicator) -> None:
        for make in (numbers, lambda comm: comm.empty(COUNT).fill(comm.rank + 1)):
            for _ in range(3):
                reduced(comm, make(comm))
            DIFFERENT[what](comm)
            DIFFERENT[what](comm)
            reduced(comm, make(comm))

    ranks.run(body)


def test_another_root_is_not_taken_for_the_first(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        for turn in range(3 * comm.world_size):
            root = turn % comm.world_size
            assert np.all(comm.broadcast(numbers(comm), root) == root + 1)
            x = numbers(comm)
            comm.reduce(x, root=root)
            assert np.all(x == (sum(range(1, comm.world_size + 1)) if comm.rank == root else comm.rank + 1))
        with pytest.raises(ArgumentError, match="out: expected an array"):
            comm.reduce(numbers(comm), root=comm.rank, out=())

    ranks.run(body)


def test_equal_options_are_the_same_whatever_objects_they_are(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        def call(op: Any, root: Any) -> None:
            reduced(comm, numbers(comm), op=op)
            assert np.all(comm.broadcast(numbers(comm), root) == 1)

        for _ in range(3):
            call("sum", 0)
        prepared = comm.calls.prepared
        call("".join(["su", "m"]), np.int64(0))
        assert comm.calls.prepared == prepared

    ranks.run(body)


def test_calls_are_right_when_there_are_more_kinds_than_are_kept() -> None:
    """A call that is repeated often stays prepared, even if the prepared call is bound to the memory of its arrays."""

    def body(comm: Communicator) -> None:
        x, bound = np.empty(MOST_FORMS + 100, np.float32), of_empty(comm, np.zeros(COUNT, DTYPE))
        for _ in range(3):
            comm.all_reduce(bound, algorithm="proxy")
        for count in (*range(1, len(x)), 1, 2):
            x[:] = count
            comm.all_reduce(x[:count])
            assert x[0] == x[count - 1] == 2 * count
            if count % 700 == 0:
                prepared = comm.calls.prepared
                comm.all_reduce(bound, algorithm="proxy")
                assert comm.calls.prepared == prepared

    run_ranks(2, body)


# -- arrays that change after a call ---


def test_an_array_that_was_freed_is_refused(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        for _ in range(3):
            comm.all_reduce(comm.empty(COUNT))
        with pytest.raises(ClosedError, match="the array's memory was freed"):
            comm.all_reduce(freed(comm))

    ranks.run(body)


def test_an_array_that_became_read_only_is_refused(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        x = numbers(comm)
        for _ in range(OFTEN):
            comm.all_reduce(x)
        x.flags.writeable = False
        with pytest.raises(ArgumentError, match="x: the array is read-only"):
            comm.all_reduce(x)

    ranks.run(body)


# -- threads and closing ---


def test_threads_take_turns_on_streams_of_their_own(ranks: Ranks) -> None:
    """The threads hold a lock while they call, so that all ranks make the same calls in the same order."""

    def body(comm: Communicator) -> None:
        lock, wrong = threading.Condition(), []
        latest = [-1]

        def go(number: int) -> None:
            stream = comm.runtime.create_stream() if number else None
            for turn in range(number, 40, 4):
                x = numbers(comm)
                with lock:
                    if not lock.wait_for(lambda turn=turn: latest[0] == turn - 1, TIMEOUT):
                        return
                    comm.all_reduce(x, stream=stream)
                    latest[0] = turn
                    lock.notify_all()
                comm.synchronize(stream)
                wrong.extend(x[x != sum(range(1, comm.world_size + 1))])

        threads = [threading.Thread(target=go, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * TIMEOUT)
        assert latest == [39]
        assert not wrong

    ranks.run(body)


@pytest.mark.parametrize("kind", ARRAYS)
def test_a_closed_communicator_refuses_a_call_whose_form_is_kept(kind: str) -> None:
    kept: list[tuple[Communicator, Any]] = []

    def body(comm: Communicator) -> None:
        x = ARRAYS[kind](comm, numbers(comm))
        for _ in range(OFTEN):
            comm.all_reduce(x)
        kept.append((comm, x))

    run_ranks(2, body)
    for comm, x in kept:
        for given in (x, np.empty(COUNT, DTYPE)):
            with pytest.raises(ClosedError, match="the communicator is closed"):
                comm.all_reduce(given)


def test_a_launch_that_overtakes_the_close_leaves_later_calls_refused() -> None:
    def body(comm: Communicator) -> None:
        x, group, stream = numbers(comm), comm.collectives.group, comm.runtime.create_stream()
        for given in (None, None, stream):
            comm.all_reduce(x, stream=given)
        stream.synchronize()
        group.failure.close()
        group.launches.recheck_next_call()
        with pytest.raises(ClosedError):
            # A thread may find the communicator open, but launch after another thread has closed it.
            group.launches.launch(lambda _: None, None, ())
        with pytest.raises(ClosedError):
            comm.all_reduce(x)
        group.failure.state = "open"
        stream.close()

    run_ranks(2, body)


def test_ranks_whose_kept_calls_differ_are_told() -> None:
    def body(comm: Communicator) -> None:
        for count in (COUNT, 2 * COUNT):
            for _ in range(OFTEN):
                comm.all_reduce(numbers(comm, count))
        with pytest.raises(MismatchError, match="different count"):
            comm.all_reduce(numbers(comm, COUNT if comm.rank == 0 else 2 * COUNT))

    run_ranks(2, body)


def test_a_communicator_that_was_aborted_refuses_a_call_whose_form_is_kept() -> None:
    def body(comm: Communicator) -> None:
        for _ in range(OFTEN):
            comm.all_reduce(numbers(comm))
        comm.all_gather_bytes(b"")
        if comm.rank == 0:
            comm.abort("enough")
        with pytest.raises(AbortedError, match="enough" if comm.rank == 0 else "rank 0 ended"):
            comm.all_reduce(numbers(comm))

    run_ranks(2, body)
