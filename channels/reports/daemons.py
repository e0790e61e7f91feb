"""Reports of node daemons: as text for people, and what they say of a rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from datetime import datetime

from proxyccl.channels.reports.render import counted, ring_lines
from proxyccl.proxy.daemon.report import Client, DaemonReport, EngineThread
from proxyccl.proxy.observe.reader import ChannelView
from proxyccl.proxy.reports.document import Member

_STATES = {"R": "runs", "S": "sleeps", "D": "is held in the kernel", "T": "is stopped"}


def _thread_text(thread: EngineThread) -> str:
    return f"{thread.name} {_STATES.get(thread.state, f'is in state {thread.state}')}"


def of_jobs(
    daemons: Iterable[DaemonReport], jobs: Collection[str], named: Collection[Member], moment: datetime
) -> list[DaemonReport]:
    """The reports of daemons that have to do with some jobs, of each the one nearest to a moment.

    Args:
        daemons: all there are, many of one process perhaps.
        jobs: names of communicators.
        named: daemons that ranks say run their proxies.
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
    """Whether a daemon ran the proxy of any rank of a job."""
    return any(client.description is not None and client.description.job == job for client in report.clients)


def remarks(report: DaemonReport, client: Client, *, rings: bool) -> list[str]:
    """What may hold a rank's proxy up in its daemon; nothing where nothing does.

    Args:
        report: the daemon's.
        client: the rank.
        rings: tell what its rings hold too, which the rank's own report does.
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
        found.append(f"its rings hold {counted(full, 'trigger')} that are not taken")
    for way in client.connections:
        if way.outstanding:
            towards = f"to rank {way.peer} by {way.transport}"
            found.append(f"{counted(way.outstanding, 'trigger')} {towards} issued and not known to be complete")
    if client.request is not None:
        found.append(f"its request {client.request.name} is under way for {client.request.seconds:.1f} s")
    return found


def _may_sleep(report: DaemonReport, thread: EngineThread | None) -> bool:
    """Whether a thread that did not look at rings while the report was made may have had nothing to do. Twice its
    longest sleep is long enough for a look, though it wakes late.
    """
    return report.meanwhile < 2 * report.longest_sleep and (thread is None or thread.state == "S")


def _channel(client: Client, channel: ChannelView) -> str:
    way = client.connection_of(channel)
    end = "a handler" if way is None else f"rank {way.peer} by {way.transport}"
    return (
        f"channel {channel.id} to {end}, ring {channel.ring}: {channel.triggers} triggers, {channel.puts} puts of "
        f"{channel.bytes} bytes, {channel.signals} signals, {channel.flushes} flushes, {channel.errors} errors"
    )


def _client(report: DaemonReport, client: Client) -> Iterator[str]:
    whose = client.description
    where = f"process {client.pid} on {client.device_id or 'no device'}, for {client.seconds:.1f} s"
    if whose is None:
        yield f"a client that says nothing of itself: {where}"
    else:
        yield f"rank {whose.rank} of {whose.world_size} of communicator {whose.job} ({whose.program}): {where}"
    if client.failure is not None:
        yield f"  its proxy failed: {client.failure}"
    if client.request is not None:
        yield f"  its request {client.request.name} is under way for {client.request.seconds:.1f} s"
    for worker in client.workers:
        seen = worker.seen
        idle = f"idle for {seen.idle_ns / 1e9:.1f} of {seen.age_ns / 1e9:.1f} s"
        doing = "ended" if worker.ended else f"{worker.looks_meanwhile} looks in {report.meanwhile:g} s, {idle}"
        yield f"  worker {seen.number} on {worker.thread}: {doing}"
    for number, ring in enumerate(client.rings):
        yield from (f"  {line}" for line in ring_lines(number, ring))
    for way in client.connections:
        yield (
            f"  connection {way.number} of worker {way.worker} to rank {way.peer} by {way.transport}: {way.completed} "
            f"triggers complete, {way.outstanding} outstanding, {way.errors} errors"
        )
    for channel in client.channels:
        yield f"  {_channel(client, channel)}"


def _cores(cores: list[int]) -> str:
    """Numbers of cores, in order, as `parse_cores` reads them."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def render(report: DaemonReport) -> str:
    """The whole report."""
    lines = [
        f"node daemon, process {report.process.pid} on {report.process.host.partition('/')[0]}, {report.written}",
        f"  {report.command}",
        f"  listens at {report.socket}; {counted(len(report.clients), 'client')}",
        f"  cause: {report.cause}",
        f"threads, which sleep for {report.longest_sleep:g} s at most where there is nothing to do",
    ]
    running = [worker.thread for client in report.clients for worker in client.workers if not worker.ended]
    lines += [
        f"  {_thread_text(thread)} (number {thread.number}), last on core {thread.core} of {_cores(thread.cores)}; "
        f"{counted(running.count(thread.name), 'worker')}"
        for thread in report.threads
    ]
    for client in report.clients:
        lines += _client(report, client)
    if report.unread:
        lines += ["could not be read", *(f"  {reason}" for reason in report.unread)]
    return "\n".join(lines) + "\n"
