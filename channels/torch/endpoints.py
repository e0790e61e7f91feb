"""The communicators of a process group, made when they are first used."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

from proxyccl.channels.communicator import Communicator
from proxyccl.device.errors import ClosedError
from proxyccl.torch.store_bootstrap import StoreBootstrap

_LINGER_SECONDS = 2.0
"""At the process's end: for the last kernels of peers, which store to this rank's memory."""
_Key = tuple[str, int | None, int | None]


class Endpoints:
    """The communicators of one rank: one of all ranks for each device, and one with each peer for single transfers.

    A single send or recv involves two ranks alone, so it can't use what all ranks must make together. It also runs
    beside other calls, so what it needs is made with its communicator.

    Args:
        store: where the ranks meet.
        rank, world_size: this rank's number in the process group, and how many there are.
        timeout: bound of every wait, in seconds.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout: float) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout = timeout
        self._lock = threading.Lock()
        self._making: dict[_Key, threading.Lock] = {}
        self._made: dict[_Key, Communicator] = {}
        self._closed = False

    def of_all(self, device: torch.device) -> Communicator:
        """The communicator of all ranks for a device. All ranks call this together."""
        made = self._made.get((device.type, device.index, None))
        return made if made is not None else self._make(device, None)

    def with_peer(self, device: torch.device, peer: int) -> tuple[Communicator, int]:
        """The communicator with a peer for a device, and the peer's number in it. Both call this."""
        made = self._made.get((device.type, device.index, peer))
        comm = made if made is not None else self._make(device, peer)
        return comm, int(self._rank < peer)

    def _make(self, device: torch.device, peer: int | None) -> Communicator:
        key = (device.type, device.index, peer)
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:
            if self._closed:
                raise ClosedError("the process group was shut down")
            if key not in self._made:
                comm = self._connect(device, peer)
                with self._lock:
                    self._made[key] = comm
                    closed = self._closed
                if closed:
                    comm.close(wait=False)
            return self._made[key]

    def _connect(self, device: torch.device, peer: int | None) -> Communicator:
        runtime = "host" if device.type == "cpu" else "hip" if torch.version.hip else "cuda"
        if peer is None:
            name, rank, world_size = runtime, self._rank, self._world_size
        else:
            low, high = sorted((self._rank, peer))
            name, rank, world_size = f"{runtime}-{low}-{high}", int(self._rank > peer), 2
        bootstrap = StoreBootstrap(dist.PrefixStore(f"proxyccl-{name}", self._store), rank, world_size)
        comm = Communicator(bootstrap, runtime, device=device.index, timeout=self._timeout, linger=_LINGER_SECONDS)
        if peer is not None:
            comm.prepare_transfers()
        return comm

    @property
    def made(self) -> list[Communicator]:
        """The communicators that exist."""
        with self._lock:
            return list(self._made.values())

    def set_timeout(self, seconds: float) -> None:
        """Changes the bound of every wait from now on."""
        self._timeout = seconds
        for comm in self.made:
            comm.timeout = seconds

    def abort(self, reason: str) -> None:
        """Ends the communicators on all ranks. Waits for nobody."""
        for comm in self.made:
            comm.abort(reason)

    def close(self) -> None:
        """Ends them. Waits for this rank's own work, but for no other rank."""
        with self._lock:
            self._closed = True
        for comm in self.made:
            comm.close(wait=False)
