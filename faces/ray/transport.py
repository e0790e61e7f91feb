"""Implements Ray's interface of tensor transports by an agent in each actor.

The interface is that of Ray 2.60, python/ray/experimental/rdt/tensor_transport_manager.py. Ray makes one transport for
each process and calls it in several threads: its main thread and the "_ray_system" thread of an actor.

The source actor registers a tensor's memory, and returns the metadata of the actor's agent and the tensor's address to
Ray, which passes both to the destination actor. The destination reads the tensor; the source's program takes no part in
the read. Ray keeps a tensor alive until Ray calls `garbage_collect`.
"""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from proxyccl.channels.transfers.agent import Agent
from proxyccl.channels.transfers.errors import ActiveError, CanceledError, TransferError, TransferTimeoutError
from proxyccl.channels.transfers.regions import VRAM, Region
from proxyccl.channels.transfers.transfer import Transfer
from proxyccl.device.process.left_behind import take_each
from ray.experimental import CommunicatorMetadata, TensorTransportManager, TensorTransportMetadata
from ray.experimental.rdt.tensor_transport_manager import FetchRequest

_MOST_KNOWN = 1024  # after this many objects, a peer is removed and added again, to drop the objects' regions
_MOST_PEERS = 1000  # the limit of Ray's own transport for NIXL
_LONG, _SHORTEST = 3600.0, 1e-6  # seconds


@dataclass
class ProxyCCLMetadata(TensorTransportMetadata):
    """The addresses of an object's tensors in the source's memory."""

    agent: str = ""  # the name of the source's agent; "" for an object without tensors
    agent_metadata: bytes = b""  # the source agent's metadata, with the registered regions of this object
    places: list[tuple[int, int]] = field(default_factory=list)  # (address, bytes) of each tensor
    # The number of times that the source has deregistered device memory. If the generation has changed, the
    # destination's mappings of earlier memory may be stale.
    generation: int = 0


@dataclass
class _Peer:
    generation: int
    known: int = 0  # the number of the peer's objects whose regions this agent knows


class _Reading:
    def __init__(self, obj_id: str, peer: str, regions: list[Region], transfer: Transfer, tensors: list[Any]) -> None:
        self.obj_id, self.peer, self.regions, self.transfer = obj_id, peer, regions, transfer
        self.tensors = tensors  # references that keep the tensors alive while the read may write to them
        self.settled = False
        self._error: tuple[type[TransferError], str] | None = None  # no exception, which would keep its frames alive

    def settle(self, timeout: float) -> None:
        if not self.settled:
            try:
                self.transfer.wait(timeout)
            except TransferTimeoutError:
                raise
            except TransferError as error:
                self._error = type(error), str(error)
            self.settled = True

    def require_success(self) -> None:
        if self._error is not None:
            kind, message = self._error
            raise kind(message, self.peer)


@dataclass
class ProxyCCLFetch(FetchRequest):
    """A fetch in progress. After this object is garbage-collected, the transport's next call cancels the fetch."""

    reading: _Reading | None = None


