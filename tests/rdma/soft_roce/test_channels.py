"""ProxyChannels between nodes: transfers arrive by RDMA, complete and in order, and respect the queues' limits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from proxyccl import Communicator
from support.cases.random_transfers import run_random_transfers
from support.ranks import Ranks
from support.soft_roce.kernels import KERNELS
from support.soft_roce.nodes import two_nodes


@pytest.fixture(scope="module")
def nodes() -> Iterator[Ranks]:
    with two_nodes() as group:
        yield group


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with two_nodes(local=1) as group:
        yield group


def bytes_of(rank: int, size: int) -> np.ndarray:
    return np.random.default_rng(rank).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.slow
def test_ranks_of_a_node_copy_and_nodes_use_rdma(nodes: Ranks) -> None:
    """Every rank writes to every other. numpy arrays are private to a process, so peers reach them only by RDMA."""
    part = 3001

    def body(comm: Communicator) -> None:
        target = comm.empty(comm.world_size * part, "uint8").fill(0)
        source = bytes_of(comm.rank, part)
        channels = comm.proxy_channels(target, source)
        assert [c.transport for c in channels] == [
            "copy" if c.peer // 2 == comm.rank // 2 else "verbs" for c in channels
        ]
        comm.compile(KERNELS, "exchange")(1, 1, channels, len(channels), comm.rank, part)
        comm.synchronize()
        got = target.numpy().reshape(comm.world_size, part)
        assert all(np.array_equal(got[channel.peer], bytes_of(channel.peer, part)) for channel in channels)

    nodes.run(body)


@pytest.mark.parametrize(
    ("dst", "src", "nbytes"),
    [
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((0, 0, 1), (5, 3, 4096), (8, 8, 0))),
        (1001, 77, 50_003),
    ],
)
def test_bytes_arrive_between_any_offsets(pair: Ranks, dst: int, src: int, nbytes: int) -> None:
    size = 64 * 1024

    def body(comm: Communicator) -> None:
        target, source = np.full(size, 0xEE, np.uint8), bytes_of(comm.rank, size)
        channels = comm.proxy_channels(target, source)
        comm.compile(KERNELS, "put")(1, 1, channels, dst, src, nbytes)
        comm.synchronize()
        expected = np.full(size, 0xEE, np.uint8)
        expected[dst : dst + nbytes] = bytes_of(1 - comm.rank, size)[src : src + nbytes]
        assert np.array_equal(target, expected)
        comm.barrier()

    pair.run(body)


@pytest.mark.parametrize("signal", [pytest.param("write", marks=pytest.mark.slow), "fetch_add"])
@pytest.mark.parametrize("turns", [50, pytest.param(200, marks=pytest.mark.full)])
def test_a_signal_never_overtakes_its_data(signal: str, turns: int) -> None:
    def body(comm: Communicator) -> None:
        # The peer repeatedly writes a number to the last element and signals. The kernel copies each number.
        values = comm.empty(turns + 1, "int64").fill(0)
        sent = comm.empty(1, "int64")
        channels = comm.proxy_channels(values, sent)
        comm.compile(KERNELS, "count")(1, 1, channels, turns, values, sent)
        comm.synchronize()
        seen = values.numpy()[:turns]
        # After a signal, the element may already hold the peer's next number, but never an earlier one.
        assert ((seen == np.arange(1, turns + 1)) | (seen == np.arange(2, turns + 2))).all(), seen

    with two_nodes(local=1, signal=signal) as pair:
        pair.run(body)


@pytest.mark.slow
@pytest.mark.parametrize("puts", [100, pytest.param(3000, marks=pytest.mark.full)])
def test_a_queue_of_16_bears_a_flood_of_puts(puts: int) -> None:
    nbytes = 64

    def body(comm: Communicator) -> None:
        target, source = np.zeros(puts * nbytes, np.uint8), bytes_of(comm.rank, puts * nbytes)
        channels = comm.proxy_channels(target, source)
        comm.compile(KERNELS, "flood")(1, 1, channels, puts, nbytes)
        comm.synchronize()
        assert np.array_equal(target, bytes_of(1 - comm.rank, puts * nbytes))
        assert channels[0].counters.puts == puts
        comm.barrier()

    with two_nodes(local=1, send_depth=16) as pair:
        pair.run(body)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_puts_values_gets_and_signals_keep_their_order(pair: Ranks, seed: int) -> None:
    def body(comm: Communicator) -> None:
        assert run_random_transfers(comm, seed).transport == "verbs"

    pair.run(body)


@pytest.mark.full
def test_they_do_so_where_signals_are_added() -> None:
    with two_nodes(local=1, signal="fetch_add", send_depth=16) as pair:
        pair.run(lambda comm: run_random_transfers(comm, 7, values=False))


@pytest.mark.full
def test_a_put_longer_than_a_message_is_split(pair: Ranks) -> None:
    size = 9 * 1024 * 1024  # a Soft-RoCE message has at most 8 MiB

    def body(comm: Communicator) -> None:
        target, source = comm.empty(size, "uint8").fill(0), comm.empty(size, "uint8").upload(bytes_of(comm.rank, size))
        channels = comm.proxy_channels(target, source)
        comm.compile(KERNELS, "put")(1, 1, channels, 0, 0, size)
        comm.synchronize()
        assert np.array_equal(target.numpy(), bytes_of(1 - comm.rank, size))

    pair.run(body)
