"""The communicator: ranks that can reach each other's memory, and everything that is called on them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import numbers
import operator
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from proxyccl.channels import proxy_channel, sm_channel
from proxyccl.channels.bootstrap import MpiBootstrap, TorchBootstrap, as_bootstrap
from proxyccl.channels.collectives import tuning
from proxyccl.channels.collectives.operations import Collectives, describe_call
from proxyccl.channels.collectives.selection import Selector
from proxyccl.channels.control import (
    CALL_DIFFERS,
    CALL_FIELDS,
    CallLog,
    ControlSegment,
    ErrorRecord,
    Watcher,
    create_segment,
    encode_fields,
    exception_from,
)
from proxyccl.channels.handles import ChannelSet
from proxyccl.channels.host_links import HostLink, Listener
from proxyccl.channels.memory import RegisteredMemory
from proxyccl.channels.proxy_channel import HandlerChannel, ProxyChannel
from proxyccl.channels.rdma import Rdma
from proxyccl.channels.reports.reporter import Reporter
from proxyccl.channels.sm_channel import SmChannel
from proxyccl.channels.topology import (
    RankInfo,
    Topology,
    TransportChoice,
    encode_choice,
    local_world_size_from_environment,
)
from proxyccl.device import open_runtime
from proxyccl.device._native import lib
from proxyccl.device.arrays import Array, as_view, current_stream
from proxyccl.device.dtypes import DType, as_dtype
from proxyccl.device.errors import (
    ArgumentError,
    ClosedError,
    CommunicatorError,
    KernelError,
    ProxyCCLError,
    WaitTimeoutError,
)
from proxyccl.device.handle_cache import HandleCache
from proxyccl.device.kernel import Kernel, Launch, Module
from proxyccl.device.runtime import Runtime, Stream, StreamLike
from proxyccl.proxy.cores import parse_cores
from proxyccl.proxy.daemon.client import DaemonClient, missing_in_daemon
from proxyccl.proxy.hosts import host_name
from proxyccl.proxy.interface import Connection, Handle, Proxy, ProxyFailure
from proxyccl.proxy.observe.publications import Description
from proxyccl.proxy.service import ProxyService
from proxyccl.proxy.thread import IdlePolicy
from proxyccl.proxy.trigger import Trigger
from proxyccl.proxy.verbs.devices import missing as missing_for_rdma
from proxyccl.proxy.verbs.options import RdmaOptions

DEFAULT_TIMEOUT = 30.0
LONGEST_TIMEOUT = 1e9
"""Seconds: what kernels count in 64-bit nanoseconds, with room to spare."""


def _timeout_from(value: float | None) -> float:
    if value is None:
        text = os.environ.get("PROXYCCL_TIMEOUT")
        if not text:
            return DEFAULT_TIMEOUT
        try:
            value = float(text)
        except ValueError:
            raise ArgumentError("PROXYCCL_TIMEOUT", f"must be a number of seconds, not {text!r}") from None
    if not isinstance(value, numbers.Real) or not 0 < value <= LONGEST_TIMEOUT:
        raise ArgumentError(
            "timeout", f"must be a positive number of seconds, at most {LONGEST_TIMEOUT:.0e}, not {value!r}"
        )
    return float(value)


def _proxy_from(where: str | None) -> str:
    argument = "proxy"
    if where is None:
        where, argument = os.environ.get("PROXYCCL_PROXY") or "thread", "PROXYCCL_PROXY"
    if where not in ("thread", "daemon"):
        raise ArgumentError(argument, f"{where!r} is neither 'thread' nor 'daemon'")
    return where


class Shared(Protocol):
    """What holds memory that peers' kernels reach."""

    def close(self) -> None:
        """Frees it. No kernel of any rank uses it any more."""
        ...


