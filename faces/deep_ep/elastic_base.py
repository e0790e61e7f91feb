"""The common part of an ElasticBuffer's calls: its ranks, its size, and its barrier."""

from __future__ import annotations

from typing import Any

import torch

from proxyccl.channels.arguments import input_view
from proxyccl.channels.group import Group
from proxyccl.deep_ep.config import MOST_BYTES
from proxyccl.deep_ep.connected import Connected
from proxyccl.device.arguments.flags import as_flag
from proxyccl.device.arguments.integers import as_integer
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.errors import ArgumentError
from proxyccl.torch_tensors.flat import byte_view


class ElasticBase(Connected):
    """The ranks of a buffer and its stated size. `ElasticBuffer` describes the attributes, which it sets."""

    rank_idx: int
    num_ranks: int
    num_rdma_ranks: int
    num_bytes: int
    num_cpu_bytes: int

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Makes the current stream wait until all ranks have made this call.

        Args:
            use_comm_stream: wait for the calls on the buffer's stream too.
            with_cpu_sync: wait on the CPU too, for all streams of the GPU, before and after it.
            sequential: without effect.
        """
        self._usable()
        use_comm_stream = as_flag(use_comm_stream, "use_comm_stream")
        waits = as_flag(with_cpu_sync, "with_cpu_sync") and self._stream is not None
        if waits:
            self.communicator.synchronize()
        current = self._current_stream()
        stream = self._stream if use_comm_stream else current
        if stream is not current:
            stream.wait_stream(current)
        self.communicator.barrier(stream=stream)
        if stream is not current:
            current.wait_stream(stream)
        if waits:
            self.communicator.synchronize()

    def _current_stream(self) -> Any:
        return None if self._stream is None else torch.cuda.current_stream()


def require_bytes(argument: str, value: Any, least: int) -> int:
    """Returns a number of bytes. Raises ArgumentError if it is not an integer of at least `least`."""
    return as_integer(
        value, argument, f"must be an integer of at least {least}, and at most {MOST_BYTES}", least, MOST_BYTES
    )


def bytes_of(group: Group, argument: str, tensor: Any) -> tuple[torch.Tensor, ArrayView]:
    """A tensor's memory, as a tensor of uint8 and as a view. Raises ArgumentError if it is not a tensor, not
    contiguous, or lies on another device."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(argument, f"must be a tensor, not {type(tensor).__name__}")
    if not tensor.is_contiguous():
        raise ArgumentError(
            argument, f"must be contiguous; it has shape {list(tensor.shape)}, strides {tensor.stride()}"
        )
    flat = byte_view(tensor)
    return flat, input_view(group, flat, argument)
