"""The offsets of a descriptor's tables in their array, computed once for all dispatches of a layer."""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct

from proxyccl.channels.expert_parallel.arrays import LibraryArrays, Maker, strides_of
from proxyccl.channels.expert_parallel.members import Nodes
from proxyccl.channels.expert_parallel.options import LayerOptions
from proxyccl.device._native import ffi
from proxyccl.device.arguments.integers import round_up

_ALIGNMENT = 128  # bytes
_NO_TABLE = 2**64 - 1
_LEADING_BITS = 4
RECEIVED = "received"
"""The name of the table with the number of received rows, int32 [1]. ProxycclExpertLayout has no such field."""
OF_ROWS = frozenset({"first_rows", "token_rows", "row_slots", "row_experts", "row_tokens"})
"""Tables with an entry for each row of the output."""
_OF_IDS = frozenset({"row_experts"})
"""Tables whose elements have the type of the caller's expert ids."""


class Tables(Struct, frozen=True):
    """Tables that lie in one array."""

    nbytes: int  # bytes of the array
    # Maps a table's name to the table's offset in bytes, shape, strides in elements, and whether its elements are int64
    # instead of int32.
    places: dict[str, tuple[int, tuple[int, ...], tuple[int, ...], bool]]
    # The tables' offsets in bytes, in the order of the fields of ProxycclExpertLayout, for C (descriptor.h).
    offsets: Any
    address: int  # the address of `offsets`, for callers in C
    wide_ids: bool  # whether the caller's expert ids are int64

    @staticmethod
    def of(shapes: dict[str, tuple[int, ...]], *, wide_ids: bool) -> Tables:
        """Returns tables of these shapes, one after the other in one array."""
        places, end = {}, 0
        for name, shape in shapes.items():
            wide = wide_ids and name in _OF_IDS
            places[name] = end, shape, strides_of(shape), wide
            end = round_up(end + math.prod(shape) * (8 if wide else 4), _ALIGNMENT)
        offsets = ffi.new("uint64_t[]", [_NO_TABLE] * (ffi.sizeof("ProxycclExpertLayout") // 8))
        for name in places.keys() - {RECEIVED}:
            offsets[number_of(name)] = places[name][0]
        return Tables(end, places, offsets, int(ffi.cast("uintptr_t", offsets)), wide_ids)

    def maker(self, arrays: LibraryArrays) -> Maker:
        """Returns a function that makes the array that holds the tables. The array is int32, or int64 if the table of
        expert ids is int64, so that programs get this table as a part of the array, without a conversion.
        """
        has_wide = self.wide_ids and _OF_IDS & self.places.keys()
        native, itemsize = (arrays.int64, 8) if has_wide else (arrays.int32, 4)
        return arrays.maker((self.nbytes // itemsize,), (1,), native)


def number_of(table: str | None) -> int:
    return 0 if table is None else int(ffi.offsetof("ProxycclExpertLayout", table)) // 8


_MOST_KEPT = 64


class TableLayouts:
    """Computes and keeps the layouts of the tables of a layer's descriptors.

    Attributes:
        alignment: each expert's rows begin at a multiple of this number.
        padded_rows: the number of rows that an expert has room for, if rows are padded; else 0.
    """

    def __init__(self, options: LayerOptions, nodes: Nodes) -> None:
        self._options, self._config, self._nodes = options, options.kernel_config, nodes
        self.alignment, self.padded_rows = options.expert_alignment or 1, options.padded_rows
        self._kept: dict[tuple[bool, int | None, bool], Tables] = {}
        self._kept_of_rows: dict[tuple[int, bool], Tables] = {}

    def of_call(self, rows: int | None, *, buffered: bool, wide_ids: bool) -> Tables:
        """Returns the tables of a dispatch. The tables with an entry for each row are included only if `rows`, the most
        rows of the output, is known. `buffered`: whether rows go to an output buffer.
        """
        key = buffered, rows, wide_ids
        if key not in self._kept:
            if len(self._kept) >= _MOST_KEPT:  # callers may vary the room of padded rows from call to call
                self._kept.clear()
            shapes = self._shapes(buffered)
            if rows is not None:
                shapes |= {**self._shapes_of_rows(rows), RECEIVED: (1,)}
            self._kept[key] = Tables.of(shapes, wide_ids=wide_ids)
        return self._kept[key]

    def of_rows(self, rows: int, *, wide_ids: bool) -> Tables:
        """Returns the tables with an entry for each row, for a number of rows that became known after the dispatch
        began. The tables may have room for a few more rows, so that few layouts serve all numbers of rows.
        """
        key = round_up(rows, 1 << max(0, rows.bit_length() - _LEADING_BITS)), wide_ids
        if key not in self._kept_of_rows:
            self._kept_of_rows[key] = Tables.of(self._shapes_of_rows(key[0]), wide_ids=wide_ids)
        return self._kept_of_rows[key]

    def _shapes(self, buffered: bool) -> dict[str, tuple[int, ...]]:
        config, nodes, ranks = self._config, self._nodes, self._config.world_size
        shapes: dict[str, tuple[int, ...]] = {
            "tokens": (ranks,),
            "counts": (ranks, config.num_experts),
            "rows": (ranks, config.max_tokens, config.topk),
            "expert_ids": (nodes.count, config.max_tokens, config.topk),
        }
        if nodes.count > 1:
            shapes |= {"places": (ranks, config.max_tokens), "sent_places": (nodes.count, config.max_tokens)}
        if buffered:
            shapes["sent_rows"] = (config.max_tokens, config.topk)
        return shapes

    def _shapes_of_rows(self, rows: int) -> dict[str, tuple[int, ...]]:
        topk = self._config.topk
        shapes: dict[str, tuple[int, ...]] = {"first_rows": (rows,), "token_rows": (rows, topk), "row_slots": (rows,)}
        if self._options.by_rank:
            shapes |= {"row_experts": (rows, topk), "row_tokens": (rows,)}
        if self.padded_rows:
            shapes |= {"row_tokens": (rows,), "expert_rows": (self._config.num_experts_per_rank,)}
        return shapes
