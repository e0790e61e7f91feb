"""`proxyccl trace`: records the activity of this machine's proxies and agents in Chrome's trace format.

Perfetto (https://ui.perfetto.dev) and chrome://tracing display files in this format, whose documentation is "Trace
Event Format". A send of a schedule is recorded like a trigger, with the schedule's number for ring and ticket.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType

from proxyccl.channels.transfers.published import find_agents
from proxyccl.channels.transfers.tracing import AgentTrace, AgentTracer
from proxyccl.device.errors import ArgumentError, ResourceError
from proxyccl.proxy.observe.publications import find, none_found
from proxyccl.proxy.observe.tracing import MOST_TRIGGERS, Allowance, ServiceTrace, TracedTrigger, TracedWait, Tracer
from proxyccl.proxy.trigger import Operation, operation_name
from proxyccl.tools import options
from proxyccl.tools.options import show_size
from proxyccl.tools.results import versions

_FETCH_EVERY = 0.005  # seconds between two fetches of records


def _alike(traced: TracedTrigger) -> tuple[object, ...]:
    """Returns a key for a trigger; consecutive triggers with equal keys are shown as one event."""
    trigger = traced.trigger
    return traced.worker, traced.look, trigger.channel, trigger.operation, trigger.size, traced.completed_ns


def _name_of(run: list[TracedTrigger]) -> str:
    trigger = run[0].trigger
    size = f" {show_size(trigger.size)}" if trigger.operation & Operation.DATA else ""
    return operation_name(trigger.operation) + size + f" x{len(run)}" * (len(run) > 1)


class _Lanes:
    """The tracks of one channel. Events that overlap in time need separate tracks. `add` makes a track with a name, and
    returns the track's number.
    """

    def __init__(self, add: Callable[[str], int], name: str) -> None:
        self._add = add
        self._name = name
        self._count = 0
        self._free: list[int] = []  # a heap
        self._taken: list[tuple[int, int]] = []  # a heap of (time until which the track is taken, track)

    def take(self, begin: int, end: int) -> int:
        """Reserves the first free track, or a new track, from `begin` to `end`. `begin` must not decrease."""
        while self._taken and self._taken[0][0] <= begin:
            heapq.heappush(self._free, heapq.heappop(self._taken)[1])
        if self._free:
            track = heapq.heappop(self._free)
        else:
            self._count += 1
            track = self._add(self._name + f" ·{self._count}" * (self._count > 1))
        heapq.heappush(self._taken, (max(begin, end), track))
        return track


class _Events:
    """The events of one process in the trace file. `pid` is the process's number in the file, `start_ns` is the time
    that becomes 0 in the file, and `write` is called with each event as JSON.
    """

    def __init__(self, pid: int, start_ns: int, write: Callable[[str], object]) -> None:
        self._pid = pid
        self._start_ns = start_ns
        self._write = write
        self._tracks = itertools.count(1)

    def _describe(self, kind: str, track: int, name: str, order: int) -> None:
        for key, value in (("name", name), ("sort_index", order)):
            event = {"ph": "M", "pid": self._pid, "tid": track, "name": f"{kind}_{key}", "args": {key: value}}
            self._write(json.dumps(event))

    def _track(self, name: str) -> int:
        number = next(self._tracks)
        self._describe("thread", number, name, number)
        return number

    def _span(self, name: str, kind: str, track: int, begin: int, end: int, arguments: str) -> None:
        self._event("X", name, kind, track, begin, f'"dur": {max(0, end - begin) / 1e3}, "args": {arguments}')

    def _event(self, phase: str, name: str, kind: str, track: int, moment_ns: int, more: str) -> None:
        where = f'"pid": {self._pid}, "tid": {track}, "ts": {(moment_ns - self._start_ns) / 1e3}'
        self._write(f'{{"ph": "{phase}", "name": {name}, "cat": "{kind}", {where}, {more}}}')


class _Agent(_Events):
    def write(self, trace: AgentTrace) -> None:
        agent = trace.agent
        self._describe("process", 0, f"agent {agent.name} ({agent.program}, process {agent.pid})", self._pid)
        ordered = sorted(trace.transfers, key=lambda each: (each.peer, each.path, each.posted_ns))
        for (peer, path), transfers in itertools.groupby(ordered, lambda each: (each.peer, each.path)):
            lanes = _Lanes(self._track, f"agent {peer} by {path}")
            for each in transfers:
                what = "write" if each.writes else "read"
                name = f"{what} {show_size(each.nbytes)}" + f" in {each.blocks} blocks" * (each.blocks > 1)
                arguments = {name: getattr(each, name) for name in ("peer", "path", "nbytes", "blocks", "end")}
                track = lanes.take(each.posted_ns, each.ended_ns)
                text = json.dumps(arguments)
                self._span(json.dumps(name), "transfer", track, each.posted_ns, each.ended_ns, text)


class _Process(_Events):
    def write(self, trace: ServiceTrace, end_ns: int) -> None:
        service = trace.publication
        rank = service.description
        name = f"rank {rank.rank} of {rank.world_size} ({rank.program}, job {rank.job}, proxy in process {service.pid})"
        self._describe("process", 0, name, rank.rank)
        threads = [self._track(f"proxy thread {worker}") for worker in range(service.workers)]
        together = [list(alike) for _, alike in itertools.groupby(trace.triggers, _alike)]
        ordered = sorted(together, key=lambda run: (run[0].trigger.channel, run[-1].issued_ns))
        for channel, runs in itertools.groupby(ordered, lambda run: run[0].trigger.channel):
            self._write_channel(trace, end_ns, channel, runs, threads)
        by_channel = sorted(trace.waits, key=lambda wait: (wait.channel, wait.begin_ns, wait.end_ns))
        for channel, waits in itertools.groupby(by_channel, lambda wait: wait.channel):
            self._write_waits(trace, channel, waits)

    def _write_waits(self, trace: ServiceTrace, channel: int, waits: Iterator[TracedWait]) -> None:
        peer, _ = trace.routes.get(channel, (None, ""))
        of = f"channel {channel}" if peer is None else f"rank {peer}"
        lanes = _Lanes(self._track, f"waits for {of} on channel {channel}")
        for wait in waits:
            what = f"{of} to join" if wait.joins else f"data of {of}"
            arguments = json.dumps({"channel": channel, "peer": peer, "schedule": wait.schedule})
            track = lanes.take(wait.begin_ns, wait.end_ns)
            self._span(json.dumps(what), "wait", track, wait.begin_ns, wait.end_ns, arguments)

    def _write_channel(
        self, trace: ServiceTrace, end_ns: int, channel: int, runs: Iterator[list[TracedTrigger]], threads: list[int]
    ) -> None:
        peer, transport = trace.routes.get(channel, (None, "unknown"))
        way = trace.publication.description.way_text(peer)
        transport += f", {way}" if way else ""
        name = f"channel {channel} " + (f"({transport})" if peer is None else f"→ rank {peer} ({transport})")
        lanes = _Lanes(self._track, name)
        for run in runs:
            first, issued, completed = run[0], run[-1].issued_ns, run[0].completed_ns
            done = end_ns if completed is None else completed
            track = lanes.take(issued, done)
            what = json.dumps(_name_of(run))
            arguments = json.dumps(
                {
                    "channel": channel,
                    "peer": peer,
                    "ring": first.ring,
                    "ticket": first.ticket,
                    "schedule": first.schedule,
                    "count": len(run),
                    "bytes": first.trigger.size,
                    "completed": completed is not None,
                }
            )
            self._span(what, "issue", threads[first.worker], first.seen_ns, issued, arguments)
            self._event("i", what, "seen", track, first.seen_ns, '"s": "t"')
            self._span(what, "transfer", track, issued, done, arguments)


def write_trace(path: Path, traces: list[ServiceTrace], agents: Sequence[AgentTrace] = ()) -> None:
    """Writes traces to a file. In the file, each service and each agent is a process."""
    begins = [traced.seen_ns for trace in traces for traced in trace.triggers]
    begins += [transfer.posted_ns for agent in agents for transfer in agent.transfers]
    start = min(begins, default=0)
    end = max((traced.completed_ns or traced.issued_ns for trace in traces for traced in trace.triggers), default=0)
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        separators = itertools.chain(("\n",), itertools.repeat(",\n"))

        def write(event: str) -> object:
            return file.write(next(separators) + event)

        for pid, trace in enumerate(traces, 1):
            _Process(pid, start, write).write(trace, end)
        for pid, agent in enumerate(agents, 1 + len(traces)):
            _Agent(pid, start, write).write(agent)
        other = {
            "start_monotonic_ns": start,
            "lost_records": sum(trace.lost for trace in traces) + sum(trace.lost for trace in agents),
            "left_out_triggers": sum(trace.left_out for trace in traces),
            **versions(),
        }
        file.write(f'\n],\n"displayTimeUnit": "ns",\n"otherData": {json.dumps(other)}}}\n')


class _Ended:
    """A context manager that sets `by_signal` at Ctrl-C or SIGTERM. Use it only in the main thread."""

    def __init__(self) -> None:
        self.by_signal = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.by_signal = True

    def __enter__(self) -> _Ended:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def record(
    seconds: float,
    job: str | None = None,
    ranks: Collection[int] | None = None,
    process: int | None = None,
    most: int = MOST_TRIGGERS,
    ended: Callable[[], bool] = lambda: False,
) -> tuple[list[ServiceTrace], list[AgentTrace]]:
    """Records the selected services and agents for `seconds`, or until `ended` returns True.

    Args:
        seconds: how long to record.
        job, ranks, process: select services; see `find`. Agents are recorded only if job and ranks are None.
        most: the largest number of triggers to keep, over all services; later triggers are only counted. See
            `Allowance`.
        ended: a function that returns whether to stop before `seconds` have passed.

    Raises:
        ResourceError: no selected service or agent runs, or another process traces one of the services.
    """
    allowance = Allowance(most)
    with contextlib.ExitStack() as opened:
        tracers = []
        for path, publication in find(job, ranks, process):
            with contextlib.suppress(ArgumentError):  # the agent or service may be closed
                tracers.append(opened.enter_context(Tracer(path, publication, allowance)))
        of_agents = []
        for agent in find_agents() if job is None and ranks is None else ():
            if process in (None, agent.pid):
                with contextlib.suppress(ArgumentError):
                    of_agents.append(AgentTracer(agent, seconds))
        if not tracers and not of_agents:
            raise ResourceError(none_found(job, ranks, process))
        deadline = time.monotonic() + seconds
        while not ended() and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(_FETCH_EVERY, left))
            for tracer in tracers:
                tracer.fetch()
            for each in of_agents:
                each.fetch()
        return [tracer.stop() for tracer in tracers], [each.stop() for each in of_agents]


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=options.json_file, required=True, metavar="FILE", help="file to write the trace to"
    )
    parser.add_argument(
        "-t",
        "--seconds",
        type=options.seconds,
        default=1.0,
        help="time to record (default %(default)s); Ctrl-C ends it earlier",
    )
    parser.add_argument("--ranks", type=options.ranks, help="only these ranks, such as 0,3 (default: all)")
    parser.add_argument(
        "--most",
        type=options.count,
        default=MOST_TRIGGERS,
        metavar="N",
        help="most triggers to keep, over all proxies; later ones are only counted (default %(default)s)",
    )
    options.add_selection(parser)


def run(parsed: Namespace) -> int:
    """Records for the requested time, or until Ctrl-C or SIGTERM. Returns the exit code. Raises `record`'s errors."""
    path, process = parsed.output, options.selected_process(parsed.daemon)
    with _Ended() as ended:
        traces, agents = record(parsed.seconds, parsed.job, parsed.ranks, process, parsed.most, lambda: ended.by_signal)
    write_trace(path, traces, agents)
    triggers = sum(len(trace.triggers) for trace in traces)
    lost = sum(trace.lost for trace in traces) + sum(trace.lost for trace in agents)
    left_out = sum(trace.left_out for trace in traces)
    unknown = sum(t.completed_ns is None for trace in traces for t in trace.triggers)
    transfers = sum(len(agent.transfers) for agent in agents)
    more = f"; {transfers} transfers of {len(agents)} agents" if agents else ""
    print(f"{path}: {triggers} triggers of {len(traces)} proxies, {unknown} were not seen to complete{more}")
    if left_out:
        print(f"proxyccl: {left_out} later triggers are left out; --most keeps more", file=sys.stderr)
    if lost:
        print(f"proxyccl: {lost} records are lost: they came faster than they could be fetched", file=sys.stderr)
    return 0
