"""The program of a rank; `engine_decoder.py` starts it by torchrun: engine_decoder_rank.py OPTIONS FOLDER.

The rank writes to FOLDER/RANK.json the seconds per step for each batch size, the first logits, and the engine's
choices. FOLDER/config.json describes the model, which vLLM's own fusion of norms asks for.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ASKED = json.loads(sys.argv[1])
ON_GPU = torch.cuda.is_available()
EPS = 1e-5
STEPS = 20
"""Steps that one measurement has."""

faulthandler.dump_traceback_later(ASKED["dump_after"], exit=True)
engine: Any = importlib.import_module(f"engine_{ASKED['engine']}")
linear, activation, vocabulary = (  # both engines give these modules and their classes the same names
    importlib.import_module(f"{engine.LAYERS}.{name}") for name in ("linear", "activation", "vocab_parallel_embedding")
)


class Attention(torch.nn.Module):
    """Attention of new tokens over a cache of random keys and values."""

    def __init__(self, model: Any, ranks: int, batch: int, prefix: str) -> None:
        super().__init__()
        self.size, self.heads = model["head_size"], model["heads"] // ranks
        self.kv_heads = max(1, model["kv_heads"] // ranks)
        self.qkv = linear.QKVParallelLinear(
            model["hidden"], self.size, model["heads"], model["kv_heads"], bias=False, prefix=f"{prefix}.qkv_proj"
        )
        shape = (batch, self.kv_heads, model["context"], self.size)
        self.keys, self.values = (torch.nn.Buffer(torch.randn(shape) / 4) for _ in range(2))

    def forward(self, x: Any) -> Any:
        widths = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        q, _, _ = self.qkv(x)[0].split(widths, dim=-1)
        q = q.view(-1, self.heads, 1, self.size)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, self.keys, self.values, enable_gqa=True)
        return mixed.reshape(-1, self.heads * self.size)


class Layer(torch.nn.Module):
    """A layer of a Llama without its first norm. Its norms also add the residuals."""

    def __init__(self, model: Any, ranks: int, batch: int, prefix: str) -> None:
        super().__init__()
        hidden, wide, heads = model["hidden"], model["intermediate"], model["heads"] * model["head_size"]
        self.attention = Attention(model, ranks, batch, f"{prefix}.self_attn")
        self.out = linear.RowParallelLinear(heads, hidden, bias=False, prefix=f"{prefix}.self_attn.o_proj")
        self.norm = engine.RMSNorm(hidden, eps=EPS)
        self.up = linear.MergedColumnParallelLinear(
            hidden, [wide, wide], bias=False, prefix=f"{prefix}.mlp.gate_up_proj"
        )
        self.activation = activation.SiluAndMul()
        self.down = linear.RowParallelLinear(wide, hidden, bias=False, prefix=f"{prefix}.mlp.down_proj")

    def forward(self, x: Any, residual: Any, next_norm: Any) -> tuple[Any, Any]:
        x, residual = engine.sum_and_norm(self.out, self.norm, self.attention(x), residual)
        made: tuple[Any, Any] = engine.sum_and_norm(self.down, next_norm, self.activation(self.up(x)[0]), residual)
        return made


class Decoder(torch.nn.Module):
    """One step for a batch of sequences: from the latest tokens to logits."""

    def __init__(self, model: Any, ranks: int, batch: int) -> None:
        super().__init__()
        hidden, count = model["hidden"], model["layers"]
        self.embedding = vocabulary.VocabParallelEmbedding(model["vocabulary"], hidden, prefix="embed_tokens")
        self.norms = torch.nn.ModuleList(engine.RMSNorm(hidden, eps=EPS) for _ in range(count + 1))
        self.layers = torch.nn.ModuleList(
            Layer(model, ranks, batch, f"{batch}.layers.{index}") for index in range(count)
        )
        self.head = vocabulary.ParallelLMHead(model["vocabulary"], hidden, prefix="lm_head")

    def forward(self, tokens: Any) -> Any:
        residual = self.embedding(tokens)
        x = self.norms[0](residual)
        for layer, next_norm in zip(self.layers, self.norms[1:], strict=True):
            x, residual = layer(x, residual, next_norm)
        return engine.all_gather(torch.nn.functional.linear(x, self.head.weight), dim=-1)


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


def seconds_of(group: Any, step: Callable[[], object], repeats: int) -> float:
    """Returns the median time of a step over measurements that all ranks begin together."""
    found, steps = [], STEPS if ON_GPU else 1
    for _ in range(repeats):
        group.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        if ON_GPU:
            torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) / steps)
    return statistics.median(found)


def note(stage: str) -> None:
    """Prints a stage that the rank has reached. The output is shown if the job fails."""
    print(f"rank {os.environ['RANK']}, {time.strftime('%H:%M:%S')}: {stage}", flush=True)


def measured(group: Any, device: torch.device, batch: int) -> tuple[float, list[float], int]:
    """Returns the seconds of a step for a batch, logits of the first step, and the number of joined norms."""
    model, repeats = ASKED["model"], ASKED["repeats"]
    made = decoder(model, group.world_size, group.rank_in_group, batch, device)
    tokens = torch.arange(batch, device=device) % model["vocabulary"]
    function, joined = engine.prepared(made, batch)

    def step() -> Any:
        logits = function(tokens)
        tokens.copy_(logits.argmax(-1))
        return logits

    with torch.no_grad():
        logits = [float(each) for each in step()[0, :64]]
        step()
        note(f"two steps of batch {batch}")
        if not ON_GPU:
            return seconds_of(group, step, repeats), logits, joined()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with engine.graph_capture(device) as context, torch.cuda.graph(graph, stream=context.stream):
            step()
        note("captured")
        graph.replay()
        torch.cuda.synchronize()
        note("replayed")
        seconds = seconds_of(group, graph.replay, repeats)
        del graph
    return seconds, logits, joined()


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    torch.set_default_dtype(torch.bfloat16)
    found: dict[str, Any] = {"seconds": {}, "logits": {}}
    note("imported")
    with engine.groups(ASKED, sys.argv[2], device) as group:
        note("groups")
        found["facts"] = {
            **engine.facts(group),
            "backend": torch.distributed.get_backend(group.device_group),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(device) if ON_GPU else "cpu",
        }
        for batch in ASKED["batches"]:
            seconds, logits, joined = measured(group, device, batch)
            found["seconds"][str(batch)], found["logits"][str(batch)] = seconds, logits
            found["facts"]["joined norms"] = joined
        Path(sys.argv[2], f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
