"""The choice of a connection's path, and the path's description."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from proxyccl.channels.transfers import paths
from proxyccl.channels.transfers.metadata import METADATA
from proxyccl.device.errors import ArgumentError
from proxyccl.proxy._transfers import lib
from proxyccl.transfer import Agent, DisconnectedError
from support.agents import Pair, add_changed, child, serve_memory

REFUSED = "process_vm_readv: Operation not permitted"
pytestmark = pytest.mark.host_only("agents move the host's memory, whatever the runtime")


class Refusing:
    """The engine's library on a kernel that refuses to copy from other processes."""

    def proxyccl_process_read(self, *_: object) -> int:
        return errno.EPERM

    def __getattr__(self, name: str) -> object:
        return getattr(lib, name)


@pytest.fixture
def not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it look as if the kernel refused to copy from process to process."""
    monkeypatch.setattr(paths, "lib", Refusing())


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it look as if the agents' sockets were in different network namespaces."""
    found = paths.unix_address
    monkeypatch.setattr(paths, "unix_address", lambda token: found(token) + b"-elsewhere")


def test_a_socket_on_one_host_is_not_taken_silently(pair: Pair, not_copied: None) -> None:
    with pytest.warns(RuntimeWarning, match=f"through a socket: {REFUSED}"):
        path = pair.a.connect("b")
    assert path.name == "unix"
    assert path.reason.startswith(REFUSED)


def test_tcp_on_one_host_is_not_taken_silently(pair: Pair, not_copied: None, apart: None) -> None:
    with pytest.warns(RuntimeWarning, match=f"no such agent in this network namespace; {REFUSED}"):
        assert pair.a.connect("b").name == "tcp"


def test_the_kernel_copies_between_network_namespaces(pair: Pair, apart: None) -> None:
    assert pair.a.connect("b") == paths.Path("process_vm")
    pair.a.read("b", pair.whole(), message=b"by TCP").wait()
    np.testing.assert_array_equal(pair.ours, pair.theirs)
    pair.b.wait_for_message(60)
    pair.b.close()
    with pytest.raises(DisconnectedError):  # noqa: PT012  the loop ends when the agent notices the lost link
        while True:
            pair.a.notify("b", b"")


def test_a_number_of_another_process_is_not_copied_from(pair: Pair, apart: None) -> None:
    place = METADATA.decode(pair.b.metadata(), "an agent").place
    assert place is not None
    add_changed(pair, place=msgspec.structs.replace(place, process=1))
    with pytest.warns(RuntimeWarning, match="through a socket"):
        assert pair.a.connect("b").name == "tcp"


