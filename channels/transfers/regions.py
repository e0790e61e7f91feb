"""Registered memory of one agent."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
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
END = 2**63
"""An address above the end of any memory."""

_MOST_DROPPED = 1000


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
    label = region.label
    if label != "" and not (isinstance(label, str) and len(label) <= LONGEST_LABEL and is_unicode(label)):
        raise ArgumentError(
            "label", f"must be a text of at most {LONGEST_LABEL} characters that UTF-8 has, not {label!r:.100}"
        )
    if region.address + region.nbytes >= END:
        raise ArgumentError("regions", f"{region} is not a range of memory")


def columns_of(regions: Collection[Region], numbers: Iterable[int]) -> Rows:
    """Returns the columns that describe regions, uint64 of shape (5, N): their starts, ends, devices, the numbers of
    their registrations, and whether they are device memory.
    """
    rows = array("Q")  # `np.array` would take three times as long
    for region, number in zip(regions, numbers, strict=True):
        rows.extend(_row_of(region, number))
    return _columns_in(rows)


def _row_of(region: Region, number: int) -> tuple[int, int, int, int, bool]:
    """Returns the values of the columns of one region."""
    return region.address, region.address + region.nbytes, region.device, number, region.kind == VRAM


def _columns_in(rows: array[int]) -> Rows:
    """Returns the columns that consecutive rows contain."""
    return np.frombuffer(rows, np.uint64).reshape(-1, 5).T


def regions_of(columns: Rows, labels: Sequence[str]) -> list[Region]:
    """Returns the regions that columns and labels describe."""
    starts, ends, devices, _, are_vram = columns
    kinds = map((DRAM, VRAM).__getitem__, are_vram.tolist())
    return list(map(Region, starts.tolist(), (ends - starts).tolist(), devices.tolist(), kinds, labels))


def is_unicode(text: str) -> bool:
    """Returns whether UTF-8 can encode a text: whether it contains no surrogates."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


class Regions:
    """The regions of an agent. Regions may overlap, and a region may be registered more than once.

    A block is registered if it lies within one region. Each region has the number of its latest registration
    (`Ledger`). Adding or removing a region takes a constant time; the next query sorts all changes at once.
    """

    def __init__(self) -> None:
        self._numbers: dict[Region, int] = {}
        self._regions: dict[int, Region] = {}  # by number
        self._again: dict[Region, int] = {}  # how often regions are registered beyond the first time
        self._columns: Rows = columns_of((), ())  # by ascending start
        self._rows = array("Q")  # of the regions that `_columns` lacks (`_row_of`)
        self._dropped: list[int] = []  # numbers that `_columns` and `_rows` may still have
        self._views: dict[tuple[str, int | None], View] = {}

    def __contains__(self, region: Region) -> bool:
        return region in self._numbers

    @property
    def all(self) -> list[Region]:
        """The regions, in the order of their first registrations, each as often as it is registered."""
        return [region for region in self._numbers for _ in range(self._again.get(region, 0) + 1)]

    def number(self, region: Region) -> int:
        """Returns the number of a region's registration; 0 if the region is absent."""
        return self._numbers.get(region, 0)

    def find(self, number: int) -> Region | None:
        """Returns the region whose latest registration has a number; None if there is none."""
        return self._regions.get(number)

    def columns(self, without: Iterable[Region] = ()) -> tuple[Rows, list[Region]]:
        """Returns the columns (`columns_of`) of the regions except those in `without`, and these regions, both in the
        order of registration.
        """
        self._sort()
        numbers = np.array([self.number(region) for region in without], np.uint64)
        order = self._columns[3].argsort(kind="stable")
        columns = self._columns[:, order[~np.isin(self._columns[3][order], numbers)]]
        return columns, self._of(columns[3])

    def add(self, regions: Sequence[Region], numbers: Mapping[Region, int]) -> None:
        """Adds regions. `numbers` has those of the regions whose registrations are new, and the registrations' numbers.
        A region that was added *n* times must be removed *n* times."""
        for region in regions:
            before = self._numbers.get(region, 0)
            number = numbers.get(region, before)
            if before:
                self._again[region] = self._again.get(region, 0) + 1
            if number != before:
                self._numbers[region] = number
                self._regions[number] = region
                self._rows.extend(_row_of(region, number))
                if before:
                    self._drop([before])

    def among(self, regions: Mapping[Region, object]) -> set[Region]:
        """Returns those of the given regions that are registered."""
        return self._numbers.keys() & regions.keys()

    def know(self, regions: Mapping[Region, object], columns: Rows) -> None:
        """Adds regions of another agent, with their columns. A known region's later registration replaces the known
        one.
        """
        self._drop(list(map(self.number, self.among(regions))))
        self._sort()  # the numbers in `_dropped` may be among those of the new columns
        numbers = columns[3].tolist()
        self._numbers.update(zip(regions, numbers, strict=True))
        self._regions.update(zip(numbers, regions, strict=True))
        self._rows.frombytes(columns.T.tobytes())

    def remove(self, regions: Sequence[Region]) -> dict[Region, int] | None:
        """Removes one registration of each region, and returns the regions that have none left, with their numbers. If
        a region is absent, removes nothing and returns None.
        """
        again, last = self._again, dict.fromkeys(regions)  # `last`: the regions that have no registration left
        if not last.keys() <= self._numbers.keys():
            return None
        if again or len(last) < len(regions):
            left = {region: again.get(region, 0) + 1 - count for region, count in Counter(regions).items()}
            if min(left.values(), default=0) < 0:
                return None
            for region, number in left.items():
                again.pop(region, None)
                if number > 1:
                    again[region] = number - 1
                if number > 0:
                    del last[region]
        return self.forget(last)

    def forget(self, regions: Iterable[Region]) -> dict[Region, int]:
        """Removes the given regions, which must be present and registered once, and returns them with their numbers."""
        gone = {region: self._numbers.pop(region) for region in regions}
        self._drop(gone.values())
        if len(self._dropped) > len(self._numbers) + _MOST_DROPPED:  # an owner may never query its regions
            self._sort()
        return gone

    def _drop(self, numbers: Collection[int]) -> None:
        self._dropped += numbers
        for number in numbers:
            self._regions.pop(number, None)  # metadata may contain a number twice

    def _of(self, numbers: Rows) -> list[Region]:
        """Returns the regions that have the given numbers of `_columns`."""
        return list(map(self._regions.__getitem__, numbers.tolist()))

    def _sort(self) -> None:
        """Applies the changes to the sorted columns."""
        if not self._rows and not self._dropped:
            return
        columns = np.concatenate((self._columns, _columns_in(self._rows)), axis=1)
        order = columns[0].argsort(kind="stable")
        if self._dropped:
            dropped, numbers = np.array(sorted(self._dropped), np.uint64), columns[3][order]
            # Compares each number with the greatest dropped number up to it. If there is none, the index is -1.
            order = order[dropped[dropped.searchsorted(numbers, "right") - 1] != numbers]
        self._columns = columns.take(order, axis=1)
        self._rows, self._dropped = array("Q"), []
        self._views.clear()

    def view(self, kind: str = DRAM, device: int | None = None) -> View:
        """Returns the currently registered regions whose memory is of the given kind (DRAM or VRAM), on one device, or
        on all devices if `device` is None. Later registrations do not change the returned view.
        """
        self._sort()
        view = self._views.get((kind, device))
        if view is None:
            _, _, devices, _, are_vram = self._columns
            chosen = (are_vram == (kind == VRAM)) & (kind in (DRAM, VRAM))
            if device is not None:
                chosen &= devices == device
            view = View(self._columns[:, _index_of(chosen)])
            self._views[kind, device] = view
        return view

    def overlapping(self, columns: Rows) -> set[Region]:
        """Returns the regions, of any kind, that overlap any of those with the given columns."""
        self._sort()
        others = columns[:2, columns[0] < columns[1]]
        starts, ends = others[:, others[0].argsort(kind="stable")]
        if not len(starts):
            return set()
        at = np.searchsorted(starts, self._columns[1]) - 1  # the last in `starts` that is before each end
        overlap = (at >= 0) & (np.maximum.accumulate(ends)[at] > self._columns[0])
        return set(self._of(self._columns[3][overlap]))

    def ended(self, words: Rows) -> set[Region]:
        """Returns the regions that their ledger's words (`Ledger.words`) show to be deregistered."""
        self._sort()
        numbers = self._columns[3]
        now = words[numbers % np.uint64(len(words))]
        return set(self._of(numbers[(now != numbers) & (now != ~numbers)]))


