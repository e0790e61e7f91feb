"""Shardings: how a tensor is divided among holders, by the conventions of torch's DTensor."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from proxyccl.device.arguments.integers import as_integer
from proxyccl.device.errors import ArgumentError


class Replicate(Struct, frozen=True):
    """All holders along a mesh axis have the same data."""


class Shard(Struct, frozen=True):
    """The holders along a mesh axis divide a dimension of n elements as `torch.chunk` does: each gets ceil(n / holders)
    elements, but the last holders may get fewer or none.

    Attributes:
        dim: the index of the tensor's dimension, from 0.
    """

    dim: int


class Box(Struct, frozen=True):
    """A box-shaped part of a tensor.

    Attributes:
        start: the index of the part's first element in each dimension.
        shape: the number of the part's elements in each dimension.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]


class Sharding:
    """How a tensor is divided among the holders of a mesh.

    Args:
        shape: the shape of the whole tensor.
        mesh: the holders (names of agents, or ranks), as nested sequences in row-major order. Each holder must occur
            exactly once.
        placements: a `Replicate` or `Shard` for each axis of the mesh. If several axes divide the same dimension, the
            first axis divides it first.

    Attributes:
        holders: the holders, in the mesh's order.

    Raises:
        ArgumentError: an argument is invalid, or the arguments do not match.
    """

    def __init__(self, shape: Sequence[int], mesh: Any, placements: Sequence[Replicate | Shard]) -> None:
        self.shape = tuple(as_integer(extent, "shape", "must have integers from 0 on", 0, 2**62) for extent in shape)
        try:
            grid = np.array(mesh, dtype=object)
        except ValueError as error:
            raise ArgumentError("mesh", f"expected sequences of equal lengths: {error}") from None
        self.placements = tuple(placements)
        if grid.ndim != len(self.placements):
            raise ArgumentError(
                "placements", f"expected one for each of the mesh's {grid.ndim} axes, got {len(self.placements)}"
            )
        for placement in self.placements:
            if isinstance(placement, Shard):
                as_integer(placement.dim, "placements", "must divide a dimension of the shape", 0, len(self.shape) - 1)
            elif not isinstance(placement, Replicate):
                raise ArgumentError("placements", f"expected Replicate or Shard, not {placement!r}")
        self.holders: list[Hashable] = list(grid.ravel())
        if len(set(self.holders)) != len(self.holders):
            raise ArgumentError("mesh", "has a holder more than once")
        self._mesh_shape = grid.shape

    def __repr__(self) -> str:
        return f"Sharding({self.shape}, {self._mesh_shape} holders, {list(self.placements)})"

    def box(self, holder: Hashable) -> Box:
        """Returns a holder's part of the tensor. If the part is empty, its shape contains 0.

        Raises:
            ArgumentError: the mesh does not have this holder.
        """
        if holder not in self.holders:
            raise ArgumentError("holder", f"{holder!r} is not in the mesh")
        place = np.unravel_index(self.holders.index(holder), self._mesh_shape)
        start, shape = [0] * len(self.shape), list(self.shape)
        for index, count, placement in zip(map(int, place), self._mesh_shape, self.placements, strict=True):
            if isinstance(placement, Shard):
                extent = shape[placement.dim]
                chunk = -(-extent // count)
                first = min(extent, index * chunk)
                start[placement.dim] += first
                shape[placement.dim] = min(extent, first + chunk) - first
        return Box(tuple(start), tuple(shape))
