"""Reads elements of another type into a staging buffer, and casts them into a target's parts.

The staging buffer has two halves. While a device casts the elements in one half, transfers fill the other half.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from proxyccl.channels.transfers.agent import Agent
from proxyccl.channels.transfers.blocks import Rows
from proxyccl.channels.transfers.transfer import Transfer
from proxyccl.channels.weights.parts import Part, strides_of
from proxyccl.channels.weights.plan import Cast, blocks_of
from proxyccl.channels.weights.sharding import Box
from proxyccl.channels.weights.tiles import BLOCK, TYPES, Tile, Tiles, grid_of, matrices, padded
from proxyccl.device.arguments.integers import round_up
from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.runtime import Runtime

_ALIGNMENT = 256
_SCALE_BYTES = 4
LEAST_STAGING = 4096
"""The least size of a staging buffer in bytes."""


class Staging:
    """A target's staging buffer, on the device of its parts.

    Args:
        nbytes: the buffer's size in bytes, at least LEAST_STAGING.
        is_device: whether agents treat the buffer as device memory; true also for an `Array` of the host runtime.

    Attributes:
        half: the size of a half in bytes.
        addresses: the addresses of the halves.
    """

    def __init__(self, agent: Agent, runtime: Runtime, nbytes: int, *, is_device: bool) -> None:
        self.runtime = runtime
        self.half = nbytes // 2 // _ALIGNMENT * _ALIGNMENT
        memory = runtime.allocate(2 * self.half)
        self._array = Array(runtime, memory, (2 * self.half,), as_dtype("uint8"))  # keeps the memory alive
        self._agent = agent
        self._region = agent.register(self._array if is_device else (memory.ptr, 2 * self.half))
        self.addresses = (memory.ptr, memory.ptr + self.half)
        self.stream = runtime.create_stream()
        self.events = [runtime.create_event(times=False) for _ in self.addresses]

    def close(self) -> None:
        self._agent.deregister(self._region)
        self._array.free()


class _Chunk(Struct):
    """Elements that fill at most one half of the staging buffer.

    Attributes:
        rows: for each source, the blocks to read.
        tiles: the casts of these elements.
        tensors: the names of the tensors that the casts write.
    """

    rows: dict[str, list[Rows]]
    tiles: list[Tile]
    tensors: set[str]


class Casts:
    """The casts of one group of a target's parts.

    Args:
        casts: the name of the source of each cast, and the cast.
        scales: by the `id` of a part, the address of the part's scales.
    """

    def __init__(
        self, agent: Agent, staging: Staging, casts: Iterable[tuple[str, Cast]], scales: Mapping[int, int]
    ) -> None:
        self._agent, self._staging = agent, staging
        chunks = _chunks(staging, casts, scales)
        self._tensors = [chunk.tensors for chunk in chunks]
        self._tiles = Tiles(staging.runtime, "cast_weights", [chunk.tiles for chunk in chunks])
        self._transfers = [
            [agent.prepare("read", source, np.concatenate(rows)) for source, rows in chunk.rows.items()]
            for chunk in chunks
        ]

    def move(self, deadline: float, written: set[str]) -> None:
        """Reads all elements, and queues their casts on the staging buffer's stream. Adds the name of each tensor to
        `written` before the tensor's part is written. Raises the errors of `Agent.wait`, but only after all transfers
        have ended.
        """
        stream, events = self._staging.stream, self._staging.events
        try:
            self._start(0)
            self._start(1)
            for index, transfers in enumerate(self._transfers):
                self._agent.wait(transfers, max(1e-3, deadline - time.monotonic()))
                written |= self._tensors[index]
                self._tiles.launch(index, stream)
                if index + 2 < len(self._transfers):
                    event = events[index % 2]
                    event.record(stream)
                    event.synchronize()
                    self._start(index + 2)
        finally:
            for transfer in self._all():
                transfer.cancel()

    def _start(self, index: int) -> None:
        for transfer in self._transfers[index] if index < len(self._transfers) else ():
            transfer.start()

    def _all(self) -> Iterator[Transfer]:
        for transfers in self._transfers:
            yield from transfers

    def close(self) -> None:
        for transfer in self._all():
            transfer.close()


def _chunks(staging: Staging, casts: Iterable[tuple[str, Cast]], scales: Mapping[int, int]) -> list[_Chunk]:
    chunks: list[_Chunk] = []
    used = staging.half
    for source, cast in casts:
        here, there, itemsize = padded(cast.here), padded(cast.there), cast.there.itemsize
        added = len(here.shape) - len(cast.box.shape)
        left = list(matrices(Box((0,) * added + cast.box.start, (1,) * added + cast.box.shape)))[::-1]
        while left:
            room, most = (staging.half - used) // itemsize, staging.half // itemsize
            if room < min(most, left[-1].shape[-1]):
                chunks.append(_Chunk({}, [], set()))
                used, room = 0, most
            box, *rest = _cut(left.pop(), room)
            left += rest[::-1]
            place = {"address": staging.addresses[(len(chunks) - 1) % 2] + used, "start": box.start}
            staged = replace(there, shape=box.shape, strides=strides_of(box.shape, itemsize), **place)
            chunks[-1].rows.setdefault(source, []).append(blocks_of(box, staged, there))
            chunks[-1].tiles.append(_tile(staged, here, scales.get(id(cast.here), 0)))
            chunks[-1].tensors.add(here.tensor)
            used += round_up(staged.nbytes, _ALIGNMENT)
    return chunks


def _cut(matrix: Box, most: int) -> list[Box]:
    """Cuts a matrix into a first box of at most `most` elements, which is as large as possible, and the rest."""
    (row, column), (rows, columns) = matrix.start[-2:], matrix.shape[-2:]
    count, width = (min(rows, most // columns), columns) if columns <= most else (1, most)
    boxes = (
        (row, column, count, width),
        (row, column + width, count, columns - width),
        (row + count, column, rows - count, columns),
    )
    return [
        Box((*matrix.start[:-2], first, left), (*matrix.shape[:-2], tall, wide))
        for first, left, tall, wide in boxes
        if tall and wide
    ]


def _tile(staged: Part, here: Part, scale: int) -> Tile:
    tile = {
        "from": staged.address,
        "from_type": TYPES[staged.dtype],
        "from_stride": staged.shape[-1],
        "to": here.address_of(staged.start),
        "to_type": TYPES[here.dtype],
        "to_stride": here.strides[-2] // here.itemsize,
        "rows": staged.shape[-2],
        "columns": staged.shape[-1],
        "scales": scale,
    }
    if here.scales == "block":
        grid = grid_of(here)
        block = (*staged.start[:-2], *(first // BLOCK for first in staged.start[-2:]))
        scale_strides = strides_of(grid.shape, _SCALE_BYTES)
        shifts = zip(block, grid.start, scale_strides, strict=True)
        tile["scales"] += sum((at - first) * stride for at, first, stride in shifts)
        tile |= {"row": staged.start[-2] % BLOCK, "column": staged.start[-1] % BLOCK}
        tile |= {"scale_stride": grid.shape[-1], "scale_step": 1}
    return tile
