"""One thread of the engine runs the workers of many services, which share nothing but the thread's time."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import pytest
from msgspec.structs import replace

from proxyccl import ArgumentError, Communicator, Operation, ProxyService, Trigger
from proxyccl.channels.segment.control import ControlSegment, create_segment
from proxyccl.channels.segment.error_record import ErrorRecord
from proxyccl.device.host import HostRuntime
from proxyccl.device.runtime import DriverCalls
from proxyccl.device.sleepers import Sleepers
from proxyccl.device.stream_operations import StreamOperations, WriteValue
from proxyccl.proxy import workers
from proxyccl.proxy._engine import lib
from proxyccl.proxy.interface import ProxyFailure
from proxyccl.proxy.observe.publications import Description
from proxyccl.proxy.observe.reader import Observer, WorkerView
from proxyccl.proxy.thread import IdlePolicy, ProxyThread
from support.bare_loops import produce
from support.running import TIMEOUT, run_ranks

pytestmark = pytest.mark.own_proxy(reason="its own services")

HALF = 4096
PUT = Operation.DATA
SIGNAL = Operation.SIGNAL


class Client:
    """A service with one channel to its own memory."""

    def __init__(
        self,
        thread: ProxyThread,
        runtime: HostRuntime | None = None,
        idle: IdlePolicy | None = None,
        fifos: int = 1,
    ) -> None:
        self.runtime = runtime or HostRuntime()
        self.segment = create_segment(self.runtime, 0, TIMEOUT)
        self.failures: list[ProxyFailure] = []
        self.service = ProxyService(
            self.runtime,
            self.segment.host_pointer,
            self.segment.memory,
            shared_offset=ControlSegment.service_offset,
            fifos=fifos,
            fifo_size=64,
            shared_threads=[thread],
            idle=idle,
            on_failure=self.failures.append,
            description=Description(0, 1, "job", "program"),
        )
        assert self.service.publication is not None
        self._observer = Observer(self.service.publication)
        connection = self.service.connect_copy()
        self.channel = self.service.reserve_channel(connection)
        self.service.set_channel(self.channel, connection, self.segment.semaphore_host(self.channel))
        self.buffer = self.runtime.allocate(2 * HALF)
        self.memory = self.service.add_memory(self.buffer.ptr, self.buffer.nbytes)
        self.fifo = self.service.fifo_for(self.channel)
        self.pushed = 0

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.runtime.synchronize()  # operations queued on streams may still write to the buffer
        self._observer.close()
        assert self.service.close(TIMEOUT, drained=False)

    def push(self, operation: Operation, count: int, channel: int | None = None) -> int:
        """Pushes triggers, waiting for space in the ring until the time-out. Returns the number of pushed triggers."""
        where = self.channel if channel is None else channel
        words = Trigger(operation, where, 8, self.memory, 0, self.memory, HALF).encode()
        found = produce(self.fifo, self.pushed, words, count, TIMEOUT)
        self.pushed += found
        return found

    @property
    def worker(self) -> WorkerView:
        return self._observer.snapshot().workers[0]

    @property
    def taken(self) -> int:
        return int(ctypes.c_uint64.from_address(self.fifo.tail_host).value)

    @property
    def signalled(self) -> int:
        return int(ctypes.c_uint64.from_address(self.segment.semaphore_host(self.channel)).value)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.001)


@pytest.fixture
def thread() -> Iterator[ProxyThread]:
    made = ProxyThread("shared", IdlePolicy())
    yield made
    assert made.close(TIMEOUT)


def test_services_on_one_thread_get_on_at_the_same_time(thread: ProxyThread) -> None:
    with Client(thread) as first, Client(thread) as second, Client(thread) as third:
        clients = (first, second, third)
        pushers = [threading.Thread(target=client.push, args=(PUT | SIGNAL, 5000)) for client in clients]
        for pusher in pushers:
            pusher.start()
        for pusher in pushers:
            pusher.join()
        for client in clients:
            assert client.service.drain(TIMEOUT)
            assert (client.taken, client.signalled) == (5000, 5000)
            assert client.service.counters(client.channel).bytes == 8 * 5000


def test_a_worker_that_fails_leaves_the_others_running(thread: ProxyThread) -> None:
    with Client(thread) as bad, Client(thread) as good:
        bad.push(SIGNAL, 1, channel=77)
        until(lambda: bad.failures)
        assert bad.failures[0].channel == 77
        assert not bad.service.drain(TIMEOUT)  # drain() returns at once for a failed service
        assert good.push(SIGNAL, 1000) == 1000
        assert good.service.drain(TIMEOUT)
        assert good.signalled == 1000
        assert not good.failures


def test_an_aborted_worker_leaves_the_others_running(thread: ProxyThread) -> None:
    with Client(thread) as aborted, Client(thread) as good:
        aborted.segment.raise_abort(ErrorRecord(code=8, rank=0))
        until(lambda: not aborted.service.drain(0.01))
        assert good.push(SIGNAL, 100) == 100
        assert good.service.drain(TIMEOUT)


def test_nothing_is_taken_after_a_handler_that_ends_in_abort(thread: ProxyThread) -> None:
    """Triggers after the abort may name freed memory."""
    with Client(thread) as client:
        calls: list[Trigger] = []

        def handler(trigger: Trigger) -> None:
            calls.append(trigger)
            client.segment.raise_abort(ErrorRecord(code=8, rank=0))

        channel = client.service.add_handler(handler)
        client.push(SIGNAL, 3, channel)
        until(lambda: calls and not client.service.drain(0.01))
        assert len(calls) == 1


def test_a_ring_of_handlers_triggers_holds_up_neither_polls_nor_other_rings(thread: ProxyThread) -> None:
    with Client(thread, fifos=2) as client:
        signalled, polls = [], []

        def handler(_: Trigger) -> None:
            signalled.append(client.signalled)
            polls.append(client.worker.looks)
            if len(polls) == 1:
                client.push(SIGNAL, 1)

        channel = client.service.add_handler(handler)
        assert client.service.fifo_for(channel) is not client.fifo
        with client.service.paused(TIMEOUT):
            produce(client.service.fifo_for(channel), 0, Trigger(SIGNAL, channel).encode(), 3, TIMEOUT)
        assert client.service.drain(TIMEOUT)
        assert signalled == [0, 1, 1]
        assert polls[0] < polls[1] < polls[2]


def test_workers_come_and_go_while_another_is_busy(thread: ProxyThread) -> None:
    with Client(thread) as busy:
        stop = threading.Event()

        def push() -> None:
            while not stop.is_set():
                assert busy.push(SIGNAL, 50) == 50

        pusher = threading.Thread(target=push)
        pusher.start()
        for _ in range(50):
            with Client(thread) as guest:
                assert guest.push(SIGNAL, 10) == 10
                assert guest.service.drain(TIMEOUT)
                assert guest.signalled == 10
        stop.set()
        pusher.join()
        assert busy.service.drain(TIMEOUT)
        assert busy.signalled == busy.pushed


def test_close_drains_or_ends_at_once(
    thread: ProxyThread,
) -> None:
    client = Client(thread)
    client.push(SIGNAL, 60)
    assert client.service.close(TIMEOUT)
    assert client.signalled == 60

    with Client(thread) as endless:  # __exit__ must close the service although its ring is never empty
        stop = threading.Event()
        kept = endless.runtime.open_pinned(endless.fifo.pinned.handle)
        slots = endless.fifo.slots_host
        words = Trigger(SIGNAL, endless.channel).encode()
        for slot in range(64):
            for i, word in enumerate(words):
                ctypes.c_uint64.from_address(slots + 16 * slot + 8 * i).value = word

        def push() -> None:
            while not stop.is_set():
                for slot in range(64):
                    ctypes.c_uint64.from_address(slots + 16 * slot + 8).value ^= 1 << 63

        pusher = threading.Thread(target=push)
        pusher.start()
        until(lambda: endless.taken > 100)
        started = time.monotonic()
        assert endless.service.close(TIMEOUT, drained=False)
        assert time.monotonic() - started < TIMEOUT / 2
        stop.set()
        pusher.join()
        kept.close()


def test_a_service_may_be_closed_while_others_wait_for_its_workers(
    thread: ProxyThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that waits for a worker reads the worker's memory. If another thread closes the worker's service
    meanwhile, the memory must stay allocated until the first thread has returned.
    """
    freed: list[object] = []

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            return freed.append if name == "proxyccl_worker_destroy" else getattr(lib, name)

    monkeypatch.setattr(workers, "lib", Recorded())
    client = Client(thread)
    with client.service.paused(TIMEOUT):
        assert not client.service.drain(TIMEOUT, lambda: client.service.close(TIMEOUT, drained=False))
        assert client.service.close(TIMEOUT)
        assert not freed
    assert not freed


