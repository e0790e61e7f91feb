"""Describes communicators as NCCL's RAS subsystem does: in the same JSON format, and in a similar text format.

The fields, their order, and the classes of errors are the same as in NCCL 2.30 (src/ras/client_support.cc:
jsonWriteHeader and the functions after it, rasClientRunInit, rasClientRunComms). ProxyCCL adds two fields: "name", the
communicator's name in ProxyCCL's reports, and "host_only", which says that only the ranks of this host are listed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version

from proxyccl.device._native import lib
from proxyccl.device.shown_text import shown
from proxyccl.proxy.hosts import host_addresses
from proxyccl.tools.communicators import CommunicatorView, RankView

_NAMES = {
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_reduce": "AllReduce",
}
"""NCCL's names of the collectives that it counts, in its order. The names of others are ours."""

_SYSTEM_ERROR, _CUDA_ERROR, _INTERNAL_ERROR, _INVALID_ARGUMENT, _INVALID_USAGE, _REMOTE_ERROR = 2, 1, 3, 4, 5, 6
_RESULTS = {
    lib.PROXYCCL_ERROR_TIMEOUT: _REMOTE_ERROR,
    lib.PROXYCCL_ERROR_PEER_LOST: _REMOTE_ERROR,
    lib.PROXYCCL_ERROR_PROXY_LOST: _REMOTE_ERROR,
    lib.PROXYCCL_ERROR_TRANSPORT: _SYSTEM_ERROR,
    lib.PROXYCCL_ERROR_CONTEXT_LOST: _CUDA_ERROR,
    lib.PROXYCCL_ERROR_MISMATCH: _INVALID_USAGE,
    lib.PROXYCCL_ERROR_TRANSFER_SIZE: _INVALID_USAGE,
    lib.PROXYCCL_ERROR_BAD_TRIGGER: _INVALID_ARGUMENT,
    lib.PROXYCCL_ERROR_BAD_SCHEDULE: _INVALID_ARGUMENT,
    lib.PROXYCCL_ERROR_OUT_OF_RANGE: _INVALID_ARGUMENT,
    lib.PROXYCCL_ERROR_INVALID_FLAG: _INVALID_ARGUMENT,
}
"""The ncclResult_t for each ProxycclErrorCode; codes that are not listed are internal errors."""

_STATES = {"failed": "ABORT", "leaves": "FINALIZE", "runs": "RUNNING"}
_MISSING = {"ended": "has ended", "stopped": "is stopped", "absent": "does not have the communicator open"}

_MOST_RANKS = 10  # the most ranks of a kind that STATUS lists, as in NCCL


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _counts(view: RankView) -> dict[str, int]:
    counts = dict.fromkeys(_NAMES.values(), 0)
    for collective, calls in view.calls.items():
        counts[_NAMES.get(collective, collective)] = calls
    return counts


def _result(view: RankView) -> int:
    return _RESULTS.get(view.failure_code, _INTERNAL_ERROR) if view.failure else 0


def as_json(communicators: Sequence[CommunicatorView], seconds: float) -> str:
    """Returns the answer to STATUS after SET FORMAT json. `seconds` is the time that the snapshot took."""
    host = host_addresses()[0]
    found = []
    for each in communicators:
        first = (each.present or each.missing)[0].pid
        found.append(
            {
                "hash": f"{_digest(each.name):#x}",
                "secondary_hash": f"{_digest(host):#x}:{_digest(str(first)):#x}",
                "size": each.size,
                "ranks_count": len(each.present),
                "missing_ranks_count": len(each.missing),
                "ranks": [_rank(view, host) for view in each.present],
                "missing_ranks": [
                    {
                        "rank": missing.rank,
                        "host": host,
                        "pid": missing.pid,
                        "cuda_dev": -1,
                        "nvml_dev": -1,
                        "status": {
                            "unresponsive": missing.state in ("ended", "stopped"),
                            "considered_dead": missing.state == "ended",
                        },
                    }
                    for missing in each.missing
                ],
                "name": each.name,
                "host_only": True,
            }
        )
    document = {
        "nccl_version": f"ProxyCCL {version('proxyccl')}",
        "cuda_runtime_version": -1,
        "cuda_driver_version": -1,
        "timestamp": time.strftime("%Y-%m-%d %H:%M:%S"),  # local time, because clients parse the text with mktime
        "communicators_count": len(found),
        "communicators": found,
        "ras": {"collection_time_sec": round(seconds, 3), "timeouts_count": 0},
    }
    return json.dumps(document, indent=2) + "\n"


def _rank(view: RankView, host: str) -> dict[str, object]:
    return {
        "rank": view.rank,
        "host": host,
        "pid": view.pid,
        "cuda_dev": view.device,
        "nvml_dev": view.device,
        "status": {
            "init_state": 0,
            "async_error": _result(view),
            "finalize_called": view.leaving,
            "destroy_flag": view.leaving,
            "abort_flag": bool(view.failure),
        },
        "collective_counts": _counts(view),
    }


