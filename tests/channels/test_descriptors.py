"""Too few descriptors end the joining of ranks at once, on all of them, with what they were for."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import Any

import pytest

from proxyccl import AbortedError, Communicator, ResourceError, ThreadBootstrap
from proxyccl.channels import watcher
from proxyccl.device.descriptors import naming_exhaustion
from proxyccl.device.host.runtime import HostRuntime
from support.running import TIMEOUT

pytestmark = pytest.mark.host_only(reason="descriptors are the host's")


def exhausted(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_the_error_names_the_purpose_and_the_limit() -> None:
    limit = r"for a test: this process may have \d+ open \(ulimit -n"
    with pytest.raises(ResourceError, match=limit), naming_exhaustion("a test"):
        exhausted()
    with pytest.raises(ResourceError, match="for a test: the system has as many"), naming_exhaustion("a test"):
        raise OSError(errno.ENFILE, "")
    with pytest.raises(FileNotFoundError), naming_exhaustion("a test"):
        raise FileNotFoundError(errno.ENOENT, "")


@pytest.mark.parametrize("where", ["own segment", "peers' segments", "watch", "runtime"])
def test_all_ranks_hear_at_once_that_one_has_too_few(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has none left from some step on."""

    def only_rank_1(allowed: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread().name == "rank 1":
                return exhausted()
            return allowed(*arguments, **options)

        return call

    owner: Any
    owner, name = {
        "own segment": (HostRuntime, "allocate_pinned"),
        "peers' segments": (HostRuntime, "open_pinned"),
        "watch": (watcher.os, "pipe"),
        "runtime": (HostRuntime, "create_stream"),
    }[where]
    monkeypatch.setattr(owner, name, only_rank_1(getattr(owner, name)))
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
        assert "rank 1 can't take part: ResourceError: no descriptor is left" in str(errors[rank])
