"""Greatest magnitudes (amaxes) of blocks of elements: sources measure them, and targets make float8 scales from them.

A source's table has an amax for each block of the tensor (tiles.py) of which the source has elements. If several parts
contain elements of one block, the block's amax is the greatest one of the parts' tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from proxyccl.channels.transfers.agent import Agent
from proxyccl.channels.transfers.blocks import Rows
from proxyccl.channels.weights.parts import FLOAT8, FLOATS, Part, strides_of
from proxyccl.channels.weights.plan import blocks_of
from proxyccl.channels.weights.sharding import Box
from proxyccl.channels.weights.tiles import BLOCK, TYPES, Tile, Tiles, grid_of, matrices, padded
from proxyccl.device._native import ffi
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.base_runtime import PinnedMemory, Stream
from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import Runtime

_FLOAT = np.dtype(np.float32)


class _PinnedFloats:
    """An array of float32 in pinned host memory.

    Attributes:
        memory: the pinned memory, which must live as long as the array is used.
        array: the memory as a numpy array.
    """

    def __init__(self, runtime: Runtime, count: int) -> None:
        nbytes = count * _FLOAT.itemsize
        self.memory: PinnedMemory = runtime.allocate_pinned(nbytes)
        buffer = memoryview(ffi.buffer(ffi.cast("char *", self.memory.host_ptr), nbytes))
        self.array: NDArray[np.float32] = np.frombuffer(buffer, _FLOAT, count)


def is_measured(part: Part) -> bool:
    """Whether a source can measure the part's amaxes."""
    return part.dtype in FLOATS and part.nbytes > 0


class Amaxes:
    """The amaxes of a source's parts on one device, in pinned memory that targets read.

    Attributes:
        parts: the parts, with the addresses of their tables.
        region: the tables, as a region of the agent.
    """

    def __init__(self, agent: Agent, runtime: Runtime, parts: Sequence[Part]) -> None:
        grids = [math.prod(grid_of(padded(part)).shape) for part in parts]
        self._table = _PinnedFloats(runtime, sum(grids))
        memory = self._table.memory
        self.region = agent.register((memory.host_ptr, memory.nbytes))
        offsets = np.concatenate(([0], np.cumsum(grids)[:-1])) * _FLOAT.itemsize
        self.parts = [
            replace(part, amax=memory.host_ptr + offset) for part, offset in zip(parts, offsets.tolist(), strict=True)
        ]
        tiles: list[Tile] = []
        for part, offset in zip(parts, offsets.tolist(), strict=True):
            tiles += _measured(padded(part), memory.ptr + offset)
        self._tiles = Tiles(runtime, "amax_of_weights", [tiles])
        self._stream = runtime.create_stream()

    def begin(self) -> None:
        self._tiles.launch(0, self._stream)

    def wait(self) -> None:
        """Waits until the tables have the amaxes of the elements at `begin`."""
        self._stream.synchronize()


def _measured(part: Part, table: int) -> list[Tile]:
    grid = grid_of(part)
    blocks = math.prod(grid.shape[-2:]) * _FLOAT.itemsize
    return [
        {
            "from": part.address_of(matrix.start),
            "from_type": TYPES[part.dtype],
            "from_stride": part.strides[-2] // part.itemsize,
            "rows": matrix.shape[-2],
            "columns": matrix.shape[-1],
            "row": matrix.start[-2] % BLOCK,
            "column": matrix.start[-1] % BLOCK,
            "scales": table + number * blocks,
            "scale_stride": grid.shape[-1],
            "scale_step": 1,
        }
        for number, matrix in enumerate(matrices(Box(part.start, part.shape)))
    ]


def scales_of(part: Part, scale: ArrayView) -> Part:
    """Returns a copy of a target's part, with `Part.scales` set according to the shape of the array of scales.

    Raises:
        ArgumentError: the array can't hold the part's scales.
    """
    if part.dtype != FLOAT8:
        raise ArgumentError("scale", f"{part.tensor}: is only for arrays in {FLOAT8}, not {part.dtype}")
    if not scale.writable or scale.dtype.name != _FLOAT.name:
        given = scale.dtype.name if scale.writable else "a read-only array"
        raise ArgumentError("scale", f"{part.tensor}: expected a writable array of {_FLOAT.name}, not {given}")
    if scale.shape in ((), (1,)):
        return replace(part, scales="tensor")
    grid = grid_of(padded(part))
    if len(part.shape) < 2 or scale.shape != grid.shape:
        or_blocks = f", or {grid.shape} for blocks of {BLOCK} x {BLOCK} elements" if len(part.shape) > 1 else ""
        raise ArgumentError(
            "scale", f"{part.tensor}: expected shape () or (1,){or_blocks}, but the shape is {scale.shape}"
        )
    if any(first % BLOCK for first in part.start[-2:]):
        raise ArgumentError(
            "start",
            f"{part.tensor}: the part begins within a block that has one scale; expected multiples of {BLOCK} in the "
            f"last two dimensions, not {part.start[-2:]}",
        )
    return replace(part, scales="block")