class _Summary:
    def __init__(self, of: CommunicatorView) -> None:
        self.of = of
        self.states = Counter(_STATES[view.state] for view in of.present)
        self.differing = [
            name
            for name in sorted({name for view in of.present for name in _counts(view)})
            if len({_counts(view).get(name, 0) for view in of.present}) > 1
        ]
        kinds = (
            ("INCOMPLETE", bool(of.missing)),
            ("ERROR", any(view.failure for view in of.present)),
            ("MISMATCH", bool(self.differing) or len(self.states) > 1),
        )
        self.errors = ",".join(name for name, holds in kinds if holds) or "OK"
        self.status = next((state for state in _STATES.values() if self.states[state]), "NOCOMM")

    @property
    def group(self) -> tuple[int, str, str]:
        return -self.of.size, self.status, self.errors


def as_text(communicators: Sequence[CommunicatorView], seconds: float, *, verbose: bool) -> str:
    """Returns the answer to STATUS, with at most ten ranks of each kind, or to VERBOSE STATUS, with all ranks."""
    return "\n".join(map(shown, _lines(communicators, seconds, len if verbose else lambda _: _MOST_RANKS))) + "\n"


def _lines(
    communicators: Sequence[CommunicatorView], seconds: float, most: Callable[[Sequence[object]], int]
) -> Iterator[str]:
    views = [view for each in communicators for view in each.present]
    devices = len({(view.pid, view.device) for view in views})
    processes = len({view.pid for view in views})
    yield f"ProxyCCL version {version('proxyccl')}, in the format of NCCL RAS"
    yield "CUDA runtime version -1, driver version -1"
    yield from ("", "Job summary", "===========", "")
    yield "  Nodes  Processes         GPUs"
    yield "(total)    (total)      (total)"
    yield f"{1:7}  {processes:9}  {devices:11}"
    yield from ("", f"Communicators... ({seconds:.2f}s)", "=============", "")
    summaries = sorted(map(_Summary, communicators), key=lambda summary: summary.group)
    groups = [list(of) for _, of in itertools.groupby(summaries, lambda summary: summary.group)]
    if groups:
        yield "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors"
        yield "    #  in group  per comm  per node  per comm  in group"
    else:
        yield "No communicator data collected!"
    for number, of in enumerate(groups):
        here = sorted({len(each.of.present) for each in of})
        span = f"{here[0]}-{here[-1]}" if len(here) > 1 else f"{here[0]}"
        total = len({view.pid for each in of for view in each.of.present})
        first = of[0]
        yield (
            f"{number:5}  {len(of):8}  {1:8}  {span:>8}  {first.of.size:8}  {total:8}  "
            f"{first.status:>8}  {first.errors:>6}"
        )
    named = [
        (f"#{group}-{place} ({_digest(each.of.name):016x})", each)
        for group, of in enumerate(groups)
        for place, each in enumerate(of)
    ]
    yield from ("", "Errors", "======", "")
    for name, each in named:
        yield from _errors(name, each, most)
    yield from ("", "Warnings", "========", "")
    for name, each in named:
        yield from _warnings(name, each, most)


def _errors(name: str, each: _Summary, most: Callable[[Sequence[object]], int]) -> Iterator[str]:
    if missing := each.of.missing:
        yield f"{name} INCOMPLETE"
        yield f"  Missing communicator data from {len(missing)} rank{'s' * (len(missing) > 1)}"
        for rank in missing[: most(missing)]:
            yield f"  Rank {rank.rank} -- process {rank.pid}, which {_MISSING[rank.state]}"
        yield ""
    failed = [view for view in each.of.present if view.failure]
    if failed:
        yield f"{name} ERROR"
        yield f"  Asynchronous error{'s' * (len(failed) > 1)} on {len(failed)} rank{'s' * (len(failed) > 1)}"
        for view in failed[: most(failed)]:
            yield f"  Rank {view.rank} reported {view.failure} -- {_place(view)}"
        yield ""


def _warnings(name: str, each: _Summary, most: Callable[[Sequence[object]], int]) -> Iterator[str]:
    ranks = each.of.present
    if "MISMATCH" not in each.errors:
        return
    yield f"{name} MISMATCH"
    if len(each.states) > 1:
        yield "  Communicator ranks have different status"
        yield from _by_value(ranks, lambda view: _STATES[view.state], lambda state: f"status {state}", most)
    for collective in each.differing:
        yield f"  Communicator ranks have different {collective} operation counts"
        yield from _by_value(
            ranks,
            lambda view, collective=collective: _counts(view).get(collective, 0),  # type: ignore[misc]
            lambda count: f"launched up to operation {count}" if count else "not launched any operations",
            most,
        )
        yield ""


def _by_value(
    ranks: Sequence[RankView],
    value_of: Callable[[RankView], object],
    words: Callable[[object], str],
    most: Callable[[Sequence[object]], int],
) -> Iterator[str]:
    """Yields a line for each value; unless the value is the most frequent, the line lists the value's ranks."""
    by_value: dict[object, list[RankView]] = {}
    for view in ranks:
        by_value.setdefault(value_of(view), []).append(view)
    for place, (value, of) in enumerate(sorted(by_value.items(), key=lambda item: -len(item[1]))):
        if len(of) == 1:
            yield f"  Rank {of[0].rank} has {words(value)} -- {_place(of[0])}"
            continue
        yield f"  {len(of)} ranks have {words(value)}"
        if place > 0:
            yield from (f"  Rank {view.rank} -- {_place(view)}" for view in of[: most(of)])


def _place(view: RankView) -> str:
    return f"GPU {view.device} managed by process {view.pid} on node {view.host.partition('/')[0]}"
