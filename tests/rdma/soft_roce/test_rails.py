"""Several RDMA devices for each rank (rails)."""

from __future__ import annotations

import random
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from proxyccl import Communicator, ProxyCCLError, RdmaOptions, TransportError
from support.checked_gather import CheckedGather
from support.ranks import Ranks
from support.soft_roce.nodes import TIMEOUT, failure_of
from support.soft_roce.wire import Wire, add_wire, packets_sent, remove_wire

RAILS = ("rxe0", "rxe2", "rxe4"), ("rxe1", "rxe3", "rxe5")
NBYTES = 1_000_003


@contextmanager
def added(first: int) -> Iterator[Wire]:
    add_wire(first)
    wire = Wire(first)
    try:
        yield wire
    finally:
        wire.restore()
        remove_wire(first)


@pytest.fixture
def second() -> Iterator[Wire]:
    """The wire between the second devices of the two ranks."""
    with added(2) as wire:
        yield wire


@pytest.fixture
def third() -> Iterator[Wire]:
    """The wire between the third devices of the two ranks."""
    with added(4) as wire:
        yield wire


def two_ranks(transport: str = "verbs", rails: int = 2, **options: object) -> Ranks:
    """Returns two ranks on two nodes, with several devices each."""
    return Ranks(
        2,
        options_of=lambda rank: {"rdma": RdmaOptions(devices=RAILS[rank][:rails], rails=rails, **options)},
        local_world_size=1,
        timeout=TIMEOUT,
        transport={(0, 1): transport},
    )


@pytest.mark.usefixtures("second")
@pytest.mark.parametrize(
    ("transport", "signal"),
    [("verbs", "write"), ("staged", "write"), pytest.param("verbs", "fetch_add", marks=pytest.mark.full)],
)
def test_long_puts_are_divided_between_two_devices(transport: str, signal: str) -> None:
    def body(comm: Communicator) -> None:
        x = np.random.default_rng(comm.rank).integers(0, 256, NBYTES, np.uint8)
        for _ in range(3):
            gathered = comm.all_gather(x, algorithm="proxy")
        for rank in range(2):
            expected = np.random.default_rng(rank).integers(0, 256, NBYTES, np.uint8)
            assert (np.asarray(gathered)[rank * NBYTES : (rank + 1) * NBYTES].ravel() == expected).all()

    with two_ranks(transport, signal=signal) as ranks:
        before = [packets_sent(f"veth{i}") for i in range(4)]
        ranks.run(body)
        sent = [packets_sent(f"veth{i}") - packets for i, packets in enumerate(before)]
    # Each rank sends 3 MB in packets of at most 4 KiB: at least a third of them by each device.
    assert min(sent) > 3 * NBYTES // 4096 // 3, sent


def gather_until(comm: Communicator, gather: CheckedGather, condition: Callable[[], bool]) -> float:
    """Gathers until rank 0 finds that a condition holds, and then once more. Returns the time of the slowest call, in
    seconds.
    """
    slowest, holds, deadline = 0.0, False, time.monotonic() + 60
    while not holds:
        assert time.monotonic() < deadline, "the condition never holds"
        holds = comm.all_gather_bytes(bytes([comm.rank == 0 and condition()]))[0] == b"\1"
        began = time.monotonic()
        gather()
        slowest = max(slowest, time.monotonic() - began)
    return slowest


def all_are_used(rails: int = 2) -> Callable[[], bool]:
    """Returns a function that tells whether all devices have sent parts of long puts since the function's last call."""

    def counts() -> list[int]:
        return [packets_sent(f"veth{i}") for i in range(2 * rails)]

    sent = counts()

    def are_used() -> bool:
        before, sent[:] = sent.copy(), counts()
        return min(now - then for now, then in zip(sent, before, strict=True)) > CheckedGather.NBYTES // 4096 // (
            rails + 1
        )

    return are_used