class Communicator:
    """A group of ranks.

    All of them construct it together, and call its collectives and registrations in the same order.

    Use it as a context manager, or call `close`.

    Args:
        bootstrap: a `Bootstrap`, an MPI communicator or a torch process group; None for MPI's world.
        runtime: a `Runtime` of this rank's own, or the name of one ("host", "cuda", "hip"); None for
            ``PROXYCCL_RUNTIME``, else what the machine offers.
        device: device number, for a runtime given by name; None for the rank's number within its host, going round
            where ranks are more than devices.
        timeout: bound of every wait, in seconds; None for ``PROXYCCL_TIMEOUT``, else 30.
        local_world_size: count this many consecutive ranks as a node; None for ``PROXYCCL_LOCAL_WORLD_SIZE``, else
            real hosts.
        fifos: rings of this rank's proxy.
        proxy_threads: threads that drain them.
        fifo_size: slots in each ring, a power of two.
        idle: what an idle proxy does. The node daemon has a policy of its own.
        proxy: where the proxy runs: "thread", in this process, or "daemon", in the node daemon; None for
            ``PROXYCCL_PROXY``, else "thread".
        proxy_cores: cores that the proxy's threads may run on, in this process: numbers and ranges such as "0-3,8",
            "node:1" for a NUMA node's, "near" for those of the node that the device is next to; None for any.
        transport: what moves the data of ProxyChannels: "copy", "verbs" (RDMA) or "staged" (RDMA through pinned memory)
            for all pairs of ranks, or a dict with some pairs, such as {(0, 1): "verbs"}; the same on all ranks. None
            for ``PROXYCCL_TRANSPORT``, else copies within a node and RDMA between nodes, which is staged where a rank's
            RDMA device can't register its GPU's memory.
        rdma: the RDMA device and its settings; None for what ``PROXYCCL_RDMA_*`` say, else what fits.

    Raises:
        ArgumentError: an argument is wrong, or ranks disagree on the runtime.
        RuntimeUnavailableError: the machine does not offer the runtime, ranks of different nodes have no RDMA, or there
            is no node daemon that would run the proxy.
        WaitTimeoutError: not all ranks came within the time.
    """

    def __init__(
        self,
        bootstrap: Any = None,
        runtime: Runtime | str | None = None,
        *,
        device: int | None = None,
        timeout: float | None = None,
        local_world_size: int | None = None,
        fifos: int = 1,
        proxy_threads: int = 1,
        fifo_size: int = 8192,
        idle: IdlePolicy | None = None,
        proxy: str | None = None,
        proxy_cores: str | None = None,
        transport: TransportChoice = None,
        rdma: RdmaOptions | None = None,
    ) -> None:
        self._state = "opening"
        self._failure: CommunicatorError | None = None
        self._failure_cause = ""
        self._proxy: Proxy | None = None
        self._proxy_options: dict[str, Any] = {
            "fifos": fifos,
            "threads": proxy_threads,
            "fifo_size": fifo_size,
            "idle": idle,
        }
        self._proxy_cores = proxy_cores
        self._lock = threading.RLock()
        self._failure_lock = threading.Lock()  # not the one above, under which a proxy that fails may be waited for
        in_daemon = _proxy_from(proxy) == "daemon"
        self.timeout = _timeout_from(timeout)
        self._bootstrap, self._owns_bootstrap = as_bootstrap(bootstrap)
        self.rank: int = self._bootstrap.rank
        self.world_size: int = self._bootstrap.world_size
        if runtime is None or isinstance(runtime, str):
            hosts = self.all_gather_bytes(host_name().encode())
            beside = hosts[: self.rank].count(hosts[self.rank])  # lower ranks of the same host
            self.runtime: Runtime = open_runtime(runtime, device, local_rank=beside)
        else:
            self.runtime = runtime
        self.runtime.activate()
        self.default_stream: Stream = self.runtime.create_stream()
        self.control: ControlSegment = create_segment(self.runtime, self.rank, self.timeout, self.world_size)

        self._uses_daemon = in_daemon
        daemon_missing, rdma_missing = missing_in_daemon(self.timeout) if in_daemon else ("", missing_for_rdma() or "")
        own = RankInfo.own(self.runtime, rdma_missing, encode_choice(transport, self.world_size))
        own = replace(own, daemon_missing=daemon_missing)
        infos = [RankInfo.decode(data) for data in self.all_gather_bytes(own.encode())]
        local = local_world_size if local_world_size is not None else local_world_size_from_environment()
        self.topology = Topology.find(self.rank, infos, self.runtime, local)
        handles = self.all_gather_bytes(self.control.memory.handle)
        self._segments = {
            peer: ControlSegment(self.runtime.open_pinned(handles[peer]))
            for peer in range(self.world_size)
            if peer != self.rank and self.topology.same_host(peer)
        }
        self.control.introduce(self._segments)
        pids = {peer: infos[peer].pid for peer in self._segments if infos[peer].pid != os.getpid()}
        self.mappings = HandleCache(self.runtime.open)
        self._connections: dict[int, Connection] = {}
        self._shared: list[Shared] = []
        self._call_log = CallLog(self.control, self._segments)
        self._collectives = Collectives(self)
        self.reporter = Reporter(self)
        self._last_stream: int | None = None
        self._last_stream_owner: StreamLike = None  # a stream's handle is good as long as the stream lives
        self.runtime.in_flight.follow(self)
        uses_verbs = self.topology.uses_verbs()  # before a rank's own: where a pair has no transport, all ranks raise
        # Everyone has mapped everyone's segment before anyone goes on, so none can be gone by then.
        self.job = self.all_gather_bytes(secrets.token_hex(4).encode())[0].decode()
        self.rdma = Rdma(self, rdma or RdmaOptions.from_environment())
        failed = weakref.WeakMethod(self.reporter.failed)  # a communicator that is forgotten can go
        try:
            if uses_verbs:
                self.topology = self.topology.with_refusals(self.rdma.probe(self.topology.transports()))
                self.rdma.connect_ends(self.topology.transports())
            self._transports = self.topology.transports()
            self._watcher = Watcher(
                self.rank,
                self.control,
                pids,
                self._link_hosts(),
                on_abort=lambda: None if (report := failed()) is None else report(),
            )
        except ProxyCCLError:
            self._close_proxy()
            raise
        self._state = "open"
        self.reporter.open()
        _open_communicators.add(self)

    def _link_hosts(self) -> dict[int, HostLink]:
        others = [peer for peer in range(self.world_size) if not self.topology.same_host(peer)]
        if not self.topology.spans_hosts:
            return {}
        listener = Listener(self.rank)
        try:
            offers = self.all_gather_bytes(listener.offer)
            return listener.join(others, offers, self.timeout, lambda: None)
        finally:
            listener.close()

    @classmethod
    def from_mpi(cls, comm: Any = None, **options: Any) -> Communicator:
        """A communicator of the ranks of an MPI communicator (None: all). Options as for the constructor."""
        bootstrap = MpiBootstrap(comm)
        communicator = cls(bootstrap, **options)
        communicator._owns_bootstrap = True
        return communicator

    @classmethod
    def from_torch(cls, group: Any = None, **options: Any) -> Communicator:
        """A communicator of the ranks of a torch process group (None: the world). Options as for the constructor."""
        return cls(TorchBootstrap(group), **options)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(_collective=error is None)

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.world_size} on {self.runtime.name}, {self._state}>"

    @property
    def local_rank(self) -> int:
        """This rank's number within its node."""
        return self.topology.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of ranks of this node."""
        return self.topology.local_world_size

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._state == "closed"

    # -- memory and channels ---

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Array:
        """A new array in device memory that peers can reach once it is registered. Its contents are undefined.

        Args:
            shape: dimensions; all at least 0.
            dtype: an element type by name, or numpy's or torch's.
        """
        self.require_usable()
        try:
            dims = tuple(operator.index(n) for n in (shape if isinstance(shape, Iterable) else (shape,)))
        except TypeError:
            raise ArgumentError("shape", f"must be an integer or a sequence of integers, not {shape!r}") from None
        if any(n < 0 for n in dims):
            raise ArgumentError("shape", f"dimensions can't be negative: {dims}")
        element: DType = as_dtype(dtype)
        nbytes = element.itemsize
        for n in dims:
            nbytes *= n
        return Array(self.runtime, self.runtime.allocate(max(nbytes, 1)), dims, element)

    def register(self, array: Any) -> RegisteredMemory:
        """Registers an array so that peers can reach it.

        All ranks call this together, each with its own array; sizes may differ.

        Memory of `empty` can be reached by all peers. On the host runtime other arrays are private to their process:
        they are good as the source of a put, and a peer that wants to reach one is refused by name.
        """
        self.require_usable()
        if isinstance(array, RegisteredMemory):
            return array
        view = as_view(array, "array", gpu=self.runtime.name)
        if view.device[0] != self.runtime.name:
            raise ArgumentError("array", f"lies on {view.device[0]}, the communicator uses {self.runtime.name}")
        return RegisteredMemory.exchange(self, view)

    def sm_channels(
        self, dst: Any, src: Any = None, *, packet_buffer: Any = None, peers: Sequence[int] | None = None
    ) -> ChannelSet[SmChannel]:
        """Channels by which kernels touch the peers' memory. All ranks call this together.

        Args:
            dst: an array or registered memory; the peers' counterparts are the destinations of put and the sources of
                get.
            src: own memory that put reads and get writes; None for `dst`.
            packet_buffer: own memory that peers' putPackets fill, where getPackets looks; None for `dst`.
            peers: ranks to connect to, in the order of the channels; None for all others by rank.

        Raises:
            ArgumentError: a peer is no other rank, or kernels here can't touch its memory.
        """
        chosen = self._peers(peers)
        target = self.register(dst)
        source = target if src is None else self.register(src)
        packets = target if packet_buffer is None else self.register(packet_buffer)
        return sm_channel.connect(self, target, source, packets, chosen)

    def proxy_channels(
        self, dst: Any, src: Any = None, *, peers: Sequence[int] | None = None
    ) -> ChannelSet[ProxyChannel]:
        """Channels by which kernels have the proxy move data.

        All ranks call this together. Arguments as for `sm_channels`.

        Raises:
            ArgumentError: a peer is no other rank, or its memory can't be shared.
            ResourceError: memory or channel ids ran out.
        """
        chosen = self._peers(peers)
        target = self.register(dst)
        source = target if src is None else self.register(src)
        return proxy_channel.connect(self, target, source, chosen)

    def handler_channel(self, handler: Callable[[Trigger], None]) -> HandlerChannel:
        """A channel by which kernels of this rank call a Python function in the proxy's thread. Not collective.

        Args:
            handler: called with each `Trigger`; later triggers of the same ring wait for it. What it raises ends the
                communicator with a HandlerError.

        Raises:
            ArgumentError: the handler can't be called.
            ResourceError: channel ids ran out.
        """
        self.require_usable()
        return HandlerChannel(self, handler)

    def _peers(self, peers: Sequence[int] | None) -> list[int]:
        self.require_usable()
        if peers is None:
            return [peer for peer in range(self.world_size) if peer != self.rank]
        chosen = list(peers)
        for peer in chosen:
            if (
                not isinstance(peer, int)
                or not 0 <= peer < self.world_size
                or peer == self.rank
                or chosen.count(peer) > 1
            ):
                raise ArgumentError(
                    "peers", f"{chosen} must be different ranks below {self.world_size} other than {self.rank}"
                )
        return chosen

    def compile(
        self, source: str, name: str | None = None, *, options: Sequence[str] = (), include_dirs: Sequence[str] = ()
    ) -> Any:
        """Compiles kernels from source text.

        It includes ``"proxyccl/proxyccl.h"`` and defines ``extern "C" __global__ void`` functions.

        Args:
            source: the text.
            name: the kernel wanted; None for all of them.
            options: extra options for the compiler.
            include_dirs: extra directories for ``#include``.

        Returns:
            The `Kernel` of that name, or a `Module` with all of them. A kernel is launched as ``kernel(grid, block,
            *args, stream=None)``.

        Raises:
            CompileError: with the compiler's messages, or with what to install where there is no compiler.
        """
        self.require_usable()
        module: Module = self.runtime.compile(source, options=tuple(options), include_dirs=tuple(include_dirs))
        kernel_or_module: Kernel | Module = module if name is None else module[name]
        return kernel_or_module

    # -- collectives ---

    def all_reduce(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str | None = None, stream: StreamLike = None
    ) -> Any:
        """Reduces `x` over all ranks; every rank gets the same bits.

        Args:
            x: float16, bfloat16, float32, float64, int32 or int64, of any contiguous shape; the same count and type
                on all ranks.
            op: "sum", "prod", "min", "max" or "avg". 16-bit floats are accumulated in float32; the integer average
                truncates.
            out: where the result goes; None for in place.
            algorithm: "one_shot", "recursive_doubling", "two_shot_packets", "two_shot", "ring" or "proxy"; across nodes
                of as many ranks each also "hierarchical". None chooses, by size within a node.
            stream: where to queue it: a stream of any library, or its handle, which must live until the next call. With
                None the call waits on the host runtime; on a GPU it is queued on the current stream of the library
                that owns `x` (torch, CuPy), else on the calling thread's default stream.

        Returns:
            `out`, or `x`.

        Raises:
            ArgumentError: an argument is wrong on this rank. Nothing was done.
            MismatchError: ranks called with different arguments.
            CommunicatorError: a peer failed; see its subclasses.
        """
        return self._collectives.all_reduce(x, op, out, algorithm, stream)

    def reduce_scatter(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str | None = None, stream: StreamLike = None
    ) -> Any:
        """Reduces `x` over all ranks and gives each one share of it.

        Args:
            x: shape [world_size * n, …]; this rank gets the reduction of rows rank * n to (rank + 1) * n.
            op: as for `all_reduce`.
            out: shape [n, …]; None for a new array.
            algorithm: None, or "proxy" to move the data through the proxy.
            stream: as for `all_reduce`.

        Returns:
            `out`, or the new array. Raises as `all_reduce`.
        """
        return self._collectives.reduce_scatter(x, op, out, algorithm, stream)

    def all_gather(self, x: Any, *, out: Any = None, algorithm: str | None = None, stream: StreamLike = None) -> Any:
        """Concatenates `x` of all ranks along the first dimension, in rank order.

        Args:
            x: shape [n, …], the same on all ranks; any element type.
            out: shape [world_size * n, …]; None for a new array. `x` may be this rank's rows of it.
            algorithm: None, or "proxy" to move the data through the proxy.
            stream: as for `all_reduce`.

        Returns:
            `out`, or the new array. Raises as `all_reduce`.
        """
        return self._collectives.all_gather(x, out, algorithm, stream)

    def all_to_all(self, x: Any, *, out: Any = None, algorithm: str | None = None, stream: StreamLike = None) -> Any:
        """Sends the i-th share of `x` to rank i, and receives rank i's as the i-th share of the result.

        Args:
            x: shape [world_size * n, …], the same on all ranks; any element type.
            out: the same shape; None for a new array. It may be `x`.
            algorithm: None, or "proxy" to move the data through the proxy.
            stream: as for `all_reduce`.

        Returns:
            `out`, or the new array. Raises as `all_reduce`.
        """
        return self._collectives.all_to_all(x, out, algorithm, stream)

    def broadcast(
        self, x: Any, root: int = 0, *, out: Any = None, algorithm: str | None = None, stream: StreamLike = None
    ) -> Any:
        """Copies `x` of rank `root` to all ranks.

        Args:
            x: the same shape and type on all ranks.
            root: the rank whose values everyone gets.
            out: where they go; None for in place.
            algorithm: None, or "proxy" to move the data through the proxy.
            stream: as for `all_reduce`.

        Returns:
            `out`, or `x`. Raises as `all_reduce`.
        """
        return self._collectives.broadcast(x, root, out, algorithm, stream)

    def barrier(self, *, stream: StreamLike = None) -> None:
        """Waits, on the stream, until all ranks have come here. Raises as `all_reduce`."""
        self._collectives.barrier(stream)

    @property
    def collectives(self) -> Collectives:
        """The collectives' own state: teams, and the `selector` that chooses algorithms by size."""
        return self._collectives

    def tune(self, sizes: Sequence[int] = tuning.SIZES, iterations: int = 5) -> Selector:
        """Measures the all-reduce algorithms and uses the fastest for each size from then on.

        All ranks call this together. It takes a second or so.

        Args:
            sizes: bytes to measure.
            iterations: calls of each algorithm at each size; the median of the slowest rank's times counts.

        Returns:
            The table, to print or to keep: ``communicator.collectives.selector = table`` on all ranks sets it.
        """
        self.require_usable()
        self._collectives.selector = tuning.selector_from(tuning.measure(self, sizes, iterations))
        return self._collectives.selector

    # -- waiting and failing ---

    def synchronize(self, stream: StreamLike = None) -> None:
        """Waits for a stream (None: all of them), and raises what went wrong on it or in the communicator."""
        try:
            if stream is not None and hasattr(stream, "synchronize"):
                stream.synchronize()
            else:
                self.runtime.synchronize()
        except KernelError as error:
            if self.control.aborted:
                raise self._fail() from error
            raise
        self.check()

    def check(self) -> None:
        """Raises the exception that ended the communicator, if one has."""
        if self._state == "closed":
            return
        if self.control.aborted:
            raise self._fail()

    def abort(self, reason: str = "") -> None:
        """Ends the communicator on all ranks: their waits end with an AbortedError."""
        if self._state == "open":
            self._failure_cause = self._failure_cause or reason
            self.control.raise_abort(ErrorRecord(lib.PROXYCCL_ERROR_LOCAL, self.rank))
            self._watcher.pass_on()

    def require_usable(self) -> None:
        """Raises ClosedError or what ended the communicator, unless it can be used."""
        if self._state == "closed":
            raise ClosedError("the communicator is closed")
        if self._state == "open" and self.control.aborted:
            raise self._fail()

    def _fail(self) -> CommunicatorError:
        with self._failure_lock:
            if self._failure is None:
                self._watcher.pass_on()
                self._failure = exception_from(self.control.record(), self.rank, self._failure_cause)
        self.reporter.note(self._failure)
        return self._failure

    @property
    def failure_cause(self) -> str:
        """What only this rank knows of the failure, in words."""
        return self._failure_cause

    def _proxy_failed(self, failure: ProxyFailure) -> None:
        if failure.code == lib.PROXYCCL_ERROR_TRANSPORT and failure.peer is not None:
            self._watcher.look_for_end(failure.peer)
        trigger = failure.trigger
        self._failure_cause = failure.reason
        self.control.raise_abort(
            ErrorRecord(
                code=failure.code,
                rank=self.rank,
                peer=failure.peer,
                operation=int(trigger.operation) if trigger else 0,
                channel=failure.channel,
                status=failure.status,
                offset=trigger.dst_offset if trigger else 0,
                size=trigger.size if trigger else 0,
            )
        )
        with self._failure_lock:
            if self._failure is None:
                self._failure = exception_from(self.control.record(), self.rank, failure.reason)
                self._failure.__cause__ = failure.exception
        if self._state != "opening":  # then the other ranks hear of it in the exchange that is under way
            self._watcher.pass_on()

    # -- for the other modules of this room ---

    def all_gather_bytes(self, data: bytes, purpose: str = "") -> list[bytes]:
        """Every rank's bytes over the bootstrap.

        A rank that does not come, or comes for another purpose, ends the communicator.
        """
        if self._state != "open":
            return self._bootstrap.all_gather(data, self.timeout, lambda: None)
        tag = purpose.encode() + b"\0"
        try:
            with self.reporter.exchanging(purpose or "an exchange"):
                everyone = self._bootstrap.all_gather(tag + data, self.timeout, self.check)
        except CommunicatorError as error:
            if not self.control.aborted:
                late = isinstance(error, WaitTimeoutError)
                code = lib.PROXYCCL_ERROR_TIMEOUT if late else lib.PROXYCCL_ERROR_LOCAL
                self._failure, self._failure_cause = error, str(error)
                self.control.raise_abort(ErrorRecord(code, self.rank, error.peer))
                self._watcher.pass_on()
                self.reporter.note(error)
            raise
        for peer, theirs in enumerate(everyone):
            if not theirs.startswith(tag):
                there = theirs.partition(b"\0")[0].decode(errors="replace")
                self._failure_cause = f"{purpose or 'an exchange'} here, {there or 'an exchange'} on rank {peer}"
                self.control.raise_abort(ErrorRecord(lib.PROXYCCL_ERROR_MISMATCH, self.rank, peer))
                raise self._fail()
        return [theirs[len(tag) :] for theirs in everyone]

    def agree(self, fields: tuple[int, ...]) -> None:
        """Logs a collective call and compares it with what the peers have logged for theirs.

        Whoever comes later sees the difference; nothing can complete before that, since every collective needs every
        rank.
        """
        self.require_usable()
        call = encode_fields(fields)
        self._check_issue(self._call_log.agree(call), call)

    def _check_issue(self, status: int, call: Any) -> None:
        if status == CALL_DIFFERS:
            self._mismatch(*self._call_log.difference(), tuple(call.fields))
        if status:
            raise self._fail()

    def _mismatch(self, peer: int, theirs: tuple[int, ...], mine: tuple[int, ...]) -> None:
        which = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        name = CALL_FIELDS[which]
        here, there = describe_call(mine), describe_call(theirs)
        self._failure_cause = (
            f"{here['collective']} with {name} {here[name]} here, "
            f"{there['collective']} with {name} {there[name]} on rank {peer}"
        )
        self.control.raise_abort(ErrorRecord(lib.PROXYCCL_ERROR_MISMATCH, self.rank, peer, wait=which))
        raise self._fail()

    def recent_calls(self, count: int) -> list[tuple[int, tuple[int, ...]]]:
        """The last collective calls of this rank in order: each with its number, from 1, and its fields."""
        return self._call_log.recent(count)

    def stream_for(self, stream: StreamLike, x: Any) -> StreamLike:
        """The stream that a call without one means: on a GPU the one where the library that owns `x` works now."""
        if stream is None and self.runtime.name != "host":
            return current_stream(x)
        return stream

    def launch(self, plan: Callable[[StreamLike], None], stream: StreamLike, owners: tuple[object, ...]) -> None:
        """Launches a plan on a stream, behind the communicator's earlier launches on any stream.

        All of them share scratch memory, so they never run at once.
        Without a stream the call waits on the host runtime: plain numpy arrays have no streams. With one, the arrays
        are kept alive until the stream has got past them.
        """
        with self._lock:
            handle = self._next_stream(stream)
            plan(handle)
        self._launched(stream, handle, owners)

    def issue(self, call: Any, launch: Launch, stream: StreamLike, owners: tuple[object, ...] = ()) -> None:
        """`agree` and `launch` for a call whose launch is prepared: one call into C."""
        if self._state != "open":
            self.require_usable()
        with self._lock:
            handle = stream if type(stream) is int and stream == self._last_stream else self._next_stream(stream)
            status = self._call_log.issue(call, launch.prepared, handle)
            if status == lib.PROXYCCL_OTHER_CONTEXT:
                with self.runtime.current():
                    status = self._call_log.issue(call, launch.prepared, handle)
            if status:
                if status > 0:
                    launch.check(status)
                self._check_issue(status, call)
        if owners or stream is None:
            self._launched(stream, handle, owners)

    @property
    def last_stream(self) -> int | None:
        """Handle of the stream that holds the latest launch, or None where there is none.

        A program that gives a stream by its number keeps it until the next call.
        """
        gone = self._state == "closed" or getattr(self._last_stream_owner, "closed", False)
        return None if gone else self._last_stream

    def _next_stream(self, stream: StreamLike) -> int:
        if stream is None and self.runtime.name == "host":
            handle = self.default_stream.handle
        else:
            handle = self.runtime.stream_handle(stream)
        if handle != self._last_stream:
            if self._last_stream is not None:
                self.runtime.order_streams(self._last_stream, handle)
            self._last_stream, self._last_stream_owner = handle, stream
        elif type(stream) is not int:
            self._last_stream_owner = stream
        return handle

    def _launched(self, stream: StreamLike, handle: int, owners: tuple[object, ...]) -> None:
        if stream is None and self.runtime.name == "host":
            try:
                self.default_stream.synchronize()
            finally:
                self.check()
        elif owners:
            self.runtime.in_flight.add(owners, stream, handle)

    @property
    def proxy(self) -> Proxy:
        """This rank's proxy, started when first used."""
        with self._lock:
            if self._proxy is None:
                self.require_usable()
                self._proxy = self._daemon_client() if self._uses_daemon else self._service()
            return self._proxy

    def _service(self) -> ProxyService:
        cores = self._proxy_cores
        return ProxyService(
            self.runtime,
            self.control.host_pointer,
            self.control.memory,
            shared_offset=ControlSegment.service_offset,
            cores=parse_cores(cores, self.runtime.numa_node()) if cores is not None else None,
            on_failure=self._proxy_failed,
            description=Description.of_this_program(self.rank, self.world_size, self.job),
            name=f"proxyccl-{self.rank}",
            **self._proxy_options,
        )

    def _daemon_client(self) -> DaemonClient:
        return DaemonClient(
            self.runtime,
            self.control.memory,
            shared_offset=ControlSegment.service_offset,
            on_failure=self._proxy_failed,
            name=f"proxyccl-{self.rank}",
            description=Description.of_this_program(self.rank, self.world_size, self.job),
            timeout=self.timeout,
            **self._proxy_options,
        )

    @property
    def proxy_if_started(self) -> Proxy | None:
        """The proxy service, if anything has used it."""
        return self._proxy

    def connection(self, peer: int) -> Connection:
        """The proxy's way to a peer, made when first used."""
        if peer not in self._connections:
            by_copy = self._transports[peer] == "copy"
            self._connections[peer] = self.proxy.connect_copy(peer=peer) if by_copy else self.rdma.connect(peer)
        return self._connections[peer]

    def keep(self, shared: Shared) -> None:
        """Keeps alive, until the end or `let_go`, what peers' kernels may reach when its user has forgotten it."""
        self._shared.append(shared)

    def let_go(self, shared: Shared) -> None:
        """Ends `keep`."""
        self._shared.remove(shared)

    def drain(self) -> None:
        """Waits until this rank's proxy has moved all that kernels which have ended asked for.

        Raises what ended the communicator, if that happens first.
        """
        if self._proxy is not None and not self._proxy.drain(self.timeout, lambda: self.control.aborted):
            self.check()
            raise WaitTimeoutError(f"the proxy was not done within {self.timeout:g} s")

    def transport(self, peer: int) -> str:
        """What moves data to a peer: "copy", "verbs" or "staged"."""
        return self._transports[peer]

    def peer_semaphore(self, peer: int, channel: int) -> int:
        """The address, as the transport to a peer reaches it, of the word that signals to its channel count up."""
        if self._transports[peer] == "copy":
            return self._segments[peer].semaphore_host(channel)
        return self.rdma.semaphore(peer, channel)

    def peer_semaphore_handle(self, peer: int, channel: int) -> Handle:
        """By which a proxy in another process reaches that word, where it is memory of this host."""
        return functools.partial(self._segments[peer].semaphore_handle, channel) if peer in self._segments else bytes

    # -- end ---

    def close(self, *, _collective: bool = True) -> None:
        """Ends the communicator. Calling it twice does nothing.

        All ranks call this together; it waits for work in flight.

        After a failure it waits for nobody.
        """
        with self._lock:
            if self._state == "closed":
                return
            healthy = self._state == "open" and not self.control.aborted
            try:
                if healthy:
                    try:
                        self.runtime.synchronize()
                    except KernelError:
                        healthy = False
                if healthy and _collective:
                    # What this rank's triggers asked for reaches peers that are still there to take it.
                    if self._proxy is not None and self.rdma.used:
                        self._proxy.drain(self.timeout, lambda: self.control.aborted)
                    # Nobody unmaps what a peer may still write to.
                    self.all_gather_bytes(b"", "close")
                elif healthy:
                    self.abort("it left without the others")
                    healthy = False
            except CommunicatorError:
                healthy = False
                raise
            finally:
                self._release(healthy=healthy)

    def _close_proxy(self) -> bool:
        if self._proxy is not None and not self._proxy.close(self.timeout):
            return False
        self.rdma.close()
        return True

    def _release(self, *, healthy: bool) -> None:
        self._state = "closed"
        _open_communicators.discard(self)
        self._watcher.close()
        self.reporter.close()
        # Kernels that were told to stop look at the memory that goes below until they have.
        with contextlib.suppress(KernelError):
            self.runtime.synchronize()
        if not self._close_proxy():
            return  # a handler still runs, and its thread still uses the memory: leave it to the process's end
        self.default_stream.close()
        self.mappings.close()
        if healthy:  # otherwise a peer's kernel may still write there: the last reference frees it
            self._collectives.close()
            while self._shared:
                self._shared.pop().close()
        for segment in self._segments.values():
            segment.close()
        self.control.close()
        if self._owns_bootstrap:
            self._bootstrap.close()


_open_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    # A program that ends well without having closed its communicators ends together with its peers, which may still
    # need what this rank holds. One that ends by an exception does not keep them waiting.
    failed = hasattr(sys, "last_type")
    for communicator in list(_open_communicators):
        with contextlib.suppress(CommunicatorError):
            communicator.close(_collective=not failed)
