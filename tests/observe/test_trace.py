"""Traces of a proxy: their records and file format. Tracing must not harm the proxy."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxyccl import Communicator, Operation, ResourceError, Trigger
from proxyccl.proxy._engine import ffi, lib
from proxyccl.proxy.observe import publications
from proxyccl.proxy.observe.publications import Description, Publication
from proxyccl.proxy.observe.reader import Observer
from proxyccl.proxy.observe.tracing import (
    Allowance,
    ServiceTrace,
    TraceDecoder,
    TracedTrigger,
    TracedWait,
    Tracer,
)
from proxyccl.proxy.trigger import operation_name
from proxyccl.tools.trace import write_trace
from support.device_arrays import barrier, on_device, on_host
from support.observing import KERNELS, channels_of, command, look, output_of, wait_for_looks, wait_until_traced
from support.running import TIMEOUT, run_ranks

pytestmark = pytest.mark.own_proxy(reason="looks in its own directory, and starts a daemon if it needs one")


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def tracer_of(comm: Communicator) -> Tracer:
    """Starts a tracer of this rank's proxy, waits until the proxy records, and returns the tracer."""
    ((path, publication),) = publications.find(comm.job, {comm.rank})
    tracer = Tracer(path, publication)
    wait_until_traced(publication)
    return tracer


def wait_for_a_tracer(comm: Communicator) -> None:
    ((_, publication),) = publications.find(comm.job, {comm.rank})
    wait_until_traced(publication)


def trace_words(comm: Communicator) -> list[tuple[int, int]]:
    """Returns for each worker of this rank's proxy: the time until which it writes records, in ns, and the number of
    records written.
    """
    ((_, publication),) = publications.find(comm.job, {comm.rank})
    with Observer(publication) as observer:
        workers = [observer.worker_stats(number) for number in range(publication.workers)]
        return [(int(stats.trace_until), int(stats.traced)) for stats in workers]


def is_off(comm: Communicator) -> bool:
    return all(until == 0 for until, _ in trace_words(comm))


def traced(comm: Communicator, *arguments: Any, kernel: str = "mixed") -> ServiceTrace:
    compiled = comm.compile(KERNELS, kernel)  # compiling may take longer than trace records are kept
    with tracer_of(comm) as tracer:
        compiled(1, 1, *arguments)
        comm.synchronize()
        comm.drain()
        tracer.fetch()
        return tracer.stop()


# -- records ---


def test_every_trigger_is_recorded_with_its_times() -> None:
    def body(comm: Communicator) -> None:
        channels = channels_of(comm)
        before = time.monotonic_ns()
        trace = traced(comm, channels, 30, 20, 10)
        after = time.monotonic_ns()
        assert trace.lost == 0
        assert trace.routes == {channels[0].id: (1 - comm.rank, channels[0].transport)}
        assert Counter(t.trigger.operation for t in trace.triggers) == {
            Operation.DATA: 30,
            Operation.SIGNAL: 20,
            Operation.FLUSH: 10,
        }
        assert {t.trigger.size for t in trace.triggers if t.trigger.operation is Operation.DATA} == {100}
        assert [t.ticket for t in trace.triggers] == list(range(60))
        moments = [moment for t in trace.triggers for moment in (t.seen_ns, t.issued_ns)]
        assert moments == sorted(moments)
        assert before < moments[0]
        for t in trace.triggers:
            assert t.completed_ns is not None
            assert t.issued_ns <= t.completed_ns < after
        barrier(comm)

    run_ranks(2, body)


def test_a_handlers_trigger_is_complete_when_it_has_returned() -> None:
    def body(comm: Communicator) -> None:
        channel = comm.handler_channel(lambda _: time.sleep(0.002))
        trace = traced(comm, channel, 5, kernel="custom")
        assert trace.routes == {channel.id: (None, "handler")}
        assert [t.trigger.size for t in trace.triggers] == list(range(5))
        for t in trace.triggers:
            assert t.completed_ns is not None
            assert t.completed_ns - t.issued_ns >= 2e6

    run_ranks(1, body)


