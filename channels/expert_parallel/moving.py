"""Moves experts' weights between ranks by agents, while the layer is in use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from proxyccl.channels.arguments import require_writable
from proxyccl.channels.group import Group
from proxyccl.channels.memory import allocate
from proxyccl.channels.transfers.agent import Agent
from proxyccl.channels.transfers.errors import TransferError
from proxyccl.channels.transfers.transfer import Transfer
from proxyccl.device.arguments.integers import find_items
from proxyccl.device.arrays.array import ArrayView, as_view
from proxyccl.device.errors import ArgumentError


class Move:
    """Reads weights into those places of this rank that get another expert.

    Args:
        group: the layer's group.
        placement: the new placement.
        weights: this rank's arrays of weights; see `EPAll2AllLayer.place`.
        places: the number of places of a rank.
        reads: for each place that gets another expert: its number on this rank, the rank to read from, the number of
            the place on that rank, and whether this rank's place is in use until the end of the move.

    Attributes:
        placement: the new placement.
        rows: for each array, its address and the bytes of a row.
        metadata: the metadata of this rank's agent.
        failure: the reason why weights can't arrive, or None.

    Raises the errors of `Agent.register`, ArgumentError for wrong weights, and MemoryError.
    """

    def __init__(
        self,
        group: Group,
        placement: tuple[int, ...],
        weights: Any,
        places: int,
        reads: Sequence[tuple[int, int, int, bool]],
    ) -> None:
        self.placement, self._group, self._places, self._reads = placement, group, places, reads
        views = self._views(weights)
        self.rows = self._rows(views)
        self.failure: Exception | None = TransferError("the start of the move was interrupted")
        self._transfers: list[Transfer] = []
        self._copies: list[Transfer] = []
        self._agent = Agent(f"experts of rank {group.rank}", timeout=group.timeout)
        try:
            for view in views:
                self._agent.register(view)
            self.metadata = self._agent.metadata()  # without the buffers, which no other rank reads
            self._buffers = [self._buffer(view) for view in views]
        except BaseException:
            self.close()
            raise

    def _views(self, weights: Any) -> list[ArrayView]:
        views = [as_view(each, "weights", gpu=self._group.runtime.name) for each in find_items(weights) or ()]
        if not views:
            raise ArgumentError("weights", f"expected a sequence of arrays, not {weights!r:.100}")
        for view in views:
            require_writable(view, "weights")
            if view.shape[:1] != (self._places,):
                what = f"expected arrays with {self._places} rows, one for each place of this rank"
                raise ArgumentError("weights", f"{what}, not of shape {view.shape}")
        return views

    def _rows(self, views: Sequence[ArrayView]) -> list[tuple[int, int]]:
        return [(view.ptr, view.nbytes // self._places) for view in views]

    def _buffer(self, view: ArrayView) -> int:
        """Makes a buffer, in memory of the array's kind, for rows of places in use. Returns the buffer's address."""
        nbytes = sum(in_use for *_, in_use in self._reads) * view.nbytes // self._places
        on_host = view.device[0] == "host"
        memory = np.empty(nbytes, np.uint8) if on_host else allocate(self._group, nbytes, "uint8", "experts")
        return self._agent.register(memory).address

    def start(self, metadata: Sequence[bytes], rows: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Starts to read weights. `metadata` and `rows` are those of all ranks' moves. Raises the errors of
        `Agent.read`.
        """
        agent = self._agent
        names = {rank: agent.add(metadata[rank]) for _, rank, *_ in self._reads if rank != self._group.rank}
        for number, ((address, nbytes), buffer) in enumerate(zip(self.rows, self._buffers, strict=True)):
            blocks: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
            copies: list[tuple[int, int, int]] = []
            for own, rank, place, in_use in self._reads:
                into = address + own * nbytes
                if in_use:
                    copies.append((into, buffer + len(copies) * nbytes, nbytes))
                    into = copies[-1][1]
                blocks[rank].append((into, rows[rank][number][0] + place * nbytes, nbytes))
            self._transfers += [agent.read(names.get(rank, agent.name), those) for rank, those in blocks.items()]
            self._copies.append(agent.prepare("read", agent.name, copies))
        self.failure = None

    def has_arrived(self, weights: Any) -> bool:
        """Returns whether all weights have arrived. Raises `failure`, TransferError if a transfer failed, or
        ArgumentError unless `weights` are the arrays with which the move began.
        """
        if self._rows(self._views(weights)) != self.rows:
            raise ArgumentError("weights", "the arrays differ from those with which the move began")
        if self.failure is not None:
            raise self.failure
        return all(transfer.done() for transfer in self._transfers)

    def finish(self) -> None:
        """Copies weights from buffers to places, and ends the move. The weights must have arrived, and no kernel may
        use the places. Raises TransferError if the copies fail.
        """
        for copy in self._copies:
            copy.start()
        self._agent.wait(self._copies)
        self.close()

    def close(self) -> None:
        """Ends the move. Weights that are still in buffers are lost."""
        self._agent.close()
