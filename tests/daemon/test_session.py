"""The state that a session of the node daemon keeps for its client, seen from inside the daemon's process."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from msgspec.structs import replace

from proxyccl import Communicator, Operation, ResourceError, Trigger
from proxyccl.device.host import HostRuntime
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.proxy.daemon.connection import DaemonConnection
from proxyccl.proxy.daemon.introductions import Introductions
from proxyccl.proxy.daemon.protocol import LONGEST_FRAME
from proxyccl.proxy.daemon.server import Daemon, DaemonOptions
from proxyccl.proxy.observe.publications import Publication
from proxyccl.proxy.service import ProxyService
from proxyccl.proxy.shared_words import SharedWords
from proxyccl.proxy.trigger import PARITY_SHIFT
from proxyccl.proxy.workers import Workers
from support.daemons import RunningDaemon, daemon_inside
from support.fakes.raw_client import DONE, ENDED, HELLO, OFFSET, RawClient
from support.running import TIMEOUT, run_ranks, wait_for

pytestmark = pytest.mark.host_only(reason="a raw client's memory is the host's")
NOT_READY = 600  # CUDA_ERROR_NOT_READY
NAMED = {"description": {"job": "0badcafe", "rank": 0, "world_size": 1, "program": "raw"}}


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


def test_a_stop_while_the_end_of_a_session_is_noticed_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.read

    def overtaken(descriptor: int, most: int) -> bytes:
        if threading.current_thread() is serving:
            daemon.stop()
        return read(descriptor, most)

    with Daemon(tmp_path / "socket", DaemonOptions(threads=1)) as daemon:
        serving = threading.Thread(target=daemon.serve)
        monkeypatch.setattr(os, "read", overtaken)
        os.write(daemon.wake_descriptor, b"x")  # simulates the end of a session
        serving.start()
        serving.join(TIMEOUT)
        returned = not serving.is_alive()
        daemon.stop()
        serving.join()
        assert returned


def test_what_is_closed_has_no_remote_links_either(client: RawClient) -> None:
    assert client.opens()
    assert client.say({"do": "close", "timeout": 1}) == ENDED
    refused = client.say({"do": "unsupported_reason", "transport": "verbs"})
    assert refused is not None
    assert refused["error"] == "protocol"
    assert refused["message"] == "unsupported_reason: no proxy is open; expected open first"


@pytest.mark.parametrize("place", ["the client's memory", "what observers find it by"])
def test_a_service_that_can_not_be_made_leaves_nothing(
    client: RawClient, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    owner, name = (os, "dup") if place == "the client's memory" else (Publication, "of_this_process")
    with RawClient(RunningDaemon(Path(client.connection.getpeername()), None)) as other:
        assert other.open(**NAMED) is not None  # some resources of the first client stay until the process exits
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
    assert "no proxy is open" in refused["message"]


@pytest.mark.parametrize(
    ("transport", "message"),
    [
        ("verbs", "'verbs' is remote; expected one of copy"),
        ("pigeon", "'pigeon' is unknown; expected one of copy, "),
    ],
)
def test_a_connection_that_copies_is_refused_by_another_transport(
    client: RawClient, transport: str, message: str
) -> None:
    assert client.opens()
    refused = client.say({"do": "connect_copy", "peer": 0, "transport": transport})
    assert refused is not None
    assert (refused["error"], refused["argument"]) == ("argument", "transport")
    assert refused["message"].startswith(message)


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
        assert client.say(request) == DONE


def test_pinned_memory_is_mapped_until_it_is_removed_or_its_client_goes(
    inside: Daemon, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SharedMemory.allocate(4096)
    handle = memory.export(memory.ptr + 64, 100)
    open_pinned, mapped = HostRuntime.open_pinned, []

    def recorded(runtime: HostRuntime, handle: bytes) -> SharedMemory:
        mapped.append(open_pinned(runtime, handle))
        return mapped[-1]

    monkeypatch.setattr(HostRuntime, "open_pinned", recorded)
    assert client.opens()
    first, second = (client.result({"do": "add_pinned_memory", "handle": handle}) for _ in range(2))
    limits = SharedWords(client.segment, OFFSET).memory_limits
    assert (limits[first], limits[second]) == (100, 100)
    assert client.say({"do": "remove_memory", "first": first}) == DONE
    assert (limits[first], limits[second]) == (0, 100)
    wait_for(
        lambda: [each.closed for each in mapped] == [True, False], "the memory is unmapped once the worker is idle"
    )
    client.connection.close()
    wait_for(lambda: inside.clients == 0, "its session has ended")
    assert [each.closed for each in mapped] == [True, True]


def test_removed_memory_is_unmapped_when_the_worker_comes_to_rest(
    client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon must unmap the memory even if the client sends no further request."""
    open_handle, mapped = HostRuntime.open, []
    drain, rests = ProxyService.drain, threading.Event()

    def recorded(runtime: HostRuntime, handle: bytes) -> SharedMemory:
        mapped.append(open_handle(runtime, handle))
        return mapped[-1]

    def drain_at_rest(service: ProxyService, timeout: float) -> bool:
        return rests.is_set() and drain(service, timeout)

    monkeypatch.setattr(HostRuntime, "open", recorded)
    monkeypatch.setattr(ProxyService, "drain", drain_at_rest)
    assert client.opens()
    used = client.use()
    assert client.say({"do": "remove_memory", "first": used["first"]}) == DONE
    assert client.result({"do": "connect_copy", "peer": 0})["number"] == 1, "it is answered meanwhile"
    assert not mapped[0].closed
    rests.set()
    wait_for(lambda: mapped[0].closed, "it is unmapped")


