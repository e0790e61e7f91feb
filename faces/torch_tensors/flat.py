"""Views of a contiguous tensor in one dimension."""

from __future__ import annotations

import torch


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor in one dimension, without its gradient. The result shares the tensor's
    memory.

    Unlike ``view(-1)`` it has stride 1 even for one element or none, where any stride counts as contiguous: torch
    reinterprets elements as elements of another size only at stride 1.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor in one dimension. The result shares the tensor's memory."""
    return flat_view(tensor).view(torch.uint8)
