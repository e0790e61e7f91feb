"""When the engine runs out of memory, the error names the object that could not be created."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from proxyccl import Communicator, ResourceError
from proxyccl.proxy import service, thread, workers
from proxyccl.proxy._engine import ffi
from support.running import run_ranks


class Lacking:
    """A C library whose `function` returns NULL."""

    def __init__(self, lib: Any, function: str) -> None:
        self._lib, self._function = lib, function

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: ffi.NULL) if name == self._function else getattr(self._lib, name)


@pytest.mark.parametrize(
    ("module", "function", "what"),
    [
        (service, "proxyccl_service_create", "a proxy service"),
        (thread, "proxyccl_thread_create", "a thread of the proxy"),
        (workers, "proxyccl_worker_create", "a worker of the proxy"),
    ],
    ids=["service", "thread", "worker"],
)
def test_what_finds_no_memory_is_named(
    module: ModuleType, function: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(comm: Communicator) -> None:
        with monkeypatch.context() as lacking:
            lacking.setattr(module, "lib", Lacking(module.lib, function))
            with pytest.raises(ResourceError, match=f"no memory for {what}"):
                _ = comm.group.links.proxy
        assert comm.group.links.proxy is not None

    run_ranks(1, body, proxy="thread")
