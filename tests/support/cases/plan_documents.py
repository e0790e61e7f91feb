"""Builds execution plans for tests, in MSCCL++'s JSON format, from the operations of each rank's threadblocks.

A rank's channels of one type are ordered by peer; every channel reaches all buffers of its peer. Every threadblock uses
all channels of the rank, so a channel has the same number in all of the rank's threadblocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Ops = list[dict[str, Any]]
Reach = Mapping[str, Sequence[int]]
"""For each type of channel, the peers that a rank reaches by it; a peer is reached by one type only."""


class RankView:
    """Helpers to write one rank's program."""

    def __init__(self, rank: int, ranks: int, channels_to_each: int, reach: Reach) -> None:
        self.rank, self.ranks, self.reach = rank, ranks, reach
        self.others = [peer for peer in range(ranks) if peer != rank]
        self._channels_to_each = channels_to_each

    def _peers_with(self, peer: int) -> Sequence[int]:
        return next(peers for peers in self.reach.values() if peer in peers)

    def channel(self, peer: int, number: int = 0) -> int:
        """Returns the number of a channel to a peer; the channels of each type are numbered separately."""
        return self._peers_with(peer).index(peer) * self._channels_to_each + number

    def all_channels(self, kind: str | None = None) -> list[int]:
        """Returns the number of the first channel to each other rank, or only to ranks that channels of type `kind`
        reach.
        """
        return [self.channel(peer) for peer in (self.others if kind is None else self.reach[kind])]

    def at(self, peer: int, buffer: str, index: int, size: int = 1) -> dict[str, Any]:
        """Returns the JSON object that names chunks of a peer's buffer."""
        peers = self._peers_with(peer)
        number = "ios".index(buffer) * len(peers) + peers.index(peer)
        return {"buffer_id": number, "index": index, "size": size}


def own(buffer: str, index: int, size: int = 1) -> dict[str, Any]:
    """Returns the JSON object that names chunks of the rank's own buffer."""
    return {"type": buffer, "index": index, "size": size}


def move(name: str, sources: list[Any], destinations: list[Any], **fields: Any) -> dict[str, Any]:
    """Returns an operation that moves data from sources to destinations."""
    return {"name": name, "src_buff": sources, "dst_buff": destinations, **fields}


def on(name: str, channels: list[int], kind: str = "memory") -> dict[str, Any]:
    """Returns an operation on channels, such as a signal."""
    return {"name": name, "channel_ids": channels, "channel_type": kind}


NOP = {"name": "nop"}


