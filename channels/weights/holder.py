"""Holders of weights: an agent, its parts of tensors, and the version that others may read."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from proxyccl.channels import array_libraries
from proxyccl.channels.timeouts import timeout_from
from proxyccl.channels.transfers.agent import Agent
from proxyccl.channels.transfers.errors import DisconnectedError, NameTakenError, TransferTimeoutError
from proxyccl.channels.transfers.regions import Region
from proxyccl.channels.weights.amax import scales_of
from proxyccl.channels.weights.card import CARD, MESSAGE, Card, HasRead, Join, Leave, Offered
from proxyccl.channels.weights.parts import Part, part_of
from proxyccl.channels.weights.sharding import Sharding
from proxyccl.device.arrays.array import Array, ArrayView, as_view
from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import Runtime
from proxyccl.device.runtimes import open_runtime

_SLICE = 0.05
"""Seconds between a waiting thread's checks of its links, because a lost link does not wake it."""
_LAST_MESSAGE_SECONDS = 0.5
"""Seconds for which a reader's last message may still arrive after the link to the reader was lost, because the reader
sends over its own link."""


Place = tuple[str, int, bool]
"""The name of a runtime, the number of a device, and whether agents treat memory there as device memory, which is true
also for an `Array` of the host runtime."""


class Memory(NamedTuple):
    """The place of a part, and the array of the part's scales, if there is one."""

    place: Place
    scales: ArrayView | None


