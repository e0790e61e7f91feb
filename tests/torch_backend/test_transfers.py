"""Transfers between ranks, on CPUs and on GPUs that HIP's runtime simulates on the host. Issuing a transfer never waits
for the peer. The ranks are threads.
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from proxyccl.device.gpu.stream_order import StreamOrder  # noqa: E402
from proxyccl.torch import endpoints, executor  # noqa: E402
from proxyccl.torch.store_bootstrap import StoreBootstrap  # noqa: E402
from support.fakes import torch_on_hip  # noqa: E402
from support.torch_groups import TIMEOUT, run  # noqa: E402

T = TypeVar("T")
LONG = 1 << 20  # elements: more than scratch memory holds


class Ranks:
    """Runs ranks as threads, with tensors on `kind`: "cpu" or "gpu"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def run(self, ranks: int, body: Callable[[Any], T], timeout: timedelta = TIMEOUT) -> list[T]:
        """Runs body(group) on all ranks at the same time. Returns the results by rank, or raises a rank's exception."""
        return run(body, ranks, timeout)

    def tensor(self, rank: int, value: float, count: int = 1000) -> Any:
        """Returns a tensor filled with a value, on the rank's device."""
        tensor = torch.full((count,), value)
        return tensor if self.kind == "cpu" else torch_on_hip.on_gpu(tensor, rank)

    def holds(self, tensor: Any, value: float) -> bool:
        """Waits for the current stream and returns whether all elements equal `value`."""
        return bool(((tensor if self.kind == "cpu" else torch_on_hip.on_cpu(tensor)) == value).all())


@pytest.fixture(params=["cpu", "gpu"])
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    if request.param == "gpu":
        torch_on_hip.use(monkeypatch)
    return Ranks(request.param)


def isend(group: Any, tensor: Any, peer: int) -> Any:
    return group.send([tensor], peer, 0)


def irecv(group: Any, tensor: Any, peer: int) -> Any:
    return group.recv([tensor], peer, 0)


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("batched", [False, True], ids=["one-by-one", "batch"])
def test_a_ring_in_which_each_rank_sends_first(on: Ranks, ranks: int, batched: bool) -> None:
    def body(group: Any) -> None:
        rank = group.rank()
        for count in (1000, LONG):
            out = on.tensor(rank, -1.0, count)
            if batched:
                group.start_coalescing()
            works = [
                isend(group, on.tensor(rank, float(rank), count), (rank + 1) % ranks),
                irecv(group, out, (rank - 1) % ranks),
            ]
            for work in [group.end_coalescing()] if batched else works:
                work.wait()
            assert on.holds(out, (rank - 1) % ranks)

    on.run(ranks, body)


def test_first_uses_in_opposite_orders(on: Ranks) -> None:
    """Each rank begins with a different peer, and either sends or receives first."""
    ranks = 3

    def body(group: Any) -> None:
        rank = group.rank()
        outs = {peer: on.tensor(rank, -1.0, LONG) for peer in range(ranks) if peer != rank}
        peers = sorted(outs, reverse=rank % 2 == 1)
        calls = [lambda p: irecv(group, outs[p], p), lambda p: isend(group, on.tensor(rank, float(rank), LONG), p)]
        if rank == 0:
            calls.reverse()
        works = [call(peer) for call in calls for peer in peers]
        for work in works:
            work.wait()
        for peer, out in outs.items():
            assert on.holds(out, peer)

    on.run(ranks, body)


def torch_class_of(group: Any) -> Any:
    """Returns the class of torch from which the group's class derives. Its calls return Works that torch wraps."""
    return next(base for base in type(group).__mro__ if base.__module__.startswith("torch."))


def test_a_work_that_torch_wraps_knows_when_its_call_ends(on: Ranks) -> None:
    """torch's C++ returns a Work of its own, which has the backend's Work in it."""
    may_come = threading.Event()

    def body(group: Any) -> None:
        if group.rank() == 1:
            assert may_come.wait(60)
            irecv(group, on.tensor(1, -1.0), 0).wait()
            return
        work = torch_class_of(group).send(group, [on.tensor(0, 7.0)], 1, 0)
        assert type(work) is dist.Work
        assert not work.is_completed()
        may_come.set()
        work.wait()
        deadline = time.monotonic() + 60
        while not work.is_completed():  # `wait` on a GPU does not block the host
            assert time.monotonic() < deadline
        if on.kind == "cpu":
            assert torch.futures.wait_all([work.get_future()])

    on.run(2, body)


