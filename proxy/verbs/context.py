"""One rank's RDMA device and the device's registrations, which the transports `verbs` and `staged` share."""

from __future__ import annotations

import contextlib

from proxyccl.proxy.remote_setup import RemoteSetup
from proxyccl.proxy.staging import RemoteWriteTargets
from proxyccl.proxy.verbs.devices import choose_device, rdma_devices
from proxyccl.proxy.verbs.endpoint import VerbsDevice
from proxyccl.proxy.verbs.options import RdmaOptions
from proxyccl.proxy.verbs.registrations import Registrations


class VerbsContext:
    """An opened device with a separate protection domain, so that the device refuses the keys of other contexts.

    Attributes:
        device: the device.
        registrations: memory that is registered with the device.
        write_targets: memory that peers' staged puts may write.
        runtime, segment, signals: see `RemoteSetup`.
        options: the device's name and settings.

    Raises:
        ArgumentError: an option names something that does not exist.
        RuntimeUnavailableError: no device can be used; the message says why.
    """

    def __init__(self, setup: RemoteSetup, options: RdmaOptions) -> None:
        self.runtime = setup.runtime
        self.segment = setup.segment
        self.signals = setup.signals
        self.options = options
        self.write_targets = RemoteWriteTargets()
        choice = choose_device(rdma_devices(), options, setup.near, local_rank=setup.local_rank)
        self.device = VerbsDevice.open(choice, options)
        self.registrations = Registrations(self.device)

    def close(self) -> None:
        """Frees registrations and the device. Endpoints must be closed."""
        with contextlib.ExitStack() as steps:  # in reverse order, even if one fails
            steps.callback(self.device.close)
            steps.callback(self.registrations.close)
