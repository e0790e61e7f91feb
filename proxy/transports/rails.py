"""Watches connections over rails (engine/rails_transport.h), and connects failed rails again."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Struct

from proxyccl.proxy import _engine

ffi, lib = _engine.ffi, _engine.lib

PEER_SECONDS = 30
"""Time in seconds for the peer's part of a recovery: its answer follows the data that it has posted before, and its
proxy may be paused or run a handler.
"""


class Mail(Struct, frozen=True):
    """The memory in which the peer of a connection reports failed rails (a ProxycclRailsMail)."""

    address: int
    keys: Sequence[int]  # by rail


class Rail(Struct, frozen=True):
    """This rank's end of a rail: a queue pair, or an endpoint of libfabric.

    Attributes:
        adapter: name of the adapter.
        stop: puts the queue pair into its error state, or closes the endpoint, which ends its requests; returns False
            if refused.
        reconnect: resets the queue pair, or opens the endpoint again, and connects it to the peer again, after the
            failure with this number. The engine does not use the rail meanwhile. Returns False if the adapter's port is
            down or the system refuses; the caller then tries again later.
        works: returns False if the adapter's port is down, in which case the rail has failed; None if the adapter
            itself reports failures.
    """

    adapter: str
    stop: Callable[[], bool]
    reconnect: Callable[[int], bool]
    works: Callable[[], bool] | None = None


class WatchedRail(Struct):
    """A rail of a connection of the transport `rails`, which must stay valid until `RailWatch.close` returns True."""

    rail: Rail
    pointer: Any  # the ProxycclConnection
    number: int  # the rail's number in the connection
    options: Any = None  # the options of the rail's connection, which the engine uses
    losses: int = 0  # of the ProxycclRailsState at the last look
    reconnected: int = 0  # number of the failure after which the rail was last connected again

    def state(self) -> Any:
        """Returns the rail's ProxycclRailsState."""
        state = ffi.new("ProxycclRailsState *")
        lib.proxyccl_rails_state(self.pointer, self.number, state)
        return state


def watched_rails(connections: Iterable[tuple[Any, Sequence[Rail], Sequence[Any]]]) -> tuple[WatchedRail, ...]:
    """Returns the rails of connections of the transport `rails`, given the connections, and each one's rails and their
    options.
    """
    return tuple(
        WatchedRail(rail, pointer, number, options[number])
        for pointer, rails, options in connections
        for number, rail in enumerate(rails)
    )


class WatchedConnection(Struct):
    """The rails of a connection to a peer."""

    rails: Sequence[WatchedRail]
    stats: Any  # the ProxycclConnectionStats that show the rails to observers; valid as long as the rails
    peer: int | None  # rank of the peer


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
            works = functools.cache(lambda each: each())  # asks once in each pass about an adapter
            free = [rail for each in tuple(self._watched) for rail in self._look(each, works)]
            until = time.monotonic() + self.PERIOD
            for _ in free:
                turn += 1
                self._reconnect(free[turn % len(free)])
                if time.monotonic() > until or self._stop.is_set():
                    break

    def _look(self, connection: WatchedConnection, works: Callable[[Callable[[], bool]], bool]) -> list[WatchedRail]:
        """Stops the queue pairs of failed rails if the engine asks. Returns the rails that may be connected again.
        `works` calls a rail's function `works`.
        """
        states = [(each, each.state()) for each in connection.rails]
        stats = connection.stats
        down = {each.rail.adapter for each, state in states if state.is_down}
        stats.rails_up = len({each.rail.adapter for each in connection.rails} - down)
        for each, state in states:
            if state.is_stopping and each.rail.stop():
                lib.proxyccl_rails_stopped(each.pointer, each.number, state.failures)
            if each.rail.works is not None and not state.is_down:
                failure = 0 if works(each.rail.works) else state.failures + 1
                lib.proxyccl_rails_fell(each.pointer, each.number, failure)
            if state.is_down and state.losses != each.losses:
                # At most one more, because a rail is connected again only after a look.
                each.losses = state.losses
                stats.rail_failures += 1
                others = [o.rail.adapter for o, s in states if o.pointer == each.pointer and not s.is_down]
                text = f"the adapter {each.rail.adapter} no longer reaches rank {connection.peer} "
                text += f"({self._status_text(state.status)}); all data goes by {' and '.join(others)} "
                self._warn(text + f"(failure {stats.rail_failures} of the connection)")
        return [each for each, state in states if state.is_free and each.reconnected != state.failures]

    def _reconnect(self, each: WatchedRail) -> None:
        state = each.state()
        if state.is_free and each.rail.reconnect(state.failures):
            each.reconnected = state.failures
            lib.proxyccl_rails_reconnected(each.pointer, each.number, state.failures)
