"""Two RDMA devices for each rank (rails)."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

from proxyccl import Communicator, ProxyCCLError, RdmaOptions, TransportError
from support.ranks import Ranks
from support.soft_roce.nodes import TIMEOUT, failure_of
from support.soft_roce.wire import Wire, add_second, packets_sent, remove_second

RAILS = ("rxe0", "rxe2"), ("rxe1", "rxe3")
NBYTES = 1_000_003


@pytest.fixture
def second() -> Iterator[Wire]:
    """The wire between the second devices of the two ranks."""
    add_second()
    wire = Wire(2)
    try:
        yield wire
    finally:
        wire.restore()
        remove_second()


def two_ranks(transport: str = "verbs", **options: object) -> Ranks:
    """Returns two ranks on two nodes, with two devices each."""
    return Ranks(
        2,
        options_of=lambda rank: {"rdma": RdmaOptions(devices=RAILS[rank], **options)},
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


def gather_checked(comm: Communicator, calls: int) -> None:
    """Gathers different long arrays, and checks every byte."""
    out = comm.empty((2 * NBYTES,), "uint8")
    x = comm.empty((NBYTES,), "uint8")
    for call in range(calls):
        np.asarray(x)[:] = (np.arange(NBYTES) * (call + 3) + comm.rank) % 251
        comm.all_gather(x, out=out, algorithm="proxy")
        comm.synchronize()
        for rank in range(2):
            expected = (np.arange(NBYTES) * (call + 3) + rank) % 251
            assert (np.asarray(out)[rank * NBYTES : (rank + 1) * NBYTES] == expected).all(), (call, rank)


# Which wire is cut, at which end and after how many seconds.
CUTS = [(i // 2 % 2 * 2, i % 2, 0.05 * i) for i in range(20)]


@pytest.mark.full  # the time-outs of the emulated adapters grow with the load of the machine
@pytest.mark.parametrize(("first", "end", "delay"), CUTS)
def test_transfers_go_on_by_the_other_wire(wire: Wire, second: Wire, first: int, end: int, delay: float) -> None:
    """A signal that came too early or twice would let a later call read old bytes."""

    def body(comm: Communicator) -> float:
        gather_checked(comm, 1)
        if comm.rank == 0:
            threading.Timer(delay, (second if first else wire).cut, (end,)).start()
        slowest = 0.0
        for _ in range(10):
            began = time.monotonic()
            gather_checked(comm, 1)
            slowest = max(slowest, time.monotonic() - began)
        return slowest

    with two_ranks(retry_count=3, timeout=12) as ranks, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        print(f"slowest call: {max(ranks.run(body)):.2f} s")
    told = sorted(text for warning in caught if "no longer reaches" in (text := str(warning.message)))
    assert len(told) == 2, told
    for rank, text in enumerate(told):
        assert text.startswith(f"the adapter rxe{first + rank} no longer reaches rank {1 - rank} (IBV_WC_")
        assert text.endswith(f"all data goes by rxe{2 - first + rank}")


def test_without_any_wire_the_error_is_that_of_the_link(wire: Wire, second: Wire) -> None:
    def body(comm: Communicator) -> ProxyCCLError:
        gather_checked(comm, 1)
        comm.all_gather_bytes(b"")
        if comm.rank == 0:
            wire.cut(0)
            second.cut(0)
        return failure_of(lambda: gather_checked(comm, 1000))

    with two_ranks(retry_count=3, timeout=12) as ranks:
        errors = ranks.run(body)
    assert all(isinstance(error, TransportError) for error in errors), errors
    assert all("IBV_WC_" in str(error) for error in errors), errors
