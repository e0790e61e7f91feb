"""Transfers between pairs of ranks: send, recv, groups of them, and the collectives that consist of them."""

from __future__ import annotations

import contextlib
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from proxyccl import AbortedError, ArgumentError, ClosedError, Communicator, MismatchError
from proxyccl.channels.collectives import transfers as in_python
from proxyccl.channels.collectives.flows import MOST_TRANSFERS
from support.device_arrays import barrier, on_device, on_host
from support.devices import ON_HOST, runtime_with_lines, world_sizes
from support.ranks import Ranks
from support.running import TIMEOUT, run_ranks

LONG = 3_000_001  # bytes: more than the slots between two ranks hold


@pytest.fixture(scope="module", params=world_sizes(1, 2, 3, 4), ids=lambda n: f"{n}-ranks")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as group:
        yield group


PAIRS: dict[str, dict[str, Any]] = {"one-node": {}, "nodes-of-one": {"local_world_size": 1}}
if ON_HOST:  # GPUs send short transfers in lines without being told
    PAIRS["lines"] = {"make_runtime": runtime_with_lines}


@pytest.fixture(scope="module", params=PAIRS)
def pairs(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Opens two ranks on one node, also with short transfers in lines, or on two nodes, where transfers go through
    proxies.
    """
    with Ranks(2, **PAIRS[request.param]) as group:
        yield group


def values(sender: int, receiver: int, nbytes: int) -> np.ndarray:
    """Returns the data that a rank sends to another."""
    return np.random.default_rng([sender, receiver, nbytes]).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, LONG])
def test_a_rank_receives_what_another_sends(pairs: Ranks, nbytes: int) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send(on_device(comm, values(0, 1, nbytes)), 1)
        else:
            out = on_device(comm, np.zeros(nbytes, np.uint8))
            assert comm.recv(out, 0) is out
            np.testing.assert_array_equal(on_host(out), values(0, 1, nbytes))

    pairs.run(body)


def test_sends_arrive_in_order_also_where_they_are_grouped_on_one_side_only(pairs: Ranks) -> None:
    sizes = [5, LONG, 1, 70_000, 3]

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            for size in sizes:
                comm.send(on_device(comm, values(0, 1, size)), 1)
        else:
            outs = [on_device(comm, np.zeros(size, np.uint8)) for size in sizes]
            with comm.transfers() as transfers:
                for out in outs:
                    transfers.recv(out, 0)
            comm.synchronize()
            for out, size in zip(outs, sizes, strict=True):
                np.testing.assert_array_equal(on_host(out), values(0, 1, size))

    pairs.run(body)


def test_a_group_may_name_its_transfers_in_any_order(ranks: Ranks) -> None:
    """Each rank sends more bytes than the slots hold, to both neighbours in a ring and to itself."""

    def body(comm: Communicator) -> None:
        rank, n = comm.rank, comm.world_size
        peers = {(rank + 1) % n, (rank - 1) % n, rank}
        outs = {peer: on_device(comm, np.zeros(LONG + peer, np.uint8)) for peer in peers}
        with comm.transfers() as transfers:
            for peer in peers:
                if rank % 2:
                    transfers.recv(outs[peer], peer) if peer != rank else None
                transfers.send(on_device(comm, values(rank, peer, LONG + rank)), peer)
                if not rank % 2 or peer == rank:
                    transfers.recv(outs[peer], peer)
        comm.synchronize()
        for peer in peers:
            np.testing.assert_array_equal(on_host(outs[peer]), values(peer, rank, LONG + peer))

    ranks.run(body)


def test_a_group_may_hold_more_transfers_than_a_launch(pairs: Ranks) -> None:
    count = 2 * MOST_TRANSFERS + 3

    def body(comm: Communicator) -> None:
        peer = 1 - comm.rank
        outs = [on_device(comm, np.zeros(9 + i, np.uint8)) for i in range(count)]
        with comm.transfers() as transfers:
            for i, out in enumerate(outs):
                transfers.send(on_device(comm, values(comm.rank, peer, 9 + i)), peer)
                transfers.recv(out, peer)
        comm.synchronize()
        for i, out in enumerate(outs):
            np.testing.assert_array_equal(on_host(out), values(peer, comm.rank, 9 + i))

    pairs.run(body)


def test_each_block_of_one_group_issues_its_own_transfers_alone(pairs: Ranks) -> None:
    def body(comm: Communicator) -> None:
        peer, transfers = 1 - comm.rank, comm.transfers()
        outs = [on_device(comm, np.zeros(8, np.uint8)) for _ in range(2)]
        with contextlib.suppress(KeyError), transfers:
            transfers.send(outs[0], peer)
            raise KeyError
        for nbytes, out in enumerate(outs, 8):
            with transfers:
                transfers.send(on_device(comm, values(comm.rank, peer, nbytes)[:8]), peer)
                transfers.recv(out, peer)
        comm.synchronize()
        for nbytes, out in enumerate(outs, 8):
            np.testing.assert_array_equal(on_host(out), values(peer, comm.rank, nbytes)[:8])

    pairs.run(body)


def test_a_transfer_waits_for_no_third_rank() -> None:
    """Ranks 0 and 1 exchange data before rank 2 does anything, and wait for rank 2 only afterwards."""
    with Ranks(3) as three:

        def body(comm: Communicator) -> None:
            comm.prepare_transfers()
            word = on_device(comm, np.array([comm.rank], np.int64))
            if comm.rank == 0:
                comm.send(word, 1)
                comm.recv(word, 1)
                comm.send(word, 2)
            elif comm.rank == 1:
                comm.recv(word, 0)
                comm.send(word, 0)
            else:
                comm.recv(word, 0)
            comm.synchronize()
            assert on_host(word)[0] == 0

        three.run(body)


def test_a_send_waits_for_earlier_sends_and_for_nothing_that_its_stream_was_given_since(pairs: Ranks) -> None:
    """On one stream, each rank sends and then waits for data that the other rank sends on a second stream."""

    def body(comm: Communicator) -> None:
        peer, first, second = 1 - comm.rank, comm.runtime.create_stream(), comm.runtime.create_stream()
        x = on_device(comm, values(comm.rank, peer, 64))
        outs = [on_device(comm, np.zeros(64, np.uint8)) for _ in range(2)]
        comm.send(x, peer, stream=first)
        for out in outs:
            comm.recv(out, peer, stream=first)
        comm.send(x, peer, stream=second)
        for stream in (first, second):
            comm.synchronize(stream)
        for out in outs:
            np.testing.assert_array_equal(on_host(out), values(peer, comm.rank, 64))

    pairs.run(body)


def test_an_issue_on_a_stream_waits_for_no_peer(pairs: Ranks) -> None:
    sent = threading.Event()

    def body(comm: Communicator) -> None:
        comm.prepare_transfers()
        stream = comm.runtime.create_stream()
        if comm.rank == 0:
            for _ in range(3):
                comm.send(on_device(comm, values(0, 1, LONG)), 1, stream=stream)
            sent.set()
        else:
            assert sent.wait(60)
            out = on_device(comm, np.zeros(LONG, np.uint8))
            for _ in range(3):
                comm.recv(out, 0, stream=stream)
            comm.synchronize(stream)
            np.testing.assert_array_equal(on_host(out), values(0, 1, LONG))
        comm.synchronize(stream)

    pairs.run(body)


@pytest.mark.host_only(reason="is about the exchanges of first calls")
def test_a_thread_may_make_transfers_while_another_makes_its_first_collectives() -> None:
    def body(comm: Communicator) -> None:
        def move() -> None:
            peer = 1 - comm.rank
            for nbytes in range(1, 9):
                out = np.zeros(nbytes, np.uint8)
                with comm.transfers() as transfers:
                    transfers.send(values(comm.rank, peer, nbytes), peer)
                    transfers.recv(out, peer)
                np.testing.assert_array_equal(out, values(peer, comm.rank, nbytes))

        comm.prepare_transfers()
        with ThreadPoolExecutor(1) as another:
            moved = another.submit(move)
            for algorithm in ("two_shot", "proxy"):
                assert (comm.all_reduce(np.ones(8, np.float32), algorithm=algorithm) == 2).all()
            moved.result()

    run_ranks(2, body)


@pytest.mark.parametrize("sizes", [(4, 5), (4, LONG), (LONG, 4)])  # short and long transfers may take different paths
def test_a_size_that_differs_is_named(pairs: Ranks, sizes: tuple[int, int]) -> None:
    def body(comm: Communicator) -> None:
        array = on_device(comm, np.zeros(sizes[comm.rank], np.uint8))
        if comm.rank == 0:
            comm.send(array, 1)
            comm.recv(array, 1)  # keeps rank 0 in a call until rank 1 has found the difference
        else:
            comm.recv(array, 0)
        comm.synchronize()

    with pytest.raises(MismatchError, match=f"{sizes[1]} bytes from rank 0, which sends {sizes[0]}"):
        pairs.run(body)


def counts_of(rank: int, world_size: int, scale: int) -> list[int]:
    """Returns how many rows a rank sends to each receiver: 0, 1, 2 or 3 times `scale`."""
    return [(rank * 3 + peer * 5) % 4 * scale for peer in range(world_size)]


@pytest.mark.parametrize("scale", [1, 40_000])
def test_all_to_all_v_moves_rows_of_any_number(ranks: Ranks, scale: int) -> None:
    def body(comm: Communicator) -> None:
        rank, n = comm.rank, comm.world_size
        sent = counts_of(rank, n, scale)
        received = [counts_of(peer, n, scale)[rank] for peer in range(n)]
        blocks = [values(rank, peer, 8 * rows).view(np.float32).reshape(rows, 2) for peer, rows in enumerate(sent)]
        out = comm.all_to_all_v(on_device(comm, np.concatenate(blocks)), sent, received)
        comm.synchronize()
        expected = np.concatenate([values(peer, rank, 8 * rows) for peer, rows in enumerate(received)])
        assert on_host(out).tobytes() == expected.tobytes()

    ranks.run(body)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("rows", [0, 3, 100_000])
def test_gather_and_scatter_are_each_others_inverse(ranks: Ranks, rows: int, in_place: bool) -> None:
    def body(comm: Communicator) -> None:
        rank, n = comm.rank, comm.world_size
        root = n - 1
        given, before = values(rank, root, 4 * rows).reshape(rows, 4), np.zeros((n * rows, 4), np.uint8)
        if in_place and rank == root:
            before[root * rows :] = given
        whole = on_device(comm, before)
        own = whole[root * rows :] if in_place and rank == root else on_device(comm, given)
        gathered = comm.gather(own, root, out=whole if rank == root else None)
        comm.synchronize()
        if rank == root:
            assert gathered is whole
            expected = np.concatenate([values(peer, root, 4 * rows) for peer in range(n)])
            assert on_host(whole).tobytes() == expected.tobytes()
        else:
            assert gathered is None
        back = own if in_place else on_device(comm, np.zeros((rows, 4), np.uint8))
        assert comm.scatter(whole if rank == root else None, root, out=back) is back
        comm.synchronize()
        assert on_host(back).tobytes() == values(rank, root, 4 * rows).tobytes()

    ranks.run(body)


def test_reduce_changes_the_root_alone(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        rank, n = comm.rank, comm.world_size
        root = n // 2
        x = on_device(comm, np.full(1000, rank + 1, np.int32))
        result = comm.reduce(x, "sum", root)
        comm.synchronize()
        assert (result is x) if rank == root else result is None
        assert (on_host(x) == (n * (n + 1) // 2 if rank == root else rank + 1)).all()

    ranks.run(body)


@pytest.mark.parametrize(("sent", "received"), [((0, 8), (0, 8)), ((0, 8), (7, 15)), ((7, 15), (0, 8))])
def test_an_array_that_is_received_overlaps_no_other(
    pairs: Ranks, sent: tuple[int, int], received: tuple[int, int]
) -> None:
    """Covers transfers between peers and from a rank to itself. Arrays that are sent may overlap each other."""

    def body(comm: Communicator) -> None:
        x = on_device(comm, np.arange(24, dtype=np.float32))
        own, peer = comm.rank, 1 - comm.rank

        def exchange(*transfers: tuple[tuple[int, int], int, tuple[int, int], int]) -> None:
            with comm.transfers() as block:
                for source, to, target, sender in transfers:
                    block.send(x[slice(*source)], to)
                    block.recv(x[slice(*target)], sender)

        refused = [((sent, peer, received, peer),), ((sent, own, (16, 24), own), ((8, 16), peer, (15, 23), peer))]
        for transfers in (*refused, ((sent, own, received, own),)) if sent != received else refused:
            with pytest.raises(ArgumentError, match="out: overlaps another array"):
                exchange(*transfers)
        np.testing.assert_array_equal(on_host(x), np.arange(24))
        with comm.transfers() as transfers:
            transfers.send(x[:8], peer)
            transfers.send(x[4:12], peer)
            transfers.recv(x[12:20], own)
            transfers.send(x[12:20], own)
            transfers.recv(first := on_device(comm, np.zeros(8, np.float32)), peer)
            transfers.recv(second := on_device(comm, np.zeros(8, np.float32)), peer)
        barrier(comm)
        np.testing.assert_array_equal(on_host(first), np.arange(8))
        np.testing.assert_array_equal(on_host(second), np.arange(4, 12))

    pairs.run(body)


def test_wrong_arguments_are_refused_before_anything_moves(pairs: Ranks) -> None:
    def body(comm: Communicator) -> None:
        x = on_device(comm, np.zeros((4, 2), np.float32))
        with pytest.raises(ArgumentError, match=r"peer: must be a rank from 0 to 1, not 2"):
            comm.send(x, 2)
        with pytest.raises(ArgumentError, match="is this rank itself"):
            comm.recv(x, comm.rank)
        to_itself = comm.transfers()
        to_itself.send(x, comm.rank)
        with pytest.raises(ArgumentError, match=r"sends itself arrays of \[32\] bytes and receives \[\]"), to_itself:
            pass
        with pytest.raises(ArgumentError, match="send_counts: expected 2 numbers of rows"):
            comm.all_to_all_v(x, [4], [2, 2])
        with pytest.raises(ArgumentError, match="expected 5 rows, the sum of send_counts"):
            comm.all_to_all_v(x, [3, 2], [3, 2])
        with pytest.raises(ArgumentError, match="out: overlaps x"):
            comm.all_to_all_v(x, [2, 2], [2, 2], out=x)
        with pytest.raises(ArgumentError, match="root: must be a rank"):
            comm.gather(x, 2)
        if comm.rank:
            with pytest.raises(ArgumentError, match="out: expected an array"):
                comm.scatter(None, 0)

    pairs.run(body)


def test_a_wrong_first_block_is_refused_although_no_peer_takes_part() -> None:
    refused = threading.Event()

    def body(comm: Communicator) -> None:
        x = on_device(comm, np.arange(12, dtype=np.float32))
        if comm.rank == 0:
            block = comm.transfers()
            block.send(x[:8], 1)
            block.recv(x[4:], 1)
            with pytest.raises(ArgumentError, match="out: overlaps another array"), block:
                pass
            block.send(x, 0)
            with pytest.raises(ArgumentError, match="sends itself arrays"), block:
                pass
            refused.set()
            comm.send(x, 1)
        else:
            assert refused.wait(TIMEOUT)
            comm.recv(x, 0)

    run_ranks(2, body, timeout=5)


def test_an_empty_array_overlaps_nothing(pairs: Ranks) -> None:
    def body(comm: Communicator) -> None:
        whole = on_device(comm, np.arange(8, dtype=np.float32) * comm.rank)
        for _ in range(2):
            if comm.rank == 0:
                comm.all_to_all_v(whole[3:][:0], [0, 0], [0, 8], out=whole)
            else:
                comm.all_to_all_v(whole, [8, 0], [0, 0])
        barrier(comm)
        assert on_host(whole).tolist() == list(range(8))

    pairs.run(body)


@pytest.mark.host_only(reason="the path is the same on GPUs")
def test_calls_with_new_arrays_and_other_counts_are_made_by_c(monkeypatch: pytest.MonkeyPatch) -> None:
    all_are_ready = threading.Barrier(2)

    def body(comm: Communicator) -> None:
        rank = comm.rank
        comm.prepare_transfers()
        if all_are_ready.wait() == 0:
            monkeypatch.delattr(in_python.TransferCalls, "_issue_views")
        all_are_ready.wait()
        for rows in (3, 1, 40_000):
            sent, received = ([rows, 5], [rows, 7]) if rank == 0 else ([7, rows], [5, rows])
            blocks = [values(rank, to, 8 * count).reshape(count, 8) for to, count in enumerate(sent)]
            out = comm.all_to_all_v(np.concatenate(blocks), sent, received)
            expected = [values(of, rank, 8 * count) for of, count in enumerate(received)]
            assert out.tobytes() == np.concatenate(expected).tobytes()
            x = values(rank, 0, rows)
            whole = comm.gather(x, 0, out=np.zeros(2 * rows, np.uint8) if rank == 0 else None)
            back = comm.scatter(whole, 0, out=np.zeros(rows, np.uint8))
            assert back.tobytes() == x.tobytes()
            if rank == 0:
                comm.send(values(0, 1, rows).view(), 1)
            else:
                assert comm.recv(np.zeros(rows, np.uint8), 0).tobytes() == values(0, 1, rows).tobytes()

    run_ranks(2, body)


def _read_only(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


@pytest.mark.host_only(reason="is about numpy's arrays")
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (_read_only, "is read-only"),
        (lambda x: x[::2], "not contiguous"),
        (np.ma.masked_array, "is masked"),
        (lambda x: x.astype(object), "unknown element type 'object'"),
        (lambda x: x.astype(">i8"), "expected this machine's byte order"),
        (lambda x: x.view("V8"), "unknown element type"),
        (lambda x: x.view(np.uint8)[1:9].view(np.int64), "not aligned"),
        (lambda _: None, "expected an array"),
    ],
    ids=["read-only", "strides", "masked", "objects", "byte order", "bytes", "alignment", "none"],
)
def test_an_array_that_can_not_be_received_in_is_named(pairs: Ranks, other: Callable[[Any], Any], message: str) -> None:
    def body(comm: Communicator) -> None:
        comm.prepare_transfers()
        with pytest.raises(ArgumentError, match=f"out: .*{message}"):
            comm.recv(other(np.zeros(4, np.int64)), 1 - comm.rank)

    pairs.run(body)


@pytest.mark.host_only(reason="is about arrays of the host's memory")
def test_arrays_without_a_type_that_c_knows_are_transferred_too(pairs: Ranks) -> None:
    def body(comm: Communicator) -> None:
        comm.prepare_transfers()
        if comm.rank == 0:
            comm.send(b"12345678", np.int64(1))
        else:
            out = array("q", [0])
            comm.recv(memoryview(out), np.int64(0))
            assert out.tobytes() == b"12345678"

    pairs.run(body)


class Interrupts(type):
    """A type whose hash raises an interrupt, so a look-up in a set raises it."""

    def __hash__(cls) -> int:
        raise KeyboardInterrupt


def test_an_exception_of_the_program_s_own_is_passed_on(pairs: Ranks) -> None:
    def body(comm: Communicator) -> None:
        comm.prepare_transfers()
        x = Interrupts("Array", (), {})()
        with pytest.raises(KeyboardInterrupt):
            comm.send(x, 1 - comm.rank, stream=comm.runtime.create_stream())

    pairs.run(body)


def test_an_array_that_was_freed_is_refused(pairs: Ranks) -> None:
    def body(comm: Communicator) -> None:
        comm.prepare_transfers()
        x = comm.empty(8)
        comm.all_gather_bytes(b"")
        x.free()
        with pytest.raises(ClosedError, match="memory was freed"):
            comm.send(x, 1 - comm.rank)

    pairs.run(body)


def test_a_group_that_has_ended_refuses_transfers() -> None:
    kept: list[tuple[Communicator, Any]] = []

    def body(comm: Communicator) -> None:
        comm.prepare_transfers()
        kept.append((comm, on_device(comm, np.zeros(4, np.float32))))
        comm.all_gather_bytes(b"")

    run_ranks(2, body)
    for comm, x in kept:
        for call in (lambda: comm.send(x, 1 - comm.rank), lambda: comm.all_to_all_v(x, [2, 2], [2, 2], out=x)):  # noqa: B023
            with pytest.raises(ClosedError, match="the communicator is closed"):
                call()


@pytest.mark.host_only(reason="on a GPU the call is only queued")
def test_an_aborted_group_refuses_transfers() -> None:
    def body(comm: Communicator) -> None:
        comm.prepare_transfers()
        x, out = (on_device(comm, np.zeros(4, np.float32)) for _ in range(2))
        comm.all_gather_bytes(b"")
        if comm.rank == 0:
            comm.abort("enough")
        with pytest.raises(AbortedError, match="enough" if comm.rank == 0 else "rank 0 ended"):
            comm.recv(x, 1 - comm.rank)
        with pytest.raises(AbortedError):
            comm.all_to_all_v(x, [2, 2], [2, 2], out=out)

    run_ranks(2, body)


def test_collectives_of_transfers_that_differ_are_told(pairs: Ranks) -> None:
    def body(comm: Communicator) -> None:
        comm.prepare_transfers()
        x = on_device(comm, np.zeros(4, np.float32 if comm.rank == 0 else np.int32))
        out = on_device(comm, np.zeros(8, np.float32))
        comm.gather(x, 0, out=out if comm.rank == 0 else None)
        comm.synchronize()

    with pytest.raises(MismatchError, match="different dtype"):
        pairs.run(body)


@pytest.mark.hip
def test_a_rank_without_peers_transfers_without_memory_of_its_communicator() -> None:
    def body(comm: Communicator) -> None:
        stream = comm.runtime.create_stream()
        x, *outs = (on_device(comm, values(0, seed, LONG)) for seed in range(4))
        before = comm.memory_usage()
        with comm.transfers(stream=stream) as block:
            for out in outs[:2]:
                block.send(x, 0)
                block.recv(out, 0)
        comm.prepare_transfers()
        comm.all_to_all_v(x, [LONG], [LONG], out=outs[2], stream=stream)
        comm.synchronize(stream)
        for out in outs:
            assert on_host(out).tobytes() == values(0, 0, LONG).tobytes()
        assert comm.memory_usage() == before

    run_ranks(1, body)


@pytest.mark.parametrize("streams", [1, 3])
def test_events_of_calls_are_used_again(streams: int) -> None:
    def body(comm: Communicator) -> None:
        given = [comm.runtime.create_stream() for _ in range(streams)]
        x, out = (on_device(comm, np.zeros(4, np.float32)) for _ in range(2))
        for turn in range(12):
            for stream in given:
                with comm.transfers(stream=stream) as block:
                    block.send(x, 1 - comm.rank)
                    if turn % 2:
                        block.recv(out, 1 - comm.rank)
            if not turn % 2:
                for stream in given:
                    comm.recv(out, 1 - comm.rank, stream=stream)
        for stream in given:
            comm.synchronize(stream)
        assert len(comm.collectives.flows().calls.events) <= 3

    run_ranks(2, body)
