"""Memory per rank of an expert-parallel layer, compared with DeepEP's formulas: python expert_memory.py

The program needs no GPU, because it only computes sizes. For ProxyCCL it computes the size of the workspace that peers
access (`Geometry`), including the outputs in the workspace, for each mode of `proxyccl.deep_ep`. For DeepEP it computes
the sizes that callers pass to DeepEP's buffers, by the formulas of DeepEP's sources with the recommended chunk sizes:

- normal mode, DeepEP 1.2.1: `Config.get_nvl_buffer_size_hint` plus `get_rdma_buffer_size_hint` (csrc/config.hpp), for
  the dispatch or the combine configuration, whichever is larger. DeepEP sends chunks in this mode, so the size does not
  depend on the number of tokens.
- low-latency mode, DeepEP 1.2.1: `get_low_latency_rdma_size_hint` (csrc/config.hpp).
- elastic, DeepEP 2.1.0: `ElasticBuffer.get_buffer_size_hint` (csrc/elastic/buffer.hpp), in bfloat16, without the
  buffer's workspace of fixed size.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxyccl.channels.expert_parallel.geometry import Geometry, aligned, blocks_for
from proxyccl.channels.expert_parallel.options import LayerOptions
from proxyccl.channels.expert_parallel.output_buffers import KEPT_OUTPUTS
from proxyccl.device._native import lib
from proxyccl.device.memory.places import own_segment_bytes
from proxyccl.tools.tables import Column, Table

HIDDEN, TOPK, EXPERTS, NUM_SMS = 7168, 8, 256, 24
TOKENS = (4096, 128)
WORLDS = ((1, 2), (1, 4), (1, 8), (2, 8))
"""The numbers of nodes, and of ranks on each node."""
_BFLOAT16, _MIB = 2, 1 << 20
_COLUMNS = (
    Column("tokens", "", 8),
    Column("ranks", "", 8, left=True),
    Column("mode", "", 12, left=True),
    Column("ProxyCCL", "(MiB)", 10, ".1f"),
    Column("DeepEP", "(MiB)", 10, ".1f"),
)


@dataclass(frozen=True)
class World:
    """A number of ranks, and the largest number of tokens per rank."""

    nodes: int
    local_size: int
    tokens: int

    @property
    def ranks(self) -> int:
        """The number of ranks on all nodes."""
        return self.nodes * self.local_size

    @property
    def name(self) -> str:
        """The text in the column "ranks", such as "2 x 8" for 2 nodes with 8 ranks each, or "8" for one node."""
        return f"{self.nodes} x {self.local_size}" if self.nodes > 1 else str(self.local_size)


# -- ours ---


def workspace(world: World, layout: str) -> int:
    """Returns the size in bytes of the workspace of a ProxyCCL layer with this layout."""
    sizes = world.tokens, HIDDEN, TOPK, 0, EXPERTS, world.local_size, world.ranks
    options = LayerOptions(
        *sizes,
        layout=layout,
        enable_local_combine=layout == "expert" and world.nodes == 1,
        expert_alignment=1 if layout == "expert" else None,
        output_buffers=KEPT_OUTPUTS if layout == "rank" else 0,
    )
    geometry = Geometry(
        options,
        blocks=blocks_for(world.tokens, NUM_SMS),
        threads=lib.PROXYCCL_EXPERT_THREADS,
        nodes=world.nodes,
        local_size=world.local_size,
        output_room=own_segment_bytes,
    )
    return geometry.workspace_bytes


# -- DeepEP's ---

_CHUNKS = {  # chunk sizes of a dispatch and of a combine: (received by NVLink, sent by RDMA, received by RDMA)
    2: ((256, 6, 128), (256, 6, 128)),
    4: ((256, 6, 128), (256, 6, 128)),
    8: ((256, 6, 128), (256, 6, 128)),
    16: ((288, 20, 128), (288, 12, 128)),
}
_NODE, _MOST_TOPK, _MOST_SCALES, _SOURCE_BYTES = 8, 128, 128, 8


def deep_ep_normal(world: World) -> int:
    """Returns the number of bytes that DeepEP's normal mode needs for NVLink and RDMA together."""
    return max(_of_chunks(world.ranks, *chunks) for chunks in _CHUNKS[world.ranks])


def _of_chunks(ranks: int, by_nvlink: int, sent_by_rdma: int, remote: int) -> int:
    channels, nodes, peers = NUM_SMS // 2, max(1, ranks // _NODE), min(ranks, _NODE)
    row = HIDDEN * _BFLOAT16 + _SOURCE_BYTES + _MOST_TOPK * (8 + 4) + _MOST_SCALES * 4
    nvlink = aligned(channels * peers * ((2 * nodes + 3) * 4 + by_nvlink * row))
    if nodes == 1:
        return nvlink
    remote = aligned(remote, sent_by_rdma)
    rdma = channels * nodes * 2 * ((2 * _NODE + 2) * 4 + remote * (row + 16)) + (1 << 20)
    return nvlink + aligned(rdma)


def deep_ep_low_latency(world: World) -> int:
    """Returns the bytes that DeepEP's low-latency mode needs for RDMA and NVLink, which share this memory."""
    scales = HIDDEN // 128
    dispatched = 16 + max(HIDDEN * _BFLOAT16, HIDDEN + scales * 4)
    combined = scales * 4 + HIDDEN * _BFLOAT16
    sent = max(world.tokens * dispatched, EXPERTS * world.tokens * combined)
    received = EXPERTS * world.tokens * max(dispatched, combined)
    signals = aligned(EXPERTS * 4)
    return (2 * (sent + received + signals) + 128) // 128 * 128


def deep_ep_elastic(world: World) -> int:
    """Returns the size in bytes of an ElasticBuffer with default options."""
    most_channels, tokens, nodes, peers = 8 * 160, world.tokens, world.nodes, world.local_size
    dispatched = aligned(HIDDEN * _BFLOAT16, 32) + aligned(TOPK * 8 + (1 + TOPK) * 4, 32)
    combined = aligned(HIDDEN * _BFLOAT16, 32) + aligned(TOPK * 8, 32)
    if nodes == 1:
        most = max(dispatched * peers * tokens, combined * min(peers, TOPK) * tokens)
    else:
        crossing = nodes * (tokens + most_channels)
        most = max(
            dispatched * (peers * nodes * tokens + tokens + crossing),
            combined * (min(peers, TOPK) * nodes * tokens + min(nodes, TOPK) * tokens + crossing),
        )
    return aligned(most, 2 * _MIB)


def main() -> None:
    experts = f"top {TOPK} of {EXPERTS} experts"
    print(f"# hidden {HIDDEN}, {experts}, bfloat16, {NUM_SMS} multiprocessors; memory of each rank")
    table = Table(_COLUMNS)
    table.header()
    for tokens in TOKENS:
        for nodes, local_size in WORLDS:
            world = World(nodes, local_size, tokens)
            rows = [
                ("normal", workspace(world, "rank"), deep_ep_normal(world)),
                ("elastic", workspace(world, "rank"), deep_ep_elastic(world)),
                ("expanded", workspace(world, "expert"), deep_ep_elastic(world)),
            ]
            if tokens == min(TOKENS):
                rows.append(("low latency", 2 * workspace(world, "padded"), deep_ep_low_latency(world)))
            for mode, ours, theirs in rows:
                table.row(tokens, world.name, mode, ours / _MIB, theirs / _MIB)


if __name__ == "__main__":
    main()
