"""Starts a rank's proxy, and makes the proxy's connection to each peer."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Collection, Sequence
from typing import Any

from proxyccl.channels.device_memory import DeviceMemory
from proxyccl.channels.joining.meeting import Meeting
from proxyccl.channels.joining.topology import RankInfo
from proxyccl.channels.liveness.failure import FailureState
from proxyccl.channels.remote import RemoteLinks
from proxyccl.channels.segment.control import ControlSegment
from proxyccl.device.errors import WaitTimeoutError
from proxyccl.device.process.cores import core_share, usable_cores
from proxyccl.proxy.daemon.choice import ChosenDaemon
from proxyccl.proxy.daemon.client import DaemonClient, Proxy
from proxyccl.proxy.daemon.connection import NodeDaemon
from proxyccl.proxy.daemon.hello import DaemonAddress
from proxyccl.proxy.daemon.job import JobDaemon, JobOptions
from proxyccl.proxy.daemon.protocol import socket_path
from proxyccl.proxy.interface import Connection, HandleProvider
from proxyccl.proxy.observe.publications import Description
from proxyccl.proxy.processes import cores_of, decode_cores, parse_cores
from proxyccl.proxy.service import ProxyService
from proxyccl.proxy.thread import IdlePolicy, choose_idle
from proxyccl.proxy.transports.table import TRANSPORTS
from proxyccl.proxy.workers import MAX_RINGS

_LOADS_LAZILY = (
    'proxy="thread": the driver loads kernels at their first launch, and the copies of this proxy wait meanwhile, '
    'which may end in a time-out; set CUDA_MODULE_LOADING=EAGER before the program starts, or use proxy="process"'
)
_SHARES_QUEUES = (
    'proxy="thread": with %s the copies of this proxy may share a queue of the device with streams that wait for them, '
    "and then end in a time-out; set CUDA_DEVICE_MAX_CONNECTIONS and CUDA_DEVICE_MAX_COPY_CONNECTIONS to 32 before the "
    'program starts, or use proxy="process"'
)


class PeerLinks:
    """The proxy and the connections that move data between this rank's memory and its peers'.

    Args:
        meeting: the ranks.
        failure: notified when the proxy fails.
        description: the proxy's description for observers.
        whole: the links of the parent of a split group; None for other groups.

    Attributes:
        place: where the proxy runs.
        topology: the placement of the ranks; complete after `bring_up`.
        host_ranks: number of this host's ranks; for a split group, the number of the parent's ranks on this host.
        container_ranks: how many of the `host_ranks` are in this rank's container.
        remote: this rank's links to other hosts.
        schedule_ids: how many of the proxy's memory ids are for peers' registered ranges in schedules.
    """

    def __init__(
        self,
        meeting: Meeting,
        failure: FailureState,
        device_memory: DeviceMemory,
        description: Description,
        whole: PeerLinks | None,
    ) -> None:
        self._runtime, self._control, self._segments = meeting.runtime, meeting.control, meeting.segments
        self._exchange, self._failure, self._options = meeting.exchange, failure, meeting.options.proxy
        self.place, self.topology = meeting.place, meeting.topology
        self._device_memory, self._description, self._whole = device_memory, description, whole
        self._lock = threading.RLock()
        self._proxy: Proxy | None = None
        devices = {info.device_id for info in self._of_host()}
        own = self._runtime.device_id
        self._daemon = ChosenDaemon(self._addresses, self._runtime.name, own, sorted(devices - {own}))
        self._connections: dict[tuple[int, bool], Connection] = {}  # by peer, and by `private` of `connection`
        self._transports: dict[int, str] = {}
        self.schedule_ids = 0
        self.host_ranks: int = len(self._of_host()) if whole is None else whole.host_ranks
        self.container_ranks: int = len(self._of_container()) if whole is None else whole.container_ranks
        share = core_share(self.host_ranks, self.container_ranks)
        self.remote = RemoteLinks(meeting, lambda: self.proxy, share)

    def bring_up(self) -> None:
        """Opens the devices of remote transports, if any two ranks need one. All ranks call this together."""
        if self.topology.has_remote_pairs():
            reasons = self.remote.probe(self.topology.transports())
            self.topology = self.topology.with_unsupported_reasons(reasons)
            self.remote.by_peer = self.topology.transports()
        self._transports = self.topology.transports()

    def prepare(self, peers: Collection[int]) -> None:
        """Makes the endpoints for connections to these peers. All ranks call this together, before `connection`.

        Raises the errors of `RemoteLinks.connect_endpoints`.
        """
        if self.topology.has_remote_pairs():
            self.remote.connect_endpoints(peers)

    def start_early(self) -> None:
        """Starts the job's own daemon in the background, if the proxy is to run in that daemon."""
        if self.place.where == "process" and self._exchange.world_size > 1 and self._whole is None:
            self._daemon.begin(self._exchange.timeout)

    @property
    def proxy(self) -> Proxy:
        """This rank's proxy, started when first used."""
        with self._lock:
            if self._proxy is None:
                self._failure.require_usable()
                self._proxy = self._start()
                for ring in self._proxy.rings:
                    self._device_memory.add(ring.device_memory, "channels")
            return self._proxy

    def _start(self) -> Proxy:
        if self.place.where == "thread":
            if self._runtime.loads_lazily:
                warnings.warn(_LOADS_LAZILY, RuntimeWarning, stacklevel=2)
            if (limit := self._runtime.queue_limit) is not None:
                warnings.warn(_SHARES_QUEUES % limit, RuntimeWarning, stacklevel=2)
            return ProxyService(
                self._runtime,
                self._control.host_pointer,
                self._control.memory,
                idle=self._idle(),
                cores=self._cores(),
                **self._common(),
            )
        return DaemonClient(
            self._runtime,
            self._control.memory,
            idle=self._options.idle,
            timeout=lambda: self._exchange.timeout,
            address=self._daemon,
            takes_private=self._takes_private,
            **self._common(),
        )

    def _addresses(self) -> list[DaemonAddress]:
        """Returns the addresses of daemons. The first of these daemons that has access to this rank's device runs the
        proxy. If a launcher has confined the rank and its children to one device, only the last of these daemons, which
        the rank starts itself, has this access.
        """
        node: list[DaemonAddress] = [NodeDaemon(socket_path())] if self.place.where == "daemon" else []
        if node and self.place.chosen:
            return node
        name, options = self.place.job_daemon, self._job_options()
        return [*node, JobDaemon(name, options), JobDaemon(f"{name}-{self._runtime.device_id}", options)]

    @property
    def proxy_if_started(self) -> Proxy | None:
        """The proxy; None before its first use."""
        return self._proxy

    def _common(self) -> dict[str, Any]:
        return {
            **self._options.rings(self._exchange.world_size),
            "shared_offset": ControlSegment.service_offset,
            "semaphores_offset": ControlSegment.semaphore_offset(0),
            "on_failure": self._failure.file_proxy_failure,
            "description": self._description,
            "name": f"proxyccl-{self._exchange.rank}",
        }

    def _cores(self) -> list[int] | None:
        cores = self._options.cores
        return parse_cores(cores, self._runtime.numa_node()) if cores is not None else None

    def _of_host(self) -> list[RankInfo]:
        return [info for rank, info in enumerate(self.topology.ranks) if self.topology.same_host(rank)]

    def _of_container(self) -> list[RankInfo]:
        own = self.topology.ranks[self.topology.rank].process.view
        return [info for info in self._of_host() if info.process.view == own]

    def _job_options(self) -> JobOptions:
        beside = self._of_container()
        return JobOptions(
            threads=min(MAX_RINGS, usable_cores(self._options.threads * len(beside))),
            cores=self._cores(),
            affinity=sorted(self._host_cores(beside)),
            programs=len(beside),
        )

    def _host_cores(self, of_host: Sequence[RankInfo]) -> set[int]:
        """Returns the cores that any of these ranks may run on; a rank in another PID namespace has reported its cores
        when joining.
        """
        return set().union(
            *(cores_of(info.process.pid) if info.process.is_visible else decode_cores(info.cores) for info in of_host)
        )

    def _idle(self) -> IdlePolicy:
        """Returns the idle policy of a proxy in this process: the caller's policy, if given, else one chosen by the
        number of cores of the host's ranks.
        """
        if self._options.idle is not None:
            return self._options.idle
        of_host, threads = self._of_host(), self._options.threads
        cores = self._host_cores(of_host).union(self._cores() or ())
        confined = len(cores_of(os.getpid())) > threads  # if False, the proxy's threads run on all cores (workers.py)
        beside = len(self._of_container())
        return choose_idle(
            len(cores) if confined else os.cpu_count() or 1,
            len(of_host),
            len(of_host) * threads,
            (beside, beside * threads),
        )

    @property
    def _takes_private(self) -> bool:
        """Whether copies from memory that other processes can't map get a separate connection. False if the caller
        requested the node daemon, which refuses such memory.
        """
        return self.place.where == "process" or (self.place.where == "daemon" and not self.place.chosen)

    def transport(self, peer: int) -> str:
        """Returns the name of the transport that moves data to a peer; "copy" for this rank itself."""
        return "copy" if peer == self._exchange.rank else self._transports[peer]

    def connection(self, peer: int, *, private: bool = False) -> Connection:
        """Returns the proxy's connection to a peer or to this rank itself, made on first use. Call `prepare` before.

        Args:
            peer: the rank at the connection's other end.
            private: whether the connection's channels copy from memory that no other process can map.
        """
        transport = self.transport(peer)
        remote = TRANSPORTS[transport].is_remote
        key = peer, private and self._takes_private and not remote
        with self._lock:
            if key not in self._connections:
                self._connections[key] = (
                    self.remote.context.open_connection(peer)
                    if remote
                    else self.proxy.connect_copy(peer=peer, transport=transport, private=key[1])
                )
            return self._connections[key]

    def semaphore(self, peer: int, channel: int) -> int:
        """Returns the address at which the transport to a peer increments the signal count of the peer's channel."""
        if peer == self._exchange.rank:
            return self._control.semaphore_host(channel)
        if TRANSPORTS[self._transports[peer]].is_remote:
            return self.remote.semaphore(peer, channel)
        return self._segments[peer].semaphore_host(channel)

    def semaphore_handle(self, peer: int, channel: int) -> HandleProvider:
        """Returns a function that returns the handle by which a proxy in another process maps the word of `semaphore`;
        b"" if the word is on another host.
        """
        if peer == self._exchange.rank:
            return functools.partial(self._control.semaphore_handle, channel)
        return functools.partial(self._segments[peer].semaphore_handle, channel) if peer in self._segments else bytes

    def drain(self) -> None:
        """Waits until the proxy has carried out all triggers of kernels that have ended.

        Raises:
            CommunicatorError: the group failed first.
            WaitTimeoutError: triggers were not carried out within the time-out.
        """
        timeout = self._exchange.timeout
        if self._proxy is not None and not self._proxy.drain(timeout, lambda: self._failure.aborted):
            self._failure.check()
            raise WaitTimeoutError(f"the proxy did not carry out all triggers within {timeout:g} s")

    def drain_for_peers(self) -> None:
        """Waits until the proxy has completed this rank's transfers to other hosts, which need the peers' proxies or
        network devices.
        """
        if self._proxy is not None and self.remote.used:
            self._proxy.drain(self._exchange.timeout, lambda: self._failure.aborted)

    def close(self) -> bool:
        """Closes the proxy and the remote links. Returns False if a handler still runs; the caller must not free memory
        that the handler's thread uses.
        """
        if self._proxy is not None and not self._proxy.close(self._exchange.timeout):
            return False
        self._daemon.drop()
        self.remote.close()
        return True
