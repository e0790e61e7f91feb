"""Watchers of a process share one process descriptor. A new process that reuses the id gets a new descriptor."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest
from msgspec.structs import replace

from proxyccl.channels.segment.process_descriptors import PeerProcess, acquire, has_ended, release
from proxyccl.device.errors import ResourceError
from proxyccl.device.memory import descriptor_server
from proxyccl.device.process import forks
from proxyccl.device.process.namespaces import proc_view
from proxyccl.proxy.processes import start_of


def sleeper() -> subprocess.Popen[bytes]:
    """Starts a process that ends when its standard input is closed."""
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def of(process: subprocess.Popen[bytes]) -> PeerProcess:
    return PeerProcess(process.pid, proc_view(), bytes(16))


def test_a_process_has_one_descriptor_until_its_last_user() -> None:
    with sleeper() as process:
        first, second = acquire(of(process)), acquire(of(process))
        assert first == second
        release(first)
        os.fstat(second)
        poll = select.poll()
        poll.register(second, select.POLLIN)
        assert not poll.poll(0)
        process.communicate(b"\n")
        assert poll.poll(10_000)
        release(second)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(second)


def test_a_process_that_has_ended_is_opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with sleeper() as ended, sleeper() as alive:
        old = acquire(of(ended))
        ended.communicate(b"\n")
        monkeypatch.setattr(os, "pidfd_open", lambda pid: original(alive.pid if pid == ended.pid else pid))
        new = acquire(of(ended))
        assert new != old
        poll = select.poll()
        poll.register(new, select.POLLIN)
        assert not poll.poll(0)
        release(old)
        assert acquire(of(ended)) == new
        release(new)
        release(new)
        alive.communicate(b"\n")


original = os.pidfd_open


def test_there_is_no_descriptor_of_no_process() -> None:
    with sleeper() as process:
        process.communicate(b"\n")
    with pytest.raises(ProcessLookupError):
        acquire(of(process))


IN_ANOTHER_NAMESPACE = """
import sys
from proxyccl.channels.segment import process_descriptors
from proxyccl.device.process import forks
from proxyccl.device.memory.descriptor_server import serve
serve()
print(forks.here().token.hex(), flush=True)
input()
"""


def test_a_process_that_has_another_number_here_hands_over_its_descriptor() -> None:
    command = [sys.executable, "-c", IN_ANOTHER_NAMESPACE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        peer = PeerProcess(os.getpid(), proc_view() + 1, bytes.fromhex(process.stdout.readline()))
        descriptor = acquire(peer)
        assert not has_ended(descriptor)
        process.communicate("\n")
        assert has_ended(descriptor)
        release(descriptor)
        with pytest.raises(ProcessLookupError, match="its process has ended, or can't be reached"):
            acquire(peer)


def test_a_process_that_refuses_its_descriptor_is_no_lost_process(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor_server.serve()
    monkeypatch.delitem(descriptor_server._supplies, b"p")
    with pytest.raises(ResourceError, match="process 7 of another PID namespace can't be watched: it has no descrip"):
        acquire(PeerProcess(7, proc_view() + 1, forks.here().token))


def test_another_process_of_the_same_number_is_not_taken_for_it() -> None:
    with sleeper() as process:
        started = start_of(process.pid)
        assert started is not None
        named = PeerProcess(process.pid, proc_view(), bytes(16), started)
        release(acquire(named))
        with pytest.raises(ProcessLookupError, match="has ended"):
            acquire(replace(named, started=started - 1))
        process.communicate(b"\n")
