"""Attacks of a client on the node daemon: the daemon refuses invalid requests or disconnects the client, serves other
clients, and frees what it allocated for the client.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import socket
import stat
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from proxyccl import (
    ArgumentError,
    Communicator,
    Operation,
    ResourceError,
    RuntimeUnavailableError,
    Trigger,
)
from proxyccl.channels.segment.control import segment_bytes
from proxyccl.device.errors import UntrustedPathError
from proxyccl.device.host import HostRuntime
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.device.process.threads import Thread
from proxyccl.device.runtime import Memory
from proxyccl.proxy.daemon import server, session_memories
from proxyccl.proxy.daemon.connection import missing_in_daemon
from proxyccl.proxy.daemon.protocol import LAYOUT, LONGEST_FRAME, VERSION, socket_path
from proxyccl.proxy.daemon.server import Daemon, DaemonOptions
from proxyccl.proxy.interface import EndpointInfo
from proxyccl.proxy.processes import parse_cores
from proxyccl.proxy.remote_options import FabricOptions, RdmaOptions
from proxyccl.proxy.thread import IdlePolicy
from support.daemons import RunningDaemon, daemon_inside, running_daemon
from support.fakes.raw_client import DONE, DRAINED, HELLO, OFFSET, Flood, RawClient, Ringing, frame_of, opening
from support.running import TIMEOUT, run_ranks, wait_for

REMOTE = {"rdma": asdict(RdmaOptions()), "fabric": asdict(FabricOptions())}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with running_daemon(tmp_path_factory.mktemp("protocol") / "socket") as running:
        with RawClient(running) as first:  # some resources of the first job stay until the daemon exits
            assert first.opens()
            first.use()
        yield running
    assert running.ended == 0, running.log


@pytest.fixture
def bystander(daemon: RunningDaemon) -> Iterator[RawClient]:
    """Opens a client that must still work after the test, and checks that the test's other clients leave nothing
    behind.
    """
    with RawClient(daemon) as client:
        assert client.opens()
        client.use()
        before = daemon.resources()
        yield client
        assert client.say({"do": "drain", "timeout": 5}) == DRAINED
        assert daemon.settles(before), (before, daemon.resources())


FIRST_FRAMES = {
    "no JSON": b"\xff\xfe",
    "no object": b"[1]",
    "too deep": b"[" * 30_000,
    "a long number": b'{"hello":' + b"9" * 10_000 + b"}",
    "no hello": {"do": "drain", "timeout": 1},
    "another version": {**HELLO, "hello": VERSION + 1},
    "a version that is not a number": {**HELLO, "hello": True},
    "another layout": {**HELLO, "layout": [*LAYOUT, 1]},
    "too long": json.dumps({**HELLO, "padding": "x" * LONGEST_FRAME}).encode(),
}


@pytest.mark.parametrize("name", FIRST_FRAMES)
@pytest.mark.usefixtures("bystander")
def test_a_client_that_does_not_introduce_itself_is_disconnected(daemon: RunningDaemon, name: str) -> None:
    with RawClient(daemon) as client:
        answer = client.say(FIRST_FRAMES[name])  # type: ignore[arg-type]
        assert answer is not None
        assert answer["error"] == "protocol"
        assert client.ended()


OPENS = {
    "a runtime that there is not": {"runtime": "opencl"},
    "a ring of no size": {"fifo_size": 63},
    "an offset that leaves the segment": {"shared_offset": segment_bytes() // 128 * 128},
    "an offset into the control block": {"shared_offset": 0},
    "an offset that is not aligned": {"shared_offset": OFFSET + 8},
    "more threads than rings": {"threads": 2},
    "no threads": {"threads": 0},
    "a text for a number": {"fifo_size": "64"},
    "a ring that is larger than its memory": {"fifo_size": 1 << 20},
}


@pytest.mark.parametrize("name", OPENS)
@pytest.mark.usefixtures("bystander")
def test_what_can_not_be_opened_is_refused(daemon: RunningDaemon, name: str) -> None:
    with RawClient(daemon) as client:
        answer = client.open(**OPENS[name])
        assert answer is not None
        assert answer["error"] in ("argument", "protocol"), answer


def _unsealed() -> int:
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, segment_bytes())
    return descriptor


@pytest.mark.parametrize("which", ["segment", "ring"])
@pytest.mark.parametrize("kind", ["too small", "one that can be cut short", "a socket", "a directory", "none"])
@pytest.mark.usefixtures("bystander")
def test_descriptors_that_are_no_such_memory_are_refused(daemon: RunningDaemon, which: str, kind: str) -> None:
    with RawClient(daemon) as client:
        assert client.say(HELLO) is not None
        wrong: list[int] = []
        small = SharedMemory.allocate(4096 if which == "segment" else 1)
        if kind == "too small":
            wrong = [os.dup(small.descriptor)]
        elif kind == "one that can be cut short":
            wrong = [_unsealed()]
        elif kind == "a socket":
            wrong = [os.dup(client.connection.fileno())]
        elif kind == "a directory":
            wrong = [os.open("/", os.O_RDONLY)]
        right = client.ring if which == "segment" else client.segment
        given = [*wrong, right.descriptor] if which == "segment" else [right.descriptor, *wrong]
        frame = opening(**({"fifo_size": 1 << 12} if kind == "too small" and which == "ring" else {}))
        answer = client.say(frame, *given)
        for descriptor in wrong:
            os.close(descriptor)
        assert answer is not None
        assert answer["error"] in ("argument", "protocol")


def test_ids_of_another_client_are_none_of_this_ones(daemon: RunningDaemon, bystander: RawClient) -> None:
    theirs = bystander.use()  # the test's client has fewer objects, so none has one of these ids
    strange = [
        {"do": "remove_memory", "first": theirs["first"]},
        {"do": "reserve_channel", "connection": theirs["connection"]},
        {"do": "free_channels", "channels": [theirs["channel"]], "connection": 0},
        {"do": "set_channel", "channel": theirs["channel"], "connection": 0, "word": ""},
        {"do": "set_channel", "channel": 5000, "connection": 0, "word": ""},
    ]
    for request in strange:
        with RawClient(daemon) as stranger:
            assert stranger.opens()
            stranger.use()
            answer = stranger.say(request)
            assert answer is not None
            assert answer["error"] == "protocol", request
            assert stranger.ended()


@pytest.mark.parametrize(
    "request_",
    [
        {"do": "fly"},
        {"do": 7},
        {},
        {"do": "open"},
        {"do": "drain", "timeout": -1},
        {"do": "drain", "timeout": float("nan")},
        {"do": "free_channels", "channels": {"0": 1}, "connection": 0},
        {"do": "add_memory", "keys": [], "handle": "not base64", "nbytes": 1},
        {"do": "add_memory", "keys": [], "handle": 3, "nbytes": 1},
        {"do": "add_pinned_memory"},
        {"do": "add_pinned_memory", "handle": 3},
        {"do": "add_pinned_memory", "handle": b"\0", "nbytes": 1},
        {"do": "add_remote_memory", "address": 4096, "nbytes": 1, "keys": [1 << 64]},
        {"do": "add_remote_memory", "address": -1, "nbytes": 1, "keys": []},
        {"do": "add_remote_memory", "address": 4096, "nbytes": 1, "keys": [1] * 9},
        {"do": "unsupported_reason", "transport": "verbs"},
        {"do": "make_endpoint", "peer": 1, "transport": "verbs"},
        {"do": "connect_endpoint", "peer": 1, "theirs": structs.asdict(EndpointInfo(b"", 0, 0)), "timeout": 1},
        {"do": "open_connection", "peer": 1},
        {"do": "expose", "handle": b"\0", "nbytes": 1, "transport": "verbs"},
        {"do": "withdraw", "number": 0},
        {
            "do": "open_remote",
            **REMOTE,
            "rdma": {"device": "mlx5_0"},
            "signals": [0, 8],
            "near": [None, None],
            "local_rank": 0,
            "core_share": 1,
        },
        {"do": "open_remote", **REMOTE, "signals": [0], "near": [None, None], "local_rank": 0, "core_share": 1},
        {"do": "add_schedule"},
        {"do": "add_schedule", "schedule": {"posts": [{"channel": -1, "memory": 0, "offset": 0}]}},
        {"do": "add_schedule", "schedule": {"sends": [{"channel": 0, "src_memory": 0}]}},
        {"do": "remove_schedule", "number": 0},
        {"do": "remove_schedule", "number": 1},
        {"do": "write_report"},
        {"do": "write_report", "cause": ["all is wrong"]},
    ],
    ids=str,
)
@pytest.mark.usefixtures("bystander")
def test_a_request_that_makes_no_sense_ends_its_client(daemon: RunningDaemon, request_: dict[str, Any]) -> None:
    with RawClient(daemon) as client:
        assert client.opens()
        client.use()
        answer = client.say(request_)
        assert answer is not None
        assert answer["error"] == "protocol"
        assert client.ended()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            {"do": "fly"},
            "do: unknown value 'fly'; expected one of add_memory, add_pinned_memory, ",
        ),
        ({}, "field 'do' is missing"),
        ({"do": "drain"}, "field 'timeout' is missing"),
        ({"do": "drain", "timeout": -1}, "timeout: expected float >= 0.0, got -1"),
        ({"do": "drain", "timeout": 1, "now": True}, "unknown field 'now'; expected timeout, request"),
        ({"do": "drain", "timeout": 1, "request": -1}, "request: expected int >= 0, got -1"),
        (
            {"do": "free_channels", "channels": [0, 1 << 10], "connection": 0},
            "channels[1]: expected int <= 1023, got 1024",
        ),
        (
            {"do": "add_remote_memory", "address": 1 << 64, "nbytes": 1, "keys": []},
            "address: expected an integer of at most",
        ),
        (
            {"do": "add_memory", "keys": [], "handle": "@", "nbytes": 1},
            "handle: Invalid base64 encoded string, got '@'",
        ),
        (opening(shared_offset=OFFSET + 8), "options.shared_offset: expected int that's a multiple of 128, got "),
        ({"do": "connect_copy", "peer": "x" * 1000}, "peer: expected int | null, got '" + 99 * "x" + "…"),
    ],
    ids=str,
)
def test_an_error_names_client_field_and_what_was_expected(
    daemon: RunningDaemon, request_: dict[str, Any], message: str
) -> None:
    with RawClient(daemon) as client:
        assert client.say(HELLO) is not None
        answer = client.say(request_)
        assert answer is not None
        assert answer["message"].startswith(f"invalid request from process {os.getpid()}: {message}")
        assert client.ended()


def test_the_daemon_opens_the_adapters_that_a_rank_names(daemon: RunningDaemon) -> None:
    remote = {**REMOTE, "rdma": asdict(RdmaOptions(devices=("rxe8", "rxe9"))), "near": [None, None]}
    with RawClient(daemon) as client:
        assert client.opens()
        client.result({"do": "open_remote", **remote, "signals": [0, 8], "local_rank": 0, "core_share": 1})
        answer = client.say({"do": "unsupported_reason", "transport": "verbs"})
        assert "no RDMA device 'rxe8'" in str(answer), answer


@pytest.mark.usefixtures("bystander")
def test_memory_that_can_not_be_mapped_is_refused(daemon: RunningDaemon) -> None:
    with RawClient(daemon) as client:
        assert client.opens()
        used = client.use()
        handle = client.buffer.export(client.buffer.ptr, 4096)
        refused = [
            {"do": "add_memory", "keys": [], "handle": b"\0", "nbytes": 1},
            {"do": "add_memory", "keys": [], "handle": handle, "nbytes": 4097},
            {"do": "add_pinned_memory", "handle": b"\0"},
            {"do": "add_pinned_memory", "handle": client.buffer.export(client.buffer.ptr, 4097)},
            {"do": "add_pinned_memory", "handle": client.buffer.export(client.buffer.ptr + 4096, 1)},
            client.set_channel(used, nbytes=4096),
            client.set_channel(used, offset=4),
        ]
        for request in refused:
            answer = client.say(request)
            assert answer is not None
            assert answer["error"] == "argument", request
        assert client.say({"do": "add_memory", "keys": [], "handle": handle, "nbytes": 4096}) is not None


@pytest.mark.usefixtures("bystander")
def test_numbers_that_are_not_free_are_refused(daemon: RunningDaemon) -> None:
    memory = SharedMemory.allocate(4096)
    part, long = memory.export(memory.ptr, 4096), 5 << 32  # five windows of 4 GiB
    wrong: dict[str, dict[str, Any]] = {
        "first: the ids from 0 to 0": {"do": "add_memory", "keys": [], "handle": part, "nbytes": 4096, "first": 0},
        "first: the ids from 0 to 4": {
            "do": "add_remote_memory",
            "address": 8,
            "nbytes": long,
            "keys": [1],
            "first": 0,
        },
        "first: the ids from 507 to 511": {
            "do": "add_remote_memory",
            "address": 8,
            "nbytes": long,
            "keys": [1],
            "first": 507,
        },
        "first: the ids from 0 to 0 are": {"do": "add_pinned_memory", "handle": memory.handle, "first": 0},
        "channel: 0 is in use": {"do": "reserve_channel", "connection": 0, "channel": 0},
        "channel: 0 is": {"do": "reserve_elsewhere", "channel": 0},
        "number: 1 is in use": {"do": "add_schedule", "number": 1},
        "start: the proxy is started already": {"do": "start"},
    }
    for message, request in wrong.items():
        with RawClient(daemon) as client:
            assert client.opens()
            used = client.use()
            schedule = client.schedule(used)
            assert client.result({"do": "add_schedule", "schedule": schedule, "number": 1}) == 1
            answer = client.say(request | ({"schedule": schedule} if request["do"] == "add_schedule" else {}))
            assert answer is not None
            assert answer["error"] == "protocol"
            assert message in answer["message"]


@pytest.mark.usefixtures("bystander")
def test_objects_are_made_with_the_numbers_that_the_client_wants(daemon: RunningDaemon) -> None:
    with RawClient(daemon) as client:
        assert client.opens()
        used = client.use()
        assert client.say(client.set_channel(used)) == DONE
        assert client.result({"do": "reserve_channel", "connection": 0, "channel": 77})[0] == 77
        assert client.result({"do": "reserve_elsewhere", "channel": 1023}) == 1023
        assert client.result({"do": "reserve_elsewhere"}) == 1
        memory = {"do": "add_remote_memory", "address": 8, "nbytes": 5 << 32, "keys": [1]}
        assert client.result(memory | {"first": 503}) == 503
        assert client.result(memory) == 1
        assert client.result({"do": "suspend", "timeout": 5}) == {"0": [0, 0], "77": [0, 0]}
        assert client.result({"do": "suspend", "timeout": 5}) == {}
        assert client.say(opening(), client.segment.descriptor, client.ring.descriptor) is not None
        assert client.say({"do": "start"}) == DONE


@pytest.mark.usefixtures("bystander")
def test_pinned_memory_is_unmapped_with_its_client(daemon: RunningDaemon) -> None:
    before = daemon.resources()
    memory = SharedMemory.allocate(4096)
    with RawClient(daemon) as client:
        assert client.opens()
        for _ in range(600):  # more requests than a client has ids
            answer = client.say({"do": "add_pinned_memory", "handle": memory.handle})
            assert answer is not None
        assert answer["error"] == "resource"
    assert daemon.settles(before), (before, daemon.resources())


@pytest.mark.usefixtures("bystander")
def test_descriptors_that_nobody_asked_for_are_closed(daemon: RunningDaemon) -> None:
    with RawClient(daemon) as client:
        assert client.opens()
        before = daemon.descriptors()
        for _ in range(20):
            client.say({"do": "drain", "timeout": 1}, *[client.ring.descriptor] * 64)
        assert daemon.descriptors() <= before


def test_descriptors_without_an_answers_number_are_closed(daemon: RunningDaemon) -> None:
    before = daemon.descriptors()
    for _ in range(5):
        with RawClient(daemon) as client:
            assert client.say(HELLO) is not None
            refused = client.say(opening() | {"request": "first"}, client.segment.descriptor, client.ring.descriptor)
            assert refused is not None
            assert refused["error"] == "protocol"
            assert client.ended()
    wait_for(lambda: daemon.descriptors() <= before, "the daemon keeps none")


@pytest.mark.parametrize("frames", [300, pytest.param(3_000, marks=pytest.mark.full)])
def test_frames_of_a_fuzzer_do_no_harm(daemon: RunningDaemon, bystander: RawClient, frames: int) -> None:
    """Sends mutated valid frames and random bytes, some with file descriptors attached."""
    rng = random.Random(20260101)
    before = daemon.resources()
    sent = 0
    while sent < frames:
        with RawClient(daemon) as client:
            used = client.opens() and client.use()
            assert used
            handle = client.buffer.export(client.buffer.ptr, 64)
            valid: list[dict[str, Any]] = [
                {"do": "add_memory", "keys": [], "handle": handle, "nbytes": 64},
                {"do": "add_pinned_memory", "handle": handle},
                {"do": "remove_memory", "first": rng.randrange(4)},
                {"do": "connect_copy", "peer": rng.randrange(4)},
                {"do": "reserve_channel", "connection": 0},
                {"do": "reserve_elsewhere", "channel": rng.randrange(4)},
                {"do": "start"},
                {"do": "suspend", "timeout": 0.001},
                client.set_channel(used),
                {"do": "free_channels", "channels": [used["channel"]], "connection": 0},
                {"do": "drain", "timeout": 0.001},
                {"do": "add_schedule", "schedule": client.schedule(used)},
                {"do": "remove_schedule", "number": rng.randrange(1, 4)},
                {"do": "add_remote_memory", "address": 4096, "nbytes": 64, "keys": [1]},
                {"do": "open_remote", **REMOTE, "signals": [0, 8], "near": [None, 0], "local_rank": 0, "core_share": 1},
                {"do": "make_endpoint", "peer": 1, "transport": "staged"},
                {"do": "expose", "handle": handle, "nbytes": 64, "transport": "verbs"},
                opening(),
            ]
            alive = True
            while alive and sent < frames:
                frame: bytes = frame_of(rng.choice(valid))
                chance = rng.random()
                if chance < 0.1:
                    frame = rng.randbytes(rng.randrange(1, 300))
                elif chance < 0.3:
                    damaged = bytearray(frame)
                    damaged[rng.randrange(len(damaged))] = rng.randrange(256)
                    frame = bytes(damaged)
                elif chance < 0.4:
                    frame = frame[: rng.randrange(1, len(frame))]
                extra = [client.ring.descriptor] * rng.choice([0, 0, 0, 0, 1, 3])
                alive = client.say(frame, *extra) is not None
                sent += 1
    assert bystander.say({"do": "drain", "timeout": 5}) == DRAINED
    assert daemon.settles(before), (before, daemon.resources())


ATTEMPTS = pytest.mark.parametrize("attempts", [6, pytest.param(60, marks=pytest.mark.full)])


@ATTEMPTS
@pytest.mark.parametrize("under", ["a flood of triggers", "a schedule"])
def test_tables_that_change_meanwhile_do_no_harm(
    daemon: RunningDaemon, bystander: RawClient, under: str, attempts: int
) -> None:
    """A client changes tables that its triggers name, or a schedule that it starts repeatedly."""
    before = daemon.resources()
    for attempt in range(attempts):
        with RawClient(daemon) as client, contextlib.ExitStack() as traffic:
            assert client.opens()
            used = client.use()
            assert client.say(client.set_channel(used, offset=1024)) == DONE
            changes = [
                client.set_channel(used, offset=1024),
                {"do": "free_channels", "channels": [used["channel"]], "connection": 0},
                {"do": "remove_memory", "first": used["first"]},
            ]
            if under == "a schedule":
                number = client.result({"do": "add_schedule", "schedule": client.schedule(used)})
                changes.append({"do": "remove_schedule", "number": number})
                traffic.enter_context(Ringing(client.schedule_words, number))
            else:
                operation = Operation.DATA | Operation.SIGNAL
                trigger = Trigger(operation, used["channel"], 8, used["first"], 0, used["first"], 64)
                traffic.callback(Flood(client.ring, trigger).end)
            change = changes[attempt % len(changes)]
            for _ in range(10):
                if client.say(change) != DONE:  # the change was already made, or the client failed
                    break
    assert bystander.say({"do": "drain", "timeout": 5}) == DRAINED
    assert daemon.settles(before), (before, daemon.resources())


def test_a_schedule_without_the_words_of_peers_is_refused(daemon: RunningDaemon) -> None:
    with RawClient(daemon) as client:
        assert client.open(semaphores_offset=None) is not None
        used = client.use()
        refused = client.say({"do": "add_schedule", "schedule": client.schedule(used)})
        assert refused is not None
        assert refused["error"] == "argument"


@pytest.mark.parametrize("number", [20, pytest.param(200, marks=pytest.mark.full)])
def test_many_clients_come_and_go(daemon: RunningDaemon, bystander: RawClient, number: int) -> None:
    before = daemon.resources()
    clients = []
    for _ in range(number):
        client = RawClient(daemon)
        assert client.opens()
        client.use()
        clients.append(client)
    assert bystander.say({"do": "drain", "timeout": 5}) == DRAINED
    for client in clients:
        client.connection.close()
    assert daemon.settles(before), (before, daemon.resources())


def test_a_client_that_says_nothing_keeps_nobody_waiting(daemon: RunningDaemon) -> None:
    silent = [daemon.connect() for _ in range(20)]
    with RawClient(daemon) as client:
        assert client.opens()
    for connection in silent:
        connection.close()


def test_memory_in_the_place_of_removed_memory_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon unmaps the removed memory only when the worker is idle, and a driver maps the new memory only after
    that.
    """
    open_handle, mapped = HostRuntime.open, []

    def open_alone(runtime: HostRuntime, handle: bytes) -> Memory:
        if any(not memory.closed for memory in mapped):
            raise ArgumentError("handle", "another is mapped in its place")
        mapped.append(open_handle(runtime, handle))
        return mapped[-1]

    monkeypatch.setattr(HostRuntime, "open", open_alone)
    monkeypatch.setattr(session_memories, "_QUIET_SECONDS", 0.0)
    running = RunningDaemon(tmp_path / "socket", None)
    with Daemon(running.path) as daemon:
        serving = threading.Thread(target=daemon.serve)
        serving.start()
        with RawClient(running) as client:
            assert client.opens()
            memory = client.use()
            other = SharedMemory.allocate(4096)
            handle = other.export(other.ptr, 4096)
            refused = client.say({"do": "add_memory", "keys": [], "handle": handle, "nbytes": 4096})
            assert refused is not None
            assert "in its place" in refused["message"]
            assert client.say({"do": "remove_memory", "first": memory["first"]}) == DONE
            assert client.say({"do": "add_memory", "keys": [], "handle": handle, "nbytes": 4096}) == {
                "kind": "answer",
                "result": memory["first"],
            }
        daemon.stop()
        serving.join()


