"""Announcements: a rank announces memory to the ranks of its host, which reply with the addresses of their mappings.
Each rank has one table in its control segment (announcements.h). No rank waits: a peer maps new entries when it next
checks the table.
"""

from __future__ import annotations

from msgspec import Struct

from proxyccl.proxy._engine import ffi, lib

TABLE_BYTES: int = ffi.sizeof("ProxycclAnnouncements")
ENTRIES: int = lib.PROXYCCL_ANNOUNCEMENTS
MOST_RANKS: int = lib.PROXYCCL_ANNOUNCEMENT_PEERS
LONGEST_HANDLE: int = lib.PROXYCCL_ANNOUNCED_HANDLE_BYTES
UNREACHED: int = lib.PROXYCCL_UNREACHED
"""The address in a reply if the peer's kernels can't reach the memory."""
NO_MEMORY: int = lib.PROXYCCL_NO_MEMORY
"""The memory id in a reply if the peer's proxy can't use the memory."""


class Announcement(Struct, frozen=True):
    """The contents of an entry, as a peer reads it."""

    version: int  # the number of the entry's changes
    handle: bytes  # the handle by which peers map the memory; empty if the memory was withdrawn
    proxies_version: int  # the last version whose memory the owner announced to peers' proxies

    @property
    def for_proxies(self) -> bool:
        return self.proxies_version == self.version


class Announcements:
    """The table of announcements, of TABLE_BYTES bytes, of this rank or of a peer.

    Args:
        address: the table's CPU address. Zeroed memory is an empty table.
    """

    def __init__(self, address: int) -> None:
        self._table = ffi.cast("ProxycclAnnouncements *", address)
        self._copy = ffi.new("ProxycclAnnouncement *")
        self._handled = ffi.new("uint64_t[]", ENTRIES)  # the versions handled by this rank as a peer, by entry

    @property
    def changes(self) -> int:
        return lib.proxyccl_announcement_changes(self._table)

    def announce(self, entry: int, handle: bytes) -> None:
        """For the owner: announces, in a free entry, the memory of a handle. An empty handle withdraws the entry's
        memory.
        """
        lib.proxyccl_announce(self._table, entry, handle, len(handle))

    def announce_to_proxies(self, entry: int) -> None:
        """For the owner: announces the entry's memory to peers' proxies."""
        lib.proxyccl_announce_to_proxies(self._table, entry)

    def changed(self) -> list[tuple[int, Announcement]]:
        """For a peer: returns the entries that have changed since `handle` marked them, except entries that are being
        written.
        """
        found, copy, entry = [], self._copy, 0
        while (entry := lib.proxyccl_announcement_changed(self._table, entry, self._handled)) < ENTRIES:
            version = lib.proxyccl_announcement_read(self._table, entry, copy)
            if version:
                handle = bytes(ffi.buffer(copy.handle, copy.handle_bytes))
                found.append((entry, Announcement(version, handle, copy.for_proxies)))
            entry += 1
        return found

    def handle(self, entry: int, announcement: Announcement) -> None:
        """For a peer: marks an announcement as handled, so that `changed` does not return it again."""
        self._handled[entry] = announcement.proxies_version << 32 | announcement.version

    def handle_again(self) -> None:
        """For a peer: makes `changed` return all entries again."""
        self._handled = ffi.new("uint64_t[]", ENTRIES)

    def reply(self, entry: int, peer: int, version: int, address: int) -> None:
        """For the peer with this number on the host: replies with the address at which the peer has mapped a version's
        memory, or 0 if the version is a withdrawal.
        """
        lib.proxyccl_announcement_reply(self._table, entry, peer, version, address)

    def reply_memory(self, entry: int, peer: int, version: int, memory: int) -> None:
        """For the peer with this number on the host: replies with the id of a version's memory in the peer's proxy, or
        NO_MEMORY.
        """
        lib.proxyccl_announcement_reply_memory(self._table, entry, peer, version, memory)

    def memories(self, entry: int, peers: list[int]) -> list[int] | None:
        """For the owner: returns the ids of the entry's memory in the peers' proxies; None while a peer has not
        replied.
        """
        memory, found = ffi.new("uint32_t *"), []
        for peer in peers:
            if not lib.proxyccl_announcement_memory(self._table, entry, peer, memory):
                return None
            found.append(memory[0])
        return found

    def replies(self, entry: int, peers: list[int]) -> list[int] | None:
        """For the owner: returns the peers' addresses of the entry's memory; None while a peer has not replied."""
        address, found = ffi.new("uint64_t *"), []
        for peer in peers:
            if not lib.proxyccl_announcement_reached(self._table, entry, peer, address):
                return None
            found.append(address[0])
        return found