def test_a_channel_may_be_freed_while_its_work_is_outstanding(
    client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Puts through other channels of the same connection still complete."""
    under_way = threading.Event()

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    def event_query(event: int) -> int:
        return NOT_READY if under_way.is_set() else 0

    address = ctypes.cast(event_query, ctypes.c_void_p).value
    functions = replace(HostRuntime.calls, event_query=address)
    monkeypatch.setattr(HostRuntime, "calls", functions)
    assert client.opens()
    used = client.use()
    freed, _ = client.result({"do": "reserve_channel", "connection": used["connection"]})
    kept = used["channel"]
    under_way.set()
    slots = (ctypes.c_uint64 * 4).from_address(client.ring.ptr)
    for ticket, channel in enumerate((kept, freed)):
        assert client.say(client.set_channel({**used, "channel": channel}, offset=1024)) == DONE
        put = Trigger(Operation.DATA, channel, 8, used["first"], 0, used["first"], 64).encode()
        slots[2 * ticket], slots[2 * ticket + 1] = put[0], put[1] | 1 << PARITY_SHIFT
    words = SharedWords(client.segment, OFFSET)
    wait_for(lambda: words.counters(freed).puts == 1, "both are issued")
    assert client.say({"do": "free_channels", "channels": [freed], "connection": used["connection"]}) == DONE
    under_way.clear()
    wait_for(lambda: words.completed[kept] == 1, "the other one's put is known to be complete")
    assert client.say({"do": "close", "timeout": 1}) == ENDED


def test_a_client_that_leaves_in_a_drain_is_not_waited_for(
    inside: Daemon, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.opens()

    asked = threading.Event()

    def never_answered(workers: Workers) -> list[int]:
        asked.set()
        return [-1] * len(workers)

    monkeypatch.setattr(Workers, "ask_to_drain", never_answered)
    client.connection.send(json.dumps({"do": "close", "timeout": 1e6}).encode())
    assert asked.wait(TIMEOUT)
    client.connection.close()
    wait_for(lambda: inside.clients == 0, "its session has ended")


def test_an_offer_is_answered_before_anybody_is_introduced(client: RawClient, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = Introductions.offer

    def overtaken(introductions: Introductions, process: bytes, *arguments: Any) -> None:
        offer(introductions, process, *arguments)
        introductions.reach(process).close()

    monkeypatch.setattr(Introductions, "offer", overtaken)
    assert client.say(HELLO) is not None
    assert client.say({"do": "offer", "process": "ab" * 16}) == DONE
    assert json.loads(client.connection.recv(LONGEST_FRAME)) == {"kind": "introduced"}


def test_the_answer_to_an_interrupted_request_is_dropped(inside: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_DAEMON_SOCKET", str(inside.path))

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    def body(comm: Communicator) -> None:
        first = comm.proxy.connect_copy(peer=0)
        with monkeypatch.context() as pressed:
            pressed.setattr(DaemonConnection, "_answer_to", interrupt)
            with pytest.raises(KeyboardInterrupt):
                comm.proxy.connect_copy(peer=0)
        assert comm.proxy.connect_copy(peer=0).number == first.number + 2

    run_ranks(1, body, proxy="daemon")
