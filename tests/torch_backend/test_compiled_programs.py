"""Programs under torch.compile: Dynamo calls functions of this package without tracing them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from proxyccl import Communicator, EPAll2AllLayer, ThreadBootstrap  # noqa: E402
from support.devices import torch_device  # noqa: E402

TOKENS, HIDDEN, EXPERTS, TOPK = 6, 64, 4, 2


def traced_files(function: Any, *arguments: Any) -> tuple[Any, set[str]]:
    """Compiles a function, calls it twice and checks that both results are equal. Returns the result and the files
    whose code Dynamo traced.
    """
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    torch._dynamo.reset()
    clear_compilation_metrics()
    compiled = torch.compile(function, backend="eager")
    first, second = compiled(*arguments), compiled(*arguments)
    assert torch.equal(first, second)
    return second, {str(each.co_filename) for each in get_compilation_metrics()}


def test_a_compiled_function_calls_a_communicator() -> None:
    with Communicator(ThreadBootstrap.create(1)[0]) as comm:

        def function(x: torch.Tensor) -> torch.Tensor:
            doubled = x * 2
            comm.all_reduce(doubled)
            return comm.all_gather(doubled + comm.rank) + 1

        result, files = traced_files(function, torch.arange(5.0, device=torch_device(comm)))
        assert torch.equal(result.cpu(), torch.arange(5.0) * 2 + 1)
    assert files == {__file__}


def test_a_compiled_function_calls_a_layer_of_experts() -> None:
    x = torch.randint(-8, 8, (TOKENS, HIDDEN)).to(torch.bfloat16)
    ids = torch.tensor([[0, 3], [1, 2], [3, 1], [0, 1], [2, 3], [1, 0]], dtype=torch.int32)
    with Communicator(ThreadBootstrap.create(1)[0]) as comm:
        layer = EPAll2AllLayer(comm, TOKENS, HIDDEN, TOPK, 0, EXPERTS, 1, 1)

        def function(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            rows, _, description = layer.dispatch(x + 0, ids)
            return layer.combine(rows, description, topk_weights=weights) + 0

        arguments = [each.to(torch_device(comm)) for each in (x, ids, torch.ones(TOKENS, TOPK))]
        result, files = traced_files(function, *arguments)
        layer.finalize()
        assert torch.equal(result.cpu(), TOPK * x)
    assert files == {__file__}
