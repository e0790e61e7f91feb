"""The table in which a rank announces memory to the other ranks of its host."""

from __future__ import annotations

from proxyccl.channels.segment.announcements import ENTRIES, Announcements
from proxyccl.proxy._engine import ffi, lib


def test_versions_that_come_round_pass_over_that_of_an_unused_entry() -> None:
    table, copy = ffi.new("ProxycclAnnouncements *"), ffi.new("ProxycclAnnouncement *")
    versions = ffi.cast("uint32_t *", ffi.cast("char *", table) + 8)
    versions[0] = 2**32 - 4
    read = []
    for handle in (b"one", b"two", b"three"):
        lib.proxyccl_announce(table, 0, handle, len(handle))
        read.append(lib.proxyccl_announcement_read(table, 0, copy))
        assert bytes(ffi.buffer(copy.handle, copy.handle_bytes)) == handle
        lib.proxyccl_announcement_reply(table, 0, 5, read[-1], 4096)
        address = ffi.new("uint64_t *")
        assert lib.proxyccl_announcement_reached(table, 0, 5, address)
        assert not lib.proxyccl_announcement_reached(table, 0, 6, address)  # peer 6 has not replied
    assert read == [2**32 - 2, 2, 4]


def test_a_peer_finds_what_it_has_not_handled() -> None:
    memory = ffi.new("ProxycclAnnouncements *")
    owner, peer = (Announcements(int(ffi.cast("uintptr_t", memory))) for _ in range(2))
    owner.announce(3, b"one")
    owner.announce(ENTRIES - 1, b"two")
    found = dict(peer.changed())
    assert {entry: announcement.handle for entry, announcement in found.items()} == {3: b"one", ENTRIES - 1: b"two"}
    peer.handle(3, found[3])
    assert [entry for entry, _ in peer.changed()] == [ENTRIES - 1]
    owner.announce_to_proxies(3)
    assert [(entry, announcement.for_proxies) for entry, announcement in peer.changed()] == [
        (3, True),
        (ENTRIES - 1, False),
    ]
    peer.handle(3, peer.changed()[0][1])
    owner.announce(3, b"")
    assert peer.changed()[0][1].handle == b""
    peer.handle(3, peer.changed()[0][1])
    peer.handle_again()
    assert [entry for entry, _ in peer.changed()] == [3, ENTRIES - 1]
