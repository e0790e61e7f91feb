"""NIXL's lists of descriptors. Each descriptor is a row (address, bytes, device); in a list for registration, a
descriptor also contains bytes for the backend.

Blocks at a constant stride may be given as one row, (address, bytes, device, stride, count).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from proxyccl.nixl.enums import nixl_mem_t
from proxyccl.nixl.errors import nixlMismatchError, nixlNotFoundError

_HEAD = struct.Struct("<4sBBQQ")
_FORMAT = b"PXD1"
_ADDRESSES = 1 << 64


def text_of(name: str | bytes) -> str:
    return bytes(name).decode() if isinstance(name, bytes | bytearray) else name


def bytes_of(message: str | bytes) -> bytes:
    return message.encode() if isinstance(message, str) else bytes(message)


class _DescList:
    """A list of descriptors.

    Attributes:
        rows: an array of uint64 of shape (N, 3): the (address, bytes, device) of each descriptor.
        grant: the bytes of the grant that contains the descriptors (`nixl_agent.grant`); b"" without one. A serialized
            list for a transfer contains the grant.
    """

    grant = b""
    _fields: ClassVar[int]
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, type: nixl_mem_t, descs: Any = None, init_size: int = 0) -> None:
        self._type = type if isinstance(type, nixl_mem_t) else nixl_mem_t(type)
        self._notes: list[bytes] = []
        if isinstance(descs, np.ndarray):
            self._rows: NDArray[np.uint64] | None = _checked_array(descs, 3).astype(np.uint64)
        elif isinstance(descs, list):
            numbers: list[int] = []
            for desc in descs:
                if not isinstance(desc, tuple):
                    raise TypeError("Each descriptor must be a tuple when provided as a list")
                if len(desc) != self._fields:
                    raise ValueError(f"Each descriptor tuple must have exactly {self._fields} elements")
                numbers += desc[:3]
                self._notes += map(bytes_of, desc[3:])
            self._rows, self._numbers = None, array("Q", numbers)
            return
        else:
            self._rows = np.zeros((int(descs or init_size), 3), np.uint64)
        if self._fields == 4:
            self._notes = [b""] * len(self._rows)

    @property
    def rows(self) -> NDArray[np.uint64]:
        if self._rows is None:  # made when it is needed, because making an array takes longer than all else here
            self._rows = np.frombuffer(self._numbers, np.uint64).reshape(-1, 3)
        return self._rows

    @rows.setter
    def rows(self, rows: NDArray[np.uint64]) -> None:
        self._rows = rows

    def numbers(self) -> Iterable[int]:
        """Returns the entries of `rows` (three integers per descriptor) as one flat sequence."""
        return self._numbers if self._rows is None else self._rows.ravel().tolist()

    def getType(self) -> nixl_mem_t:
        return self._type

    def descCount(self) -> int:
        return len(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def isEmpty(self) -> bool:
        return len(self.rows) == 0

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _DescList)
            and other._fields == self._fields
            and other._type == self._type
            and np.array_equal(other.rows, self.rows)
            and other._notes == self._notes
            and other.grant == self.grant
        )

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        row = tuple(int(value) for value in self.rows[index])
        return (*row, self._notes[index]) if self._fields == 4 else row

    def __setitem__(self, index: int, desc: tuple[Any, ...]) -> None:
        self.rows[index] = desc[:3]
        if self._fields == 4:
            self._notes[index] = bytes_of(desc[3])

    def addDesc(self, desc: tuple[Any, ...]) -> None:
        self.rows = np.concatenate((self.rows, np.array([desc[:3]], np.uint64)))
        if self._fields == 4:
            self._notes.append(bytes_of(desc[3]))

    append = addDesc

    def index(self, desc: tuple[Any, ...]) -> int:
        found = np.flatnonzero((self.rows == np.array(desc[:3], np.uint64)).all(axis=1))
        if not len(found):
            raise nixlNotFoundError(f"the list has no descriptor {desc[:3]}")
        return int(found[0])

    def remDesc(self, index: int) -> None:
        self.rows = np.delete(self.rows, index, 0)
        if self._fields == 4:
            del self._notes[index]

    def clear(self) -> None:
        self.rows = self.rows[:0]
        self._notes = []
        self.grant = b""

    def print(self) -> None:
        print(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._type.name}, {[self[index] for index in range(len(self))]})"

    def serialize(self) -> bytes:
        notes = self.grant or b"".join(len(note).to_bytes(4, "little") + note for note in self._notes)
        head = _HEAD.pack(_FORMAT, self._fields, self._type, len(self.rows), len(notes))
        return head + self.rows.tobytes() + notes


class nixlXferDList(_DescList):
    """Descriptors of a transfer: (address, bytes, device)."""

    _fields = 3


class nixlRegDList(_DescList):
    """Descriptors of a registration: (address, bytes, device, bytes for the backend)."""

    _fields = 4

    def trim(self) -> nixlXferDList:
        """Returns these descriptors as a list for a transfer."""
        return nixlXferDList(self._type, self.rows)


def deserialize(data: bytes) -> nixlXferDList | nixlRegDList:
    """Returns the list that `serialize` turned into these bytes. Unlike a pickle, the bytes can't make this process run
    code.

    Raises:
        nixlMismatchError: the bytes are not a serialized list.
    """
    try:
        name, fields, kind, count, notes_bytes = _HEAD.unpack_from(data)
        rows_end = _HEAD.size + 24 * count
        if name != _FORMAT or fields not in (3, 4) or len(data) != rows_end + notes_bytes:
            raise nixlMismatchError("the bytes are not a list of descriptors")
        rows = np.frombuffer(data, np.uint64, 3 * count, _HEAD.size).reshape(-1, 3).copy()
        made = (nixlRegDList if fields == 4 else nixlXferDList)(nixl_mem_t(kind))
        notes, at = [], rows_end
        if fields == 3 and notes_bytes:
            made.grant, at = data[rows_end:], len(data)
        while at < len(data):
            length = int.from_bytes(data[at : at + 4], "little")
            notes.append(data[at + 4 : at + 4 + length])
            at += 4 + length
        if len(notes) != count * (fields == 4) or at != len(data):
            raise nixlMismatchError("the bytes are not a list of descriptors")
    except (struct.error, ValueError, TypeError) as error:
        raise nixlMismatchError(f"the bytes are not a list of descriptors: {error}") from None
    made.rows, made._notes = rows, notes
    return made


class StridedRows:
    """The rows (address, bytes, device) of blocks at a constant stride. A block's row is computed only when a transfer
    picks the block, because a cache may have millions of blocks.

    Args:
        descs: uint64 or int64 [N, 5], rows of (address, bytes, device, stride, count). Strides are in bytes.

    Attributes:
        spans: uint64 [N, 3], for each row of `descs` the (address, bytes, device) of the memory from the row's first
            block to its last block.

    Raises:
        TypeError, ValueError: `descs` is not such an array.
        nixlNotFoundError: a row has no block, or blocks that are empty, overlap or end beyond the last address.
    """

    def __init__(self, descs: object) -> None:
        if not isinstance(descs, np.ndarray):
            raise TypeError(f"expected a Nx5 numpy array, not {type(descs).__name__}")
        self._rows = _checked_array(descs, 5).astype(np.uint64)
        self.spans = self._rows[:, :3].copy()
        for index, (address, nbytes, _, stride, count) in enumerate(self._rows.tolist()):
            span = (count - 1) * stride + nbytes
            if not count or not nbytes or stride < nbytes or address + span > _ADDRESSES:
                raise nixlNotFoundError(f"row {index} does not describe blocks: {tuple(self._rows[index].tolist())}")
            self.spans[index, 1] = span
        self._ends = self._rows[:, 4].cumsum()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, indices: NDArray[Any]) -> NDArray[np.uint64]:
        """Returns the rows of the blocks with these indices, uint64 [M, 3]. Indices of blocks continue from row to
        row.
        """
        blocks = indices.astype(np.uint64)
        of_row = np.searchsorted(self._ends, blocks, side="right")
        rows = self._rows[of_row]
        places = blocks - (self._ends[of_row] - rows[:, 4])
        return np.column_stack((rows[:, 0] + places * rows[:, 3], rows[:, 1:3]))


def _checked_array(descs: NDArray[Any], columns: int) -> NDArray[Any]:
    if descs.ndim != 2 or descs.shape[1] != columns:
        raise ValueError(f"descs must be a Nx{columns} numpy array")
    if descs.dtype not in (np.uint64, np.int64):
        raise ValueError(f"descs must be a Nx{columns} numpy array of uint64 or int64")
    if not descs.flags.c_contiguous:
        raise ValueError("descs must be a C-contiguous numpy array")
    return descs
