"""The program of a rank; `vllm_decoder.py` starts it by torchrun: vllm_decoder_rank.py OPTIONS FOLDER.

The rank writes to FOLDER/RANK.json the seconds per step for each batch size, the first logits, and vLLM's choices.
FOLDER/config.json describes the model, which vLLM's own fusion of norms asks for.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import vllm.platforms

ON_GPU = torch.cuda.is_available()
if not ON_GPU:  # on a machine without GPUs, vLLM's GPU wheel finds no platform and has no kernels
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from support.fakes import vllm_kernels

    vllm_kernels.register()
    vllm.platforms.builtin_platform_plugins["cpu"] = lambda: "vllm.platforms.cpu.CpuPlatform"

from vllm.compilation.passes.inductor_pass import pass_context  # noqa: E402
from vllm.compilation.passes.ir.inplace_functionalization import VllmIRInplaceFunctionalizationPass  # noqa: E402
from vllm.config import CompilationConfig, ModelConfig, PassConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.config.utils import Range  # noqa: E402
from vllm.distributed import parallel_state, tensor_model_parallel_all_gather  # noqa: E402
from vllm.model_executor.layers.activation import SiluAndMul  # noqa: E402
from vllm.model_executor.layers.layernorm import RMSNorm  # noqa: E402
from vllm.model_executor.layers.linear import (  # noqa: E402
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.utils.import_utils import resolve_obj_by_qualname  # noqa: E402

EPS = 1e-5
STEPS = 20
"""Steps that one measurement has."""


class Attention(torch.nn.Module):
    """Attention of new tokens over a cache of random keys and values."""

    def __init__(self, model: Any, ranks: int, batch: int, prefix: str) -> None:
        super().__init__()
        self.size, self.heads = model["head_size"], model["heads"] // ranks
        self.kv_heads = max(1, model["kv_heads"] // ranks)
        self.qkv = QKVParallelLinear(
            model["hidden"], self.size, model["heads"], model["kv_heads"], bias=False, prefix=f"{prefix}.qkv_proj"
        )
        self.out = RowParallelLinear(model["heads"] * self.size, model["hidden"], bias=False, prefix=f"{prefix}.o_proj")
        shape = (batch, self.kv_heads, model["context"], self.size)
        self.keys, self.values = (torch.nn.Buffer(torch.randn(shape) / 4) for _ in range(2))

    def forward(self, x: Any) -> Any:
        widths = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        q, _, _ = self.qkv(x)[0].split(widths, dim=-1)
        q = q.view(-1, self.heads, 1, self.size)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, self.keys, self.values, enable_gqa=True)
        return self.out(mixed.reshape(-1, self.heads * self.size))[0]


class Layer(torch.nn.Module):
    """A layer of a Llama. Its norms also add the residuals."""

    def __init__(self, model: Any, ranks: int, batch: int, prefix: str) -> None:
        super().__init__()
        hidden, wide = model["hidden"], model["intermediate"]
        self.first, self.second = RMSNorm(hidden, eps=EPS), RMSNorm(hidden, eps=EPS)
        self.attention = Attention(model, ranks, batch, f"{prefix}.self_attn")
        self.up = MergedColumnParallelLinear(hidden, [wide, wide], bias=False, prefix=f"{prefix}.mlp.gate_up_proj")
        self.activation = SiluAndMul()
        self.down = RowParallelLinear(wide, hidden, bias=False, prefix=f"{prefix}.mlp.down_proj")

    def forward(self, x: Any, residual: Any) -> tuple[Any, Any]:
        if residual is None:
            x, residual = self.first(x), x
        else:
            x, residual = self.first(x, residual)
        x, residual = self.second(self.attention(x), residual)
        return self.down(self.activation(self.up(x)[0]))[0], residual


class Decoder(torch.nn.Module):
    """One step for a batch of sequences: from the latest tokens to logits."""

    def __init__(self, model: Any, ranks: int, batch: int) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(model["vocabulary"], model["hidden"], prefix="embed_tokens")
        self.layers = torch.nn.ModuleList(
            Layer(model, ranks, batch, f"{batch}.layers.{index}") for index in range(model["layers"])
        )
        self.norm = RMSNorm(model["hidden"], eps=EPS)
        self.head = ParallelLMHead(model["vocabulary"], model["hidden"], prefix="lm_head")

    def forward(self, tokens: Any) -> Any:
        x, residual = self.embedding(tokens), None
        for layer in self.layers:
            x, residual = layer(x, residual)
        x, _ = self.norm(x, residual)
        return tensor_model_parallel_all_gather(torch.nn.functional.linear(x, self.head.weight), dim=-1)


def decoder(model: Any, ranks: int, rank: int, batch: int, device: torch.device) -> Decoder:
    """Makes the decoder with random weights, which depend only on the rank."""
    torch.manual_seed(1 + rank)
    with device:
        made = Decoder(model, ranks, batch)
    with torch.no_grad():
        for weight in made.parameters():
            weight.fill_(1) if weight.dim() == 1 else weight.normal_(0, weight.shape[-1] ** -0.5)
    for layer in made.modules():
        if getattr(layer, "quant_method", None) is not None:
            layer.quant_method.process_weights_after_loading(layer)
    return made.requires_grad_(False)


def compiled(made: Decoder, config: Any) -> tuple[Callable[..., Any], Any]:
    """Compiles the decoder by torch, with the passes of vLLM's platform. Returns the function and the passes."""
    manager = resolve_obj_by_qualname(current_platform.get_pass_manager_cls())()
    manager.configure(config)
    torch._dynamo.reset()
    options = {
        "pre_grad_custom_pass": VllmIRInplaceFunctionalizationPass(config),
        "post_grad_custom_post_pass": manager,
        "enable_auto_functionalized_v2": False,
        "fx_graph_cache": False,
    }
    function: Callable[..., Any] = torch.compile(made, fullgraph=True, dynamic=False, options=options)
    return function, manager


