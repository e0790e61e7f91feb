"""Describes schedules: lists of transfers that a rank's proxy carries out when a stream starts them
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
    """A step that lets a peer write to memory of this rank. The peer answers the post by a send of its schedule.

    Attributes:
        channel: a channel to the peer that is used only for posts.
        memory: the first id of the memory in the peer's proxy.
        offset: where the peer's data begins in that memory, in bytes.
    """

    channel: Uint32
    memory: Uint32
    offset: Uint64


class ScheduleSend(Message, frozen=True):
    """A step that copies data to a peer, then signals the peer.

    Attributes:
        channel: a channel to the peer that is used only for sends.
        src_memory: the first id of the source.
        src_offset: offset in the source, in bytes.
        nbytes: bytes to copy; 0 to signal only.
        post_channel: the channel that the peer posts on; None for a send that waits for no post.
        dst_memory: the first id of the destination; None for the place that the peer posted.
        dst_offset: offset from the destination's start, in bytes.
        gate: the count that the send's gate, a counter, must reach before the send begins; 0 for a send that waits for
            no gate.
        gate_stage: the stage that serves as the gate, for a send that forwards the stage's data; None for the gate that
            streams and kernels count up.
        stage: index of the word that counts the send once it is complete, and that streams and kernels may wait for;
            None for no such word.
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
        sends: number of the peer's sends to wait for, beyond the sends of earlier receives on the channel.
        stage: index of the word that counts the receive once it is complete, and that streams may wait for; None for no
            such word.
    """

    channel: Uint32
    sends: Uint32 = 1
    stage: Uint32 | None = None


class Schedule(Message, frozen=True):
    """The steps of one rank. The proxy begins each step as soon as it can, in any order, but keeps the order of sends
    on one channel.

    Attributes:
        posts, sends, receives: the steps.
        joined: index of the word that counts the peers whose posts have arrived, and that streams may wait for; None
            for no such word.
    """

    posts: tuple[SchedulePost, ...] = ()
    sends: tuple[ScheduleSend, ...] = ()
    receives: tuple[ScheduleReceive, ...] = ()
    joined: Uint32 | None = None


class SchedulePointers(Struct, frozen=True):
    """The device's addresses of the words by which streams and the proxy synchronize.

    A stream writes a schedule's number to `bell`, and waits until `done` is at least 1. If the schedule has stages, the
    stream may, before `done`, wait until a stage has reached a count, and write to `gate` the count up to which gated
    sends may begin. In the end the stream, or its kernel, writes 0 to each word that it waited for, and to the gate.

    Attributes:
        bell: the number of the schedule to start.
        done: 1 once the schedule is complete or has failed.
        gate: the count that gated sends wait for.
        stages: for each stage, the number of completed receives, or of peers that have joined.
    """

    bell: int
    done: int
    gate: int
    stages: tuple[int, ...]


class ScheduleWait(Message, frozen=True):
    """A schedule that makes no progress, and the event for which it waits.

    Attributes:
        kind: ProxycclWaitKind (control.h).
        peer: the rank that the schedule waits for, or to which its sends do not complete; None if unknown.
        schedule: the schedule's number.
    """

    kind: int
    peer: int | None
    schedule: int
