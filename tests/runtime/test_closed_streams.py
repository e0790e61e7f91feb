"""A wait for all work includes work that was queued on streams before they were closed, even if a new stream has the
same handle.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from proxyccl import Communicator
from support.devices import ON_HOST
from support.running import TIMEOUT, run_ranks
from support.stream_words import wait_value, write_value

pytestmark = [
    pytest.mark.hip,
    pytest.mark.skipif(ON_HOST, reason="a stream of the host runtime is closed when its work has ended"),
]


class Words:
    """Three words on the device: a gate for which queued work waits, and the source and target of a copy."""

    def __init__(self, comm: Communicator) -> None:
        self._runtime = comm.runtime
        self.array = comm.empty(3, "int64").fill(0)
        self.gate, self.source, self.target = (self.array.ptr + 8 * i for i in range(3))

    def write_after_gate(self, stream: Any) -> None:
        """Queues a store to `source` that waits for the gate."""
        wait_value(self._runtime, self.gate, 1, stream)
        write_value(self._runtime, self.source, 7, stream)

    def copy(self, stream: Any) -> None:
        """Queues a copy of `source` to `target`."""
        self._runtime.copy(self.target, self.source, 8, stream)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Opens the gate when the block ends."""
        try:
            yield
        finally:
            opener = self._runtime.create_stream()
            write_value(self._runtime, self.gate, 1, opener)
            opener.synchronize()


@pytest.mark.parametrize("by_number", [False, True], ids=["object", "number"])
def test_a_launch_follows_one_on_a_closed_stream(by_number: bool) -> None:
    def body(comm: Communicator) -> None:
        runtime, words, launches = comm.runtime, Words(comm), comm.group.launches
        first, later = runtime.create_stream(), runtime.create_stream()
        with words.opening():
            launches.launch(words.write_after_gate, first, ())
            first.close()
            launches.launch(words.copy, later.handle if by_number else later, ())
        later.synchronize()
        assert words.array.numpy().tolist() == [1, 7, 7]

    run_ranks(1, body)


def test_what_waits_for_all_launches_waits_for_those_on_closed_streams() -> None:
    """Freeing memory and loading a module wait for launches on closed streams."""

    def body(comm: Communicator) -> None:
        runtime, words, waited = comm.runtime, Words(comm), threading.Event()

        def wait() -> None:
            runtime.in_flight.wait()
            waited.set()

        thread = threading.Thread(target=wait)
        with words.opening():
            stream = runtime.create_stream()
            words.write_after_gate(stream)
            runtime.in_flight.add(words, stream, stream.handle)
            stream.close()
            thread.start()
            early = waited.wait(0.3)
        thread.join(TIMEOUT)
        assert waited.is_set()
        assert not early

    run_ranks(1, body)
