"""Opens RDMA devices and makes their endpoints. An endpoint is a reliable connected (RC) queue pair for one peer."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from proxyccl.device.errors import ArgumentError, ClosedError, RuntimeUnavailableError, TransportError
from proxyccl.device.ffi_types import fill
from proxyccl.proxy import _engine
from proxyccl.proxy.remote_options import MTUS, RdmaOptions
from proxyccl.proxy.verbs.address import EndpointAddress
from proxyccl.proxy.verbs.devices import DeviceChoice, rdma_devices
from proxyccl.proxy.verbs.pyverbs_api import error_number, load

ffi, lib = _engine.ffi, _engine.lib

SIGNAL_BYTES = 8
_MOST_READS = 16
_HOP_LIMIT = 64
_RNR_TIMER = 12  # libibverbs' code for 0.64 ms
_RETRY_PAUSE = 0.05
_PSNS = 1 << 24
_PSN_STEP = 0x9E3779  # multiples of this odd number are spread over all packet sequence numbers
# The errors that the system reports until the network has resolved the peer's address.
_NOT_YET = (errno.ETIMEDOUT, errno.EAGAIN, errno.EHOSTUNREACH, errno.EINTR)


def _psn_after(psn: int, failure: int) -> int:
    return (psn + failure * _PSN_STEP) % _PSNS


class VerbsDevice:
    """An opened device and its protection domain, to which endpoints and registered memory belong.

    Closing the device also closes its endpoints and registrations. The device is a context manager.

    Attributes:
        api: the pyverbs that opened the device.
        choice: the device, the port and the index of the port's GID.
        gid: the chosen GID.
        options: the settings of the device's endpoints.
        pd: the protection domain, a pyverbs object.
        access: libibverbs' access flags for memory that is registered with the device.
        mtu: the largest path MTU that endpoints may use, in bytes.
        max_message: maximum number of bytes of one work request.
        reads: number of a peer's reads and atomics that the device executes at a time; 0 if the device supports no
            reads.
        atomics: number of a peer's atomics that the device executes at a time; 0 if the device supports no atomics.
        dependents: the endpoints and registrations, which must be closed before the protection domain.

    Raises:
        ArgumentError: the port lacks the chosen GID or the MTU of `options`; the message says what the port has.
        ResourceError: the device can't allocate a protection domain.
        RuntimeUnavailableError: pyverbs is missing, or can't open the device; the message says why.
    """

    def __init__(self, choice: DeviceChoice, options: RdmaOptions) -> None:
        name, port = choice.device.name, choice.port
        self.api = api = load()
        self.choice = choice
        self.options = options
        gids = {gid.index: gid for gid in choice.device.port(port).gids}
        if choice.gid_index not in gids:
            existing = ", ".join(map(str, gids.values()))
            raise ArgumentError("gid_index", f"{name} port {port} has no GID {choice.gid_index}; there is {existing}")
        self.gid = gids[choice.gid_index]
        with contextlib.ExitStack() as undo:
            self._context = context = api.open(name)
            undo.callback(context.close)
            with api.calling("ibv_query_device or ibv_query_port", name):
                self._limits = limits = context.query_device()
                port_attributes = context.query_port(port)
            active_mtu = MTUS[port_attributes.active_mtu - 1]
            if options.mtu is not None and options.mtu > active_mtu:
                raise ArgumentError("mtu", f"{options.mtu} exceeds the active MTU of {name} port {port}, {active_mtu}")
            self.mtu = options.mtu or active_mtu
            self.max_message: int = port_attributes.max_msg_sz
            has_atomics = limits.atomic_caps != api.enumerator("IBV_ATOMIC_NONE")
            self.reads: int = min(_MOST_READS, limits.max_qp_rd_atom, limits.max_qp_init_rd_atom)
            self.atomics = self.reads if has_atomics else 0
            # The flags do not include relaxed ordering, so that a signal can't overtake its data.
            self.access = api.enumerator("IBV_ACCESS_LOCAL_WRITE") | api.enumerator("IBV_ACCESS_REMOTE_WRITE")
            if self.reads:
                self.access |= api.enumerator("IBV_ACCESS_REMOTE_READ")
            if self.atomics:
                self.access |= api.enumerator("IBV_ACCESS_REMOTE_ATOMIC")
            with api.calling("ibv_alloc_pd", name):
                self.pd = api.PD(context)
            undo.pop_all()
        self.dependents: weakref.WeakSet[Any] = weakref.WeakSet()
        self._scratch: Any = None
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> VerbsDevice:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        return self.choice.device.name

    @property
    def speed(self) -> int:
        """The port's rate in Gbit/s, at least 1."""
        return max(1, int(self.choice.device.port(self.choice.port).rate))

    def find_gid(self) -> int | None:
        """Returns the present index of the device's GID, which changes if the port has been down; None if the port is
        not active.
        """
        found = next((each for each in rdma_devices() if each.name == self.name), None)
        port = next((each for each in found.ports if each.number == self.choice.port), None) if found else None
        if port is None or port.state != "active":
            return None
        gids = (gid for gid in port.gids if (gid.address, gid.type) == (self.gid.address, self.gid.type))
        return next((gid.index for gid in gids), None)

    def endpoint(self) -> Endpoint:
        """Makes an unconnected endpoint for one peer.

        Raises:
            ResourceError: the device can't allocate another queue.
            RuntimeUnavailableError: the device does not support the requested kind of signal, or any kind of signal.
        """
        self.require_open()
        made = Endpoint(self, self._context, self._limits)
        self.dependents.add(made)
        return made

    def scratch(self) -> Any:
        """Returns a registered region of 8 bytes, to which fetch-adds write old values. Nothing reads these values. The
        first call registers the region.
        """
        with self._lock:
            if self._scratch is None:
                with self.api.calling("ibv_reg_mr", f"{SIGNAL_BYTES} bytes on {self.name}"):
                    self._scratch = self.api.MR(self.pd, SIGNAL_BYTES, self.access)
            return self._scratch

    def require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the RDMA device {self.name} is closed")

    def close(self) -> None:
        """Closes the endpoints, registrations, protection domain and context. No request may be outstanding."""
        if self._closed:
            return
        self._closed = True
        with self.api.calling("ibv_close_device", self.name), contextlib.ExitStack() as closing:
            closing.callback(self._context.close)
            closing.callback(self.pd.close)
            if self._scratch is not None:
                closing.callback(self._scratch.close)
            for dependent in tuple(self.dependents):
                closing.callback(dependent.close)


