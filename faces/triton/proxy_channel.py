"""Implements ProxyChannels in Triton, as proxy_channel.h and fifo.h do in C++.

In a kernel, a channel is a pointer to the channel's device handle. All threads of a program call a function together,
and the program acts like one thread. Offsets and sizes are in bytes and need no alignment. An offset counts from the
start of the peer's or the local memory. If a range is not inside the memory, the call moves nothing and ends the
communicator with a TriggerError.

`put`, `put_value` and `get` return a ticket for `is_complete` and `wait_complete`, a uint64. The ticket is 2**64 - 1 if
no trigger was pushed.
"""

from __future__ import annotations

import triton.language as tl
from proxyccl.triton import layout as c
from proxyccl.triton.basics import jit, long_at, number_at, pointer_at, u32, u64, words_at
from proxyccl.triton.semaphores import poll_for_signal, wait_for_count, wait_for_signal
from proxyccl.triton.target import (
    SPINS_PER_CHECK,
    load_acquire_device,
    load_acquire_system,
    load_relaxed_device,
    load_relaxed_system,
    pass_on,
    pause,
    store_release_device,
    store_trigger,
)
from proxyccl.triton.waits import aborted, check_wait, record_error, wait_at_least

NO_TICKET = tl.constexpr(-1)
"""The ticket of a trigger that was not pushed, equal to kNoTicket of fifo.h: all bits are set."""


@jit
def _require(channel):
    tl.static_assert(channel.dtype == tl.pointer_type(tl.uint64), "expected a ProxyChannel")


@jit
def _semaphore(channel):
    _require(channel)
    return (
        pointer_at(channel, c.PROXY_SEMAPHORE_INBOUND_8),
        pointer_at(channel, c.PROXY_SEMAPHORE_EXPECTED_8),
        long_at(channel, c.PROXY_CONTROL_8),
        u32(c.WAIT_PROXY_SIGNAL),
        number_at(channel, c.PROXY_PEER_4),
        number_at(channel, c.PROXY_CHANNEL_4),
    )


@jit
def _reaches(channel, memory, offset, size):
    # Returns whether a range is inside a memory. The engine can't check the range, because a trigger names an offset
    # past the first window by a following memory id, and ids past the memory's last window belong to another memory.
    # The memory's size is in host memory, so it is read only for a range that leaves the first window.
    known = memory < c.MAX_MEMORIES
    inside = (offset < c.WINDOW_BYTES) & (size <= u64(c.WINDOW_BYTES) - offset)
    if known & (inside == 0):
        limit = load_relaxed_system(pointer_at(channel, c.PROXY_MEMORY_LIMITS_8) + memory.to(tl.int64))
        inside = (offset <= limit) & (size <= limit - offset)
    return known & inside


@jit
def _refuse(channel, operation: tl.constexpr, kind, memory, offset, size):
    # Ends the communicator with an error that describes a range outside the memory.
    known = memory < c.MAX_MEMORIES
    place = tl.where(known, memory, u32(0)).to(tl.int64)
    limit = load_relaxed_system(pointer_at(channel, c.PROXY_MEMORY_LIMITS_8) + place)
    record_error(
        long_at(channel, c.PROXY_CONTROL_8),
        u32(c.ERROR_BAD_TRIGGER),
        kind,
        number_at(channel, c.PROXY_PEER_4),
        number_at(channel, c.PROXY_CHANNEL_4),
        memory.to(tl.uint64),
        tl.where(known, limit, u64(0)),
        u32(operation),
        offset,
        size,
    )