def test_a_client_without_a_thread_is_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = Thread.start, []

    def start_all_but_the_first(thread: Thread) -> None:
        if thread.name == "proxyccl-client" and not refused:
            refused.append(thread)
            raise ResourceError("no thread can be started")
        start(thread)

    monkeypatch.setattr(Thread, "start", start_all_but_the_first)
    running = RunningDaemon(tmp_path / "socket", None)
    with Daemon(running.path) as daemon:
        serving = threading.Thread(target=daemon.serve)
        serving.start()
        with RawClient(running) as client:
            assert client.say(HELLO) is None
        with RawClient(running) as client:
            assert client.opens()
        daemon.stop()
        serving.join()
    assert len(refused) == 1


# -- the socket and its users ---


def test_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "peer_credentials", lambda _: (os.getpid(), os.geteuid() + 1))
    monkeypatch.setenv("PROXYCCL_DAEMON_SOCKET", str(tmp_path / "socket"))
    with Daemon(socket_path()) as daemon:
        serving = threading.Thread(target=daemon.serve)
        serving.start()
        user = os.geteuid()
        assert f"serves user {user}, not {user + 1}" in missing_in_daemon(TIMEOUT)[0]
        assert daemon.clients == 0
        daemon.stop()
        serving.join()


def test_silent_strangers_cost_no_thread_and_no_client_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    monkeypatch.setattr(server, "peer_credentials", lambda _: (os.getpid(), user + 1))
    with daemon_inside(tmp_path / "socket") as daemon:
        threads = threading.active_count()
        strangers = [connected(tmp_path / "socket") for _ in range(100)]
        assert all(stranger.recv(LONGEST_FRAME) for stranger in strangers)  # the refusal
        assert [stranger.recv(LONGEST_FRAME) for stranger in strangers] == [b""] * 100
        assert (daemon.clients, threading.active_count()) == (0, threads)
        monkeypatch.undo()
        monkeypatch.setenv("PROXYCCL_DAEMON_SOCKET", str(tmp_path / "socket"))
        assert missing_in_daemon(TIMEOUT)[0] == ""
        for stranger in strangers:
            stranger.close()


