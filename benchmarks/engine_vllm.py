"""The parts of vLLM of which `engine_decoder_rank.py` makes a decoder: layers, groups, the compiler with the passes of
vLLM's platform, and the capture of graphs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import vllm.platforms

if not torch.cuda.is_available():  # on a machine without GPUs, vLLM's GPU wheel finds no platform and has no kernels
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from support.fakes import vllm_kernels

    vllm_kernels.register()
    vllm.platforms.builtin_platform_plugins["cpu"] = lambda: "vllm.platforms.cpu.CpuPlatform"

from vllm.compilation.passes.inductor_pass import pass_context
from vllm.compilation.passes.ir.inplace_functionalization import VllmIRInplaceFunctionalizationPass
from vllm.config import (
    CompilationConfig,
    ModelConfig,
    PassConfig,
    VllmConfig,
    get_current_vllm_config,
    set_current_vllm_config,
)
from vllm.config.utils import Range
from vllm.distributed import parallel_state, tensor_model_parallel_all_gather
from vllm.model_executor.layers import layernorm
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

LAYERS = "vllm.model_executor.layers"
RMSNorm = layernorm.RMSNorm
all_gather = tensor_model_parallel_all_gather
graph_capture = parallel_state.graph_capture


def sum_and_norm(linear: Any, norm: Any, x: Any, residual: Any) -> tuple[Any, Any]:
    """Returns the norm after a row-parallel layer, and the new residual. Passes of the compiler may join the two."""
    made: tuple[Any, Any] = norm(linear(x)[0], residual)
    return made


@contextmanager
def groups(asked: Any, folder: str, device: torch.device) -> Iterator[Any]:
    """Makes vLLM's groups of all ranks, and destroys them in the end. Yields the tensor-parallel group."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    of_gpus = ("fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant")
    passes = {} if device.type == "cuda" else dict.fromkeys(of_gpus, False)
    passes["fuse_allreduce_rms"] = joins = asked["fused"] and not asked["plug_in"]
    described = {"model": folder, "dtype": "bfloat16", "skip_tokenizer_init": True}
    parallel_state.set_custom_all_reduce(asked["custom"])
    config = VllmConfig(
        **({"model_config": ModelConfig(**described)} if joins else {}),
        compilation_config=CompilationConfig(pass_config=PassConfig(**passes)),
        additional_config={"proxyccl_fused_norms": asked["fused"]},
    )
    with set_current_vllm_config(config, check_compile=False), config.kernel_config.ir_op_priority.set_priority():
        parallel_state.init_distributed_environment(
            world_size, rank, "env://", int(os.environ["LOCAL_RANK"]), current_platform.dist_backend
        )
        parallel_state.initialize_model_parallel(world_size)
        yield parallel_state.get_tp_group()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def facts(group: Any) -> dict[str, Any]:
    """Returns vLLM's version and choices."""
    own = getattr(group.device_communicator, "ca_comm", None)
    return {
        "vllm": vllm.__version__,
        "platform": type(current_platform).__name__,
        "communicator": type(group.device_communicator).__name__,
        "own all_reduce": own is not None and not own.disabled,
    }


def prepared(decoder: Any, batch: int) -> tuple[Callable[[Any], Any], Callable[[], int]]:
    """Compiles the decoder by torch, with the passes of vLLM's platform.

    Returns:
        The compiled function, and a function that returns how many norms the latest compilation joined with their
        all_reduce.
    """
    config = get_current_vllm_config()
    manager = resolve_obj_by_qualname(current_platform.get_pass_manager_cls())()
    manager.configure(config)
    torch._dynamo.reset()
    options = {
        "pre_grad_custom_pass": VllmIRInplaceFunctionalizationPass(config),
        "post_grad_custom_post_pass": manager,
        "enable_auto_functionalized_v2": False,
        "fx_graph_cache": False,
    }
    compiled = torch.compile(decoder, fullgraph=True, dynamic=False, options=options)

    def step(tokens: Any) -> Any:
        with pass_context(Range(1, batch)):
            return compiled(tokens)

    def joined() -> int:
        joining = [each for each in manager.passes if type(each).__name__ in ("FusedNorms", "AllReduceFusionPass")]
        return sum(getattr(each, "matched_count", 0) for each in joining)

    return step, joined
