"""Unmaps the memory of agents that were lost, although no thread of the program uses the agent that had it mapped."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

from proxyccl.device.memory.descriptors import naming_exhaustion
from proxyccl.device.process import forks
from proxyccl.device.process.threads import Thread


class Losing(Protocol):
    """An agent of this process."""

    def unmap_lost(self) -> None: ...  # noqa: D102


_lock = threading.Lock()
forks.hold_while_forking(_lock)
_agents: list[weakref.ref[Losing]] = []
_event = -1


def event_of_losses(agent: Losing) -> int:
    """The eventfd, one for the process, that the engine raises when a link of the agent is lost. A thread then calls
    `unmap_lost` of all agents that were given it.

    Raises:
        ResourceError: there are too few descriptors or threads.
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
        _agents[:] = [each for each in _agents if each() is not None]
        _agents.append(weakref.ref(agent))
        return _event


def _run(event: int) -> None:
    while True:
        os.eventfd_read(event)
        with _lock:
            references = list(_agents)
        for reference in references:
            agent = reference()
            if agent is not None:
                agent.unmap_lost()
            del agent


def _forget() -> None:
    """In a fork's child, which has neither the thread nor agents."""
    global _event  # noqa: PLW0603
    if _event >= 0:
        os.close(_event)
        _event = -1
    _agents.clear()


os.register_at_fork(after_in_child=_forget)
