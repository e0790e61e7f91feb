"""Memory that a device may read and write: registered once, and kept for a while when nobody uses it."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from proxyccl.device.errors import ArgumentError, ClosedError, ProxyCCLError
from proxyccl.device.lease_cache import LeaseCache
from proxyccl.proxy.verbs.endpoint import VerbsDevice
from proxyccl.proxy.verbs.pyverbs_api import error_number

DmaBuf = Callable[[], tuple[int, int] | None]
"""Gives a descriptor of a DMA-BUF and the range's offset in it, or None where the driver offers none. The descriptor
is closed here.
"""

_Key = tuple[int, int, Hashable]


@dataclass(frozen=True)
class Registration:
    """A registered range of memory.

    Attributes:
        ptr: its address in this process.
        nbytes: its size.
        address: by which the device and peers name its first byte. It is `ptr`, but for a DMA-BUF.
        lkey: key for this device's own work requests.
        rkey: key for peers'.
        how: "host", "peer memory" (the device takes the GPU's address itself) or "dma-buf".
        allocation: what `Registrations.register` was given.
    """

    ptr: int
    nbytes: int
    address: int
    lkey: int
    rkey: int
    how: str
    allocation: Hashable = None


_Made = tuple[Registration, Any]  # with pyverbs' memory region


class Registrations:
    """What is registered with a device. Threads may share it.

    A range is registered once however often it is asked for. Ranges that nobody uses any more stay registered for the
    next time if the caller names their allocation, so that one of another allocation at the same address is never
    taken for them; the least recently used go first. They keep their memory occupied, even freed memory of a GPU.

    Args:
        device: to register with; closing it closes this.
        keep: ranges that stay registered when nobody uses them.
        keep_bytes: their size altogether.
    """

    def __init__(self, device: VerbsDevice, *, keep: int = 64, keep_bytes: int = 1 << 30) -> None:
        self._device = device
        self._made: LeaseCache[_Key, _Made] = LeaseCache(
            self._deregister, keep=keep, weigh=lambda made: made[0].nbytes, keep_weight=keep_bytes
        )
        device.adopt(self)

    def register(
        self, ptr: int, nbytes: int, dmabuf: DmaBuf | None = None, *, allocation: Hashable = None
    ) -> Registration:
        """Registers a range, or finds it registered. Each call is paired with a `release`.

        Args:
            ptr: address of the range.
            nbytes: its size.
            dmabuf: for memory of a GPU.
            allocation: what tells this allocation from all others, earlier ones at the same address too; None: the
                range is registered for as long as it is used.

        Raises:
            ArgumentError: the range is empty or none.
            ResourceError: the system or the device has no room.
            RuntimeUnavailableError: the device can't reach this memory.
        """
        if not isinstance(ptr, int) or not 0 < ptr < 1 << 64:
            raise ArgumentError("ptr", f"must be an address, not {ptr!r}")
        if not isinstance(nbytes, int) or nbytes <= 0:
            raise ArgumentError("nbytes", f"must be positive, not {nbytes!r}")
        self._require_open()
        key = (ptr, nbytes, allocation)
        return self._made.acquire(key, lambda: self._make(ptr, nbytes, dmabuf, allocation))[0]

    def release(self, registration: Registration) -> None:
        """Ends one use. No request may name it any more when the last one ends.

        Raises:
            ArgumentError: it is not in use.
        """
        key = (registration.ptr, registration.nbytes, registration.allocation)
        try:
            self._made.release(key, keep=registration.allocation is not None)
        except KeyError:
            raise ArgumentError("registration", f"{registration} is not in use") from None

    def close(self) -> None:
        """Deregisters everything. Nothing may be under way from or to it."""
        self._made.close()
        self._device.disown(self)

    def _require_open(self) -> None:
        self._device.require_open()
        if self._made.closed:
            raise ClosedError("the registrations are closed")

    def _make(self, ptr: int, nbytes: int, dmabuf: DmaBuf | None, allocation: Hashable) -> _Made:
        api, refusal = self._device.api, ""
        if dmabuf is not None:
            try:
                made = self._make_dmabuf(nbytes, dmabuf)
            except api.PyverbsError as cause:
                # Where the device or the kernel does not take it, the device may still know the GPU's addresses.
                refusal = f"; {self._error('ibv_reg_dmabuf_mr', nbytes, 'a DMA-BUF', cause)}"
            else:
                if made is not None:
                    region, offset = made
                    return self._registration(ptr, nbytes, offset, region, "dma-buf", allocation), region
        kind = "host memory" if dmabuf is None else "a GPU's memory"
        try:
            region = api.MR(self._device.pd, nbytes, self._device.access, address=ptr)
        except api.PyverbsError as cause:
            error = self._error("ibv_reg_mr", nbytes, kind, cause)
            raise type(error)(f"{error}{refusal}") from cause
        how = "host" if dmabuf is None else "peer memory"
        return self._registration(ptr, nbytes, ptr, region, how, allocation), region

    def _make_dmabuf(self, nbytes: int, dmabuf: DmaBuf) -> tuple[Any, int] | None:
        given = dmabuf()
        if given is None:
            return None
        descriptor, offset = given
        try:
            # pyverbs has the device name the range by its offset.
            return self._device.api.DmaBufMR(
                self._device.pd, nbytes, self._device.access, dmabuf=descriptor, offset=offset
            ), offset
        finally:
            os.close(descriptor)

    @staticmethod
    def _registration(ptr: int, nbytes: int, address: int, region: Any, how: str, allocation: Hashable) -> Registration:
        return Registration(ptr, nbytes, address, region.lkey, region.rkey, how, allocation)

    def _error(self, call: str, nbytes: int, kind: str, cause: Exception) -> ProxyCCLError:
        error = self._device.api.error(call, f"{nbytes} bytes of {kind} on {self._device.name}", cause)
        if error_number(cause) != errno.ENOMEM:
            return error
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if limit == resource.RLIM_INFINITY:
            return error
        return type(error)(f"{error}; this process may lock {limit >> 10} KiB of memory in all (ulimit -l)")

    def _deregister(self, made: _Made) -> None:
        registration, region = made
        with self._device.api.calling("ibv_dereg_mr", f"{registration.nbytes} bytes on {self._device.name}"):
            region.close()
