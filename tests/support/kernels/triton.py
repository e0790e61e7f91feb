"""Kernels in Triton for tests."""

from __future__ import annotations

import triton
import triton.language as tl

import proxyccl.triton as pt


@triton.jit
def laps(channel, count, half):
    """Sends `count` words one by one, more than the ring has slots, and waits for the same number."""
    for i in range(count):
        pt.put_with_signal(channel, half + i * 4, i * 4, 4)
    for _ in range(count):
        pt.wait(channel)
    pt.flush(channel)


@triton.jit
def to_all(channels, count, rank, nbytes, base, flushed):
    """A put to each peer, and the result of flush."""
    for i in range(count):
        channel = pt.channel(channels, i)
        pt.put(channel, base + rank * nbytes, i * nbytes, nbytes)
        pt.signal(channel)
    for i in range(count):
        channel = pt.channel(channels, i)
        pt.wait(channel)
        tl.store(flushed + i, pt.flush(channel).to(tl.int32))


@triton.jit
def put_and_flush(channel, dst_offset, src_offset, size, out):
    """One put that is flushed, and whether it was."""
    tl.store(out, pt.put_with_signal_and_flush(channel, dst_offset, src_offset, size).to(tl.int32))


@triton.jit
def put_values(channel, base, number, out):
    """Values of each size, one after another, the last with a signal; the results of the flushes, and the tickets."""
    first = pt.put_value(channel, base, number, tl.int8)
    pt.put_value(channel, base + 1, 1.5, tl.float16)
    pt.put_value(channel, base + 3, number * 0.5, tl.float32)
    last = pt.put_value_with_signal(channel, base + 7, -number, tl.int64)
    ticket = pt.flush_async(channel)
    pt.wait(channel)
    tl.store(out, pt.wait_flushed(channel, ticket).to(tl.int32))
    tl.store(out + 1, pt.is_flushed(channel, ticket).to(tl.int32))
    tl.store(out + 2, (last - first).to(tl.int32))
    tl.store(out + 3, (pt.wait_complete(channel, last) & pt.is_complete(channel, first)).to(tl.int32))


@triton.jit
def put_one_value(channel, offset, out):
    """Eight bytes, and the ticket."""
    tl.store(out, pt.put_value(channel, offset, 1, tl.int64))


@triton.jit
def counts(channel, out):
    """Raises the peer's count to 5 by one signal, which counts as five, and waits for the same."""
    pt.signal(channel)
    pt.signal(channel, 5)
    tl.store(out, pt.wait_until(channel, 4).to(tl.int32))
    tl.store(out + 1, pt.wait_until(channel, 3).to(tl.int32))  # consumed already
    tl.store(out + 2, pt.wait(channel).to(tl.int32))
    tl.store(out + 3, pt.poll(channel).to(tl.int32))


@triton.jit
def sm_counts(channel, out):
    """The same over an SmChannel."""
    pt.sm_signal(channel)
    pt.sm_signal(channel, 5)
    tl.store(out, pt.sm_wait_until(channel, 4).to(tl.int32))
    tl.store(out + 1, pt.sm_wait_until(channel, 3).to(tl.int32))
    tl.store(out + 2, pt.sm_wait(channel).to(tl.int32))
    tl.store(out + 3, pt.sm_poll(channel).to(tl.int32))


@triton.jit
def sm_signals_twice(channel, value):
    """Two signals with the same count, the second of which is refused."""
    pt.sm_signal(channel, value)
    pt.sm_signal(channel, value)


@triton.jit
def put_elsewhere(channel, dst_memory, src_memory, size):
    """A put between memories other than the channel's own."""
    pt.put_with_signal(channel, 0, 0, size, dst_memory=dst_memory, src_memory=src_memory)
    pt.wait(channel)


@triton.jit
def get_and_wait(channel, dst_offset, src_offset, size, out):
    """One get, and whether it is complete after the wait for its ticket."""
    ticket = pt.get(channel, dst_offset, src_offset, size)
    tl.store(out, pt.wait_complete(channel, ticket).to(tl.int32))
    tl.store(out + 1, pt.is_complete(channel, ticket).to(tl.int32))


@triton.jit
def put_get_and_flush(channel, size, own_memory, peer_memory, out):
    """A put, a get of its data into another local memory, and the state of their tickets."""
    first = pt.put(channel, 0, 0, size)
    second = pt.get(channel, 0, 0, size, dst_memory=own_memory, src_memory=peer_memory)
    tl.store(out, pt.flush(channel).to(tl.int32))
    tl.store(out + 1, (second - first).to(tl.int32))


@triton.jit
def polls(channel, out):
    """A signal each way: polls until it arrives, then once more."""
    pt.signal(channel)
    while (pt.poll(channel) == 0) & (pt.ended(channel) == 0):
        tl.store(out, 1)
    tl.store(out + 1, pt.poll(channel).to(tl.int32))


@triton.jit
def signals(channel, count):
    """Signals that nobody answers."""
    for _ in range(count):
        pt.signal(channel)


