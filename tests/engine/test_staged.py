"""The staged transports, which use pinned memory on both sides if the network device can't register other memory. The
tests use two proxies in this process, over fake devices that copy memory and check every limit
(support/fakes/staging.py).
"""

from __future__ import annotations

import ctypes
import errno
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxyccl import ArgumentError, Operation, ResourceError, Runtime, Trigger
from proxyccl.device._native import lib as native
from proxyccl.device.host import HostRuntime
from proxyccl.proxy._engine import ffi, lib
from proxyccl.proxy.observe import publications
from proxyccl.proxy.observe.publications import Description
from proxyccl.proxy.observe.reader import Observer
from proxyccl.proxy.registrations import RemoteWriteTargets
from proxyccl.proxy.remote_options import MOST_WIRES
from proxyccl.proxy.schedule import Schedule, SchedulePost, ScheduleReceive, ScheduleSend
from proxyccl.proxy.transports.table import find_transport
from support.devices import rank_runtime
from support.fakes.staging import COPY, EVENT_QUERY, End, Ends, LateStreams, seen_as
from support.fakes.verbs import bytes_of_value
from support.fakes.wires import AddingVerbsWire, FabricWire, FakeWire, JoinedFabricWire, UnorderedFabricWire, VerbsWire
from support.ranks import Gate
from support.running import TIMEOUT

PUT, SIGNAL, FLUSH = Operation.DATA, Operation.SIGNAL, Operation.FLUSH
GET = Operation.DATA | Operation.GET
HEADER = 64
OUTSIDE = "the peer put or got data outside the memory that this rank offers"
REM_ACCESS_ERR = 10
ARRIVED, CREDITED = 0, int(lib.PROXYCCL_STAGED_WIRES) * 128 // 8  # indices of 64-bit words in a peer's `area`
RECEIVING = int(lib.PROXYCCL_STAGED_WORDS_BYTES)  # bytes of a peer's `area` before the rings

MakeWire = Callable[[int, int], FakeWire]
built = pytest.mark.skipif(
    not lib.proxyccl_fabric_built(), reason="this build has no fabric transport: libfabric's headers were not there"
)
WIRES = [
    pytest.param(VerbsWire, id="write"),
    pytest.param(AddingVerbsWire, id="fetch-add"),
    pytest.param(FabricWire, id="fabric", marks=built),
    pytest.param(JoinedFabricWire, id="joined fabric", marks=built),
    pytest.param(UnorderedFabricWire, id="unordered fabric", marks=built),
]

pytestmark = [
    pytest.mark.hip,
    pytest.mark.own_proxy(reason="its own services"),
    pytest.mark.skipif(
        not lib.proxyccl_verbs_built(), reason="this build has no verbs transport: libibverbs' headers were not there"
    ),
]


class Stuck:
    """Blocks the worker at one end of a connection in a handler, so that this end does no other work."""

    def __init__(self, end: End) -> None:
        self._gate = Gate()
        self._entered = threading.Event()
        self._end = end

    def _handle(self, _: Trigger) -> None:
        self._entered.set()
        self._gate.wait()

    def __enter__(self) -> Stuck:
        handler = self._end.service.add_handler(self._handle)
        self._end.producer.push(Trigger(Operation.CUSTOM, handler))
        assert self._entered.wait(60)
        return self

    def __exit__(self, *exception: object) -> None:
        self._gate.open()


# -- data ---


@pytest.mark.parametrize("wire", WIRES)
def test_schedules_of_two_ends_exchange_their_memories(wire: MakeWire) -> None:
    size, rounds = 10_007, 20
    with Ends(size, channels=2, wire=wire) as ends:
        first, second = ends
        numbers = []
        for end, other in ((first, second), (second, first)):
            posts, sends = end.channels
            schedule = Schedule(
                posts=(SchedulePost(posts, other.destination_id, 0),),
                sends=(ScheduleSend(sends, end.source_id, 1, size - 1, post_channel=posts, dst_offset=1),),
                receives=(ScheduleReceive(sends),),
            )
            numbers.append(end.service.add_schedule(schedule))
        for _ in range(rounds):
            first.destination.fill(0)
            second.destination.fill(0)
            words = [end.service.words.schedule_words for end in ends]
            for schedule_words, number in zip(words, numbers, strict=True):
                schedule_words.done = 0
                schedule_words.bell = number
            ends.wait(lambda words=words: all(each.done == 1 for each in words), "both schedules")
            for end, other in ((first, second), (second, first)):
                assert end.destination.numpy()[0] == 0
                assert (end.destination.numpy()[1:] == other.source.numpy()[1:]).all()


@pytest.mark.parametrize("wire", [WIRES[0], WIRES[-1]])
@pytest.mark.parametrize(("ring_bytes", "chunk_bytes"), [(128, 64), (4096, 1000), (4096, 2048), (1 << 20, 1 << 18)])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000, 4097, 50_001])
def test_a_put_of_any_length_arrives_whole(size: int, ring_bytes: int, chunk_bytes: int, wire: MakeWire) -> None:
    with Ends(size + 9, ring_bytes=ring_bytes, chunk_bytes=chunk_bytes, wire=wire) as ends:
        here, there = ends
        here.push(PUT, size, source=3, destination=4)
        ends.flush(here)
        arrived = there.destination.numpy()
        assert (arrived[4 : 4 + size] == here.source.numpy()[3 : 3 + size]).all()
        assert not arrived[:4].any()
        assert not arrived[4 + size :].any()


