"""How data moves between two agents: which path, and the socket that carries what the path does not."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterable

from msgspec import Struct

from proxyccl.channels.transfers.errors import DisconnectedError
from proxyccl.channels.transfers.metadata import Place
from proxyccl.device.memory.descriptors import naming_exhaustion
from proxyccl.proxy._transfers import ffi, lib
from proxyccl.proxy.hosts import host_addresses

_KEEP_ALIVE = {  # a host that lost its power or its network stays silent
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 20_000,
}
_UNIX_BUFFER_BYTES = 1 << 20
_CREDENTIALS = struct.Struct("3i")


class Path(Struct, frozen=True):
    """How data moves to and from a peer.

    Attributes:
        name: "self", within the agent; "process_vm", copied once by the kernel; "unix" or "tcp", through the socket;
            `device_path` names those of devices.
        reason: why a faster path between agents of one host does not serve; "" if none is faster.
    """

    name: str
    reason: str = ""


def device_path(by: str, ways: Iterable[str], unpinned: str = "") -> Path:
    """The path of a transfer that a device copies, such as "copy engine (IPC)".

    Args:
        by: what copies: "copy engine", "kernel", or "copy engine and kernel".
        ways: how it reaches memory that is not its own process's device memory.
        unpinned: why it copies the host's memory by way of the driver's own buffers; "" if it does not.
    """
    named = sorted({way for way in ways if way} | ({"staged by the driver"} if unpinned else set()))
    return Path(f"{by} ({', '.join(named)})" if named else by, unpinned)


class Connected(Struct, frozen=True):
    """A socket to a peer, for the engine.

    Attributes:
        socket: its descriptor, which the engine takes over.
        process: a pidfd, likewise, or -1.
        pid: the process to copy from and to, or 0.
        path: the path that this makes.
    """

    socket: int
    process: int
    pid: int
    path: Path


def unix_address(token: bytes) -> bytes:
    """The Unix socket of an agent. The name is abstract, so it leaves no file, and only metadata contain it."""
    return b"\0proxyccl-agent-" + token.hex().encode()


def listen(token: bytes, addresses: list[str] | None) -> tuple[list[socket.socket], list[tuple[str, int]]]:
    """Sockets that listen, and the addresses of those for other hosts.

    Args:
        token: names the Unix socket.
        addresses: of this host; None: all that other hosts may reach.

    Raises:
        OSError: this host does not have such an address.
        ResourceError: there are too few descriptors.
    """
    with contextlib.ExitStack() as undo, naming_exhaustion("an agent's sockets"):
        local = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        local.bind(unix_address(token))
        local.listen(1024)
        listeners, found = [local], []
        if addresses is None:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            every = undo.enter_context(socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=dual))
            listeners.append(every)
            found = [(address, every.getsockname()[1]) for address in host_addresses()]
        for address in addresses or []:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            one = undo.enter_context(socket.create_server((address, 0), family=family, backlog=1024))
            listeners.append(one)
            found.append((address, one.getsockname()[1]))
        for listener in listeners:
            listener.setblocking(False)
        undo.pop_all()
    return listeners, found


def connect(peer: str, place: Place, timeout: float) -> Connected:
    """Connects to an agent: by its Unix socket if it is on this host, else by TCP.

    Raises:
        DisconnectedError: it does not answer within the time, in seconds.
        ResourceError: there are too few descriptors.
    """
    deadline = time.monotonic() + timeout
    with naming_exhaustion(f"the link to agent {peer}"):
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            local.settimeout(timeout)
            local.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
            local.connect(unix_address(place.token))
        except (ConnectionError, TimeoutError):
            local.close()
        except OSError:
            local.close()
            raise
        else:
            return _on_this_host(local, place)
        failures = ["there is no such agent on this host"]
        for address, port in place.addresses:
            try:
                remote = socket.create_connection((address, port), max(0.001, deadline - time.monotonic()))
            except OSError as error:
                failures.append(f"{address} port {port}: {error.strerror or error}")
                continue
            for option, value in _KEEP_ALIVE.items():
                remote.setsockopt(*option, value)
            remote.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            remote.setblocking(False)
            return Connected(remote.detach(), -1, 0, Path("tcp"))
    raise DisconnectedError(f"agent {peer} can't be reached: {'; '.join(failures)}", peer)


def _on_this_host(local: socket.socket, place: Place) -> Connected:
    pid, _, _ = _CREDENTIALS.unpack(local.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    reason, process = _why_not_copied(pid, place), -1
    if pid > 0:
        # A socket alone would not tell of the peer's end while a fork's child of it has a copy.
        with contextlib.suppress(ProcessLookupError, OSError):
            process = os.pidfd_open(pid)
    local.setblocking(False)
    path = Path("unix", reason) if reason else Path("process_vm")
    return Connected(local.detach(), process, 0 if reason else pid, path)


def _why_not_copied(pid: int, place: Place) -> str:
    """Why the kernel can't copy from and to the peer's process; "" if it can."""
    if pid <= 0:
        return "its process is not visible in this PID namespace"
    seen = ffi.new("char[]", lib.PROXYCCL_SECRET_BYTES)
    error = lib.proxyccl_process_read(pid, place.secret_address, seen, len(seen))
    if error:
        return f"process_vm_readv: {os.strerror(error)} (/proc/sys/kernel/yama/ptrace_scope, CAP_SYS_PTRACE, seccomp)"
    return "" if bytes(ffi.buffer(seen)) == place.secret else "its process has another number here"