@triton.jit
def waits(channel, out):
    """A wait, and its result."""
    came = pt.wait(channel)
    tl.store(out + tl.program_id(0), came.to(tl.int32))


@triton.jit
def one_fails(channel):
    """The first program waits, the second can't do what it shall."""
    if tl.program_id(0) == 0:
        pt.wait(channel)
    else:
        pt.sm_signal(channel)


@triton.jit
def sm_shift(right, left, u, n, BLOCK: tl.constexpr):
    """Stores this rank's values to the next rank's memory, and doubles those that the previous rank stored here."""
    i = tl.arange(0, BLOCK)
    far = pt.remote(right, tl.float32)
    fits = (i < n) & (n + i < pt.remote_bytes(right) // 4)
    tl.store(far + n + i, tl.load(u + i, i < n), fits)
    pt.sm_signal(right)
    pt.sm_relaxed_signal(right)
    pt.sm_wait(left)
    while (pt.sm_poll(left) == 0) & (pt.sm_ended(left) == 0):
        pass
    tl.store(u + 2 * n + i, tl.load(u + n + i, i < n) * 2, i < n)


@triton.jit
def own_loops(channel, words, out):
    """Two programs, each of which stores a number to the peer, wait for both numbers without a signal."""
    own = tl.program_id(0)
    tl.store(pt.remote(channel, tl.int32) + own, 1 + own)
    total = 0
    while (total != 3) & (pt.sm_ended(channel) == 0):
        total = tl.load(words, volatile=True) + tl.load(words + 1, volatile=True)
    tl.store(out + own, total)


@triton.jit
def packets(right, left, u, out, n, offset, flag, BLOCK: tl.constexpr):
    """Values to the next rank as packets, and those of the previous one."""
    i = tl.arange(0, BLOCK)
    pt.put_packets(right, offset, tl.load(u + i, i < n, other=0.0), flag, count=n)
    tl.store(out + i, pt.get_packets(left, offset, flag, BLOCK, tl.float32, count=n))


@triton.jit
def grid_sums(barrier, u, out, rounds):
    """In each round every program of a grid writes a number, and reads the others' numbers."""
    own = tl.program_id(0)
    programs = tl.num_programs(0)
    total = 0
    for step in range(rounds):
        tl.store(u + own, own + step)
        pt.sync_grid(barrier)
        for i in range(programs):
            total += tl.load(u + i)
        pt.sync_grid(barrier)
    tl.store(out + own, total)


@triton.jit
def one_fails_at_barrier(barrier, fails):
    """The programs of a grid meet, unless the last one can't do what it shall."""
    if fails & (tl.program_id(0) == tl.num_programs(0) - 1):
        pt.sm_signal(barrier)
    pt.sync_grid(barrier)


@triton.jit
def one_makes_room_and_fails(channel, tail):
    """The first program needs room in a ring of two triggers. The second makes it, and can't do what it shall."""
    if tl.program_id(0) == 0:
        for _ in range(3):
            pt.signal(channel)
    else:
        tl.store(tail, 1)
        pt.sm_signal(channel)


@triton.jit
def signal_block(channel):
    """A signal whose value is a block."""
    pt.signal(channel, tl.arange(0, 2))


@triton.jit
def put_block(channel):
    """A value that is a block."""
    pt.put_value(channel, 0, tl.arange(0, 2), tl.int32)


@triton.jit
def put_too_large(channel):
    """A put whose offset has more than 64 bits."""
    pt.put(channel, 1 << 64, 0, 4)


@triton.jit
def wrong_kind(channel):
    """Takes a ProxyChannel for an SmChannel."""
    pt.sm_signal(channel)


@triton.jit
def wrong_barrier(barrier):
    """Takes a ProxyChannel for a grid barrier."""
    pt.sync_grid(barrier)


@triton.jit
def put_half(channel, size):
    """A put whose size is a float, as a division gives it."""
    pt.put(channel, 0, 0, size / 2)


@triton.jit
def numbers(x, factor, wanted):
    """Half of a float, unless it is not wanted."""
    if wanted:
        tl.store(x, (factor * 0.5).to(tl.float16).to(tl.float32))


@triton.jit
def typed(x, n: tl.int64, factor: tl.float64, small: tl.uint8):
    """Products that 32 bits do not hold."""
    tl.store(x, n * 65536 * 65536)
    tl.store(x + 1, (factor * 1e10).to(tl.int64))
    tl.store(x + 2, small)


@triton.jit
def fill(x, value: tl.constexpr):
    """One element."""
    tl.store(x, value[0])


@triton.jit
def scale(x, n, factor, BLOCK: tl.constexpr):
    """Multiplies; no communication."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, i < n) * factor, i < n)


@triton.jit
def exchange(channel, x, n, BLOCK: tl.constexpr):
    """A put each way: both ranks must launch it the same number of times."""
    pt.put_with_signal(channel, n * 4, 0, n * 4)
    pt.wait(channel)
    i = tl.arange(0, BLOCK)
    tl.store(x + 2 * n + i, tl.load(x + n + i, i < n) + BLOCK, i < n)
