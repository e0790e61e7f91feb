"""The fabric transport, through the engine, over a fake endpoint that copies memory, in the order of writes or in any
order.
"""

from __future__ import annotations

import errno
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from proxyccl import ArgumentError, Operation, Trigger
from proxyccl.device.ffi_types import fill
from proxyccl.proxy._engine import lib
from proxyccl.proxy.observe.metrics import metrics_text
from proxyccl.proxy.observe.publications import Description
from proxyccl.proxy.observe.rates import Watch
from proxyccl.proxy.observe.reader import snapshots
from proxyccl.proxy.transports.table import find_transport
from proxyccl.tools.top import table_of
from support.fakes.fabric import FakeFabricPeer
from support.fakes.verbs import Loop, bytes_of_value, rails_up, require_done, wait_with_peer
from support.running import TIMEOUT

PUT, SIGNAL, FLUSH = Operation.DATA, Operation.SIGNAL, Operation.FLUSH
GET = Operation.DATA | Operation.GET

pytestmark = [
    pytest.mark.host_only(reason="its own endpoint, in the CPU's memory"),
    pytest.mark.own_proxy(reason="its own services"),
    pytest.mark.skipif(
        not lib.proxyccl_fabric_built(), reason="this build has no fabric transport: libfabric's headers were not there"
    ),
]

Order = dict[str, int]
JOINED: Order = {"joined": True}
ORDERED: Order = {}
UNORDERED: Order = {"ordered": False}

rails = pytest.mark.parametrize("rails", [{}, {"rails": 3}], ids=["one rail", "three rails"])
orders = pytest.mark.parametrize("order", [JOINED, ORDERED, UNORDERED], ids=["joined", "ordered", "unordered"])


