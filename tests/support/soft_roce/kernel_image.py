"""Extracts the uncompressed kernel from a vmlinuz.

QEMU starts an uncompressed kernel directly (PVH), because an emulated CPU would unpack it slowly. The kernel's
Documentation/arch/x86/boot.rst describes the format.
"""

from __future__ import annotations

import lzma
import struct

SECTOR = 512
SETUP_SECTORS = 0x1F1
PAYLOAD = 0x248  # at this offset are the payload's offset after the setup sectors, and its length
XZ = b"\xfd7zXZ\0"
UNPACKED_SIZE = 4  # size in bytes of the payload's last field, the unpacked length


def uncompressed(image: bytes) -> bytes:
    """Returns the uncompressed kernel of a vmlinuz, or the vmlinuz itself if its compression is not xz."""
    offset, length = struct.unpack_from("<II", image, PAYLOAD)
    start = (image[SETUP_SECTORS] + 1) * SECTOR + offset
    payload = image[start : start + length]
    return lzma.decompress(payload[:-UNPACKED_SIZE]) if payload.startswith(XZ) else image
