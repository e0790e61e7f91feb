"""The tokens that a caller dispatches: rows, or float8 rows and their scales."""

from __future__ import annotations

from typing import NamedTuple

import torch

from proxyccl.deep_ep.arguments import require_tensor
from proxyccl.deep_ep.float8 import Rows as Pair
from proxyccl.deep_ep.float8 import carried, column_major
from proxyccl.deep_ep.handles import Rows
from proxyccl.device.errors import ArgumentError


class Tokens(NamedTuple):
    """A caller's rows, in the form that a layer takes.

    Attributes:
        rows: [T, hidden].
        scales: as the caller gave them, or None.
        moved: the layer's input: the rows, or a pair of them and float32 scales [T, n].
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    moved: Rows

    @staticmethod
    def of(x: Rows) -> Tokens:
        """The tokens of the argument `x`.

        Raises:
            ArgumentError: it has another shape, or scales of another type.
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
        """The token type of the layer that takes them, which is also that of its combine."""
        return str(self.rows.dtype).removeprefix("torch.") if self.scales is None else "bfloat16"

    @property
    def num_scales(self) -> int:
        """Scales of a row, any number; 0 without scales."""
        if not isinstance(self.moved, tuple):
            return 0
        hidden, scales = self.rows.shape[1], self.moved[1].shape[1]
        if not 0 < scales <= hidden:
            raise ArgumentError("x", f"has {scales} scales of a row; expected 1 to {hidden}, one for each element")
        return int(scales)

    def as_given(self, received: Rows, *, by_columns: bool = False) -> Rows:
        """A layer's results, with scales in the type and number of dimensions of those that were given.

        Args:
            received: the layer's rows.
            by_columns: put those of consecutive rows side by side.
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
