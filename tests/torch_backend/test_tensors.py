"""Tensors that are more than plain memory: a call refuses them before data moves, waits for them, or resolves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate  # noqa: E402

from proxyccl import ArgumentError  # noqa: E402
from support.torch_groups import options, run  # noqa: E402

COUNT = 4


def freed() -> Any:
    x = torch.ones(COUNT)
    x.untyped_storage().resize_(0)
    return x


def freed_from_an_offset() -> Any:
    """Returns a tensor whose storage was freed. The tensor's data pointer is its offset in the storage, not 0."""
    whole = torch.ones(2 * COUNT)
    x = whole[COUNT:]
    whole.untyped_storage().resize_(0)
    return x


def cut_short() -> Any:
    x = torch.ones(COUNT)
    x.untyped_storage().resize_(4 * COUNT - 1)
    return x


def fake() -> Any:
    with FakeTensorMode():
        return torch.ones(COUNT)


class OfTensors(torch.Tensor):
    """A tensor that is made of other tensors."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (COUNT,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError("it has no operations")


def distributed() -> Any:
    """Returns a DTensor, like FSDP's parameters and gradients, on a mesh without a process group."""
    mesh = dist.DeviceMesh("cpu", torch.arange(1), _init_backend=False, _rank=0)
    return DTensor.from_local(torch.ones(COUNT), mesh, [Replicate()], run_check=False)


WITHOUT_MEMORY = {
    "freed": (freed, "has no memory: its storage was freed, or it has none"),
    "freed from an offset": (freed_from_an_offset, "has no memory: its storage was freed, or it has none"),
    "cut short": (cut_short, "its storage has 15 bytes; expected 16"),
    "zero": (lambda: torch._efficientzerotensor(COUNT), "has no memory"),
    "fake": (fake, "a FakeTensor has no memory of its own; expected a tensor with values"),
    "of tensors": (OfTensors, "OfTensors .* has no memory"),
    "distributed": (distributed, r"a DTensor has no memory of its own; pass x\.to_local\(\)"),
}
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "allreduce": lambda g, x: g.allreduce([x], options("Allreduce")),
    "allreduce_coalesced": lambda g, x: g.allreduce_coalesced([torch.ones(COUNT), x], options("AllreduceCoalesced")),
    "broadcast": lambda g, x: g.broadcast([x], options("Broadcast", rootRank=0)),
    "reduce": lambda g, x: g.reduce([x], options("Reduce", rootRank=0)),
    "allgather from": lambda g, x: g.allgather([[torch.ones(COUNT)]], [x]),
    "allgather to": lambda g, x: g.allgather([[x]], [torch.ones(COUNT)]),
    "all_gather_single from": lambda g, x: g.all_gather_single(torch.ones(COUNT), x),
    "all_gather_single to": lambda g, x: g.all_gather_single(x, torch.ones(COUNT)),
    "all_gather_single_coalesced": lambda g, x: g.all_gather_single_coalesced([torch.ones(COUNT)], [x]),
    "allgather_coalesced to": lambda g, x: g.allgather_coalesced([[x]], [torch.ones(COUNT)]),
    "gather from": lambda g, x: g.gather([[torch.ones(COUNT)]], [x], options("Gather", rootRank=0)),
    "gather to": lambda g, x: g.gather([[x]], [torch.ones(COUNT)], options("Gather", rootRank=0)),
    "scatter from": lambda g, x: g.scatter([torch.ones(COUNT)], [[x]], options("Scatter", rootRank=0)),
    "scatter to": lambda g, x: g.scatter([x], [[torch.ones(COUNT)]], options("Scatter", rootRank=0)),
    "reduce_scatter from": lambda g, x: g.reduce_scatter([torch.ones(COUNT)], [[x]]),
    "reduce_scatter to": lambda g, x: g.reduce_scatter([x], [[torch.ones(COUNT)]]),
    "reduce_scatter_single": lambda g, x: g.reduce_scatter_single(torch.ones(COUNT), x),
    "reduce_scatter_single_coalesced to": lambda g, x: g.reduce_scatter_single_coalesced([x], [torch.ones(COUNT)]),
    "all_to_all_single from": lambda g, x: g.all_to_all_single(torch.ones(COUNT), x, [], []),
    "all_to_all_single to": lambda g, x: g.all_to_all_single(x, torch.ones(COUNT), [], []),
    "alltoall": lambda g, x: g.alltoall([torch.ones(COUNT)], [x]),
    "send": lambda g, x: g.send([x], 1),
    "recv": lambda g, x: g.recv([x], 1),
}


