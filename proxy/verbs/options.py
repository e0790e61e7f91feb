"""How RDMA is to be used: which device, and how its queue pairs behave."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

from proxyccl.device.errors import ArgumentError

MTUS = (256, 512, 1024, 2048, 4096)
"""What a path MTU can be, in bytes."""

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
    "staging_bytes": range(4096, (64 << 20) + 1),
    "staging_chunk": range(64, (32 << 20) + 1),
}
_CHOICES: dict[str, tuple[object, ...]] = {"mtu": MTUS, "signal": SIGNALS}


@dataclass(frozen=True)
class RdmaOptions:
    """How RDMA is to be used. None leaves a choice to what the machine offers.

    Attributes:
        device: name of the RDMA device, such as "mlx5_0"; None: the nearest (`choose_device`).
        port: its port's number; None: the nearest active one.
        gid_index: which of the port's GIDs it is reached by; None: RoCE v2 with an IPv4 address if there is one.
        mtu: largest path MTU in bytes, one of 256, 512, 1024, 2048, 4096; None: the port's. A connection uses the
            smaller one of its two ends.
        service_level: InfiniBand's service level, or the priority of RoCE's frames, 0 to 15.
        traffic_class: of the packets' IP header, with the DSCP in its upper six bits; 0 to 255.
        timeout: how long a request waits for its acknowledgement before it is sent again: 4.096 µs times two to this
            power, 1 to 31. 14 is 67 ms. A device may wait some times longer.
        retry_count: how often it is sent again before the connection fails, 0 to 7; to Soft-RoCE 7 is without end.
        rnr_retry_count: how often a request is sent again to a peer that has no receive posted, 0 to 7; 7 is without
            end. RDMA writes and atomics need no receives.
        send_depth: work requests that a send queue takes, from 2; fewer where the device has less.
        signal: how a peer's counter is advanced: by an inline "write", by an atomic "fetch_add", or "auto": by what
            the device can do, a write if it can do both.
        staging_bytes: pinned memory for each direction to each peer that the transport "staged" leads to, from 4 KiB to
            64 MiB; of two ranks that differ the smaller counts.
        staging_chunk: how much of a put goes through it at a time, from 64 bytes to 32 MiB; half of `staging_bytes` at
            the most.

    Raises:
        ArgumentError: a value that can't be, with the field's name.
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
    staging_bytes: int = 2 << 20
    staging_chunk: int = 256 << 10

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, field.name, getattr(self, field.name), optional=field.default is None)

    @classmethod
    def from_environment(cls, **arguments: Any) -> RdmaOptions:
        """The options that ``PROXYCCL_RDMA_DEVICE``, ``PROXYCCL_RDMA_PORT``, … name; arguments win where not None.

        Raises:
            ArgumentError: a variable or an argument is wrong, with its name; or an argument is no field.
        """
        named = {name: value for name, value in arguments.items() if value is not None}
        known = {field.name: field for field in fields(cls)}
        for name in named:
            if name not in known:
                raise ArgumentError(name, f"no option of RDMA; there are {', '.join(known)}")
        for name in known.keys() - named.keys():
            variable = _PREFIX + name.upper()
            text = os.environ.get(variable)
            if text:
                value: object = int(text) if text.isascii() and text.isdigit() else text
                if name == "device":
                    value = text
                _check(name, variable, value, optional=False)
                named[name] = value
        return cls(**named)


def _check(field: str, shown: str, value: object, *, optional: bool) -> None:
    if optional and value is None:
        return
    if field == "device":
        if not isinstance(value, str) or not value:
            raise ArgumentError(shown, f"must be the name of an RDMA device, not {value!r}")
        return
    if field in _CHOICES:
        if isinstance(value, bool) or value not in _CHOICES[field]:
            raise ArgumentError(shown, f"must be one of {', '.join(map(str, _CHOICES[field]))}, not {value!r}")
        return
    allowed = _RANGES[field]
    if not isinstance(value, int) or isinstance(value, bool) or value not in allowed:
        raise ArgumentError(shown, f"must be a whole number from {allowed[0]} to {allowed[-1]}, not {value!r}")