class Scales:
    """The scales of a target's parts: reads the sources' amaxes, and stores the scales in the target's arrays.

    Attributes:
        looks: the transfers that read the amaxes.
    """

    def __init__(
        self,
        agent: Agent,
        runtime: Runtime,
        scaled: Sequence[tuple[Part, ArrayView]],
        sources: Mapping[str, Sequence[Part]],
    ) -> None:
        self._amaxes = _PinnedFloats(runtime, sum(view.size for _, view in scaled))
        tables = _tables(sources)
        wanted: list[tuple[NDArray[np.float32], str, Part, Box]] = []  # (destination, holder, table, box to read)
        tiles: list[Tile] = []
        at = 0
        for part, view in scaled:
            grid = grid_of(padded(part))
            amaxes = self._amaxes.array[at : at + view.size].reshape(grid.shape if part.scales == "block" else 1)
            for holder, table in tables[part.tensor]:
                box = Box(table.start, table.shape)
                if part.scales == "tensor":
                    wanted.append((amaxes, holder, table, box))
                elif math.prod((box := _common(grid, box)).shape):
                    wanted.append((amaxes[_slices(box, grid.start)], holder, table, box))
            address = self._amaxes.memory.ptr + at * _FLOAT.itemsize
            tiles.append({"from": address, "to": view.ptr, "to_type": TYPES["scale"], "rows": 1, "columns": view.size})
            at += view.size
        self._tiles = Tiles(runtime, "cast_weights", [tiles])
        self._read = np.empty(sum(math.prod(box.shape) for *_, box in wanted), _FLOAT)
        self._agent, self._region = agent, agent.register(self._read)
        self._merges: list[tuple[NDArray[np.float32], NDArray[np.float32]]] = []
        rows: dict[str, list[Rows]] = {}
        at = 0
        for amaxes, holder, table, box in wanted:
            read = self._read[at : at + math.prod(box.shape)].reshape(box.shape)
            here = replace(table, start=box.start, shape=box.shape, strides=read.strides, address=read.ctypes.data)
            rows.setdefault(holder, []).append(blocks_of(box, here, table))
            self._merges.append((amaxes, read))
            at += read.size
        self.looks = [agent.prepare("read", holder, np.concatenate(each)) for holder, each in rows.items()]

    def store(self, stream: Stream) -> None:
        """Merges the amaxes that the transfers `looks` have read, and queues the kernel that stores the scales."""
        self._amaxes.array.fill(0)
        for amaxes, read in self._merges:
            np.maximum(amaxes, read if amaxes.shape == read.shape else read.max(), out=amaxes)
        self._tiles.launch(0, stream)

    def close(self) -> None:
        for look in self.looks:
            look.close()
        self._agent.deregister(self._region)


def _tables(sources: Mapping[str, Sequence[Part]]) -> dict[str, list[tuple[str, Part]]]:
    """Returns the tables of each tensor, as (holder, part), by the tensor's name. A table has one entry per block,
    and its coordinates count blocks. Of the sources that have the same part, only one is chosen.
    """
    found: dict[str, dict[tuple[tuple[int, ...], ...], tuple[str, Part]]] = {}
    for holder, parts in sources.items():
        for part in parts:
            if part.amax and part.nbytes:
                grid = grid_of(padded(part))
                table = replace(
                    padded(part),
                    dtype=_FLOAT.name,
                    itemsize=_FLOAT.itemsize,
                    size=tuple(first + extent for first, extent in zip(grid.start, grid.shape, strict=True)),
                    start=grid.start,
                    shape=grid.shape,
                    strides=strides_of(grid.shape, _FLOAT.itemsize),
                    address=part.amax,
                )
                found.setdefault(part.tensor, {}).setdefault((part.start, part.shape), (holder, table))
    return {tensor: list(tables.values()) for tensor, tables in found.items()}


def _slices(box: Box, origin: Sequence[int]) -> tuple[slice, ...]:
    """Returns the slices that select a box in an array whose first element has the index `origin`."""
    bounds = zip(box.start, box.shape, origin, strict=True)
    return tuple(slice(first - begin, first - begin + extent) for first, extent, begin in bounds)


def _common(first: Box, second: Box) -> Box:
    start = tuple(map(max, first.start, second.start))
    ends = (
        min(begin + extent, other + also)
        for begin, extent, other, also in zip(first.start, first.shape, second.start, second.shape, strict=True)
    )
    return Box(start, tuple(max(0, end - begin) for begin, end in zip(start, ends, strict=True)))
