"""Flows: the scratch memory and links of transfers between pairs of ranks (flows.h), and their order on streams."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from proxyccl.channels._prepared_calls import PreparedCalls
from proxyccl.channels.collectives.links import Links
from proxyccl.channels.collectives.table import COLLECTIVES
from proxyccl.channels.group import Group
from proxyccl.channels.joining.exchange import FLAG
from proxyccl.channels.memory import allocate, register
from proxyccl.device._native import ffi, lib
from proxyccl.device.arguments.integers import round_up
from proxyccl.device.arrays.array import Array, ArrayView
from proxyccl.device.arrays.libraries import libraries
from proxyccl.device.errors import KernelError
from proxyccl.device.kernel import Kernel, Launch
from proxyccl.device.runtime import Runtime, Stream, StreamLike
from proxyccl.device.sleepers import ProxiedStruct
from proxyccl.proxy._engine import ffi as engine
from proxyccl.proxy._engine import lib as engine_lib

MOST_TRANSFERS: int = lib.PROXYCCL_MAX_TRANSFERS
"""The most transfers of one launch."""
_MOST_LANES = 8
_THREADS = 256
"""Per block: with this number all blocks of a launch are resident at once on any GPU with at least 132
multiprocessors."""
_LEAST_SLOT_BYTES = 1024


def load_kernel(runtime: Runtime) -> Kernel:
    """The kernel of transfers; loads it if necessary."""
    (kernel,) = COLLECTIVES["send"]
    return runtime.shipped(kernel.file, kernel.name)


class Transfer(Struct, frozen=True):
    """Data that goes to a peer, or comes from it.

    Attributes:
        peer: the other rank; this rank itself where `source` is copied to `target`.
        source: the data to send; None to receive.
        target: the place for received data; None to send.
    """

    peer: int
    source: ArrayView | None = None
    target: ArrayView | None = None

    @property
    def nbytes(self) -> int:
        """Its size."""
        view = self.target if self.source is None else self.source
        assert view is not None
        return view.nbytes

    @property
    def in_place(self) -> bool:
        """Whether it is a copy of an array to itself."""
        return self.source is not None and self.target is not None and self.source.ptr == self.target.ptr

    @property
    def flow(self) -> tuple[int, bool]:
        """The peer, and whether this rank sends."""
        return self.peer, self.source is not None


class FlowCall:
    """Transfers that are issued together, prepared: they can be issued again and again.

    Args:
        launches: one or several.
        flows: numbers of their flows.
        event: recorded after them.
        unused: takes the event when this is freed.

    Attributes:
        launches: as given.
        native: the ProxycclFlowCall (flow_order.h).
    """

    __slots__ = ("_event", "_flows", "_launches", "_unused", "launches", "native")

    def __init__(self, launches: Sequence[Launch], flows: Sequence[int], event: int, unused: deque[int]) -> None:
        self._event, self._unused = event, unused
        self.launches = launches
        self._flows = engine.new("uint32_t[]", [*flows])
        addresses = [int(ffi.cast("uintptr_t", launch.prepared)) for launch in launches]
        self._launches = engine.new(
            "ProxycclLaunch *[]", [engine.cast("ProxycclLaunch *", address) for address in addresses]
        )
        self.native = engine.new("ProxycclFlowCall *")
        self.native.flows, self.native.flow_count = self._flows, len(flows)
        self.native.launches, self.native.launch_count = self._launches, len(launches)
        self.native.event = event

    def __del__(self) -> None:
        # Without a lock: this runs wherever the last reference goes.
        self._unused.append(self._event)


class Flows:
    """All ranks make them together.

    Args:
        group: whose ranks.

    Attributes:
        prepared_calls: those that `keep` has kept.
    """

    def __init__(self, group: Group) -> None:
        runtime, ranks = group.runtime, group.world_size
        self._runtime, self._rank, self._ranks = runtime, group.rank, ranks
        via_proxy = [peer for peer in range(ranks) if peer != group.rank and not group.topology.accessible[peer]]
        flags = group.exchange.all_gather(not via_proxy, FLAG, "the first transfer")
        defaults = runtime.launch_defaults
        # Copy engines and the proxy's thread are faster with few large pieces, so flows through the proxy have one
        # lane.
        self._lanes = min(_MOST_LANES, defaults.blocks) if all(flags) else 1
        self._bytes_per_lane = 4 * defaults.bytes_per_block
        slots = self._lanes * ranks * lib.PROXYCCL_FLOW_SLOTS
        slot_bytes = max(_LEAST_SLOT_BYTES, 2 * defaults.exchange_bytes // slots // 128 * 128)
        inbox = slots * slot_bytes
        self._scratch = allocate(group, (inbox if all(flags) else 2 * inbox,), "uint8")
        memory = register(group, self._scratch)
        self._kept = memory
        ends = 2 * self._lanes  # of each peer: a lane's two flows
        self._links = Links(group, memory, memory, range(ranks), via_proxy, ends, proxied_anywhere=not all(flags))
        counters_bytes = round_up(ends * ranks * ffi.sizeof("uint64_t"), 128)
        raw = self._links.raw
        self._memory = runtime.allocate(counters_bytes + len(raw))
        runtime.copy(self._memory.ptr + counters_bytes, int(ffi.cast("uintptr_t", ffi.from_buffer(raw))), len(raw))
        flows = self._flows = ffi.new("ProxycclFlows *")
        flows.rank, flows.world_size, flows.lanes = group.rank, ranks, self._lanes
        flows.control = ffi.cast("ProxycclControl *", group.control.device_pointer)
        flows.pieces = ffi.cast("uint64_t *", self._memory.ptr)
        flows.links = ffi.cast("ProxycclLink *", self._memory.ptr + counters_bytes)
        flows.scratch = ffi.cast("char *", self._scratch.ptr)
        flows.slot_bytes, flows.staging_offset = slot_bytes, inbox
        self._kernel = load_kernel(runtime)
        self._failure = group.failure
        self._events = runtime.stream_events()
        self._unused: deque[int] = deque()  # events of calls that were freed; flows may still wait for them
        self._last = engine.new("ProxycclLastOfFlow[]", 2 * ranks)
        order = self._order = engine.new("ProxycclFlowOrder *")
        order.streams = engine.cast("ProxycclStreamOrder *", self._events.order)
        order.control = engine.cast("ProxycclControl *", group.control.host_pointer)
        order.thread_stream = engine_lib.PROXYCCL_NO_STREAM if runtime.thread_stream is None else runtime.thread_stream
        order.last, order.flow_count = self._last, 2 * ranks
        self._lock = threading.Lock()
        group.launches.add_lock(self._lock)
        self.prepared_calls = PreparedCalls(Array, "identity", self._lock, self._refuse, None, libraries.tensor_types)
        self.prepared_calls.set_stream(0)  # calls name their streams
        group.launches.add_prepared_calls(self.prepared_calls)
        self._idle_streams: list[Stream] = []

    def run(self, transfers: Sequence[Transfer], stream: StreamLike, owners: tuple[object, ...]) -> FlowCall:
        """Issues transfers, none of them empty, and returns them prepared; with more than `MOST_TRANSFERS`, or several
        of one flow, by several launches.

        Without a stream the call waits on the host runtime, on its own stream, because other streams may depend on
        other calls. `owners` are kept alive until the stream has passed the launches.
        """
        call = self._call(transfers)
        if stream is not None or self._runtime.name != "host":
            handle = self._issue(call, stream)
            self._runtime.in_flight.add((owners, call), stream, handle)
            return call
        own = self._idle_streams.pop() if self._idle_streams else self._runtime.create_stream()
        try:
            self._issue(call, own)
            own.synchronize()
        except KernelError:
            self._failure.check()
            raise
        except BaseException as error:  # from a signal handler, after which the caller's arrays may go away
            self._failure.abort(f"interrupted by {type(error).__name__}")
            with contextlib.suppress(KernelError):
                own.synchronize()
            raise
        finally:
            self._idle_streams.append(own)
        self._failure.check()
        return call

    def keep(self, call: FlowCall, x: Any, out: Any, options: tuple[Any, ...]) -> None:
        """Has ``prepared_calls.repeat(x, out, options, stream)`` issue a call again, which uses these arrays alone."""
        issue = engine.addressof(engine_lib, "proxyccl_flow_order_issue")
        function, order, native = (int(engine.cast("uintptr_t", each)) for each in (issue, self._order, call.native))
        with self._lock:
            self.prepared_calls.keep(x, out, options, function, order, native, 0, call)

    def _call(self, transfers: Sequence[Transfer]) -> FlowCall:
        launches = [self._prepare(part) for part in _parts(transfers, self._rank, self._ranks)]
        flows = {transfer.flow: None for transfer in transfers if transfer.peer != self._rank}
        with self._lock:
            event = self._take_event()
        return FlowCall(launches, [2 * peer + sends for peer, sends in flows], event, self._unused)

    def _take_event(self) -> int:
        if self._unused:
            event = self._unused.popleft()
            if not engine_lib.proxyccl_flow_order_needs(self._order, event):
                return event
            self._unused.append(event)
        return self._events.take()

    def _issue(self, call: FlowCall, stream: StreamLike) -> int:
        handle = self._runtime.stream_handle(stream)
        with self._lock:
            self._failure.require_usable()  # C checks the abort word itself
            status = engine_lib.proxyccl_flow_order_issue(self._order, call.native, engine.NULL, handle)
            if status == lib.PROXYCCL_OTHER_CONTEXT:
                with self._runtime.current():
                    status = engine_lib.proxyccl_flow_order_issue(self._order, call.native, engine.NULL, handle)
            if status:
                self._refuse(status, call)
            if not isinstance(stream, int):  # an object may be closed, and its handle become another stream's
                engine_lib.proxyccl_flow_order_unname(self._order, call.native)
        return handle

    def _refuse(self, status: int, call: FlowCall) -> None:
        """Raises the error for a nonzero status of a call."""
        if status == engine_lib.PROXYCCL_CALL_ABORTED:
            raise self._failure.exception()
        call.launches[0].check(status)

    def _prepare(self, transfers: Sequence[Transfer]) -> Launch:
        flows = ffi.new("ProxycclFlows *", self._flows[0])
        flows.count = len(transfers)
        blocks = 0
        for number, transfer in enumerate(transfers):
            entry, nbytes = flows.transfers[number], transfer.nbytes
            entry.src = ffi.cast("char *", transfer.source.ptr if transfer.source else 0)
            entry.dst = ffi.cast("char *", transfer.target.ptr if transfer.target else 0)
            entry.bytes, entry.peer = nbytes, transfer.peer
            entry.lanes = min(self._lanes, -(-nbytes // self._bytes_per_lane))  # both sides compute the same
            entry.lane_bytes = round_up(-(-nbytes // entry.lanes), 128)
            blocks += entry.lanes
        threads = min(_THREADS, self._runtime.launch_defaults.threads)
        return self._kernel.prepare(blocks, threads, ProxiedStruct.of(bytes(ffi.buffer(flows)), self._links.sleepers))

    def close(self) -> None:
        """Frees the memory. Kernels of all ranks must have ended."""
        self._scratch.free()
        self._memory.close()
        self._links.close()
        self.prepared_calls.clear()
        while self._unused:
            self._events.give(self._unused.popleft())
        while self._idle_streams:
            self._idle_streams.pop().close()


def _parts(transfers: Sequence[Transfer], rank: int, ranks: int) -> list[list[Transfer]]:
    """Cuts transfers into launches: the k-th transfers of all flows together, nearest ranks first, so that the launches
    of all ranks of a collective fit together.
    """
    by_turn: dict[int, list[Transfer]] = {}
    turns: dict[tuple[int, bool], int] = {}
    for transfer in transfers:
        turn = turns[transfer.flow] = turns.get(transfer.flow, -1) + 1
        by_turn.setdefault(turn, []).append(transfer)
    parts = []
    for _, together in sorted(by_turn.items()):
        together.sort(key=lambda t: ((t.peer - rank if t.source else rank - t.peer) % ranks, t.target is not None))
        parts += [together[i : i + MOST_TRANSFERS] for i in range(0, len(together), MOST_TRANSFERS)]
    return parts