def test_a_work_that_torch_wraps_has_the_methods_of_the_backends_work(on: Ranks) -> None:
    receives = threading.Event()

    def body(group: Any) -> None:
        if group.rank() == 1:
            assert receives.wait(60)
            isend(group, on.tensor(1, 7.0), 0).wait()
            return
        out = on.tensor(0, -1.0)
        work = torch_class_of(group).recv(group, [out], 1, 0)
        receives.set()
        work.synchronize()
        assert on.holds(out, 7.0)
        assert work.is_success()
        assert work.exception() is None
        assert work.source_rank() == work._source_rank() == 1
        assert work.result()[0].data_ptr() == out.data_ptr()

    on.run(2, body)


def test_a_failed_work_that_torch_wraps_has_ended(on: Ranks) -> None:
    def body(group: Any) -> None:
        if group.rank() == 0:
            work = torch_class_of(group).send(group, [on.tensor(0, 7.0)], 1, 0)
            with pytest.raises(dist.DistBackendError):
                work.wait()
            assert work.is_completed()

    on.run(2, body, timeout=timedelta(seconds=2))


def test_works_of_other_backends_are_asked_as_before() -> None:
    class Own(dist.Work):
        pass

    own = Own()
    assert not dist.Work.is_completed(own)  # `own` has no future that could be complete
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    work = group.allreduce([torch.ones(1)])
    work.wait()
    assert work.is_completed()


def test_a_transfer_returns_before_its_peer_comes(on: Ranks) -> None:
    may_come = threading.Event()

    def body(group: Any) -> None:
        if group.rank() == 0:
            works = [isend(group, on.tensor(0, 7.0 + i), 1) for i in range(3)]
            assert not any(work.is_completed() for work in works)
            with pytest.raises(RuntimeError, match=r"did not end within 0.05 s"):
                works[0].wait(timedelta(seconds=0.05))
            assert group.calls.oldest() == "send to rank 1, call 1 of rank 0"
            may_come.set()
            for work in works:
                work.wait()
            return
        assert may_come.wait(60)
        outs = [on.tensor(1, -1.0) for _ in range(3)]
        for out in outs:
            irecv(group, out, 0).wait()
        assert all(on.holds(out, 7.0 + i) for i, out in enumerate(outs))

    on.run(2, body)


def test_many_messages_of_both_directions_are_under_way(on: Ranks) -> None:
    ranks, counts = 4, [1, 70_000, 3, LONG, 5] * 3

    def body(group: Any) -> None:
        rank = group.rank()
        peers = [(rank + 1) % ranks, (rank - 1) % ranks]
        outs = {(peer, i): on.tensor(rank, -1.0, count) for peer in peers for i, count in enumerate(counts)}
        works = []
        for i, count in enumerate(counts):
            works += [isend(group, on.tensor(rank, float(100 * rank + i), count), peer) for peer in peers]
            works += [irecv(group, outs[peer, i], peer) for peer in peers]
        for work in reversed(works):
            work.wait()
        for (peer, i), out in outs.items():
            assert on.holds(out, 100 * peer + i)

    on.run(ranks, body)


@pytest.mark.parametrize("met", [False, True], ids=["first", "after-a-collective"])
def test_a_ring_of_a_new_group(on: Ranks, met: bool) -> None:
    """The new group orders ranks differently than the whole group. With `met`, the whole group has been used before."""
    order = [3, 0, 2]

    def body(group: Any) -> None:
        rank = group.rank()
        if met:
            x = on.tensor(rank, 1.0)
            group.allreduce([x]).wait()
            assert on.holds(x, 4)
        part = group.split(group.get_group_store(), order, None)
        if part is None:
            return
        place, out = part.rank(), on.tensor(rank, -1.0, LONG)
        works = [isend(part, on.tensor(rank, float(rank), LONG), (place + 1) % 3), irecv(part, out, (place - 1) % 3)]
        for work in works:
            work.wait()
        assert on.holds(out, order[place - 1])
        part.shutdown()

    on.run(4, body)


def test_ranks_may_order_transfers_and_collectives_differently(on: Ranks) -> None:
    ranks = 3

    def body(group: Any) -> None:
        rank = group.rank()
        x, out = on.tensor(rank, float(rank)), on.tensor(rank, -1.0, LONG)
        calls = [
            lambda: isend(group, on.tensor(rank, float(rank), LONG), (rank + 1) % ranks),
            lambda: group.allreduce([x]),
            lambda: irecv(group, out, (rank - 1) % ranks),
        ]
        works = [call() for call in calls[rank:] + calls[:rank]]
        for work in works:
            work.wait()
        assert on.holds(x, 3)
        assert on.holds(out, (rank - 1) % ranks)

    on.run(ranks, body)


