"""Formats the state of services as Prometheus metrics, and serves the text on the loopback interface.

Exposition format 0.0.4: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.observe.bounded_server import BoundedServer, LocalPages
from proxyccl.proxy.observe.rates import MemoryByRank
from proxyccl.proxy.observe.reader import ChannelView, ServiceView, snapshots

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = dict[str, object]
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})

_THREAD = "its thread (ranks of a node daemon share threads)"
_Family = tuple[str, str, Callable[[Any], float]]
_UP: _Family = ("up", "A proxy service that runs.", lambda v: 1)
_WORKERS: tuple[_Family, ...] = (
    ("worker_looks_total", "Looks at rings and connections.", lambda w: w.looks),
    ("worker_seconds_total", "Age of the worker.", lambda w: w.age_ns / 1e9),
    ("worker_idle_seconds_total", f"Time that {_THREAD} was idle.", lambda w: w.idle_ns / 1e9),
    ("worker_sleeps_total", f"Sleeps of {_THREAD}.", lambda w: w.sleeps),
    ("worker_slept_seconds_total", f"Time that {_THREAD} slept.", lambda w: w.slept_ns / 1e9),
    ("worker_wakes_total", f"Sleeps of {_THREAD} that a launch ended.", lambda w: w.wakes),
    (
        "worker_cpu_seconds_total",
        f"CPU time of {_THREAD}.",
        lambda w: math.nan if w.cpu_ns is None else w.cpu_ns / 1e9,
    ),
)
_RINGS: tuple[_Family, ...] = (
    ("ring_triggers_total", "Triggers taken out of the ring.", lambda r: r.taken),
    ("ring_full_slots", "Slots that hold a trigger.", lambda r: r.full),
    ("ring_slots", "Slots.", lambda r: r.size),
)
_MEMORY: tuple[_Family, ...] = (("device_memory_bytes", "Device memory of the communicator.", int),)
_CONNECTIONS: tuple[_Family, ...] = (
    ("connection_triggers_completed_total", "Triggers and sends complete.", lambda c: c.completed),
    ("connection_outstanding_triggers", "Triggers and sends not yet complete.", lambda c: c.outstanding),
    ("connection_errors_total", "Failures.", lambda c: c.errors),
    ("connection_rails_up", "Network adapters in use; 0 for a connection without rails.", lambda c: c.rails_up),
    ("connection_rail_failures_total", "Failures of network adapters or their links.", lambda c: c.rail_failures),
)
_CHANNELS: tuple[_Family, ...] = (
    ("channel_triggers_total", "Triggers acted on.", lambda c: c.triggers),
    ("channel_puts_total", "Triggers and sends of schedules that put data.", lambda c: c.puts),
    ("channel_gets_total", "Triggers that got data.", lambda c: c.gets),
    ("channel_bytes_total", "Bytes put and got.", lambda c: c.bytes),
    ("channel_signals_total", "Triggers and sends of schedules that signalled.", lambda c: c.signals),
    ("channel_flushes_total", "Triggers that flushed.", lambda c: c.flushes),
    ("channel_errors_total", "Triggers that failed.", lambda c: c.errors),
)


def _sample(name: str, labels: Labels, value: float) -> str:
    texts = ((key, str(label).translate(_ESCAPES)) for key, label in labels.items() if label is not None)
    inside = ",".join(f'{key}="{text}"' for key, text in texts)
    return f"proxyccl_{name}{{{inside}}} {value:.17g}"


def _labels_of(view: ServiceView) -> Labels:
    who = view.publication  # Prometheus itself uses the label "job"
    return {"communicator": who.description.job, "rank": who.description.rank, "pid": who.pid}


def _labels_of_channel(view: ServiceView, channel: ChannelView) -> Labels:
    connection = view.connection_of(channel)
    way = {"peer": connection.peer, "transport": connection.transport} if connection else {"transport": "handler"}
    return {"channel": channel.id, "ring": channel.ring, **way}


def metrics_text(views: Iterable[ServiceView], memory: MemoryByRank) -> str:
    """Returns the metrics of services, and of ranks' device memory, in Prometheus's text format."""
    seen = [(view, _labels_of(view)) for view in views]
    lines: list[str] = []

    def family(name: str, kind: str, text: str, samples: Iterable[str]) -> None:
        lines.extend((f"# HELP proxyccl_{name} {text}", f"# TYPE proxyccl_{name} {kind}", *samples))

    def families(of: Iterable[_Family], items: Iterable[tuple[Labels, object]]) -> None:
        found = list(items)
        for name, text, value_of in of:
            kind = "counter" if name.endswith("_total") else "gauge"
            family(name, kind, text, (_sample(name, labels, value_of(item)) for labels, item in found))

    families((_UP,), ((labels, view) for view, labels in seen))
    families(_WORKERS, (({**labels, "worker": w.number}, w) for view, labels in seen for w in view.workers))
    families(_RINGS, (({**labels, "ring": r.number}, r) for view, labels in seen for r in view.rings))
    ends = [
        ({"worker": c.worker, "connection": c.number, "peer": c.peer, "transport": c.transport}, c, labels)
        for view, labels in seen
        for c in view.connections
    ]
    families(_CONNECTIONS, (({**labels, **own}, c) for own, c, labels in ends))
    channels = [({**labels, **_labels_of_channel(view, c)}, c) for view, labels in seen for c in view.channels]
    families(_CHANNELS, channels)
    name, text = "channel_flush_seconds", "From issue to completion of the flushes that were timed."
    sums = [
        (_sample(f"{name}_sum", of, c.flush_ns / 1e9), _sample(f"{name}_count", of, c.timed_flushes))
        for of, c in channels
    ]
    family(name, "summary", text, itertools.chain.from_iterable(sums))
    purposes = [({"communicator": job, "rank": rank}, used) for (job, rank), used in memory.items()]
    used = (({**labels, "purpose": purpose}, nbytes) for labels, used in purposes for purpose, nbytes in used.items())
    families(_MEMORY, used)
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def serve(port: int, memory: Callable[[], MemoryByRank]) -> Iterator[str]:
    """A context manager that serves the metrics to this machine at `port`, or at any free port if `port` is 0. `memory`
    returns the ranks' device memory. The context's value is a text with the URL. Raises the errors of `BoundedServer`.
    """

    class Handler(LocalPages):
        def do_GET(self) -> None:  # noqa: N802  the base class defines the name
            if self.path_asked != "/metrics":
                self.send_error(404, "the metrics are at /metrics")
                return
            try:
                body = metrics_text(snapshots().values(), memory()).encode()
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
