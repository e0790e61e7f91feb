"""Weights from sources to targets: versions, late and restarted targets, lost agents, targets that relay parts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from proxyccl.channels.weights.card import CARD, MESSAGE, HasRead, Join, Leave
from proxyccl.device.errors import ArgumentError
from proxyccl.transfer import (
    Agent,
    DisconnectedError,
    MetadataError,
    NotStartedError,
    Transfer,
    TransferError,
    TransferTimeoutError,
)
from proxyccl.weights import Replicate, Shard, Sharding, WeightSource, WeightTarget
from support.agents import child

pytestmark = [pytest.mark.host_only("the host's memory moves alike on every runtime")]

ROWS, COLUMNS = 12, 8
WORDS_BYTES = 16
"""The size of a holder's version and number, which is less than any part of these tests."""


def matrix(version: int, name: str = "w") -> NDArray[np.float32]:
    """Returns the values that a tensor has in a version of the weights."""
    return np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) + 1000 * version + len(name)


class Trainer:
    """Sources among which the rows of the tensors w and up are divided."""

    def __init__(self, *names: str) -> None:
        sharding = Sharding((ROWS, COLUMNS), names, [Shard(0)])
        self.agents = [Agent(name) for name in names]
        self.sources = [WeightSource(agent) for agent in self.agents]
        self.boxes = [sharding.box(name) for name in names]
        self.memory = [{tensor: np.zeros(box.shape, np.float32) for tensor in ("w", "up")} for box in self.boxes]
        for source, memory in zip(self.sources, self.memory, strict=True):
            for tensor, array in memory.items():
                source.add(tensor, array, sharding=sharding)
        self.cards = [source.card() for source in self.sources]

    def train(self, version: int) -> None:
        for box, memory in zip(self.boxes, self.memory, strict=True):
            for tensor, array in memory.items():
                array[:] = matrix(version, tensor)[box.start[0] : box.start[0] + box.shape[0]]

    def offer(self, version: int, **options: Any) -> list[Any]:
        """Makes each source offer a version, in its own thread. Returns the results."""
        return run([lambda source=source: source.offer(version, **options) for source in self.sources])


class Sampler:
    """A target with a range of columns of w and up, which are fused in one array."""

    def __init__(self, name: str, first: int = 0, last: int = COLUMNS, timeout: float | None = None) -> None:
        self.columns = slice(first, last)
        self.agent = Agent(name, timeout=timeout)
        self.target = WeightTarget(self.agent)
        self.fused = np.zeros((2 * ROWS, last - first), np.float32)
        for tensor, rows in (("w", slice(0, ROWS)), ("up", slice(ROWS, None))):
            self.target.add(tensor, self.fused, within=rows, start=(0, first), size=(ROWS, COLUMNS))

    def holds(self, version: int) -> bool:
        expected = np.concatenate([matrix(version, tensor)[:, self.columns] for tensor in ("w", "up")])
        return bool((self.fused == expected).all())


class Staged:
    """A target that first reads w and then up into the same memory."""

    def __init__(self, name: str) -> None:
        self.agent = Agent(name)
        self.target = WeightTarget(self.agent)
        self.memory = np.zeros((ROWS, COLUMNS), np.float32)
        self.target.add("w", self.memory)
        self.target.next_group()
        self.target.add("up", self.memory)


def connect(trainer: Trainer, samplers: Sequence[Sampler | Staged]) -> None:
    cards = [sampler.target.card() for sampler in samplers]
    for number, sampler in enumerate(samplers):
        sampler.target.connect(trainer.cards, peers=cards[:number] + cards[number + 1 :])


def ignore(_: str) -> None:
    """Does nothing."""


def watch_reads(
    sampler: Sampler | Staged,
    *,
    before: Callable[[str], object] = ignore,
    after: Callable[[str], object] = ignore,
    looked: Callable[[str], object] = ignore,
) -> None:
    """Calls `before(peer)` before, and `after(peer)` after each read of weights from a peer by a sampler that connects
    after this call, and `looked(peer)` after each read of the peer's version.
    """
    prepare, wait = sampler.agent.prepare, sampler.agent.wait

    def prepared(operation: str, peer: str, blocks: Any) -> Transfer:
        transfer = prepare(operation, peer, blocks)
        start = transfer.start

        def started(**options: Any) -> Transfer:
            before(peer)
            return start(**options)

        if transfer.nbytes > WORDS_BYTES:
            transfer.start = started  # type: ignore[method-assign]
        return transfer

    def waited(transfers: Sequence[Transfer], timeout: float) -> None:
        wait(transfers, timeout)
        for transfer in transfers:
            (after if transfer.nbytes > WORDS_BYTES else looked)(transfer.peer)

    sampler.agent.prepare, sampler.agent.wait = prepared, waited  # type: ignore[assignment, method-assign]