def test_each_workers_context_is_current_for_its_turn() -> None:
    current: list[int] = []
    copied: set[tuple[int, int]] = set()
    make_current = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t)(lambda context: current.append(context) or 0)

    class OfContext(HostRuntime):
        def __init__(self, context: int) -> None:
            super().__init__()
            pointers = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
            self._copy = ctypes.CFUNCTYPE(ctypes.c_int, *pointers)(lambda *_: copied.add((context, current[-1])) or 0)
            make, copy = (ctypes.cast(call, ctypes.c_void_p).value or 0 for call in (make_current, self._copy))
            self.calls = replace(self.calls, context=context, make_current=make, copy=copy)

    thread = ProxyThread("shared", IdlePolicy())
    with Client(thread, OfContext(0)) as zero, Client(thread, OfContext(7)) as seven:
        for client in (zero, zero, seven, zero, seven, seven):
            client.push(PUT, 3)
            assert client.service.drain(TIMEOUT)
    assert copied == {(0, 0), (7, 7)}
    assert thread.close(TIMEOUT)


Help = Callable[[bool], int]


@contextmanager
def helped_thread(idle: IdlePolicy) -> Iterator[tuple[ProxyThread, Help]]:
    """Yields a proxy thread and its helper: a function that runs one turn of the proxy's workers on the calling thread,
    as threads of the host runtime do. The helper's argument says whether the caller waits for the proxy.
    """
    helpers: dict[int, Callable[[int, int], int]] = {}
    helper = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    add = ctypes.CFUNCTYPE(None, helper, ctypes.c_void_p)(lambda call, argument: helpers.update({argument: call}))
    remove = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda argument: helpers.pop(argument) and None)
    added, removed = (ctypes.cast(call, ctypes.c_void_p).value or 0 for call in (add, remove))
    functions = DriverCalls(add_helper=added, remove_helper=removed)
    thread = ProxyThread("helped", idle, functions=functions)
    ((argument, call),) = helpers.items()
    yield thread, lambda waits: call(argument, waits)
    assert thread.close(TIMEOUT)
    assert not helpers


