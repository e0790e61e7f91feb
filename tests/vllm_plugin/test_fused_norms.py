"""The pass that joins an all_reduce and the norm after it, in graphs that vLLM's pass manager handles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import vllm._custom_ops
from proxyccl_vllm.fused_norms import FusedNorms, PassManager
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.compilation.passes.ir.inplace_functionalization import VllmIRInplaceFunctionalizationPass
from vllm.config import ModelConfig, get_current_vllm_config
from vllm.config.utils import Range
from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

on_two = pytest.mark.parametrize("ranks", [2], indirect=True, ids=["2 ranks"])  # graphs are the same for more ranks
WIDTH = 64
TOLERANCES = {"rtol": 2**-6, "atol": 2**-6}


def calls(graph: Any) -> list[str]:
    """Returns the kind of quantization of each all_reduce_rms_norm call in a functionalized graph."""
    operator = torch.ops.proxyccl.all_reduce_rms_norm.default
    made = [node.kwargs for node in graph.nodes if operator in node.args[:1]]
    return ["by row" if each["scales"] else "by one" if each["scale"] else "not" for each in made]


class Block(torch.nn.Module):
    """Two norms, each of a sum of the ranks' tensors."""

    def __init__(self, kind: Callable[..., Any], eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = kind(WIDTH, eps=eps), kind(WIDTH, eps=eps)
        for norm in (self.first, self.second):
            norm.weight.data = torch.linspace(-1, 1, WIDTH).to(dtype)

    def forward(self, x: Any, y: Any, residual: Any) -> Any:
        normed, residual = self.first(tensor_model_parallel_all_reduce(x * 2), residual)
        normed, residual = self.second(tensor_model_parallel_all_reduce(normed + y), residual)
        return normed


class Alone(Block):
    """A norm without a residual, as after an embedding. The norm's input becomes the next residual."""

    def forward(self, x: Any, y: Any, residual: Any) -> Any:
        total = tensor_model_parallel_all_reduce(x * 2)
        return self.first(total), total + y


def inputs(dtype: torch.dtype = torch.bfloat16, rows: int = 5) -> list[Any]:
    rank = get_tp_group().rank_in_group
    mine = torch.Generator().manual_seed(rank)
    same = torch.Generator().manual_seed(100)
    x, y = (torch.randn(rows, WIDTH, generator=mine).to(dtype) for _ in range(2))
    return [x, y, torch.randn(rows, WIDTH, generator=same).to(dtype)]


def through_the_passes(model: Any, given: list[Any]) -> tuple[Any, list[str]]:
    """Compiles a model with torch's compiler and vLLM's passes. Returns the compiled model's results for the inputs,
    and the kind of quantization of each all_reduce_rms_norm call in its graph.
    """
    manager, found = PassManager(), []
    manager.configure(get_current_vllm_config())

    class Noting(PassManager):
        """A manager that records the all_reduce_rms_norm calls in the final graph."""

        def __init__(self) -> None:
            self.__dict__.update(manager.__dict__)

        def __call__(self, graph: Any) -> None:
            super().__call__(graph)
            found.append(calls(graph))

    options = {
        "pre_grad_custom_pass": VllmIRInplaceFunctionalizationPass(get_current_vllm_config()),
        "post_grad_custom_post_pass": Noting(),
        "fx_graph_cache": False,
        "fx_graph_remote_cache": False,
        "compile_threads": 1,
        "enable_auto_functionalized_v2": False,
    }
    torch._dynamo.reset()
    own = [each.clone() for each in given]
    for each in own:
        torch._dynamo.mark_dynamic(each, 0)  # vLLM also compiles for any number of tokens
    with pass_context(Range(1, 64)), torch.no_grad():
        got = torch.compile(model, fullgraph=True, options=options)(*own)
    assert len(found) == 1
    return got, found[0]


@pytest.mark.parametrize(("kind", "eps"), [("rms", 1e-5), ("gemma", 1e-6)])
def test_norms_are_joined_with_their_all_reduce(ranks: Any, kind: str, eps: float) -> None:
    ranks.run(joined, kind, eps)


def joined(kind: str, eps: float) -> None:
    norm = {"rms": RMSNorm, "gemma": GemmaRMSNorm}[kind]
    for model, norms in ((Block(norm, eps, torch.bfloat16), 2), (Alone(norm, eps, torch.bfloat16), 1)):
        given = inputs()
        with torch.no_grad():
            want = model(*[each.clone() for each in given])
        got, made = through_the_passes(model, given)
        assert made == ["not"] * norms
        torch.testing.assert_close(got, want, **TOLERANCES)


@on_two
def test_other_norms_are_left_alone(ranks: Any) -> None:
    """Norms whose epsilon is not the model's, or whose type the operator does not support, are not joined."""
    ranks.run(left_alone)


def left_alone() -> None:
    for eps, dtype in (
        (1e-3, torch.bfloat16),
        (1e-5, torch.float32),
    ):
        model, given = Block(RMSNorm, eps, dtype), inputs(dtype)
        with torch.no_grad():
            want = model(*[each.clone() for each in given])
        got, made = through_the_passes(model, given)
        assert made == []
        torch.testing.assert_close(got, want, **TOLERANCES)


class Sliced(Block):
    """A norm of a sum of slices of padded rows, as after experts."""

    def forward(self, x: Any, y: Any, residual: Any) -> Any:
        padded = torch.cat([x, y], -1) * 2
        return self.first(tensor_model_parallel_all_reduce(padded[..., :WIDTH]), residual)


class OtherResidual(Block):
    """A norm of a sum, with a residual whose type differs from the sum's."""

    def forward(self, x: Any, y: Any, residual: Any) -> Any:
        return self.first(tensor_model_parallel_all_reduce(x * 2), residual.float())


@on_two
@pytest.mark.parametrize("kind", [Sliced, OtherResidual])
def test_tensors_that_the_operator_refuses_are_left_alone(ranks: Any, kind: type[Block]) -> None:
    ranks.run(refused, kind)


def refused(kind: type[Block]) -> None:
    model, given = kind(RMSNorm, 1e-5, torch.bfloat16), inputs()
    with torch.no_grad():
        want = model(*[each.clone() for each in given])
    got, made = through_the_passes(model, given)
    assert made == []
    torch.testing.assert_close(got, want, **TOLERANCES)


class Quantized(Block):
    """Norms whose rows are quantized to float8, by vLLM's layer, as before a matrix product in float8.

    Args:
        scale: the scale of all rows; None for one scale per row.
        native: whether the layer uses torch's operators, which torch compiles; otherwise vLLM's kernels.
        adds: whether a residual is added.
    """

    def __init__(self, kind: Any, scale: Any, native: bool, adds: bool) -> None:
        super().__init__(kind, 1e-6, torch.bfloat16)
        self.scale, self.adds = scale, adds
        layer = QuantFP8(scale is not None, GroupShape.PER_TOKEN if scale is None else GroupShape.PER_TENSOR)
        self.quantize = layer.forward_native if native else layer.forward_cuda

    def forward(self, x: Any, y: Any, residual: Any) -> Any:
        total = tensor_model_parallel_all_reduce(x * 2)
        normed, sums = self.first(total, residual) if self.adds else (self.first(total), total)
        return (*self.quantize(normed, self.scale), sums + y)


@on_two
@pytest.mark.parametrize("native", [False, True], ids=["kernel", "native"])
@pytest.mark.parametrize("kind", ["rms", "gemma"])
def test_quantization_joins_too(ranks: Any, kind: str, native: bool) -> None:
    ranks.run(quantized, kind, native)


def quantized(kind: str, native: bool) -> None:
    norm, config = {"rms": RMSNorm, "gemma": GemmaRMSNorm}[kind], get_current_vllm_config().compilation_config
    with mock.patch.object(config, "custom_ops", ["none"] if native else ["none", "+quant_fp8"]):
        for scale in (torch.full((1, 1), 0.03125), None):
            for adds in (True, False):
                model, given = Quantized(norm, scale, native, adds), inputs()
                with torch.no_grad():
                    want = model(*[each.clone() for each in given])
                got, made = through_the_passes(model, given)
                assert made == ["by row" if scale is None else "by one"]
                assert got[0].dtype is torch.float8_e4m3fn
                torch.testing.assert_close(got[1], want[1], rtol=2**-6, atol=0)
                torch.testing.assert_close(got[2], want[2], **TOLERANCES)
                back, wanted = (each[0].float() * each[1] for each in (got, want))
                torch.testing.assert_close(back, wanted, rtol=1 / 7, atol=0.05)


_library = torch.library.Library("_C", "FRAGMENT")
_library.define(
    "scaled_fp4_quant.out(Tensor input, Tensor input_scale, bool is_sf_swizzled_layout, *, "
    "Tensor(a!) output, Tensor(b!) output_scale) -> ()"
)


def quantize_to_float4(x: Any, scale: Any, _: bool, *, output: Any, output_scale: Any) -> None:
    """Stands in for vLLM's kernel, which needs a GPU: keeps the signs and every second value."""
    output.copy_((x[:, ::2].float() * scale).sign() + 1)
    output_scale.zero_()


_library.impl("scaled_fp4_quant.out", quantize_to_float4, "CPU")
torch.library.register_fake("_C::scaled_fp4_quant.out", lambda *_, **__: None, lib=_library)


class Narrow(Quantized):
    """Norms whose rows are quantized to NVFP4."""

    def __init__(self, adds: bool) -> None:
        super().__init__(RMSNorm, None, True, adds)
        self.quantize = lambda rows, _: vllm._custom_ops.scaled_fp4_quant(rows, torch.ones(()))


@on_two
@pytest.mark.parametrize("adds", [False, True])
def test_a_norm_before_nvfp4_is_joined_without_the_quantization(ranks: Any, adds: bool) -> None:
    ranks.run(narrowed, adds)


def narrowed(adds: bool) -> None:
    model, given = Narrow(adds), inputs()
    with torch.no_grad():
        want = model(*[each.clone() for each in given])
    got, made = through_the_passes(model, given)
    assert made == ["not"]
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[2], want[2], **TOLERANCES)


