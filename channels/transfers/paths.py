"""Chooses the path of data between two agents, and opens the socket for their other messages."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import pathlib
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from proxyccl.channels.transfers.engine_calls import raise_status
from proxyccl.channels.transfers.errors import DisconnectedError
from proxyccl.channels.transfers.metadata import Place
from proxyccl.channels.transfers.regions import VRAM
from proxyccl.device.errors import ArgumentError, ClosedError, ResourceError
from proxyccl.device.memory.descriptors import EXHAUSTED, naming_exhaustion
from proxyccl.device.process import forks
from proxyccl.proxy._transfers import ffi, lib
from proxyccl.proxy.connecting import NoAddressError, connect_to_any
from proxyccl.proxy.hosts import boot_id, host_addresses

if TYPE_CHECKING:
    from proxyccl.channels.transfers.fabric import AgentFabric
    from proxyccl.proxy._transfers import ProxycclAgentPointer, ProxycclLinkPointer

_TCP_OPTIONS = {
    # Disables Nagle's algorithm, which would delay an answer until the previous one is acknowledged, up to 40 ms later.
    (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
    # Keep-alives detect a host that has lost its power or network.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
    # Sent data also makes a link fail if nobody takes the data, even if the peer's host answers.
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 20_000,
}
_UNIX_BUFFER_BYTES = 1 << 20
_CREDENTIALS = struct.Struct("3i")
_YAMA = pathlib.Path("/proc/sys/kernel/yama/ptrace_scope")
_ANSWER_MS = 2000


FABRIC = "fabric"
"""The path by libfabric."""

SHARED = "shared_memory"
"""The path for memory that this process maps. A link always has another path, for memory that can't be mapped."""

_ALL = (SHARED, "process_vm", "unix", FABRIC, "tcp")


class Path(Struct, frozen=True):
    """The mechanism that transfers data to and from a peer.

    Attributes:
        name: "self" (within the agent), "shared_memory" (the CPU copies), "process_vm" (the kernel copies), "unix" or
            "tcp" (through the socket), "fabric (PROVIDER)" (by libfabric), or for device memory a name that
            `device_path` or `staged_path` makes.
        reason: the reason why a faster path can't be used; "" if no faster path exists or is allowed.
    """

    name: str
    reason: str = ""

    def __str__(self) -> str:
        return self.name + (f" ({self.reason})" if self.reason else "")


def device_path(by: str, ways: Iterable[str], unpinned: str = "") -> Path:
    """Returns the path of a transfer that a device copies, such as "copy engine (IPC)". `by` names the copying engine,
    and `ways` names how it accesses memory of other processes and of the host. `unpinned` is the reason why the driver
    must copy through its own buffers; "" if it copies directly.
    """
    named = sorted({way for way in ways if way} | ({"staged by the driver"} if unpinned else set()))
    return Path(f"{by} ({', '.join(named)})" if named else by, unpinned)


def fabric_path(provider: str, *, of_devices: bool = False) -> str:
    """Returns the name of the path by a libfabric provider. `of_devices` says whether either side is device memory."""
    return f"{FABRIC} ({provider}{', device memory' if of_devices else ''})"


def staged_path(link: Path, kinds: tuple[str, str], reason: str = "") -> Path:
    """Returns the path of a transfer whose devices copy to and from pinned memory, whose contents are sent over a link,
    such as "copy engine and tcp, staged". `reason` says why no device can access both sides' memory.
    """
    steps = ["copy engine"] * (kinds[0] == VRAM) + [link.name] + ["copy engine"] * (kinds[1] == VRAM)
    by = " and ".join((", ".join(steps[:-1]), steps[-1]))
    return Path(f"{by}, staged", "; ".join(filter(None, (reason, link.reason))))


