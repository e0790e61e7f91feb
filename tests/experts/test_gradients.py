"""EPAll2AllLayer under torch's autograd: compares the gradients of all ranks' inputs with numerical gradients and with
the gradients that one process computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from proxyccl import ArgumentError, Communicator, EPAll2AllLayer
from support.devices import most_ranks, runtime_with_blocks
from support.ranks import Ranks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.host_only(reason="tensors of the CPU")

TOKENS, HIDDEN, TOPK, EXPERTS_PER_RANK = 3, 2, 3, 2
LAYOUTS = {
    "one node": (2, {}, {}),
    "local combine": (2, {}, {"enable_local_combine": True}),
    "two nodes": (4, {"local_world_size": 2}, {}),
    "every rank a node": (3, {"local_world_size": 1}, {}),
    "fixed maximum": (2, {}, {"max_recv_tokens": 3 * TOKENS * TOPK}),
}

Tensor = Any
Block = Callable[[EPAll2AllLayer, Tensor, Tensor, Tensor], Tensor]
"""Computes a rank's output from its layer, tokens, expert ids and weights."""


class Mixture:
    """The layers of all ranks, and expert ids: some tokens choose an expert twice, some leave a slot without expert."""

    def __init__(self, ranks: Ranks, **options: Any) -> None:
        self.ranks, self._options = ranks, options
        self.layers = self._everywhere(self._layer)
        experts = self.layers[0].ep_config.num_experts
        generator = torch.Generator().manual_seed(3)
        self.ids = [
            torch.randint(0, experts + 1, (self.tokens(rank), TOPK), dtype=torch.int32, generator=generator)
            for rank in range(ranks.world_size)
        ]

    @staticmethod
    def tokens(rank: int) -> int:
        """Returns a rank's number of tokens, which differs between ranks and is 0 on one rank."""
        return (TOKENS, 2, 0, 1)[rank]

    def _everywhere(self, body: Callable[[Communicator], Any]) -> list[Any]:
        return self.ranks.run(body)

    def _layer(self, comm: Communicator) -> EPAll2AllLayer:
        n = comm.world_size
        options = {"dtype": "float64", "weight_dtype": "float64", **self._options}
        experts = n * EXPERTS_PER_RANK
        return EPAll2AllLayer(comm, TOKENS, HIDDEN, TOPK, comm.rank, experts, comm.local_world_size, n, **options)

    def inputs(self) -> list[Tensor]:
        """Returns the tokens and weights of rank 0, then those of rank 1, and so on."""
        generator = torch.Generator().manual_seed(4)
        shapes = [(self.tokens(rank), width) for rank in range(len(self.layers)) for width in (HIDDEN, TOPK)]
        return [torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes]

    def run(self, block: Block, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Returns all ranks' outputs for all ranks' inputs, as one function of autograd."""
        outputs: tuple[Tensor, ...] = OnRanks.apply(self, block, *inputs)
        return outputs


class OnRanks(torch.autograd.Function):  # type: ignore[misc]
    """A function of all ranks' inputs. Each rank's thread computes its own part of the forward and backward pass."""

    @staticmethod
    def forward(ctx: Any, mixture: Mixture, block: Block, *inputs: Tensor) -> tuple[Tensor, ...]:
        def body(comm: Communicator) -> tuple[list[Tensor], Tensor]:
            own = [x.detach().clone().requires_grad_() for x in inputs[2 * comm.rank : 2 * comm.rank + 2]]
            with torch.enable_grad():
                return own, block(mixture.layers[comm.rank], own[0], mixture.ids[comm.rank], own[1])

        ctx.ranks, ctx.calls = mixture.ranks, mixture.ranks.run(body)
        return tuple(output.detach() for _, output in ctx.calls)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        def body(comm: Communicator) -> Sequence[Tensor]:
            own, output = ctx.calls[comm.rank]
            found: Sequence[Tensor] = torch.autograd.grad(
                output, own, gradients[comm.rank], retain_graph=True, allow_unused=True
            )
            return found

        return None, None, *(gradient for own in ctx.ranks.run(body) for gradient in own)


@pytest.fixture(params=LAYOUTS)
def mixture(request: pytest.FixtureRequest) -> Iterator[Mixture]:
    world_size, options, layer_options = LAYOUTS[request.param]
    if world_size > most_ranks():
        pytest.skip(f"needs {world_size} ranks")
    with Ranks(world_size, make_runtime=runtime_with_blocks, **options) as ranks:
        yield Mixture(ranks, **layer_options)


def weighted_by_hand(layer: EPAll2AllLayer, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    rows, row_weights, desc = layer.dispatch(tokens, ids, weights)
    return layer.combine(torch.tanh(rows) * row_weights[:, None], desc)


def weighted_by_combine(layer: EPAll2AllLayer, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    rows, row_weights, desc = layer.dispatch(tokens, ids, weights)
    return layer.combine(torch.tanh(rows), desc, weights=row_weights.float())


def tokens_alone(layer: EPAll2AllLayer, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    rows, _, desc = layer.dispatch(tokens, ids)
    return layer.combine(rows * rows, desc) * weights.sum()


def weights_alone(layer: EPAll2AllLayer, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    constant = torch.arange(tokens.numel(), dtype=tokens.dtype).reshape(tokens.shape)
    rows, row_weights, desc = layer.dispatch(constant, ids, weights)
    return layer.combine(rows * row_weights[:, None], desc) + tokens


def in_halves(layer: EPAll2AllLayer, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    rows, row_weights, desc = layer.dispatch_recv(layer.dispatch_send(tokens, ids, weights))
    return layer.combine_recv(layer.combine_send(torch.tanh(rows) * row_weights[:, None], desc))


def by_an_earlier_routing(layer: EPAll2AllLayer, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    _, _, desc = layer.dispatch(tokens.detach(), ids)
    return layer.combine(torch.tanh(layer.redispatch(tokens, desc)), desc) * weights.sum()


@pytest.mark.parametrize("block", [weighted_by_hand, tokens_alone, weights_alone, in_halves, by_an_earlier_routing])
def test_gradients_are_the_numerical_ones(mixture: Mixture, block: Block) -> None:
    assert torch.autograd.gradcheck(lambda *inputs: mixture.run(block, *inputs), mixture.inputs())


@pytest.mark.parametrize("block", [weighted_by_hand, by_an_earlier_routing])
def test_gradients_with_gaps_between_experts_are_the_numerical_ones(pair: Ranks, block: Block) -> None:
    mixture = Mixture(pair, expert_alignment=4)
    assert torch.autograd.gradcheck(lambda *inputs: mixture.run(block, *inputs), mixture.inputs())


def test_gradients_of_combine_weights_are_the_numerical_ones(mixture: Mixture) -> None:
    # Because the weights are float32, the numerical step must be large. A large step is accurate, because the function
    # is linear in the weights.
    inputs = mixture.inputs()
    tokens, weights = inputs[::2], inputs[1::2]

    def of_weights(*changed: Tensor) -> tuple[Tensor, ...]:
        pairs = [x for pair in zip((x.detach() for x in tokens), changed, strict=True) for x in pair]
        return mixture.run(weighted_by_combine, *pairs)

    def of_tokens(*changed: Tensor) -> tuple[Tensor, ...]:
        pairs = [x for pair in zip(changed, (x.detach() for x in weights), strict=True) for x in pair]
        return mixture.run(weighted_by_combine, *pairs)

    assert torch.autograd.gradcheck(of_weights, weights, eps=1e-2, atol=1e-4)
    assert torch.autograd.gradcheck(of_tokens, tokens)


def test_gradients_are_those_of_one_process(mixture: Mixture) -> None:
    """A dense model computes the same gradients in one process. Each expert multiplies tokens by its matrix; tokens of
    all ranks contribute to the matrix's gradient.
    """
    n = len(mixture.layers)
    matrices = torch.randn((n * EXPERTS_PER_RANK, HIDDEN, HIDDEN), dtype=torch.float64)
    inputs = mixture.inputs()

    def dense(matrices: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        # Slots without expert use the last matrix, which is zero.
        padded = torch.cat([matrices, torch.zeros_like(matrices[:1])])
        for rank, ids in enumerate(mixture.ids):
            tokens, weights = inputs[2 * rank], inputs[2 * rank + 1]
            slots = torch.einsum("th,tkhj->tkj", tokens, padded[ids.long()])
            total = total + torch.einsum("tkj,tk->tj", slots, weights).square().sum()
        return total

    wanted = torch.autograd.grad(dense(matrices.requires_grad_()), [matrices, *inputs])

    def body(comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        layer, first = mixture.layers[comm.rank], comm.rank * EXPERTS_PER_RANK
        own = matrices.detach()[first : first + EXPERTS_PER_RANK].clone().requires_grad_()
        tokens, weights = (x.detach().clone().requires_grad_() for x in inputs[2 * comm.rank : 2 * comm.rank + 2])
        rows, row_weights, desc = layer.dispatch(tokens, mixture.ids[comm.rank], weights)
        counts = desc.counts.sum(dim=0)[first : first + EXPERTS_PER_RANK].tolist()
        parts = torch.split(rows, [*counts, len(rows) - sum(counts)])
        made = [part @ matrix for part, matrix in zip(parts, own, strict=False)] + [parts[-1]]
        combined = layer.combine(torch.cat(made) * row_weights[:, None], desc)
        tokens_grad, weights_grad, own_grad = torch.autograd.grad(combined.square().sum(), [tokens, weights, own])
        return tokens_grad, weights_grad, own_grad

    found = mixture.ranks.run(body)
    torch.testing.assert_close(torch.cat([own for _, _, own in found]), wanted[0])
    for rank, (tokens_grad, weights_grad, _) in enumerate(found):
        torch.testing.assert_close(tokens_grad, wanted[1 + 2 * rank])
        torch.testing.assert_close(weights_grad, wanted[2 + 2 * rank])


@pytest.mark.parametrize("buffers", [0, 1])
@pytest.mark.parametrize("halves", [False, True])
def test_gradients_of_a_row_for_each_rank(pair: Ranks, halves: bool, buffers: int) -> None:
    """Expert i multiplies its rows by i + 1, so that the exact gradients are known."""
    mixture = Mixture(pair, layout="rank", dtype="float32", weight_dtype="float32", output_buffers=buffers)

    def body(comm: Communicator) -> None:
        layer, ids = mixture.layers[comm.rank], mixture.ids[comm.rank]
        tokens = torch.rand((len(ids), HIDDEN), requires_grad=True)
        weights = torch.rand(ids.shape, requires_grad=True)
        if halves:
            rows, row_weights, desc = layer.dispatch_recv(layer.dispatch_send(tokens, ids, weights))
        else:
            rows, row_weights, desc = layer.dispatch(tokens, ids, weights)
        # For an expert of another rank, the row's weight is 0, so the expert's factor does not matter.
        factors = desc.local_expert_ids + comm.rank * EXPERTS_PER_RANK + 1
        made = rows * (row_weights * factors).sum(1, keepdim=True)
        combined = layer.combine_recv(layer.combine_send(made, desc)) if halves else layer.combine(made, desc)
        combined.sum().backward()
        kept = torch.where(ids < layer.ep_config.num_experts, ids + 1, 0).float()
        torch.testing.assert_close(tokens.grad, (kept * weights).sum(1, keepdim=True).expand(-1, HIDDEN))
        torch.testing.assert_close(weights.grad, kept * tokens.detach().sum(1, keepdim=True))

    pair.run(body)


# -- recording ---


def test_what_a_fixed_maximum_leaves_over_is_zero(pair: Ranks) -> None:
    mixture = Mixture(pair, max_recv_tokens=4 * TOKENS * TOPK)

    def body(comm: Communicator) -> None:
        layer, ids = mixture.layers[comm.rank], mixture.ids[comm.rank]
        tokens = torch.ones((len(ids), HIDDEN), dtype=torch.float64, requires_grad=True)
        weights = torch.ones(ids.shape, dtype=torch.float64, requires_grad=True)
        rows, row_weights, desc = layer.dispatch(tokens, ids, weights)
        filled = int(desc.num_recv_tokens[0])
        assert 0 < filled < len(rows)
        assert (rows[:filled] == 1).all()
        assert (row_weights[:filled] == 1).all()
        assert not rows[filled:].any()
        assert not row_weights[filled:].any()
        scales = row_weights.detach().float().requires_grad_()
        rows.retain_grad()
        layer.combine(rows, desc, weights=scales).sum().backward()
        assert (rows.grad[:filled] == 1).all()
        assert not rows.grad[filled:].any()
        assert (scales.grad[:filled] == HIDDEN).all()
        assert not scales.grad[filled:].any()

    pair.run(body)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradients_have_their_tensors_types(pair: Ranks, dtype: str) -> None:
    mixture = Mixture(pair, dtype=dtype, weight_dtype="float32")

    def body(comm: Communicator) -> None:
        layer, ids = mixture.layers[comm.rank], mixture.ids[comm.rank]
        tokens = torch.full((len(ids), HIDDEN), 0.5, dtype=getattr(torch, dtype), requires_grad=True)
        weights = torch.full(ids.shape, 0.25, requires_grad=True)
        rows, row_weights, desc = layer.dispatch(tokens, ids, weights)
        layer.combine(rows, desc, weights=row_weights).sum().backward()
        kept = (ids < layer.ep_config.num_experts).float()
        assert (tokens.grad.dtype, weights.grad.dtype) == (tokens.dtype, weights.dtype)
        torch.testing.assert_close(tokens.grad.float(), 0.25 * kept.sum(dim=1, keepdim=True).expand(-1, HIDDEN))
        torch.testing.assert_close(weights.grad, 0.5 * HIDDEN * kept)

    pair.run(body)


def test_nothing_is_recorded_that_needs_no_gradient(pair: Ranks) -> None:
    mixture = Mixture(pair)

    def body(comm: Communicator) -> None:
        layer, ids = mixture.layers[comm.rank], mixture.ids[comm.rank]
        tokens = torch.ones((len(ids), HIDDEN), dtype=torch.float64)
        weights = torch.ones(ids.shape, dtype=torch.float64)
        rows, row_weights, desc = layer.dispatch(tokens, ids, weights)
        assert not rows.requires_grad
        assert not row_weights.requires_grad
        with torch.no_grad():
            rows, row_weights, desc = layer.dispatch(tokens.requires_grad_(), ids, weights)
            assert not layer.combine(rows, desc).requires_grad
        rows, row_weights, desc = layer.dispatch(tokens, ids, weights)
        assert rows.requires_grad
        assert not row_weights.requires_grad

    pair.run(body)


def test_an_output_is_refused_where_the_call_is_recorded(pair: Ranks) -> None:
    mixture = Mixture(pair)

    def body(comm: Communicator) -> None:
        layer, ids = mixture.layers[comm.rank], mixture.ids[comm.rank]
        tokens = torch.ones((len(ids), HIDDEN), dtype=torch.float64, requires_grad=True)
        rows, _, desc = layer.dispatch(tokens, ids)
        with pytest.raises(ArgumentError, match=r"^out: can't be given"):
            layer.combine(rows, desc, out=torch.empty_like(tokens))
        assert torch.equal(
            layer.combine(rows.detach(), desc, out=torch.empty_like(rows[: len(ids)])), layer.combine(rows, desc)
        )

    pair.run(body)
