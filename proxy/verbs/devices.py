"""Lists this machine's RDMA devices, chooses the nearest device, and names the missing requirements if no device can be
used.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from proxyccl.device.errors import ArgumentError, ProxyCCLError, RuntimeUnavailableError
from proxyccl.proxy.interface import issue_warning
from proxyccl.proxy.placement import NOWHERE, SYSFS, Nearness, NearnessTo, Place, nearest, numa_node_of, pci_path, read
from proxyccl.proxy.remote_options import MTUS, RdmaOptions
from proxyccl.proxy.verbs.address import LINK_LAYERS
from proxyccl.proxy.verbs.pyverbs_api import DEVICES, Pyverbs, load

_UsedGids = dict[int, list[tuple[int, str]]]  # for each port, the index and the text of each GID that is not empty


@dataclass(frozen=True)
class RdmaGid:
    """An address of a port.

    Attributes:
        index: the GID's index in the port's table.
        address: the GID as an IPv6 address; an IPv4 address looks like "::ffff:10.0.0.1".
        type: "RoCE v1", "RoCE v2" or "IB".
        netdev: name of the network interface that has the address; None on InfiniBand.
    """

    index: int
    address: str
    type: str
    netdev: str | None

    def __str__(self) -> str:
        return f"GID {self.index} {self.address} ({self.type})"


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA device. Attributes from pyverbs are None if pyverbs is missing or can't open the device.

    Attributes:
        number: the port's number, from 1.
        state: "active", "down", "init", "armed", …
        link_layer: "ethernet" or "infiniband".
        rate: data rate in Gbit/s; 0 if unknown.
        lid: local identifier on InfiniBand, otherwise 0.
        netdev: name of the port's network interface; None if the port has no interface.
        gids: the port's GIDs, by index.
        active_mtu: the link's MTU, in bytes (from pyverbs).
        max_message: maximum number of bytes of one work request (from pyverbs).
    """

    number: int
    state: str
    link_layer: str
    rate: float
    lid: int
    netdev: str | None
    gids: tuple[RdmaGid, ...]
    active_mtu: int | None = None
    max_message: int | None = None

    @property
    def best_gid(self) -> RdmaGid | None:
        """The default GID: a RoCE v2 GID with an IPv4 address, otherwise another RoCE v2 GID, otherwise the port's
        first GID; None if the port has no GID.
        """
        return min(self.gids, key=_gid_preference, default=None)

    def __str__(self) -> str:
        facts = [f"port {self.number} {self.state}", self.link_layer or "unknown link", f"{self.rate:g} Gbit/s"]
        if self.active_mtu is not None:
            facts.append(f"MTU {self.active_mtu}")
        if self.netdev is not None:
            facts.append(self.netdev)
        facts.append(str(self.best_gid or "no GID"))
        return ", ".join(facts)


@dataclass(frozen=True)
class RdmaDevice:
    """An RDMA device of this machine. Attributes from pyverbs are None if pyverbs is missing or can't open the device.

    Attributes:
        name: the device's name, such as "mlx5_0".
        guid: node GUID, in hexadecimal with colons.
        numa_node: the NUMA node that the device is attached to; None if unknown.
        ports: the device's ports, by number.
        atomics: whether the device supports fetch-and-add on a peer's memory (from pyverbs).
        max_queue_pairs: maximum number of queue pairs on the device (from pyverbs).
        max_work_requests: maximum number of work requests in one queue (from pyverbs).
        max_completions: maximum number of completions in one completion queue (from pyverbs).
        max_registrations: maximum number of memory registrations on the device (from pyverbs).
        max_registered_bytes: maximum number of bytes in one registration (from pyverbs).
        problem: the reason why pyverbs can't open the device; "" if pyverbs can open the device, or is missing.
        pci_path: the names of the PCI bridges from the host bridge to the device, and of the device; () if the device
            is not a PCI device.
    """

    name: str
    guid: str
    numa_node: int | None
    ports: tuple[RdmaPort, ...]
    atomics: bool | None = None
    max_queue_pairs: int | None = None
    max_work_requests: int | None = None
    max_completions: int | None = None
    max_registrations: int | None = None
    max_registered_bytes: int | None = None
    problem: str = ""
    pci_path: tuple[str, ...] = ()

    def port(self, number: int) -> RdmaPort:
        """Returns the port with this number.

        Raises:
            ArgumentError: the device has no such port.
        """
        for port in self.ports:
            if port.number == number:
                return port
        raise ArgumentError("port", f"{self.name} has no port {number}; it has {_listed(p.number for p in self.ports)}")


