"""Descriptors of processes: one for all watchers of a process, and a new one when its id is reused."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from proxyccl.channels.segment.process_descriptors import acquire, release


def sleeper() -> subprocess.Popen[bytes]:
    """A process that ends with its input."""
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_a_process_has_one_descriptor_until_its_last_user() -> None:
    with sleeper() as process:
        first, second = acquire(process.pid), acquire(process.pid)
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
        old = acquire(ended.pid)
        ended.communicate(b"\n")
        monkeypatch.setattr(os, "pidfd_open", lambda pid: original(alive.pid if pid == ended.pid else pid))
        new = acquire(ended.pid)
        assert new != old
        poll = select.poll()
        poll.register(new, select.POLLIN)
        assert not poll.poll(0)
        release(old)
        assert acquire(ended.pid) == new
        release(new)
        release(new)
        alive.communicate(b"\n")


original = os.pidfd_open


def test_there_is_no_descriptor_of_no_process() -> None:
    with sleeper() as process:
        process.communicate(b"\n")
    with pytest.raises(ProcessLookupError):
        acquire(process.pid)
