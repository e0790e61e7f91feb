"""Makes `is_completed` correct for a Work that torch has wrapped.

torch's C++ wraps the Work of a backend or a group that is written in Python in a Work of C++ (``PyWorkHolder``), which
forwards only `wait` and `get_future`: its own `is_completed` always returns False. So this module replaces
`torch.distributed.Work.is_completed` by a function that asks the wrapper for a future. While a thread asks, our Works
register themselves instead of making a future. For Works of other backends, the result of `is_completed` does not
change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class _Search(threading.local):
    """A thread's search for the Work in a wrapper: a list to which the Work is added; None without a search."""

    found: list[dist.Work] | None = None


_search = _Search()
_is_completed_in_torch: Callable[[dist.Work], bool] = dist.Work.is_completed
_UNNAMED: int = dist.Work()._get_op_type()
"""The type of operation that a wrapper has."""
_NO_FUTURE = torch.futures.Future()
"""The future that torch's C++ gets from `get_future` during a search. It never completes, and nobody waits for it."""


def registered(work: dist.Work) -> Any:
    """Registers a Work if the calling thread searches for one, and returns a future for torch's C++. Returns None if
    the thread wants the Work's own future.
    """
    if _search.found is None:
        return None
    _search.found.append(work)
    return _NO_FUTURE


def _is_completed(work: dist.Work) -> bool:
    """Returns whether the call has ended, also for a wrapped Work."""
    if _is_completed_in_torch(work):
        return True
    if work._get_op_type() != _UNNAMED:
        return False
    found = _search.found = []
    try:
        work.get_future()
    except RuntimeError:  # a Work of another backend may have no future
        return False
    finally:
        _search.found = None
    return bool(found) and found[0].is_completed()


dist.Work.is_completed = _is_completed
