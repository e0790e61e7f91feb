"""Low-latency combines of rows that another kernel still computes: counters tell which rows are complete."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import deep_ep  # noqa: E402

from proxyccl import Communicator  # noqa: E402
from proxyccl.device.errors import ArgumentError, WaitTimeoutError  # noqa: E402
from support.devices import ON_HOST, runtime_with_blocks, torch_device  # noqa: E402
from support.ranks import Ranks  # noqa: E402
from support.running import impatient, run_ranks  # noqa: E402

RANKS, EXPERTS, TOPK, HIDDEN, TOKENS = 2, 4, 2, 64, 40
LOCAL, ROWS = EXPERTS // RANKS, RANKS * TOKENS
BLOCK, THRESHOLD = 32, 3
UNFINISHED = -64.0


@pytest.fixture(scope="module", params=[2, 1] if ON_HOST else [2])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(RANKS, make_runtime=runtime_with_blocks, local_world_size=request.param) as made:
        yield made


def by_block(device: Any) -> tuple[Any, dict[str, Any]]:
    """Returns counters with the values that DeepGEMM would store, and the arguments of the combine."""
    counters = torch.zeros(LOCAL * -(-ROWS // BLOCK), dtype=torch.int32, device=device)
    return counters, {"comp_signal": counters, "block_m": BLOCK, "threshold": THRESHOLD, "num_sms": 1}


def by_expert(device: Any) -> tuple[Any, dict[str, Any]]:
    """Returns counters with the values that FlashInfer would store, and the arguments of the combine."""
    counters = torch.zeros(LOCAL, dtype=torch.uint32, device=device)
    return counters, {"src_signals": counters, "src_signal_expect_value": THRESHOLD}


def dispatched(buffer: Any, comm: Communicator, turn: int) -> tuple[Any, ...]:
    made, device = torch.Generator().manual_seed(2 * turn + comm.rank), torch_device(comm)
    x = torch.randint(-8, 8, (TOKENS - 3 * comm.rank, HIDDEN), generator=made).bfloat16().to(device)
    ids = torch.rand(len(x), EXPERTS, generator=made).argsort(1)[:, :TOPK].contiguous().to(device)
    rows, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS, use_fp8=False)
    return x, ids, torch.ones(len(x), TOPK, device=device), rows, counts, handle


def compute(results: Any, rows: Any, counts: Any, counters: Any) -> None:
    """Computes blocks of rows from the last to the first, and raises each block's counter in steps."""
    raised, blocks = counters.view(torch.int32), len(counters) // LOCAL
    for number in reversed(range(len(counters))):
        expert, block = divmod(number, blocks)
        part = slice(None) if blocks == 1 else slice(block * BLOCK, (block + 1) * BLOCK)
        raised[number] += THRESHOLD - 1
        results[expert, part] = rows[expert, part]
        if counts[expert] > (part.start or 0):  # no call waits for the counter of rows that no rank sent
            raised[number] += 1


@pytest.mark.host_only(reason="a thread of the CPU stands in for the kernel that computes rows")
@pytest.mark.parametrize("how", ["", "return_recv_hook"])
@pytest.mark.parametrize("counted", [by_block, by_expert])
def test_rows_are_read_after_their_counter(ranks: Ranks, counted: Any, how: str) -> None:
    def body(comm: Communicator) -> None:
        buffer = deep_ep.Buffer(comm, explicitly_destroy=True)
        for turn in range(3):
            x, ids, weights, rows, counts, handle = dispatched(buffer, comm, turn)
            counters, arguments = counted(x.device)
            results = torch.full_like(rows, UNFINISHED)

            computing = threading.Thread(target=compute, args=(results, rows, counts, counters))
            computing.start()
            combined, _, hook = buffer.low_latency_combine(
                results,
                ids,
                weights,
                handle,
                overlap=True,
                packed_recv_count=counts,
                **arguments,
                **({how: True} if how else {}),
            )
            computing.join()
            if hook is not None:
                comm.synchronize()
                counters.zero_()  # the kernels that send have read all counters
                hook()
            assert torch.equal(combined, (x.float() * TOPK).bfloat16())
            # Without overlap=True the combine ignores the counters.
            counters.zero_()
            again = dispatched(buffer, comm, turn)
            combined, _, _ = buffer.low_latency_combine(
                again[3], again[1], again[2], again[5], overlap=False, **arguments
            )
            assert torch.equal(combined, (x.float() * TOPK).bfloat16())
        buffer.destroy()

    ranks.run(body)


def test_wrong_arguments(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer = deep_ep.Buffer(comm, explicitly_destroy=True)
        _, ids, weights, rows, _, handle = dispatched(buffer, comm, 0)

        def refused(reason: str, **options: Any) -> None:
            with pytest.raises(ArgumentError, match=reason):
                buffer.low_latency_combine(rows, ids, weights, handle, overlap=True, **options)

        counters, right = by_block(rows.device)
        refused("^overlap: expected either comp_signal or src_signals")
        refused("^overlap: expected either comp_signal or src_signals", **right, src_signals=counters[:LOCAL])
        refused("^threshold: ", **{**right, "threshold": -1})
        refused("^block_m: ", **{**right, "block_m": 0})
        refused("^num_sms: ", **{**right, "num_sms": 0})
        refused("^comp_signal: is torch.int64", **{**right, "comp_signal": counters.long()})
        refused(
            "^comp_signal: has 5 counters; expected 6, contiguous, one for each 32 of the 80 rows of an expert$",
            **{**right, "comp_signal": counters[:-1]},
        )
        refused("^src_signals: has 1 counters; expected 2, contiguous, one for an expert$", src_signals=counters[:1])
        counters += THRESHOLD
        shape = len(weights), HIDDEN
        for how in ({}, {"return_recv_hook": True}):
            refused("^out: ", **right, **how, out=rows.new_empty(shape[::-1]).t())
            refused("^out: overlaps ", **right, **how, out=rows.view(-1, HIDDEN)[: len(weights)])
        buffer.low_latency_combine(rows, ids, weights, handle, overlap=True, **right)  # the refused calls had no effect
        buffer.destroy()

    ranks.run(body)


@pytest.mark.own_proxy(reason="the bound of waits is short")
def test_a_counter_that_is_never_raised_ends_all_ranks() -> None:
    def body(comm: Communicator) -> None:
        buffer = deep_ep.Buffer(comm, explicitly_destroy=True)
        x, ids, weights, rows, _, handle = dispatched(buffer, comm, 0)
        _, arguments = by_block(x.device)
        impatient(comm)
        buffer.low_latency_combine(rows, ids, weights, handle, overlap=True, **arguments)
        comm.synchronize()

    with pytest.raises(WaitTimeoutError, match="a condition of its kernel"):
        run_ranks(RANKS, body, make_runtime=runtime_with_blocks)
