"""Determines this machine's unique name, and the addresses at which other machines may reach this machine.

Containers of one host have different host names, so hosts are identified by their boot ids.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import ipaddress
import os
import platform
import socket
import struct
import sys
from pathlib import Path

from proxyccl.device.errors import ArgumentError

_SIOCGIFADDR, _SIOCGIFFLAGS = 0x8915, 0x8913
_IFF_RUNNING = 0x40
_IPV6 = Path("/proc/net/if_inet6")


@functools.cache  # cached, so that a call succeeds even when descriptors have run out
def boot_id() -> str:
    """Returns the machine's boot id, which all containers of the machine share; "" if the system has no boot id."""
    found = Path("/proc/sys/kernel/random/boot_id")
    return found.read_text().strip() if found.exists() else ""


def host_name() -> str:
    """Returns "<name>/<boot id>", or "<name>/<name>" if there is no boot id. With ``PROXYCCL_HOSTS=name`` the result is
    "<name>/<boot id>/<name>", so containers with different names are different hosts.

    Raises:
        ArgumentError: ``PROXYCCL_HOSTS`` is neither "machine" nor "name".
    """
    name, chosen = platform.node(), os.environ.get("PROXYCCL_HOSTS") or "machine"
    if chosen not in ("machine", "name"):
        raise ArgumentError("PROXYCCL_HOSTS", f"must be machine or name, not {chosen!r}")
    identity = boot_id() or name
    return f"{name}/{identity}/{name}" if chosen == "name" else f"{name}/{identity}"


def told_apart_by(host: str) -> str:
    """Returns the value that ``PROXYCCL_HOSTS`` had when `host_name` returned `host`."""
    return "name" if host.count("/") > 1 else "machine"


def same_host(one: str, other: str) -> bool:
    """Whether two results of `host_name` denote the same host. Only the texts after the first slash are compared."""
    return one.partition("/")[2] == other.partition("/")[2]


def host_addresses() -> list[str]:
    """Returns the addresses at which other hosts may reach this host, IPv4 first; loopback addresses if there are no
    other addresses.
    """
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface may have no IPv4 address
                request = struct.pack("256s", name.encode()[:15])
                found.append(socket.inet_ntoa(fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, request)[20:24]))
    found += _ipv6_addresses()
    return [address for address in found if not ipaddress.ip_address(address).is_loopback] or found


def is_running(interface: str) -> bool:
    """Returns whether a network interface is up and its link has a carrier; True if the system does not say. Does not
    read sysfs, which may show the interfaces of another network namespace.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
            answer = fcntl.ioctl(asker.fileno(), _SIOCGIFFLAGS, struct.pack("256s", interface.encode()[:15]))
    except OSError as error:
        return error.errno != errno.ENODEV
    return bool(int.from_bytes(answer[16:18], sys.byteorder) & _IFF_RUNNING)


def _ipv6_addresses() -> list[str]:
    if not _IPV6.exists():
        return []
    lines = (line.split() for line in _IPV6.read_text().splitlines())
    addresses = (ipaddress.IPv6Address(bytes.fromhex(fields[0])) for fields in lines)
    return [str(address) for address in addresses if not address.is_link_local]
