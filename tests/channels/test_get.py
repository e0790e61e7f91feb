"""Gets on ProxyChannels, and tickets, by which kernels wait for the completion of puts and gets."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from proxyccl import (
    ArgumentError,
    Communicator,
    CommunicatorError,
    Operation,
    Trigger,
    TriggerError,
    WaitTimeoutError,
)
from proxyccl.device._native import lib
from proxyccl.device.host import HostRuntime
from proxyccl.proxy.trigger import WINDOW_BYTES
from support.cases.random_transfers import run_random_transfers
from support.ranks import Gate, Ranks
from support.running import impatient

pytestmark = [pytest.mark.daemon, pytest.mark.hip]

KERNELS = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
using Proxy = DeviceHandle<ProxyChannel>;

extern "C" __global__ void get(Proxy* channels, unsigned long dst, unsigned long src, unsigned long bytes, int* done) {
  *done = channels[0].waitComplete(channels[0].get(dst, src, bytes));
}
extern "C" __global__ void get_same(Proxy* channels, unsigned long offset, unsigned long bytes) {
  channels[0].get(offset, bytes);
  channels[0].flush();
}
extern "C" __global__ void get_elsewhere(Proxy* channels, unsigned own, unsigned theirs, unsigned long bytes) {
  channels[0].get(own, 1, theirs, 2, bytes);
  channels[0].flush();
}
// One rank writes numbers, the other gets each of them and lets it be overwritten.
extern "C" __global__ void hand_over(Proxy* channels, int rank, unsigned long turns, uint64_t* memory) {
  for (unsigned long turn = 1; turn <= turns; ++turn) {
    if (rank == 0) {
      storeRelaxedSystem<uint64_t>(memory, turn);
      channels[0].signal();
      if (!channels[0].wait()) return;
    } else {
      if (!channels[0].wait()) return;
      channels[0].get(8 * turn, 0, 8);
      channels[0].signal();
    }
  }
  channels[0].flush();
}
extern "C" __global__ void tickets(Proxy* channels, unsigned long bytes, unsigned long* tickets, int* seen) {
  tickets[0] = channels[0].put(0, 0, bytes);
  tickets[1] = channels[0].get(0, 0, bytes);
  seen[0] = channels[0].waitComplete(tickets[1]);
  seen[1] = channels[0].isComplete(tickets[0]);
  seen[2] = channels[0].isComplete(tickets[1] + 1);
  seen[3] = channels[0].isComplete(kNoTicket) || channels[0].waitComplete(kNoTicket);
}
extern "C" __global__ void later(Proxy* channels, unsigned long bytes, unsigned long* ticket) {
  for (int i = 0; i < 100; ++i) *ticket = channels[0].put(0, 0, bytes);
}
extern "C" __global__ void wait_for(Proxy* channels, unsigned long ticket, int* done) {
  *done = channels[0].waitComplete(ticket);
}
extern "C" __global__ void custom(ProxyChannelDeviceHandle channel, int* done) {
  *done = channel.waitComplete(channel.custom(1));
}
extern "C" __global__ void triggers(ProxyChannelDeviceHandle channel, unsigned long dst, unsigned long src,
                                    unsigned long bytes) {
  channel.get(dst, src, bytes);
  channel.flush();
}
"""
SIZE = 1 << 16


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as group:
        yield group


def bytes_of(rank: int, size: int = SIZE) -> Any:
    return np.random.default_rng(rank).integers(0, 256, size, np.uint8)


def run_on_all(comm: Communicator, kernel: str, *arguments: object) -> None:
    """Runs a kernel on all ranks, and waits until it ends or the communicator fails."""
    comm.compile(KERNELS, kernel)(1, 1, *arguments)
    comm.synchronize()
    comm.barrier()


@pytest.mark.parametrize(("dst", "src", "nbytes"), [(0, 0, SIZE), (5, 3, 4097), (SIZE - 1, 0, 1), (7, 7, 0)])
def test_a_get_brings_its_bytes_and_touches_no_others(ranks: Ranks, dst: int, src: int, nbytes: int) -> None:
    def body(comm: Communicator) -> None:
        own = comm.empty(SIZE, "uint8").fill(0xEE)
        theirs, done = comm.empty(SIZE, "uint8").upload(bytes_of(comm.rank)), comm.empty(1, "int32").fill(7)
        channels = comm.proxy_channels(theirs, own)
        comm.barrier()
        run_on_all(comm, "get", channels, dst, src, nbytes, done)
        expected = np.full(SIZE, 0xEE, np.uint8)
        expected[dst : dst + nbytes] = bytes_of(1 - comm.rank)[src : src + nbytes]
        np.testing.assert_array_equal(own.numpy(), expected)
        np.testing.assert_array_equal(theirs.numpy(), bytes_of(comm.rank))
        assert done.numpy()[0] == 1
        counters = channels[0].counters
        assert (counters.gets, counters.puts, counters.bytes) == (1, 0, nbytes)
        comm.barrier()

    ranks.run(body)


