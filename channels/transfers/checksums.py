"""Checksums of blocks of this process's host memory."""

from __future__ import annotations

import os
import zlib

import numpy as np
from numpy.typing import NDArray

from proxyccl.channels.transfers.blocks import Rows
from proxyccl.device.errors import ResourceError

UNREADABLE = -1
_PIECE = 1 << 18


def checksums_of(rows: Rows) -> NDArray[np.int64]:
    """Returns the CRC-32 of each block, or UNREADABLE if the program has freed the block's memory. Rows are (address,
    bytes). Raises ResourceError if /proc/self/mem can't be opened.
    """
    piece = memoryview(bytearray(_PIECE))
    # Reading freed memory through the kernel fails, whereas a direct access would end the process.
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ResourceError(f"checksums need /proc/self/mem: {error}") from None
    try:
        return np.array([_checksum_of(memory, piece, *row) for row in rows.tolist()], np.int64)
    finally:
        os.close(memory)


def _checksum_of(memory: int, piece: memoryview, address: int, nbytes: int) -> int:
    value, at, end = 0, address, address + nbytes
    while at < end:
        try:
            read = os.preadv(memory, [piece[: end - at]], at)
        except OSError:
            return UNREADABLE
        value = zlib.crc32(piece[:read], value)
        at += read
    return value
