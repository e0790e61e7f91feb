"""Plans: the blocks that each target reads, so that each byte is sent once to each node."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from proxyccl.channels.transfers.blocks import Rows, joined
from proxyccl.channels.weights.parts import Part, require_castable
from proxyccl.channels.weights.sharding import Box
from proxyccl.device.errors import ArgumentError

_SHORTEST = 64 << 10
"""The smallest size of a piece in bytes."""


class Cast(Struct, frozen=True):
    """A box of a tensor that a target reads in a source's element type, and casts to its own type.

    Attributes:
        box: the box, which lies within both parts.
        here, there: the part of the target, and the part of the source.
    """

    box: Box
    here: Part
    there: Part

    @property
    def nbytes(self) -> int:
        """The total bytes of the elements at the source."""
        return math.prod(self.box.shape) * self.there.itemsize


class Read(Struct, frozen=True):
    """The blocks and the boxes that a target reads from one other holder.

    Attributes:
        peer: the holder to read from.
        relayed: whether the peer is another target, which must read the blocks from a source first.
        blocks: uint64 of shape (N, 3): local address, address at the peer, bytes.
        casts: the boxes whose elements have another type at the peer. `blocks` does not contain these boxes.
    """

    peer: str
    relayed: bool
    blocks: Rows
    casts: Sequence[Cast] = ()

    @property
    def nbytes(self) -> int:
        """The total bytes that the target reads."""
        return int(self.blocks[:, 2].sum()) + sum(cast.nbytes for cast in self.casts)


Held = Mapping[str, Sequence[Part]]
"""The parts of each holder, by its name."""


def plan(sources: Held, targets: Held, nodes: Mapping[str, Hashable] | None = None) -> dict[str, list[Read]]:
    """Plans how targets get their parts of tensors from sources.

    If several sources have a part, each sends an equal share of the part. If some of these sources are on the target's
    node, only the sources on this node send. If several targets of a node need a part, each reads an equal share of the
    part from sources, and the remaining shares from the other targets.

    Args:
        sources, targets: the parts of each holder, by its name. A name must not be in both mappings. The parts of a
            target may belong to several shardings, and parts of one holder may contain the same elements.
        nodes: the node of each holder, by its name. A holder without an entry is alone on its node.

    Returns:
        The reads of each target, by the target's name. A target has at most one read from each other holder.

    Raises:
        ArgumentError: no source has a part, shapes differ, element types differ between sources or between targets, or
            a source's type can't be cast to a target's type.
    """
    return _Planner(sources, targets, nodes or {}, set(targets)).reads


def plan_one(target: str, sources: Held, targets: Held, nodes: Mapping[str, Hashable]) -> tuple[list[Read], set[str]]:
    """Plans as `plan` does, and returns the reads of one target, and the names of the targets that read from this
    target.
    """
    planner = _Planner(sources, targets, nodes, {target})
    return planner.reads[target], {reader for reader, peer, _ in planner.links if peer == target}


class _Candidate(NamedTuple):
    holder: str
    part: Part


class _Planner:
    """Makes a plan, and computes the blocks of the targets in `chosen`.

    Attributes:
        links: the blocks of each read, by (target, peer, whether the read is relayed).
        casts: the casts of each read, by the same key.
        reads: for each target in `chosen`, its reads.
    """

    def __init__(self, sources: Held, targets: Held, nodes: Mapping[str, Hashable], chosen: set[str]) -> None:
        if both := set(sources) & set(targets):
            raise ArgumentError("targets", f"{min(both)} is a source too")
        self._nodes, self._chosen = nodes, chosen
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()
        self._cells: dict[tuple[object, ...], list[_Cell]] = {}  # by the positions and shapes of a tensor's parts
        # The blocks are grouped by pair of parts, because blocks of different parts, which may be registered
        # separately, must not be joined.
        self.links: dict[tuple[str, str, bool], dict[tuple[int, int], list[Rows]]] = {}
        self.casts: dict[tuple[str, str, bool], list[Cast]] = {}
        held = _by_tensor(sources)
        for tensor, wanted in _by_tensor(targets).items():
            self._plan_tensor(tensor, held.get(tensor, []), wanted)
        self.reads: dict[str, list[Read]] = {target: [] for target in targets if target in chosen}
        for link, pairs in self.links.items():
            target, peer, relayed = link
            if target in chosen:
                each = [joined(np.concatenate(rows)) if len(rows) > 1 else rows[0] for rows in pairs.values()]
                blocks = np.concatenate(each) if each else np.empty((0, 3), np.uint64)
                self.reads[target].append(Read(peer, relayed, blocks, self.casts.get(link, ())))

    def _plan_tensor(self, tensor: str, held: list[_Candidate], wanted: list[_Candidate]) -> None:
        _require_same(tensor, held, wanted)
        parts = [each.part for each in (*held, *wanted)]
        layout = (len(held), *((part.start, part.shape) for part in parts))
        if layout not in self._cells:
            self._cells[layout] = list(_cells(parts, len(held)))
        for box, having, wanting in self._cells[layout]:
            if not having:
                raise ArgumentError("sources", f"no source has {tensor} from {box.start} on, of shape {box.shape}")
            self._share(box, [held[index] for index in having], [wanted[index] for index in wanting])

    def _share(self, box: Box, having: list[_Candidate], wanting: list[_Candidate]) -> None:
        first_part: dict[str, Part] = {}
        for holder, part in having:
            first_part.setdefault(holder, part)
        on_nodes: dict[Hashable, dict[str, list[Part]]] = {}
        for holder, part in wanting:
            node = self._nodes.get(holder, (holder,))
            on_nodes.setdefault(node, {}).setdefault(holder, []).append(part)
        pieces = max(len(first_part), *(len(holders) for holders in on_nodes.values()))
        itemsize = having[0].part.itemsize
        for piece in _cut(box, itemsize, pieces):
            nbytes = math.prod(piece.shape) * itemsize
            for node, holders in on_nodes.items():
                near = [holder for holder in first_part if self._nodes.get(holder) == node] or list(first_part)
                source = min(near, key=self._sent.__getitem__)
                importer = min(holders, key=self._received.__getitem__)
                self._sent[source] += nbytes
                self._received[importer] += nbytes
                for part in holders[importer]:
                    self._add(importer, source, False, piece, part, first_part[source])
                for holder, parts in holders.items():
                    for part in parts if holder != importer else ():
                        self._add(holder, importer, True, piece, part, holders[importer][0])

    def _add(self, target: str, peer: str, relayed: bool, box: Box, here: Part, there: Part) -> None:
        link = (target, peer, relayed)
        pairs = self.links.setdefault(link, {})
        if target not in self._chosen:
            return
        if here.dtype == there.dtype:
            pairs.setdefault((id(here), id(there)), []).append(blocks_of(box, here, there))
        else:
            self.casts.setdefault(link, []).append(Cast(box, here, there))


def _by_tensor(held: Held) -> dict[str, list[_Candidate]]:
    found: dict[str, list[_Candidate]] = {}
    for holder, parts in held.items():
        for part in parts:
            if part.nbytes:
                found.setdefault(part.tensor, []).append(_Candidate(holder, part))
    return found


def _require_same(tensor: str, held: list[_Candidate], wanted: list[_Candidate]) -> None:
    for role, whose, whats in (
        ("targets", [*held, *wanted], ("size",)),
        ("sources", held, ("dtype", "itemsize")),
        ("targets", wanted, ("dtype", "itemsize", "scales")),
    ):
        for holder, part in whose[1:]:
            for what in whats:
                own, others = getattr(part, what), getattr(whose[0].part, what)
                if own != others:
                    raise ArgumentError(role, f"{tensor}: {holder} has {what} {own!r}, others {others!r}")
    for (holder, part), (reader, own) in itertools.product(held, wanted[:1]):
        require_castable(part, own, holder, reader)


_Cell = tuple[Box, list[int], list[int]]
"""A box, and the indices of the sources' and of the targets' parts that contain the box."""


def _cells(parts: Sequence[Part], held: int) -> Iterator[_Cell]:
    """Divides a tensor at all parts' boundaries, and yields the boxes that a target needs.

    Args:
        parts: the sources' parts, then the targets' parts.
        held: the number of sources' parts.
    """
    edges, inside = [], np.ones((1, len(parts)), np.bool_)  # for each cell, the parts that contain it
    for dim in range(len(parts[0].size)):
        begin, end = (np.array([getattr(part, side)[dim] for part in parts]) for side in ("start", "end"))
        cuts = np.unique(np.concatenate((begin, end)))
        segments = np.column_stack((cuts[:-1], cuts[1:]))
        contain = (begin <= segments[:, :1]) & (end >= segments[:, 1:])
        wanted = contain[:, held:].any(axis=1)
        edges.append(segments[wanted])
        inside = (inside[:, None] & contain[wanted]).reshape(-1, len(parts))
    for index in np.flatnonzero(inside[:, held:].any(axis=1)):
        place = np.unravel_index(index, [len(each) for each in edges])
        bounds = [tuple(each[at].tolist()) for each, at in zip(edges, place, strict=True)]
        box = Box(tuple(first for first, _ in bounds), tuple(after - first for first, after in bounds))
        yield box, np.flatnonzero(inside[index, :held]).tolist(), np.flatnonzero(inside[index, held:]).tolist()


def _cut(box: Box, itemsize: int, pieces: int) -> Iterator[Box]:
    """Cuts a box into at most `pieces` pieces of about equal size, along the first dimension with enough elements."""
    pieces = min(pieces, math.prod(box.shape) * itemsize // _SHORTEST)
    dim = next((dim for dim, extent in enumerate(box.shape) if extent >= pieces), None)
    if pieces <= 1 or dim is None:
        yield box
        return
    extent = box.shape[dim]
    for index in range(pieces):
        first, last = index * extent // pieces, (index + 1) * extent // pieces
        start, shape = list(box.start), list(box.shape)
        start[dim], shape[dim] = start[dim] + first, last - first
        yield Box(tuple(start), tuple(shape))


def blocks_of(box: Box, here: Part, there: Part) -> Rows:
    """Returns the blocks of a box, as rows of (address in `here`, address in `there`, bytes). The box must lie within
    `here` and within `there`."""
    nbytes, dim = there.itemsize, len(box.shape)
    while dim and (box.shape[dim - 1] == 1 or here.strides[dim - 1] == there.strides[dim - 1] == nbytes):
        dim -= 1
        nbytes *= box.shape[dim]
    rows = np.empty((math.prod(box.shape[:dim]), 3), np.uint64)
    for column, part in enumerate((here, there)):
        offsets = np.zeros(1, np.int64)
        for extent, stride in zip(box.shape[:dim], part.strides[:dim], strict=True):
            offsets = np.add.outer(offsets, np.arange(extent) * stride).ravel()
        rows[:, column] = part.address_of(box.start) + offsets
    rows[:, 2] = nbytes
    return rows
