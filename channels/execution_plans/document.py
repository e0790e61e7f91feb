"""The JSON of an execution plan, in the format that MSCCL++'s language has written since 2025.

A plan with an unknown field is refused, because the field might change the plan's meaning.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from proxyccl.proxy.codec import Codec, Message, Uint32, Uint64

BufferName = Literal["i", "o", "s"]
"""Input, output or scratch memory."""
ChannelType = Literal["memory", "port", "switch", "none"]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class Chunks(Message, frozen=True):
    """Consecutive chunks of a buffer of this rank (`type`) or of a peer (`buffer_id`)."""

    index: Uint32  # the number of the first chunk
    size: Positive  # the number of chunks
    type: BufferName | None = None  # a buffer of this rank
    buffer_id: Uint32 | None = None  # index into the threadblock's references to remote buffers
    switch_channel_id: Uint32 | None = None  # index into the threadblock's switch channels


class ThreadblockGroup(Message, frozen=True):
    """A threadblock's part of an operation's bytes: part number `tb_id` of `tbg_size` equal parts."""

    tb_id: Uint32
    tbg_size: Positive


class IterationContext(Message, frozen=True):
    """The range of a pipeline: `num_chunks` chunks in iterations of `unit_size` bytes."""

    unit_size: Positive
    num_chunks: Positive


class Op(Message, frozen=True):
    """An operation of a threadblock; `name` determines the other fields. Only switch channels use the last four."""

    name: str
    channel_type: ChannelType = "none"
    channel_ids: tuple[Uint32, ...] = ()
    src_buff: tuple[Chunks, ...] = ()
    dst_buff: tuple[Chunks, ...] = ()
    tbg_info: ThreadblockGroup | None = None
    reduce_op: str = "sum"
    barrier_id: Uint32 | None = None
    num_threadblocks: Positive | None = None
    semaphore_ids: tuple[Uint32, ...] = ()
    iter_context: IterationContext | None = None
    ops: tuple[Op, ...] = ()
    buffer_type: BufferName | None = None
    buffer_offset: Uint32 = 0
    size: Uint32 = 0
    dst_chunk: Chunks | None = None


class ThreadblockChannels(Message, frozen=True):
    """The channels that a threadblock uses. An operation refers to a channel by its index in `channel_ids`."""

    channel_type: ChannelType
    channel_ids: tuple[Uint32, ...]


class RemoteBufferRefs(Message, frozen=True):
    """The remote buffers of a threadblock's channels of one type; operations name indices of `remote_buffer_ids`."""

    access_channel_type: ChannelType
    remote_buffer_ids: tuple[Uint32, ...]


class Threadblock(Message, frozen=True):
    """The operations of one block of the kernel, in order."""

    id: Uint32
    ops: tuple[Op, ...]
    channels: tuple[ThreadblockChannels, ...] = ()
    remote_buffer_refs: tuple[RemoteBufferRefs, ...] = ()


class RankGroup(Message, frozen=True):
    size: Uint32
    ranks: tuple[Uint32, ...]


class Channels(Message, frozen=True):
    """Channels of a rank: one channel for each entry of `connected_to`, which may name a rank several times."""

    channel_type: ChannelType
    connected_to: tuple[Uint32, ...] = ()
    buffer_type: BufferName | None = None
    rank_groups: tuple[RankGroup, ...] = ()


class RemoteBuffer(Message, frozen=True):
    rank: Uint32
    type: BufferName
    access_channel_types: tuple[ChannelType, ...]


class SemaphoreStart(Message, frozen=True):
    """A semaphore between the threadblocks of a rank."""

    init_value: Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Gpu(Message, frozen=True):
    id: Uint32
    input_chunks: Positive
    output_chunks: Positive
    scratch_chunks: Uint32
    threadblocks: tuple[Threadblock, ...]
    channels: tuple[Channels, ...] = ()
    remote_buffers: tuple[RemoteBuffer, ...] = ()
    semaphores: tuple[SemaphoreStart, ...] = ()


class Document(Message, frozen=True):
    """A plan for all ranks."""

    name: str
    collective: str  # the author's name for the collective, such as "allreduce" or "allgather"
    protocol: Literal["Simple", "LL"]  # "LL" if scratch memory holds packets
    inplace: bool  # whether input and output are one array
    gpus: tuple[Gpu, ...]
    reuse_resources: bool = False  # an option of MSCCL++ for scratch memory, which ProxyCCL ignores
    num_threads_per_block: Positive = 1024
    use_double_scratch_buffer: bool = False  # whether executions alternate between the halves of the scratch memory
    buffer_alignment: Positive = 16  # the alignment of parts of chunks, in bytes
    # The range of message sizes, in bytes, that the plan accepts.
    min_message_size: Uint64 = 0
    max_message_size: Uint64 = 2**64 - 1


DOCUMENT = Codec(Document, 64 << 20, "execution plan")
