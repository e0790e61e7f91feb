"""Makes a transfer that no device copies run after a stream's earlier work, and before the stream's later work. A
transfer waits until the stream writes one word, and the stream then waits for another word.

Both words are in pinned memory. The agent's thread, or a caller that waits, begins the transfer when it sees the first
word, and stores the second word at the transfer's end. After its wait, the stream writes the first word again. The
words can't be reused before this second write, because a stream may reach them after the transfer was canceled.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from proxyccl.channels.transfers.copier import Copier, Table
from proxyccl.device.base_runtime import BaseRuntime, StreamLike
from proxyccl.device.errors import ArgumentError
from proxyccl.device.process import forks
from proxyccl.device.process.left_behind import take_each
from proxyccl.device.stream_operations import StreamOperations, WaitValue, WriteValue
from proxyccl.proxy._transfers import ffi, lib

if TYPE_CHECKING:
    from proxyccl.proxy._transfers import ProxycclTransferPointer

_WORD = 8
_PASSED = 2

_unpassed: deque[Table] = deque()
"""The words of turns that were garbage-collected before their stream had passed them."""


class Turn:
    """The two words for one start of a transfer.

    Args:
        copier: the copier of the stream's device.
    """

    def __init__(self, copier: Copier) -> None:
        waiting = [table for table in take_each(_unpassed) if not _is_passed(table)]
        _unpassed.extend(waiting)
        self._copier, self._table = copier, Table(copier, 2 * _WORD)
        words = _words(self._table)
        words[0] = words[1] = 0
        forks.finalizer(self, _leave, self._table)

    def start(self, transfer: ProxycclTransferPointer, message: Any, nbytes: int, stream: int) -> int:
        """Makes the stream start the transfer and wait for its end. Returns 0 or an errno.

        Raises:
            KernelError: the driver refused the stream's operations. After any exception, the transfer is canceled.
        """
        words, ptr = _words(self._table), self._table.ptr
        operations = StreamOperations(
            self._copier.runtime, [WriteValue(ptr, 1), WaitValue(ptr + _WORD, 1), WriteValue(ptr, _PASSED)]
        )
        try:
            status: int = lib.proxyccl_transfer_post(transfer, message, nbytes, ffi.NULL, words)
            if status == 0:
                operations(stream)
        except BaseException:
            lib.proxyccl_transfer_cancel(transfer, 0)
            raise
        if status:
            words[0], words[1] = _PASSED, 1  # the stream will not use these words
        return status


def _leave(table: Table) -> None:
    if not _is_passed(table):
        _unpassed.append(table)


def _words(table: Table) -> Any:
    return ffi.cast("uint64_t *", table.host_ptr)


def _is_passed(table: Table) -> bool:
    words = _words(table)
    return bool(words[0] == _PASSED and words[1])  # the driver may have refused only the wait


def require_no_capture(runtime: BaseRuntime, stream: StreamLike) -> int:
    """Returns the handle of a stream that is not being captured.

    Raises:
        ArgumentError: `stream` is not a stream, or is being captured into a graph.
    """
    handle = runtime.stream_handle(stream)
    if runtime.capture_of(handle):
        raise ArgumentError("stream", "is being captured into a graph, which can't repeat a transfer")
    return handle
