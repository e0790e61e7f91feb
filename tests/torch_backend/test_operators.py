"""The library's operators for torch, which take a process group, and the function that returns its communicator."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from proxyccl import ArgumentError  # noqa: E402
from proxyccl.torch import communicator_of  # noqa: E402
from support.torch_groups import run, torch_group  # noqa: E402

EPS = 1e-6
_numbers = itertools.count()  # makes new names for groups, because torch keeps used names
_registered: dict[str, dist.ProcessGroup] = {}  # torch's registry does not keep groups


def rows(rank: int, width: int = 48) -> Any:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)


def named(group: Any) -> str:
    """Registers a group with torch under a new name and returns the name. Names differ between ranks, because ranks are
    threads.
    """
    name = f"{next(_numbers)} of rank {group.rank()}"
    _registered[name] = torch_group(group)
    torch._C._distributed_c10d._register_process_group(name, _registered[name])
    return name


def expected(ranks: int, residual: Any, weight: Any) -> tuple[Any, Any]:
    total = sum(rows(rank).float() for rank in range(ranks)).to(torch.bfloat16) + residual
    return total, torch.nn.functional.rms_norm(total.float(), weight.shape, weight.float(), EPS)


def block(x: Any, residual: Any, weight: Any, group_name: str) -> Any:
    """Computes what a layer computes between two matrix products: all_reduce, addition of a residual, RMSNorm."""
    out = torch.empty_like(x)
    torch.ops.proxyccl.all_reduce_rms_norm(x * 1, residual, weight, EPS, group_name, out=out)
    return out * 2


@pytest.mark.parametrize("compiled", [False, True])
def test_the_operator_writes_the_residual_and_the_normed_rows(compiled: bool) -> None:
    def body(group: Any) -> None:
        name, weight = named(group), rows(100)[0]
        call = torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block
        for seed in (50, 51):
            residual = rows(seed)
            total, normed = expected(group.size(), residual, weight)
            out = call(rows(group.rank()), residual, weight, name)
            assert torch.equal(residual, total)
            torch.testing.assert_close(out.float(), 2 * normed, rtol=2**-7, atol=1e-6)

    run(body, 2)


def test_the_operator_quantizes_rows() -> None:
    def body(group: Any) -> None:
        name, weight = named(group), rows(100)[0]
        residual, given = rows(50), torch.tensor([0.125])
        _, normed = expected(group.size(), residual, weight)
        for scales in (None, torch.empty(4, 1)):
            out, sums = torch.empty(4, 48, dtype=torch.float8_e4m3fn), residual.clone()
            scale = given if scales is None else None
            torch.ops.proxyccl.all_reduce_rms_norm(
                rows(group.rank()), sums, weight, EPS, name, out=out, scales=scales, scale=scale
            )
            got = out.float() * (given if scales is None else scales)
            torch.testing.assert_close(got, normed, rtol=1 / 15, atol=0.05)
        with pytest.raises(ArgumentError, match="scale: expected None, because `scales` asks for a scale of each row"):
            torch.ops.proxyccl.all_reduce_rms_norm(
                rows(group.rank()), sums, weight, EPS, name, out=out, scales=scales, scale=given
            )

    run(body, 2)


def test_a_bias_is_added_to_the_weights() -> None:
    def body(group: Any) -> None:
        weight, residual, out = rows(100)[0], rows(50), torch.empty(4, 48).bfloat16()
        _, normed = expected(group.size(), residual, weight.float() + 1)
        torch.ops.proxyccl.all_reduce_rms_norm(
            rows(group.rank()), residual, weight, EPS, named(group), out=out, weight_bias=1.0
        )
        torch.testing.assert_close(out.float(), normed, rtol=2**-7, atol=1e-6)

    run(body, 2)


def test_a_residual_may_be_written_alone() -> None:
    def body(group: Any) -> None:
        weight, sums, out = rows(100)[0], torch.full((4, 48), 9.0, dtype=torch.bfloat16), torch.empty(4, 48).bfloat16()
        torch.ops.proxyccl.all_reduce_rms_norm(rows(group.rank()), sums, weight, EPS, named(group), out=out, add=False)
        assert torch.equal(sums, sum(rows(rank).float() for rank in range(group.size())).to(torch.bfloat16))

    run(body, 2)


def added(x: Any, residual: Any, group_name: str) -> Any:
    """Adds the ranks' rows and a residual, without a norm."""
    torch.ops.proxyccl.all_reduce_rms_norm(x * 1, residual, None, EPS, group_name)
    return residual * 1


@pytest.mark.parametrize("compiled", [False, True])
def test_without_a_weight_rows_are_added_alone(compiled: bool) -> None:
    def body(group: Any) -> None:
        name, residual = named(group), rows(50)
        total, _ = expected(group.size(), residual, rows(100)[0])
        call = torch.compile(added, backend="aot_eager", fullgraph=True) if compiled else added
        assert torch.equal(call(rows(group.rank()), residual, name), total)
        assert torch.equal(residual, total)

    run(body, 2)


