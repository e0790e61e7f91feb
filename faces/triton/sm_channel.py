"""Implements SmChannels in Triton, as sm_channel.h and packet.h do in C++.

In a kernel, a channel is a pointer to the channel's device handle. `remote` returns a pointer to the peer's memory, for
``tl.load`` and ``tl.store``.
"""

from __future__ import annotations

import triton.language as tl
from proxyccl.triton import layout as c
from proxyccl.triton.basics import jit, long_at, longs_at, number_at, pointer_at, u32, u64
from proxyccl.triton.semaphores import poll_for_signal, wait_for_count, wait_for_signal
from proxyccl.triton.target import (
    SPINS_PER_CHECK,
    load_packets,
    load_relaxed_device,
    pause,
    spin_for_packets,
    store_packets,
    store_relaxed_system,
    store_release_system,
    sync_threads_system,
)
from proxyccl.triton.waits import aborted, check_wait, record_error

PACKET_BYTES = tl.constexpr(8)
"""The size of a packet: 4 bytes of data and a flag of 4 bytes, the layout of LL8Packet (packet.h). Two consecutive
packets with the same flag have the layout of one LL16Packet.
"""


@jit
def _require(channel):
    tl.static_assert(channel.dtype == tl.pointer_type(tl.int64), "expected an SmChannel")


@jit
def _semaphore(channel):
    _require(channel)
    return (
        pointer_at(channel, c.SM_SEMAPHORE_INBOUND_8),
        pointer_at(channel, c.SM_SEMAPHORE_EXPECTED_8),
        long_at(channel, c.SM_CONTROL_8),
        u32(c.WAIT_SM_SIGNAL),
        number_at(channel, c.SM_PEER_4),
        number_at(channel, c.SM_CHANNEL_4),
    )


@jit
def _outgoing(channel):
    # Returns pointers to the peer's count of this rank's signals, and to this rank's count of its own signals.
    _require(channel)
    return pointer_at(channel, c.SM_SEMAPHORE_REMOTE_INBOUND_8), pointer_at(channel, c.SM_SEMAPHORE_OUTBOUND_8)


@jit
def remote(channel, dtype: tl.constexpr):
    """Returns a pointer of type `dtype` to the start of the peer's memory, for loads and stores.

    Loads and stores through this pointer have no memory order; a later `sm_signal` tells the peer that they are done.
    To be fast in inner loops, such loads and stores are not checked against the memory's size (`remote_bytes`).
    """
    _require(channel)
    return long_at(channel, c.SM_DST_8).to(tl.pointer_type(dtype))


@jit
def remote_bytes(channel):
    """Returns the size of the peer's memory, in bytes."""
    _require(channel)
    return long_at(channel, c.SM_DST_BYTES_8)


@jit
def sm_signal(channel, value=None):
    """Adds one to the peer's semaphore of this channel. Only one program at a time may signal on a channel.

    The peer that waits for the signal sees all earlier stores of this program's threads.

    Args:
        value: instead of adding one, sets the semaphore to this count, which has the effect of several signals. If the
            count does not exceed all earlier counts, the communicator ends with a TriggerError.
    """
    remote_inbound, outbound = _outgoing(channel)
    sync_threads_system()
    sent = load_relaxed_device(outbound)
    if value is None:
        store_release_system(remote_inbound, sent + 1)
        tl.store(outbound, sent + 1)
    else:
        target = u64(value)
        if target > sent:
            store_release_system(remote_inbound, target)
            tl.store(outbound, target)
        else:
            control, peer = long_at(channel, c.SM_CONTROL_8), number_at(channel, c.SM_PEER_4)
            number, code, kind = number_at(channel, c.SM_CHANNEL_4), u32(c.ERROR_SIGNAL_VALUE), u32(c.WAIT_SM_SIGNAL)
            record_error(control, code, kind, peer, number, sent, target, u32(0), u64(0), u64(0))
    tl.debug_barrier()


@jit
def sm_relaxed_signal(channel):
    """Adds one to the peer's semaphore without ordering any stores, for a signal that announces no data."""
    remote_inbound, outbound = _outgoing(channel)
    sent = load_relaxed_device(outbound) + 1
    store_relaxed_system(remote_inbound, sent)
    tl.store(outbound, sent)
    tl.debug_barrier()


@jit
def sm_wait(channel):
    """Waits for the peer's next signal and consumes the signal, as `wait` does for a ProxyChannel."""
    return wait_for_signal(_semaphore(channel))


@jit
def sm_wait_until(channel, value):
    """Waits until the number of the peer's signals has reached a count, as `wait_until` does for a ProxyChannel."""
    return wait_for_count(_semaphore(channel), value)


@jit
def sm_poll(channel):
    """If the peer's next signal has arrived, consumes the signal, as `poll` does for a ProxyChannel."""
    _require(channel)
    return poll_for_signal(
        pointer_at(channel, c.SM_SEMAPHORE_INBOUND_8), pointer_at(channel, c.SM_SEMAPHORE_EXPECTED_8)
    )


@jit
def sm_ended(channel):
    """Returns whether the communicator of an SmChannel has ended, in which case the kernel's own loops must end."""
    _require(channel)
    return aborted(long_at(channel, c.SM_CONTROL_8))


