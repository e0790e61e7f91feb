"""Moves KV blocks from a prefiller to a decoder by vLLM's NixlConnector, with grants and without. This needs vLLM,
packages/vllm and packages/nixl, but neither a GPU nor a model's weights:

    python examples/vllm_kv_connector.py

A server of vLLM has a connector for its scheduler and one for each worker. The example makes the connectors of two
servers in this process, and calls them in the order in which vLLM's engine calls them. A router would pass the
prefiller's `kv_transfer_params` to the decoder. If the prefiller has freed a request's blocks before the decoder reads
them, or if the parameters name other blocks, vLLM's own connector delivers another request's data without an error.
With GrantingNixlConnector such blocks are load errors, so that vLLM recomputes them.
"""

# ruff: noqa: E402 (the platform must be chosen before vLLM is imported)

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import vllm.platforms

vllm.platforms.builtin_platform_plugins["cpu"] = lambda: "vllm.platforms.cpu.CpuPlatform"

from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

BLOCKS, TOKENS, HEADS, HEAD = 8, 32, 4, 16
LAYERS = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
THEIRS, OURS = [1, 2, 3], [4, 5, 6]
"""A request's blocks in the prefiller's cache and in the decoder's."""

GRANTING, PLAIN = "GrantingNixlConnector", "NixlPullConnector"
CASES: dict[str, dict[str, Any]] = {
    "the request's blocks": {},
    "blocks that were freed before the read": {"lease": 0},
    "other blocks than the request's": {"named": [2, 3, 4]},
}
SECONDS = 60
"""The longest time that a read may take."""

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HEADS * HEAD,
    "intermediate_size": 128,
    "num_attention_heads": HEADS,
    "num_hidden_layers": len(LAYERS),
    "vocab_size": 128,
    "max_position_embeddings": 256,
}


class Server:
    """A server's connectors, of the scheduler and of the only worker."""

    def __init__(self, folder: Path, connector: str, role: str, **options: Any) -> None:
        with socket.create_server(("localhost", 0)) as free:
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free.getsockname()[1])
        model = ModelConfig(str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="float32")
        transfer = KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path="proxyccl_vllm.kv_connector",
            kv_role=role,  # type: ignore[arg-type]
            kv_connector_extra_config=options,
        )
        cache = CacheConfig(block_size=TOKENS)
        self.config = VllmConfig(model_config=model, cache_config=cache, kv_transfer_config=transfer)
        if hasattr(cache, "kv_cache_layout"):  # vLLM 0.26 has no such field
            cache.kv_cache_layout = "LBHNC"
        spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.float32)
        groups = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(LAYERS, spec)])
        with set_current_vllm_config(self.config):
            create = KVConnectorFactory.create_connector
            self.worker = create(self.config, KVConnectorRole.WORKER, groups)
            self.scheduler = create(self.config, KVConnectorRole.SCHEDULER, groups)
            self.caches = {layer: torch.rand(BLOCKS, HEADS, TOKENS, 2 * HEAD) for layer in LAYERS}
            self.worker.register_kv_caches(self.caches)
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})

    def step(self) -> tuple[set[str], set[str]]:
        """Makes an engine's step without a model. Returns the requests whose blocks were sent or whose lease has ended,
        and those whose reads have ended.
        """
        metadata = self.scheduler.build_connector_meta(None)  # type: ignore[arg-type]
        with set_current_vllm_config(self.config):
            self.worker.bind_connector_metadata(metadata)
            self.worker.start_load_kv(None)  # type: ignore[arg-type]
            self.worker.clear_connector_metadata()
            sent, received = self.worker.get_finished(set())
            return sent or set(), received or set()

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def request_of(name: str, parameters: dict[str, Any]) -> Any:
    tokens = list(range(TOKENS * len(THEIRS)))
    request = Request(name, tokens, SamplingParams(max_tokens=1), None)
    request.kv_transfer_params = parameters
    return request


def prefill(server: Server) -> dict[str, Any]:
    """Finishes a request on the prefiller. Returns the parameters for the decoder."""
    request = request_of("prefilled", {"do_remote_decode": True})
    server.scheduler.update_state_after_alloc(request, None, 0)  # type: ignore[arg-type]
    server.step()
    request.status, request.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, request.num_tokens
    delays, parameters = server.scheduler.request_finished_all_groups(request, (THEIRS,))  # type: ignore[attr-defined]
    assert delays
    passed: dict[str, Any] = json.loads(json.dumps(parameters))
    return passed


def decode(server: Server, parameters: dict[str, Any]) -> set[int]:
    """Reads a request's blocks. Returns the blocks with load errors."""
    request = request_of("decoded", parameters)
    assert server.scheduler.get_num_new_matched_tokens(request, 0) == (request.num_tokens, True)
    blocks = KVCacheBlocks(([KVCacheBlock(block) for block in OURS],))
    server.scheduler.update_state_after_alloc(request, blocks, request.num_tokens)
    deadline = time.monotonic() + SECONDS
    while server.step()[1] != {"decoded"}:
        assert time.monotonic() < deadline, "the read did not end"
        time.sleep(0.01)
    return server.worker.get_block_ids_with_load_errors()


def move(folder: Path, connector: str, *, lease: int = 60, named: list[int] = THEIRS) -> str:
    """Moves a request's blocks, and returns what the decoder received.

    Args:
        lease: the time in seconds after which the prefiller frees the request's blocks.
        named: the blocks that the parameters name when they reach the decoder.
    """
    prefiller = Server(folder, connector, "kv_producer", kv_lease_duration=lease)
    decoder = Server(folder, connector, "kv_consumer")
    parameters = prefill(prefiller)
    expected = [cache[THEIRS].clone() for cache in prefiller.caches.values()]
    freed, _ = prefiller.step()
    if freed:
        for cache in prefiller.caches.values():
            cache.fill_(-1.0)  # another request's blocks
    errors = decode(decoder, {**parameters, "remote_block_ids": [named]})
    arrived = all(
        torch.equal(cache[OURS], wanted) for cache, wanted in zip(decoder.caches.values(), expected, strict=True)
    )
    if not errors and not freed:  # the prefiller keeps the blocks until the decoder's message has arrived
        assert prefiller.step()[0] == {"prefilled"}
    for server in (prefiller, decoder):
        server.close()
    if errors:
        return f"load errors of blocks {sorted(errors)}"
    return "the request's data" if arrived else "other data, without an error"


def main() -> None:
    with tempfile.TemporaryDirectory() as name, set_current_vllm_config(VllmConfig(), check_compile=False):
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODEL))
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        parallel_state.initialize_model_parallel(1)
        received = {
            f"{case}, {connector}": move(folder, connector, **options)
            for case, options in CASES.items()
            for connector in (GRANTING, PLAIN)
        }
    for case, outcome in received.items():
        print(f"{case}: {outcome}")
    errors = f"load errors of blocks {OURS}"
    assert list(received.values()) == ["the request's data"] * 2 + [errors, "other data, without an error"] * 2
    print("OK: with grants, the decoder notices each read of blocks that are not the request's")


if __name__ == "__main__":
    main()
