"""Finds why ranks wait, from the reports of all ranks.

Ranks are the nodes of a graph. An edge leads from a rank to each rank for which its kernel, its proxy in a schedule, or
its call of the bootstrap waits. The root cause is a strongly connected component without an outgoing edge: one rank, or
ranks that wait for each other in a cycle.

Communicators that one process had open at the same time share one graph, because a process that waits in one
communicator delays the ranks of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec

from proxyccl.channels.reports import daemons
from proxyccl.channels.reports.render import call_text, counted, wait_text, waited, where, with_arguments
from proxyccl.channels.reports.report import Call, Report, Wait
from proxyccl.device._native import lib
from proxyccl.proxy.codec import Message
from proxyccl.proxy.daemon.report import DaemonReport
from proxyccl.proxy.hosts import host_name, same_host
from proxyccl.proxy.processes import catches, is_stopped, start_of
from proxyccl.proxy.reports import on_signal
from proxyccl.proxy.reports.document import Member

OWN_PROXY_WAITS = (
    lib.PROXYCCL_WAIT_RING_ROOM,
    lib.PROXYCCL_WAIT_RING_SYNC,
    lib.PROXYCCL_WAIT_FLUSH,
    lib.PROXYCCL_WAIT_COMPLETION,
)
SCHEDULE_PEER_WAITS = (lib.PROXYCCL_WAIT_SCHEDULE_POST, lib.PROXYCCL_WAIT_SCHEDULE_DATA)
_SHOWN = 8
"""The most waits for one rank that are shown."""
_LONG_APART = 10.0
"""Reports that were written more than this many seconds apart may not show the same moment."""

Node = tuple[str, int, int | str]
"""The executor of a rank: host, process, and the thread if ranks are threads of one process."""


class Finding(Message, frozen=True):
    """One conclusion from the reports."""

    kind: str  # "lost", "missing", "mismatch", "waits_for", "circle", "proxy" or "failed"
    about: list[str]  # names of the ranks concerned
    waiting: list[str]  # names of the ranks that wait for the ranks in `about`
    text: str  # the conclusion, as a sentence
    reasons: list[str] = msgspec.field(default_factory=list)  # the pieces of evidence, as text


class Diagnosis(Message, frozen=True):
    """The reasons why ranks wait in communicators that shared processes."""

    communicators: list[str]  # the communicators' names
    world_sizes: list[int]  # the communicators' numbers of ranks
    reported: list[list[int]]  # for each communicator the ranks that wrote reports
    daemons: list[Member]  # the node daemons that wrote reports
    written: str  # the time of the newest report
    findings: list[Finding]  # the conclusions, the most important first; empty if no rank waits
    notes: list[str]  # reasons why the findings may be wrong or incomplete


def diagnose(reports: Iterable[Report], of_daemons: Sequence[DaemonReport] = ()) -> list[Diagnosis]:
    """Returns a diagnosis for each set of communicators that shared processes, the newest set first.

    Args:
        reports: the ranks' reports.
        of_daemons: the node daemons' reports.
    """
    latest: dict[tuple[str, int], Report] = {}
    for report in sorted(reports, key=lambda report: report.written):
        latest[report.communicator, report.rank] = report
    groups: list[dict[str, dict[int, Report]]] = []
    for report in sorted(latest.values(), key=lambda report: (report.rank, report.written)):
        names = {report.communicator, *report.beside}
        joined: dict[str, dict[int, Report]] = {report.communicator: {}}
        for group in [group for group in groups if _names(group) & names]:
            groups.remove(group)
            joined.update(group)
        joined[report.communicator][report.rank] = report
        groups.append(joined)
    groups.sort(key=lambda group: max(report.written for report in _all(group)), reverse=True)
    return [_WaitGraph(group, of_daemons).diagnosis() for group in groups]


def _all(group: dict[str, dict[int, Report]]) -> list[Report]:
    return [report for by_rank in group.values() for report in by_rank.values()]


def _names(group: dict[str, dict[int, Report]]) -> set[str]:
    return {name for report in _all(group) for name in (report.communicator, *report.beside)}


@dataclass(frozen=True)
class _Edge:
    waiter: Node
    target: Node
    communicator: str
    rank: int
    peer: int
    wait: Wait | None  # a kernel's wait
    text: str


class _WaitGraph:
    def __init__(self, reports: dict[str, dict[int, Report]], of_daemons: Sequence[DaemonReport]) -> None:
        self._reports = reports
        newest = max(datetime.fromisoformat(report.written) for report in _all(reports))
        self._served: dict[Member, list[Report]] = {}  # the ranks' reports by node daemon
        for report in _all(reports):
            if report.daemon is not None:
                self._served.setdefault(report.daemon, []).append(report)
        self._daemons = daemons.of_jobs(of_daemons, reports, self._served, newest)
        self._members = {name: next(iter(by_rank.values())).members for name, by_rank in reports.items()}
        self._ranks: dict[Node, dict[str, int]] = {}  # each node's rank in each communicator
        for name, members in self._members.items():
            for rank in range(len(members)):
                self._ranks.setdefault(self._node(name, rank), {})[name] = rank
        self._lost = self._find_lost()
        self._edges = [edge for report in _all(reports) for edge in self._waits_of(report)]
        self._reach = self._find_reach()

    # -- names ---

    def _node(self, name: str, rank: int) -> Node:
        members = self._members[name]
        member = members[rank]
        if members.count(member) == 1:
            return *member.place, 0
        report = self._reports[name].get(rank)
        return *member.place, report.thread if report is not None else f"{name} {rank}"

    def _name(self, node: Node) -> str:
        ranks = self._ranks[node]
        if len(set(ranks.values())) == 1:
            return f"rank {next(iter(ranks.values()))}"
        return "rank " + "/".join(f"{rank} of {name}" for name, rank in ranks.items())

    def _named(self, nodes: Iterable[Node]) -> list[str]:
        return [self._name(node) for node in sorted(nodes, key=lambda node: sorted(self._ranks[node].values()))]

    def _inside(self, communicator: str) -> str:
        return f" of communicator {communicator}" if len(self._reports) > 1 else ""

    # -- the graph ---

    def _waits_of(self, report: Report) -> list[_Edge]:
        name, rank = report.communicator, report.rank
        own, edges = self._node(name, rank), []

        def add(peer: int, wait: Wait | None, text: str) -> None:
            edges.append(_Edge(own, self._node(name, peer), name, rank, peer, wait, text))

        last = f"; its last call{self._inside(name)} is {call_text(report.calls[-1])}" if report.calls else ""
        for of_proxy in report.proxy_waits:
            if of_proxy.peer not in (None, rank) and of_proxy.kind in SCHEDULE_PEER_WAITS:
                add(of_proxy.peer, None, f"the proxy of {self._name(own)} waits for {of_proxy.what}{last}")
        for wait in report.waits:
            if wait.peer not in (None, rank) and wait.kind not in OWN_PROXY_WAITS:
                add(wait.peer, wait, f"a kernel of {self._name(own)} waits for {wait_text(wait)}{last}")
        if report.exchange is not None:
            for peer in range(len(report.members)):
                theirs = self._reports[name].get(peer)
                there = theirs.exchange if theirs is not None else None
                if peer != rank and (there is None or there.purpose != report.exchange.purpose):
                    text = f"{self._name(own)} has {waited(report.exchange)}{self._inside(name)}"
                    add(peer, None, f"{text}; {self._name(self._node(name, peer))} has not reached it")
        return edges

    def _find_reach(self) -> dict[Node, set[Node]]:
        direct: dict[Node, set[Node]] = {}
        for edge in self._edges:
            direct.setdefault(edge.waiter, set()).add(edge.target)
        reach: dict[Node, set[Node]] = {}
        for node in self._ranks:
            found, todo = set[Node](), list(direct.get(node, ()))
            while todo:
                other = todo.pop()
                if other not in found:
                    found.add(other)
                    todo += direct.get(other, ())
            reach[node] = found
        return reach

    def _ends(self) -> list[set[Node]]:
        """Returns the components without an outgoing edge: single nodes, and cycles."""
        ends: list[set[Node]] = []
        for node in dict.fromkeys(edge.target for edge in self._edges):
            circle = {other for other in self._reach[node] if node in self._reach[other]} | {node}
            if self._reach[node] <= circle and circle not in ends:
                ends.append(circle)
        return sorted(ends, key=self._named)

    # -- findings ---

    def _find_lost(self) -> dict[Node, str]:
        lost: dict[Node, str] = {}
        for report in _all(self._reports):
            failure = report.failure
            if failure is not None and failure.kind == "PeerLostError" and failure.peer is not None:
                node = self._node(report.communicator, failure.peer)
                lost[node] = f"its process ended, as rank {failure.rank} noticed"
        return lost

    def _missing(self) -> list[Finding]:
        findings = []
        for node, ranks in self._ranks.items():
            if any(rank in self._reports[name] for name, rank in ranks.items()):
                continue
            kind = "lost" if node in self._lost else "missing"
            waiting = self._named(other for other in self._ranks if node in self._reach[other])
            text = f"{sentence(self._name(node))} wrote no report: {self._why_absent(node)}."
            reasons = [reason for name, rank in ranks.items() for reason in self._at_daemon(name, rank)]
            findings.append(Finding(kind, [self._name(node)], waiting, text, reasons))
        return findings

    def _mismatches(self) -> list[Finding]:
        findings = []
        for name, by_rank in self._reports.items():
            calls: dict[int, dict[int, Call]] = {}
            for rank, report in by_rank.items():
                for call in report.calls:
                    calls.setdefault(call.number, {})[rank] = call
            for number in sorted(calls):
                kinds: dict[str, list[int]] = {}
                for rank, call in sorted(calls[number].items()):
                    text = with_arguments(call.fields.get("collective", "?"), call)
                    kinds.setdefault(text, []).append(rank)
                if len(kinds) > 1:
                    text = f"Ranks differ in call #{number}{self._inside(name)}."
                    reasons = [f"{listed(_rank_names(ranks))}: {kind}" for kind, ranks in kinds.items()]
                    about = [rank for ranks in kinds.values() for rank in ranks]
                    findings.append(Finding("mismatch", _rank_names(about), [], text, reasons))
                    break
        return findings

    def _failures(self, findings: Sequence[Finding]) -> list[Finding]:
        """Returns findings of errors that explain by themselves why a communicator failed.

        Time-outs explain nothing, and lost processes are separate findings, so both are omitted.
        """
        explained = {"WaitTimeoutError", "PeerLostError", "AbortedError"}
        if any(finding.kind == "mismatch" for finding in findings):
            explained.add("MismatchError")
        failures = []
        for name, by_rank in self._reports.items():
            failed = [(report.rank, report.failure) for report in by_rank.values() if report.failure is not None]
            failed.sort(key=lambda each: each[0] != each[1].rank)  # the failing rank's own report comes first
            if not failed or failed[0][1].kind in explained:
                continue
            rank, failure = failed[0]
            about = self._name(self._node(name, failure.rank))
            reasons = [f"{self._name(self._node(name, rank))} has {failure.kind}: {failure.message}"]
            reasons += [where(by_rank[failure.rank])] if failure.rank in by_rank else []
            text = f"{sentence(about)} ended the communicator{self._inside(name)}."
            failures.append(Finding("failed", [about], [], text, reasons))
        return failures

    def _proxies(self) -> list[Finding]:
        """Returns findings of ranks that wait for their own proxy, for its sends to complete, or for a handler."""
        findings = []
        for report in _all(self._reports):
            waits = [wait for wait in report.waits if wait.kind in OWN_PROXY_WAITS]
            held = report.handling and any(ring.full for ring in report.rings)
            sends = any(wait.kind == lib.PROXYCCL_WAIT_SCHEDULE_SEND for wait in report.proxy_waits)
            if waits or sends or held:
                node = self._node(report.communicator, report.rank)
                name = self._name(node)
                reasons = [f"its kernel waits for {wait_text(wait)}" for wait in waits]
                waiting = self._named(other for other in self._ranks if node in self._reach[other])
                text = f"{name} is held up by its own proxy{self._inside(report.communicator)}."
                reasons += [*_proxy_state(report), *self._at_daemon(report.communicator, report.rank)]
                findings.append(Finding("proxy", [name], waiting, sentence(text), reasons))
        return findings

    def _waits(self) -> list[Finding]:
        findings = []
        for end in self._ends():
            waiters = {node for node in self._ranks if node not in end and end <= self._reach[node]}
            about, waiting = self._named(end), self._named(waiters)
            inner = [edge for edge in self._edges if edge.waiter in end and edge.target in end]
            if inner:
                others = f", and {listed(waiting)} {_verb(waiting)} for them" if waiting else ""
                text = f"{listed(about)} wait for each other{others}."
                places = [place for node in end for place in self._ranks[node].items()]
                reasons = [reason for place in sorted(places) for reason in self._at_daemon(*place, idle=False)]
                reasons = [*(edge.text for edge in inner), *reasons]
                findings.append(Finding("circle", about, waiting, sentence(text), reasons))
                continue
            (node,) = end
            edges = sorted((edge for edge in self._edges if edge.target == node), key=lambda edge: edge.rank)
            text = f"{listed(waiting)} {_verb(waiting)} for {about[0]}."
            reasons = [*self._explain(node, edges), *(edge.text for edge in edges[:_SHOWN])]
            if len(edges) > _SHOWN:
                reasons.append(f"and {len(edges) - _SHOWN} more")
            findings.append(Finding("waits_for", about, waiting, sentence(text), reasons))
        return findings

    def _explain(self, node: Node, edges: Sequence[_Edge]) -> list[str]:
        name = self._name(node)
        reasons: list[str] = []
        for communicator in dict.fromkeys(edge.communicator for edge in edges):
            rank = self._ranks[node][communicator]
            report = self._reports[communicator].get(rank)
            if report is None:
                reasons.append(f"{name} wrote no report{self._inside(communicator)}: {self._why_absent(node)}")
                reasons += self._at_daemon(communicator, rank)
                continue
            reasons += self._calls_behind(report, [edge for edge in edges if edge.communicator == communicator])
            reasons += [f"{name}: {text}" for text in _proxy_state(report)]
            reasons += self._at_daemon(communicator, rank)
            for edge in edges:
                reasons += self._signals(report, edge)
            # A kernel's wait for a schedule's stage is omitted, because the proxy waits for the same peer.
            explained = *OWN_PROXY_WAITS, lib.PROXYCCL_WAIT_STAGE, lib.PROXYCCL_WAIT_GRID
            if not any(wait.kind in explained for wait in report.waits):
                reasons.append(f"no kernel of {name}{self._inside(communicator)} waits; {where(report)}")
        return reasons

    def _at_daemon(self, communicator: str, rank: int, *, idle: bool = True) -> list[str]:
        """Returns what node daemons report about a rank; if `idle` is true, also that nothing is outstanding."""
        own = self._reports[communicator].get(rank)
        name = f"{self._name(self._node(communicator, rank))}{self._inside(communicator)}"
        said = []
        for daemon in self._daemons:
            if not same_host(daemon.process.host, self._members[communicator][rank].host):
                continue
            place = f"the node daemon, process {daemon.process.pid}"
            client = daemon.client_of(communicator, rank)
            if client is not None:
                remarks = daemons.remarks(daemon, client, rings=own is None)
                if remarks or idle:
                    said.append(f"{name} at {place}: {'; '.join(remarks) or 'nothing is outstanding'}")
            elif own is not None and own.daemon == daemon.process:
                said.append(f"{name} no longer has a session at {place}")
            elif own is None and daemons.serves(daemon, communicator):
                said.append(f"{name} has no session at {place}, which runs other ranks' proxies")
        return said

    def _why_absent(self, node: Node) -> str:
        name, rank = next(iter(self._ranks[node].items()))
        return self._lost.get(node) or _absence(self._members[name][rank])

    def _calls_behind(self, report: Report, edges: Sequence[_Edge]) -> list[str]:
        """Returns the waiting ranks' last call as text if this rank has not made that call; otherwise []."""
        own = report.calls[-1] if report.calls else None
        theirs = [self._reports[report.communicator][edge.rank].calls for edge in edges]
        furthest = max((calls[-1] for calls in theirs if calls), key=lambda call: call.number, default=None)
        if furthest is None or (own is not None and own.number >= furthest.number):
            return []
        last = f"its last call is {call_text(own)}" if own is not None else "it has called nothing yet"
        name = self._name(self._node(report.communicator, report.rank))
        return [f"{name} has not called {with_arguments(call_text(furthest), furthest)}; {last}"]

    def _signals(self, report: Report, edge: _Edge) -> list[str]:
        """Returns as text the number of signals that this rank's proxy sent on the channel on which a peer waits."""
        if edge.communicator != report.communicator or edge.wait is None:
            return []
        if edge.wait.kind != lib.PROXYCCL_WAIT_PROXY_SIGNAL:
            return []
        name = self._name(self._node(report.communicator, report.rank))
        return [
            f"{name} has sent {counted(channel.signals, 'signal')} to channel {edge.wait.channel} of rank {edge.rank}, "
            f"which waits for number {edge.wait.expected}"
            for channel in report.channels
            if (channel.peer, channel.peer_channel) == (edge.rank, edge.wait.channel)
        ]

    def diagnosis(self) -> Diagnosis:
        names = list(self._reports)
        waits = self._waits()
        absent = [finding for finding in self._missing() if finding.kind == "lost" or not finding.waiting]
        explained = [self._name(node) for end in self._ends() for node in end]
        absent = [finding for finding in absent if finding.about[0] not in explained]
        findings = [*self._mismatches(), *self._proxies(), *waits, *absent]
        findings += self._failures(findings)
        return Diagnosis(
            communicators=names,
            world_sizes=[len(self._members[name]) for name in names],
            reported=[sorted(self._reports[name]) for name in names],
            daemons=[daemon.process for daemon in self._daemons],
            written=max(self._moments()),
            findings=sorted(findings, key=self._weight),
            notes=self._notes(),
        )

    def _weight(self, finding: Finding) -> int:
        """Returns a sort key, which is smaller for a finding that may explain other findings.

        Findings from waits alone come last, because they may mislead: a rank that learned of a failure early makes no
        later calls, and sends no further signals.
        """
        if finding.kind == "mismatch":
            return 0
        if finding.kind == "failed" or any(self._name(node) in finding.about for node in self._lost):
            return 1
        if finding.kind in ("proxy", "circle"):
            return 2
        return 3 if any("has not called" in reason for reason in finding.reasons) else 4

    def _moments(self) -> list[str]:
        return [report.written for report in _all(self._reports)] + [daemon.written for daemon in self._daemons]

    def _notes(self) -> list[str]:
        notes = []
        times = [datetime.fromisoformat(moment) for moment in self._moments()]
        apart = (max(times) - min(times)).total_seconds()
        if apart > _LONG_APART:
            notes.append(f"the reports were written up to {apart:.0f} s apart: they may not show the same moment")
        for report in _all(self._reports):
            notes += [f"rank {report.rank} could not read {reason}" for reason in report.unread]
        for daemon in self._daemons:
            notes += [f"the node daemon, process {daemon.process.pid}, could not read {what}" for what in daemon.unread]
        for process, served in self._served.items():
            if process not in [daemon.process for daemon in self._daemons]:
                ranks = listed(_rank_names(sorted({report.rank for report in served})))
                notes.append(f"the node daemon that runs the proxy of {ranks} wrote no report: {_absence(process)}")
        return notes


