"""Defines a pass of vLLM's compiler that replaces an all_reduce and the norm after it by one operator."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import vllm.ir.ops
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor import pattern_matcher
from torch._prims_common import is_contiguous_or_false
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq
from vllm.compilation.passes.inductor_pass import enable_fake_mode
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.compilation.passes.vllm_inductor_pass import VllmFusionPatternMatcherPass, VllmInductorPass
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size, get_tp_group, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym, kFp8StaticTensorSym
from vllm.platforms import current_platform

from proxyccl_vllm.platform import FUSED_NORMS

try:
    from vllm.compilation.passes.fusion.add_rms_fusion import AddRMSNormFusionPass
except ImportError:  # vLLM 0.26
    AddRMSNormFusionPass = None

_OPERATOR = torch.ops.proxyccl.all_reduce_rms_norm.default
_RESIDUAL, _OUT, _SCALES = 1, 2, 3
"""The places of the operator's results in its functionalized form."""
_DTYPES = (torch.bfloat16, torch.float16)
_USUAL_EPS = (1e-5, 1e-6)
_STATIC, _PER_TOKEN = kFp8StaticTensorSym, kFp8DynamicTokenSym
_EARLIER = ("NoOpEliminationPass", "AddRMSNormFusionPass")
"""vLLM's passes after which graphs can match the patterns."""


