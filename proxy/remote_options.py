"""The options of the transports between hosts, and the description of the rank for which the transports' devices are
opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from msgspec import Struct, field

from proxyccl.device.arguments.integers import as_integer, find_integer
from proxyccl.device.environment import OLD_VARIABLES
from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import PinnedMemory, Runtime
from proxyccl.proxy._engine import lib
from proxyccl.proxy.interface import issue_warning
from proxyccl.proxy.placement import Place

MTUS = (256, 512, 1024, 2048, 4096)
"""The valid path MTUs, in bytes."""

MOST_WIRES: int = lib.PROXYCCL_STAGED_WIRES
"""The highest number of links (wires) of a staged connection."""

_LEAST_NAMES, _MOST_NAMES = 2, 32  # the numbers of devices or interfaces of which a rank uses the nearest
_NAME = r"[^\s,=^]+"
_NAMES = rf"\^?=?{_NAME}(,{_NAME})*"

_RANGES = {
    "rails": range(1, lib.PROXYCCL_RAILS + 1),
    "port": range(1, 255),
    "gid_index": range(1 << 16),
    "service_level": range(16),
    "traffic_class": range(256),
    "timeout": range(1, 32),
    "retry_count": range(8),
    "rnr_retry_count": range(8),
    "send_depth": range(2, 1 << 16),
    "depth": range(2, 4097),
    "staging_bytes": range(4096, (64 << 20) + 1),
    "staging_chunk": range(64, (32 << 20) + 1),
    "streams": range(1, MOST_WIRES + 1),
}


@dataclass(frozen=True)
class _FromEnvironment:
    """Base class of sets of options, which are checked, and which an environment variable can set. A field that is not
    in `_RANGES` or `_choices` is a name; `interface` and the second of `_names` list names.
    """

    _owner: ClassVar[str]
    _variable: ClassVar[str]
    _name: ClassVar[str]  # a description of valid texts, for errors
    _names: ClassVar[tuple[str, str]]  # the options that name one adapter and several adapters; at most one is set
    _choices: ClassVar[dict[str, tuple[object, ...]]]

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None or each.default is not None:
                object.__setattr__(self, each.name, self._checked(each.name, each.name, value))
        one, several = self._names
        if getattr(self, one) is not None and getattr(self, several) is not None:
            raise ArgumentError(several, f"must be None, because {one} is {getattr(self, one)!r}")

    @classmethod
    def _checked(cls, option: str, shown: str, value: object) -> object:
        if option == cls._names[1]:
            listed = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
            names = tuple(listed) if isinstance(listed, Sequence) else ()  # the order of a set is not the user's
            valid = all(isinstance(name, str) and re.fullmatch(_NAME, name) for name in names)
            if not valid or not _LEAST_NAMES <= len(names) <= _MOST_NAMES or len(set(names)) < len(names):
                expected = f"a list of {_LEAST_NAMES} to {_MOST_NAMES} names of different {option}"
                raise ArgumentError(shown, f"must be {expected}, not {value!r}")
            return names
        if option in _RANGES:
            lowest, highest = _RANGES[option][0], _RANGES[option][-1]
            return as_integer(value, shown, f"must be a whole number from {lowest} to {highest}", lowest, highest)
        if option in cls._choices:
            chosen = value if isinstance(value, str) else find_integer(value)
            if chosen not in cls._choices[option]:
                raise ArgumentError(shown, f"must be one of {', '.join(map(str, cls._choices[option]))}, not {value!r}")
            return chosen
        text = ",".join(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else ""
        if not re.fullmatch(_NAMES if option == "interface" else _NAME, text):
            raise ArgumentError(shown, f"must be {cls._name}, not {value!r}")
        return text

    @classmethod
    def from_environment(cls, **arguments: Any) -> Self:
        """Reads options from the environment variable ``PROXYCCL_RDMA`` or ``PROXYCCL_FABRIC``, which lists options and
        values, such as ``device=mlx5_0,mtu=4096``. A part without "=" continues the value before it, as in
        ``interface=eth0,eth1``. An option that the variable does not list may be set by a separate, older variable,
        such as ``PROXYCCL_RDMA_PORT``. Arguments that are not None take precedence; an argument that names adapters
        replaces all names of adapters in the environment.

        Raises:
            ArgumentError: a variable or an argument is out of range, and the error names it; or an argument, or a name
                in the variable, is not the name of an option.
        """
        named = {name: value for name, value in arguments.items() if value is not None}
        known = [each.name for each in fields(cls)]
        for name in named:
            if name not in known:
                raise ArgumentError(name, f"unknown option of {cls._owner}; expected one of {', '.join(known)}")
        given, listed = set(named), cls._listed(known)
        for name in known:
            group = cls._names if name in cls._names else (name,)
            if not given.isdisjoint(group):
                continue
            older = f"{cls._variable}_{name.upper()}"
            shown, text = f"{cls._variable}: {name}", listed.get(name)
            if older in OLD_VARIABLES and listed.keys().isdisjoint(group):
                shown, text = older, os.environ.get(older) or None
            if text is not None:
                is_number = (name in _RANGES or name == "mtu") and text.isascii() and text.isdigit()
                named[name] = cls._checked(name, shown, int(text) if is_number else text)
        return cls(**named)

    @classmethod
    def _listed(cls, known: list[str]) -> dict[str, str]:
        """Returns the texts of the options that the variable lists."""
        listed: dict[str, str] = {}
        name = ""
        variable = os.environ.get(cls._variable)
        for part in variable.split(",") if variable else ():
            option, equals, text = (piece.strip() for piece in part.partition("="))
            if name and not equals:
                listed[name] += f",{option}"
            elif option in known and option not in listed:
                name, listed[option] = option, text
            else:
                reason = "is listed twice" if option in listed else f"is unknown; expected one of {', '.join(known)}"
                raise ArgumentError(cls._variable, f"must be a list of OPTION=VALUE; {option!r} {reason}")
        return listed


@dataclass(frozen=True)
class RdmaOptions(_FromEnvironment):
    """The RDMA device to use, and its settings. For an option that is None, ProxyCCL selects a value that suits the
    machine.

    Attributes:
        device: name of the RDMA device, such as "mlx5_0"; None for the nearest (`choose_devices`).
        devices: names of 2 to 32 RDMA devices, of which a rank uses the `rails` that are nearest to its GPU or NUMA
            node; None for one device. Long puts and gets are divided between the rank's devices by the rates of their
            ports. The first devices of two ranks are connected with each other, the second devices, and so on, so the
            order of the names matters if the devices are on separate networks. If a device or its link fails, the other
            devices carry all data; this needs signals by "write", and devices that support RDMA reads. A device without
            an active port when the rank opens its devices is left out with a warning, and the devices after it move up.
        rails: number of the `devices` that a rank uses, 1 to 8.
        port: number of the device's port; None for the nearest active port.
        gid_index: index of the port's GID to use; None to choose a GID of RoCE v2 with an IPv4 address if there is one.
        mtu: largest path MTU in bytes, one of 256, 512, 1024, 2048, 4096; None for the port's MTU. A connection uses
            the smaller MTU of its two endpoints.
        service_level: the InfiniBand service level, or the priority of RoCE's frames, 0 to 15.
        traffic_class: traffic class of the packets' IP header, with the DSCP in its upper six bits; 0 to 255.
        timeout: exponent, from 1 to 31, of the time after which an unacknowledged request is sent again: 4.096 µs ·
            2^timeout. An exponent of 14 means 67 ms. The actual wait may be a few times longer.
        retry_count: how often a request is sent again before the connection fails, 0 to 7; with 7, Soft-RoCE never
            gives up.
        rnr_retry_count: how often a request is sent again to a peer that has posted no receive, 0 to 7; with 7, the
            device never gives up. RDMA writes and atomics need no receives.
        send_depth: work requests that a send queue holds, at least 2; fewer if the device's limit is lower.
        signal: how to advance a peer's counter: "write" by an inline write, "fetch_add" by an atomic operation, "auto"
            by a write if the device supports inline data, else by a fetch-add.
        gpu_writes: "auto" to write to a GPU's memory only if the device says that it orders RDMA writes before signals
            in host memory; "ordered" if the caller promises this order. With "auto", the transport is "staged" if the
            device does not say that it keeps this order.
        staging_bytes: bytes of pinned memory per peer and direction of the transport "staged", 4 KiB to 64 MiB; two
            ranks use the smaller of their values.
        staging_chunk: maximum number of bytes of a put that are staged at a time, 64 bytes to 32 MiB; at most half of
            `staging_bytes`.

    Raises:
        ArgumentError: a value is out of range; the error names the field.
    """

    device: str | None = None
    devices: tuple[str, ...] | None = None
    rails: int = 2
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

    _owner, _name = "RDMA", "the name of an RDMA device"
    _names = "device", "devices"
    _variable = "PROXYCCL_RDMA"
    _choices = {  # noqa: RUF012  the base class declares a ClassVar
        "mtu": MTUS,
        "signal": ("auto", "write", "fetch_add"),
        "gpu_writes": ("auto", "ordered"),
    }


@dataclass(frozen=True)
class FabricOptions(_FromEnvironment):
    """The libfabric provider to use, and its settings.

    Attributes:
        provider: the provider's name, such as "efa", "cxi" or "tcp;ofi_rxm", or a part of the name between semicolons,
            such as "tcp"; None for the first provider, in libfabric's order of preference, that reaches other hosts
            (`choose_offers`).
        interface: the interfaces to use, as a comma-separated list of prefixes of libfabric's domain names, such as
            "eth0" or "rdmap0s6". A leading "=" means that the list has whole names; a leading "^" or "^=" means that
            the list has prefixes or whole names to exclude. None for any interface except the loopback.
        interfaces: names of 2 to 32 interfaces, each a domain name or its prefix, of which a rank uses the `rails` that
            are nearest to its GPU or NUMA node; None for one interface. Long puts and gets are divided between the
            rank's interfaces by the rates of their links. The first interfaces of two ranks are connected with each
            other, the second interfaces, and so on, so the order of the names matters if the interfaces are on separate
            networks. All ranks must use the same number of interfaces. If an interface or its link fails, the other
            interfaces carry all data; this needs the provider "tcp" of libfabric 1.18 or later, or "net", and data that
            is not staged. Transfers of agents are divided between the interfaces too.
        rails: number of the `interfaces` that a rank uses, 1 to 8.
        depth: maximum number of outstanding writes of a connection, 2 to 4096; fewer if the provider takes fewer.
        signal: when a signal is written: with "ordered" right after its data, which needs a provider that keeps the
            order of writes; with "delivered" once its data has been delivered. "auto" is "ordered" if the provider
            supports that, else "delivered". With "auto", a provider that stores each message in order gets the data and
            the signal in one message.
        gpu_writes: "auto" to write to a GPU's memory only if the device says that it orders RDMA writes before signals
            in host memory; "ordered" if the caller promises this order. With "auto", the transport is "staged_fabric"
            if the device does not say that it keeps this order.
        staging_bytes: bytes of pinned memory per peer and direction of the transport "staged_fabric", 4 KiB to 64 MiB;
            two ranks use the smaller of their values. None means 4 MiB, or 2 MiB for each stream if there are several
            streams; a rank with many peers uses less.
        staging_chunk: maximum number of bytes of a put that are staged at a time, 64 bytes to 32 MiB; at most half of
            `staging_bytes`.
        streams: number of connections over which staged data goes to a peer, each served by a separate thread, 1 to 16;
            two ranks use the smaller of their values. None means 1 if the provider is not based on sockets, else the
            rank's share of half of the machine's cores.

    Raises:
        ArgumentError: a value is out of range; the error names the field.
    """

    provider: str | None = None
    interface: str | None = None
    interfaces: tuple[str, ...] | None = None
    rails: int = 2
    depth: int = 256
    signal: str = "auto"
    gpu_writes: str = "auto"
    staging_bytes: int | None = None
    staging_chunk: int = 512 << 10
    streams: int | None = None

    _owner, _name = "the fabric", "a name"
    _names = "interface", "interfaces"
    _variable = "PROXYCCL_FABRIC"
    _choices = {  # noqa: RUF012  the base class declares a ClassVar
        "signal": ("auto", "ordered", "delivered"),
        "gpu_writes": ("auto", "ordered"),
    }


class TransportOptions(Struct, frozen=True):
    """A rank's options for the transports between hosts."""

    # Options of the RDMA device, for the transports `verbs` and `staged`.
    rdma: RdmaOptions = field(default_factory=RdmaOptions)
    # Options of libfabric, for the transports `fabric` and `staged_fabric`.
    fabric: FabricOptions = field(default_factory=FabricOptions)


class RemoteSetup(Struct, frozen=True):
    """The rank for which a device is opened."""

    runtime: Runtime  # the runtime whose device memory peers access
    segment: PinnedMemory  # the rank's control segment
    signals: range  # byte range, in the control segment, of the words that peers' proxies may signal
    near: Place  # the place that the device should be near
    local_rank: int  # the rank's number on its host
    core_share: int  # cores that the rank's threads may keep busy
    warn: Callable[[str], None] = issue_warning  # issues a warning with a text in the rank's process
