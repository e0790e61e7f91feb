"""The scratch memory and links of transfers between pairs of ranks (flows.h), and the order of transfers on streams."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np

from proxyccl.channels.calls._calls import FlowCalls
from proxyccl.channels.calls.launches import CurrentStream, array_types
from proxyccl.channels.collectives.packet_team import LINE_PACKETS, LINE_WARP, PACKET_BYTES, line_data_bytes
from proxyccl.channels.collectives.table import SEND_RECEIVE
from proxyccl.channels.collectives.team import Links
from proxyccl.channels.group import Group
from proxyccl.channels.joining.exchange import FLAG
from proxyccl.channels.memory import allocate, register
from proxyccl.device._native import ffi, lib
from proxyccl.device.arguments.integers import round_up
from proxyccl.device.errors import KernelError
from proxyccl.device.kernel import Launch
from proxyccl.device.runtime import Stream
from proxyccl.device.sleepers import ProxiedStruct
from proxyccl.proxy._engine import lib as engine_lib

MOST_TRANSFERS: int = lib.PROXYCCL_MAX_TRANSFERS
_MOST_BLOCKS = 256
"""The most blocks of a launch. A thread of a shipped kernel has at most 128 registers, so a multiprocessor holds two
blocks of `_THREADS` threads, and a GPU with at least 128 multiprocessors holds all blocks at once.
"""
_MOST_LANES = 16
"""The most lanes of a flow. In a launch, each rank is the peer of at most two transfers. If transfers with this many
lanes to and from all ranks would need more than `_MOST_BLOCKS` blocks, a flow has at most `_MOST_BLOCKS //
MOST_TRANSFERS` lanes.
"""
_SLOTS, _PROXIED_SLOTS = 2, 4
"""Slots of a lane. Between mapped ranks, few large slots are faster, because a block waits after each piece until all
its stores have arrived. A proxy's pieces take longer, and more of them should be under way.
"""
_THREADS = 256
_LEAST_SLOT_BYTES = 1024
_MOST_LINE_BYTES, _LINE_PART, _LINE_UNIT = 32 << 10, 4, 2048
"""The most bytes of a slot's lines; the least size of a slot as a multiple of its lines' size; and a number of which
the lines' size is a multiple, so that the size of the data in the lines is a multiple of 128 bytes.
"""
_NO_STREAM = 2**64 - 1


class Flows:
    """The state of transfers between pairs of ranks. All ranks construct a `Flows` together. A group of one rank only
    copies within the rank, so its `Flows` has neither memory nor a kernel.

    Args:
        whole_lines: as for `PacketTeam`.

    Attributes:
        calls: the object that issues the transfers.
    """

    def __init__(self, group: Group, *, whole_lines: bool) -> None:
        runtime = self._runtime = group.runtime
        self._failure, self._memory = group.failure, contextlib.ExitStack()
        self._events = runtime.stream_events()
        self._idle_streams: list[Stream] = []
        defaults = runtime.launch_defaults
        threads = round_up(min(_THREADS, defaults.threads), LINE_WARP if whole_lines else 1)
        flows = ffi.new("ProxycclFlows *", {"rank": group.rank, "world_size": group.world_size})
        self._launch = self._connect(group, flows, threads, whole_lines) if group.world_size > 1 else None
        launch: tuple[int, int, object] = (0, _address(flows), flows)
        if self._launch is not None:
            launch = (_address(self._launch.prepared), _address(self._launch.packed(0)), self._launch)
        at_once = min(flows.line_bytes, line_data_bytes(threads * LINE_PACKETS * PACKET_BYTES))
        lock = threading.Lock()
        group.launches.locks.append(lock)
        self.calls = FlowCalls(
            array_types(runtime),
            np.ndarray,
            CurrentStream,
            runtime,
            group.failure,
            lock,
            (*launch, 4 * defaults.bytes_per_block, at_once),
            (
                runtime.calls.copy,
                self._events.order,
                group.control.host_pointer,
                _NO_STREAM if runtime.thread_stream is None else runtime.thread_stream,
            ),
            (
                self._refuse,
                runtime.stream_handle,
                runtime.current,
                runtime.in_flight.add,
                self._events.take,
                self._take_stream,
                self._wait,
            ),
        )

    def _connect(self, group: Group, flows: Any, threads: int, whole_lines: bool) -> Launch:
        """Allocates and exchanges the memory of flows, fills in `flows`, and returns the launch that has it as its
        argument.
        """
        ranks, defaults = group.world_size, group.runtime.launch_defaults
        via_proxy = [peer for peer in range(ranks) if peer != group.rank and not group.topology.accessible[peer]]
        flags = group.exchange.all_gather(not via_proxy, FLAG, "the first transfer")
        # Copy engines and the proxy's thread are faster with few large pieces, so flows through the proxy have one
        # lane.
        most = _MOST_LANES if 2 * ranks * _MOST_LANES <= _MOST_BLOCKS else _MOST_BLOCKS // MOST_TRANSFERS
        lanes, slots = (min(most, defaults.blocks), _SLOTS) if all(flags) else (1, _PROXIED_SLOTS)
        every = lanes * ranks * slots
        slot_bytes = max(_LEAST_SLOT_BYTES, defaults.flow_bytes // every // 128 * 128)
        inbox = every * slot_bytes
        scratch = allocate(group, (inbox if all(flags) else 2 * inbox,), "uint8", "transfers")
        memory = register(group, scratch)
        ends = 2 * lanes  # links to each peer: one for each lane and direction
        links = Links(group, memory, memory, range(ranks), via_proxy, ends, proxied_anywhere=not all(flags))
        self._memory.callback(links.close)
        self._registered = memory  # kept, because the links hold addresses of its mappings
        counters_bytes = round_up(ends * ranks * ffi.sizeof("uint64_t"), 128)
        table = links.on_device(group, counters_bytes)
        self._memory.callback(table.close)
        self._memory.callback(scratch.free)
        flows.lanes, flows.slots = lanes, slots
        flows.control = ffi.cast("ProxycclControl *", group.control.device_pointer)
        flows.pieces = ffi.cast("uint64_t *", table.ptr)
        flows.links = ffi.cast("ProxycclLink *", table.ptr + counters_bytes)
        flows.scratch = ffi.cast("char *", scratch.ptr)
        flows.slot_bytes, flows.staging_offset = slot_bytes, inbox
        lines = min(_MOST_LINE_BYTES, slot_bytes // _LINE_PART) // _LINE_UNIT * _LINE_UNIT if whole_lines else 0
        flows.line_bytes, flows.data_offset = line_data_bytes(lines), lib.PROXYCCL_FLOW_HEADER_BYTES + lines
        argument = ProxiedStruct.of(bytes(ffi.buffer(flows)), links.sleepers)
        return SEND_RECEIVE.load(group.runtime).prepare(1, threads, argument)

    def _take_stream(self) -> Stream:
        """Returns a stream that only one call uses, so that waiting for the stream does not wait for other calls."""
        try:
            return self._idle_streams.pop()
        except IndexError:
            return self._runtime.create_stream()

    def _wait(self, own: Stream) -> None:
        try:
            own.synchronize()
        except KernelError:
            self._failure.check()
            raise
        except BaseException as error:  # after a KeyboardInterrupt, for example, the caller may free the arrays
            self._failure.abort(f"interrupted by {type(error).__name__}")
            with contextlib.suppress(KernelError):
                own.synchronize()
            raise
        finally:
            self._idle_streams.append(own)
        self._failure.check()

    def _refuse(self, status: int) -> None:
        if status == engine_lib.PROXYCCL_CALL_ABORTED:
            raise self._failure.exception()
        if self._launch is None:
            self._runtime.check(status, "copy")
        else:
            self._launch.check(status)

    def close(self) -> None:
        """Frees the memory. All kernels of all ranks must have completed."""
        self._memory.close()
        for event in self.calls.events:
            self._events.give(event)
        while self._idle_streams:
            self._idle_streams.pop().close()


def _address(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))
