"""Windows: streams access an array of another rank one-sidedly, without a kernel.

A put or a get is a copy by a copy engine on the caller's stream. To signal, the stream writes a count to a word of the
peer after the copy; to wait, the peer's stream waits for this word. Copies, signals and waits occupy no multiprocessor.

The words are in each rank's pinned memory, so the CPU can release waiting streams when a rank has failed. A waiting
stream also stores the expected count to another word, so the CPU notices a stream that waits too long.
"""

from __future__ import annotations

from typing import Any

from proxyccl.channels import array_libraries
from proxyccl.channels.group import Group
from proxyccl.channels.joining.exchange import HANDLE
from proxyccl.channels.memory import RegisteredMemory, register
from proxyccl.channels.ranks import as_rank
from proxyccl.device._native import ffi
from proxyccl.device.arguments.integers import as_integer
from proxyccl.device.arrays.array import ArrayView, as_view
from proxyccl.device.errors import ArgumentError, ClosedError
from proxyccl.device.runtime import PinnedMemory, StreamLike
from proxyccl.device.stream_operations import CopyBytes, Operation, StreamOperations, WaitValue, WriteValue

_WORD = 8
_RELEASED = (1 << 63) - 1
"""The value that releases the streams that wait for a word: more than any number of signals."""


class Window:
    """One-sided access to an array of every rank, made by `Communicator.window`.

    A rank's calls take effect in the order of the calls, even on different streams. Each peer's signals are counted
    separately. Calls of different ranks are ordered only by signals.

    Args:
        group: the ranks.
        array: this rank's array, as for `Communicator.register`.

    Raises:
        ArgumentError: peers can't map the array of some rank. All ranks raise this error.
    """

    def __init__(self, group: Group, array: Any) -> None:
        array_libraries.keep_opaque(Window)
        self._group, self._runtime = group, group.runtime
        self._memory: RegisteredMemory = register(group, array, symmetric=True)
        try:
            self._memory.require_shared("array")
        except ArgumentError:
            if self._memory is not array:
                self._memory.close()
            raise
        ranks = group.world_size
        # Two words per rank: the count of signals, which the rank writes, and the count for which this rank's streams
        # wait.
        self._words = group.runtime.allocate_pinned(2 * ranks * _WORD)
        self._values = ffi.cast("uint64_t *", self._words.host_ptr)
        self._sent, self._awaited = [0] * ranks, [0] * ranks
        self._since = [0.0] * ranks
        self._closed = False
        handles = group.exchange.all_gather(self._words.handle, HANDLE, "window")
        self._peers: dict[int, PinnedMemory] = {}
        for peer in range(ranks):
            if peer != group.rank and group.topology.accessible[peer]:
                with group.mapping_of(peer):
                    self._peers[peer] = group.runtime.open_pinned(handles[peer])
        group.exchange.barrier("window: all ranks have mapped it")
        group.keep(self)
        group.stream_waits.append(self)

    def __repr__(self) -> str:
        return f"<Window of {self._memory.nbytes} bytes>"

    @property
    def array(self) -> Any:
        """This rank's array."""
        return self._memory.array

    def put(self, x: Any, peer: int, *, offset: int = 0, signal: bool = False, stream: StreamLike = None) -> None:
        """Copies an array into a peer's array, on the stream.

        Args:
            x: any contiguous array on this rank's device.
            peer: a rank whose memory this rank's device can access; may be this rank.
            offset: the offset in the peer's array, in bytes.
            signal: whether to signal the peer after the copy; see `signal`.
            stream: as for `all_reduce`.

        Raises:
            ArgumentError: an argument is wrong, or this rank's device can't access the peer's memory.
            CommunicatorError: a rank failed; see its subclasses.
        """
        view, theirs = self._ranges(x, "x", peer, offset)
        operations: list[Operation] = [CopyBytes(theirs, view.ptr, view.nbytes)]
        self._issue(operations, peer, signal, stream, x)

    def get(self, out: Any, peer: int, *, offset: int = 0, stream: StreamLike = None) -> Any:
        """Copies a part of a peer's array to `out`, on the stream. Returns `out`. Has the arguments and errors of
        `put`."""
        view, theirs = self._ranges(out, "out", peer, offset)
        if not view.writable:
            raise ArgumentError("out", "the array is read-only")
        self._issue([CopyBytes(view.ptr, theirs, view.nbytes)], peer, False, stream, out)
        return out

    def signal(self, peer: int, *, stream: StreamLike = None) -> None:
        """Signals a peer, on the stream. A peer's stream that has waited for the signal sees all of this rank's earlier
        puts.

        Args:
            peer: as for `put`.
            stream: as for `all_reduce`. A graph must not capture this call, because each replay would write the same
                count again.
        """
        self._word(as_rank(self._group.world_size, peer, "peer"))
        self._issue([], peer, True, stream, self._memory.array)

    def wait_signal(self, peer: int, *, count: int = 1, stream: StreamLike = None) -> None:
        """Makes the stream wait for the next `count` signals of a peer.

        The communicator fails if the signals do not arrive within its time-out, which begins with the stream's wait.

        Args:
            peer: as for `put`.
            count: the number of signals, from 1 on.
            stream: as for `signal`.
        """
        rank = as_rank(self._group.world_size, peer, "peer")
        self._word(rank)
        count = as_integer(count, "count", "expected an integer from 1 on", 1, 1 << 31)
        self._require_open()

        def launch(handle: StreamLike) -> None:
            self._require_no_capture(handle)
            self._awaited[rank] += count
            reached = self._words.ptr + (self._group.world_size + rank) * _WORD
            words: list[Operation] = [
                WriteValue(reached, self._awaited[rank]),
                WaitValue(self._words.ptr + rank * _WORD, self._awaited[rank]),
            ]
            StreamOperations(self._runtime, words)(handle)

        launches = self._group.launches
        launches.launch(launch, launches.stream_for(stream, self._memory.array), (), (self._words,))

    def _issue(self, operations: list[Operation], peer: int, signals: bool, stream: StreamLike, x: Any) -> None:
        rank = as_rank(self._group.world_size, peer, "peer")
        self._require_open()

        def launch(handle: StreamLike) -> None:
            then: list[Operation] = []
            if signals:
                self._require_no_capture(handle)
                self._sent[rank] += 1
                then = [WriteValue(self._word(rank), self._sent[rank])]
            StreamOperations(self._runtime, [*operations, *then])(handle)

        launches = self._group.launches
        launches.launch(launch, launches.stream_for(stream, x), (x,), (self._words,))

    def _require_no_capture(self, handle: StreamLike) -> None:
        if self._runtime.capture_of(self._runtime.stream_handle(handle)):
            raise ArgumentError("stream", "is being captured into a graph, which can't count signals")

    def _word(self, rank: int) -> int:
        if rank == self._group.rank:
            return self._words.ptr + rank * _WORD
        self._group.topology.require_accessible([rank], "peer")
        return self._peers[rank].ptr + self._group.rank * _WORD

    def _ranges(self, x: Any, argument: str, peer: int, offset: int) -> tuple[ArrayView, int]:
        """Returns the view of `x`, and the address at which this device accesses the peer's range."""
        self._require_open()
        view = as_view(x, argument, gpu=self._runtime.name)
        if view.device[0] != self._runtime.name:
            raise ArgumentError(argument, f"lies on {view.place}, the communicator uses {self._runtime.name}")
        room = self._memory.peer_nbytes(peer)
        offset = as_integer(offset, "offset", f"expected an integer from 0 to {room}", 0, room)
        if offset + view.nbytes > room:
            raise ArgumentError(
                argument,
                f"has {view.nbytes} bytes; at offset {offset} rank {peer}'s array has room for {room - offset}",
            )
        theirs = self._memory.peer_ptr(peer) + offset
        if view.ptr != theirs and view.ptr < theirs + view.nbytes and theirs < view.ptr + view.nbytes:
            raise ArgumentError(argument, "overlaps the window's range in part; expected the same range or no overlap")
        return view, theirs

    def _require_open(self) -> None:
        self._group.failure.require_usable()
        if self._closed:
            raise ClosedError("the window is closed")

    # -- called by the watcher's thread ---

    def look_for_timeouts(self, now: float) -> None:
        """Aborts the communicator if a stream has waited longer than the time-out."""
        ranks = self._group.world_size
        for rank in range(ranks):
            count, wanted = self._values[rank], self._values[ranks + rank]
            if count >= wanted:
                self._since[rank] = 0.0
            elif self._since[rank] == 0.0:
                self._since[rank] = now
            elif now - self._since[rank] > self._group.timeout:
                self._group.failure.abort(
                    f"a stream of rank {self._group.rank} waited {self._group.timeout:g} s for a signal of a window "
                    f"from rank {rank}: expected {wanted}, saw {count}"
                )
                return

    def release_streams(self) -> None:
        """Sets the words so that no stream waits for signals, now or later."""
        for rank in range(self._group.world_size):
            self._values[rank] = _RELEASED

    def close(self) -> None:
        """Closes the window; its array stays registered. The words live until no stream uses them."""
        if self._closed or self._group.failure.inherited:
            return
        self._closed = True
        self._group.stream_waits.remove(self)
        if not self._group.failure.closed:
            self._group.let_go(self)
