"""Renders a report as text."""

from __future__ import annotations

from collections.abc import Iterator

from proxyccl.channels.reports.report import Call, Exchange, ProxiedChannel, Report, Thread, Wait
from proxyccl.device.shown_text import shown
from proxyccl.proxy.processes import process_name
from proxyccl.proxy.ring import RingContents, RingTrigger


def counted(number: int, thing: str) -> str:
    """Returns a number with its noun, such as "2 triggers"."""
    return f"{number} {thing}{'s' if number != 1 else ''}"


def call_text(call: Call) -> str:
    return f"{call.fields.get('collective', '?')} #{call.number}"


def arguments_text(call: Call) -> str:
    """Returns the text of the arguments that must agree between ranks; "" for a barrier."""
    given = {} if call.fields.get("collective") == "barrier" else call.fields
    return ", ".join(f"{name} {value}" for name, value in given.items() if name != "collective")


def with_arguments(name: str, call: Call) -> str:
    arguments = arguments_text(call)
    return f"{name} ({arguments})" if arguments else name


def wait_text(wait: Wait) -> str:
    from_rank = "" if wait.peer is None else f" from rank {wait.peer}"
    return f"{wait.what}{from_rank}: expected {wait.expected}, saw {wait.seen}"


def waited(exchange: Exchange) -> str:
    """Returns "waited", with the time that a rank has waited in an exchange and the exchange's purpose."""
    shown = f"{exchange.seconds:.1f}"
    return f"waited{f' {shown} s' if shown != '0.0' else ''} for all ranks to reach {exchange.purpose}"


def headline(report: Report) -> str:
    if report.failure is not None and report.failure.kind == "MismatchError":
        return f"{report.failure.kind}: {report.failure.message}"
    inside = f", in or after {call_text(report.calls[-1])}" if report.calls else ""
    if report.proxy_waits:
        return f"its proxy waited for {report.proxy_waits[0].what}{inside}"
    if report.waits:
        wait = next((wait for wait in report.waits if wait.peer is not None), report.waits[0])
        return f"a kernel waited for {wait_text(wait)}{inside}"
    if report.exchange is not None:
        return waited(report.exchange)
    if report.failure is not None:
        return f"{report.failure.kind}: {report.failure.message}"
    return "no kernel waits"


def where(report: Report) -> str:
    """Returns text with the innermost call of the program's own code in the thread that made the communicator."""
    own = next((thread for thread in report.threads if thread.own), None)
    if own is None:
        if report.threads:
            return "its thread has ended"
        unread = any(reason.startswith("the threads") for reason in report.unread)
        return "its threads could not be read" if unread else "its program has ended"
    return f"its thread is at {own.program}"


def _trigger(trigger: RingTrigger) -> str:
    text = f"#{trigger.ticket} channel {trigger.channel} {trigger.operation}"
    moves = trigger.operation.split("+")[0] in ("data", "get")
    if trigger.value is not None:
        target = f" to memory {trigger.dst_memory}+{trigger.dst_offset}" if moves else ""
        text += f" of the value {trigger.value:#x}, {trigger.size} bytes{target}"
    elif moves:
        source, target = f"{trigger.src_memory}+{trigger.src_offset}", f"{trigger.dst_memory}+{trigger.dst_offset}"
        text += f" of {trigger.size} bytes from memory {source} to {target}"
    return text


def ring_lines(number: int, ring: RingContents) -> Iterator[str]:
    yield f"ring {number}: {ring.full} of {ring.size} slots full, {ring.taken} triggers taken so far"
    triggers = [f"not taken: {_trigger(trigger)}" for trigger in ring.waiting]
    triggers += [f"taken:     {_trigger(trigger)}" for trigger in ring.recent]
    for line in triggers or ["no triggers so far"]:
        yield f"  {line}"


def _channel(channel: ProxiedChannel) -> Iterator[str]:
    end = "a handler" if channel.transport == "handler" else f"rank {channel.peer} by {channel.transport}"
    yield (
        f"{channel.id} to {end}: {channel.triggers} triggers, {channel.puts} puts and {channel.gets} gets of "
        f"{channel.bytes} bytes, {channel.signals} signals sent, {channel.flushes} flushes"
    )
    if channel.outstanding:
        yield f"  {channel.outstanding} triggers or sends to rank {channel.peer} are not known to be complete"
    if channel.signals_used is not None and channel.transport != "handler":
        yield f"  {channel.signals_in} signals received, {channel.signals_used} of them waited for"
    if channel.flush_asked is not None and channel.flush_asked > channel.flushed:
        yield f"  the flush with ticket {channel.flush_asked - 1} is not complete"


def _thread(thread: Thread) -> Iterator[str]:
    yield f"{thread.name}{' (made the communicator)' if thread.own else ''}"
    for line in thread.stack:
        yield f"  {line}"


def render(report: Report) -> str:
    lines = [
        f"rank {report.rank} of {len(report.members)} of communicator {report.communicator}, {report.written}",
        f"  {report.process.shown}: {report.command}",
        f"  {report.runtime}; waits are bounded by {report.timeout:g} s",
        f"  cause: {report.cause}",
    ]
    lines += [f"  reaches rank {peer} by {path}" for peer, path in enumerate(report.transports) if ", " in path]
    if report.daemon is not None:
        lines.append(f"  its proxy is in the node daemon, {process_name(report.daemon.pid)}")
    if report.failure is not None:
        lines.append(f"  {report.failure.kind}: {report.failure.message}")
    if report.exchange is not None:
        lines.append(f"  has {waited(report.exchange)}")

    def section(title: str, items: list[str], none: str) -> None:
        lines.append(title)
        lines.extend(f"  {item}" for item in items or [none])

    section("kernels wait for", [wait_text(wait) for wait in report.waits], "nothing")
    if report.proxy_waits:
        section("its proxy waits for", [wait.what for wait in report.proxy_waits], "")
    calls = [": ".join(filter(None, (call_text(call), arguments_text(call)))) for call in report.calls]
    section("last collective calls", calls, "none")
    for number, ring in enumerate(report.rings):
        lines.extend(ring_lines(number, ring))
    for handling in report.handling:
        lines.append(f"the handler of channel {handling.channel} has been running for {handling.seconds:.1f} s")
    section("proxy channels", [line for channel in report.channels for line in _channel(channel)], "none")
    semaphores = [
        f"rank {item.peer}, lane {item.lane}: {item.signals_in} signals received, "
        f"{item.signals_used} of them waited for, {item.signals_out} sent"
        for item in report.semaphores
    ]
    section("semaphores in device memory", semaphores, "none")
    section("threads", [line for thread in report.threads for line in _thread(thread)], "none")
    if report.unread:
        section("could not be read", report.unread, "")
    return "\n".join(map(shown, lines)) + "\n"
