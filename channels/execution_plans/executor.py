"""Executes plans: makes a plan's resources on this rank, and launches the plan's kernel.

All ranks make a plan's channels, barriers and counters together at its first execution, and larger scratch memory
together at the first execution that needs it. The call log first compares the plan and the size, so all ranks make
these resources in the same call.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from proxyccl.channels.arguments import overlap
from proxyccl.channels.calls.launches import Launchable
from proxyccl.channels.execution_plans.document import BufferName
from proxyccl.channels.execution_plans.plan import ExecutionPlan
from proxyccl.channels.execution_plans.program import ChannelEnd
from proxyccl.channels.execution_plans.steps import Tables, Writer
from proxyccl.channels.group import Group
from proxyccl.channels.memory import RegisteredMemory, allocate, register
from proxyccl.channels.proxy_channel import connect_handles
from proxyccl.channels.sm_channel import SmSemaphores
from proxyccl.device._native import ffi, lib
from proxyccl.device.arguments.integers import round_up
from proxyccl.device.arrays.array import Array, ArrayView
from proxyccl.device.arrays.dtypes import DTYPES
from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import Memory
from proxyccl.device.sleepers import ProxiedStruct
from proxyccl.device.stream_operations import CopyBytes, StreamOperations

LEAST_THREADS = 32
_LINE = 128
_BARRIER_BYTES = 8  # the size of a DeviceSyncer
Reached = dict[BufferName, RegisteredMemory]
_ARRAYS: dict[BufferName, int] = {"i": 0, "o": 1}
_ARRAY_POINTERS = tuple(ffi.offsetof("ProxycclExecution", name) for name in ("input", "output"))
_Key = tuple[int, tuple[tuple[BufferName, RegisteredMemory], ...]]
"""Bytes of the input, and the registered arrays that peers reach. The key has the arrays themselves, not their digests,
because two arrays that can't be shared may have the same digest.
"""


class ExecutionPlans:
    """The plans that one group has executed.

    Args:
        forget: called when a plan's memory has moved; discards the results of earlier `prepare` calls.
    """

    def __init__(self, group: Group, forget: Callable[[], None]) -> None:
        self._group = group
        self._forget = forget
        self._resources: dict[str, _Resources] = {}
        group.keep(self)

    def require_executable(self, plan: ExecutionPlan) -> None:
        """Raises ArgumentError if the plan is for another number of ranks, or if its kernels would access memory on
        another node or on a device that the kernels' device can't access.
        """
        if plan.digest in self._resources:
            return
        group = self._group
        if plan.world_size != group.world_size:
            raise ArgumentError("plan", f"{plan!r}; expected a plan for the communicator's {group.world_size} ranks")
        for rank, peers in enumerate(plan.touched):
            for peer, place in peers.items():
                if not group.topology.may_touch(rank, peer):
                    raise place.refuse(
                        f"a memory channel to rank {peer}, which kernels of rank {rank} can't reach; expected port "
                        "channels between nodes, and between devices that are not peers"
                    )

    def prepare(self, plan: ExecutionPlan, source: ArrayView, target: ArrayView, given: Reached) -> Launchable:
        """Prepares a plan for arrays that are disjoint or overlap as in an in-place call. All ranks call this together.
        Raises ArgumentError if these ranks can't execute the plan.

        Args:
            plan: a plan that can execute the call.
            given: the registered arrays that peers access in place, the same on all ranks.
        """
        resources = self._resources.get(plan.digest)
        if resources is None:
            resources = self._resources[plan.digest] = _Resources(self._group, plan, self._forget)
        return resources.prepare(source, target, given)

    def close(self) -> None:
        """Frees the plans' resources, which no kernel of any rank may still use."""
        for resources in self._resources.values():
            resources.close()
        self._resources.clear()


