"""Schedules: a rank's proxy runs one for a call that a stream rings in (engine/schedule.h).

The protocol is in channels/schedules/DESIGN.md.
"""

from __future__ import annotations

from msgspec import Struct

from proxyccl.proxy._engine import lib
from proxyccl.proxy.codec import Message, Uint32, Uint64

STAGES: int = lib.PROXYCCL_SCHEDULE_STAGES
"""Words that count the receives of a schedule."""


class SchedulePost(Message, frozen=True):
    """Lets a peer write to memory of this rank. The peer's schedule sends in answer.

    Attributes:
        channel: a channel to the peer that is used for posts alone.
        memory: the first id of the memory in the peer's proxy.
        offset: where the peer's data begin in that memory, in bytes.
    """

    channel: Uint32
    memory: Uint32
    offset: Uint64


class ScheduleSend(Message, frozen=True):
    """Copies to a peer, and signals after that.

    Attributes:
        channel: a channel to the peer that is used for sends alone.
        src_memory: the first id of the source.
        src_offset: in it, in bytes.
        nbytes: may be 0: then it only signals.
        post_channel: the channel that the peer posts on; None for a send that waits for no post.
        dst_memory: the first id of the destination; None for where the peer posted.
        dst_offset: from there on, in bytes.
        gate: the send waits until its gate has been counted up to this; 0 for one that waits for no gate.
        gate_stage: the stage that is its gate, so that it sends on what the stage has received; None for the gate that
            streams and kernels count up.
        stage: which of the words that streams and kernels wait for counts it when it is complete; None for none.
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
    """Waits until a peer's sends have come.

    Attributes:
        channel: the channel to the peer that is used for sends alone.
        sends: how many of the peer's sends it waits for, after those of earlier receives on the channel.
        stage: which of the words that streams wait for counts it when it is complete; None for none.
    """

    channel: Uint32
    sends: Uint32 = 1
    stage: Uint32 | None = None


class Schedule(Message, frozen=True):
    """The steps of one rank. They are taken as soon as they can be, in any order, except sends on one channel.

    Attributes:
        posts, sends, receives: the steps.
        joined: which of the words that streams wait for counts the peers whose posts the sends wait for; None for none.
    """

    posts: tuple[SchedulePost, ...] = ()
    sends: tuple[ScheduleSend, ...] = ()
    receives: tuple[ScheduleReceive, ...] = ()
    joined: Uint32 | None = None


class SchedulePointers(Struct, frozen=True):
    """The device's addresses of the words through which streams and the proxy meet.

    A stream writes a schedule's number to `bell`, and waits until `done` is at least 1. When a schedule has stages, the
    stream may wait in between until a stage has counted its receives, and write to `gate` how far gated sends may go.
    In the end it, or its kernel, writes 0 to all that was waited for, and to the gate.

    Attributes:
        bell: a schedule's number.
        done: 1 when the schedule is complete, and after a failure.
        gate: what gated sends wait for.
        stages: the receives of each stage that are complete, or the peers that have joined.
    """

    bell: int
    done: int
    gate: int
    stages: tuple[int, ...]


class ScheduleWait(Message, frozen=True):
    """The wait of a schedule that makes no progress.

    Attributes:
        kind: ProxycclWaitKind (control.h).
        peer: the rank that it waits for, or whose sends do not end; None if that is not known.
        schedule: its number.
    """

    kind: int
    peer: int | None
    schedule: int
