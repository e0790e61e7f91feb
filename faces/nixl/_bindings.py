"""The names of NIXL's module `_bindings`: the class of agents, lists of descriptors, enumerations and exceptions.

`nixl_agent` is a thin layer over this module's `nixlAgent`. This module represents handles and backends by numbers;
`nixl_agent` represents handles by objects that release themselves, and backends by names. The docstrings of
`nixl_agent` describe the calls and their errors.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from proxyccl.channels.transfers.agent import Agent
from proxyccl.channels.transfers.grants import Grant
from proxyccl.channels.transfers.preparing import Side
from proxyccl.channels.transfers.regions import Region
from proxyccl.channels.transfers.transfer import State, Transfer
from proxyccl.device.errors import ArgumentError, ProxyCCLError, RuntimeUnavailableError
from proxyccl.nixl.descriptors import StridedRows, bytes_of, nixlRegDList, nixlXferDList, text_of
from proxyccl.nixl.enums import nixl_cost_t, nixl_mem_t, nixl_status_t, nixl_thread_sync_t, nixl_xfer_op_t
from proxyccl.nixl.errors import *  # noqa: F403  NIXL's module has all exceptions
from proxyccl.nixl.errors import (
    in_nixl,
    in_nixls_words,
    nixlBackendError,
    nixlInvalidParamError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlNotSupportedError,
)
from proxyccl.nixl.metadata_exchange import Request, Sender, listen

DEFAULT_COMM_PORT = 8888
NIXL_INIT_AGENT = ""
HAVE_UCX_GPU_DEVICE_API = False

for _kind in (nixl_cost_t, nixl_mem_t, nixl_status_t, nixl_thread_sync_t, nixl_xfer_op_t):
    globals().update(_kind.__members__)  # exported because NIXL's extension module exports these names

_BACKENDS = ["UCX", "LIBFABRIC"]  # both names mean ProxyCCL; programs request backends by these names
_UNKNOWN_COST = 1
_HANDLES = itertools.count(16, 16)
"""Yields the numbers of new handles. All agents of a process take numbers from it, so that an agent can refuse another
agent's handle.
"""

_YES = ("y", "yes", "1", "on", "true")


class nixlAgentConfig(Struct):
    """The configuration of an agent. Fields that configure NIXL's own threads have no effect."""

    useProgThread: bool = False
    useListenThread: bool = False
    listenPort: int = 0
    syncMode: nixl_thread_sync_t | int = nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
    numWorkers: int = 1
    pthrDelay: int = 0
    lthrDelay: int = 100000
    captureTelemetry: bool = False
    etcdWatchTimeout: int = 5000000


class nixlXferTelemetry(Struct):
    """The times and sizes of the latest post of a transfer. Times are in microseconds, and at least 1. NIXL's class
    lacks the field `path`.
    """

    startTime: int = 0
    postDuration: int = 0
    xferDuration: int = 0
    totalBytes: int = 0
    descCount: int = 0
    path: str = ""


class _Prepared(Struct, frozen=True, eq=False):
    """A prepared list, and the registered memory that contains its descriptors. `is_own` says whether the list is the
    initiator's. `grant`: the bytes of the list's grant, or the grant's key; b"" without a grant.
    """

    rows: NDArray[np.uint64] | StridedRows
    side: Side
    is_own: bool
    grant: bytes | int


class _Posted(Struct, eq=False):
    transfer: Transfer
    name: str
    notification: bytes | None
    count: int


