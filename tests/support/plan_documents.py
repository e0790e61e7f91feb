"""Execution plans for tests: documents in MSCCL++'s format, from what each rank's threadblocks do.

Every rank has channels to all others in the order of their ranks, and reaches all their buffers; every threadblock
uses all of them, so a number among a rank's is the same number in its threadblocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Ops = list[dict[str, Any]]


class RankView:
    """What one rank's program is written with."""

    def __init__(self, rank: int, ranks: int, channels_to_each: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.others = [peer for peer in range(ranks) if peer != rank]
        self._channels_to_each = channels_to_each

    def channel(self, peer: int, number: int = 0) -> int:
        """The channel to a peer."""
        return self.others.index(peer) * self._channels_to_each + number

    def all_channels(self) -> list[int]:
        """The first channel to each other rank."""
        return [self.channel(peer) for peer in self.others]

    def at(self, peer: int, buffer: str, index: int, size: int = 1) -> dict[str, Any]:
        """Chunks of a peer."""
        number = "ios".index(buffer) * len(self.others) + self.others.index(peer)
        return {"buffer_id": number, "index": index, "size": size}


def own(buffer: str, index: int, size: int = 1) -> dict[str, Any]:
    """Chunks of the rank itself."""
    return {"type": buffer, "index": index, "size": size}


def move(name: str, sources: list[Any], destinations: list[Any], **fields: Any) -> dict[str, Any]:
    """An operation on data."""
    return {"name": name, "src_buff": sources, "dst_buff": destinations, **fields}


def on(name: str, channels: list[int], kind: str = "memory") -> dict[str, Any]:
    """An operation on channels."""
    return {"name": name, "channel_ids": channels, "channel_type": kind}


NOP = {"name": "nop"}


def document(
    ranks: int,
    threadblocks: Callable[[RankView], list[Ops]],
    *,
    chunks: tuple[int, int, int],
    kind: str = "memory",
    channels_to_each: int = 1,
    semaphores: tuple[int, ...] = (),
    **fields: Any,
) -> dict[str, Any]:
    """A plan of `ranks` ranks whose program `threadblocks` gives."""
    gpus = []
    for rank in range(ranks):
        view = RankView(rank, ranks, channels_to_each)
        count = len(view.others)
        blocks = [
            {
                "id": number,
                "ops": ops,
                "channels": [{"channel_type": kind, "channel_ids": list(range(count * channels_to_each))}],
                "remote_buffer_refs": [{"access_channel_type": kind, "remote_buffer_ids": list(range(3 * count))}],
            }
            for number, ops in enumerate(threadblocks(view))
        ]
        connected = [peer for peer in view.others for _ in range(channels_to_each)]
        gpus.append(
            {
                "id": rank,
                "input_chunks": chunks[0],
                "output_chunks": chunks[1],
                "scratch_chunks": chunks[2],
                "threadblocks": blocks,
                "channels": [{"channel_type": kind, "connected_to": connected}],
                "remote_buffers": [
                    {"rank": peer, "type": buffer, "access_channel_types": [kind]}
                    for buffer in "ios"
                    for peer in view.others
                ],
                "semaphores": [{"init_value": value} for value in semaphores],
            }
        )
    return {
        "name": "a plan of the tests",
        "collective": "custom",
        "protocol": "Simple",
        "inplace": False,
        "gpus": gpus,
        "num_threads_per_block": 64,
        **fields,
    }


# -- plans that tests share ---


def meet(view: RankView, kind: str = "memory") -> Ops:
    """All ranks have come here, and see what the others wrote before."""
    channels = view.all_channels()
    return [NOP, on("signal", channels, kind), on("wait", channels, kind), NOP]


def all_gather(ranks: int, kind: str = "memory", name: str = "put") -> dict[str, Any]:
    """Each rank puts its input into every output."""

    def program(view: RankView) -> list[Ops]:
        me = view.rank
        signals = name in ("pws", "pwsf")
        puts = [
            move(name, [own("i", 0)], [view.at(peer, "o", me)], channel_type=kind, channel_ids=[view.channel(peer)])
            for peer in view.others
        ]
        channels = view.all_channels()
        end = [on("wait", channels, kind)] if signals else meet(view, kind)
        flush = [on("flush", channels, kind)] if kind == "port" and name != "pwsf" else []
        # Outputs may be written when their rank has come; and inputs are free when all have theirs.
        return [
            [
                *meet(view, kind),
                move("copy", [own("i", 0)], [own("o", me)]),
                *puts,
                *end,
                NOP,
                *flush,
                *meet(view, kind),
            ]
        ]

    return document(ranks, program, chunks=(1, ranks, 0), kind=kind, collective="allgather", name=f"{kind} {name}")


def all_reduce_by_reads(ranks: int, reduce_op: str = "sum", threadblocks: int = 1) -> dict[str, Any]:
    """Each rank reads and reduces its chunk of every input, and writes the result to every output."""

    def program(view: RankView) -> list[Ops]:
        me, others = view.rank, view.others
        sources = [own("i", me), *(view.at(peer, "i", me) for peer in others)]
        targets = [own("o", me), *(view.at(peer, "o", me) for peer in others)]
        return [
            [
                *([] if block else meet(view)),
                {"name": "barrier", "barrier_id": 0, "num_threadblocks": threadblocks},
                move(
                    "rres",
                    sources,
                    targets,
                    channel_type="memory",
                    reduce_op=reduce_op,
                    tbg_info={"tb_id": block, "tbg_size": threadblocks},
                ),
                {"name": "barrier", "barrier_id": 0, "num_threadblocks": threadblocks},
                *([] if block else meet(view)),
            ]
            for block in range(threadblocks)
        ]

    return document(ranks, program, chunks=(ranks, ranks, 0), collective="allreduce", name=f"reads {reduce_op}")


def all_reduce_by_packets(ranks: int) -> dict[str, Any]:
    """Each rank sends its chunks to their owners as packets; an owner reduces and sends the result as packets."""

    def program(view: RankView) -> list[Ops]:
        me, others = view.rank, view.others
        send = [move("ppkt", [own("i", peer)], [view.at(peer, "s", me)], channel_type="memory") for peer in others]
        reduce = move(
            "respkt",
            [own("i", me), *(own("s", peer) for peer in others)],
            [own("o", me), *(view.at(peer, "s", ranks + me) for peer in others)],
            channel_type="memory",
        )
        unpack = [move("upkt", [own("s", ranks + peer)], [own("o", peer)]) for peer in others]
        return [send, [reduce], unpack]

    return document(
        ranks,
        program,
        chunks=(ranks, ranks, 2 * ranks),
        protocol="LL",
        use_double_scratch_buffer=True,
        collective="allreduce",
        name="packets",
    )