def memory(nbytes: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def loop_of(source: NDArray[np.uint8], destination: NDArray[np.uint8], **options: Any) -> Loop:
    return Loop(source, destination, make_peer=FakeFabricPeer, **options)


@orders
@pytest.mark.parametrize(("size", "max_message", "depth"), [(1, 1, 1), (4097, 4096, 2), (1_000_003, 64, 128)])
def test_a_put_of_any_length_arrives_whole(size: int, max_message: int, depth: int, order: Order) -> None:
    source, destination = memory(size + 3), np.zeros(size + 5, np.uint8)
    with loop_of(source, destination, depth=depth, max_message=max_message, **order) as loop:
        loop.push(0, PUT, size, source=3, destination=4)
        loop.flush()
        assert (destination[4:-1] == source[3:]).all()
        assert not destination[:4].any()
        assert destination[-1] == 0
        assert loop.peers[0].device.counts.requests == -(-size // max_message)


@orders
@pytest.mark.parametrize("offsets", [False, True], ids=["addresses", "offsets"])
@pytest.mark.parametrize("depth", [1, 16, 128])
def test_a_signal_arrives_behind_its_data(depth: int, order: Order, offsets: bool) -> None:
    sizes = [1 + 37 * i % 501 for i in range(300)]
    source, destination = memory(501), np.zeros(501, np.uint8)
    options = {"depth": depth, "max_message": 100, **order, "offsets": offsets}
    with loop_of(source, destination, channels=2, **options) as loop:
        (peer,) = loop.peers
        peer.device.dawdle(5, depth)
        for number, size in enumerate(sizes):
            loop.push(0, PUT | SIGNAL, size, channel=number % 2)
        for channel in range(2):
            loop.flush(channel=channel)
        before = np.cumsum(sizes).tolist()
        signals = peer.device.signals
        words = [peer.words[number % 2 :].ctypes.data for number in range(len(sizes))]
        assert [signal[:2] for signal in signals] == [(word, 1 + i // 2) for i, word in enumerate(words)]
        assert all(seen >= needed for (_, _, seen), needed in zip(signals, before, strict=True))
        assert peer.words.tolist() == [150, 150]
        assert (destination == source).all()


@orders
@pytest.mark.parametrize(("size", "max_message", "depth"), [(1, 1, 1), (4097, 4096, 2), (1_000_003, 64, 128)])
def test_a_get_of_any_length_brings_it_whole(size: int, max_message: int, depth: int, order: Order) -> None:
    own, theirs = np.zeros(size + 5, np.uint8), memory(size + 3)
    with loop_of(own, theirs, depth=depth, max_message=max_message, **order) as loop:
        loop.push(0, GET, size, source=3, destination=4)
        loop.flush()
        assert (own[4:-1] == theirs[3:]).all()
        assert not own[:4].any()
        assert own[-1] == 0
        assert loop.peers[0].device.counts.reads == -(-size // max_message)


@rails
@pytest.mark.parametrize("seed", range(4))
def test_gets_keep_their_place_among_unordered_writes(seed: int, rails: Order) -> None:
    """A put writes each range of memory once, then a get reads it. Signals must follow earlier puts and gets."""
    rng = random.Random(seed)
    own, theirs = memory(1 << 13, seed), np.zeros(1 << 12, np.uint8)
    expected = own.copy()
    options = {"depth": rng.choice([1, 2, 5, 16, 128]), "max_message": rng.choice([7, 64, 4096]), **UNORDERED}
    with loop_of(own, theirs, **options, **rails) as loop:
        (peer,) = loop.peers
        for device in peer.devices:
            device.dawdle(rng.choice([1, 3, 40]), seed)
        for turn in range(20):
            at, size = 200 * turn, rng.randint(1, 200)
            loop.push(0, PUT | rng.choice([SIGNAL, FLUSH, PUT]), size, source=at, destination=at)
            loop.push(0, GET | rng.choice([SIGNAL, FLUSH, PUT]), size, source=at, destination=4096 + at)
            expected[4096 + at : 4096 + at + size] = expected[at : at + size]
        loop.flush()
        assert (own == expected).all()


def test_a_provider_that_makes_no_reads_refuses_gets() -> None:
    with loop_of(np.zeros(8, np.uint8), memory(8), reads=False) as loop:
        loop.push(0, GET, 4)
        failure = loop.fails()
        assert failure.reason == "get: the provider of one of the two ranks can't read; have the peer put the data"
        assert loop.peers[0].device.counts.reads == 0


def test_memory_of_the_peer_is_no_place_to_get_to() -> None:
    """Providers access local memory by its address, so a peer's memory must not be taken for local memory."""
    with loop_of(np.zeros(8, np.uint8), memory(8)) as loop:
        (peer,) = loop.peers
        loop.producer.push(Trigger(GET, peer.channels[0], 4, peer.source_id, 0, peer.destination_id, 0))
        assert "only a remote link reaches a memory" in loop.fails().reason


@rails
@pytest.mark.parametrize("order", [JOINED, ORDERED], ids=["joined", "ordered"])
@pytest.mark.parametrize("seed", range(4))
def test_ordered_writes_leave_what_one_after_another_would(seed: int, order: Order, rails: Order) -> None:
    """Pushes random triggers on three channels, with overlapping puts and gets, over an endpoint that executes requests
    late and refuses some.

    Gets do not overlap in local memory, because they are not ordered among themselves.
    """
    rng = random.Random(seed)
    source, destination = memory(1 << 16, seed), np.zeros(1 << 12, np.uint8)
    own, expected, free = source.copy(), destination.copy(), 1 << 14
    with loop_of(
        source,
        destination,
        channels=3,
        depth=rng.choice([1, 2, 5, 16, 128]),
        max_message=rng.choice([7, 64, 4096]),
        service={"fifo_size": rng.choice([2, 64, 1024])},
        **order,
        **rails,
    ) as loop:
        for device in loop.peers[0].devices:
            device.dawdle(rng.choice([1, 3, 40]), seed)
        for _ in range(400):
            operation, size = Operation(rng.randint(1, 7)), rng.randint(1, 300)
            start, end = rng.randrange(free - 300), rng.randrange(len(destination) - 300)
            where, data = {"source": start, "destination": end}, own[start : start + size]
            if operation & PUT and rng.randrange(4) == 0:
                where, size = {"value": rng.getrandbits(64), "destination": end}, rng.choice([1, 2, 4, 8])
                data = bytes_of_value(where["value"], size)
            elif operation & PUT and rng.randrange(4) == 0:
                operation |= GET
                own[free : free + size] = expected[end : end + size]
                where, free = {"source": end, "destination": free}, free + size
            if operation & PUT and not operation & Operation.GET:
                expected[end : end + size] = data
            loop.push(0, operation, size, channel=rng.randrange(3), **where)
        for channel in range(3):
            loop.flush(channel=channel)
        assert (destination == expected).all()
        assert (source == own).all()


@pytest.mark.parametrize(
    ("operation", "size", "where", "writes", "joined"),
    [
        (PUT | SIGNAL, 8, {}, 1, 1),
        (PUT | SIGNAL, 8, {"value": 5}, 1, 1),
        (SIGNAL, 0, {}, 1, 0),
        (PUT | SIGNAL, 56, {}, 1, 1),
        (PUT | SIGNAL, 57, {}, 2, 0),  # a put with its signal would exceed the longest write
        (PUT | SIGNAL, 64 + 57, {}, 3, 0),
        (PUT | SIGNAL, 64 + 8, {}, 2, 1),
        (GET | SIGNAL, 8, {}, 2, 0),
    ],
)
def test_a_signal_joins_the_write_before_it(
    operation: Operation, size: int, where: dict[str, int], writes: int, joined: int
) -> None:
    source, destination = memory(128), memory(128, seed=1)
    with loop_of(source, destination, max_message=64, **JOINED) as loop:
        (peer,) = loop.peers
        loop.push(0, operation, size, **where)
        loop.flush()
        assert (peer.device.counts.requests, peer.device.counts.joined) == (writes, joined)
        assert peer.words[0] == 1
        if "value" not in where:
            assert (source[:size] == destination[:size]).all()


@rails
def test_what_no_flush_waits_behind_comes_to_rest_by_one_completion(rails: Order) -> None:
    with loop_of(memory(8), np.zeros(8, np.uint8), depth=64, **rails) as loop:
        for _ in range(7):  # 14 requests, fewer than a quarter of the window, so none asks for a completion
            loop.push(0, PUT | SIGNAL, 8)
        assert loop.service.drain(TIMEOUT)
        counts = loop.peers[0].device.counts
        assert counts.requests == 14
        assert counts.awaited == counts.empty > 0


@rails
def test_observers_see_the_rails(rails: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    described = {"description": Description(0, 2, "job", "program")}
    with loop_of(memory(8), np.zeros(8, np.uint8), **rails, service=described) as loop:
        text = metrics_text(snapshots("job").values(), {})
        (up,) = re.findall(r"^proxyccl_connection_rails_up\{.*\} (\d)", text, re.M)
        assert int(up) == rails.get("rails", 0)
        loop.push(0, PUT, 8)
        loop.flush()
        watch = Watch("job")
        watch.rates()
        assert ("7 fabric, 3 of 3 rails" in table_of(watch.rates())) == bool(rails)


@rails
def test_a_run_of_ordered_writes_asks_for_few_completions(rails: Order) -> None:
    with loop_of(memory(8), np.zeros(8, np.uint8), depth=64, **rails) as loop:
        loop.push(0, PUT, 8, count=640)
        loop.flush()
        counts = loop.peers[0].device.counts
        assert counts.requests - counts.empty == 640
        assert counts.awaited <= 320


@rails
@orders
def test_a_flood_waits_in_the_ring(order: Order, rails: Order) -> None:
    """While the endpoint executes nothing, triggers beyond the capacity of endpoint and connection stay in the ring."""
    source, destination = memory(8), np.zeros(8, np.uint8)
    with loop_of(source, destination, depth=16, **order, **rails, service={"fifo_size": 1024}) as loop:
        (peer,) = loop.peers
        for device in peer.devices:
            device.allow(0)
        loop.push(0, PUT | SIGNAL, 8, count=1000)
        loop.let_poll(0)
        assert peer.device.counts.requests <= 16
        assert loop.producer.taken(peer.channels[0]) < 300
        for device in peer.devices:
            device.allow(-1)
        loop.flush()
        assert peer.words[0] == 1000


@rails
@orders
def test_a_failed_write_names_the_peer_and_quotes_the_provider(order: Order, rails: Order) -> None:
    with loop_of(memory(800), np.zeros(800, np.uint8), peers=2, **order, **rails) as loop:
        loop.peers[1].devices[-1].fail(3, errno.ECONNRESET)
        loop.push(1, PUT, 800, count=5)
        failure = loop.fails()
        assert failure.peer == 8
        assert failure.status == lib.PROXYCCL_FABRIC_FAILED + errno.ECONNRESET
        assert failure.reason == "completion: Connection reset by peer: the fake provider's words"


def test_a_failed_write_brings_neither_its_data_nor_its_signal() -> None:
    source, destination = memory(40), np.zeros(40, np.uint8)
    with loop_of(source, destination, **JOINED) as loop:
        (peer,) = loop.peers
        peer.device.fail(3, errno.ECONNRESET)
        for place in range(0, 40, 8):
            loop.push(0, PUT | SIGNAL, 8, source=place, destination=place)
        failure = loop.fails()
        assert failure.peer == 7
        assert failure.reason == "completion: Connection reset by peer: the fake provider's words"
        assert peer.device.signals[:2] == [(peer.words.ctypes.data, 1, 8), (peer.words.ctypes.data, 2, 16)]
        assert not destination[16:24].any()


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": 0},
        {"queue": 0},
        {"depth": 0},
        {"depth": 4097},
        {"max_message": 0},
        {"requests": 0},
        {"requests": 12345},
        {"requests_key": 4096},
        {"looks": 0},
    ],
    ids=str,
)
def test_wrong_options_are_refused_by_name(wrong: dict[str, int]) -> None:
    with loop_of(memory(8), np.zeros(8, np.uint8)) as loop:
        given = loop.peers[0].options
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            loop.service.connect("fabric", fill(given, **wrong))


def test_a_status_has_words() -> None:
    text = find_transport("fabric").status_text
    assert text(lib.PROXYCCL_FABRIC_FAILED + errno.EHOSTUNREACH) == "No route to host"


@pytest.mark.parametrize("failure", ["an error", "a link without a carrier", "silence"])
@pytest.mark.filterwarnings("ignore:the adapter .* no longer reaches:RuntimeWarning")
def test_a_failed_rail_is_closed_and_its_parts_go_by_the_other_until_it_is_back(failure: str) -> None:
    source, destination = memory(9000), np.zeros(9000, np.uint8)
    with loop_of(source, destination, rails=2, recovers=True) as loop:
        (peer,) = loop.peers
        failing = peer.devices[1]
        if failure == "an error":
            failing.fail(1, errno.ECONNRESET)
        else:
            failing.allow(0)
            peer.works = lambda: failure == "silence"
        for _ in range(2):
            ticket = loop.push(0, PUT | SIGNAL | FLUSH, 9000)
            wait_with_peer(loop, lambda ticket=ticket: peer.flushed() > ticket, "the flush")
            assert (destination == source).all()
        assert peer.words[0] == 2
        failing.allow(-1)
        peer.works = lambda: True
        wait_with_peer(loop, lambda: rails_up(loop) == 2, "both rails")
        before = failing.counts.executed
        loop.push(0, PUT | SIGNAL, 9000)
        loop.flush()
        assert failing.counts.executed > before
        assert peer.words[0] == 3


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.filterwarnings("ignore:the adapter .* no longer reaches:RuntimeWarning")
def test_what_failed_rails_have_not_done_is_done_once_by_the_other(seed: int) -> None:
    """Either rail fails at a random request, while the endpoints execute requests late. No two gets have the same
    destination, because providers may execute gets in any order.
    """
    rng = random.Random(seed)
    source, destination = memory(1 << 17, seed), np.zeros(1 << 12, np.uint8)
    own, expected = source.copy(), destination.copy()
    order = rng.choice([JOINED, ORDERED])
    options: dict[str, Any] = {"rails": 2, "recovers": True, "channels": 2, "depth": rng.choice([4, 16, 128]), **order}
    with loop_of(source, destination, max_message=300, **options) as loop:
        (peer,) = loop.peers
        for device in peer.devices:
            device.dawdle(rng.choice([1, 3, 40]), seed)
        signals, got = [0, 0], 1 << 13
        for _ in range(4):
            failing = rng.choice(peer.devices)
            failing.fail(failing.counts.requests + rng.randrange(1, 40), errno.ECONNRESET)
            for _ in range(200):
                operation, channel, size = Operation(rng.randint(1, 7)), rng.randrange(2), rng.randint(1, 300)
                signals[channel] += bool(operation & SIGNAL)
                at, end = rng.randrange((1 << 13) - 300), rng.randrange((1 << 12) - 300)
                where = {"source": at, "destination": end}
                if operation & PUT and rng.randrange(3) == 0:
                    operation, where = operation | GET, {"source": end, "destination": got}
                    own[got : got + size] = expected[end : end + size]
                    got += size
                elif operation & PUT:
                    expected[end : end + size] = own[at : at + size]
                loop.push(0, operation, size if operation & PUT else 0, channel=channel, **where)
            require_done(loop, peer, signals, ((destination, expected), (source, own)), 2)
        assert peer.peer_mail.up.sum() >= 4, "a rail failed in each round"


def test_an_error_that_is_not_the_links_ends_the_connection() -> None:
    with loop_of(memory(9000), np.zeros(9000, np.uint8), rails=2, recovers=True) as loop:
        loop.peers[0].devices[1].fail(1, errno.EACCES)
        loop.push(0, PUT, 9000)
        assert "Permission denied" in loop.fails().reason