@jit
def _wait_for_room(channel, control, ticket, slots):
    # Waits until the ring has room for a ticket's trigger. Only the program that holds the lock polls the tail in host
    # memory, and updates the cached tail, which the other programs poll. Returns 0 if the wait gave up, else 1.
    cache = pointer_at(channel, c.PROXY_FIFO_TAIL_CACHE_8)
    tail = pointer_at(channel, c.PROXY_FIFO_TAIL_8)
    lock = words_at(long_at(channel, c.PROXY_FIFO_REFRESH_LOCK_8))
    target = ticket + 1 - slots
    seen = load_acquire_device(cache)
    spins = tl.full([], 0, tl.int32)
    started = tl.full([], 0, tl.uint64)
    waits = tl.full([], 1, tl.int32)
    while (seen < target) & (waits != 0):
        if tl.atomic_xchg(lock, u32(1), sem="acquire", scope="gpu") == 0:
            store_release_device(cache, load_acquire_system(tail))
            store_release_device(lock, u32(0))
        seen = load_acquire_device(cache)
        if seen < target:
            spins += 1
            pass_on(spins)
            if spins % SPINS_PER_CHECK == 0:
                started = check_wait(
                    control, u32(c.WAIT_RING_ROOM), u32(c.NO_PEER), u32(c.NO_CHANNEL), target, seen, started
                )
                waits = tl.where(started == 0, 0, 1).to(tl.int32)
    return waits


@jit
def _ring(channel):
    # Loads all fields of the handle that a push reads. After the push's first atomic, each load would wait for the
    # previous load.
    _require(channel)
    return (
        pointer_at(channel, c.PROXY_FIFO_HEAD_8),
        pointer_at(channel, c.PROXY_FIFO_TAIL_CACHE_8),
        pointer_at(channel, c.PROXY_FIFO_SLOTS_8),
        number_at(channel, c.PROXY_FIFO_SIZE_LOG2_4).to(tl.uint64),
        number_at(channel, c.PROXY_CHANNEL_4).to(tl.uint64),
    )


@jit
def _push_trigger(channel, ring, control, operation, dst_memory, dst_offset, src_memory, src_offset, size):
    # Takes a ticket, waits for room and stores the trigger. The cached tail may be loaded before the ticket is taken,
    # because the tail only grows. Returns the ticket, or NO_TICKET if the wait gave up.
    head, tail_cache, ring_slots, size_log2, number = ring
    known = load_relaxed_device(tail_cache)
    ticket = tl.atomic_add(head, u64(1), sem="relaxed", scope="gpu")
    slots = u64(1) << size_log2
    pushed = tl.full([], 1, tl.int32)
    if ticket >= known + slots:
        pushed = _wait_for_room(channel, control, ticket, slots)
    if pushed != 0:
        word0 = (size & 0xFFFFFFFF) | (src_offset << c.SRC_OFFSET_SHIFT)
        word0 = word0 | (((operation & c.OP_GET) != 0).to(tl.uint64) << c.GET_SHIFT)
        dst_id = dst_memory.to(tl.uint64) + (dst_offset >> c.OFFSET_BITS)
        src_id = src_memory.to(tl.uint64) + (src_offset >> c.OFFSET_BITS)
        word1 = (dst_offset & 0xFFFFFFFF) | (src_id << c.SRC_MEMORY_SHIFT) | (dst_id << c.DST_MEMORY_SHIFT)
        word1 = word1 | ((operation & c.OP_MASK).to(tl.uint64) << c.OP_SHIFT) | (number << c.CHANNEL_SHIFT)
        parity = ((ticket >> size_log2) & 1) ^ 1
        slot = ring_slots + ((ticket & (slots - 1)) * 2).to(tl.int64)
        store_trigger(slot, word0, word1 | (parity << c.PARITY_SHIFT))
    return tl.where(pushed != 0, ticket, u64(NO_TICKET))