class Apart(Block):
    """A block of vLLM's Transformers backend, whose residuals are added apart from the norms."""

    def forward(self, x: Any, y: Any, residual: Any) -> Any:
        residual = residual + tensor_model_parallel_all_reduce(x * 2)
        residual = residual + tensor_model_parallel_all_reduce(self.first(residual) + y)
        return self.second(residual)


@on_two
def test_a_residual_that_the_model_adds_is_joined(ranks: Any) -> None:
    ranks.run(added_by_the_model)


def added_by_the_model() -> None:
    config, model = get_current_vllm_config(), Apart(RMSNorm, 1e-6, torch.bfloat16)
    described = mock.Mock(spec=ModelConfig, dtype=torch.bfloat16, hf_text_config=None)
    given = [each[None] for each in inputs()]  # the backend has a dimension for the batch
    for transformers, norms in ((True, 2), (False, 0)):
        described.using_transformers_backend.return_value = transformers
        with torch.no_grad():
            want = model(*[each.clone() for each in given])
        with mock.patch.object(config, "model_config", described):
            got, made = through_the_passes(model, given)
        assert made == ["not"] * norms
        torch.testing.assert_close(got, want, **TOLERANCES)


@on_two
def test_caches_know_the_group_in_the_graph(ranks: Any) -> None:
    """The group's name does not depend on groups that the process made earlier."""
    ranks.run(identified)


def identified() -> None:
    assert FusedNorms(get_current_vllm_config()).uuid().split("|")[1] == "proxyccl tp:0"
    found = torch._C._distributed_c10d._resolve_process_group("proxyccl tp:0")
    assert found is get_tp_group().device_group


@on_two
def test_the_pass_precedes_vllms_and_can_be_left_out(ranks: Any) -> None:
    ranks.run(places)


def places() -> None:
    config, usual = get_current_vllm_config(), ["NoOpEliminationPass"]
    for options, names in (({}, [*usual, "FusedNorms"]), ({"proxyccl_fused_norms": False}, usual)):
        with mock.patch.object(config, "additional_config", options):
            manager = PassManager()
            manager.configure(config)
        assert [type(each).__name__ for each in manager.passes] == names
