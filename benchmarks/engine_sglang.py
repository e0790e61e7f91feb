"""The parts of SGLang of which `engine_decoder_rank.py` makes a decoder: layers, groups and the capture of graphs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

_OWN_KERNELS = find_spec("sgl_kernel") is not None
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.fakes import empty_packages  # noqa: E402

empty_packages.install(on_gpus=torch.cuda.is_available())  # they take effect only where the packages are not installed

from sglang.srt.plugins import load_plugins  # noqa: E402

load_plugins()  # SGLang's processes also load plug-ins before they import SGLang's other modules

import sglang.version  # noqa: E402
from sglang.srt.distributed import parallel_state, tensor_model_parallel_all_gather  # noqa: E402
from sglang.srt.layers import flashinfer_comm_fusion, layernorm  # noqa: E402
from sglang.srt.layers.layer_boundary.residual.add_norm import flashinfer_ar_fusion_applies  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402

LAYERS = "sglang.srt.layers"
all_gather = tensor_model_parallel_all_gather
RMSNorm = partial(layernorm.RMSNorm, cast_x_before_out_mul=not _OWN_KERNELS)
"""SGLang's norm. Where the package sgl_kernel is missing, the norm rounds before it multiplies by the weight, because
SGLang compiles its kernel for that order from source. The benchmark's weights are 1, so the results are the same."""

_norm_of_sums = flashinfer_comm_fusion.flashinfer_allreduce_residual_rmsnorm
_joined: list[bool] = []


def _recorded(*arguments: Any, **options: Any) -> Any:
    """Calls the function that SGLang's norms call to join an all_reduce, and records whether it did so."""
    made = _norm_of_sums(*arguments, **options)
    _joined.append(made[0] is not None)
    return made


flashinfer_comm_fusion.flashinfer_allreduce_residual_rmsnorm = _recorded


def sum_and_norm(linear: Any, norm: Any, x: Any, residual: Any) -> tuple[Any, Any]:
    """Returns the norm after a row-parallel layer, and the new residual, by the calls of SGLang's models."""
    joins = flashinfer_ar_fusion_applies(x.shape[0])
    sums = linear(x, skip_all_reduce=joins)[0]
    made: tuple[Any, Any] = norm.forward_with_allreduce_fusion(sums, residual) if joins else norm(sums, residual)
    return made


@contextmanager
def groups(asked: Any, _: str, device: torch.device) -> Iterator[Any]:
    """Makes SGLang's groups of all ranks, and destroys them in the end. Yields the tensor-parallel group."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    by_flashinfer = asked["fused"] and not asked["plug_in"]
    arguments = {
        "disable_custom_all_reduce": not asked["custom"],
        "enforce_disable_flashinfer_allreduce_fusion": not asked["fused"],
        "flashinfer_allreduce_fusion_backend": "auto" if by_flashinfer else None,
    }
    with get_context().override_server_args(**arguments):
        get_parallel().override_permanently(
            tp_size=world_size, pp_size=1, moe_ep_size=1, attn_dp_size=1, attn_cp_size=1, moe_dp_size=1,
            attn_dcp_size=1, shared_experts_tp_size=None, tp_rank=rank, pp_rank=0, attn_tp_size=world_size,
            attn_tp_rank=rank, moe_tp_size=world_size,
        )  # fmt: skip
        parallel_state.set_custom_all_reduce(asked["custom"])
        parallel_state.init_distributed_environment(
            backend=parallel_state.get_default_distributed_backend(device.type),
            world_size=world_size,
            rank=rank,
            local_rank=int(os.environ["LOCAL_RANK"]),
            distributed_init_method="env://",
        )
        parallel_state.initialize_model_parallel()
        if by_flashinfer:
            flashinfer_comm_fusion.pre_initialize_workspaces(
                max(asked["batches"]), asked["model"]["hidden"], torch.bfloat16
            )
        yield get_parallel().tp_group
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def facts(group: Any) -> dict[str, Any]:
    """Returns SGLang's version and choices, among them the class that adds short messages."""
    own = group.ca_comm
    in_use = [each for each in (own, group.pynccl_comm) if each is not None and not each.disabled]
    return {
        "sglang": sglang.version.__version__,
        "communicator": type(in_use[0]).__name__ if in_use else "none",
        "own all_reduce": type(own).__module__.startswith("sglang.") and not own.disabled,
        "own kernels": _OWN_KERNELS,
    }


def graph_capture(_: torch.device) -> AbstractContextManager[Any]:
    """Returns the context of a capture, which SGLang's communicators of all groups join."""
    made: AbstractContextManager[Any] = parallel_state.graph_capture()
    return made


def prepared(decoder: Any, _: int) -> tuple[Callable[[Any], Any], Callable[[], int]]:
    """Returns the decoder, which SGLang does not compile, and a function that returns how many norms the latest call of
    the decoder joined with their all_reduce.
    """

    def step(tokens: Any) -> Any:
        _joined.clear()
        return decoder(tokens)

    return step, lambda: sum(_joined)