@jit
def _may_use_packets(channel, call: tl.constexpr, memory: tl.constexpr, memory_bytes, offset, count, flag):
    # Returns whether the flag is not 0 and the packets are inside the memory, at a multiple of PACKET_BYTES, which a
    # store of a whole packet needs. If the flag or the range is invalid, ends the communicator with an error.
    number = u64(count)
    flagged = u32(flag) != 0
    fits = (offset <= memory_bytes) & (number <= (memory_bytes - offset) // PACKET_BYTES)
    fits = fits & (offset % PACKET_BYTES == 0)
    if (flagged & fits) == 0:
        code = tl.where(flagged, u32(c.ERROR_OUT_OF_RANGE), u32(c.ERROR_INVALID_FLAG))
        kind = tl.where(flagged, u32(memory), u32(c.WAIT_PACKET))
        peer = number_at(channel, c.SM_PEER_4)
        channel_id = number_at(channel, c.SM_CHANNEL_4)
        nbytes = number * PACKET_BYTES
        control = long_at(channel, c.SM_CONTROL_8)
        seen = tl.where(flagged, memory_bytes, u64(0))
        unit = tl.where(flagged, u64(PACKET_BYTES), u64(0))
        record_error(control, code, kind, peer, channel_id, unit, seen, u32(call), offset, nbytes)
    return flagged & fits


@jit
def _look_at_packets(packets, flag, expected):
    # Returns (contents, missing); `missing` is 0 if all packets have the flag, else 1. `missing` has 32 bits, because a
    # warp can reduce 32 bits in one instruction.
    words = spin_for_packets(packets, load_packets(packets, expected), flag, expected)
    return words, tl.max((expected & ((words >> 32) != flag)).to(tl.int32), 0)


@jit
def put_packets(channel, packet_offset, values, flag, count=None):
    """Writes values as packets to the peer's memory. One store writes a packet's data and flag, so no signal is needed.

    The peer's `get_packets` with the same flag waits for each packet.

    Args:
        packet_offset: the first packet's offset in the peer's memory, in bytes: a multiple of 8. The offset of packet i
            is ``packet_offset + 8 * i``.
        values: a block of shape [BLOCK], of any type of 32 bits.
        flag: an integer of 32 bits that differs from the packets' previous flag. A flag of 0 ends the communicator with
            a TriggerError.
        count: writes only the first `count` values; None for all values.
    """
    _require(channel)
    i = tl.arange(0, values.shape[0])
    if count is None:
        number = i.shape[0]
    else:
        number = count
    offset = u64(packet_offset)
    memory = long_at(channel, c.SM_DST_8)  # the address is loaded together with the size, before the branch
    if _may_use_packets(
        channel, c.SM_PUT_PACKETS, c.SM_PEER_MEMORY, long_at(channel, c.SM_DST_BYTES_8), offset, number, flag
    ):
        words = values.to(tl.uint32, bitcast=True).to(tl.uint64) | (u32(flag).to(tl.uint64) << 32)
        store_packets(longs_at(memory + offset) + i, words, i < number)


@jit
def get_packets(channel, packet_offset, flag, BLOCK: tl.constexpr, dtype: tl.constexpr, count=None):
    """Waits for the packets that the peer puts into this rank's packet buffer, and returns their values.

    Args:
        packet_offset: the first packet's offset in the packet buffer, in bytes: a multiple of 8. If the sender's
            channel writes to this packet buffer, the sender passes the same packet_offset.
        flag: the sender's flag.
        BLOCK: the number of values that are returned.
        dtype: the type of the values, of 32 bits.
        count: waits only for the first `count` packets, and returns 0 for the other values; None for BLOCK.

    Returns:
        A block of shape [BLOCK]. If the wait fails, all values are zeros, and the communicator ends.
    """
    _require(channel)
    i = tl.arange(0, BLOCK)
    if count is None:
        number = BLOCK
    else:
        number = count
    offset = u64(packet_offset)
    buffer = long_at(channel, c.SM_PACKET_BUFFER_8)
    words = tl.full([BLOCK], 0, tl.uint64)
    if _may_use_packets(
        channel,
        c.SM_GET_PACKETS,
        c.SM_PACKET_BUFFER,
        long_at(channel, c.SM_PACKET_BUFFER_BYTES_8),
        offset,
        number,
        flag,
    ):
        packets = longs_at(buffer + offset) + i
        wanted = u32(flag).to(tl.uint64)
        words, missing = _look_at_packets(packets, u32(flag), i < number)
        spins = tl.full([], 0, tl.int32)
        started = tl.full([], 0, tl.uint64)
        waits = tl.full([], 1, tl.int32)
        while (missing != 0) & (waits != 0):
            spins += 1
            pause(spins)
            if spins % SPINS_PER_CHECK == 0:
                seen = tl.max(tl.where((i < number) & ((words >> 32) != wanted), words >> 32, words * 0), 0)
                started = check_wait(
                    long_at(channel, c.SM_CONTROL_8),
                    u32(c.WAIT_PACKET),
                    number_at(channel, c.SM_PEER_4),
                    number_at(channel, c.SM_CHANNEL_4),
                    wanted,
                    seen,
                    started,
                )
                waits = tl.where(started == 0, 0, 1).to(tl.int32)
            words, missing = _look_at_packets(packets, u32(flag), i < number)
        words = tl.where(missing == 0, words, words * 0)
    return words.to(tl.uint32).to(dtype, bitcast=True)