class View:
    """An immutable snapshot of regions of one kind.

    Attributes:
        starts: the first addresses of the regions, in ascending order.
        ends: for each region, the highest end of this region and all before it.
    """

    def __init__(self, columns: Rows) -> None:
        starts, ends, _, numbers, _ = columns
        self.starts = np.ascontiguousarray(starts)
        self.ends = np.maximum.accumulate(ends)
        kept = _index_of(outermost(ends))
        self._starts, self._numbers = self.starts[kept], numbers[kept]

    def find_outside(self, addresses: Rows, nbytes: Rows) -> int | None:
        """Returns the index of the first block that no region contains; None if regions contain all blocks."""
        return find_outside(self.starts, self.ends, addresses, nbytes)

    def holders(self, addresses: Rows) -> Rows:
        """Finds the regions that contain the given blocks. If several regions contain a block, the outermost one is
        used. Each block must lie in a region. Returns a row for each region, in ascending order of addresses: the
        number of its registration, and the address of a block in the region.
        """
        if not len(addresses):
            return np.empty((0, 2), np.uint64)
        at = self._starts.searchsorted(addresses, "right") - 1
        a_block = np.zeros(len(self._starts), np.uint64)
        a_block[at[::-1]] = addresses[::-1]  # keeps each region's first block
        (used,) = a_block.nonzero()
        rows = np.empty((len(used), 2), np.uint64)
        rows[:, 0], rows[:, 1] = self._numbers[used], a_block[used]
        return rows


def holder_of(addresses: Rows, holders: Sequence[Region]) -> NDArray[np.intp]:
    """Returns for each block the index in `holders` (see `View.holders`) of the region that contains it."""
    starts = np.array([region.address for region in holders], np.uint64)
    return np.searchsorted(starts, addresses, "right") - 1


def outermost(ends: Rows) -> NDArray[np.bool_]:
    """Selects the regions that extend beyond all regions before them; `ends` are the ends of regions sorted by their
    starts. If a block lies in any region, it lies in the last selected region that starts at or before the block.
    """
    return np.append(True, ends[1:] > np.maximum.accumulate(ends)[:-1])[: len(ends)]


def _index_of(chosen: NDArray[np.bool_]) -> NDArray[np.bool_] | slice:
    """Returns an index for the chosen elements of an array, which copies nothing if all are chosen."""
    return slice(None) if chosen.all() else chosen


def end_of(region: Region) -> int:
    """Returns the address after the last byte of a region."""
    return region.address + region.nbytes
