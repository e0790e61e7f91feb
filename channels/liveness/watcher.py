"""The watcher's thread, which notices when a peer's process ends (process_watch.py) or a rank of another host fails,
and reports failures to all ranks.

The thread also maps memory that peers have registered. The thread wakes every INTERVAL_MS while this rank makes calls,
and otherwise every IDLE_INTERVAL_MS, so that an idle rank uses almost no CPU time. A rank that waits for a peer's
thread wakes that thread immediately. A communicator and the communicators that were split from it share the thread.
After a failure the thread releases streams that wait for the proxy. No separate thread releases these streams, because
once memory has run out, no thread can be started.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from proxyccl.channels.liveness.host_links import HostLink
from proxyccl.channels.liveness.process_watch import ProcessWatch
from proxyccl.channels.segment import process_descriptors
from proxyccl.channels.segment.control import ControlSegment, Presence
from proxyccl.channels.segment.error_record import ErrorRecord
from proxyccl.channels.segment.process_descriptors import PeerProcess
from proxyccl.device._native import lib
from proxyccl.device.errors import ResourceError
from proxyccl.device.memory.descriptors import naming_exhaustion
from proxyccl.device.process import forks
from proxyccl.device.process.threads import Thread

_logger = logging.getLogger("proxyccl")
_MOST_RINGS = 64  # maximum number of datagrams that one turn of a thread takes; poll() reports the others again


class WatchThread:
    """The thread that runs the watchers of a communicator and of the communicators that were split from it. Between
    runs the thread sleeps in poll(). A datagram to the thread's socket (its bell) wakes the thread.

    Attributes:
        bell: the number in the name of the thread's socket.

    Raises:
        ResourceError: there is no memory for a thread, or no descriptor for its socket.
    """

    INTERVAL_MS = 20
    IDLE_INTERVAL_MS = 200
    BUSY_SECONDS = 1.0  # for this time after a call, the thread wakes every INTERVAL_MS
    RELEASING_MS = 1

    def __init__(self, name: str) -> None:
        self._lock = threading.RLock()
        self._watchers: list[Watcher] = []
        self._by_descriptor: dict[int, Watcher] = {}
        self._poll = select.poll()
        self._ending = False
        self.bell = int.from_bytes(os.urandom(8), "little") | 1  # 0 is the bell of a rank without a thread
        with naming_exhaustion("the thread that watches the peers"):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        forks.keep_from_children(self._socket)
        self._poll.register(self._socket, select.POLLIN)
        self._thread = Thread(self._run, name, failed=self._fail)
        try:
            self._socket.bind(_address(self.bell))
            self._thread.start()
        except BaseException:
            self._socket.close()
            raise

    def add(self, watcher: Watcher) -> None:
        """Makes the thread run a watcher each time the thread wakes, and as soon as a descriptor of the watcher is
        readable."""
        with self._lock:
            self._watchers.append(watcher)
        for descriptor in watcher.descriptors:
            self.watch(watcher, descriptor)

    def watch(self, watcher: Watcher, descriptor: int) -> None:
        """Makes the thread also wake as soon as this descriptor of the watcher is readable."""
        with self._lock:
            self._by_descriptor[descriptor] = watcher
            self._poll.register(descriptor, select.POLLIN)

    def remove(self, watcher: Watcher) -> None:
        """Stops running a watcher. The watcher's descriptors must still be open."""
        with self._lock:
            self._watchers.remove(watcher)
            for descriptor in [known for known, whose in self._by_descriptor.items() if whose is watcher]:
                self.forget(descriptor)

    def forget(self, descriptor: int) -> None:
        with self._lock:
            if self._by_descriptor.pop(descriptor, None) is not None:
                self._poll.unregister(descriptor)

    def _run(self) -> None:
        readable: set[int] = set()
        while not self._ending:
            with self._lock:
                whose = {descriptor: self._by_descriptor.get(descriptor) for descriptor in readable}
                watchers = list(self._watchers)
            for watcher in watchers:
                self._have_look(watcher, [descriptor for descriptor in readable if whose[descriptor] is watcher])
            if any(watcher.releasing for watcher in watchers):
                interval = self.RELEASING_MS
            elif any(watcher.busy_until > time.monotonic() for watcher in watchers):
                interval = self.INTERVAL_MS
            else:
                interval = max(self.INTERVAL_MS, self.IDLE_INTERVAL_MS)
            readable = {fd for fd, _ in self._poll.poll(interval)}
            if self._socket.fileno() in readable:
                with contextlib.suppress(BlockingIOError):
                    for _ in range(_MOST_RINGS):
                        self._socket.recv(1)

    def ring(self, bell: int) -> None:
        """Wakes the thread with this bell, which may be in another process. Has no effect if the process has ended, or
        is in another network namespace, where the thread wakes only by itself.
        """
        # The socket's queue may be full of unread datagrams, and a security module may forbid datagrams. The thread
        # also wakes without a datagram, after its interval.
        with contextlib.suppress(OSError):
            self._socket.sendto(b"", _address(bell))

    @staticmethod
    def _have_look(watcher: Watcher, readable: list[int]) -> None:
        try:
            watcher.look(readable)
        except MemoryError:
            return  # retried: `poll` returns the same events again
        except Exception as error:  # the thread continues to run the other watchers
            watcher.fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher.fail(error)

    def end(self) -> None:
        """Ends the thread. All watchers of the thread must already be closed."""
        self._ending = True
        self.ring(self.bell)
        self._thread.join()
        self._socket.close()