DevicePort = tuple[RdmaDevice, RdmaPort]


class DeviceChoice(NamedTuple):
    """A chosen device, the number of one of its ports, and the index of one of the port's GIDs."""

    device: RdmaDevice
    port: int
    gid_index: int


def rdma_devices(root: Path = SYSFS) -> list[RdmaDevice]:
    """Returns the RDMA devices of this machine, sorted by name.

    Most attributes are read from sysfs, which needs no privileges and no package; the other attributes come from
    pyverbs. pyverbs also lists all GIDs with one call, whereas sysfs has one file for each entry of a port's GID table,
    which may have a thousand entries.

    Args:
        root: the directory where sysfs is mounted. If the directory is not /sys, pyverbs is not used, because pyverbs
            lists only this machine's devices.
    """
    return list(_devices(root))


def _devices(root: Path) -> Iterator[RdmaDevice]:
    directory = root / DEVICES
    paths = sorted(directory.iterdir()) if directory.is_dir() else []
    api = None
    if paths and root == SYSFS:
        with contextlib.suppress(RuntimeUnavailableError):
            api = load()
    for path in paths:
        yield _read_device(path) if api is None else _ask_device(api, path)


def _ask_device(api: Pyverbs, path: Path) -> RdmaDevice:
    calls = "ibv_query_device, ibv_query_port or ibv_query_gid_table"
    try:
        with api.open(path.name) as context, api.calling(calls, path.name):
            limits = context.query_device()
            ports = {number: context.query_port(number) for number in _numbers(path / "ports")}
            table = context.query_gid_table(sum(port.gid_tbl_len for port in ports.values()))
    except ProxyCCLError as error:
        return replace(_read_device(path), problem=str(error))
    used: _UsedGids = {number: [] for number in ports}
    for gid in table:
        used[gid.port_num].append((gid.gid_index, gid.gid_str()))
    device = _read_device(path, used)
    return replace(
        device,
        ports=tuple(
            replace(port, active_mtu=MTUS[ports[port.number].active_mtu - 1], max_message=ports[port.number].max_msg_sz)
            for port in device.ports
        ),
        atomics=limits.atomic_caps != api.enumerator("IBV_ATOMIC_NONE"),
        max_queue_pairs=limits.max_qp,
        max_work_requests=limits.max_qp_wr,
        max_completions=limits.max_cqe,
        max_registrations=limits.max_mr,
        max_registered_bytes=limits.max_mr_size,
    )


# -- sysfs ---


def _number(text: str) -> int | None:
    try:
        return int(text, 0)
    except ValueError:
        return None


def _numbers(directory: Path) -> list[int]:
    """Returns the sorted names of a directory's entries that are numbers."""
    return sorted(int(name) for name in os.listdir(directory) if name.isdigit()) if directory.is_dir() else []


def _read_device(path: Path, used: _UsedGids | None = None) -> RdmaDevice:
    ports = ((number, path / "ports" / str(number)) for number in _numbers(path / "ports"))
    return RdmaDevice(
        name=path.name,
        guid=read(path / "node_guid"),
        numa_node=numa_node_of(path / "device"),
        pci_path=pci_path(path / "device"),
        ports=tuple(
            _read_port(port, number, _used_gids(port / "gids") if used is None else used[number])
            for number, port in ports
        ),
    )


