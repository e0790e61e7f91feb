"""A transfer's turn on a stream where no device copies: the stream writes a word, and waits for another one.

Both words are in pinned memory. The agent's thread, or a caller that waits, begins the transfer when it sees the first
one, and stores the second one at its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxyccl.channels.transfers.copier import Copier, Table
from proxyccl.device.base_runtime import BaseRuntime, StreamLike
from proxyccl.device.errors import ArgumentError, KernelError
from proxyccl.device.stream_operations import StreamOperations, WaitValue, WriteValue
from proxyccl.proxy._transfers import ffi, lib

if TYPE_CHECKING:
    from proxyccl.proxy._transfers import ProxycclTransferPointer

_WORD = 8


class Turn:
    """The two words of one transfer.

    Attributes:
        copier: the device of its streams.
    """

    def __init__(self, copier: Copier) -> None:
        self.copier = copier
        self._table = Table(copier, 2 * _WORD)
        self._words = ffi.cast("uint64_t *", self._table.memory.host_ptr)
        self._words[0] = self._words[1] = 0
        self._value = 0

    def start(self, transfer: ProxycclTransferPointer, message: Any, nbytes: int, stream: int) -> int:
        """Starts the transfer when the stream comes to it, and makes the stream wait for its end. The engine's status.

        Raises:
            KernelError: the driver refused it; the transfer is canceled.
        """
        value = self._value + 1
        status: int = lib.proxyccl_transfer_post_after(transfer, message, nbytes, self._words, value)
        if status:
            return status
        self._value = value
        ptr = self._table.memory.ptr
        try:
            StreamOperations(self.copier.runtime, [WriteValue(ptr, value), WaitValue(ptr + _WORD, value)])(stream)
        except KernelError:
            lib.proxyccl_transfer_cancel(transfer, 0)
            raise
        return 0


def require_no_capture(runtime: BaseRuntime, stream: StreamLike) -> int:
    """The handle of a stream.

    Raises:
        ArgumentError: it is not a stream, or is being captured.
    """
    handle = runtime.stream_handle(stream)
    if runtime.is_capturing(handle):
        raise ArgumentError("stream", "is being captured into a graph, which can't repeat a transfer")
    return handle
