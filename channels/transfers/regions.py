"""Registered memory of one agent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from proxyccl.channels.transfers.blocks import Rows, find_outside
from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.codec import Message, Uint64

DRAM = "dram"
"""The host's memory."""

VRAM = "vram"
"""Memory of a device: of a GPU, or of the host runtime, which stands in for one."""

LONGEST_LABEL = 4096
_END = 2**63
"""An address above the end of any memory."""


class Region(Message, frozen=True, gc=False, cache_hash=True):
    """A range of registered memory.

    Attributes:
        address, nbytes: the first address, and the size in bytes.
        device: for device memory, the device's number in the owner's process; for host memory, any number that the
            owner chooses. Two regions with different device numbers are different regions.
        kind: the kind of memory: "dram" or "vram".
        label: the owner's name for the region.
    """

    address: Uint64
    nbytes: Uint64
    device: Uint64 = 0
    kind: Annotated[str, Meta(pattern=f"^({DRAM}|{VRAM})$")] = DRAM
    label: Annotated[str, Meta(max_length=LONGEST_LABEL)] = ""


def require_valid(region: Region) -> None:
    """Raises ArgumentError if a caller's region has invalid values."""
    for name, value in (("address", region.address), ("nbytes", region.nbytes), ("device", region.device)):
        if type(value) is not int or not 0 <= value < 2**64:
            raise ArgumentError(name, f"must be an integer from 0 to 2^64 - 1, not {value!r}")
    if region.kind not in (DRAM, VRAM):
        raise ArgumentError("kind", f'must be "dram" or "vram", not {region.kind!r}')
    if not isinstance(region.label, str) or len(region.label) > LONGEST_LABEL or not is_unicode(region.label):
        raise ArgumentError(
            "label", f"must be a text of at most {LONGEST_LABEL} characters that UTF-8 has, not {region.label!r:.100}"
        )
    if not is_range(region):
        raise ArgumentError("regions", f"{region} is not a range of memory")


def is_range(region: Region) -> bool:
    """Returns whether the range can be memory of a process."""
    return end_of(region) < _END


def is_unicode(text: str) -> bool:
    """Returns whether UTF-8 can encode a text: whether it contains no surrogates."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


class Regions:
    """The regions of an agent. Regions may overlap, and a region may be registered more than once.

    A block is registered if it lies within one region. Each region has the number of its latest registration
    (`Ledger`). Adding or removing a region takes a constant time; the next query sorts all changes at once.
    """

    def __init__(self) -> None:
        self._counts: dict[Region, int] = {}
        self._numbers: dict[Region, int] = {}
        # The starts, ends, devices and numbers of the regions, and whether they are device memory, by ascending start.
        self._columns: Rows = np.empty((5, 0), np.uint64)
        self._sorted: NDArray[np.object_] = np.empty(0, object)  # the regions of `_columns`
        self._new: dict[Region, None] = {}  # the regions that `_columns` lacks
        self._dropped: list[int] = []  # numbers that `_columns` may still have
        self._views: dict[tuple[str, int | None], View] = {}

    def __contains__(self, region: Region) -> bool:
        return region in self._counts

    def __len__(self) -> int:
        return sum(self._counts.values())

    @property
    def all(self) -> list[Region]:
        """The regions, in the order of their first registrations, each as often as it is registered."""
        return [region for region, count in self._counts.items() for _ in range(count)]

    def number(self, region: Region) -> int:
        """Returns the number of a region's registration; 0 if the region is absent."""
        return self._numbers.get(region, 0)

    def add(self, regions: Sequence[Region], numbers: Sequence[int]) -> None:
        """Adds regions, with the numbers of their registrations. A region that was added *n* times must be removed *n*
        times."""
        for region, number in zip(regions, numbers, strict=True):
            self._counts[region] = self._counts.get(region, 0) + 1
            self._renumber(region, number)

    def know(self, regions: Sequence[Region], numbers: Sequence[int]) -> None:
        """Adds regions of another agent. If a region is known, keeps the later registration's number, because metadata
        may arrive out of order.
        """
        for region, number in zip(regions, numbers, strict=True):
            self._counts[region] = 1
            self._renumber(region, max(number, self.number(region)))

    def _renumber(self, region: Region, number: int) -> None:
        before = self.number(region)
        if number != before:
            self._numbers[region] = number
            self._new[region] = None
            if before:
                self._dropped.append(before)

    def remove(self, regions: Iterable[Region]) -> list[Region] | None:
        """Removes one registration of each region, and returns the regions that have none left. If a region is absent,
        removes nothing and returns None.
        """
        counts: dict[Region, int] = {}
        for region in regions:
            counts[region] = counts.get(region, 0) + 1
            if counts[region] > self._counts.get(region, 0):
                return None
        for region, count in counts.items():
            self._counts[region] -= count
        gone = [region for region in counts if not self._counts[region]]
        self.forget(gone)
        return gone

    def forget(self, regions: Sequence[Region]) -> None:
        """Removes all registrations of the given regions, which must be present."""
        for region in regions:
            del self._counts[region]
            self._dropped.append(self._numbers.pop(region))
            self._new.pop(region, None)

    def _sort(self) -> None:
        """Applies the changes to the sorted regions."""
        if self._dropped:
            dropped, numbers = np.array(sorted(self._dropped), np.uint64), self._columns[3]
            # Compares each number with the greatest dropped number up to it. If there is none, the index is -1.
            (left,) = (dropped[dropped.searchsorted(numbers, "right") - 1] != numbers).nonzero()
            self._columns, self._sorted = self._columns.take(left, axis=1), self._sorted[left]
        if self._new:
            new = np.empty(len(self._new), object)
            new[:] = sorted(self._new, key=_start)
            rows = [(each.address, end_of(each), each.device, self._numbers[each], each.kind == VRAM) for each in new]
            added = np.array(rows, np.uint64).T
            places = np.searchsorted(self._columns[0], added[0])
            self._columns = np.insert(self._columns, places, added, axis=1)
            self._sorted = np.insert(self._sorted, places, new)
        if self._new or self._dropped:
            self._new, self._dropped = {}, []
            self._views.clear()

    def view(self, kind: str = DRAM, device: int | None = None) -> View:
        """Returns a snapshot of the regions of one kind, for `device` or, if that is None, for all devices."""
        self._sort()
        view = self._views.get((kind, device))
        if view is None:
            starts, ends, devices, numbers, are_vram = self._columns
            chosen = (are_vram == (kind == VRAM)) & (kind in (DRAM, VRAM))
            if device is not None:
                chosen &= devices == device
            view = View(starts[chosen], ends[chosen], numbers[chosen], self._sorted[chosen])
            self._views[kind, device] = view
        return view

    def overlapping(self, others: Iterable[Region]) -> set[Region]:
        """Returns the regions, of any kind, that overlap any of `others`."""
        chosen = sorted((other for other in others if other.nbytes), key=_start)
        found: set[Region] = set()
        if chosen:
            starts = np.array([other.address for other in chosen], np.uint64)
            ends = np.maximum.accumulate(np.array([end_of(other) for other in chosen], np.uint64))
            self._sort()
            at = np.searchsorted(starts, self._columns[1]) - 1  # the last in `chosen` that starts before each end
            found = set(self._sorted[(at >= 0) & (ends[at] > self._columns[0])])
        return found

    def ended(self, words: Rows) -> list[Region]:
        """Returns the regions that their ledger's words (`Ledger.words`) show to be deregistered."""
        self._sort()
        numbers = self._columns[3]
        now = words[numbers % np.uint64(len(words))]
        ended: list[Region] = self._sorted[(now != numbers) & (now != ~numbers)].tolist()
        return ended


