"""Calls in torch's profiler, with what a trace tells of NCCL's calls."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

_Event: Any = torch._C._profiler._RecordFunctionFast


def event(
    name: str,
    outs: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    *,
    ranks: Sequence[int],
    group: tuple[str, str],
) -> AbstractContextManager[None]:
    """The event of a call, which lasts as long as the context.

    Its keys are those of NCCL's ``record_param_comms``. That name is impossible here: torch's profiler reads the
    details of such an event from a C++ object, and crashes without one.

    Args:
        name: of the call, whose first word says which collective it is.
        outs: the tensors that it writes.
        xs: the others that it uses.
        ranks: the group's, in the default group.
        group: its name and description.
    """
    inputs, outputs = list(xs or outs), list(outs or xs)
    details: dict[str, Any] = {
        "Collective name": name.split(maxsplit=1)[0],
        "In msg nelems": sum(x.numel() for x in inputs),
        "Out msg nelems": sum(x.numel() for x in outputs),
        "dtype": str(inputs[0].dtype).removeprefix("torch.") if inputs else "",
        "Group size": len(ranks),
        "Process Group Name": group[0],
        "Process Group Description": group[1],
        "Process Group Ranks": str(list(ranks)),
    }
    made: AbstractContextManager[None] = _Event(f"proxyccl:{name}", inputs, details)
    return made