def test_one_offset_may_serve_for_both_memories(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        own, theirs = comm.empty(64, "uint8").fill(0xEE), comm.empty(64, "uint8").fill(comm.rank)
        channels = comm.proxy_channels(theirs, own)
        comm.barrier()
        run_on_all(comm, "get_same", channels, 9, 50)
        assert own.numpy().tolist() == [0xEE] * 9 + [1 - comm.rank] * 50 + [0xEE] * 5

    ranks.run(body)


def test_a_get_goes_between_other_memories(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        peer = 1 - comm.rank
        unused, own = comm.empty(64, "uint8").fill(0xDD), comm.empty(64, "uint8").fill(0xEE)
        theirs = comm.empty(64, "uint8").upload(bytes_of(comm.rank, 64))
        ids = comm.register(own).source_id(peer), comm.register(theirs).peer_id(peer)
        channels = comm.proxy_channels(unused, unused)
        comm.barrier()
        run_on_all(comm, "get_elsewhere", channels, *ids, 40)
        assert own.numpy().tolist() == [0xEE, *bytes_of(peer, 64)[2:42], *[0xEE] * 23]
        assert (unused.numpy() == 0xDD).all()

    ranks.run(body)


def test_a_rank_gets_from_itself(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        own, theirs = comm.empty(64, "uint8").fill(0), comm.empty(64, "uint8").fill(9)
        channels = comm.proxy_channels(theirs, own, peers=[comm.rank])
        run_on_all(comm, "get_same", channels, 3, 5)
        assert own.numpy().sum() == 5 * 9

    ranks.run(body)


@pytest.mark.host_only(reason="a numpy array is the host's device memory")
@pytest.mark.own_proxy(reason="a requested node daemon refuses such memory")
def test_memory_that_no_other_process_can_map_takes_what_is_got(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        own, theirs = np.zeros(64, np.uint8), comm.empty(64, "uint8").fill(comm.rank + 3)
        channels = comm.proxy_channels(theirs, own)
        comm.barrier()
        run_on_all(comm, "get_same", channels, 4, 60)
        assert own.tolist() == [0] * 4 + [4 - comm.rank] * 60

    ranks.run(body)


def test_a_signal_behind_a_get_gives_its_source_back(ranks: Ranks) -> None:
    turns = 300

    def body(comm: Communicator) -> None:
        memory = comm.empty(turns + 1, "uint64").fill(0)
        run_on_all(comm, "hand_over", comm.proxy_channels(memory), comm.rank, turns, memory)
        if comm.rank == 1:
            np.testing.assert_array_equal(memory.numpy()[1:], np.arange(1, turns + 1))

    ranks.run(body)


@pytest.mark.parametrize("seed", range(4))
def test_puts_values_gets_and_signals_keep_their_order(ranks: Ranks, seed: int) -> None:
    ranks.run(lambda comm: run_random_transfers(comm, seed))


@pytest.mark.host_only(reason="HostRuntime's option")
@pytest.mark.parametrize("seed", range(2))
def test_they_do_so_where_copies_have_threads_of_their_own(seed: int) -> None:
    with Ranks(2, make_runtime=lambda _: HostRuntime(async_copies=True)) as pair:
        pair.run(lambda comm: run_random_transfers(comm, 10 + seed))


@pytest.mark.parametrize(("dst", "src"), [(SIZE - 7, 0), (0, SIZE - 7), (1 << 33, 0), (0, 1 << 33)])
def test_a_get_that_leaves_a_memory_is_refused(dst: int, src: int) -> None:
    def body(comm: Communicator) -> None:
        memory, done = comm.empty(SIZE, "uint8"), comm.empty(1, "int32").fill(7)
        channels = comm.proxy_channels(memory, memory)
        with pytest.raises(TriggerError, match=r"was refused: get of 8 bytes at offset"):
            run_on_all(comm, "get", channels, dst, src, 8, done)

    with Ranks(2) as pair:
        pair.run(body)


@pytest.mark.host_only(reason="needs memory that is allocated on first touch")
def test_a_get_reaches_later_windows_of_memories() -> None:
    behind = 64 << 10

    def part(array: Any) -> Any:
        return np.ctypeslib.as_array((ctypes.c_uint8 * behind).from_address(array.ptr + WINDOW_BYTES))

    def body(comm: Communicator) -> None:
        theirs, own = (comm.empty(WINDOW_BYTES + behind, "uint8") for _ in range(2))
        done = comm.empty(1, "int32").fill(7)
        part(theirs)[:] = bytes_of(comm.rank, behind)
        channels = comm.proxy_channels(theirs, own)
        comm.barrier()
        run_on_all(comm, "get", channels, WINDOW_BYTES + 5, WINDOW_BYTES + 3, behind - 5, done)
        np.testing.assert_array_equal(part(own)[5:], bytes_of(1 - comm.rank, behind)[3 : behind - 2])
        assert not part(own)[:5].any()

    with Ranks(2) as pair:
        pair.run(body)


def test_a_get_of_more_than_a_trigger_can_say_becomes_several() -> None:
    with Ranks(1) as ranks:

        def body(comm: Communicator) -> None:
            seen: list[Trigger] = []
            channel = comm.handler_channel(seen.append)
            size, dst, src = (9 << 30) + 5, (5 << 30) + 3, (1 << 30) + 7
            comm.compile(KERNELS, "triggers")(1, 1, channel, dst, src, size)
            comm.synchronize()
            *gets, flush = seen
            assert flush.operation == Operation.FLUSH
            assert {trigger.operation for trigger in gets} == {Operation.DATA | Operation.GET}
            assert max(trigger.size for trigger in gets) == lib.PROXYCCL_MAX_TRIGGER_BYTES
            assert sum(trigger.size for trigger in gets) == size
            for trigger in gets:
                assert trigger.dst_memory << 32 | trigger.dst_offset == dst
                assert trigger.src_memory << 32 | trigger.src_offset == src
                dst += trigger.size
                src += trigger.size

        ranks.run(body)


# -- tickets ---


def test_tickets_tell_what_is_complete(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        memory, own = comm.empty(SIZE, "uint8"), comm.empty(SIZE, "uint8").upload(bytes_of(comm.rank))
        numbers, seen = comm.empty(2, "uint64").fill(0), comm.empty(4, "int32").fill(7)
        channels = comm.proxy_channels(memory, own)
        run_on_all(comm, "tickets", channels, SIZE, numbers, seen)
        assert seen.numpy().tolist() == [1, 1, 0, 0]
        first, second = numbers.numpy().tolist()
        assert (second, channels[0].completed) == (first + 1, second + 1)
        np.testing.assert_array_equal(own.numpy(), bytes_of(comm.rank))

    ranks.run(body)


def test_the_cpu_waits_for_a_ticket(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        memory, ticket = comm.empty(SIZE, "uint8"), comm.empty(1, "uint64").fill(0)
        channels = comm.proxy_channels(memory, memory)
        comm.compile(KERNELS, "later")(1, 1, channels, SIZE, ticket)
        comm.synchronize()
        last = int(ticket.numpy()[0])
        channels[0].wait_complete(last)
        assert channels[0].completed == last + 1
        comm.barrier()

    ranks.run(body)


@pytest.mark.parametrize("ticket", [-1, (1 << 64) - 1, 1.5, None])
def test_what_is_no_ticket_is_refused(ranks: Ranks, ticket: Any) -> None:
    def body(comm: Communicator) -> None:
        (channel,) = comm.proxy_channels(comm.empty(16, "uint8"))
        with pytest.raises(ArgumentError, match=r"^ticket: must be a number from 0 to"):
            channel.wait_complete(ticket)
        comm.barrier()

    ranks.run(body)


def test_a_handlers_trigger_is_complete_when_the_handler_has_returned() -> None:
    with Ranks(1) as ranks, Gate() as gate:

        def body(comm: Communicator) -> None:
            done = comm.empty(1, "int32").fill(7)
            channel = comm.handler_channel(lambda _: gate.wait())
            comm.compile(KERNELS, "custom")(1, 1, channel, done, stream=(stream := comm.runtime.create_stream()))
            gate.open()
            stream.synchronize()
            assert done.numpy()[0] == 1

        ranks.run(body)


@pytest.mark.parametrize("waiter", ["kernel", "CPU"])
def test_a_wait_for_a_ticket_that_is_not_pushed_ends_by_name(waiter: str) -> None:
    def body(comm: Communicator) -> None:
        done = comm.empty(1, "int32").fill(7)
        channels = comm.proxy_channels(comm.empty(16, "uint8"), peers=[0])
        impatient(comm, 1)
        if waiter == "CPU":
            with pytest.raises(
                WaitTimeoutError, match=r"on the CPU for its operations to rank 0 .* expected 1001, saw 0"
            ):
                channels[0].wait_complete(1000)
        else:
            with pytest.raises(WaitTimeoutError, match=r"for the completion of its operations .* expected 1001, saw 0"):
                run_on_all(comm, "wait_for", channels, 1000, done)
            with pytest.raises(CommunicatorError):
                channels[0].wait_complete(0)

    with Ranks(1) as one:
        one.run(body)
