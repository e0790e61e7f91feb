"""The verbs transport, through the engine, over a fake device that copies memory and checks every limit.

The device counts requests, and can delay requests, execute them late, and fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import random
import threading
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from proxyccl import (
    ArgumentError,
    Communicator,
    Operation,
    RuntimeUnavailableError,
    ThreadBootstrap,
    TransportError,
    Trigger,
)
from proxyccl.channels.segment.control import ControlSegment
from proxyccl.device._native import lib as native
from proxyccl.proxy._engine import ffi, lib
from proxyccl.proxy.observe import publications
from proxyccl.proxy.observe.metrics import metrics_text
from proxyccl.proxy.observe.publications import Description
from proxyccl.proxy.observe.rates import Watch
from proxyccl.proxy.observe.reader import Observer, snapshots
from proxyccl.proxy.observe.tracing import Tracer
from proxyccl.proxy.schedule import Schedule, SchedulePost, ScheduleReceive, ScheduleSend
from proxyccl.proxy.transports.table import find_transport
from proxyccl.tools.top import table_of
from support.bare_loops import produce, verbs_write
from support.daemons import daemon_inside
from support.fakes.verbs import (
    LKEY,
    RKEY,
    SIGNAL_RKEY,
    FakeDevice,
    FakePeer,
    Loop,
    Producer,
    bytes_of_value,
    rails_up,
    require_done,
    verbs_options,
    wait_with_peer,
)
from support.observing import wait_until_traced
from support.ranks import Gate
from support.running import TIMEOUT, run_ranks, wait_for

pytestmark = [
    pytest.mark.host_only(reason="its own device, in the CPU's memory"),
    pytest.mark.own_proxy(reason="its own services"),
]

PUT, SIGNAL, FLUSH = Operation.DATA, Operation.SIGNAL, Operation.FLUSH
GET = Operation.DATA | Operation.GET
BUILT = bool(lib.proxyccl_verbs_built())
OPERATIONS: int = lib.PROXYCCL_VERBS_OPERATIONS
CHAIN: int = lib.PROXYCCL_VERBS_CHAIN
REM_ACCESS_ERR = 10

needs_transport = pytest.mark.skipif(
    not BUILT, reason="this build has no verbs transport: libibverbs' headers were not there"
)


def memory(nbytes: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


# -- data ---


@needs_transport
@pytest.mark.parametrize("depth", [1, 2, 16, 128])
@pytest.mark.parametrize(
    ("size", "max_message"),
    [(1, 1), (1, 4096), (1000, 1), (4096, 4096), (4097, 4096), (1_000_003, 64), (25_000_000, 65536)],
)
def test_a_put_of_any_length_arrives_whole(size: int, max_message: int, depth: int) -> None:
    source, destination = memory(size + 3), np.zeros(size + 5, np.uint8)
    with Loop(source, destination, send_depth=depth, max_message=max_message) as loop:
        loop.push(0, PUT, size, source=3, destination=4)
        loop.flush()
        assert (destination[4:-1] == source[3:]).all()
        assert not destination[:4].any()
        assert destination[-1] == 0
        counts = loop.peers[0].device.counts
        assert counts.requests == counts.executed == -(-size // max_message)


@needs_transport
@pytest.mark.parametrize("fetch_add", [False, True], ids=["write", "fetch-add"])
def test_a_schedule_posts_then_sends_where_its_peer_posted(fetch_add: bool) -> None:
    """The test itself makes the peer's posts and, at the end, the peer's signal."""
    source, destination = memory(5000), np.zeros(5000, np.uint8)
    service = {"semaphores_offset": ControlSegment.semaphore_offset(0)}
    with Loop(source, destination, channels=2, fetch_add=fetch_add, service=service, send_depth=4) as loop:
        peer, shared = loop.peers[0], loop.service.words
        words = shared.schedule_words
        posts, sends = peer.channels
        posted, signalled = (
            ctypes.c_uint64.from_address(shared.memory.host_ptr + ControlSegment.semaphore_offset(channel))
            for channel in (posts, sends)
        )
        number = loop.service.add_schedule(
            Schedule(
                posts=(SchedulePost(posts, 5, (1 << 32) + 7),),
                sends=(ScheduleSend(sends, peer.source_id, 100, 4000, post_channel=posts, dst_offset=50),),
                receives=(ScheduleReceive(sends),),
            )
        )
        for call in (1, 2, 3):
            destination[:] = 0
            words.done, words.bell = 0, number
            loop.wait(lambda call=call: peer.words[0] == call << 41 | 6 << 32 | 7, "the post")
            time.sleep(0.02)
            assert not destination.any()
            posted.value = call << 41 | peer.destination_id << 32 | 10
            loop.wait(lambda call=call: peer.words[1] == call, "the signal")
            assert (destination[60:4060] == source[100:4100]).all()
            time.sleep(0.02)
            assert words.done == 0
            signalled.value = call
            loop.wait(lambda: words.done == 1, "the schedule's end")
        counters = loop.service.counters(sends)
        assert (counters.puts, counters.bytes, counters.signals) == (3, 12_000, 3)


@needs_transport
@pytest.mark.parametrize("fetch_add", [False, True], ids=["write", "fetch-add"])
@pytest.mark.parametrize("home", [0, 1])
def test_a_signal_follows_the_parts_of_its_put_on_both_rails(home: int, fetch_add: bool) -> None:
    source, destination = memory(40_000), np.zeros(40_000, np.uint8)
    with Loop(source, destination, speeds=(1, 3), home=home, cut=4096, fetch_add=fetch_add) as loop:
        (peer,) = loop.peers
        at_home, other = peer.devices[home], peer.devices[1 - home]
        other.allow(0)
        loop.push(0, PUT | SIGNAL, 40_000)
        loop.wait(lambda: destination[0] == source[0] or destination[-1] == source[-1], "the part on the home rail")
        polls = other.counts.polls
        loop.wait(lambda: other.counts.polls >= polls + 5, "polls")
        assert peer.words[0] == 0
        other.allow(-1)
        loop.wait(lambda: peer.words[0] == 1, "the signal")
        assert (destination == source).all()
        loop.push(0, PUT | SIGNAL, 4095)
        loop.flush()
        # A quarter of the put goes by rail 0, rounded down to a multiple of 64 bytes, in requests of 4096 bytes.
        parts = [-(-(40_000 // 4 // 64 * 64) // 4096), -(-(40_000 - 40_000 // 4 // 64 * 64) // 4096)]
        assert at_home.counts.executed == parts[home] + 3
        assert other.counts.executed == parts[1 - home]


@needs_transport
def test_a_rail_that_fails_ends_the_connection() -> None:
    with Loop(memory(9000), np.zeros(9000, np.uint8), speeds=(1, 1)) as loop:
        loop.peers[0].devices[1].fail_request(1, REM_ACCESS_ERR)
        loop.push(0, PUT, 9000)
        assert "IBV_WC_REM_ACCESS_ERR" in loop.fails().reason


RETRY_EXC_ERR = 12


def random_trigger(
    rng: random.Random, channels: int, own: NDArray[np.uint8], expected: NDArray[np.uint8]
) -> tuple[Operation, int, int, dict[str, int]]:
    """Returns the operation, the channel, the size and the offsets of a random trigger. If the trigger gets data, also
    makes the get in `own`, from the peer's memory `expected`.
    """
    operation = Operation(rng.randint(1, 7))
    channel = rng.randrange(channels)
    size = rng.randint(0, 300) if operation & PUT else 0
    start, end = rng.randrange(len(own) - 300), rng.randrange(len(expected) - 300)
    if not operation & PUT or rng.randrange(3):
        return operation, channel, size, {"source": start, "destination": end}
    own[start : start + size] = expected[end : end + size]
    return operation | GET, channel, size, {"source": end, "destination": start}


def rails_observed() -> list[str]:
    """Returns the metrics of rails: first each connection's number of rails, then each connection's failures."""
    lines = metrics_text(snapshots("job").values(), {}).splitlines()
    return [line.rpartition(" ")[2] for line in lines if line.startswith("proxyccl_connection_rail")]


def require_put(loop: Loop, peer: FakePeer, source: NDArray[np.uint8], destination: NDArray[np.uint8]) -> None:
    """Puts all of `source` with the first signal, and checks that both arrive."""
    loop.push(0, PUT | SIGNAL, 9000)
    loop.flush()
    assert (destination == source).all()
    assert peer.words[0] == 1


def lose_and_connect_rail(loop: Loop) -> tuple[FakePeer, FakeDevice]:
    """Makes rail 1 fail in a put of 9000 bytes, and waits until this rank, but not the peer, has connected the rail
    again. Returns the peer, and the fake device of rail 1.
    """
    (peer,) = loop.peers
    failing = peer.devices[1]
    failing.fail_request(1, RETRY_EXC_ERR)
    loop.push(0, PUT, 9000)
    loop.wait(lambda: peer.peer_mail.down[1] == 1, "the report of the failure")
    peer.mail.down[1] = 1
    loop.wait(lambda: peer.peer_mail.up[1] == 1, "the message that the rail is connected")
    return peer, failing


@needs_transport
@pytest.mark.parametrize("rails", [2, 3, 4])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.filterwarnings("ignore:the adapter .* no longer reaches:RuntimeWarning")
def test_what_failed_rails_have_not_done_is_done_once_by_the_others(seed: int, rails: int) -> None:
    """All rails but one fail at random requests, also during recoveries, while the devices execute requests late. The
    rails are used again.
    """
    rng = random.Random(seed)
    source, destination = memory(1 << 13, seed), np.zeros(1 << 12, np.uint8)
    own, expected = source.copy(), destination.copy()
    options: dict[str, Any] = {"channels": 2, "send_depth": rng.choice([4, 16, 128]), "max_message": 64}
    with Loop(source, destination, speeds=(1,) * rails, home=rng.randrange(rails), **options) as loop:
        (peer,) = loop.peers
        for device in peer.devices:
            device.dawdle(rng.choice([1, 3, 40]), seed)
        signals, spared = [0, 0], rng.choice(peer.devices)
        for _ in range(4):
            for failing in set(peer.devices) - {spared}:
                lost = rng.choice([0, 1, 20])
                failing.fail_request(failing.counts.requests + rng.randrange(1, 80), RETRY_EXC_ERR, lost)
            for _ in range(200):
                operation, channel, size, where = random_trigger(rng, 2, own, expected)
                if not operation & Operation.GET:
                    start, end = where["source"], where["destination"]
                    expected[end : end + size] = own[start : start + size]
                loop.push(0, operation, size, channel=channel, **where)
                signals[channel] += bool(operation & SIGNAL)
            require_done(loop, peer, signals, ((destination, expected), (source, own)), rails)
        assert peer.peer_mail.up.sum() >= 4, "a rail failed in each round"
        words = range(peer.words.ctypes.data, peer.words.ctypes.data + peer.words.nbytes)
        for word in words[::8]:
            values = [value for device in peer.devices for at, value, _ in device.signals if at == word]
            assert sorted(values) == list(range(1, len(values) + 1)), "no signal is written twice"


@needs_transport
@pytest.mark.parametrize("executed", [1, 2, 3, 4, 5])
def test_what_precedes_a_value_that_the_peer_has_seen_is_not_put_again(executed: int) -> None:
    """The rail fails when it has executed the put (1 request), the count of parts (2), the value (3), the next count
    (4), and the put after it (5), without a completion.
    """
    source, destination = memory(96), np.zeros(96, np.uint8)
    value = 0x1122334455667788
    with Loop(source, destination, speeds=(1, 1), send_depth=128) as loop:
        (peer,) = loop.peers
        peer.devices[0].fail_request(1, RETRY_EXC_ERR, executed)
        with loop.service.paused(TIMEOUT):  # so that all requests are one chain
            loop.push(0, PUT, 32)
            loop.push(0, PUT, 8, destination=32, value=value)
            loop.push(0, PUT, 32, source=64, destination=64)
            ticket = loop.push(0, PUT | FLUSH, 32, source=64, destination=64)
        loop.wait(lambda: bool(peer.peer_mail.down[0]), "the report of the failure")
        consumed = executed >= 3
        if consumed:
            assert destination[32:40].tobytes() == value.to_bytes(8, "little")
            destination[:32] = 7  # the peer has seen the value
        wait_with_peer(loop, lambda: peer.flushed() > ticket, "the flush")
        assert (destination[:32] == (7 if consumed else source[:32])).all()
        assert destination[32:40].tobytes() == value.to_bytes(8, "little")
        assert (destination[64:] == source[64:]).all()


@needs_transport
@pytest.mark.parametrize("is_one_chain", [False, True])
def test_what_completes_just_before_a_failure_is_not_put_again(is_one_chain: bool) -> None:
    source, destination = memory(64), np.zeros(64, np.uint8)
    with Loop(source, destination, speeds=(1, 1)) as loop:
        (peer,) = loop.peers
        failing = peer.devices[0]
        failing.allow(0)  # so that one poll sees the completion and the failure
        failing.fail_request(2, RETRY_EXC_ERR)
        with loop.service.paused(TIMEOUT) if is_one_chain else contextlib.nullcontext():
            loop.push(0, PUT, 32)
            if not is_one_chain:
                loop.wait(lambda: failing.counts.posts == 1, "the first post")
            ticket = loop.push(0, PUT | FLUSH, 32, source=32, destination=32)
        loop.wait(lambda: failing.counts.requests == 2, "both requests")
        failing.allow(-1)
        loop.wait(lambda: bool(peer.peer_mail.down[0]), "the report of the failure")
        assert (destination[:32] == source[:32]).all()
        destination[:32] = 7
        wait_with_peer(loop, lambda: peer.flushed() > ticket, "the flush")
        assert (destination[:32] == 7).all()
        assert (destination[32:] == source[32:]).all()


@needs_transport
@pytest.mark.parametrize("status", ["a refused post", "a refused poll"])
def test_a_rail_on_trial_that_fails_without_a_completion_is_stopped_before_the_peer_is_told(status: str) -> None:
    source, destination, asked = memory(9000), np.zeros(9000, np.uint8), threading.Event()
    with Loop(source, destination, speeds=(1, 1)) as loop:
        peer, failing = lose_and_connect_rail(loop)
        peer.can_stop = lambda: asked.set() or False
        if status == "a refused post":
            failing.fail_post(failing.counts.posts + 1, errno.EINVAL)
        else:
            failing.fail_polls()
        peer.mail.up[1] = 1
        loop.wait(asked.is_set, "an attempt to stop the queue pair")
        assert peer.peer_mail.down[1] == 1
        peer.can_stop = lambda: True
        wait_with_peer(loop, lambda: peer.peer_mail.down[1] == 2 and rails_up(loop) == 2, "both rails")
        require_put(loop, peer, source, destination)


@needs_transport
def test_a_rail_that_fails_again_before_the_watch_sees_it_up_is_counted_again(
    recwarn: pytest.WarningsRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch waits for the port of another connection while a rail is used and fails again."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    source, destination = memory(9000), np.zeros(9000, np.uint8)
    described = {"description": Description(0, 2, "job", "program")}
    with Loop(source, destination, peers=2, speeds=(1, 1), service=described) as loop:
        first, second = loop.peers
        failing, waits, ends = second.devices[1], threading.Event(), threading.Event()

        def late_port() -> bool:
            waits.set()
            return ends.wait(TIMEOUT)

        def port() -> bool:
            first.port = late_port  # the watch asks the other connection next
            return True

        first.port = second.port = lambda: False
        for number, peer in enumerate(loop.peers):
            peer.devices[1].fail_request(1, RETRY_EXC_ERR)
            loop.push(number, PUT, 9000)
        wait_with_peer(loop, lambda: rails_observed() == ["1", "1", "1", "1"], "the reports to observers")
        second.port = port
        wait_with_peer(loop, lambda: waits.is_set() and rails_up(loop, 1) == 2, "both rails")
        failing.fail_request(failing.counts.requests + 1, RETRY_EXC_ERR)
        loop.push(1, PUT, 9000)
        wait_with_peer(loop, lambda: rails_up(loop, 1) == 1, "the second failure")
        ends.set()
        wait_with_peer(loop, lambda: rails_observed() == ["2", "2", "1", "2"], "the reports to observers")
    told = Counter(str(each.message).partition("; all data goes by ")[2] for each in recwarn)
    assert told == {"rail0 (failure 1 of the connection)": 2, "rail0 (failure 2 of the connection)": 1}


@needs_transport
def test_a_failed_rail_of_a_daemon_is_told_by_the_client_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, source, destination = tmp_path / "socket", memory(9000), np.zeros(9000, np.uint8)
    monkeypatch.setenv("PROXYCCL_DAEMON_SOCKET", str(path))
    told: list[tuple[str, str]] = []  # the texts of the warnings, and the threads that issued them
    with (
        warnings.catch_warnings(),
        contextlib.ExitStack() as opened,
        daemon_inside(path) as daemon,
        Communicator(ThreadBootstrap.create(1)[0], proxy="daemon") as comm,
    ):
        warnings.simplefilter("always")
        monkeypatch.setattr(
            warnings, "showwarning", lambda what, *_: told.append((str(what), threading.current_thread().name))
        )
        ring = comm.proxy.fifos[0]
        (session,) = daemon._sessions
        peer = FakePeer(session.served, source, destination, speeds=(1, 1))
        for device in peer.devices:
            opened.enter_context(device)
        peer.devices[1].fail_request(1, RETRY_EXC_ERR)
        produce(ring, 0, peer.trigger(PUT, 9000).encode(), 1, TIMEOUT)
        wait_for(lambda: bool(told), "the warning")
        peer.mail.answer(peer.peer_mail)
        wait_for(lambda: bool((destination == source).all()), "the put")
    ((text, thread),) = told
    assert text.startswith("the adapter rail1 no longer reaches rank 7 (IBV_WC_RETRY_EXC_ERR, ")
    assert thread.endswith("-daemon"), "the thread that reads the daemon's events"


@needs_transport
def test_a_rail_that_is_back_is_used_again(
    recwarn: pytest.WarningsRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port comes up late; then the first request on the rail fails, and the second one succeeds."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    source, destination = memory(9000), np.zeros(9000, np.uint8)
    described = {"description": Description(0, 2, "job", "program")}
    with Loop(source, destination, speeds=(1, 1), service=described) as loop:
        watch = Watch("job")
        assert (rails_observed(), watch.rates()) == (["2", "0"], [])
        (peer,) = loop.peers
        failing = peer.devices[1]
        peer.port = lambda: False
        failing.fail_request(1, RETRY_EXC_ERR)
        for _ in range(2):
            ticket = loop.push(0, PUT | SIGNAL | FLUSH, 9000)
            wait_with_peer(loop, lambda ticket=ticket: peer.flushed() > ticket, "the flush")
            assert (destination == source).all()
        assert (failing.counts.requests, rails_up(loop)) == (2, 1)
        loop.wait(lambda: rails_observed() == ["1", "1"], "the report to observers")
        assert "7 verbs, 1 of 2 rails (failures: 1)" in table_of(watch.rates())
        failing.fail_request(failing.counts.requests + 1, RETRY_EXC_ERR)
        peer.port = lambda: True
        loop.wait(lambda: bool(peer.peer_mail.up[1]), "the message that the rail is connected")
        loop.push(0, PUT, 9000)
        loop.flush()
        assert failing.counts.requests == 2, "the peer is not connected yet"
        wait_with_peer(loop, lambda: rails_up(loop) == 2, "both rails")
        assert (peer.peer_mail.down[:2].tolist(), peer.peer_mail.up[:2].tolist()) == ([0, 2], [0, 2])
        before = failing.counts.executed
        loop.push(0, PUT | SIGNAL, 9000)
        loop.flush()
        assert failing.counts.executed > before
        assert peer.words[0] == 3
        loop.wait(lambda: rails_observed() == ["2", "1"], "the report to observers")
        (told,) = [str(each.message) for each in recwarn]
        assert told.startswith("the adapter rail1 no longer reaches rank 7 (IBV_WC_RETRY_EXC_ERR, ")
        assert told.endswith("; all data goes by rail0 (failure 1 of the connection)")


@needs_transport
@pytest.mark.parametrize("stage", ["the peer is not connected", "the request is not executed", "both rails are up"])
def test_a_rail_that_fails_again_at_the_peer_is_stopped_first(stage: str) -> None:
    source, destination = memory(9000), np.zeros(9000, np.uint8)
    with Loop(source, destination, speeds=(1, 1)) as loop:
        peer, failing = lose_and_connect_rail(loop)
        failing.allow(-1 if stage == "both rails are up" else 0)
        before = failing.counts.requests
        if stage != "the peer is not connected":
            peer.mail.up[1] = 1
            loop.wait(lambda: failing.counts.requests > before, "the first request")
        if stage == "both rails are up":
            loop.wait(lambda: rails_up(loop) == 2, "both rails")
        peer.mail.down[1] = 2
        loop.wait(lambda: peer.peer_mail.down[1] == 2, "the answer")
        failing.allow(-1)
        wait_with_peer(loop, lambda: peer.peer_mail.up[1] == 2 and rails_up(loop) == 2, "both rails")
        require_put(loop, peer, source, destination)


@needs_transport
def test_a_peer_that_does_not_answer_ends_the_connection_with_the_rails_status() -> None:
    source, destination = memory(9000), np.zeros(9000, np.uint8)
    with Loop(source, destination, speeds=(1, 1), limit=0.2) as loop:
        loop.peers[0].devices[1].fail_request(1, RETRY_EXC_ERR)
        loop.push(0, PUT, 9000)
        assert "IBV_WC_RETRY_EXC_ERR" in loop.fails().reason


@needs_transport
def test_the_failure_of_both_rails_ends_the_connection() -> None:
    source, destination = memory(9000), np.zeros(9000, np.uint8)
    with Loop(source, destination, speeds=(1, 1)) as loop:
        (peer,) = loop.peers
        peer.port = lambda: False
        loop.push(0, PUT, 9000)
        loop.flush()
        peer.mail.down[1] = 1
        loop.wait(lambda: peer.peer_mail.down[1] == 1, "the answer")
        before = peer.devices[1].counts.requests
        loop.push(0, PUT | SIGNAL, 9000)
        loop.flush()
        assert peer.words[0] == 1
        assert peer.devices[1].counts.requests == before
        peer.devices[0].fail_request(peer.devices[0].counts.requests + 1, RETRY_EXC_ERR)
        loop.push(0, PUT, 9000)
        assert "IBV_WC_RETRY_EXC_ERR" in loop.fails().reason


@needs_transport
def test_a_put_of_nothing_makes_no_request() -> None:
    with Loop(memory(8), np.zeros(8, np.uint8)) as loop:
        loop.push(0, PUT)
        loop.flush()
        assert loop.peers[0].device.counts.requests == 0


@needs_transport
@pytest.mark.parametrize("speeds", [(1,), (1, 2), (2, 1, 3)], ids=["one rail", "two rails", "three rails"])
@pytest.mark.parametrize("seed", range(8))
def test_everything_happens_as_if_one_after_another(seed: int, speeds: tuple[int, ...]) -> None:
    """Pushes random triggers on three channels, with overlapping puts and gets, over devices that execute them late."""
    rng = random.Random(seed)
    source, destination = memory(1 << 13, seed), np.zeros(1 << 12, np.uint8)
    own, expected = source.copy(), destination.copy()
    depth, cq_depth = rng.choice([1, 2, 5, 16, 128]), rng.choice([1, 3, 16, 256])
    signals, flushes, written = [0, 0, 0], [0, 0, 0], 0
    signalled: list[tuple[int, int, int]] = []
    with Loop(
        source,
        destination,
        channels=3,
        send_depth=depth,
        cq_depth=cq_depth,
        max_message=rng.choice([1, 7, 64, 4096]),
        fetch_add=bool(seed % 2),
        service={"fifo_size": rng.choice([2, 64, 1024])},
        speeds=speeds,
        home=seed // 2 % len(speeds),
    ) as loop:
        (peer,) = loop.peers
        for device in peer.devices:
            device.dawdle(rng.choice([1, 3, 40]), seed)
        for _ in range(600):
            operation, channel, size, where = random_trigger(rng, 3, own, expected)
            start, end = where["source"], where["destination"]
            if operation & PUT and not operation & Operation.GET and not seed % 2 and rng.randrange(4) == 0:
                value, size = rng.getrandbits(64), rng.choice([1, 2, 4, 8])
                expected[end : end + size] = bytes_of_value(value, size)
                where["value"] = value
            elif not operation & Operation.GET:
                written += size
                expected[end : end + size] = own[start : start + size]
            ticket = loop.push(0, operation, size, channel=channel, **where)
            if operation & SIGNAL:
                signals[channel] += 1
                signalled.append((peer.words[channel:].ctypes.data, signals[channel], written))
            if operation & FLUSH:
                flushes[channel] = ticket + 1
        for channel in range(3):
            loop.flush(channel=channel)
        assert (destination == expected).all()
        assert (source == own).all()
        words = range(peer.words.ctypes.data, peer.words.ctypes.data + peer.words.nbytes)
        seen = [signal for device in peer.devices for signal in device.signals if signal[0] in words]
        if len(speeds) > 1:  # a device counts only the bytes that it put itself
            seen, signalled = [(*each[:2], 0) for each in seen], [(*each[:2], 0) for each in signalled]
        assert seen == signalled
        assert peer.words.tolist() == signals
        assert all(peer.flushed(channel) > flushes[channel] for channel in range(3))


@needs_transport
@pytest.mark.parametrize("depth", [1, 2, 16, 128])
@pytest.mark.parametrize(("size", "max_message"), [(1, 1), (4097, 4096), (100_003, 64), (25_000_000, 65536)])
def test_a_get_of_any_length_brings_it_whole(size: int, max_message: int, depth: int) -> None:
    own, theirs = np.zeros(size + 5, np.uint8), memory(size + 3)
    with Loop(own, theirs, send_depth=depth, max_message=max_message) as loop:
        loop.push(0, GET, size, source=3, destination=4)
        loop.flush()
        assert (own[4:-1] == theirs[3:]).all()
        assert not own[:4].any()
        assert own[-1] == 0
        counts = loop.peers[0].device.counts
        assert counts.requests == counts.reads == -(-size // max_message)
        counters = loop.service.counters(loop.peers[0].channels[0])
        assert (counters.gets, counters.puts, counters.bytes) == (1, 0, size)


@needs_transport
@pytest.mark.parametrize("fetch_add", [False, True], ids=["write", "fetch-add"])
def test_only_the_first_request_behind_reads_has_a_fence(fetch_add: bool) -> None:
    with Loop(memory(64), memory(64, 1), fetch_add=fetch_add) as loop:
        for operation in (PUT, GET, GET, SIGNAL, PUT, GET, PUT | SIGNAL, PUT):
            loop.push(0, operation, 8)
        loop.flush()
        counts = loop.peers[0].device.counts
        assert (counts.requests, counts.reads, counts.fenced) == (9, 3, 2)


@needs_transport
def test_a_device_that_makes_no_reads_refuses_gets() -> None:
    with Loop(np.zeros(8, np.uint8), memory(8), reads=0) as loop:
        loop.push(0, GET, 4)
        failure = loop.fails()
        assert failure.reason == "get: one of the two devices can't do RDMA reads; have the peer put the data"
        assert failure.status == lib.PROXYCCL_VERBS_NO_READS
        assert loop.peers[0].device.counts.requests == 0


@needs_transport
def test_a_read_that_fails_names_the_peer() -> None:
    with Loop(np.zeros(64, np.uint8), memory(64), peers=2) as loop:
        loop.peers[1].device.fail_request(2, REM_ACCESS_ERR)
        loop.push(1, GET, 8, count=3)
        failure = loop.fails()
        assert (failure.peer, failure.status) == (8, lib.PROXYCCL_VERBS_COMPLETION + REM_ACCESS_ERR)


@needs_transport
def test_a_ticket_is_complete_when_its_requests_are() -> None:
    """A ticket completes without a flush, and later requests do not delay it."""
    with Loop(np.zeros(64, np.uint8), memory(64), channels=2) as loop:
        (peer,) = loop.peers
        first, second = peer.channels
        peer.device.allow(0)
        got = loop.push(0, GET, 8)
        loop.let_poll(0)
        put = loop.push(0, PUT, 8, channel=1)
        loop.let_poll(0)
        assert (loop.service.completed(first), loop.service.completed(second)) == (0, 0)
        peer.device.allow(1)
        loop.wait(lambda: loop.service.completed(first) == got + 1, "the get")
        loop.let_poll(0)
        assert loop.service.completed(second) == 0
        peer.device.allow(-1)
        loop.wait(lambda: loop.service.completed(second) == put + 1, "the put")


@needs_transport
def test_tickets_are_told_of_while_triggers_keep_coming() -> None:
    with Loop(memory(64), np.zeros(64, np.uint8), send_depth=4, service={"fifo_size": 16}) as loop:
        (peer,) = loop.peers
        seen = {0}
        peer.device.dawdle(2, 1)
        for _ in range(2000):
            last = loop.push(0, PUT, 8)
            seen.add(loop.service.completed(peer.channels[0]))
        assert len(seen) > 20
        loop.wait(lambda: loop.service.completed(peer.channels[0]) == last + 1, "the last put")


@needs_transport
def test_a_device_that_takes_no_inline_data_refuses_values() -> None:
    with Loop(memory(8), np.zeros(8, np.uint8), fetch_add=True) as loop:
        loop.push(0, PUT, 4, value=7)
        failure = loop.fails()
        assert failure.reason == (
            "put of a value: the device does not support inline data, in which values travel; put them from memory"
        )


# -- signals ---


@needs_transport
@pytest.mark.parametrize("fetch_add", [False, True], ids=["inline-write", "fetch-add"])
def test_a_signal_with_a_value_raises_the_count(fetch_add: bool) -> None:
    with Loop(memory(8), np.zeros(8, np.uint8), fetch_add=fetch_add) as loop:
        loop.push(0, SIGNAL, 8, value=5)
        loop.push(0, SIGNAL)
        loop.push(0, SIGNAL, 8, value=1 << 40)
        loop.flush()
        assert [value for _, value, _ in loop.peers[0].device.signals] == [5, 6, 1 << 40]
        loop.push(0, SIGNAL, 8, value=1 << 40)
        assert loop.fails().reason == "a signal's value is not above the count of the channel's signals"


@needs_transport
@pytest.mark.parametrize("fetch_add", [False, True], ids=["inline-write", "fetch-add"])
@pytest.mark.parametrize("depth", [2, 16, 128])
def test_a_signal_arrives_behind_its_data(depth: int, fetch_add: bool) -> None:
    sizes = [1 + 37 * i % 501 for i in range(400)]
    source, destination = memory(501), np.zeros(501, np.uint8)
    with Loop(source, destination, send_depth=depth, max_message=100, fetch_add=fetch_add) as loop:
        (peer,) = loop.peers
        peer.device.dawdle(5, depth)
        for size in sizes:
            loop.push(0, PUT | SIGNAL, size)
        loop.flush()
        before = np.cumsum(sizes).tolist()
        assert peer.device.signals == [(peer.words.ctypes.data, i + 1, total) for i, total in enumerate(before)]
        assert peer.words[0] == len(sizes)
        assert peer.device.counts.inlined == (0 if fetch_add else len(sizes))
        # a fetch-and-add returns the value before the addition
        assert peer.scratch[0] == (len(sizes) - 1 if fetch_add else 0)


# -- flushes ---


@needs_transport
def test_a_flush_with_nothing_outstanding_is_over_at_once() -> None:
    with Loop(memory(8), np.zeros(8, np.uint8)) as loop:
        loop.peers[0].device.allow(0)
        loop.flush()
        assert loop.peers[0].flushed() == 1
        assert loop.peers[0].device.counts.posts == 0


@needs_transport
def test_a_flush_word_comes_with_the_last_completion() -> None:
    with Loop(memory(64), np.zeros(64, np.uint8), max_message=16) as loop:
        (peer,) = loop.peers
        peer.device.allow(0)
        ticket = loop.push(0, PUT | FLUSH, 64)
        loop.wait(lambda: peer.device.counts.requests == 4, "the requests")
        for executed in range(4):
            loop.let_poll(0)
            assert peer.device.counts.executed == executed
            assert peer.flushed() == 0
            peer.device.allow(1)
        loop.wait(lambda: peer.flushed() == ticket + 1, "the flush")


@needs_transport
def test_an_observer_sees_outstanding_work_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    described = {"description": Description(0, 2, "job", "program")}
    with Loop(memory(64), np.zeros(64, np.uint8), service=described) as loop:
        (peer,) = loop.peers
        ((path, publication),) = publications.find("job")
        with Observer(publication) as observer, Tracer(path, publication) as tracer:

            def progress() -> tuple[int, int]:
                tracer.fetch()  # the proxy stops tracing some time after the last fetch
                (connection,) = observer.snapshot().connections
                return connection.completed, connection.outstanding

            wait_until_traced(publication)
            peer.device.allow(0)
            for count in (1, 2, 3):
                loop.push(0, PUT, 8)
                loop.wait(lambda count=count: progress() == (0, count), "the puts are seen to be outstanding")
            allowed = time.monotonic_ns()
            peer.device.allow(3)
            loop.wait(lambda: progress() == (3, 0), "the puts are seen to be complete")
            triggers = tracer.stop().triggers
            assert [t.trigger.operation for t in triggers] == [PUT] * 3
            assert all(t.completed_ns is not None and t.issued_ns < allowed < t.completed_ns for t in triggers)


@needs_transport
def test_flushes_wait_each_for_what_is_before_it() -> None:
    with Loop(memory(64), np.zeros(64, np.uint8), channels=3) as loop:
        (peer,) = loop.peers
        peer.device.allow(0)
        for channel in (0, 1, 0, 2):
            loop.push(0, PUT | FLUSH, 8, channel=channel)
            loop.let_poll(0)
        assert peer.device.counts.posts == 4  # each flush needs a completion of its own
        for words in ([0, 0, 0], [1, 0, 0], [1, 2, 0], [3, 2, 0]):
            loop.let_poll(0)
            assert [peer.flushed(channel) for channel in range(3)] == words
            peer.device.allow(1)
        loop.wait(lambda: peer.flushed(2) == 4, "the last flush")


@needs_transport
def test_more_flushes_than_a_connection_notes_are_all_kept() -> None:
    """Many flushes wait for one put. The connection records some of the flushes; the other flushes stay in the ring."""
    with Loop(memory(64), np.zeros(64, np.uint8), service={"fifo_size": 1024}) as loop:
        (peer,) = loop.peers
        peer.device.allow(0)
        loop.push(0, PUT, 8)
        ticket = loop.push(0, FLUSH, count=900)
        loop.wait(lambda: loop.producer.taken(peer.channels[0]) >= OPERATIONS, "the first flushes")
        assert peer.flushed() == 0
        assert loop.producer.taken(peer.channels[0]) < 900
        peer.device.allow(-1)
        loop.wait(lambda: peer.flushed() == ticket + 1, "the last flush")


# -- limits and back-pressure ---


@needs_transport
@pytest.mark.parametrize("cq_depth", [1, 4, 16, 64])
@pytest.mark.parametrize("send_depth", [1, 3, 16])
def test_a_flood_fills_the_queues_and_breaks_no_limit(send_depth: int, cq_depth: int) -> None:
    source, destination = memory(4000), np.zeros(4000, np.uint8)
    with Loop(source, destination, send_depth=send_depth, cq_depth=cq_depth, max_message=64) as loop:
        (peer,) = loop.peers
        peer.device.dawdle(send_depth, 1)
        loop.push(0, PUT | SIGNAL, 4000, count=300)
        loop.flush()
        assert peer.device.breach is None
        assert peer.device.counts.requests == 300 * 64
        assert peer.device.counts.most_outstanding == min(send_depth, cq_depth)
        assert (destination == source).all()


@needs_transport
def test_a_full_connection_holds_back_its_own_ring_alone() -> None:
    source, destination = memory(64), np.zeros(64, np.uint8)
    slots, puts = 64, 2000
    with Loop(source, destination, peers=2, service={"fifos": 2, "fifo_size": slots}) as loop:
        full, other = loop.peers
        full.device.allow(0)
        flood = threading.Thread(target=loop.push, args=(0, PUT | SIGNAL, 8), kwargs={"count": puts})
        flood.start()
        try:
            # A trigger needs 2 of the send queue's 16 operations, but the worker waits until 3 are free.
            most = (16 + OPERATIONS - 2) // 2
            loop.wait(lambda: loop.producer.taken(full.channels[0]) == most, "a full connection")
            loop.push(1, PUT, 8, count=1000)
            loop.flush(1)
            assert other.device.counts.executed == 1000
            assert loop.producer.taken(full.channels[0]) == most
            assert full.device.counts.executed == 0
            assert flood.is_alive()
        finally:
            full.device.allow(-1)
            flood.join(60)
        assert not flood.is_alive()
        loop.flush(0)
        assert full.device.signals == [(full.words.ctypes.data, i + 1, 8 * (i + 1)) for i in range(puts)]


@needs_transport
@pytest.mark.parametrize(("operation", "size"), [(FLUSH, 0), (PUT | SIGNAL | FLUSH, 8)], ids=["flushes", "puts"])
def test_closing_drains_what_was_held_back_in_the_ring(operation: Operation, size: int) -> None:
    with Loop(memory(64), np.zeros(64, np.uint8), service={"fifo_size": 2048}) as loop:
        (peer,) = loop.peers
        peer.device.allow(0)
        loop.push(0, PUT, 8)
        loop.push(0, operation, size, count=1500)
        closing = threading.Thread(target=loop.service.close, args=(60.0,))
        closing.start()
        loop.let_poll(0)
        assert closing.is_alive()
        assert peer.flushed() == 0
        peer.device.allow(-1)
        closing.join(60)
        assert not closing.is_alive()
        assert peer.flushed() == 1501
        assert peer.device.counts.executed == 1 + (2 * 1500 if size else 0)


# -- chains ---


def push_at_once(loop: Loop, puts: int) -> None:
    """Pushes puts while the worker is blocked, so that the worker finds all puts in the ring at the same time, and then
    flushes.
    """
    with Gate() as gate:
        handler = loop.service.add_handler(lambda _: gate.wait())
        loop.producer.push(Trigger(Operation.CUSTOM, handler))
        loop.push(0, PUT, 8, count=puts)
    loop.flush()


@needs_transport
@pytest.mark.parametrize(
    ("send_depth", "puts", "posts", "longest"),
    [(128, 5, 1, 5), (128, 32, 1, 32), (128, 33, 2, 32), (128, 100, 4, 32), (4, 2, 1, 2), (2, 9, 9, 1)],
)
def test_requests_are_posted_in_chains_with_the_last_signalled(
    send_depth: int, puts: int, posts: int, longest: int
) -> None:
    with Loop(memory(64), np.zeros(64, np.uint8), send_depth=send_depth) as loop:
        push_at_once(loop, puts)
        counts = loop.peers[0].device.counts
        assert (counts.posts, counts.requests, counts.signalled) == (posts, puts, posts)
        assert counts.longest_chain == longest


# -- failures ---


@needs_transport
@pytest.mark.parametrize("number", [1, 2, 20])
def test_a_failed_request_ends_the_communicator_with_its_status(number: int) -> None:
    def body(comm: Communicator) -> TransportError:
        peer = FakePeer(comm.proxy, memory(64), np.zeros(64, np.uint8), rank=7)
        peer.device.fail_request(number, REM_ACCESS_ERR)
        Producer(comm.proxy).push(peer.trigger(PUT | FLUSH, 8), 30)
        wait_for(lambda: comm.group.failure.aborted, "the abort")
        assert peer.flushed() < number
        with pytest.raises(TransportError) as caught:
            comm.synchronize()
        comm.proxy.close()
        with peer.device:
            return caught.value

    (error,) = run_ranks(1, body)
    assert error.peer == 7
    assert "to rank 7 " in str(error)
    assert "IBV_WC_REM_ACCESS_ERR" in str(error)
    assert "registered" in str(error)


@needs_transport
def test_the_failure_names_the_connection_and_first_status() -> None:
    with Loop(memory(64), np.zeros(64, np.uint8), peers=3) as loop:
        loop.peers[1].device.fail_request(3, REM_ACCESS_ERR)
        for peer in range(3):
            loop.push(peer, PUT, 8, count=10)
        failure = loop.fails()
        assert failure.code == native.PROXYCCL_ERROR_TRANSPORT
        assert failure.peer == 8
        assert failure.status == lib.PROXYCCL_VERBS_COMPLETION + REM_ACCESS_ERR
        assert failure.reason.startswith("completion: IBV_WC_REM_ACCESS_ERR, ")


@needs_transport
@pytest.mark.parametrize(("key", "name"), [("source", "LOC_PROT_ERR"), ("destination", "REM_ACCESS_ERR")])
def test_memory_under_a_wrong_key_fails_at_the_device(key: str, name: str) -> None:
    source, destination = memory(64), np.zeros(64, np.uint8)
    with Loop(source, destination) as loop:
        array = source if key == "source" else destination
        wrong = loop.service.add_memory(array.ctypes.data, array.nbytes, [LKEY + RKEY])
        trigger = loop.peers[0].trigger(PUT, 8)
        loop.producer.push(
            replace(trigger, src_memory=wrong) if key == "source" else replace(trigger, dst_memory=wrong)
        )
        failure = loop.fails()
        assert f"IBV_WC_{name}" in failure.reason
        assert not destination.any()


@needs_transport
@pytest.mark.parametrize("number", [1, 2])
def test_a_post_that_is_refused_is_a_failure(number: int) -> None:
    with Loop(memory(64), np.zeros(64, np.uint8), send_depth=2) as loop:
        loop.peers[0].device.fail_post(number, errno.ENOMEM)
        loop.push(0, PUT | FLUSH, 8, count=3)
        failure = loop.fails()
        assert (failure.status, failure.peer) == (errno.ENOMEM, 7)
        assert "Cannot allocate memory" in failure.reason
        assert loop.peers[0].flushed() < number


@needs_transport
def test_long_messages_do_not_wait_for_a_chain() -> None:
    nbytes = 64 << 10
    source, destination = memory(nbytes), np.zeros(nbytes, np.uint8)
    with Loop(source, destination, max_message=nbytes) as loop:
        loop.push(0, PUT, nbytes, destination=0, count=20)
        loop.flush()
        counts = loop.peers[0].device.counts
        assert (counts.requests, counts.posts, counts.longest_chain) == (20, 20, 1)
        assert (destination == source).all()


@needs_transport
def test_a_refused_post_of_a_full_chain_names_the_trigger() -> None:
    """The worker notices the failure while it executes the trigger, not at a later poll, so the error names the
    trigger.
    """
    with Loop(memory(64), np.zeros(64, np.uint8), max_message=1, send_depth=2 * CHAIN) as loop:
        loop.peers[0].device.fail_post(1, errno.EINVAL)
        loop.push(0, PUT, 64, destination=0)
        failure = loop.fails()
        assert failure.trigger is not None
        assert (failure.trigger.operation, failure.channel) == (PUT, loop.peers[0].channels[0])
        assert failure.reason == "put: Invalid argument"
        assert failure.peer == 7


@needs_transport
def test_polls_that_fail_are_a_failure() -> None:
    with Loop(memory(64), np.zeros(64, np.uint8)) as loop:
        loop.peers[0].device.fail_polls()
        loop.push(0, PUT, 8)
        failure = loop.fails()
        assert (failure.status, failure.peer) == (errno.EIO, 7)
        assert failure.reason == "completion: Input/output error"


@needs_transport
def test_a_refused_trigger_names_the_peer_that_it_was_for() -> None:
    with Loop(memory(64), np.zeros(64, np.uint8), peers=2) as loop:
        loop.push(1, PUT, 65)
        failure = loop.fails()
        assert (failure.code, failure.peer) == (native.PROXYCCL_ERROR_BAD_TRIGGER, 8)
        assert failure.reason.startswith("the transfer leaves the source memory")


@needs_transport
def test_statuses_have_the_names_of_verbs() -> None:
    with FakeDevice() as device:
        names = device.status_names()
    texts = [
        find_transport("verbs").status_text(lib.PROXYCCL_VERBS_COMPLETION + status) for status in range(len(names) + 1)
    ]
    assert [text.split(", ")[0] for text in texts] == [*names, f"work completion status {len(names)}"]


def test_a_status_is_put_into_words() -> None:
    base = lib.PROXYCCL_VERBS_COMPLETION
    assert find_transport("verbs").status_text(base + 12).startswith("IBV_WC_RETRY_EXC_ERR, ")
    assert find_transport("verbs").status_text(errno.ENOMEM) == "Cannot allocate memory"
    assert find_transport("copy").status_text(700) == ""


# -- options ---


def some(**wrong: Any) -> Any:
    fields = {"send_depth": 16, "cq_depth": 16, "max_message": 4096, "signal_rkey": SIGNAL_RKEY}
    return verbs_options(wrong.pop("qp", 8), **{**fields, **wrong})


@needs_transport
def test_a_connection_knows_what_it_is() -> None:
    with Loop(memory(8), np.zeros(8, np.uint8)) as loop:
        connection = loop.peers[0].connection
        assert (connection.transport, connection.peer) == ("verbs", 7)


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("qp", {"qp": 0}),
        ("qp", {"qp": -1}),
        ("send_depth", {"send_depth": 0}),
        ("send_depth", {"send_depth": 1 << 32}),
        ("cq_depth", {"cq_depth": 0}),
        ("max_message", {"max_message": 0}),
        ("max_message", {"max_message": 1.5}),
        ("signal_rkey", {"signal_rkey": None}),
        ("scratch", {"signal": lib.PROXYCCL_VERBS_FETCH_ADD}),
        ("scratch", {"signal": lib.PROXYCCL_VERBS_FETCH_ADD, "scratch": 4}),
        ("scratch_lkey", {"signal": lib.PROXYCCL_VERBS_FETCH_ADD, "scratch": 8, "scratch_lkey": -1}),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(argument: str, options: dict[str, Any]) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError) as caught:
            comm.proxy.connect("verbs", some(**options), peer=0)
        assert caught.value.argument == argument

    run_ranks(1, body)


if not BUILT:

    def test_a_build_without_the_transport_says_what_to_install() -> None:
        def body(comm: Communicator) -> None:
            with pytest.raises(RuntimeUnavailableError, match="libibverbs-dev"):
                comm.proxy.connect("verbs", some())

        run_ranks(1, body)


# -- pyverbs' objects ---


def found_in(address: int, offset: int, qp_num: int) -> tuple[int, int, int]:
    found = ffi.new("ProxycclVerbsQp *")
    return lib.proxyccl_verbs_find_qp(address, offset, qp_num, found), found.qp, found.send_cq


@needs_transport
def test_a_queue_pair_is_found_in_its_holder() -> None:
    with FakeDevice() as device:
        holder = (ctypes.c_uint64 * 8)()
        holder[5] = device.qp
        address = ctypes.addressof(holder)
        assert found_in(address, lib.PROXYCCL_VERBS_QP_OFFSET, device.qp_num) == (
            lib.PROXYCCL_VERBS_FOUND,
            device.qp,
            device.cq,
        )
        assert found_in(address, 40, device.qp_num + 1) == (lib.PROXYCCL_VERBS_OTHER_QP, 0, 0)
        assert found_in(address, 48, device.qp_num) == (lib.PROXYCCL_VERBS_NO_POINTER, 0, 0)


@needs_transport
def test_an_address_that_leads_nowhere_is_no_fault() -> None:
    holder = (ctypes.c_uint64 * 8)(*[1 << 46] * 8)
    assert found_in(8, 40, 1)[0] == lib.PROXYCCL_VERBS_NO_OBJECT
    assert found_in(ctypes.addressof(holder), 40, 1)[0] == lib.PROXYCCL_VERBS_NO_POINTER
    with mmap.mmap(-1, 2 * mmap.PAGESIZE) as pages:  # too short for the queue pair that `holder` points to
        last = ctypes.addressof(ctypes.c_char.from_buffer(pages)) + 2 * mmap.PAGESIZE - 8
        holder[5] = last
        finding = found_in(ctypes.addressof(holder), 40, 1)[0]
    assert finding in (lib.PROXYCCL_VERBS_NO_POINTER, lib.PROXYCCL_VERBS_OTHER_QP)


@needs_transport
@pytest.mark.parametrize("part", ["pd", "send_cq", "recv_cq"])
@pytest.mark.parametrize("where", ["nowhere", "another context"])
def test_a_queue_pair_whose_parts_do_not_agree_is_not_believed(part: str, where: str) -> None:
    """Copies a device's queue pair and changes one pointer, which the engine must notice."""
    order = ("context", "qp_context", "pd", "send_cq", "recv_cq", "srq")
    with FakeDevice() as device:
        forged = (ctypes.c_uint64 * 16).from_buffer_copy(ctypes.string_at(device.qp, 128))
        address = ctypes.addressof(forged)
        found = ffi.new("ProxycclVerbsQp *")
        assert lib.proxyccl_verbs_check_qp(address, device.qp_num, found) == lib.PROXYCCL_VERBS_FOUND
        other = (ctypes.c_uint64 * 8)(address)
        forged[order.index(part)] = 0 if where == "nowhere" else ctypes.addressof(other)
        assert lib.proxyccl_verbs_check_qp(address, device.qp_num, found) == lib.PROXYCCL_VERBS_OTHER_PARTS


