"""Runs a process group's calls on CPU tensors, and the callbacks of its futures, in threads."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from proxyccl.device.process.threads import Thread
from proxyccl.torch.endpoints import LINGER_SECONDS, Endpoints

Task = Callable[[], None]
Flow = tuple[int, bool]
"""One direction of transfers: a peer, and whether this rank sends to that peer."""
_Key = tuple[torch.device, Flow | int | None]
_LOOK_SECONDS = 0.05
"""The interval at which `GroupThreads.await_calls` checks whether ranks have left."""


class Executor:
    """A queue of tasks and the thread that runs them, which starts with the first task and first calls `begin`."""

    def __init__(self, name: str, begin: Task = lambda: None) -> None:
        self._name = name
        self._begin = begin
        self.ended = 0  # the number of tasks that the thread has completed
        self._changed = threading.Condition()
        self._tasks: deque[Task] = deque()
        self._runner: int | None = None  # the thread that runs a task
        self._thread: Thread | None = None
        self._ended = False

    @property
    def is_idle(self) -> bool:
        return not self._tasks and self._runner is None

    def run_here(self, task: Task, *, after_others: bool = False) -> bool:
        """Runs a task in the caller's thread if no other task is queued or running; if `after_others` is set, first
        waits for the other tasks. Returns whether the task ran.
        """
        with self._changed:
            if after_others:
                self._changed.wait_for(lambda: self.is_idle)
            elif not self.is_idle:
                return False
            self._runner = threading.get_ident()
        try:
            task()
        finally:
            with self._changed:
                self._runner = None
                self._changed.notify_all()
        return True

    def submit(self, task: Task) -> None:
        """Queues a task, which must not raise. After `end`, runs the task in the caller's thread instead. If the thread
        can't be started, raises ResourceError and does not queue the task.
        """
        with self._changed:
            ended = self._ended
            if not ended:
                self.start()  # starts the thread first, so that no task stays queued if the start fails
                self._tasks.append(task)
                self._changed.notify_all()
        if ended:
            task()

    def start(self) -> None:
        """Starts the thread now, so that `submit` can't fail. Raises ResourceError."""
        with self._changed:
            if self._thread is None and not self._ended:
                thread = Thread(self._run, self._name)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        self._begin()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._runner is None if self._tasks else self._ended)
                if not self._tasks:
                    return
                self._runner = threading.get_ident()  # comes first, because `is_idle` takes no lock
                task = self._tasks.popleft()
            try:
                task()
            finally:
                del task  # releases the task's tensors before the next task arrives
                with self._changed:
                    self.ended += 1
                    self._runner = None
                    self._changed.notify_all()

    @property
    def runs_here(self) -> bool:
        return self._runner == threading.get_ident()

    def wait_until_idle(self, seconds: float) -> bool:
        """Waits for all tasks. Returns whether they ended within `seconds`. A task must not call this function."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_idle, min(seconds, threading.TIMEOUT_MAX))

    def end(self) -> None:
        """Makes the thread end after the queued tasks. Does not wait for the thread."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class _Callbacks(threading.local):
    """The nesting depth of the callbacks that a thread runs: 0 if it runs no callbacks."""

    depth = 0


_callbacks = _Callbacks()


class GroupThreads:
    """One rank's threads of a process group. For each device, each flow (the transfers to or from one peer) has a
    thread, each nesting depth of callbacks has a thread, and all other calls share a thread.
    """

    def __init__(self, rank: int, endpoints: Endpoints) -> None:
        self._rank, self._endpoints = rank, endpoints
        self._lock = threading.Lock()
        self._made: dict[_Key, Executor] = {}

    def callbacks_of(self, device: torch.device) -> Executor:
        """Returns the thread that runs the callbacks of calls that the current thread makes.

        A callback may make calls, add callbacks to these calls and wait for them. So the callbacks of each nesting
        depth run in a separate thread, and all ranks run their callbacks in the same order.
        """
        return self.of(device, _callbacks.depth + 1)

    def of(self, device: torch.device, of: Flow | int | None) -> Executor:
        """Returns the thread of a flow or of a callbacks' nesting depth; if `of` is None, of all other calls."""
        with self._lock:
            if (device, of) not in self._made:
                if isinstance(of, int):
                    suffix = f"-callbacks-{of}"
                else:
                    suffix = f"-{of[0]}-{'send' if of[1] else 'recv'}" if of else ""
                begin = functools.partial(_begin_thread, device, of)
                self._made[device, of] = Executor(f"proxyccl-torch-{self._rank}{suffix}", begin)
            return self._made[device, of]

    def find(self, device: torch.device, of: Flow | int | None) -> Executor | None:
        """Returns the thread that `of` would return, or None if that thread was not made yet."""
        return self._made.get((device, of))

    def await_calls(self, deadline: float, *, leaves: bool = False) -> None:
        """Waits until `deadline` for the calls that are queued in the group's threads. If a call needs a rank that has
        left, aborts the call after LINGER_SECONDS without progress. `leaves` is set if this rank makes no further
        calls. Two such ranks would wait for each other's sends, so each announces when it waits only for receives.
        """
        announced = False
        in_vain: dict[Any, tuple[int, float]] = {}  # by thread whose peer has left: (ended calls, deadline)
        while self._endpoints.failed is None:
            busy = {key: executor for key, executor in self._all.items() if not executor.is_idle}
            now = time.monotonic()
            if not busy or now > deadline or any(executor.runs_here for executor in busy.values()):
                return
            if leaves and not announced and all(isinstance(of, tuple) and not of[1] for _, of in busy):
                self._endpoints.announce_no_sends()
                announced = True
            for key, executor in busy.items():
                _, of = key
                peer = of[0] if isinstance(of, tuple) else None
                if isinstance(of, int) or peer == self._rank:
                    continue
                sends_nothing = announced and peer is not None and self._endpoints.sends_nothing(peer)
                if not sends_nothing and not self._endpoints.has_left(peer):
                    continue
                ended, until = in_vain.get(key, (-1, 0.0))
                if ended != executor.ended:  # the peer made these calls before it left
                    in_vain[key] = executor.ended, now + LINGER_SECONDS
                elif now > until:
                    self._endpoints.end_calls(peer, "it was shut down, and a call waited for a rank that has left")
                    return
            next(iter(busy.values())).wait_until_idle(min(deadline - now, _LOOK_SECONDS))

    def await_meetings(self, deadline: float) -> None:
        """Waits until `deadline` for the threads that make communicators and then for callbacks. Does not wait for the
        calls of communicators that exist.
        """
        for (device, of), executor in sorted(self._all.items(), key=lambda each: isinstance(each[0][1], int)):
            if isinstance(of, int) or not self._endpoints.has_met(device, of and of[0]):
                executor.wait_until_idle(deadline - time.monotonic())

    @property
    def _all(self) -> dict[_Key, Executor]:
        with self._lock:
            return dict(self._made)

    def end(self) -> None:
        """Ends the threads. Waits up to LINGER_SECONDS until failed calls no longer use their tensors' memory."""
        until = time.monotonic() + LINGER_SECONDS
        for (_, of), executor in self._all.items():
            executor.end()
            if not isinstance(of, int) and not executor.runs_here:
                executor.wait_until_idle(until - time.monotonic())


def _begin_thread(device: torch.device, of: Flow | int | None) -> None:
    if device.type != "cpu":  # otherwise torch would make a context on device 0
        torch.cuda.set_device(device)
    if isinstance(of, int):
        _callbacks.depth = of