def joined_norms(manager: Any) -> int:
    """Returns how many norms the latest compilation joined with their all_reduce."""
    joining = [each for each in manager.passes if type(each).__name__ in ("FusedNorms", "AllReduceFusionPass")]
    return sum(getattr(each, "matched_count", 0) for each in joining)


def seconds_of(step: Callable[[], object], repeats: int) -> float:
    """Returns the median time of a step over measurements that all ranks begin together."""
    group, found = parallel_state.get_tp_group(), []
    for _ in range(repeats):
        group.barrier()
        begin = time.perf_counter()
        for _ in range(STEPS if ON_GPU else 1):
            step()
        if ON_GPU:
            torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) / (STEPS if ON_GPU else 1))
    return statistics.median(found)


def measured(asked: Any, config: Any, device: torch.device, batch: int) -> tuple[float, list[float], int]:
    """Returns the seconds of a step for a batch, logits of the first step, and the number of joined norms."""
    group = parallel_state.get_tp_group()
    made = decoder(asked["model"], group.world_size, group.rank_in_group, batch, device)
    first = torch.arange(batch, device=device) % asked["model"]["vocabulary"]
    tokens = first.clone()
    function, manager = compiled(made, config)

    def step() -> Any:
        logits = function(tokens)
        tokens.copy_(logits.argmax(-1))
        return logits

    with pass_context(Range(1, batch)), torch.no_grad():
        logits = [float(each) for each in step()[0, :64]]
        step()
        if not ON_GPU:
            return seconds_of(step, asked["repeats"]), logits, joined_norms(manager)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with parallel_state.graph_capture(device) as context, torch.cuda.graph(graph, stream=context.stream):
            step()
        graph.replay()
        torch.cuda.synchronize()
        seconds = seconds_of(graph.replay, asked["repeats"])
        del graph
    return seconds, logits, joined_norms(manager)


def main() -> None:
    asked = json.loads(sys.argv[1])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    torch.set_default_dtype(torch.bfloat16)
    passes = {} if ON_GPU else dict.fromkeys(("fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant"), False)
    passes["fuse_allreduce_rms"] = joins = asked["fused"] and not asked["plug_in"]
    described = {"model": sys.argv[2], "dtype": "bfloat16", "skip_tokenizer_init": True}
    parallel_state.set_custom_all_reduce(asked["custom"])
    config = VllmConfig(
        **({"model_config": ModelConfig(**described)} if joins else {}),
        compilation_config=CompilationConfig(pass_config=PassConfig(**passes)),
        additional_config={"proxyccl_fused_norms": asked["fused"]},
    )
    found: dict[str, Any] = {"seconds": {}, "logits": {}}
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(config, check_compile=False))
        stack.enter_context(config.kernel_config.ir_op_priority.set_priority())
        parallel_state.init_distributed_environment(
            world_size, rank, "env://", int(os.environ["LOCAL_RANK"]), current_platform.dist_backend
        )
        parallel_state.initialize_model_parallel(world_size)
        group = parallel_state.get_tp_group()
        found["facts"] = {
            "platform": type(current_platform).__name__,
            "backend": torch.distributed.get_backend(group.device_group),
            "communicator": type(group.device_communicator).__name__,
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(device) if ON_GPU else "cpu",
        }
        for batch in asked["batches"]:
            seconds, logits, joined = measured(asked, config, device, batch)
            found["seconds"][str(batch)], found["logits"][str(batch)] = seconds, logits
            found["facts"]["joined norms"] = joined
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    Path(sys.argv[2], f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
