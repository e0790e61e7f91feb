"""Options of RDMA: the device to use, and the behaviour of its queue pairs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

from proxyccl.device.arguments.integers import as_integer, find_integer
from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.environment_options import named_options
from proxyccl.proxy.gpu_writes import GPU_WRITES
from proxyccl.proxy.staging import STAGING_BYTES, STAGING_CHUNK

MTUS = (256, 512, 1024, 2048, 4096)
"""The valid path MTUs, in bytes."""

SIGNALS = ("auto", "write", "fetch_add")

_PREFIX = "PROXYCCL_RDMA_"
_RANGES = {
    "port": range(1, 255),
    "gid_index": range(1 << 16),
    "service_level": range(16),
    "traffic_class": range(256),
    "timeout": range(1, 32),
    "retry_count": range(8),
    "rnr_retry_count": range(8),
    "send_depth": range(2, 1 << 16),
    "staging_bytes": STAGING_BYTES,
    "staging_chunk": STAGING_CHUNK,
}
_CHOICES: dict[str, tuple[object, ...]] = {"mtu": MTUS, "signal": SIGNALS, "gpu_writes": GPU_WRITES}


@dataclass(frozen=True)
class RdmaOptions:
    """The RDMA device to use, and its settings. None selects a value that suits the machine.

    Attributes:
        device: name of the RDMA device, such as "mlx5_0"; None for the nearest (`choose_device`).
        port: number of its port; None for the nearest active one.
        gid_index: index of the port's GID to use; None for RoCE v2 with an IPv4 address if there is one.
        mtu: largest path MTU in bytes, one of 256, 512, 1024, 2048, 4096; None for the port's. A connection uses the
            smaller of its two endpoints'.
        service_level: InfiniBand's service level, or the priority of RoCE's frames, 0 to 15.
        traffic_class: traffic class of the packets' IP header, with the DSCP in its upper six bits; 0 to 255.
        timeout: exponent of the time after which an unacknowledged request is sent again, which is 4.096 µs ·
            2^timeout; 1 to 31. 14 is 67 ms. A device may wait a few times longer.
        retry_count: how often a request is sent again before the connection fails, 0 to 7; Soft-RoCE never gives up at
            7.
        rnr_retry_count: how often a request is sent again to a peer that has posted no receive, 0 to 7; 7 never gives
            up. RDMA writes and atomics need no receives.
        send_depth: work requests that a send queue holds, at least 2; fewer if the device's limit is lower.
        signal: how to advance a peer's counter: by an inline "write", by an atomic "fetch_add", or "auto" for a write
            if the device can, else a fetch-add.
        gpu_writes: "auto" to write to a GPU's memory only if the device says that it orders RDMA writes before signals
            in host memory; "ordered" if the caller promises it. Otherwise the transport is "staged".
        staging_bytes: bytes of pinned memory per peer and direction of the transport "staged", 4 KiB to 64 MiB; two
            ranks use the smaller of their values.
        staging_chunk: the most bytes of a put that are staged at a time, 64 bytes to 32 MiB; at most half of
            `staging_bytes`.

    Raises:
        ArgumentError: a value is out of range; the error names the field.
    """

    device: str | None = None
    port: int | None = None
    gid_index: int | None = None
    mtu: int | None = None
    service_level: int = 0
    traffic_class: int = 0
    timeout: int = 14
    retry_count: int = 6
    rnr_retry_count: int = 7
    send_depth: int = 256
    signal: str = "auto"
    gpu_writes: str = "auto"
    staging_bytes: int = 2 << 20
    staging_chunk: int = 256 << 10

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            _check(field.name, field.name, value, optional=field.default is None)
            if find_integer(value) is not None:
                object.__setattr__(self, field.name, find_integer(value))

    @classmethod
    def from_environment(cls, **arguments: Any) -> RdmaOptions:
        """Options from ``PROXYCCL_RDMA_DEVICE``, ``PROXYCCL_RDMA_PORT``, …; arguments that are not None take
        precedence.

        Raises:
            ArgumentError: a variable or an argument is out of range, and the error names it; or an argument is not the
                name of an option.
        """
        check = functools.partial(_check, optional=False)
        return cls(**named_options(cls, "RDMA", arguments, _PREFIX, ("device",), check))


def _check(field: str, shown: str, value: object, *, optional: bool) -> None:
    if optional and value is None:
        return
    if field == "device":
        if not isinstance(value, str) or not value:
            raise ArgumentError(shown, f"must be the name of an RDMA device, not {value!r}")
        return
    if field in _CHOICES:
        if (value if isinstance(value, str) else find_integer(value)) not in _CHOICES[field]:
            raise ArgumentError(shown, f"must be one of {', '.join(map(str, _CHOICES[field]))}, not {value!r}")
        return
    allowed = _RANGES[field]
    as_integer(value, shown, f"must be a whole number from {allowed[0]} to {allowed[-1]}", allowed[0], allowed[-1])
