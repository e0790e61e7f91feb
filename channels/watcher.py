"""The thread that notices when a peer's process ends or a rank of another host fails, and passes failures on.

It also maps what peers announce, within INTERVAL_MS.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from proxyccl.channels import process_descriptors
from proxyccl.channels.control import ControlSegment, Presence
from proxyccl.channels.error_record import ErrorRecord
from proxyccl.device._native import lib


class Link(Protocol):
    """A connection to a rank of another host (host_links.py)."""

    def fileno(self) -> int:
        """Descriptor for poll()."""
        ...

    def send(self, message: ErrorRecord | Presence) -> None:
        """Sends the record of an abort, or whether this rank may still touch the peer's memory. Never blocks."""
        ...

    def receive(self) -> ErrorRecord | Presence | str | None:
        """The peer's next message: the record of its abort, its presence, "lost", or None if there is none yet."""
        ...

    def close(self) -> None:
        """Closes the connection."""
        ...


class Watcher:
    """Watches the peers of a rank: processes of its host by their descriptors, ranks of other hosts by their links.

    The thread sleeps in poll() otherwise.

    Args:
        rank: this rank.
        own: its segment.
        segments: the segments of the host's other ranks.
        pids: their processes, where these are not this one.
        links: to the ranks of other hosts; the watcher closes them.
        on_abort: called in the thread after the abort was passed on.
        each_turn: called in the thread every INTERVAL_MS at least.
    """

    INTERVAL_MS = 20
    ENDING_MS = 1000

    def __init__(
        self,
        rank: int,
        own: ControlSegment,
        segments: Mapping[int, ControlSegment],
        pids: Mapping[int, int],
        links: Mapping[int, Link],
        on_abort: Callable[[], None] = lambda: None,
        each_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_abort = on_abort
        self._each_turn = each_turn
        self._rank = rank
        self._own = own
        self._segments = segments
        self._links = {link.fileno(): (peer, link) for peer, link in links.items()}
        self._remote_presence = dict.fromkeys(links, Presence.PRESENT)
        self._poll = select.poll()
        self._descriptors: dict[int, int] = {}
        lost: list[int] = []
        for peer, pid in pids.items():
            try:
                descriptor = process_descriptors.acquire(pid)
            except ProcessLookupError:
                lost.append(peer)
                continue
            self._descriptors[descriptor] = peer
            self._poll.register(descriptor, select.POLLIN)
        for descriptor in self._links:
            self._poll.register(descriptor, select.POLLIN)
        self._stop_read, self._stop_write = os.pipe()
        self._poll.register(self._stop_read, select.POLLIN)
        self._lost = lost
        self._thread = threading.Thread(target=self._run, name=f"proxyccl-watch-{rank}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for peer in self._lost:
            self._peer_ended(peer)
        while not self._own.aborted:
            self._each_turn()
            for descriptor, _ in self._poll.poll(self.INTERVAL_MS):
                if descriptor == self._stop_read:
                    if not self._own.aborted:
                        return
                elif descriptor in self._links:
                    self._receive(descriptor)
                else:
                    self._poll.unregister(descriptor)
                    self._peer_ended(self._descriptors[descriptor])
        self.pass_on()
        self._on_abort()

    def _receive(self, descriptor: int) -> None:
        peer, link = self._links[descriptor]
        while (message := link.receive()) is not None:
            if isinstance(message, Presence):
                self._remote_presence[peer] = message
                if message is not Presence.LEFT:
                    continue
            elif isinstance(message, ErrorRecord):
                self._own.raise_abort(message)
            else:
                self._file_lost(peer)
            self._poll.unregister(descriptor)  # the peer says nothing more
            return

    def _peer_ended(self, peer: int) -> None:
        # A rank that left touches nothing any more, and its process may end as it likes.
        if self._segments[peer].presence is not Presence.LEFT:
            self._file_lost(peer)

    def _file_lost(self, peer: int) -> None:
        self._own.raise_abort(ErrorRecord(lib.PROXYCCL_ERROR_PEER_LOST, self._rank, peer))

    def check_for_end(self, peer: int) -> None:
        """Files that a peer of this host is lost if its process ends within ENDING_MS.

        For a rank whose transfer to that peer has failed: the kernel takes the memory of a dying process from the RDMA
        device first, and only then makes the process's descriptor readable.
        """
        ending = select.poll()
        for descriptor, rank in self._descriptors.items():
            if rank == peer:
                ending.register(descriptor, select.POLLIN)
                if ending.poll(self.ENDING_MS):
                    self._peer_ended(peer)

    def pass_on(self) -> None:
        """Sends the record of this rank's failure to all other ranks. Ranks of its host are told too: the rank that
        told this one may have been killed before it told the others.
        """
        record = self._own.record()
        self._own.raise_abort(record)
        for _, link in self._links.values():
            link.send(record)

    def announce(self, presence: Presence, exchanges: int = 0) -> None:
        """Lets all peers know whether this rank may still touch their memory; with LEFT, after so many exchanges."""
        self._own.set_presence(presence, exchanges)
        for _, link in self._links.values():
            link.send(presence)

    def presence(self, peer: int) -> Presence:
        """What a peer announced last."""
        if peer in self._segments:
            return self._segments[peer].presence
        return self._remote_presence[peer]

    def left_before(self, exchange: int) -> int | None:
        """A peer of this host that left before it came to the exchange of this number, from 1; None if none did."""
        for peer, segment in self._segments.items():
            if segment.presence is Presence.LEFT and segment.exchanges < exchange:
                return peer
        return None

    def close(self) -> None:
        """Ends the thread."""
        os.write(self._stop_write, b"x")
        self._thread.join()
        if self._own.aborted:  # the abort may have come after the thread's last look
            self.pass_on()
        for _, link in self._links.values():
            link.close()
        for descriptor in self._descriptors:
            process_descriptors.release(descriptor)
        for descriptor in (self._stop_read, self._stop_write):
            os.close(descriptor)
