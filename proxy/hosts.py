"""This machine's names: one that no other machine has, and the addresses at which others may reach it.

Containers have host names of their own, and are of one host all the same: what tells hosts apart is the boot id.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import os
import platform
import socket
import struct
from pathlib import Path

from proxyccl.device.errors import ArgumentError

_SIOCGIFADDR = 0x8915
_IPV6 = Path("/proc/net/if_inet6")


@functools.cache  # also where no descriptor is left to read it again
def boot_id() -> str:
    """A text that differs between machines and is the same in a machine's containers; "" if the system has none."""
    found = Path("/proc/sys/kernel/random/boot_id")
    return found.read_text().strip() if found.exists() else ""


def host_name() -> str:
    """This host's name for people, a slash, and a text that no other host has: the machine's boot id. With
    ``PROXYCCL_HOSTS=name`` the name belongs to it, so containers with names of their own are hosts of their own.

    Raises:
        ArgumentError: the variable has another value than "machine" or "name".
    """
    name, chosen = platform.node(), os.environ.get("PROXYCCL_HOSTS") or "machine"
    if chosen not in ("machine", "name"):
        raise ArgumentError("PROXYCCL_HOSTS", f"must be machine or name, not {chosen!r}")
    identity = boot_id() or name
    return f"{name}/{identity}/{name}" if chosen == "name" else f"{name}/{identity}"


def told_apart_by(host: str) -> str:
    """The value of ``PROXYCCL_HOSTS`` with which a `host_name` was made."""
    return "name" if host.count("/") > 1 else "machine"


def same_host(one: str, other: str) -> bool:
    """Whether two of `host_name` are of one host, whatever it is called in a container."""
    return one.partition("/")[2] == other.partition("/")[2]


def host_addresses() -> list[str]:
    """This host's addresses that other hosts may reach, IPv4 first; those of the loopback if there are no others."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without such an address
                request = struct.pack("256s", name.encode()[:15])
                found.append(socket.inet_ntoa(fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, request)[20:24]))
    found += _ipv6_addresses()
    return [address for address in found if not ipaddress.ip_address(address).is_loopback] or found


def _ipv6_addresses() -> list[str]:
    """The addresses that are valid beyond one link, and the loopback's."""
    if not _IPV6.exists():
        return []
    lines = (line.split() for line in _IPV6.read_text().splitlines())
    addresses = (ipaddress.IPv6Address(bytes.fromhex(fields[0])) for fields in lines)
    return [str(address) for address in addresses if not address.is_link_local]
