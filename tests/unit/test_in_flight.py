"""A launch's arguments are kept until the stream has executed the launch."""

from __future__ import annotations

import gc
import threading
import weakref

from proxyccl.device.runtimes import open_runtime


class Argument:
    """A weakly referenced argument of a launch."""


def test_dropped_streams_and_ended_threads_keep_few_arguments() -> None:
    """Arguments are released although no further launch follows on a dropped stream or from an ended thread."""
    runtime = open_runtime("host")
    shared, kept = runtime.create_stream(), []

    def launch(stream: object) -> None:
        argument = Argument()
        kept.append(weakref.ref(argument))
        runtime.in_flight.add(argument, stream, runtime.stream_handle(stream))

    for _ in range(100):
        thread = threading.Thread(target=launch, args=(shared,))
        thread.start()
        thread.join()
    streams = weakref.WeakSet()
    for _ in range(100):
        streams.add(stream := runtime.create_stream())
        launch(stream)
        stream.synchronize()
        del stream
    gc.collect()
    assert sum(each() is not None for each in kept) <= 32
    assert len(streams) <= 16