@pytest.mark.parametrize("waits", [True, False])
def test_helpers_give_the_workers_their_turns_and_handlers_stay_with_the_thread(waits: bool) -> None:
    with helped_thread(IdlePolicy()) as (thread, help_), Client(thread) as client:

        def helped() -> bool:
            client.push(PUT | SIGNAL, 1)
            return help_(waits) == 1

        until(helped)
        assert client.service.drain(TIMEOUT)
        assert (client.taken, client.signalled) == (client.pushed, client.pushed)

        ran_in: list[str] = []
        channel = client.service.add_handler(lambda _: ran_in.append(threading.current_thread().name))
        for count in range(1, 51):
            client.push(SIGNAL, 1, channel)
            until(lambda count=count: help_(waits) or len(ran_in) == count)
        assert client.service.drain(TIMEOUT)
        assert ran_in == ["helped"] * 50


def test_a_thread_that_is_helped_sleeps_whatever_it_would_yield() -> None:
    """A proxy thread whose workers another thread runs must sleep; yielding would take a core from that thread."""
    with helped_thread(IdlePolicy(yield_us=1e6 * TIMEOUT)) as (thread, help_), Client(thread) as client:
        until(lambda: client.worker.looks > 1000)
        assert client.worker.sleeps == 0
        until(lambda: help_(True) or client.worker.sleeps > 10)


