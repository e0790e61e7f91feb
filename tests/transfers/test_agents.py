"""Agents of one process, over every path: data, messages, their order, and errors."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from proxyccl.channels.transfers.peers import Peer
from proxyccl.device.errors import ArgumentError, ClosedError
from proxyccl.proxy._transfers import ffi, lib
from proxyccl.transfer import (
    ActiveError,
    Agent,
    CanceledError,
    DisconnectedError,
    MetadataError,
    NameTakenError,
    NotRegisteredError,
    NotStartedError,
    State,
    TransferTimeoutError,
    UnknownAgentError,
    strided,
)
from support.agents import PATHS, LateMemory, Pair, force_path

pytestmark = [
    pytest.mark.host_only("agents move the host's memory, whatever the runtime"),
]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, pair: Pair) -> str:
    force_path(pair.a, request.param)
    assert pair.a.connect("b").name == request.param
    return request.param


def many(pair: Pair) -> np.ndarray:
    """Returns blocks of all lengths, whose order differs between the two memories."""
    random = np.random.default_rng(3)
    starts = np.arange(0, len(pair.ours) // 2, 401, dtype=np.uint64)
    there = random.permutation(starts)
    lengths = random.integers(0, 401, len(starts))
    return np.stack((starts, there, lengths), 1).astype(np.uint64)


@pytest.mark.parametrize("path", ["process_vm", "unix", "tcp"])
def test_regions_may_lie_side_by_side(path: str) -> None:
    """Blocks that are adjacent in both memories are merged into one, which may extend over two regions."""
    ours, theirs = np.zeros(300, np.uint8), np.arange(300, dtype=np.uint16).astype(np.uint8)
    with Agent("a", paths=[path]) as a, Agent("b", listen=["127.0.0.1"]) as b:
        for agent, memory in ((a, ours), (b, theirs)):
            for start in (100, 0, 200):
                agent.register(memory[start : start + 100])
        a.add(b.metadata())
        here, there = ours.ctypes.data, theirs.ctypes.data
        a.read("b", [(here, there, 100), (here + 100, there + 100, 100)]).wait()
        assert (ours[:200] == theirs[:200]).all()
        assert not ours[200:].any()
        b.deregister(b.regions[0])
        if path != "process_vm":  # with process_vm the peer does not see the read
            with pytest.raises(NotRegisteredError):
                a.read("b", [(here, there, 100), (here + 100, there + 100, 100)]).wait()


def test_blocks_arrive_where_they_belong(pair: Pair, path: str) -> None:
    blocks, big = many(pair), (len(pair.ours) // 2, len(pair.ours) // 2, len(pair.ours) // 2)
    expected = np.zeros_like(pair.ours)
    for here, there, nbytes in [*blocks.astype(int), big]:
        expected[here : here + nbytes] = pair.theirs[there : there + nbytes]
    pair.a.read("b", pair.blocks(*map(tuple, blocks), big)).wait()
    np.testing.assert_array_equal(pair.ours, expected)

    pair.ours[:] = np.random.default_rng(5).integers(0, 256, len(pair.ours), dtype=np.uint8)
    expected = pair.theirs.copy()
    for here, there, nbytes in [*blocks.astype(int), big]:
        expected[there : there + nbytes] = pair.ours[here : here + nbytes]
    pair.a.write("b", pair.blocks(*map(tuple, blocks), big)).wait()
    np.testing.assert_array_equal(pair.theirs, expected)


def test_a_message_comes_after_the_data_of_its_transfer(pair: Pair, path: str) -> None:
    pair.ours[:] = 9
    transfer = pair.a.prepare("write", "b", pair.whole())
    for message in (b"one", b"", b"\0\xff"):
        pair.theirs[:] = 0
        transfer.start(message)
        pair.b.wait_for_message(60)
        assert (pair.theirs == 9).all()
        assert pair.b.messages() == [("a", message)]
        transfer.wait(60)


@pytest.mark.parametrize("path", PATHS[1:], indirect=True)
def test_a_caller_may_stop_polling(pair: Pair, path: str) -> None:
    transfer = pair.a.prepare("read", "b", pair.whole())
    for _ in range(20):
        transfer.start(b"told")
        for _ in range(3):
            transfer.done()
        deadline = time.monotonic() + 60
        while transfer.state is State.ACTIVE and time.monotonic() < deadline:
            time.sleep(0.0005)  # reading `state` does not advance the transfer
        assert transfer.state is State.DONE


@pytest.mark.parametrize("path", ["unix", "tcp"])
def test_a_short_write_ends_although_a_long_read_filled_the_turn(path: str) -> None:
    """The answer to a write has no body, so it may be the last bytes that the agent has read from the socket."""
    pair = Pair(6 << 20)
    force_path(pair.a, path)
    with contextlib.closing(pair):
        long, short = pair.a.prepare("read", "b", pair.whole()), pair.a.prepare("write", "b", pair.blocks((0, 0, 4096)))
        for _ in range(30):
            long.start()
            short.start()
            long.wait(60)
            short.wait(10)


def test_within_an_agent(pair: Pair) -> None:
    pair.ours[:10] = 1
    region = pair.our_region
    transfer = pair.a.write("a", [(region.address, region.address + 100, 10)], message=b"to myself")
    transfer.wait()
    assert pair.a.connect("a").name == "self"
    assert (pair.ours[100:110] == 1).all()
    pair.a.notify("a", b"again")
    assert pair.a.messages() == [("a", b"to myself"), ("a", b"again")]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_an_inbox_that_never_becomes_empty_does_not_grow() -> None:
    """Messages that arrive while a program takes others remain in the inbox."""
    with Agent("a") as agent:
        one = 16 + 1 + (1 << 20)  # bytes of a message in the inbox: two lengths, the sender's name, and the text
        room = ffi.new("char[]", one)
        agent.notify("a", bytes(1 << 20))
        before = resident_bytes()
        for number in range(100):
            agent.notify("a", bytes([number]) * (1 << 20))
            assert lib.proxyccl_agent_take(agent._handle, room, one) == one
        assert resident_bytes() < before + 50_000_000
        assert agent.messages() == [("a", b"\x63" * (1 << 20))]


def test_messages_keep_their_order_and_contents(pair: Pair, path: str) -> None:
    sent = [b"", b"\0\xff", b"x" * (1 << 20), *(b"%d" % number for number in range(5000))]
    for message in sent:
        pair.a.notify("b", message)
    got: list[tuple[str, bytes]] = []
    while len(got) < len(sent):
        pair.b.wait_for_message(60)
        got += pair.b.messages()
    assert got == [("a", message) for message in sent]
    assert pair.a.messages() == []


def test_blocks_that_are_not_registered_are_refused(pair: Pair) -> None:
    last = len(pair.ours)
    for block, side in (((last - 10, 0, 20), "local"), ((0, last - 10, 20), "remote"), ((last, 0, 1), "local")):
        with pytest.raises(NotRegisteredError, match=f"block 1: .* at {side} address"):
            pair.a.read("b", pair.blocks((0, 0, 10), block))
    assert not pair.ours.any()
    pair.a.read("b", pair.blocks((last - 10, 0, 10))).wait()


def test_memory_that_the_peer_has_deregistered_is_refused(pair: Pair, path: str) -> None:
    transfer = pair.a.prepare("read", "b", pair.whole())
    writing = pair.a.prepare("write", "b", pair.whole())
    before = pair.theirs.copy()
    pair.b.deregister(pair.their_region)
    with pytest.raises(NotRegisteredError):
        transfer.start().wait()
    with pytest.raises(NotRegisteredError):
        writing.start().wait()
    assert transfer.state is State.REFUSED
    assert not pair.ours.any()
    np.testing.assert_array_equal(pair.theirs, before)
    pair.b.register(pair.theirs)  # registers the same address again
    with pytest.raises(NotRegisteredError):
        transfer.start().wait()
    pair.a.add(pair.b.metadata())
    pair.a.read("b", pair.whole()).wait()
    np.testing.assert_array_equal(pair.ours, pair.theirs)


def test_canceled_transfers_write_nothing_more_and_links_go_on(pair: Pair, path: str) -> None:
    reading, writing = (pair.a.prepare(operation, "b", pair.whole()) for operation in ("read", "write"))
    for _ in range(30):
        for transfer in (reading, writing):
            transfer.start(b"canceled")
            transfer.cancel()
            pair.ours[:] = 0
            if transfer.state is State.DONE:  # the transfer ended before cancel()
                continue
            with pytest.raises(CanceledError):
                transfer.wait()
    # If the canceled transfers still sent data, that data would arrive before this read's data.
    pair.a.read("b", pair.blocks((0, 0, 100)), message=b"last").wait()
    assert not pair.ours[100:].any()
    np.testing.assert_array_equal(pair.ours[:100], pair.theirs[:100])


def test_states(pair: Pair, path: str) -> None:
    transfer = pair.a.prepare("read", "b", pair.whole())
    assert transfer.state is State.NEW
    with pytest.raises(NotStartedError):
        transfer.wait()
    for _ in range(3):
        pair.ours[:] = 0
        transfer.start().wait()
        assert transfer.done()
        np.testing.assert_array_equal(pair.ours, pair.theirs)
    times = transfer.times
    assert 0 < times.posted <= times.ended
    assert times.posted <= times.returned <= time.monotonic_ns()
    transfer.close()
    with pytest.raises(ClosedError):
        transfer.start()


def test_threads_share_an_agent(pair: Pair, path: str) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(20):
                start = (number * 20 + step) * 4096
                pair.a.read("b", pair.blocks((start, start, 2048), (start + 3000, start + 3000, 1000))).wait(60)
                pair.a.notify("b", b"%d" % step)
                pair.b.messages()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    rows = 120 * 4096
    for part in (slice(0, 2048), slice(3000, 4000)):
        np.testing.assert_array_equal(
            pair.ours[:rows].reshape(-1, 4096)[:, part], pair.theirs[:rows].reshape(-1, 4096)[:, part]
        )


def test_a_closed_agent(pair: Pair, path: str) -> None:
    transfer = pair.a.read("b", pair.whole())
    transfer.wait()
    pair.b.close()
    with pytest.raises(DisconnectedError):  # noqa: PT012  the loop ends when the agent notices the lost link
        while True:
            pair.a.notify("b", b"")
    with pytest.raises(DisconnectedError, match="closed the link"):
        transfer.start().wait()
    pair.a.close()
    for call in (pair.a.metadata, lambda: pair.a.notify("a", b""), lambda: pair.a.prepare("read", "b", [])):
        with pytest.raises(ClosedError):
            call()
    with pytest.raises(CanceledError):
        transfer.start().wait()


def test_a_second_close_returns_when_the_first_has_ended(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second close() that returned early would free memory that the first still uses."""
    entered, returned = threading.Event(), threading.Event()
    was_early = []

    def leave(_: Peer) -> None:
        entered.set()
        was_early.append(returned.wait(0.2))

    monkeypatch.setattr(Peer, "leave", leave)
    first = threading.Thread(target=pair.a.close)
    first.start()
    assert entered.wait(60)
    pair.a.close()
    returned.set()
    first.join()
    assert was_early == [False]


