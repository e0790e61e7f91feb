"""Opens a rank's RDMA device, and registers memory with the device."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
from collections.abc import Callable, Hashable
from typing import Any

from proxyccl.device.errors import ProxyCCLError
from proxyccl.device.runtime import Runtime
from proxyccl.proxy.registrations import (
    RailRegistrations,
    Registration,
    RegistrationCache,
    RemoteDevice,
    require_ordered,
)
from proxyccl.proxy.remote_options import RdmaOptions, RemoteSetup
from proxyccl.proxy.verbs.devices import choose_devices, rdma_devices
from proxyccl.proxy.verbs.endpoint import VerbsDevice
from proxyccl.proxy.verbs.pyverbs_api import error_number

DmaBuf = Callable[[], tuple[int, int] | None]
"""A function that exports a memory range as a DMA-BUF, and returns the DMA-BUF's file descriptor and the range's offset
in the DMA-BUF, or None if the driver can't export the range. This module closes the descriptor.
"""


class Registrations(RegistrationCache):
    """A `RegistrationCache` that supports DMA-BUFs. Closing the device also closes the cache."""

    def __init__(self, device: VerbsDevice) -> None:
        super().__init__()
        self._device = device
        device.dependents.add(self)

    def register(
        self, ptr: int, nbytes: int, dmabuf: DmaBuf | None = None, *, allocation: Hashable = None
    ) -> Registration:
        """Registers a memory range, unless it is registered already. Each call must be paired with a `release`.
        `dmabuf` exports a range of GPU memory, and is None for host memory. Raises the exceptions of `register_of`.
        """
        self._device.require_open()
        return self._acquire(ptr, nbytes, allocation, lambda: self._make(ptr, nbytes, dmabuf, allocation))

    def register_of(
        self, runtime: Runtime, gpu_writes: str, ptr: int, nbytes: int, allocation: Hashable = None
    ) -> Registration:
        require_ordered(runtime, gpu_writes, "PROXYCCL_RDMA")
        dmabuf = None if runtime.name == "host" else functools.partial(runtime.dmabuf, ptr, nbytes)
        return self.register(ptr, nbytes, dmabuf, allocation=allocation)

    def _make(self, ptr: int, nbytes: int, dmabuf: DmaBuf | None, allocation: Hashable) -> Registration:
        api, refusal = self._device.api, ""
        if dmabuf is not None:
            try:
                made = self._make_dmabuf(nbytes, dmabuf)
            except api.PyverbsError as cause:
                # If the network device or the operating system refuses the DMA-BUF, the network device may still accept
                # the GPU's virtual addresses (peer memory).
                refusal = f"; {self._error('ibv_reg_dmabuf_mr', nbytes, 'a DMA-BUF', cause)}"
            else:
                if made is not None:
                    region, offset = made
                    return Registration(ptr, nbytes, offset, region.rkey, region.lkey, allocation, "dma-buf", region)
        kind = "host memory" if dmabuf is None else "a GPU's memory"
        try:
            region = api.MR(self._device.pd, nbytes, self._device.access, address=ptr)
        except api.PyverbsError as cause:
            error = self._error("ibv_reg_mr", nbytes, kind, cause)
            raise type(error)(f"{error}{refusal}") from cause
        how = "host" if dmabuf is None else "peer memory"
        return Registration(ptr, nbytes, ptr, region.rkey, region.lkey, allocation, how, region)

    def _make_dmabuf(self, nbytes: int, dmabuf: DmaBuf) -> tuple[Any, int] | None:
        given = dmabuf()
        if given is None:
            return None
        descriptor, offset = given
        try:
            # If pyverbs registers a DMA-BUF, requests name bytes by their offset in the DMA-BUF.
            return self._device.api.DmaBufMR(
                self._device.pd, nbytes, self._device.access, dmabuf=descriptor, offset=offset
            ), offset
        finally:
            os.close(descriptor)

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


class VerbsContext(RemoteDevice):
    """A rank's opened RDMA devices: one, or several of those that `RdmaOptions.devices` names. Each context has its own
    protection domains, so a device refuses the keys of other contexts.

    Attributes:
        devices: the opened devices.
        registrations_by_rail: the registrations of each device.

    Raises:
        ArgumentError: an option names a device, port, GID or MTU that is not available.
        RuntimeUnavailableError: no device can be used; the message says why.
    """

    options: RdmaOptions

    def __init__(self, setup: RemoteSetup, options: RdmaOptions) -> None:
        super().__init__(setup)
        self.options = options
        self.devices: list[VerbsDevice] = []
        with contextlib.ExitStack() as undo:
            devices, rank = rdma_devices(), setup.local_rank
            for choice in choose_devices(devices, options, setup.near, local_rank=rank, warn=setup.warn):
                self.devices.append(VerbsDevice(choice, options))
                undo.callback(self.devices[-1].close)
            self.registrations_by_rail = [Registrations(device) for device in self.devices]
            self.registrations: RegistrationCache = self.registrations_by_rail[0]
            if len(self.devices) > 1:
                self.registrations = RailRegistrations(self.registrations_by_rail)
                undo.callback(self.registrations.close)
            self._closing = undo.pop_all()  # closes all devices even if closing one fails

    @property
    def reads(self) -> bool:
        """Whether all devices support RDMA reads."""
        return all(device.reads for device in self.devices)

    def close(self) -> None:
        self._closing.close()