class ProxyCCLTransport(TensorTransportManager):
    """Moves torch tensors and numpy arrays between actors by one-sided reads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._starting = threading.Lock()  # this lock is held from adding a peer until the read starts
        self._made: Agent | None = None
        self._generation = 0
        self._objects: dict[str, list[Region]] = {}
        self._peers: dict[str, _Peer] = {}  # the most recently used peer is last
        self._readings: list[_Reading] = []  # reads that may be active; their memory is registered
        self._dropped: deque[_Reading] = deque()  # reads whose fetches were freed
        self._aborted: set[str] = set()

    @property
    def agent(self) -> Agent:
        """The agent of this process, which is made at its first use, because Ray's driver needs none."""
        with self._lock:
            if self._made is None:
                self._made = Agent(f"ray-{os.getpid()}-{uuid.uuid4().hex}")
            return self._made

    def tensor_transport_backend(self) -> str:
        return "PROXYCCL"

    @staticmethod
    def is_one_sided() -> bool:
        """Returns True, because only the destination takes part in a transfer."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """Returns True, so that Ray aborts a transfer instead of killing the transfer's actors."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Returns True without asking the actor, because Ray calls this method before each use of the transport."""
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> ProxyCCLMetadata:
        """Waits until the devices have written an object's tensors, and registers the tensors' memory. Runs in the
        actor that has the tensors.

        Raises:
            ValueError: the tensors are not contiguous, or not on one type of device.
        """
        if not rdt_object:
            return ProxyCCLMetadata(tensor_meta=[], tensor_device=None)
        devices = {_device_type(tensor) for tensor in rdt_object}
        if len(devices) > 1:
            raise ValueError(f"all tensors of an object must be on one type of device, not on {sorted(devices)}")
        _synchronize(rdt_object)
        regions = [_region(tensor) for tensor in rdt_object]
        self._end_dropped()
        agent = self.agent
        agent.register_regions(regions)
        with self._lock:
            self._objects.setdefault(obj_id, []).extend(regions)
            generation = self._generation
        return ProxyCCLMetadata(
            tensor_meta=[(tensor.shape, tensor.dtype) for tensor in rdt_object],
            tensor_device=devices.pop(),
            agent=agent.name,
            agent_metadata=agent.metadata(regions),
            places=[(region.address, region.nbytes) for region in regions],
            generation=generation,
        )

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Any:
        """Returns empty metadata, because the metadata of the tensors already name the source."""
        return CommunicatorMetadata()

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: Any,
        target_buffers: Sequence[Any] | None = None,
    ) -> ProxyCCLFetch:
        """Starts to read an object's tensors into `target_buffers`, or into new tensors if there are no buffers.

        Raises:
            ValueError: a buffer is not contiguous, or its size differs from the size of its tensor.
            CanceledError: Ray has aborted the transfer.
            TransferError: see `Agent.prepare` and `Transfer.start`.
        """
        meta: ProxyCCLMetadata = tensor_transport_metadata
        self._refuse_if_aborted(obj_id, meta)
        tensors = list(target_buffers or ())
        if not tensors:
            tensors = [_empty(shape, dtype, meta.tensor_device) for shape, dtype in meta.tensor_meta]
        if not tensors:
            return ProxyCCLFetch(obj_id, tensors)
        regions = [_region(tensor) for tensor in tensors]
        if [region.nbytes for region in regions] != [nbytes for _, nbytes in meta.places]:
            raise ValueError("a buffer has another size than its tensor")
        _synchronize(tensors)  # earlier work may still use the buffers' memory
        self._end_dropped()
        agent = self.agent
        agent.register_regions(regions)
        blocks = [
            (region.address, address, nbytes) for region, (address, nbytes) in zip(regions, meta.places, strict=True)
        ]
        reading: _Reading | None = None
        try:
            with self._starting:
                self._add(meta)
                begun = _Reading(obj_id, meta.agent, regions, agent.prepare("read", meta.agent, blocks), tensors)
                with self._lock:  # so that a concurrent abort either is seen here or finds the started transfer
                    self._refuse_if_aborted(obj_id, meta)
                    self._readings.append(begun)
                    reading = begun
                    reading.transfer.start()
        except BaseException:
            if reading is None:
                agent.deregister(*regions)
            else:
                self._dropped.append(reading)
                self._end_dropped()
            raise
        fetch = ProxyCCLFetch(obj_id, tensors, reading)
        weakref.finalize(fetch, self._dropped.append, reading).atexit = False
        return fetch

    def wait_fetch_complete(self, fetch_request: Any, timeout: float = -1) -> list[Any]:
        """Waits for a fetch, and returns its tensors.

        Args:
            fetch_request: the result of `fetch_multiple_tensors`.
            timeout: the time-out in seconds; if negative, the call waits until the transfer has ended or the source is
                lost.

        Raises:
            TimeoutError: the transfer is still active.
            TransferError: the transfer failed, for example because the source has ended (DisconnectedError), or because
                Ray aborted the transfer (CanceledError).
        """
        self._end_dropped()
        reading: _Reading | None = fetch_request.reading
        if reading is not None:
            while not reading.settled:
                try:
                    self._settle(reading, max(timeout, _SHORTEST) if timeout >= 0 else _LONG)
                except TransferTimeoutError:
                    if timeout >= 0:
                        raise
            reading.require_success()
        tensors: list[Any] = fetch_request.tensors
        return tensors

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: Any,
        target_buffers: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Reads an object's tensors, by `fetch_multiple_tensors` and `wait_fetch_complete`."""
        fetch = self.fetch_multiple_tensors(obj_id, tensor_transport_metadata, communicator_metadata, target_buffers)
        return self.wait_fetch_complete(fetch)

    def send_multiple_tensors(self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        """Raises NotImplementedError. Ray does not call this method, because the destination reads the tensors."""
        raise NotImplementedError("the transport is one-sided: the destination reads")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: Any) -> None:
        """Deregisters the tensors of an object, which the program no longer uses."""
        self._end_dropped()
        with self._lock:
            regions = self._objects.pop(obj_id, [])
            self._generation += any(region.kind == VRAM for region in regions)
        if regions:
            self.agent.deregister(*regions)

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """Aborts the transfer of an object: its fetch raises CanceledError, even if the fetch starts later."""
        self._end_dropped()
        with self._lock:
            readings = [reading for reading in self._readings if reading.obj_id == obj_id]
            if not readings and obj_id not in self._objects:  # on the source, there is nothing to abort
                self._aborted.add(obj_id)
        for reading in readings:
            reading.transfer.cancel()

    def _refuse_if_aborted(self, obj_id: str, meta: ProxyCCLMetadata) -> None:
        with self._lock:
            if obj_id in self._aborted:
                self._aborted.remove(obj_id)
                raise CanceledError(f"the transfer of object {obj_id} was aborted", meta.agent)

    def _add(self, meta: ProxyCCLMetadata) -> None:
        agent = self.agent
        if meta.agent == agent.name:
            return
        peer = self._peers.get(meta.agent)
        if peer is None:
            self._remove_unused()
        elif peer.generation < meta.generation or peer.known >= _MOST_KNOWN:
            # This agent's mappings of the peer's memory may be stale, or the agent knows too many regions of the peer.
            # After the active reads from the peer, the peer is therefore removed and added again.
            with self._lock:
                readings = [reading for reading in self._readings if reading.peer == meta.agent]
            for reading in readings:
                self._settle(reading, agent.timeout)
            self._remove(meta.agent)
        agent.add(meta.agent_metadata)
        peer = self._peers.pop(meta.agent, None) or _Peer(meta.generation)
        peer.known += 1
        self._peers[meta.agent] = peer  # moved to the end: the most recently used peer is last

    def _remove_unused(self) -> None:
        """Removes peers that have ended, because their memory would stay mapped. If there are too many peers, also
        removes the least recently used peers.
        """
        with self._lock:
            active = {reading.peer for reading in self._readings}
        surplus = len(self._peers) + 1 - _MOST_PEERS
        for index, name in enumerate(list(self._peers)):
            if name not in active and (index < surplus or self.agent.lost(name)):
                self._remove(name)

    def _remove(self, name: str) -> None:
        del self._peers[name]
        self.agent.remove(name)

    def _settle(self, reading: _Reading, timeout: float) -> None:
        reading.settle(timeout)
        self._release(reading)

    def _release(self, reading: _Reading) -> None:
        with self._lock:
            if reading not in self._readings:
                return
            self._readings.remove(reading)
        reading.tensors = []
        self.agent.deregister(*reading.regions)

    def _end_dropped(self) -> None:
        active: list[_Reading] = []
        try:
            for reading in take_each(self._dropped):
                active.append(reading)
                try:
                    reading.transfer.cancel(_SHORTEST)  # not close(), because another thread may wait for the transfer
                except ActiveError:  # a network adapter may still write the tensors
                    continue
                self._release(active.pop())
        finally:
            self._dropped.extend(active)


def _device_type(tensor: Any) -> str:
    return "cpu" if isinstance(tensor, np.ndarray) else str(tensor.device.type)


def _synchronize(tensors: Iterable[Any]) -> None:
    """Waits for all work of the tensors' GPUs, because agents copy without regard to streams."""
    gpus = {tensor.device for tensor in tensors if _device_type(tensor) == "cuda"}
    if gpus:
        import torch

        for gpu in gpus:
            torch.cuda.synchronize(gpu)


def _region(tensor: Any) -> Region:
    if isinstance(tensor, np.ndarray):
        if not tensor.flags.c_contiguous:
            raise ValueError("the array is not contiguous")
        return Region(tensor.ctypes.data, tensor.nbytes)
    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous")
    nbytes = tensor.numel() * tensor.element_size()
    if tensor.device.type == "cpu":
        return Region(tensor.data_ptr(), nbytes)
    return Region(tensor.data_ptr(), nbytes, tensor.device.index or 0, VRAM)


def _empty(shape: Any, dtype: Any, device: Any) -> Any:
    if isinstance(dtype, np.dtype):
        return np.empty(shape, dtype)
    import torch

    return torch.empty(shape, dtype=dtype, device=device)
