"""The numbers with which programs for DeepEP tune kernels and compute the sizes of buffers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from proxyccl.channels.expert_parallel.arguments import MAX_NUMBER, whole_number
from proxyccl.channels.expert_parallel.geometry import aligned

_RANKS_OF_A_NODE = 8  # with more ranks, DeepEP needs an RDMA buffer
ELASTIC_ALIGNMENT = 2 << 20
"""The sizes of an ElasticBuffer, in bytes, are multiples of this number."""
MOST_BYTES = 2**62
"""The largest size that a caller may state for a buffer."""


@dataclass(frozen=True)
class Config:
    """The tuning of a call. Only `num_sms`, the largest number of multiprocessors that a kernel takes, has an effect.

    DeepEP sends rows in chunks, and the size hints are the sizes of the chunks' buffers. Callers pass the hints to
    `Buffer`, which stores them without other effect, because ProxyCCL has no chunks.

    Raises:
        ArgumentError: a number is not a positive integer.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if type(value) is not int or not 0 < value <= MAX_NUMBER:  # converts numpy's integers to int
                object.__setattr__(self, name, whole_number(name, value, 1))

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns the number of bytes that DeepEP would need for rows sent within a node.

        Raises:
            ArgumentError: a number is negative, or not an integer; or there are no ranks.
        """
        hidden_bytes, num_ranks = whole_number("hidden_bytes", hidden_bytes, 0), whole_number("num_ranks", num_ranks, 1)
        ranks = min(num_ranks, _RANKS_OF_A_NODE)
        return aligned(self.num_sms // 2 * ranks * self.num_max_nvl_chunked_recv_tokens * hidden_bytes)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns the number of bytes that DeepEP would need for rows sent between nodes; 0 for up to 8 ranks. Raises
        the errors of `get_nvl_buffer_size_hint`.
        """
        hidden_bytes, num_ranks = whole_number("hidden_bytes", hidden_bytes, 0), whole_number("num_ranks", num_ranks, 1)
        if num_ranks <= _RANKS_OF_A_NODE:
            return 0
        nodes = num_ranks // _RANKS_OF_A_NODE
        return aligned(2 * (self.num_sms // 2) * nodes * self.num_max_rdma_chunked_recv_tokens * hidden_bytes)


_SIZES = tuple(each.name for each in fields(Config))


def elastic_size_hint(ranks: int, max_tokens: int, hidden: int, topk: int, *, float8: bool) -> int:
    """Returns the larger of two numbers of bytes: of the rows of a dispatch, which has `max_tokens` rows from each
    rank, and of the rows of a combine in bfloat16.
    """
    max_tokens = whole_number("num_max_tokens_per_rank", max_tokens, 0)
    hidden, topk = whole_number("hidden", hidden, 0), whole_number("num_topk", topk, 0)
    dispatched = ranks * max_tokens * hidden * (1 if float8 else 2)
    combined = min(ranks, topk or ranks) * max_tokens * hidden * 2
    return aligned(max(dispatched, combined), ELASTIC_ALIGNMENT)