def words_of(holder: WeightSource | WeightTarget) -> Any:
    """Returns the words of a holder that others read, which are the version that it offers, and its number."""
    card = CARD.decode(holder.card(), "a holder of weights")
    return np.ctypeslib.as_array((ctypes.c_uint64 * 2).from_address(card.version_address))


def run(bodies: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return [future.result() for future in [pool.submit(body) for body in bodies]]


@pytest.fixture
def keep() -> Iterator[Callable[[Any], Any]]:
    """Yields a function that takes a trainer or a sampler, returns it, and closes its agents after the test."""
    with contextlib.ExitStack() as stack:

        def kept(holder: Any) -> Any:
            for agent in getattr(holder, "agents", None) or [holder.agent]:
                stack.callback(agent.close)
            return holder

        yield kept


Keep = Callable[[Any], Any]


def test_each_version_arrives_in_another_sharding(keep: Keep) -> None:
    trainer = keep(Trainer("a", "b", "c"))
    samplers = [keep(Sampler("s", 0, 3)), keep(Sampler("t", 3))]
    for sampler in samplers:
        sampler.target.connect(trainer.cards)
    # The third target reads from only one source, but every source counts all 3 targets.
    tail = Agent("tail")
    last = WeightTarget(tail)
    last.add("w", np.zeros((1, COLUMNS), np.float32), start=(ROWS - 1, 0), size=(ROWS, COLUMNS))
    last.connect(trainer.cards)
    assert [sampler.target.nbytes for sampler in samplers] == [2 * ROWS * 4 * 3, 2 * ROWS * 4 * 5]
    for version in (1, 2, 5):
        trainer.train(version)
        bodies: list[Callable[[], Any]] = [lambda sampler=sampler: sampler.target.receive() for sampler in samplers]
        received = run([*bodies, last.receive, lambda version=version: trainer.offer(version, targets=3)])
        assert {each.version for each in received[:3]} == {version}
        assert all(sorted(names) == ["s", "t", "tail"] for names in received[3])
        assert all(sampler.holds(version) for sampler in samplers)
    tail.close()


def test_a_target_that_comes_late_gets_the_version_that_is_offered(keep: Keep) -> None:
    trainer = keep(Trainer("a", "b"))
    trainer.train(1)
    with ThreadPoolExecutor(1) as pool:
        offer = pool.submit(trainer.offer, 1, targets=1)
        sampler = keep(Sampler("s"))
        sampler.target.connect(trainer.cards)
        assert sampler.target.receive().version == 1
        assert offer.result() == [["s"], ["s"]]
    assert sampler.holds(1)


def test_an_offer_without_targets_returns_at_once(keep: Keep) -> None:
    trainer = keep(Trainer("a"))
    assert trainer.offer(1) == [[]]
    assert trainer.sources[0].targets == []


def test_a_version_is_received_once(keep: Keep) -> None:
    trainer, sampler = keep(Trainer("a")), keep(Sampler("s"))
    trainer.train(1)
    sampler.target.connect(trainer.cards)
    with trainer.sources[0].offered(1):
        sampler.target.receive()
        with pytest.raises(TransferTimeoutError, match=r"did not offer a new version \(now: 1\)"):
            sampler.target.receive(timeout=0.1)
        assert sampler.target.receive(1).version == 1
        with pytest.raises(TransferTimeoutError, match=r"did not offer version 2 \(now: 1\)"):
            sampler.target.receive(2, timeout=0.1)
    with pytest.raises(TransferTimeoutError, match=r"now: none"):
        sampler.target.receive(timeout=0.1)


def test_sources_must_offer_the_same_version(keep: Keep) -> None:
    trainer, sampler = keep(Trainer("a", "b")), keep(Sampler("s"))
    sampler.target.connect(trainer.cards)
    with (
        trainer.sources[0].offered(1),
        trainer.sources[1].offered(2),
        pytest.raises(TransferTimeoutError, match=r"now: 1, 2"),
    ):
        sampler.target.receive(timeout=0.1)


def test_a_version_that_is_withdrawn_while_it_is_read_does_not_count(keep: Keep) -> None:
    trainer, sampler = keep(Trainer("a")), keep(Sampler("s"))
    offer, read = contextlib.ExitStack(), []

    def withdraw(peer: str) -> None:
        read.append(peer)
        if len(read) == 1:  # simulates that the source timed out and offered the next version
            offer.close()
            trainer.train(2)
            offer.enter_context(trainer.sources[0].offered(2))

    watch_reads(sampler, after=withdraw)
    connect(trainer, [sampler])
    trainer.train(1)
    offer.enter_context(trainer.sources[0].offered(1))
    with offer:
        assert sampler.target.receive().version == 2
    assert (read, sampler.holds(2)) == (["a", "a"], True)


def test_an_error_names_the_tensors_that_may_be_of_two_versions(keep: Keep) -> None:
    """The source withdraws a version while the second of two groups is read."""
    trainer, sampler = keep(Trainer("a")), keep(Staged("s"))
    offer, read = contextlib.ExitStack(), []

    def withdraw(peer: str) -> None:
        read.append(peer)
        if len(read) == 2:
            offer.close()

    watch_reads(sampler, after=withdraw)
    connect(trainer, [sampler])
    offer.enter_context(trainer.sources[0].offered(1))
    with pytest.raises(TransferTimeoutError) as caught:
        sampler.target.receive(timeout=0.3)
    assert caught.value.__notes__ == ["incomplete tensors: up"]
    assert sampler.target.incomplete == ["up"]
    with trainer.sources[0].offered(2):
        sampler.target.receive()
    assert sampler.target.incomplete == []


def test_a_slow_target_is_named(keep: Keep) -> None:
    trainer, sampler = keep(Trainer("a")), keep(Sampler("s"))
    sampler.target.connect(trainer.cards)
    with pytest.raises(TransferTimeoutError, match="s did not read version 1"):
        trainer.sources[0].offer(1, targets=1, timeout=0.3)
    with pytest.raises(TransferTimeoutError, match="2 targets did not join, but 1"):
        run([sampler.target.receive, lambda: trainer.sources[0].offer(2, targets=2, timeout=1)])


def sample(connection: socket.socket) -> None:
    """Runs a sampler in its own process, which receives a version of the weights after each message."""
    sampler = Sampler("s")
    sampler.target.connect([connection.recv(1 << 16)])
    connection.send(b"connected")
    while connection.recv(100):
        connection.send(str(sampler.target.receive().version).encode())
    os._exit(0)


def test_a_target_that_is_lost_is_named_and_one_of_its_name_may_follow(keep: Keep) -> None:
    trainer, other = keep(Trainer("a")), keep(Sampler("t", 2, 5))
    source = trainer.sources[0]
    other.target.connect(trainer.cards)
    for version in (1, 3):
        trainer.train(version)
        with child(sample) as process:
            process.connection.send(trainer.cards[0])
            assert process.receive() == b"connected"
            process.connection.send(b"go")
            received = run([other.target.receive, lambda version=version: source.offer(version, targets=2)])
            assert sorted(received[1]) == ["s", "t"]
            assert process.receive() == str(version).encode()
            process.stop()
            with ThreadPoolExecutor(1) as pool:
                offer = pool.submit(source.offer, version + 1)
                assert other.target.receive().version == version + 1
                assert not offer.done()
                process.kill()
                with pytest.raises(DisconnectedError, match=f"agent s did not read version {version + 1}") as caught:
                    offer.result()
            assert caught.value.peer == "s"
        assert source.targets == ["t"]


def train_and_end(connection: socket.socket) -> None:
    """Runs a trainer in its own process: sends its source's card, and exits after a message."""
    trainer = Trainer("a")
    connection.send(trainer.cards[0])
    connection.recv(1)
    os._exit(0)


def test_a_source_that_is_lost_is_named(keep: Keep) -> None:
    sampler = keep(Sampler("s"))
    with child(train_and_end) as process:
        sampler.target.connect([process.receive()])
        killer = threading.Timer(0.2, os.kill, (process.pid, signal.SIGKILL))
        killer.start()
        begin = time.monotonic()
        with pytest.raises(DisconnectedError) as caught:
            sampler.target.receive()
        assert time.monotonic() - begin < 20
        assert caught.value.peer == "a"
        killer.join()
    replacement = keep(Trainer("a"))
    replacement.train(1)
    sampler.target.connect(replacement.cards)
    run([sampler.target.receive, lambda: replacement.offer(1, targets=1)])
    assert sampler.holds(1)


def test_a_target_that_leaves_is_not_waited_for(keep: Keep) -> None:
    trainer, sampler = keep(Trainer("a")), keep(Sampler("s"))
    sampler.target.connect(trainer.cards)
    while trainer.sources[0].targets != ["s"]:
        time.sleep(0.001)
    sampler.target.close()
    while trainer.sources[0].targets:
        time.sleep(0.001)
    assert trainer.offer(1) == [[]]
    with pytest.raises(NotStartedError):
        sampler.target.receive()


def test_peers_pass_on_what_each_has_read(keep: Keep) -> None:
    """Four targets, two for each of two overlapping parts, together read each element from the sources only once."""
    trainer = keep(Trainer("a", "b"))
    samplers = [keep(Sampler(f"s{n}", *columns)) for n, columns in enumerate(((0, 5), (3, 8), (0, 5), (3, 8)))]
    direct = []
    for sampler in samplers:
        prepare = sampler.agent.prepare

        def prepared(operation: str, peer: str, blocks: Any, prepare: Any = prepare) -> Transfer:
            transfer = prepare(operation, peer, blocks)
            if peer in ("a", "b") and transfer.nbytes > WORDS_BYTES:
                direct.append(transfer.nbytes)
            return transfer

        sampler.agent.prepare = prepared
    connect(trainer, samplers)
    assert sum(direct) == 2 * ROWS * COLUMNS * 4
    for version in (1, 2):
        trainer.train(version)
        receives: list[Callable[[], Any]] = [lambda sampler=sampler: sampler.target.receive() for sampler in samplers]
        received = run([*receives, lambda version=version: trainer.offer(version)])
        assert {each.version for each in received[:4]} == {version}
        assert all(sampler.holds(version) for sampler in samplers)


def test_a_peer_that_is_lost_is_named(keep: Keep) -> None:
    trainer = keep(Trainer("a"))
    samplers = [keep(Sampler(name, timeout=60)) for name in "stu"]
    cards = [sampler.target.card() for sampler in samplers]
    for number, sampler in enumerate(samplers):
        sampler.target.connect(trainer.cards, peers=cards[:number] + cards[number + 1 :])
    trainer.train(1)
    with trainer.sources[0].offered(1), ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(sampler.target.receive) for sampler in samplers[:2]]
        time.sleep(0.1)  # receive() must report a loss before or during its wait
        samplers[2].agent.close()
        for future in waiting:
            with pytest.raises(DisconnectedError) as caught:
                future.result()
            assert caught.value.peer == "u"
        for sampler, other in ((samplers[0], cards[1]), (samplers[1], cards[0])):
            sampler.target.connect(trainer.cards, peers=[other])
        run([sampler.target.receive for sampler in samplers[:2]])
    assert all(sampler.holds(1) for sampler in samplers[:2])


