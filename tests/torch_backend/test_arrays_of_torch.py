"""Tensors that a communicator's calls refuse, both at the first call and at calls that reuse prepared calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from proxyccl import ArgumentError, Communicator  # noqa: E402
from proxyccl.device.arrays.array import as_view, current_stream  # noqa: E402
from support.cases.reference import Call  # noqa: E402
from support.ranks import Ranks  # noqa: E402

pytestmark = pytest.mark.host_only(reason="tensors of CPUs")
COUNT = 4
KERNEL = '#include "proxyccl/proxyccl.h"\nextern "C" __global__ void touch(float *x) { x[0] = 1; }'


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as group:
        yield group


def freed() -> Any:
    x = torch.ones(COUNT)
    x.untyped_storage().resize_(0)
    return x


def ones(count: int = COUNT) -> Any:
    return torch.ones(count)


CALLS: dict[str, tuple[str, Callable[[Communicator, Any], object]]] = {
    "all_reduce": ("x", lambda c, x: c.all_reduce(x)),
    "all_reduce to": ("out", lambda c, x: c.all_reduce(ones(), out=x)),
    "reduce": ("x", lambda c, x: c.reduce(x)),
    "reduce_scatter": ("x", lambda c, x: c.reduce_scatter(x)),
    "reduce_scatter to": ("out", lambda c, x: c.reduce_scatter(ones(2 * COUNT), out=x)),
    "all_gather": ("x", lambda c, x: c.all_gather(x)),
    "all_gather to": ("out", lambda c, x: c.all_gather(ones(COUNT // 2), out=x)),
    "all_to_all": ("x", lambda c, x: c.all_to_all(x)),
    "all_to_all to": ("out", lambda c, x: c.all_to_all(ones(), out=x)),
    "broadcast": ("x", lambda c, x: c.broadcast(x)),
    "broadcast to": ("out", lambda c, x: c.broadcast(ones(), out=x)),
    "gather": ("x", lambda c, x: c.gather(x)),
    "scatter": ("x", lambda c, x: c.scatter(x, c.rank)),
    "scatter to": ("out", lambda c, x: c.scatter(ones(2 * COUNT), c.rank, out=x)),
    "all_to_all_v": ("x", lambda c, x: c.all_to_all_v(x, [2, 2], [2, 2])),
    "all_to_all_v to": ("out", lambda c, x: c.all_to_all_v(ones(), [2, 2], [2, 2], out=x)),
    "send": ("x", lambda c, x: c.send(x, 1 - c.rank)),
    "recv": ("out", lambda c, x: c.recv(x, 1 - c.rank)),
    "register": ("array", lambda c, x: c.register(x)),
    "deregister": ("array", lambda c, x: c.deregister(x)),
    "sm_channels": ("dst", lambda c, x: c.sm_channels(x)),
    "proxy_channels": ("dst", lambda c, x: c.proxy_channels(x)),
    "kernel": ("args[0] of kernel touch", lambda c, x: c.compile(KERNEL, "touch")(1, 1, x)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_tensor_without_memory_is_refused_by_every_call(ranks: Ranks, call: str) -> None:
    argument, function = CALLS[call]

    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match=r"the Tensor of shape .* has no memory") as caught:
            function(comm, freed())
        assert caught.value.argument == argument

    ranks.run(body)


@pytest.mark.parametrize("call", [name for name in CALLS if name != "deregister"])
def test_a_lazy_view_is_refused_by_every_call(ranks: Ranks, call: str) -> None:
    """Even an input may not be a lazy view, because resolving a view would need a copy on another stream."""
    argument, function = CALLS[call]

    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match=r"a negative view, .*; pass x\.resolve_neg\(\)") as caught:
            function(comm, torch._neg_view(torch.ones(COUNT)))
        assert caught.value.argument == argument

    ranks.run(body)


def of_a_transformation() -> Any:
    inside = []
    torch.vmap(lambda x: inside.append(x) or x)(torch.ones(2, COUNT))
    return inside[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.ones(COUNT, dtype=torch.complex64).conj(), r"conjugate view, .*; pass x\.resolve_conj\(\)"),
        (lambda: torch.ones(COUNT, device="meta"), "torch device meta is not supported"),
        (lambda: torch.eye(3).to_sparse(), r"layout torch\.sparse_coo; expected a dense one"),
        (lambda: torch.eye(3).to_sparse_csr(), r"layout torch\.sparse_csr; expected a dense one"),
        (lambda: torch.nested.nested_tensor([ones(2), ones(3)]), "layout nested; expected a dense one"),
        (lambda: torch.nested.nested_tensor([ones(2), ones(3)], layout=torch.jagged), r"NestedTensor .* x\.values\(\)"),
        (lambda: torch.masked.masked_tensor(ones(), ones() > 0), r"a MaskedTensor has no memory of its own; pass x"),
        (lambda: torch._efficientzerotensor(COUNT), "has no memory"),
        (of_a_transformation, "has no memory"),
    ],
    ids=["conjugate", "meta", "coo", "csr", "nested", "jagged", "masked", "zero", "vmap"],
)
@pytest.mark.filterwarnings("ignore")  # torch warns that some kinds of tensors are unfinished
def test_what_is_more_or_less_than_memory_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"x: .*{message}"):
        as_view(make(), "x")


def test_a_class_derived_from_tensors_and_a_parameter_are_taken() -> None:
    class Derived(torch.Tensor):
        pass

    for x in (ones().as_subclass(Derived), torch.nn.Parameter(ones()), ones()[1:], torch.ones(0)):
        assert as_view(x, "x").ptr == x.data_ptr()


def elsewhere() -> Any:
    return ones().to("meta")


def freed_with_offset() -> Any:
    x = ones(COUNT + 1)
    view = x[1:]
    x.untyped_storage().resize_(0)
    return view


def shrunk() -> Any:
    x = ones()
    x.untyped_storage().resize_(8)
    return x


@pytest.mark.parametrize(
    ("like", "make", "message"),
    [
        (ones, freed, "has no memory"),
        (ones, shrunk, "has no memory"),
        (lambda: ones(COUNT + 1)[1:], freed_with_offset, "has no memory"),
        (ones, elsewhere, "torch device .* is not supported"),
        (lambda: ones().byte(), lambda: ones().byte().view(torch.uint4), "unknown element type 'uint4'"),
    ],
    ids=["freed", "shrunk", "freed-with-offset", "elsewhere", "of-few-bits"],
)
def test_a_tensor_is_refused_after_calls_of_others_like_it(
    ranks: Ranks, like: Callable[[], Any], make: Callable[[], Any], message: str
) -> None:
    def body(comm: Communicator) -> None:
        for _ in range(3):
            comm.all_reduce(like(), out=like())
        with pytest.raises(ArgumentError, match=f"x: .*{message}"):
            comm.all_reduce(make(), out=like())
        with pytest.raises(ArgumentError, match=f"out: .*{message}"):
            comm.all_reduce(like(), out=make())

    ranks.run(body)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"])
def test_calls_of_new_tensors_are_right_and_prepared_once(ranks: Ranks, collective: str) -> None:
    call = Call(collective, count=COUNT, in_place=False)

    def body(comm: Communicator) -> None:
        kept, prepared = [], 0
        for turn in range(8):
            each = replace(call, seed=turn)
            x = torch.from_numpy(each.input(comm.rank, comm.world_size).copy())
            out = torch.empty(each.sizes(comm.world_size)[1])
            kept.append((x, out))  # gives later arrays new addresses
            assert each.issue(comm, x, out, None) is out
            each.check(out.numpy(), comm.rank, comm.world_size)
            if turn == 2:  # the first calls may allocate memory, which invalidates prepared calls
                prepared = comm.calls.prepared
        assert comm.calls.prepared == prepared

    ranks.run(body)


def test_a_kept_form_does_not_take_a_lazy_view_for_its_base(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        x, out = torch.ones(COUNT, dtype=torch.complex64) * 1j, torch.zeros(2 * COUNT, dtype=torch.complex64)
        for _ in range(4):
            comm.all_gather(x, out=out)
        with pytest.raises(ArgumentError, match=r"x: .*conjugate view"):
            comm.all_gather(x.conj(), out=out)
        with pytest.raises(ArgumentError, match=r"out: .*conjugate view"):
            comm.all_gather(x, out=out.conj())
        assert np.array_equal(out.numpy(), np.full(2 * COUNT, 1j))

    ranks.run(body)


def test_a_tensor_of_the_cpu_has_no_stream() -> None:
    """A launch asks each tensor argument for its current stream, which is None for a tensor on the CPU."""
    assert current_stream(ones()) is None


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2], ids=str
)
def test_narrow_floats_are_moved(ranks: Ranks, dtype: Any) -> None:
    def body(comm: Communicator) -> None:
        rows = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
        gathered = comm.all_gather((rows + comm.rank).view(dtype))
        assert gathered.dtype is dtype
        assert torch.equal(gathered.view(torch.uint8), torch.cat([rows + rank for rank in range(comm.world_size)]))

    ranks.run(body)
