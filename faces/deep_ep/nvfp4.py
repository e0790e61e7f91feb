"""Rows in NVFP4: two float4 values (e2m1) in a byte, a float8 scale (e4m3) for each 16 values, and a global scale."""

from __future__ import annotations

from typing import Any

import torch

from proxyccl.channels.group import Group
from proxyccl.deep_ep.arguments import require_beside
from proxyccl.deep_ep.tokens import Pair
from proxyccl.device._native import ffi
from proxyccl.device.errors import ArgumentError

ELEMENTS = 16
"""The number of consecutive elements of a row that share a scale."""
WORD_ELEMENTS = 4 * ELEMENTS
"""The number of elements whose scales fill a word of four bytes; a layer moves whole words."""
_THREADS, _MOST_BLOCKS = 256, 4096
_TILE_ROWS, _TILE_PARTS = 128, 4  # a tile's rows lie in memory as 32 groups of four rows that are 32 apart


def require_global_scale(scale: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Returns the argument `x_global_scale`. Raises ArgumentError unless the argument is None or a float32 tensor on
    the device of `x`."""
    if scale is None:
        return None
    if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32 or not scale.numel():
        given = f"{scale.dtype} {list(scale.shape)}" if isinstance(scale, torch.Tensor) else type(scale).__name__
        raise ArgumentError("x_global_scale", f"is {given}; expected a tensor of one float32")
    require_beside("x_global_scale", scale, x)
    return scale


class Quantizer:
    """Converts rows by one kernel, on the current stream, with the formula of device/kernels/nvfp4_rows.h. NVIDIA's
    libraries (`cvt_warp_fp16_to_fp4` in TensorRT-LLM, FlashInfer and DeepEP) use the same formula with approximate
    reciprocals; this kernel rounds reciprocals correctly, so in rare cases it rounds a value differently than those
    libraries. The kernel's launch is prepared once, and each call fills in the arguments.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._threads, self._most_blocks = (1, 1) if group.runtime.name == "host" else (_THREADS, _MOST_BLOCKS)
        kernel = group.runtime.shipped("nvfp4_rows.h", "nvfp4_rows")
        self._launch = kernel.prepare(1, self._threads, None, None, None, None, 0)
        self._words = [ffi.cast("uint64_t *", self._launch.packed(index)) for index in range(5)]

    def quantize(self, x: torch.Tensor, global_scale: torch.Tensor | None) -> Pair:
        """Returns the rows of `x`, uint8 [T, hidden / 2], and their scales, four in each float32 [T, hidden / 64].
        `global_scale` None means 1.
        """
        tokens, hidden = x.shape
        given = x.contiguous()
        if given.data_ptr() % 16:
            given = given.clone()
        rows = torch.empty(tokens, hidden // 2, dtype=torch.uint8, device=x.device)
        scales = torch.empty(tokens, hidden // WORD_ELEMENTS, device=x.device)
        count = tokens * hidden // ELEMENTS
        if count:
            arrays = given, global_scale, rows, scales
            for word, each in zip(self._words, arrays, strict=False):
                word[0] = 0 if each is None else each.data_ptr()
            self._words[-1][0] = count
            self._launch.prepared.grid[0] = min(-(-count // self._threads), self._most_blocks)
            launches = self._group.launches
            launches.launch(self._launch, launches.stream_for(None, x), arrays)
        return rows, scales


def new_tiles(scales: torch.Tensor) -> torch.Tensor:
    """Returns an uninitialised tensor for the scales of padded rows, [experts, rows, hidden / 64] in words: uint8
    [experts, tiles of 128 rows, hidden / 64, 32, 4, 4]. Grouped matrix products read scales in this layout.
    """
    experts, rows, words = scales.shape
    shape = (experts, -(-rows // _TILE_ROWS), words, _TILE_ROWS // _TILE_PARTS, _TILE_PARTS, 4)
    return torch.empty(shape, dtype=torch.uint8, device=scales.device)


def fill_tiles(tiles: torch.Tensor, scales: torch.Tensor) -> None:
    """Copies scales to `new_tiles`. The scales of rows after the last received row are undefined."""
    experts, rows, words = scales.shape
    given = scales.view(torch.uint8)
    if rows % _TILE_ROWS:
        given = torch.nn.functional.pad(given, (0, 0, 0, -rows % _TILE_ROWS))
    groups = given.view(experts, -1, _TILE_PARTS, _TILE_ROWS // _TILE_PARTS, words, 4)
    tiles.copy_(groups.permute(0, 1, 4, 3, 2, 5))


def as_deep_ep(rows: torch.Tensor, tiles: torch.Tensor) -> Pair:
    """Returns views of padded rows and of their scales with DeepEP's dimensions: uint8 [rows, hidden / 2, experts] and
    uint8 [32, 4, tiles, 4, hidden / 64, experts].
    """
    return rows.permute(1, 2, 0), tiles.permute(3, 4, 1, 5, 2, 0)
