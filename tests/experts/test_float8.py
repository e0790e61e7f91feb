"""Dispatch in float8: elements and scales have the bits that ml_dtypes computes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from proxyccl import ArgumentError, Communicator, EPAll2AllLayer
from proxyccl.channels.expert_parallel import geometry
from support.cases.reference import numpy_dtype
from support.device_arrays import on_device, on_host, overwrite
from support.devices import runtime_with_blocks
from support.running import run_ranks

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
HIDDEN, TOPK, PER_RANK = 256, 3, 2
TOKENS = (5, 9, 0, 7)


def quantized(rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Returns the rows' elements as float8, and one scale per 128 elements."""
    blocks = rows.astype(np.float32).reshape(len(rows), HIDDEN // 128, 128)
    greatest = np.abs(blocks).max(axis=-1)
    some = np.where(greatest > 0, greatest, np.float32(448))
    elements = blocks * (np.float32(448) / some)[:, :, None]
    return elements.astype(FLOAT8).reshape(rows.shape), some / np.float32(448)


def inputs(rank: int, experts: int, dtype: str) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Returns tokens with values of all magnitudes that float8 can distinguish, and expert ids."""
    rng = np.random.default_rng(rank)
    tokens = rng.standard_normal((TOKENS[rank], HIDDEN)) * 2.0 ** rng.integers(-12, 3, (TOKENS[rank], HIDDEN))
    tokens[::3, :128] = 0
    return tokens.astype(numpy_dtype(dtype)), rng.integers(0, experts + 1, (TOKENS[rank], TOPK)).astype(np.int32)


def layer_of(comm: Communicator, dtype: str, **options: Any) -> EPAll2AllLayer:
    ranks = comm.world_size
    sizes = (max(TOKENS), HIDDEN, TOPK, comm.rank, PER_RANK * ranks, comm.local_world_size, ranks)
    return EPAll2AllLayer(comm, *sizes, dtype=dtype, dispatch_dtype="float8_e4m3fn", **options)


@pytest.mark.parametrize("given", [False, True], ids=["quantised here", "given"])
@pytest.mark.parametrize(
    ("dtype", "ranks", "local_world_size"),
    # Without --full, all types run with two ranks and bfloat16 runs with all numbers of ranks and nodes, because the
    # conversion does not depend on the destination.
    [
        pytest.param(dtype, *ranks, marks=[] if dtype == "bfloat16" or ranks == (2, None) else pytest.mark.full)
        for dtype in ("bfloat16", "float16", "float32", "float64")
        for ranks in ((1, None), (2, None), (4, None), (2, 1), (4, 2))
    ],
)
def test_rows_and_scales(dtype: str, ranks: int, local_world_size: int | None, given: bool) -> None:
    def body(comm: Communicator) -> None:
        layer = layer_of(comm, dtype)
        everyone = [inputs(rank, PER_RANK * ranks, dtype) for rank in range(ranks)]
        tokens, ids = everyone[comm.rank]
        sent = tuple(on_device(comm, x) for x in quantized(tokens)) if given else on_device(comm, tokens)
        expected: list[tuple[NDArray[Any], NDArray[np.float32]]] = []
        for expert in range(comm.rank * PER_RANK, (comm.rank + 1) * PER_RANK):
            for source, chosen in everyone:
                rows, scales = quantized(source)
                token = np.nonzero(chosen == expert)[0]
                expected.append((rows[token], scales[token]))
        for pending in (False, True):
            if pending:
                (rows, scales), weights, desc = layer.dispatch_recv(layer.dispatch_send(sent, on_device(comm, ids)))
            else:
                (rows, scales), weights, desc = layer.dispatch(sent, on_device(comm, ids))
            assert weights is None
            got = on_host(rows)
            assert got.dtype == FLOAT8
            assert got.tobytes() == np.concatenate([rows for rows, _ in expected]).tobytes()
            assert on_host(scales).tobytes() == np.concatenate([scales for _, scales in expected]).tobytes()
            # `combine` works in the layer's dtype, not in float8.
            ones = on_device(comm, np.ones((len(got), HIDDEN), numpy_dtype(dtype)))
            back = on_host(layer.combine(ones, desc))
            assert np.array_equal(
                back, np.broadcast_to((ids < layer.ep_config.num_experts).sum(1)[:, None], back.shape)
            )
        layer.finalize()

    run_ranks(ranks, body, local_world_size=local_world_size)


def test_a_fixed_maximum() -> None:
    def body(comm: Communicator) -> None:
        tokens, ids = inputs(comm.rank, 2 * PER_RANK, "float32")
        sent, chosen = on_device(comm, tokens), on_device(comm, ids)
        (rows, scales), _, _ = layer_of(comm, "float32").dispatch(sent, chosen)
        (more, more_scales), _, desc = layer_of(comm, "float32", max_recv_tokens=50).dispatch(sent, chosen)
        count = int(on_host(desc.num_recv_tokens)[0])
        assert on_host(more)[:count].tobytes() == on_host(rows).tobytes()
        assert on_host(more_scales)[:count].tobytes() == on_host(scales).tobytes()

    run_ranks(2, body)


@pytest.mark.parametrize("local_world_size", [2, 1])
def test_scales_that_take_more_room_than_the_tokens_type(local_world_size: int) -> None:
    def body(comm: Communicator) -> None:
        everyone = [inputs(rank, PER_RANK * comm.world_size, "bfloat16") for rank in range(comm.world_size)]
        tokens, ids = everyone[comm.rank]
        pair = tokens.astype(FLOAT8), tokens.astype(np.float32)
        layer = layer_of(comm, "bfloat16", scale_elements=1)
        sent = on_device(comm, pair[0]), on_device(comm, pair[1])
        (rows, scales), _, _ = layer.dispatch(sent, on_device(comm, ids))
        expected = np.concatenate(
            [
                source[np.nonzero(chosen == expert)[0]]
                for expert in range(comm.rank * PER_RANK, (comm.rank + 1) * PER_RANK)
                for source, chosen in everyone
            ]
        )
        assert on_host(rows).tobytes() == expected.astype(FLOAT8).tobytes()
        assert on_host(scales).tobytes() == expected.astype(np.float32).tobytes()
        layer.finalize()

    run_ranks(2, body, make_runtime=runtime_with_blocks, local_world_size=local_world_size)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float4_e2m1fn_x2"])
@pytest.mark.parametrize("num_scales", [None, 7])
@pytest.mark.parametrize(
    "options",
    [{}, {"layout": "rank"}, {"layout": "rank", "output_buffers": 1}, {"layout": "padded"}, {"expert_alignment": 4}],
    ids=repr,
)
@pytest.mark.parametrize("local_world_size", [2, 1])
def test_any_number_of_scales(
    num_scales: int | None, options: dict[str, Any], local_world_size: int, dtype: str
) -> None:
    """A row of 208 elements needs two scales, for 128 and for 80 elements. Callers may pass more scales per row. Rows
    in float4 are arrays of bytes.
    """
    width, element = 208, FLOAT8 if dtype == "float8_e4m3fn" else np.dtype(np.uint8)
    hidden = width if element is FLOAT8 else 2 * width
    scales = num_scales or -(-hidden // 128)

    def body(comm: Communicator) -> None:
        sizes = (4, hidden, 1, comm.rank, 2, local_world_size, 2)
        layer = EPAll2AllLayer(comm, *sizes, dispatch_dtype=dtype, num_scales=num_scales, **options)
        rng = np.random.default_rng(comm.rank)
        pairs = [
            (
                on_device(comm, (rng.random((4, width)) * 256).astype(element)),
                on_device(comm, rng.random((4, scales), np.float32)),
            )
            for _ in range(2)
        ]
        ids = on_device(comm, np.full((4, 1), 1 - comm.rank, np.int32))
        with pytest.raises(ArgumentError, match="must be a pair"):
            layer.dispatch(on_device(comm, np.ones((4, hidden), numpy_dtype("bfloat16"))), ids)
        for pair in pairs:  # the second iteration reuses the prepared calls
            whole, _, desc = layer.dispatch(pair, ids)
            in_halves, _, _ = layer.dispatch_recv(layer.dispatch_send(pair, ids))
            for values, of_rows in (whole, in_halves, layer.redispatch(pair, desc)):
                for got, given in zip((values, of_rows), pair, strict=True):
                    first = on_host(got).reshape(-1, got.shape[-1])[:4]
                    assert first.tobytes() == comm.all_gather_bytes(on_host(given).tobytes())[1 - comm.rank]
        layer.finalize()

    run_ranks(2, body, local_world_size=local_world_size)


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "counted"])
@pytest.mark.parametrize("given", [False, True], ids=["quantised here", "given"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_in_output_buffers(dtype: str, given: bool, announced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows equal the rows of a layer without output buffers, whoever converts them to float8."""
    if not announced:
        monkeypatch.setattr(geometry, "ANNOUNCED_SLOTS", 0)

    def body(comm: Communicator) -> None:
        tokens, ids = inputs(comm.rank, PER_RANK * comm.world_size, dtype)
        sent = tuple(on_device(comm, x) for x in quantized(tokens)) if given else on_device(comm, tokens)
        for options in ({}, {"max_recv_tokens": 40}):
            plain, stored = (
                layer_of(comm, dtype, layout="rank", output_buffers=buffers, **options) for buffers in (0, 1)
            )
            (rows, scales), _, _ = plain.dispatch(sent, on_device(comm, ids))
            (more, more_scales), _, desc = stored.dispatch(sent, on_device(comm, ids))
            assert desc.output_buffer
            count = int((on_host(desc.row_slots) >= 0).sum()) if not options else int(on_host(desc.num_recv_tokens)[0])
            assert on_host(more)[:count].tobytes() == on_host(rows)[:count].tobytes()
            assert on_host(more_scales)[:count].tobytes() == on_host(scales)[:count].tobytes()
            ones = stored.combine_input(desc)
            overwrite(ones, 1)
            kept = on_host(desc.topk_indices_tensor) < comm.world_size  # ranks, each once
            assert np.array_equal(on_host(stored.combine(ones, desc))[:, 0], kept.sum(1))

    run_ranks(2, body)


def test_what_is_refused() -> None:
    def body(comm: Communicator) -> None:
        def refused(argument: str, call: Any) -> None:
            with pytest.raises(ArgumentError) as caught:
                call()
            assert caught.value.argument == argument

        def make(hidden: int, dispatch_dtype: Any) -> EPAll2AllLayer:
            return EPAll2AllLayer(comm, 4, hidden, 1, 0, 2, 1, 1, dtype="float32", dispatch_dtype=dispatch_dtype)

        refused("hidden", lambda: make(200, "float8_e4m3fn"))
        short = make(192, "float8_e4m3fn")
        refused("dispatch_dtype", lambda: make(256, "float8_e5m2"))
        refused("hidden", lambda: make(16, "float4_e2m1fn_x2"))
        ids = on_device(comm, np.zeros((2, 1), np.int32))
        rows, scales = (on_device(comm, x) for x in quantized(np.ones((2, HIDDEN), np.float32)))
        refused("input", lambda: short.dispatch(on_device(comm, np.ones((2, 192), np.float32)), ids))
        refused("input", lambda: make(256, None).dispatch((rows, scales), ids))
        layer = make(256, "float8_e4m3fn")
        refused("input", lambda: layer.dispatch((rows, scales, scales), ids))
        refused("input", lambda: layer.dispatch(rows, ids))
        refused("input", lambda: layer.dispatch((rows, on_device(comm, np.ones((2, 1), np.float32))), ids))
        assert on_host(layer.dispatch((rows, scales), ids)[0][0]).tobytes() == on_host(rows).tobytes()

    run_ranks(1, body)