def test_tensors_may_lie_side_by_side() -> None:
    """Blocks that are adjacent in both memories are merged, although each tensor was registered separately."""
    with Agent("a") as a, Agent("b") as b:
        source, target = WeightSource(a), WeightTarget(b)
        theirs, ours = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
        for name, where in (("w", slice(0, 32)), ("up", slice(32, 64))):
            source.add(name, theirs[where])
            target.add(name, ours[where])
        target.connect([source.card()])
        with source.offered(1):
            target.receive()
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("count", [1, 3])
def test_groups_share_memory(keep: Keep, count: int) -> None:
    trainer, samplers = keep(Trainer("a", "b")), [keep(Staged(f"s{number}")) for number in range(count)]
    for sampler in samplers:
        sampler.target.next_group()
        sampler.target.add("w", sampler.memory)
    connect(trainer, samplers)
    for version in (1, 2**63 - 1):
        trainer.train(version)
        seen: list[list[NDArray[np.float32]]] = [[] for _ in samplers]

        def receive(number: int, seen: list[list[NDArray[np.float32]]] = seen) -> None:
            samplers[number].target.receive(each=lambda _: seen[number].append(samplers[number].memory.copy()))

        bodies: list[Callable[[], Any]] = [lambda number=number: receive(number) for number in range(count)]
        run([*bodies, lambda version=version: trainer.offer(version, targets=count)])
        for each in seen:
            np.testing.assert_array_equal(each, [matrix(version, name) for name in ("w", "up", "w")])
    other = keep(Sampler("other"))
    with pytest.raises(ArgumentError, match="other has 1 groups of parts; this target has 3"):
        samplers[0].target.connect(trainer.cards, peers=[other.target.card()])


