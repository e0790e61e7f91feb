"""A communicator's launches run one after another, even if different threads make them on their default streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from proxyccl import Communicator
from proxyccl.device.in_flight import identify_stream, thread_number
from support.devices import ON_HOST
from support.running import TIMEOUT, run_ranks
from support.stream_words import wait_value, write_value

pytestmark = [
    pytest.mark.hip,
    pytest.mark.skipif(ON_HOST, reason="the host runtime has no streams that belong to threads"),
]


def in_another_thread(action: Callable[[], object]) -> None:
    """Runs the action in a thread that stays alive, because the thread's stream ends with the thread."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    for error in errors:
        raise error


def test_the_same_handle_names_another_stream_in_each_thread() -> None:
    def body(comm: Communicator) -> None:
        runtime, found = comm.runtime, []
        handle = runtime.stream_handle(None)
        in_another_thread(lambda: found.append(identify_stream(runtime, handle)))
        assert found[0] != identify_stream(runtime, handle) == (handle, thread_number())

    run_ranks(1, body)


@pytest.mark.parametrize("given", [None, "number"])
def test_a_launch_without_a_stream_follows_that_of_another_thread(given: str | None) -> None:
    """A launch of the main thread must run after an earlier launch of thread A, even if A's launch waits for a gate."""

    def body(comm: Communicator) -> None:
        runtime, launches = comm.runtime, comm.group.launches
        words = comm.empty(3, "int64").fill(0)
        gate, source, target = (words.ptr + 8 * i for i in range(3))
        stream = None if given is None else runtime.stream_handle(None)

        def first(handle: int) -> None:
            wait_value(runtime, gate, 1, handle)
            write_value(runtime, source, 7, handle)

        held, queued = threading.Event(), threading.Event()

        def thread_a() -> None:
            launches.launch(first, stream, ())
            held.set()
            queued.wait(TIMEOUT)  # the thread must not end, because its stream would end with it
            runtime.synchronize()

        a = threading.Thread(target=thread_a)
        a.start()
        try:
            assert held.wait(TIMEOUT)
            launches.launch(lambda handle: runtime.copy(target, source, 8, handle), stream, ())
            end = runtime.create_event()
            end.record(runtime.stream_handle(None))
            deadline = time.monotonic() + 0.3
            while not end.query() and time.monotonic() < deadline:
                time.sleep(0.001)
        finally:
            opener = runtime.create_stream()
            write_value(runtime, gate, 1, opener)
            opener.synchronize()
            queued.set()
            a.join(TIMEOUT)
        end.synchronize()
        assert words.numpy().tolist() == [1, 7, 7]

    run_ranks(1, body)


def test_what_waits_for_all_launches_waits_for_another_threads() -> None:
    """A thread that frees memory or loads a module waits for all launches, even if another thread launched last."""

    def body(comm: Communicator) -> None:
        runtime, launches = comm.runtime, comm.group.launches
        words = comm.empty(2, "int64").fill(0)
        held, done = threading.Event(), threading.Event()

        def thread_a() -> None:
            launches.launch(lambda handle: wait_value(runtime, words.ptr, 1, handle), None, ())
            held.set()
            done.wait(TIMEOUT)

        waited = threading.Event()

        def wait() -> None:
            runtime.in_flight.wait()
            waited.set()

        a, b = threading.Thread(target=thread_a), threading.Thread(target=wait)
        a.start()
        try:
            assert held.wait(TIMEOUT)
            b.start()
            early = waited.wait(0.3)
        finally:
            opener = runtime.create_stream()
            write_value(runtime, words.ptr, 1, opener)
            opener.synchronize()
            assert waited.wait(TIMEOUT)
            done.set()
            a.join(TIMEOUT)
            b.join(TIMEOUT)
        assert not early

    run_ranks(1, body)
