"""The process group's calls on CPU tensors. The ranks are threads of the test's process."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from proxyccl import RuntimeUnavailableError, SizeTable, WaitTimeoutError  # noqa: E402
from proxyccl.device.errors import DriverError  # noqa: E402
from proxyccl.torch import Options, ProcessGroupProxyCCL, StoreBootstrap, flight_recorder, process_group  # noqa: E402
from proxyccl.torch._device_calls import ADDED_BETWEEN  # noqa: E402
from proxyccl.torch.endpoints import Settings  # noqa: E402
from proxyccl.torch.tensor_collectives import REDUCIBLE  # noqa: E402
from proxyccl.torch.under_way import UnderWay  # noqa: E402
from support.torch_groups import RANKS, TIMEOUT, options, run, torch_group  # noqa: E402

FLOATS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)
MOVED = (*sorted(REDUCIBLE, key=str), torch.bool, torch.complex64, *FLOATS)


def all_reduced(group: Any, tensor: Any, op: Any = dist.ReduceOp.SUM) -> Any:
    group.allreduce([tensor], options("Allreduce", reduceOp=op)).wait()
    return tensor


@pytest.mark.parametrize("dtype", sorted(REDUCIBLE, key=str), ids=str)
def test_all_reduce_of_every_type(dtype: Any) -> None:
    def body(group: Any) -> None:
        values = torch.tensor([[1, 2], [3, 4]]) + group.rank()
        total = torch.tensor([[6, 9], [12, 15]])
        assert torch.equal(all_reduced(group, values.to(dtype, copy=True)), total.to(dtype))
        assert torch.equal(all_reduced(group, values.to(dtype, copy=True).t()), total.to(dtype).t())  # not contiguous
        assert torch.equal(
            all_reduced(group, values.to(dtype), dist.ReduceOp.MAX), (torch.tensor([[3, 4], [5, 6]])).to(dtype)
        )

    run(body)


KINDS = dist.ReduceOp.RedOpType
BITS = (KINDS.BAND, KINDS.BOR, KINDS.BXOR)
HALVES, TRIPLES = torch.tensor([0.5]), torch.tensor([3])
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
SHOWN: dict[Any, tuple[Any, ...]] = {
    torch.float16: (KINDS.SUM, KINDS.PREMUL_SUM),
    torch.int32: (KINDS.SUM, KINDS.BAND, KINDS.PREMUL_SUM),
    torch.bool: tuple(KINDS.__members__.values()),
    torch.complex32: (KINDS.SUM, KINDS.AVG, KINDS.PREMUL_SUM),
}
"""The operators whose results are checked without --full, because each kernel has tests of its own."""


def reduced(dtype: Any, kind: Any, factor: Any, xs: Any) -> Any:
    """Returns the expected reduction of `xs` (one row per rank), or None if the operator does not support the type."""
    integers = not (dtype.is_floating_point or dtype.is_complex)
    if kind in BITS and not integers:
        return None
    if dtype.is_complex and kind not in (KINDS.SUM, KINDS.AVG, KINDS.PREMUL_SUM):
        return None
    if dtype is torch.bool:
        parity = functools.reduce(torch.logical_xor, xs)
        every, some = (KINDS.PRODUCT, KINDS.MIN, KINDS.BAND), (KINDS.SUM, KINDS.MAX, KINDS.BOR)
        return {**dict.fromkeys(every, xs.all(0)), **dict.fromkeys(some, xs.any(0)), KINDS.BXOR: parity}.get(kind)
    if kind == KINDS.PREMUL_SUM and integers and factor is not TRIPLES:
        return None
    wide = xs.to(torch.complex128 if dtype.is_complex else torch.int64 if integers else torch.float64)
    if kind in BITS:
        combine = (torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor)[BITS.index(kind)]
        return functools.reduce(combine, wide).to(dtype)
    if kind == KINDS.PREMUL_SUM:
        return (wide * factor).sum(0).to(dtype)
    if kind == KINDS.AVG:
        return (torch.div(wide.sum(0), RANKS, rounding_mode="trunc") if integers else wide.sum(0) / RANKS).to(dtype)
    found = {KINDS.SUM: wide.sum, KINDS.PRODUCT: wide.prod, KINDS.MIN: wide.amin, KINDS.MAX: wide.amax}[kind]
    return found(0).to(dtype)


def copied(x: Any) -> Any:
    """Returns a copy with the same bytes. Cloning a tensor of bools would change each byte to 0 or 1."""
    return x.view(torch.uint8).clone().view(x.dtype)


def reductions(group: Any, op: Any, x: Any) -> Iterator[Callable[[], Any]]:
    """Yields a function for each collective that reduces `x`. The function returns this rank's part of the result."""
    rank, count = group.rank(), x.numel()
    own, rows = slice(rank * count // RANKS, (rank + 1) * count // RANKS), x.view(RANKS, -1)

    def all_reduce() -> Any:
        return all_reduced(group, copied(x), op)

    def reduce() -> Any:
        out = copied(x)
        group.reduce([out], options("Reduce", reduceOp=op, rootRank=1)).wait()
        return out if rank == 1 else None

    def coalesced() -> Any:
        outs = [copied(x), copied(x[:2])]
        group.allreduce_coalesced(outs, options("AllreduceCoalesced", reduceOp=op)).wait()
        assert same(outs[0][:2], outs[1])
        return outs[0]

    def scatter() -> Any:
        out = torch.empty_like(x[own])
        group.reduce_scatter_single(out, copied(x), options("ReduceScatter", reduceOp=op)).wait()
        return own, out

    def scatter_lists() -> Any:
        out = torch.empty_like(x[own])
        group.reduce_scatter([out], [list(copied(rows))], options("ReduceScatter", reduceOp=op)).wait()
        return own, out

    def scatter_coalesced() -> Any:
        outs = [torch.empty_like(x[own]) for _ in range(2)]
        group.reduce_scatter_single_coalesced(outs, [copied(x)] * 2, options("ReduceScatter", reduceOp=op)).wait()
        assert same(*outs)
        return own, outs[1]

    yield from (all_reduce, reduce, coalesced, scatter, scatter_lists, scatter_coalesced)


def same(a: Any, b: Any) -> bool:
    """Returns whether two tensors have the same type and the same bytes."""
    return a.dtype == b.dtype and bytes(a.view(torch.uint8).tolist()) == bytes(b.view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", [*sorted(REDUCIBLE, key=str), torch.bool, *COMPLEX, torch.float8_e5m2], ids=str)
def test_every_operator_reduces_or_refuses_every_type_in_every_call(dtype: Any, pytestconfig: pytest.Config) -> None:
    """No result needs rounding. A bool's byte may have any value; all values but 0 are true."""
    kinds = [(kind, None) for kind in KINDS.__members__.values() if kind != KINDS.PREMUL_SUM]
    kinds += [(KINDS.PREMUL_SUM, factor) for factor in (0.5, HALVES, TRIPLES)]
    inputs = torch.tensor([[4, 2, 6, 0, 2, 8], [2, 4, 2, 0, 2, 0], [6, 6, 4, 0, 2, 4]])
    if dtype is torch.bool:
        xs = (inputs.to(torch.uint8)).view(torch.bool)
    else:
        xs = (inputs * (1 + 2j)).to(torch.complex64).to(dtype) if dtype.is_complex else inputs.to(dtype)

    def body(group: Any) -> None:
        for kind, factor in kinds:
            op = dist.ReduceOp(kind) if factor is None else dist._make_nccl_premul_sum(factor)
            known = dtype in REDUCIBLE or dtype is torch.bool or dtype.is_complex
            expected = reduced(dtype, kind, factor, xs) if known else None
            if expected is not None and kind not in SHOWN.get(dtype, ()) and not pytestconfig.getoption("--full"):
                continue
            for call in reductions(group, op, xs[group.rank()]):
                if expected is None:
                    with pytest.raises((TypeError, ValueError), match=f"{kind.name}|{dtype}"):
                        call()
                    continue
                result = call()
                where, out = result if isinstance(result, tuple) else (slice(None), result)
                assert out is None or same(out, expected[where]), (kind, factor, call.__name__, out, expected)

    run(body)


@pytest.mark.parametrize(
    ("tensor", "op", "error", "message"),
    [
        (torch.ones(2), dist.ReduceOp.BAND, ValueError, "BAND of torch.float32 is not supported; expected integers"),
        (torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX, ValueError, "op: MAX of complex is not supported"),
        (torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG, ValueError, "op: AVG of bool is not supported"),
        (torch.ones(2).int(), dist._make_nccl_premul_sum(0.5), ValueError, "PREMUL_SUM by 0.5 .*; expected a factor"),
        (torch.ones(2, dtype=torch.float8_e5m2), dist.ReduceOp.SUM, TypeError, "float8_e5m2 can't be reduced"),
        (torch.eye(2).to_sparse(), dist.ReduceOp.SUM, RuntimeError, "expected a dense tensor"),
    ],
    ids=["bits", "complex", "bool", "factor", "float8", "sparse"],
)
def test_what_can_not_be_reduced_is_refused(tensor: Any, op: Any, error: type[Exception], message: str) -> None:
    def body(group: Any) -> None:
        with pytest.raises(error, match=message):
            all_reduced(group, tensor.clone(), op)
        assert all_reduced(group, torch.ones(1)).item() == RANKS  # the group stays usable

    run(body)


def test_an_asynchronous_call_may_change_an_inference_tensor() -> None:
    def body(group: Any) -> None:
        with torch.inference_mode():
            x = torch.tensor([group.rank() == 1, False])  # a bool is reduced in a copy
            group.allreduce([x], options("Allreduce")).wait()
            assert x.tolist() == [True, False]

    run(body)


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_every_type_is_moved(dtype: Any) -> None:
    def body(group: Any) -> None:
        rank = group.rank()

        def of(source: int, size: int = 5) -> Any:
            return torch.arange(size).add(10 * source).to(torch.uint8).repeat_interleave(16).view(dtype)

        size = len(of(0))
        tensor = of(rank)
        group.broadcast([tensor], options("Broadcast", rootRank=1)).wait()
        assert tensor.view(torch.uint8).equal(of(1).view(torch.uint8))
        whole = torch.empty(RANKS * size, dtype=dtype)
        group._allgather_base(whole, of(rank), options("Allgather")).wait()
        for peer, part in enumerate(whole.chunk(RANKS)):
            assert part.view(torch.uint8).equal(of(peer).view(torch.uint8))

    run(body)


def test_lists_may_hold_tensors_of_different_sizes() -> None:
    def body(group: Any) -> None:
        rank = group.rank()
        outs = [torch.zeros(peer + 1, 2) for peer in range(RANKS)]
        outs[1] = torch.zeros(2, 2).t()  # not contiguous
        group.allgather([outs], [torch.full((rank + 1, 2), float(rank))], options("Allgather")).wait()
        assert all((out == peer).all() for peer, out in enumerate(outs))

        sent = [torch.full((rank + 2 * peer,), float(rank)) for peer in range(RANKS)]
        received = [torch.zeros(peer + 2 * rank) for peer in range(RANKS)]
        group.alltoall(received, sent, options("AllToAll")).wait()
        assert all((out == peer).all() for peer, out in enumerate(received))

        out = torch.zeros(rank + 1)
        parts = [torch.full((peer + 1,), float(peer)) for peer in range(RANKS)]
        group.reduce_scatter([out], [parts], options("ReduceScatter")).wait()
        assert (out == RANKS * rank).all()

    run(body)


def test_gather_scatter_and_reduce_have_a_root() -> None:
    def body(group: Any) -> None:
        rank, root = group.rank(), 1
        outs = [[torch.zeros(2) for _ in range(RANKS)]] if rank == root else []
        group.gather(outs, [torch.full((2,), float(rank))], options("Gather", rootRank=root)).wait()
        if rank == root:
            assert [out[0].item() for out in outs[0]] == [0, 1, 2]
        out = torch.zeros(2)
        ins = [[torch.full((2,), float(peer)) for peer in range(RANKS)]] if rank == root else []
        group.scatter([out], ins, options("Scatter", rootRank=root)).wait()
        assert (out == rank).all()
        tensor = torch.ones(3)
        group.reduce([tensor], options("Reduce", rootRank=root)).wait()
        assert (tensor == (RANKS if rank == root else 1)).all()

    run(body)


@pytest.mark.skipif(not process_group.IS_BACKEND, reason="torch before 2.15 has no gather_single")
@pytest.mark.parametrize("shape", [(4,), (2, 2), (), (0,)], ids=str)
def test_torch_gathers_in_one_tensor(shape: tuple[int, ...]) -> None:
    process_group.register()

    def body(group: Any) -> None:
        wrapper, rank, root = torch_group(group), group.rank(), 1
        x, opts = torch.full(shape, float(rank)), options("Gather", rootRank=root)
        out = torch.zeros(RANKS, *shape) if rank == root else torch.empty(0)
        wrapper.gather_single(out, x, opts).wait()
        if rank == root:
            assert torch.equal(out, torch.stack([torch.full(shape, float(peer)) for peer in range(RANKS)]))
        with pytest.raises(RuntimeError, match="is invalid for input of size"):
            wrapper.gather_single(torch.zeros(RANKS * 4 + 1), x, options("Gather", rootRank=rank))

    run(body)


def test_all_to_all_single_with_splits() -> None:
    def body(group: Any) -> None:
        rank = group.rank()
        even = torch.zeros(RANKS, 2)
        group.alltoall_base(even, torch.full((RANKS, 2), float(rank)), [], [], options("AllToAll")).wait()
        assert even[:, 0].tolist() == [0, 1, 2]
        sent, received = [rank, 0, 2], [[0, 0, 2], [1, 0, 2], [2, 0, 2]]
        splits = [received[peer][rank] for peer in range(RANKS)]
        out = torch.zeros(sum(splits), 2)
        group.alltoall_base(out, torch.full((sum(sent), 2), float(rank)), splits, sent, options("AllToAll")).wait()
        assert out[:, 0].tolist() == [float(peer) for peer, n in enumerate(splits) for _ in range(n)]
        with pytest.raises(RuntimeError, match="Split sizes doesn't match"):
            group.alltoall_base(out, torch.zeros(4, 2), splits, [1, 1, 1], options("AllToAll"))

    run(body)


def test_all_to_all_in_place_is_refused_with_splits_and_lists() -> None:
    def body(group: Any) -> None:
        x = torch.arange(2.0 * RANKS)
        with pytest.raises(ValueError, match="out: overlaps another array"):
            group.all_to_all_single(x, x, [2] * RANKS, [2] * RANKS, options("AllToAll")).wait()
        with pytest.raises(ValueError, match="out: overlaps another array"):
            group.alltoall(list(x.chunk(RANKS)), list(x.chunk(RANKS)), options("AllToAll")).wait()
        assert x.tolist() == list(range(2 * RANKS))

    run(body)


@pytest.mark.host_only("with a GPU the ids are its own")
def test_a_barrier_ignores_ids_of_devices_without_a_gpu() -> None:
    run(lambda group: group.barrier(options("Barrier", device_ids=[group.rank()])).wait())


def test_coalesced_calls() -> None:
    def body(group: Any) -> None:
        rank = group.rank()
        tensors = [torch.ones(3), torch.ones(2, dtype=torch.int32), torch.full((2, 2), 2.0)]
        group.allreduce_coalesced(tensors, options("AllreduceCoalesced")).wait()
        assert [tensor.flatten()[0].item() for tensor in tensors] == [RANKS, RANKS, 2 * RANKS]
        outs = [torch.zeros(RANKS * 2), torch.zeros(RANKS, dtype=torch.int8)]
        ins = [torch.full((2,), float(rank)), torch.full((1,), rank, dtype=torch.int8)]
        group.all_gather_single_coalesced(outs, ins, options("Allgather")).wait()
        assert outs[0].tolist() == [0, 0, 1, 1, 2, 2]
        assert outs[1].tolist() == [0, 1, 2]
        shares = [torch.zeros(1), torch.zeros(2)]
        wholes = [torch.arange(3.0), torch.arange(6.0)]
        group.reduce_scatter_single_coalesced(shares, wholes, options("ReduceScatter")).wait()
        assert shares[0].tolist() == [RANKS * rank]
        assert shares[1].tolist() == [RANKS * 2.0 * rank, RANKS * (2.0 * rank + 1)]

    run(body)


@pytest.mark.parametrize("tensors", ["one", "several"])
def test_outputs_of_another_size_or_type_are_refused(tensors: str) -> None:
    """The group stays usable, because it refuses the call before data moves."""
    x, whole = torch.ones(2), torch.ones(2 * RANKS)

    def gathers(group: Any, out: Any, x: Any) -> Any:
        if tensors == "one":
            return group.all_gather_single(out, x)
        return group.all_gather_single_coalesced([whole.clone(), out], [torch.ones(2), x])

    def scatters(group: Any, out: Any, x: Any) -> Any:
        if tensors == "one":
            return group.reduce_scatter_single(out, x)
        return group.reduce_scatter_single_coalesced([torch.ones(1), out], [torch.ones(RANKS), x])

    def body(group: Any) -> None:
        with pytest.raises(ValueError, match="output tensor size must be equal to world_size times"):
            gathers(group, whole[1:], x)
        with pytest.raises(ValueError, match="input tensor must be the same size as output size times world size"):
            scatters(group, whole[:3], whole)
        for out, call, source in ((whole.bfloat16(), gathers, x), (x.bfloat16(), scatters, whole)):
            with pytest.raises(TypeError, match="must have the same type as input tensor"):
                call(group, out, source)
        parts = [torch.ones(2 + peer) for peer in range(RANKS)]
        with pytest.raises(ValueError, match=f"output: has 1 elements; expected {2 + group.rank()}"):
            group.reduce_scatter([torch.zeros(1)], [parts], options("ReduceScatter"))
        assert all_reduced(group, torch.ones(1)).item() == RANKS

    run(body)


def test_one_rank_gathers_coalesced_tensors_of_several_types() -> None:
    def body(group: Any) -> None:
        ins = [torch.tensor([1, 2, 3], dtype=torch.uint8), torch.tensor([4.0])]
        outs = [torch.zeros_like(x) for x in ins]
        group.all_gather_single_coalesced(outs, ins, options("Allgather")).wait()
        assert all(map(torch.equal, outs, ins))

    run(body, ranks=1)


def test_calls_between_the_coalescing_calls_end_with_the_last() -> None:
    def body(group: Any) -> None:
        tensor = torch.ones(4)
        group.start_coalescing()
        group.allreduce([tensor], options("Allreduce", waits=False))
        group.broadcast([tensor], options("Broadcast", waits=False))
        group.end_coalescing().wait()
        assert (tensor == RANKS).all()

    run(body)


def test_transfers_after_a_batch_that_failed_are_not_coalesced() -> None:
    """After an error, torch's batch_isend_irecv does not call end_coalescing."""

    def body(group: Any) -> None:
        rank, out = group.rank(), torch.zeros(4)
        group.start_coalescing()
        group.send([torch.full((4,), float(rank))], (rank + 1) % RANKS)
        with pytest.raises(ValueError, match="expected 0 to"):
            group.recv([out], RANKS)
        group.recv([out], (rank - 1) % RANKS).wait()
        assert (out == (rank - 1) % RANKS).all()

    run(body)


def test_an_asynchronous_call_returns_before_the_others_come() -> None:
    last_may_come = threading.Event()

    def body(group: Any) -> None:
        tensor = torch.ones(4)
        if group.rank() == RANKS - 1:
            assert last_may_come.wait(30)
        works = [group.allreduce([tensor], options("Allreduce", waits=False)) for _ in range(3)]
        if group.rank() == 0:
            assert not any(work.is_completed() for work in works)
            last_may_come.set()
        assert works[-1].wait()
        # Calls run in order, so the last one ends last.
        assert all(work.is_completed() and work.is_success() for work in works)
        assert (tensor == RANKS**3).all()
        assert works[-1].get_future().wait() == [tensor]

    run(body)


@pytest.mark.parametrize("nest", [list, lambda tensors: {"of a rank": tensors}, lambda tensors: (tensors, [tensors])])
def test_a_future_of_a_gpu_finds_the_tensors_of_any_value(nest: Callable[[list[torch.Tensor]], Any]) -> None:
    """The backend replaces the function by which torch finds a value's tensors."""
    tensor = torch.ones(2)
    found = torch._jit_internal._extract_tensors(nest([tensor]))
    assert {id(each) for each in found} == {id(tensor)}


def test_callbacks_of_futures_may_make_calls_and_wait_for_the_futures_of_those() -> None:
    """DDP's hooks make calls in callbacks. In this test, callbacks make calls whose callbacks also make calls."""
    last_may_come = threading.Event()

    def body(group: Any) -> None:
        tensor, ended = torch.ones(4), threading.Event()

        def again(more: int) -> Any:
            future = group.allreduce([tensor], options("Allreduce", waits=False)).get_future()
            return future.then(lambda _: again(more - 1).wait()) if more else future

        if group.rank() == RANKS - 1:
            assert last_may_come.wait(30)
        again(2).add_done_callback(lambda _: ended.set())
        last_may_come.set()
        assert ended.wait(30)
        assert (tensor == RANKS**3).all()

    run(body)


def test_the_result_of_a_call_is_what_it_writes() -> None:
    """The Work's result and the future's value are the call's outputs, without its inputs."""

    def body(group: Any) -> None:
        x, root = torch.ones(RANKS), {"rootRank": 0}
        outs = [torch.zeros(RANKS) for _ in range(RANKS)]
        part, whole = torch.zeros(1), torch.zeros(RANKS**2)
        gathered = outs if group.rank() == 0 else []
        sources = [outs] if group.rank() == 0 else []
        peers = (group.rank() + 1) % RANKS, (group.rank() - 1) % RANKS
        calls = {
            "all_reduce": (group.allreduce([x], options("Allreduce", waits=False)), [x]),
            "all_gather": (group.allgather([outs], [x], options("Allgather", waits=False)), outs),
            "all_gather_single": (group.all_gather_single(whole, x, options("Allgather", waits=False)), [whole]),
            "gather": (group.gather([gathered], [x], options("Gather", waits=False, **root)), gathered),
            "scatter": (group.scatter([x], sources, options("Scatter", waits=False, **root)), [x]),
            "reduce_scatter": (group.reduce_scatter_single(part, x, options("ReduceScatter", waits=False)), [part]),
            "all_to_all": (group.alltoall(outs, [x] * RANKS, options("AllToAll", waits=False)), outs),
            "barrier": (group.barrier(options("Barrier", waits=False)), []),
            "send": (group.send([torch.ones(1)], peers[0]), []),
            "recv": (group.recv([part], peers[1]), [part]),
        }
        for name, (work, written) in calls.items():
            for found in (work.result(), work.get_future().wait()):
                assert list(map(id, found)) == list(map(id, written)), name

    run(body)


@pytest.mark.parametrize("rank", [RANKS, -1])
def test_a_rank_that_does_not_exist_is_refused_at_once(rank: int) -> None:
    # No other rank makes its group, so any wait would time out.
    group = ProcessGroupProxyCCL(dist.HashStore(), 0, RANKS, TIMEOUT)
    x = torch.ones(1)
    refused = pytest.raises(ValueError, match=f"{rank} is not a rank of the group; expected 0 to {RANKS - 1}")
    for transfer in (group.send, group.recv):
        with refused:
            transfer([x], rank, 0)
    group.start_coalescing()
    with refused:
        group.send([x], rank, 0)
    with pytest.raises(RuntimeError, match="expected a start_coalescing before it, and no failed transfer since"):
        group.end_coalescing()
    with refused:
        group.broadcast([x], options("Broadcast", rootRank=rank))
    with refused:
        group.reduce([x], options("Reduce", rootRank=rank))
    with refused:
        group.gather([], [x], options("Gather", rootRank=rank))
    with refused:
        group.scatter([x], [], options("Scatter", rootRank=rank))
    group.shutdown()


def test_sends_and_receives_cross() -> None:
    """Each rank sends to both neighbours before it receives, in single calls and coalesced. The data does not fit into
    scratch memory.
    """
    size = 1 << 20

    def body(group: Any) -> None:
        rank = group.rank()
        right, left = (rank + 1) % RANKS, (rank - 1) % RANKS
        for coalesced in (False, True):
            outs = {peer: torch.zeros(size) for peer in (right, left)}
            if coalesced:
                group.start_coalescing()
            works = [group.send([torch.full((size,), float(rank))], peer, 0) for peer in (right, left)]
            works += [group.recv([outs[peer]], peer, 0) for peer in (left, right)]
            if coalesced:
                assert works == [None] * 4
                works = [group.end_coalescing()]
            for work in works:
                work.wait()
            assert all((out == peer).all() for peer, out in outs.items())

    run(body)


def test_recv_from_any_source_is_refused() -> None:
    def body(group: Any) -> None:
        with pytest.raises(RuntimeError, match="recv from any source is not supported"):
            group.recv_anysource([torch.zeros(1)], 0)

    run(body, ranks=1)


def test_a_group_can_be_split() -> None:
    def body(group: Any) -> None:
        rank = group.rank()
        part = group.split(group.get_group_store(), [2, 0], None)
        if rank == 1:
            assert part is None
            return
        assert (part.rank(), part.size()) == ((0, 2) if rank == 2 else (1, 2))
        assert all_reduced(part, torch.full((1,), float(rank))).item() == 2
        part.shutdown()

    run(body)


@pytest.mark.skipif(not process_group.IS_BACKEND, reason="torch splits only groups of GPUs")
def test_torch_splits_a_group_that_leaves_ranks_out() -> None:
    """torch's C++ ends the process of a rank on which a backend of Python returns None."""

    def body(group: Any) -> None:
        part = torch_group(group).split_group([2, 0], TIMEOUT, None, "part", None)
        if group.rank() == 1:
            assert part is None
            return
        part.allreduce([total := torch.ones(1)]).wait()
        assert total.item() == 2
        part.shutdown()

    run(body)


def test_groups_are_made_again_over_one_store() -> None:
    """A store serves new groups even if an earlier group of the same name has failed."""
    store = dist.HashStore()

    def body(group: Any) -> None:
        group.monitored_barrier(TIMEOUT)
        if group.rank() == 0:
            with pytest.raises(RuntimeError, match="Rank 1 failed"):
                group.monitored_barrier(timedelta(milliseconds=50))
        assert all_reduced(group, torch.ones(1)).item() == RANKS
        for turn in range(3):
            part = ProcessGroupProxyCCL(
                dist.PrefixStore("part", store), group.rank(), RANKS, TIMEOUT, whole=group, members=range(RANKS)
            )
            assert all_reduced(part, torch.full((1,), float(turn))).item() == RANKS * turn
            part.shutdown()

    for _ in range(2):
        run(body, store=store)


def test_an_aborted_group_is_shut_down_when_torch_makes_the_next() -> None:
    process_group.register()
    aborted = []
    for _ in range(2):
        dist.init_process_group("proxyccl", store=dist.HashStore(), rank=0, world_size=1)
        try:
            dist.all_reduce(torch.ones(1))
            group = process_group._default_group()
            assert group in flight_recorder.groups
            assert not any(each in flight_recorder.groups for each in aborted)
            aborted.append(group)
        finally:
            dist.distributed_c10d._abort_process_group()
    for each in aborted:
        each.shutdown()


def test_groups_that_were_shut_down_let_go_of_their_store() -> None:
    """Groups release their store immediately, without a garbage collection, so that a program can make a store at the
    same port.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = store.port

    def body(group: Any) -> None:
        assert all_reduced(group, torch.ones(1)).item() == 2
        part = group.split(group.get_group_store(), [0, 1], None)
        assert all_reduced(part, torch.ones(1)).item() == 2
        (group.send if group.rank() else group.recv)([torch.ones(1)], 1 - group.rank()).wait()
        part.shutdown()
        group.shutdown()
        with pytest.raises(dist.DistBackendError, match="ClosedError: the process group was shut down"):
            group.monitored_barrier(TIMEOUT)

    gc.disable()
    try:
        run(body, 2, store=store)
        del store
        dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    finally:
        gc.enable()


def test_ranks_that_came_in_vain_meet_those_that_come_later() -> None:
    """After a group's first use has timed out, nothing in the store disturbs the next use."""
    early_has_given_up = threading.Event()

    def body(group: Any) -> None:
        if group.rank() == 0:
            group.set_timeout(timedelta(milliseconds=100))
            with pytest.raises(dist.DistBackendError, match=r"WaitTimeoutError: .* ranks \[1\] did not come"):
                all_reduced(group, torch.ones(1))
            group.set_timeout(TIMEOUT)
            early_has_given_up.set()
        assert early_has_given_up.wait(60)
        assert all_reduced(group, torch.ones(1)).item() == 2

    run(body, 2)


def test_the_environment_names_the_groups_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_CTA_POLICY", "efficiency")

    def body(group: Any) -> str:
        all_reduced(group, torch.ones(1))
        return str(group.endpoints.made[0].collectives.standing.cta_policy)

    assert run(body, 2) == ["efficiency"] * 2


def test_options_make_groups_invariant_and_their_parts() -> None:
    def body(group: Any) -> list[bool]:
        store, rank = group.get_group_store(), group.rank()
        given = Options(invariant=True, timeout=TIMEOUT)
        own, settings = dist.PrefixStore("own", store), Settings(invariant=True)
        whole = ProcessGroupProxyCCL(own, rank, group.size(), TIMEOUT, settings=settings)
        parts = [group, whole, *(whole.split(store, [0, 1], opts) for opts in (None, copy.deepcopy(whole.options)))]
        parts += [group.split(store, [0, 1], given), whole.split(store, [0, 1], Options(invariant=False))]
        found = []
        for part in parts:
            assert all_reduced(part, torch.ones(1)).item() == 2
            found.append(part.endpoints.made[0].collectives.standing.invariant)
        for part in parts[1:]:
            part.shutdown()
        return found

    assert run(body, 2) == [[False, True, True, True, True, False]] * 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_an_invariant_group_have_the_same_bits_in_every_tensor(ranks: int) -> None:
    """Tensors of several sizes repeat the same values, at several offsets in memory. The group's table names algorithms
    that add in different orders.
    """

    def body(group: Any) -> None:
        whole = group.split(group.get_group_store(), list(range(ranks)), Options(invariant=True, timeout=TIMEOUT))
        collectives = whole.endpoints.of_all(torch.device("cpu")).collectives
        collectives.selector = collectives.selector.with_table("all_reduce", SizeTable(((1024, "one_shot"),), "ring"))
        values = torch.randn(61, generator=torch.Generator().manual_seed(group.rank()))
        for dtype in (torch.float32, torch.bfloat16):
            own = values.to(dtype)
            sums = all_reduced(whole, own.clone())
            for repeats in (1, 3, 40, 5000):
                for offset in (0, 1, 7):
                    tensor = torch.cat([torch.zeros(offset, dtype=dtype), own.repeat(repeats)])[offset:]
                    got = all_reduced(whole, tensor)
                    assert torch.equal(got.view(torch.uint8), sums.repeat(repeats).view(torch.uint8)), (repeats, offset)
        whole.shutdown()

    run(body, ranks)


def test_a_forks_child_is_refused_and_the_parent_goes_on() -> None:
    """A forked child's calls are refused. A child's wait for a parent's call is also refused, because the child has no
    thread that would end the call.
    """
    child_has_ended = threading.Barrier(2)

    def refusals(group: Any, pending: Any) -> str:
        calls = [
            pending.wait,
            lambda: all_reduced(group, torch.ones(3)),
            lambda: group.set_timeout(TIMEOUT),
            group.abort,
        ]
        errors = []
        for call in calls:
            try:
                call()
                errors.append("no error")
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
        group.shutdown()
        return "\n".join(errors)

    def body(group: Any) -> None:
        other, tensor = 1 - group.rank(), torch.ones(3)
        assert all_reduced(group, tensor).tolist() == [2, 2, 2]
        if group.rank() == 0:
            pending = group.recv([tensor], other, 0)
            told, tell = os.pipe()
            if (child := os.fork()) == 0:
                signal.alarm(60)
                os.write(tell, refusals(group, pending).encode())
                os._exit(0)
            os.waitpid(child, 0)
            os.close(tell)
            with open(told) as answer:
                errors = answer.read().split("\n")
            assert len(errors) == 4
            for error in errors:
                assert re.match("(DistBackendError: proxyccl: )?ClosedError: .* is a fork of it", error)
            child_has_ended.wait(TIMEOUT.total_seconds())
            pending.wait()
        else:
            child_has_ended.wait(TIMEOUT.total_seconds())
            group.send([tensor], other, 0).wait()
        assert all_reduced(group, torch.ones(3)).tolist() == [2, 2, 2]

    run(body, ranks=2)


def test_errors_are_torchs_with_our_texts() -> None:
    all_have_called = threading.Barrier(RANKS)

    def body(group: Any) -> None:
        all_reduced(group, torch.ones(1))
        all_have_called.wait(30)
        if group.rank() == 0:
            group.abort()
        with pytest.raises(dist.DistBackendError, match=r"proxyccl: AbortedError: .*ended the communicator"):
            all_reduced(group, torch.ones(1))

    run(body)


def test_a_rank_that_does_not_come_is_named() -> None:
    def body(group: Any) -> None:
        if group.rank() == 0:
            with pytest.raises(dist.DistBackendError, match=r"Timed out with WaitTimeoutError: .*ranks \[1\]"):
                all_reduced(group, torch.ones(1))

    run(body, ranks=2, timeout=timedelta(seconds=0.5))


def test_a_call_has_a_time_out_of_its_own() -> None:
    timed_out = threading.Event()  # keeps rank 1 from leaving, which would end rank 0's call immediately

    def body(group: Any) -> None:
        all_reduced(group, torch.ones(1))
        if group.rank() == 1:
            assert timed_out.wait(30)
        if group.rank() == 0:
            late = group.allreduce([torch.ones(1)], options("Allreduce", waits=False, timeout=timedelta(seconds=0.3)))
            with pytest.raises(RuntimeError, match=r"did not end within 0.05 s"):
                late.wait(timedelta(seconds=0.05))
            with pytest.raises(dist.DistBackendError, match="Timed out with WaitTimeoutError"):
                late.wait()
            timed_out.set()

    run(body, ranks=2)


def test_the_watchdog_names_the_oldest_call_that_has_not_ended(caplog: pytest.LogCaptureFixture) -> None:
    may_fail = threading.Barrier(2)

    def body(group: Any) -> None:
        all_reduced(group, torch.ones(1))
        if group.rank() == 0:
            works = [group.allreduce([torch.ones(1)], options("Allreduce", waits=False))]
            works.append(group.broadcast([torch.ones(1)], options("Broadcast", waits=False, rootRank=0)))
        may_fail.wait(30)
        if group.rank() == 1:
            group.abort()
        deadline = time.monotonic() + 30
        while f"of rank {group.rank()}: " not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.02)

    with caplog.at_level(logging.ERROR, "proxyccl.torch"):
        run(body, ranks=2)
    assert "all_reduce, call 2 of rank 0: " in caplog.text
    assert "no call of rank 1: " in caplog.text


def test_calls_that_have_ended_are_forgotten_whatever_their_numbers() -> None:
    """A group's flows (pairs of ranks) share one sequence of call numbers, so one flow may have only odd numbers."""
    under_way = UnderWay(lambda: True)
    first = functools.partial(bool, True)
    kept = weakref.ref(first)
    under_way.add("flow", 1, "recv", first)
    del first
    for number in range(3, 3 + 2 * ADDED_BETWEEN, 2):
        under_way.add("flow", number, "recv", functools.partial(bool, True))
    assert kept() is None


def test_a_call_whose_device_is_lost_is_taken_for_unfinished() -> None:
    def lost() -> bool:
        raise DriverError("event query", 700, "an illegal memory access was encountered")

    under_way = UnderWay(lambda: True)
    under_way.add("flow", 1, "send", lambda: True)
    under_way.add("flow", 2, "recv", lost)
    assert under_way.oldest() == (2, "recv")


def test_the_watchdog_goes_on_after_an_error_of_one_group(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "groups", {})
    seen = threading.Event()

    class Group:
        endpoints = SimpleNamespace(failed=None)

        def __init__(self, *, fails: bool) -> None:
            self.fails = fails

        @property
        def calls(self) -> Any:
            return self

        def oldest(self) -> str:
            if self.fails:
                raise RuntimeError("broken")
            if "RuntimeError: broken" in caplog.text:
                seen.set()
            return ""

    groups: list[Any] = [Group(fails=True), Group(fails=False)]
    with caplog.at_level(logging.ERROR, "proxyccl.torch"):
        for group in groups:
            flight_recorder.watch(group)
        assert seen.wait(30)
    assert caplog.text.count("a process group is no longer watched") == 1


def test_a_group_shares_with_the_one_that_it_is_a_part_of() -> None:
    def body(group: Any) -> None:
        all_reduced(group, torch.ones(1))
        part = group.split(group.get_group_store(), [1, 0], None)
        if part is None:
            return
        assert all_reduced(part, torch.ones(1)).item() == 2
        whole, comm = group.endpoints.made[0], part.endpoints.made[0]
        assert comm.runtime is whole.runtime
        again = part.split(part.get_group_store(), [0, 1], None)
        part.shutdown()
        # `again` was split from the whole group, so it works after `part` is shut down.
        assert all_reduced(again, torch.ones(1)).item() == 2
        assert not again.endpoints.made[0].closed
        again.shutdown()

    run(body)


def test_a_mismatch_is_named_and_keeps_its_type() -> None:
    def body(group: Any) -> None:
        with pytest.raises(ValueError, match="count"):
            all_reduced(group, torch.ones(2 + group.rank()))

    run(body, ranks=2)


@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_monitored_barrier_names_who_is_missing(wait_all_ranks: bool) -> None:
    def body(group: Any) -> None:
        group.monitored_barrier(TIMEOUT, wait_all_ranks)
        if group.rank() == 0:
            missing = "Ranks 1, 2 failed" if wait_all_ranks else "Rank 1 failed"
            with pytest.raises(RuntimeError, match=missing):
                group.monitored_barrier(timedelta(milliseconds=100), wait_all_ranks)
            with pytest.raises(RuntimeError, match="Rank 0 timed out"):
                group.monitored_barrier(timedelta(0))

    run(body)


def test_a_shutdown_waits_for_calls_that_were_issued() -> None:
    ends = threading.Event()

    def body(group: Any) -> None:
        tensor = torch.ones(4)
        if group.rank() == RANKS - 1:
            assert ends.wait(30)
        works = [group.allreduce([tensor], options("Allreduce", waits=False)) for _ in range(3)]
        ends.set()
        group.shutdown()
        assert all(work.is_success() for work in works)
        assert (tensor == RANKS**3).all()

    run(body)


def test_a_call_after_shutdown_is_refused() -> None:
    def body(group: Any) -> None:
        group.shutdown()
        with pytest.raises(dist.DistBackendError, match="ClosedError: the process group was shut down"):
            all_reduced(group, torch.ones(1))
        work = group.allreduce([torch.ones(1)], options("Allreduce", waits=False))
        with pytest.raises(dist.DistBackendError, match="ClosedError"):
            work.wait()

    run(body, ranks=1)


@pytest.mark.parametrize(
    ("kind", "ranks"), [("HashStore", 2), ("FileStore", 2), ("TCPStore", 2), ("HashStore", 16), ("TCPStore", 16)]
)
def test_ranks_meet_over_every_store(kind: str, ranks: int, tmp_path: Any) -> None:
    if kind == "HashStore":
        stores: list[dist.Store] = [dist.HashStore()] * ranks
    elif kind == "FileStore":
        stores = [dist.FileStore(str(tmp_path / "store"), ranks) for _ in range(ranks)]
    else:
        server = dist.TCPStore("localhost", 0, ranks, is_master=True, wait_for_workers=False)
        clients = (
            dist.TCPStore("localhost", server.port, ranks, is_master=False, wait_for_workers=False)
            for _ in range(ranks - 1)
        )
        stores = [server, *clients]

    def on_rank(rank: int) -> list[list[bytes]]:
        bootstrap = StoreBootstrap(dist.PrefixStore("meeting", stores[rank]), rank, ranks)
        return [bootstrap.all_gather(bytes([rank] * n), 60, lambda: None) for n in (0, 1, 5, 2)]

    with ThreadPoolExecutor(ranks) as pool:
        for rounds in pool.map(on_rank, range(ranks)):
            assert rounds == [[bytes([rank] * n) for rank in range(ranks)] for n in (0, 1, 5, 2)]


def test_a_rank_that_was_alone_in_a_store_takes_back_its_messages() -> None:
    store = dist.HashStore()
    for rank in (0, 1):
        late = StoreBootstrap(store, rank, 2).subset([0, 1], 5)
        with pytest.raises(WaitTimeoutError):
            late.all_gather(b"", 0, lambda: None)
        late.withdraw()


def test_memory_is_allocated_on_gpus_once_there_is_a_communicator() -> None:
    def body(group: Any) -> None:
        all_reduced(group, torch.ones(3))
        assert not group.supports_tensor_alloc(torch.device("cpu"))
        assert not group.supports_tensor_alloc(torch.device("cuda", 0))
        with pytest.raises(RuntimeError, match="no communicator for cuda:0 yet; call a collective on it first"):
            group.allocate_tensor(5, dtype=torch.float32, device=torch.device("cuda", 0))

    run(body)


def test_a_group_without_the_option_is_not_suspended() -> None:
    def body(group: Any) -> None:
        all_reduced(group, torch.ones(1))
        with pytest.raises(
            RuntimeUnavailableError, match=r"Options\(suspendable=True\)\), or with PROXYCCL_SUSPENDABLE=1"
        ):
            group.suspend()
        part = group.split(group.get_group_store(), list(range(RANKS)), Options(suspendable=True))
        all_reduced(part, torch.ones(1))
        part.suspend()
        assert part.memory_stats()["suspended"] == 1
        part.resume()
        assert all_reduced(part, torch.ones(3)).eq(RANKS).all()
        inherits = part.split(group.get_group_store(), list(range(RANKS)), None)
        assert copy.copy(inherits.options).settings == Settings(suspendable=True)

    run(body)


def test_a_group_gives_its_memory_back_and_takes_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_SUSPENDABLE", "1")

    def body(group: Any) -> None:
        assert group.memory_stats() == {"suspend": 0, "suspended": 0, "persist": 0, "total": 0}
        group.suspend()  # there is no communicator yet
        all_reduced(group, torch.ones(1 << 20))
        stats = group.memory_stats()
        assert stats["suspend"] > 0
        assert (stats["suspended"], stats["total"]) == (0, stats["suspend"] + stats["persist"])
        group.suspend()
        assert group.memory_stats() == {**stats, "suspended": 1}
        with pytest.raises(RuntimeError, match="suspended"):
            all_reduced(group, torch.ones(3))
        part = group.split(group.get_group_store(), list(range(RANKS)), None)
        assert all_reduced(part, torch.ones(3)).eq(RANKS).all()
        group.resume()
        assert group.memory_stats() == stats
        assert all_reduced(group, torch.ones(1 << 20)).eq(RANKS).all()

    run(body)


def test_collectives_resume_a_group_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_SUSPENDABLE", "1")

    def body(group: Any) -> None:
        x = torch.ones(1 << 20)
        parts = [torch.empty(3) for _ in range(RANKS)]
        calls = {
            "all_reduce": lambda: group.allreduce([x]),
            "barrier": group.barrier,
            "all_gather": lambda: group.allgather([parts], [torch.ones(3)]),  # consists of transfers
        }
        for name, call in calls.items():
            for _ in range(2):
                group.suspend(save=False, resume_on_call=True)
                call().wait()
                assert group.memory_stats()["suspended"] == 0, name
        assert torch.cat(parts).eq(1).all()
        group.suspend(resume_on_call=True)
        work = group.allreduce([x])  # may run in a thread of the group
        group.resume()
        work.wait()
        assert x.eq(RANKS**3).all()

    run(body)


@pytest.mark.skipif(process_group.IS_BACKEND, reason="torch keeps other devices' backends from 2.15 on")
def test_no_rank_drops_the_backend_of_another_device_while_others_make_theirs() -> None:
    """With "cpu:gloo,cuda:proxyccl", making the GPUs' group waits for all ranks, but making the CPUs' does not."""
    store = dist.PrefixStore("group", dist.HashStore())

    def wait(device: str, rank: int) -> None:
        process_group._await_other_backends(dist.PrefixStore(f"{device}/", store), rank, 2, TIMEOUT)

    for rank in range(2):
        wait("cpu", rank)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            first = pool.submit(wait, "cuda", 0)
            with pytest.raises(TimeoutError):
                first.result(0.05)
            wait("cuda", 1)
            first.result()


ENDS_WHILE_IT_MEETS = """
import threading, time
from datetime import timedelta

import torch
import torch.distributed as dist
from proxyccl.torch import ProcessGroupProxyCCL

class SlowStore(dist.Store):
    def __init__(self):
        super().__init__()
        self.values, self.checked = dist.HashStore(), threading.Event()

    def set(self, key, value):
        self.values.set(key, value)

    def add(self, key, amount):
        return self.values.add(key, amount)

    def check(self, keys):
        self.checked.set()
        time.sleep(0.2)
        return False

store = SlowStore()
group = ProcessGroupProxyCCL(store, 0, 2, timedelta(seconds=60))
options = dist.AllreduceOptions()
options.asyncOp = True
work = group.allreduce([torch.ones(4)], options)
assert store.checked.wait(60)
"""


def test_a_process_ends_without_a_message_while_a_thread_waits_for_a_peer_over_the_store() -> None:
    """The store is slow, so that the thread is inside the store's C++ code when the program ends."""
    command = [sys.executable, "-c", ENDS_WHILE_IT_MEETS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
