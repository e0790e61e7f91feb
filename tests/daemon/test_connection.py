"""A rank whose node daemon sends an invalid message treats the daemon as lost, and quotes the message."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from msgspec import Raw

from proxyccl import ClosedError, ProxyLostError, RuntimeUnavailableError
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.proxy.daemon.connection import DaemonConnection, NodeDaemon
from proxyccl.proxy.daemon.protocol import LONGEST_FRAME, REPLIES, VERSION, Answer, AnyReply, Ending, Warned
from proxyccl.proxy.daemon.session_service import SessionService
from proxyccl.proxy.interface import Connection, ProxyFailure
from proxyccl.proxy.shared_words import SharedWords, TurnWatch
from support.running import wait_for
from support.signals import NUMBER, handled, handling

pytestmark = pytest.mark.host_only(reason="needs no runtime")


@dataclass
class Daemon:
    """A stand-in for the node daemon, connected to a rank's client."""

    end: socket.socket
    client: DaemonConnection = field(init=False)
    failures: list[ProxyFailure] = field(default_factory=list)
    timeout: float = 5.0  # of the client

    def send(self, reply: AnyReply | bytes) -> None:
        self.end.send(reply if isinstance(reply, bytes) else REPLIES.encode(reply))

    def answer(self, *replies: AnyReply) -> None:
        def serve() -> None:
            for reply in replies:
                self.end.recv(LONGEST_FRAME)
                self.send(reply)

        threading.Thread(target=serve, daemon=True).start()


def result(value: object, request: int) -> Answer:
    return Answer(Raw(json.dumps(value).encode()), request=request)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(NodeDaemon, "connect", lambda self, timeout: (own, os.getpid()))
    made = Daemon(theirs)
    words = SharedWords(SharedMemory.allocate(SharedWords.BYTES), 0)
    made.client = DaemonConnection(
        lambda: made.timeout, "test", made.failures.append, lambda: TurnWatch(words.schedule_words, 1)
    )
    with theirs:
        yield made
        made.client.hang_up()


def test_an_answer_of_the_type_that_is_expected_is_returned(daemon: Daemon) -> None:
    daemon.answer(result(True, 0), result({"number": 3, "worker": 1, "peer": 2, "transport": "copy"}, 1))
    assert daemon.client.ask(SessionService.drain, 1.0)
    assert daemon.client.ask(SessionService.connect_copy, peer=2) == Connection(3, 1, 2, "copy")
    assert not daemon.failures


def test_objects_need_not_be_freed_in_a_daemon_that_is_lost_or_closed(daemon: Daemon) -> None:
    """Freeing an array must not raise an error, because the garbage collector frees arrays and can't handle errors."""
    daemon.answer(Ending())
    for _ in range(2):
        daemon.client.ask(SessionService.remove_memory, 0)
    with pytest.raises(ProxyLostError):
        daemon.client.ask(SessionService.drain, 1.0)
    daemon.client.hang_up()
    daemon.client.ask(SessionService.remove_memory, 0)
    with pytest.raises(ClosedError):
        daemon.client.ask(SessionService.drain, 1.0)


@pytest.mark.parametrize("lost", [False, True])
def test_a_signals_handler_may_ask_within_another_request(daemon: Daemon, lost: bool) -> None:
    found: list[object] = []

    def ask() -> None:
        try:
            found.append(daemon.client.ask(SessionService.drain, 1.0))
        except ProxyLostError as error:
            found.append(type(error))

    def serve() -> None:
        daemon.end.recv(LONGEST_FRAME)
        signal.pthread_kill(asking, NUMBER)
        daemon.end.recv(LONGEST_FRAME)
        for answer in [Ending()] if lost else [result(True, 0), result(False, 1)]:
            daemon.send(answer)

    asking, server = threading.get_ident(), threading.Thread(target=serve)
    with handled(ask):
        server.start()
        try:
            ask()
        finally:
            server.join()
    assert found == ([ProxyLostError, ProxyLostError] if lost else [False, True])


def test_a_handler_that_takes_long_does_not_lengthen_the_wait(daemon: Daemon) -> None:
    daemon.timeout = 0.3
    with (
        handling(lambda: time.sleep(1)),
        pytest.raises(ProxyLostError, match="does not answer a request to drain: too late"),
    ):
        daemon.client.ask(SessionService.drain, 1.0)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"\xff", "invalid reply from the node daemon: expected JSON, got b'\\xff'"),
        (b'{"kind":"ending","drained":true}', "invalid reply from the node daemon: unknown field 'drained'"),
        (b'{"kind":"refused","error":"other"}', "invalid reply from the node daemon: field 'message' is missing"),
        (
            b'{"kind":"failed","failure":{"code":-1}}',
            "invalid reply from the node daemon: failure.code: expected int >= 0, got -1",
        ),
        (
            b'{"kind":"flown"}',
            "invalid reply from the node daemon: kind: unknown value 'flown'; expected one of answer, ",
        ),
        (b" " * (LONGEST_FRAME + 1), "a frame from the node daemon did not arrive whole"),
    ],
    ids=range(6),
)
def test_nonsense_loses_the_daemon_and_says_what_came(daemon: Daemon, frame: bytes, reason: str) -> None:
    daemon.send(frame)
    wait_for(lambda: bool(daemon.failures), "the daemon is lost")
    (failure,) = daemon.failures
    assert failure.reason.startswith(reason)
    with pytest.raises(ProxyLostError) as caught:
        daemon.client.ask(SessionService.drain, 1.0)
    assert str(caught.value).startswith(f"the node daemon is lost: {reason}")
    assert not daemon.client.is_open


def test_an_answer_to_another_question_loses_the_daemon(daemon: Daemon) -> None:
    daemon.answer(result(None, 0))
    reason = "invalid answer to drain from the node daemon: expected bool, got None"
    with pytest.raises(ProxyLostError, match=reason):
        daemon.client.ask(SessionService.drain, 1.0)
    assert [failure.reason for failure in daemon.failures] == [reason]


def test_a_daemon_that_ends_is_lost_with_its_reason(daemon: Daemon) -> None:
    daemon.send(Ending())
    wait_for(lambda: bool(daemon.failures), "the daemon is lost")
    assert daemon.failures[0].reason == f"process {os.getpid()} is ending"


@pytest.mark.parametrize("action", ["default", "error"])
def test_each_warning_of_the_daemon_is_shown_or_logged(
    daemon: Daemon, action: Literal["default", "error"], caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter(action)
        for _ in range(2):
            daemon.send(Warned("an adapter has failed"))
        wait_for(lambda: len(shown) + len(caplog.records) == 2, "both warnings")
    assert [str(each.message) for each in shown] + caplog.messages == 2 * ["an adapter has failed"]
    assert len(shown) == (2 if action == "default" else 0)
    assert not daemon.failures


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"{", r"no node daemon answers at .* \(invalid answer to Hello from the node daemon: expected JSON"),
        (b'{"version":4,"pid":1}', f"speaks version 4 of the protocol, this process {VERSION}"),
        (b'{"error":"protocol","message":"version: the daemon speaks 4, the client 5"}', "the daemon speaks 4"),
    ],
    ids=["no JSON", "another version", "a refusal"],
)
def test_a_daemon_of_another_version_is_named(tmp_path: Path, answer: bytes, reason: str) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            accepted, _ = listener.accept()
            with accepted:
                accepted.recv(LONGEST_FRAME)
                accepted.send(answer)

        server = threading.Thread(target=serve)
        server.start()
        with pytest.raises(RuntimeUnavailableError, match=reason):
            NodeDaemon(path).connect(5.0)
        server.join()