def test_accepted_links_send_small_answers_at_once_and_notice_silent_hosts() -> None:
    listeners, addresses = paths.open_listeners(b"a token of a test", ["127.0.0.1"])
    with contextlib.ExitStack() as undo:
        for listener in listeners:
            undo.enter_context(listener)
        undo.enter_context(socket.create_connection(addresses[0], 60))
        listeners[1].settimeout(60)
        accepted = undo.enter_context(listeners[1].accept()[0])
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_an_address_that_does_not_answer_takes_no_time_of_the_next(
    apart: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer's listener has a full queue of connections, so its host drops packets."""
    monkeypatch.setattr(paths, "boot_id", lambda: "another")
    with contextlib.ExitStack() as undo:
        full = undo.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waits = undo.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex(full.getsockname())
        pair = undo.enter_context(contextlib.closing(Pair(timeout=1000)))
        _publish(pair, full.getsockname())
        assert pair.a.connect("b").name == "tcp"


def _publish(pair: Pair, first: tuple[str, int], *, alone: bool = False) -> None:
    """Makes agent a know agent b by the address `first`, and then by its own addresses unless `alone`."""
    place = METADATA.decode(pair.b.metadata(), "an agent").place
    assert place is not None
    add_changed(pair, place=msgspec.structs.replace(place, addresses=[first, *([] if alone else place.addresses)]))


@pytest.mark.parametrize("alone", [False, True], ids=["among the agent's addresses", "alone"])
@pytest.mark.parametrize("stranger", ["another agent", "another program", "silent"])
def test_a_stranger_at_a_published_address_is_not_taken_for_the_agent(
    stranger: str, alone: bool, apart: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "boot_id", lambda: "another")
    with contextlib.ExitStack() as undo:
        pair = undo.enter_context(contextlib.closing(Pair(timeout=2)))
        if stranger == "another agent":
            other = undo.enter_context(Agent("b", listen=["127.0.0.1"]))
            address = METADATA.decode(other.metadata(), "an agent").place.addresses[0]  # type: ignore[union-attr]
        else:
            listener = undo.enter_context(socket.create_server(("127.0.0.1", 0)))
            address = listener.getsockname()
        _publish(pair, address, alone=alone)
        with ThreadPoolExecutor(1) as threads:
            connecting = threads.submit(pair.a.connect, "b")
            if stranger != "another agent":
                accepted = undo.enter_context(listener.accept()[0])
                if stranger == "another program":
                    accepted.sendall(b"220 mail.example ESMTP\r\n")
            if alone:
                error = "timed out" if stranger == "silent" else "another program listens there"
                with pytest.raises(DisconnectedError, match=error):
                    connecting.result(60)
            else:
                assert connecting.result(60).name == "tcp"
        if stranger != "another agent":
            with contextlib.suppress(ConnectionResetError):
                assert accepted.recv(1) == b""  # the stranger gets no secret


class Yama(Refusing):
    """Emulates a kernel with Yama, where a peer must permit copies of its memory, as it does if `permits` is true."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scope: Path) -> None:
        self.permits = True
        scope.write_text("1\n")
        self._asked = False
        monkeypatch.setattr(paths, "_YAMA", scope)
        monkeypatch.setattr(paths, "lib", self)

    def proxyccl_process_read(self, *arguments: object) -> int:
        return int(lib.proxyccl_process_read(*arguments)) if self._asked and self.permits else errno.EPERM

    def proxyccl_ask_to_copy(self, *arguments: object) -> int:
        self._asked = True
        return int(lib.proxyccl_ask_to_copy(*arguments))


@pytest.fixture
def yama(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Yama:
    return Yama(monkeypatch, tmp_path / "ptrace_scope")


def test_a_peer_is_asked_where_yama_restricts_copies(pair: Pair, yama: Yama) -> None:
    assert pair.a.connect("b") == paths.Path("process_vm")
    pair.a.notify("b", b"over the same socket")
    pair.b.wait_for_message(60)


def test_a_peer_that_is_asked_may_refuse(pair: Pair, yama: Yama) -> None:
    yama.permits = False
    with Agent("c", listen=(), paths=["unix"]) as refuses:
        pair.a.add(refuses.metadata())
        with pytest.warns(RuntimeWarning, match="asked to permit it, the peer answered: Operation not permitted"):
            assert pair.a.connect("c").name == "unix"


def test_an_answer_that_comes_too_late_is_not_another_frame_s(yama: Yama, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer is stopped, so the peer answers a request for permission only after the agent's wait has ended."""
    yama.permits = False
    monkeypatch.setattr(paths, "_ANSWER_MS", 100)
    with child(serve_memory) as process, Agent("a", listen=()) as agent:
        agent.add(process.receive())
        process.stop()
        with pytest.warns(RuntimeWarning, match="asked to permit it, the peer answered: Connection timed out"):
            assert agent.connect("b").name == "unix"
        process.resume()
        memory = np.zeros(100, np.uint8)
        ours, theirs = agent.register(memory), agent.regions_of("b")[0]
        agent.read("b", [(ours.address, theirs.address, 100)]).wait()
        assert (memory == 7).all()


@pytest.mark.parametrize(
    ("allowed", "patched", "reason"),
    [
        (["process_vm"], "not_copied", f"by process_vm: {REFUSED}"),
        (["unix"], "apart", "by unix: there is no such agent in this network namespace"),
        (["process_vm", "unix"], "elsewhere", "by process_vm or unix: it is on another host"),
    ],
)
def test_a_peer_that_no_allowed_path_reaches_is_refused(
    pair: Pair, allowed: list[str], patched: str, reason: str, request: pytest.FixtureRequest
) -> None:
    if patched == "elsewhere":
        request.getfixturevalue("monkeypatch").setattr(paths, "boot_id", lambda: "another")
    else:
        request.getfixturevalue(patched)
    with Agent("c", listen=(), paths=allowed) as agent:
        agent.add(pair.b.metadata())
        with pytest.raises(DisconnectedError, match=reason):
            agent.connect("b")


def test_the_environment_chooses_paths(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_TRANSFER_PATHS", "unix, tcp")
    with Agent("c", listen=()) as agent:
        agent.add(pair.b.metadata())
        assert agent.connect("b") == paths.Path("unix")
    monkeypatch.setenv("PROXYCCL_TRANSFER_PATHS", "pigeon")
    with pytest.raises(ArgumentError, match="must be one or more of shared_memory, process_vm, unix, fabric, tcp"):
        Agent("c", listen=())
    for wrong in ("tcp", [], ["self"]):
        with pytest.raises(ArgumentError, match="paths"):
            Agent("c", listen=(), paths=wrong)


@pytest.mark.parametrize("listen", [["localhost"], ["0.0.0.0"], ["::"], ["::1", "127.0.0.1"], None])
def test_an_agent_publishes_addresses_that_a_peer_reaches(listen: list[str] | None) -> None:
    with Agent("a", paths=["tcp"]) as a, Agent("b", listen=listen) as b:
        published = json.loads(b.metadata())["place"]["addresses"]
        assert published
        assert not any(ipaddress.ip_address(address).is_unspecified for address, _ in published)
        a.add(b.metadata())
        assert a.connect("b").name == "tcp"


@pytest.mark.parametrize("listen", ["127.0.0.1", ["no such host.invalid"], [7]])
def test_an_agent_can_listen_only_at_addresses_of_its_host(listen: Any) -> None:
    with pytest.raises(ArgumentError, match="listen"):
        Agent("a", listen=listen)


def test_addresses_of_a_name_at_which_the_host_can_t_listen_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = socket.getaddrinfo

    def with_another(host: str, *arguments: Any, **named: Any) -> list[Any]:
        places = found("127.0.0.1", *arguments, **named)
        foreign = [(*place[:4], ("203.0.113.1", 0)) for place in places]
        return foreign + places if host == "two addresses" else found(host, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", with_another)
    with Agent("a", listen=["two addresses"]) as agent:
        assert [address for address, _ in json.loads(agent.metadata())["place"]["addresses"]] == ["127.0.0.1"]
