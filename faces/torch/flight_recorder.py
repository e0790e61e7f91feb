"""Dumps for the analyzer of torch's flight recorder, ``torch.distributed.flight_recorder.fr_trace`` (torchfrtrace).

A dump contains the names of calls, which each group knows anyway (`UnderWay`); it contains neither sizes nor times, so
recording costs a call almost nothing. The analyzer compares the ranks' dumps by the calls' numbers in their group.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from proxyccl.device.process import forks
from proxyccl.torch.under_way import Recorded

_VERSION = "2.10"
"""The version of the dump's format: that of torch 2.11 to 2.15."""
_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_BACKEND = "nccl"
"""The analyzer refuses calls of backends that it does not know."""
_NO_SIZES = [[0]]
"""Equal on all ranks, and consistent for gathers: the analyzer compares and multiplies sizes."""
_logger = logging.getLogger("proxyccl.torch")
_lock = threading.Lock()
forks.hold_while_forking(_lock)
_has_failed = False


@dataclass(frozen=True)
class GroupRecord:
    """The calls of one process group on this rank.

    Attributes:
        name: torch's name of the group.
        description: the program's.
        ranks: the members' numbers in the default group, in the order of the group.
        rank: this rank's number in the group.
        calls: by flow. The flow of a transfer ends with the peer's number and whether this rank sends; None is the flow
            of collectives.
    """

    name: str
    description: str
    ranks: list[int]
    rank: int
    calls: Mapping[Hashable, Recorded]


class Group(Protocol):
    """A process group."""

    def record(self) -> GroupRecord:
        """Its calls."""
        ...


groups: dict[Group, None] = {}
"""The groups that were not shut down, in the order of their making. torch keeps only their C++ part, which needs the
Python part to work: this keeps it alive."""


def write_failure() -> None:
    """Writes a dump for the first failure in the process, if an environment variable of torch's says where. A file that
    can't be written is logged: the caller reports the failure itself."""
    global _has_failed  # noqa: PLW0603  one dump for the process
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
    """Writes the calls of this process's groups for the analyzer of torch's flight recorder: those in progress and the
    latest that have ended.

    Args:
        prefix: the file's path without the number of this rank in the default group, which is appended.

    Returns:
        The path.

    Raises:
        RuntimeError: this process has no group.
    """
    records = [group.record() for group in list(groups)]
    if not records:
        raise RuntimeError("write_flight_record: there is no process group; expected init_process_group before")
    path = Path(f"{prefix}{records[0].ranks[records[0].rank]}")
    config: dict[str, dict[str, str]] = {}
    entries: list[dict[str, Any]] = []
    for record in records:
        for flow, calls in {None: Recorded(1, [], 0), **record.calls}.items():
            group, ranks, ends = (record.name, record.description), record.ranks, ""
            if flow is not None:
                group, ranks, ends = _pair(record, flow)
            if len(ranks) == 1 and ends:
                continue  # a rank's transfers to itself, which miss nobody
            config[group[0]] = {"name": group[0], "desc": group[1], "ranks": str(ranks)}
            for place, name in enumerate(calls.names):
                operation = name.split()[0].removesuffix("_single") + ends
                number, ended = calls.first + place, place < calls.ended
                entries.append(_entry(len(entries) + 1, group, number, operation, ended=ended))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps({"version": _VERSION, "pg_config": config, "pg_status": {}, "entries": entries}))
    return path


def _pair(record: GroupRecord, flow: Any) -> tuple[tuple[str, str], list[int], str]:
    """The transfers from one rank to another as a group of their own: its name and description, its ranks, and the
    analyzer's words for who sends. In the whole group the analyzer would miss the other ranks."""
    (peer, sends), on = (flow, "") if isinstance(flow[0], int) else (flow[1], f" on {flow[0].type}")
    own, other = record.ranks[record.rank], record.ranks[peer]
    sender, receiver = (own, other) if sends else (other, own)
    ranks = sorted({own, other})
    source, target = ranks.index(sender), ranks.index(receiver)
    ends = f" {source}->{target}" if sends else f" {target}<-{source}"
    return (f"{record.name}: {sender} to {receiver}{on}", "transfers"), ranks, ends


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
