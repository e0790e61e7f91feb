"""Watches connections over rails (engine/rails_transport.h), and connects failed rails again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct, field

from proxyccl.proxy import _engine

ffi, lib = _engine.ffi, _engine.lib


class Mail(Struct, frozen=True):
    """The memory in which the peer of a connection reports failed rails (a ProxycclRailsMail)."""

    address: int
    keys: Sequence[int]  # by rail


class Rail(Struct, frozen=True):
    """This rank's end of a rail.

    Attributes:
        adapter: name of the adapter.
        stop: puts the rail's queue pair into its error state, which ends its requests; returns False if refused.
        reconnect: resets the rail's queue pair and connects it to the peer again, after the failure with this number.
            The engine does not use the queue pair meanwhile. Returns False if the adapter's port is down or the system
            refuses; the caller then tries again later.
    """

    adapter: str
    stop: Callable[[], bool]
    reconnect: Callable[[int], bool]


class WatchedConnection(Struct):
    """A connection over rails, whose `pointer` and `stats` must stay valid until `RailWatch.close` returns True."""

    rails: Sequence[Rail]
    pointer: Any  # the ProxycclConnection
    stats: Any  # the ProxycclConnectionStats that show the rails to observers
    peer: int | None  # rank of the peer
    # For each rail, at the last look: `losses` of its ProxycclRailsState, and the number of the failure after which it
    # was last connected again.
    losses: list[int] = field(default_factory=lambda: [0] * lib.PROXYCCL_RAILS)
    reconnected: list[int] = field(default_factory=lambda: [0] * lib.PROXYCCL_RAILS)


class RailWatch:
    """A thread that looks at a service's connections over rails every `PERIOD` seconds. For a failed rail, the thread
    issues a warning, counts the failure for observers, and connects the rail again as soon as that is possible.

    Args:
        status_text: returns a status of the rails' transport in words.
        warn: issues a warning with a text in the rank's process; must not wait.
        name: prefix of the thread's name.
    """

    PERIOD = 0.1

    def __init__(self, status_text: Callable[[int], str], warn: Callable[[str], None], name: str) -> None:
        self._status_text = status_text
        self._warn = warn
        self._watched: list[WatchedConnection] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}-rails", daemon=True)
        self._thread.start()

    def add(self, connection: WatchedConnection) -> None:
        self._watched.append(connection)

    def close(self, timeout: float) -> bool:
        """Ends the thread. Returns False if the thread did not end in time; another call then waits again."""
        self._stop.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        turn = 0
        while not self._stop.wait(self.PERIOD):
            # Recoveries wait for `stop`, and one attempt to connect may take a second. So all connections are looked at
            # before the first attempt, and again when attempts have taken one period.
            free = [(each, rail) for each in tuple(self._watched) for rail in self._look(each)]
            until = time.monotonic() + self.PERIOD
            for _ in free:
                turn += 1
                self._reconnect(*free[turn % len(free)])
                if time.monotonic() > until or self._stop.is_set():
                    break

    def _state(self, each: WatchedConnection, rail: int) -> Any:
        state = ffi.new("ProxycclRailsState *")
        lib.proxyccl_rails_state(each.pointer, rail, state)
        return state

    def _look(self, each: WatchedConnection) -> list[int]:
        """Stops the queue pairs of failed rails if the engine asks. Returns the rails that may be connected again."""
        states = [self._state(each, rail) for rail in range(len(each.rails))]
        up = [rail.adapter for rail, state in zip(each.rails, states, strict=True) if not state.is_down]
        each.stats.rails_up = len(up)
        for number, (rail, state) in enumerate(zip(each.rails, states, strict=True)):
            if state.is_stopping and rail.stop():
                lib.proxyccl_rails_stopped(each.pointer, number, state.failures)
            if state.is_down and state.losses != each.losses[number]:
                # At most one more, because a rail is connected again only after a look.
                each.losses[number] = state.losses
                each.stats.rail_failures += 1
                text = f"the adapter {rail.adapter} no longer reaches rank {each.peer} "
                text += f"({self._status_text(state.status)}); all data goes by {' and '.join(up)} "
                self._warn(text + f"(failure {each.stats.rail_failures} of the connection)")
        return [
            number
            for number, state in enumerate(states)
            if state.is_free and each.reconnected[number] != state.failures
        ]

    def _reconnect(self, each: WatchedConnection, rail: int) -> None:
        state = self._state(each, rail)
        if state.is_free and each.rails[rail].reconnect(state.failures):
            each.reconnected[rail] = state.failures
            lib.proxyccl_rails_reconnected(each.pointer, rail, state.failures)