class Endpoint:
    """A queue pair and its completion queue. Made by `VerbsDevice.endpoint`.

    Attributes:
        signal: how the endpoint advances a peer's counter: "write" or "fetch_add".
        send_depth: number of work requests that the send queue can hold.
        mtu: the path MTU in bytes; before the endpoint is connected, the largest MTU that the device supports.
        peer: the peer's address; None until the endpoint is connected.
    """

    def __init__(self, device: VerbsDevice, context: Any, limits: Any) -> None:
        self._device = device
        self._api = device.api
        self._closed = False
        self.peer: EndpointAddress | None = None
        self.mtu = device.mtu
        # The send queue and the completion queue have the same depth, because after an error every request has a
        # completion.
        self.send_depth: int = min(device.options.send_depth, limits.max_qp_wr, limits.max_cqe)
        self._psn = secrets.randbits(24)
        with self._api.calling("ibv_create_cq", f"{self.send_depth} completions on {device.name}"):
            self._cq = self._api.CQ(context, self.send_depth)
        try:
            self._qp, self.signal = self._create_queue_pair()
        except BaseException:
            self._cq.close()
            raise

    def _create_queue_pair(self) -> tuple[Any, str]:
        device, api, wanted = self._device, self._api, self._device.options.signal
        subject = f"a queue pair with {self.send_depth} requests on {device.name}"

        def create(inline: int) -> tuple[Any, int]:
            capacities = api.QPCap(max_send_wr=self.send_depth, max_recv_wr=1, max_inline_data=inline)
            init = api.QPInitAttr(
                qp_type=api.enumerator("IBV_QPT_RC"), scq=self._cq, rcq=self._cq, cap=capacities, sq_sig_all=0
            )
            return api.QP(device.pd, init), init.max_inline_data

        try:
            qp, inline = create(0 if wanted == "fetch_add" else SIGNAL_BYTES)
        except api.PyverbsError as cause:
            if wanted != "auto" or not device.atomics:
                raise api.error("ibv_create_qp", subject, cause) from cause
            with api.calling("ibv_create_qp", subject):
                qp, inline = create(0)
        signal = "write" if wanted != "fetch_add" and inline >= SIGNAL_BYTES else "fetch_add"
        if wanted not in ("auto", signal) or (signal == "fetch_add" and not device.atomics):
            qp.close()
            atomics = "supports atomics" if device.atomics else "supports no atomics"
            raise RuntimeUnavailableError(
                f"signal {wanted!r} is not supported: {device.name} takes {inline} bytes inline, where a write needs "
                f"{SIGNAL_BYTES}, and {atomics}"
            )
        return qp, signal

    @property
    def address(self) -> bytes:
        """This endpoint's address, as bytes, which the peer passes to its `connect`."""
        self._require_open()
        return self._own_address().encode()

    def _own_address(self) -> EndpointAddress:
        device = self._device
        port = device.choice.device.port(device.choice.port)
        return EndpointAddress(
            qp_number=self._qp.qp_num,
            psn=self._psn,
            gid=ipaddress.IPv6Address(device.gid.address).packed,
            gid_type=device.gid.type,
            link_layer=port.link_layer,
            lid=port.lid,
            port=port.number,
            mtu=device.mtu,
            atomics=device.atomics,
            reads=device.reads,
        )

    def connect(self, peer: bytes, timeout: float = 30.0, given_up: Callable[[], bool] = lambda: False) -> None:
        """Connects to a peer's endpoint, given the `address` of that endpoint. The peer must likewise connect to this
        endpoint.

        The call does not wait for the peer to connect. While the network does not resolve the peer's address, the call
        retries until `timeout` seconds have passed or `given_up` returns True.

        Raises:
            ArgumentError: the bytes are not an address, or this port can't reach the peer.
            TransportError: the system refuses to connect, or the network has not resolved the address in time.
        """
        self._require_open()
        if self.peer is not None:
            raise ArgumentError("peer", f"this endpoint is connected to {self.peer} already")
        address = EndpointAddress.decode(peer)
        self._require_reachable(address)
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._to_ready(address, 0, self._device.choice.gid_index)
                break
            except self._api.PyverbsError as cause:
                if error_number(cause) not in _NOT_YET or given_up() or time.monotonic() >= deadline:
                    error = self._api.error("ibv_modify_qp", f"{self._device.name} to {address}", cause)
                    raise TransportError(str(error), operation="connect") from cause
            time.sleep(_RETRY_PAUSE)
        self.mtu = min(self._device.mtu, address.mtu)
        self.peer = address

    def stop(self) -> bool:
        """Puts the queue pair into its error state, in which the device executes no requests. Returns False if the
        system refuses.
        """
        self._require_open()
        try:
            self._set_state("IBV_QPS_ERR")
        except self._api.PyverbsError:
            return False
        return True

    def _set_state(self, state: str) -> None:
        api = self._api
        self._qp.modify(api.QPAttr(qp_state=api.enumerator(state)), api.enumerator("IBV_QP_STATE"))

    def reconnect(self, failure: int) -> bool:
        """Resets the queue pair, discards its completions, and connects it to the peer again. Nothing else may use the
        queue pair meanwhile. Both ranks must reconnect after the same failure, so that both compute the same packet
        sequence numbers, which differ from those of the requests before the failure.

        Args:
            failure: number of the failure, from 1.

        Returns:
            False if the port is not active, or the system refuses. The caller then tries again later.

        Raises:
            ArgumentError: the endpoint was never connected.
            ClosedError: the endpoint is closed.
        """
        self._require_open()
        if self.peer is None:
            raise ArgumentError("endpoint", "is not connected; call connect first")
        try:
            gid_index = self._device.find_gid()
            if gid_index is None:
                return False
            self._set_state("IBV_QPS_RESET")
            while self._cq.poll(self.send_depth)[0]:
                pass
            self._to_ready(self.peer, failure, gid_index)
        except (self._api.PyverbsError, OSError):  # OSError: the device was removed, with its files in sysfs
            return False
        return True

    def _to_ready(self, peer: EndpointAddress, failure: int, gid_index: int) -> None:
        """Makes the queue pair ready to send to the peer, after this number of failures."""
        device, api, options = self._device, self._api, self._device.options
        attributes = api.QPAttr(port_num=device.choice.port)
        attributes.qp_access_flags = device.access
        attributes.path_mtu = MTUS.index(min(device.mtu, peer.mtu)) + 1
        attributes.dest_qp_num = peer.qp_number
        attributes.rq_psn = _psn_after(peer.psn, failure)
        attributes.max_dest_rd_atomic = device.reads
        attributes.min_rnr_timer = _RNR_TIMER
        attributes.ah_attr = self._path_to(peer, gid_index)
        attributes.sq_psn = _psn_after(self._psn, failure)
        attributes.timeout = options.timeout
        attributes.retry_cnt = options.retry_count
        attributes.rnr_retry = options.rnr_retry_count
        attributes.max_rd_atomic = min(device.reads, peer.reads)
        self._qp.to_init(attributes)
        self._qp.to_rtr(attributes)
        self._qp.to_rts(attributes)

    def _require_reachable(self, address: EndpointAddress) -> None:
        own = self._own_address()
        if (own.link_layer, own.gid_type) != (address.link_layer, address.gid_type):
            raise ArgumentError(
                "peer",
                f"it is on {address.link_layer} with a GID of {address.gid_type}, and {self._device.name} on "
                f"{own.link_layer} with one of {own.gid_type}; choose with the options device, port and gid_index",
            )
        if self.signal == "fetch_add" and not address.atomics:
            raise ArgumentError(
                "peer", f"its device supports no atomics, and {self._device.name} signals by them (option signal)"
            )

    def _path_to(self, address: EndpointAddress, gid_index: int) -> Any:
        api, device, own = self._api, self._device, self._own_address()
        route = api.GlobalRoute(
            dgid=api.GID(address.gid.hex(":", 2)),
            sgid_index=gid_index,
            hop_limit=_HOP_LIMIT,
            traffic_class=device.options.traffic_class,
        )
        # Within an InfiniBand subnet, the LID suffices as the peer's address; otherwise the GID is needed.
        routed = own.link_layer == "ethernet" or own.gid[:8] != address.gid[:8]
        return api.AHAttr(
            gr=route,
            is_global=int(routed),
            dlid=address.lid,
            sl=device.options.service_level,
            port_num=device.choice.port,
        )

    def engine_options(self, signal_rkey: int) -> Any:
        """Returns the ProxycclVerbsOptions for a connection over this endpoint. The endpoint must outlive the
        connection. `signal_rkey` is the remote key of the memory that contains the peer's semaphore words.

        Raises:
            ArgumentError: the endpoint is not connected.
            RuntimeUnavailableError: libibverbs' queue pair can't be found in pyverbs' object.
        """
        self._require_open()
        if self.peer is None:
            raise ArgumentError("endpoint", "is not connected; call connect first")
        made = fill(
            ffi.new("ProxycclVerbsOptions *"),
            qp=self._api.queue_pair(self._qp),
            send_depth=self.send_depth,
            cq_depth=self.send_depth,
            max_message=self._device.max_message,
            signal=lib.PROXYCCL_VERBS_WRITE,
            signal_rkey=signal_rkey,
            reads=min(self._device.reads, self.peer.reads),
        )
        if self.signal == "write":
            return made
        scratch = self._device.scratch()
        return fill(made, signal=lib.PROXYCCL_VERBS_FETCH_ADD, scratch=scratch.buf, scratch_lkey=scratch.lkey)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the RDMA endpoint is closed")

    def close(self) -> None:
        """Destroys the queue pair and its completion queue. No request may be outstanding, and no engine may still use
        the queue pair.
        """
        if self._closed:
            return
        self._closed = True
        with self._api.calling("ibv_destroy_qp", self._device.name):
            self._qp.close()
        with self._api.calling("ibv_destroy_cq", self._device.name):
            self._cq.close()