@pytest.mark.parametrize(
    ("transport", "seed", "cuts"),
    [
        ("verbs", 0, 2),
        ("staged", 0, 2),
        *(pytest.param("verbs", seed, 10, marks=pytest.mark.full) for seed in range(1, 11)),
        *(pytest.param("staged", seed, 10, marks=pytest.mark.full) for seed in range(1, 3)),
    ],
)
def test_transfers_go_on_by_the_other_wire_until_a_wire_is_back(
    wire: Wire, second: Wire, transport: str, seed: int, cuts: int
) -> None:
    """A signal that came too early or twice would let a later call read old bytes. Sometimes the ports of the wire are
    down, and sometimes the wire is cut again before it is used again.
    """

    def body(comm: Communicator) -> float:
        rng = random.Random(seed)  # the same numbers on both ranks
        gather, slowest = CheckedGather(comm), 0.0
        for number in range(cuts):
            cut = (wire, second)[rng.randrange(2)]
            for _ in range(rng.choice([1, 1, 1, 2])):
                delay, is_down, end = 0.3 * rng.random(), number % 2 == 0, rng.randrange(2)
                timer = threading.Timer(delay, cut.lose_all)
                if comm.rank == 0:
                    timer.start()
                slowest = max(slowest, gather_until(comm, gather, timer.finished.is_set))
                if comm.rank == 0:
                    timer.join()
                    if is_down:
                        cut.cut(end)
                    cut.restore()
            gather_until(comm, gather, all_are_used())
        return slowest

    # The emulated adapters report failures late if the machine is busy.
    options = {"retry_count": 3, "timeout": 15, "staging_chunk": 32 << 10}
    with two_ranks(transport, **options) as ranks, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        print(f"slowest call: {max(ranks.run(body)):.2f} s")
    told = [text for warning in caught if "no longer reaches" in (text := str(warning.message))]
    assert len(told) >= 2 * cuts, told
    for text in told:
        adapter, rank, other = re.fullmatch(
            r"the adapter rxe(\d) no longer reaches rank ([01]) \(IBV_WC_.*\); all data goes by rxe(\d) "
            r"\(failure \d+ of the connection\)",
            text,
        ).groups()
        assert (int(adapter) % 2, int(other)) == (1 - int(rank), (int(adapter) + 2) % 4), text


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 5))])
def test_transfers_go_on_by_one_of_three_wires(wire: Wire, second: Wire, third: Wire, seed: int) -> None:
    """Two of the three wires are cut at random moments, so that one may fail during the recovery from the other."""

    def body(comm: Communicator) -> float:
        rng = random.Random(seed)  # the same numbers on both ranks
        gather, slowest = CheckedGather(comm), 0.0
        for _ in range(2):
            cuts = rng.sample([wire, second, third], 2)
            timers = [threading.Timer(0.3 * rng.random(), cut.lose_all) for cut in cuts]
            for timer in timers if comm.rank == 0 else ():
                timer.start()
            slowest = max(
                slowest, gather_until(comm, gather, lambda timers=timers: all(t.finished.is_set() for t in timers))
            )
            for timer, cut in zip(timers, cuts, strict=True) if comm.rank == 0 else ():
                timer.join()
                cut.restore()
            gather_until(comm, gather, all_are_used(3))
        return slowest

    with two_ranks(rails=3, retry_count=3, timeout=15) as ranks:
        print(f"slowest call: {max(ranks.run(body)):.2f} s")


def test_without_any_wire_the_error_is_that_of_the_link(wire: Wire, second: Wire) -> None:
    def body(comm: Communicator) -> ProxyCCLError:
        gather = CheckedGather(comm)
        gather()
        comm.all_gather_bytes(b"")
        if comm.rank == 0:
            wire.lose_all()
            second.lose_all()
        return failure_of(lambda: [gather() for _ in range(1000)])

    with two_ranks(retry_count=3, timeout=12) as ranks:
        errors = ranks.run(body)
    assert all(isinstance(error, TransportError) for error in errors), errors
    assert all("IBV_WC_" in str(error) for error in errors), errors
