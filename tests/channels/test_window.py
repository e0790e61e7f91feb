"""Windows: memory that peers access by puts, gets and signals on streams."""

from __future__ import annotations

import time

import numpy as np
import pytest

from proxyccl import AbortedError, ArgumentError, ClosedError, Communicator
from support.devices import require_devices
from support.ranks import Ranks
from support.running import impatient

RANKS = 2
COUNT = 5000


@pytest.fixture(scope="module")
def ranks() -> object:
    require_devices(RANKS)
    with Ranks(RANKS) as made:
        yield made


def test_puts_and_gets_arrive_before_their_signals(ranks: Ranks) -> None:
    """Each rank puts into the second half of the peer's array, and checks the result there with a get."""

    def body(comm: Communicator) -> None:
        peer = 1 - comm.rank
        array, out = comm.empty(2 * COUNT, "int32"), comm.empty(COUNT, "int32")
        array.fill(0)
        window = comm.window(array)
        assert window.array is array
        stream, other = comm.runtime.create_stream(), comm.runtime.create_stream()
        for step in range(1, 20):
            values = comm.empty(COUNT, "int32").upload(np.arange(COUNT) + step * 1000 + comm.rank)
            window.put(values, peer, offset=4 * COUNT, signal=True, stream=stream)
            window.wait_signal(peer, stream=stream)
            window.get(out, comm.rank, offset=4 * COUNT, stream=stream)
            stream.synchronize()
            np.testing.assert_array_equal(out.numpy(), np.arange(COUNT) + step * 1000 + peer)
            window.signal(peer, stream=other)  # the peer may now overwrite the values
            window.wait_signal(peer, stream=other)
            other.synchronize()
        window.get(out, peer, offset=4 * COUNT, stream=stream)
        stream.synchronize()
        np.testing.assert_array_equal(out.numpy(), np.arange(COUNT) + 19 * 1000 + comm.rank)
        comm.barrier()
        comm.synchronize()
        window.close()
        with pytest.raises(ClosedError):
            window.signal(peer)

    ranks.run(body)


def test_signals_are_counted(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        window = comm.window(comm.empty(1))
        stream = comm.runtime.create_stream()
        for _ in range(5):
            window.signal(1 - comm.rank, stream=stream)
            window.signal(comm.rank, stream=stream)
        window.wait_signal(1 - comm.rank, count=4, stream=stream)
        window.wait_signal(comm.rank, count=5, stream=stream)
        window.wait_signal(1 - comm.rank, stream=stream)
        stream.synchronize()

    ranks.run(body)


def test_wrong_arguments(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        window = comm.window(comm.empty(10, "uint8"))
        four = comm.empty(4, "uint8")
        for call in (
            lambda: window.put(four, RANKS),
            lambda: window.put(four, 0, offset=7),
            lambda: window.get(four, 1, offset=-1),
            lambda: window.put("four", 0),
            lambda: window.wait_signal(0, count=0),
            lambda: window.signal(-1),
        ):
            with pytest.raises(ArgumentError):
                call()
        window.put(four, 1 - comm.rank, offset=6)
        comm.synchronize()

    ranks.run(body)


@pytest.mark.host_only("parts of its array are numpy's")
def test_a_copy_between_parts_of_one_array_that_overlap_is_refused(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        window = comm.window(array := comm.empty(10, "uint8").upload(np.arange(10, dtype=np.uint8)))
        part = np.asarray(array)[3:7]
        with pytest.raises(ArgumentError, match="x: overlaps"):
            window.put(part, comm.rank, offset=2)
        with pytest.raises(ArgumentError, match="out: overlaps"):
            window.get(part, comm.rank, offset=6)
        window.put(part, comm.rank, offset=3)  # to itself
        comm.synchronize()
        np.testing.assert_array_equal(array.numpy(), np.arange(10))

    ranks.run(body)


@pytest.mark.host_only("a GPU's memory is always shared")
def test_an_array_that_peers_can_not_map_is_refused_on_all_ranks(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        private = np.zeros(4)
        for array in (private if comm.rank else comm.empty(4), comm.register(private)):
            with pytest.raises(ArgumentError, match=r"array: rank [01] can't share its memory: .*Communicator.empty"):
                comm.window(array)
        assert np.all(comm.all_reduce(np.ones(4)) == RANKS)  # the communicator stays usable
        comm.window(comm.empty(0)).close()

    ranks.run(body)


def test_a_signal_that_does_not_come_ends_the_communicator() -> None:
    require_devices(RANKS)

    def body(comm: Communicator) -> None:
        window = comm.window(comm.empty(1))
        stream = comm.runtime.create_stream()
        impatient(comm)
        if comm.rank == 0:
            window.wait_signal(1, stream=stream)
        with pytest.raises(AbortedError, match="signal of a window from rank 1: expected 1, saw 0"):  # noqa: PT012  then
            while True:
                comm.check()
                time.sleep(0.005)
        stream.synchronize()  # the abort has released the stream
        with pytest.raises(AbortedError):
            window.signal(1 - comm.rank)

    with Ranks(RANKS) as ranks:
        ranks.run(body)
