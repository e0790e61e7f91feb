"""Kernels in Triton for tests."""

from __future__ import annotations

import triton
import triton.language as tl

import proxyccl.triton as pt


@triton.jit
def laps(channel, count, half):
    """Puts `count` words one by one, and waits for `count` words. `count` should exceed the number of ring slots."""
    for i in range(count):
        pt.put_with_signal(channel, half + i * 4, i * 4, 4)
    for _ in range(count):
        pt.wait(channel)
    pt.flush(channel)


@triton.jit
def to_all(channels, count, rank, nbytes, base, flushed):
    """Puts data to each peer, and stores whether each flush succeeded."""
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
    """Makes a put with a flush, and stores whether the flush succeeded."""
    tl.store(out, pt.put_with_signal_and_flush(channel, dst_offset, src_offset, size).to(tl.int32))


@triton.jit
def put_values(channel, base, number, out):
    """Puts one value of each size, the last with a signal. Stores whether the waits and checks succeeded, and the
    difference between the last and the first ticket.
    """
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
    """Puts a value of eight bytes, and stores the ticket."""
    tl.store(out, pt.put_value(channel, offset, 1, tl.int64))


@triton.jit
def counts(channel, out):
    """Signals once, raises the count to 5 by a second signal, and waits for the same signals from the peer."""
    pt.signal(channel)
    pt.signal(channel, 5)
    tl.store(out, pt.wait_until(channel, 4).to(tl.int32))
    tl.store(out + 1, pt.wait_until(channel, 3).to(tl.int32))  # the wait for 4 has also consumed signal 3
    tl.store(out + 2, pt.wait(channel).to(tl.int32))
    tl.store(out + 3, pt.poll(channel).to(tl.int32))


@triton.jit
def sm_counts(channel, out):
    """Does the same as `counts` over an SmChannel."""
    pt.sm_signal(channel)
    pt.sm_signal(channel, 5)
    tl.store(out, pt.sm_wait_until(channel, 4).to(tl.int32))
    tl.store(out + 1, pt.sm_wait_until(channel, 3).to(tl.int32))
    tl.store(out + 2, pt.sm_wait(channel).to(tl.int32))
    tl.store(out + 3, pt.sm_poll(channel).to(tl.int32))


@triton.jit
def sm_signals_twice(channel, value):
    """Signals twice with the same count; the second signal must be refused."""
    pt.sm_signal(channel, value)
    pt.sm_signal(channel, value)


@triton.jit
def put_elsewhere(channel, dst_memory, src_memory, size):
    """Puts between the given memories instead of the channel's, and waits for the peer's put."""
    pt.put_with_signal(channel, 0, 0, size, dst_memory=dst_memory, src_memory=src_memory)
    pt.wait(channel)


@triton.jit
def get_and_wait(channel, dst_offset, src_offset, size, out):
    """Gets once, waits for the get's ticket, and stores whether the get is complete."""
    ticket = pt.get(channel, dst_offset, src_offset, size)
    tl.store(out, pt.wait_complete(channel, ticket).to(tl.int32))
    tl.store(out + 1, pt.is_complete(channel, ticket).to(tl.int32))


@triton.jit
def put_get_and_flush(channel, size, own_memory, peer_memory, out):
    """Puts data, and gets it back into another local memory. Stores the flush's result and the tickets' difference."""
    first = pt.put(channel, 0, 0, size)
    second = pt.get(channel, 0, 0, size, dst_memory=own_memory, src_memory=peer_memory)
    tl.store(out, pt.flush(channel).to(tl.int32))
    tl.store(out + 1, (second - first).to(tl.int32))


@triton.jit
def polls(channel, out):
    """Signals the peer, polls until the peer's signal arrives, then polls once more."""
    pt.signal(channel)
    while (pt.poll(channel) == 0) & (pt.ended(channel) == 0):
        tl.store(out, 1)
    tl.store(out + 1, pt.poll(channel).to(tl.int32))


@triton.jit
def signals(channel, count):
    """Signals `count` times."""
    for _ in range(count):
        pt.signal(channel)


@triton.jit
def waits(channel, out):
    """Waits for a signal, and stores the wait's result."""
    came = pt.wait(channel)
    tl.store(out + tl.program_id(0), came.to(tl.int32))


