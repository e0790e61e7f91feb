"""Makes the methods of a Work that torch has wrapped call the methods of the Work in the wrapper.

torch's C++ wraps the Work of a backend or a group that is written in Python in a Work of C++ (``PyWorkHolder``), which
forwards only `wait` and `get_future`: its own `is_completed` always returns False, its `synchronize` does not wait, and
its `result` and `source_rank` raise errors. So this module replaces methods of `torch.distributed.Work` by functions
that ask the wrapper for a future. While a thread asks, our Works register themselves instead of making a future. For
Works of other backends, the methods' effects do not change.
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


def _wrapped(work: dist.Work) -> dist.Work | None:
    """Returns our Work in a wrapper; None if `work` is another Work."""
    if work._get_op_type() != _UNNAMED:
        return None
    found = _search.found = []
    try:
        work.get_future()
    except RuntimeError:  # a Work of another backend may have no future
        return None
    finally:
        _search.found = None
    return found[0] if found else None


def _forward(name: str) -> None:
    in_torch: Callable[[dist.Work], Any] = getattr(dist.Work, name)

    def method(work: dist.Work) -> Any:
        own = _wrapped(work)
        return in_torch(work) if own is None or own is work else getattr(own, name)()

    setattr(dist.Work, name, method)


for _name in ("is_completed", "is_success", "exception", "result", "source_rank", "_source_rank", "synchronize"):
    _forward(_name)
