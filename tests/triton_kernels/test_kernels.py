"""Kernels in Triton, over the real ring and proxy."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import triton
from triton.runtime.interpreter import InterpretedFunction

import proxyccl.triton as pt
from proxyccl import (
    AbortedError,
    ArgumentError,
    Communicator,
    CommunicatorError,
    KernelError,
    Operation,
    PeerLostError,
    ThreadBootstrap,
    Trigger,
    TriggerError,
    WaitTimeoutError,
)
from proxyccl.channels.proxy_channel import ProxyChannel
from proxyccl.channels.segment.control import LAST_QUESTION, KernelWait
from proxyccl.device._native import ffi, lib
from proxyccl.triton import proxy_channel, turns
from support.kernels import triton as kernels
from support.kernels.triton_compiling import without_interpreter
from support.paths import PROGRAMS
from support.processes import run_processes
from support.running import TIMEOUT, impatient, run_ranks

HOST_ONLY = pytest.mark.host_only(reason="the ring is the test's own")


def uploaded(comm: Communicator, values: Any) -> Any:
    host = np.asarray(values)
    return comm.empty(host.shape, host.dtype.name).upload(host)


def errors_of(ranks: int, body: Callable[[Communicator], None], **options: Any) -> list[CommunicatorError]:
    def caught(comm: Communicator) -> CommunicatorError:
        try:
            body(comm)
            comm.synchronize()
            deadline = time.monotonic() + TIMEOUT  # a peer's kernel may end before the peer learns of the failure
            while time.monotonic() < deadline:
                comm.check()
                time.sleep(0.01)
        except CommunicatorError as error:
            return error
        raise AssertionError(f"rank {comm.rank} has not noticed a failure")

    return run_ranks(ranks, caught, **options)


def test_triggers_go_round_a_small_ring_in_order() -> None:
    def body(comm: Communicator) -> None:
        x = np.arange(64, dtype=np.int32) + 1000 * comm.rank
        u = uploaded(comm, x)
        (channel,) = comm.proxy_channels(u)
        comm.triton(kernels.laps, grid=1)(channel, 11, 32 * 4)
        comm.synchronize()
        assert u.numpy()[32:43].tolist() == [i + 1000 * (1 - comm.rank) for i in range(11)]
        assert (channel.counters.puts, channel.counters.flushes) == (11, 1)

    run_ranks(2, body, fifo_size=4)


def test_a_channel_is_chosen_in_the_kernel() -> None:
    def body(comm: Communicator) -> None:
        rank, peers = comm.rank, 2
        u = uploaded(comm, np.arange(5 * 8, dtype=np.int64) + 100 * rank)
        channels, flushed = comm.proxy_channels(u), uploaded(comm, np.zeros(peers, np.int32))
        pt.compile(comm, kernels.to_all, grid=(1,))(channels, peers, rank, 64, 128, flushed)
        comm.synchronize()
        assert flushed.numpy().tolist() == [1, 1]
        for peer in channels.peers:
            mine = [p for p in range(3) if p != peer].index(rank)
            start = 16 + 8 * peer
            assert u.numpy()[start : start + 8].tolist() == [100 * peer + 8 * mine + i for i in range(8)]

    run_ranks(3, body)


def test_a_put_goes_between_other_memories() -> None:
    def body(comm: Communicator) -> None:
        peer = 1 - comm.rank
        u, source, target = (uploaded(comm, np.full(8, value + comm.rank, np.int32)) for value in (0, 10, 20))
        (channel,) = comm.proxy_channels(u)
        source_id, target_id = comm.register(source).source_id(peer), comm.register(target).peer_id(peer)
        pt.compile(comm, kernels.put_elsewhere, grid=1)(channel, target_id, source_id, 16)
        comm.synchronize()
        assert target.numpy().tolist() == [10 + peer] * 4 + [20 + comm.rank] * 4

    run_ranks(2, body)


def test_values_travel_in_triggers() -> None:
    def body(comm: Communicator) -> None:
        u, out = uploaded(comm, np.zeros(32, np.int8)), uploaded(comm, np.zeros(4, np.int32))
        (channel,) = comm.proxy_channels(u)
        pt.compile(comm, kernels.put_values, grid=1)(channel, 3, 20 + comm.rank, out)
        comm.synchronize()
        number = 20 + 1 - comm.rank
        expected = b"\0\0\0" + struct.pack("<befq", number, 1.5, number / 2, -number)
        assert u.numpy().tobytes().rstrip(b"\0") == expected
        assert out.numpy().tolist() == [1, 1, 3, 1]
        assert (channel.counters.puts, channel.counters.flushes) == (4, 1)

    run_ranks(2, body)


def test_a_get_brings_the_peers_data() -> None:
    def body(comm: Communicator) -> None:
        own, theirs = (uploaded(comm, np.arange(16, dtype=np.int32) + value + comm.rank) for value in (0, 100))
        (channel,) = comm.proxy_channels(theirs, own)
        out = uploaded(comm, np.full(2, 7, np.int32))
        comm.barrier()
        pt.compile(comm, kernels.get_and_wait, grid=1)(channel, 8, 4, 40, out)
        comm.synchronize()
        assert out.numpy().tolist() == [1, 1]
        peer = 1 - comm.rank
        expected = [0, 1, *(101 + peer + i for i in range(10)), 12, 13, 14, 15]
        assert own.numpy().tolist() == [expected[i] + (comm.rank if i not in range(2, 12) else 0) for i in range(16)]
        assert (channel.counters.gets, channel.counters.puts) == (1, 0)
        comm.barrier()

    run_ranks(2, body)


def test_a_value_that_leaves_its_memory_is_not_written() -> None:
    def body(comm: Communicator) -> None:
        (channel,) = comm.proxy_channels(uploaded(comm, np.zeros(4, np.int64)))
        ticket = uploaded(comm, np.zeros(1, np.uint64))
        if comm.rank == 0:
            pt.compile(comm, kernels.put_one_value, grid=1)(channel, 5 << 32, ticket)
            comm.runtime.synchronize()
            assert ticket.numpy().tolist() == [2**64 - 1]

    for error in errors_of(2, body):
        assert isinstance(error, TriggerError)
        assert (error.rank, error.offset) == (0, 5 << 32)


@pytest.mark.parametrize("kind", ["proxy", "sm"])
def test_a_signal_raises_the_count(kind: str) -> None:
    def body(comm: Communicator) -> None:
        u, out = uploaded(comm, np.zeros(4, np.int32)), uploaded(comm, np.full(4, 7, np.int32))
        (channel,) = comm.proxy_channels(u) if kind == "proxy" else comm.sm_channels(u)
        pt.compile(comm, kernels.counts if kind == "proxy" else kernels.sm_counts, grid=1)(channel, out)
        comm.synchronize()
        assert out.numpy().tolist() == [1, 1, 1, 0]

    run_ranks(2, body)


def test_a_get_reads_what_was_put_before_it() -> None:
    def body(comm: Communicator) -> None:
        source, back = uploaded(comm, np.arange(8, dtype=np.int32) + comm.rank), uploaded(comm, np.zeros(8, np.int32))
        target, out = uploaded(comm, np.zeros(8, np.int32)), uploaded(comm, np.full(2, 7, np.int32))
        (channel,) = comm.proxy_channels(target, source)
        ids = comm.register(back).source_id(1 - comm.rank), comm.register(target).peer_id(1 - comm.rank)
        comm.barrier()
        pt.compile(comm, kernels.put_get_and_flush, grid=1)(channel, 32, *ids, out)
        comm.synchronize()
        assert out.numpy().tolist() == [1, 1]
        assert back.numpy().tolist() == [i + comm.rank for i in range(8)]
        comm.barrier()

    run_ranks(2, body)


def test_a_count_that_does_not_grow_is_refused() -> None:
    def body(comm: Communicator) -> None:
        (channel,) = comm.sm_channels(uploaded(comm, np.zeros(4, np.int32)))
        if comm.rank == 0:
            pt.compile(comm, kernels.sm_signals_twice, grid=1)(channel, 3)

    for error in errors_of(2, body):
        assert isinstance(error, TriggerError)
        assert "with the value 3; expected one above the count of signals, 3" in str(error)


def test_a_poll_consumes_one_signal() -> None:
    def body(comm: Communicator) -> None:
        u, out = uploaded(comm, np.zeros(4, np.int32)), uploaded(comm, np.full(2, 7, np.int32))
        (channel,) = comm.proxy_channels(u)
        pt.compile(comm, kernels.polls, grid=1)(channel, out)
        comm.synchronize()
        assert out.numpy()[1] == 0

    run_ranks(2, body)


def test_a_wait_for_a_signal_that_never_comes_is_bounded_and_says_what_it_waited_for() -> None:
    def body(comm: Communicator) -> None:
        u, out = uploaded(comm, np.zeros(4, np.int32)), uploaded(comm, np.full(1, 7, np.int32))
        (channel,) = comm.proxy_channels(u)
        impatient(comm, 0.4)
        if comm.rank == 0:
            began = time.monotonic()
            pt.compile(comm, kernels.waits, grid=1)(channel, out)
            comm.runtime.synchronize()
            assert 0.3 <= time.monotonic() - began < TIMEOUT / 2
            assert out.numpy().tolist() == [0]
            (wait,) = comm.group.control.waits(LAST_QUESTION)
            assert (wait.kind, wait.peer, wait.channel) == (lib.PROXYCCL_WAIT_PROXY_SIGNAL, 1, channel.id)
            assert (wait.expected, wait.seen) == (1, 0)

    for rank, error in enumerate(errors_of(2, body)):
        assert isinstance(error, WaitTimeoutError), rank
        assert (error.rank, error.peer) == (0, 1)
        assert "a signal (ProxyChannel) from rank 1" in str(error)
        assert "expected 1, saw 0" in str(error)


def test_a_kernel_says_what_it_waits_for_when_it_is_asked() -> None:
    def body(comm: Communicator) -> None:
        u, out = uploaded(comm, np.zeros(4, np.int32)), uploaded(comm, np.zeros(1, np.int32))
        (channel,) = comm.proxy_channels(u)
        answers: list[KernelWait] = []

        def ask() -> None:
            comm.group.control.ask(5)
            deadline = time.monotonic() + TIMEOUT
            while not answers and time.monotonic() < deadline:
                time.sleep(0.001)
                answers.extend(comm.group.control.waits(5))
            comm.abort("asked")

        if comm.rank == 0:
            asker = threading.Thread(target=ask)
            asker.start()
            pt.compile(comm, kernels.waits, grid=1)(channel, out)
            comm.runtime.synchronize()
            asker.join()
            (wait,) = answers
            assert (wait.kind, wait.peer) == (lib.PROXYCCL_WAIT_PROXY_SIGNAL, 1)

    for error in errors_of(2, body):
        assert isinstance(error, AbortedError)


def test_a_peer_s_abort_ends_a_wait() -> None:
    def body(comm: Communicator) -> None:
        u, out = uploaded(comm, np.zeros(4, np.int32)), uploaded(comm, np.full(1, 7, np.int32))
        (channel,) = comm.proxy_channels(u)
        if comm.rank == 1:
            comm.abort("enough")
        else:
            pt.compile(comm, kernels.waits, grid=1)(channel, out)
            comm.runtime.synchronize()
            assert out.numpy().tolist() == [0]

    errors = errors_of(2, body)
    assert all(isinstance(error, AbortedError) for error in errors)


def test_a_killed_peer_ends_a_wait() -> None:
    waiting, _ = run_processes(2, PROGRAMS / "triton_peer.py")
    assert waiting.returncode == 0, waiting.stderr
    assert waiting.stdout.split() == [PeerLostError.__name__, "1", "0"]


@HOST_ONLY
def test_two_programs_that_wait_on_one_channel_are_refused() -> None:
    def body(comm: Communicator) -> None:
        u, out = uploaded(comm, np.zeros(4, np.int32)), uploaded(comm, np.zeros(2, np.int32))
        (channel,) = comm.proxy_channels(u)
        if comm.rank == 0:
            pt.compile(comm, kernels.waits, grid=2)(channel, out)

    errors = errors_of(2, body)
    assert "waited at once for a signal (ProxyChannel) from rank 1" in str(errors[0])


@pytest.mark.parametrize(
    ("dst_offset", "src_offset", "size", "offset"),
    [(5 << 32, 0, 16, 5 << 32), (0, 3 << 32, 16, 3 << 32), (8, 0, 1 << 33, 8), (-4, 0, 4, (1 << 64) - 4)],
    ids=["dst", "src", "size", "negative"],
)
def test_a_range_that_leaves_its_memory_moves_nothing(dst_offset: int, src_offset: int, size: int, offset: int) -> None:
    def body(comm: Communicator) -> None:
        u, out = uploaded(comm, np.full(8, comm.rank, np.int32)), uploaded(comm, np.full(1, 7, np.int32))
        (channel,) = comm.proxy_channels(u)
        if comm.rank == 0:
            pt.compile(comm, kernels.put_and_flush, grid=1)(channel, dst_offset, src_offset, size, out)
            comm.runtime.synchronize()
            assert out.numpy().tolist() == [0]
            assert channel.counters.triggers == 0

    for error in errors_of(2, body):
        assert isinstance(error, TriggerError)
        assert (error.rank, error.offset) == (0, offset)


def own_ring(comm: Communicator, slots: int, limit: int) -> tuple[ProxyChannel, Any, list[object]]:
    """Returns a channel whose ring no proxy drains, the ring's slots, and objects to keep alive. The channel's
    memories, ids 7 and 9, have `limit` bytes.
    """
    ring, words = np.zeros((slots, 2), np.uint64), np.zeros(6, np.uint64)
    limits = np.full(512, limit, np.uint64)
    handle = ffi.new("ProxycclProxyChannel *")
    handle.fifo.slots = ffi.cast("ProxycclTrigger *", ring.ctypes.data)
    for i, name in enumerate(("tail", "head", "tail_cache")):
        setattr(handle.fifo, name, ffi.cast("uint64_t *", words.ctypes.data + 8 * i))
    handle.fifo.refresh_lock = ffi.cast("uint32_t *", words.ctypes.data + 24)
    handle.flushed = ffi.cast("uint64_t *", words.ctypes.data + 32)
    handle.completed = ffi.cast("uint64_t *", words.ctypes.data + 40)
    handle.fifo.size_log2 = slots.bit_length() - 1
    handle.memory_limits = ffi.cast("uint64_t *", limits.ctypes.data)
    handle.control = ffi.cast("ProxycclControl *", comm.group.control.device_pointer)
    handle.channel, handle.peer, handle.dst_memory, handle.src_memory = 3, 0, 7, 9
    channel = object.__new__(ProxyChannel)
    channel.device_pointer = int(ffi.cast("uintptr_t", handle))
    return channel, ring, [words, limits, handle]


@HOST_ONLY
def test_a_long_put_becomes_triggers_of_the_windows_that_it_touches() -> None:
    size = 2 * lib.PROXYCCL_MAX_TRIGGER_BYTES + 5
    start = (1 << 32) + 100

    def body(comm: Communicator) -> None:
        channel, ring, kept = own_ring(comm, 8, 4 << 32)
        comm.timeout = 0.2  # no proxy answers the flush
        out = uploaded(comm, np.full(1, 7, np.int32))
        pt.compile(comm, kernels.put_and_flush, grid=1)(channel, start, 40, size, out)
        moved, operations = 0, []
        for low, high in ring[:3].tolist():
            length, src, dst = low & 0xFFFFFFFF, low >> 32, high & 0xFFFFFFFF
            src_memory, dst_memory = high >> 32 & 511, high >> 41 & 511
            assert (dst_memory - 7) << 32 | dst == start + moved
            assert (src_memory - 9) << 32 | src == 40 + moved
            assert (high >> 53 & 1023, high >> 63) == (3, 1)
            operations.append(high >> 50 & 7)
            moved += length
        assert moved == size
        data, all_three = lib.PROXYCCL_OP_DATA, lib.PROXYCCL_OP_DATA | lib.PROXYCCL_OP_SIGNAL | lib.PROXYCCL_OP_FLUSH
        assert operations == [data, data, all_three]
        assert not ring[3:].any()
        del kept

    (error,) = errors_of(1, body)
    assert isinstance(error, WaitTimeoutError)


@HOST_ONLY
def test_a_long_get_becomes_gets_of_the_windows_that_it_touches() -> None:
    size = 2 * lib.PROXYCCL_MAX_TRIGGER_BYTES + 5
    start = (1 << 32) + 100

    def body(comm: Communicator) -> None:
        channel, ring, kept = own_ring(comm, 8, 4 << 32)
        comm.timeout = 0.2  # no proxy completes the ticket
        out = uploaded(comm, np.full(2, 7, np.int32))
        pt.compile(comm, kernels.get_and_wait, grid=1)(channel, start, 40, size, out)
        moved = 0
        for low, high in ring[:3].tolist():
            trigger = Trigger.decode(low, high)
            assert (trigger.operation, trigger.channel) == (Operation.DATA | Operation.GET, 3)
            assert (trigger.dst_memory - 9) << 32 | trigger.dst_offset == start + moved
            assert (trigger.src_memory - 7) << 32 | trigger.src_offset == 40 + moved
            moved += trigger.size
        assert moved == size
        assert not ring[3:].any()
        del kept

    (error,) = errors_of(1, body)
    assert isinstance(error, WaitTimeoutError)
    assert "the completion of its operations" in str(error)


@HOST_ONLY
def test_a_ring_that_stays_full_is_reported() -> None:
    def body(comm: Communicator) -> None:
        channel, ring, kept = own_ring(comm, 2, 1 << 20)
        impatient(comm, 0.2)
        pt.compile(comm, kernels.signals, grid=1)(channel, 3)
        assert np.count_nonzero(ring[:, 1]) == 2
        del kept

    (error,) = errors_of(1, body)
    assert "room in the trigger ring: expected 1, saw 0" in str(error)


@pytest.mark.parametrize("n", [1, 100])
def test_stores_to_a_peer_s_memory_are_there_behind_the_signal(n: int) -> None:
    def body(comm: Communicator) -> None:
        rank, ranks = comm.rank, comm.world_size
        x = np.zeros(3 * n, np.float32)
        x[:n] = np.arange(n) + 1000 * rank
        u = uploaded(comm, x)
        channels = comm.sm_channels(u)
        right, left = channels.to((rank + 1) % ranks), channels.to((rank - 1) % ranks)
        pt.compile(comm, kernels.sm_shift, grid=1)(right, left, u, n, BLOCK=128)
        comm.synchronize()
        assert u.numpy()[2 * n :].tolist() == [2 * (i + 1000 * ((rank - 1) % ranks)) for i in range(n)]

    run_ranks(3, body)


def test_a_kernel_s_own_loop_may_wait_for_other_programs_and_ranks() -> None:
    def body(comm: Communicator) -> None:
        words, out = (uploaded(comm, np.zeros(2, np.int32)) for _ in range(2))
        (channel,) = comm.sm_channels(words)
        watch = threading.Timer(TIMEOUT, comm.abort, ["the loops have not ended"])
        watch.start()
        pt.compile(comm, kernels.own_loops, grid=2)(channel, words, out)
        comm.synchronize()
        watch.cancel()
        assert out.numpy().tolist() == [3, 3]
        comm.barrier()

    run_ranks(2, body)


def test_packets_carry_values_and_flags() -> None:
    def body(comm: Communicator) -> None:
        rank = comm.rank
        (channel,) = comm.sm_channels(buffer := comm.empty(64, "uint64").fill(0))
        own, out = uploaded(comm, np.arange(32, dtype=np.float32) + rank), comm.empty(32, "float32").fill(9)
        kernel = pt.compile(comm, kernels.packets, grid=1)
        kernel(channel, channel, own, out, 20, 16, 5, BLOCK=32)
        comm.synchronize()
        expected = np.arange(32, dtype=np.float32) + (1 - rank)
        assert out.numpy()[:20].tolist() == expected[:20].tolist()
        assert not out.numpy()[20:].any()
        words = buffer.numpy()
        # A packet is laid out as packet.h's LL8Packet: the low half is data, the high half the flag.
        assert (words[2:22] & 0xFFFFFFFF).astype(np.uint32).view(np.float32).tolist() == expected[:20].tolist()
        assert set((words >> 32).tolist()) == {0, 5}

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("count", "offset", "flag", "text"),
    [
        (20, 0, 0, "used packet flag 0"),
        (20, 512, 1, "on its SmChannel to rank 1: 160 bytes at offset 512 leave the peer's memory of 512 bytes"),
        (20, 360, 1, "putPackets on its SmChannel to rank 1: 160 bytes at offset 360 leave the peer's memory"),
        (1 << 61, 8, 1, "bytes at offset 8 leave the peer's memory of 512 bytes"),  # 2**64 bytes
        (20, 12, 1, "160 bytes at offset 12 of the peer's memory; expected multiples of 8 bytes"),
    ],
)
def test_packets_that_can_t_be_are_refused(count: int, offset: int, flag: int, text: str) -> None:
    def body(comm: Communicator) -> None:
        (channel,) = comm.sm_channels(comm.empty(64, "uint64").fill(0))
        own, out = comm.empty(32, "float32").fill(1), comm.empty(32, "float32").fill(9)
        if comm.rank == 0:
            pt.compile(comm, kernels.packets, grid=1)(channel, channel, own, out, count, offset, flag, BLOCK=32)

    for error in errors_of(2, body):
        assert isinstance(error, TriggerError)
        assert text in str(error)


def test_packets_that_never_come_are_reported() -> None:
    def body(comm: Communicator) -> None:
        (channel,) = comm.sm_channels(comm.empty(64, "uint64").fill(0))
        own, out = comm.empty(32, "float32").fill(1), comm.empty(32, "float32").fill(9)
        impatient(comm, 0.3)
        if comm.rank == 0:
            pt.compile(comm, kernels.packets, grid=1)(channel, channel, own, out, 20, 0, 5, BLOCK=32)
            comm.runtime.synchronize()
            assert not out.numpy().any()

    for error in errors_of(2, body):
        assert "a packet from rank 1 on channel 0: expected 5, saw 0" in str(error)


def test_a_grid_meets_at_a_barrier() -> None:
    def body(comm: Communicator) -> None:
        barrier = pt.GridBarrier(comm)
        for programs in (3, 1, 2):
            u, out = uploaded(comm, np.zeros(4, np.int32)), uploaded(comm, np.zeros(4, np.int32))
            pt.compile(comm, kernels.grid_sums, grid=(programs,))(barrier, u, out, 2)
            comm.synchronize()
            total = 2 * sum(range(programs)) + programs
            assert out.numpy()[:programs].tolist() == [total] * programs

    run_ranks(1, body)


def test_all_ranks_choose_the_same_configuration() -> None:
    configs = [triton.Config({"BLOCK": block}, num_warps=1) for block in (16, 32)]

    def body(comm: Communicator) -> tuple[Any, int]:
        u = uploaded(comm, np.arange(24, dtype=np.float32))
        (channel,) = comm.proxy_channels(u)
        kernel = pt.compile(comm, kernels.exchange, grid=1, configs=configs, key=["n"])
        kernel(channel, u, 8)
        comm.synchronize()
        (chosen,) = kernel.chosen.values()
        assert u.numpy()[16:].tolist() == [i + chosen.kwargs["BLOCK"] for i in range(8)]
        kernel(channel, u, 8)  # measured once
        comm.synchronize()
        comm.drain()
        return chosen.kwargs["BLOCK"], channel.counters.puts

    (first, puts), second = run_ranks(2, body)
    assert second == (first, puts)
    assert puts == 2 * (1 + 5) + 2


def test_a_launch_comes_behind_what_its_stream_holds() -> None:
    def body(comm: Communicator) -> None:
        x, stream = comm.empty(300, "float32").fill(1), comm.runtime.create_stream()
        comm.all_reduce(x, stream=stream)
        pt.compile(comm, kernels.scale, grid=lambda given: (triton.cdiv(given["x"].size, given["BLOCK"]),))(
            x, 300, 3.0, BLOCK=128, stream=stream
        )
        comm.all_reduce(x, stream=stream)
        comm.synchronize(stream)
        assert set(x.numpy().tolist()) == {12.0}

    run_ranks(2, body)


@pytest.mark.host_only(reason="about the interpreter")
def test_kernels_are_rewritten_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    in_turn: list[bool] = []
    rewrite = InterpretedFunction.rewrite

    def rewrite_and_look(function: Any) -> Any:
        in_turn.append(turns._turn.locked())
        return rewrite(function)

    monkeypatch.setattr(InterpretedFunction, "rewrite", rewrite_and_look)

    def body(comm: Communicator) -> None:
        channel = comm.proxy_channels(uploaded(comm, np.arange(8, dtype=np.int64)), peers=[0])
        pt.compile(comm, kernels.laps, grid=1)(channel[0], 1, 0)

    run_ranks(1, body)
    assert set(in_turn) == {True}


@pytest.mark.parametrize(("number", "boolean"), [(float, bool), (np.float32, np.bool_)])
def test_numbers_are_those_of_python_or_of_numpy(
    number: Callable[[float], Any], boolean: Callable[[bool], Any]
) -> None:
    def body(comm: Communicator) -> None:
        kernel = pt.compile(comm, kernels.numbers, grid=1)
        for wanted in (True, False):
            x = comm.empty(1, "float32").fill(9)
            kernel(x, number(3), boolean(wanted))
            comm.synchronize()
            assert x.numpy().tolist() == [1.5 if wanted else 9]

    run_ranks(1, body)


def test_numbers_have_the_types_of_their_annotations() -> None:
    def body(comm: Communicator) -> None:
        x = comm.empty(3, "int64").fill(9)
        kernel = pt.compile(comm, kernels.typed, grid=1)
        kernel(x, 1, 0.1, 200)
        comm.synchronize()
        assert x.numpy().tolist() == [1 << 32, 10**9, 200]
        with pytest.raises(ArgumentError, match="small of kernel typed: -1 does not fit in the annotation's u8"):
            kernel(x, 1, 1.0, -1)
        with pytest.raises(ArgumentError, match=r"n of kernel typed: 1\.0 can't be passed as i64, the type"):
            kernel(x, 1.0, 1.0, 1)

    run_ranks(1, body)


def test_wrong_arguments_are_named() -> None:
    def body(comm: Communicator) -> None:
        x = comm.empty(8, "float32").fill(1)
        with pytest.raises(ArgumentError, match=r"kernel: expected a function decorated by @triton\.jit"):
            pt.compile(comm, lambda: None, grid=1)
        with pytest.raises(ArgumentError, match="grid: must be one to three positive integers"):
            pt.compile(comm, kernels.scale, grid=(0,))(x, 8, 1.0, BLOCK=8)
        with pytest.raises(ArgumentError, match="args: kernel scale: missing a required argument: 'BLOCK'"):
            pt.compile(comm, kernels.scale, grid=1)(x, 8, 1.0)
        with pytest.raises(ArgumentError, match="n of kernel scale: 18446744073709551616 does not fit in 64 bits"):
            pt.compile(comm, kernels.scale, grid=1)(x, 1 << 64, 1.0, BLOCK=8)
        with pytest.raises(ArgumentError, match="x of kernel scale: Triton has no type complex64"):
            pt.compile(comm, kernels.scale, grid=1)(comm.empty(8, "complex64"), 8, 1.0, BLOCK=8)
        with pytest.raises(ArgumentError, match="key: scale has no parameter 'm'"):
            pt.compile(comm, kernels.scale, grid=1, configs=[triton.Config({"BLOCK": 8})], key=["m"])
        with pytest.raises(ArgumentError, match=r"configs: expected a sequence of triton\.Config without a pre_hook"):
            pt.compile(comm, kernels.scale, grid=1, configs=[triton.Config({"BLOCK": 8}, pre_hook=print)])
        with pytest.raises(ArgumentError, match="BLOCK: the configurations of kernel scale set this parameter"):
            pt.compile(comm, kernels.scale, grid=1, configs=[triton.Config({"BLOCK": 8})])(x, 8, 1.0, BLOCK=16)
        tuned = triton.autotune([triton.Config({"BLOCK": 8})], key=[], reset_to_zero=["x"])(kernels.scale)
        with pytest.raises(ArgumentError, match=r"kernel: its @triton\.autotune has reset_to_zero"):
            pt.compile(comm, tuned, grid=1)
        with pytest.raises(ArgumentError, match="channel of kernel waits: expected a ProxyChannel, an SmChannel"):
            pt.compile(comm, kernels.waits, grid=1)(comm.handler_channel(lambda trigger: None), x)

    run_ranks(1, body)


@HOST_ONLY
def test_a_channel_of_the_wrong_kind_is_refused_before_anything_moves() -> None:
    def body(comm: Communicator) -> None:
        channels, barrier = comm.proxy_channels(uploaded(comm, np.zeros(4, np.int32))), pt.GridBarrier(comm)
        for kernel, given, expected in (
            (kernels.wrong_kind, channels, "an SmChannel"),
            (kernels.wrong_barrier, channels, "a GridBarrier"),
            (kernels.put_half, barrier, "a ProxyChannel"),
        ):
            arguments = (given, 8)[: len(kernel.arg_names)]
            with pytest.raises(KernelError, match=f"{kernel.__name__} raised AssertionError: expected {expected}"):
                pt.compile(comm, kernel, grid=1)(*arguments)

    run_ranks(2, body)


@HOST_ONLY
def test_programs_do_not_wait_for_one_that_has_failed() -> None:
    def body(comm: Communicator) -> None:
        (channel,) = comm.proxy_channels(uploaded(comm, np.zeros(4, np.int32)), peers=[0])
        comm.timeout = 2
        with pytest.raises(KernelError, match="kernel one_fails raised AssertionError: expected an SmChannel"):
            pt.compile(comm, kernels.one_fails, grid=2)(channel)
        pt.compile(comm, kernels.laps, grid=1)(channel, 1, 0)  # the failed kernel leaves no waiting program
        comm.synchronize()

    run_ranks(1, body)


@HOST_ONLY
def test_a_launch_after_one_that_raised_finds_its_barrier_empty() -> None:
    def body(comm: Communicator) -> None:
        barrier = pt.GridBarrier(comm)
        comm.timeout = 2
        kernel = pt.compile(comm, kernels.one_fails_at_barrier, grid=3)
        for _ in range(2):
            with pytest.raises(KernelError, match="kernel one_fails_at_barrier raised AssertionError"):
                kernel(barrier, True)
            kernel(barrier, False)
        comm.synchronize()

    run_ranks(1, body)


@HOST_ONLY
def test_a_push_that_waits_for_room_is_made_if_another_program_raises() -> None:
    def body(comm: Communicator) -> None:
        channel, ring, kept = own_ring(comm, 2, 1 << 20)
        words: Any = kept[0]
        with pytest.raises(KernelError, match="kernel one_makes_room_and_fails raised AssertionError"):
            pt.compile(comm, kernels.one_makes_room_and_fails, grid=2)(channel, words)
        assert words[1] == 3  # three tickets were taken
        # parity bits: slot 0 was reused in the second lap, slot 1 is from the first lap
        assert (ring[:, 1] >> np.uint64(63)).tolist() == [0, 1]

    run_ranks(1, body)


@HOST_ONLY
def test_a_signal_s_handler_that_raises_leaves_the_ring_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    store = proxy_channel.store_trigger

    def interrupted(*arguments: Any) -> None:
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGINT)
        store(*arguments)

    with Communicator(ThreadBootstrap.create(1)[0], "host", timeout=2) as comm:
        (channel,) = comm.proxy_channels(uploaded(comm, np.zeros(4, np.int32)), peers=[0])
        monkeypatch.setattr(proxy_channel, "store_trigger", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pt.compile(comm, kernels.signals, grid=1)(channel, 1)
        pt.compile(comm, kernels.waits, grid=1)(channel, uploaded(comm, np.zeros(1, np.int32)))
        comm.synchronize()


@HOST_ONLY
@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (kernels.put_half, "an integer"),
        (kernels.put_too_large, "an integer of 64 bits"),
        (kernels.signal_block, "an integer"),
        (kernels.put_block, "one value"),
    ],
)
def test_a_number_that_is_not_an_integer_is_refused_before_anything_moves(kernel: Any, expected: str) -> None:
    def body(comm: Communicator) -> None:
        (channel,) = comm.proxy_channels(uploaded(comm, np.zeros(4, np.int32)), peers=[0])
        arguments = (channel, 8)[: len(kernel.arg_names)]
        with pytest.raises(KernelError, match=f"kernel {kernel.__name__} raised AssertionError: expected {expected}$"):
            pt.compile(comm, kernel, grid=1)(*arguments)
        assert channel.counters.triggers == 0
        pt.compile(comm, kernels.laps, grid=1)(channel, 1, 0)  # succeeds, because the failed kernel took no ticket
        comm.synchronize()

    run_ranks(1, body)


@HOST_ONLY
def test_a_kernel_that_is_not_interpreted_says_what_to_set() -> None:
    program = """
import proxyccl, sys
assert "triton" not in sys.modules
from proxyccl import ArgumentError, Communicator, RuntimeUnavailableError, ThreadBootstrap
with Communicator(ThreadBootstrap.create(1)[0], "host") as comm:
    try:
        comm.triton(None, grid=1)
    except RuntimeUnavailableError as error:
        print(error)
    import triton
    import proxyccl.triton
    try:
        comm.triton(triton.jit(open), grid=1)
    except ArgumentError as error:
        print(error)
"""
    program = program.replace("triton.jit(open)", "proxyccl.triton.wait")
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=without_interpreter(),
    )
    first, second = done.stdout.splitlines()
    assert first == "triton: the program must import proxyccl.triton first"
    assert "set TRITON_INTERPRET=1 before triton is imported" in second