def test_of_too_many_silent_clients_the_first_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_GREETED", 4)
    monkeypatch.setattr(server, "_SILENT_SECONDS", 0.0)
    with daemon_inside(tmp_path / "socket") as daemon:
        silent = []
        for number in range(5):
            silent.append(connected(tmp_path / "socket"))
            least = min(number + 1, 4)
            wait_for(functools.partial(seen, daemon, least), "the client is seen")
        assert silent[0].recv(LONGEST_FRAME) == b""
        wait_for(lambda: daemon.clients == 4, "its session ends")
        for each in silent:
            each.close()


def seen(daemon: Daemon, clients: int) -> bool:
    return daemon.clients >= clients


def connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(TIMEOUT)
    connection.connect(os.fspath(path))
    return connection


def test_the_socket_is_its_users_alone(daemon: RunningDaemon, tmp_path: Path) -> None:
    assert stat.S_IMODE(daemon.path.stat().st_mode) == 0o600
    nested = tmp_path / "fresh" / "socket"
    with Daemon(nested):
        assert stat.S_IMODE(nested.parent.stat().st_mode) == 0o700
    (tmp_path / "public").mkdir()
    (tmp_path / "public").chmod(0o777)
    for mode in (0o777, 0o1777, 0o770):
        (tmp_path / "public").chmod(mode)
        with pytest.raises(UntrustedPathError, match=r"other users can write to .*public .*chmod"):
            Daemon(tmp_path / "public" / "socket")
    (tmp_path / "link").symlink_to(nested.parent)
    with pytest.raises(UntrustedPathError, match="link is a link"):
        Daemon(tmp_path / "link" / "socket")
    assert list(nested.parent.iterdir()) == [nested.with_name("socket.lock")]


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can give files to other users")
@pytest.mark.parametrize("name", ["socket", "socket.lock"])
def test_what_a_stranger_left_beside_the_socket_is_refused_by_name(tmp_path: Path, name: str) -> None:
    left = tmp_path / name
    left.touch()
    os.chown(left, 12345, 12345)
    with pytest.raises(UntrustedPathError, match=rf"{left} belongs to user 12345; remove it"):
        Daemon(tmp_path / "socket")
    assert left.stat().st_uid == 12345
    left.unlink()
    with Daemon(tmp_path / "socket"):
        pass


