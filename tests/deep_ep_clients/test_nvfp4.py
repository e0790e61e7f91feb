"""Low-latency dispatches in NVFP4: each bit of rows and scales, compared with ml_dtypes' conversions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
ml_dtypes = pytest.importorskip("ml_dtypes")

import deep_ep  # noqa: E402

from proxyccl import Communicator  # noqa: E402
from proxyccl.device.errors import ArgumentError  # noqa: E402
from support.devices import runtime_with_blocks, torch_device  # noqa: E402
from support.ranks import Ranks  # noqa: E402

RANKS, EXPERTS, TOPK = 2, 4, 2
LOCAL = EXPERTS // RANKS
BLOCK = 16


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(RANKS, make_runtime=runtime_with_blocks) as made:
        yield made


def quantized(x: Any, global_scale: float) -> tuple[Any, Any]:
    """Returns the bytes of rows in NVFP4 and the bytes of the rows' scales, both computed in numpy."""
    blocks = x.float().numpy().reshape(len(x), -1, BLOCK)
    one, scale = np.float32(1), np.float32(global_scale)
    with np.errstate(all="ignore"):
        greatest = np.fmax.reduce(np.abs(blocks), -1, initial=np.float32(0))
        wanted = scale * (greatest * (one / np.float32(6)))
        scales = np.fmin(wanted, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        wide = scales.astype(np.float32)
        factor = np.where(wide != 0, one / (wide * (one / scale)), np.float32(0))
        values = blocks * factor[..., None]
        values = np.where(np.isnan(values), np.float32(6), values)
        codes = np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(len(x), -1, 2)
    return codes[..., 0] | codes[..., 1] << 4, scales.view(np.uint8)


def tokens_of(rank: int, count: int, hidden: int) -> tuple[Any, Any]:
    """Returns a rank's tokens, with values of all magnitudes, ties and special values, and their expert ids."""
    made = torch.Generator().manual_seed(rank)
    x = torch.randn(count, hidden, generator=made) * torch.exp2(torch.randint(-30, 30, (count, 1), generator=made))
    x[::3] = torch.randint(-12, 13, x[::3].shape, generator=made) / 2  # many are halfway between NVFP4 values
    for row, value in enumerate((0.0, torch.inf, -torch.inf, torch.nan, 3e38)):
        if row < count:
            x[row, row * BLOCK : row * BLOCK + 1 + row] = value
            x[row, :BLOCK] *= row != 0
    ids = torch.rand(count, EXPERTS, generator=made).argsort(1)[:, :TOPK].contiguous()
    return x.bfloat16(), ids


@pytest.mark.parametrize("how", ["", "async_finish", "return_recv_hook"])
@pytest.mark.parametrize(("most", "hidden", "global_scale"), [(7, 192, None), (64, 64, 0.37), (70, 256, 2688.0)])
def test_each_bit_of_rows_and_scales(
    ranks: Ranks, most: int, hidden: int, global_scale: float | None, how: str
) -> None:
    counts = (most, most - 4)
    every = [tokens_of(rank, count, hidden) for rank, count in enumerate(counts)]

    def body(comm: Communicator) -> None:
        device = torch_device(comm)
        scale = None if global_scale is None else torch.tensor([global_scale] * EXPERTS, device=device)
        chosen: dict[str, Any] = {how: True} if how else {}
        buffer = deep_ep.Buffer(comm, explicitly_destroy=True)
        for skipped in (2, 0):  # calls with more and fewer tokens share what the first call prepared
            x, ids = (each[skipped:].to(device) for each in every[comm.rank])
            (rows, scales), received, handle, event, hook = buffer.low_latency_dispatch(
                x, ids, most, EXPERTS, use_fp8=False, use_nvfp4=True, x_global_scale=scale, **chosen
            )
            if hook is not None:
                hook()
            if how == "async_finish":
                event.current_stream_wait()
            tiles = -(-RANKS * most // 128)
            assert (rows.shape, rows.dtype) == ((RANKS * most, hidden // 2, LOCAL), torch.uint8)
            assert (scales.shape, scales.dtype) == ((32, 4, tiles, 4, hidden // 64, LOCAL), torch.uint8)
            assert rows.permute(2, 0, 1).is_contiguous()
            assert scales.permute(5, 2, 4, 0, 1, 3).is_contiguous()
            by_row = scales.permute(5, 2, 1, 0, 4, 3).reshape(LOCAL, tiles * 128, hidden // BLOCK).cpu().numpy()
            for local in range(LOCAL):
                here = comm.rank * LOCAL + local
                mine = [tokens[skipped:][(to[skipped:] == here).any(1)] for tokens, to in every]
                expected, factors = quantized(torch.cat(mine), global_scale or 1.0)
                assert received[local] == len(expected)
                np.testing.assert_array_equal(rows[: len(expected), :, local].cpu().numpy(), expected)
                np.testing.assert_array_equal(by_row[local, : len(expected)], factors)
            results = torch.full((LOCAL, RANKS * most, hidden), 2.0, dtype=torch.bfloat16, device=device)
            weights = torch.ones(len(x), TOPK, device=device)
            combined, event, hook = buffer.low_latency_combine(results, ids, weights, handle, **chosen)
            if hook is not None:
                hook()
            if how == "async_finish":
                event.current_stream_wait()
            assert (combined == 2 * TOPK).all()
        buffer.destroy()

    ranks.run(body)


def test_wrong_arguments(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer = deep_ep.Buffer(comm, explicitly_destroy=True)
        x, ids = (each.to(torch_device(comm)) for each in tokens_of(comm.rank, 3, 96))

        def refused(reason: str, **options: Any) -> None:
            with pytest.raises(ArgumentError, match=reason):
                buffer.low_latency_dispatch(x, ids, 8, EXPERTS, use_nvfp4=True, **options)

        refused("^use_nvfp4: can't be given with use_fp8; expected use_fp8=False$")
        for name in ("round_scale", "use_ue8m0"):
            reason = f"^use_nvfp4: can't be given with {name}; expected {name}=False$"
            refused(reason, use_fp8=False, **{name: True})
        refused("^x: has 96 elements in a row; expected a multiple of 64 with use_nvfp4$", use_fp8=False)
        x = x[:, :64]
        for wrong in (1.0, torch.ones((), dtype=torch.float64), torch.empty(0)):
            refused("^x_global_scale: is .*; expected a tensor of one float32$", use_fp8=False, x_global_scale=wrong)
        buffer.low_latency_dispatch(x, ids, 8, EXPERTS, use_fp8=False, use_nvfp4=True)  # rows that are not contiguous
        buffer.destroy()

    ranks.run(body)
