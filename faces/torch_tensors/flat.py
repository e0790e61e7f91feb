"""Views of a contiguous tensor in one dimension."""

from __future__ import annotations

import torch


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a contiguous tensor in one dimension, without its gradient. The result shares the
    tensor's memory.

    The result always has stride 1, because torch can view elements as elements of another size only with stride 1.
    ``view(-1)`` may return another stride if there are fewer than two elements.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor in one dimension. The result shares the tensor's memory."""
    return flat_view(tensor).view(torch.uint8)