def test_a_lock_that_is_a_link_or_no_file_is_refused_by_name(tmp_path: Path) -> None:
    lock, elsewhere = tmp_path / "socket.lock", tmp_path / "elsewhere"
    lock.symlink_to(elsewhere)
    with pytest.raises(UntrustedPathError, match=rf"{lock} is a link"):
        Daemon(tmp_path / "socket")
    assert not elsewhere.exists()
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(ArgumentError, match=rf"{lock} is not a regular file"):
        Daemon(tmp_path / "socket")


def test_a_lock_that_others_could_open_is_closed_to_them(tmp_path: Path) -> None:
    lock = tmp_path / "socket.lock"
    lock.touch(mode=0o644)
    with Daemon(tmp_path / "socket"):
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600


def test_a_second_daemon_on_a_socket_is_refused(daemon: RunningDaemon) -> None:
    with pytest.raises(ResourceError, match="another node daemon listens"):
        Daemon(daemon.path)
    with RawClient(daemon) as client:
        assert client.opens()


def test_what_a_killed_daemon_left_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    for _ in range(2):
        with running_daemon(path) as killed:
            killed.end(9)
        assert path.is_socket()
    with Daemon(path):
        assert path.is_socket()
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(ArgumentError, match="not a socket"):
        Daemon(path)
    assert path.read_text() == "precious"