def test_a_tensor_without_memory_is_refused_by_every_call() -> None:
    def body(group: Any) -> None:
        for name, call in CALLS.items():
            with pytest.raises(ArgumentError, match=r"tensor: a DTensor .* pass x\.to_local\(\)") as caught:
                call(group, distributed())
            assert caught.value.argument == "tensor", name

    run(body, 1)


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_what_kind_of_tensor_has_no_memory_is_said(kind: str) -> None:
    make, message = WITHOUT_MEMORY[kind]

    def body(group: Any) -> None:
        with pytest.raises(ArgumentError, match=message):
            group.allreduce([make()], options("Allreduce"))

    run(body, 1)


def test_a_tensor_that_is_freed_after_a_call_is_refused_by_the_next() -> None:
    def body(group: Any) -> None:
        x = torch.ones(COUNT)
        for _ in range(4):  # the first call is prepared, and the later calls reuse it
            group.allreduce([x], options("Allreduce")).wait()
        x.untyped_storage().resize_(0)
        with pytest.raises(ArgumentError, match="has no memory"):
            group.allreduce([x], options("Allreduce"))

    run(body, 2)


@pytest.mark.parametrize("call", [call for call in CALLS if call not in ("send", "recv")])
def test_a_result_of_a_functional_collective_is_waited_for(call: str) -> None:
    """A functional collective returns a tensor that gets its values later."""

    def body(group: Any) -> None:
        x = torch.full((COUNT,), 3.0)
        CALLS[call](group, AsyncCollectiveTensor(x)).wait()
        # A call whose name ends in "to" writes ones to x; other calls do not change x.
        assert torch.equal(x, torch.ones(COUNT) if call.endswith(" to") else torch.full((COUNT,), 3.0))

    run(body, 1)


def lazy(values: Any, kind: str) -> Any:
    """Returns a lazy view of `values`. The view's memory holds the values' conjugates or negatives."""
    view = values.conj_physical().conj() if kind == "conjugate" else torch._neg_view(-values)
    assert torch.equal(view, values)
    assert view.is_conj() or view.is_neg()
    return view


@pytest.mark.parametrize("kind", ["conjugate", "negative"])
def test_lazy_views_are_sent_and_filled_by_their_values(kind: str) -> None:
    dtype = torch.complex64 if kind == "conjugate" else torch.float32

    def body(group: Any) -> None:
        rank, ranks = group.rank(), group.size()
        by_rank = [(torch.arange(1, 5) * (r + 1)).to(dtype) * (1 + 2j if kind == "conjugate" else 1) for r in (0, 1)]
        own, both = by_rank[rank], torch.cat(by_rank)

        def empty(count: int) -> Any:
            return lazy(torch.zeros(count, dtype=dtype), kind)

        x = lazy(own, kind)
        group.allreduce([x], options("Allreduce")).wait()
        assert torch.equal(x, by_rank[0] + by_rank[1])
        x = lazy(own, kind)
        group.allreduce_coalesced([x, y := own.clone()], options("AllreduceCoalesced")).wait()
        assert torch.equal(x, y)
        x = lazy(own, kind)
        group.broadcast([x], options("Broadcast", rootRank=1)).wait()
        assert torch.equal(x, by_rank[1])
        group.all_gather_single(out := empty(8), lazy(own, kind)).wait()
        assert torch.equal(out, both)
        group.allgather([parts := [empty(4), empty(4)]], [lazy(own, kind)]).wait()
        assert torch.equal(torch.cat(parts), both)
        group.all_to_all_single(out := empty(4), lazy(own, kind), [], []).wait()
        half = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(out, torch.cat([values[half] for values in by_rank]))
        group.all_to_all_single(out := empty(4), lazy(own, kind), [2, 2], [2, 2]).wait()
        assert torch.equal(out, torch.cat([values[half] for values in by_rank]))
        group.reduce_scatter_single(out := empty(2), lazy(own, kind)).wait()
        assert torch.equal(out, (by_rank[0] + by_rank[1])[half])
        x = lazy(own, kind)
        group.reduce([x], options("Reduce", rootRank=0, reduceOp=dist.ReduceOp.SUM)).wait()
        assert torch.equal(x, by_rank[0] + by_rank[1] if rank == 0 else own)
        call, x = (group.send, lazy(own, kind)) if rank == 0 else (group.recv, empty(4))
        call([x], ranks - 1 - rank).wait()
        assert torch.equal(x, by_rank[0])

    run(body, 2)


