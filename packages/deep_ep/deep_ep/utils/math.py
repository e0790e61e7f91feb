"""Arithmetic for tests and benchmarks: differences of tensors, conversion to float8 with a scale for each 128 elements,
and checksums.
"""

from __future__ import annotations

from typing import Any

import torch

from proxyccl.torch_tensors.flat import byte_view

_ELEMENTS = 128
_GREATEST = 448.0  # the largest number in float8_e4m3fn


def calc_diff(x: Any, y: Any) -> float:
    """Returns 1 - 2 Σxy / Σ(x² + y²) of the tensors x + 1 and y + 1: their relative difference, 0 if they are equal."""
    x, y = x.double() + 1, y.double() + 1
    return float(1 - 2 * (x * y).sum() / (x.square() + y.square()).sum())


def safe_div(a: float, b: float) -> float:
    """Returns a / b, where 0 / 0 is 0."""
    return 0 if a == b == 0 else a / b


def ceil_div(x: int, y: int) -> int:
    """Returns x / y, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """Rounds x up to the next multiple of y."""
    return ceil_div(x, y) * y


def per_token_cast_to_fp8(x: Any) -> tuple[Any, Any]:
    """Converts rows [T, n] to float8. Returns the float8 rows and their scales, float32 [T, n / 128] (rounded up)."""
    tokens, n = x.shape
    groups = torch.nn.functional.pad(x, (0, -n % _ELEMENTS)).float().view(tokens, -1, _ELEMENTS)
    scales = groups.abs().amax(2).clamp(min=1e-4) / _GREATEST
    rows = (groups / scales.unsqueeze(2)).to(torch.float8_e4m3fn).view(tokens, -1)
    return rows[:, :n].contiguous(), scales


def per_token_cast_back(x_fp8: Any, x_scales: Any) -> Any:
    """Converts float8 rows and their scales to bfloat16. Scales may also be packed exponents, four in an int32."""
    tokens, n = x_fp8.shape
    if tokens == 0 or n == 0:
        return x_fp8.to(torch.bfloat16)
    if x_scales.dtype == torch.int32:
        exponents = byte_view(x_scales.contiguous()).to(torch.int32).view(tokens, -1)
        x_scales = (exponents << 23).view(torch.float32)
    groups = torch.nn.functional.pad(x_fp8.float(), (0, -n % _ELEMENTS)).view(tokens, -1, _ELEMENTS)
    rows = groups * x_scales.reshape(tokens, -1, 1)
    return rows.view(tokens, -1)[:, :n].to(torch.bfloat16).contiguous()


def inplace_unique(x: Any, num_slots: int) -> None:
    """Removes duplicates in place: each row of x keeps each of its numbers from 0 to num_slots - 1 once, in any order,
    followed by -1.
    """
    rows = len(x)
    present = torch.zeros(rows, num_slots + 1, dtype=torch.bool, device=x.device)
    present.scatter_(1, torch.where(x < 0, num_slots, x).long(), True)
    numbers = torch.arange(num_slots, dtype=x.dtype, device=x.device)
    kept = torch.where(present[:, :num_slots], numbers, -1).sort(1, descending=True).values
    width = min(num_slots, x.shape[1])
    x.fill_(-1)
    x[:, :width] = kept[:, :width]


def create_grouped_scores(scores: Any, group_idx: Any, num_groups: int) -> Any:
    """Returns a copy of scores [T, experts], with zeros for experts outside the token's groups. group_idx, [T, n], has
    the groups of each token.
    """
    tokens, experts = scores.shape
    chosen = torch.zeros(tokens, num_groups, dtype=torch.bool, device=scores.device).scatter_(1, group_idx, True)
    return (scores.view(tokens, num_groups, -1) * chosen.unsqueeze(2)).view(tokens, experts)


def hash_tensor(t: Any) -> int:
    """Returns the sum of a tensor's elements, viewed as int32."""
    return int(t.view(torch.int32).sum())


def hash_tensors(*tensors: Any) -> int:
    """Returns the exclusive or of all tensors' results of `hash_tensor`. Arguments may be tensors, None, and tuples or
    lists of these.
    """
    value = 0
    for each in _flat(tensors):
        value ^= hash_tensor(each)
    return value


def count_bytes(*tensors: Any) -> int:
    """Returns the total size of tensors in bytes. Takes the same arguments as `hash_tensors`."""
    return sum(each.numel() * each.element_size() for each in _flat(tensors))


def _flat(values: Any) -> list[Any]:
    if isinstance(values, (tuple, list)):
        return [each for value in values for each in _flat(value)]
    return [] if values is None else [values]
