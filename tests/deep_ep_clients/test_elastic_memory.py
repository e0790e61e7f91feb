"""ElasticBuffer's calls except dispatch and combine: pipelines, sessions of all-gathers, stored rows and barriers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import deep_ep  # noqa: E402

from proxyccl import (  # noqa: E402
    ArgumentError,
    Communicator,
    CommunicatorError,
    MismatchError,
    ThreadBootstrap,
    WaitTimeoutError,
)
from proxyccl.deep_ep.tokens import column_major  # noqa: E402
from support.cases.deep_ep_oracle import same, signature  # noqa: E402
from support.devices import ON_HOST, runtime_with_blocks, torch_device  # noqa: E402
from support.ranks import Ranks  # noqa: E402
from support.running import SHORT, TIMEOUT, run_ranks  # noqa: E402

Elastic = deep_ep.ElasticBuffer
MIB = 1 << 20
WORLDS: list[tuple[int, dict[str, int]]] = [(2, {}), (3, {}), (4, {"local_world_size": 2})] if ON_HOST else [(2, {})]
SIGNATURES = {
    "get_pp_buffer_size_hint": "num_max_tensor_bytes num_max_inflight_tensors",
    "pp_set_config": "num_max_tensor_bytes num_max_inflight_tensors",
    "pp_send": "t dst_rank_idx num_sms=0",
    "pp_recv": "t src_rank_idx num_sms=0",
    "get_agrs_num_max_session_bytes": "group shapes dtype",
    "get_agrs_buffer_size_hint": "group num_max_session_bytes",
    "agrs_set_config": "num_max_session_bytes num_max_all_gathers_per_session",
    "create_agrs_session": "",
    "destroy_agrs_session": "",
    "agrs_new_session": "enabled=True",
    "agrs_get_inplace_tensor": "shapes dtype",
    "all_gather": "t",
    "get_engram_storage_size_hint": "num_entries hidden num_max_tokens_per_rank dtype=torch.bfloat16",
    "engram_write": "storage sf=None",
    "engram_fetch": "indices num_qps=0 use_tma_aligned_col_major_sf=False",
}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, make_runtime=runtime_with_blocks) as made:
        yield made


def numbers(comm: Communicator, count: int, seed: int, dtype: Any = torch.bfloat16) -> Any:
    """Returns random values, the same on all ranks for the same seed."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).to(torch_device(comm))


def elastic(comm: Communicator, **options: Any) -> Any:
    torch_device(comm)
    return Elastic(comm, **options)


def refused(what: str, call: Callable[[], Any], error: type[Exception] = ArgumentError) -> None:
    with pytest.raises(error, match=what):
        call()


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert signature(getattr(Elastic, name)) == SIGNATURES[name]


def test_sizes() -> None:
    assert Elastic.get_pp_buffer_size_hint(33, 4) == 2 * MIB
    assert Elastic.get_pp_buffer_size_hint(MIB + 1, 2) == 10 * MIB  # 8 MiB + 2 KiB, rounded up to a multiple of 2 MiB
    assert Elastic.get_engram_storage_size_hint(3 * MIB, 15, 9) == (2 * MIB, 96 * MIB)
    assert Elastic.get_engram_storage_size_hint(MIB, 32, MIB, torch.float8_e4m3fn) == (32 * MIB, 32 * MIB)


# -- pipelines ---


def pipeline(comm: Communicator, nbytes: int, in_flight: int) -> Any:
    size = Elastic.get_pp_buffer_size_hint(nbytes, in_flight)
    buffer = elastic(comm, num_bytes=size, explicitly_destroy=True)
    buffer.pp_set_config(nbytes, in_flight)
    return buffer