def test_a_version_may_be_offered_again_while_groups_share_memory(keep: Keep) -> None:
    """In the second offer one target reads its peer's share late; until then the peer must not overwrite the share."""
    trainer, samplers = keep(Trainer("a", "b")), [keep(Staged(name)) for name in "st"]
    offers = contextlib.ExitStack()

    def open_offers() -> None:
        for source in trainer.sources:
            offers.enter_context(source.offered(1))

    withdraw, offer = threading.Barrier(2, offers.close), threading.Barrier(2, open_offers)
    went_on = threading.Event()
    seen: dict[str, list[NDArray[np.float32]]] = {"s": [], "t": []}
    must_offer = {"s": True, "t": True}

    def looked(name: str, peer: str) -> None:
        if peer == "b" and len(seen[name]) == 1 and must_offer[name]:
            must_offer[name] = False
            offer.wait(60)

    def read_late(peer: str) -> None:
        if peer == "s" and len(seen["t"]) == 1 and not must_offer["t"]:
            went_on.wait(0.3)

    def go_on(peer: str) -> None:
        if peer in ("a", "b") and len(seen["s"]) == 2:
            went_on.set()

    watch_reads(samplers[0], after=go_on, looked=lambda peer: looked("s", peer))
    watch_reads(samplers[1], before=read_late, looked=lambda peer: looked("t", peer))
    connect(trainer, samplers)
    trainer.train(1)
    open_offers()

    def receive(sampler: Staged, name: str) -> None:
        def each(_: int) -> None:
            seen[name].append(sampler.memory.copy())
            if len(seen[name]) == 1:
                withdraw.wait(60)

        assert sampler.target.receive(each=each).version == 1

    with offers:
        run([lambda: receive(samplers[0], "s"), lambda: receive(samplers[1], "t")])
    for each in seen.values():
        np.testing.assert_array_equal(each, [matrix(1, "w"), matrix(1, "w"), matrix(1, "up")])