@triton.jit
def one_fails(channel):
    """Makes the first program wait while the second program fails by using the channel as an SmChannel."""
    if tl.program_id(0) == 0:
        pt.wait(channel)
    else:
        pt.sm_signal(channel)


@triton.jit
def sm_shift(right, left, u, n, BLOCK: tl.constexpr):
    """Stores values in the next rank's memory, and doubles the values received from the previous rank."""
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
    """Makes each of two programs store a number in the peer's memory, and poll memory for the peer's two numbers."""
    own = tl.program_id(0)
    tl.store(pt.remote(channel, tl.int32) + own, 1 + own)
    total = 0
    while (total != 3) & (pt.sm_ended(channel) == 0):
        total = tl.load(words, volatile=True) + tl.load(words + 1, volatile=True)
    tl.store(out + own, total)


@triton.jit
def packets(right, left, u, out, n, offset, flag, BLOCK: tl.constexpr):
    """Sends values to the next rank as packets, and stores the values received from the previous rank."""
    i = tl.arange(0, BLOCK)
    pt.put_packets(right, offset, tl.load(u + i, i < n, other=0.0), flag, count=n)
    tl.store(out + i, pt.get_packets(left, offset, flag, BLOCK, tl.float32, count=n))


@triton.jit
def grid_sums(barrier, u, out, rounds):
    """In each round, every program of the grid writes a number and adds up all programs' numbers."""
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
    """Synchronises the programs of a grid. If `fails`, the last program first uses the barrier as a channel, which is
    an error.
    """
    if fails & (tl.program_id(0) == tl.num_programs(0) - 1):
        pt.sm_signal(barrier)
    pt.sync_grid(barrier)


@triton.jit
def one_makes_room_and_fails(channel, tail):
    """Makes the first program wait for room in a ring of two triggers. The second program makes room, then fails."""
    if tl.program_id(0) == 0:
        for _ in range(3):
            pt.signal(channel)
    else:
        tl.store(tail, 1)
        pt.sm_signal(channel)


@triton.jit
def signal_block(channel):
    """Signals with a block as the value, which is an error."""
    pt.signal(channel, tl.arange(0, 2))


@triton.jit
def put_block(channel):
    """Puts a block as the value, which is an error."""
    pt.put_value(channel, 0, tl.arange(0, 2), tl.int32)


@triton.jit
def put_too_large(channel):
    """Puts at an offset of more than 64 bits, which is an error."""
    pt.put(channel, 1 << 64, 0, 4)


@triton.jit
def wrong_kind(channel):
    """Uses a ProxyChannel as an SmChannel, which is an error."""
    pt.sm_signal(channel)


@triton.jit
def wrong_barrier(barrier):
    """Uses a ProxyChannel as a grid barrier, which is an error."""
    pt.sync_grid(barrier)


@triton.jit
def put_half(channel, size):
    """Puts with a float (the result of a division) as the size, which is an error."""
    pt.put(channel, 0, 0, size / 2)


@triton.jit
def numbers(x, factor, wanted):
    """Stores half of a float, if `wanted`."""
    if wanted:
        tl.store(x, (factor * 0.5).to(tl.float16).to(tl.float32))


@triton.jit
def typed(x, n: tl.int64, factor: tl.float64, small: tl.uint8):
    """Stores products that need more than 32 bits."""
    tl.store(x, n * 65536 * 65536)
    tl.store(x + 1, (factor * 1e10).to(tl.int64))
    tl.store(x + 2, small)


@triton.jit
def fill(x, value: tl.constexpr):
    """Stores the first element of `value`."""
    tl.store(x, value[0])


@triton.jit
def scale(x, n, factor, BLOCK: tl.constexpr):
    """Multiplies the elements by a factor, without communication."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, i < n) * factor, i < n)


@triton.jit
def exchange(channel, x, n, BLOCK: tl.constexpr):
    """Puts data to the peer, and waits for the peer's data. Both ranks must launch this kernel equally often."""
    pt.put_with_signal(channel, n * 4, 0, n * 4)
    pt.wait(channel)
    i = tl.arange(0, BLOCK)
    tl.store(x + 2 * n + i, tl.load(x + n + i, i < n) + BLOCK, i < n)
