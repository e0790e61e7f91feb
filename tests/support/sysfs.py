"""Makes directories like those in sysfs of the machines that `machines/*.txt` describe.

A line of a description is "NAME: node NUMA_NODE, pci BUS ADDRESS..., STATE LINK_LAYER RATE", where BUS is the number of
the host bridge and each ADDRESS is that of a bridge, or finally of the device. GPUs have no state, link layer and rate.
The line "nodes: ..." has the rows of distances between NUMA nodes.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path

_MACHINES = Path(__file__).with_name("machines")


def put(directory: Path, files: dict[str, str]) -> None:
    """Writes files, whose keys are paths below the directory."""
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def gid_files(index: int, address: str, kind: str = "", netdev: str = "") -> dict[str, str]:
    """Returns the files of a port that describe one GID."""
    written = ipaddress.IPv6Address(address).packed.hex(":", 2)
    files = {f"gids/{index}": written, f"gid_attrs/types/{index}": kind, f"gid_attrs/ndevs/{index}": netdev}
    return {name: text for name, text in files.items() if text}


def expand(machine: str, root: Path) -> dict[str, str]:
    """Makes the directories and files of a machine below `root`. Returns the PCI addresses of the machine's GPUs, by
    name.
    """
    gpus = {}
    for line in (_MACHINES / f"{machine}.txt").read_text().splitlines():
        name, _, text = line.partition(": ")
        if line.startswith("#"):
            continue
        if name == "nodes":
            for node, row in enumerate(text.split(" / ")):
                cores = f"{node * 8}-{node * 8 + 7}"
                put(root / f"devices/system/node/node{node}", {"distance": row, "cpulist": cores})
            continue
        node, pci, *port = text.split(", ")
        bus, *addresses = pci.split()[1:]
        device = root.joinpath("devices", f"pci0000:{bus}", *(f"0000:{address}" for address in addresses))
        put(device, {"numa_node": node.split()[1]})
        link = root / "bus/pci/devices" / device.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(device)
        if port:
            adapter = root / "class/infiniband" / name
            adapter.mkdir(parents=True)
            (adapter / "device").symlink_to(device)
            _put_port(adapter, *port[0].split())
        else:
            gpus[name] = device.name
    return gpus


def _put_port(adapter: Path, state: str, layer: str, rate: str) -> None:
    number = "4" if state == "active" else "1"
    port = {"state": f"{number}: {state.upper()}", "link_layer": layer, "rate": f"{rate} Gb/sec (4X NDR)"}
    put(adapter, {f"ports/1/{name}": text for name, text in port.items()})
    if layer == "Ethernet":
        put(adapter / "ports/1", gid_files(3, "::ffff:10.0.0.1", "RoCE v2", f"net_{adapter.name}"))
    else:
        put(adapter / "ports/1", gid_files(0, "fe80::1", "IB/RoCE v1"))
