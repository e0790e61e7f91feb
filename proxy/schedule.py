"""Describes schedules: lists of transfers that a rank's proxy makes when a stream starts the schedule
(engine/schedule.h).

The protocol is in channels/schedules/DESIGN.md.
"""

from __future__ import annotations

from msgspec import Struct

from proxyccl.proxy._engine import lib
from proxyccl.proxy.codec import Message, Uint32, Uint64

STAGES: int = lib.PROXYCCL_SCHEDULE_STAGES
"""Number of the words (stages) that count completed receives of a schedule."""


class SchedulePost(Message, frozen=True):
    """A step that lets a peer write to memory of this rank. A send of the peer's schedule writes to the memory.

    Attributes:
        channel: a channel to the peer that is used only for posts.
        memory: the first of the memory's ids in the peer's proxy.
        offset: where the peer's data begins in the memory, in bytes.
    """

    channel: Uint32
    memory: Uint32
    offset: Uint64


class ScheduleSend(Message, frozen=True):
    """A step that copies data to a peer, then signals the peer.

    Attributes:
        channel: a channel to the peer that is used only for sends.
        src_memory: the first of the source memory's ids.
        src_offset: offset in the source, in bytes.
        nbytes: bytes to copy; 0 to signal only.
        post_channel: the channel of the peer's post, for which the send waits; None to wait for no post.
        dst_memory: the first of the destination memory's ids; None for the memory that the peer posted.
        dst_offset: offset from the destination's start, in bytes.
        gate: the send begins when the counter that is its gate has reached this count; 0 to wait for no gate.
        gate_stage: index of the stage that is the gate, for a send that forwards received data; None for the gate that
            streams and kernels count up.
        stage: index of the stage that the complete send increments, for streams and kernels that wait for it; None for
            no stage.
    """

    channel: Uint32
    src_memory: Uint32
    src_offset: Uint64
    nbytes: Uint64
    post_channel: Uint32 | None = None
    dst_memory: Uint32 | None = None
    dst_offset: Uint64 = 0
    gate: Uint64 = 0
    gate_stage: Uint32 | None = None
    stage: Uint32 | None = None


class ScheduleReceive(Message, frozen=True):
    """A step that waits until a peer's sends have arrived.

    Attributes:
        channel: the channel to the peer that is used only for sends.
        sends: number of sends to wait for, after the sends for which the channel's earlier receives wait.
        stage: index of the stage that the complete receive increments, for streams that wait for it; None for no stage.
    """

    channel: Uint32
    sends: Uint32 = 1
    stage: Uint32 | None = None


class Schedule(Message, frozen=True):
    """The steps of one rank. The proxy begins each step as early as possible, in any order, but keeps the order of
    sends on one channel.

    Attributes:
        posts, sends, receives: the steps.
        joined: index of the stage that each peer's post increments, for streams that wait for it; None for no stage.
    """

    posts: tuple[SchedulePost, ...] = ()
    sends: tuple[ScheduleSend, ...] = ()
    receives: tuple[ScheduleReceive, ...] = ()
    joined: Uint32 | None = None


class SchedulePointers(Struct, frozen=True):
    """The device's addresses of the words with which streams and the proxy synchronize.

    A stream writes a schedule's number to `bell`, and waits until `done` is at least 1. Before waiting for `done`, the
    stream may wait until a stage has reached a count, and may write to `gate` the count up to which gated sends may
    begin. Finally the stream or its kernel writes 0 to `gate`, and to each word for which it waited.
    """

    bell: int  # the number of the schedule to start
    done: int  # 1 once the schedule is complete or has failed
    gate: int  # the count that gated sends wait for
    stages: tuple[int, ...]  # for each stage, the number of completed receives, or of peers that have joined


class ScheduleWait(Message, frozen=True):
    """The event for which a schedule without progress waits."""

    kind: int  # ProxycclWaitKind (control.h)
    # The rank that the schedule waits for, or to which a send of the schedule does not complete; None if unknown.
    peer: int | None
    schedule: int  # the schedule's number
