"""Checks DeepEP's arguments before data is sent, and replaces names in the errors of layers by DeepEP's names."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from proxyccl.channels.arguments import input_view
from proxyccl.channels.expert_parallel.config import MOST_ADDED
from proxyccl.channels.group import Group
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.errors import ArgumentError, CapacityError
from proxyccl.torch_tensors.flat import byte_view

_IDENTIFIER = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")


@dataclass(frozen=True)
class Names:
    """The names of DeepEP that replace names in the errors of a layer.

    Attributes:
        arguments: DeepEP's argument for each of the layer's arguments.
        words: the replacements of other words in the layer's error texts.
    """

    arguments: Mapping[str, str]
    words: Mapping[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """A context manager that puts DeepEP's names into the errors raised in its block."""
        try:
            yield
        except (ArgumentError, CapacityError) as error:
            self.rename(error)
            raise

    def rename(self, error: ArgumentError | CapacityError) -> None:
        text, words = str(error), {**self.arguments, **self.words}
        if isinstance(error, ArgumentError):
            text = text.removeprefix(f"{error.argument}: ")
            error.argument = self.arguments.get(error.argument, error.argument)
        text = _IDENTIFIER.sub(lambda match: words.get(match[0], match[0]), text)
        error.args = (f"{error.argument}: {text}" if isinstance(error, ArgumentError) else text,)


_OF_ALL = {
    "input": "x",
    "exp_indices": "topk_idx",
    "weight": "topk_weights",
    "weights": "topk_weights",
    "values": "topk_weights",
    "hidden": "x",
    "topk": "topk_idx",
    "dtype": "x",
    "dispatch_dtype": "x",
    "num_scales": "x",
    "ep_a2a_layout_desc": "handle",
    "desc": "handle",
    "pending": "hook",
    "dispatch": "return_recv_hook",
    "combine": "return_recv_hook",
    "combine_weights": "return_recv_hook",
    "apart": "async_finish",
}
_WORDS = {"dispatch_recv": "its hook", "combine_recv": "its hook"}
NORMAL = Names(
    {
        **_OF_ALL,
        "num_tot_experts": "num_tokens_per_expert",
        "num_sm": "config",
        "max_tokens": "x",
        "max_recv_tokens": "num_worst_tokens",
    },
    {"max_tokens": "the greater of num_worst_tokens / ranks and the most tokens of a rank in the first such call"},
)
LOW_LATENCY = Names(
    {
        **_OF_ALL,
        "dispatch_dtype": "use_fp8",
        "num_tot_experts": "num_experts",
        "num_sm": "num_sms",
        "max_tokens": "num_max_dispatch_tokens_per_rank",
        "max_recv_tokens": "num_max_dispatch_tokens_per_rank",
    },
    _WORDS,
)
ELASTIC = Names(
    {
        **_OF_ALL,
        "num_tot_experts": "num_experts",
        "num_sm": "num_sms",
        "max_tokens": "num_max_tokens_per_rank",
        "max_recv_tokens": "num_max_tokens_per_rank",
        "apart": "async_with_compute_stream",
    },
    {"max_recv_tokens": "the room that num_max_tokens_per_rank gives"},
)


def require_tensor(
    argument: str, x: Any, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...] = ()
) -> torch.Tensor:
    """Returns `x`. Raises ArgumentError unless `x` is a tensor of the given shape, where None matches any size, and of
    a type in `dtypes` (any type if `dtypes` is empty).
    """
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(argument, f"must be a tensor, not {type(x).__name__}")
    given = x.shape
    fits = len(given) == len(shape)
    for got, want in zip(given, shape, strict=False):
        fits = fits and (want is None or want == got)
    if not fits:
        expected = ", ".join("any" if want is None else str(want) for want in shape)
        raise ArgumentError(argument, f"has shape {list(x.shape)}; expected [{expected}]")
    if dtypes and x.dtype not in dtypes:
        raise ArgumentError(argument, f"is {x.dtype}; expected {' or '.join(map(str, dtypes))}")
    return x


def bytes_of(group: Group, argument: str, tensor: Any) -> tuple[torch.Tensor, ArrayView]:
    """Returns a tensor's memory, as a tensor of uint8 and as an `ArrayView`. Raises ArgumentError if `tensor` is not a
    tensor, is not contiguous, or is not on the group's device.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(argument, f"must be a tensor, not {type(tensor).__name__}")
    if not tensor.is_contiguous():
        raise ArgumentError(
            argument, f"must be contiguous; it has shape {list(tensor.shape)}, strides {tensor.stride()}"
        )
    flat = byte_view(tensor)
    return flat, input_view(group, flat, argument)


def require_beside(argument: str, x: torch.Tensor, rows: torch.Tensor) -> None:
    """Raises ArgumentError unless the tensor `x` is on the same device as `rows`."""
    if x.device != rows.device:
        raise ArgumentError(argument, f"is on {x.device}; expected {rows.device}, where x is")


def require_ids(topk_idx: Any, tokens: int | None = None) -> torch.Tensor:
    """Returns `topk_idx`. Raises ArgumentError unless `topk_idx` is a tensor of integers, [tokens, topk]."""
    return require_tensor("topk_idx", topk_idx, (tokens, None), (torch.int32, torch.int64))


def require_bias(bias: Any, tokens: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of the argument `bias`. Raises ArgumentError unless `bias` has at most two tensors, each
    [tokens, hidden].
    """
    given = [each for each in (bias if isinstance(bias, tuple) else (bias,)) if each is not None]
    if len(given) > MOST_ADDED:
        raise ArgumentError("bias", f"has {len(given)} tensors; expected at most {MOST_ADDED}")
    return tuple(require_tensor("bias", each, (tokens, hidden), (dtype,)).contiguous() for each in given)


def require_stats(stats: Any, experts: int) -> None:
    if stats is not None:
        require_tensor("cumulative_local_expert_recv_stats", stats, (experts,), (torch.int32,))


def require_seconds(argument: str, value: Any) -> float:
    """Returns `value` as a float. Raises ArgumentError unless `value` is a finite number of seconds, 0 or more."""
    is_number = isinstance(value, (int, float)) or hasattr(value, "__index__")
    if isinstance(value, bool) or not is_number or not 0 <= value < math.inf:
        raise ArgumentError(argument, f"must be a number of seconds, not {value!r}")
    return float(value)


def refuse(what: str, reason: str) -> NotImplementedError:
    return NotImplementedError(f"proxyccl.deep_ep has no {what}: {reason}")


def refuse_unknown(call: str, options: Mapping[str, Any]) -> None:
    """Raises NotImplementedError, which names the keyword, if an unknown keyword's value is neither None nor False.
    Unknown keywords with the value None or False are allowed, because programs for DeepEP's forks pass many of them.
    """
    for name, value in options.items():
        if value is not None and value is not False:
            raise refuse(f"{call}({name}=)", "DeepEP has no such argument either")