class Holder:
    """The base class of `WeightSource` and `WeightTarget`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._parts: list[Part] = []
        self._groups = [0]  # for each group, the index of its first part
        self._regions: dict[tuple[int, int], Region] = {}
        self._memories: list[Memory] = []  # one entry per part
        self._runtimes: dict[Place, Runtime] = {}
        self._number = int.from_bytes(os.urandom(8), "little") | 1
        self._words = np.array([0, self._number], np.uint64)
        self._version = self._words[:1]
        self._version_region = agent.register(self._words)
        self._readers: dict[str, int] = {}  # by name of a reader, the version that it has read
        self._numbers: dict[str, int] = {}  # by name of a reader, its number (`Card.holder`)
        self._ended: dict[str, tuple[str, float]] = {}  # by name of a reader, why and since when its link is lost

    def __repr__(self) -> str:
        nbytes = sum(part.nbytes for part in self._parts)
        return f"{type(self).__name__}({self._agent.name!r}, {len(self._parts)} parts, {nbytes} bytes)"

    def add(
        self,
        tensor: str,
        array: Any,
        *,
        sharding: Sharding | None = None,
        start: Sequence[int] | None = None,
        size: Sequence[int] | None = None,
        within: Any = (),
    ) -> None:
        """Adds an array that contains a tensor or a part of it, and registers the array with the agent.

        Args:
            tensor: the tensor's name, which must be the same in all sources and targets.
            array: a contiguous array in host or GPU memory, or a torch DTensor, such as FSDP's parameters, whose local
                part is added.
            sharding: a sharding of the tensor among agents' names, instead of `start` and `size`.
            start: the index in the tensor of the part's first element, for each dimension.
            size: the shape of the whole tensor. Without `size` and `sharding`, the part is the whole tensor.
            within: a tuple of slices that select the part in the array; () for the whole array. To add a fused array,
                call `add` once for each of its tensors.

        Raises:
            ArgumentError: the part does not lie within the tensor or does not match `sharding`, or the array can't be
                registered.
        """
        self._add(tensor, array, sharding, start, size, within)

    def _add(
        self,
        tensor: str,
        array: Any,
        sharding: Sharding | None,
        start: Sequence[int] | None,
        size: Sequence[int] | None,
        within: Any,
        scale: Any = None,
    ) -> None:
        if hasattr(array, "placements") and hasattr(array, "device_mesh"):
            if sharding is not None or start is not None or size is not None:
                raise ArgumentError(
                    "array", "a DTensor knows which part it holds; pass neither sharding, start nor size"
                )
            array, start, size = array_libraries.load("torch: shardings").local_part(array)
        view = as_view(array, "array")
        if sharding is not None:
            box = sharding.box(self._agent.name)
            start, size = box.start, sharding.shape
        part = part_of(tensor, view, start, size, within)
        if sharding is not None and part.shape != box.shape:
            raise ArgumentError("array", f"{tensor}: expected a part of shape {box.shape}, got {part.shape}")
        place, scales = self._place(array, view), None
        if scale is not None:
            scales = as_view(scale, "scale")
            if self._place(scale, scales)[:2] != place[:2]:
                raise ArgumentError("scale", f"{tensor}: is on {scales.place}, but the part is on {view.place}")
            part = scales_of(part, scales)
        range_ = (view.ptr, view.nbytes)
        if view.nbytes and range_ not in self._regions:
            self._regions[range_] = self._agent.register(array if isinstance(array, Array) else view)
        self._parts.append(part)
        self._memories.append(Memory(place, scales))

    def _place(self, array: Any, view: ArrayView) -> Place:
        place = (view.device[0], max(0, view.device[1]), isinstance(array, Array) or view.device[0] != "host")
        if isinstance(array, Array):
            runtime: Any = array.runtime
            self._runtimes.setdefault(place, runtime)
        return place

    def _runtime(self, place: Place) -> Runtime:
        if place not in self._runtimes:
            self._runtimes[place] = open_runtime(*place[:2])
        return self._runtimes[place]

    def card(self) -> bytes:
        """Returns this holder's card, with which others connect to it. Anyone who has the card may read and write this
        agent's registered memory. Call `add` for all parts before this call.
        """
        address = self._version_region.address
        metadata = self._agent.metadata()
        return CARD.encode(Card("proxyccl-weights-3", metadata, self._number, address, self._parts, self._groups))

    def close(self) -> None:
        """Deregisters all parts, but leaves the agent open. Targets that still read from this holder get an error, and
        must connect with the card of a new source, even if it uses the same agent.
        """
        self._words[:] = 0
        self._agent.deregister(self._version_region, *self._regions.values())
        self._regions.clear()
        self._parts.clear()
        self._memories.clear()

    def _open(self, version: int) -> None:
        self._version[0] = version
        for name in list(self._readers):
            self._tell(name)

    def _shut(self) -> None:
        self._version[0] = 0

    def _tell(self, reader: str) -> None:
        try:
            self._agent.notify(reader, MESSAGE.encode(Offered()))
        except DisconnectedError as error:
            self._ended.setdefault(reader, (str(error), time.monotonic()))

    def _take_messages(self) -> None:
        for sender, data in self._agent.messages():
            match MESSAGE.decode(data, f"agent {sender}"):
                case Join(metadata, number):
                    self._meet(metadata)
                    self._readers[sender], self._numbers[sender] = 0, number
                    self._ended.pop(sender, None)
                    if self._version[0]:
                        self._tell(sender)
                case HasRead(version, number) if sender in self._readers and self._numbers.get(sender) == number:
                    self._readers[sender] = version
                case Leave(number) if self._numbers.get(sender) == number:
                    self._readers.pop(sender, None)
                    self._ended.pop(sender, None)

    def _meet(self, metadata: bytes) -> str:
        """Adds another agent to this holder's agent, in place of any agent of the same name, which must have ended."""
        try:
            return self._agent.add(metadata)
        except NameTakenError as error:
            self._agent.remove(error.peer)
            return self._agent.add(metadata)

    def _lost_readers(self) -> dict[str, str]:
        """Removes readers whose links were lost _LAST_MESSAGE_SECONDS ago, and returns the reason of each loss by
        reader's name."""
        now = time.monotonic()
        for name in self._readers:
            if reason := self._agent.lost(name):
                self._ended.setdefault(name, (reason, now))
        over = {name: reason for name, (reason, since) in self._ended.items() if now - since >= _LAST_MESSAGE_SECONDS}
        lost = {name: reason for name, reason in over.items() if name in self._readers}
        for name in lost:
            del self._readers[name]
            del self._ended[name]
            self._agent.remove(name)
        return lost

    def _wait(self, met: Callable[[], bool], deadline: float, expected: Callable[[], str]) -> None:
        """Handles messages until `met` returns true.

        Raises:
            TransferTimeoutError: `deadline`, in seconds of `time.monotonic`, has passed. The error contains the text
                that `expected` returns.
        """
        self._take_messages()
        while not met():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferTimeoutError(f"agent {self._agent.name}: {expected()} within the time")
            with contextlib.suppress(TransferTimeoutError):  # `met` may become true without a message
                self._agent.wait_for_message(min(left, _SLICE))
            self._take_messages()


def deadline_of(agent: Agent, timeout: float | None) -> float:
    """Returns the deadline of a wait in seconds of `time.monotonic`. If `timeout` is None, uses the agent's
    time-out."""
    return time.monotonic() + (agent.timeout if timeout is None else timeout_from(timeout))
