"""Finds the kernel modules that the virtual machine loads, in load order."""

from __future__ import annotations

import lzma
from pathlib import Path

from support.packages.debian import UnavailableError

MODULES = (
    *("virtio_pci", "virtio_console", "virtio_net"),
    *("9p", "9pnet_virtio", "overlay"),
    *("veth", "sch_netem"),
    *("rdma_rxe", "ib_uverbs", "rdma_ucm"),
    *("crc32_generic", "crc32_pclmul"),  # rdma_rxe requests CRC-32 by name, not as a dependency
)
PLACES = (
    *("./boot/vmlinuz-*", "*/modules.builtin"),
    *(
        f"*/kernel/{folder}"
        for folder in ("arch", "crypto", "drivers/infiniband", "drivers/virtio", "fs", "lib", "net")
    ),
    *(f"*/kernel/drivers/{name}*" for name in ("char/virtio", "net/net_failover", "net/veth", "net/virtio_net")),
)
"""Patterns of the paths of the image, the modules and their dependencies in a kernel's package, a third of the
package.
"""


def named(path_or_name: str) -> str:
    """Returns the kernel's name of a module, which is the file's name with underscores for dashes."""
    return Path(path_or_name).name.split(".ko")[0].replace("-", "_")


def contents(path: Path) -> bytes:
    """Returns the uncompressed contents of a module's file."""
    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()


def dependencies(module: bytes) -> list[str]:
    """Returns the names of the modules that a module depends on, from the .modinfo section."""
    start = module.index(b"\0depends=") + len(b"\0depends=")
    return [name for name in module[start : module.index(b"\0", start)].decode().split(",") if name]


def in_load_order(tree: Path) -> dict[str, bytes]:
    """Returns MODULES and their dependencies by name, in load order. `tree` is the kernel's directory
    lib/modules/VERSION. Raises UnavailableError if a module is missing.
    """
    files = {named(path.name): path for path in tree.rglob("*.ko*")}
    built_in = {named(line) for line in (tree / "modules.builtin").read_text().splitlines()}
    found: dict[str, bytes] = {}

    def add(name: str) -> None:
        if name in built_in or name in found:
            return
        if name not in files:
            raise UnavailableError(f"the kernel {tree.name} has no module {name}")
        module = contents(files[name])
        for dependency in dependencies(module):
            add(named(dependency))
        found[name] = module

    for name in MODULES:
        add(name)
    return found