def test_a_share_that_its_peer_gives_up_while_it_is_read_is_read_again(keep: Keep) -> None:
    trainer, samplers = keep(Trainer("a", "b")), [keep(Staged(name)) for name in "st"]
    gives_up, reads = samplers
    has_all, back, kept = threading.Event(), threading.Event(), []

    def give_up(peer: str) -> None:
        if peer == "s" and has_all.wait(60) and not kept:
            kept.append((words_of(gives_up.target)[0], gives_up.memory.copy()))
            words_of(gives_up.target)[0] = 0
            gives_up.memory[:] = 0

    def restore(peer: str) -> None:
        if peer == "s" and kept and not back.is_set():  # once, because later the target may be between two `groups`
            back.set()
            gives_up.memory[:] = kept[0][1]
            words_of(gives_up.target)[0] = kept[0][0]

    watch_reads(gives_up, after=lambda peer: has_all.set() if peer == "t" else None)
    watch_reads(reads, before=give_up, looked=restore)
    connect(trainer, samplers)
    trainer.train(1)
    seen: list[NDArray[np.float32]] = []
    with trainer.sources[0].offered(1), trainer.sources[1].offered(1):
        run([gives_up.target.receive, lambda: reads.target.receive(each=lambda _: seen.append(reads.memory.copy()))])
    assert back.is_set()
    np.testing.assert_array_equal(seen, [matrix(1, "w"), matrix(1, "up")])


