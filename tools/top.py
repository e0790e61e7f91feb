"""`proxyccl top`: shows the activity of this machine's proxies, as a refreshed table, as one table, or as JSON."""

from __future__ import annotations

import io
import itertools
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from proxyccl.channels.transfers.published import find_agents
from proxyccl.device.shown_text import printed_json, shown
from proxyccl.proxy.codec import Codec
from proxyccl.proxy.observe.publications import none_found
from proxyccl.proxy.observe.rates import ChannelRates, ServiceRates, rates_between
from proxyccl.proxy.observe.reader import ServiceView, snapshots
from proxyccl.proxy.reports.document import MOST_BYTES
from proxyccl.tools.tables import Column, Table

_RATES = Codec(list[ServiceRates], MOST_BYTES)
_CLEAR = "\x1b[H\x1b[J"
_COLUMNS = (
    Column("rank", "", 5),
    Column("channel", "", 7, left=True),
    Column("to", "", 8, left=True),
    Column("triggers", "(/s)", 8),
    Column("sends", "(/s)", 8),
    Column("puts", "(/s)", 8),
    Column("gets", "(/s)", 8),
    Column("bytes", "(/s)", 8),
    Column("in ring", "", 11),
    Column("outstanding", "", 11, "d"),
    Column("flush", "(µs)", 7, ".1f"),
    Column("errors", "", 6, "d"),
    Column("busy", "", 5),
    Column("core", "", 5),
    Column("idle", "", 0, left=True),
)


class Watch:
    """Observes the proxy services of this machine, or those of one job or process.

    Args:
        job: of this job only; None for all.
        process: in this process only; None for all.
    """

    def __init__(self, job: str | None = None, process: int | None = None) -> None:
        self._of = job, process
        self._views: dict[Path, ServiceView] = {}

    def rates(self) -> list[ServiceRates]:
        """The services' activity since the last call, ordered by job and rank; without services that are new.

        Raises:
            ArgumentError: the directory of publications is not this user's own.
        """
        before, self._views = self._views, snapshots(*self._of)
        return [rates_between(before[path], view) for path, view in self._views.items() if path in before]

    @property
    def views(self) -> list[ServiceView]:
        """The services at the last call of `rates`, new ones among them."""
        return list(self._views.values())


def short(value: float) -> str:
    """A number in at most five characters: 950, 12.3k, 4.56M."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.0f}"


def _mean_flush(channels: list[ChannelRates]) -> float | None:
    timed = [(each.flush_us, each.timed_flushes) for each in channels if each.flush_us is not None]
    return sum(mean * count for mean, count in timed) / sum(count for _, count in timed) if timed else None


def _row(channel: ChannelRates) -> tuple[object, ...]:
    to = channel.transport if channel.peer is None else f"{channel.peer} {channel.transport}"
    return (
        "",
        str(channel.id),
        to,
        short(channel.triggers_per_s),
        short(channel.sends_per_s),
        short(channel.puts_per_s),
        short(channel.gets_per_s),
        short(channel.bytes_per_s),
        f"{channel.ring_full}/{channel.ring_size}",
        channel.outstanding,
        channel.flush_us,
        channel.errors + channel.connection_errors,
        "",
        "",
        "",
    )


def share_of_a_core(service: ServiceRates) -> str:
    """The CPU time of a service's busiest thread as a share of a core, in percent; a dash if it is not known."""
    shares = [worker.core for worker in service.workers if worker.core is not None]
    return f"{max(shares):.0%}" if shares else "-"


def _summary(service: ServiceRates) -> tuple[object, ...]:
    channels = list(service.channels)
    rings = {channel.ring: channel for channel in channels}.values()
    connections = {(channel.worker, channel.connection): channel for channel in channels}.values()
    return (
        str(service.rank),
        "all",
        "",
        short(sum(channel.triggers_per_s for channel in channels)),
        short(sum(channel.sends_per_s for channel in channels)),
        short(sum(channel.puts_per_s for channel in channels)),
        short(sum(channel.gets_per_s for channel in channels)),
        short(sum(channel.bytes_per_s for channel in channels)),
        f"{sum(ring.ring_full for ring in rings)}/{sum(ring.ring_size for ring in rings)}",
        sum(each.outstanding for each in connections),
        _mean_flush(channels),
        service.errors,
        f"{max(worker.busy for worker in service.workers):.0%}",
        share_of_a_core(service),
        str(service.workers[0].idle),
    )


def table_of(services: list[ServiceRates]) -> str:
    """The services as text: a block for each job, with a line for each rank and for each of its channels in use."""
    out = io.StringIO()
    for job, of_job in itertools.groupby(services, lambda service: service.job):
        ranks = list(of_job)
        first = ranks[0]
        print(shown(f"job {job}: {first.program}, {first.world_size} ranks, {first.runtime} runtime"), file=out)
        table = Table(_COLUMNS, out)
        table.header()
        for service in ranks:
            table.row(*_summary(service))
            for channel in service.channels:
                if channel.triggers or channel.signals or channel.errors or channel.connection_errors:
                    table.row(*_row(channel))
        print(file=out)
    return out.getvalue().rstrip("\n")


def agents_text() -> str:
    """A line for each agent of this user: its peers, and the path to each. "" if there is none."""
    return "\n".join(
        shown(f"agent {seen.name}: reaches {seen.reaches}; process {seen.pid}, {seen.program}")
        for seen in find_agents()
    )


def _fitting(text: str) -> str:
    """The first lines of a text, as many as fit the terminal."""
    lines, height = text.splitlines(), shutil.get_terminal_size().lines - 2
    if len(lines) <= height:
        return text
    return "\n".join(
        [
            *lines[: height - 1],
            f"… {len(lines) - height + 1} more lines; use a taller terminal, --job, --daemon or --once",
        ]
    )


def _frames(watch: Watch, interval: float) -> Iterator[list[ServiceRates]]:
    watch.rates()
    while watch.views:
        time.sleep(interval)
        rates = watch.rates()
        if rates or not watch.views:
            yield rates


def run(interval: float, job: str | None, process: int | None, *, once: bool, as_json: bool) -> int:
    """The command. Returns the exit code: 1 if neither a proxy nor an agent runs. JSON has no agents.

    Args:
        interval: seconds between two tables.
        job: of this job only; None for all.
        process: in this process only, such as a daemon; None for all.
        once: whether to print one table, over one interval; otherwise continue until Ctrl-C or until no proxy runs.
        as_json: whether to print a line of JSON, a list of services, for each table.

    Raises:
        ArgumentError: the directory of publications is not this user's own.
    """
    watch = Watch(job, process)
    with_agents = job is None and process is None
    live = sys.stdout.isatty() and not once and not as_json
    any_shown = False
    try:
        for rates in _frames(watch, interval):
            if not rates:
                break
            any_shown = True
            if as_json:
                print(printed_json(_RATES.encode(rates).decode()), flush=True)
            else:
                agents = agents_text() if with_agents else ""
                text = table_of(rates) + (f"\n\n{agents}" if agents else "")
                print(_CLEAR + _fitting(text) if live else text + ("" if once else "\n"), flush=True)
            if once:
                break
    except KeyboardInterrupt:
        return 0
    if not any_shown and with_agents and not as_json and (agents := agents_text()):
        print(agents)
        return 0
    if not any_shown:
        print(shown(f"proxyccl: {none_found(job, process=process)}"), file=sys.stderr)
    return 0 if any_shown else 1