def _read_port(path: Path, number: int, used: Iterable[tuple[int, str]]) -> RdmaPort:
    layer = read(path / "link_layer").lower()
    gids = tuple(_read_gids(path, layer, used))
    rate = read(path / "rate").partition(" ")[0]
    netdevs = [gid.netdev for gid in gids if gid.netdev is not None]
    return RdmaPort(
        number=number,
        state=read(path / "state").partition(": ")[2].lower() or "unknown",
        link_layer=layer,
        rate=float(rate) if rate.replace(".", "", 1).isdigit() else 0.0,
        lid=_number(read(path / "lid")) or 0,
        netdev=netdevs[0] if netdevs else _netdev_of(path.parent.parent, number),
        gids=gids,
    )


def _read_gids(port: Path, link_layer: str, used: Iterable[tuple[int, str]]) -> Iterable[RdmaGid]:
    for index, text in used:
        try:
            address = ipaddress.IPv6Address(text)
        except ValueError:
            continue
        kind = read(port / f"gid_attrs/types/{index}")
        if kind == "IB/RoCE v1":
            kind = "IB" if link_layer == "infiniband" else "RoCE v1"
        written = str(address) if address.ipv4_mapped is None else f"::ffff:{address.ipv4_mapped}"
        yield RdmaGid(index, written, kind, read(port / f"gid_attrs/ndevs/{index}") or None)


def _used_gids(table: Path) -> Iterable[tuple[int, str]]:
    for index in _numbers(table):
        text = read(f"{table}/{index}")
        if text.strip("0:"):
            yield index, text


def _netdev_of(device: Path, port: int) -> str | None:
    for path in sorted((device / "device/net").glob("*")):
        if _number(read(path / "dev_port")) == port - 1:
            return path.name
    return None


# -- choosing ---


def active_ports(devices: Iterable[RdmaDevice]) -> list[DevicePort]:
    """Returns the active ports that have GIDs."""
    return [(device, port) for device, port in _ports(devices) if _state(device, port) == "active"]


def choose_devices(
    devices: list[RdmaDevice],
    options: RdmaOptions,
    near: Place = NOWHERE,
    *,
    local_rank: int = 0,
    root: Path = SYSFS,
    warn: Callable[[str], None] = issue_warning,
) -> list[DeviceChoice]:
    """Chooses one device: the nearest of the ports that the options allow; of equally near ports, the fastest. Of the
    devices that `options.devices` names, chooses `options.rails` by the same rule, in the order of their names. Several
    ports that are equally near and fast are divided among a node's ranks (`nearest`).

    Named devices without an active port are left out with a warning, if another named device has an active port.

    By default the GID is the port's `best_gid`. Options override the choice of device, port and GID.

    Args:
        devices: the machine's devices (`rdma_devices`).
        options: the devices, the port and the GID to use; each may be None.
        near: the rank's place.
        local_rank: the rank's number on its node.
        root: the directory where sysfs is mounted, from which distances are read.
        warn: issues a warning with a text.

    Raises:
        ArgumentError: an option names a device, port or GID that does not exist or is not active; the message lists the
            devices, ports or GIDs that exist.
        RuntimeUnavailableError: no device has an active port.
    """
    nearness = NearnessTo(near, root)

    def distance(placed: DevicePort) -> tuple[Nearness, float]:
        device, port = placed
        return nearness(device.pci_path, device.numa_node), -port.rate

    option, names = "device", [options.device]
    if options.devices is not None:
        usable = {device.name for device, port in active_ports(devices) if options.port in (None, port.number)}
        left_out = [each for each in devices if each.name in options.devices and each.name not in usable]
        option, names = "devices", [*options.devices]
        if 0 < len(left_out) < len(names):
            names = [name for name in options.devices if all(name != each.name for each in left_out)]
            states = _states(left_out)
            warn(f"the option devices names RDMA devices that are left out, because they can't be used: {states}")
    ports = [nearest(_usable_ports(devices, options, option, name), distance, 1, local_rank)[0] for name in names]
    if len({port.link_layer for _, port in ports}) > 1:
        kinds = _listed(f"{device.name} ({port.link_layer})" for device, port in ports)
        raise ArgumentError(option, f"must have links of one kind, because InfiniBand can't reach RoCE, not {kinds}")
    chosen = []
    for device, port in nearest(ports, distance, options.rails, local_rank):
        assert port.best_gid is not None
        index = port.best_gid.index if options.gid_index is None else options.gid_index
        chosen.append(DeviceChoice(device, port.number, index))
    return chosen


