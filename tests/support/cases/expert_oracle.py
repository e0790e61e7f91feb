"""Computes the expert-parallel layer's results on every rank in plain numpy, from the arguments of all ranks.

Sums have the order and the roundings that the layer promises, so tests compare results for equality.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]
Integers = NDArray[np.int32]


@dataclass(frozen=True)
class Layout:
    """The fields of a rank's `EPAllToAllLayoutDesc`."""

    num_dispatch_token_cur_rank: int
    num_input_tokens_per_rank: Integers
    send_reqs_recv_tensor: Integers | None
    topk_indices_tensor: Integers
    token_dst_scatter_idx: Integers
    skipped_token_mapping_indices: Integers
    skipped_token_topk_mapping_indices: Integers


@dataclass(frozen=True, eq=False)
class Routing:
    """The destinations of all ranks' slots; each token has K slots, one for each expert that it chose. Slots are
    numbered by rank, then token, then k.

    Attributes:
        ids: for each rank, [T, K]: the expert of each slot, or the value `experts` if the slot is dropped.
        experts: number of experts of all ranks.
        local_world_size: number of ranks of a node.
        max_tokens: the layer's max_tokens.
        scatter: [sum of T, K]: the row of each slot in the concatenation of all ranks' outputs; None for rows ordered
            by expert, then source rank, token and k.
        alignment: each expert's rows begin at a multiple of this number of rows.
    """

    ids: tuple[Integers, ...]
    experts: int
    local_world_size: int
    max_tokens: int
    scatter: Integers | None = None
    alignment: int = 1

    @property
    def world_size(self) -> int:
        return len(self.ids)

    @property
    def nodes(self) -> int:
        return self.world_size // self.local_world_size

    @property
    def topk(self) -> int:
        return self.ids[0].shape[1]

    @cached_property
    def expert(self) -> Integers:
        """Each slot's expert."""
        return np.concatenate([ids.reshape(-1) for ids in self.ids])

    @cached_property
    def rank(self) -> Integers:
        """The rank that each slot goes to; world_size for dropped slots."""
        return self.expert // (self.experts // self.world_size)

    @cached_property
    def token(self) -> NDArray[np.intp]:
        """The token of each slot, as an index into the concatenation of all ranks' tokens."""
        return np.arange(len(self.expert)) // self.topk

    @cached_property
    def rows(self) -> list[int]:
        """The number of rows R of each rank's output, including the gaps after each expert's rows."""
        return [int(self._sizes[self._experts_of(rank)].sum()) for rank in range(self.world_size)]

    @cached_property
    def _counts(self) -> NDArray[np.intp]:
        return np.bincount(self.expert[self.expert < self.experts], minlength=self.experts)

    @property
    def _sizes(self) -> NDArray[np.intp]:
        """The number of rows of each expert, including the gap after them."""
        return -(-self._counts // self.alignment) * self.alignment

    def _experts_of(self, rank: int) -> slice:
        per_rank = self.experts // self.world_size
        return slice(rank * per_rank, (rank + 1) * per_rank)

    def rows_of_experts(self, rank: int) -> list[int]:
        """Returns the number of rows that each expert of a rank gets."""
        counts: list[int] = self._counts[self._experts_of(rank)].tolist()
        return counts

    def filled(self, rank: int) -> NDArray[np.bool_]:
        """Returns a mask of a rank's output rows that is False for gaps."""
        here = np.zeros(self.rows[rank], np.bool_)
        here[self.row[self.rank == rank]] = True
        return here

    @cached_property
    def row(self) -> Values:
        """The row of each slot in the output of the rank that it goes to; -1 for dropped slots."""
        if self.scatter is None:
            place = np.argsort(np.argsort(self.expert, kind="stable"), kind="stable")
        else:
            place = self.scatter.reshape(-1).astype(np.int64)
        # A slot's row is its index without gaps, plus the gaps before the slot's expert, minus the rows of lower ranks.
        gaps = np.concatenate([[0], np.cumsum(self._sizes - self._counts)])
        before = np.concatenate([[0], np.cumsum(self.rows)])
        return np.where(self.expert < self.experts, place + gaps[self.expert] - before[self.rank], -1)

    def slots_of(self, rank: int) -> slice:
        """Returns the range of a source rank's slots among the slots of all ranks."""
        before = sum(ids.size for ids in self.ids[:rank])
        return slice(before, before + self.ids[rank].size)

    def random_scatter(self, rng: np.random.Generator) -> Integers:
        """Returns full scatter indices with random permutations of the rows that each expert gets from each source
        rank.
        """
        place = np.argsort(np.argsort(self.expert, kind="stable"), kind="stable")
        for source in range(self.world_size):
            slots = np.arange(len(self.expert))[self.slots_of(source)]
            for expert in range(self.experts):
                group = slots[self.expert[slots] == expert]
                place[group] = rng.permutation(place[group])
        return place.reshape(-1, self.topk).astype(np.int32)

    def rows_from(self, slots: list[Values]) -> list[Values]:
        """Moves values from slots, one [T, K, ...] per rank, to rows, one [R, ...] per rank."""
        flat = np.concatenate([values.reshape(-1, *values.shape[2:]) for values in slots])
        out = []
        for rank, rows in enumerate(self.rows):
            gets = self.rank == rank
            array = np.empty((rows, *flat.shape[1:]), flat.dtype)
            array[self.row[gets]] = flat[gets]
            out.append(array)
        return out

    def slots_from(self, rows: list[Values]) -> list[Values]:
        """Moves values from rows, one [R, ...] per rank, to slots, one [T, K, ...] per rank, with zeros in dropped
        slots.
        """
        flat = np.zeros((len(self.expert), *rows[0].shape[1:]), rows[0].dtype)
        for rank, array in enumerate(rows):
            gets = self.rank == rank
            flat[gets] = array[self.row[gets]]
        return [flat[self.slots_of(source)].reshape(*ids.shape, *flat.shape[1:]) for source, ids in enumerate(self.ids)]

    def dispatch(self, inputs: list[Values]) -> list[Values]:
        """Returns dispatch's outputs, one [R, H] per rank, for inputs, one [T, H] per rank."""
        return self.rows_from([np.repeat(x[:, None], self.topk, axis=1) for x in inputs])

    def combine(
        self, rows: list[Values], weights: list[Values] | None = None, *, local_combine: bool = False
    ) -> list[Values]:
        """Returns combine's outputs, one [T, H] per rank, for rows [R, H] and weights [R] of all ranks.

        For each token, adds up its slots on each node (with `local_combine`, on each rank), rounds these partial sums,
        and adds them up.
        """
        dtype = rows[0].dtype
        wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
        part_of_rank = np.arange(self.world_size + 1) // self.local_world_size
        if local_combine:
            part_of_rank = np.arange(self.world_size + 1)
        terms = self.slots_from([array.astype(wide) for array in rows])
        if weights is not None:
            scales = self.slots_from([array.astype(wide) for array in weights])
            terms = [term * scale[:, :, None] for term, scale in zip(terms, scales, strict=True)]
        out = []
        for source, term in enumerate(terms):
            part = part_of_rank[self.rank[self.slots_of(source)]].reshape(term.shape[:2])
            total = np.zeros((term.shape[0], term.shape[2]), wide)
            for number in range(part_of_rank[self.world_size - 1] + 1):
                partial = np.zeros_like(total)
                for k in range(self.topk):
                    partial += np.where((part[:, k] == number)[:, None], term[:, k], 0)
                total += partial.astype(dtype).astype(wide)
            out.append(total.astype(dtype))
        return out

    def layout(self, rank: int) -> Layout:
        """Returns the fields of a rank's descriptor."""
        node, local = divmod(rank, self.local_world_size)
        shape = self.nodes, self.max_tokens, self.topk
        runs = np.full((self.nodes, 2, self.max_tokens), -1, np.int32)
        experts, places = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
        for other in range(self.nodes):
            source = other * self.local_world_size + local
            slots, ids = self.slots_of(source), self.ids[source]
            here = (self.rank[slots] // self.local_world_size == node).reshape(ids.shape)
            experts[other, : len(ids)] = ids
            shown = here | (other == node)
            places[other, : len(ids)] = np.where(shown, self.row[slots].reshape(ids.shape), -1)
            comes = np.concatenate([[False], here.any(axis=1), [False]]).astype(np.int8)
            starts, ends = np.flatnonzero(np.diff(comes) == 1), np.flatnonzero(np.diff(comes) == -1)
            runs[other, 0, : len(starts)], runs[other, 1, : len(ends)] = starts, ends
        first, of_token = self._duplicates(rank)
        return Layout(
            num_dispatch_token_cur_rank=len(self.ids[rank]),
            num_input_tokens_per_rank=np.array([len(ids) for ids in self.ids], np.int32),
            send_reqs_recv_tensor=runs if self.nodes > 1 else None,
            topk_indices_tensor=experts if self.nodes > 1 else self.ids[rank],
            token_dst_scatter_idx=places,
            skipped_token_mapping_indices=first,
            skipped_token_topk_mapping_indices=of_token,
        )

    def _duplicates(self, rank: int) -> tuple[Integers, Integers]:
        first = np.full(self.rows[rank], -1, np.int32)
        of_token = np.full((self.rows[rank], self.topk), -1, np.int32)
        first_of: dict[int, int] = {}
        for slot in np.flatnonzero(self.rank == rank).tolist():
            row = int(self.row[slot])
            first[row] = first_of.setdefault(int(self.token[slot]), row)
            of_token[first[row], slot % self.topk] = row
        return first, of_token
