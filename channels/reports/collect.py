"""Makes a rank's report. This code must never block, even if everything else hangs, and must not disturb the program.

The report omits values that can't be read, and lists the reasons.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import operator
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import starmap
from types import FrameType
from typing import Any, TypeVar

from msgspec.structs import asdict

from proxyccl.channels.group import Group
from proxyccl.channels.proxy_channel import HandlerChannel, ProxyChannel
from proxyccl.channels.reports.peers import member_of
from proxyccl.channels.reports.report import (
    Call,
    Exchange,
    Failure,
    Handling,
    ProxiedChannel,
    ProxyWait,
    Report,
    Semaphore,
    Thread,
    Wait,
)
from proxyccl.channels.segment.control import LAST_QUESTION, READBACK_BYTES, KernelWait
from proxyccl.channels.segment.error_record import SCHEDULE_WAITS, WAITS, exception_from
from proxyccl.channels.segment.rendezvous import wait_at_most
from proxyccl.device._native import lib
from proxyccl.device.errors import ProxyCCLError
from proxyccl.device.runtime import Runtime
from proxyccl.proxy.daemon.client import DaemonClient, Proxy
from proxyccl.proxy.observe.publications import way_text
from proxyccl.proxy.reports.document import Member
from proxyccl.proxy.ring import RingContents
from proxyccl.proxy.trigger import Operation

CALLS = 16
FRAMES = 64
ANSWER_SECONDS = 0.3
"""Seconds that kernels have to describe their waits; they check every few thousand spins, or when they get a core."""
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_SETTLED_SECONDS = 0.05
_COPY_SECONDS = 0.5

T = TypeVar("T")


class DeviceReader:
    """Reads device memory by copies on its own stream, which works while kernels hang.

    The constructor allocates everything, because a driver that allocates may wait for kernels.

    Args:
        runtime: the runtime whose memory is read.
        readback_buffer: addresses, for the device and for the CPU, of READBACK_BYTES of pinned memory.
    """

    def __init__(self, runtime: Runtime, readback_buffer: tuple[int, int]) -> None:
        self._runtime = runtime
        self._device, self._host = readback_buffer
        self._stream = runtime.create_stream(for_proxy=True)
        self._late = False

    def read(self, ranges: Sequence[tuple[int, int]]) -> bytes:
        """Reads ranges (address, nbytes), and returns their bytes, concatenated. Raises TimeoutError if the device does
        not copy the ranges in time, and ValueError if the ranges have more than READBACK_BYTES in total.
        """
        if self._late:
            raise TimeoutError("the device has not finished the copies of an earlier report")
        total = sum(nbytes for _, nbytes in ranges)
        if total > READBACK_BYTES:
            raise ValueError(f"the ranges have {total} bytes; expected at most {READBACK_BYTES}")
        offset = 0
        for address, nbytes in ranges:
            self._runtime.copy(self._device + offset, address, nbytes, self._stream)
            offset += nbytes
        self._late = not wait_at_most(self._stream.query, time.monotonic() + _COPY_SECONDS)
        if self._late:
            raise TimeoutError(f"the device did not copy the ranges within {_COPY_SECONDS} s")
        return ctypes.string_at(self._host, offset)

    def close(self) -> None:
        self._stream.close()


def collect(
    group: Group, device: DeviceReader, cause: str, question: int, exchange: Exchange | None, beside: list[str]
) -> Report:
    """Collects this rank's report.

    Args:
        group: this rank's group.
        device: reads device memory.
        cause: the reason for the report, in words.
        question: a new number, which this rank's kernels answer with their waits.
        exchange: the call of the bootstrap that this rank is in; None if there is none.
        beside: names of the other communicators that this process has open.
    """
    topology, rank = group.topology, group.rank
    members = [member_of(info) for info in topology.ranks]
    unread: list[str] = []

    def part(what: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except Exception as error:  # the report continues with its other parts
            unread.append(f"{what}: {type(error).__name__}: {error}")
            return otherwise

    # The most volatile state is read first, because the program continues after its exception and frees memory.
    # Kernels answer the question while the CPU reads this state.
    with _asking(group, question) as answers:
        threads: list[Thread] = part("the threads", lambda: _threads(group.thread), [])
        proxy = group.links.proxy_if_started
        handling: list[Handling] = part("the handlers", lambda: _handling(proxy), [])
        proxy_waits: list[ProxyWait] = part("what the proxy waits for", lambda: _proxy_waits(proxy), [])
        rings: list[RingContents] = part(
            "the rings", lambda: [fifo.snapshot() for fifo in proxy.rings] if proxy is not None else [], []
        )
        look_at_channels = functools.partial(_channels, group, device, proxy, rings, unread)
        channels: list[ProxiedChannel] = part("the channels", look_at_channels, [])
        semaphores: list[Semaphore] = part("the semaphores", lambda: _semaphores(group, device), [])
        waits: list[Wait] = part("what kernels wait for", lambda: [*map(_wait, answers())], [])
    return Report(
        version=6,
        communicator=group.job,
        beside=beside,
        rank=rank,
        members=members,
        transports=part("the transports", lambda: _transports(group), []),
        process=members[rank],
        thread=group.thread,
        daemon=_daemon(proxy, members[rank]),
        command=" ".join(sys.orig_argv),
        runtime=part("the runtime", group.runtime.describe, group.runtime.name),
        timeout=group.timeout,
        written=datetime.now(UTC).isoformat(timespec="milliseconds"),
        cause=cause,
        failure=part("the failure", lambda: _failure(group), None),
        waits=waits,
        proxy_waits=proxy_waits,
        exchange=exchange,
        calls=part("the collective calls", lambda: list(starmap(Call, group.launches.recent_calls(CALLS))), []),
        rings=rings,
        channels=channels,
        handling=handling,
        semaphores=semaphores,
        threads=threads,
        unread=unread,
    )


@contextlib.contextmanager
def _asking(group: Group, question: int) -> Iterator[Callable[[], list[KernelWait]]]:
    """Asks this rank's kernels to describe their waits or, after a failure, the waits that failed. Yields a function
    that waits for the answers and returns them.
    """
    control = group.control
    deadline = time.monotonic() + ANSWER_SECONDS

    def answers() -> list[KernelWait]:
        found: list[KernelWait] = []
        settled = deadline
        while time.monotonic() < min(deadline, settled):
            now = control.waits(LAST_QUESTION if control.aborted else question)
            if len(now) != len(found):
                found, settled = now, time.monotonic() + _SETTLED_SECONDS
            time.sleep(0.005)
        return control.waits(LAST_QUESTION if control.aborted else question)

    control.ask(question)
    try:
        yield answers
    finally:
        control.ask(0)


def _failure(group: Group) -> Failure | None:
    if not group.control.aborted:
        return None
    record = group.control.record()
    error = exception_from(record, group.rank, group.failure.cause)
    return Failure(type(error).__name__, str(error), record.rank, record.peer)


def _wait(wait: KernelWait) -> Wait:
    what = WAITS.get(wait.kind, f"wait {wait.kind}")
    return Wait(what, wait.kind, wait.peer, wait.channel, wait.expected, wait.seen)


def _proxy_waits(proxy: Proxy | None) -> list[ProxyWait]:
    found = dict[tuple[int, int | None, int], ProxyWait]()
    for wait in () if proxy is None else proxy.schedule_waits():
        peer = None if wait.kind == lib.PROXYCCL_WAIT_SCHEDULE_GATE else wait.peer
        what = SCHEDULE_WAITS.get(wait.kind, "wait {kind}").format(peer=peer, schedule=wait.schedule, kind=wait.kind)
        found[wait.kind, peer, wait.schedule] = ProxyWait(what, wait.kind, peer, wait.schedule)
    return list(found.values())


def _transports(group: Group) -> list[str]:
    found = ["" if peer == group.rank else group.links.transport(peer) for peer in range(group.world_size)]
    for peer, way in group.ways.items():
        found[peer] += f", {way_text(way)}"
    return found


def _daemon(proxy: Proxy | None, own: Member) -> Member | None:
    if not isinstance(proxy, DaemonClient):
        return None
    return Member(own.host, proxy.daemon, proxy.daemon_started, own.view if proxy.daemon_started is not None else 0)


def _handling(proxy: Proxy | None) -> list[Handling]:
    if proxy is None:
        return []
    now = time.monotonic()
    return [Handling(channel, round(now - since, 3)) for channel, since in list(proxy.handling.items())]


def _channels(
    group: Group, device: DeviceReader, proxy: Proxy | None, rings: list[RingContents], unread: list[str]
) -> list[ProxiedChannel]:
    if proxy is None:
        return []
    known = [each for each in group.inventory.channels() if isinstance(each, ProxyChannel | HandlerChannel)]
    channels = sorted(known, key=lambda channel: channel.id)
    used = _signals_used(channels, device, unread)
    found = []
    for channel in channels:
        ring = proxy.rings.index(proxy.fifo_for(channel.id))
        flush_name = str(Operation.FLUSH.name).lower()
        asked = [
            trigger.ticket + 1
            for trigger in ((*rings[ring].recent, *rings[ring].waiting) if rings else ())
            if trigger.channel == channel.id and flush_name in trigger.operation.split("+")
        ]
        signals, taken = group.control.semaphore(channel.id), used.get(channel.id)
        found.append(
            ProxiedChannel(
                id=channel.id,
                peer=channel.peer,
                peer_channel=channel.peer_channel if isinstance(channel, ProxyChannel) else None,
                transport=channel.transport if isinstance(channel, ProxyChannel) else "handler",
                ring=ring,
                **asdict(proxy.counters(channel.id)),
                outstanding=proxy.outstanding(channel.id),
                signals_in=signals,
                # `taken` may be higher, because a thread claims a signal before the signal arrives.
                signals_used=None if taken is None else min(taken, signals),
                completed=proxy.completed(channel.id),
                flushed=proxy.flushed(channel.id),
                flush_asked=max(asked, default=None),
            )
        )
    return found


def _signals_used(
    channels: Sequence[ProxyChannel | HandlerChannel], device: DeviceReader, unread: list[str]
) -> dict[int, int]:
    proxied = [channel for channel in channels if isinstance(channel, ProxyChannel)]
    try:
        words = device.read([(channel.expected_pointer, 8) for channel in proxied])
    except (ProxyCCLError, TimeoutError) as error:
        unread.append(f"signals used on channels: {error}")
        return {}
    return {channel.id: int.from_bytes(words[8 * i : 8 * i + 8], "little") for i, channel in enumerate(proxied)}


def _semaphores(group: Group, device: DeviceReader) -> list[Semaphore]:
    found = []
    for semaphores in group.inventory.semaphores():
        words = device.read(semaphores.ranges)
        for peer, lane, signals, taken, sent in semaphores.decode(words):
            if signals or taken or sent:
                found.append(Semaphore(peer, lane, signals, min(taken, signals), sent))
    return found


_frames_lock = threading.Lock()
_CALLERS = ("f_back",) * (FRAMES - 1)


def _walks() -> Iterator[tuple[int, list[FrameType]]]:
    innermost = itertools.islice(iter(sys._current_frames, None), 1)  # the only item holds all threads' frames
    idents, frames = itertools.tee(itertools.chain.from_iterable(map(dict.items, innermost)))
    chains = map(itertools.chain, map(operator.itemgetter(slice(1, 2)), frames), itertools.repeat(_CALLERS))
    walks: Iterator[Any] = map(itertools.accumulate, chains, itertools.repeat(getattr))
    # A stack ends at None, the caller of its outermost frame.
    walks = map(itertools.takewhile, itertools.repeat(bool), walks)
    return zip(map(operator.itemgetter(0), idents), map(list, walks), strict=True)


def _frames() -> dict[int, list[FrameType]]:
    """Returns the frames of each other thread, from the innermost on, at most FRAMES per thread.

    While the interpreter returns the frames, it holds an internal lock. No garbage collection may begin while the lock
    is held, because a finaliser may switch to a thread that waits for this lock without releasing the GIL. Iterators in
    C take the frames and find their callers without running other threads, because CPython 3.11 sometimes crashes when
    a frame's caller is read after the frame's thread has run on.
    """
    walks = _walks()
    with _frames_lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            found = dict(walks)
        finally:
            if collects:
                gc.enable()
    # This thread's frames hold these variables, so a reference from a variable to the frames is a cycle, which would
    # keep all threads' arrays alive.
    del walks, found[threading.get_ident()]
    return found


def _threads(own: int) -> list[Thread]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frames in _frames().items():
        stack: list[str] = []
        program = installed = ""
        for frame in frames:
            code = frame.f_code
            stack.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}")
            if frame.f_globals.get("__name__", "").partition(".")[0] not in ("proxyccl", "threading"):
                installed = installed or stack[-1]
                if not code.co_filename.startswith((*_LIBRARIES, "<frozen")):
                    program = program or stack[-1]
        if installed:  # omits this package's threads, which the rest of the report covers
            name = names.get(ident, f"thread {ident}")
            found.append(Thread(name, ident == own, stack[::-1], program or installed))
    return found
