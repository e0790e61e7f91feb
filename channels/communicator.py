"""`Communicator`: a group of ranks that can access each other's memory, with all public calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple

from msgspec.structs import replace

from proxyccl.channels import array_libraries, program_exit, proxy_channel, sm_channel
from proxyccl.channels.collective_calls import CollectiveCalls
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.request import CTA_POLICIES, CTA_POLICY, INVARIANT, SUSPENDABLE, Standing, flag_from
from proxyccl.channels.collectives.tensor_calls import TensorCalls
from proxyccl.channels.group import Group
from proxyccl.channels.handles import ChannelSet
from proxyccl.channels.joining.bootstrap import as_bootstrap, of_process_group, require_mpi
from proxyccl.channels.joining.meeting import Options, meet
from proxyccl.channels.joining.proxy_place import ProxyOptions, requested_place
from proxyccl.channels.joining.topology import Topology, TransportChoice
from proxyccl.channels.lent_memory import limit_of_environment
from proxyccl.channels.memory import RegisteredMemory, allocate, deregister, register
from proxyccl.channels.proxy_channel import HandlerChannel, ProxyChannel
from proxyccl.channels.ranks import as_rank, as_ranks
from proxyccl.channels.reports.reporter import Reporter
from proxyccl.channels.segment.error_record import raised
from proxyccl.channels.sm_channel import SmChannel
from proxyccl.channels.timeouts import as_seconds, timeout_from
from proxyccl.channels.window import Window
from proxyccl.device.arguments.flags import as_flag
from proxyccl.device.arguments.texts import choice_from, require_text, require_texts
from proxyccl.device.arrays.array import Array
from proxyccl.device.environment import warn_of_unknown
from proxyccl.device.errors import (
    AbortedError,
    ArgumentError,
    ClosedError,
    CommunicatorError,
    ProxyCCLError,
    ResourceError,
    RuntimeUnavailableError,
    SuspendedError,
)
from proxyccl.device.kernel import Kernel, Module
from proxyccl.device.runtime import Runtime, StreamLike
from proxyccl.proxy.daemon.client import Proxy
from proxyccl.proxy.remote_options import FabricOptions, RdmaOptions, TransportOptions
from proxyccl.proxy.thread import IdlePolicy
from proxyccl.proxy.trigger import Trigger


def _require_instance(argument: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise ArgumentError(argument, f"must be an object of {kind.__name__} or None, not {value!r}")


class CallCounts(NamedTuple):
    """The numbers of calls that a communicator has launched and prepared.

    Attributes:
        made: calls that were launched.
        prepared: kinds of calls that were prepared; see `Communicator.calls`.
    """

    made: int
    prepared: int


class Communicator(CollectiveCalls):
    """A group of ranks.

    All ranks construct a `Communicator` together, and call its collectives and registrations in the same order. So only
    one thread of a rank at a time may call collectives or register memory. Once `prepare_transfers` has returned, other
    threads may `send`, `recv` and use `transfers` at the same time.

    Use a communicator as a context manager, or call `close`.

    Args:
        bootstrap: a `Bootstrap`, an MPI communicator or a torch process group; None for MPI's world.
        runtime: this rank's `Runtime`, or the name of one ("host", "cuda", "hip"); None for
            ``PROXYCCL_RUNTIME``, else the first that the machine offers.
        device: device number, for a runtime given by name. None for the rank's number within its host, modulo the
            number of devices.
        timeout: bound of every wait, in seconds; None for ``PROXYCCL_TIMEOUT``, else 30.
        local_world_size: count this many consecutive ranks as a node; the same on all ranks. None for
            ``PROXYCCL_LOCAL_WORLD_SIZE``, else each host is a node.
        fifos: the number of rings of this rank's proxy; or "peer" for one ring for each peer, up to 64. A slow peer
            delays all channels that share its ring.
        proxy_threads: the number of threads that take triggers from the rings.
        fifo_size: the number of slots in each ring, a power of two.
        idle: the policy of an idle proxy, wherever the proxy runs; a thread that serves several proxies uses the most
            aggressive of their policies. None to choose by the free cores, or, in a node daemon, to use the daemon's
            policy.
        proxy: where the proxy runs: "thread", in this process, "process", in a daemon that the job's ranks start on
            each host and that ends with them, or "daemon", in the node daemon. None for ``PROXYCCL_PROXY``, else
            "thread" on the host runtime, and on GPUs "daemon" if the ranks of the host find one, else "process". The
            job's own daemon starts in the background when the communicator is made. On CUDA "thread" needs
            ``CUDA_MODULE_LOADING=EAGER``; without this setting the library warns when the proxy is first used.
        proxy_cores: cores that the proxy's threads may run on: numbers and ranges such as "0-3,8", "node:1" for the
            cores of NUMA node 1, "near" for those of the NUMA node next to the device; None for any core. The job's own
            daemon uses the setting of the rank that starts the daemon; the node daemon has its own setting.
        transport: the transport of ProxyChannels: "copy", "verbs" (RDMA), "staged" (RDMA through pinned memory),
            "fabric" (libfabric) or "staged_fabric" (libfabric through pinned memory) for all pairs of ranks, or a dict
            with some pairs, such as {(0, 1): "verbs"}; the same on all ranks. None for ``PROXYCCL_TRANSPORT``, else
            "copy" within a node, and between nodes "verbs", or "fabric" without RDMA; "staged" or "staged_fabric" if a
            rank's network device can't register its GPU's memory.
        rdma: the RDMA device and its settings; None for those in ``PROXYCCL_RDMA``, else the defaults of
            `RdmaOptions`.
        fabric: libfabric's provider, interface and settings; None for those in ``PROXYCCL_FABRIC``, else the defaults
            of `FabricOptions`.
        cta_policy: "zero" leaves the multiprocessors to the program, as NCCL_CTA_POLICY_ZERO does: collectives run by
            proxy unless a call names an algorithm or another policy. "efficiency" leaves most multiprocessors to the
            program: kernels have few blocks. "default" chooses the algorithm that is fastest on an idle device. All
            ranks pass the same `cta_policy`. None for ``PROXYCCL_CTA_POLICY``, else "default".
        invariant: whether the bits of each element that `all_reduce`, `reduce` or `reduce_scatter` returns depend only
            on the ranks' values of this element and on the group, and not on the array's size, the element's index, or
            the algorithm. If True, the library uses only algorithms that add in the same order, and refuses other
            algorithms. All ranks pass the same `invariant`. None for ``PROXYCCL_INVARIANT``, else False.
        suspendable: whether `suspend` may be called. If True, device memory of 1 MiB and more consists of blocks that
            can be unmapped (on CUDA, of the driver's virtual memory management, whose blocks are multiples of 2 MiB).
            All ranks pass the same `suspendable`. None for ``PROXYCCL_SUSPENDABLE``, else False.
        linger: seconds that the exiting process waits, without a report, for ranks that have not closed the
            communicator. With None, the process waits for `timeout` seconds, and then reports the missing ranks.

    Raises:
        ArgumentError: an argument is wrong, or ranks disagree on the runtime, the nodes, the transports, the policy,
            `invariant` or `suspendable`.
        RuntimeUnavailableError: the machine does not offer the runtime, no remote transport connects two nodes, the
            requested node daemon does not run, or the runtime can't suspend memory (on AMD GPUs).
        WaitTimeoutError: not all ranks arrived within the time.
    """

    def __init__(
        self,
        bootstrap: Any = None,
        runtime: Runtime | str | None = None,
        *,
        device: int | None = None,
        timeout: float | None = None,
        local_world_size: int | None = None,
        fifos: int | str = 1,
        proxy_threads: int = 1,
        fifo_size: int = 8192,
        idle: IdlePolicy | None = None,
        proxy: str | None = None,
        proxy_cores: str | None = None,
        transport: TransportChoice = None,
        rdma: RdmaOptions | None = None,
        fabric: FabricOptions | None = None,
        cta_policy: str | None = None,
        invariant: bool | None = None,
        suspendable: bool | None = None,
        linger: float | None = None,
    ) -> None:
        warn_of_unknown()
        array_libraries.keep_opaque(Communicator)
        _require_instance("idle", idle, IdlePolicy)
        _require_instance("rdma", rdma, RdmaOptions)
        _require_instance("fabric", fabric, FabricOptions)
        if not isinstance(runtime, str | None) and not hasattr(runtime, "activate"):
            raise ArgumentError("runtime", f"must be a name, a Runtime or None, not {runtime!r}")
        may_suspend = flag_from(suspendable, "suspendable", SUSPENDABLE)
        bits = flag_from(invariant, "invariant", INVARIANT)
        policy = choice_from(cta_policy, "cta_policy", CTA_POLICY, CTA_POLICIES)
        standing = Standing(policy, bits, may_suspend)
        limit_of_environment()  # raises an error for a wrong value before the ranks connect
        proxies = ProxyOptions(requested_place(proxy), fifos, proxy_threads, fifo_size, idle, proxy_cores)
        bounded = timeout_from(timeout)
        if linger is not None:
            linger = as_seconds(linger, "linger", "must be a number of seconds from 0 on", may_be_none=True)
        transports = TransportOptions(
            rdma or RdmaOptions.from_environment(), fabric or FabricOptions.from_environment()
        )
        options = Options(proxies, transports, transport, local_world_size, linger, may_suspend)
        joined, made_here = as_bootstrap(bootstrap)
        meeting = meet(joined, runtime, options, owns_bootstrap=made_here, timeout=bounded, device=device)
        self._open(Group(meeting), standing)

    def _open(self, group: Group, standing: Standing) -> None:
        self._take(group, standing)
        try:
            self._collectives.start()
        except ProxyCCLError:
            self._group.close()
            raise

    def _take(self, group: Group, standing: Standing) -> None:
        program_exit.watch()
        self._group = group
        self._collectives = Collectives(group, standing)
        try:
            with group.exchange.telling():
                group.open(Reporter(group))
        except BaseException:
            group.discard()
            raise

    def split(
        self,
        ranks: Sequence[int],
        *,
        timeout: float | None = None,
        bootstrap: Any = None,
        invariant: bool | None = None,
    ) -> Communicator:
        """Returns a communicator of some of the ranks, which call this together; the other ranks need not call it.

        The new communicator shares this communicator's runtime, process watches and mappings, and needs no bootstrap if
        the ranks share a host. If this communicator fails, is closed or is aborted, the new communicator fails too, but
        not vice versa.

        Args:
            ranks: numbers in this communicator, including this rank's; the same list on all members. A rank's index in
                the list is its number in the new communicator.
            timeout: bound of this call and of the new communicator's waits, in seconds; None for this communicator's.
            bootstrap: a `Bootstrap` of the members, in the order of their new numbers, which the caller keeps open.
                Threads that split the same ranks concurrently, or in a different order than on other ranks, need a
                separate bootstrap for each split. With None, the members meet through this communicator, and only one
                thread of a rank at a time may split.
            invariant: as for the constructor, but with None the new communicator has this communicator's setting.

        Raises:
            ArgumentError: the ranks are not different ranks of this communicator, or this rank is not among them; or
                the bootstrap does not join exactly the members.
            MismatchError: members passed different `ranks`.
            WaitTimeoutError: not all members arrived within the time. This communicator stays usable.
            ResourceError: this process has too few file descriptors left. This communicator stays usable on all
                members; the other members get an AbortedError.
            RuntimeUnavailableError: the ranks are on several hosts, and the bootstrap can't join some of its ranks.
        """
        self._group.failure.require_usable()
        members = as_ranks(self.world_size, ranks, "ranks")
        if self.rank not in members:
            raise ArgumentError("ranks", f"this rank, {self.rank}, is not among {members}; only members call this")
        bounded = self.timeout if timeout is None else timeout_from(timeout)
        if bootstrap is not None:
            place = getattr(bootstrap, "rank", None), getattr(bootstrap, "world_size", None)
            if place != (expected := (members.index(self.rank), len(members))):
                expecting = f"must have the rank and world_size {expected}, as this rank's place in {members}"
                raise ArgumentError("bootstrap", f"{expecting}, and has {place}")
        standing = self._collectives.standing
        if invariant is not None:
            standing = replace(standing, invariant=flag_from(invariant, "invariant", INVARIANT))
        part = object.__new__(Communicator)
        part._open(self._group.split(members, bounded, bootstrap), standing)
        return part

    def shrink(self, *, exclude: Sequence[int] = (), timeout: float | None = None) -> Communicator:
        """Returns a communicator of the remaining ranks, after a failure or without one. All remaining ranks call this,
        once.

        A rank remains unless its process has ended, it has closed this communicator, or `exclude` names it. A rank that
        does not arrive within the time-out does not remain, and this communicator fails. The ranks agree on the
        remaining ranks even if some of these fail during the call, and the remaining ranks keep their order.

        The call waits for the work that the ranks have queued on their devices. If this communicator has failed, the
        call closes it; otherwise this communicator stays usable, and closing it does not affect the new one. The new
        communicator keeps the device, compiled kernels, and the mappings of the other ranks' memory, and uses arrays of
        `empty` in place. Registered arrays are also used in place if all ranks share a host; registering an array again
        needs no new mapping. Channels must be made anew, because a failure leaves their counts of signals undefined. If
        this communicator failed while it was suspended, its arrays of `empty` are lost.

        Args:
            exclude: ranks to leave out; the same on all callers.
            timeout: bound of each wait for the other ranks and of the new communicator's waits, in seconds; None for
                this communicator's.

        Raises:
            ArgumentError: `exclude` names this rank, or something that is not a rank of this communicator.
            ExcludedError: this rank arrived too late, and the other ranks continued without this rank.
            MismatchError: a rank passed a different `exclude`. Further calls of `shrink` on this communicator fail.
            ClosedError: this communicator is closed, or was shrunk before.
            SuspendedError: this communicator is suspended and has not failed.
            PeerLostError: ranks were lost in each of the call's attempts.
            ResourceError: this process has too few file descriptors left. This communicator is closed, and the other
                ranks continue without this rank.
            RuntimeUnavailableError: the ranks are on several hosts, and the bootstrap has no board (`Bootstrap`).
        """
        self._group.failure.require_own_process()
        if self.closed:
            raise ClosedError("the communicator is closed; expected `shrink` before `close`")
        if self.suspended and not self._group.failure.aborted:
            raise SuspendedError("the communicator is suspended; expected `resume` before `shrink`")
        excluded = as_ranks(self.world_size, exclude, "exclude")
        if self.rank in excluded:
            raise ArgumentError(
                "exclude", f"{self.rank} is this rank; expected others, because only ranks that stay call this"
            )
        bounded = self.timeout if timeout is None else timeout_from(timeout)
        shrunk = object.__new__(Communicator)
        try:
            shrunk._take(self._group.shrink(frozenset(excluded), bounded), self._collectives.standing)
        except ResourceError as error:  # the other ranks notice that this rank has left, and continue without it
            self._group.failure.abort(f"shrink: {error}")
            self._group.close()
            raise
        if not self.suspended:  # the arrays of a communicator that failed while it was suspended have no memory
            shrunk._group.symmetric.inherit(self._group.symmetric)
        if self._group.failure.aborted:
            self._group.close()
        try:
            shrunk._collectives.start()
        except CommunicatorError:  # a rank was lost after all ranks had agreed
            try:
                again = shrunk.shrink(timeout=bounded)
            finally:
                shrunk._group.close()
            # `again` was shrunk from `shrunk`, which the caller never gets: its `members` must count as in this group.
            again._group.members = again._group.numbers_in(self._group) or ()
            return again
        except ProxyCCLError:
            shrunk._group.close()
            raise
        return shrunk

    def grow(self, bootstrap: Any, *, timeout: float | None = None) -> Communicator:
        """Returns a communicator of these ranks and new ranks, which join over a bootstrap.

        The ranks of this communicator call this; new processes construct a `Communicator` with their bootstrap, and
        with the same options. If `transport` is given for some pairs of ranks, all ranks must pass it, with the ranks'
        new numbers. This communicator stays usable, and closing it does not affect the new one. The new communicator
        keeps the device, compiled kernels, options and mappings, and uses arrays of `empty` in place. After a `shrink`,
        a new process can have the number of the lost rank, and each old rank the number that it had before.

        Either all ranks of this communicator get the new communicator, or the call raises an error on all of them.
        After an error this communicator is usable, unless it has itself failed.

        Args:
            bootstrap: a bootstrap of all ranks, old and new, in the order of their new numbers; as for the constructor.
            timeout: bound of every wait, in seconds; None for this communicator's.

        Raises the errors of the constructor; AbortedError if another rank could not join; PeerLostError if a new rank
        ended; or this communicator's failure as soon as this communicator fails.
        """
        self._group.failure.require_usable()
        bounded = self.timeout if timeout is None else timeout_from(timeout)
        joined, made_here = as_bootstrap(bootstrap)
        grown, is_open = object.__new__(Communicator), False
        failure: ProxyCCLError | None = None
        try:
            grown._take(self._group.grow(joined, bounded, owns_bootstrap=made_here), self._collectives.standing)
            is_open = True
            grown._collectives.start()
        except ProxyCCLError as error:
            failure = error
        try:
            all_have = self._group.all_have_grown(bounded, joined=failure is None)
        except BaseException:
            if is_open:
                grown._group.close(reason="grow: the ranks could not agree")
            raise
        if all_have:
            grown._group.symmetric.inherit(self._group.symmetric)
            return grown
        reason = "grow: a rank could not join"
        if is_open:
            grown._group.close(reason=reason)
        self._group.failure.require_usable()
        raise failure or AbortedError(reason, rank=self.rank, operation="grow")

    @property
    def members(self) -> tuple[int, ...]:
        """For each rank, the rank's number in the communicator that this communicator was split or shrunk from; empty
        if there is no such communicator.
        """
        return self._group.members

    @classmethod
    def from_mpi(cls, comm: Any = None, **options: Any) -> Communicator:
        """Makes a communicator of the ranks of an MPI communicator (None: all). The options are those of the
        constructor.
        """
        require_mpi(comm)
        return cls(comm, **options)

    @classmethod
    def from_torch(cls, group: Any = None, **options: Any) -> Communicator:
        """Makes a communicator of the ranks of a torch process group (None: the world). The options are those of the
        constructor.
        """
        return cls(of_process_group(group), **options)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._group.close(reason="" if error is None else raised(error))

    def __repr__(self) -> str:
        group = self._group
        return f"<Communicator rank {group.rank} of {group.world_size} on {group.runtime.name}, {group.failure}>"

    @property
    def group(self) -> Group:
        """The group under the communicator: exchanges, failure state, streams, proxy. For extensions."""
        return self._group

    @property
    def calls(self) -> CallCounts:
        """The numbers of calls of this communicator: collectives, barriers and calls of experts' layers.

        A call is prepared if it is the first call with its options, element types and shapes. Later calls with the same
        properties, even with new arrays, reuse the prepared form. For experts' calls, shapes that differ only in the
        number of tokens are treated as equal.
        """
        calls = self._group.launches.calls
        return CallCounts(calls.made, calls.prepared)

    def memory_usage(self) -> dict[str, int]:
        """Returns the bytes of device memory that this rank has allocated for the communicator, by purpose.

        The purposes are: "arrays" for the arrays of `empty`, "channels" for words of semaphores and rings, tables of
        links and counters, "experts" for layers of experts, "plans" for execution plans, "results" for arrays that
        calls have made, "scratch" for collectives by kernels, "staging" for collectives by proxy, and "transfers" for
        `send` and `recv`.

        The account has the requested sizes; a driver rounds allocations up. The account does not include memory of the
        program, such as registered tensors, the device's context, loaded kernels, and allocations of the proxy's
        process.
        """
        return self._group.device_memory.usage()

    @property
    def tensor_calls(self) -> TensorCalls:
        """The collectives of torch tensors that torch's backend calls."""
        return TensorCalls(self._collectives)

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._group.world_size

    @property
    def local_rank(self) -> int:
        """This rank's number within its node."""
        return self._group.topology.local_rank

    @property
    def local_world_size(self) -> int:
        """The number of ranks of this node."""
        return self._group.topology.local_world_size

    @property
    def runtime(self) -> Runtime:
        """This rank's runtime."""
        return self._group.runtime

    @property
    def topology(self) -> Topology:
        """The ranks' hosts, nodes and devices."""
        return self._group.topology

    @property
    def timeout(self) -> float:
        """The time-out of every wait, in seconds. Setting this property changes the time-out of this rank's later
        waits.
        """
        return self._group.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._group.set_timeout(timeout_from(seconds))

    @property
    def job(self) -> str:
        """The communicator's name in reports and for observers; the same on all ranks."""
        return self._group.job

    @property
    def proxy(self) -> Proxy:
        """This rank's proxy, started when first used."""
        return self._group.links.proxy

    @property
    def proxy_if_started(self) -> Proxy | None:
        """This rank's proxy; None before its first use."""
        return self._group.links.proxy_if_started

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._group.failure.closed

    # -- memory and channels ---

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Array:
        """Allocates an array with undefined contents in device memory.

        Collectives read and write the array directly, without staging; see `register`. ProxyChannels and SmChannels can
        use the array once it is registered.

        Args:
            shape: dimensions; all at least 0.
            dtype: an element type by name, or numpy's or torch's.
        """
        return allocate(self._group, shape, dtype, "arrays", symmetric=True)

    def register(self, array: Any) -> RegisteredMemory:
        """Registers an array so that peers can access it.

        All ranks call this together, each with its own array; sizes may differ. Collectives then use the array, and
        slices of it at any offset, in place, if all ranks' arrays are registered or made by `empty`. Otherwise
        collectives copy each rank's array through scratch memory.

        All peers can access memory that `empty` returns. On the host runtime all other arrays are private to their
        process: they can be the source of a put, but a peer that tries to access such an array gets an error that names
        the reason.

        The array is kept alive until `deregister`. Until `deregister`, do not free the array's memory by other means,
        such as hipFree or a tensor's ``untyped_storage().resize_(0)``. Collectives detect a freed array, and do not
        confuse a new array at its address with the registered one. Channels do not detect a freed array.

        Raises:
            ArgumentError: the argument is not an array, has no memory, or is on another device; or it is a result of
                `register` whose array was freed after its registration.
        """
        return self._register(array, "array")

    def _register(self, array: Any, argument: str) -> RegisteredMemory:
        return register(self._group, array, symmetric=True, argument=argument)

    def deregister(self, array: Any) -> None:
        """Ends the registration of an array, or of a result of `register`. Not collective.

        Neither queued work nor a graph that will be replayed may still use the array as registered memory. The program
        may free the array after the call. If any ranks use a remote transport, all ranks must deregister between the
        same two collectives, because the call also removes the peers' arrays from this rank's proxy.

        Raises:
            ArgumentError: the array is not registered.
        """
        deregister(self._group, array)

    def memory_pool(self) -> AbstractContextManager[Any]:
        """Makes torch allocate tensors in memory that peers can access. Not collective.

        Tensors that this thread allocates in the ``with`` block, on the communicator's device, and their slices, are
        registered for as long as they live. Collectives use these tensors in place if all ranks' arrays are registered.
        Until the peers have mapped a new tensor's memory, calls with the tensor may copy it through scratch memory.

        The pool belongs to the device, and lives as long as any communicator that has used it. Later ``with`` blocks,
        also of other communicators, reuse memory that a tensor frees. When the pool is destroyed, torch returns its
        memory to the driver, except for the memory of live tensors. Outside of the block, capture a graph into the pool
        with ``torch.cuda.graph(graph, pool=pool.id)``.

        Returns:
            A context manager that yields the ``torch.cuda.MemPool``.

        Raises:
            RuntimeUnavailableError: torch is missing, older than 2.8 or built for another vendor, or the communicator
                uses the host runtime.
        """
        pool: AbstractContextManager[Any] = array_libraries.load("torch: pools").pool_for(self._group)
        return pool

    def sm_channels(
        self, dst: Any, src: Any = None, *, packet_buffer: Any = None, peers: Sequence[int] | None = None
    ) -> ChannelSet[SmChannel]:
        """Makes channels through which kernels access the peers' memory. All ranks call this together.

        Args:
            dst: an array or registered memory; a put writes to, and a get reads from, the `dst` of the peer.
            src: local memory that put reads and get writes; None for `dst`.
            packet_buffer: local memory that peers' putPackets fill and getPackets reads; None for `dst`.
            peers: ranks to connect to, in the order of the channels; may include this rank. With None, there is a
                channel to each other rank, in rank order.

        Raises:
            ArgumentError: a peer is not a rank, or this rank's kernels can't access the peer's memory.
        """
        chosen = self._peers(peers)
        target = self._register(dst, "dst")
        source = target if src is None else self._register(src, "src")
        packets = target if packet_buffer is None else self._register(packet_buffer, "packet_buffer")
        return sm_channel.connect(self._group, target, source, packets, chosen)

    def proxy_channels(
        self, dst: Any, src: Any = None, *, peers: Sequence[int] | None = None
    ) -> ChannelSet[ProxyChannel]:
        """Makes channels through which kernels have the proxy move data.

        All ranks call this together. The arguments are those of `sm_channels`.

        Raises:
            ArgumentError: a peer is not a rank, or the peer's memory can't be shared.
            ResourceError: memory or channel ids ran out.
        """
        chosen = self._peers(peers)
        target = self._register(dst, "dst")
        source = target if src is None else self._register(src, "src")
        return proxy_channel.connect(self._group, target, source, chosen)

    def handler_channel(self, handler: Callable[[Trigger], None]) -> HandlerChannel:
        """Makes a channel through which kernels of this rank call a Python function in the proxy's thread. Not
        collective.

        Args:
            handler: a function that is called with each `Trigger`; later triggers of the same ring wait until it
                returns. If the handler raises an exception, the communicator fails with a HandlerError.

        Raises:
            ArgumentError: the handler can't be called.
            ResourceError: channel ids ran out.
        """
        self._group.failure.require_usable()
        return HandlerChannel(self._group, handler)

    def window(self, array: Any) -> Window:
        """Makes a window on an array of every rank, for one-sided puts, gets and signals by streams, without a kernel.

        All ranks call this together, each with its own array; sizes may differ. See `Window`.

        Args:
            array: as for `register`, in memory that peers can map: from `empty` or `shared_empty`, or on a GPU.

        Raises:
            ArgumentError: as for `register`; in addition, all ranks raise this error if any rank's array is in memory
                that peers can't map.
        """
        self._group.failure.require_usable()
        return Window(self._group, array)

    def _peers(self, peers: Sequence[int] | None) -> list[int]:
        self._group.failure.require_usable()
        if peers is None:
            return [peer for peer in range(self.world_size) if peer != self.rank]
        return as_ranks(self.world_size, peers, "peers")

    def compile(
        self, source: str, name: str | None = None, *, options: Sequence[str] = (), include_dirs: Sequence[str] = ()
    ) -> Any:
        """Compiles kernels from source text.

        The text includes ``"proxyccl/proxyccl.h"`` and defines ``extern "C" __global__ void`` functions.

        Args:
            source: the text.
            name: the name of the kernel to return; None for all kernels.
            options: extra options for the compiler.
            include_dirs: extra directories for ``#include``.

        Returns:
            The `Kernel` of that name, or a `Module` with all kernels. A kernel is launched as ``kernel(grid, block,
            *args, stream=None)``.

        Raises:
            CompileError: compilation failed, with the compiler's messages; or no compiler was found, with the name of
                the package to install.
        """
        self._group.failure.require_usable()
        module: Module = self.runtime.compile(
            source,
            options=require_texts(options, "options"),
            include_dirs=require_texts(include_dirs, "include_dirs"),
            control=self._group.control.device_pointer,
        )
        kernel_or_module: Kernel | Module = module if name is None else module[name]
        return kernel_or_module

    def triton(self, kernel: Any, **options: Any) -> Any:
        """Compiles a kernel written in Triton. See `proxyccl.triton.compile` for arguments, result and errors.

        Raises:
            RuntimeUnavailableError: `proxyccl.triton` was not imported.
        """
        face: Any = sys.modules.get("proxyccl.triton")
        if face is None:
            raise RuntimeUnavailableError("triton: the program must import proxyccl.triton first")
        return face.compile(self, kernel, **options)

    # -- waiting and failing ---

    def synchronize(self, stream: StreamLike = None) -> None:
        """Waits for a stream (None: for all streams), and raises errors of the stream's work or of the communicator."""
        self._group.synchronize(stream)

    def check(self) -> None:
        """Raises the communicator's failure, if it has failed."""
        self._group.failure.check()

    def abort(self, reason: str = "") -> None:
        """Aborts the communicator on all ranks, whose waits raise an AbortedError. Does not wait."""
        self._group.failure.abort(reason)

    def all_gather_bytes(self, data: bytes, purpose: str = "all_gather_bytes") -> list[bytes]:
        """Exchanges bytes over the bootstrap, and returns every rank's bytes. All ranks call this together. The call is
        slow, and meant for set-up.

        Args:
            data: this rank's bytes; lengths may differ.
            purpose: describes the exchange in words; the same on all ranks.

        Raises:
            ArgumentError: `data` is not bytes, or `purpose` is not a string.
            WaitTimeoutError: not all ranks arrived within the time-out.
            MismatchError: a rank passed a different purpose, or has closed the communicator.
        """
        self._group.failure.require_usable()
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ArgumentError("data", f"must be bytes, not {type(data).__name__}")
        return self._group.exchange.all_gather_bytes(bytes(data), require_text(purpose, "purpose"))

    def drain(self) -> None:
        """Waits until this rank's proxy has carried out all triggers of kernels that have ended.

        If the communicator fails during the wait, raises its failure.
        """
        self._group.links.drain()

    def transport(self, peer: int) -> str:
        """Returns the name of the transport that moves data to a peer. Raises ArgumentError for a peer that is not a
        rank.
        """
        return self._group.links.transport(as_rank(self.world_size, peer, "peer"))

    # -- sleep ---

    @property
    def suspended(self) -> bool:
        """Whether the communicator is suspended."""
        return self._group.failure.suspended

    def suspend(self, *, save: bool = True, resume_on_call: bool = False) -> None:
        """Gives the communicator's device memory back to the device until `resume`. All ranks call this together.

        The call waits for all work of the ranks' devices, and then frees the library's scratch memory, the workspaces
        of expert layers and the memory of `empty` arrays, in all processes that map them. Their addresses stay
        reserved, so arrays, registrations, channels and captured graphs stay valid for the time after `resume`.
        The proxies' process of `proxy="process"` ends if no other communicator uses it; a node daemon frees what it
        holds for this rank. Allocations of less than 1 MiB, which hold the words that kernels need, and arrays that
        calls have made stay on the device, as do arrays of other libraries, such as registered torch tensors.

        While a communicator is suspended, its calls raise SuspendedError, and so does every use of its `empty` arrays.
        With `resume_on_call`, the first collective or call of an expert layer resumes the communicator instead.
        Neither graphs, kernels of the program nor views of the arrays, such as torch tensors, may then use the
        communicator's memory, and nothing checks this. The communicator can be closed. A rank that ends
        makes the communicator fail, as always. Communicators that were split from this one are not suspended with it,
        nor are arrays that it took over by `shrink` or `grow`.

        Args:
            save: whether to keep the contents of `empty` arrays and of experts' outputs, in host memory. If False,
                their contents are undefined after `resume`, except while a call of an expert layer in two halves is
                pending. The same on all ranks.
            resume_on_call: whether collectives and the calls of expert layers first resume the communicator, with the
                errors of `resume`. Other ranks may meanwhile make the same call or call `resume`. All other calls still
                raise SuspendedError: captured calls, transfers between pairs of ranks, calls of windows, and calls that
                set up memory, channels or communicators. The same on all ranks.

        Raises:
            RuntimeUnavailableError: the communicator was not made with `suspendable`, or remote transports connect some
                of its ranks.
            ArgumentError: `save` or `resume_on_call` is not a bool; or a rank has registered one of the arrays with an
                agent, or with a communicator that has a rank in another process. The communicator stays usable.
            SuspendedError: the communicator is suspended already.
            MismatchError: a rank makes another call, or passes different arguments. No memory was given back.
            ResourceError: a rank has too little host memory for the contents. All ranks raise this error, no memory was
                given back, and the communicator stays usable.
            CommunicatorError: a rank failed during the call.
        """
        for name, value in (("save", save), ("resume_on_call", resume_on_call)):
            if value is not True and value is not False:  # a wrong `save` that counts as false would lose the contents
                raise ArgumentError(name, f"must be True or False, not {value!r}")
        self._group.suspend(save=save, resume_on_call=resume_on_call)

    def resume(self) -> None:
        """Allocates device memory again at the same addresses, after `suspend`. All ranks call this together.

        The proxies' process starts again in the background, and calls by proxy wait for it. If it can't start, the
        communicator fails with a ProxyLostError.

        Raises:
            SuspendedError: the communicator is not suspended.
            ResourceError: the device of some rank has too little memory left. All ranks raise this error, and the
                communicator stays suspended.
            CommunicatorError: a rank failed while the communicator was suspended, or during the call.
        """
        self._group.resume()

    # -- end ---

    def close(self, *, wait: bool = True) -> None:
        """Closes the communicator. Further calls of `close` do nothing.

        All ranks call this. The call waits for queued work, and, unless the communicator has failed, for the other
        ranks. Ranks may close several communicators in different orders.

        Args:
            wait: whether to wait for the other ranks to close the communicator. If False, a thread frees the memory
                that other ranks may access once all ranks have closed the communicator.

        Raises:
            WaitTimeoutError: a rank did not close the communicator within the time-out.
        """
        self._group.close(wait=as_flag(wait, "wait"))
