"""Blocks of memory as numpy arrays of uint64, with one row per block."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxyccl.device.arguments.integers import as_integer
from proxyccl.device.errors import ArgumentError

Rows = NDArray[np.uint64]


def strided(
    local: int, remote: int, nbytes: int, count: int, local_stride: int, remote_stride: int | None = None
) -> Rows:
    """Returns equally spaced blocks of equal size, for `Agent.read` and `Agent.write`.

    Args:
        local, remote: the local and the remote address of the first block.
        nbytes: the size of each block in bytes.
        count: the number of blocks.
        local_stride, remote_stride: bytes from the start of one block to the start of the next, on each side. By
            default `remote_stride` equals `local_stride`.

    Returns:
        uint64 of shape (count, 3): local address, remote address, bytes.

    Raises:
        ArgumentError: a number is negative, or not an integer.
    """
    values = {"local": local, "remote": remote, "nbytes": nbytes, "count": count, "local_stride": local_stride}
    values["remote_stride"] = local_stride if remote_stride is None else remote_stride
    for name, value in values.items():
        as_integer(value, name, "must be an integer from 0 on", 0, 2**63 - 1)
    steps = np.arange(count, dtype=np.uint64)
    rows = np.empty((count, 3), np.uint64)
    rows[:, 0] = np.uint64(local) + steps * np.uint64(local_stride)
    rows[:, 1] = np.uint64(remote) + steps * np.uint64(values["remote_stride"])
    rows[:, 2] = nbytes
    return rows


def as_rows(blocks: Any, columns: int = 3) -> Rows:
    """Converts a caller's blocks to rows. The caller may pass anything that numpy converts to integers of shape (N,
    columns).

    Raises:
        ArgumentError: `blocks` can't be converted, or a number is negative.
    """
    if isinstance(blocks, np.ndarray) and blocks.dtype == np.uint64 and blocks.ndim == 2 and blocks.shape[1] == columns:
        return blocks
    try:
        rows = np.asarray(blocks)
    except ValueError as error:  # numpy raises this for rows of different lengths
        raise ArgumentError("blocks", f"expected rows of {columns} integers: {error}") from None
    if rows.size == 0:
        rows = rows.reshape(0, columns).astype(np.uint64)
    if rows.ndim != 2 or rows.shape[1] != columns or rows.dtype.kind not in "iu":
        raise ArgumentError(
            "blocks",
            f"expected an array of integers of shape (N, {columns}), not of shape {rows.shape} and type {rows.dtype}",
        )
    if rows.dtype.kind == "i" and (rows < 0).any():
        raise ArgumentError("blocks", "has a negative number")
    return rows.astype(np.uint64)


def find_outside(starts: Rows, ends: Rows, addresses: Rows, nbytes: Rows) -> int | None:
    """Returns the index of the first block that no range contains; None if ranges contain all blocks.

    Args:
        starts, ends: the ranges, in ascending order of both.
        addresses, nbytes: the blocks.
    """
    if not len(starts):
        return 0 if len(addresses) else None
    at = np.searchsorted(starts, addresses, "right") - 1
    last = addresses + nbytes
    outside = (at < 0) | (ends[at] < last) | (last < addresses)
    return int(outside.argmax()) if outside.any() else None


def joined(rows: Rows) -> Rows:
    """Drops empty rows of (local, remote, bytes, …), and merges consecutive rows that are adjacent on both sides and
    equal in the further columns.
    """
    rows = rows[rows[:, 2] > 0]
    if len(rows) > 1:
        ends = rows[:-1, :2] + rows[:-1, 2:3]
        differ = (rows[1:, :2] != ends).any(axis=1) | (rows[1:, 3:] != rows[:-1, 3:]).any(axis=1)
        first = np.concatenate(([0], np.flatnonzero(differ) + 1))
        if len(first) < len(rows):
            nbytes = np.add.reduceat(rows[:, 2], first)
            rows = rows[first]
            rows[:, 2] = nbytes
    return rows


def sides(rows: Rows, apart: Rows | None = None) -> tuple[Rows, Rows]:
    """Joins rows, and returns the engine's two arguments: (address, bytes) of the local side, and of the remote side.
    `apart`, if given, has a row of numbers for each row of `rows`; rows whose numbers differ are not joined.
    """
    rows = joined(rows if apart is None else np.column_stack((rows, apart)))
    return np.ascontiguousarray(rows[:, 0:3:2]), np.ascontiguousarray(rows[:, 1:3])
