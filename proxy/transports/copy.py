"""The transport `copy`: copies by the runtime's copy engine, within a host (engine/copy_transport.h)."""

from __future__ import annotations

import contextlib
from typing import Any

from proxyccl.device.runtime import Event, Runtime, Stream
from proxyccl.proxy import _engine
from proxyccl.proxy.transports.engine_connection import EngineConnection, EngineRuntime, create
from proxyccl.proxy.transports.transport import Transport

ffi, lib = _engine.ffi, _engine.lib


def make_copy_options(runtime: Runtime, undo: contextlib.ExitStack) -> tuple[Any, Stream, Event]:
    """A ProxycclCopyOptions that puts no values, and the stream and the event in it, which `undo` closes."""
    stream = runtime.create_stream(for_proxy=True)
    undo.callback(stream.close)
    event = runtime.create_event()
    undo.callback(event.close)
    native_options = ffi.new("ProxycclCopyOptions *")
    native_options.stream = ffi.cast("void *", stream.handle)
    native_options.event = ffi.cast("void *", event.handle)
    return native_options, stream, event


def _connect(engine: EngineRuntime, options: None) -> EngineConnection:
    with contextlib.ExitStack() as undo:
        native_options, stream, event = make_copy_options(engine.runtime, undo)
        native_options.shorts = ffi.cast("char *", engine.shorts())
        bundle_events = _bundle_events(engine, undo)
        handles = ffi.new("void *[]", [ffi.cast("void *", each.handle) for each in bundle_events])
        native_options.bundle_events = handles if bundle_events else ffi.NULL
        pointer = create(engine, TRANSPORT.name, native_options)
        undo.pop_all()
    return EngineConnection(pointer, (stream, event, *bundle_events))


def _bundle_events(engine: EngineRuntime, undo: contextlib.ExitStack) -> list[Event]:
    """The events of a connection's bundles, which `undo` closes; none where the driver issues a copy a call."""
    events: list[Event] = []
    for _ in range(lib.PROXYCCL_MOST_BUNDLES if engine.functions.copy_many else 0):
        events.append(engine.runtime.create_event())
        undo.callback(events[-1].close)
    return events


def _status_text(status: int) -> str:
    return ""


TRANSPORT = Transport(name="copy", connect=_connect, status_text=_status_text, statuses=range(0))
