"""`proxyccl top`: shows the activity of this machine's proxies, as a table, once or refreshed, or as JSON."""

from __future__ import annotations

import io
import itertools
import shutil
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from proxyccl.channels.transfers.published import agents_text
from proxyccl.device.shown_text import printed_json, shown
from proxyccl.proxy.codec import Codec
from proxyccl.proxy.observe.publications import none_found
from proxyccl.proxy.observe.rates import ChannelRates, ServiceRates, Watch
from proxyccl.proxy.reports.document import MOST_BYTES
from proxyccl.tools import options
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


def short(value: float) -> str:
    """Formats a number in at most five characters: 950, 12.3k, 4.56M."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.0f}"


def _mean_flush(channels: Sequence[ChannelRates]) -> float | None:
    timed = [(each.flush_us, each.timed_flushes) for each in channels if each.flush_us is not None]
    return sum(mean * count for mean, count in timed) / sum(count for _, count in timed) if timed else None


def share_of_a_core(service: ServiceRates) -> str:
    """Returns the CPU time of a service's busiest thread in percent of a core; "-" if the time is not known."""
    shares = [worker.core for worker in service.workers if worker.core is not None]
    return f"{max(shares):.0%}" if shares else "-"


def _values(channels: Sequence[ChannelRates], errors: int) -> tuple[object, ...]:
    """Returns the cells "triggers" to "errors" of several channels, with shared rings and connections counted once."""
    rings = {channel.ring: channel for channel in channels}.values()
    connections = {(channel.worker, channel.connection): channel for channel in channels}.values()
    per_s = ("triggers_per_s", "sends_per_s", "puts_per_s", "gets_per_s", "bytes_per_s")
    return (
        *(short(sum(getattr(channel, name) for channel in channels)) for name in per_s),
        f"{sum(ring.ring_full for ring in rings)}/{sum(ring.ring_size for ring in rings)}",
        sum(each.outstanding for each in connections),
        _mean_flush(channels),
        errors,
    )


def _row(channel: ChannelRates) -> tuple[object, ...]:
    to = channel.transport if channel.peer is None else f"{channel.peer} {channel.transport}"
    if channel.rails:
        failures = f" (failures: {channel.rail_failures})" if channel.rail_failures else ""
        to += f", {channel.rails_up} of {channel.rails} rails{failures}"
    return ("", str(channel.id), to, *_values([channel], channel.errors + channel.connection_errors), "", "", "")


def _summary(service: ServiceRates) -> tuple[object, ...]:
    return (
        str(service.rank),
        "all",
        "",
        *_values(service.channels, service.errors),
        f"{max(worker.busy for worker in service.workers):.0%}",
        share_of_a_core(service),
        str(service.workers[0].idle),
    )


def table_of(services: list[ServiceRates]) -> str:
    """Returns the services as text: a block per job, with a line per rank and per channel in use."""
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


def _fitting(text: str) -> str:
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


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = (
        "busy: the share of time in which a proxy's busiest thread had work. The ranks of a node daemon share "
        "its threads, so an idle rank there appears as busy as the ranks that share its thread. "
        "core: the CPU time of that thread as a share of a core; idle: its policy when it has no work."
    )
    parser.add_argument("--once", action="store_true", help="print one table, over one interval")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each table")
    parser.add_argument(
        "--interval",
        type=options.seconds,
        default=1.0,
        metavar="S",
        help="seconds between tables (default %(default)s)",
    )
    options.add_web(parser)
    options.add_selection(parser)


def run(parsed: Namespace) -> int:
    """Runs the command. Returns the exit code, 1 if no proxy and no agent runs. JSON contains only proxies."""
    job, process = parsed.job, options.selected_process(parsed.daemon)
    if parsed.web is not None:
        from proxyccl.tools.web import server

        return server.run(parsed.web, parsed.interval, job, process)
    from proxyccl.tools.communicators import device_memory, memory_text  # imports numpy, which --help does not need

    once, as_json = parsed.once, parsed.json
    watch = Watch(job, process)
    with_agents = job is None and process is None
    live = sys.stdout.isatty() and not once and not as_json
    any_shown = False
    try:
        for rates in _frames(watch, parsed.interval):
            if not rates:
                break
            any_shown = True
            if as_json:
                memory = device_memory()
                all_of = [replace(each, memory=memory.get((each.job, each.rank), {})) for each in rates]
                print(printed_json(_RATES.encode(all_of).decode()), flush=True)
            else:
                parts = table_of(rates), memory_text(job), agents_text() if with_agents else ""
                text = "\n\n".join(filter(None, parts))
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