def document(
    ranks: int,
    threadblocks: Callable[[RankView], list[Ops]],
    *,
    chunks: tuple[int, int, int],
    kind: str = "memory",
    reach: Callable[[int], Reach] | None = None,
    channels_to_each: int = 1,
    semaphores: tuple[int, ...] = (),
    **fields: Any,
) -> dict[str, Any]:
    """Returns a plan of `ranks` ranks in which each rank runs the operations that `threadblocks` returns for it.
    `reach` returns a rank's peers by type of channel; without it, every rank has channels of type `kind` to all others.
    """
    gpus = []
    for rank in range(ranks):
        everyone = {kind: [peer for peer in range(ranks) if peer != rank]}
        view = RankView(rank, ranks, channels_to_each, everyone if reach is None else reach(rank))
        remote_buffers = [
            {"rank": peer, "type": buffer, "access_channel_types": [each]}
            for each, peers in view.reach.items()
            for buffer in "ios"
            for peer in peers
        ]
        uses = {
            "channels": [
                {"channel_type": each, "channel_ids": list(range(len(peers) * channels_to_each))}
                for each, peers in view.reach.items()
            ],
            "remote_buffer_refs": [
                {
                    "access_channel_type": each,
                    "remote_buffer_ids": [
                        i for i, buffer in enumerate(remote_buffers) if buffer["access_channel_types"] == [each]
                    ],
                }
                for each in view.reach
            ],
        }
        gpus.append(
            {
                "id": rank,
                "input_chunks": chunks[0],
                "output_chunks": chunks[1],
                "scratch_chunks": chunks[2],
                "threadblocks": [{"id": number, "ops": ops, **uses} for number, ops in enumerate(threadblocks(view))],
                "channels": [
                    {"channel_type": each, "connected_to": [peer for peer in peers for _ in range(channels_to_each)]}
                    for each, peers in view.reach.items()
                ],
                "remote_buffers": remote_buffers,
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
    """Returns the operations of a barrier between the ranks that channels of type `kind` connect. After the
    barrier, each rank sees the other ranks' earlier writes.
    """
    channels = view.all_channels(kind)
    return [NOP, on("signal", channels, kind), on("wait", channels, kind), NOP]


def all_gather(ranks: int, kind: str = "memory", name: str = "put") -> dict[str, Any]:
    """Returns a plan in which each rank puts its input into every rank's output."""

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
        # After the first barrier, outputs may be written; after the last, all ranks have read every input.
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
    """Returns a plan in which each rank reads and reduces its chunk of every input, and writes the result to every
    output.
    """

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
    """Returns a plan in which each rank sends each chunk as packets to the chunk's owner, which reduces the chunk and
    sends the result as packets to all.
    """

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


def port_packets(ranks: int) -> dict[str, Any]:
    """Returns a plan of an all-gather that sends packets over port channels.

    Executions alternate between two halves of scratch memory. A rank ends an execution only when it has every peer's
    packets, so the peers have finished reading a half before this rank writes it again.
    """

    def program(view: RankView) -> list[Ops]:
        me = view.rank
        puts = [
            move(
                "ppkt", [own("s", me)], [view.at(peer, "s", me)], channel_type="port", channel_ids=[view.channel(peer)]
            )
            for peer in view.others
        ]
        unpacks = [move("upkt", [own("s", rank)], [own("o", rank)]) for rank in range(ranks)]
        flush = on("flush", view.all_channels(), "port")
        return [[move("cpkt", [own("i", 0)], [own("s", me)]), NOP, *puts, *unpacks, flush]]

    return document(
        ranks,
        program,
        chunks=(1, ranks, ranks),
        kind="port",
        protocol="LL",
        use_double_scratch_buffer=True,
        collective="allgather",
        name="port packets",
    )


def all_reduce_of_nodes(ranks: int, local: int) -> dict[str, Any]:
    """Returns a plan of an all-reduce between nodes with `local` ranks each. Each rank reduces one share inside its
    node over memory channels, sends the result over port channels to the ranks with the same local rank on other nodes,
    reduces what it receives, and writes the total to all ranks of its node.
    """
    nodes = ranks // local

    def reach(rank: int) -> Reach:
        node, share = divmod(rank, local)
        return {
            "memory": [peer for peer in range(node * local, (node + 1) * local) if peer != rank],
            "port": [other * local + share for other in range(nodes) if other != node],
        }

    def program(view: RankView) -> list[Ops]:
        node, share = divmod(view.rank, local)
        inside, across = view.reach["memory"], view.reach["port"]
        reduce = move(
            "rre",
            [own("i", share), *(view.at(peer, "i", share) for peer in inside)],
            [own("s", node)],
            channel_type="memory",
        )
        puts = [
            move(
                "pws",
                [own("s", node)],
                [view.at(peer, "s", node)],
                channel_type="port",
                channel_ids=[view.channel(peer)],
            )
            for peer in across
        ]
        spread = move(
            "res",
            [own("s", other) for other in range(nodes)],
            [own("o", share), *(view.at(peer, "o", share) for peer in inside)],
            channel_type="memory",
        )
        return [
            [
                *meet(view, "port"),  # the other nodes have read this rank's previous puts
                *meet(view, "memory"),
                reduce,
                NOP,
                *puts,
                on("wait", view.all_channels("port"), "port"),
                NOP,
                spread,
                *meet(view, "memory"),
                on("flush", view.all_channels("port"), "port"),
            ]
        ]

    return document(
        ranks,
        program,
        chunks=(local, local, nodes),
        reach=reach,
        collective="allreduce",
        name="all_reduce of nodes",
    )