@pytest.mark.parametrize("path", ["process_vm", "self"])
def test_close_returns_only_when_no_thread_copies(pair: Pair, path: str) -> None:
    with contextlib.closing(LateMemory(pair.theirs.nbytes)) as late:
        region = pair.a.register((late.address, late.nbytes))
        ours = pair.a.register(pair.theirs) if path == "self" else pair.their_region
        force_path(pair.a, path)
        transfer = pair.a.prepare("read", "a" if path == "self" else "b", [(region.address, ours.address, late.nbytes)])
        starting = threading.Thread(target=transfer.start)
        starting.start()
        late.wait_for_access()
        closed = threading.Event()
        closing = threading.Thread(target=lambda: (pair.a.close(), closed.set()))
        closing.start()
        was_early = closed.wait(0.5)
        late.appear()
        starting.join()
        closing.join()
        assert not was_early


def test_an_agent_that_joins_later_under_the_same_name(pair: Pair) -> None:
    pair.a.read("b", pair.whole()).wait()
    pair.b.close()
    later = Agent("b", listen=())
    region = later.register(np.full(10, 5, np.uint8))
    with pytest.raises(NameTakenError):
        pair.a.add(later.metadata())
    pair.a.remove("b")
    with pytest.raises(UnknownAgentError):
        pair.a.notify("b", b"")
    assert pair.a.add(later.metadata()) == "b"
    pair.a.read("b", [(pair.our_region.address, region.address, 10)]).wait()
    assert (pair.ours[:10] == 5).all()
    later.close()


