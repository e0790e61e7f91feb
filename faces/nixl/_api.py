"""NIXL's Python interface: agents, their configuration and their handles.

Names of agents and messages may be given as str or bytes. Any thread may call any method of an agent.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from proxyccl.nixl import _bindings as nixlBind
from proxyccl.nixl.descriptors import deserialize, nixlRegDList, nixlXferDList
from proxyccl.nixl.enums import nixl_cost_t, nixl_mem_t, nixl_status_t, nixl_thread_sync_t, nixl_xfer_op_t
from proxyccl.nixl.logging import get_logger

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from proxyccl.channels.transfers.grants import Grant

_T = TypeVar("_T")
_List = TypeVar("_List", nixlXferDList, nixlRegDList)

logger = get_logger("_api")

DEFAULT_COMM_PORT = nixlBind.DEFAULT_COMM_PORT
nixl_backend_handle = int


class _Handle:
    """A resource of an agent, which is released by `release` or when the handle is garbage-collected."""

    def __init__(self, agent: nixlBind.nixlAgent, value: int) -> None:
        self._handle = int(value)
        self._agent = agent
        self._released = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._handle:#x}, released={self._released})"

    def _release(self) -> None:
        raise NotImplementedError

    def release(self) -> None:
        """Releases the resource. A second call has no effect."""
        if not self._released:
            self._release()
            self._released = True

    def __del__(self) -> None:
        if not sys.is_finalizing():
            # A forked child can't release its parent's handles. A transfer that is still written ends as canceled.
            with contextlib.suppress(nixlBind.nixlCancelledError, nixlBind.nixlRepostActiveError):
                self.release()


class nixl_prepped_dlist_handle(_Handle):
    def _release(self) -> None:
        self._agent.releasedDlistH(self._handle)


class nixl_xfer_handle(_Handle):
    """A transfer. Releasing an active transfer cancels the transfer, or raises nixlRepostActiveError if a network
    adapter still writes the transfer's data.
    """

    def _release(self) -> None:
        self._agent.releaseXferReq(self._handle)

    def __del__(self) -> None:
        super().__del__()
        self._agent._transfers.pop(self._handle, None)


class nixl_agent_config:
    """The configuration of an agent.

    Args:
        enable_prog_thread: without effect: an agent always has a thread, which sleeps when there is nothing to do.
        enable_listen_thread: whether the agent listens at `listen_port`, where peers send and fetch metadata.
        listen_port: the port to listen at; 0 for any free port.
        capture_telemetry: whether `get_xfer_telemetry` works. ``NIXL_TELEMETRY_ENABLE`` overrides this setting.
        num_threads: without effect.
        backends: "UCX" and "LIBFABRIC" both mean ProxyCCL.
        sync_mode: without effect: an agent is thread-safe in every mode.

    Raises:
        TypeError: `sync_mode` is not a nixl_thread_sync_t.
    """

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: list[str] = ["UCX"],  # noqa: B006  NIXL's default; the list is never changed
        sync_mode: nixl_thread_sync_t | None = None,
    ) -> None:
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(f"sync_mode must be a nixl_thread_sync_t (got {type(sync_mode).__name__!r})")
        self.backends = backends
        self.enable_pthread = enable_prog_thread
        self.enable_listen = enable_listen_thread
        self.port = listen_port
        self.capture_telemetry = capture_telemetry
        self.num_threads = num_threads
        self.sync_mode = sync_mode


class nixl_agent:
    """An agent, which registers memory, and moves blocks between its own registered memory and the registered memory of
    other agents.

    The argument `backends` of methods is a list of names of created backends.

    Args:
        instantiate_all: whether to create all backends; ignored with `nixl_conf`.

    Attributes:
        agent: the agent as an object of `_bindings.nixlAgent`.
        backends: handles of the backends that were created, by name.

    Raises:
        ValueError: the name is empty.
    """

    def __init__(
        self, agent_name: str, nixl_conf: nixl_agent_config | None = None, instantiate_all: bool = False
    ) -> None:
        if nixl_conf and instantiate_all:
            logger.warning("instantiate_all is ignored: the configuration names the backends")
        conf = nixl_conf or nixl_agent_config()
        modes = nixl_thread_sync_t
        default = modes.NIXL_THREAD_SYNC_STRICT if conf.enable_listen else modes.NIXL_THREAD_SYNC_NONE
        config = nixlBind.nixlAgentConfig(
            useListenThread=conf.enable_listen,
            listenPort=conf.port,
            captureTelemetry=conf.capture_telemetry,
            syncMode=(conf.sync_mode or default).value,
        )
        self.agent = nixlBind.nixlAgent(agent_name, config)
        self.name = agent_name
        self.notifs: dict[str, list[bytes]] = {}
        self.backends: dict[str, int] = {}
        self.backend_mems: dict[str, list[str]] = {}
        self.backend_options: dict[str, dict[str, str]] = {}
        self.plugin_list = self.agent.getAvailPlugins()
        for backend in self.plugin_list if instantiate_all and not nixl_conf else conf.backends:
            if backend in self.plugin_list:
                self.create_backend(backend)
            else:
                logger.warning("The backend %s is skipped: it is not one of %s", backend, ", ".join(self.plugin_list))
        self.nixl_mems = {
            "DRAM": nixl_mem_t.DRAM_SEG,
            "VRAM": nixl_mem_t.VRAM_SEG,
            "FILE": nixl_mem_t.FILE_SEG,
            "BLOCK": nixl_mem_t.BLK_SEG,
            "OBJ": nixl_mem_t.OBJ_SEG,
            "cpu": nixl_mem_t.DRAM_SEG,
            "cuda": nixl_mem_t.VRAM_SEG,
        }
        self.nixl_ops = {"WRITE": nixl_xfer_op_t.NIXL_WRITE, "READ": nixl_xfer_op_t.NIXL_READ}
        logger.info("Initialized NIXL agent: %s", agent_name)

    # Backends

    def get_plugin_list(self) -> list[str]:
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        """Returns the kinds of memory that a backend, created or not, supports. For an unknown name, logs a warning and
        returns [].
        """
        return self._plugin(backend)[1]

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        return self._plugin(backend)[0]

    def _plugin(self, backend: str) -> tuple[dict[str, str], list[str]]:
        if backend not in self.plugin_list:
            logger.warning("The backend %s is not one of %s", backend, ", ".join(self.plugin_list))
            return {}, []
        return self.agent.getPluginParams(backend)

    def get_backend_mem_types(self, backend: str) -> list[str]:
        """Returns the kinds of memory of a created backend. For other backends, logs a warning and returns []."""
        return self._created(backend, self.backend_mems) or []

    def get_backend_params(self, backend: str) -> dict[str, str]:
        return self._created(backend, self.backend_options) or {}

    def _created(self, backend: str, known: dict[str, _T]) -> _T | None:
        if backend not in known:
            logger.warning("The backend %s was not created", backend)
        return known.get(backend)

    def create_backend(self, backend: str, initParams: dict[str, str] | None = None) -> None:
        """Creates a backend. Raises nixlNotFoundError if the name is unknown, and nixlInvalidParamError if the backend
        was already created.
        """
        handle = self.agent.createBackend(backend, initParams or {})
        self.backends[backend] = handle
        self.backend_options[backend], self.backend_mems[backend] = self.agent.getBackendParams(handle)
        logger.info("Backend %s was instantiated", backend)

    def _handles(self, backends: Sequence[str]) -> list[int]:
        return [self.backends[backend] for backend in backends]

    # Memory

    def register_memory(self, reg_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()) -> nixlRegDList:
        """Registers memory. `reg_list` and `mem_type` are the arguments of `get_reg_descs`. Returns the list of
        descriptors that `deregister_memory` takes.

        Raises:
            nixlBackendError: the memory is neither host memory nor device memory that can be shared.
            nixlNotFoundError: no backend was created.
        """
        descs = self.get_reg_descs(reg_list, mem_type)
        self.agent.registerMem(descs, self._handles(backends))  # type: ignore[arg-type]  # None is a TypeError
        return descs  # type: ignore[return-value]

    def deregister_memory(self, dereg_list: nixlRegDList, backends: Sequence[str] = ()) -> None:
        """Deregisters memory. Raises nixlNotFoundError if the memory is not registered."""
        self.agent.deregisterMem(dereg_list, self._handles(backends))

    def query_memory(self, reg_list: Any, backend: str, mem_type: str | None = None) -> list[dict[str, str] | None]:
        """Raises nixlNotSupportedError, because ProxyCCL can't query memory. Raises ValueError if the backend was not
        created.
        """
        descs = self.get_reg_descs(reg_list, mem_type)
        if backend not in self.backends:
            raise ValueError(f"Backend '{backend}' not found. Available backends: {list(self.backends)}")
        return self.agent.queryMem(descs, self.backends[backend])  # type: ignore[arg-type]

    def grant(
        self, descs: nixlXferDList, lease: float | None = None, key: int | None = None, writes: bool = False
    ) -> Grant:
        """Lets other agents read, or write, descriptors of this agent's memory until the grant is revoked. This method
        is not NIXL's. The list, also after `get_serialized_descs`, carries the grant: a transfer of its descriptors by
        another agent raises nixlBackendError if the grant was revoked before the transfer was complete.

        Args:
            descs: a list of this agent's descriptors, which must be registered and must not overlap.
            lease: seconds after which the grant ends; None for no limit.
            key: an integer from 0 to 2^40 - 1, which this agent has not used before, for `granted_dlist` of agents that
                do not receive the list.
            writes: whether the grant is for writes, rather than reads. Only agents of this host can write with a grant,
                to DRAM; other agents get nixlNotSupportedError.

        Returns:
            The grant. Call its `revoke` before the memory is overwritten. After a grant for writes, no byte arrives
            once `revoke` has returned True.

        Raises:
            nixlInvalidParamError: descriptors overlap, or `lease` or `key` is invalid.
            nixlNotFoundError: a descriptor is not registered.
        """
        return self.agent.grant(descs, lease, key, writes)

    def granted_dlist(self, dlist: nixl_prepped_dlist_handle, grant: bytes | int) -> nixl_prepped_dlist_handle:
        """Returns a prepared list with the descriptors of `dlist`, a prepared list of another agent. Transfers of the
        returned list check the grant, which `grant` names by its bytes (`Grant.encoded`) or its key. This method is not
        NIXL's.

        Raises:
            nixlInvalidParamError: `dlist` is not a prepared list of another agent.
        """
        return nixl_prepped_dlist_handle(self.agent, self.agent.grantedDlist(dlist._handle, grant))

    # Transfers

    def make_connection(self, remote_agent: str | bytes, backends: Sequence[str] = ()) -> None:
        """Connects to an agent now; otherwise the first use of the agent connects. Raises nixlNotFoundError if the
        agent is unknown, and nixlRemoteDisconnectError if the agent can't be reached.
        """
        self.agent.makeConnection(remote_agent, self._handles(backends))

    def prep_xfer_dlist(
        self, agent_name: str | bytes, xfer_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> nixl_prepped_dlist_handle:
        """Prepares a list of descriptors. A transfer names descriptors of two prepared lists, the initiator's and the
        other agent's, by index.

        Args:
            agent_name: "NIXL_INIT_AGENT" or "" for the initiator's list. For the other agent's list, the name of that
                agent, which may be this agent.
            xfer_list: a list that `get_xfer_descs` takes; or an array of uint64 or int64 of shape (N, 5). Each row of
                the array, (address, bytes, device, stride, count), describes `count` blocks whose addresses are
                `stride` bytes apart. The blocks of all rows are numbered in order: a row's first index is one more than
                the last index of the row before it.
            mem_type: as for `get_xfer_descs`.

        Raises:
            nixlNotFoundError: the agent is unknown, the list is empty, a descriptor is not in registered memory, or the
                blocks of a row overlap or are not all in one registration.
            ValueError: `mem_type` is None with an array of shape (N, 5).
        """
        name = nixlBind.NIXL_INIT_AGENT if agent_name == "NIXL_INIT_AGENT" else agent_name
        handles = self._handles(backends)
        if isinstance(xfer_list, np.ndarray) and xfer_list.ndim == 2 and xfer_list.shape[1] == 5:
            if mem_type is None:
                raise ValueError("mem_type is needed with an array of blocks")
            handle = self.agent.prepXferDlist(name, self.nixl_mems[mem_type], xfer_list, handles)
        else:
            handle = self.agent.prepXferDlist(name, self.get_xfer_descs(xfer_list, mem_type), handles)
        return nixl_prepped_dlist_handle(self.agent, handle)

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        """Returns (0, 0, "UNKNOWN"), because ProxyCCL does not estimate costs. NIXL returns the duration in
        microseconds, the error margin in microseconds, and the method of the estimate.
        """
        duration, margin, method = self.agent.estimateXferCost(req_handle._handle)
        known = method == nixl_cost_t.NIXL_COST_ANALYTICAL_BACKEND
        return duration, margin, "ANALYTICAL_BACKEND" if known else "UNKNOWN"

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: Sequence[int] | NDArray[Any],
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: Sequence[int] | NDArray[Any],
        notif_msg: bytes | str = b"",
        backends: Sequence[str] = (),
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        """Makes a transfer between two prepared lists, which copies between the descriptors at each local index and the
        corresponding remote index. Unless `notif_msg` is empty, the other agent receives this message as a notification
        when the data has arrived. `skip_desc_merge` has no effect.

        Raises:
            KeyError: the operation is neither "READ" nor "WRITE".
            nixlInvalidParamError: a list or an index is wrong, or the local and the remote descriptors differ in number
                or length.
            nixlNotFoundError: the agent was removed (even if another agent has its name), or memory of a list was
                deregistered (even if it was registered again).
        """
        op = self.nixl_ops[operation]
        handle = self.agent.makeXferReq(
            op,
            local_xfer_side._handle,
            local_indices,
            remote_xfer_side._handle,
            remote_indices,
            notif_msg,
            self._handles(backends),
            skip_desc_merge,
        )
        return nixl_xfer_handle(self.agent, handle)

    def initialize_xfer(
        self,
        operation: str,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: str | bytes,
        notif_msg: bytes | str = b"",
        backends: Sequence[str] = (),
    ) -> nixl_xfer_handle:
        """Makes a transfer between two lists that `get_xfer_descs` returned. `remote_agent` may be this agent.
        `notif_msg` is as for `make_prepped_xfer`.

        Raises:
            nixlInvalidParamError: the lists differ in their number of descriptors or in a descriptor's length.
            nixlNotFoundError: the agent is unknown, the lists are empty, or a descriptor is not in registered memory.
            nixlRemoteDisconnectError: the agent can't be reached.
        """
        op = self.nixl_ops[operation]
        handles = self._handles(backends)
        handle = self.agent.createXferReq(op, local_descs, remote_descs, remote_agent, notif_msg, handles)
        return nixl_xfer_handle(self.agent, handle)

    def transfer(self, handle: nixl_xfer_handle, notif_msg: bytes | str = b"") -> str:
        """Starts a transfer, or starts it again. Returns the transfer's state: "DONE", or "PROC" while the transfer is
        in progress. If `notif_msg` is not empty, it replaces the message with which the transfer was made.

        Raises:
            nixlNotFoundError: the agent was removed.
            nixlRepostActiveError: the transfer is still in progress.
            nixlRemoteDisconnectError, nixlBackendError: the transfer failed during this call.
        """
        return _state(self.agent.postXferReq(handle._handle, notif_msg))

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """Returns a transfer's state: "DONE", or "PROC" while the transfer is in progress. Raises the errors of
        `transfer`, and nixlNotPostedError if the transfer was not started.
        """
        return _state(self.agent.getXferStatus(handle._handle))

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlBind.nixlXferTelemetry:
        """Returns the times and sizes of a transfer. Raises nixlNoTelemetryError if telemetry is not enabled, and
        nixlNotPostedError if the transfer was not started.
        """
        return self.agent.getXferTelemetry(handle._handle)

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        backend = self.agent.queryXferBackend(handle._handle)
        return next(name for name, value in self.backends.items() if value == backend)

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        """Releases a transfer, and cancels the transfer if it is active. After this call, the transfer writes no local
        memory.
        """
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        """Releases a prepared list. Transfers that were made from the list stay usable."""
        handle.release()

    # Notifications

    def get_new_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """Returns the notifications that have arrived since the last call, by sender."""
        return self.agent.getNotifs({}, self._handles(backends))

    def update_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """Adds the new notifications to those in `notifs`, and returns `notifs`."""
        self.notifs = self.agent.getNotifs(self.notifs, self._handles(backends))
        return self.notifs

    def check_remote_xfer_done(
        self,
        remote_agent_name: str | bytes,
        lookup_tag: bytes,
        backends: Sequence[str] = (),
        tag_is_prefix: bool = True,
    ) -> bool:
        """Returns whether a notification has arrived that begins with `lookup_tag` (contains `lookup_tag` if
        `tag_is_prefix` is False), and removes the first such notification from `notifs`.
        """
        name = remote_agent_name.decode() if isinstance(remote_agent_name, bytes) else remote_agent_name
        messages = self.update_notifs(backends).get(name, [])
        for index, message in enumerate(messages):
            if message.startswith(lookup_tag) if tag_is_prefix else lookup_tag in message:
                del messages[index]
                return True
        return False

    def send_notif(self, remote_agent_name: str | bytes, notif_msg: bytes | str, backend: str | None = None) -> None:
        """Sends a notification without a transfer. Raises nixlNotFoundError if the agent is unknown, and
        nixlRemoteDisconnectError if the agent can't be reached.
        """
        self.agent.genNotif(remote_agent_name, notif_msg, [] if backend is None else [self.backends[backend]])

    # Metadata

    def get_agent_metadata(self) -> bytes:
        """Returns this agent's metadata, with which another agent can read and write this agent's registered memory."""
        return self.agent.getLocalMD()

    def get_partial_agent_metadata(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: Sequence[str] = ()
    ) -> bytes:
        """Returns a part of this agent's metadata: the registered memory of `descs`, and, if `inc_conn_info` is set or
        `descs` is empty, the address at which the agent listens. Raises nixlNotFoundError if a descriptor is not
        registered.
        """
        return self.agent.getLocalPartialMD(descs, inc_conn_info, self._handles(backends))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Adds the agent that made the metadata, or, if that agent is known already, adds the metadata's memory to the
        known memory of the agent. Returns the agent's name as bytes.

        Raises:
            nixlMismatchError: the bytes are not metadata.
            nixlInvalidParamError: the metadata are this agent's own.
            nixlNotFoundError: the metadata are partial, and the agent is unknown.
            nixlNotAllowedError: another agent of this name is known.
        """
        return self.agent.loadRemoteMD(metadata)

    def remove_remote_agent(self, agent: str | bytes) -> None:
        """Removes an agent that was added, and disconnects from it."""
        self.agent.invalidateRemoteMD(agent)

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Sends this agent's metadata to a peer that listens. Raises nixlInvalidParamError if `ip_addr` is empty."""
        self.agent.sendLocalMD(ip_addr, port)

    def send_partial_agent_metadata(
        self,
        descs: nixlRegDList,
        inc_conn_info: bool = False,
        backends: Sequence[str] = (),
        ip_addr: str = "",
        port: int = DEFAULT_COMM_PORT,
        label: str = "",
    ) -> None:
        """Sends a part of this agent's metadata to a peer that listens. `label` has no effect."""
        self.agent.sendLocalPartialMD(descs, inc_conn_info, self._handles(backends), ip_addr, port, label)

    def fetch_remote_metadata(
        self, remote_agent: str | bytes, ip_addr: str = "", port: int = DEFAULT_COMM_PORT, label: str = ""
    ) -> None:
        """Requests the metadata of a peer that listens. `check_remote_metadata` returns True once the metadata have
        arrived.
        """
        self.agent.fetchRemoteMD(remote_agent, ip_addr, port, label)

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Asks a listening peer to remove this agent from its known agents."""
        self.agent.invalidateLocalMD(ip_addr, port)

    def check_remote_metadata(self, agent: str | bytes, descs: nixlXferDList | None = None) -> bool:
        """Returns whether an agent was added and, if `descs` is given, whether the agent's known memory contains all
        descriptors.
        """
        asked = nixlXferDList(nixl_mem_t.DRAM_SEG) if descs is None else descs
        return self.agent.checkRemoteMD(agent, asked) == nixl_status_t.NIXL_SUCCESS

    # Descriptors

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> nixlXferDList | None:
        """Returns a list of descriptors for a transfer.

        Args:
            descs: a list of (address, bytes, device) tuples; an array of uint64 or int64 of shape (N, 3); a contiguous
                tensor, or a list of such tensors on one device; or a nixlXferDList, which is returned unchanged.
            mem_type: the kind of memory, for tuples and arrays: "DRAM", "VRAM", "FILE", "BLOCK", "OBJ", "cpu" or
                "cuda".

        Returns:
            The list, or, after logging an error, None if `descs` or `mem_type` is wrong.
        """
        if isinstance(descs, nixlRegDList):
            logger.error("This is a list for registration; expected one for a transfer")
            return None
        return self._descs(nixlXferDList, (), descs, mem_type)

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> nixlRegDList | None:
        """Returns a list of descriptors for registration. The arguments are those of `get_xfer_descs`, except that each
        tuple has a fourth element, str or bytes, which has no effect.
        """
        if isinstance(descs, nixlXferDList):
            logger.error("This is a list for a transfer; expected one for registration")
            return None
        return self._descs(nixlRegDList, ("",), descs, mem_type)

    def _descs(self, kind: type[_List], rest: tuple[str, ...], descs: Any, mem_type: str | None) -> _List | None:
        if isinstance(descs, kind):
            return descs
        array = isinstance(descs, np.ndarray)
        if array or (not _is_tensor(descs) and isinstance(descs[0], tuple)):
            fits = descs.ndim == 2 and descs.shape[1] == 3 if array else len(descs[0]) == 3 + len(rest)
            if mem_type is None:
                logger.error("mem_type is needed with tuples and arrays")
            elif not fits:
                logger.error("Expected an array of shape (N, 3), or tuples of %d elements", 3 + len(rest))
            else:
                return kind(self.nixl_mems[mem_type], descs)
            return None
        tensors = [descs] if _is_tensor(descs) else list(descs)
        if not all(_is_tensor(tensor) for tensor in tensors):
            return None
        device = tensors[0].device
        if any(tensor.device != device or not tensor.is_contiguous() for tensor in tensors):
            logger.error("Expected contiguous tensors on one device")
            return None
        number = max(0, tensors[0].get_device())  # -1: the CPU's
        rows = [(tensor.data_ptr(), tensor.numel() * tensor.element_size(), number, *rest) for tensor in tensors]
        return kind(self.nixl_mems["DRAM" if tensors[0].get_device() == -1 else "VRAM"], rows)

    def get_serialized_descs(self, descs: nixlXferDList | nixlRegDList) -> bytes:
        return descs.serialize()

    def deserialize_descs(self, serialized_descs: bytes) -> nixlXferDList | nixlRegDList:
        """Returns the list that `get_serialized_descs` turned into these bytes. Raises nixlMismatchError if the bytes
        are not a serialized list.
        """
        return deserialize(serialized_descs)


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # before torch is imported, no object is a tensor
    return torch is not None and isinstance(value, torch.Tensor)


def _state(status: nixl_status_t) -> str:
    return "DONE" if status is nixl_status_t.NIXL_SUCCESS else "PROC"
