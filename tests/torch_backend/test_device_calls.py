"""A repeated call on a GPU is one call into C and gives the same result as a call that Python makes. HIP's runtime on
the host simulates the GPUs; the ranks are threads.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from proxyccl import ArgumentError, Communicator  # noqa: E402
from proxyccl.device.gpu.hip_bindings import library  # noqa: E402
from proxyccl.device.gpu.stream_order import StreamOrder  # noqa: E402
from proxyccl.torch._device_calls import ADDED_BETWEEN  # noqa: E402
from support.fakes import torch_on_hip  # noqa: E402
from support.running import wait_for  # noqa: E402
from support.stream_words import check_order, wait_value  # noqa: E402
from support.torch_groups import TIMEOUT, options, run  # noqa: E402

RANKS = 2


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_on_hip.use(monkeypatch)


def on_gpus(body: Callable[[Any], None]) -> None:
    """Runs body(group) on two ranks, each with its own GPU and a current stream on that GPU."""

    def on_rank(group: Any) -> None:
        device = torch.device("cuda", group.rank())
        torch.cuda.current_stream(device)
        group.eager_connect_single_device(device)  # before the ranks have connected, C issues no asynchronous call
        body(group)

    run(on_rank, RANKS)


class IssuedInC:
    """Counts the calls of a group that C has issued since this object was made."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._before = self._so_far

    @property
    def _so_far(self) -> int:
        return self._group.calls.issued_in_c

    @property
    def count(self) -> int:
        return self._so_far - self._before


def communicator(group: Any) -> Communicator:
    return group.endpoints.of_all(torch.device("cuda", group.rank()))


def wait(work: Any, *, waits: bool) -> None:
    """Waits for a call, as torch does. A synchronous call (`waits`) runs on the current stream and has no Work."""
    if waits:
        assert work is None
    else:
        assert work.wait()


def all_reduce(group: Any, x: Any, *, waits: bool = True, op: Any = dist.ReduceOp.SUM) -> Any:
    return group.allreduce([x], options("Allreduce", waits=waits, reduceOp=op))