def test_metadata(pair: Pair) -> None:
    for junk in (b"", b"junk", pair.b.metadata()[:100], b'{"format":"another"}', pair.b.metadata() + b"x"):
        with pytest.raises(MetadataError):
            pair.a.add(junk)
    with pytest.raises(ArgumentError, match="this one's name"):
        pair.a.add(pair.a.metadata())
    with pytest.raises(UnknownAgentError):
        pair.b.add(pair.a.metadata(place=False))
    extra = pair.b.register(np.zeros(10, np.uint8), label="extra")
    pair.a.add(pair.b.metadata([extra], place=False))
    assert pair.a.regions_of("b") == [pair.their_region, extra]
    pair.b.deregister(extra)
    with pytest.raises(NotRegisteredError):
        pair.b.deregister(extra)
    with pytest.raises(NotRegisteredError):
        pair.b.metadata([extra])


def test_wrong_arguments(pair: Pair) -> None:
    for name in ("", "a\0b", "x" * 1025, 7):
        with pytest.raises(ArgumentError, match="name"):
            Agent(name)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="listen"):
        Agent("c", listen=["203.0.113.1"])
    with pytest.raises(ArgumentError, match="read-only"):
        pair.a.register(np.frombuffer(b"bytes", np.uint8))
    with pytest.raises(ArgumentError, match="operation"):
        pair.a.prepare("copy", "b", [])
    for blocks in ([(1, 2)], [(1, 2, -3)], [(1.5, 2, 3)], np.zeros(3, np.uint64)):
        with pytest.raises(ArgumentError, match="blocks"):
            pair.a.prepare("read", "b", blocks)
    with pytest.raises(UnknownAgentError):
        pair.a.prepare("read", "c", [])
    pair.a.read("b", []).wait()
    with pytest.raises(TransferTimeoutError):
        pair.a.wait_for_message(0.01)


