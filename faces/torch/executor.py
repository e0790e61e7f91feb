"""Threads that run a process group's calls on CPU tensors and its futures' callbacks, in order, while the program
continues.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from proxyccl.device.process.threads import Thread

Task = Callable[[], None]


class Executor:
    """One queue of tasks. Its thread starts with the first task that must wait, and ends with the executor.

    Args:
        name: of the thread.
        begin: called by the thread first.

    Attributes:
        ended: the number of tasks that have ended in its thread.
    """

    def __init__(self, name: str, begin: Task = lambda: None) -> None:
        self._name = name
        self._begin = begin
        self.ended = 0
        self._changed = threading.Condition()
        self._tasks: deque[Task] = deque()
        self._runner: int | None = None  # the thread that runs a task
        self._thread: Thread | None = None
        self._ended = False

    @property
    def is_idle(self) -> bool:
        """Whether no task is queued or running."""
        return not self._tasks and self._runner is None

    def run_here(self, task: Task, *, after_others: bool = False) -> bool:
        """Runs a task in the caller's thread, if none is queued or running. Returns whether it did.

        Args:
            task: the task.
            after_others: whether to wait for queued and running tasks.
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
        """Queues a task, which must not raise. After the executor's end it runs in the caller's thread.

        Raises:
            ResourceError: the executor's thread can't be started; the task is not queued.
        """
        with self._changed:
            ended = self._ended
            if not ended:
                self.start()  # first, because a task must not remain queued if the thread can't be started
                self._tasks.append(task)
                self._changed.notify_all()
        if ended:
            task()

    def start(self) -> None:
        """Starts the thread now, so that `submit` can't fail.

        Raises:
            ResourceError: the thread can't be started.
        """
        with self._changed:
            if self._thread is None and not self._ended:
                thread = Thread(self._run, self._name)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        self._begin()
        while True:
            with self._changed:
                self._changed.wait_for(self._has_something_to_do)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
                self._runner = threading.get_ident()
            try:
                task()
            finally:
                del task  # releases its tensors before the next task arrives
                with self._changed:
                    self.ended += 1
                    self._runner = None
                    self._changed.notify_all()

    def _has_something_to_do(self) -> bool:
        return self._runner is None if self._tasks else self._ended

    @property
    def runs_here(self) -> bool:
        """Whether the caller is a task of the executor."""
        return self._runner == threading.get_ident()

    def wait_until_idle(self, seconds: float) -> bool:
        """Waits for queued and running tasks. Returns whether they ended in time. No task may call this."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_idle, min(seconds, threading.TIMEOUT_MAX))

    def end(self) -> None:
        """Ends the thread after the queued tasks. Does not wait."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