class _Form(NamedTuple):
    """A pattern of an all_reduce and a norm, and the operator that replaces it.

    Attributes:
        eps: the norm's epsilon.
        adds: whether a residual is added.
        uses_sums: whether the graph also uses the norm's input. Without a residual, the pattern matches whether or not
            the graph uses the norm's input.
        gemma: whether the norm's weight is `weight + 1` in float32.
        quantization: vLLM's key of the quantization after the norm; None for none.
    """

    eps: float
    adds: bool
    uses_sums: bool
    gemma: bool
    quantization: Any

    @property
    def names(self) -> list[str]:
        return ["x", "weight", *(["residual"] if self.adds else []), *(["scale"] if self.is_static else [])]

    @property
    def is_static(self) -> bool:
        return self.quantization is _STATIC

    def examples(self) -> list[torch.Tensor]:
        made = {
            "x": torch.empty(5, 16, dtype=torch.bfloat16, device=current_platform.device_type),
            "weight": torch.empty(16, dtype=torch.bfloat16, device=current_platform.device_type),
            "residual": torch.empty(5, 16, dtype=torch.bfloat16, device=current_platform.device_type),
            "scale": torch.empty(1, 1, dtype=torch.float32, device=current_platform.device_type),
        }
        return [made[name] for name in self.names]

    def pattern(self) -> Callable[..., Any]:
        quantize = _quantizer(self.quantization)

        def norm(**given: torch.Tensor) -> Any:
            total, weight = tensor_model_parallel_all_reduce(given["x"]), given["weight"]
            weight = weight.float() + 1.0 if self.gemma else weight
            if self.adds:
                normed, sums = vllm.ir.ops.fused_add_rms_norm(total, given["residual"], weight, self.eps)
            else:
                normed, sums = vllm.ir.ops.rms_norm(total, weight, self.eps), total
            return self._results(quantize(normed, given.get("scale")), sums)

        return self._named(norm)

    def replacement(self, group_name: str) -> Callable[..., Any]:
        def norm(**given: torch.Tensor) -> Any:
            x, per_token = given["x"], self.quantization is _PER_TOKEN
            made = auto_functionalized(
                _OPERATOR,
                x=x,
                residual=given["residual"] if self.adds else torch.empty_like(x),
                weight=given["weight"],
                eps=self.eps,
                group_name=group_name,
                out=torch.empty_like(x, dtype=torch.float8_e4m3fn if self.quantization else None),
                scales=x.new_empty((*x.shape[:-1], 1), dtype=torch.float32) if per_token else None,
                scale=given.get("scale"),
                add=self.adds,
                weight_bias=1.0 if self.gemma else 0.0,
            )
            return self._results([made[_OUT], *([made[_SCALES]] if per_token else [])], made[_RESIDUAL])

        return self._named(norm)

    def fits(self, match: Any) -> bool:
        x, *others = given = [match.kwargs[name].meta["val"] for name in self.names if name != "scale"]
        return (
            x.dtype in _DTYPES
            and all(each.dtype == x.dtype for each in others)
            and all(is_contiguous_or_false(each) for each in given)
            and (not self.adds or statically_known_true(sym_eq(others[-1].shape, x.shape)))
        )

    def _results(self, normed: list[torch.Tensor], sums: torch.Tensor) -> Any:
        results = (*normed, sums) if self.uses_sums else tuple(normed)
        return results if len(results) > 1 else results[0]

    def _named(self, norm: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that takes arguments by position, with the names in its signature, which torch reads."""
        names = self.names

        def named(*given: torch.Tensor) -> Any:
            return norm(**dict(zip(names, given, strict=True)))

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        named.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        return named


def _quantizer(key: Any) -> Callable[[torch.Tensor, torch.Tensor | None], list[torch.Tensor]]:
    """Returns a function that quantizes as vLLM's current configuration says. The function returns the quantized rows
    and, if each row has its own scale, the scales.
    """
    if key is None:
        return lambda normed, _: [normed]
    from vllm.compilation.passes.fusion.matcher_utils import MatcherQuantFP8  # needs vLLM's kernels

    matcher = MatcherQuantFP8(key)
    if key is _STATIC:
        return lambda normed, scale: [matcher(normed, scale)[0]]
    return lambda normed, _: list(matcher(normed))


def _forms(eps: set[float]) -> Iterator[_Form]:
    """Yields the patterns, larger patterns first, because a smaller pattern also matches a part of a larger pattern."""
    quantizes = hasattr(torch.ops._C, "static_scaled_fp8_quant") and current_platform.fp8_dtype() is torch.float8_e4m3fn
    for quantization in (_STATIC, _PER_TOKEN, None) if quantizes else (None,):
        for gemma, each in itertools.product((True, False), sorted(eps)):
            for adds, uses_sums in ((True, True), (True, False), (False, True)):
                yield _Form(each, adds, uses_sums, gemma, quantization)


class FusedNorms(VllmFusionPatternMatcherPass):  # type: ignore[misc]
    """Replaces each all_reduce of the tensor-parallel group together with the norm that follows it."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config, "proxyccl_fused_norms")
        self._group_name = get_tp_group().device_communicator.group_name
        model = config.model_config
        own = getattr(model.hf_text_config, "rms_norm_eps", None) if model is not None else None
        self._eps = {*_USUAL_EPS, *([own] if isinstance(own, float) else [])}
        self._register_all()

    @enable_fake_mode  # type: ignore[misc]
    def _register_all(self) -> None:
        for form in _forms(self._eps):
            pattern_matcher.register_replacement(
                form.pattern(),
                form.replacement(self._group_name),
                form.examples(),
                self._trace_fn,
                self.pm_pass,
                extra_check=form.fits,
            )
            pattern_matcher._seen_patterns.clear()  # else torch rejects a pattern that differs only in a constant

    def uuid(self) -> str:
        """Returns an identifier of the graphs that this pass makes, for caches of compiled graphs."""
        source = VllmInductorPass.hash_source(type(self), _Form, _quantizer, _forms)
        return f"{source}|{self._group_name}|{sorted(self._eps)}"


class PassManager(PostGradPassManager):  # type: ignore[misc]
    """Runs vLLM's passes, with `FusedNorms` before those that join norms with quantization."""

    def configure(self, config: VllmConfig) -> None:
        super().configure(config)
        options = config.additional_config
        asked = options.get(FUSED_NORMS, True) if isinstance(options, dict) else True
        if not asked or get_tensor_model_parallel_world_size() == 1:
            return
        names = [type(each).__name__ for each in self.passes]
        place = next((i for i, name in enumerate(names) if name not in _EARLIER), len(names))
        model = config.model_config
        adds_apart = AddRMSNormFusionPass is not None and model is not None and model.using_transformers_backend()
        with set_current_vllm_config(config, check_compile=False):
            added = [FusedNorms(config)]
            if adds_apart and "AddRMSNormFusionPass" not in names:
                # vLLM configures this pass only for its own fusions, one of which the platform switches off.
                added.insert(0, AddRMSNormFusionPass(config))
            self.passes[place:place] = added