def test_blocks_that_follow_each_other_are_one(pair: Pair) -> None:
    region = pair.our_region.address
    there = pair.their_region.address
    joined = pair.a.prepare("read", "b", strided(region, there, 64, 100, 64))
    apart = pair.a.prepare("read", "b", strided(region, there, 64, 100, 128))
    one_side = pair.a.prepare("read", "b", strided(region, there, 64, 100, 64, 128))
    assert [each.blocks for each in (joined, apart, one_side)] == [1, 100, 100]
    assert joined.nbytes == apart.nbytes == 6400
    one_side.start().wait()
    np.testing.assert_array_equal(pair.ours[:6400].reshape(100, 64), pair.theirs[:12800].reshape(100, 128)[:, :64])


def test_an_active_transfer_is_not_started_again(pair: Pair) -> None:
    force_path(pair.a, "unix")
    transfer = pair.a.prepare("read", "b", pair.whole())
    with pytest.raises(ActiveError):  # noqa: PT012  the loop ends when start() raises, usually at the second call
        while True:
            transfer.start()
    transfer.wait()


def test_idle_agents_take_no_processor_time(pair: Pair) -> None:
    pair.a.read("b", pair.whole()).wait()

    def spent() -> int:
        threads = [task for task in Path("/proc/self/task").iterdir() if "agent" in (task / "comm").read_text()]
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)

    before = spent()
    time.sleep(0.2)
    assert spent() - before < 5_000_000


def test_a_wait_ends_in_time_although_it_copies(pair: Pair) -> None:
    transfer = pair.a.prepare("read", "b", np.repeat(pair.whole(), 20_000, axis=0))  # seconds
    transfer.start()
    with pytest.raises(TransferTimeoutError):
        transfer.wait(0.01)
    transfer.cancel()


def test_threads_that_wait_for_a_copy_help_with_it() -> None:
    big = Pair(4 << 20)
    transfer = big.a.prepare("read", "b", big.whole())

    def poll() -> None:
        with contextlib.suppress(CanceledError):
            while not transfer.done():
                pass

    def wait() -> None:
        with contextlib.suppress(CanceledError):
            transfer.wait()

    for canceled in (False, True) * 2:
        big.ours[:] = 0
        transfer.start()
        threads = [threading.Thread(target=run) for run in (poll, wait, wait)]
        for thread in threads:
            thread.start()
        if canceled:
            transfer.cancel()
        for thread in threads:
            thread.join()
        if not canceled:
            np.testing.assert_array_equal(big.ours, big.theirs)
    big.close()
