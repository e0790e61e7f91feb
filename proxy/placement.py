"""Measures, by sysfs, how near this machine's network devices are to a GPU or a NUMA node."""

from __future__ import annotations

import bisect
import itertools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from proxyccl.proxy.processes import parse_cores

SYSFS = Path("/sys")
T = TypeVar("T")
_HOST_BRIDGE = re.compile("pci[0-9a-f]{4,}:[0-9a-f]{2}")


class Place(NamedTuple):
    """A rank's place on its machine."""

    gpu: str | None = None  # the PCI address of the rank's GPU in the form of sysfs, or None
    # The NUMA node to whose cores the rank's process is bound, or None. The node counts only if sysfs does not know the
    # NUMA node of the GPU.
    node: int | None = None


NOWHERE = Place()
"""A place to which all devices are equally near."""

SAME_SWITCH, SAME_NODE, OTHER_NODE, UNKNOWN = range(4)
KINDS = ("same PCIe switch", "same NUMA node", "other NUMA node", "unknown place")


class Nearness(NamedTuple):
    """How near a device is to a place; nearer devices have smaller values."""

    kind: int  # the index in `KINDS`
    # For PCI devices below one switch, the number of bridges and devices on the way; between NUMA nodes, the distance
    # that the firmware reports; otherwise 0.
    distance: int


class NearnessTo:
    """Measures how near devices are to a place.

    Args:
        near: the place.
        root: the directory where sysfs is mounted.
    """

    def __init__(self, near: Place, root: Path = SYSFS) -> None:
        gpu = root / "bus/pci/devices" / (near.gpu or "")
        self._path, own = pci_path(gpu), numa_node_of(gpu)
        node = near.node if own is None else own
        self._unplaced = not self._path and node is None
        self._distances: dict[int, int] = {}
        if node is not None:
            texts = read(root / f"devices/system/node/node{node}/distance").split()
            self._distances = dict(zip(numa_nodes(root), map(int, texts), strict=False)) | {node: 0}

    def adapter(self, directory: Path) -> Nearness:
        """Returns the nearness of a network adapter, given its directory in sysfs, such as /sys/class/net/eth0."""
        return self(pci_path(directory / "device"), numa_node_of(directory / "device"))

    def __call__(self, path: tuple[str, ...], node: int | None) -> Nearness:
        """Returns the nearness of a device, given its `pci_path` and its NUMA node."""
        if self._unplaced:
            return Nearness(UNKNOWN, 0)
        distance = None if node is None else self._distances.get(node)
        pairs = zip(self._path, path, strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if common > 1:
            return Nearness(SAME_SWITCH, len(self._path) + len(path) - 2 * common)
        if common == 1 and not distance:  # a virtual machine may show all devices of all NUMA nodes below one bridge
            return Nearness(SAME_NODE, 0)
        if distance is None:
            return Nearness(UNKNOWN, 0)
        return Nearness(OTHER_NODE, distance) if distance else Nearness(SAME_NODE, 0)


def nearest(devices: Sequence[T], how_near: Callable[[T], Any], count: int, local_rank: int) -> list[T]:
    """Returns the `count` devices with the smallest distances `how_near`, or all if there are fewer, in their order in
    `devices`. If more devices than needed are equally near, the ranks of a host divide the devices: a rank uses the
    devices that follow its nearer device, or, without a nearer device, those at its turn by its number `local_rank`.
    """
    distances = [how_near(device) for device in devices]
    chosen: list[int] = []
    for distance in sorted(set(distances)):
        equals = [i for i, each in enumerate(distances) if each == distance]
        needed = min(count - len(chosen), len(equals))
        first = bisect.bisect(equals, chosen[-1]) if chosen else local_rank * needed
        chosen += [equals[(first + i) % len(equals)] for i in range(needed)]
    return [devices[i] for i in sorted(chosen)]


def pci_path(device: Path) -> tuple[str, ...]:
    """Returns the names of a PCI device's host bridge, of the bridges between the host bridge and the device, and of
    the device. Returns () for another kind of device. `device` is the device's directory in sysfs, or a link to it.
    """
    parts = Path(os.path.realpath(device)).parts
    return next((parts[i:] for i, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)), ())


def numa_node_of(device: Path) -> int | None:
    """Returns a device's NUMA node; None if unknown."""
    try:
        node = int(read(device / "numa_node"))
    except ValueError:
        return None
    return node if node >= 0 else None


def read(path: Path | str) -> str:
    """Returns the text of a file in sysfs; "" if the file is absent or can't be read, as for an empty GID."""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def numa_nodes(root: Path = SYSFS) -> list[int]:
    """Returns the numbers of the machine's NUMA nodes."""
    return sorted(int(path.name[4:]) for path in (root / "devices/system/node").glob("node[0-9]*"))


def process_numa_node(root: Path = SYSFS) -> int | None:
    """Returns the NUMA node to whose cores this process is bound; None if the process may run on several nodes."""
    allowed = os.sched_getaffinity(0)
    for node in numa_nodes(root):
        cpus = read(root / f"devices/system/node/node{node}/cpulist")
        if cpus and allowed <= set(parse_cores(cpus)):
            return node
    return None