@jit
def _push_data(channel, operation: tl.constexpr, dst_offset, src_offset, size, dst_memory, src_memory):
    # Pushes an operation that moves data. If one trigger can't move all data, pushes several triggers, and sets the
    # signal in the last one. For a get, the channel's destination memory is the source. Returns the last trigger's
    # ticket, or NO_TICKET if a trigger was not pushed.
    ring = _ring(channel)
    control = long_at(channel, c.PROXY_CONTROL_8)
    is_get: tl.constexpr = (operation & c.OP_GET) != 0
    if dst_memory is None:
        dst_id = number_at(channel, c.PROXY_SRC_MEMORY_4 if is_get else c.PROXY_DST_MEMORY_4)
    else:
        dst_id = u32(dst_memory)
    if src_memory is None:
        src_id = number_at(channel, c.PROXY_DST_MEMORY_4 if is_get else c.PROXY_SRC_MEMORY_4)
    else:
        src_id = u32(src_memory)
    dst = u64(dst_offset)
    src = u64(src_offset)
    left = u64(size)
    dst_fits = _reaches(channel, dst_id, dst, left)
    going = (dst_fits & _reaches(channel, src_id, src, left)).to(tl.int32)
    if going == 0:
        of_source = u32(c.SM_PEER_MEMORY if is_get else c.SM_OWN_MEMORY)
        of_destination = u32(c.SM_OWN_MEMORY if is_get else c.SM_PEER_MEMORY)
        kind = tl.where(dst_fits, of_source, of_destination)
        _refuse(channel, operation, kind, tl.where(dst_fits, src_id, dst_id), tl.where(dst_fits, src, dst), left)
    ticket = u64(NO_TICKET)
    while going != 0:
        is_last = left <= c.MAX_TRIGGER_BYTES
        piece = tl.where(is_last, left, u64(c.MAX_TRIGGER_BYTES))
        bits = tl.where(is_last, u32(operation), u32(operation & (c.OP_DATA | c.OP_GET)))
        ticket = _push_trigger(channel, ring, control, bits, dst_id, dst, src_id, src, piece)
        dst += piece
        src += piece
        left -= piece
        going = ((is_last == 0) & (ticket != u64(NO_TICKET))).to(tl.int32)
    return ticket


@jit
def _push_value(channel, operation: tl.constexpr, dst_memory, dst_offset, kind, value):
    # Pushes a trigger that contains a value instead of a source. The size field holds the value's low half, and the
    # field of the source's offset holds the high half.
    low, high = value & 0xFFFFFFFF, value >> 32
    ring = _ring(channel)
    control = long_at(channel, c.PROXY_CONTROL_8)
    return _push_trigger(channel, ring, control, u32(operation), dst_memory, dst_offset, u32(kind), high, low)


@jit
def _push_word(channel, operation: tl.constexpr):
    # Pushes an operation without data.
    return _push_value(channel, operation, u32(0), u64(0), 0, u64(0))