def _usable_ports(devices: list[RdmaDevice], options: RdmaOptions, option: str, name: str | None) -> list[DevicePort]:
    """Returns the active ports that the options allow. `name` is the value of the option `option`, or one of its names;
    None for all devices.

    Of InfiniBand and RoCE ports, only the ports of one kind are returned, because ports of different kinds can't be
    connected. The chosen kind is the kind whose ports have the higher total rate, so that all hosts with the same
    adapters use the same kind.
    """
    if name is not None:
        names = _listed(device.name for device in devices)
        devices = [device for device in devices if device.name == name]
        if not devices:
            raise ArgumentError(option, f"no RDMA device {name!r}; there is {names}")
        if options.port is not None:
            devices[0].port(options.port)  # raises ArgumentError if the device lacks the port
    active = [(device, port) for device, port in active_ports(devices) if options.port in (None, port.number)]
    if not active:
        for argument, asked in ((option, name), ("port", options.port)):
            if asked is not None:
                raise ArgumentError(argument, f"{asked!r} has no active port; there is {_states(devices)}")
        raise RuntimeUnavailableError(f"no RDMA device has an active port; there is {_states(devices)}")
    index = options.gid_index
    having = [each for each in active if index is None or any(gid.index == index for gid in each[1].gids)]
    if not having:
        there = "; ".join(f"{device.name} port {port.number}: {_listed(port.gids)}" for device, port in active)
        raise ArgumentError("gid_index", f"no active port has a GID {index}; there is {there}")
    rates: dict[str, float] = {}
    for _, port in having:
        rates[port.link_layer] = rates.get(port.link_layer, 0) + port.rate
    kind = max(rates, key=lambda layer: (rates[layer], layer))
    return [(device, port) for device, port in having if port.link_layer == kind]


def _state(device: RdmaDevice, port: RdmaPort) -> str:
    if device.problem:
        return device.problem
    if port.link_layer not in LINK_LAYERS:  # EFA, which has no reliable connections
        return f"{port.state}, a link layer without reliable connections"
    return port.state if port.gids else f"{port.state}, no GID"


def _ports(devices: Iterable[RdmaDevice]) -> list[DevicePort]:
    return [(device, port) for device in devices for port in device.ports]


def _states(devices: Iterable[RdmaDevice]) -> str:
    return _listed(f"{device.name} port {port.number} ({_state(device, port)})" for device, port in _ports(devices))


def inactive_ports(root: Path = SYSFS) -> str | None:
    """If no RDMA port of this machine is active, returns a text with the ports and their states; otherwise None."""
    devices = []
    for device in _devices(root):  # stops at the first active port: every rank makes this check, so it must be fast
        if any(_state(device, port) == "active" for port in device.ports):
            return None
        devices.append(device)
    return _states(devices)


def _listed(things: Iterable[object]) -> str:
    return ", ".join(map(str, things)) or "none"


def _gid_preference(gid: RdmaGid) -> tuple[int, int]:
    address = ipaddress.IPv6Address(gid.address)
    if gid.type != "RoCE v2":
        return 3, gid.index
    return 0 if address.ipv4_mapped is not None else 2 if address.is_link_local else 1, gid.index
