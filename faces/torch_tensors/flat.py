"""A contiguous tensor as one row of elements."""

from __future__ import annotations

import torch


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor in one dimension, without its gradient. It shares the memory.

    Unlike ``view(-1)`` it has stride 1 also where there is one element or none, of which any stride is contiguous:
    torch views elements as those of another size only in a tensor with stride 1.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor in one dimension. It shares the memory."""
    return flat_view(tensor).view(torch.uint8)