def _absence(member: Member) -> str:
    """Returns a possible reason why a process wrote no report. The text advises SIGUSR1 only if the same process still
    runs and handles the signal, which would kill it otherwise.
    """
    pid = member.pid
    if not member.is_visible:
        elsewhere = ", in another PID namespace" if same_host(member.host, host_name()) else ""
        return f"it ran as {member.shown}{elsewhere}; look for its report there"
    started = start_of(pid)
    if started is None or member.started is None:
        return f"its process {pid} has ended"
    if started != member.started:
        return f"its process {pid} has ended; {pid} is another process now"
    state = f"its process {pid} still runs{', but is stopped' if is_stopped(pid) else ''}"
    if not catches(pid, on_signal.SIGNAL):
        return f"{state}; it writes no reports, as it does not handle {on_signal.SIGNAL.name}"
    return f"{state}; to make it write one: kill -USR1 {pid}"


def _proxy_state(report: Report) -> list[str]:
    own = [f"its proxy waits for {wait.what}" for wait in report.proxy_waits if wait.kind not in SCHEDULE_PEER_WAITS]
    full = sum(ring.full for ring in report.rings)
    behind = f"its rings hold {counted(full, 'trigger')} that the proxy has not taken"
    if report.handling:
        return own + [
            f"its proxy has been in the handler of channel {handling.channel} for {handling.seconds:.1f} s; {behind}"
            for handling in report.handling
        ]
    return own + ([behind] if full else [])


def _verb(waiting: Sequence[str]) -> str:
    return "wait" if len(waiting) > 1 else "waits"


def _rank_names(ranks: Sequence[int]) -> list[str]:
    return [f"rank {rank}" for rank in ranks]


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def listed(names: Sequence[str]) -> str:
    """Joins the names of ranks for a sentence: "rank 0", "ranks 0, 1 and 3"."""
    if len(names) < 2:
        return "".join(names)
    short = [name.removeprefix("rank ") for name in names]
    return f"ranks {', '.join(short[:-1])} and {short[-1]}"