def test_where_the_socket_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROXYCCL_DAEMON_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert socket_path() == Path("/run/user/7/proxyccl.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert socket_path() == Path(f"/tmp/proxyccl-{os.geteuid()}/daemon.sock")
    monkeypatch.setenv("PROXYCCL_DAEMON_SOCKET", "/elsewhere")
    assert socket_path() == Path("/elsewhere")
    assert socket_path("/here") == Path("/here")
    with pytest.raises(ArgumentError, match="socket"):
        socket_path("/" + 200 * "x")


@pytest.mark.parametrize(
    ("options", "argument"),
    [({"threads": 0}, "threads"), ({"threads": 65}, "threads"), ({"cores": [1 << 20]}, "cores")],
)
def test_options_that_can_not_be_are_named(tmp_path: Path, options: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError, match=argument):
        Daemon(tmp_path / "socket", DaemonOptions(**options))
    with Daemon(tmp_path / "socket"):  # the first daemon left nothing behind
        pass


@pytest.mark.parametrize("name", ["spin_us", "yield_us", "max_sleep_us"])
@pytest.mark.parametrize("value", [-1, float("nan"), 1e12])
def test_an_idle_policy_that_can_not_be_is_named(name: str, value: float) -> None:
    with pytest.raises(ArgumentError, match=name):
        IdlePolicy(**{name: value})


def test_cores_are_read_as_people_write_them() -> None:
    assert parse_cores("3") == [3]
    assert parse_cores("0-2,8,2") == [0, 1, 2, 8]
    for text in ("", "a", "1-", "-1", "3-1", "0,,1", "99999999999", "node:99", "node:../x"):
        with pytest.raises(ArgumentError, match="cores"):
            parse_cores(text)
    with pytest.raises(ArgumentError, match="near"):
        parse_cores("near", None)


def test_a_proxy_is_one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="proxy: 'fork'"):
        run_ranks(1, lambda comm: None, proxy="fork")
    monkeypatch.setenv("PROXYCCL_PROXY", "fork")
    with pytest.raises(ArgumentError, match="PROXYCCL_PROXY: 'fork'"):
        run_ranks(1, lambda comm: None)


