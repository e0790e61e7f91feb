"""Flows: the scratch memory and links of transfers between pairs of ranks (flows.h), and their order on streams."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from msgspec import Struct

from proxyccl.channels.collectives.links import Links
from proxyccl.channels.collectives.table import COLLECTIVES
from proxyccl.channels.group import Group
from proxyccl.channels.memory import allocate, register
from proxyccl.device._native import ffi, lib
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.errors import KernelError
from proxyccl.device.kernel import Kernel, Launch
from proxyccl.device.owned import closed_stream
from proxyccl.device.runtime import Event, Runtime, Stream, StreamLike
from proxyccl.device.sleepers import ProxiedStruct
from proxyccl.device.thread_streams import ThreadStream, identify_stream
from proxyccl.proxy.codec import Codec

MOST_TRANSFERS: int = lib.PROXYCCL_MAX_TRANSFERS
"""The most transfers of one launch."""
_MOST_LANES = 8
_THREADS = 256
"""Per block: with this number all blocks of a launch are resident at once on any GPU with at least 132
multiprocessors."""
_LEAST_SLOT_BYTES = 1024

_FLAG = Codec(bool, 16, "flag")


def load_kernel(runtime: Runtime) -> Kernel:
    """The kernel of transfers; loads it if necessary."""
    (kernel,) = COLLECTIVES["send"]
    return runtime.shipped(kernel.file, kernel.name)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


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


class _Last(Struct, frozen=True):
    """The latest launch of a flow.

    Attributes:
        stream: the stream of the launch, kept because its handle is valid only while it lives.
        identity: the stream's (`identify_stream`).
        event: recorded after it. Waiting for the whole stream would not do: work that was queued later may wait for the
        peer.
        captured: whether the event is part of a graph, so that nothing outside the graph can wait for it.
    """

    stream: StreamLike
    identity: int | ThreadStream
    event: Event
    captured: bool


class Flows:
    """All ranks make them together.

    Args:
        group: whose ranks.
    """

    def __init__(self, group: Group) -> None:
        runtime, ranks = group.runtime, group.world_size
        self._runtime, self._rank, self._ranks = runtime, group.rank, ranks
        via_proxy = [peer for peer in range(ranks) if peer != group.rank and not group.topology.accessible[peer]]
        flags = group.exchange.all_gather(not via_proxy, _FLAG, "the first transfer")
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
        self._links = Links(group, memory, range(ranks), via_proxy, ends, proxied_anywhere=not all(flags))
        counters_bytes = _round_up(ends * ranks * ffi.sizeof("uint64_t"), 128)
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
        self._lock = threading.Lock()
        group.launches.add_lock(self._lock)
        self._last: dict[tuple[int, bool], _Last] = {}
        self._idle_streams: list[Stream] = []

    def run(self, transfers: Sequence[Transfer], stream: StreamLike, owners: tuple[object, ...]) -> None:
        """Issues transfers, none of them empty; with more than `MOST_TRANSFERS`, or several of one flow, by several
        launches.

        Without a stream the call waits on the host runtime, on its own stream, because other streams may depend on
        other calls. `owners` are kept alive until the stream has passed the launches.
        """
        launches = [self._prepare(part) for part in _parts(transfers, self._rank, self._ranks)]
        if stream is not None or self._runtime.name != "host":
            handle = self._issue(transfers, launches, stream)
            self._runtime.in_flight.add((owners, launches), stream, handle)
            return
        own = self._idle_streams.pop() if self._idle_streams else self._runtime.create_stream()
        try:
            self._issue(transfers, launches, own)
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

    def _issue(self, transfers: Sequence[Transfer], launches: Sequence[Launch], stream: StreamLike) -> int:
        handle = self._runtime.stream_handle(stream)
        identity = identify_stream(self._runtime, handle)
        flows = [transfer.flow for transfer in transfers if transfer.peer != self._rank]
        with self._lock:
            captured = self._runtime.is_capturing(handle)
            self._order(flows, handle, identity, captured=captured)
            self._failure.require_usable()  # the last look before the driver is called, as in Launches.launch
            for launch in launches:
                launch(handle)
            event = self._runtime.create_event()
            event.record(handle)
            self._last.update(dict.fromkeys(flows, _Last(stream, identity, event, captured)))
        return handle

    def _order(
        self, flows: Sequence[tuple[int, bool]], handle: int, identity: int | ThreadStream, *, captured: bool
    ) -> None:
        """Makes the stream wait for earlier transfers of the same flows on other streams.

        A stream that is being captured into a graph can't wait for one that is not; the graph's own launches are the
        caller's to order.
        """
        known = [last for flow in flows if (last := self._last.get(flow)) is not None and last.captured == captured]
        others = [last for last in known if last.identity != identity or closed_stream(last.stream) is not None]
        for event in {last.event for last in others}:
            self._runtime.wait_event(handle, event)

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
            entry.lane_bytes = _round_up(-(-nbytes // entry.lanes), 128)
            blocks += entry.lanes
        threads = min(_THREADS, self._runtime.launch_defaults.threads)
        return self._kernel.prepare(blocks, threads, ProxiedStruct.of(bytes(ffi.buffer(flows)), self._links.sleepers))

    def close(self) -> None:
        """Frees the memory. Kernels of all ranks must have ended."""
        self._scratch.free()
        self._memory.close()
        self._links.close()
        self._last.clear()
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
