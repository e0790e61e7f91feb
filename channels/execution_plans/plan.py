"""Reads and checks execution plans."""

from __future__ import annotations

import functools
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from proxyccl.channels.execution_plans.document import DOCUMENT, BufferName, ChannelType, Document, Op
from proxyccl.channels.execution_plans.operations import CHANNELLED, MOVING
from proxyccl.channels.execution_plans.program import Operation, Place, Program, Reader, channel_ends, refuse_switches
from proxyccl.channels.segment.calls import register_names
from proxyccl.device.arguments.texts import require_text
from proxyccl.device.arrays.dtypes import DType
from proxyccl.device.errors import ArgumentError, ProtocolError

_Times = Counter[tuple[int, int]]
"""How often something happens, counted by the chunks and the unit of the enclosing pipeline; the key is (0, 0) outside
of pipelines.
"""

PACKET_PAYLOAD = 8
"""Bytes of data in a packet."""
COLLECTIVES = {name: name.replace("_", "") for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")}
"""For each collective that a plan can implement, the collective's name in plans."""


def _combines(ops: Sequence[Op]) -> bool:
    return any(_combines(op.ops) or (op.name in MOVING and MOVING[op.name].combines) for op in ops)


class ExecutionPlan:
    """A collective as a program for all ranks, written by MSCCL++'s language, for `Communicator.execute`.

    Use `load`.

    Attributes:
        name: the author's name for the plan.
        collective: the author's name for the collective, such as "allreduce" or "allgather".
        world_size: the number of ranks that the plan is for.
        in_place: whether input and output are one array.
        reduces: whether one of the plan's operations combines values.
        digest: the digest of the plan's text. Plans of the same text are equal.
        call_name: the plan's name and digest, by which ranks compare the plans that they execute.
    """

    def __init__(self, document: Document, digest: str) -> None:
        self.document = document
        self.name, self.collective = document.name, document.collective
        self._kind = self.collective.replace("_", "").lower()
        self.reduces = any(_combines(block.ops) for gpu in document.gpus for block in gpu.threadblocks)
        self.world_size = len(document.gpus)
        self.in_place = document.inplace
        self.digest = digest
        self.call_name = f"execution plan {document.name} ({digest[:12]})"
        for rank, gpu in enumerate(document.gpus):
            if gpu.id != rank:
                raise ArgumentError("plan", f"gpus[{rank}] has id {gpu.id}; expected the ranks in order")
        if not document.gpus:
            raise ArgumentError("plan", "it has no gpus")
        for gpu in document.gpus:
            refuse_switches(gpu)
        if not any(gpu.threadblocks for gpu in document.gpus):
            raise ArgumentError("plan", "no rank has a threadblock")
        first = document.gpus[0]
        for gpu in document.gpus:
            chunks = (gpu.input_chunks, gpu.output_chunks)
            if chunks != (first.input_chunks, first.output_chunks):
                raise ArgumentError(
                    "plan",
                    f"rank {gpu.id} has {chunks[0]} input and {chunks[1]} output chunks, rank 0 {first.input_chunks} "
                    f"and {first.output_chunks}; expected the same numbers on all ranks",
                )
        if document.protocol == "LL" and document.buffer_alignment % PACKET_PAYLOAD:
            raise ArgumentError(
                "plan", f"buffer_alignment is {document.buffer_alignment}; packets need a multiple of {PACKET_PAYLOAD}"
            )
        if document.use_double_scratch_buffer and document.buffer_alignment % 4:
            raise ArgumentError("plan", f"buffer_alignment is {document.buffer_alignment}; expected a multiple of 4")
        self.programs: tuple[Program, ...] = tuple(Reader(document, gpu).program() for gpu in document.gpus)
        self._ends = [channel_ends(gpu, self.world_size) for gpu in document.gpus]
        self._peers: dict[ChannelType, list[tuple[int, ...]]] = {
            "memory": self._joined("memory"),
            "port": self._joined("port"),
        }
        self._check_signals()
        for rank in range(self.world_size):
            self._check_inside(rank)
        register_names(self.call_name)

    @classmethod
    def load(cls, plan: Any) -> ExecutionPlan:
        """Reads and checks a plan.

        Args:
            plan: a path (anything with ``__fspath__``, or a string that is not JSON), the JSON as a string or bytes,
                or the result of ``json.load``.

        Raises:
            ArgumentError: `plan` is not a plan, or can't be executed; the error's text names the rank, threadblock and
                operation.
            OSError: the file can't be read.
        """
        if isinstance(plan, ExecutionPlan):
            return plan
        source = "the argument"
        if isinstance(plan, dict):
            try:
                data = msgspec.json.encode(plan)
            except (TypeError, msgspec.EncodeError) as error:
                raise ArgumentError("plan", f"is not JSON: {error}") from None
        elif isinstance(plan, bytes | bytearray):
            data = bytes(plan)
        elif isinstance(plan, str) and plan.lstrip().startswith("{"):
            data = require_text(plan, "plan").encode()
        elif isinstance(plan, str | os.PathLike):
            data, source = Path(require_text(plan, "plan")).read_bytes(), str(plan)
        else:
            raise ArgumentError("plan", f"expected a path, JSON or an ExecutionPlan, not {type(plan).__name__}")
        try:
            document = DOCUMENT.decode(data, source)
        except ProtocolError as error:
            raise ArgumentError("plan", str(error)) from None
        return cls(document, hashlib.sha256(data).hexdigest())

    def __repr__(self) -> str:
        return f"<ExecutionPlan {self.name} ({self.collective}) for {self.world_size} ranks>"

    def __str__(self) -> str:
        return self.call_name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExecutionPlan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def require_collective(self, collective: str, argument: str) -> None:
        """Raises ArgumentError for `argument` if the plan is for a different collective."""
        expected = COLLECTIVES.get(collective)
        if expected is None:
            raise ArgumentError(argument, f"{self!r} for {collective}, which takes no plans")
        if self._kind != expected:
            raise ArgumentError(argument, f"{self!r} is for {self.collective!r}; expected a plan for {expected!r}")

    def refusal(
        self, source_count: int, target_count: int, dtype: DType, op: str | None = None
    ) -> ArgumentError | None:
        """Returns the error if the plan can't execute a call; None if it can.

        Args:
            source_count, target_count: the numbers of elements of input and output.
            dtype: the element type.
            op: the requested operator; None for the plan's operator.
        """
        document, gpu = self.document, self.document.gpus[0]
        if op is not None and self.combinations != {op}:
            combined = ", ".join(sorted(self.combinations)) or "nothing"
            return ArgumentError("op", f"is {op!r}, but {self!r} works out {combined}")
        if target_count * gpu.input_chunks != source_count * gpu.output_chunks:
            expected = source_count * gpu.output_chunks // gpu.input_chunks
            return ArgumentError("out", f"has {target_count} elements; expected {expected}")
        unit, nbytes = document.buffer_alignment * gpu.input_chunks, source_count * dtype.itemsize
        if nbytes % unit:
            return ArgumentError(
                "x",
                f"has {nbytes} bytes; the plan takes multiples of {unit}: {gpu.input_chunks} chunks of multiples of "
                f"{document.buffer_alignment} bytes",
            )
        if document.buffer_alignment % dtype.itemsize:
            return ArgumentError(
                "x", f"has elements of {dtype.itemsize} bytes; the plan cuts at {document.buffer_alignment}"
            )
        if self._kind == COLLECTIVES["all_gather"]:
            nbytes = max(nbytes, target_count * dtype.itemsize)
        if nbytes and not document.min_message_size <= nbytes <= document.max_message_size:
            return ArgumentError(
                "x",
                f"the message has {nbytes} bytes; the plan is for {document.min_message_size} to "
                f"{document.max_message_size}",
            )
        if self.combinations and not (dtype.c_name or dtype.plan_name):
            return ArgumentError("x", f"kernels can't reduce {dtype}")
        return None

    @property
    def most_channels(self) -> dict[ChannelType, int]:
        """For each channel type, the greatest number of channels that any rank has to one peer."""
        return {
            kind: max((end.number + 1 for ends in self._ends for end in ends[kind]), default=0)
            for kind in ("memory", "port")
        }

    def peers(self, rank: int, kind: ChannelType) -> tuple[int, ...]:
        """Returns the ranks to or from which a rank has channels of a type."""
        return self._peers[kind][rank]

    def operations(self, rank: int) -> Iterator[tuple[Operation, tuple[int, int]]]:
        """Yields a rank's operations, each with the chunks and the unit of its pipeline, or (0, 0) outside of
        pipelines.
        """
        for block in self.programs[rank]:
            for operation in block:
                yield operation, (0, 0)
                for inner in operation.body:
                    yield inner, (operation.chunks, operation.unit)

    @functools.cached_property
    def touched(self) -> list[dict[int, Place]]:
        """For each rank, the peers whose memory its kernels access, and the first operation that does so."""
        found: list[dict[int, Place]] = [{} for _ in range(self.world_size)]
        for rank in range(self.world_size):
            for operation, _ in self.operations(rank):
                peers = [end.peer for end in operation.channels if end.type == "memory"]
                if not operation.channels:
                    peers += [each.rank for each in (*operation.sources, *operation.destinations) if each.rank != rank]
                for peer in peers:
                    found[rank].setdefault(peer, operation.place)
        return found

    @functools.cached_property
    def combinations(self) -> set[str]:
        """The operators with which the plan combines values; empty if the plan only moves data."""
        return {
            operation.combination
            for rank in range(self.world_size)
            for operation, _ in self.operations(rank)
            if operation.moving is not None and len(operation.sources) > 1 and not operation.moving.pairs
        }

    @functools.cached_property
    def reached(self) -> set[BufferName]:
        """Those of the buffers "i" (input) and "o" (output) that peers' kernels or proxies access."""
        return {
            each.buffer
            for rank in range(self.world_size)
            for operation, _ in self.operations(rank)
            for each in (*operation.sources, *operation.destinations)
            if each.buffer != "s" and (each.rank != rank or operation.channels != ())
        }

    @functools.cached_property
    def writes_whole_outputs(self) -> bool:
        """Whether every chunk of every output is written; otherwise the unwritten parts keep their contents."""
        parts: dict[tuple[int, int, int], set[int]] = {}  # the parts written, by rank, chunk and number of parts
        for rank in range(self.world_size):
            for operation, _ in self.operations(rank):
                for each in operation.destinations:
                    for chunk in range(each.index, each.index + each.size):
                        if each.buffer == "o":
                            parts.setdefault((each.rank, chunk, operation.parts), set()).add(operation.part)
        whole = {(rank, chunk) for (rank, chunk, count), written in parts.items() if len(written) == count}
        return len(whole) == sum(gpu.output_chunks for gpu in self.document.gpus)

    def _joined(self, kind: ChannelType) -> list[tuple[int, ...]]:
        pairs = {(rank, end.peer) for rank, ends in enumerate(self._ends) for end in ends[kind]}
        both = pairs | {(peer, rank) for rank, peer in pairs}
        return [tuple(sorted(peer for one, peer in both if one == rank)) for rank in range(self.world_size)]

    def _check_signals(self) -> None:
        """Requires as many signals as waits on every channel, because the next execution would consume a leftover
        signal.
        """
        sent: dict[tuple[int, int, str, int], _Times] = {}
        awaited: dict[tuple[int, int, str, int], _Times] = {}
        for rank in range(self.world_size):
            for operation, times in self.operations(rank):
                for end in operation.channels:
                    name = operation.place.name
                    if name in ("wait", "rlxwait"):
                        awaited.setdefault((end.peer, rank, end.type, end.number), Counter())[times] += 1
                    elif (name in CHANNELLED and name != "flush") or (operation.moving and operation.moving.signals):
                        sent.setdefault((rank, end.peer, end.type, end.number), Counter())[times] += 1
        for key in sorted({*sent, *awaited}):
            if sent.get(key, Counter()) != awaited.get(key, Counter()):
                rank, peer, kind, number = key
                raise ArgumentError(
                    "plan",
                    f"rank {rank} signals rank {peer} {_total(sent.get(key))} on {kind} channel number {number}, which "
                    f"waits {_total(awaited.get(key))}; expected as many waits as signals",
                )

    def _check_inside(self, rank: int) -> None:
        """Requires that all threadblocks of a barrier arrive equally often, and that each semaphore is released as
        often as acquired.
        """
        barriers: dict[int, dict[int, _Times]] = {}
        sizes: dict[int, int] = {}
        semaphores: dict[int, list[_Times]] = {}
        for operation, times in self.operations(rank):
            name, place = operation.place.name, operation.place
            if name == "barrier":
                number, blocks = operation.numbers
                barriers.setdefault(number, {}).setdefault(place.threadblock, Counter())[times] += 1
                if sizes.setdefault(number, blocks) != blocks:
                    raise place.refuse(f"barrier {number} of {blocks} threadblocks; elsewhere of {sizes[number]}")
            elif name.startswith("sem_"):
                for number in operation.numbers:
                    counts = semaphores.setdefault(number, [Counter(), Counter()])
                    counts[name == "sem_release"][times] += 1
        for number, by_block in barriers.items():
            if len(by_block) != sizes[number] or any(
                times != next(iter(by_block.values())) for times in by_block.values()
            ):
                raise ArgumentError(
                    "plan",
                    f"rank {rank}: barrier {number} is of {sizes[number]} threadblocks, but "
                    f"{', '.join(map(str, sorted(by_block)))} come to it, or not equally often",
                )
        for number, (acquired, released) in semaphores.items():
            if acquired != released:
                raise ArgumentError(
                    "plan",
                    f"rank {rank}: semaphore {number} is acquired {_total(acquired)} and released {_total(released)}; "
                    "expected equally often",
                )


def _total(times: _Times | None) -> str:
    if not times:
        return "never"
    outside = times[0, 0]
    inside = sum(times.values()) - outside
    return f"{outside} times" + (f" and {inside} times in each turn of pipelines" if inside else "")