def test_a_daemon_that_is_missing_on_one_rank_is_an_error_on_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROXYCCL_DAEMON_SOCKET", str(tmp_path / "socket"))
    bodies: list[Communicator] = []
    with pytest.raises(RuntimeUnavailableError, match="rank 0: no node daemon answers"):
        run_ranks(2, bodies.append, proxy="daemon")
    assert not bodies


def test_a_process_that_nobody_offered_is_not_reached(daemon: RunningDaemon) -> None:
    with RawClient(daemon) as client, RawClient(daemon) as owner:
        assert client.say(HELLO) is not None
        assert owner.say(HELLO) is not None
        reach = {"do": "reach", "process": "ab" * 16}
        unknown = {"kind": "refused", "error": "argument", "argument": "process"}
        answer = client.say(reach)
        assert answer is not None
        assert answer.items() >= unknown.items()
        assert owner.say({"do": "offer", "process": "ab" * 16}) == DONE
        assert client.say(reach) == DONE
        assert json.loads(owner.connection.recv(LONGEST_FRAME)) == {"kind": "introduced"}
        owner.connection.close()
        wait_for(lambda: (client.say(reach) or {}).items() >= unknown.items(), "the offer ends with its client")
        answer = client.say({"do": "reach", "process": "ab"})
        assert answer is not None
        assert answer["message"] == "process: expected 32 hexadecimal digits, not 'ab'"
        assert client.ended()
