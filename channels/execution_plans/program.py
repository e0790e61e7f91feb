"""Checks the programs of a plan's threadblocks, and resolves ids in the programs to channels, peers and buffers.

The error for an invalid operation names the rank, the threadblock and the operation's index. Each rank reads the whole
plan, so all ranks refuse an invalid plan.
"""

from __future__ import annotations

from msgspec import Struct

from proxyccl.channels.execution_plans.document import BufferName, ChannelType, Chunks, Document, Gpu, Op, Threadblock
from proxyccl.channels.execution_plans.operations import (
    CHANNELLED,
    COMBINATIONS,
    MOVING,
    MOVING_PACKETS_BY_PORT,
    OTHERS,
    SWITCHED,
    Moving,
    Operand,
)
from proxyccl.device._native import lib
from proxyccl.device.errors import ArgumentError

MOST_OPERATIONS = 1 << lib.PROXYCCL_PLACE_OPERATION_BITS
MOST_THREADBLOCKS = 1 << (32 - lib.PROXYCCL_PLACE_OPERATION_BITS)
BUFFERS: dict[BufferName, str] = {"i": "input", "o": "output", "s": "scratch memory"}


class Place(Struct, frozen=True):
    """The place of an operation in a plan, for errors. A pipeline's number precedes the numbers of its operations."""

    rank: int
    threadblock: int
    operation: int
    name: str

    def __str__(self) -> str:
        return f"rank {self.rank}, threadblock {self.threadblock}, operation {self.operation} ({self.name})"

    def refuse(self, why: str) -> ArgumentError:
        return ArgumentError("plan", f"{self}: {why}")


class Range(Struct, frozen=True):
    rank: int
    buffer: BufferName
    index: int
    size: int
    packets: bool


class ChannelEnd(Struct, frozen=True):
    """A rank's end of a channel. `number` is the channel's index among the rank's channels of this type to the peer."""

    type: ChannelType
    peer: int
    number: int


class Operation(Struct, frozen=True):
    """An operation of one threadblock.

    Attributes:
        place: the operation's place in the plan.
        moving: how the operation moves data; None if it moves no data.
        channels: the channels that the operation uses, in order.
        sources, destinations: the ranges that the operation reads and writes; if `moving.pairs`, source i is copied to
            destination i.
        combination: how sources are combined.
        part, parts: this threadblock's part of the bytes, and the number of parts.
        numbers: a barrier's number and its number of threadblocks; or the numbers of semaphores.
        unit, chunks: for a pipeline, the bytes of an iteration, and the number of chunks.
        body: a pipeline's operations.
    """

    place: Place
    moving: Moving | None = None
    channels: tuple[ChannelEnd, ...] = ()
    sources: tuple[Range, ...] = ()
    destinations: tuple[Range, ...] = ()
    combination: str = "sum"
    part: int = 0
    parts: int = 1
    numbers: tuple[int, ...] = ()
    unit: int = 0
    chunks: int = 0
    body: tuple[Operation, ...] = ()


Program = tuple[tuple[Operation, ...], ...]
"""A rank's threadblocks."""


def channel_ends(gpu: Gpu, ranks: int) -> dict[ChannelType, list[ChannelEnd]]:
    """Returns a rank's channels by type, in the order of their ids. Raises ArgumentError."""
    ends: dict[ChannelType, list[ChannelEnd]] = {"memory": [], "port": []}
    for channels in gpu.channels:
        kind = channels.channel_type
        if kind not in ends:
            raise ArgumentError("plan", f"rank {gpu.id} has channels of type {kind!r}; expected 'memory' or 'port'")
        for peer in channels.connected_to:
            if peer >= ranks or peer == gpu.id:
                raise ArgumentError(
                    "plan", f"rank {gpu.id} has a {kind} channel to rank {peer}; expected another of {ranks} ranks"
                )
            ends[kind].append(ChannelEnd(kind, peer, sum(end.peer == peer for end in ends[kind])))
    return ends


def refuse_switches(gpu: Gpu) -> None:
    """Raises ArgumentError, which names the operation, if the rank uses a switch that multicasts."""
    why = "needs a switch that multicasts, which ProxyCCL does not use"
    for block in gpu.threadblocks:
        ops = [each for op in block.ops for each in (op, *op.ops)]
        for i, op in enumerate(ops):
            chunks = (*op.src_buff, *op.dst_buff)
            switched = any(each.switch_channel_id is not None for each in chunks)
            if switched or op.name in SWITCHED or op.channel_type == "switch":
                raise Place(gpu.id, block.id, i, op.name).refuse(f"{op.name} {why}")
    if any(channels.channel_type == "switch" for channels in gpu.channels):
        raise ArgumentError("plan", f"rank {gpu.id}: a channel of type 'switch' {why}")