@pytest.mark.parametrize("waits", [True, False], ids=["synchronous", "asynchronous"])
def test_each_collective_of_new_tensors_is_right_and_prepared_once(waits: bool) -> None:
    size = 24

    def body(group: Any) -> None:
        rank, kept, issued, prepared = group.rank(), [], None, 0
        for turn in (1.0, 2.0, 3.0, 4.0, 5.0):
            if turn == 4.0:  # the first calls may allocate memory, which invalidates prepared calls
                issued, prepared = IssuedInC(group), communicator(group).calls.prepared
            memory = [
                torch.full((count,), turn * (rank + 1)) for count in (size, size, size // 2, size, size // 2, size)
            ]
            kept.append(memory)  # gives later tensors new addresses
            x, moved, share, whole, half, spread = (torch_on_hip.on_gpu(each, rank) for each in memory)
            calls = [
                (group._reduce_scatter_base(share, x, options("ReduceScatter", waits=waits)), share, 3.0),
                (group._allgather_base(whole, half, options("Allgather", waits=waits)), whole, None),
                (group.broadcast([half], options("Broadcast", waits=waits, rootRank=1)), half, 2.0),
                (group.alltoall_base(spread, moved, [], [], options("AllToAll", waits=waits)), spread, None),
                (all_reduce(group, x, waits=waits), x, 3.0),
            ]
            for work, result, expected in calls:
                wait(work, waits=waits)
                values = torch_on_hip.on_cpu(result)
                if expected is None:
                    assert values.reshape(2, -1).tolist() == [[turn] * (size // 2), [2.0 * turn] * (size // 2)]
                else:
                    assert (values == turn * expected).all()
        assert issued is not None
        assert issued.count == 2 * len(calls)
        assert communicator(group).calls.prepared == prepared

    on_gpus(body)


@pytest.mark.parametrize("waits", [True, False], ids=["synchronous", "asynchronous"])
def test_each_call_with_lists_or_splits_is_issued_in_c_with_what_its_memory_holds_then(waits: bool) -> None:
    def body(group: Any) -> None:
        rank = group.rank()
        memory = [torch.empty(12) for _ in range(6)]
        x, y, first, second, whole, uneven = (torch_on_hip.on_gpu(each, rank) for each in memory)
        root = {"rootRank": 1}
        here = rank == 1
        splits = [4, 8] if rank == 0 else [8, 4]  # elements: each rank sends 8 to its peer and 4 to itself
        calls = {
            "all_gather": lambda: group.allgather([[first, second]], [x], options("Allgather", waits=waits)),
            "gather": lambda: group.gather(
                [[first, second]] if here else [], [x], options("Gather", waits=waits, **root)
            ),
            "scatter": lambda: group.scatter(
                [whole], [[x, y]] if here else [], options("Scatter", waits=waits, **root)
            ),
            "all_to_all": lambda: group.alltoall([first, second], [x, y], options("AllToAll", waits=waits)),
            "splits": lambda: group.alltoall_base(uneven, x, splits, splits, options("AllToAll", waits=waits)),
            "reduce": lambda: group.reduce([y], options("Reduce", waits=waits, **root)),
        }
        own, other = torch.arange(12.0) + 100 * rank, torch.arange(12.0) + 100 * (1 - rank)
        expected = {
            "all_gather": [(first, 0.0), (second, 100.0)],
            "gather": [(first, 0.0), (second, 100.0)] if here else [],
            "scatter": [(whole, 100.0 + 1000 * rank)],
            "all_to_all": [(first, 1000.0 * rank), (second, 100.0 + 1000 * rank)],
            "splits": [],
            "reduce": [(y, 2100.0)] if here else [(y, 1000.0)],
        }
        issued = None
        for turn in range(5):
            issued = IssuedInC(group) if turn == 3 else issued  # by turn 3 peers have mapped all arrays
            for name, call in calls.items():
                torch_on_hip.on_cpu(x)
                memory[0].copy_(own + turn)
                memory[1].copy_(own + 1000 + turn)
                for each in memory[2:]:
                    each.fill_(-1.0)
                wait(call(), waits=waits)
                torch_on_hip.on_cpu(x)
                for tensor, base in expected[name]:
                    terms = 2 if name == "reduce" and here else 1
                    values = torch.arange(12.0) * terms + base + turn * terms
                    assert torch.equal(tensor.as_subclass(torch.Tensor), values), (name, turn)
                if name == "splits":
                    mine, theirs = own + turn, other + turn
                    parts = [mine[:4], theirs[:8]] if rank == 0 else [theirs[4:], mine[8:]]
                    assert torch.equal(memory[5], torch.cat(parts)), turn
        assert issued is not None
        assert issued.count == 2 * len(calls)

    on_gpus(body)


def test_the_result_of_a_call_is_what_it_writes_whoever_issues_it() -> None:
    def body(group: Any) -> None:
        x, *outs = (torch_on_hip.on_gpu(torch.ones(8), group.rank()) for _ in range(3))
        for _ in range(3):
            work = group.allgather([outs], [x], options("Allgather", waits=False))
            assert work.wait()
            assert list(map(id, work.result())) == list(map(id, outs))

    on_gpus(body)


def test_a_barrier_that_c_issues_is_waited_for_on_the_host() -> None:
    def body(group: Any) -> None:
        x = torch_on_hip.on_gpu(torch.ones(1 << 18), group.rank())
        all_reduce(group, x)
        opts = options("Barrier")
        opts.device = x.device
        issued = IssuedInC(group)
        for _ in range(4):
            all_reduce(group, x)
            before = issued.count
            work = group.barrier(opts)
            assert work.wait()
            assert work.is_completed()
        assert issued.count == before + 1

    on_gpus(body)


@pytest.mark.parametrize("waits", [True, False], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("in_time", [True, False], ids=["in time", "too late"])
def test_a_barrier_on_the_cpu_waits_for_earlier_work_on_the_groups_gpu(in_time: bool, waits: bool) -> None:
    """torch names a GPU only if the program passes device_ids, and NCCL's barrier always waits for the GPU."""

    def body(group: Any) -> None:
        runtime, device = communicator(group).runtime, torch.device("cuda", group.rank())
        all_reduce(group, torch_on_hip.on_gpu(torch.ones(8), group.rank()))
        stream = torch.cuda.current_stream(device)
        stream.synchronize()
        word = runtime.allocate_pinned(8)
        value = ctypes.c_uint64.from_address(word.ptr)
        wait_value(runtime, word.ptr, 1, stream.cuda_stream)
        earlier = stream.record_event()
        if in_time:
            end = threading.Timer(0.3, setattr, (value, "value", 1))
            end.start()
            group.barrier(options("Barrier", waits=waits)).wait()
            assert earlier.query()
            end.join()
        else:
            with pytest.raises(dist.DistBackendError, match="did not complete the work before a barrier within"):
                group.barrier(options("Barrier", waits=waits, timeout=timedelta(seconds=0.3))).wait()
            value.value = 1

    on_gpus(body)


def test_the_host_does_not_wait_for_a_captured_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured barrier runs in the graph, so the host can't query it. test_on_gpus.py captures a barrier on a GPU."""

    def body(group: Any) -> None:
        opts = options("Barrier")
        opts.device = torch.device("cuda", group.rank())
        assert not group.barrier(opts)._call.blocks

    monkeypatch.setattr(StreamOrder, "is_capturing", lambda *_: True)
    on_gpus(body)


def test_lists_of_other_tensors_and_other_splits_are_made_by_c() -> None:
    def body(group: Any) -> None:
        rank = group.rank()
        x = torch_on_hip.on_gpu(torch.arange(8.0) + 10 * rank, rank)
        outs = [torch_on_hip.on_gpu(torch.full((8,), -1.0), rank) for _ in range(3)]
        opts = options("Allgather")
        group.allgather([outs[:2]], [x], opts)
        issued = IssuedInC(group)
        for chosen in (outs[1:], [outs[1], outs[0]], [outs[0], outs[2]]):
            group.allgather([chosen], [x], opts)
            assert [torch_on_hip.on_cpu(out)[0] for out in chosen] == [0.0, 10.0]
        into = torch_on_hip.on_gpu(torch.empty(8), rank)
        for splits in ([4, 4], [2, 6] if rank == 0 else [6, 2]):
            group.alltoall_base(into, x, splits, splits, options("AllToAll"))
            mine = slice(0, splits[0]) if rank == 0 else slice(splits[0], 8)
            assert (torch_on_hip.on_cpu(into)[mine] == torch_on_hip.on_cpu(x)[mine]).all()
        assert issued.count == 5

    on_gpus(body)


def test_calls_of_transfers_on_two_streams_follow_each_other() -> None:
    """Two exchanges, one on the group's own stream and one on the current stream, run one after another."""

    def body(group: Any) -> None:
        rank, count = group.rank(), 1 << 16
        memory = torch.zeros(count)
        x = torch_on_hip.on_gpu(memory, rank)
        pairs = [[torch_on_hip.on_gpu(torch.empty(count), rank) for _ in range(RANKS)] for _ in range(2)]
        for turn in range(6):
            torch_on_hip.on_cpu(x)
            memory.fill_(10.0 * turn + rank)
            work = group.allgather([pairs[0]], [x], options("Allgather", waits=False))
            group.allgather([pairs[1]], [x], options("Allgather"))
            work.wait()
            for pair in pairs:
                assert [(torch_on_hip.on_cpu(out) == 10.0 * turn + i).all() for i, out in enumerate(pair)] == [True] * 2

    on_gpus(body)


@pytest.mark.parametrize(("captures", "ordered"), [((1, 2), False), ((1, 1), True), ((0, 1, 0), True)])
def test_exchanges_wait_for_each_other_only_within_a_capture_or_outside_captures(
    captures: tuple[int, ...], ordered: bool
) -> None:
    """Each exchange is on a stream of its own, in the capture of this number or, for 0, in none. A wait for an event of
    another capture would invalidate the capture.
    """

    def body(group: Any) -> None:
        rank = group.rank()
        runtime = communicator(group).runtime
        x, y = (torch_on_hip.on_gpu(torch.full((4,), float(rank)), rank) for _ in range(2))
        splits = [1, 3] if rank == 0 else [3, 1]

        def exchange() -> None:
            group.alltoall_base(y, x, splits, splits, options("AllToAll"))

        exchange()
        torch_on_hip.on_cpu(x)
        streams = [runtime.create_stream() for _ in captures]
        word = runtime.allocate_pinned(8)
        wait_value(runtime, word.ptr, 1, streams[0])
        for stream, capture in zip(streams, captures, strict=True):
            library().hipOnHostCapture(ctypes.c_void_p(stream.handle), capture)
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle, x.device)):
                exchange()
            library().hipOnHostCapture(ctypes.c_void_p(stream.handle), 0)
        check_order(runtime, word.ptr, streams[-1], ordered=ordered)
        for stream in streams:
            stream.synchronize()

    on_gpus(body)


def test_a_prepared_reduction_stays_valid_after_one_that_needs_more_scratch_memory() -> None:
    def body(group: Any) -> None:
        rank = group.rank()
        memory = torch.empty(16)
        small, large = torch_on_hip.on_gpu(memory, rank), torch_on_hip.on_gpu(torch.ones(1 << 20), rank)
        opts = options("Reduce", rootRank=0)
        for turn in range(8):
            torch_on_hip.on_cpu(small)
            memory.fill_(rank + 1.0)
            issued = IssuedInC(group)
            group.reduce([small], opts)
            assert (torch_on_hip.on_cpu(small) == (3.0 if rank == 0 else 2.0)).all()
            if turn == 3:
                assert issued.count == 1
                group.reduce([large], opts)  # all ranks but the root allocate larger scratch memory
            if turn == 4 and rank != 0:
                # The prepared call still uses the earlier scratch memory, which stays allocated.
                assert issued.count == 1

    on_gpus(body)


@pytest.mark.parametrize("batched", [False, True], ids=["one-by-one", "batch"])
def test_transfers_are_issued_in_c_with_what_their_memory_holds_then(batched: bool) -> None:
    def body(group: Any) -> None:
        rank, peer = group.rank(), 1 - group.rank()
        memory = torch.empty(24)
        x, out = torch_on_hip.on_gpu(memory, rank), torch_on_hip.on_gpu(torch.empty(24), rank)
        all_reduce(group, out)  # makes the GPU this thread's current GPU
        issued = None
        for turn in range(6):
            torch_on_hip.on_cpu(x)
            memory.fill_(10.0 * turn + rank)
            if batched:
                group.start_coalescing()
            works = [group.send([x], peer, 0), group.recv([out], peer, 0)]
            assert batched or works[1].source_rank() == peer
            for work in [group.end_coalescing()] if batched else works:
                work.wait()
            assert (torch_on_hip.on_cpu(out) == 10.0 * turn + peer).all()
            # A thread of the group issues the first transfers, after the peer has connected; C issues the later ones.
            issued = issued or IssuedInC(group)
        assert issued is not None
        assert issued.count == 10
        assert group._get_sequence_number_for_group() == 1  # the sequence number counts no transfers

    on_gpus(body)


def test_a_transfer_of_an_aborted_group_raises_as_other_calls() -> None:
    all_have_transferred = threading.Barrier(RANKS)

    def body(group: Any) -> None:
        peer = 1 - group.rank()
        x = torch_on_hip.on_gpu(torch.ones(8), group.rank())
        all_reduce(group, x)
        transfer = group.send if group.rank() else group.recv
        for _ in range(3):
            transfer([x], peer, 0).wait()
        torch_on_hip.on_cpu(x)
        all_have_transferred.wait(TIMEOUT.total_seconds())  # the abort must not end the peer's transfer
        issued = IssuedInC(group)
        group.abort()
        with pytest.raises(dist.DistBackendError, match="AbortedError"):
            transfer([x], peer, 0).wait()
        assert issued.count == 0

    on_gpus(body)


def test_a_call_with_other_memory_or_another_operator_is_not_confused() -> None:
    def body(group: Any) -> None:
        rank = group.rank()
        memory = torch.full((64,), 1.0 + rank)
        x = torch_on_hip.on_gpu(memory, rank)
        all_reduce(group, x)
        for other in (x[:32], x.view(8, 8), x[1:], x[32:], x[2:34]):
            torch_on_hip.on_cpu(x)
            memory.fill_(1.0 + rank)
            all_reduce(group, other)
            assert (torch_on_hip.on_cpu(other) == 3.0).all()
            assert memory.sum() == 3.0 * other.numel() + (1.0 + rank) * (64 - other.numel())
        memory.fill_(1.0 + rank)
        for op, value in ((dist.ReduceOp.MAX, 2.0), (dist.ReduceOp.AVG, 2.0), (dist._make_nccl_premul_sum(0.5), 2.0)):
            for _ in range(2):
                all_reduce(group, x, op=op)
                assert (torch_on_hip.on_cpu(x) == value).all()

    on_gpus(body)


def test_synchronous_and_asynchronous_calls_follow_each_other() -> None:
    """Synchronous and asynchronous calls use two streams. The communicator orders the calls of both streams, whether C
    or Python issues them.
    """

    def body(group: Any) -> None:
        rank, value = group.rank(), 1.0
        x = torch_on_hip.on_gpu(torch.ones(1 << 16), rank)

        def launches() -> Any:
            return group.endpoints.of_all(x.device).group.launches

        for _ in range(6):
            work = all_reduce(group, x, waits=False)
            last = [launches().last_stream]
            all_reduce(group, x)  # a program should wait for `work` before this call, but need not
            last.append(launches().last_stream)
            assert last == [group.calls.gpus.of(x.device).own, torch.cuda.current_stream(x.device).cuda_stream]
            work.wait()
            value *= RANKS**2
            assert (torch_on_hip.on_cpu(x) == value).all()

    on_gpus(body)


def test_a_truth_value_is_not_taken_for_a_stream_after_calls_on_streams() -> None:
    def body(group: Any) -> None:
        x, comm = torch_on_hip.on_gpu(torch.ones(8), group.rank()), communicator(group)
        for _ in range(3):
            comm.all_reduce(x, stream=torch.cuda.current_stream(x.device).cuda_stream)
        with pytest.raises(ArgumentError, match="stream: "):
            comm.all_reduce(x, stream=True)
        torch_on_hip.on_cpu(x)

    on_gpus(body)


def test_a_work_is_not_kept_once_the_program_has_its_future() -> None:
    def body(group: Any) -> None:
        x = torch_on_hip.on_gpu(torch.ones(8), group.rank())
        for _ in range(4):
            work = all_reduce(group, x, waits=False)
            future, found = work.get_future(), weakref.ref(work)
            del work
            assert found() is None
            assert future.wait() == [x]
        torch_on_hip.on_cpu(x)

    on_gpus(body)


def test_a_work_with_a_large_result_is_not_kept_once_the_program_has_waited() -> None:
    def body(group: Any) -> None:
        x = torch_on_hip.on_gpu(torch.ones(4096), group.rank())
        for _ in range(4):
            work = all_reduce(group, x, waits=False)
            work.wait()
            found = weakref.ref(work)
            del work
            assert found() is None
        torch_on_hip.on_cpu(x)

    on_gpus(body)


def test_a_work_of_several_calls_keeps_the_tensors_and_not_the_list_of_the_program() -> None:
    def body(group: Any) -> None:
        tensors = [torch_on_hip.on_gpu(torch.ones(size), group.rank()) for size in (8, 12)]
        for _ in range(2):
            given = list(tensors)
            work = group.allreduce_coalesced(given, options("AllreduceCoalesced", waits=False))
            given.clear()
            assert [tensor.numel() for tensor in work.result()] == [8, 12]
            assert [tensor.numel() for tensor in work.get_future().wait()] == [8, 12]
        torch_on_hip.on_cpu(tensors[0])

    on_gpus(body)


def test_in_a_capture_the_future_of_several_calls_joins_their_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the program then does not wait for the future, no stream of torch's is left in the capture."""

    def body(group: Any) -> None:
        runtime = communicator(group).runtime
        tensors = [torch_on_hip.on_gpu(torch.ones(size), group.rank()) for size in (8, 12)]
        all_reduce(group, tensors[0])
        torch_on_hip.on_cpu(tensors[0])
        word, other = runtime.allocate_pinned(8), runtime.create_stream()
        wait_value(runtime, word.ptr, 1, torch.cuda.current_stream(tensors[0].device).cuda_stream)
        group.start_coalescing()
        for tensor in tensors:
            all_reduce(group, tensor, waits=False)
        work = group.end_coalescing()
        with torch.cuda.stream(torch.cuda.ExternalStream(other.handle, tensors[0].device)):
            future = work.get_future()
        check_order(runtime, word.ptr, other, ordered=True)
        assert [tensor.numel() for tensor in future.wait()] == [8, 12]
        torch_on_hip.on_cpu(tensors[0])

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    on_gpus(body)


def test_the_future_of_a_call_that_was_never_queued_has_the_error() -> None:
    def on_rank(group: Any) -> None:
        if group.rank() == 1:
            return  # the group can't be connected
        torch.cuda.current_stream(torch.device("cuda", 0))
        work = all_reduce(group, torch_on_hip.on_gpu(torch.ones(8), 0), waits=False)
        # torch's C++ alone completes the future of collect_all, so this future shows which errors C++ sees.
        for future in (work.get_future(), torch.futures.collect_all([work.get_future()])):
            with pytest.raises(RuntimeError, match="did not come in time"):
                future.wait()
        with pytest.raises(RuntimeError):
            work.wait()
        for future in (work.get_future(), torch.futures.collect_all([work.get_future()])):
            with pytest.raises(RuntimeError):
                future.wait()

    run(on_rank, RANKS, timedelta(seconds=2))


def test_memory_is_recorded_on_the_groups_stream_unless_somebody_has_waited_or_an_uncaptured_call_has_ended() -> None:
    def body(group: Any) -> None:
        recorded: list[Any] = []

        class Noted(torch.Tensor):
            is_cuda, is_cpu, device = True, False, torch.device("cuda", group.rank())

            def get_device(self) -> int:
                return self.device.index

            def record_stream(self, stream: Any) -> None:
                recorded.append(stream.cuda_stream)

        def free(works: list[Any]) -> None:
            """Frees the Work in a list, to which nothing else refers."""
            group.calls.unwaited.forget(works.pop())
            all_reduce(group, x, waits=False).wait()  # making a Work drops Works that were forgotten
            gc.collect()

        x = torch.ones(8).as_subclass(Noted)
        runtime = communicator(group).runtime
        word, own = runtime.allocate_pinned(8), group.calls.gpus.of(x.device).own
        for turn in range(3):
            works = [all_reduce(group, x, waits=False)]
            works[0].wait()
            free(works)
            for capture in (0, 1):
                assert len(recorded) == 2 * turn
                library().hipOnHostCapture(ctypes.c_void_p(own), capture)
                works = [all_reduce(group, x, waits=False)]
                library().hipOnHostCapture(ctypes.c_void_p(own), 0)
                wait_for(works[0].is_completed, "the end of the call")
                free(works)
            wait_value(runtime, word.ptr, turn + 1, torch.cuda.current_stream(x.device).cuda_stream)
            free([all_reduce(group, x, waits=False)])
            ctypes.c_uint32.from_address(word.ptr).value = turn + 1
            assert recorded == [own] * (2 * turn + 2)
            torch.cuda.current_stream(x.device).synchronize()

    on_gpus(body)


def test_a_call_of_an_aborted_group_raises_whether_it_waits_or_not() -> None:
    all_have_called = threading.Barrier(RANKS)

    def body(group: Any) -> None:
        x = torch_on_hip.on_gpu(torch.ones(8), group.rank())
        for _ in range(3):
            all_reduce(group, x)
        torch_on_hip.on_cpu(x)
        all_have_called.wait(TIMEOUT.total_seconds())  # the abort must not end the peer's calls
        issued = IssuedInC(group)
        group.abort()
        for waits in (True, False):
            with pytest.raises(dist.DistBackendError, match="AbortedError"):
                all_reduce(group, x, waits=waits)
        assert issued.count == 0

    on_gpus(body)


def test_a_call_after_shutdown_is_refused() -> None:
    def body(group: Any) -> None:
        x = torch_on_hip.on_gpu(torch.ones(8), group.rank())
        for _ in range(3):
            all_reduce(group, x)
        torch_on_hip.on_cpu(x)
        group.shutdown()
        with pytest.raises(dist.DistBackendError, match="ClosedError"):
            all_reduce(group, x)

    on_gpus(body)


@pytest.mark.parametrize("waits", [True, False], ids=["synchronous", "asynchronous"])
def test_few_coalesced_tensors_are_calls_that_c_issues(waits: bool) -> None:
    def body(group: Any) -> None:
        rank = group.rank()
        memory = [torch.empty(8), torch.empty(12)]
        tensors = [torch_on_hip.on_gpu(each, rank) for each in memory]
        issued = None
        for turn in (1.0, 2.0):
            for each in memory:
                each.fill_(turn * (rank + 1))
            work = group.allreduce_coalesced(tensors, options("AllreduceCoalesced", waits=waits))
            wait(work, waits=waits)
            assert waits or [tensor.numel() for tensor in work.result()] == [8, 12]
            assert all((torch_on_hip.on_cpu(each) == 3.0 * turn).all() for each in tensors)
            issued = issued or IssuedInC(group)
        assert issued is not None
        assert issued.count == len(tensors)

    on_gpus(body)


@pytest.mark.parametrize("waits", [True, False], ids=["synchronous", "asynchronous"])
def test_coalesced_calls_of_which_only_the_first_were_made_before(waits: bool) -> None:
    def body(group: Any) -> None:
        rank = group.rank()
        memory = [torch.empty(size) for size in (8, 12, 20)]
        first, second, third = (torch_on_hip.on_gpu(each, rank) for each in memory)
        issued = None
        for tensors in ([first, second], [first, third], [first, second, third]):
            for each in memory:
                each.fill_(rank + 1.0)
            work = group.allreduce_coalesced(tensors, options("AllreduceCoalesced", waits=waits))
            wait(work, waits=waits)
            assert waits or [tensor.numel() for tensor in work.result()] == [tensor.numel() for tensor in tensors]
            assert all((torch_on_hip.on_cpu(tensor) == 3.0).all() for tensor in tensors)
            issued = issued or IssuedInC(group)
        assert issued is not None
        assert issued.count == 1 + 3

    on_gpus(body)


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist._make_nccl_premul_sum(1.0)], ids=["in-c", "in-python"])
def test_synchronous_calls_are_known_to_have_ended_but_the_last_ones(op: Any) -> None:
    def body(group: Any) -> None:
        x = torch_on_hip.on_gpu(torch.ones(8), group.rank())
        for _ in range(ADDED_BETWEEN + 4):
            all_reduce(group, x, op=op)
        torch_on_hip.on_cpu(x)
        number, _ = group.calls.under_way.oldest()
        assert number > ADDED_BETWEEN

    on_gpus(body)


def test_calls_are_numbered_in_their_order_whoever_issues_them() -> None:
    def body(group: Any) -> None:
        x = torch_on_hip.on_gpu(torch.ones(8), group.rank())
        for number, waits in enumerate((True, True, False, True, False, False), 1):
            work = all_reduce(group, x, waits=waits)
            assert group._get_sequence_number_for_group() == number
            if not waits:
                work.wait()
        all_reduce(group, x)
        torch_on_hip.on_cpu(x)

    on_gpus(body)


@pytest.mark.parametrize("profiles", [False, True])
def test_python_makes_the_calls_that_a_profiler_shows(profiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd.profiler, "_is_profiler_enabled", profiles)

    def body(group: Any) -> None:
        x = torch_on_hip.on_gpu(torch.ones(8), group.rank())
        all_reduce(group, x)
        issued = IssuedInC(group)
        all_reduce(group, x)
        assert issued.count == (0 if profiles else 1)
        assert (torch_on_hip.on_cpu(x) == 4).all()

    on_gpus(body)