def test_gets_are_recorded_and_counted_by_their_name() -> None:
    def body(comm: Communicator) -> None:
        channels = channels_of(comm)
        trace = traced(comm, channels, 7, kernel="gets")
        assert Counter(operation_name(t.trigger.operation) for t in trace.triggers) == {"get": 7, "flush": 1}
        (channel,) = look(comm).channels
        assert (channel.gets, channel.puts, channel.bytes) == (7, 0, 700)
        comm.barrier()

    run_ranks(2, body)


def test_a_collective_is_recorded_on_every_rank_and_worker() -> None:
    def body(comm: Communicator) -> None:
        x = on_device(comm, np.ones(5000, np.float32))
        comm.all_reduce(x, algorithm="proxy")  # connects
        comm.barrier()
        with tracer_of(comm) as tracer:
            channels = [channel.id for channel in look(comm).channels]
            before = {id: comm.proxy.counters(id) for id in channels}
            comm.all_reduce(x, algorithm="proxy")
            comm.synchronize()
            comm.drain()
            tracer.fetch()
            trace = tracer.stop()
        after = {id: comm.proxy.counters(id) for id in channels}
        sends = {id: after[id].signals - before[id].signals for id in channels}
        assert Counter(t.trigger.channel for t in trace.triggers) == {id: count for id, count in sends.items() if count}
        for id in channels:
            of_channel = [t.trigger for t in trace.triggers if t.trigger.channel == id]
            assert sum(trigger.size for trigger in of_channel) == after[id].bytes - before[id].bytes
            assert {trigger.operation for trigger in of_channel} <= {Operation.DATA | Operation.SIGNAL}
        assert {trace.routes[id][0] for id, count in sends.items() if count} == {0, 1, 2} - {comm.rank}
        assert {t.worker for t in trace.triggers} == {0, 1}
        assert {(t.ring, t.ticket) for t in trace.triggers} == {(None, None)}, "no kernel pushed them"
        (schedule,) = {t.schedule for t in trace.triggers}
        assert schedule is not None
        for joins in (True, False):
            waits = [wait for wait in trace.waits if wait.joins == joins]
            assert {(trace.routes[wait.channel][0], wait.schedule) for wait in waits} == {
                (peer, schedule) for peer in range(3) if peer != comm.rank
            }
        for t in trace.triggers:
            assert t.completed_ns is not None
            assert t.seen_ns <= t.issued_ns <= t.completed_ns
        assert (on_host(x) == 9).all()
        comm.barrier()

    run_ranks(3, body, fifos=2, proxy_threads=2)


def test_nothing_is_recorded_while_nobody_asks() -> None:
    def body(comm: Communicator) -> None:
        channels = channels_of(comm)
        traced(comm, channels, 5, 5, 5)
        ((_, publication),) = publications.find(comm.job, {comm.rank})
        wait_for_looks(publication)  # a pass over the rings that began during tracing records triggers until it ends
        before = trace_words(comm)
        assert before[0][1] > 15
        comm.compile(KERNELS, "mixed")(1, 1, channels, 5, 5, 5)
        comm.synchronize()
        comm.drain()
        assert trace_words(comm) == before
        barrier(comm)

    run_ranks(2, body)


