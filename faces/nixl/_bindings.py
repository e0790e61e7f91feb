"""The names of NIXL's module `_bindings`: its agent, its lists, enumerations and exceptions."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from proxyccl.channels.transfers.agent import Agent
from proxyccl.channels.transfers.preparing import Side
from proxyccl.channels.transfers.regions import Region
from proxyccl.channels.transfers.transfer import State, Transfer
from proxyccl.device.errors import ArgumentError, ProxyCCLError, RuntimeUnavailableError
from proxyccl.nixl.descriptors import StridedRows, bytes_of, nixlRegDList, nixlXferDList, text_of
from proxyccl.nixl.enums import nixl_cost_t, nixl_mem_t, nixl_status_t, nixl_thread_sync_t, nixl_xfer_op_t
from proxyccl.nixl.errors import (
    in_nixl,
    in_nixls_words,
    nixlBackendError,
    nixlCancelledError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlNotSupportedError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    nixlUnknownError,
)
from proxyccl.nixl.metadata_exchange import Listener, Request, Sender

__all__ = [
    "BLK_SEG",
    "DEFAULT_COMM_PORT",
    "DRAM_SEG",
    "FILE_SEG",
    "HAVE_UCX_GPU_DEVICE_API",
    "NIXL_COST_ANALYTICAL_BACKEND",
    "NIXL_ERR_BACKEND",
    "NIXL_ERR_CANCELED",
    "NIXL_ERR_INVALID_PARAM",
    "NIXL_ERR_MISMATCH",
    "NIXL_ERR_NOT_ALLOWED",
    "NIXL_ERR_NOT_FOUND",
    "NIXL_ERR_NOT_POSTED",
    "NIXL_ERR_NOT_SUPPORTED",
    "NIXL_ERR_NO_TELEMETRY",
    "NIXL_ERR_REMOTE_DISCONNECT",
    "NIXL_ERR_REPOST_ACTIVE",
    "NIXL_ERR_UNKNOWN",
    "NIXL_INIT_AGENT",
    "NIXL_IN_PROG",
    "NIXL_READ",
    "NIXL_SUCCESS",
    "NIXL_THREAD_SYNC_DEFAULT",
    "NIXL_THREAD_SYNC_NONE",
    "NIXL_THREAD_SYNC_RW",
    "NIXL_THREAD_SYNC_STRICT",
    "NIXL_WRITE",
    "OBJ_SEG",
    "VRAM_SEG",
    "nixlAgent",
    "nixlAgentConfig",
    "nixlBackendError",
    "nixlCancelledError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNoTelemetryError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlNotPostedError",
    "nixlNotSupportedError",
    "nixlRegDList",
    "nixlRemoteDisconnectError",
    "nixlRepostActiveError",
    "nixlUnknownError",
    "nixlXferDList",
    "nixlXferTelemetry",
    "nixl_cost_t",
    "nixl_mem_t",
    "nixl_status_t",
    "nixl_thread_sync_t",
    "nixl_xfer_op_t",
]

DEFAULT_COMM_PORT = 8888
NIXL_INIT_AGENT = ""
HAVE_UCX_GPU_DEVICE_API = False

NIXL_THREAD_SYNC_NONE = nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
NIXL_THREAD_SYNC_STRICT = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
NIXL_THREAD_SYNC_RW = nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
NIXL_THREAD_SYNC_DEFAULT = nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT
DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG = nixl_mem_t
NIXL_READ, NIXL_WRITE = nixl_xfer_op_t
NIXL_COST_ANALYTICAL_BACKEND = nixl_cost_t.NIXL_COST_ANALYTICAL_BACKEND
NIXL_IN_PROG = nixl_status_t.NIXL_IN_PROG
NIXL_SUCCESS = nixl_status_t.NIXL_SUCCESS
NIXL_ERR_NOT_POSTED = nixl_status_t.NIXL_ERR_NOT_POSTED
NIXL_ERR_INVALID_PARAM = nixl_status_t.NIXL_ERR_INVALID_PARAM
NIXL_ERR_BACKEND = nixl_status_t.NIXL_ERR_BACKEND
NIXL_ERR_NOT_FOUND = nixl_status_t.NIXL_ERR_NOT_FOUND
NIXL_ERR_MISMATCH = nixl_status_t.NIXL_ERR_MISMATCH
NIXL_ERR_NOT_ALLOWED = nixl_status_t.NIXL_ERR_NOT_ALLOWED
NIXL_ERR_REPOST_ACTIVE = nixl_status_t.NIXL_ERR_REPOST_ACTIVE
NIXL_ERR_UNKNOWN = nixl_status_t.NIXL_ERR_UNKNOWN
NIXL_ERR_NOT_SUPPORTED = nixl_status_t.NIXL_ERR_NOT_SUPPORTED
NIXL_ERR_REMOTE_DISCONNECT = nixl_status_t.NIXL_ERR_REMOTE_DISCONNECT
NIXL_ERR_CANCELED = nixl_status_t.NIXL_ERR_CANCELED
NIXL_ERR_NO_TELEMETRY = nixl_status_t.NIXL_ERR_NO_TELEMETRY

_BACKENDS = ["UCX", "LIBFABRIC"]  # both are ProxyCCL: clients ask for them by name
_UNKNOWN_COST = 1
_HANDLES = itertools.count(16, 16)
"""Numbers of handles. No two agents of a process have one in common, so a handle of another agent is not valid."""

_YES = ("y", "yes", "1", "on", "true")


class nixlAgentConfig:
    """The configuration of an agent. Fields that steer NIXL's own threads have no effect here."""

    def __init__(
        self,
        useProgThread: bool = False,
        useListenThread: bool = False,
        listenPort: int = 0,
        syncMode: nixl_thread_sync_t = NIXL_THREAD_SYNC_NONE,
        numWorkers: int = 1,
        pthrDelay: int = 0,
        lthrDelay: int = 100000,
        captureTelemetry: bool = False,
    ) -> None:
        self.useProgThread = useProgThread
        self.useListenThread = useListenThread
        self.listenPort = listenPort
        self.syncMode = syncMode
        self.pthrDelay = pthrDelay
        self.lthrDelay = lthrDelay
        self.captureTelemetry = captureTelemetry
        self.etcdWatchTimeout = 5000000