# -- the bare loop: writes posted without the engine ---


def bare_writes(device: FakeDevice, source: NDArray[np.uint8], destination: NDArray[np.uint8], **changes: int) -> int:
    """Posts writes in a loop without the engine. Returns the time in nanoseconds, or a negative status."""
    options = {
        "qp": device.qp,
        "cq": device.cq,
        "local": source.ctypes.data,
        "lkey": LKEY,
        "remote": destination.ctypes.data,
        "rkey": RKEY,
        "bytes": source.nbytes,
        "depth": 16,
        "chain": 1,
        "signal_every": 1,
        "count": 100,
        "timeout_ns": 30_000_000_000,
        **changes,
    }
    device.register(LKEY, source)
    device.register(RKEY, destination)
    return verbs_write(**options)


@needs_transport
@pytest.mark.parametrize(
    ("depth", "chain", "signal_every", "posts", "signalled"),
    [(1, 1, 1, 1003, 1003), (16, 1, 1, 1003, 1003), (16, 1, 16, 1003, 63), (16, 8, 8, 126, 126), (16, 4, 13, 251, 78)],
)
def test_the_bare_loop_writes_as_often_as_it_is_told(
    depth: int, chain: int, signal_every: int, posts: int, signalled: int
) -> None:
    source, destination = memory(100), np.zeros(100, np.uint8)
    with FakeDevice(16) as device:
        device.dawdle(7, 1)
        changes = {"depth": depth, "chain": chain, "signal_every": signal_every, "count": 1003}
        assert bare_writes(device, source, destination, **changes) > 0
        counts = device.counts
        assert counts.executed == counts.requests == 1003
        assert (counts.posts, counts.signalled, counts.longest_chain) == (posts, signalled, chain)
        assert counts.most_outstanding <= depth
        assert (destination == source).all()