def test_records_that_are_written_over_are_counted_as_lost(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        channels = channels_of(comm)
        count = lib.PROXYCCL_TRACE_RECORDS + 5000
        trace = traced(comm, channels, count, kernel="empty_puts")
        assert 0 < len(trace.triggers) < lib.PROXYCCL_TRACE_RECORDS
        assert trace.lost > 5000
        assert len(trace.triggers) + trace.lost >= count  # `lost` also counts records that are not triggers
        assert trace.triggers[-1].trigger.operation is Operation.FLUSH
        assert trace.triggers[-1].completed_ns is not None
        file = tmp_path / f"{comm.rank}.json"
        write_trace(file, [trace])
        assert json.loads(file.read_text())["otherData"]["lost_records"] == trace.lost
        barrier(comm)

    run_ranks(2, body)


def test_only_one_observer_traces_a_service() -> None:
    def body(comm: Communicator) -> None:
        comm.handler_channel(print)
        with tracer_of(comm), pytest.raises(ResourceError, match="being traced by another"):
            tracer_of(comm)
        with tracer_of(comm):
            pass
        assert is_off(comm)

    run_ranks(1, body)


# -- reading records ---

SEEN, ISSUED, COMPLETED = lib.PROXYCCL_MARK_SEEN, lib.PROXYCCL_MARK_ISSUED, lib.PROXYCCL_MARK_COMPLETED
SCHEDULE = lib.PROXYCCL_MARK_SCHEDULE


def mark(kind: int, now: int, number: int = 0) -> list[int]:
    return [now, 1 << 63 | kind << lib.PROXYCCL_MARK_SHIFT | number]


def put(channel: int = 0) -> list[int]:
    return list(Trigger(Operation.DATA, channel, 8).encode())


def test_triggers_that_share_a_look_at_the_clock_divide_its_time() -> None:
    decoder = TraceDecoder(0, {0: 0})
    decoder.feed([mark(SEEN, 1000, 2 << 48 | 7), put(), put(), mark(ISSUED, 1100), put(), mark(ISSUED, 1500)])
    assert [(t.ring, t.ticket, t.seen_ns, t.issued_ns) for t in decoder.triggers] == [
        (2, 7, 1000, 1050),
        (2, 8, 1050, 1100),
        (2, 9, 1100, 1500),
    ]


def step(kind: int, now: int, number: int) -> list[int]:
    return mark(lib.PROXYCCL_MARK_STEP, now, kind << lib.PROXYCCL_TRACED_STEP_SHIFT | number)


def test_sends_of_schedules_have_a_schedule_in_place_of_a_ticket() -> None:
    """A send is complete when the worker records a completion for its channel, whichever connection copied the data."""
    decoder = TraceDecoder(0, {0: 0, 1: 1})
    decoder.feed([mark(SEEN, 10, 7), put(), mark(ISSUED, 20), mark(SCHEDULE, 30, 5), put(1), mark(ISSUED, 40)])
    decoder.feed(
        [mark(SCHEDULE, 41, 5), put(1), mark(ISSUED, 42), mark(COMPLETED, 50, 0), mark(COMPLETED, 51, 1 << 32)]
    )
    decoder.feed([step(lib.PROXYCCL_TRACED_SENT, 55, 1), mark(SEEN, 60, 8), put(), mark(ISSUED, 70)])
    assert [(t.ring, t.ticket, t.schedule, t.seen_ns, t.issued_ns, t.completed_ns) for t in decoder.triggers] == [
        (0, 7, None, 10, 20, 50),
        (None, None, 5, 30, 40, 55),
        (None, None, 5, 41, 42, None),
        (0, 8, None, 60, 70, None),
    ]


def test_a_schedules_waits_last_from_its_beginning(tmp_path: Path) -> None:
    decoder = TraceDecoder(0, {3: 0, 4: 0})
    # recording began during the schedule, so the schedule's beginning is missing
    decoder.feed([step(lib.PROXYCCL_TRACED_JOINED, 5, 3)])
    decoder.feed([step(lib.PROXYCCL_TRACED_BEGIN, 1000, 9), step(lib.PROXYCCL_TRACED_JOINED, 3000, 3)])
    decoder.feed([step(lib.PROXYCCL_TRACED_RECEIVED, 9000, 4)])
    assert decoder.waits == [TracedWait(9, 3, True, 1000, 3000), TracedWait(9, 4, False, 1000, 9000)]
    events = events_of(tmp_path, [], {3: (1, "copy"), 4: (1, "copy")}, decoder.waits)
    spans = [(event["name"], event["dur"], event["args"]["peer"]) for event in events if event.get("cat") == "wait"]
    assert spans == [("rank 1 to join", 2.0, 1), ("data of rank 1", 8.0, 1)]


def test_completion_is_that_of_a_connections_own_triggers() -> None:
    decoder = TraceDecoder(0, {0: 3, 1: 3, 2: 4})
    decoder.feed([mark(SEEN, 0, 0), put(0), put(1), put(2), mark(ISSUED, 3), mark(COMPLETED, 10, 3 << 32 | 1)])
    assert [t.completed_ns for t in decoder.triggers] == [10, None, None]
    decoder.feed([mark(COMPLETED, 11, 3 << 32), mark(COMPLETED, 12, 4 << 32)])
    assert [t.completed_ns for t in decoder.triggers] == [10, 11, 12]


def test_what_follows_a_gap_is_read_from_the_next_visit_on() -> None:
    decoder = TraceDecoder(0, {0: 0})
    decoder.feed([mark(SEEN, 0, 0), put(), mark(ISSUED, 1), put()])
    decoder.skip(100)
    decoder.feed([put(), mark(ISSUED, 5), mark(COMPLETED, 6, 1), mark(SEEN, 7, 500), put(), mark(ISSUED, 8)])
    decoder.feed([mark(COMPLETED, 9, 0)])
    assert [(t.ticket, t.completed_ns) for t in decoder.triggers] == [(0, None), (500, 9)]
    assert decoder.lost == 102


def test_what_is_kept_ends_with_a_look_at_the_clock() -> None:
    def end(allowance: Allowance, records: str) -> int | None:
        return allowance.end_of_kept(np.array([record == "M" for record in records]))

    allowance = Allowance(5)
    assert end(allowance, "MTTMTM") is None
    assert end(allowance, "MTTMM") is None  # five triggers are allowed, so the records after the fifth are kept
    assert end(allowance, "MM") is None
    assert end(allowance, "MMTM") == 2
    assert end(Allowance(2), "MTTTTMTM") == 6


def test_records_come_whole_while_the_ring_is_written_over() -> None:
    stats = ffi.new("ProxycclWorkerStats *")
    size, at, lost = lib.PROXYCCL_TRACE_RECORDS, ffi.new("uint64_t *"), ffi.new("uint64_t *")
    records = ffi.new("ProxycclTraceRecord[]", size)
    stats.traced = 10
    assert lib.proxyccl_trace_read(stats, at, records, size, lost) == 10
    stats.traced = 10 + 2 * size
    kept = size - lib.PROXYCCL_TRACE_UNPUBLISHED
    assert lib.proxyccl_trace_read(stats, at, records, 100, lost) == 100
    assert (at[0], lost[0]) == (10 + 2 * size - kept + 100, 2 * size - kept)


# -- the trace file ---


looks = itertools.count()


def a_trigger(channel: int, seen: int, issued: int, completed: int | None) -> TracedTrigger:
    return TracedTrigger(0, 0, 0, None, Trigger(Operation.DATA, channel, 8), next(looks), seen, issued, completed)


def events_of(
    tmp_path: Path,
    triggers: list[TracedTrigger],
    ways: dict[int, tuple[int | None, str]],
    waits: Sequence[TracedWait] = (),
    of: dict[int, str] | None = None,
) -> list[Any]:
    whose = Description(0, 1, "job", "program", of or {})
    who = Publication.of_this_process(whose, "host", workers=1, observed="", counters="", rings=())
    write_trace(tmp_path / "trace", [ServiceTrace(who, triggers, ways, 0, 0, list(waits))])
    events: list[Any] = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    return events


def test_a_channel_to_another_pid_namespace_names_its_path(tmp_path: Path) -> None:
    ways = {1: "network", 2: "directory", 3: "daemon"}
    events = events_of(
        tmp_path, [a_trigger(c, 0, 1, 2) for c in range(4)], {c: (c + 1, "copy") for c in range(4)}, of=ways
    )
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names[1:] == [
        "channel 0 → rank 1 (copy, memory by descriptors over an abstract socket)",
        "channel 1 → rank 2 (copy, memory by descriptors over a socket file)",
        "channel 2 → rank 3 (copy, memory by descriptors over the node daemon)",
        "channel 3 → rank 4 (copy)",
    ]


def test_channels_with_many_tracks_share_none(tmp_path: Path) -> None:
    triggers = [a_trigger(channel, i, i + 1, 5000) for i in range(1001) for channel in (0, 1)]
    events = events_of(tmp_path, triggers, {0: (1, "copy"), 1: (2, "copy")})
    names: dict[int, str] = {}
    for event in events:
        if event["name"] == "thread_name":
            assert event["tid"] not in names
            names[event["tid"]] = event["args"]["name"]
    assert len(names) == 1 + 2 * 1001
    for event in events:
        if event.get("cat") == "transfer":
            assert names[event["tid"]].startswith(f"channel {event['args']['channel']} ")


def test_like_triggers_of_one_clock_reading_are_one_span(tmp_path: Path) -> None:
    decoder = TraceDecoder(0, {0: 0, 1: 1})
    decoder.feed([mark(SEEN, 0), *[put()] * 200, put(1), mark(ISSUED, 20100), *[put()] * 2, mark(ISSUED, 22000)])
    decoder.feed([mark(COMPLETED, 30000, 0 << 32), mark(COMPLETED, 30000, 1 << 32)])
    spans = [e for e in events_of(tmp_path, decoder.triggers, {0: (1, "copy"), 1: (2, "copy")}) if e["ph"] == "X"]
    shown = {(e["cat"], e["name"], e["args"]["ticket"], e["args"]["count"], e["ts"], e["dur"]) for e in spans}
    assert shown == {
        ("issue", "data 8 B x200", 0, 200, 0.0, 20.0),
        ("transfer", "data 8 B x200", 0, 200, 20.0, 10.0),
        ("issue", "data 8 B", 200, 1, 20.0, 0.1),
        ("transfer", "data 8 B", 200, 1, 20.1, 9.9),
        ("issue", "data 8 B x2", 201, 2, 20.1, 1.9),
        ("transfer", "data 8 B x2", 201, 2, 22.0, 8.0),
    }


def test_events_on_one_track_never_overlap(tmp_path: Path) -> None:
    times = ((0, 1, 10), (1, 2, 5), (2, 3, 12), (3, 4, None), (20, 21, 22))
    events = events_of(tmp_path, [a_trigger(5, *each) for each in times], {5: (3, "copy")})
    spans = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(spans) == 1 + 4
    for of_track in spans.values():
        ordered = sorted(of_track)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ordered))
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"proxy thread 0", "channel 5 → rank 3 (copy)", "channel 5 → rank 3 (copy) ·2"} <= names
    (open_end,) = (e for e in events if e["ph"] == "X" and e["cat"] == "transfer" and not e["args"]["completed"])
    assert open_end["ts"] + open_end["dur"] == pytest.approx(0.022)


