"""Runs torch process groups of ProxyCCL, whose ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from proxyccl.torch import ProcessGroupProxyCCL

T = TypeVar("T")
RANKS = 3
TIMEOUT = timedelta(seconds=60)


def run(body: Callable[[Any], T], ranks: int = RANKS, timeout: timedelta = TIMEOUT, store: Any = None) -> list[T]:
    """Runs body(group) on all ranks concurrently. Returns the results by rank, or raises the first rank's exception.
    The ranks bootstrap through `store`, which may be a store of earlier groups, or by default through a new store.
    """
    store = store or dist.HashStore()

    def on_rank(rank: int) -> T:
        group = ProcessGroupProxyCCL(store, rank, ranks, timeout)
        try:
            return body(group)
        except BaseException:
            group.abort()
            raise
        finally:
            group.shutdown()

    with ThreadPoolExecutor(ranks) as pool:
        return [future.result(240) for future in [pool.submit(on_rank, rank) for rank in range(ranks)]]


def torch_group(group: Any) -> dist.ProcessGroup:
    """Returns a torch process group whose backend is `group`; before torch 2.15, `group` itself is one."""
    if isinstance(group, dist.ProcessGroup):
        return group
    wrapper = dist.ProcessGroup(group.get_group_store(), group.rank(), group.size())
    kind = dist.ProcessGroup.BackendType.CUSTOM
    wrapper._register_backend(torch.device("cpu"), kind, group)
    wrapper._set_default_backend(kind)
    return wrapper


def options(kind: str, *, waits: bool = True, **values: Any) -> Any:
    """Returns the torch options object of a collective."""
    made = getattr(torch._C._distributed_c10d, f"{kind}Options")()
    made.asyncOp = not waits
    for name, value in values.items():
        setattr(made, name, value)
    return made
