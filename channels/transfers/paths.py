"""How data moves between two agents: which path, and the socket that carries what the path does not."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import socket
import struct
import time
from collections.abc import Iterable, Sequence

from msgspec import Struct

from proxyccl.channels.transfers.errors import DisconnectedError
from proxyccl.channels.transfers.metadata import Place
from proxyccl.channels.transfers.regions import VRAM
from proxyccl.device.errors import ArgumentError
from proxyccl.device.memory.descriptors import naming_exhaustion
from proxyccl.proxy._transfers import ffi, lib
from proxyccl.proxy.connecting import NoAddressError, connect_to_any
from proxyccl.proxy.hosts import boot_id, host_addresses

_TCP_OPTIONS = {
    # An answer would otherwise wait until the one before is acknowledged, which takes the other side 40 ms.
    (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
    # A host that lost its power or its network stays silent.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 20_000,
}
_UNIX_BUFFER_BYTES = 1 << 20
_CREDENTIALS = struct.Struct("3i")
_YAMA = pathlib.Path("/proc/sys/kernel/yama/ptrace_scope")
_ANSWER_MS = 2000


PATHS = ("process_vm", "unix", "tcp")
"""The paths between agents that need Linux alone, the best first."""

FABRIC = "fabric"
"""The path by libfabric."""

SHARED = "shared_memory"
"""The path of memory that this process maps. It is not a link's: another path carries what can't be mapped."""

_ALL = (SHARED, "process_vm", "unix", FABRIC, "tcp")


class Path(Struct, frozen=True):
    """How data moves to and from a peer.

    Attributes:
        name: "self", within the agent; "shared_memory", copied by the CPU; "process_vm", copied once by the kernel;
            "unix" or "tcp", through the socket; "fabric (…)", by libfabric's provider of that name (`fabric_path`);
            `device_path` and `staged_path` name those of devices.
        reason: why a faster path between agents of one host does not serve; "" if none is faster, or allowed.
    """

    name: str
    reason: str = ""

    def __str__(self) -> str:
        return self.name + (f" ({self.reason})" if self.reason else "")


def device_path(by: str, ways: Iterable[str], unpinned: str = "") -> Path:
    """The path of a transfer that a device copies, such as "copy engine (IPC)".

    Args:
        by: what copies: "copy engine", "kernel", or "copy engine and kernel".
        ways: how it reaches memory that is not its own process's device memory.
        unpinned: why it copies the host's memory by way of the driver's own buffers; "" if it does not.
    """
    named = sorted({way for way in ways if way} | ({"staged by the driver"} if unpinned else set()))
    return Path(f"{by} ({', '.join(named)})" if named else by, unpinned)


def fabric_path(provider: str, *, of_devices: bool = False) -> str:
    """The name of the path by a provider of libfabric; `of_devices`: whether its adapter reaches memory of devices."""
    return f"{FABRIC} ({provider}{', device memory' if of_devices else ''})"


def staged_path(link: Path, kinds: tuple[str, str], reason: str = "") -> Path:
    """The path of memory of devices, on one side or both, through a socket: "copy engine and tcp, staged".

    Each device copies to and from pinned memory of its own side.

    Args:
        link: the path of the link, whose name is that of the socket.
        kinds: of memory, here and there.
        reason: why no device reaches both sides; "" between hosts.
    """
    steps = ["copy engine"] * (kinds[0] == VRAM) + [link.name] + ["copy engine"] * (kinds[1] == VRAM)
    by = " and ".join((", ".join(steps[:-1]), steps[-1]))
    return Path(f"{by}, staged", "; ".join(filter(None, (reason, link.reason))))


class Connected(Struct, frozen=True):
    """A socket to a peer, for the engine.

    Attributes:
        socket: its descriptor, which the engine takes over.
        process: a pidfd, likewise, or -1.
        pid: the process to copy from and to, or 0.
        path: the path that this makes.
        carrier: "unix" or "tcp".
    """

    socket: int
    process: int
    pid: int
    path: Path
    carrier: str


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
        for listener in listeners[1:]:
            _set_options(listener)  # what it accepts inherits them
        undo.pop_all()
    return listeners, found


def _set_options(connection: socket.socket) -> None:
    for option, value in _TCP_OPTIONS.items():
        connection.setsockopt(*option, value)


def allowed_paths(names: Sequence[str] | None) -> tuple[frozenset[str], bool]:
    """The paths that data may take between agents: those named, or for None those of ``PROXYCCL_TRANSFER_PATHS``, else
    all; and whether they were named.

    Raises:
        ArgumentError: a name is not that of a path, or there is none.
    """
    argument = "paths"
    if names is None:
        text = os.environ.get("PROXYCCL_TRANSFER_PATHS")
        if not text:
            return frozenset(_ALL), False
        names, argument = [name.strip() for name in text.split(",")], "PROXYCCL_TRANSFER_PATHS"
    if isinstance(names, str) or not names or not set(names) <= set(_ALL):
        raise ArgumentError(argument, f"must be one or more of {', '.join(_ALL)}, not {names!r}")
    return frozenset(names), True


def connect(
    peer: str, token: bytes, place: Place, allowed: frozenset[str], timeout: float, provider: str = "", reason: str = ""
) -> Connected:
    """Connects to an agent: by its Unix socket if it is on this host, else by TCP.

    Args:
        peer: its name.
        token: its token.
        place: where it listens.
        allowed: the paths that data may take.
        timeout: seconds.
        provider: of libfabric, that both have; "": none.
        reason: why its registrations can't be looked at from here, so that the kernel may not copy; "": they can.

    Raises:
        DisconnectedError: it does not answer within the time, or no allowed path leads to it.
        ResourceError: there are too few descriptors.
    """
    deadline = time.monotonic() + timeout
    here = place.host == boot_id()
    failures: list[str] = [] if here else ["it is on another host"]
    if reason:
        failures.append(reason)
        allowed -= {"process_vm"}
    usable = {"process_vm"} if here else set()
    if provider:
        usable.add(FABRIC)
    with naming_exhaustion(f"the link to agent {peer}"):
        for carrier in ("unix", "tcp") if here else ("tcp",):
            if allowed.isdisjoint(usable | {carrier}):
                continue
            if carrier == "unix":
                connection = _by_unix(token, deadline, failures)
            else:
                connection = _by_tcp(place, deadline, failures)
            if connection is not None:
                connected = _choose(connection, carrier, token, place, allowed, failures, provider)
                if connected is not None:
                    return connected
    paths = "" if len(allowed) == len(_ALL) else f" by {' or '.join(sorted(allowed))}"
    raise DisconnectedError(f"agent {peer} can't be reached{paths}: {'; '.join(failures)}", peer)


def _by_unix(token: bytes, deadline: float, failures: list[str]) -> socket.socket | None:
    with contextlib.ExitStack() as undo:
        local = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            local.settimeout(max(0.001, deadline - time.monotonic()))
            local.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
            local.connect(unix_address(token))
        except (ConnectionError, TimeoutError):
            failures.append("there is no such agent in this network namespace")
            return None
        undo.pop_all()
    return local


def _by_tcp(place: Place, deadline: float, failures: list[str]) -> socket.socket | None:
    if not place.addresses:
        failures.append("it listens for agents of its own host only")
        return None
    try:
        remote = connect_to_any(place.addresses, deadline)
    except NoAddressError as error:
        failures.append(str(error))
        return None
    _set_options(remote)
    return remote


def _choose(
    connection: socket.socket,
    carrier: str,
    token: bytes,
    place: Place,
    allowed: frozenset[str],
    failures: list[str],
    provider: str,
) -> Connected | None:
    """The best path over a connection, which is closed if none is allowed. TCP carries the messages of agents on one
    host without a common network namespace; the kernel may copy their data all the same."""
    here = place.host == boot_id()
    with contextlib.ExitStack() as undo:
        undo.enter_context(connection)
        pid, process, copied = place.process if here else 0, -1, False
        if carrier == "unix":
            pid, _, _ = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
        if pid > 0:
            # A socket alone would not tell of the peer's end while a fork's child of it has a copy.
            with contextlib.suppress(ProcessLookupError, OSError):
                process = os.pidfd_open(pid)
                undo.callback(os.close, process)
        if here and "process_vm" in allowed:
            reason = _why_not_copied(pid, token, place, carrier)
            copied = not reason
            failures += [reason] if reason else []
        by_fabric = provider and FABRIC in allowed and (carrier == "tcp" or carrier not in allowed)
        if not copied and not by_fabric and carrier not in allowed:
            return None
        if not copied and carrier == "tcp" and process >= 0:  # it may be a stranger's here
            os.close(process)
            process = -1
        connection.setblocking(False)
        undo.pop_all()
    if copied:
        path = Path("process_vm")
    else:
        name = fabric_path(provider) if by_fabric else carrier
        path = Path(name, "; ".join(dict.fromkeys(failures)) if here else "")
    return Connected(connection.detach(), process, pid if copied else 0, path, carrier)


def _why_not_copied(pid: int, token: bytes, place: Place, carrier: str) -> str:
    """Why the kernel can't copy from and to the peer's process; "" if it can.

    Where Yama restricts that to parents, the peer is asked to lift it if its Unix socket can be reached.
    """
    if pid <= 0:
        return "its process is not visible in this PID namespace"
    error, seen = _read_secret(pid, place)
    refusal = ""
    if error == errno.EPERM and carrier == "unix" and _YAMA.exists() and _YAMA.read_text().strip() == "1":
        refused = _ask_to_copy(token, place)
        refusal = f"; asked to permit it, the peer answered: {os.strerror(refused)}" if refused else ""
        error, seen = _read_secret(pid, place)
    if error:
        where = "/proc/sys/kernel/yama/ptrace_scope, CAP_SYS_PTRACE, seccomp"
        return f"process_vm_readv: {os.strerror(error)} ({where}){refusal}"
    return "" if seen == place.secret else "its process has another number here"


def _ask_to_copy(token: bytes, place: Place) -> int:
    """Asks the peer to let this process copy. 0 or an errno.

    The question has a connection of its own: over the link's, a late answer would be taken for that of a frame.
    """
    connection = _by_unix(token, time.monotonic() + _ANSWER_MS / 1000, [])
    if connection is None:
        return errno.ECONNREFUSED
    with connection:
        return lib.proxyccl_ask_to_copy(connection.fileno(), place.secret, _ANSWER_MS)


def _read_secret(pid: int, place: Place) -> tuple[int, bytes]:
    """An errno, or 0 and the bytes in another process where the peer's secret is."""
    seen = ffi.new("char[]", lib.PROXYCCL_SECRET_BYTES)
    error = lib.proxyccl_process_read(pid, place.secret_address, seen, len(seen))
    return error, bytes(ffi.buffer(seen))
