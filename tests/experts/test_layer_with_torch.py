"""The expert-parallel layer with torch's tensors, and its gradients in torch's autograd."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from proxyccl import Communicator, EPAll2AllLayer
from support.cases.expert_layer import (
    DTYPES,
    Case,
    Values,
    plan_of,
    run_ranks,
    same,
    same_numbers,
)
from support.cases.reference import numpy_dtype
from support.ranks import Ranks


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    """Returns the module torch, whose tensors are in the CPU's memory in these tests."""
    return pytest.importorskip("torch")


HOST_TENSORS = pytest.mark.host_only(reason="with torch's tensors in the CPU's memory")


@HOST_TENSORS
@pytest.mark.parametrize("local_world_size", [3, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_torch(torch: ModuleType, dtype: str, local_world_size: int) -> None:
    plan = plan_of(Case((12, 0, 9), hidden=6, dtype=dtype, topk=3, local_world_size=local_world_size))

    def tensor(values: Values) -> Any:
        if values.dtype == numpy_dtype("bfloat16"):
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)

    def numpy(x: Any) -> Values:
        assert isinstance(x, torch.Tensor)
        return x.view(torch.int16).numpy().view(numpy_dtype("bfloat16")) if x.dtype == torch.bfloat16 else x.numpy()

    def body(comm: Communicator) -> None:
        rank = comm.rank
        with plan.case.layer(comm, dtype=getattr(torch, dtype), weight_dtype=torch.float32) as layer:
            arrays = plan.inputs[rank], plan.routing.ids[rank], plan.weights[rank]
            rows, weights, desc = layer.dispatch(*(tensor(array) for array in arrays))
            same(numpy(rows), plan.rows[rank], "output")
            same(numpy(weights), plan.row_weights[rank], "weights")
            results, scales = tensor(plan.results[rank]), tensor(plan.scales[rank])
            same_numbers(numpy(layer.combine(results, desc)), plan.combined[rank], "combine")
            same_numbers(numpy(layer.combine(results, desc, weights=scales)), plan.scaled[rank], "weighted combine")
            same(numpy(layer.redispatch(tensor(plan.others[rank]), desc)), plan.other_rows[rank], "redispatch")
            expected = plan.routing.layout(rank)
            assert desc.skipped_token_mapping_indices.tolist() == expected.skipped_token_mapping_indices.tolist()
            assert desc.token_dst_scatter_idx.tolist() == expected.token_dst_scatter_idx.tolist()

    run_ranks(3, body, local_world_size=local_world_size)


@HOST_TENSORS
@pytest.mark.parametrize("local_world_size", [2, 1])
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_a_rank_without_rows_takes_the_weights_of_its_peers_rows(
    torch: ModuleType, layout: str, local_world_size: int
) -> None:
    def body(comm: Communicator) -> None:
        with Case((4, 4), hidden=8, topk=1, local_world_size=local_world_size).layer(comm, layout=layout) as layer:
            rows, _, desc = layer.dispatch(torch.ones(4, 8), torch.zeros(4, 1, dtype=torch.int32))
            assert len(rows) == (8 if comm.rank == 0 else 0)
            weights = torch.full((len(rows),), 0.5)
            assert (layer.combine(rows, desc, weights=weights) == 0.5).all()
            assert (layer.combine_recv(layer.combine_send(rows, desc, weights=weights)) == 0.5).all()

    run_ranks(2, body, local_world_size=local_world_size)


@HOST_TENSORS
def test_the_weights_of_experts_that_move_may_be_tensors(torch: ModuleType) -> None:
    before, after = torch.tensor([[0, 1], [-1, 2]]), torch.tensor([[2, 1], [0, 2]])

    def body(comm: Communicator) -> None:
        layer = EPAll2AllLayer(comm, 4, 8, 1, comm.rank, 4, 2, 2, placement=before.flatten().tolist())
        parameter = torch.nn.Parameter(before[comm.rank, :, None].repeat(1, 5).bfloat16())
        scales = before[comm.rank, :, None, None].repeat(1, 3, 4).float().to(torch.float8_e4m3fn)
        while not layer.place(after.flatten().tolist(), [parameter, scales]):
            pass
        for tensor in (parameter, scales):
            assert (tensor.flatten(1).float() == after[comm.rank, :, None]).all()
        layer.finalize()

    run_ranks(2, body)


@HOST_TENSORS
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("local_world_size", [2, 1])
def test_gradients(torch: ModuleType, local_world_size: int, weighted: bool) -> None:
    """torch's gradcheck checks dispatch, experts and combine as one function of all ranks' tensors, because a rank's
    gradient needs the other ranks' part of the backward pass. Each rank's part runs in the rank's thread.

    The function is linear in each tensor, so that large differences are as accurate as small differences. The routing
    weights are exact in float32.
    """
    plan = plan_of(Case((4, 3), hidden=3, topk=3, dtype="float64", local_world_size=local_world_size))
    rng = np.random.default_rng(0)

    def random(*shape: int) -> Any:
        return torch.from_numpy(rng.integers(-64, 64, shape) / 32).requires_grad_()

    with Ranks(2, local_world_size=local_world_size) as ranks:
        layers = ranks.run(plan.case.layer)

        def output(rank: int, x: Any, weight: Any, factor: Any) -> Any:
            ids = torch.from_numpy(plan.routing.ids[rank])
            rows, row_weights, desc = layers[rank].dispatch(x, ids, weight.float())
            if weighted:
                return layers[rank].combine(rows * factor, desc, weights=row_weights)
            return layers[rank].combine(rows * factor * row_weights[:, None], desc)

        class Everywhere(torch.autograd.Function):  # type: ignore[misc]
            @staticmethod
            def forward(context: Any, *tensors: Any) -> Any:
                context.leaves = [tensor.detach().requires_grad_() for tensor in tensors]

                def body(comm: Communicator) -> Any:
                    with torch.enable_grad():
                        return output(comm.rank, *context.leaves[3 * comm.rank : 3 * comm.rank + 3])

                context.outputs = ranks.run(body)
                return tuple(output.detach() for output in context.outputs)

            @staticmethod
            def backward(context: Any, *gradients: Any) -> Any:
                def body(comm: Communicator) -> Any:
                    leaves = context.leaves[3 * comm.rank : 3 * comm.rank + 3]
                    output = context.outputs[comm.rank]
                    return torch.autograd.grad(output, leaves, gradients[comm.rank], retain_graph=True)

                return tuple(gradient for part in ranks.run(body) for gradient in part)

        leaves = [
            leaf
            for rank, tokens in enumerate(plan.case.tokens)
            for leaf in (random(tokens, 3), random(tokens, 3), random(plan.routing.rows[rank], 3))
        ]
        assert torch.autograd.gradcheck(Everywhere.apply, leaves, eps=1 / 32)
