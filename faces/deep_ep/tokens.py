"""Converts the rows and scales that a caller dispatches, and lays out scales for grouped matrix products."""

from __future__ import annotations

from typing import NamedTuple

import torch

from proxyccl.deep_ep.arguments import require_tensor
from proxyccl.deep_ep.handles import Rows
from proxyccl.device.arguments.integers import round_up
from proxyccl.device.errors import ArgumentError

ELEMENTS = 128
"""The number of consecutive elements of a row that share a scale."""
_GREATEST = 448.0  # the largest number in float8_e4m3fn
_LEAST_MAGNITUDE = 1e-4  # smaller maxima of groups are raised to this value
EXPONENTS_OF_A_WORD = 4
"""The number of exponents (UE8M0) in an int32 of packed scales."""
_WORDS_OF_A_LINE = 4  # 16 bytes

Pair = tuple[torch.Tensor, torch.Tensor]


@torch.no_grad()
def quantize_rounded(x: torch.Tensor) -> Pair:
    """Converts rows to float8. Returns the rows [T, hidden] and float32 scales [T, hidden / 128]. Each scale is the
    smallest power of two with which its group of 128 elements fits in float8.
    """
    tokens, hidden = x.shape
    groups = x.float().view(tokens, hidden // ELEMENTS, ELEMENTS)
    greatest = groups.abs().amax(-1).clamp(min=_LEAST_MAGNITUDE)
    scales = torch.exp2(torch.ceil(torch.log2(greatest / _GREATEST)))
    rows = (groups / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return rows.view(tokens, hidden), scales


def column_major(scales: torch.Tensor, *, packed: bool = False) -> torch.Tensor:
    """Returns an uninitialised tensor of the shape of `scales`, or, if `packed` is set, of the shape of
    `packed_exponents(scales)`. The scales of consecutive rows are adjacent in memory, and each column begins at a
    multiple of 16 bytes, as bulk copies (TMA) require.
    """
    *leading, rows, n = scales.shape
    column = round_up(rows, _WORDS_OF_A_LINE)
    shape = (*leading, n // EXPONENTS_OF_A_WORD if packed else n, column)
    return scales.new_empty(shape, dtype=torch.int32 if packed else scales.dtype)[..., :rows].transpose(-2, -1)


def packed_exponents(scales: torch.Tensor) -> torch.Tensor:
    """Packs scales that are powers of two: four exponents (UE8M0) in each int32, so [..., n] becomes [..., n / 4]."""
    exponents = (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return exponents.view(torch.int32)


def carried(scales: torch.Tensor, tokens: int) -> torch.Tensor:
    """Returns a caller's scales, [T] or [T, n] of float32 or int32, viewed as float32 [T, n]. Layers send the bits of
    scales unchanged.
    """
    if scales.dtype not in (torch.float32, torch.int32) or scales.dim() not in (1, 2) or len(scales) != tokens:
        raise ArgumentError(
            "x", f"has scales {scales.dtype} {list(scales.shape)}; expected float32 or int32 [{tokens}, n]"
        )
    return (scales if scales.dim() == 2 else scales.unsqueeze(1)).contiguous().view(torch.float32)


class Tokens(NamedTuple):
    """A caller's rows and scales, and the input that a layer takes for them.

    Attributes:
        rows: [T, hidden].
        scales: as the caller gave them, or None.
        moved: the layer's input: the rows, or a pair of the rows and float32 scales [T, n].
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    moved: Rows

    @staticmethod
    def of(x: Rows) -> Tokens:
        """Returns the tokens of the argument `x`. Raises ArgumentError if the shape of `x`, or the type of its scales,
        is wrong.
        """
        if isinstance(x, tuple) and len(x) != 2:
            raise ArgumentError("x", f"is a tuple of {len(x)}; expected a tensor, or a pair of rows and scales")
        rows, scales = x if isinstance(x, tuple) else (x, None)
        require_tensor("x", rows, (None, None))
        if scales is not None and not isinstance(scales, torch.Tensor):
            raise ArgumentError("x", f"has scales of type {type(scales).__name__}; expected a tensor")
        return Tokens(rows, scales, rows if scales is None else (rows, carried(scales, len(rows))))

    @property
    def dtype(self) -> str:
        """The element type of a layer for these tokens, also for the combine: bfloat16 if the tokens have scales."""
        return str(self.rows.dtype).removeprefix("torch.") if self.scales is None else "bfloat16"

    @property
    def num_scales(self) -> int:
        """The number of scales of each row; 0 without scales."""
        if not isinstance(self.moved, tuple):
            return 0
        hidden, scales = self.rows.shape[1], self.moved[1].shape[1]
        if not 0 < scales <= hidden:
            raise ArgumentError("x", f"has {scales} scales of a row; expected 1 to {hidden}, one for each element")
        return int(scales)

    def as_given(self, received: Rows, *, by_columns: bool = False) -> Rows:
        """Converts a layer's results: returns scales in the type and with the number of dimensions of the caller's
        scales. With by_columns, the scales of consecutive rows are adjacent in memory.
        """
        if self.scales is None or not isinstance(received, tuple):
            return received
        values: Pair = received
        scales = values[1].view(self.scales.dtype)
        if self.scales.dim() == 1:
            scales = scales.squeeze(1)
        elif by_columns:
            scales = column_major(scales).copy_(scales)
        return values[0], scales
