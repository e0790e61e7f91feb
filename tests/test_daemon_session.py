"""What a session of the node daemon keeps of its client, seen from inside the daemon's process."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from daemons import RunningDaemon, daemon_inside
from observing import wait_for
from running import run_ranks
from test_daemon_protocol import Flood, RawClient

from proxyccl import Communicator, Operation, ResourceError, Trigger
from proxyccl.proxy.daemon.client import DaemonClient
from proxyccl.proxy.daemon.server import Daemon
from proxyccl.proxy.observe.publications import Publication
from proxyccl.proxy.service import ProxyService

pytestmark = pytest.mark.host_only(reason="a raw client's memory is the host's")
NAMED = {"job": "0badcafe", "rank": 0, "world_size": 1, "program": "raw"}


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Daemon]:
    with daemon_inside(tmp_path / "socket") as running:
        yield running


@pytest.fixture
def client(inside: Daemon) -> Iterator[RawClient]:
    with RawClient(RunningDaemon(inside.path, None)) as raw:
        yield raw


def no_descriptor_is_left(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_what_is_closed_has_no_rdma_either(client: RawClient) -> None:
    assert client.opens()
    assert client.say({"do": "close", "timeout": 1}) == {"ended": True}
    refused = client.say({"do": "rdma_refusal"})
    assert refused is not None
    assert refused["error"] == "protocol"
    assert "there is no 'rdma_refusal'" in refused["message"]


@pytest.mark.parametrize("place", ["the client's memory", "what observers find it by"])
def test_a_service_that_can_not_be_made_leaves_nothing(
    client: RawClient, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    owner, name = (os, "dup") if place == "the client's memory" else (Publication, "of_this_process")
    with RawClient(RunningDaemon(Path(client.connection.getpeername()), None)) as other:
        assert other.open(**NAMED) is not None  # whatever a process keeps for good
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    with monkeypatch.context() as full:
        full.setattr(owner, name, no_descriptor_is_left)
        refused = client.open(**NAMED)
    assert refused is not None
    assert refused["error"] == "resource"
    assert os.strerror(errno.EMFILE) in refused["message"]
    wait_for(lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) <= before, "it is as before")
    refused = client.say({"do": "connect_copy", "peer": 0})
    assert refused is not None
    assert "nothing is open" in refused["message"]


def test_what_could_not_be_removed_can_be_removed_later(client: RawClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.opens()
    used = client.use()
    requests: list[dict[str, Any]] = [
        {"do": "remove_memory", "first": used["first"]},
        {"do": "free_channels", "channels": [used["channel"]], "connection": used["connection"]},
    ]

    def restless(*_: object) -> NoReturn:
        raise ResourceError("a proxy thread did not come to rest")

    for request in requests:
        with monkeypatch.context() as busy:
            busy.setattr(ProxyService, "paused", restless)
            refused = client.say(request)
            assert refused is not None
            assert refused["error"] == "resource"
        assert client.say(request) == {}


def test_a_client_that_leaves_while_it_is_drained_is_not_waited_for(inside: Daemon, client: RawClient) -> None:
    assert client.opens()
    used = client.use()
    word = client.buffer.export(client.buffer.ptr, 8).hex()
    assert client.say({"do": "set_channel", **used, "word": word}) == {}
    flood = Flood(client.ring, Trigger(Operation.FLUSH, channel=used["channel"]))
    try:
        client.connection.send(json.dumps({"do": "close", "timeout": 1e6}).encode())
        wait_for(lambda: any(session.request for session in list(inside._sessions)), "it is under way")
        client.connection.close()
        wait_for(lambda: not inside._sessions, "its session has ended")
    finally:
        flood.end()


def test_the_answer_to_an_interrupted_request_is_not_taken_for_the_next_ones(
    inside: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROXYCCL_DAEMON_SOCKET", str(inside.path))

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    def body(comm: Communicator) -> None:
        first = comm.proxy.connect_copy(peer=0)
        with monkeypatch.context() as pressed:
            pressed.setattr(DaemonClient, "_answer_to", interrupt)
            with pytest.raises(KeyboardInterrupt):
                comm.proxy.connect_copy(peer=0)
        assert comm.proxy.connect_copy(peer=0).number == first.number + 2

    run_ranks(1, body, proxy="daemon")
