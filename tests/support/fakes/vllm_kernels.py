"""Stands in for kernels of vLLM that exist only for GPUs: registers their operators for the CPU.

vLLM's passes name all these operators. The operators that quantize have vLLM's schemas, and
compute as vLLM documents. The other operators are never called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

GREATEST = 448.0
LEAST_SCALE = 1 / (GREATEST * 512)
_library = torch.library.Library("_C", "FRAGMENT")


def _quantize(result: Any, x: Any, scale: Any) -> None:
    result.copy_((x.float() / scale).clamp(-GREATEST, GREATEST).to(result.dtype))


def static_scaled_fp8_quant(result: Any, x: Any, scale: Any, _: Any = None) -> None:
    _quantize(result, x, scale)


def dynamic_scaled_fp8_quant(result: Any, x: Any, scale: Any) -> None:
    scale.copy_((x.abs().max().float() / GREATEST).clamp(min=LEAST_SCALE))
    _quantize(result, x, scale)


def dynamic_per_token_scaled_fp8_quant(result: Any, x: Any, scale: Any, _: Any) -> None:
    scale.copy_((x.abs().amax(-1, keepdim=True).float() / GREATEST).clamp(min=LEAST_SCALE))
    _quantize(result, x, scale)


OPERATORS: dict[str, Callable[..., None] | None] = {
    "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None)": (
        static_scaled_fp8_quant
    ),
    "dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale)": dynamic_scaled_fp8_quant,
    "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub)": (
        dynamic_per_token_scaled_fp8_quant
    ),
    "silu_and_mul(Tensor! result, Tensor input)": None,
    "silu_and_mul_quant(Tensor! result, Tensor input, Tensor scale)": None,
    "silu_and_mul_nvfp4_quant(Tensor! result, Tensor! scales, Tensor input, Tensor scale)": None,
    "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache)": None,
    "rms_norm(Tensor! result, Tensor input, Tensor weight, float epsilon)": None,
    "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor weight, float epsilon)": None,
    "rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor weight, Tensor scale, float epsilon)": None,
    "fused_add_rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor! residual, Tensor weight, Tensor scale, "
    "float epsilon)": None,
    "rms_norm_dynamic_per_token_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, "
    "Tensor? scale_ub, Tensor!? residual)": None,
    "fused_qk_norm_rope(Tensor! qkv, float eps)": None,
}


def register() -> None:
    """Registers the operators, once in a process."""
    for schema, body in OPERATORS.items():
        name = schema.split("(", maxsplit=1)[0]
        _library.define(f"{schema} -> ()")
        if body is not None:
            _library.impl(name, body, "CPU")
            torch.library.register_fake(f"_C::{name}", lambda *_, **__: None, lib=_library)
