"""`proxyccl trace`: records what the proxies of this machine do and writes it in Chrome's trace format.

Perfetto (https://ui.perfetto.dev) and chrome://tracing show such a file. Format: "Trace Event Format", the document
that both of them name.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from proxyccl.channels.tools.options import show_size
from proxyccl.channels.tools.report import versions
from proxyccl.device.errors import ArgumentError, ResourceError
from proxyccl.proxy.observe.publications import find, none_found
from proxyccl.proxy.observe.tracing import ServiceTrace, TracedTrigger, Tracer, operation_name

_FETCH_EVERY = 0.005  # seconds
_CHANNEL_TRACKS = 100  # number of the first channel's first track; the proxy's threads come before
_LANES = 1000  # numbers kept for one channel's tracks

Event = dict[str, Any]


def _name_of(traced: TracedTrigger) -> str:
    name, size = operation_name(traced.trigger.operation), traced.trigger.size
    return f"{name} {show_size(size)}" if name.startswith("put") else name


def _lane(ends: list[int], begin: int) -> int:
    """The first lane that is free at a moment; a new one if none is. What overlaps can't lie on one track."""
    for lane, end in enumerate(ends):
        if end <= begin:
            return lane
    ends.append(0)
    return len(ends) - 1


def _named(kind: str, pid: int, tid: int, name: str, order: int) -> Iterator[Event]:
    yield {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": f"{kind}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": order}}


def _events_of(pid: int, trace: ServiceTrace, start_ns: int, end_ns: int) -> Iterator[Event]:
    who = trace.publication
    whose = who.description
    rank = whose.rank
    name = f"rank {rank} of {whose.world_size} ({whose.program}, job {whose.job}, proxy in process {who.pid})"
    yield from _named("process", pid, 0, name, rank)
    for worker in range(who.workers):
        yield from _named("thread", pid, worker + 1, f"proxy thread {worker}", worker)
    lanes: dict[int, list[int]] = {}
    for traced in sorted(trace.triggers, key=lambda traced: traced.issued_ns):
        channel = traced.trigger.channel
        peer, transport = trace.ways.get(channel, (None, "unknown"))
        done = end_ns if traced.completed_ns is None else traced.completed_ns
        common = {"pid": pid, "name": _name_of(traced)}
        arguments = {
            "channel": channel,
            "peer": peer,
            "ring": traced.ring,
            "ticket": traced.ticket,
            "bytes": traced.trigger.size,
            "completed": traced.completed_ns is not None,
        }
        seen, issued = ((moment - start_ns) / 1e3 for moment in (traced.seen_ns, traced.issued_ns))
        yield {
            **common,
            "ph": "X",
            "cat": "issue",
            "tid": traced.worker + 1,
            "ts": seen,
            "dur": issued - seen,
            "args": arguments,
        }
        ends = lanes.setdefault(channel, [])
        before = len(ends)
        lane = _lane(ends, traced.issued_ns)
        track = _CHANNEL_TRACKS + channel * _LANES + lane
        if lane == before:
            to = f"→ rank {peer} ({transport})" if peer is not None else f"({transport})"
            yield from _named("thread", pid, track, f"channel {channel} {to}" + f" ·{lane + 1}" * bool(lane), track)
        ends[lane] = max(done, traced.issued_ns)
        yield {**common, "ph": "i", "s": "t", "cat": "seen", "tid": track, "ts": seen, "args": {}}
        yield {
            **common,
            "ph": "X",
            "cat": "transfer",
            "tid": track,
            "ts": issued,
            "dur": max(0, done - traced.issued_ns) / 1e3,
            "args": arguments,
        }


def write_trace(path: Path, traces: list[ServiceTrace]) -> None:
    """Writes traces to a file, each service's as a process."""
    triggers = [traced for trace in traces for traced in trace.triggers]
    start = min((traced.seen_ns for traced in triggers), default=0)
    end = max((traced.completed_ns or traced.issued_ns for traced in triggers), default=0)
    with path.open("w") as file:
        file.write('{"traceEvents": [\n')
        separator = ""
        for pid, trace in enumerate(traces, 1):
            for event in _events_of(pid, trace, start, end):
                file.write(separator + json.dumps(event))
                separator = ",\n"
        other = {"start_monotonic_ns": start, "lost_records": sum(trace.lost for trace in traces), **versions()}
        file.write(f'\n],\n"displayTimeUnit": "ns",\n"otherData": {json.dumps(other)}}}\n')


def record(
    seconds: float, job: str | None = None, ranks: Collection[int] | None = None, process: int | None = None
) -> list[ServiceTrace]:
    """Records all that the chosen services do for some seconds, or until Ctrl-C.

    Args:
        seconds: for how long.
        job: of this job only; None for all.
        ranks: of these ranks only; None for all.
        process: what runs in this process only, such as a daemon's; None for all.

    Raises:
        ResourceError: none of them runs, or another process traces one.
    """
    with contextlib.ExitStack() as opened:
        tracers = []
        for path, publication in find(job, ranks, process):
            with contextlib.suppress(ArgumentError):  # it was closed meanwhile
                tracers.append(opened.enter_context(Tracer(path, publication)))
        if not tracers:
            raise ResourceError(none_found(job, ranks, process))
        deadline = time.monotonic() + seconds
        with contextlib.suppress(KeyboardInterrupt):
            while (left := deadline - time.monotonic()) > 0:
                time.sleep(min(_FETCH_EVERY, left))
                for tracer in tracers:
                    tracer.fetch()
        return [tracer.stop() for tracer in tracers]


def run(path: Path, seconds: float, job: str | None, ranks: Collection[int] | None, process: int | None) -> int:
    """The command. Returns the exit code. Arguments and errors as for `record`."""
    traces = record(seconds, job, ranks, process)
    write_trace(path, traces)
    triggers, lost = sum(len(trace.triggers) for trace in traces), sum(trace.lost for trace in traces)
    unknown = sum(t.completed_ns is None for trace in traces for t in trace.triggers)
    print(f"{path}: {triggers} triggers of {len(traces)} proxies, {unknown} of them not seen to complete")
    if lost:
        print(f"proxyccl: {lost} records came faster than they could be fetched and are lost", file=sys.stderr)
    return 0
