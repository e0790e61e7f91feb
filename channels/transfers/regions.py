"""Registered memory of one agent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Annotated

import numpy as np
from msgspec import Meta

from proxyccl.channels.transfers.blocks import Rows
from proxyccl.proxy.codec import Message, Uint64

DRAM = "dram"
"""The host's memory."""

VRAM = "vram"
"""Memory of a device: a GPU's, or the host runtime's in its place."""


class Region(Message, frozen=True):
    """A range of registered memory.

    Attributes:
        address, nbytes: the range.
        device: of a device's memory, its number in the owner's process. Otherwise a number that its owner gives. Part
            of the region's identity.
        kind: of memory: "dram" or "vram".
        label: its owner's name for it.
    """

    address: Uint64
    nbytes: Uint64
    device: Uint64 = 0
    kind: Annotated[str, Meta(max_length=16)] = DRAM
    label: Annotated[str, Meta(max_length=4096)] = ""


class Regions:
    """The regions of an agent. They may overlap, and a region may be registered more than once.

    A block belongs to memory if one region holds all of it.
    """

    def __init__(self) -> None:
        self.all: list[Region] = []
        self._bounds: dict[tuple[str, int | None], tuple[Rows, Rows]] = {}

    def add(self, regions: Iterable[Region]) -> None:
        """Adds regions."""
        self.all += regions
        self._bounds = {}

    def extend(self, regions: Iterable[Region]) -> None:
        """Adds the regions that are not there."""
        known = set(self.all)
        self.add(region for region in regions if region not in known)

    def remove(self, regions: Iterable[Region]) -> bool:
        """Removes regions, each once. False, without effect, if one is not there."""
        left = list(self.all)
        for region in regions:
            if region not in left:
                return False
            left.remove(region)
        self.all = left
        self._bounds = {}
        return True

    def bounds(self, kind: str = DRAM, device: int | None = None) -> tuple[Rows, Rows]:
        """The first addresses of the regions, in order, and for each the highest end of those up to it.

        Args:
            kind, device: whose; None: of all devices.
        """
        key = (kind, device)
        if key not in self._bounds:
            self._bounds[key] = _bounds(
                region for region in self.all if region.kind == kind and device in (None, region.device)
            )
        return self._bounds[key]

    def ranges(self, kind: str = DRAM, device: int | None = None) -> tuple[Rows, Rows]:
        """The first addresses and the ends of the memory of regions, in order. Regions that touch are one range: blocks
        that follow each other are sent as one, whatever regions they belong to. Arguments are those of `bounds`.
        """
        starts, ends = self.bounds(kind, device)
        if not len(starts):
            return starts, ends
        first = np.flatnonzero(np.append(True, starts[1:] > ends[:-1]))
        return starts[first], ends[np.append(first[1:], len(starts)) - 1]

    def holders(self, addresses: Rows) -> list[Region]:
        """The regions of the host's memory that hold blocks, which belong to such memory."""
        chosen = outermost(region for region in self.all if region.kind == DRAM)
        starts = np.array([region.address for region in chosen], np.uint64)
        return [chosen[index] for index in np.unique(np.searchsorted(starts, addresses, "right") - 1)]

    def find_outside(self, addresses: Rows, nbytes: Rows, kind: str = DRAM, device: int | None = None) -> int | None:
        """The index of the first block that no region holds; None if all belong to registered memory."""
        starts, ends = self.bounds(kind, device)
        if not len(starts):
            return 0 if len(addresses) else None
        at = np.searchsorted(starts, addresses, "right") - 1
        last = addresses + nbytes
        outside = (at < 0) | (ends[at] < last) | (last < addresses)
        return int(outside.argmax()) if outside.any() else None


def _bounds(regions: Iterable[Region]) -> tuple[Rows, Rows]:
    """`Regions.bounds` of some regions."""
    chosen = sorted((region.address, region.address + region.nbytes) for region in regions)
    found = np.array(chosen, np.uint64).reshape(-1, 2)
    return np.ascontiguousarray(found[:, 0]), np.maximum.accumulate(found[:, 1])


def overlapping(regions: Sequence[Region], others: Iterable[Region]) -> set[Region]:
    """Those of the regions that have a byte in common with one of the others, of whatever kind."""
    starts, ends = _bounds(other for other in others if other.nbytes)
    if not len(starts) or not regions:
        return set()
    ranges = np.array([(region.address, region.address + region.nbytes) for region in regions], np.uint64)
    at = np.searchsorted(starts, ranges[:, 1]) - 1  # the last of the others that starts before the region's end
    return set(compress(regions, (at >= 0) & (ends[at] > ranges[:, 0])))


def outermost(regions: Iterable[Region]) -> list[Region]:
    """The regions that no other one holds, by address. The last of them that starts before a block, or with it, holds
    the block if any region does."""
    chosen: list[Region] = []
    for region in sorted(regions, key=lambda each: (each.address, -each.nbytes)):
        if not chosen or region.address + region.nbytes > chosen[-1].address + chosen[-1].nbytes:
            chosen.append(region)
    return chosen
