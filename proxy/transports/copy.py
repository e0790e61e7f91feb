"""The transport `copy`, which moves data within a host by the GPU's copy engines (engine/copy_transport.h)."""

from __future__ import annotations

import contextlib
from typing import Any

from proxyccl.device.runtime import Event, Runtime, Stream
from proxyccl.proxy import _engine
from proxyccl.proxy.transports.transport import EngineConnection, EngineRuntime, Transport, create

ffi = _engine.ffi


def make_copy_options(runtime: Runtime, undo: contextlib.ExitStack) -> tuple[Any, Stream, Event]:
    """Returns a ProxycclCopyOptions without the table for puts of values, and its new stream and event, which `undo`
    closes.
    """
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
        pointer = create(engine, TRANSPORT.name, native_options)
        undo.pop_all()
    return EngineConnection(pointer, (stream, event))


TRANSPORT = Transport("copy", _connect)
