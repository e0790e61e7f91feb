"""A rank watches a few processes of its host, and replaces a watched process that leaves by another process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from proxyccl import open_runtime
from proxyccl.channels.liveness.process_watch import ProcessWatch
from proxyccl.channels.liveness.watcher import Watcher
from proxyccl.channels.segment.control import create_segment
from proxyccl.channels.segment.process_descriptors import PeerProcess, acquire, has_ended, release
from proxyccl.device._native import lib
from proxyccl.device.errors import ResourceError
from proxyccl.device.process.namespaces import proc_view
from proxyccl.proxy.processes import start_of
from support.running import TIMEOUT, wait_for

Processes = list[subprocess.Popen[bytes]]


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = [subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(10)]
    yield started
    for process in started:
        process.communicate()


class Watching:
    """The process watch of rank 2 among ranks 0 to 10. A child process stands for each other rank."""

    def __init__(self, processes: Processes) -> None:
        self.left: set[int] = set()
        ranks = [rank for rank in range(11) if rank != 2]
        self.process = dict(zip(ranks, processes, strict=True))
        named = {rank: PeerProcess(process.pid, proc_view(), bytes(16)) for rank, process in self.process.items()}
        self.watch = ProcessWatch(2, named, self.left.__contains__)

    def follow(self) -> list[int]:
        """Updates the watch. Returns the ranks that are lost."""
        _, old, lost = self.watch.follow()
        for descriptor in old:
            release(descriptor)
        return lost

    @property
    def watched(self) -> set[int]:
        return set(self.watch.watched.values())


@pytest.fixture
def watching(processes: Processes) -> Iterator[Watching]:
    made = Watching(processes)
    yield made
    made.watch.close()


def test_a_rank_watches_those_at_powers_of_two(watching: Watching) -> None:
    assert watching.follow() == []
    assert watching.watched == {3, 4, 6, 10}


def test_others_are_watched_in_the_place_of_those_that_have_left(watching: Watching) -> None:
    before = set(os.listdir("/proc/self/fd"))
    watching.follow()
    watching.left |= {3, 4, 5, 6}
    assert watching.follow() == []
    assert watching.watched == {7, 10}
    watching.left |= {rank for rank in range(11) if rank != 1}
    watching.follow()
    assert watching.watched == {1}
    watching.left.add(1)
    watching.follow()
    assert watching.watched == set()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_the_end_of_a_watched_process_is_seen_and_of_one_that_ended_before(watching: Watching) -> None:
    watching.follow()
    watching.process[3].communicate()
    ended = [peer for descriptor, peer in watching.watch.watched.items() if has_ended(descriptor)]
    assert ended == [3]
    watching.process[5].communicate()
    watching.left |= {4}
    assert watching.follow() == [5]
    watching.process[0].communicate()
    with pytest.raises(ProcessLookupError):
        watching.watch.descriptor_of(0)
    assert not has_ended(watching.watch.descriptor_of(1))


def test_those_that_were_watched_still_are_if_no_descriptor_is_left(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: int) -> int:
        raise OSError(24, "Too many open files")

    watching.follow()
    watching.left |= {3, 4}
    with monkeypatch.context() as few:
        few.setattr(os, "pidfd_open", none)
        with pytest.raises(ResourceError, match="no file descriptor is left for the watch of rank 5's process"):
            watching.follow()
    assert watching.watched == {3, 4, 6, 10}
    watching.follow()
    assert watching.watched == {5, 6, 10}


ENDS_ITS_FIRST_THREAD = """
import ctypes, os, sys, threading
sys.stdin.readline()
threading.Thread(target=sys.stdin.read, daemon=True).start()
ctypes.CDLL(None).syscall({exit}, 0)
"""
EXIT = {"x86_64": 60, "aarch64": 93}
"""The number of the system call that ends one thread."""


@pytest.fixture
def ending() -> Iterator[PeerProcess]:
    """Starts a process whose first thread has ended while another thread still runs."""
    if os.uname().machine not in EXIT:
        pytest.skip("another system's numbers of calls")
    program = [sys.executable, "-c", ENDS_ITS_FIRST_THREAD.format(exit=EXIT[os.uname().machine])]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as process:
        started = start_of(process.pid)
        assert started is not None
        named = PeerProcess(process.pid, proc_view(), bytes(16), started)
        assert not named.is_ending
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        wait_for(lambda: named.is_ending, "its first thread ends")
        yield named
        process.communicate(b"")


def test_a_process_whose_first_thread_has_ended_is_ending(ending: PeerProcess) -> None:
    watch = ProcessWatch(0, {1: ending}, lambda _: False)
    assert ending.is_ending
    assert not has_ended(watch.descriptor_of(1))
    late = acquire(replace(ending, token=bytes(15) + b"1"))  # a later watch sees a running process
    assert not has_ended(late)
    release(late)
    watch.close()


@pytest.mark.parametrize("readable", [True, False], ids=["", "no-descriptor-is-left"])
def test_who_fails_to_reach_an_ending_process_files_it_as_lost(
    ending: PeerProcess, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    def none(_: PeerProcess) -> bool:
        raise OSError(24, "Too many open files")

    own, peer = (create_segment(open_runtime("host"), 1, TIMEOUT) for _ in range(2))
    monkeypatch.setattr(Watcher, "ENDING_MS", 1)
    if not readable:
        monkeypatch.setattr(PeerProcess, "is_ending", property(none))
    watcher = Watcher(0, own, {1: peer}, {1: ending}, {})
    watcher.check_for_end(1)
    assert own.aborted == readable
    if readable:
        assert (own.record().code, own.record().peer) == (lib.PROXYCCL_ERROR_PEER_LOST, 1)
    watcher.close()
    own.close()
    peer.close()