def test_an_array_that_is_refused_is_not_offered(keep: Keep) -> None:
    target = keep(Sampler("s")).target
    card = target.card()
    array = np.zeros((ROWS, COLUMNS), np.float32)
    array.flags.writeable = False
    with pytest.raises(ArgumentError, match="read-only"):
        target.add("w", array)
    assert target.card() == card


def test_wrong_calls_are_refused(keep: Keep) -> None:
    trainer, sampler = keep(Trainer("a")), keep(Sampler("s"))
    with pytest.raises(NotStartedError):
        sampler.target.receive()
    with pytest.raises(MetadataError):
        sampler.target.connect([b"{}"])
    with pytest.raises(ArgumentError, match="version"):
        trainer.sources[0].offer(0)
    with trainer.sources[0].offered(1), pytest.raises(TransferError, match="offers version 1 already"):
        trainer.sources[0].offer(2)
    array = np.zeros((ROWS, 2), np.float32)
    with pytest.raises(ArgumentError, match=r"expected a part of shape \(12, 8\), got \(12, 2\)"):
        sampler.target.add("w", array, sharding=Sharding((ROWS, COLUMNS), ["s"], [Replicate()]))
    with pytest.raises(ArgumentError, match="'s' is not in the mesh"):
        sampler.target.add("w", array, sharding=Sharding((ROWS, COLUMNS), ["a"], [Replicate()]))
    with pytest.raises(ArgumentError, match="expected both start and size, or neither"):
        sampler.target.add("w", array, start=(0, 0))
    empty = WeightTarget(sampler.agent)
    with pytest.raises(ArgumentError, match="no part"):
        empty.connect(trainer.cards)


def test_a_source_that_is_closed_and_made_anew_is_another_one(keep: Keep) -> None:
    """The new source's version word may be at the address of the closed source's version word."""
    trainer, sampler = keep(Trainer("a")), keep(Staged("s"))
    connect(trainer, [sampler])
    trainer.train(1)
    with trainer.sources[0].offered(1):
        sampler.target.receive()
    former = trainer.sources[0]
    former.close()
    trainer.memory[0]["w"][:] = -7
    weights = np.full((ROWS, COLUMNS), 2, np.float32)
    again = WeightSource(trainer.agents[0])
    again.add("w", weights)
    again.add("up", weights)
    with again.offered(2):
        with pytest.raises(DisconnectedError, match="agent a has closed its weights") as error:
            sampler.target.receive(timeout=60)
        assert error.value.peer == "a"
        assert (sampler.memory == matrix(1, "up")).all()
        sampler.target.connect([again.card()])
        assert sampler.target.receive().version == 2
    assert (sampler.memory == 2).all()


def test_words_of_another_holder_at_the_same_address_are_noticed(keep: Keep) -> None:
    trainer, sampler = keep(Trainer("a")), keep(Staged("s"))
    connect(trainer, [sampler])
    words_of(trainer.sources[0])[:] = 1, 77
    with pytest.raises(DisconnectedError, match="agent a has closed its weights"):
        sampler.target.receive(timeout=60)


def test_a_former_reader_of_a_name_says_nothing_for_the_later_one(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, former = keep(Trainer("a")), keep(Staged("s"))
    (source,), (owner,) = trainer.sources, trainer.agents
    received: list[Any] = []
    messages = owner.messages

    def noted() -> list[tuple[str, bytes]]:
        got = messages()
        received.extend(MESSAGE.decode(data, sender) for sender, data in got)
        return got

    def joined(number: int) -> bool:
        return bool(source.targets) and any(isinstance(each, Join) and each.holder == number for each in received)

    monkeypatch.setattr(owner, "messages", noted)
    connect(trainer, [former])
    number = int(words_of(former.target)[1])
    until(lambda: joined(number))
    with Agent("s") as agent:
        later = WeightTarget(agent)
        later.add("w", np.zeros((ROWS, COLUMNS), np.float32))
        later.connect(trainer.cards)
        until(lambda: joined(int(words_of(later)[1])))
        for said in (HasRead(1, number), Leave(number)):
            former.agent.notify("a", MESSAGE.encode(said))
        until(lambda: not source.targets or said in received)
        assert source.targets == ["s"]
        with pytest.raises(TransferTimeoutError, match="s did not read version 1"):
            source.offer(1, targets=1, timeout=0.1)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