class Link:
    """A link that this agent opened. The engine frees the link when this object and all transfers over the link are
    gone.

    Args:
        attempt: the attempt to connect that led to the link.
        connection: the socket, whose ownership passes to the engine.
        process: a pidfd of the other agent's process, whose ownership passes to the engine; -1 without one.
        pid: the other agent's process, if the kernel copies from and to it; otherwise 0.
        path: the path of data over the link.
        carrier: the kind of socket, "unix" or "tcp".

    Attributes:
        rails: the number of libfabric endpoints of each agent that the link uses; 0 without libfabric.
    """

    def __init__(
        self, attempt: Connecting, connection: socket.socket, process: int, pid: int, path: Path, carrier: str
    ) -> None:
        self.peer, self.path, self.pid, self.carrier = attempt.peer, path, pid, carrier
        self._agent, self._fabric = attempt.agent, attempt.fabric
        handle = lib.proxyccl_link_create(self._agent, connection.detach(), attempt.place.secret, process, pid)
        if not handle:
            if ffi.errno == errno.ECANCELED:
                raise ClosedError("the agent was closed")
            if ffi.errno == errno.ENOMEM:
                raise MemoryError("there is no memory for a link")
            raise ResourceError(f"the link to agent {self.peer} can't be watched: {os.strerror(ffi.errno)}")
        self.handle: ProxycclLinkPointer = handle
        self.rails = 0
        theirs = attempt.place.fabric
        if attempt.fabric is not None and theirs is not None and path.name.startswith(FABRIC):
            ends = attempt.fabric.rails.in_engine, theirs.in_engine
            self.rails = lib.proxyccl_link_use_rails(handle, ends[0], len(ends[0]), ends[1], len(ends[1]))
        forks.finalizer(self, lib.proxyccl_link_release, handle)

    @property
    def lost(self) -> str:
        """The reason why the link was lost; "" while it works."""
        reason = lib.proxyccl_link_lost(self.handle)
        return ffi.string(reason).decode() if reason else ""

    @property
    def stalled(self) -> str:
        """A text that names this agent's interfaces whose requests to the peer don't complete; "" if there are none."""
        stalled, every = lib.proxyccl_link_stalled(self.handle), self._fabric.interfaces if self._fabric else []
        names = " and ".join(name for number, name in enumerate(every) if stalled >> number & 1)
        return names and f"; no request by {names} has completed for 2 s"

    def look(self) -> str:
        """Polls the socket for a disconnect, and returns `lost`."""
        lib.proxyccl_link_look(self.handle)
        return self.lost

    def tell(self, message: bytes) -> None:
        """Sends a message. Raises the errors of `Agent.notify`, and TransferError if too many bytes are waiting to be
        sent."""
        status = lib.proxyccl_agent_tell(self._agent, self.handle, message, len(message))
        raise_status(status, self.peer, self.lost)

    def end(self) -> None:
        """Closes the link. Active transfers over the link end as lost."""
        lib.proxyccl_link_end(self.handle)


def unix_address(token: bytes) -> bytes:
    """Returns the abstract address of an agent's Unix socket."""
    return b"\0proxyccl-agent-" + token.hex().encode()


def open_listeners(token: bytes, addresses: Sequence[str] | None) -> tuple[list[socket.socket], list[tuple[str, int]]]:
    """Makes listening sockets: the Unix socket of `token`, and TCP sockets at these addresses or names of this host
    (None: all addresses). Returns the sockets, and the (address, port) pairs at which other hosts reach the TCP
    sockets.

    Raises:
        ArgumentError: this host can't listen at an address.
        ResourceError: no file descriptor is left.
    """
    if addresses is not None and (isinstance(addresses, str) or not all(isinstance(each, str) for each in addresses)):
        raise ArgumentError("listen", f"must be a list of addresses, not {addresses!r}")
    try:
        return _listen(token, addresses)
    # An address with invalid characters raises ValueError or TypeError.
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError("listen", f"this host can't listen at {addresses!r}: {reason}") from None


def _listen(token: bytes, addresses: Sequence[str] | None) -> tuple[list[socket.socket], list[tuple[str, int]]]:
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
            for one in _listeners_at(address):
                listeners.append(undo.enter_context(one))
                bound, port = one.getsockname()[:2]
                found += [(each, port) for each in _reachable(bound)]
        for listener in listeners:
            listener.setblocking(False)
        for listener in listeners[1:]:
            _set_options(listener)  # accepted sockets inherit the options
        undo.pop_all()
    return listeners, found


