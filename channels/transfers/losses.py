"""Runs a thread that unmaps the memory of lost peers, because the program may no longer call the agent that mapped
it."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable

from proxyccl.device.memory.descriptors import naming_exhaustion
from proxyccl.device.process import forks
from proxyccl.device.process.threads import Thread

_LOG = logging.getLogger("proxyccl.transfer")
_lock = threading.Lock()
forks.hold_while_forking(_lock)
_tasks: list[weakref.WeakMethod[Callable[[], object]]] = []
_event = -1


def event_of_losses(task: Callable[[], object]) -> int:
    """Returns an eventfd, which the engine signals when a link is lost. A thread then calls `task`, a method that this
    module references weakly. Raises ResourceError.
    """
    global _event  # noqa: PLW0603
    with _lock:
        if _event < 0:
            with naming_exhaustion("the watch for lost agents"):
                made = os.eventfd(0, os.EFD_CLOEXEC)
            try:
                Thread(_run, "proxyccl-losses", made).start()
            except BaseException:
                os.close(made)
                raise
            _event = made
        _tasks[:] = [each for each in _tasks if each() is not None]
        _tasks.append(weakref.WeakMethod(task))
        return _event


def _run(event: int) -> None:
    while True:
        os.eventfd_read(event)
        with _lock:
            references = list(_tasks)
        for reference in references:
            task = reference()
            try:
                if task is not None:
                    task()
            except Exception as error:  # the thread continues to run the other agents' tasks
                _LOG.exception("an agent can't unmap the memory of lost agents: %s", error)
            del task


def _forget() -> None:
    global _event  # noqa: PLW0603
    if _event >= 0:
        os.close(_event)
        _event = -1
    _tasks.clear()


os.register_at_fork(after_in_child=_forget)
