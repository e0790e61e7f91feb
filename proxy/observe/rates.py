"""Computes a service's activity between two snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from proxyccl.proxy.codec import Message
from proxyccl.proxy.observe.reader import ChannelView, ServiceView, snapshots
from proxyccl.proxy.thread import IdlePolicy

MemoryByRank = Mapping[tuple[str, int], Mapping[str, int]]
"""Bytes of device memory by purpose, by the name of a communicator and a rank. Ranks publish them, not services."""


class WorkerRates(Message, frozen=True):
    """A worker's activity between two snapshots."""

    number: int  # the worker's number in its service
    busy: float  # fraction of the time, 0 to 1, in which the worker's thread had work for any of its workers
    looks_per_s: float  # polls of the worker's rings and connections per second
    sleeps_per_s: float  # sleeps of the thread per second
    wakes_per_s: float  # how often per second a launch woke the thread
    # The share of a core that the thread used, from 0 to 1; None if the system does not report the CPU time.
    core: float | None
    idle_times: tuple[float, float, float]  # the fields of the thread's `IdlePolicy`, in order

    @property
    def idle(self) -> IdlePolicy:
        return IdlePolicy(*self.idle_times)


class ChannelRates(Message, frozen=True):
    """A channel's activity between two snapshots."""

    id: int  # the channel's id
    peer: int | None  # the rank at the other end; None for a handler's channel
    transport: str  # name of the transport; "handler" for a handler's channel
    worker: int  # number of the worker that serves the channel
    connection: int | None  # number of the channel's connection in that worker; None for a handler's channel
    triggers: int  # number of triggers since the channel was created
    signals: int  # number of signals since the channel was created, including schedules' sends
    triggers_per_s: float  # triggers of all operations per second
    # Sends of schedules per second. No kernel pushes a trigger for a send, but traces show sends along with triggers.
    sends_per_s: float
    puts_per_s: float  # triggers that put data, and schedules' sends that carried data, per second
    gets_per_s: float  # triggers that got data, per second
    bytes_per_s: float  # bytes per second that the channel's puts and gets moved
    ring: int  # number of the channel's ring
    ring_full: int  # number of the ring's slots that hold a trigger at the second snapshot
    ring_size: int  # number of the ring's slots
    # Number of triggers and schedules' sends, on all channels of the connection, that are not known to be complete.
    outstanding: int
    # Number of triggers and schedules' sends, on all channels of the connection, that are known to be complete.
    completed: int
    # Mean time, in µs, from issue to completion of the timed flushes between the snapshots; None if there were no timed
    # flushes.
    flush_us: float | None
    timed_flushes: int  # number of timed flushes between the snapshots
    errors: int  # number of triggers that have failed since the channel was created
    # Number of failures of the connection, on all its channels, since the connection was created.
    connection_errors: int
    rails: int = 0  # number of the connection's rails; 0 for a connection without rails
    rails_up: int = 0  # number of the connection's rails in use
    rail_failures: int = 0  # number of failures of a rail of the connection


class ServiceRates(Message, frozen=True):
    """A service's activity between two snapshots."""

    job: str  # the communicator's name
    rank: int  # the rank that the service works for
    world_size: int  # number of ranks of the job
    pid: int  # id of the service's process, which is the rank's process or a daemon
    program: str  # the rank's program
    runtime: str  # the runtime's name
    seconds: float  # time between the two snapshots
    errors: int  # number of failed triggers and of failures of connections since the service started
    workers: tuple[WorkerRates, ...]  # the service's workers, by number
    channels: tuple[ChannelRates, ...]  # the channels in use, by id
    # For each rank of the host in another PID namespace, how this rank reaches that rank's memory, in words.
    ways: dict[int, str] = msgspec.field(default_factory=dict)
    memory: dict[str, int] = msgspec.field(default_factory=dict)  # the rank's bytes of device memory, by purpose

    def paths(self) -> dict[str, list[int]]:
        """Returns a dict that maps each path to the sorted ranks that are reached by the path. A path is a text: the
        transport of a rank's channels, if there are any, and the rank's entry in `ways`, if there is one.
        """
        transports = dict.fromkeys(self.ways, "") | {each.peer: each.transport for each in self.channels}
        found: dict[str, list[int]] = {}
        for peer, transport in transports.items():
            if peer is not None:
                found.setdefault(", ".join(filter(None, (transport, self.ways.get(peer)))), []).append(peer)
        return {text: sorted(peers) for text, peers in sorted(found.items())}


