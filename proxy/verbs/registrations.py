"""Memory that is registered with an RDMA device."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from proxyccl.device.errors import ClosedError, ProxyCCLError
from proxyccl.proxy.registration_cache import RegistrationCache
from proxyccl.proxy.verbs.endpoint import VerbsDevice
from proxyccl.proxy.verbs.pyverbs_api import error_number

DmaBuf = Callable[[], tuple[int, int] | None]
"""Gives a descriptor of a DMA-BUF and the range's offset in it, or None if the driver does not offer one. The
descriptor is closed here.
"""


@dataclass(frozen=True)
class Registration:
    """A registered range of memory.

    Attributes:
        ptr: the range's address in this process.
        nbytes: the range's size.
        address: the address by which the device and peers name its first byte. It is `ptr`, except for a DMA-BUF.
        lkey: key for this device's own work requests.
        rkey: key for peers' work requests.
        how: "host", "peer memory" (the device takes the GPU's address itself) or "dma-buf".
        allocation: the argument of `Registrations.register`.
        region: pyverbs' memory region.
    """

    ptr: int
    nbytes: int
    address: int
    lkey: int
    rkey: int
    how: str
    allocation: Hashable = None
    region: Any = field(default=None, compare=False, repr=False)


class Registrations:
    """The registrations of a device: a `RegistrationCache` that supports DMA-BUFs. Threads may share it.

    Args:
        device: the device to register with, whose end closes the registrations.
        keep: see `RegistrationCache`.
        keep_bytes: see `RegistrationCache`.
    """

    def __init__(self, device: VerbsDevice, *, keep: int = 64, keep_bytes: int = 1 << 30) -> None:
        self._device = device
        self._made: RegistrationCache[Registration] = RegistrationCache(
            self._deregister, keep=keep, keep_bytes=keep_bytes
        )
        device.adopt(self)

    def register(
        self, ptr: int, nbytes: int, dmabuf: DmaBuf | None = None, *, allocation: Hashable = None
    ) -> Registration:
        """Registers a range, or finds it registered. Each call is paired with a `release`.

        Args:
            ptr: address of the range.
            nbytes: size of the range.
            dmabuf: exports memory of a GPU; None for memory of the host.
            allocation: identifies this allocation among all others, including earlier ones at the same address;
                None: the range is registered only while it is used.

        Raises:
            ArgumentError: the range is empty or invalid.
            ResourceError: the system or the device has no room.
            RuntimeUnavailableError: the device can't reach this memory.
        """
        self._require_open()
        return self._made.acquire(ptr, nbytes, allocation, lambda: self._make(ptr, nbytes, dmabuf, allocation))

    def release(self, registration: Registration) -> None:
        """Ends one use of a registration. After the last use, requests must no longer name it.

        Raises:
            ArgumentError: the registration is not in use.
        """
        self._made.release(registration)

    def close(self) -> None:
        """Deregisters everything. No transfers may be in flight from or to it."""
        self._made.close()
        self._device.disown(self)

    def _require_open(self) -> None:
        self._device.require_open()
        if self._made.closed:
            raise ClosedError("the registrations are closed")

    def _make(self, ptr: int, nbytes: int, dmabuf: DmaBuf | None, allocation: Hashable) -> Registration:
        api, refusal = self._device.api, ""
        if dmabuf is not None:
            try:
                made = self._make_dmabuf(nbytes, dmabuf)
            except api.PyverbsError as cause:
                # If the device or the kernel refuses the DMA-BUF, the device may still accept the GPU's addresses (peer
                # memory).
                refusal = f"; {self._error('ibv_reg_dmabuf_mr', nbytes, 'a DMA-BUF', cause)}"
            else:
                if made is not None:
                    region, offset = made
                    return self._registration(ptr, nbytes, offset, region, "dma-buf", allocation)
        kind = "host memory" if dmabuf is None else "a GPU's memory"
        try:
            region = api.MR(self._device.pd, nbytes, self._device.access, address=ptr)
        except api.PyverbsError as cause:
            error = self._error("ibv_reg_mr", nbytes, kind, cause)
            raise type(error)(f"{error}{refusal}") from cause
        how = "host" if dmabuf is None else "peer memory"
        return self._registration(ptr, nbytes, ptr, region, how, allocation)

    def _make_dmabuf(self, nbytes: int, dmabuf: DmaBuf) -> tuple[Any, int] | None:
        given = dmabuf()
        if given is None:
            return None
        descriptor, offset = given
        try:
            # pyverbs registers a DMA-BUF so that requests name bytes by their offset.
            return self._device.api.DmaBufMR(
                self._device.pd, nbytes, self._device.access, dmabuf=descriptor, offset=offset
            ), offset
        finally:
            os.close(descriptor)

    @staticmethod
    def _registration(ptr: int, nbytes: int, address: int, region: Any, how: str, allocation: Hashable) -> Registration:
        return Registration(ptr, nbytes, address, region.lkey, region.rkey, how, allocation, region)

    def _error(self, call: str, nbytes: int, kind: str, cause: Exception) -> ProxyCCLError:
        error = self._device.api.error(call, f"{nbytes} bytes of {kind} on {self._device.name}", cause)
        if error_number(cause) != errno.ENOMEM:
            return error
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if limit == resource.RLIM_INFINITY:
            return error
        return type(error)(f"{error}; this process may lock {limit >> 10} KiB of memory in all (ulimit -l)")

    def _deregister(self, registration: Registration) -> None:
        with self._device.api.calling("ibv_dereg_mr", f"{registration.nbytes} bytes on {self._device.name}"):
            registration.region.close()
