"""If a rank runs out of file descriptors while ranks join, all ranks immediately get an error that says what the rank
tried to open.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxyccl import AbortedError, Communicator, FileBootstrap, ResourceError, ThreadBootstrap
from proxyccl.channels.joining import exchange
from proxyccl.channels.liveness import watcher
from proxyccl.channels.liveness.host_links import Listener
from proxyccl.device.host.runtime import HostRuntime
from proxyccl.device.memory.descriptors import naming_exhaustion
from proxyccl.proxy.daemon.connection import daemon_process
from proxyccl.proxy.daemon.job import JobDaemon, JobOptions, new_name
from support.running import TIMEOUT, run_ranks

pytestmark = pytest.mark.host_only(reason="descriptors are the host's")


def exhausted(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def exhausted_on(thread: str, allowed: Any) -> Any:
    """Returns a function that calls `allowed`, but raises EMFILE in threads whose names begin with `thread`."""

    def call(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread().name.startswith(thread):
            return exhausted()
        return allowed(*arguments, **options)

    return call


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Keeps this process from opening any descriptor during the block."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def test_the_error_names_the_purpose_and_the_limit() -> None:
    limit = r"for a test: this process may open \d+ \(ulimit -n"
    with pytest.raises(ResourceError, match=limit), naming_exhaustion("a test"):
        exhausted()
    with pytest.raises(ResourceError, match="for a test: the system"), naming_exhaustion("a test"):
        raise OSError(errno.ENFILE, "")
    with pytest.raises(FileNotFoundError), naming_exhaustion("a test"):
        raise FileNotFoundError(errno.ENOENT, "")


@pytest.mark.parametrize("where", ["own segment", "peers' segments", "watch", "runtime"])
def test_all_ranks_hear_at_once_that_one_has_too_few(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner: Any
    owner, name = {
        "own segment": (HostRuntime, "allocate_pinned"),
        "peers' segments": (HostRuntime, "open_pinned"),
        "watch": (watcher.socket, "socket"),
        "runtime": (HostRuntime, "create_stream"),
    }[where]
    monkeypatch.setattr(owner, name, exhausted_on("rank 1", getattr(owner, name)))
    bootstraps = ThreadBootstrap.create(3)
    errors: dict[int, BaseException] = {}

    def join(rank: int) -> None:
        try:
            Communicator(bootstraps[rank], "host", timeout=TIMEOUT)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=join, args=(rank,), name=f"rank {rank}") for rank in range(3)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert time.monotonic() - began < TIMEOUT / 2
    assert isinstance(errors[1], ResourceError), errors
    for rank in (0, 2):
        assert isinstance(errors[rank], AbortedError), errors
        assert "rank 1 can't take part: ResourceError: no file descriptor is left" in str(errors[rank])


def transfer(comm: Communicator) -> None:
    with comm.transfers() as transfers:
        transfers.send(np.ones(10), 1 - comm.rank)
        transfers.recv(np.ones(10), 1 - comm.rank)


CALLS: dict[str, Callable[[Communicator], object]] = {
    "register": lambda comm: comm.register(np.ones(10)),
    "sm_channels": lambda comm: comm.sm_channels(comm.register(np.ones(10)), peers=[comm.rank]),
    "kernel": lambda comm: comm.all_reduce(np.ones(10), algorithm="ring"),
    "proxy": lambda comm: comm.all_reduce(np.ones(10), algorithm="proxy"),
    "transfers": transfer,
    "split": lambda comm: comm.split([1, 0]),
}


@pytest.mark.parametrize("step", ["allocate", "allocate_pinned", "open", "open_pinned", "export"])
@pytest.mark.parametrize("name", CALLS)
def test_all_ranks_hear_at_once_that_one_has_too_few_for_a_call(
    name: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(comm: Communicator) -> None:
        comm.all_gather_bytes(b"")
        if comm.rank == 0:
            monkeypatch.setattr(HostRuntime, step, exhausted_on("rank-1", getattr(HostRuntime, step)))
        comm.all_gather_bytes(b"")
        began, raised = time.monotonic(), None
        try:
            CALLS[name](comm)
        except (ResourceError, AbortedError) as error:
            raised = error
        if raised is not None and comm.rank == 1:
            assert isinstance(raised, ResourceError), raised
            assert "no file descriptor is left" in str(raised)
        elif raised is not None:
            assert isinstance(raised, AbortedError), raised
            assert re.search("rank 1 can't take part: ResourceError: no file descriptor|rank 1 ended", str(raised))
        assert time.monotonic() - began < TIMEOUT / 2
        monkeypatch.undo()
        if name == "split":  # the communicator stays usable after a failed split
            comm.all_gather_bytes(b"")
            comm.split([1, 0]).all_gather_bytes(b"")

    with contextlib.suppress(AbortedError):
        run_ranks(2, body, proxy="thread")


def test_the_communicator_goes_on_where_all_ranks_have_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    all_limited = threading.Barrier(2)
    # The limit is long, because on a busy machine one rank may make the call much later than the other.
    monkeypatch.setattr(exchange, "_TELLING_OPEN_SECONDS", TIMEOUT)

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            monkeypatch.setattr(HostRuntime, "allocate", exhausted_on("rank-", HostRuntime.allocate))
        all_limited.wait(TIMEOUT)
        with pytest.raises(ResourceError, match="no file descriptor is left"):
            comm.all_reduce(np.ones(10), algorithm="ring")
        if all_limited.wait(TIMEOUT) == 0:
            monkeypatch.undo()
        comm.all_gather_bytes(b"")
        assert (comm.all_reduce(np.ones(10), algorithm="ring") == 2).all()

    run_ranks(2, body)


@pytest.mark.parametrize("step", ["allocate_pinned", "open_pinned"])
def test_the_others_shrink_at_once_without_a_rank_that_has_too_few(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: Communicator) -> None:
        comm.all_gather_bytes(b"")
        if comm.rank == 0:
            monkeypatch.setattr(HostRuntime, step, exhausted_on("rank-1", getattr(HostRuntime, step)))
        comm.all_gather_bytes(b"")
        began = time.monotonic()
        if comm.rank == 1:
            with pytest.raises(ResourceError, match="no file descriptor is left"):
                comm.shrink()
            assert comm.closed
        else:
            with comm.shrink() as shrunk:
                assert shrunk.members == (0, 2)
                assert time.monotonic() - began < TIMEOUT / 2

    run_ranks(3, body)


def test_a_rank_without_descriptors_still_has_messages_for_its_peers(tmp_path: Path) -> None:
    bootstrap = FileBootstrap(tmp_path / "private", 0, 1)
    with no_descriptors():
        for number in range(3):
            assert bootstrap.all_gather(b"%d" % number, TIMEOUT, lambda: None) == [b"%d" % number]
        with pytest.raises(ResourceError, match=r"no file descriptor is left for the directory .*/other"):
            FileBootstrap(tmp_path / "other", 0, 1)
    assert bootstrap.all_gather(b"", TIMEOUT, lambda: None) == [b""]


def test_links_to_other_hosts_are_refused_before_peers_wait_for_them() -> None:
    listener = Listener(0)
    with no_descriptors():
        with pytest.raises(ResourceError, match="no file descriptor is left for links to 3 ranks of other hosts"):
            listener.offer(3)
        with pytest.raises(ResourceError, match="no file descriptor is left for links to ranks of other hosts"):
            Listener(0)
    assert listener.offer(3).port
    listener.close()


def test_a_daemon_is_not_blamed_for_too_few_descriptors(tmp_path: Path) -> None:
    daemon = JobDaemon(new_name(), JobOptions(1, None, [0], 1))
    with no_descriptors():
        with pytest.raises(ResourceError, match="no file descriptor is left for a connection to the node daemon"):
            daemon_process(tmp_path / "socket")
        with pytest.raises(ResourceError, match="no file descriptor is left for a connection to the node daemon"):
            daemon.connect(TIMEOUT)