def rates_between(before: ServiceView, after: ServiceView) -> ServiceRates:
    seconds = max(1e-9, (after.time_ns - before.time_ns) / 1e9)
    earlier = {channel.id: channel for channel in before.channels}
    workers = []
    for old, new in zip(before.workers, after.workers, strict=True):
        age, idle = (new.age_ns - old.age_ns) / 1e9, (new.idle_ns - old.idle_ns) / 1e9
        workers.append(
            WorkerRates(
                new.number,
                min(1.0, max(0.0, (age - idle) / seconds)),
                (new.looks - old.looks) / seconds,
                (new.sleeps - old.sleeps) / seconds,
                (new.wakes - old.wakes) / seconds,
                None if new.cpu_ns is None or old.cpu_ns is None else (new.cpu_ns - old.cpu_ns) / 1e9 / seconds,
                new.idle_times,
            )
        )
    who = after.publication
    return ServiceRates(
        who.description.job,
        who.description.rank,
        who.description.world_size,
        who.pid,
        who.description.program,
        who.runtime,
        seconds,
        sum(channel.errors for channel in after.channels) + sum(connection.errors for connection in after.connections),
        tuple(workers),
        tuple(_channel_rates(after, channel, earlier.get(channel.id), seconds) for channel in after.channels),
        {peer: who.description.way_text(peer) for peer in who.description.ways},
    )


def _channel_rates(view: ServiceView, new: ChannelView, old: ChannelView | None, seconds: float) -> ChannelRates:
    ring = view.rings[new.ring]
    connection = view.connection_of(new)
    old = old or ChannelView(id=new.id, ring=new.ring, worker=new.worker, connection=new.connection)
    sends = 0 if new.triggers else new.signals - old.signals  # a channel serves either kernels or schedules
    flushes = new.timed_flushes - old.timed_flushes
    counted = ("triggers", "puts", "gets", "bytes")
    return ChannelRates(
        id=new.id,
        peer=connection.peer if connection else None,
        transport=connection.transport if connection else "handler",
        worker=new.worker,
        connection=new.connection,
        triggers=new.triggers,
        signals=new.signals,
        sends_per_s=sends / seconds,
        ring=new.ring,
        ring_full=ring.full,
        ring_size=ring.size,
        outstanding=connection.outstanding if connection else 0,
        completed=connection.completed if connection else new.triggers,
        flush_us=(new.flush_ns - old.flush_ns) / flushes / 1e3 if flushes > 0 else None,
        timed_flushes=flushes,
        errors=new.errors,
        connection_errors=connection.errors if connection else 0,
        rails=connection.rails if connection else 0,
        rails_up=connection.rails_up if connection else 0,
        rail_failures=connection.rail_failures if connection else 0,
        **{f"{name}_per_s": (getattr(new, name) - getattr(old, name)) / seconds for name in counted},
    )


class Watch:
    """Observes this user's proxy services on this machine, or only the services of one job or of one process."""

    def __init__(self, job: str | None = None, process: int | None = None) -> None:
        self._of = job, process
        self._views: dict[Path, ServiceView] = {}

    def rates(self) -> list[ServiceRates]:
        """Returns the activity since the last call of services that ran then, by job and rank. Raises as `find`."""
        before, self._views = self._views, snapshots(*self._of)
        return [rates_between(before[path], view) for path, view in self._views.items() if path in before]

    @property
    def views(self) -> list[ServiceView]:
        """The services at the last call of `rates`, including new services."""
        return list(self._views.values())