def _address(bell: int) -> bytes:
    return b"\0proxyccl-watch-%x" % bell


class Watcher:
    """Watches the peers of a rank: processes of its host by their pidfds, and ranks of other hosts by sockets (links).

    Args:
        segments: the segments of the host's other ranks.
        processes: the processes of these ranks, except this process; empty if `parent` watches them.
        links: the connections to the ranks of other hosts, which the watcher closes.
        on_abort: called in a separate thread after an abort was reported to all ranks.
        each_turn: called each time the thread wakes, until an abort. Returns the number of calls that this rank has
            made.
        on_error: called once, in the thread, with an unexpected error of the watcher; must make the communicator fail.
        end_waits: releases streams that wait for the proxy; called in the thread every RELEASING_MS, but only after an
            abort was reported, so that a program whose stream is released sees the failure.
        parent: the watcher of the communicator that this communicator was split from. The parent's abort also aborts
            this communicator, and the parent's thread runs this watcher.
        members: the ranks' numbers in the parent's communicator.
    """

    ENDING_MS = 1000

    def __init__(
        self,
        rank: int,
        own: ControlSegment,
        segments: Mapping[int, ControlSegment],
        processes: Mapping[int, PeerProcess],
        links: Mapping[int, HostLink],
        on_abort: Callable[[], None] = lambda: None,
        each_turn: Callable[[], int] = lambda: 0,
        end_waits: Callable[[], None] = lambda: None,
        on_error: Callable[[BaseException], None] = lambda _: None,
        parent: Watcher | None = None,
        members: Sequence[int] = (),
    ) -> None:
        self._on_abort = on_abort
        self._each_turn = each_turn
        self._end_waits = end_waits
        self._on_error: Callable[[BaseException], None] | None = on_error
        self._rank = rank
        self._own = own
        self._segments = segments
        self._links = {link.fileno(): (peer, link) for peer, link in links.items()}
        self._remote_presence = dict.fromkeys(links, Presence.PRESENT)
        self._thread: WatchThread = parent._thread if parent is not None else WatchThread(f"proxyccl-watch-{rank}")
        own.bell = self._thread.bell
        self._processes = ProcessWatch(rank, processes, lambda peer: segments[peer].presence is Presence.LEFT)
        self._ended: set[int] = set()
        try:
            _, _, self._lost = self._processes.follow()
        except ResourceError:
            if parent is None:
                self._thread.end()
            raise
        self._ended.update(self._lost)
        self._parent, self._members = parent, members
        self._looking = threading.Lock()  # held while a thread uses the links
        self._passed_on = self._closed = False
        self._reporting: Thread | None = None
        self.releasing = False
        self._calls = 0
        self.busy_until = time.monotonic() + WatchThread.BUSY_SECONDS
        self._thread.add(self)

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that become readable when a peer's process ends, or when a peer's link has a message."""
        return [*self._processes.watched, *self._links]

    def wake_peers(self) -> None:
        """Wakes the threads that watch for the other ranks of this host, so that they call `each_turn` immediately."""
        for segment in self._segments.values():
            self._thread.ring(segment.bell)

    def look(self, readable: Sequence[int]) -> None:
        """Handles events. The watcher's thread calls `look` each time it wakes.

        Args:
            readable: those of `descriptors` that are readable.
        """
        with self._looking:
            if self._closed:
                return
            if not self._passed_on:
                self._watch(readable)
            if self.releasing:
                self._end_waits()

    def fail(self, error: BaseException) -> None:
        on_error, self._on_error = self._on_error, None
        if on_error is not None:
            _logger.error("rank %d: its watcher has failed", self._rank, exc_info=error)
            on_error(error)

    def _watch(self, readable: Sequence[int]) -> None:
        for peer in self._lost:
            self._peer_ended(peer)
        self._lost = []
        for descriptor in readable:
            self._take(descriptor)
        self._follow_processes()
        self._end_with_parent()
        if self._own.aborted:
            for descriptor in self.descriptors:
                self._thread.forget(descriptor)
            self.pass_on()
            self._passed_on = self.releasing = True
            self._report()
        elif (calls := self._each_turn()) != self._calls:
            self._calls, self.busy_until = calls, time.monotonic() + WatchThread.BUSY_SECONDS

    def _follow_processes(self) -> None:
        # If no descriptor is left, the next wake-up tries again, and meanwhile other ranks watch the same processes.
        with contextlib.suppress(ResourceError):
            new, old, lost = self._processes.follow()
            for descriptor in old:
                self._thread.forget(descriptor)
                process_descriptors.release(descriptor)
            for descriptor in new:
                self._thread.watch(self, descriptor)
            for peer in lost:
                self._peer_ended(peer)

    def _report(self) -> None:
        # `on_abort` may take long, so it runs in its own thread, in order not to delay the other watchers of this
        # thread.
        with contextlib.suppress(ResourceError, MemoryError):
            thread = Thread(self._on_abort, f"proxyccl-abort-{self._rank}")
            thread.start()
            self._reporting = thread

    def _end_with_parent(self) -> None:
        if self._parent is not None and self._parent._own.aborted:
            self._own.raise_abort(ErrorRecord(lib.PROXYCCL_ERROR_PARENT, self._rank))

    def _take(self, descriptor: int) -> None:
        if descriptor in self._links:
            self._receive(descriptor)
        else:
            self._peer_ended(self._processes.watched[descriptor])
            self._thread.forget(descriptor)

    def _receive(self, descriptor: int) -> None:
        peer, link = self._links[descriptor]
        if self._remote_presence[peer] is Presence.LEFT:  # `check_for_end` has already read the last message
            return
        while (message := link.receive()) is not None:
            if isinstance(message, Presence):
                self._remote_presence[peer] = message
                if message is not Presence.LEFT:
                    continue
            elif isinstance(message, ErrorRecord):
                self._own.raise_abort(message)
            else:
                self._file_lost(peer)
            self._thread.forget(descriptor)  # after this message the peer sends nothing
            return

    def _peer_ended(self, peer: int) -> None:
        # A rank that has closed the communicator no longer accesses this rank's memory, so its process may end.
        if self._segments[peer].presence is not Presence.LEFT:
            self._file_lost(peer)

    def _file_lost(self, peer: int) -> None:
        self._ended.add(peer)
        self._own.raise_abort(ErrorRecord(lib.PROXYCCL_ERROR_PEER_LOST, self._rank, peer))

    def check_for_end(self, peer: int) -> None:
        """Makes the communicator fail with a PeerLostError if, within ENDING_MS, the peer's process ends or, for a peer
        on another host, its link closes.

        Call this when this rank could not reach the peer, because the operating system closes a dying process's files,
        verbs objects and libfabric connections before the process's pidfd becomes readable, and maybe before it closes
        the link.
        """
        if self._parent is not None:
            if not self._parent._own.aborted:
                self._parent.check_for_end(self._members[peer])
            self._end_with_parent()
            return
        if peer in self._processes.processes:
            ended = self._process_ends(peer, self.ENDING_MS)
            with self._looking:
                if ended and not (self._closed or self._own.aborted):
                    self._peer_ended(peer)
        for descriptor in [known for known, (rank, _) in self._links.items() if rank == peer]:
            if _is_readable(descriptor, self.ENDING_MS, select.POLLRDHUP):
                with self._looking:
                    if not (self._closed or self._own.aborted):
                        self._take(descriptor)

    def has_ended(self, peer: int) -> bool:
        """Returns whether a peer can no longer take part, because its process has ended, its link is lost, or it has
        closed the communicator."""
        if peer not in self._ended and self._can_tell_end(peer):
            self._ended.add(peer)
        return peer in self._ended

    def _can_tell_end(self, peer: int) -> bool:
        for rank, link in self._links.values():
            if rank == peer:
                with self._looking:  # after an abort, the watcher's thread no longer reads from links
                    while self._own.aborted and (message := link.receive()) is not None:
                        if isinstance(message, Presence):
                            self._remote_presence[peer] = message
                        elif isinstance(message, str):
                            return True
        if self.presence(peer) is Presence.LEFT:
            return True
        if peer in self._processes.processes:
            return self._process_ends(peer)
        return self._parent is not None and self._parent.has_ended(self._members[peer])

    def _process_ends(self, peer: int, milliseconds: int = 0) -> bool:
        """Returns whether a peer's process has ended, or begins to end within `milliseconds`. Returns False if this
        rank can't tell, because other ranks watch the process.
        """
        try:
            ended = _is_readable(self._processes.descriptor_of(peer), milliseconds)
            return ended or (milliseconds > 0 and self._processes.processes[peer].is_ending)
        except ProcessLookupError:
            return True
        except (ResourceError, OSError):
            return False

    def pass_on(self) -> None:
        """Sends this rank's error record to all other ranks, even if the failure came from another rank, which may have
        been killed before its record reached all ranks.
        """
        record = self._own.record()
        self._own.raise_abort(record)
        for _, link in self._links.values():
            link.send(record)

    def announce(self, presence: Presence, exchanges: int = 0) -> None:
        """Tells all peers whether this rank may still access their memory. If the presence is LEFT, `exchanges` is the
        number of exchanges that this rank has made. After LEFT does nothing: a thread that closes another group may
        announce a presence while a second thread closes this group.
        """
        with self._looking:  # keeps `close`, after which the segment is freed, from running meanwhile
            if self._closed or self._own.presence is Presence.LEFT:
                return
            self._own.set_presence(presence, exchanges)
            for _, link in self._links.values():
                link.send(presence)

    def presence(self, peer: int) -> Presence:
        if peer in self._segments:
            return self._segments[peer].presence
        return self._remote_presence[peer]

    def left_before(self, exchange: int) -> int | None:
        """Returns a peer of this host that closed the communicator before the exchange of this number (from 1); None if
        no peer did."""
        for peer, segment in self._segments.items():
            if segment.presence is Presence.LEFT and segment.exchanges < exchange:
                return peer
        return None

    def end_waits(self) -> None:
        """After the proxy has ended, makes the thread release streams that wait for the proxy, until `close`."""
        self.releasing = True

    def finish(self) -> None:
        """Stops watching for failures. If a rank has failed, waits until `on_abort` has returned."""
        with self._looking:
            unseen, self._passed_on = self._own.aborted and not self._passed_on, True
        if unseen:  # the abort came after the watcher's last wake-up
            self.pass_on()
            self._report()
        if self._reporting is not None:
            self._reporting.join()

    def close(self) -> None:
        """Closes the watcher and, unless the communicator was split from another communicator, ends the thread."""
        self.finish()
        with self._looking:
            self._closed = True
        self._thread.remove(self)
        if self._parent is None:
            self._thread.end()
        for _, link in self._links.values():
            link.close()
        self._processes.close()


def _is_readable(descriptor: int, milliseconds: int, event: int = select.POLLIN) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(milliseconds))