def test_who_does_not_wait_and_has_pushed_nothing_leaves_the_workers_to_their_thread() -> None:
    with helped_thread(IdlePolicy(yield_us=1e6 * TIMEOUT)) as (thread, help_), Client(thread) as client:
        until(lambda: client.worker.looks > 1000)
        assert [help_(False) for _ in range(10000)] == [0] * 10000
        assert client.worker.sleeps == 0


def wait_for_sleep(client: Client) -> None:
    """Waits until the thread of a client's worker sleeps most of the time."""
    until(lambda: client.worker.sleeps > 0 and client.worker.idle_ns > 50e6)


def test_an_operation_that_rings_a_proxy_wakes_its_thread(thread: ProxyThread) -> None:
    with Client(thread) as client:
        wait_for_sleep(client)
        word = client.buffer.ptr
        silent = StreamOperations(client.runtime, [WriteValue(word, 1)])
        rings = StreamOperations(client.runtime, [WriteValue(word, 1)], sleepers=client.service.sleepers)
        for _ in range(100):
            silent()
        assert client.worker.wakes == 0

        def woken() -> bool:
            rings()
            return bool(client.worker.wakes)

        until(woken)


def test_a_kernel_that_is_given_a_channel_wakes_the_proxys_thread(thread: ProxyThread) -> None:
    class Channel:
        """A stand-in for a channel as a kernel's argument: its bytes, and the sleeping threads that a launch wakes."""

        def __init__(self, sleepers: Sleepers) -> None:
            self.device_handle, self.sleepers = b"1234", sleepers

    with Client(thread) as client:
        source = 'struct Four { char c[4]; }; extern "C" __global__ void nothing(Four, int) {}'
        kernel = client.runtime.compile(f'#include "proxyccl/proxyccl.h"\n{source}')["nothing"]
        wait_for_sleep(client)
        channel = Channel(client.service.sleepers)
        silent, prepared = kernel.prepare(1, 1, b"1234", 3), kernel.prepare(1, 1, channel, 3)
        for _ in range(100):
            silent()
        assert client.worker.wakes == 0
        for launch in (prepared, lambda: kernel(1, 1, channel, 3)):

            def woken(before: int = client.worker.wakes, launch: Callable[[], None] = launch) -> bool:
                launch()
                return client.worker.wakes > before

            until(woken)


def test_a_thread_is_as_awake_as_the_most_awake_of_its_workers(thread: ProxyThread) -> None:
    awake, asleep = IdlePolicy(1, 900, 2000), IdlePolicy(7, 30, 40)
    with Client(thread, idle=awake) as first:
        assert thread.idle == awake
        with Client(thread, idle=asleep) as second:
            assert thread.idle == IdlePolicy(7, 900, 40)
            for client in (first, second):
                assert client.worker.idle_times == (7, 900, 40)
        assert thread.idle == awake
        with Client(thread):
            assert thread.idle == IdlePolicy(5, 900, 1000)
    assert thread.idle == IdlePolicy()


def test_a_thread_runs_on_the_cores_that_are_named() -> None:
    core = max(os.sched_getaffinity(0))
    thread = ProxyThread("pinned", IdlePolicy(), cores=[core])
    assert os.sched_getaffinity(thread.native_id) == {core}
    assert thread.close(TIMEOUT)
    with pytest.raises(ArgumentError, match="cores"):
        ProxyThread("pinned", IdlePolicy(), cores=[1 << 20])


def test_a_communicators_proxy_runs_on_the_cores_that_are_named() -> None:
    core = max(os.sched_getaffinity(0))

    def body(comm: Communicator) -> None:
        _ = comm.proxy
        (proxy,) = (thread for thread in threading.enumerate() if thread.name == "proxyccl-0-proxy-0")
        until(lambda: os.sched_getaffinity(proxy.native_id or 0) == {core})
        time.sleep(0.05)
        assert os.sched_getaffinity(proxy.native_id or 0) == {core}

    run_ranks(1, body, proxy="thread", proxy_cores=str(core))
    with pytest.raises(ArgumentError, match="cores"):
        run_ranks(1, lambda comm: comm.proxy, proxy="thread", proxy_cores="some")
