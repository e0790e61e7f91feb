"""The table in which a rank announces memory to the other ranks of its host."""

from __future__ import annotations

from proxyccl.proxy._engine import ffi, lib


def test_versions_that_come_round_pass_over_that_of_an_unused_entry() -> None:
    table, copy = ffi.new("ProxycclAnnouncements *"), ffi.new("ProxycclAnnouncement *")
    versions = ffi.cast("uint32_t *", ffi.cast("char *", table) + 8)  # the first entry's, after the number of changes
    versions[0] = 2**32 - 4
    read = []
    for handle in (b"one", b"two", b"three"):
        lib.proxyccl_announce(table, 0, handle, len(handle))
        read.append(lib.proxyccl_announcement_read(table, 0, copy))
        assert bytes(ffi.buffer(copy.handle, copy.handle_bytes)) == handle
        lib.proxyccl_announcement_reply(table, 0, 5, read[-1], 4096)
        address = ffi.new("uint64_t *")
        assert lib.proxyccl_announcement_reached(table, 0, 5, address)
        assert not lib.proxyccl_announcement_reached(table, 0, 6, address)  # a peer that has not replied
    assert read == [2**32 - 2, 2, 4]