@jit
def _put_value(channel, operation: tl.constexpr, dst_offset, value, dtype: tl.constexpr):
    _require(channel)
    typed = (tl.full([], 0, dtype) + value).to(dtype)
    tl.static_assert(not typed.type.is_block(), "expected one value")
    bits: tl.constexpr = typed.dtype.primitive_bitwidth
    if bits == 8:
        carried = typed.to(tl.uint8, bitcast=True).to(tl.uint64)
        kind = c.VALUE_1_BYTE
    elif bits == 16:
        carried = typed.to(tl.uint16, bitcast=True).to(tl.uint64)
        kind = c.VALUE_1_BYTE + 1
    elif bits == 32:
        carried = typed.to(tl.uint32, bitcast=True).to(tl.uint64)
        kind = c.VALUE_1_BYTE + 2
    else:
        tl.static_assert(bits == 64, "expected a type of 1, 2, 4 or 8 bytes")
        carried = typed.to(tl.uint64, bitcast=True)
        kind = c.VALUE_8_BYTES
    dst_id = number_at(channel, c.PROXY_DST_MEMORY_4)
    dst = u64(dst_offset)
    size = u64(bits // 8)
    ticket = u64(NO_TICKET)
    if _reaches(channel, dst_id, dst, size):
        ticket = _push_value(channel, operation, dst_id, dst, kind, carried)
    else:
        _refuse(channel, operation, u32(c.SM_PEER_MEMORY), dst_id, dst, size)
    return ticket


@jit
def _wait_for_ticket(channel, ticket, word: tl.constexpr, kind: tl.constexpr):
    # Waits until `word` exceeds the ticket. The engine stores the number of flushed triggers, or of complete triggers,
    # in `word`.
    done = (ticket != u64(NO_TICKET)).to(tl.int32)
    if done != 0:
        done = wait_at_least(
            pointer_at(channel, word),
            ticket + 1,
            long_at(channel, c.PROXY_CONTROL_8),
            u32(kind),
            number_at(channel, c.PROXY_PEER_4),
            number_at(channel, c.PROXY_CHANNEL_4),
        )
    return done != 0


@jit
def put(channel, dst_offset, src_offset, size, dst_memory=None, src_memory=None):
    """Starts a copy from local memory to the peer's memory. Returns immediately, unless the ring is full.

    The copy contains the stores that the program made before its last `sync_threads_system`. The source may be
    overwritten when the put is complete. Once the peer has received a later `signal`, the peer may read the data.

    Args:
        dst_offset: the destination's offset in the peer's memory, in bytes.
        src_offset: the source's offset in local memory, in bytes.
        size: the number of bytes.
        dst_memory: ``RegisteredMemory.peer_id(peer)`` of another memory of the peer; None for the channel's memory.
        src_memory: ``RegisteredMemory.source_id(peer)`` of another local memory; None for the channel's memory.
    """
    return _push_data(channel, c.OP_DATA, dst_offset, src_offset, size, dst_memory, src_memory)


@jit
def get(channel, dst_offset, src_offset, size, dst_memory=None, src_memory=None):
    """Starts a copy from the peer's memory to local memory. Returns immediately, unless the ring is full.

    A get after a `wait` reads all stores that the peer made before the signal. The data may be read when the get is
    complete. A `signal` after the get tells the peer that the source may be overwritten.

    Args:
        dst_offset: the destination's offset in local memory, in bytes.
        src_offset: the source's offset in the peer's memory, in bytes.
        size: the number of bytes.
        dst_memory: ``RegisteredMemory.source_id(peer)`` of another local memory; None for the channel's memory.
        src_memory: ``RegisteredMemory.peer_id(peer)`` of another memory of the peer; None for the channel's memory.
    """
    return _push_data(channel, c.OP_DATA | c.OP_GET, dst_offset, src_offset, size, dst_memory, src_memory)


@jit
def put_value(channel, dst_offset, value, dtype: tl.constexpr):
    """Writes a value, which the trigger contains, to the peer's memory.

    Args:
        dst_offset: the destination's offset in the peer's memory, in bytes; it need not be aligned.
        value: a number.
        dtype: the type of the number, of 1, 2, 4 or 8 bytes.
    """
    return _put_value(channel, c.OP_DATA, dst_offset, value, dtype)


@jit
def put_value_with_signal(channel, dst_offset, value, dtype: tl.constexpr):
    """Combines `put_value` and a following `signal` in one operation. Takes the arguments of `put_value`."""
    return _put_value(channel, c.OP_DATA | c.OP_SIGNAL, dst_offset, value, dtype)


@jit
def signal(channel, value=None):
    """Adds one to the peer's semaphore of this channel after the data of its earlier puts and gets has arrived.

    Args:
        value: instead of adding one, sets the semaphore to this count, which has the effect of several signals. If the
            count does not exceed all earlier counts, the communicator ends with a TriggerError.
    """
    if value is None:
        _push_word(channel, c.OP_SIGNAL)
    else:
        _push_value(channel, c.OP_SIGNAL, u32(0), u64(0), c.VALUE_8_BYTES, u64(value))


@jit
def put_with_signal(channel, dst_offset, src_offset, size, dst_memory=None, src_memory=None):
    """Combines `put` and a following `signal` in one operation, which is faster. Takes the arguments of `put`."""
    return _push_data(channel, c.OP_DATA | c.OP_SIGNAL, dst_offset, src_offset, size, dst_memory, src_memory)


@jit
def put_with_signal_and_flush(channel, dst_offset, src_offset, size, dst_memory=None, src_memory=None):
    """Combines `put`, `signal` and `flush` in one operation, with the arguments of `put` and the result of `flush`."""
    operation: tl.constexpr = c.OP_DATA | c.OP_SIGNAL | c.OP_FLUSH
    ticket = _push_data(channel, operation, dst_offset, src_offset, size, dst_memory, src_memory)
    return _wait_for_ticket(channel, ticket, c.PROXY_FLUSHED_8, c.WAIT_FLUSH)


@jit
def flush(channel):
    """Waits until all earlier operations on this channel are complete.

    After the flush, the sources of puts may be overwritten, and the results of gets may be read.

    Returns True, or False if the communicator has ended or the time-out has passed; the kernel should then return.
    """
    return _wait_for_ticket(channel, _push_word(channel, c.OP_FLUSH), c.PROXY_FLUSHED_8, c.WAIT_FLUSH)


@jit
def flush_async(channel):
    """Requests a flush and returns without waiting for it.

    Returns the flush's ticket, which `is_flushed` and `wait_flushed` take.
    """
    return _push_word(channel, c.OP_FLUSH)


@jit
def is_flushed(channel, ticket):
    """Returns whether the flush with this ticket is complete. Does not wait. A loop that calls this function must end
    when `ended` returns that the communicator has ended.
    """
    _require(channel)
    done = (ticket != u64(NO_TICKET)) & (load_acquire_system(pointer_at(channel, c.PROXY_FLUSHED_8)) > ticket)
    if done == 0:
        pause(0)
    return done


@jit
def wait_flushed(channel, ticket):
    """Waits for the flush with this ticket. Returns what `flush` returns."""
    _require(channel)
    return _wait_for_ticket(channel, ticket, c.PROXY_FLUSHED_8, c.WAIT_FLUSH)


@jit
def is_complete(channel, ticket):
    """Returns whether the operation with this ticket and all earlier operations are complete. Does not wait."""
    _require(channel)
    return (ticket != u64(NO_TICKET)) & (load_acquire_system(pointer_at(channel, c.PROXY_COMPLETED_8)) > ticket)


@jit
def wait_complete(channel, ticket):
    """Waits until the operation with this ticket and all earlier operations on the channel are complete. Over a fabric,
    the proxy notices the completion sooner if a flush follows the operation. Returns True, or False if the communicator
    has ended or the time-out has passed; the kernel should then return.
    """
    _require(channel)
    return _wait_for_ticket(channel, ticket, c.PROXY_COMPLETED_8, c.WAIT_COMPLETION)


@jit
def wait(channel):
    """Waits for the peer's next signal and consumes it. Then the data that the peer put before the signal may be read.

    Only one program at a time may wait on a channel. If two programs wait, the interpreter ends the communicator with a
    TriggerError; on a GPU nothing checks this.

    Returns True, or False if the communicator has ended or the time-out has passed; the kernel should then return.
    """
    return wait_for_signal(_semaphore(channel))


@jit
def wait_until(channel, value):
    """Waits until the peer's signals have reached a count, and consumes them. Returns whether the count was reached.

    Args:
        value: the number of signals since the channel was made. If this number of signals was consumed before, returns
            immediately.
    """
    return wait_for_count(_semaphore(channel), value)


@jit
def poll(channel):
    """Consumes the peer's next signal if the signal has arrived, and returns whether it has arrived. Only one program
    at a time may poll a channel.

    Does not wait. A loop that calls this function must end when `ended` returns that the communicator has ended.
    """
    _require(channel)
    return poll_for_signal(
        pointer_at(channel, c.PROXY_SEMAPHORE_INBOUND_8), pointer_at(channel, c.PROXY_SEMAPHORE_EXPECTED_8)
    )


@jit
def ended(channel):
    """Returns whether the communicator of a ProxyChannel has ended, in which case the kernel's own loops must end."""
    _require(channel)
    return aborted(long_at(channel, c.PROXY_CONTROL_8))
