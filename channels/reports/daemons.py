"""Renders node daemons' reports as text, and finds their statements about a rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from datetime import datetime

from proxyccl.channels.reports.render import counted, ring_lines
from proxyccl.device.shown_text import shown
from proxyccl.proxy.daemon.report import Client, DaemonReport, EngineThread, Request
from proxyccl.proxy.observe.reader import ChannelView, connection_of
from proxyccl.proxy.processes import process_name
from proxyccl.proxy.reports.document import Member

_STATES = {"R": "runs", "S": "sleeps", "D": "is held in the kernel", "T": "is stopped"}


def _thread_text(thread: EngineThread) -> str:
    return f"{thread.name} {_STATES.get(thread.state, f'is in state {thread.state}')}"


def of_jobs(
    daemons: Iterable[DaemonReport], jobs: Collection[str], named: Collection[Member], moment: datetime
) -> list[DaemonReport]:
    """Returns, for each daemon that serves one of the jobs, the report that was written nearest to `moment`.

    Args:
        daemons: all reports; one daemon may have written several.
        jobs: names of communicators.
        named: the daemons that the ranks' reports name.
        moment: when the ranks reported.
    """
    chosen: dict[Member, DaemonReport] = {}
    by_distance = sorted(daemons, key=lambda report: abs(datetime.fromisoformat(report.written) - moment), reverse=True)
    for report in by_distance:
        serves = {client.description.job for client in report.clients if client.description is not None}
        if report.process in named or serves & set(jobs):
            chosen[report.process] = report
    return list(chosen.values())


def serves(report: DaemonReport, job: str) -> bool:
    """Returns whether a daemon ran the proxy of any rank of a job."""
    return any(client.description is not None and client.description.job == job for client in report.clients)


def remarks(report: DaemonReport, client: Client, *, rings: bool) -> list[str]:
    """Returns possible reasons why a rank's proxy makes no progress in its daemon.

    Args:
        report: the daemon's report.
        client: the rank.
        rings: whether to state the number of triggers in the rank's rings, which the rank's own report also states.
    """
    found = [] if client.failure is None else [f"its proxy failed: {client.failure}"]
    threads = {thread.name: thread for thread in report.threads}
    for worker in client.workers:
        thread = threads.get(worker.thread)
        if not worker.ended and worker.looks_meanwhile == 0 and not _may_sleep(report, thread):
            state = f": the thread {_thread_text(thread)}" if thread is not None else ""
            found.append(f"worker {worker.seen.number} did not look at its rings for {report.meanwhile:g} s{state}")
    full = sum(ring.full for ring in client.rings)
    if rings and full:
        found.append(f"its rings hold {counted(full, 'trigger')} that the proxy has not taken")
    for connection in client.connections:
        if connection.outstanding:
            to_peer = f"to rank {connection.peer} by {connection.transport}"
            found.append(f"{counted(connection.outstanding, 'trigger')} {to_peer} issued but not known to be complete")
    if client.request is not None:
        found.append(_request_text(client.request))
    return found


def _request_text(request: Request) -> str:
    return f"its request {request.name} has been in progress for {request.seconds:.1f} s"


def _may_sleep(report: DaemonReport, thread: EngineThread | None) -> bool:
    """Returns whether a thread that did not poll its rings may merely have slept.

    A thread may wake late, but polls its rings within twice its longest sleep.
    """
    return report.meanwhile < 2 * report.longest_sleep and (thread is None or thread.state == "S")


def _channel(client: Client, channel: ChannelView) -> str:
    connection = connection_of(channel, client.connections)
    end = "a handler" if connection is None else f"rank {connection.peer} by {connection.transport}"
    return (
        f"channel {channel.id} to {end}, ring {channel.ring}: {channel.triggers} triggers, {channel.puts} puts and "
        f"{channel.gets} gets of {channel.bytes} bytes, {channel.signals} signals, {channel.flushes} flushes, "
        f"{channel.errors} errors"
    )


def _client(report: DaemonReport, client: Client) -> Iterator[str]:
    rank = client.description
    where = f"{process_name(client.pid)} on {client.device_id or 'no device'}, for {client.seconds:.1f} s"
    if rank is None:
        yield f"a client without a description: {where}"
    else:
        yield f"rank {rank.rank} of {rank.world_size} of communicator {rank.job} ({rank.program}): {where}"
    if client.failure is not None:
        yield f"  its proxy failed: {client.failure}"
    if client.request is not None:
        yield f"  {_request_text(client.request)}"
    for worker in client.workers:
        seen = worker.seen
        idle = f"idle for {seen.idle_ns / 1e9:.1f} of {seen.age_ns / 1e9:.1f} s"
        doing = "ended" if worker.ended else f"{worker.looks_meanwhile} looks in {report.meanwhile:g} s, {idle}"
        yield f"  worker {seen.number} on {worker.thread}: {doing}"
    for number, ring in enumerate(client.rings):
        yield from (f"  {line}" for line in ring_lines(number, ring))
    for each in client.connections:
        yield (
            f"  connection {each.number} of worker {each.worker} to rank {each.peer} by {each.transport}: "
            f"{each.completed} triggers complete, {each.outstanding} outstanding, {each.errors} errors"
        )
    for channel in client.channels:
        yield f"  {_channel(client, channel)}"


def _cores(cores: list[int]) -> str:
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def render(report: DaemonReport) -> str:
    lines = [
        f"node daemon, {report.process.shown}, {report.written}",
        f"  {report.command}",
        f"  listens at {report.socket}; {counted(len(report.clients), 'client')}",
        f"  cause: {report.cause}",
        f"threads (an idle one sleeps for at most {report.longest_sleep:g} s between two looks at its rings)",
    ]
    running = [worker.thread for client in report.clients for worker in client.workers if not worker.ended]
    lines += [
        f"  {_thread_text(thread)} (thread {thread.number}), last on core {thread.core} of {_cores(thread.cores)}; "
        f"{counted(running.count(thread.name), 'worker')}"
        for thread in report.threads
    ]
    for client in report.clients:
        lines += _client(report, client)
    if report.unread:
        lines += ["could not be read", *(f"  {reason}" for reason in report.unread)]
    return "\n".join(map(shown, lines)) + "\n"