@pytest.mark.parametrize("wire", [WIRES[0], WIRES[-1]])
@pytest.mark.parametrize(("ring_bytes", "chunk_bytes"), [(128, 64), (4096, 1000), (1 << 20, 1 << 18)])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 4097, 50_001])
def test_a_get_of_any_length_brings_it_whole(size: int, ring_bytes: int, chunk_bytes: int, wire: MakeWire) -> None:
    with Ends(size + 9, ring_bytes=ring_bytes, chunk_bytes=chunk_bytes, wire=wire) as ends:
        here, there = ends
        theirs, own = there.source.numpy(), np.zeros(size + 9, np.uint8)
        there.destination.upload(theirs)
        here.source.upload(own)
        here.push(GET, size, source=3, destination=4)
        ends.flush(here)
        own[4 : 4 + size] = theirs[3 : 3 + size]
        assert (here.source.numpy() == own).all()
        counters = here.service.counters(here.channels[0])
        assert (counters.gets, counters.puts, counters.bytes) == (1, 0, size)


@pytest.mark.parametrize("ring_bytes", [128, 1 << 16])
def test_two_ends_get_from_each_other_more_often_than_they_may_ask(ring_bytes: int) -> None:
    count, size = 4 * int(lib.PROXYCCL_STAGED_GETS), 50
    with Ends(count * size, ring_bytes=ring_bytes, chunk_bytes=64, service={"fifo_size": 2048}) as ends:
        for number, end in enumerate(ends):
            end.device.dawdle(3, number)
            end.destination.upload(end.source.numpy())
        wanted = [other.source.numpy() for other in reversed(ends.ends)]
        for i in range(count):
            for end in ends:
                end.push(GET, size, source=i * size, destination=i * size)
        for end in ends:
            ends.flush(end)
        for end, theirs in zip(ends, wanted, strict=True):
            assert (end.source.numpy() == theirs).all()


@pytest.mark.host_only("copies are replaced by the CPU's")
@pytest.mark.parametrize("seed", range(3))
def test_puts_and_gets_pass_data_on_whatever_stream_is_first(seed: int) -> None:
    streams, count, size = [LateStreams(2 * seed), LateStreams(2 * seed + 1)], 60, 40
    with Ends(
        2 * count * size,
        ring_bytes=1024,
        chunk_bytes=64,
        first={"calls": streams[0].calls},
        second={"calls": streams[1].calls},
    ) as ends:
        here, there = ends
        own = here.source.numpy()
        for i in range(count):
            here.push(PUT, size, source=i * size, destination=i * size)
            here.push(GET, size, source=i * size, destination=(count + i) * size)
            here.push(PUT, size, source=(count + i) * size, destination=(count + i) * size)
        ends.flush(here)
        own[count * size :] = own[: count * size]
        assert (here.source.numpy() == own).all()
        assert (there.destination.numpy() == own).all()


def test_what_follows_a_get_waits_for_its_data() -> None:
    with Ends() as ends:
        here, there = ends
        with Stuck(there):
            ticket = here.push(GET, 8)
            here.push(PUT | SIGNAL | FLUSH, 8)
            ends.wait(lambda: here.device.counts.executed == 2, "the request")
            assert not here.service.drain(0.05)
            assert here.device.counts.requests == 2  # one write for the get's message, one for the count of messages
            assert here.service.completed(here.channels[0]) == 0
        ends.wait(lambda: here.service.completed(here.channels[0]) > ticket + 1, "all of it")
        assert there.words[0] == 1


def test_draining_waits_for_an_answer_that_the_peer_has_not_sent() -> None:
    with Ends() as ends:
        here, there = ends
        there.device.allow(1)  # the peer can return the request's credit, but can't send the answer
        here.push(GET, 4000)
        ends.wait(lambda: there.device.counts.executed == 1, "the credit")
        assert not here.service.drain(0.05)
        assert not there.service.drain(0.05)
        there.device.allow(-1)
        assert here.service.drain(60)
        assert there.service.drain(60)


def test_a_put_of_25_megabytes_through_a_ring_of_two() -> None:
    size = 25_000_003
    with Ends(size, ring_bytes=2 << 20, chunk_bytes=256 << 10, max_message=1 << 20) as ends:
        here, there = ends
        here.push(PUT, size)
        ends.flush(here)
        assert (there.destination.numpy() == here.source.numpy()).all()


def test_a_small_rest_of_the_ring_is_filled_and_not_used_for_a_short_piece() -> None:
    """Four messages leave 256 bytes at the ring's end. The next put skips these bytes and starts at offset 0."""
    size, puts, per_lap = 16_256, 20, 4
    with Ends(puts * size, ring_bytes=1 << 16, chunk_bytes=size) as ends:
        here, there = ends
        for i in range(puts):
            here.push(PUT | SIGNAL, size, source=i * size, destination=i * size)
        ends.wait(lambda: there.words[0] == puts, "the signals")
        assert (there.destination.numpy() == here.source.numpy()).all()
        assert int(seen_as(there.area, np.uint64)[ARRIVED]) == puts + puts // per_lap - 1


