"""Services as Prometheus metrics: the text, and a server of it on the loopback interface.

Exposition format 0.0.4: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.observe.bounded_server import BoundedServer
from proxyccl.proxy.observe.local_pages import LocalPages
from proxyccl.proxy.observe.publications import find
from proxyccl.proxy.observe.reader import ChannelView, ConnectionView, Observer, RingView, ServiceView, WorkerView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = dict[str, object]
V = TypeVar("V")

_THREAD = "its thread (ranks of a node daemon share threads)"
_WORKERS: tuple[tuple[str, str, str, Callable[[WorkerView], float]], ...] = (
    ("worker_looks_total", "counter", "Looks at rings and connections.", lambda w: w.looks),
    ("worker_seconds_total", "counter", "Age of the worker.", lambda w: w.age_ns / 1e9),
    ("worker_idle_seconds_total", "counter", f"Time that {_THREAD} was idle.", lambda w: w.idle_ns / 1e9),
    ("worker_sleeps_total", "counter", f"Sleeps of {_THREAD}.", lambda w: w.sleeps),
    ("worker_slept_seconds_total", "counter", f"Time that {_THREAD} slept.", lambda w: w.slept_ns / 1e9),
    ("worker_wakes_total", "counter", f"Sleeps of {_THREAD} that a launch ended.", lambda w: w.wakes),
    (
        "worker_cpu_seconds_total",
        "counter",
        f"CPU time of {_THREAD}.",
        lambda w: math.nan if w.cpu_ns is None else w.cpu_ns / 1e9,
    ),
)
_RINGS: tuple[tuple[str, str, str, Callable[[RingView], float]], ...] = (
    ("ring_triggers_total", "counter", "Triggers taken out of the ring.", lambda r: r.taken),
    ("ring_full_slots", "gauge", "Slots that hold a trigger.", lambda r: r.full),
    ("ring_slots", "gauge", "Slots.", lambda r: r.size),
)
_CONNECTIONS: tuple[tuple[str, str, str, Callable[[ConnectionView], float]], ...] = (
    ("connection_triggers_completed_total", "counter", "Triggers and sends complete.", lambda c: c.completed),
    ("connection_outstanding_triggers", "gauge", "Triggers and sends not yet complete.", lambda c: c.outstanding),
    ("connection_errors_total", "counter", "Failures.", lambda c: c.errors),
)
_CHANNELS: tuple[tuple[str, str, str, Callable[[ChannelView], float]], ...] = (
    ("channel_triggers_total", "counter", "Triggers acted on.", lambda c: c.triggers),
    ("channel_puts_total", "counter", "Triggers and sends of schedules that put data.", lambda c: c.puts),
    ("channel_gets_total", "counter", "Triggers that got data.", lambda c: c.gets),
    ("channel_bytes_total", "counter", "Bytes put and got.", lambda c: c.bytes),
    ("channel_signals_total", "counter", "Triggers and sends of schedules that signalled.", lambda c: c.signals),
    ("channel_flushes_total", "counter", "Triggers that flushed.", lambda c: c.flushes),
    ("channel_errors_total", "counter", "Triggers that failed.", lambda c: c.errors),
)


def _escape(value: object) -> str:
    return str(value).replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _sample(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_escape(label)}"' for key, label in labels.items() if label is not None)
    return f"proxyccl_{name}{{{inside}}} {value:.17g}"


def _labels_of(view: ServiceView) -> Labels:
    who = view.publication  # "job" is a label of Prometheus's own
    return {"communicator": who.description.job, "rank": who.description.rank, "pid": who.pid}


def _labels_of_connection(view: ServiceView, each: ConnectionView) -> Labels:
    way = {"worker": each.worker, "connection": each.number, "peer": each.peer, "transport": each.transport}
    return {**_labels_of(view), **way}


def _labels_of_channel(view: ServiceView, channel: ChannelView) -> Labels:
    connection = view.connection_of(channel)
    way = {"peer": connection.peer, "transport": connection.transport} if connection else {"transport": "handler"}
    return {**_labels_of(view), "channel": channel.id, "ring": channel.ring, **way}


def _flush_samples(view: ServiceView, channel: ChannelView) -> Iterator[str]:
    labels = _labels_of_channel(view, channel)
    yield _sample("channel_flush_seconds_sum", labels, channel.flush_ns / 1e9)
    yield _sample("channel_flush_seconds_count", labels, channel.timed_flushes)


def metrics_text(views: Iterable[ServiceView]) -> str:
    """The services' metrics, for Prometheus to read."""
    seen = list(views)
    lines: list[str] = []

    def family(name: str, kind: str, text: str, samples: Iterator[str]) -> None:
        lines.extend((f"# HELP proxyccl_{name} {text}", f"# TYPE proxyccl_{name} {kind}", *samples))

    family("up", "gauge", "A proxy service that runs.", (_sample("up", _labels_of(view), 1) for view in seen))

    def families(metrics: Iterable[tuple[str, str, str, Callable[[V], float]]], parts: list[tuple[Labels, V]]) -> None:
        for name, kind, text, value in metrics:
            family(name, kind, text, (_sample(name, labels, value(part)) for labels, part in parts))

    families(_WORKERS, [({**_labels_of(v), "worker": each.number}, each) for v in seen for each in v.workers])
    families(_RINGS, [({**_labels_of(v), "ring": each.number}, each) for v in seen for each in v.rings])
    families(_CONNECTIONS, [(_labels_of_connection(v, each), each) for v in seen for each in v.connections])
    families(_CHANNELS, [(_labels_of_channel(v, each), each) for v in seen for each in v.channels])
    flushes = (sample for v in seen for each in v.channels for sample in _flush_samples(v, each))
    family("channel_flush_seconds", "summary", "From issue to completion of the flushes that were timed.", flushes)
    return "\n".join(lines) + "\n"


def snapshot_all() -> list[ServiceView]:
    """Snapshots of this user's services on this machine."""
    views = []
    for _, publication in find():
        with contextlib.suppress(ArgumentError), Observer(publication) as observer:  # it was closed meanwhile
            views.append(observer.snapshot())
    return views


@contextlib.contextmanager
def serve(port: int, snapshot: Callable[[], list[ServiceView]] = snapshot_all) -> Iterator[str]:
    """Serves the metrics to this machine only, as a context whose value says where: http://127.0.0.1:PORT/metrics.

    Args:
        port: 0 for any that is free.
        snapshot: returns the services, for each request.

    Raises:
        ArgumentError: the port is not from 0 to 65535.
        ResourceError: the port is in use, or not allowed.
    """

    class Handler(LocalPages):
        def do_GET(self) -> None:  # noqa: N802  the base class's name
            if self.path_asked != "/metrics":
                self.send_error(404, "the metrics are at /metrics")
                return
            try:
                body = metrics_text(snapshot()).encode()
            except ArgumentError as error:
                self.send_error(503, explain=str(error))
                return
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with BoundedServer("127.0.0.1", port, Handler, "proxyccl-metrics") as server:
        yield f"metrics at http://127.0.0.1:{server.port}/metrics"