class Reader:
    def __init__(self, document: Document, gpu: Gpu) -> None:
        self._document = document
        self._gpu = gpu
        self._gpus = document.gpus
        self._ends = channel_ends(gpu, len(document.gpus))

    def program(self) -> Program:
        """Returns the threadblocks, in the order of their ids. Raises ArgumentError for an invalid operation."""
        blocks = self._gpu.threadblocks
        if [block.id for block in blocks] != list(range(len(blocks))):
            raise ArgumentError("plan", f"rank {self._gpu.id}: threadblocks must be numbered from 0, in order")
        if len(blocks) > MOST_THREADBLOCKS:
            raise ArgumentError(
                "plan", f"rank {self._gpu.id} has {len(blocks)} threadblocks, more than {MOST_THREADBLOCKS}"
            )
        return tuple(self._threadblock(block) for block in blocks)

    def _threadblock(self, block: Threadblock) -> tuple[Operation, ...]:
        operations: list[Operation] = []
        count = 0
        for op in block.ops:
            place = Place(self._gpu.id, block.id, count, op.name)
            count += 1 + len(op.ops)
            if count > MOST_OPERATIONS:
                raise place.refuse(f"a threadblock has {MOST_OPERATIONS} operations at most")
            if op.name != "pipeline":
                operations.append(self._operation(block, op, place))
                continue
            if op.iter_context is None:
                raise place.refuse("expected iter_context")
            body = tuple(
                self._in_pipeline(
                    block, inner, Place(place.rank, place.threadblock, place.operation + 1 + i, inner.name)
                )
                for i, inner in enumerate(op.ops)
            )
            unit, chunks = op.iter_context.unit_size, op.iter_context.num_chunks
            if unit % self._document.buffer_alignment:
                raise place.refuse(
                    f"unit_size {unit} is not a multiple of the alignment {self._document.buffer_alignment}"
                )
            operations.append(Operation(place, unit=unit, chunks=chunks, body=body))
        return tuple(operations)

    def _in_pipeline(self, block: Threadblock, op: Op, place: Place) -> Operation:
        operation = self._operation(block, op, place)
        if op.name == "pipeline" or (operation.moving is not None and operation.moving.packets):
            raise place.refuse("a pipeline takes neither pipelines nor packets")
        return operation

    def _operation(self, block: Threadblock, op: Op, place: Place) -> Operation:
        if op.ops and op.name != "pipeline":
            raise place.refuse("only a pipeline contains operations")
        if op.name in CHANNELLED:
            channels = self._channels(block, op, place, CHANNELLED[op.name])
            if not channels:
                raise place.refuse("expected channel_ids")
            return Operation(place, channels=channels)
        if op.name in MOVING:
            return self._moving(block, op, place)
        if op.name not in OTHERS:
            raise place.refuse("the operation is unknown")
        if op.name == "barrier":
            if op.barrier_id is None or op.num_threadblocks is None:
                raise place.refuse("expected barrier_id and num_threadblocks")
            if op.num_threadblocks > len(self._gpu.threadblocks):
                raise place.refuse(f"{op.num_threadblocks} threadblocks; the rank has {len(self._gpu.threadblocks)}")
            return Operation(place, numbers=(op.barrier_id, op.num_threadblocks))
        for semaphore in op.semaphore_ids:
            if semaphore >= len(self._gpu.semaphores):
                raise place.refuse(f"semaphore {semaphore}; the rank has {len(self._gpu.semaphores)}")
        if op.name.startswith("sem_") and not op.semaphore_ids:
            raise place.refuse("expected semaphore_ids")
        return Operation(place, numbers=op.semaphore_ids)

    def _channels(
        self, block: Threadblock, op: Op, place: Place, types: tuple[ChannelType, ...]
    ) -> tuple[ChannelEnd, ...]:
        if op.channel_type not in types:
            raise place.refuse(f"channel_type {op.channel_type!r}; expected {' or '.join(map(repr, types))}")
        mine = [
            i for channels in block.channels if channels.channel_type == op.channel_type for i in channels.channel_ids
        ]
        ends = self._ends[op.channel_type]
        found = []
        for number in op.channel_ids:
            if number >= len(mine):
                raise place.refuse(f"{op.channel_type} channel {number}; the threadblock has {len(mine)}")
            if mine[number] >= len(ends):
                raise place.refuse(f"{op.channel_type} channel {mine[number]} of the rank; the rank has {len(ends)}")
            found.append(ends[mine[number]])
        if len(set(found)) < len(found) and op.name in CHANNELLED:
            raise place.refuse(f"channel_ids {list(op.channel_ids)} name a channel twice")
        return tuple(found)

    def _moving(self, block: Threadblock, op: Op, place: Place) -> Operation:
        by_port = op.channel_type == "port"
        moving = MOVING_PACKETS_BY_PORT if op.name == "ppkt" and by_port else MOVING[op.name]
        if moving.packets and self._document.protocol != "LL":
            raise place.refuse(f"packets in a plan whose protocol is {self._document.protocol!r}; expected 'LL'")
        if moving.channels and op.channel_type not in moving.channels:
            raise place.refuse(f"channel_type {op.channel_type!r}; expected {' or '.join(map(repr, moving.channels))}")
        if op.reduce_op not in COMBINATIONS:
            raise place.refuse(f"reduce_op {op.reduce_op!r}; expected one of {', '.join(COMBINATIONS)}")
        sources = self._ranges(block, op, place, "src_buff", op.src_buff, moving.sources)
        destinations = self._ranges(block, op, place, "dst_buff", op.dst_buff, moving.destinations)
        if moving.pairs and len(sources) != len(destinations):
            raise place.refuse(f"{len(sources)} sources and {len(destinations)} destinations; expected equal numbers")
        groups = list(zip(sources, destinations, strict=True)) if moving.pairs else [(*sources, *destinations)]
        for group in groups:
            if len({each.size for each in group}) > 1:
                raise place.refuse(f"ranges of {', '.join(str(each.size) for each in group)} chunks; expected one size")
        channels: tuple[ChannelEnd, ...] = ()
        if by_port and moving.channels:
            channels = self._channels(block, op, place, moving.channels)
            if [end.peer for end in channels] != [each.rank for each in destinations]:
                raise place.refuse("expected a channel for each destination, to its rank")
        group_info = op.tbg_info
        if group_info is not None and group_info.tb_id >= group_info.tbg_size:
            raise place.refuse(f"tb_id {group_info.tb_id} of {group_info.tbg_size}; expected less than tbg_size")
        part, parts = (0, 1) if group_info is None else (group_info.tb_id, group_info.tbg_size)
        return Operation(place, moving, channels, sources, destinations, op.reduce_op, part, parts)

    def _ranges(
        self,
        block: Threadblock,
        op: Op,
        place: Place,
        field: str,
        given: tuple[Chunks, ...],
        wanted: tuple[Operand, ...],
    ) -> tuple[Range, ...]:
        ranges: list[Range] = []
        at = 0
        for i, operand in enumerate(wanted):
            later = len(wanted) - 1 - i  # leaves at least one entry for each later operand
            first = at
            while at < len(given) - later and at - first < operand.most:
                if operand.most > 1 and at > first and (given[at].buffer_id is not None) != operand.remote:
                    break
                ranges.append(self._range(block, op, place, f"{field}[{at}]", given[at], operand))
                at += 1
            if at == first:
                raise place.refuse(f"{field} has {len(given)} entries; expected {len(wanted)} at least")
        if at < len(given):
            raise place.refuse(f"{field} has {len(given)} entries; expected {at}")
        return tuple(ranges)

    def _range(self, block: Threadblock, op: Op, place: Place, entry: str, chunks: Chunks, operand: Operand) -> Range:
        if (chunks.buffer_id is None) == (chunks.type is None) or operand.remote == (chunks.buffer_id is None):
            raise place.refuse(f"{entry}: expected only {'buffer_id' if operand.remote else 'type'}")
        rank, buffer = self._gpu.id, chunks.type
        if chunks.buffer_id is not None:
            rank, buffer = self._remote(block, op, place, entry, chunks.buffer_id)
        assert buffer is not None
        owner = self._gpus[rank]
        limit = {"i": owner.input_chunks, "o": owner.output_chunks, "s": owner.scratch_chunks}[buffer]
        if chunks.index + chunks.size > limit:
            raise place.refuse(
                f"{entry}: chunks {chunks.index} to {chunks.index + chunks.size - 1} of rank {rank}'s "
                f"{BUFFERS[buffer]}; it has only {limit} chunks"
            )
        if operand.packets and buffer != "s":
            raise place.refuse(f"{entry}: packets in the {BUFFERS[buffer]}; expected scratch memory")
        return Range(rank, buffer, chunks.index, chunks.size, operand.packets)

    def _remote(self, block: Threadblock, op: Op, place: Place, entry: str, number: int) -> tuple[int, BufferName]:
        kind = op.channel_type
        mine = [
            i for refs in block.remote_buffer_refs if refs.access_channel_type == kind for i in refs.remote_buffer_ids
        ]
        if number >= len(mine):
            raise place.refuse(f"{entry}: remote buffer {number}; the threadblock has {len(mine)} for {kind} channels")
        if mine[number] >= len(self._gpu.remote_buffers):
            raise place.refuse(
                f"{entry}: remote buffer {mine[number]} of the rank; the rank has {len(self._gpu.remote_buffers)}"
            )
        remote = self._gpu.remote_buffers[mine[number]]
        if kind not in remote.access_channel_types:
            raise place.refuse(f"{entry}: remote buffer {mine[number]} does not allow {kind} channels")
        if remote.rank >= len(self._gpus) or remote.rank == self._gpu.id:
            raise place.refuse(f"{entry}: a buffer of rank {remote.rank}; expected another of {len(self._gpus)} ranks")
        return remote.rank, remote.type
