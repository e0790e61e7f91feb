"""How DeepEP's channels share a rank's tokens: consecutive shares of equal size, the last ones smaller or empty."""

from __future__ import annotations

import torch


def prefixes_of_channels(goes: torch.Tensor, channels: int) -> torch.Tensor:
    """int32 [targets, channels]: how many tokens of the channels 0 to c go to each target.

    Args:
        goes: bool [T, targets].
        channels: their number.
    """
    before, tokens = _before(goes), len(goes)
    ends = (torch.arange(1, channels + 1, device=goes.device) * _share(tokens, channels)).clamp(max=tokens)
    return before[ends].t().contiguous()


def heads_of_channels(goes: torch.Tensor, channels: int) -> torch.Tensor:
    """int32 [T, targets]: how many tokens of the same channel go to that target before this one; -1 if it does not go
    there.
    """
    before, share = _before(goes), max(1, _share(len(goes), channels))
    tokens = torch.arange(len(goes), device=goes.device)
    return torch.where(goes, before[tokens] - before[tokens // share * share], -1)


def rows_of_channels(
    ends: torch.Tensor, tokens: torch.Tensor, source_tokens: torch.Tensor, channels: int
) -> torch.Tensor:
    """int32 [sources, channels]: how many rows came from each channel of each source.

    Args:
        ends: int64 [sources]: where the rows of each source end.
        tokens: int [sources]: of each source.
        source_tokens: int [rows]: each row's token on its source. Those after the last end may be undefined.
        channels: their number.
    """
    sources = len(ends)
    shares = torch.cat([(tokens.long() + channels - 1) // channels, tokens.new_ones(1)]).clamp(min=1)
    source = torch.searchsorted(ends, torch.arange(len(source_tokens), device=ends.device), right=True)
    channel = (source_tokens.long() // shares[source]).clamp(0, channels - 1)
    counts = torch.zeros((sources + 1) * channels, dtype=torch.int32, device=ends.device)  # with those after the end
    counts.scatter_add_(0, source * channels + channel, torch.ones_like(source, dtype=torch.int32))
    return counts.view(-1, channels)[:sources]


def _before(goes: torch.Tensor) -> torch.Tensor:
    """int32 [T + 1, targets]: how many of the tokens before each go to each target."""
    return torch.cat([goes.new_zeros(1, goes.shape[1], dtype=torch.int32), goes.cumsum(0, dtype=torch.int32)])


def _share(tokens: int, channels: int) -> int:
    return -(-tokens // channels)