def test_a_put_is_cut_into_parts_of_one_length() -> None:
    longest, size = 1 << 17, 150_000  # the put is cut into two equal parts, not into `longest` bytes and a short rest
    with Ends(size, ring_bytes=1 << 20, chunk_bytes=longest) as ends:
        here, there = ends
        here.push(PUT | SIGNAL, size)
        ends.wait(lambda: there.words[0] == 1, "the signal")
        assert (there.destination.numpy() == here.source.numpy()).all()
        first = seen_as(there.area, np.uint64)[(RECEIVING + (1 << 20)) // 8 + 2]
        assert size // 2 <= first < size // 2 + HEADER


def test_a_put_of_nothing_makes_no_message() -> None:
    with Ends() as ends:
        here, _ = ends
        here.push(PUT)
        ends.flush(here)
        assert here.device.counts.requests == 0


@pytest.fixture(params=["inline copies", pytest.param("copy threads", marks=pytest.mark.host_only("its threads"))])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    """Returns the host runtime, with synchronous or asynchronous copies."""
    return rank_runtime(0) if request.param == "inline copies" else HostRuntime(async_copies=True)


RANDOM_WIRES = [(seed, WIRES[seed % len(WIRES)]) for seed in range(8)]


@pytest.mark.parametrize(
    ("seed", "wire"),
    [
        pytest.param(seed, *wire.values, marks=(*wire.marks, *([pytest.mark.full] if seed >= len(WIRES) else [])))
        for seed, wire in RANDOM_WIRES  # the first seeds cover each kind of wire once
    ],
)
def test_everything_happens_as_if_one_after_another(seed: int, wire: MakeWire, runtime: Runtime) -> None:
    """Pushes random triggers on three channels in both directions concurrently, with overlapping puts and gets, over
    devices that execute requests late.
    """
    rng = random.Random(seed)
    ring_bytes = rng.choice([128, 192, 1024, 65536])
    chunk_bytes, max_message = rng.choice([1, 50, 64, 500, 4096]), rng.choice([7, 64, 4096])
    longest = min(300, 20 * min(chunk_bytes, max_message))  # at most tens of messages per put, to save time
    with Ends(
        1 << 12,
        channels=3,
        ring_bytes=ring_bytes,
        chunk_bytes=chunk_bytes,
        depth=rng.choice([1, 2, 5, 64]),
        max_message=max_message,
        wire=wire,
        wires=rng.choice([1, 1, 2, 3, MOST_WIRES]),
        credits_tell=rng.randrange(2) == 1,
        service={"fifo_size": rng.choice([2, 64, 1024])},
        runtime=runtime,
    ) as ends:
        expected = [end.destination.numpy() for end in ends]
        sources = [end.source.numpy() for end in ends]
        signals = [[0, 0, 0], [0, 0, 0]]
        for number, end in enumerate(ends):
            for device in end.devices:
                device.dawdle(rng.choice([1, 3, 40]), seed + number)
        for _ in range(600):
            number, operation, channel = rng.randrange(2), Operation(rng.randint(1, 7)), rng.randrange(3)
            size = rng.randint(0, longest) if operation & PUT else 0
            start, end = rng.randrange(4096 - longest), rng.randrange(4096 - longest)
            where: dict[str, int] = {"source": start, "destination": end}
            own, theirs = sources[number], expected[1 - number]
            if operation & PUT and rng.randrange(4) == 0:
                value, size = rng.getrandbits(64), rng.choice([1, 2, 4, 8])
                theirs[end : end + size] = bytes_of_value(value, size)
                where["value"] = value
            elif operation & PUT and rng.randrange(3) == 0:
                operation |= GET
                own[start : start + size] = theirs[end : end + size]
                where = {"source": end, "destination": start}
            else:
                theirs[end : end + size] = own[start : start + size]
            signals[1 - number][channel] += bool(operation & SIGNAL)
            ends.ends[number].push(operation, size, channel=channel, **where)
        for end in ends:
            for channel in range(3):
                ends.flush(end, channel)
        for number, end in enumerate(ends):
            assert (end.destination.numpy() == expected[number]).all()
            assert (end.source.numpy() == sources[number]).all()
            assert end.words[:3].tolist() == signals[number]
            assert all(device.breach is None for device in end.devices)


# -- pinned memory ---


def test_cpus_copy_short_data_between_pinned_memories() -> None:
    size, refused = 1000, 1
    no_copies = COPY(lambda *_: refused)
    address = ctypes.cast(no_copies, ctypes.c_void_p).value
    with Ends(ring_bytes=1 << 16, calls={"copy": address}) as ends:
        here, there = ends
        source, target = here.runtime.allocate_pinned(size), there.runtime.allocate_pinned(size)
        seen_as(source, np.uint8)[:] = np.arange(size) % 251
        key = there.write_targets.add(target.ptr, size, target.host_ptr)
        here.source_id = here.service.add_pinned_memory(source)
        here.destination_id = here.service.add_remote_memory(target.ptr, size, [key])
        ticket = here.push(PUT | SIGNAL | FLUSH, size - 200, source=100, destination=7)
        ends.wait(lambda: here.flushed() > ticket, "the flush")
        assert there.words[0] == 1
        assert (seen_as(target, np.uint8)[7 : size - 193] == seen_as(source, np.uint8)[100 : size - 100]).all()


# -- several wires ---


@pytest.mark.parametrize("wire", WIRES)
def test_long_messages_take_turns_on_wires_and_none_is_taken_before_another(wire: MakeWire) -> None:
    turns, size, wires = 100, 300, 3
    with Ends(turns * size, ring_bytes=1 << 16, chunk_bytes=size // wires, wire=wire, wires=wires) as ends:
        here, there = ends
        for number, device in enumerate(here.devices):
            device.dawdle(1 + 20 * number, number)
        for i in range(turns):
            here.push(PUT | SIGNAL, size, source=i * size, destination=i * size)
        source, seen = here.source.numpy(), 0
        while seen < turns:
            before = seen
            ends.wait(lambda: there.words[0] > before, "a signal")  # noqa: B023
            seen = int(there.words[0])
            assert (there.destination.numpy()[: seen * size] == source[: seen * size]).all()
        requests = [device.counts.requests for device in here.devices]
        assert min(requests) >= turns // wires, requests


def test_short_messages_follow_one_another_on_one_wire_and_a_long_put_begins_there() -> None:
    with Ends(ring_bytes=1 << 16, chunk_bytes=100, wires=2) as ends:
        here, there = ends

        def arrived() -> list[int]:
            return [int(seen_as(there.area, np.uint64)[ARRIVED + 128 // 8 * number]) for number in range(2)]

        here.push(SIGNAL, count=3)
        ends.wait(lambda: there.words[0] == 3, "the signals")
        before = arrived()
        assert before[0] > 0 == before[1]
        here.push(PUT | SIGNAL, 200)  # two long messages
        ends.wait(lambda: there.words[0] == 4, "the put")
        assert arrived() == [before[0] + 1, 1]
        here.push(SIGNAL)
        ends.wait(lambda: there.words[0] == 5, "the signal after it")
        assert arrived() == [before[0] + 2, 1]


def test_a_long_put_after_a_rest_alerts_the_threads_of_wires_first() -> None:
    size = 1 << 17
    with Ends(size, ring_bytes=1 << 20, chunk_bytes=size, wires=2) as ends:
        here, there = ends

        def arrived(number: int) -> int:
            return int(seen_as(there.area, np.uint64)[ARRIVED + 128 // 8 * number])

        here.push(PUT | SIGNAL, size)
        ends.wait(lambda: there.words[0] == 1, "the put")
        assert (arrived(0), arrived(1)) == (2, 1)
        assert (there.destination.numpy() == here.source.numpy()).all()
        time.sleep(0.001)  # idle time
        here.push(PUT | SIGNAL, size)
        ends.wait(lambda: there.words[0] == 2, "the second put")
        assert (arrived(0), arrived(1)) == (4, 2)


def test_several_wires_have_a_thread_each_until_their_service_ends() -> None:
    def threads() -> int:
        return sum("-wire-" in thread.name for thread in threading.enumerate())

    with Ends(wires=1):
        assert threads() == 0
    with Ends(wires=3):
        assert threads() == 2 * 3
    assert threads() == 0


@built
def test_a_thread_serves_a_wire_while_the_worker_is_busy() -> None:
    """A fabric endpoint must be polled even if this process has no requests, because libfabric executes the peer's
    writes only during polls.
    """
    with Ends(ring_bytes=1 << 16, chunk_bytes=100, wires=2, wire=FabricWire) as ends:
        here, there = ends
        with Stuck(there):
            here.push(PUT | SIGNAL, 200)
            counts = [ARRIVED + 128 // 8 * number for number in range(2)]
            ends.wait(lambda: all(seen_as(there.area, np.uint64)[count] == 1 for count in counts), "two messages")
            ends.let_poll(there)
        ends.wait(lambda: there.words[0] == 1, "the signal")


def test_nobody_waits_while_a_wires_thread_is_at_the_same_endpoint_for_another_peer() -> None:
    with Ends(ring_bytes=1 << 16, chunk_bytes=100, wires=2) as ends:
        here, there = ends
        workers, threads = here.service._workers, here.service._wires
        assert threads is not None
        with workers.paused(TIMEOUT), threads._workers.paused(TIMEOUT):  # between their turns
            threads._shared[1].turn = 1
        here.push(PUT | SIGNAL, 300)  # wire 0 sends the first and third pieces, wire 1 the second
        ends.wait(lambda: int(seen_as(there.area, np.uint64)[ARRIVED]) == 2, "the messages of the other wire")
        assert int(seen_as(there.area, np.uint64)[ARRIVED + 128 // 8]) == 0
        assert there.words[0] == 0
        threads._shared[1].turn = 0
        ends.wait(lambda: there.words[0] == 1, "the signal")
        assert (there.destination.numpy()[:300] == here.source.numpy()[:300]).all()


def test_a_wire_that_stands_still_holds_up_later_messages_alone() -> None:
    with Ends(ring_bytes=1 << 16, chunk_bytes=100, wires=2) as ends:
        here, there = ends
        here.devices[1].allow(0)
        here.push(PUT | SIGNAL, 100)
        ends.wait(lambda: there.words[0] == 1, "the first message")
        ticket = here.push(
            PUT | SIGNAL | FLUSH, 300, source=100, destination=100
        )  # wire 0 sends the first and third pieces, wire 1 the second
        ends.wait(lambda: int(seen_as(there.area, np.uint64)[ARRIVED]) == 3, "the last message")
        assert there.words[0] == 1
        assert here.flushed() <= ticket
        here.devices[1].allow(10)
        ends.wait(lambda: here.flushed() > ticket, "the flush")
        assert there.words[0] == 2
        assert (there.destination.numpy()[:400] == here.source.numpy()[:400]).all()


@pytest.mark.parametrize("number", [0, 2])
def test_a_wire_that_fails_ends_the_connection(number: int) -> None:
    with Ends(ring_bytes=1 << 16, chunk_bytes=100, wires=3) as ends:
        here, _ = ends
        here.devices[number].fail_request(1, REM_ACCESS_ERR)
        here.push(PUT, 300)
        failure = here.fails()
        assert failure.peer == 8
        assert find_transport("staged").status_text(failure.status) in failure.reason


# -- signals ---


@pytest.mark.parametrize("ring_bytes", [256, 1 << 16])
def test_a_signal_arrives_behind_its_data(ring_bytes: int, runtime: Runtime) -> None:
    turns, size = 300, 100
    with Ends(turns * size, ring_bytes=ring_bytes, chunk_bytes=64, runtime=runtime) as ends:
        here, there = ends
        there.device.dawdle(3, 1)
        here.device.dawdle(3, 2)
        pushing = threading.Thread(
            target=lambda: [here.push(PUT | SIGNAL, size, source=i * size, destination=i * size) for i in range(turns)]
        )
        pushing.start()
        source, seen = here.source.numpy(), 0
        while seen < turns:
            before = seen
            ends.wait(lambda: there.words[0] > before, "a signal")  # noqa: B023
            seen = int(there.words[0])
            assert (there.destination.numpy()[: seen * size] == source[: seen * size]).all()
        pushing.join(60)
        assert there.words[0] == turns


def test_a_signal_rides_on_the_data_before_it() -> None:
    with Ends(ring_bytes=1 << 16) as ends:
        here, there = ends
        here.push(PUT | SIGNAL | FLUSH, 100)
        ends.wait(lambda: here.flushed() == 1, "the flush")
        assert there.words[0] == 1
        assert here.device.counts.requests == 2  # one write for the message, one for the count of messages
        assert there.device.counts.requests == 1  # a write of the credit
        signal_and_flush(ends, here)
        assert there.words[0] == 2
        assert here.device.counts.requests == 4


# -- flushes, credits and back-pressure ---


def test_a_flush_is_over_when_the_peer_has_its_data_however_the_wire_tells() -> None:
    with Ends(ring_bytes=1 << 16, credits_tell=True) as ends:
        here, there = ends
        with Stuck(there):
            ticket = here.push(PUT | SIGNAL | FLUSH, 100)
            ends.wait(lambda: seen_as(there.area, np.uint64)[ARRIVED] == 1, "the message")
            assert here.flushed() <= ticket
        ends.wait(lambda: here.flushed() > ticket, "the flush")
        assert there.words[0] == 1


def test_credits_that_nobody_awaits_are_returned_together() -> None:
    count = 50
    with Ends(ring_bytes=1 << 16) as ends:
        here, there = ends
        with Stuck(there):
            here.push(SIGNAL, count=count)
            ends.wait(lambda: seen_as(there.area, np.uint64)[ARRIVED] == count, "the messages")
        ends.wait(lambda: seen_as(here.area, np.uint64)[CREDITED] == count, "the credits")
        assert there.device.counts.requests == 1


def test_a_schedule_is_over_when_its_sources_are_staged() -> None:
    with Ends(ring_bytes=1 << 16) as ends:
        here, there = ends
        send = ScheduleSend(here.channels[0], here.source_id, 0, 1000, dst_memory=here.destination_id)
        number = here.service.add_schedule(Schedule(sends=(send,)))
        words = here.service.words.schedule_words
        with Stuck(there):
            words.done = 0
            words.bell = number
            ends.wait(lambda: words.done == 1, "the schedule")
            here.source.fill(0)
            assert there.words[0] == 0
        ends.wait(lambda: there.words[0] == 1, "the signal")
        assert there.destination.numpy()[:1000].any()


def test_a_flush_with_nothing_outstanding_is_over_at_once() -> None:
    with Ends() as ends:
        here, there = ends
        here.device.allow(0)
        there.device.allow(0)
        ends.flush(here)
        assert here.flushed() == 1


def test_a_flush_waits_until_the_data_is_at_its_destination() -> None:
    with Ends() as ends:
        here, there = ends
        with Stuck(there):
            ticket = here.push(PUT | FLUSH, 100)
            ends.wait(lambda: seen_as(there.area, np.uint64)[ARRIVED] == 1, "the message")
            here.push(PUT, 100)
            ends.wait(lambda: here.device.counts.executed == 4, "another message")
            assert here.flushed() == 0
            assert not there.destination.numpy().any()
        ends.wait(lambda: here.flushed() == ticket + 1, "the flush")
        assert (there.destination.numpy()[:100] == here.source.numpy()[:100]).all()


def test_a_put_is_seen_complete_when_the_peer_has_placed_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with Ends(service={"description": Description(0, 2, "job", "program")}) as ends:
        here, there = ends
        views = [Observer(publication) for _, publication in publications.find("job")]
        assert len(views) == 2

        def progress() -> list[tuple[int, int]]:
            """Returns the sender's completed and outstanding operations; the receiver has none."""
            found = ((way.completed, way.outstanding) for view in views for way in view.snapshot().connections)
            return [each for each in found if each != (0, 0)]

        with Stuck(there):
            here.push(PUT, 100)
            ends.wait(lambda: seen_as(there.area, np.uint64)[ARRIVED] == 1, "the message")
            ends.wait(lambda: progress() == [(0, 1)], "it is seen to be outstanding")
        ends.wait(lambda: progress() == [(1, 0)], "it is seen to be complete")
        assert (there.destination.numpy()[:100] == here.source.numpy()[:100]).all()
        for view in views:
            view.close()


def test_flushes_wait_each_for_the_credits_before_it() -> None:
    with Ends(channels=2) as ends:
        here, there = ends
        there.device.allow(0)
        for channel in (0, 1, 0):
            here.push(PUT | FLUSH, 8, channel=channel)
            ends.let_poll(there)
        assert (there.destination.numpy()[:8] == here.source.numpy()[:8]).all()
        assert (here.flushed(0), here.flushed(1)) == (0, 0)
        there.device.allow(-1)
        ends.wait(lambda: (here.flushed(0), here.flushed(1)) == (3, 2), "the flushes")


def test_an_end_that_stalls_holds_back_its_ring_alone() -> None:
    puts, size = 3000, 40
    with Ends(ring_bytes=1024, service={"fifo_size": 64}) as ends:
        here, there = ends
        with Stuck(there):
            flood = threading.Thread(target=here.push, args=(PUT | SIGNAL, size), kwargs={"count": puts})
            flood.start()
            # The ring holds 8 messages of 128 bytes. At most 256 more operations, up to 3 per trigger, may wait.
            most = 1024 // 128 + (256 - 2) // 2
            ends.wait(lambda: here.taken() >= most, "a full connection")
            assert here.device.counts.executed <= 2 * 1024 // 128
            assert here.taken() == most
            assert flood.is_alive()
        flood.join(60)
        assert not flood.is_alive()
        ends.flush(here)
        assert there.words[0] == puts


def test_more_messages_than_may_be_under_way_wait() -> None:
    messages = int(lib.PROXYCCL_STAGED_MESSAGES)
    with Ends(ring_bytes=1 << 20, service={"fifo_size": 1024}) as ends:
        here, there = ends
        with Stuck(there):
            here.push(SIGNAL, count=700)
            ends.wait(lambda: here.taken() >= messages, "the first signals")
            ends.wait(lambda: seen_as(there.area, np.uint64)[ARRIVED] > 0, "a message")
        ends.flush(here)
        assert there.words[0] == 700


def test_both_ends_flood_each_other_through_the_smallest_rings() -> None:
    puts = 500
    with Ends(ring_bytes=128, chunk_bytes=64, depth=2) as ends:
        floods = [threading.Thread(target=end.push, args=(PUT | SIGNAL, 200), kwargs={"count": puts}) for end in ends]
        for flood in floods:
            flood.start()
        for flood in floods:
            flood.join(60)
        for end in ends:
            ends.flush(end)
        assert [int(end.words[0]) for end in ends] == [puts, puts]


def test_one_worker_may_serve_both_directions_to_several_peers() -> None:
    with Ends(channels=4, service={"fifos": 4}) as ends:
        for end in ends:
            for channel in range(4):
                end.push(PUT | SIGNAL, 1500, channel=channel, count=20)
        for end in ends:
            for channel in range(4):
                ends.flush(end, channel)
        assert all((end.words[:4] == 20).all() for end in ends)


# -- invalid messages of a peer ---


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *((change, OUTSIDE) for change in ("target", "number", "before", "behind", "removed")),
        ("word", "the peer signalled an address that is not a semaphore word of this rank"),
        ("odd word", "the peer signalled an address that is not a semaphore word of this rank"),
    ],
)
def test_what_was_not_offered_is_refused_where_it_arrives(change: str, reason: str) -> None:
    with Ends(256) as ends:
        here, there = ends
        base, nbytes, key = there.destination.ptr, there.destination.nbytes, there.key
        if change == "removed":
            there.write_targets.remove(key)
        wrong = {
            "target": (base, nbytes, [key + 1]),
            "number": (base, nbytes, [1 << 40]),
            "before": (base - 8, nbytes, [key]),
            "behind": (base + 64, nbytes, [key]),
        }.get(change, (base, nbytes, [key]))
        here.destination_id = here.service.add_memory(*wrong)
        if "word" in change:
            word = there.word_memory.host_ptr + (4 if change == "odd word" else there.words.nbytes)
            here.service.set_channel(here.channels[0], here.connection, word)
        here.push(PUT | SIGNAL | FLUSH, 200)
        failure = there.fails()
        assert failure.code == native.PROXYCCL_ERROR_TRANSPORT
        assert failure.peer == here.rank
        assert failure.reason == f"completion: refused: {reason}"
        assert not there.destination.numpy().any()
        assert not there.words.any()
        assert here.flushed() == 0


@pytest.mark.parametrize("change", ["target", "before", "behind", "removed"])
def test_what_was_not_offered_can_not_be_got(change: str) -> None:
    with Ends(256) as ends:
        here, there = ends
        before, base, nbytes, key = here.source.numpy(), there.destination.ptr, there.destination.nbytes, there.key
        if change == "removed":
            there.write_targets.remove(key)
        wrong = {
            "target": (base, nbytes, [key + 1]),
            "before": (base - 8, nbytes, [key]),
            "behind": (base + 64, nbytes, [key]),
        }.get(change, (base, nbytes, [key]))
        here.destination_id = here.service.add_memory(*wrong)
        here.push(GET | FLUSH, 200)
        assert there.fails().reason == f"completion: refused: {OUTSIDE}"
        assert (here.source.numpy() == before).all()
        assert here.flushed() == 0


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"bytes": 8, "answers": 1}, "the peer sends more data than was requested"),
        ({"bytes": 8, "asked": 8}, "the peer asks for more gets than may be outstanding, or sends data with one"),
    ],
)
def test_messages_of_gets_that_can_not_be_are_refused(header: dict[str, int], reason: str) -> None:
    fields = ("address", "target", "bytes", "word", "value", "asked", "answers")
    with Ends(ring_bytes=4096) as ends:
        _, there = ends
        area = seen_as(there.area, np.uint64)
        for name, value in header.items():
            area[(RECEIVING + 4096) // 8 + fields.index(name)] = value
        area[ARRIVED] = 1
        assert there.fails().reason == f"completion: refused: {reason}"


def test_more_requests_than_may_be_outstanding_are_refused() -> None:
    most = int(lib.PROXYCCL_STAGED_GETS)
    with Ends(ring_bytes=1 << 16) as ends:
        _, there = ends
        there.device.allow(0)  # the device executes nothing, so the answers to the gets fill the ring
        area = seen_as(there.area, np.uint64)
        size = there.destination.nbytes
        for i in range(most + 20):
            message = area[(RECEIVING + (1 << 16) + HEADER * i) // 8 :]
            message[0], message[1], message[5] = there.destination.ptr, there.key, size
        area[ARRIVED] = most + 20
        assert "asks for more gets than may be outstanding" in there.fails().reason


@pytest.mark.parametrize(
    ("arrived", "nbytes", "reason"),
    [
        (1, 4096 - HEADER + 1, "a message of the peer does not fit the ring"),
        (1, (1 << 64) - 1, "a message of the peer does not fit the ring"),
        (1000, 0, "the peer's count of messages is out of range"),
        ((1 << 64) - 1, 0, "the peer's count of messages is out of range"),
    ],
)
def test_a_damaged_ring_is_refused(arrived: int, nbytes: int, reason: str) -> None:
    with Ends(ring_bytes=4096) as ends:
        _, there = ends
        area = seen_as(there.area, np.uint64)
        area[(RECEIVING + 4096) // 8 + 2] = nbytes  # sets the size field in the first message's header
        area[ARRIVED] = arrived
        assert there.fails().reason == f"completion: refused: {reason}"


def signal_and_flush(ends: Ends, end: End) -> None:
    ticket = end.push(SIGNAL | FLUSH)
    ends.wait(lambda: end.flushed(0) > ticket, "a flush")


def test_a_count_that_is_half_written_is_read_again() -> None:
    """A stream socket may deliver the low bytes of a count first: when 255 becomes 256, the reader may first see 0."""
    with Ends(ring_bytes=1 << 16) as ends:
        here, there = ends
        here.push(SIGNAL, count=254)
        signal_and_flush(ends, here)
        counts = (seen_as(there.area, np.uint64)[ARRIVED:], seen_as(here.area, np.uint64)[CREDITED:])
        for count in counts:
            count[0] = 0
        for end in (there, here):  # traffic makes both proxies read the counts
            signal_and_flush(ends, end)
        assert [int(count[0]) for count in counts] == [256, 256]
        assert (there.words[0], here.words[0]) == (256, 1)


def test_credits_that_were_not_earned_are_refused() -> None:
    with Ends() as ends:
        here, _ = ends
        seen_as(here.area, np.uint64)[CREDITED] = 1
        assert here.fails().reason == "completion: refused: the peer's count of messages is out of range"


# -- failures ---


@pytest.mark.parametrize("number", [1, 2, 9])
def test_a_request_that_fails_names_the_peer_and_the_status(number: int) -> None:
    with Ends() as ends:
        here, there = ends
        here.device.fail_request(number, REM_ACCESS_ERR)
        here.push(PUT | SIGNAL | FLUSH, 8, count=30)
        failure = here.fails()
        assert failure.peer == there.rank
        assert failure.status == lib.PROXYCCL_VERBS_COMPLETION + REM_ACCESS_ERR
        assert failure.reason.startswith("completion: IBV_WC_REM_ACCESS_ERR, ")
        assert here.flushed() <= number


def test_a_credit_that_fails_ends_the_end_that_gives_it() -> None:
    with Ends() as ends:
        here, there = ends
        there.device.fail_request(1, REM_ACCESS_ERR)
        here.push(PUT | FLUSH, 8)
        failure = there.fails()
        assert failure.peer == here.rank
        assert "IBV_WC_REM_ACCESS_ERR" in failure.reason
        assert here.flushed() == 0


def test_a_post_that_is_refused_is_a_failure() -> None:
    with Ends() as ends:
        here, _ = ends
        here.device.fail_post(1, errno.ENOMEM)
        here.push(PUT, 8)
        assert here.fails().reason == "completion: Cannot allocate memory"


class FailingCopies:
    """A driver's copy function that fails in one call."""

    def __init__(self, end: int, number: int, status: int) -> None:
        self._copies, self._number, self._status = 0, number, status
        self.call = COPY(self._copy)
        self.options = {("first", "second")[end]: {"calls": {"copy": ctypes.cast(self.call, ctypes.c_void_p).value}}}

    def _copy(self, dst: int, src: int, nbytes: int, stream: int) -> int:
        self._copies += 1
        if self._copies == self._number:
            return self._status
        ctypes.memmove(dst, src, nbytes)
        return 0


@pytest.mark.host_only("copies are replaced by the CPU's")
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("way", ["out", "in"])
def test_a_copy_that_fails(way: str, number: int) -> None:
    """The failed put's signal must not arrive. The flush ends only after all puts."""
    copies = FailingCopies(int(way == "in"), number, 719)
    with Ends(**copies.options) as ends:
        here, there = ends
        here.push(PUT | SIGNAL | FLUSH, 8, count=5)
        if way == "out":
            failed, other, what = here, there, "put: the copy into"
        else:
            failed, other, what = there, here, "completion: the copy from"
        failure = failed.fails()
        assert failure.peer == other.rank
        assert failure.reason == f"{what} pinned memory failed with the driver's status 719"
        assert there.words[0] <= number - 1
        assert here.flushed() <= number - 1


@pytest.mark.parametrize(("end", "way"), [(0, "into"), (1, "from")])
def test_a_copy_whose_failure_shows_later(end: int, way: str) -> None:
    query = EVENT_QUERY(lambda event: 719)
    calls = {"calls": {"event_query": ctypes.cast(query, ctypes.c_void_p).value}}
    with Ends(first=calls if end == 0 else {}, second=calls if end == 1 else {}) as ends:
        here, _ = ends
        here.push(PUT | FLUSH, 8)
        failure = ends.ends[end].fails()
        assert failure.reason == f"completion: the copy {way} pinned memory failed with the driver's status 719"
        assert here.flushed() == 0


# -- closing ---


def test_an_end_with_work_outstanding_is_destroyed() -> None:
    with Ends() as ends:
        here, _ = ends
        here.device.allow(3)
        here.push(PUT | SIGNAL | FLUSH, 4000, count=50)
        ends.let_poll(here)
        assert here.flushed() == 0
        for end in ends:
            end.abort()
            assert end.service.close(60)  # so that no worker writes to memory of the other end that is freed below
        for end in ends:
            end.close()


def test_draining_waits_for_what_the_peer_has_to_do() -> None:
    with Ends() as ends:
        here, there = ends
        with Stuck(there):
            here.push(PUT | SIGNAL, 4000, count=20)
            assert not here.service.drain(0.05)
            assert not here.service.drain(60, lambda: True)
        assert here.service.drain(60)
        assert there.words[0] == 20
        assert (there.destination.numpy()[:4000] == here.source.numpy()[:4000]).all()
        assert there.service.drain(60)


def test_a_proxy_that_has_failed_or_is_closed_does_not_drain() -> None:
    with Ends() as ends:
        here, there = ends
        here.device.fail_request(1, REM_ACCESS_ERR)
        here.push(PUT, 8)
        here.fails()
        assert not here.service.drain(60)
        there.close()
        assert not there.service.drain(60)


# -- options ---


def test_a_connection_knows_what_it_is() -> None:
    with Ends() as ends:
        here, there = ends
        assert (here.connection.transport, here.connection.peer) == ("staged", there.rank)


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("area", {"area": 0}),
        ("area", {"area": 8}),
        ("device_area", {"device_area": 0}),
        ("wires", {"wires": 0}),
        ("area_keys", {"area_keys": [-1]}),
        ("peer_area", {"peer_area": None}),
        ("ring_bytes", {"ring_bytes": 64}),
        ("ring_bytes", {"ring_bytes": 1000}),
        ("ring_bytes", {"ring_bytes": None}),
        ("chunk_bytes", {"chunk_bytes": 0}),
        ("write_targets", {"write_targets": ffi.NULL}),
        ("send_depth", {"link": {"send_depth": 0}}),
        ("qp", {"link": {"qp": 0}}),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(argument: str, options: dict[str, Any]) -> None:
    with Ends() as ends:
        here, there = ends
        with pytest.raises(ArgumentError) as caught:
            here.service.connect("staged", here.options(there, **options))
        assert caught.value.argument == argument


def test_more_wires_than_there_may_be_are_refused() -> None:
    with Ends() as ends:
        here, there = ends
        with pytest.raises(ArgumentError, match=f"at most {MOST_WIRES}"):
            here.options(there, wires=MOST_WIRES + 1)


def test_keys_of_write_targets_run_out_and_rest_when_given_back() -> None:
    write_targets, count = RemoteWriteTargets(), int(lib.PROXYCCL_STAGED_WRITE_TARGETS)
    keys = [write_targets.add(4096, 1) for _ in range(count)]
    assert sorted(keys) == list(range(count))
    with pytest.raises(ResourceError, match=f"{count} memories are registered for staged peers already"):
        write_targets.add(4096, 1)
    for key in (7, 5):
        write_targets.remove(key)
    assert [write_targets.add(4096, 1) for _ in range(2)] == [7, 5]


def test_statuses_of_verbs_mean_the_same() -> None:
    for status in (errno.EINVAL, lib.PROXYCCL_VERBS_COMPLETION + REM_ACCESS_ERR):
        assert find_transport("staged").status_text(status) == find_transport("verbs").status_text(status) != ""