@pytest.mark.parametrize("met", [False, True], ids=["new", "split"])
def test_groups_of_the_same_ranks_are_first_used_in_any_order(on: Ranks, met: bool) -> None:
    """Ranks first use several groups in different orders, by collectives or transfers. If the whole group has been used
    before (`met`), the groups are split from it.
    """

    def body(group: Any) -> None:
        rank = group.rank()
        if met:
            group.allreduce([on.tensor(rank, 1.0)]).wait()
        parts = [group.split(group.get_group_store(), [0, 1], None) for _ in range(3)]
        sums = [on.tensor(rank, 10.0 + number) for number in range(3)]
        outs = [on.tensor(rank, -1.0) for _ in range(3)]
        calls: list[Callable[[], Any]] = []
        for number, (part, x, out) in enumerate(zip(parts, sums, outs, strict=True)):
            calls += [
                functools.partial(isend, part, on.tensor(rank, 100.0 * number + rank), 1 - rank),
                functools.partial(part.allreduce, [x]),
                functools.partial(irecv, part, out, 1 - rank),
            ]
        works = [call() for call in (calls if rank else reversed(calls))]
        for work in works:
            work.wait()
        for number, (x, out) in enumerate(zip(sums, outs, strict=True)):
            assert on.holds(x, 2 * (10 + number))
            assert on.holds(out, 100 * number + 1 - rank)
        for part in parts:
            part.shutdown()

    on.run(2, body)


def test_a_batch_meets_single_transfers_of_some_ranks(on: Ranks) -> None:
    """One rank of the group makes no transfers."""

    def body(group: Any) -> None:
        rank = group.rank()
        if rank == 2:
            return
        peer, outs = 1 - rank, [on.tensor(rank, -1.0) for _ in range(2)]
        if rank == 0:
            group.start_coalescing()
        works = [irecv(group, out, peer) for out in outs]
        works += [isend(group, on.tensor(rank, 10.0 * rank + i), peer) for i in range(2)]
        if rank == 0:
            assert works == [None] * 4
            works = [group.end_coalescing()]
        for work in works:
            assert work.wait()
        assert all(on.holds(out, 10 * peer + i) for i, out in enumerate(outs))

    on.run(3, body)


@pytest.mark.parametrize("batched", [False, True], ids=["one-by-one", "batch"])
def test_every_rank_and_itself_in_any_order(on: Ranks, batched: bool) -> None:
    ranks = 2

    def body(group: Any) -> None:
        rank = group.rank()
        for receives_first in (False, True):
            outs = {(peer, i): on.tensor(rank, -1.0) for peer in range(ranks) for i in range(2)}
            sends = [(isend, on.tensor(rank, 10.0 * rank + i), peer) for peer, i in outs]
            receives = [(irecv, out, peer) for (peer, _), out in outs.items()]
            if batched:
                group.start_coalescing()
            ordered = [*receives, *sends] if receives_first else [*sends, *receives]
            works = [call(group, tensor, peer) for call, tensor, peer in ordered]
            for work in [group.end_coalescing()] if batched else works:
                work.wait()
            for (peer, i), out in outs.items():
                assert on.holds(out, 10 * peer + i)

    on.run(ranks, body)


def test_a_transfer_to_oneself_without_its_other_half_is_named(on: Ranks) -> None:
    def body(group: Any) -> None:
        rank, out = group.rank(), on.tensor(group.rank(), -1.0)
        group.set_timeout(timedelta(seconds=0.5))
        work = isend(group, out, rank) if rank == 0 else irecv(group, out, rank)
        text = "send of rank 0 to itself: it made no recv" if rank == 0 else "recv of rank 1 to itself: it made no send"
        with pytest.raises(dist.DistBackendError, match=f"Timed out with WaitTimeoutError: {text} within 0.5 s"):
            work.wait()
        group.set_timeout(TIMEOUT)
        works = [isend(group, on.tensor(rank, 1.0, 5), rank), irecv(group, on.tensor(rank, 1.0, 6), rank)]
        for work in works:
            with pytest.raises(ValueError, match=f"rank {rank} sends itself a tensor of 20 bytes and receives one of"):
                work.wait()
        works = [isend(group, on.tensor(rank, 3.0), rank), irecv(group, out, rank)]
        for work in works:
            work.wait()
        assert on.holds(out, 3)

    on.run(2, body)


