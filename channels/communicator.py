"""The communicator: ranks that can reach each other's memory, and all calls on them."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple

from proxyccl.channels import array_libraries, kernel_languages, proxy_channel, sm_channel
from proxyccl.channels.collectives.collective import EXECUTE
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.moves import ALL_GATHER, ALL_TO_ALL, BROADCAST
from proxyccl.channels.collectives.reductions import ALL_REDUCE, REDUCE_SCATTER, reduce
from proxyccl.channels.collectives.request import CtaPolicy, requested_policy
from proxyccl.channels.collectives.run import barrier, run
from proxyccl.channels.collectives.selection import Selector
from proxyccl.channels.collectives.tensor_calls import TensorCalls
from proxyccl.channels.collectives.transfers import Transfers, all_to_all_v, gather, recv, scatter, send
from proxyccl.channels.execution_plans.plan import ExecutionPlan
from proxyccl.channels.group import Group, close_at_exit
from proxyccl.channels.handles import ChannelSet
from proxyccl.channels.joining.bootstrap import as_bootstrap, of_process_group, require_mpi
from proxyccl.channels.joining.meeting import meet
from proxyccl.channels.joining.proxy_options import ProxyOptions
from proxyccl.channels.joining.proxy_place import requested_place
from proxyccl.channels.joining.topology import Topology, TransportChoice
from proxyccl.channels.lent_memory import limit_of_environment
from proxyccl.channels.liveness import program_end
from proxyccl.channels.memory import RegisteredMemory, allocate, deregister, register
from proxyccl.channels.proxy_channel import HandlerChannel, ProxyChannel
from proxyccl.channels.ranks import as_rank, as_ranks
from proxyccl.channels.reports.peers import await_reports
from proxyccl.channels.reports.reporter import Reporter
from proxyccl.channels.segment.error_record import raised
from proxyccl.channels.sm_channel import SmChannel
from proxyccl.channels.timeouts import as_seconds, timeout_from
from proxyccl.channels.window import Window
from proxyccl.device.arguments.flags import as_flag
from proxyccl.device.arguments.texts import require_text, require_texts
from proxyccl.device.arrays.array import Array
from proxyccl.device.environment import warn_of_unknown
from proxyccl.device.errors import ArgumentError, ClosedError, CommunicatorError, ProxyCCLError, ResourceError
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
    """How often a communicator was used.

    Attributes:
        made: calls that were launched.
        prepared: forms of calls that were prepared.
    """

    made: int
    prepared: int


class Communicator:
    """A group of ranks.

    All ranks construct it together, and call its collectives and registrations in the same order. So only one thread of
    a rank at a time may make these calls. Other threads may `send`, `recv` and use `transfers` meanwhile, once
    `prepare_transfers` has returned.

    Use it as a context manager, or call `close`.

    Args:
        bootstrap: a `Bootstrap`, an MPI communicator or a torch process group; None for MPI's world.
        runtime: this rank's `Runtime`, or the name of one ("host", "cuda", "hip"); None for
            ``PROXYCCL_RUNTIME``, else the first that the machine offers.
        device: device number, for a runtime given by name; None for the rank's number within its host, modulo the
            number of devices.
        timeout: bound of every wait, in seconds; None for ``PROXYCCL_TIMEOUT``, else 30.
        local_world_size: count this many consecutive ranks as a node; the same on all ranks. None for
            ``PROXYCCL_LOCAL_WORLD_SIZE``, else real hosts.
        fifos: rings of this rank's proxy, or "peer" for one for each peer, up to 64. A channel whose peer is slow holds
            back the channels of its ring.
        proxy_threads: threads that drain the rings.
        fifo_size: slots in each ring, a power of two.
        idle: the policy of an idle proxy, wherever the proxy runs; a thread that serves several proxies uses the most
            aggressive of their policies. None to choose by the free cores, or, in a node daemon, to use the daemon's
            policy.
        proxy: where the proxy runs: "thread", in this process, "process", in a daemon that the job's ranks start on
            each host and that ends with them, or "daemon", in the node daemon. None for ``PROXYCCL_PROXY``, else
            "thread" on the host runtime, and on GPUs "daemon" if the ranks of the host find one, else "process". The
            job's own daemon starts in the background when the communicator is made. On CUDA "thread" needs
            ``CUDA_MODULE_LOADING=EAGER``, without which it warns when the proxy is first used.
        proxy_cores: cores that the proxy's threads may run on: numbers and ranges such as "0-3,8", "node:1" for a NUMA
            node's, "near" for the NUMA node next to the device; None for any core. The job's own daemon uses the cores
            of the rank that starts it; the node daemon has its own setting.
        transport: the transport of ProxyChannels: "copy", "verbs" (RDMA), "staged" (RDMA through pinned memory),
            "fabric" (libfabric) or "staged_fabric" (libfabric through pinned memory) for all pairs of ranks, or a dict
            with some pairs, such as {(0, 1): "verbs"}; the same on all ranks. None for ``PROXYCCL_TRANSPORT``, else
            copies within a node and RDMA between nodes, which is staged where a rank's RDMA device can't register its
            GPU's memory; between hosts without RDMA the fabric, staged likewise.
        rdma: the RDMA device and its settings; None for those in ``PROXYCCL_RDMA_*``, else the defaults of
            `RdmaOptions`.
        fabric: libfabric's provider, interface and settings; None for those in ``PROXYCCL_FABRIC_*``, else the defaults
            of `FabricOptions`.
        cta_policy: "zero" leaves the multiprocessors to the program, as NCCL_CTA_POLICY_ZERO does: collectives run by
            proxy unless a call names an algorithm or another policy. "efficiency" leaves most multiprocessors to the
            program: kernels have few blocks. "default" takes the algorithm that is fastest on an idle device. The same
            on all ranks. None for ``PROXYCCL_CTA_POLICY``, else "default".
        linger: seconds that the process waits at its end, silently, for ranks that have not closed the
            communicator; None for `timeout`, after which a report names the missing ranks.

    Raises:
        ArgumentError: an argument is wrong, or ranks disagree on the runtime, the nodes, the transports or the policy.
        RuntimeUnavailableError: the machine does not offer the runtime, no remote transport connects two nodes, or the
            requested node daemon does not run.
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
        linger: float | None = None,
    ) -> None:
        warn_of_unknown()
        array_libraries.keep_opaque(Communicator)
        _require_instance("idle", idle, IdlePolicy)
        _require_instance("rdma", rdma, RdmaOptions)
        _require_instance("fabric", fabric, FabricOptions)
        if not isinstance(runtime, str | None) and not hasattr(runtime, "activate"):
            raise ArgumentError("runtime", f"must be a name, a Runtime or None, not {runtime!r}")
        policy = requested_policy(cta_policy)
        limit_of_environment()  # refuses a wrong value before the ranks meet
        proxy_options = ProxyOptions(requested_place(proxy), fifos, proxy_threads, fifo_size, idle, proxy_cores)
        bounded = timeout_from(timeout)
        if linger is not None:
            linger = as_seconds(linger, "linger", "must be a number of seconds from 0 on", may_be_none=True)
        joined, made_here = as_bootstrap(bootstrap)
        meeting = meet(
            joined,
            runtime,
            owns_bootstrap=made_here,
            device=device,
            timeout=bounded,
            local_world_size=local_world_size,
            transport=transport,
            transport_options=TransportOptions(
                rdma or RdmaOptions.from_environment(), fabric or FabricOptions.from_environment()
            ),
            proxy_options=proxy_options,
            linger=linger,
        )
        self._open(Group(meeting), policy)

    def _open(self, group: Group, cta_policy: CtaPolicy | None) -> None:
        self._take(group, cta_policy)
        try:
            self._collectives.start()
        except ProxyCCLError:
            self._group.close()
            raise

    def _take(self, group: Group, cta_policy: CtaPolicy | None) -> None:
        program_end.watch()
        self._group = group
        self._collectives = Collectives(group, cta_policy)
        try:
            with group.exchange.telling():
                group.open(Reporter(group))
        except BaseException:
            group.discard()
            raise

    def split(self, ranks: Sequence[int], *, timeout: float | None = None, bootstrap: Any = None) -> Communicator:
        """Returns a communicator of some of the ranks, which call this together; the other ranks need not.

        The new communicator shares this one's runtime, process watches and mappings, and needs no bootstrap if the
        ranks share a host. A `close`, failure or `abort` of this communicator ends the new one too, but not the
        reverse.

        Args:
            ranks: numbers in this communicator, including this rank's; the same list on all members. A rank's place in
                the list is its number in the new communicator.
            timeout: bound of this call and of the new communicator's waits, in seconds; None for this communicator's.
            bootstrap: a `Bootstrap` of the members, in the order of their new numbers, which the caller keeps open.
                Threads that split the same ranks concurrently, or in a different order than on other ranks, need a
                separate bootstrap for each split. None to meet through this communicator, in one thread of a rank at a
                time.

        Raises:
            ArgumentError: the ranks are not different ranks of this communicator, or this rank is not among them; or
                the bootstrap does not join exactly the members.
            MismatchError: members gave different lists.
            WaitTimeoutError: not all members arrived within the time. This communicator stays usable.
            ResourceError: there are too few descriptors. This communicator stays usable, here and on the other members,
                which get an AbortedError.
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
        part = object.__new__(Communicator)
        part._open(self._group.split(members, bounded, bootstrap), self._collectives.cta_policy)
        return part

    def shrink(self, *, exclude: Sequence[int] = (), timeout: float | None = None) -> Communicator:
        """Returns a communicator of the remaining ranks, after a failure or without one. All remaining ranks call this,
        once.

        A rank remains unless its process has ended, it has closed this communicator, or it is excluded. A rank that
        does not arrive within the time-out is excluded too, and this communicator has then failed. The ranks agree on
        the remaining ones even if some of them fail meanwhile, and keep their order.

        The call waits for the work that the ranks have queued on their devices. If this communicator has failed, the
        call closes it; otherwise this communicator stays usable, and its end does not end the new one. The device,
        compiled kernels, and the mappings of the other ranks' memory are kept. Arrays of `empty` are still used in
        place, and so are registered arrays if all ranks share a host; registering an array again needs no new mapping.
        Make channels anew, because a failure leaves their counts undefined.

        Args:
            exclude: ranks to leave out; the same on all callers.
            timeout: bound of each wait for the other ranks and of the new communicator's waits, in seconds; None for
                this communicator's.

        Raises:
            ArgumentError: `exclude` names this rank, or something that is not a rank of this communicator.
            ExcludedError: this rank arrived too late, and the others continued without it.
            MismatchError: a rank passed a different `exclude`. This communicator can't be shrunk any longer.
            ClosedError: this communicator is closed, or was shrunk before.
            PeerLostError: ranks were lost in each of the call's attempts.
            ResourceError: there are too few descriptors. This communicator is closed, and the other ranks continue
                without this one.
            RuntimeUnavailableError: the ranks are on several hosts, and the bootstrap has no board (`Bootstrap`).
        """
        self._group.failure.require_own_process()
        if self.closed:
            raise ClosedError("the communicator is closed; expected `shrink` before `close`")
        excluded = as_ranks(self.world_size, exclude, "exclude")
        if self.rank in excluded:
            raise ArgumentError(
                "exclude", f"{self.rank} is this rank; expected others, because only ranks that stay call this"
            )
        bounded = self.timeout if timeout is None else timeout_from(timeout)
        shrunk = object.__new__(Communicator)
        try:
            shrunk._take(self._group.shrink(frozenset(excluded), bounded), self._collectives.cta_policy)
        except ResourceError as error:  # the others continue without this rank when they notice that it has left
            self._group.failure.abort(f"shrink: {error}")
            self._group.close()
            raise
        shrunk._group.symmetric.inherit(self._group.symmetric)
        if self._group.failure.aborted:
            self._group.close()
        try:
            shrunk._collectives.start()
        except CommunicatorError:  # a rank was lost after all had agreed
            try:
                return shrunk.shrink(timeout=bounded)
            finally:
                shrunk._group.close()
        except ProxyCCLError:
            shrunk._group.close()
            raise
        return shrunk

    def grow(self, bootstrap: Any, *, timeout: float | None = None) -> Communicator:
        """Returns a communicator of these ranks and new ones, which join over a bootstrap.

        The ranks of this communicator call this; new processes construct a `Communicator` with their bootstrap, and
        with the same options. A `transport` for some pairs names ranks by their new numbers, on all ranks. This
        communicator stays usable, and its end does not end the new one. The device, compiled kernels, options and
        mappings are kept, and arrays of `empty` are used in place, as with `shrink`.

        Args:
            bootstrap: a bootstrap of all ranks, old and new, in the order of their new numbers; as for the constructor.
                timeout: bound of every wait, in seconds; None for this communicator's.

        Raises as the constructor, and the error that ended this communicator.
        """
        self._group.failure.require_usable()
        bounded = self.timeout if timeout is None else timeout_from(timeout)
        joined, made_here = as_bootstrap(bootstrap)
        grown = object.__new__(Communicator)
        grown._open(self._group.grow(joined, bounded, owns_bootstrap=made_here), self._collectives.cta_policy)
        grown._group.symmetric.inherit(self._group.symmetric)
        return grown

    @property
    def members(self) -> tuple[int, ...]:
        """By rank, its number in the communicator that this one was split or shrunk from; empty if there is no such
        communicator.
        """
        return self._group.members

    @classmethod
    def from_mpi(cls, comm: Any = None, **options: Any) -> Communicator:
        """Makes a communicator of the ranks of an MPI communicator (None: all). Options as for the constructor."""
        require_mpi(comm)
        return cls(comm, **options)

    @classmethod
    def from_torch(cls, group: Any = None, **options: Any) -> Communicator:
        """Makes a communicator of the ranks of a torch process group (None: the world). Options as for the
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
        """The numbers of this communicator's collective calls and of experts' layers' calls, including barriers.

        A call is prepared when it is the first with its options, element types and shapes. Later such calls, even with
        new arrays, reuse the prepared form. For experts' calls, the numbers of tokens do not matter.
        """
        calls = self._group.launches.calls
        return CallCounts(calls.made, calls.prepared)

    @property
    def tensor_calls(self) -> TensorCalls:
        """The calls with torch's tensors, for torch's backend."""
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
        """Number of ranks of this node."""
        return self._group.topology.local_world_size

    @property
    def runtime(self) -> Runtime:
        """This rank's runtime."""
        return self._group.runtime

    @property
    def topology(self) -> Topology:
        """The placement of the ranks."""
        return self._group.topology

    @property
    def timeout(self) -> float:
        """Bound of every wait, in seconds. Setting it changes this rank's waits from now on."""
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
        """This rank's proxy, if anything has used it."""
        return self._group.links.proxy_if_started

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._group.failure.closed

    # -- memory and channels ---

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Array:
        """Allocates an array in device memory. Its contents are undefined.

        Collectives use the array in place; see `register`. ProxyChannels and SmChannels can use it once it is
        registered.

        Args:
            shape: dimensions; all at least 0.
            dtype: an element type by name, or numpy's or torch's.
        """
        return allocate(self._group, shape, dtype, symmetric=True)

    def register(self, array: Any) -> RegisteredMemory:
        """Registers an array so that peers can reach it.

        All ranks call this together, each with its own array; sizes may differ. Collectives then use the array, and
        slices of it at any offset, in place, if all ranks' arrays are registered or made by `empty`. Otherwise
        collectives copy the array through scratch memory.

        Memory of `empty` can be reached by all peers. On the host runtime other arrays are private to their process:
        they can be the source of a put, and a peer that tries to reach one gets an error that names the reason.

        The array is kept alive until `deregister`. Do not free its memory before that by other means, such as
        hipFree or a tensor's ``untyped_storage().resize_(0)``. Collectives detect a freed array, and do not confuse a
        new array at its address with the registered one. Channels do not detect this.

        Raises:
            ArgumentError: the argument is not an array, has no memory, or is on another device; or it is a result of
                `register` whose array was freed meanwhile.
        """
        return self._register(array, "array")

    def _register(self, array: Any, argument: str) -> RegisteredMemory:
        return register(self._group, array, symmetric=True, argument=argument)

    def deregister(self, array: Any) -> None:
        """Ends the registration of an array, or of a result of `register`. Not collective.

        Neither queued work nor graphs that will be replayed may still use the array as registered memory. The array may
        be freed afterwards. If ranks reach one another by a remote transport, all ranks must deregister between the
        same two collectives, because a rank's proxy forgets its peers' arrays too.

        Raises:
            ArgumentError: the array is not registered.
        """
        deregister(self._group, array)

    def memory_pool(self) -> AbstractContextManager[Any]:
        """Makes torch allocate tensors in memory that peers reach. Not collective.

        Tensors that this thread allocates in the ``with`` block, on the communicator's device, count as registered for
        as long as they live, and so do their slices. Collectives use them in place if all ranks' arrays are registered
        or count as registered. A new tensor's first calls may be staged, until the peers have mapped its memory.

        The pool belongs to the device. It lives as long as a communicator that has used it. Later blocks, including
        those of other communicators, reuse memory that a tensor frees. torch returns memory to the driver when the pool
        is destroyed; remaining tensors keep their memory. Outside of the block, capture a graph into the pool with
        ``torch.cuda.graph(graph, pool=pool.id)``.

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
            dst: an array or registered memory; put writes to, and get reads from, the `dst` of the peer.
            src: local memory that put reads and get writes; None for `dst`.
            packet_buffer: local memory that peers' putPackets fill and getPackets reads; None for `dst`.
            peers: ranks to connect to, in the order of the channels; may include this rank. None for all others by
                rank.

        Raises:
            ArgumentError: a peer is not a rank, or this rank's kernels can't access its memory.
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

        All ranks call this together. Arguments as for `sm_channels`.

        Raises:
            ArgumentError: a peer is not a rank, or its memory can't be shared.
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
            handler: called with each `Trigger`; later triggers of the same ring wait for it. An exception ends the
                communicator with a HandlerError.

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
            array: as for `register`, in memory that peers map: of `empty` or `shared_empty`, or of a GPU.

        Raises:
            ArgumentError: as `register`; also on all ranks, if any rank's array is in memory that peers can't map.
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

        It includes ``"proxyccl/proxyccl.h"`` and defines ``extern "C" __global__ void`` functions.

        Args:
            source: the text.
            name: the name of the kernel to return; None for all kernels.
            options: extra options for the compiler.
            include_dirs: extra directories for ``#include``.

        Returns:
            The `Kernel` of that name, or a `Module` with all of them. A kernel is launched as ``kernel(grid, block,
            *args, stream=None)``.

        Raises:
            CompileError: compilation failed, with the compiler's messages; or there is no compiler, with what to
                install.
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
        return kernel_languages.maker_of("triton")(self, kernel, **options)

    # -- collectives ---

    def all_reduce(
        self,
        x: Any,
        op: str = "sum",
        *,
        out: Any = None,
        algorithm: str | ExecutionPlan | None = None,
        cta_policy: str | None = None,
        symmetric: bool = False,
        stream: StreamLike = None,
    ) -> Any:
        """Reduces `x` over all ranks; every rank gets the same bits. A NaN in the result has no sign and no payload.

        With an execution plan, the plan fixes the order in which each rank combines, so bits may differ between ranks.

        Args:
            x: float16, bfloat16, float32, float64, or integers of 8 to 64 bits, signed or not, of any contiguous shape,
                which may differ between ranks; the same count and type on all ranks.
            op: "sum", "prod", "min", "max" or "avg"; of integers also "band", "bor" and "bxor", which combine bits.
                16-bit floats are accumulated in float32, also between nodes, so only the result must be in their range.
                Integers wrap around; their average truncates.
            out: where the result goes; None for in place.
            algorithm: "one_shot", "recursive_doubling", "two_shot_packets", "two_shot", "ring" or "proxy"; across nodes
                with equal numbers of ranks also "hierarchical". None chooses, by size and element type. Or an
                `ExecutionPlan` for this collective and operator.
            cta_policy: "zero" leaves the multiprocessors to the program: the proxies move the data, and only a
                reduction runs a kernel, with few blocks. "efficiency" limits kernels to few blocks, whatever the
                algorithm. "default" chooses from all algorithms. None for the communicator's policy. All ranks pass the
                same value.
            symmetric: promises that the arrays of all ranks are symmetric memory (`empty`, `register`), on which the
                choice of an algorithm may rely; results are correct either way. All ranks pass the same value.
            stream: where to queue the call: a stream of any library, or its handle, which must live until the next
                call. With None the call waits for its end on the host runtime; on a GPU it is queued on the current
                stream of the library that owns `x` (torch, CuPy), else on the calling thread's default stream. While
                the thread captures a graph, the stream must be one that is captured.

        Returns:
            `out`, or `x`.

        Raises:
            ArgumentError: an argument is wrong on this rank. The call had no effect.
            MismatchError: ranks called with different arguments.
            CommunicatorError: a peer failed; see its subclasses.
        """
        return run(self._collectives, ALL_REDUCE, x, out, op, None, algorithm, cta_policy, symmetric, stream)

    def reduce_scatter(
        self,
        x: Any,
        op: str = "sum",
        *,
        out: Any = None,
        algorithm: str | ExecutionPlan | None = None,
        cta_policy: str | None = None,
        symmetric: bool = False,
        stream: StreamLike = None,
    ) -> Any:
        """Reduces `x` over all ranks and gives each rank one share of the result.

        Args:
            x: shape [world_size * n, …], the same on all ranks; this rank gets the reduction of rows rank * n to
                (rank + 1) * n.
            op: as for `all_reduce`.
            out: shape [n, …]; None for a new array.
            algorithm: "kernels", or "proxy" to have the proxies move the data. None chooses. Or an `ExecutionPlan`.
            cta_policy, symmetric, stream: as for `all_reduce`.

        Returns:
            `out`, or the new array. Raises as `all_reduce`.
        """
        return run(self._collectives, REDUCE_SCATTER, x, out, op, None, algorithm, cta_policy, symmetric, stream)

    def all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        algorithm: str | ExecutionPlan | None = None,
        cta_policy: str | None = None,
        symmetric: bool = False,
        stream: StreamLike = None,
    ) -> Any:
        """Concatenates `x` of all ranks along the first dimension, in rank order.

        Args:
            x: shape [n, …], the same on all ranks; any element type.
            out: shape [world_size * n, …]; None for a new array. `x` may be this rank's rows of `out`.
            algorithm: "kernels", or "proxy" to have the proxies move the data. None chooses. Or an `ExecutionPlan`.
            cta_policy, symmetric, stream: as for `all_reduce`.

        Returns:
            `out`, or the new array. Raises as `all_reduce`.
        """
        return run(self._collectives, ALL_GATHER, x, out, None, None, algorithm, cta_policy, symmetric, stream)

    def all_to_all(
        self,
        x: Any,
        *,
        out: Any = None,
        algorithm: str | ExecutionPlan | None = None,
        cta_policy: str | None = None,
        symmetric: bool = False,
        stream: StreamLike = None,
    ) -> Any:
        """Sends the i-th share of `x` to rank i, and receives rank i's share as the i-th share of the result.

        Args:
            x: shape [world_size * n, …], the same on all ranks; any element type.
            out: the same shape; None for a new array. It may be `x`.
            algorithm: "kernels", or "proxy" to have the proxies move the data. None chooses. Or an `ExecutionPlan`.
            cta_policy, symmetric, stream: as for `all_reduce`.

        Returns:
            `out`, or the new array. Raises as `all_reduce`.
        """
        return run(self._collectives, ALL_TO_ALL, x, out, None, None, algorithm, cta_policy, symmetric, stream)

    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        cta_policy: str | None = None,
        symmetric: bool = False,
        stream: StreamLike = None,
    ) -> Any:
        """Copies `x` of rank `root` to all ranks.

        Args:
            x: the same shape and type on all ranks.
            root: the rank whose values all ranks get.
            out: where the values go; None for in place.
            algorithm: "kernels", or "proxy" to have the proxies move the data. None chooses.
            cta_policy, symmetric, stream: as for `all_reduce`.

        Returns:
            `out`, or `x`. Raises as `all_reduce`.
        """
        return run(self._collectives, BROADCAST, x, out, None, root, algorithm, cta_policy, symmetric, stream)

    def reduce(
        self,
        x: Any,
        op: str = "sum",
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        stream: StreamLike = None,
    ) -> Any:
        """Reduces `x` over all ranks; rank `root` gets the result. It costs as much as `all_reduce`.

        Args:
            x: as for `all_reduce`. It is not changed on ranks other than `root`.
            op: as for `all_reduce`.
            root: the rank that gets the result.
            out: where the result goes, only on `root`; None for in place.
            algorithm: as for `all_reduce`.
            stream: as for `all_reduce`.

        Returns:
            `out`, or `x`, on `root`; None on the others. Raises as `all_reduce`.
        """
        return reduce(self._collectives, x, op, root, out, algorithm, stream)

    def gather(self, x: Any, root: int = 0, *, out: Any = None, stream: StreamLike = None) -> Any:
        """Concatenates `x` of all ranks along the first dimension, in rank order, on rank `root`.

        Args:
            x: shape [n, …], the same on all ranks; any element type.
            root: the rank that gets the result.
            out: shape [world_size * n, …], only on `root`; None for a new array. On `root`, `x` may be its own rows of
                `out`.
            stream: as for `all_reduce`.

        Returns:
            `out`, or the new array, on `root`; None on the others. Raises as `all_reduce`.
        """
        return gather(self._collectives, x, root, out, stream)

    def scatter(self, x: Any = None, root: int = 0, *, out: Any = None, stream: StreamLike = None) -> Any:
        """Gives each rank one share of rank `root`'s `x`.

        Args:
            x: shape [world_size * n, …], only on `root`; any element type.
            root: the rank whose array is distributed.
            out: shape [n, …], the same on all ranks. None for a new array. On `root`, `out` may be its own rows of `x`.
            stream: as for `all_reduce`.

        Returns:
            `out`, or the new array. Raises as `all_reduce`.
        """
        return scatter(self._collectives, x, root, out, stream)

    def all_to_all_v(
        self,
        x: Any,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        out: Any = None,
        stream: StreamLike = None,
    ) -> Any:
        """Sends consecutive rows of `x` to the ranks in order, and receives the other ranks' rows in rank order.

        Args:
            x: shape [sum(send_counts), …]; any element type. The dimensions after the first are the same on all ranks.
            send_counts: by rank, the number of rows that this rank sends to it.
            recv_counts: by rank, the number of rows that it sends to this rank, as in that rank's ``send_counts``.
            out: shape [sum(recv_counts), …]; None for a new array.
            stream: as for `all_reduce`.

        Returns:
            `out`, or the new array. Raises as `all_reduce`, and MismatchError for a count that differs from the
            peer's, if neither is 0: see `send`.
        """
        return all_to_all_v(self._collectives, x, send_counts, recv_counts, out, stream)

    # -- programs of collectives ---

    def execute(self, plan: Any, x: Any, *, out: Any = None, stream: StreamLike = None) -> Any:
        """Executes a plan written by MSCCL++'s language. All ranks call this together, with the same plan.

        The first execution, and an execution of a larger size than before, makes channels and scratch memory, and waits
        for all ranks to do so. A graph can capture only a call that was executed before.

        Args:
            plan: an `ExecutionPlan`, or an argument of `ExecutionPlan.load`. Load a plan once if you use it often.
            x: the input: a contiguous array of `input_chunks` equal chunks, whose bytes are multiples of the plan's
                alignment; the same count and type on all ranks. Types as for `all_reduce` if the plan reduces, any
                otherwise. An array that peers reach is copied to or from the plan's own memory, unless all ranks pass
                results of `register`.
            out: the output, of `output_chunks` such chunks. None for a new array, or for `x` if the plan works in
                place on an array of that size. Such a plan also accepts an array other than `x`.
            stream: as for `all_reduce`.

        Returns:
            `out`, or the array that holds the result.

        Raises:
            ArgumentError: the plan can't be executed, or an array does not fit it. The call had no effect.
            MismatchError: ranks execute different plans, or arrays of other sizes or types.
            CommunicatorError: a rank failed; see its subclasses. After a time-out it names the rank waited for, the
                threadblock and the operation.
        """
        return run(self._collectives, EXECUTE, x, out, algorithm=ExecutionPlan.load(plan), stream=stream)

    # -- transfers between pairs of ranks ---

    def prepare_transfers(self) -> None:
        """Sets up transfers between ranks. All ranks call this together.

        Otherwise the first `send`, `recv` or `transfers` does so, and waits for all ranks. Call this first if not all
        ranks take part in the first transfer, or if transfers and collectives run in different threads: two threads
        that wait for all ranks at once end the communicator, or one of them gets ConcurrentCallError.
        """
        self._group.failure.require_usable()
        if self.world_size > 1:
            self._collectives.flows()

    def send(self, x: Any, peer: int, *, stream: StreamLike = None) -> None:
        """Sends an array to a rank, which receives it with `recv`. A rank's sends to a peer arrive in order.

        Data that does not fit into the peer's scratch memory (some hundred KiB) waits for the peer's `recv`.

        An empty array sends and receives nothing. If only one side's array is empty, no error is raised, and the other
        side's transfer is matched with the next transfer of the pair.

        Args:
            x: any contiguous array, of as many bytes as the peer receives.
            peer: another rank.
            stream: as for `all_reduce`. Transfers on different streams run concurrently; transfers with the same peer
                in the same direction run in order.

        Raises:
            ArgumentError: an argument is wrong, and nothing was sent.
            MismatchError: the peer receives a different number of bytes, and neither number is 0.
            CommunicatorError: a rank failed; see its subclasses.
        """
        send(self._collectives, x, peer, stream)

    def recv(self, out: Any, peer: int, *, stream: StreamLike = None) -> Any:
        """Receives an array from a rank. Arguments and errors as for `send`. Returns `out`."""
        return recv(self._collectives, out, peer, stream)

    def transfers(self, *, stream: StreamLike = None) -> Transfers:
        """Returns a context that collects sends and receives, and issues them together, by one launch, at the end of
        the ``with`` block.

        ``with comm.transfers() as t: t.send(x, right); t.recv(y, left)``. Within a block no transfer waits for another,
        so its order does not matter between different peers, and an array that is received may not overlap another.

        Args:
            stream: as for `all_reduce`.
        """
        self._group.failure.require_usable()
        return Transfers(self._collectives, stream)

    def barrier(self, *, stream: StreamLike = None) -> None:
        """Waits, on the stream, until all ranks have made this call. Raises as `all_reduce`."""
        barrier(self._collectives, stream)

    @property
    def collectives(self) -> Collectives:
        """The collectives' own state: teams, and the `selector` that chooses algorithms."""
        return self._collectives

    def tune(
        self, sizes: Sequence[int] | None = None, iterations: int = 5, *, seconds: float = 10.0, save: bool = True
    ) -> Selector:
        """Measures the algorithms of all collectives, and uses the fastest for each kind of call from then on.

        It measures kernels and proxies, float32 and bfloat16 where types matter, symmetric and other arrays, and the
        execution plans in the current tables, each with arrays of the sizes that the plan takes. All ranks call this
        together, with the same arguments, while nothing else runs.

        Args:
            sizes: bytes to measure, in rising order; None for 1 KiB to 64 MiB, or to 4 MiB on the host runtime. If
                the last one is less than that, larger arrays keep the defaults.
            iterations: calls of each algorithm at each size; the median of the slowest rank's times counts.
            seconds: the approximate limit of the total time. Larger sizes are skipped when the time is over.
            save: whether rank 0 keeps the tables on disk, next to the compiled kernels. Communicators of the same
                number of ranks on the same kind of machine then start with these tables, until another version of the
                library is installed. `proxyccl info` shows the tables. Saved tables omit execution plans, which a
                program loads itself.

        Returns:
            The tables: ``communicator.collectives.selector = tables`` on all ranks sets them.

        Raises:
            ArgumentError: an argument is wrong.
            CommunicatorError: a peer failed; see its subclasses.
        """
        from proxyccl.channels.collectives import tuned, tuning

        self._group.failure.require_usable()
        save = as_flag(save, "save")
        chosen: Any = tuning.default_sizes(self.runtime.name) if sizes is None else sizes
        chosen, iterations, seconds = tuning.checked_arguments(chosen, iterations, seconds)
        measured = tuning.measure(self._collectives, chosen, iterations, seconds)
        selector = tuning.selector_from(self._collectives, measured)
        if save and self.rank == 0 and measured:
            tuned.keep(self._group, tuning.selector_from(self._collectives, tuning.of_library(measured)))
        self._collectives.selector = selector
        return selector

    # -- waiting and failing ---

    def synchronize(self, stream: StreamLike = None) -> None:
        """Waits for a stream (None: for all streams), and raises errors of the stream's work or of the communicator."""
        self._group.synchronize(stream)

    def check(self) -> None:
        """Raises the exception that ended the communicator, if one has."""
        self._group.failure.check()

    def abort(self, reason: str = "") -> None:
        """Ends the communicator on all ranks, whose waits end with an AbortedError. Does not wait."""
        self._group.failure.abort(reason)

    def all_gather_bytes(self, data: bytes, purpose: str = "all_gather_bytes") -> list[bytes]:
        """Returns every rank's bytes, exchanged over the bootstrap. All ranks call this together; for set-up, not for
        speed.

        Args:
            data: this rank's bytes; lengths may differ.
            purpose: what the exchange is for, in words; the same on all ranks.

        Raises:
            ArgumentError: `data` is not bytes, or `purpose` not a text.
            WaitTimeoutError: not all ranks arrived within the time-out.
            MismatchError: a rank calls with another purpose, or has closed the communicator.
        """
        self._group.failure.require_usable()
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ArgumentError("data", f"must be bytes, not {type(data).__name__}")
        return self._group.exchange.all_gather_bytes(bytes(data), require_text(purpose, "purpose"))

    def drain(self) -> None:
        """Waits until this rank's proxy has carried out all triggers of kernels that have ended.

        If the communicator ends first, raises the error that ended it.
        """
        self._group.links.drain()

    def transport(self, peer: int) -> str:
        """Returns the name of the transport that moves data to a peer. Raises ArgumentError for a peer that is not a
        rank.
        """
        return self._group.links.transport(as_rank(self.world_size, peer, "peer"))

    # -- end ---

    def close(self, *, wait: bool = True) -> None:
        """Ends the communicator. Calling it twice does nothing.

        All ranks call this. The call waits for work in flight, except for other ranks after a failure. Ranks may close
        several communicators in different orders.

        Args:
            wait: whether to wait for the other ranks to close the communicator. If not, a thread later frees the memory
                that they reach, when all have closed it.

        Raises:
            WaitTimeoutError: a rank did not close the communicator within the time-out.
        """
        self._group.close(wait=as_flag(wait, "wait"))


@atexit.register
def _close_at_exit() -> None:
    close_at_exit(program_end.failure())
    await_reports()