class View:
    """An immutable snapshot of regions of one kind.

    Attributes:
        starts: the first addresses of the regions, in ascending order.
        ends: for each region, the highest end of this region and all before it.
    """

    def __init__(self, starts: Rows, ends: Rows, numbers: Rows, regions: NDArray[np.object_]) -> None:
        self.starts = np.ascontiguousarray(starts)
        self.ends = np.maximum.accumulate(ends)
        chosen = outermost(ends)
        self._starts, self._numbers, self._regions = self.starts[chosen], numbers[chosen], regions[chosen]

    def find_outside(self, addresses: Rows, nbytes: Rows) -> int | None:
        """Returns the index of the first block that no region contains; None if regions contain all blocks."""
        return find_outside(self.starts, self.ends, addresses, nbytes)

    def holders(self, addresses: Rows) -> tuple[list[Region], Rows]:
        """Returns the regions that contain the given blocks. If several regions contain a block, the outermost one is
        used. Each block must lie in a region.

        Returns:
            The regions, and for each region a row: the number of its registration, and the address of a block in the
            region.
        """
        if not len(addresses):
            return [], np.empty((0, 2), np.uint64)
        at = self._starts.searchsorted(addresses, "right") - 1
        a_block = np.zeros(len(self._starts), np.uint64)
        a_block[at[::-1]] = addresses[::-1]  # keeps each region's first block
        (used,) = a_block.nonzero()
        rows = np.empty((len(used), 2), np.uint64)
        rows[:, 0], rows[:, 1] = self._numbers[used], a_block[used]
        return self._regions[used].tolist(), rows


def holder_of(addresses: Rows, holders: Sequence[Region]) -> NDArray[np.intp]:
    """Returns for each block the index in `holders` (see `View.holders`) of the region that contains it."""
    starts = np.array([region.address for region in holders], np.uint64)
    return np.searchsorted(starts, addresses, "right") - 1


def outermost(ends: Rows) -> NDArray[np.bool_]:
    """Selects the regions that extend beyond all regions before them; `ends` are the ends of regions sorted by their
    starts. If a block lies in any region, it lies in the last selected region that starts at or before the block.
    """
    return np.append(True, ends[1:] > np.maximum.accumulate(ends)[:-1])[: len(ends)]


def end_of(region: Region) -> int:
    """Returns the address after the last byte of a region."""
    return region.address + region.nbytes


def _start(region: Region) -> int:
    return region.address
