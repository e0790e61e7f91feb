"""Ranks of one process that reach each other through fake devices of the verbs transport (verbs.py)."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from proxyccl.proxy.interface import EndpointInfo
from proxyccl.proxy.registrations import Registration, RegistrationCache, RemoteDevice
from proxyccl.proxy.remote_options import RdmaOptions, RemoteSetup
from proxyccl.proxy.transports import table, verbs
from proxyccl.proxy.transports.transport import RemoteFunctions
from support.fakes.verbs import FakeDevice, verbs_options

_SEND_DEPTH = 16


class FakeNetwork:
    """Replaces the verbs transport's devices by fake devices, one for each ordered pair of ranks. All devices know all
    memory keys. A device executes requests late; closing a device fails if a request violated a limit.

    Args:
        monkeypatch: restores the verbs transport after the test.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self._keys = itertools.count(1)
        self._memories: dict[int, tuple[int, int]] = {}  # key: (address, size)
        self._devices: list[FakeDevice] = []
        functions = RemoteFunctions(
            missing=lambda: "",
            open=lambda setup, _: _Opened(self, setup),
            make_endpoint=_Endpoint,
            refusal="{rank}: {reason}",
        )
        monkeypatch.setitem(table.TRANSPORTS, "verbs", replace(verbs.TRANSPORT, remote=functions))

    def register(self, address: int, nbytes: int) -> int:
        """Registers memory of this process with all devices. Returns its key."""
        with self._lock:
            key = next(self._keys)
            self._memories[key] = address, nbytes
            for device in self._devices:
                _tell(device, key, address, nbytes)
            return key

    def device(self) -> FakeDevice:
        """Returns a new device that knows all memory keys."""
        with self._lock:
            device = FakeDevice(_SEND_DEPTH, _SEND_DEPTH)
            device.dawdle(3, len(self._devices))
            for key, memory in self._memories.items():
                _tell(device, key, *memory)
            self._devices.append(device)
            return device

    def requests(self) -> int:
        """Returns the number of requests that the devices have executed."""
        return sum(device.counts.executed for device in self._devices)

    def close(self, device: FakeDevice) -> None:
        """Closes a device. Raises AssertionError if a request violated a limit."""
        with self._lock:
            self._devices.remove(device)
        with device:
            pass


def _tell(device: FakeDevice, key: int, address: int, nbytes: int) -> None:
    device.register(key, np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8))


class _Registrations(RegistrationCache):
    def __init__(self, network: FakeNetwork) -> None:
        super().__init__()
        self._network = network

    def register_of(self, runtime: Any, gpu_writes: str, ptr: int, nbytes: int, allocation: Any = None) -> Registration:
        key = self._network.register(ptr, nbytes)
        return Registration(ptr, nbytes, ptr, key, key)

    def unsupported_reason(self, runtime: Any, gpu_writes: str) -> str:
        return ""

    def release(self, registration: Registration) -> None:
        """Does nothing."""


class _Opened(RemoteDevice):
    options = RdmaOptions()

    def __init__(self, network: FakeNetwork, setup: RemoteSetup) -> None:
        super().__init__(setup)
        self.registrations = _Registrations(network)
        self.network, self.segment = network, setup.segment.host_ptr
        self.key = network.register(self.segment, setup.segment.nbytes)

    def close(self) -> None:
        """Does nothing."""


class _Endpoint:
    def __init__(self, opened: _Opened) -> None:
        self._network, self._device = opened.network, opened.network.device()
        self.info = EndpointInfo(b"", opened.segment, opened.key)

    def connect(self, theirs: EndpointInfo, timeout: float, given_up: Callable[[], bool]) -> Any:
        return verbs_options(
            self._device.qp,
            send_depth=_SEND_DEPTH,
            cq_depth=_SEND_DEPTH,
            max_message=4096,
            signal_rkey=theirs.rkey,
        )

    def close(self) -> None:
        self._network.close(self._device)