def _listeners_at(address: str) -> list[socket.socket]:
    """Returns listening sockets at an address, or at those addresses of a host name at which this host can listen.
    Raises OSError if there is none, or if no file descriptor is left.
    """
    made: list[socket.socket] = []
    failure: OSError | None = None
    places = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with contextlib.ExitStack() as undo:
        for family, _, _, _, place in dict.fromkeys(places):
            try:
                made.append(undo.enter_context(socket.create_server(place, family=family, backlog=1024)))
            except OSError as error:
                if error.errno in EXHAUSTED:
                    raise
                failure = error  # the kernel may lack IPv6
        if failure is not None and not made:
            raise failure
        undo.pop_all()
    return made


def _reachable(address: str) -> list[str]:
    """Returns the addresses by which other hosts reach a socket that is bound to `address`."""
    bound = ipaddress.ip_address(address.partition("%")[0])
    if not bound.is_unspecified:
        return [address]
    return [each for each in host_addresses() if ipaddress.ip_address(each).version == bound.version]


def _set_options(connection: socket.socket) -> None:
    for option, value in _TCP_OPTIONS.items():
        connection.setsockopt(*option, value)


def allowed_paths(names: Sequence[str] | None) -> tuple[frozenset[str], bool]:
    """Returns the allowed paths: `names`, if not None, else the paths in ``PROXYCCL_TRANSFER_PATHS``, if set, else all
    paths. The second result is whether `names` or the variable named the paths.

    Raises:
        ArgumentError: the list is empty, or a name is not that of a path.
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


class Connecting(Struct):
    """An attempt to connect to another agent.

    Attributes:
        agent: the engine's handle of this agent.
        peer, token, place: the other agent's name, token and place.
        allowed: the allowed paths.
        deadline: the time of `time.monotonic` at which the attempt ends.
        fabric: this agent's libfabric endpoints, if the peer has endpoints of the same provider.
        reason: the reason why this process can't check the peer's registrations, which excludes copies by the kernel;
            "" if it can check them.
    """

    agent: ProxycclAgentPointer
    peer: str
    token: bytes
    place: Place
    allowed: frozenset[str]
    deadline: float
    fabric: AgentFabric | None
    reason: str
    _failures: list[str] = []

    def connect(self) -> Link:
        """Connects by the other agent's Unix socket if possible, else by TCP.

        Raises:
            DisconnectedError: the agent did not answer in time, or no allowed path leads to it.
            ResourceError: no file descriptor is left.
            ClosedError: this agent was closed.
        """
        here = self.place.host == boot_id()
        usable = {"process_vm"} if here and not self.reason else set()
        if self.fabric is not None:
            usable.add(FABRIC)
        self._failures += filter(None, ("" if here else "it is on another host", self.reason))
        with naming_exhaustion(f"the link to agent {self.peer}"):
            for carrier in ("unix", "tcp") if here else ("tcp",):
                if self.allowed.isdisjoint(usable | {carrier}):
                    continue
                connection = self._by_unix() if carrier == "unix" else self._by_tcp()
                link = None if connection is None else self._choose(connection, carrier, here)
                if link is not None:
                    return link
        allowed = self.allowed - {"process_vm"} if self.reason else self.allowed
        paths = "" if len(allowed) == len(_ALL) else f" by {' or '.join(sorted(allowed))}"
        raise DisconnectedError(f"agent {self.peer} can't be reached{paths}: {'; '.join(self._failures)}", self.peer)

    def _by_unix(self) -> socket.socket | None:
        with contextlib.ExitStack() as undo:
            local = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                local.settimeout(max(0.001, self.deadline - time.monotonic()))
                local.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
                local.connect(unix_address(self.token))
            except (ConnectionError, TimeoutError):
                self._failures.append("there is no such agent in this network namespace")
                return None
            except OSError as error:  # too many connections wait, or a policy forbids the connection
                self._failures.append(f"its Unix socket: {error.strerror}")
                return None
            undo.pop_all()
        return local

    def _by_tcp(self) -> socket.socket | None:
        if not self.place.addresses:
            self._failures.append("it listens for agents of its own host only")
            return None
        try:
            remote = connect_to_any(self.place.addresses, self.deadline, greeting=self.token)
        except NoAddressError as error:
            self._failures.append(str(error))
            return None
        _set_options(remote)
        return remote

    def _choose(self, connection: socket.socket, carrier: str, here: bool) -> Link | None:
        """Chooses the best allowed path over a connection. If no path is allowed, closes the connection and returns
        None. Agents on one host without a common network namespace use TCP for messages, but the kernel may still copy
        their data.
        """
        allowed, fabric = self.allowed, self.fabric
        with contextlib.ExitStack() as undo:
            undo.enter_context(connection)
            pid, process, copied = self.place.process if here else 0, -1, False
            if carrier == "unix":
                pid, _, _ = _CREDENTIALS.unpack(
                    connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                )
            if pid > 0:
                # The socket does not show the peer's end while a forked child of the peer has a copy of the socket.
                with contextlib.suppress(ProcessLookupError, OSError):
                    process = os.pidfd_open(pid)
                    undo.callback(os.close, process)
            if here and "process_vm" in allowed and not self.reason:
                refusal = self._why_not_copied(pid, carrier)
                copied = not refusal
                self._failures += filter(None, [refusal])
            by_fabric = fabric is not None and FABRIC in allowed and (carrier == "tcp" or carrier not in allowed)
            if not copied and not by_fabric and carrier not in allowed:
                return None
            if not copied and carrier == "tcp" and process >= 0:  # `pid` may be another process in this namespace
                os.close(process)
                process = -1
            connection.setblocking(False)
            undo.pop_all()
        if copied:
            path = Path("process_vm")
        else:
            name = fabric_path(fabric.rails.provider) if fabric is not None and by_fabric else carrier
            path = Path(name, "; ".join(dict.fromkeys(self._failures)) if here else "")
        return Link(self, connection, process, pid if copied else 0, path, carrier)

    def _why_not_copied(self, pid: int, carrier: str) -> str:
        """Returns the reason why the kernel can't copy from and to the peer's process; "" if it can. If Yama restricts
        the kernel's copies to parent processes, asks the peer over its Unix socket to permit copies.
        """
        if pid <= 0:
            return "its process is not visible in this PID namespace"
        error, seen = _read_secret(pid, self.place)
        refusal = ""
        if error == errno.EPERM and carrier == "unix" and _YAMA.exists() and _YAMA.read_text().strip() == "1":
            refused = self._ask_to_copy()
            refusal = f"; asked to permit it, the peer answered: {os.strerror(refused)}" if refused else ""
            error, seen = _read_secret(pid, self.place)
        if error:
            where = "/proc/sys/kernel/yama/ptrace_scope, CAP_SYS_PTRACE, seccomp"
            return f"process_vm_readv: {os.strerror(error)} ({where}){refusal}"
        return "" if seen == self.place.secret else "its process has another number here"

    def _ask_to_copy(self) -> int:
        """Asks the peer to permit this process to copy, and returns 0 or an errno. Uses its own connection, because on
        the link a late answer would be mistaken for the answer to a frame.
        """
        asking = replace(self, deadline=time.monotonic() + _ANSWER_MS / 1000, _failures=[])
        connection = asking._by_unix()
        if connection is None:
            return errno.ECONNREFUSED
        with connection:
            return lib.proxyccl_ask_to_copy(connection.fileno(), self.place.secret, _ANSWER_MS)


def _read_secret(pid: int, place: Place) -> tuple[int, bytes]:
    """Reads the peer's secret from its process. Returns 0 and the secret, or an errno and undefined bytes."""
    seen = ffi.new("char[]", lib.PROXYCCL_SECRET_BYTES)
    error = lib.proxyccl_process_read(pid, place.secret_address, seen, len(seen))
    return error, bytes(ffi.buffer(seen))
