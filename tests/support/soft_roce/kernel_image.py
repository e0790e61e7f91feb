"""The kernel itself, from the compressed file that boot loaders take.

QEMU starts it directly (PVH), which saves the time that an emulated CPU needs to unpack it.
Format: the kernel's Documentation/arch/x86/boot.rst.
"""

from __future__ import annotations

import lzma
import struct

SECTOR = 512
SETUP_SECTORS = 0x1F1
PAYLOAD = 0x248  # offset from the end of the setup sectors, length
XZ = b"\xfd7zXZ\0"
UNPACKED_SIZE = 4  # bytes after the payload with its unpacked length


def uncompressed(image: bytes) -> bytes:
    """The kernel in a vmlinuz; the vmlinuz itself if it is compressed with anything but xz, because that starts too."""
    offset, length = struct.unpack_from("<II", image, PAYLOAD)
    start = (image[SETUP_SECTORS] + 1) * SECTOR + offset
    payload = image[start : start + length]
    return lzma.decompress(payload[:-UNPACKED_SIZE]) if payload.startswith(XZ) else image