def test_the_operator_refuses_a_weight_without_a_place_for_rows_and_the_reverse() -> None:
    def body(group: Any) -> None:
        name, x, weight = named(group), rows(0), rows(100)[0]
        call = torch.ops.proxyccl.all_reduce_rms_norm
        with pytest.raises(ArgumentError, match="out: expected a tensor, because the rows are normed by `weight`"):
            call(x, rows(1), weight, EPS, name)
        with pytest.raises(ArgumentError, match="weight: expected an array"):
            call(x, rows(1), None, EPS, name, out=torch.empty_like(x))
        with pytest.raises(ArgumentError, match="weight: expected an array"):
            call(x, rows(1), None, EPS, name, scales=torch.empty(4, 1))

    run(body, 1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("argument", [0, 2], ids=["x", "weight"])
def test_gradients_are_refused(argument: int, compiled: bool) -> None:
    def body(group: Any) -> None:
        given = [rows(0), rows(1), rows(100)[0], named(group)]
        given[argument].requires_grad_()
        call = torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block
        with torch.no_grad():
            call(*given)
        name = ("x", "residual", "weight")[argument]
        with pytest.raises(RuntimeError if compiled else ArgumentError, match=f"{name}: requires a gradient"):
            call(*given)

    run(body, 1)


@pytest.mark.parametrize("argument", ["out", "scales", "scale"])
def test_gradients_of_named_arguments_are_refused(argument: str) -> None:
    def body(group: Any) -> None:
        x, number = rows(0), 1 if argument == "scale" else len(rows(0))
        normed = torch.empty_like(x) if argument == "out" else torch.empty_like(x, dtype=torch.float8_e4m3fn)
        given = {"out": normed} if argument == "out" else {"out": normed, argument: torch.ones(number, 1)}
        given[argument].requires_grad_()
        with pytest.raises(ArgumentError, match=f"{argument}: requires a gradient"):
            torch.ops.proxyccl.all_reduce_rms_norm(x, rows(1), rows(100)[0], EPS, named(group), **given)

    run(body, 1)


def test_the_fake_operator_agrees_with_the_real_one() -> None:
    def body(group: Any) -> None:
        x, residual, weight = rows(0), rows(1), rows(2)[0]
        arguments = (x, residual, weight, EPS, named(group))
        torch.library.opcheck(
            torch.ops.proxyccl.all_reduce_rms_norm, arguments, {"out": torch.empty_like(x)}, test_utils="test_schema"
        )
        torch.library.opcheck(
            torch.ops.proxyccl.all_reduce_rms_norm,
            arguments,
            {"out": torch.empty_like(x)},
            test_utils="test_faketensor",
        )

    run(body, 1)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_residual_may_be_divided_among_the_ranks(compiled: bool) -> None:
    def body(group: Any) -> None:
        torch._dynamo.reset()
        weight = torch.linspace(0.5, 2, 48).to(torch.bfloat16)
        residual = rows(100)
        sums, normed = expected(2, residual, weight)
        own = residual.chunk(2)[group.rank()].clone()
        function = torch.compile(block, fullgraph=True) if compiled else block
        got = function(rows(group.rank()), own, weight, named(group))
        assert torch.equal(own, sums.chunk(2)[group.rank()])
        torch.testing.assert_close(got, (2 * normed).to(torch.bfloat16), rtol=2**-7, atol=2**-7)

    run(body, 2)


def test_a_groups_communicator_makes_its_calls() -> None:
    def body(group: Any) -> None:
        comm = communicator_of(torch_group(group), "cpu")
        assert comm is group.endpoints.made[0]
        x = torch.ones(3)
        comm.all_reduce(x)
        assert x.tolist() == [2, 2, 2]

    run(body, 2)


def test_a_groups_communicator_is_made_so_that_it_can_be_suspended() -> None:
    def body(group: Any) -> None:
        whole = communicator_of(torch_group(group), "cpu", suspendable=False)
        with pytest.raises(ArgumentError, match="suspendable: is True; expected the setting of the group's comm"):
            communicator_of(torch_group(group), "cpu", suspendable=True)
        assert communicator_of(torch_group(group), "cpu") is whole
        part = torch_group(group.split(group.get_group_store(), [0, 1], None))
        comm = communicator_of(part, "cpu", suspendable=True)
        assert communicator_of(part, "cpu", suspendable=True) is comm
        comm.suspend()
        comm.resume()
        x = torch.ones(3)
        comm.all_reduce(x)
        assert x.tolist() == [2, 2, 2]

    run(body, 2)


def test_a_group_of_another_backend_has_no_communicator() -> None:
    store = dist.HashStore()
    group = dist.ProcessGroupGloo(store, 0, 1)

    class Group:
        def _get_backend(self, _: Any) -> Any:
            return group

    with pytest.raises(ArgumentError, match="group: its backend for cpu is gloo; expected proxyccl"):
        communicator_of(Group(), "cpu")