class _Buffer:
    """A growing buffer on each rank: the input ("i"), the output ("o") or scratch memory ("s")."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.arrays: list[Array] = []  # includes replaced arrays, which peers may still use
        self.memory: RegisteredMemory | None = None

    def reserve(self, nbytes: int) -> bool:
        """Replaces a buffer of fewer than `nbytes` bytes, on all ranks together. Returns whether the buffer was
        replaced.
        """
        if self.memory is not None and nbytes <= self.memory.nbytes:
            return False
        room = 1 << max(12, (nbytes - 1).bit_length())
        self.arrays.append(allocate(self._group, (room,), "uint8", "plans"))
        self.memory = register(self._group, self.arrays[-1])
        return True

    def close(self) -> None:
        for array in self.arrays:
            array.free()


_Sized = tuple[Memory, Tables]
"""The kernel's tables for one size, in device memory."""


class _Resources:
    """The resources of one plan on this rank. All ranks construct a `_Resources` together."""

    def __init__(self, group: Group, plan: ExecutionPlan, forget: Callable[[], None]) -> None:
        self._group, self._plan, self._forget = group, plan, forget
        document, rank, runtime = plan.document, group.rank, group.runtime
        self._gpu = document.gpus[rank]
        defaults = runtime.launch_defaults
        most = defaults.threads if runtime.name == "host" else lib.PROXYCCL_MAX_BLOCK_THREADS
        self._threads = max(LEAST_THREADS, min(document.num_threads_per_block, most))
        self._buffers: dict[BufferName, _Buffer] = {"s": _Buffer(group)}
        for buffer in _ARRAYS:
            if buffer in plan.reached:
                self._buffers[buffer] = _Buffer(group)
        if plan.in_place and len(self._buffers) > 1:  # input and output are one array
            self._buffers["i"] = self._buffers["o"] = next(b for name, b in self._buffers.items() if name != "s")
        self._buffers["s"].reserve(1)
        self._sizes: dict[_Key, _Sized] = {}
        self._retired: list[_Sized] = []  # captured graphs may still use the old tables
        self._privates: list[Memory] = []
        self._kept: list[object] = []
        self._semaphores: dict[ChannelEnd, Any] = {}
        self._ports: dict[ChannelEnd, int] = {}  # indices in the kernel's table
        self._connect_memory_channels()
        self._port_table = self._connect_ports()
        self._words = self._start_words()

    # -- channels ---

    def _connect_memory_channels(self) -> None:
        count = self._plan.most_channels["memory"]
        if count == 0:
            return
        semaphores = SmSemaphores(self._group, count)
        self._kept.append(semaphores)
        reachable = self._group.topology.accessible
        for peer in self._plan.peers(self._group.rank, "memory"):
            if not reachable[peer]:  # does not raise an error, because a plan may name channels that no operation uses
                continue
            for number in range(count):
                semaphore = ffi.new("ProxycclSemaphore *")
                semaphores.fill(semaphore, peer, number)
                self._semaphores[ChannelEnd("memory", peer, number)] = semaphore[0]

    def _connect_ports(self) -> Memory | None:
        count = self._plan.most_channels["port"]
        if count == 0:
            return None
        scratch = self._buffers["s"].memory
        assert scratch is not None
        peers = self._plan.peers(self._group.rank, "port")
        channels, kept = connect_handles(self._group, scratch, scratch, list(peers), count)
        self._kept += [channels, kept]
        raw: list[bytes] = []
        for peer in peers:
            for number, channel in enumerate(channels[peer]):
                end, handle = ChannelEnd("port", peer, number), ffi.new("ProxycclProxyChannel *")
                ffi.memmove(handle, channel.device_handle, ffi.sizeof("ProxycclProxyChannel"))
                self._ports[end], self._semaphores[end] = len(raw), handle.semaphore
                self._kept.append(handle)
                raw.append(channel.device_handle)
        return self._upload(b"".join(raw))

    def _start_words(self) -> tuple[Memory, int, int]:
        counters = ffi.sizeof("ProxycclExecutionCounters")
        numbers = [
            operation.numbers[0]
            for operation, _ in self._plan.operations(self._group.rank)
            if operation.place.name == "barrier"
        ]
        barriers = max(numbers, default=-1) + 1
        semaphores_at = counters + barriers * _BARRIER_BYTES
        start = [semaphore.init_value for semaphore in self._gpu.semaphores]
        raw = bytes(semaphores_at) + struct.pack(f"<{len(start)}i", *start)
        return self._upload(raw), counters, semaphores_at

    def _upload(self, raw: bytes) -> Memory:
        memory = self._group.device_memory.allocate(max(len(raw), 1), "plans")
        if raw:
            self._group.runtime.copy(memory.ptr, int(ffi.cast("uintptr_t", ffi.from_buffer(raw))), len(raw))
        return memory

    # -- launches ---

    def prepare(self, source: ArrayView, target: ArrayView, given: Reached) -> Launchable:
        plan, runtime = self._plan, self._group.runtime
        chunk = source.nbytes // self._gpu.input_chunks
        half = self._scratch_bytes(chunk)
        moved = self._buffers["s"].reserve(2 * half if plan.document.use_double_scratch_buffer else half)
        larger = max(source.nbytes, target.nbytes)
        for buffer, view in _ARRAYS.items():
            if buffer in self._buffers and buffer not in given:
                nbytes = larger if plan.in_place else (source, target)[view].nbytes
                moved = self._buffers[buffer].reserve(nbytes) or moved
        if moved and self._sizes:
            self._retired += self._sizes.values()
            self._sizes.clear()
            self._forget()
        key = source.nbytes, tuple(given.items())
        reached = {**self._registered(), **given}
        sized = self._sizes.get(key)
        if sized is None:
            # No work or graph may use a deregistered array, so the tables of calls with this array can be freed.
            for old in [old for old in self._sizes if any(memory.closed for _, memory in old[1])]:
                del self._sizes[old]
            sized = self._sizes[key] = self._tables(source, target, reached)
        before, own_in, own_out, after = self._places(source, target, reached)
        dtype = source.dtype if plan.combinations else DTYPES["uint8"]  # a plan that only moves data ignores the type
        shipped = runtime.shipped("execute_plan.h", "execute_plan", dtype.name)
        kernel = shipped.prepare(sized[1].blocks, self._threads, self._parameter(sized, own_in, own_out))
        return StreamOperations(runtime, (*before, kernel, *after)) if before or after else kernel

    def _scratch_bytes(self, chunk: int) -> int:
        document = self._plan.document
        chunks = max(gpu.scratch_chunks for gpu in document.gpus)
        nbytes = chunk * chunks * (2 if document.protocol == "LL" else 1)
        return round_up(nbytes, _LINE)

    def _share(self, rank: int, buffer: BufferName, source: ArrayView, target: ArrayView) -> int:
        """Returns the offset of a rank's input or output in the buffer that peers access.

        In an in-place call, the smaller of input and output is the rank's share of the larger, as in MSCCL++.
        """
        if not self._plan.in_place or buffer == "s":
            return 0
        own, other = (source, target) if buffer == "i" else (target, source)
        return rank * own.nbytes if own.nbytes < other.nbytes else 0

    def _registered(self) -> Reached:
        return {name: buffer.memory for name, buffer in self._buffers.items() if buffer.memory is not None}

    def _tables(self, source: ArrayView, target: ArrayView, reached: Reached) -> _Sized:
        plan, document, own = self._plan, self._plan.document, self._group.rank

        def address(rank: int, buffer: BufferName) -> int:
            return reached[buffer].peer_ptr(rank) + self._share(rank, buffer, source, target)

        def memory_id(rank: int, buffer: BufferName, peer: int) -> tuple[int, int]:
            memory = reached[buffer]
            first = memory.source_id(peer) if rank == own else memory.peer_id(rank)
            return first, self._share(rank, buffer, source, target)

        chunk = source.nbytes // self._gpu.input_chunks
        writer = Writer(
            own,
            self._threads,
            chunk,
            document.buffer_alignment,
            document.use_double_scratch_buffer,
            address,
            memory_id,
            self._ports.__getitem__,
            self._semaphores.__getitem__,
        )
        program = plan.programs[own] or ((),)  # an empty block counts executions on a rank without threadblocks
        raw, tables = writer.tables(program)
        return self._upload(raw), tables

    def _places(
        self, source: ArrayView, target: ArrayView, reached: Reached
    ) -> tuple[list[CopyBytes], int, int, list[CopyBytes]]:
        """Returns the copies before the kernel, the addresses of the kernel's input and output, and the copies after
        the kernel. Parts of the output that the plan does not write keep their contents.
        """
        rank = self._group.rank
        if not self._plan.in_place:
            if "i" in reached:
                own_in = reached["i"].ptr
            else:  # the plan would overwrite an input that overlaps the output
                own_in = self._private(source.nbytes) if overlap(source, target) else source.ptr
            own_out = reached["o"].ptr if "o" in reached else target.ptr
        else:
            in_share, out_share = (self._share(rank, buffer, source, target) for buffer in _ARRAYS)
            whole = reached["i"].ptr if "i" in reached else target.ptr - out_share
            if "i" not in reached and target.nbytes < source.nbytes:
                whole = source.ptr if source.ptr + out_share == target.ptr else self._private(source.nbytes)
            own_in, own_out = whole + in_share, whole + out_share
        before = [] if own_in == source.ptr else [CopyBytes(own_in, source.ptr, source.nbytes)]
        # If an in-place output is not larger than the input, copying the input has filled the output.
        of_larger = self._plan.in_place and source.nbytes >= target.nbytes
        if own_out != target.ptr and not of_larger and not self._plan.writes_whole_outputs:
            before.insert(0, CopyBytes(own_out, target.ptr, target.nbytes))
        after = [] if own_out == target.ptr else [CopyBytes(target.ptr, own_out, target.nbytes)]
        return before, own_in, own_out, after

    def _private(self, nbytes: int) -> int:
        if not self._privates or self._privates[-1].nbytes < nbytes:
            self._privates.append(self._group.device_memory.allocate(nbytes, "plans"))
        return self._privates[-1].ptr

    def _parameter(self, sized: _Sized, own_in: int, own_out: int) -> bytes:
        words, barriers_at, semaphores_at = self._words
        execution = ffi.new("ProxycclExecution *")
        execution.control = ffi.cast("ProxycclControl *", self._group.control.device_pointer)
        execution.input, execution.output = ffi.cast("char *", own_in), ffi.cast("char *", own_out)
        memory, tables = sized
        execution.steps = ffi.cast("ProxycclStep *", memory.ptr)
        execution.operands = ffi.cast("ProxycclOperand *", memory.ptr + tables.operands_at)
        execution.block_steps, execution.block_operands = tables.block_steps, tables.block_operands
        ports = self._port_table
        execution.port_channels = ffi.cast("ProxycclProxyChannel *", ports.ptr if ports else 0)
        execution.counters = ffi.cast("ProxycclExecutionCounters *", words.ptr)
        execution.barriers = ffi.cast("uint32_t *", words.ptr + barriers_at)
        execution.semaphores = ffi.cast("int32_t *", words.ptr + semaphores_at)
        # The second half begins at the same offset for all sizes: otherwise a rank that has begun a short call could
        # overwrite data of a long call that another rank has yet to read.
        scratch = self._buffers["s"].memory
        assert scratch is not None
        execution.alternate_bytes = scratch.nbytes // 2 if self._plan.document.use_double_scratch_buffer else 0
        sleepers = self._group.links.proxy.sleepers if ports else None
        return ProxiedStruct.of(bytes(ffi.buffer(execution)), sleepers, pointers=_ARRAY_POINTERS)

    def close(self) -> None:
        for buffer in self._buffers.values():
            buffer.close()
        for memory in (*self._privates, self._words[0], self._port_table):
            if memory is not None:
                memory.close()
        for memory, _ in (*self._sizes.values(), *self._retired):
            memory.close()