@needs_transport
@pytest.mark.parametrize(
    "changes",
    [
        {"qp": 0},
        {"cq": 0},
        {"count": 0},
        {"depth": 0},
        {"chain": 0},
        {"chain": 65, "depth": 1000},
        {"chain": 17},
        {"signal_every": 0},
        {"signal_every": 17},
        {"chain": 8, "signal_every": 10},
    ],
    ids=str,
)
def test_the_bare_loop_refuses_what_it_could_not_finish(changes: dict[str, int]) -> None:
    with FakeDevice() as device:
        assert bare_writes(device, memory(8), np.zeros(8, np.uint8), **changes) == -errno.EINVAL
        assert device.counts.posts == 0


@needs_transport
def test_the_bare_loop_says_what_failed() -> None:
    source, destination = memory(8), np.zeros(8, np.uint8)
    with FakeDevice() as device:
        device.allow(5)
        assert bare_writes(device, source, destination, timeout_ns=20_000_000) == -errno.ETIMEDOUT
    with FakeDevice() as device:
        device.fail_request(9, REM_ACCESS_ERR)
        failed = -(lib.PROXYCCL_VERBS_COMPLETION + REM_ACCESS_ERR)
        assert bare_writes(device, source, destination) == failed
    with FakeDevice() as device:
        device.fail_post(2, errno.ENOMEM)
        assert bare_writes(device, source, destination) == -errno.ENOMEM
    with FakeDevice() as device:
        device.fail_polls()
        assert bare_writes(device, source, destination) == -errno.EIO