class nixlAgent:
    """An agent with the methods of NIXL's extension module. Any thread may call any method, in every mode. The
    constructor raises ValueError if the name is empty.
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
            listen(self, config.listenPort)

    # Backends

    def getAvailPlugins(self) -> list[str]:
        return list(_BACKENDS)

    def getPluginParams(self, type: str) -> tuple[dict[str, str], list[str]]:
        if type not in _BACKENDS:
            raise nixlNotFoundError(f"the backend {type!r} is not one of {', '.join(_BACKENDS)}")
        return {}, [nixl_mem_t.DRAM_SEG.name, nixl_mem_t.VRAM_SEG.name]

    def getBackendParams(self, backend: int) -> tuple[dict[str, str], list[str]]:
        if backend not in self._backends:
            raise nixlNotFoundError("the backend was not created")
        return self.getPluginParams(self._backends[backend])

    def createBackend(self, type: str, initParams: dict[str, str]) -> int:
        self.getPluginParams(type)
        with self._lock:
            if type in self._backends.values():
                raise nixlInvalidParamError(f"the backend {type} was already created")
            handle = next(_HANDLES)
            self._backends[handle] = type
        return handle

    # Memory

    def registerMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        regions = _regions_of(_required(descs, nixlRegDList))
        if not self._backends:
            raise nixlNotFoundError("no backend was created")
        if descs.getType() not in (nixl_mem_t.DRAM_SEG, nixl_mem_t.VRAM_SEG):
            raise nixlBackendError(f"ProxyCCL moves DRAM and VRAM, not {descs.getType().name}")
        try:
            self._agent.register_regions(regions)
        except ProxyCCLError as error:
            if descs.getType() == nixl_mem_t.VRAM_SEG and isinstance(error, ArgumentError | RuntimeUnavailableError):
                raise nixlBackendError(str(error)) from error
            raise in_nixl(error) from error
        return nixl_status_t.NIXL_SUCCESS

    def deregisterMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        with in_nixls_words():
            self._agent.deregister(*_regions_of(_required(descs, nixlRegDList)))
        return nixl_status_t.NIXL_SUCCESS

    def grant(self, descs: nixlXferDList, lease: float | None, key: int | None, writes: bool) -> Grant:
        granted = _required(descs, nixlXferDList)
        with in_nixls_words():
            made = self._agent.grant(granted.rows[:, :2], lease=lease, key=key, writes=writes)
        granted.grant = made.encoded
        return made

    def queryMem(self, descs: nixlRegDList, backend: int) -> list[dict[str, str] | None]:
        raise nixlNotSupportedError("ProxyCCL does not move files or objects, and memory has nothing to query")

    # Other agents

    def getLocalMD(self) -> bytes:
        if not self._backends:
            raise nixlInvalidParamError("no backend was created")
        with in_nixls_words():
            return self._agent.metadata()

    def getLocalPartialMD(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: Sequence[int] = ()
    ) -> bytes:
        regions = _regions_of(_required(descs, nixlRegDList))
        with in_nixls_words():
            return self._agent.metadata(regions, place=inc_conn_info or not regions)

    def loadRemoteMD(self, remote_metadata: bytes | str) -> bytes:
        with in_nixls_words():
            return self._agent.add(bytes_of(remote_metadata)).encode()

    def invalidateRemoteMD(self, remote_agent: str | bytes) -> nixl_status_t:
        name = text_of(remote_agent)
        with in_nixls_words():
            if name in self._agent.peers:
                self._agent.remove(name)
        return nixl_status_t.NIXL_SUCCESS

    def forgetSender(self, metadata: bytes) -> None:
        """Removes the agent that sent these metadata, if that agent was added. Another agent that took the same name is
        not removed.
        """
        with in_nixls_words():
            self._agent.remove_agent_of(metadata)

    def checkRemoteMD(self, remote_agent: str | bytes, descs: nixlXferDList) -> nixl_status_t:
        name = text_of(remote_agent)
        with contextlib.suppress(nixlNotFoundError):  # another thread may remove the agent
            if name in self._agent.peers and self._find(name, descs)[1] is None:
                return nixl_status_t.NIXL_SUCCESS
        return nixl_status_t.NIXL_ERR_NOT_FOUND

    def makeConnection(self, remote_agent: str | bytes, backends: Sequence[int] = ()) -> nixl_status_t:
        with in_nixls_words():
            self._agent.connect(text_of(remote_agent))
        return nixl_status_t.NIXL_SUCCESS

    def sendLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
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
        self._send(ip_addr, port, Request.LOAD, self.getLocalPartialMD(descs, inc_conn_info))

    def fetchRemoteMD(self, remote_agent: str | bytes, ip_addr: str = "", port: int = 0, label: str = "") -> None:
        self._send(ip_addr, port, Request.FETCH, b"")

    def invalidateLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
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
        """Prepares a list. The arguments are ``(descs, backend)`` for the initiator's list, and ``(agent_name, descs,
        backend)`` for the other agent's list.

        If `descs` is an array for `StridedRows`, the kind of memory is one more argument: ``(agent_name, mem_type,
        descs, backend)``.

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
        self._prepared[handle] = _Prepared(rows, side, not name, descs.grant)
        return handle

    def grantedDlist(self, handle: int, grant: bytes | int) -> int:
        """Returns the handle of a prepared list of another agent that is the list of `handle`, with a grant."""
        prepared = self._prepared.get(handle)
        if prepared is None or prepared.is_own:
            raise nixlInvalidParamError("expected a prepared list of the other side")
        made = next(_HANDLES)
        self._prepared[made] = replace(prepared, grant=grant)
        return made

    def releasedDlistH(self, handle: int) -> nixl_status_t:
        self._prepared.pop(handle, None)
        return nixl_status_t.NIXL_SUCCESS

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
        local, remote = self._prepared.get(local_side), self._prepared.get(remote_side)
        if local is None or remote is None or not local.is_own or remote.is_own:
            raise nixlInvalidParamError("expected a prepared list of this agent's side, then one of the other side")
        ours, theirs = _picked(local, local_indices), _picked(remote, remote_indices)
        return self._make(operation, ours, theirs, notif_msg, local.side, remote.side, remote.grant)

    def createXferReq(
        self,
        operation: nixl_xfer_op_t,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: str | bytes,
        notif_msg: str | bytes = "",
        backend: Sequence[int] = (),
    ) -> int:
        name = text_of(remote_agent)
        local, remote = _required(local_descs, nixlXferDList), _required(remote_descs, nixlXferDList)
        self._require_known(name)
        if len(local) != len(remote) or not np.array_equal(local.rows[:, 1], remote.rows[:, 1]):
            raise nixlInvalidParamError("the lists differ in their number of descriptors, or in a length")
        sides = self._check(self._name, local), self._check(name, remote)
        return self._make(operation, local.rows, remote.rows, notif_msg, *sides, remote.grant)

    def _make(
        self,
        operation: nixl_xfer_op_t,
        local: NDArray[np.uint64],
        remote: NDArray[np.uint64],
        notification: str | bytes,
        ours: Side,
        theirs: Side,
        grant: bytes | int,
    ) -> int:
        if not len(local) or len(local) != len(remote) or not np.array_equal(local[:, 1], remote[:, 1]):
            raise nixlInvalidParamError("the two sides differ in their number of descriptors, or in a length")
        rows = np.column_stack((local[:, 0], remote[:, :2]))
        with in_nixls_words():
            writes = operation == nixl_xfer_op_t.NIXL_WRITE
            transfer = self._agent.prepare_checked(writes, rows, ours, theirs, grant=None if grant == b"" else grant)
        handle = next(_HANDLES)
        self._transfers[handle] = _Posted(transfer, theirs.name, bytes_of(notification) or None, len(local))
        return handle

    def estimateXferCost(self, req_handle: int) -> tuple[int, int, int]:
        self._transfer(req_handle)
        return 0, 0, _UNKNOWN_COST

    def postXferReq(self, reqh: int, notif_msg: str | bytes = "") -> nixl_status_t:
        posted = self._transfer(reqh)
        try:  # not `in_nixls_words`, which would take longer than `start`
            posted.transfer.start(bytes_of(notif_msg) if notif_msg else posted.notification)
            return nixl_status_t.NIXL_SUCCESS if posted.transfer.done() else nixl_status_t.NIXL_IN_PROG
        except ProxyCCLError as error:
            self._require_known(posted.name)
            raise in_nixl(error) from error

    def getXferStatus(self, reqh: int) -> nixl_status_t:
        posted = self._transfer(reqh)
        try:
            return nixl_status_t.NIXL_SUCCESS if posted.transfer.done() else nixl_status_t.NIXL_IN_PROG
        except ProxyCCLError as error:
            raise in_nixl(error) from error

    def getXferTelemetry(self, reqh: int) -> nixlXferTelemetry:
        if not self._telemetry:
            raise nixlNoTelemetryError("enable it by capture_telemetry or NIXL_TELEMETRY_ENABLE")
        posted = self._transfer(reqh)
        transfer, times = posted.transfer, posted.transfer.times
        if transfer.state is State.NEW:
            raise nixlNotPostedError
        ended = time.monotonic_ns() if transfer.state is State.ACTIVE else times.ended
        post = max(1, (min(times.returned, ended) - times.posted) // 1000)
        whole = max(post, (ended - times.posted) // 1000)
        elapsed = time.monotonic_ns() - times.posted
        started = time.time_ns() - elapsed
        return nixlXferTelemetry(started // 1000, post, whole, transfer.nbytes, posted.count, str(transfer.path))

    def queryXferBackend(self, reqh: int) -> int:
        self._transfer(reqh)
        return next(iter(self._backends))

    def releaseXferReq(self, reqh: int) -> nixl_status_t:
        posted = self._transfers.get(reqh)
        if posted is not None:
            with in_nixls_words():
                posted.transfer.close()
            self._transfers.pop(reqh, None)
        return nixl_status_t.NIXL_SUCCESS

    def _transfer(self, handle: int) -> _Posted:
        posted = self._transfers.get(handle)
        if posted is None:
            raise nixlInvalidParamError("the transfer was released")
        return posted

    def _require_known(self, name: str) -> None:
        if name != self._name and name not in self._agent.peers:
            raise nixlNotFoundError(f"no agent of the name {name!r} was added")

    def _check(self, name: str, descs: nixlXferDList) -> Side:
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
        with in_nixls_words():
            for name, message in self._agent.messages():
                notif_map.setdefault(name, []).append(message)
        return notif_map

    def genNotif(self, remote_agent: str | bytes, msg: str | bytes, backends: Sequence[int] = ()) -> nixl_status_t:
        with in_nixls_words():
            self._agent.notify(text_of(remote_agent), bytes_of(msg))
        return nixl_status_t.NIXL_SUCCESS


_KINDS = {kind: kind.name.removesuffix("_SEG").lower() for kind in nixl_mem_t}


def _required(descs: Any, kind: type[Any]) -> Any:
    if not isinstance(descs, kind):
        raise TypeError(f"expected a {kind.__name__}, not {type(descs).__name__}")
    return descs


def _regions_of(descs: nixlRegDList) -> list[Region]:
    kind, numbers = _KINDS[descs.getType()], iter(descs.numbers())
    return [Region(*row, kind) for row in zip(numbers, numbers, numbers, strict=True)]


def _picked(prepared: _Prepared, indices: Any) -> NDArray[np.uint64]:
    chosen = np.asarray(indices)
    if chosen.ndim != 1:
        raise ValueError("indices numpy array must be 1D")
    if not len(chosen) or chosen.dtype.kind not in "iu" or chosen.min() < 0 or chosen.max() >= len(prepared.rows):
        raise nixlInvalidParamError(f"expected indices from 0 to {len(prepared.rows) - 1}, at least one")
    rows: NDArray[np.uint64] = prepared.rows[chosen]
    return rows