def test_the_command_writes_what_chrome_reads(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"

    def body(comm: Communicator) -> None:
        channels = channels_of(comm)
        if comm.rank == 0:
            tracer = command("trace", "-o", str(file), "-t", "60", "--job", comm.job)
            start_tracing[0] = tracer
        wait_for_a_tracer(comm)
        comm.compile(KERNELS, "mixed")(1, 1, channels, 30, 20, 10)
        comm.synchronize()
        comm.drain()
        barrier(comm)
        if comm.rank == 0:
            start_tracing[0].send_signal(signal.SIGINT)
            text = output_of(start_tracing[0])
            assert "120 triggers of 2 proxies, 0 were not seen to complete" in text
        barrier(comm)
        assert is_off(comm)

    start_tracing: dict[int, Any] = {}
    run_ranks(2, body)
    whole = json.loads(file.read_text())
    assert whole["otherData"]["lost_records"] == 0
    events = whole["traceEvents"]
    for pid in (1, 2):
        of_rank = [event for event in events if event["pid"] == pid]
        issues, transfers = (
            {e["args"]["ticket"]: e for e in of_rank if e["ph"] == "X" and e["cat"] == cat}
            for cat in ("issue", "transfer")
        )
        for spans in (issues, transfers):
            assert sorted(t + i for t, e in spans.items() for i in range(e["args"]["count"])) == list(range(60))
        assert len([event for event in of_rank if event["ph"] == "i"]) == len(transfers)
        for ticket, issue in issues.items():
            assert issue["ts"] + issue["dur"] == pytest.approx(transfers[ticket]["ts"])
            assert issue["name"] == transfers[ticket]["name"]
    assert {e["name"].partition(" x")[0] for e in events if e["ph"] == "X"} == {"data 100 B", "signal", "flush"}


def test_what_comes_after_the_most_is_left_out_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"

    def body(comm: Communicator) -> None:
        channels = channels_of(comm)
        if comm.rank == 0:
            tracer = command("trace", "-o", str(file), "-t", "60", "--job", comm.job, "--most", "300")
            wait_for_a_tracer(comm)
            comm.compile(KERNELS, "mixed")(1, 1, channels, 2000, 0, 1)
            comm.synchronize()
            comm.drain()
            tracer.send_signal(signal.SIGTERM)
            out, error = tracer.communicate(timeout=TIMEOUT)
            assert tracer.returncode == 0, error
            kept = int(re.findall(r"(\d+) triggers of 2 proxies", out)[0])
            assert 300 <= kept < 300 + 256
            assert f"{2001 - kept} later triggers are left out; --most keeps more" in error
            whole = json.loads(file.read_text())
            assert whole["otherData"]["left_out_triggers"] == 2001 - kept
            counts = [e["args"]["count"] for e in whole["traceEvents"] if e.get("cat") == "issue"]
            assert sum(counts) == kept
        comm.barrier()

    run_ranks(2, body)


def test_ranks_can_be_chosen(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        channels_of(comm)
        if comm.rank == 0:
            text = output_of(command("trace", "-o", str(tmp_path / "t"), "-t", "0.05", "--ranks", "1"))
            assert "0 triggers of 1 proxies" in text
            missing = command("trace", "-o", str(tmp_path / "t"), "-t", "0.05", "--ranks", "5,7")
            _, error = missing.communicate(timeout=120)
            assert missing.returncode == 1
            assert "this user runs no proxy of rank 5, 7 on this machine" in error
        comm.barrier()

    run_ranks(2, body)


def test_a_killed_tracer_leaves_the_proxy_untraced(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        channels = channels_of(comm)
        kernel = comm.compile(KERNELS, "mixed")
        if comm.rank == 0:
            tracer = command("trace", "-o", str(tmp_path / "t"), "-t", "60", "--ranks", "0")
            wait_for_a_tracer(comm)
            os.kill(tracer.pid, signal.SIGKILL)
            tracer.communicate()
        deadline = time.monotonic() + TIMEOUT
        rounds = 0
        while not (is_off(comm) and rounds) and time.monotonic() < deadline:
            kernel(1, 1, channels, 5, 0, 1)
            comm.synchronize()
            rounds += 1
        assert is_off(comm)
        assert channels[0].counters.puts == 5 * rounds
        assert len(traced(comm, channels, 5, 0, 1).triggers) == 6
        comm.barrier()

    run_ranks(2, body)
