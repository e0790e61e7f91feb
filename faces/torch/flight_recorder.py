"""Writes a process's calls for torch's flight recorder and profiler, and runs the watchdog that reports failed groups.

A dump, or flight record, is a file for the analyzer of torch's flight recorder,
``torch.distributed.flight_recorder.fr_trace`` (torchfrtrace). A dump contains the names of calls (`UnderWay`), but
neither sizes nor times, because recording them would slow down every call. The analyzer compares the ranks' dumps by
the calls' numbers in their group.

The watchdog is a thread that logs the oldest call in progress when a group fails. Without the watchdog, only the next
call or a wait for a Work would report the failure, which a program that waits for its device would not see.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from proxyccl.device.process import forks
from proxyccl.device.process.threads import Thread
from proxyccl.torch.under_way import Recorded

_VERSION = "2.10"
"""The version of the dump's format, as in torch 2.11 to 2.15."""
_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_BACKEND = "nccl"
"""The backend's name in dumps: torch's own backend, because the analyzer refuses backends that it does not know."""
_NO_SIZES = [[0]]
"""The tensors' sizes in dumps. The analyzer compares the sizes between ranks, and zeros always agree."""
_logger = logging.getLogger("proxyccl.torch")
_lock = threading.Lock()
forks.hold_while_forking(_lock)
_has_failed = False
_INTERVAL_SECONDS = 0.5
_watchdog: Thread | None = None


groups: dict[Any, None] = {}
"""The groups that were not shut down, in the order in which they were made. torch keeps only a group's C++ part alive,
which calls the Python part; this dict keeps the Python part alive.
"""


def watch(group: Any) -> None:
    """Adds a process group to `groups`, which the watchdog watches."""
    global _watchdog  # noqa: PLW0603  the process has one watchdog
    with _lock:
        groups[group] = None
        if _watchdog is None or not _watchdog.is_alive():
            thread = Thread(_run_watchdog, "proxyccl-torch-watchdog")
            thread.start()
            _watchdog = thread


def _run_watchdog() -> None:
    reported: weakref.WeakSet[Any] = weakref.WeakSet()
    while True:
        time.sleep(_INTERVAL_SECONDS)
        _look(reported)


def _look(reported: weakref.WeakSet[Any]) -> None:
    """Logs the groups that have failed since the last call of this function. The code is not in `_run_watchdog`,
    because local variables would keep a group alive while the watchdog sleeps.
    """
    for group in [group for group in list(groups) if group not in reported]:
        try:
            oldest = group.calls.oldest()
            comm = group.endpoints.failed
            if comm is not None:
                reported.add(group)
                write_failure()
                _logger.error("%s: %s", oldest, comm.group.failure.exception())
        except Exception:  # the watchdog continues with the other groups
            reported.add(group)
            _logger.exception("a process group is no longer watched")


def write_failure() -> None:
    """Writes a dump for the first failure in the process, if one of torch's environment variables names a path. If the
    file can't be written, logs the error instead of raising it, because the caller reports the failure itself.
    """
    global _has_failed  # noqa: PLW0603  the process writes one dump
    prefix = next(filter(None, map(os.environ.get, _VARIABLES)), None)
    if prefix is None:
        return
    with _lock:
        if _has_failed or not groups:
            return
        _has_failed = True
        try:
            _logger.info("wrote the flight record %s", write_flight_record(prefix))
        except OSError as error:
            _logger.exception("the flight record was not written: %s", error.filename)


def write_flight_record(prefix: str) -> Path:
    """Writes the names of this process's latest calls, in progress and ended, for torch's flight recorder's analyzer.

    Args:
        prefix: the beginning of the file's path; this rank's number in the default group is appended.

    Returns:
        The path of the written file.

    Raises:
        TypeError: `prefix` is not a str.
        RuntimeError: this process has no group.
        OSError: the file can't be written.
    """
    if not isinstance(prefix, str):
        raise TypeError(f"prefix: expected a str, the beginning of a file's path, not {prefix!r}")
    of_groups = [group.calls for group in list(groups)]
    if not of_groups:
        raise RuntimeError("write_flight_record: there is no process group; expected init_process_group before")
    path = Path(f"{prefix}{of_groups[0].members[of_groups[0].rank]}")
    config: dict[str, dict[str, str]] = {}
    entries: list[dict[str, Any]] = []
    for of_group in of_groups:
        for flow, calls in {None: Recorded(1, [], 0), **of_group.under_way.recorded()}.items():
            group, ranks, ends = (of_group.group_name, of_group.group_desc or "undefined"), of_group.members, ""
            if flow is not None:
                group, ranks, ends = _pair(of_group, flow)
            if len(ranks) == 1 and ends:
                continue  # leaves out this rank's transfers to itself, which wait for no other rank
            config[group[0]] = {"name": group[0], "desc": group[1], "ranks": str(ranks)}
            for place, name in enumerate(calls.names):
                operation = name.split()[0].removesuffix("_single") + ends
                number, ended = calls.first + place, place < calls.ended
                entries.append(_entry(len(entries) + 1, group, number, operation, ended=ended))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps({"version": _VERSION, "pg_config": config, "pg_status": {}, "entries": entries}))
    return path


def _pair(calls: Any, flow: Any) -> tuple[tuple[str, str], list[int], str]:
    """Presents the transfers of a flow as a group of two ranks, because otherwise the analyzer would report that the
    other ranks' calls are missing. Returns the group's (name, description), its ranks, and the analyzer's name for the
    direction.
    """
    (peer, sends), on = (flow, "") if isinstance(flow[0], int) else (flow[1], f" on {flow[0].type}")
    own, other = calls.members[calls.rank], calls.members[peer]
    sender, receiver = (own, other) if sends else (other, own)
    ranks = sorted({own, other})
    source, target = ranks.index(sender), ranks.index(receiver)
    ends = f" {source}->{target}" if sends else f" {target}<-{source}"
    return (f"{calls.group_name}: {sender} to {receiver}{on}", "transfers"), ranks, ends


def _entry(record_id: int, group: tuple[str, str], number: int, operation: str, *, ended: bool) -> dict[str, Any]:
    is_transfer = " " in operation
    return {
        "record_id": record_id,
        "pg_id": 0,
        "process_group": group,
        "collective_seq_id": number,
        "p2p_seq_id": number if is_transfer else 0,
        "op_id": number,
        "profiling_name": f"{_BACKEND}:{operation}",
        "time_created_ns": 0,
        "input_sizes": _NO_SIZES,
        "input_dtypes": [],
        "output_sizes": _NO_SIZES,
        "output_dtypes": [],
        "state": "completed" if ended else "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": ended,
        "timeout_ms": 0,
        "is_p2p": is_transfer,
        "frames": [],
    }


def profiler_event(
    name: str, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], *, ranks: Sequence[int], group: tuple[str, str]
) -> AbstractContextManager[None]:
    """Returns a context that shows a call as an event in torch's profiler. The event has the keys of NCCL's
    ``record_param_comms`` event, but another name, because torch's profiler expects a C++ object in events of that name
    and crashes otherwise.
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
    made: Any = torch._C._profiler._RecordFunctionFast(f"proxyccl:{name}", inputs, details)
    event: AbstractContextManager[None] = made
    return event