def test_a_transfer_to_oneself_whose_copy_fails_ends_on_both_sides() -> None:
    def body(group: Any) -> None:
        overlapping = torch.zeros(1).expand(4)  # torch refuses to write to overlapping elements
        for work in [isend(group, torch.ones(4), 0), irecv(group, overlapping, 0)]:
            with pytest.raises(RuntimeError, match="single memory location"):
                work.wait()

    run(body, ranks=1)


def test_threads_of_a_rank_transfer_and_collect_at_once(on: Ranks) -> None:
    """Each thread exchanges data with different peers, because the transfers between two ranks match in order."""
    ranks = 4

    def body(group: Any) -> None:
        rank, errors = group.rank(), []
        barrier = threading.Barrier(ranks)

        def with_peer(peer: int) -> None:
            try:
                barrier.wait(60)
                for i in range(5):
                    out = on.tensor(rank, -1.0)
                    if i % 2:
                        group.start_coalescing()
                    works = [isend(group, on.tensor(rank, 10.0 * rank + i), peer), irecv(group, out, peer)]
                    for work in [group.end_coalescing()] if i % 2 else works:
                        work.wait()
                    assert on.holds(out, 10 * peer + i)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=with_peer, args=(peer,)) for peer in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        for error in errors:
            raise error

    on.run(ranks, body)


