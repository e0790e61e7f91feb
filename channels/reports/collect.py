"""Looks at a rank and makes its report. It must neither block, whatever hangs, nor disturb what goes on.

What can't be read is left out, and the report says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from proxyccl.channels.collectives.operations import describe_call
from proxyccl.channels.control import LANDING_BYTES, LAST_QUESTION, WAITS, KernelWait, exception_from
from proxyccl.channels.proxy_channel import HandlerChannel, ProxyChannel
from proxyccl.channels.reports.report import (
    FORMAT,
    VERSION,
    Call,
    Failure,
    Handling,
    ProxiedChannel,
    Report,
    Semaphore,
    Thread,
    Wait,
)
from proxyccl.device.errors import ProxyCCLError
from proxyccl.device.runtime import Runtime
from proxyccl.proxy.daemon.client import DaemonClient
from proxyccl.proxy.interface import Proxy
from proxyccl.proxy.reports.document import Member
from proxyccl.proxy.reports.rings import TRIGGERS, Ring
from proxyccl.proxy.ring_contents import look
from proxyccl.proxy.trigger import Operation

if TYPE_CHECKING:
    from proxyccl.channels.communicator import Communicator
    from proxyccl.channels.reports.reporter import Reporter

CALLS = 16
FRAMES = 64
ANSWER_SECONDS = 0.3
"""For kernels to say what they wait for: they look every few thousand spins, on the host when they get a core."""
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_SETTLED_SECONDS = 0.05
_COPY_SECONDS = 0.5

T = TypeVar("T")


class DeviceReader:
    """Reads device memory while kernels hang: by copies in a stream of its own, which no kernel holds up.

    Everything is made beforehand, as a driver may wait for kernels when it allocates.

    Args:
        runtime: whose memory.
        landing: addresses, for the device and for the CPU, of LANDING_BYTES of pinned memory.
    """

    def __init__(self, runtime: Runtime, landing: tuple[int, int]) -> None:
        self._runtime = runtime
        self._device, self._host = landing
        self._stream = runtime.create_stream(for_proxy=True)
        self._late = False

    def read(self, ranges: Sequence[tuple[int, int]]) -> bytes:
        """The bytes of some ranges (address, size), in one. Raises TimeoutError where the device does not copy them."""
        if self._late:
            raise TimeoutError("the device still has not done the copies of an earlier report")
        if sum(nbytes for _, nbytes in ranges) > LANDING_BYTES:
            raise ValueError(f"more than {LANDING_BYTES} bytes")
        offset = 0
        for address, nbytes in ranges:
            self._runtime.copy(self._device + offset, address, nbytes, self._stream)
            offset += nbytes
        deadline = time.monotonic() + _COPY_SECONDS
        while not self._stream.query():
            if time.monotonic() > deadline:
                self._late = True
                raise TimeoutError(f"the device did not copy it within {_COPY_SECONDS} s")
            time.sleep(0.001)
        return ctypes.string_at(self._host, offset)

    def close(self) -> None:
        """Destroys the stream."""
        self._stream.close()


def collect(communicator: Communicator, reporter: Reporter, device: DeviceReader, cause: str, question: int) -> Report:
    """This rank's report.

    Args:
        communicator: as this rank has it.
        reporter: what knows its channels.
        device: for what lies in device memory.
        cause: why it is wanted, in words.
        question: a number by which its kernels have not been asked before.
    """
    topology, rank = communicator.topology, communicator.rank
    members = [Member(info.host, info.pid, info.started) for info in topology.ranks]
    unread: list[str] = []

    def part(what: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except Exception as error:  # a report says what went wrong and goes on: it is wanted when things are broken
            unread.append(f"{what}: {type(error).__name__}: {error}")
            return otherwise

    # What may change soonest is read first: a program goes on when its exception has been raised, and gives back what
    # it used. Kernels take their time to answer.
    with _asking(communicator, question) as answers:
        threads: list[Thread] = part("the threads", lambda: _threads(reporter.thread), [])
        exchange = reporter.exchange
        proxy = communicator.proxy_if_started
        handling: list[Handling] = part("the handlers", lambda: _handling(proxy), [])
        rings: list[Ring] = part("the rings", lambda: _rings(proxy), [])
        look_at_channels = functools.partial(_channels, communicator, reporter, device, proxy, rings, unread)
        channels: list[ProxiedChannel] = part("the channels", look_at_channels, [])
        semaphores: list[Semaphore] = part("the semaphores", lambda: _semaphores(reporter, device), [])
        waits: list[Wait] = part("what kernels wait for", lambda: [*map(_wait, answers())], [])
    return Report(
        format=FORMAT,
        version=VERSION,
        communicator=communicator.job,
        beside=reporter.beside(),
        rank=rank,
        members=members,
        transports=part("the transports", lambda: _transports(communicator), []),
        process=members[rank],
        thread=reporter.thread,
        daemon=_daemon(proxy, members[rank].host),
        command=" ".join(sys.orig_argv),
        runtime=part("the runtime", communicator.runtime.describe, communicator.runtime.name),
        timeout=communicator.timeout,
        written=datetime.now(UTC).isoformat(timespec="milliseconds"),
        cause=cause,
        failure=part("the failure", lambda: _failure(communicator), None),
        waits=waits,
        exchange=exchange,
        calls=part("the collective calls", lambda: _calls(communicator), []),
        rings=rings,
        channels=channels,
        handling=handling,
        semaphores=semaphores,
        threads=threads,
        unread=unread,
    )


@contextlib.contextmanager
def _asking(communicator: Communicator, question: int) -> Iterator[Callable[[], list[KernelWait]]]:
    """Asks this rank's kernels what they wait for, or waited for when they were told to stop. Yields a function that
    waits for their answers.
    """
    control = communicator.control
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


def _failure(communicator: Communicator) -> Failure | None:
    if not communicator.control.aborted:
        return None
    record = communicator.control.record()
    error = exception_from(record, communicator.rank, communicator.failure_cause)
    return Failure(type(error).__name__, str(error), record.rank, record.peer)


def _wait(wait: KernelWait) -> Wait:
    what = WAITS.get(wait.kind, f"wait {wait.kind}")
    return Wait(what, wait.kind, wait.peer, wait.channel, wait.expected, wait.seen)


def _transports(communicator: Communicator) -> list[str]:
    ranks = range(communicator.world_size)
    return ["" if peer == communicator.rank else communicator.transport(peer) for peer in ranks]


def _calls(communicator: Communicator) -> list[Call]:
    return [Call(number, describe_call(fields)) for number, fields in communicator.recent_calls(CALLS)]


def _rings(proxy: Proxy | None) -> list[Ring]:
    return [] if proxy is None else [Ring.of(look(fifo, TRIGGERS)) for fifo in proxy.rings]


def _daemon(proxy: Proxy | None, host: str) -> Member | None:
    return Member(host, proxy.daemon, proxy.daemon_started) if isinstance(proxy, DaemonClient) else None


def _handling(proxy: Proxy | None) -> list[Handling]:
    if proxy is None:
        return []
    now = time.monotonic()
    return [Handling(channel, round(now - since, 3)) for channel, since in list(proxy.handling.items())]


def _channels(
    communicator: Communicator,
    reporter: Reporter,
    device: DeviceReader,
    proxy: Proxy | None,
    rings: list[Ring],
    unread: list[str],
) -> list[ProxiedChannel]:
    if proxy is None:
        return []
    channels = sorted(reporter.channels(), key=lambda channel: channel.id)
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
        found.append(
            ProxiedChannel(
                id=channel.id,
                peer=channel.peer,
                peer_channel=channel.peer_channel if isinstance(channel, ProxyChannel) else None,
                transport=channel.transport if isinstance(channel, ProxyChannel) else "handler",
                ring=ring,
                **asdict(proxy.counters(channel.id)),
                outstanding=proxy.outstanding(channel.id),
                signals_in=communicator.control.semaphore(channel.id),
                signals_used=used.get(channel.id),
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


def _semaphores(reporter: Reporter, device: DeviceReader) -> list[Semaphore]:
    found = []
    for semaphores in reporter.semaphores():
        words = device.read(semaphores.ranges)
        found += [Semaphore(*row) for row in semaphores.decode(words) if any(row[2:])]
    return found


_looking = threading.Lock()


def _frames() -> dict[int, FrameType]:
    """What each thread is in.

    The interpreter holds a lock of its own while it makes these. A collection must not begin meanwhile: a finaliser may
    give way to a thread that wants that lock and keeps the interpreter until it has it.
    """
    with _looking:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def _threads(own: int) -> list[Thread]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, innermost in _frames().items():
        stack: list[str] = []
        program = installed = ""
        frame = innermost if ident != threading.get_ident() else None  # but the one that looks
        while frame is not None and len(stack) < FRAMES:
            code = frame.f_code
            stack.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}")
            if frame.f_globals.get("__name__", "").partition(".")[0] not in ("proxyccl", "threading"):
                installed = installed or stack[-1]
                if not code.co_filename.startswith((*_LIBRARIES, "<frozen")):
                    program = program or stack[-1]
            frame = frame.f_back
        if installed:  # else it is one of this package's, which tell of themselves by the rest of the report
            name = names.get(ident, f"thread {ident}")
            found.append(Thread(name, ident == own, stack[::-1], program or installed))
    return found
