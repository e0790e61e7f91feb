"""Views a contiguous tensor as a tensor of one dimension."""

from __future__ import annotations

import torch


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of a contiguous tensor with one dimension and without gradient.

    The result always has stride 1, without which torch can't view it as a dtype of another size. For fewer than two
    elements, ``view(-1)`` may return another stride.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of a contiguous tensor's bytes with one dimension."""
    return flat_view(tensor).view(torch.uint8)