class nixlXferTelemetry(Struct):
    """The record of a transfer's last post. Times are in microseconds, at least 1. NIXL's has no `path`."""

    startTime: int = 0
    postDuration: int = 0
    xferDuration: int = 0
    totalBytes: int = 0
    descCount: int = 0
    path: str = ""


class _Prepared(Struct, frozen=True, eq=False):
    """A prepared list, and the registered memory of which agent it lies in: of this one if `is_own`."""

    rows: NDArray[np.uint64] | StridedRows
    side: Side
    is_own: bool


class _Posted(Struct, eq=False):
    """A transfer, and what NIXL wants to know of it."""

    transfer: Transfer
    name: str
    notification: bytes | None
    count: int


class nixlAgent:
    """An agent. Every call may be made by any thread, in every mode.

    Args:
        name: its name.
        config: see `nixlAgentConfig`.

    Raises:
        ValueError: the name is empty.
    """

    def __init__(self, name: str, config: nixlAgentConfig) -> None:
        self._agent = Agent(text_of(name))
        self._name = self._agent.name
        enabled = os.environ.get("NIXL_TELEMETRY_ENABLE")
        self._telemetry = config.captureTelemetry if enabled is None else enabled.lower() in _YES
        self._lock = threading.Lock()
        self._backends: dict[int, str] = {}
        self._prepared: dict[int, _Prepared] = {}
        self._transfers: dict[int, _Posted] = {}
        self._sender: Sender | None = None
        if config.useListenThread:
            Listener(self, config.listenPort)

    # Backends

    def getAvailPlugins(self) -> list[str]:
        """The names by which clients ask for ProxyCCL."""
        return list(_BACKENDS)

    def getPluginParams(self, type: str) -> tuple[dict[str, str], list[str]]:
        """Parameters and kinds of memory of a plugin. Raises nixlNotFoundError."""
        if type not in _BACKENDS:
            raise nixlNotFoundError(f"the backend {type!r} is not one of {', '.join(_BACKENDS)}")
        return {}, [DRAM_SEG.name, VRAM_SEG.name]

    def getBackendParams(self, backend: int) -> tuple[dict[str, str], list[str]]:
        """The same of a backend that was created. Raises nixlNotFoundError."""
        if backend not in self._backends:
            raise nixlNotFoundError("the backend was not created")
        return self.getPluginParams(self._backends[backend])

    def createBackend(self, type: str, initParams: dict[str, str]) -> int:
        """Creates a backend. Its parameters have no effect.

        Raises:
            nixlNotFoundError: there is none of this name.
            nixlInvalidParamError: it exists.
        """
        self.getPluginParams(type)
        with self._lock:
            if type in self._backends.values():
                raise nixlInvalidParamError(f"the backend {type} exists")
            handle = next(_HANDLES)
            self._backends[handle] = type
        return handle

    # Memory

    def registerMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        """Registers memory.

        Raises:
            nixlNotFoundError: there is no backend.
            nixlBackendError: it is neither the host's memory nor a device's that can be shared.
        """
        regions = _regions_of(_required(descs, nixlRegDList))
        if not self._backends:
            raise nixlNotFoundError("no backend was created")
        if descs.getType() not in (DRAM_SEG, VRAM_SEG):
            raise nixlBackendError(f"ProxyCCL moves DRAM and VRAM, not {descs.getType().name}")
        with in_nixls_words():
            try:
                self._agent.register_regions(regions)
            except (ArgumentError, RuntimeUnavailableError) as error:
                if descs.getType() == DRAM_SEG:
                    raise
                raise nixlBackendError(str(error)) from error
        return NIXL_SUCCESS

    def deregisterMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        """Ends a registration. Raises nixlNotFoundError."""
        with in_nixls_words():
            self._agent.deregister(*_regions_of(_required(descs, nixlRegDList)))
        return NIXL_SUCCESS

    def queryMem(self, descs: nixlRegDList, backend: int) -> list[dict[str, str] | None]:
        """Raises nixlNotSupportedError: it asks about files and objects."""
        raise nixlNotSupportedError("ProxyCCL does not move files or objects, and memory has nothing to query")

    # Other agents

    def getLocalMD(self) -> bytes:
        """This agent's metadata. Raises nixlInvalidParamError if there is no backend."""
        if not self._backends:
            raise nixlInvalidParamError("no backend was created")
        with in_nixls_words():
            return self._agent.metadata()

    def getLocalPartialMD(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: Sequence[int] = ()
    ) -> bytes:
        """A part of this agent's metadata; without descriptors, where it listens. Raises nixlNotFoundError."""
        regions = _regions_of(_required(descs, nixlRegDList))
        with in_nixls_words():
            return self._agent.metadata(regions, place=inc_conn_info or not regions)

    def loadRemoteMD(self, remote_metadata: bytes | str) -> bytes:
        """Adds an agent, or adds to its known memory.

        Raises:
            nixlMismatchError: the bytes are not metadata.
            nixlInvalidParamError: they are this agent's own.
            nixlNotFoundError: they only extend, and the agent is unknown.
            nixlNotAllowedError: another agent of this name is known.
        """
        with in_nixls_words():
            return self._agent.add(bytes_of(remote_metadata)).encode()

    def invalidateRemoteMD(self, remote_agent: str | bytes) -> nixl_status_t:
        """Forgets an agent, if it is known."""
        name = text_of(remote_agent)
        with in_nixls_words():
            if name in self._agent.peers:
                self._agent.remove(name)
        return NIXL_SUCCESS

    def forgetSender(self, metadata: bytes) -> None:
        """Forgets the agent whose metadata these are, if it is known: not another one that has its name by now."""
        with in_nixls_words():
            self._agent.remove_agent_of(metadata)

    def checkRemoteMD(self, remote_agent: str | bytes, descs: nixlXferDList) -> nixl_status_t:
        """Whether an agent is known, and all of these descriptors."""
        name = text_of(remote_agent)
        if name not in self._agent.peers:
            return NIXL_ERR_NOT_FOUND
        try:
            return NIXL_SUCCESS if self._find(name, descs)[1] is None else NIXL_ERR_NOT_FOUND
        except nixlNotFoundError:  # it was forgotten meanwhile
            return NIXL_ERR_NOT_FOUND

    def makeConnection(self, remote_agent: str | bytes, backends: Sequence[int] = ()) -> nixl_status_t:
        """Connects. Raises nixlNotFoundError, nixlRemoteDisconnectError."""
        with in_nixls_words():
            self._agent.connect(text_of(remote_agent))
        return NIXL_SUCCESS

    def sendLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        """Sends this agent's metadata to a peer that listens. A failure is logged."""
        self._send(ip_addr, port, Request.LOAD, self.getLocalMD())

    def sendLocalPartialMD(
        self,
        descs: nixlRegDList,
        inc_conn_info: bool = False,
        backends: Sequence[int] = (),
        ip_addr: str = "",
        port: int = 0,
        label: str = "",
    ) -> None:
        """Sends a part of this agent's metadata to a peer that listens. A failure is logged."""
        self._send(ip_addr, port, Request.LOAD, self.getLocalPartialMD(descs, inc_conn_info))

    def fetchRemoteMD(self, remote_agent: str | bytes, ip_addr: str = "", port: int = 0, label: str = "") -> None:
        """Asks a peer that listens for its metadata. A failure is logged."""
        self._send(ip_addr, port, Request.FETCH, b"")

    def invalidateLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        """Makes a peer that listens forget this agent. A failure is logged."""
        with in_nixls_words():
            self._send(ip_addr, port, Request.INVALIDATE, self._agent.metadata((), place=False))

    def _send(self, address: str, port: int, request: Request, data: bytes) -> None:
        if not address:
            raise nixlInvalidParamError("an address is needed: ProxyCCL does not use a metadata server")
        with self._lock:
            if self._sender is None:
                self._sender = Sender(self)
        self._sender.send(address, port, request, data)

    # Transfers

    def prepXferDlist(self, *arguments: Any, **named: Any) -> int:
        """Prepares a list: ``(descs, backend)`` for this agent's side, ``(agent_name, descs, backend)`` for the other.

        Of an array of `StridedRows` the kind of memory is told too: ``(agent_name, mem_type, descs, backend)``.

        Raises:
            nixlNotFoundError: the agent is unknown, the list is empty, or a descriptor is not registered.
        """
        names = ["agent_name", "mem_type", "descs", "backend"]
        if not (len(arguments) > 1 and isinstance(arguments[1], nixl_mem_t)):
            names.remove("mem_type")
        if arguments and not isinstance(arguments[0], str | bytes):
            names.remove("agent_name")
        given = dict(zip(names, arguments, strict=False)) | named
        name = text_of(given.get("agent_name", NIXL_INIT_AGENT))
        rows: NDArray[np.uint64] | StridedRows
        if "mem_type" in given:
            rows = StridedRows(given.get("descs"))
            descs = nixlXferDList(given["mem_type"], rows.spans)
        else:
            descs = _required(given.get("descs"), nixlXferDList)
            rows = descs.rows.copy()
        side = self._check(name or self._name, descs)
        handle = next(_HANDLES)
        self._prepared[handle] = _Prepared(rows, side, not name)
        return handle

    def releasedDlistH(self, handle: int) -> nixl_status_t:
        """Forgets a prepared list."""
        self._prepared.pop(handle, None)
        return NIXL_SUCCESS

    def makeXferReq(
        self,
        operation: nixl_xfer_op_t,
        local_side: int,
        local_indices: Any,
        remote_side: int,
        remote_indices: Any,
        notif_msg: str | bytes = "",
        backend: Sequence[int] = (),
        skip_desc_merg: bool = False,
    ) -> int:
        """A transfer between descriptors of two prepared lists, by their indices.

        Raises:
            nixlInvalidParamError: of the lists, the indices, or lengths that differ.
            nixlNotFoundError: the agent was removed, also if another one has its name, or memory of a list was
                deregistered, also if it was registered anew.
        """
        local, remote = self._prepared.get(local_side), self._prepared.get(remote_side)
        if local is None or remote is None or not local.is_own or remote.is_own:
            raise nixlInvalidParamError("expected a prepared list of this agent's side, then one of the other side")
        ours, theirs = _picked(local, local_indices), _picked(remote, remote_indices)
        return self._make(operation, ours, theirs, notif_msg, local.side, remote.side)

    def createXferReq(
        self,
        operation: nixl_xfer_op_t,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: str | bytes,
        notif_msg: str | bytes = "",
        backend: Sequence[int] = (),
    ) -> int:
        """A transfer between two lists.

        Raises:
            nixlInvalidParamError: the lists differ in number or length.
            nixlNotFoundError: the agent is unknown, the lists are empty, or a descriptor is not registered.
        """
        name = text_of(remote_agent)
        local, remote = _required(local_descs, nixlXferDList), _required(remote_descs, nixlXferDList)
        self._require_known(name)
        if len(local) != len(remote) or not np.array_equal(local.rows[:, 1], remote.rows[:, 1]):
            raise nixlInvalidParamError("the lists differ in their number of descriptors, or in a length")
        sides = self._check(self._name, local), self._check(name, remote)
        return self._make(operation, local.rows, remote.rows, notif_msg, *sides)

    def _make(
        self,
        operation: nixl_xfer_op_t,
        local: NDArray[np.uint64],
        remote: NDArray[np.uint64],
        notification: str | bytes,
        ours: Side,
        theirs: Side,
    ) -> int:
        if not len(local) or len(local) != len(remote) or not np.array_equal(local[:, 1], remote[:, 1]):
            raise nixlInvalidParamError("the two sides differ in their number of descriptors, or in a length")
        rows = np.column_stack((local[:, 0], remote[:, :2]))
        with in_nixls_words():
            transfer = self._agent.prepare_checked(operation == NIXL_WRITE, rows, ours, theirs)
        handle = next(_HANDLES)
        self._transfers[handle] = _Posted(transfer, theirs.name, bytes_of(notification) or None, len(local))
        return handle

    def estimateXferCost(self, req_handle: int) -> tuple[int, int, int]:
        """Nothing is estimated: (0, 0, 1), which `nixl_agent` calls UNKNOWN."""
        self._transfer(req_handle)
        return 0, 0, _UNKNOWN_COST

    def postXferReq(self, reqh: int, notif_msg: str | bytes = "") -> nixl_status_t:
        """Starts a transfer, again if it has ended.

        Raises:
            nixlNotFoundError: the agent was removed.
            nixlRepostActiveError: it is active.
            nixlRemoteDisconnectError, nixlBackendError: it failed at once.
        """
        posted = self._transfer(reqh)
        try:  # a context manager would take longer than the call that starts the transfer
            posted.transfer.start(bytes_of(notif_msg) if notif_msg else posted.notification)
            return NIXL_SUCCESS if posted.transfer.done() else NIXL_IN_PROG
        except ProxyCCLError as error:
            self._require_known(posted.name)
            raise in_nixl(error) from error

    def getXferStatus(self, reqh: int) -> nixl_status_t:
        """Where a transfer is. Errors are raised."""
        posted = self._transfer(reqh)
        try:
            return NIXL_SUCCESS if posted.transfer.done() else NIXL_IN_PROG
        except ProxyCCLError as error:
            raise in_nixl(error) from error

    def getXferTelemetry(self, reqh: int) -> nixlXferTelemetry:
        """Times and sizes of a transfer's last post.

        Raises:
            nixlNoTelemetryError: telemetry is not enabled.
            nixlNotPostedError: it was never posted.
        """
        if not self._telemetry:
            raise nixlNoTelemetryError("enable it by capture_telemetry or NIXL_TELEMETRY_ENABLE")
        posted = self._transfer(reqh)
        transfer, times = posted.transfer, posted.transfer.times
        if transfer.state is State.NEW:
            raise nixlNotPostedError
        ended = time.monotonic_ns() if transfer.state is State.ACTIVE else times.ended
        post = max(1, (min(times.returned, ended) - times.posted) // 1000)
        whole = max(post, (ended - times.posted) // 1000)
        elapsed = time.monotonic_ns() - times.posted  # read first: a pause between the two must not make it too early
        started = time.time_ns() - elapsed
        return nixlXferTelemetry(started // 1000, post, whole, transfer.nbytes, posted.count, str(transfer.path))

    def queryXferBackend(self, reqh: int) -> int:
        """The backend that a transfer uses: the first that was created."""
        self._transfer(reqh)
        return next(iter(self._backends))

    def releaseXferReq(self, reqh: int) -> nixl_status_t:
        """Cancels a transfer if it is active, and forgets it."""
        posted = self._transfers.get(reqh)
        if posted is not None:
            with in_nixls_words():
                posted.transfer.close()
            self._transfers.pop(reqh, None)
        return NIXL_SUCCESS

    def _transfer(self, handle: int) -> _Posted:
        posted = self._transfers.get(handle)
        if posted is None:
            raise nixlInvalidParamError("the transfer was released")
        return posted

    def _require_known(self, name: str) -> None:
        if name != self._name and name not in self._agent.peers:
            raise nixlNotFoundError(f"no agent of the name {name!r} was added")

    def _check(self, name: str, descs: nixlXferDList) -> Side:
        """The registered memory of an agent. Raises nixlNotFoundError unless all descriptors belong to it."""
        self._require_known(name)
        if descs.isEmpty():
            raise nixlNotFoundError("the list is empty")
        side, outside = self._find(name, descs)
        if outside is not None:
            raise nixlNotFoundError(f"descriptor {outside}, {descs[outside]}, is not in registered memory")
        return side

    def _find(self, name: str, descs: nixlXferDList) -> tuple[Side, int | None]:
        with in_nixls_words():
            return self._agent.find_side(name, descs.rows, _KINDS[descs.getType()])

    # Notifications

    def getNotifs(self, notif_map: dict[str, list[bytes]], backends: Sequence[int] = ()) -> dict[str, list[bytes]]:
        """Adds the notifications that have arrived to a map of senders' names, and returns it."""
        with in_nixls_words():
            for name, message in self._agent.messages():
                notif_map.setdefault(name, []).append(message)
        return notif_map

    def genNotif(self, remote_agent: str | bytes, msg: str | bytes, backends: Sequence[int] = ()) -> nixl_status_t:
        """Sends a notification. Raises nixlNotFoundError, nixlRemoteDisconnectError."""
        with in_nixls_words():
            self._agent.notify(text_of(remote_agent), bytes_of(msg))
        return NIXL_SUCCESS


_KINDS = {kind: kind.name.removesuffix("_SEG").lower() for kind in nixl_mem_t}


def _required(descs: Any, kind: type[Any]) -> Any:
    if not isinstance(descs, kind):
        raise TypeError(f"expected a {kind.__name__}, not {type(descs).__name__}")
    return descs


def _regions_of(descs: nixlRegDList) -> list[Region]:
    kind = _KINDS[descs.getType()]
    return [Region(int(address), int(nbytes), int(device), kind) for address, nbytes, device in descs.rows]


def _picked(prepared: _Prepared, indices: Any) -> NDArray[np.uint64]:
    """The rows that a caller picks. Raises nixlInvalidParamError, ValueError."""
    chosen = np.asarray(indices)
    if chosen.ndim != 1:
        raise ValueError("indices numpy array must be 1D")
    if not len(chosen) or chosen.dtype.kind not in "iu" or chosen.min() < 0 or chosen.max() >= len(prepared.rows):
        raise nixlInvalidParamError(f"expected indices from 0 to {len(prepared.rows) - 1}, at least one")
    rows: NDArray[np.uint64] = prepared.rows[chosen]
    return rows
