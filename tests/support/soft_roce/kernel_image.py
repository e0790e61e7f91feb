"""Extracts the uncompressed kernel from the compressed file that boot loaders take.

QEMU starts it directly (PVH), which saves the time that an emulated CPU needs to unpack it.
Format: the kernel's Documentation/arch/x86/boot.rst.
"""

from __future__ import annotations

import lzma
import struct

SECTOR = 512
SETUP_SECTORS = 0x1F1
PAYLOAD = 0x248  # here are the payload's offset from the end of the setup sectors, and its length
XZ = b"\xfd7zXZ\0"
UNPACKED_SIZE = 4  # the payload's last bytes are its unpacked length


def uncompressed(image: bytes) -> bytes:
    """Returns the kernel in a vmlinuz, or the vmlinuz itself if it is compressed with anything but xz: QEMU starts that
    too, only slower.
    """
    offset, length = struct.unpack_from("<II", image, PAYLOAD)
    start = (image[SETUP_SECTORS] + 1) * SECTOR + offset
    payload = image[start : start + length]
    return lzma.decompress(payload[:-UNPACKED_SIZE]) if payload.startswith(XZ) else image
