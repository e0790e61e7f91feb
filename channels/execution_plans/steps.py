"""Translates a rank's program for one chunk size into the tables that the rank's kernel reads (execution.h)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from proxyccl.channels.execution_plans.document import BufferName
from proxyccl.channels.execution_plans.operations import COMBINATIONS
from proxyccl.channels.execution_plans.program import ChannelEnd, Operation, Program, Range
from proxyccl.device._native import ffi, lib

if TYPE_CHECKING:
    from proxyccl.device._native import ProxycclStepPointer  # this name exists only in the stub, not in cffi

_BASES: dict[BufferName, int] = {"i": lib.PROXYCCL_BASE_INPUT, "o": lib.PROXYCCL_BASE_OUTPUT}
_ONE_THREAD = {
    "signal": lib.PROXYCCL_STEP_SIGNAL,
    "rlxsignal": lib.PROXYCCL_STEP_RELAXED_SIGNAL,
    "wait": lib.PROXYCCL_STEP_WAIT,
    "rlxwait": lib.PROXYCCL_STEP_RELAXED_WAIT,
    "sem_acquire": lib.PROXYCCL_STEP_ACQUIRE,
    "sem_release": lib.PROXYCCL_STEP_RELEASE,
}


class Tables(Struct, frozen=True):
    """The layout of the kernel's tables in memory. Each block has an array of `block_steps` ProxycclStep structs, from
    offset 0, and an array of `block_operands` ProxycclOperand structs, from offset `operands_at`.
    """

    blocks: int
    block_steps: int
    block_operands: int
    operands_at: int


class _Block(Struct):
    steps: list[ProxycclStepPointer] = field(default_factory=list)
    operands: list[bytes] = field(default_factory=list)
    by_all: bool | None = None  # whether all threads or one thread executes the last step; None after a barrier


def _filled(found: list[bytes], count: int, empty: bytes) -> bytes:
    return b"".join(found) + empty * (count - len(found))


class Writer(Struct, frozen=True):
    """Writes the tables of one rank for one chunk size."""

    rank: int  # the rank that the tables are for
    threads: int
    chunk_bytes: int  # size of a chunk, in every buffer
    alignment: int  # the alignment of the threadblocks' parts of a range, in bytes
    double_scratch: bool  # whether scratch memory has two halves
    # Returns the address at which this rank's kernels access a rank's buffer, except this rank's own input and output.
    address: Callable[[int, BufferName], int]
    # Returns the proxy's id of the memory of a rank's buffer, for triggers to a peer, and the buffer's offset in that
    # memory.
    memory_id: Callable[[int, BufferName, int], tuple[int, int]]
    port: Callable[[ChannelEnd], int]  # returns the index of a port channel in the kernel's table
    semaphore: Callable[[ChannelEnd], Any]  # returns the ProxycclSemaphore of a memory channel

    def tables(self, program: Program) -> tuple[bytes, Tables]:
        """Returns the tables of a program with at least one threadblock, and their layout."""
        blocks = [_Block() for _ in program]
        for block, operations in zip(blocks, program, strict=True):
            for operation in operations:
                self._operation(block, operation)
        steps = 1 + max(len(block.steps) for block in blocks)
        operands = max(len(block.operands) for block in blocks)
        end = bytes(ffi.buffer(ffi.new("ProxycclStep *", {"code": lib.PROXYCCL_STEP_END})))
        unused = bytes(ffi.sizeof("ProxycclOperand"))
        raw = b"".join(_filled([bytes(ffi.buffer(step)) for step in block.steps], steps, end) for block in blocks)
        raw += bytes(-len(raw) % 16)
        tables = Tables(len(program), steps, operands, len(raw))
        return raw + b"".join(_filled(block.operands, operands, unused) for block in blocks), tables

    # -- steps ---

    def _step(self, block: _Block, operation: Operation, code: int, *, by_all: bool | None) -> ProxycclStepPointer:
        """Adds a step, and a barrier between a step that all threads execute and a step that one thread executes."""
        if by_all is not None and block.by_all is not None and by_all != block.by_all:
            self._sync(block, operation)
        step = ffi.new("ProxycclStep *")
        step.code = code
        step.place = operation.place.threadblock << lib.PROXYCCL_PLACE_OPERATION_BITS | operation.place.operation
        block.steps.append(step)
        block.by_all = by_all
        return step

    def _sync(self, block: _Block, operation: Operation) -> None:
        block.by_all = None
        self._step(block, operation, lib.PROXYCCL_STEP_SYNC, by_all=None)

    def _operation(self, block: _Block, operation: Operation) -> None:
        name = operation.place.name
        if name == "nop":
            self._sync(block, operation)
        elif name == "pipeline":
            self._pipeline(block, operation)
        elif name == "barrier":
            if block.by_all is not None:
                self._sync(block, operation)
            step = self._step(block, operation, lib.PROXYCCL_STEP_BARRIER, by_all=None)
            step.channel, step.option = operation.numbers
        elif operation.moving is not None:
            self._move(block, operation)
        elif operation.channels:
            for i, end in enumerate(operation.channels):
                self._on_channel(block, operation, i, end)
        else:
            for i, number in enumerate(operation.numbers):
                step = self._step(block, operation, _ONE_THREAD[name], by_all=False)
                step.thread, step.channel = i % self.threads, number

    def _on_channel(self, block: _Block, operation: Operation, i: int, end: ChannelEnd) -> None:
        name = operation.place.name
        waits, is_port = name in ("wait", "rlxwait"), end.type == "port"
        if is_port and not waits:
            step = self._step(block, operation, lib.PROXYCCL_STEP_PORT, by_all=False)
            step.option = lib.PROXYCCL_OP_FLUSH if name == "flush" else lib.PROXYCCL_OP_SIGNAL
            step.channel = self.port(end)
        else:
            code = lib.PROXYCCL_STEP_PORT_WAIT if is_port else _ONE_THREAD[name]
            step = self._step(block, operation, code, by_all=False)
            step.option, step.semaphore = end.peer if waits else 0, self.semaphore(end)
        step.thread = i % self.threads

    def _pipeline(self, block: _Block, operation: Operation) -> None:
        iterations = -(-operation.chunks * self.chunk_bytes // operation.unit)
        if iterations == 0 or not operation.body:
            return
        if block.by_all is not None:
            self._sync(block, operation)
        loop = self._step(block, operation, lib.PROXYCCL_STEP_LOOP, by_all=None)
        begin = len(block.steps)
        for inner in operation.body:
            self._operation(block, inner)
        if block.by_all is not None:  # other threads may execute the next iteration's first step
            self._sync(block, operation)
        loop.option, loop.unit, loop.iterations = len(block.steps) - begin, operation.unit, iterations

    # -- data ---

    def _move(self, block: _Block, operation: Operation) -> None:
        moving = operation.moving
        assert moving is not None
        if operation.channels:
            self._put(block, operation)
        elif moving.pairs:
            for source, destination in zip(operation.sources, operation.destinations, strict=True):
                self._combine(block, operation, (source,), (destination,))
        else:
            self._combine(block, operation, operation.sources, operation.destinations)

    def _combine(
        self, block: _Block, operation: Operation, sources: tuple[Range, ...], destinations: tuple[Range, ...]
    ) -> None:
        packets = any(each.packets for each in (*sources, *destinations))
        is_copy = len(sources) == len(destinations) == 1 and not packets
        code = lib.PROXYCCL_STEP_COPY if is_copy else lib.PROXYCCL_STEP_COMBINE
        step = self._step(block, operation, code, by_all=True)
        step.option, step.packets = COMBINATIONS.index(operation.combination), packets
        self._operands_of(block, step, operation, sources, destinations)

    def _operands_of(
        self,
        block: _Block,
        step: ProxycclStepPointer,
        operation: Operation,
        sources: tuple[Range, ...],
        destinations: tuple[Range, ...],
    ) -> None:
        step.sources, step.destinations, step.first_operand = len(sources), len(destinations), len(block.operands)
        for each in (*sources, *destinations):
            start, step.bytes = self._part(operation, each)
            operand = ffi.new("ProxycclOperand *")
            own = each.rank == self.rank
            if own and each.buffer in _BASES:
                operand.base, operand.address = _BASES[each.buffer], start
            else:
                operand.address = self.address(each.rank, each.buffer) + start
            operand.packets, operand.alternates = each.packets, self._alternates(each)
            block.operands.append(bytes(ffi.buffer(operand)))

    def _put(self, block: _Block, operation: Operation) -> None:
        moving = operation.moving
        assert moving is not None
        sources = operation.sources
        if operation.place.name == "rppkt":
            step = self._step(block, operation, lib.PROXYCCL_STEP_AWAIT_PACKETS, by_all=True)
            self._operands_of(block, step, operation, sources, ())
            sources = sources * len(operation.destinations)
        option = lib.PROXYCCL_OP_DATA
        option |= lib.PROXYCCL_OP_SIGNAL * moving.signals | lib.PROXYCCL_OP_FLUSH * moving.flushes
        pairs = zip(sources, operation.destinations, operation.channels, strict=True)
        for i, (source, destination, end) in enumerate(pairs):
            step = self._step(block, operation, lib.PROXYCCL_STEP_PORT, by_all=False)
            step.thread, step.channel, step.option = i % self.threads, self.port(end), option
            step.src_offset, step.bytes = self._part(operation, source)
            step.dst_offset, _ = self._part(operation, destination)
            step.bytes *= 2 if source.packets else 1
            step.src_memory, begin = self.memory_id(source.rank, source.buffer, end.peer)
            step.src_offset += begin
            step.dst_memory, begin = self.memory_id(destination.rank, destination.buffer, end.peer)
            step.dst_offset += begin
            step.src_alternates, step.dst_alternates = self._alternates(source), self._alternates(destination)

    def _alternates(self, each: Range) -> bool:
        return self.double_scratch and each.buffer == "s"

    def _part(self, operation: Operation, each: Range) -> tuple[int, int]:
        units = each.size * self.chunk_bytes // self.alignment

        def before(part: int) -> int:
            return part * (units // operation.parts) + min(part, units % operation.parts)

        first, end = before(operation.part), before(operation.part + 1)
        start = each.index * self.chunk_bytes + first * self.alignment
        return start * (2 if each.packets else 1), (end - first) * self.alignment
