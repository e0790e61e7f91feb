"""ElasticBuffer's sends and receives between neighbouring ranks, for the stages of a pipeline."""

from __future__ import annotations

from typing import Any

from proxyccl.channels.communicator import Communicator
from proxyccl.channels.expert_parallel.arguments import whole_number
from proxyccl.channels.expert_parallel.geometry import aligned
from proxyccl.channels.schedules.ring_slots import RingSlots
from proxyccl.deep_ep.arguments import bytes_of, refuse
from proxyccl.deep_ep.config import ELASTIC_ALIGNMENT, MOST_BYTES
from proxyccl.deep_ep.connected import ElasticBase
from proxyccl.device.errors import ArgumentError

_ALIGNMENT = 32
_SIDES = 4  # a send area and a receive area for each of the two neighbours


class PipelineCalls(ElasticBase):
    """The calls between neighbours: sends, which write to a neighbour's slots, and receives, which read this rank's
    slots. `pp_send` and `pp_recv` use a separate communicator, so that a call that waits for a neighbour delays no
    other call of the buffer.
    """

    _pipeline: Communicator | None = None
    _slots: RingSlots | None = None
    _slot_bytes = 0

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """Returns the smallest `num_bytes` with which a buffer accepts `pp_set_config` with these arguments: a multiple
        of 2 MiB.

        Raises:
            ArgumentError: a number is not a positive integer.
        """
        nbytes = _slot_of(num_max_tensor_bytes)
        return aligned(nbytes * _in_flight(num_max_inflight_tensors) * _SIDES, ELASTIC_ALIGNMENT)

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        """Makes the slots for `pp_send` and `pp_recv`. All ranks make this call together, with the same arguments. The
        CPU waits for the earlier work of all ranks.

        Args:
            num_max_tensor_bytes: the largest size of a tensor, in bytes.
            num_max_inflight_tensors: the largest number of tensors that were sent to a rank and that the rank has not
                received yet. Beyond this number, a send waits.

        Raises:
            ArgumentError: a number is out of range, the slots don't fit in the buffer's `num_bytes`, or the group has
                only one rank.
            CommunicatorError: a peer failed; see its subclasses.
        """
        self._usable()
        slot_bytes, slots = _slot_of(num_max_tensor_bytes), _in_flight(num_max_inflight_tensors)
        needed = int(num_max_tensor_bytes) * slots * _SIDES
        if needed > self.num_bytes:
            raise ArgumentError(
                "num_max_tensor_bytes",
                f"needs a buffer of {needed} bytes for {slots} tensors in flight; num_bytes is {self.num_bytes}",
            )
        if self.num_ranks == 1:
            raise ArgumentError("group", "has one rank; sends between neighbours need two")
        self.barrier(use_comm_stream=False, with_cpu_sync=True)
        self._close_pipeline()
        self._pipeline = self.communicator.split(range(self.num_ranks))
        self._slots, self._slot_bytes = RingSlots(self._pipeline.group, slot_bytes, slots), slot_bytes

    def pp_send(self, t: Any, dst_rank_idx: int, num_sms: int = 0) -> None:
        """Sends a tensor to the previous or the next rank, which receives it with `pp_recv`. Sends arrive in order.

        The current stream waits for a free slot of this rank, and copies the tensor to that slot. The proxy sends the
        slot's data when the peer has a free slot.

        Args:
            t: a contiguous tensor of at most `num_max_tensor_bytes`.
            dst_rank_idx: the destination: the previous or the next rank, cyclically.
            num_sms: without effect, because the call takes no multiprocessor.

        Raises:
            ArgumentError: an argument is wrong, or `pp_set_config` was not called. Nothing was sent.
            NotImplementedError: the current stream is being captured into a CUDA graph.
            CommunicatorError: a peer failed, or did not receive in time; see its subclasses.
        """
        slots, view, peer = self._transfer("pp_send", t, "dst_rank_idx", dst_rank_idx, num_sms)
        slots.send(view, peer, self._current_stream())

    def pp_recv(self, t: Any, src_rank_idx: int, num_sms: int = 0) -> None:
        """Receives a tensor from the previous or the next rank. The current stream waits for the tensor. Raises the
        errors of `pp_send`.

        Args:
            t: a contiguous tensor, which receives the data. The tensor should have the size of the sent tensor.
            src_rank_idx: the source: the previous or the next rank, cyclically.
            num_sms: without effect.
        """
        slots, view, peer = self._transfer("pp_recv", t, "src_rank_idx", src_rank_idx, num_sms)
        slots.receive(view, peer, self._current_stream())

    def _transfer(self, call: str, t: Any, argument: str, rank: Any, num_sms: Any) -> tuple[RingSlots, Any, int]:
        self._usable()
        if self._slots is None or self._pipeline is None:
            raise ArgumentError("num_max_tensor_bytes", f"is not known; call pp_set_config before {call}")
        whole_number("num_sms", num_sms, 0)
        _, view = bytes_of(self._pipeline.group, "t", t)
        if view.nbytes > self._slot_bytes:
            raise ArgumentError(
                "t", f"has {view.nbytes} bytes; expected at most num_max_tensor_bytes, {self._slot_bytes}"
            )
        peer = whole_number(argument, rank, 0, self.num_ranks - 1)
        if peer not in self._slots.neighbours:
            raise ArgumentError(
                argument, f"is {peer}; expected a neighbour, {' or '.join(map(str, self._slots.neighbours))}"
            )
        stream = self._current_stream()
        runtime = self._pipeline.runtime
        if stream is not None and runtime.capture_of(runtime.stream_handle(stream)):
            raise refuse(f"{call} in a graph", "each call takes the next slot, which a replay can't do")
        return self._slots, view, peer

    def _close_pipeline(self) -> None:
        pipeline, self._pipeline, self._slots = self._pipeline, None, None
        if pipeline is not None:
            pipeline.close()


def _slot_of(num_max_tensor_bytes: Any) -> int:
    return aligned(whole_number("num_max_tensor_bytes", num_max_tensor_bytes, 1, MOST_BYTES), _ALIGNMENT)


def _in_flight(num_max_inflight_tensors: Any) -> int:
    return whole_number("num_max_inflight_tensors", num_max_inflight_tensors, 1)
