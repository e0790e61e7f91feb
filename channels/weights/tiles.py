"""Lists of matrices of elements, for the kernels that cast weights and measure them (device/kernels/cast_weights.h)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec.structs import replace

from proxyccl.channels.weights.parts import FLOAT8, FLOATS, Part
from proxyccl.channels.weights.sharding import Box
from proxyccl.device.base_runtime import Stream
from proxyccl.device.runtime import Runtime

BLOCK = 128
"""The extent, in each of the last two dimensions, of a block of elements that share a scale (kBlockExtent)."""
TYPES = {name: code for code, name in enumerate((*FLOATS, FLOAT8, "scale"))}
"""The codes of element types (WeightType). "scale" is the type of scales that are made from amaxes."""

_FIELDS = (
    *("from", "to", "from_type", "to_type", "from_stride", "to_stride", "rows", "columns", "row", "column"),
    *("scales", "scale_stride", "scale_step", "first"),
)
TILE = np.dtype([(name, np.uint64) for name in _FIELDS])
"""The struct WeightTile."""
_THREADS, _GROUP, _MOST_BLOCKS = 256, 32, 4096

Tile = dict[str, int]
"""The fields of a WeightTile that are not 0. `first` is computed by `Tiles`."""


def padded(part: Part) -> Part:
    """Returns a part to which leading dimensions of one element are added, so that it has at least two dimensions."""
    count = max(0, 2 - len(part.shape))
    ones, zeros = (1,) * count, (0,) * count
    places = {name: (*zeros, *getattr(part, name)) for name in ("start", "strides")}
    return replace(part, size=(*ones, *part.size), shape=(*ones, *part.shape), **places)


def matrices(box: Box) -> Iterator[Box]:
    """Divides a box of at least two dimensions into boxes that extend in only the last two dimensions."""
    for index in np.ndindex(*box.shape[:-2]):
        start = (*(first + at for first, at in zip(box.start, index, strict=False)), *box.start[-2:])
        yield Box(start, (*(1 for _ in index), *box.shape[-2:]))


def grid_of(part: Part) -> Box:
    """Returns the box of blocks that contain elements of a part of at least two dimensions. The last two dimensions
    are divided into blocks; the other dimensions are not.
    """
    start, shape = list(part.start), list(part.shape)
    for dim in (-2, -1):
        start[dim] = part.start[dim] // BLOCK
        shape[dim] = -(-part.end[dim] // BLOCK) - start[dim] if part.shape[dim] else 0
    return Box(tuple(start), tuple(shape))


class Tiles:
    """Launches of a kernel on lists of tiles, which are copied to the device.

    Args:
        runtime: the runtime of the tiles' device.
        kernel: the kernel's name, "cast_weights" or "amax_of_weights".
        lists: the tiles of each launch, at least one.
    """

    def __init__(self, runtime: Runtime, kernel: str, lists: Sequence[Sequence[Tile]]) -> None:
        loaded = runtime.shipped("cast_weights.h", kernel)
        table = np.zeros(sum(map(len, lists)), TILE)
        self._table = runtime.allocate(table.nbytes)
        on_host = runtime.name == "host"  # on the host, one thread handles a whole block of elements
        threads, groups = (1, 1) if on_host else (_THREADS, _THREADS // _GROUP)
        self._launches = []
        row = 0
        for tiles in lists:
            address, blocks = self._table.ptr + row * TILE.itemsize, 0
            for tile in tiles:
                table[row] = (*(tile.get(name, 0) for name in _FIELDS[:-1]), blocks)
                row += 1
                extents = ((tile.get("row", 0), tile["rows"]), (tile.get("column", 0), tile["columns"]))
                blocks += math.prod(-(-(position + extent) // BLOCK) for position, extent in extents)
            grid = 1 if on_host else min(-(-blocks // groups), _MOST_BLOCKS)
            self._launches.append(loaded.prepare(grid, threads, address, len(tiles), blocks))
        runtime.copy(self._table.ptr, table.ctypes.data, table.nbytes)

    def launch(self, index: int, stream: Stream) -> None:
        """Queues the kernel on the tiles of list `index`."""
        self._launches[index](stream)