@pytest.mark.parametrize("change", [torch._neg_view, lambda x: x[:]], ids=["negative", "plain"])
def test_a_kept_form_does_not_take_a_lazy_view_for_its_base(change: Callable[[Any], Any]) -> None:
    def body(group: Any) -> None:
        x = torch.ones(COUNT)
        for _ in range(4):
            group.allreduce([x], options("Allreduce")).wait()
        view = change(x)
        expected = view * 2
        group.allreduce([view], options("Allreduce")).wait()
        assert torch.equal(view, expected)

    run(body, 2)


def test_contiguous_tensors_may_have_any_stride_where_they_have_one_element_or_none() -> None:
    def element(value: int) -> Any:
        return torch.full((3, 5), value)[:1, 0]

    def none() -> Any:
        return torch.arange(15).as_strided((0,), (3,))

    def body(group: Any) -> None:
        rank, ranks = group.rank(), group.size()
        own, root = element(rank), options("Gather", rootRank=1)
        everyone, outs = list(range(ranks)), [element(9) for _ in range(ranks)]
        assert own.stride() == (5,)

        def results(*tensors: Any) -> list[int]:
            return [int(tensor) for tensor in tensors]

        group.broadcast([x := element(rank)], options("Broadcast", rootRank=2)).wait()
        group.broadcast([none()], options("Broadcast", rootRank=2)).wait()
        assert results(x) == [2]
        group.allgather([outs], [own], options("Allgather")).wait()
        assert results(*outs) == everyone
        group._allgather_base(whole := torch.zeros(ranks, dtype=torch.int64), own, options("Allgather")).wait()
        assert whole.tolist() == everyone
        group.gather([gathered := outs[::-1]] if rank == 1 else [], [own], root).wait()
        assert rank != 1 or results(*gathered) == everyone
        parts = [[element(7 + peer) for peer in everyone]] if rank == 1 else []
        group.scatter([x], parts, options("Scatter", rootRank=1)).wait()
        assert results(x) == [7 + rank]
        group.alltoall(outs, [element(rank)] * ranks, options("AllToAll")).wait()
        assert results(*outs) == everyone
        group.allreduce([x := element(rank)], options("Allreduce")).wait()
        assert results(x) == [sum(everyone)]
        group.reduce([x := element(rank)], options("Reduce", rootRank=0)).wait()
        assert rank != 0 or results(x) == [sum(everyone)]
        group.reduce_scatter([x], [[own] * ranks], options("ReduceScatter")).wait()
        assert results(x) == [sum(everyone)]
        sent, received = group.send([own], (rank + 1) % ranks), group.recv([x], (rank - 1) % ranks)
        sent.wait()
        received.wait()
        assert results(x) == [(rank - 1) % ranks]

    run(body)