def test_a_peer_that_does_not_come_is_named(
    on: Ranks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two transfers, in opposite directions, wait for the same missing peer. Both errors name the peer. Neither the
    peer nor the waiting rank is the group's first.
    """
    others, meetings = threading.Event(), []

    def counted(*arguments: Any) -> StoreBootstrap:
        meetings.append(arguments)
        return StoreBootstrap(*arguments)

    monkeypatch.setattr(endpoints, "StoreBootstrap", counted)

    def body(group: Any) -> None:
        if group.rank() != 1:
            assert others.wait(60)
            return
        works = [isend(group, on.tensor(1, 1.0), 2), irecv(group, on.tensor(1, 1.0), 2)]
        for work in works:
            with pytest.raises(dist.DistBackendError, match=r"WaitTimeoutError: between ranks 1 and 2, .* ranks \[1\]"):
                work.wait()
            assert work.is_completed()
            assert not work.is_success()
        assert len(meetings) == 1  # both transfers waited in one attempt to connect
        others.set()

    with caplog.at_level(logging.ERROR, "proxyccl.torch"):
        on.run(3, body, timeout=timedelta(seconds=2))
    assert "send to rank 2, call 1 of rank 1: between ranks 1 and 2" in caplog.text


def test_a_shutdown_waits_for_transfers_that_were_issued(on: Ranks) -> None:
    """A shutdown waits even for transfers whose peer first connects during the shutdown."""
    ends = threading.Event()

    def body(group: Any) -> None:
        outs = [on.tensor(group.rank(), 7.0 * (1 - group.rank()), LONG) for _ in range(3)]
        if group.rank() == 0:
            for out in outs:
                isend(group, out, 1)
            ends.set()
            group.shutdown()
            return
        assert ends.wait(60)
        for out in outs:
            irecv(group, out, 0).wait()
        assert all(on.holds(out, 7) for out in outs)

    on.run(2, body)


@pytest.mark.parametrize("met", [False, True], ids=["first", "later"])
def test_a_shutdown_does_not_wait_for_a_rank_that_has_left(
    on: Ranks, met: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "LINGER_SECONDS", 0.1)
    has_left = threading.Event()

    def body(group: Any) -> None:
        rank = group.rank()
        first = on.tensor(rank, 1.0)
        group.allreduce([first]).wait()
        # The CPU must wait here, so that no kernel writes to the memory after the test has freed it.
        assert on.holds(first, 2.0)
        if met:
            (irecv if rank else isend)(group, first, 1 - rank).wait()
            assert on.holds(first, 2.0)
        if rank == 0:
            group.shutdown()
            has_left.set()
            return
        out = on.tensor(rank, 1.0)
        assert has_left.wait(60)
        work = irecv(group, out, 0)
        group.shutdown()
        if on.kind == "gpu" and met:  # the shutdown ended the kernel, and no error reports that
            return
        with pytest.raises(dist.DistBackendError, match=r"ClosedError|AbortedError: .*a call waited for a rank that"):
            work.wait(timedelta(seconds=50))

    on.run(2, body)


def test_ranks_that_both_wait_for_a_receive_are_shut_down_soon() -> None:
    begin = time.monotonic()

    def body(group: Any) -> None:
        group.recv([torch.zeros(2)], 1 - group.rank())

    run(body, 2, timeout=timedelta(seconds=20))
    assert time.monotonic() - begin < 10


def test_an_abort_and_a_shutdown_end_the_wait_for_a_first_peer(on: Ranks) -> None:
    def body(group: Any) -> None:
        rank = group.rank()
        work = isend(group, on.tensor(rank, 1.0), (rank + 1) % 3)
        group._timeout = timedelta(seconds=0.1)  # limits the wait in `shutdown`, not the wait for the peer
        end, message = [
            (group.abort, "AbortedError: .*the process group was aborted"),
            (group.shutdown, "ClosedError: the process group was shut down"),
        ][rank % 2]
        end()
        with pytest.raises(dist.DistBackendError, match=message):
            work.wait(timedelta(seconds=50))

    on.run(3, body)


def test_a_failure_of_the_group_ends_the_wait_for_a_first_peer(on: Ranks) -> None:
    have_reduced, waits = threading.Barrier(3), threading.Event()

    def body(group: Any) -> None:
        rank = group.rank()
        group.allreduce([on.tensor(rank, 1.0)]).wait()
        have_reduced.wait(60)
        if rank == 1:
            assert waits.wait(60)
            group.endpoints.made[0].abort("as if a rank had ended")
        elif rank == 2:
            work = irecv(group, on.tensor(rank, -1.0), 1)
            waits.set()
            with pytest.raises(dist.DistBackendError, match="AbortedError: rank 1 ended the communicator: as if"):
                work.wait(timedelta(seconds=50))

    on.run(3, body)


def test_a_transfer_that_the_peer_does_not_match_is_named(on: Ranks) -> None:
    def body(group: Any) -> None:
        rank = group.rank()
        if rank == 0:
            return
        out = on.tensor(rank, -1.0)
        works = [isend(group, on.tensor(rank, 1.0), 3 - rank), irecv(group, out, 3 - rank)]
        for work in works:
            work.wait()
        assert on.holds(out, 1)
        if rank == 1:
            group.set_timeout(timedelta(seconds=1))
            work = irecv(group, out, 2)
            with pytest.raises(dist.DistBackendError, match="Timed out with WaitTimeoutError: between ranks 1 and 2"):
                work.wait(timedelta(seconds=60))

    on.run(3, body)


def test_the_record_of_a_transfer_in_progress_keeps_no_tensors(on: Ranks) -> None:
    """A transfer's record must keep no tensors alive, because the record may exist until the watchdog reads it."""
    if on.kind == "cpu":
        pytest.skip("transfers of CPU tensors tell when they have ended")

    def body(group: Any) -> None:
        rank, transfer = group.rank(), isend if group.rank() == 0 else irecv
        x, y = on.tensor(rank, 1.0), on.tensor(rank, 1.0)
        device, kept = x.device, weakref.ref(x)
        transfer(group, x, 1 - rank).wait()
        assert group.calls.threads.of(device, (1 - rank, rank == 0)).wait_until_idle(60)
        transfer(group, y, 1 - rank).wait()  # In older versions of torch, making a Work finishes the previous Work.
        assert on.holds(y, 1.0)  # `holds` waits for the stream, which freeing the tensors' CPU memory would not do.
        del x
        gc.collect()
        assert kept() is None

    on.run(2, body)


def test_no_two_transfers_share_a_stream(on: Ranks) -> None:
    """No two transfers share a stream even if there are many groups, although torch has only 32 streams."""
    if on.kind == "cpu":
        pytest.skip("CPU tensors have no streams")

    def body(group: Any) -> set[int]:
        rank = group.rank()
        flows = [(peer, sends) for peer in range(20) for sends in (False, True)]
        return {group.calls.gpus.stream_of(torch.device("cuda", rank), flow).cuda_stream for flow in flows}

    first, second = on.run(2, body)
    assert len(first | second) == 80


def test_a_capture_is_told_to_have_transfers_before(on: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    if on.kind == "cpu":
        pytest.skip("a CPU captures no graphs")
    monkeypatch.setattr(StreamOrder, "is_capturing", lambda *_: True)

    def body(group: Any) -> None:
        with pytest.raises(
            RuntimeError, match="a graph is being captured; expected an earlier transfer with that rank"
        ):
            isend(group, on.tensor(group.rank(), 1.0), 1 - group.rank())

    on.run(2, body)