def test_sends_to_both_neighbours_arrive_in_order(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        rank, size, in_flight = comm.rank, comm.world_size, 3
        buffer = pipeline(comm, 4096, in_flight)
        order = random.Random(7)  # all ranks draw the same sequence of senders and receivers
        ahead: dict[tuple[int, int], list[int]] = {}
        for step in range(80):
            source = order.randrange(size)
            target = (source + order.choice([1, -1])) % size
            waiting = ahead.setdefault((source, target), [])
            receives = len(waiting) == in_flight or (waiting and order.random() < 0.4)
            if receives:
                sent = waiting.pop(0)
                if rank == target:
                    got = numbers(comm, 1 + sent * 20, 0)
                    buffer.pp_recv(got, source)
                    same(got, numbers(comm, 1 + sent * 20, sent))
            else:
                waiting.append(step)
                if rank == source:
                    values = numbers(comm, 1 + step * 20, step)
                    # a tensor of one element is contiguous with any stride
                    buffer.pp_send(values if step else values.as_strided((1,), (7,)), target)
                    values.zero_()
        for (source, target), waiting in ahead.items():
            for sent in waiting:
                if rank == target:
                    got = numbers(comm, 1 + sent * 20, 0)
                    buffer.pp_recv(got, source, num_sms=4)
                    same(got, numbers(comm, 1 + sent * 20, sent))
        buffer.destroy()

    ranks.run(body)


def test_a_pipeline_is_configured_again(two: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer = pipeline(comm, 1 << 16, 2)
        other = 1 - comm.rank
        for nbytes, dtype in ((1 << 10, torch.bool), (1 << 16, torch.float64), (0, torch.int8)):
            buffer.pp_set_config(max(nbytes, 1), 1)
            values = numbers(comm, nbytes // dtype.itemsize, comm.rank, dtype)
            got = torch.empty_like(values)
            buffer.pp_send(values, other)
            buffer.pp_recv(got, other)
            same(got, numbers(comm, len(got), other, dtype))
        buffer.destroy()

    two.run(body)


def test_a_receive_holds_up_no_other_call(two: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer = pipeline(comm, 4096, 1)
        values = numbers(comm, 100, 0)
        buffer.barrier()
        if comm.rank == 0:
            buffer.pp_send(values, 1)
        buffer.barrier(use_comm_stream=False)  # a barrier may come between a send and its receive
        if comm.rank == 1:
            got = torch.empty_like(values)
            buffer.pp_recv(got, 0)
            same(got, values)
        buffer.barrier(with_cpu_sync=True)

    two.run(body)


@pytest.mark.host_only(reason="the call itself waits")
def test_a_send_without_a_free_slot_waits_for_a_receive() -> None:
    ended = threading.Event()

    def body(comm: Communicator) -> None:
        buffer = pipeline(comm, 4096, 2)
        if comm.rank == 0:
            buffer._pipeline.timeout = SHORT
            for _ in range(2):
                buffer.pp_send(numbers(comm, 10, 0), 1)
            refused("the data of rank 1", lambda: buffer.pp_send(numbers(comm, 10, 0), 1), WaitTimeoutError)
            ended.set()
        assert ended.wait(4 * TIMEOUT)
        buffer.barrier()  # a barrier still works after the pipeline's failure

    run_ranks(2, body)


def test_what_a_pipeline_refuses(two: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer = elastic(comm, num_bytes=2 * MIB)
        x = numbers(comm, 64, 0)
        refused("^num_max_tensor_bytes: is not known", lambda: buffer.pp_send(x, 1 - comm.rank))
        refused("^num_max_tensor_bytes: needs a buffer of", lambda: buffer.pp_set_config(MIB, 1))
        refused("^num_max_tensor_bytes: must be", lambda: buffer.pp_set_config(0, 1))
        refused("^num_max_inflight_tensors: must be", lambda: buffer.pp_set_config(64, 0))
        buffer.pp_set_config(128, 1)
        refused(f"^dst_rank_idx: is {comm.rank}", lambda: buffer.pp_send(x, comm.rank))
        refused("^src_rank_idx: must be", lambda: buffer.pp_recv(x, 2))
        refused("^t: has 256 bytes", lambda: buffer.pp_recv(x.float(), 1 - comm.rank))
        refused("^t: must be contiguous", lambda: buffer.pp_send(x[::2], 1 - comm.rank))
        refused("^t: must be a tensor", lambda: buffer.pp_send([1], 1 - comm.rank))

    two.run(body)


# -- sessions ---


def sessions(comm: Communicator, shapes: Any, calls: int, dtype: Any = torch.bfloat16) -> Any:
    nbytes = Elastic.get_agrs_num_max_session_bytes(comm, shapes, dtype)
    buffer = elastic(comm, num_bytes=Elastic.get_agrs_buffer_size_hint(comm, nbytes), explicitly_destroy=True)
    buffer.agrs_set_config(nbytes, calls)
    return buffer


def test_gathers_of_a_session(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        shapes = [(3, 5), (7,), (2, 64, 40), (1,)]
        buffer = sessions(comm, shapes, 4)
        order = random.Random(3)  # all ranks draw the same random numbers

        def values(rank: int, number: int, shape: tuple[int, ...]) -> Any:
            return numbers(comm, torch.Size(shape).numel(), 100 * number + rank).view(shape)

        for session in range(6):
            with buffer.agrs_new_session():
                pending, left = [], list(shapes)
                while left:
                    count = order.randint(1, len(left))
                    batch, left = left[:count], left[count:]
                    mine = [values(comm.rank, session, shape) for shape in batch]
                    if order.random() < 0.5:
                        places = buffer.agrs_get_inplace_tensor(tuple(batch), torch.bfloat16)
                        for place, each in zip(places, mine, strict=True):
                            place.copy_(each)
                        mine = list(places)
                    if len(batch) == 1 and order.random() < 0.5:
                        *results, handle = buffer.all_gather(mine[0])
                    else:
                        *results, handle = buffer.all_gather(mine)
                    pending.append((batch, results, handle))
                order.shuffle(pending)
                for batch, results, handle in pending:
                    handle()
                    for shape, got in zip(batch, results, strict=True):
                        same(got, torch.stack([values(rank, session, shape) for rank in range(comm.world_size)]))
        with buffer.agrs_new_session(enabled=False):
            refused("^session: is not open", lambda: buffer.all_gather(mine))
        buffer.destroy()

    ranks.run(body)


@pytest.mark.parametrize("count", [1, 2])
def test_ranks_that_gather_other_sizes_are_told(count: int) -> None:
    def body(comm: Communicator) -> None:
        buffer = sessions(comm, [(64,)] * 4, 4)
        tensors = [numbers(comm, 4 + comm.rank, 0)] * count

        def gathered() -> None:
            buffer.all_gather(tensors)
            comm.synchronize()  # on a GPU, synchronize() may raise the error instead of all_gather()

        with buffer.agrs_new_session():
            refused("all_gather", gathered, MismatchError)

    run_ranks(2, body)


def test_what_sessions_refuse(two: Ranks) -> None:
    def body(comm: Communicator) -> None:
        x = numbers(comm, 64, comm.rank)
        buffer = elastic(comm, num_bytes=2 * MIB)
        buffer.create_agrs_session()
        refused("^num_max_session_bytes: is not known", lambda: buffer.all_gather(x))
        refused("^session: is open", lambda: buffer.agrs_set_config(MIB, 1))
        buffer.destroy_agrs_session()
        refused("^session: is not open", buffer.destroy_agrs_session)
        refused("^num_max_session_bytes: is 2097153", lambda: buffer.agrs_set_config(2 * MIB + 1, 1))
        refused("^num_max_all_gathers_per_session: must", lambda: buffer.agrs_set_config(512, 33))
        buffer.agrs_set_config(512, 2)
        with buffer.agrs_new_session():
            refused("^session: is open", buffer.create_agrs_session)
            (whole,), handle = (lambda *got: (got[:-1], got[-1]))(*buffer.all_gather((x,)))
            refused("^t: needs 1024 bytes; the session has 256 left of", lambda: buffer.all_gather(x.double()))
            place = buffer.agrs_get_inplace_tensor((16,), torch.float32)
            refused("^shapes: needs", lambda: buffer.agrs_get_inplace_tensor(((64,), (64,)), torch.float16))
            refused("^t: lies in the session's memory at another place", lambda: buffer.all_gather(place[1:]))
            refused("^t: lies in", lambda: buffer.all_gather(whole[comm.rank, :4]))
            buffer.all_gather(place)
            refused("^t: has no room: num_max_all_gathers", lambda: buffer.all_gather(x[:1]))
            handle()
        refused("^handle: comes from a session", handle)
        refused("^dtype: must be", lambda: buffer.agrs_get_inplace_tensor((1,), "float32"))

    two.run(body)


# -- stored rows ---


def test_rows_of_all_ranks_are_fetched_by_their_numbers(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        entries, hidden, tokens, each = 37, 24, 11, 3
        fetched, stored = Elastic.get_engram_storage_size_hint(entries, hidden, tokens * each)
        buffer = elastic(comm, num_bytes=fetched + stored, num_cpu_bytes=stored, explicitly_destroy=True)
        if comm.world_size > comm.local_world_size:
            rows = numbers(comm, entries * hidden, 0).view(entries, hidden)
            refused("engram_write across nodes", lambda: buffer.engram_write(rows), NotImplementedError)
            return
        generator = torch.Generator().manual_seed(comm.rank)
        for seed in range(2):
            rows = [
                numbers(comm, entries * hidden, 10 * seed + rank).view(entries, -1) for rank in range(comm.world_size)
            ]
            buffer.engram_write(rows[comm.rank])
            for _ in range(comm.rank + 1):  # each rank makes a different number of fetches
                indices = torch.randint(0, comm.world_size * entries, (tokens, each), generator=generator)
                indices = indices.to(torch.int32).to(torch_device(comm))
                data, factors = buffer.engram_fetch(indices)()
                same(data, torch.cat(rows)[indices.flatten().long()].view(tokens, each * hidden))
                assert factors is None
        buffer.destroy()

    ranks.run(body)


def test_float8_rows_come_with_their_scales(two: Ranks) -> None:
    def body(comm: Communicator) -> None:
        entries, hidden = 5, 30
        buffer = elastic(comm, num_bytes=4 * MIB, num_cpu_bytes=2 * MIB)
        rows = [numbers(comm, entries * hidden, rank, torch.float8_e4m3fn).view(entries, -1) for rank in range(2)]
        scales = numbers(comm, 2 * entries * 2, 9, torch.float32).view(-1, 2)
        buffer.engram_write(rows[comm.rank], sf=scales)
        indices = torch.tensor([[9, 0], [4, 5], [3, 3]], dtype=torch.int32, device=torch_device(comm))
        expected = scales[indices.flatten().long()].view(3, 4)
        for columns in (False, True):
            data, factors = buffer.engram_fetch(indices, use_tma_aligned_col_major_sf=columns)()
            same(
                data,
                torch.cat([row.view(torch.uint8) for row in rows])[indices.flatten().long()]
                .view(data.dtype)
                .view(3, -1),
            )
            same(factors, expected)
            assert factors.stride() == (column_major(expected) if columns else expected).stride()
            data, factors = buffer.engram_fetch(indices[:0], use_tma_aligned_col_major_sf=columns)()
            assert (data.shape, factors.shape) == ((0, 2 * hidden), (0, 4))
        if not ON_HOST:  # the host runtime refuses indices out of range
            data, _ = buffer.engram_fetch(indices.new_tensor([[-1, 2 * entries]]))()
            assert not data.view(torch.uint8).any()

    two.run(body)


def test_what_stored_rows_refuse(two: Ranks) -> None:
    def body(comm: Communicator) -> None:
        refused("^num_cpu_bytes: is 1;", lambda: elastic(comm, num_bytes=4 * MIB, num_cpu_bytes=1))
        refused("^num_cpu_bytes: is 2097152;", lambda: elastic(comm, num_cpu_bytes=2 * MIB))
        buffer = elastic(comm, num_bytes=4 * MIB, num_cpu_bytes=2 * MIB)
        rows, indices = (
            numbers(comm, 64, 0).view(4, 16),
            torch.zeros(1, 1, dtype=torch.int32, device=torch_device(comm)),
        )
        refused("^storage: is not known", lambda: buffer.engram_fetch(indices))
        refused("^storage: is torch.float32", lambda: buffer.engram_write(rows.float()))
        refused("^sf: must be given", lambda: buffer.engram_write(rows.to(torch.float8_e4m3fn)))
        refused("^storage: has 4194304 bytes", lambda: buffer.engram_write(rows.new_empty(MIB, 2)))
        refused("^storage: has . rows of 32 bytes; rank . has", lambda: buffer.engram_write(rows[comm.rank :]))
        buffer.engram_write(rows)
        refused("^indices: is torch.int64", lambda: buffer.engram_fetch(indices.long()))
        refused("^indices: names 65537 rows", lambda: buffer.engram_fetch(indices.expand(1, 65537).contiguous()))
        if ON_HOST:
            refused("^indices: are 0 to 8; expected 0 to 7", lambda: buffer.engram_fetch(indices.new_tensor([[0, 8]])))

    two.run(body)


@pytest.mark.host_only(reason="more ranks than most machines have GPUs")
def test_an_elastic_buffer_continues_with_a_new_process() -> None:
    """Rank 1 fails while the other ranks are in a session, and is replaced."""
    whole = ThreadBootstrap.create(3)
    used = threading.Barrier(3)

    def use(buffer: Any, comm: Communicator) -> None:
        ids = torch.tensor([[0], [1], [2]], device=torch_device(comm))
        tokens = numbers(comm, 3 * 128, comm.rank).view(3, 128)
        rows, _, _, handle, _ = buffer.dispatch(tokens, ids, num_experts=3, num_max_tokens_per_rank=3)
        assert len(rows) == 3
        assert torch.equal(buffer.combine(rows, handle)[0], tokens)
        buffer.agrs_set_config(4096, 2)
        with buffer.agrs_new_session():
            gathered, wait = buffer.all_gather(torch.full((4,), comm.rank, dtype=torch.int32))
            wait()
            assert gathered[:, 0].tolist() == [0, 1, 2]
        buffer.engram_write(numbers(comm, 128, comm.rank).view(1, 128))
        fetched, _ = buffer.engram_fetch(torch.tensor([[2]], dtype=torch.int32))()
        assert torch.equal(fetched.view(-1), numbers(comm, 128, 2))
        buffer.pp_set_config(4096, 1)
        buffer.pp_send(torch.full((4,), comm.rank, dtype=torch.int32), (comm.rank + 1) % 3)
        received = torch.empty(4, dtype=torch.int32)
        buffer.pp_recv(received, (comm.rank - 1) % 3)
        assert received[0] == (comm.rank - 1) % 3

    def body(comm: Communicator) -> None:
        sizes = {"num_bytes": 4 * MIB, "num_cpu_bytes": 2 * MIB, "explicitly_destroy": True}
        buffer = elastic(comm, **sizes)
        use(buffer, comm)
        used.wait(TIMEOUT)  # `abort` would end calls of the other ranks
        if comm.rank == 1:
            comm.abort("of the test")
            with Communicator(whole[1], comm.runtime, timeout=TIMEOUT) as grown:
                joining = elastic(grown, **sizes)
                use(joining, grown)
                joining.destroy()
            return
        buffer.create_agrs_session()
        with pytest.raises(CommunicatorError, match="of the test"):
            comm.all_gather_bytes(b"")
        with comm.shrink(exclude=[1]) as shrunk, shrunk.grow(whole[comm.rank]) as grown:
            buffer.grow(grown)
            with pytest.raises(ArgumentError, match=r"^communicator: is the buffer's own"):
                buffer.grow(grown)
            use(buffer, grown)
            buffer.destroy()

    run_ranks(3, body, make_runtime=runtime_with_blocks)


# -- the end ---


@pytest.mark.host_only(reason="AMD's GPUs can't suspend memory")
def test_buffers_are_destroyed_while_their_communicator_is_suspended() -> None:
    def body(comm: Communicator) -> None:
        sizes = {"num_bytes": 16 * MIB, "num_cpu_bytes": 2 * MIB, "num_max_tokens_per_rank": 8}
        buffer = elastic(comm, **sizes, hidden=64, num_topk=2, explicitly_destroy=True)
        other = deep_ep.Buffer(comm, explicitly_destroy=True)
        buffer.agrs_set_config(2 * MIB, 2)
        buffer.pp_set_config(MIB, 1)
        buffer.engram_write(numbers(comm, 64, 0).reshape(4, 16))
        ids, weights = torch.arange(2).repeat(4, 1), torch.ones(4, 2)
        x = numbers(comm, 4 * 64, 1).reshape(4, 64)
        buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_experts=2)
        other.low_latency_dispatch(x, ids, 4, 2, use_fp8=False)
        comm.suspend()
        buffer.destroy()
        other.destroy()
        comm.resume()
        comm.barrier()

    with Ranks(2, suspendable=True) as ranks:
        ranks.run(body)
