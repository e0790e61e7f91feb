"""Sockets between ranks of different hosts: how two ranks connect, and how a rank notices the other's exit."""

from __future__ import annotations

import errno
import functools
import ipaddress
import itertools
import os
import resource
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from msgspec import structs

from proxyccl import PeerLostError, open_runtime
from proxyccl.channels.liveness import host_links
from proxyccl.channels.liveness.failure import FailureState
from proxyccl.channels.liveness.host_links import OFFER, HostLink, Listener, Offer, host_addresses
from proxyccl.channels.liveness.watcher import Watcher
from proxyccl.channels.segment.control import Presence, create_segment
from proxyccl.channels.segment.error_record import ErrorRecord
from proxyccl.device._native import lib
from proxyccl.proxy.interface import ProxyFailure
from support.running import TIMEOUT

RECORD = ErrorRecord(code=3, rank=1, peer=2, operation=4, channel=5, status=-6, expected=1 << 63, seen=8, offset=9)
CALLER_THAT_IS_KILLED = """
import os, signal, sys
from proxyccl.channels.liveness.host_links import Listener
from proxyccl.channels.liveness.host_links import OFFER
Listener(1).join([0], [OFFER.decode(sys.argv[1].encode(), "rank 0")], 20)
os.kill(os.getpid(), signal.SIGKILL)
"""


def joined(world_size: int) -> list[dict[int, HostLink]]:
    """Connects ranks as if all were on different hosts. Returns, for each rank, a dictionary from peers to links."""
    listeners = [Listener(rank) for rank in range(world_size)]
    offers = [listener.offer(1) for listener in listeners]

    def join(rank: int) -> dict[int, HostLink]:
        peers = [peer for peer in range(world_size) if peer != rank]
        return listeners[rank].join(peers, offers, TIMEOUT)

    try:
        with ThreadPoolExecutor(world_size) as pool:
            return list(pool.map(join, range(world_size), timeout=2 * TIMEOUT))
    finally:
        for listener in listeners:
            listener.close()


@pytest.fixture
def pair() -> Iterator[tuple[HostLink, HostLink]]:
    """Joins two ranks. Yields rank 0's link to rank 1, and rank 1's link to rank 0."""
    links = joined(2)
    try:
        yield links[0][1], links[1][0]
    finally:
        links[0][1].close()
        links[1][0].close()


def cut(link: HostLink) -> None:
    """Ends a link without a goodbye, as the end of a killed process does."""
    with socket.socket(fileno=os.dup(link.fileno())) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def heard(link: HostLink) -> ErrorRecord | Presence | str | None:
    poll = select.poll()
    poll.register(link, select.POLLIN)
    assert poll.poll(TIMEOUT * 1000), "nothing is said"
    return link.receive()


def call(listener: Listener, hello: bytes) -> socket.socket:
    """Connects to a listener and sends `hello`. Returns the connection."""
    offer = listener.offer(1)
    connection = socket.create_connection((offer.addresses[0], offer.port), timeout=TIMEOUT)
    connection.sendall(hello)
    return connection


def hello(rank: int, token: bytes) -> bytes:
    return struct.pack("<I16s", rank, token)


def token_of(listener: Listener) -> bytes:
    return listener.offer(1).token


def test_each_rank_gets_a_link_to_every_other() -> None:
    links = joined(4)
    for rank, own in enumerate(links):
        assert sorted(own) == [peer for peer in range(4) if peer != rank]
        assert all(link.peer == peer for peer, link in own.items())
    for rank, own in enumerate(links):
        for link in own.values():
            link.send(ErrorRecord(code=1, rank=rank))
    for own in links:
        for peer, link in own.items():
            assert heard(link) == ErrorRecord(code=1, rank=peer)
            link.close()


def test_nothing_is_heard_from_a_peer_that_says_nothing(pair: tuple[HostLink, HostLink]) -> None:
    assert [link.receive() for link in pair] == [None, None]


def test_an_abort_passes_with_its_whole_record(pair: tuple[HostLink, HostLink]) -> None:
    pair[0].send(RECORD)
    pair[0].close()  # the message must arrive although the link is closed
    assert heard(pair[1]) == RECORD


def test_a_record_in_pieces_is_heard_when_it_is_whole(pair: tuple[HostLink, HostLink]) -> None:
    os.write(pair[0].fileno(), b'{"code": 3, ')
    assert heard(pair[1]) is None
    os.write(pair[0].fileno(), b'"rank": 1}\n')
    assert heard(pair[1]) == ErrorRecord(code=3, rank=1)


def test_a_peer_that_closes_says_goodbye(pair: tuple[HostLink, HostLink]) -> None:
    pair[0].close()
    assert heard(pair[1]) is Presence.LEFT


def test_a_peer_that_is_killed_is_lost() -> None:
    listener = Listener(0)
    program = [sys.executable, "-c", CALLER_THAT_IS_KILLED, OFFER.encode(listener.offer(1)).decode()]
    with subprocess.Popen(program) as process:
        link = listener.join([1], [], TIMEOUT)[1]
        listener.close()
        assert heard(link) == "lost"
        assert process.wait(TIMEOUT) == -9
    link.close()


def test_a_rank_that_closes_behind_an_abort_tells_its_peers(pair: tuple[HostLink, HostLink]) -> None:
    own = create_segment(open_runtime("host"), 1, TIMEOUT)
    watcher = Watcher(1, own, {}, {}, {0: pair[1]})
    own.raise_abort(RECORD)
    watcher.close()
    assert heard(pair[0]) == RECORD
    own.close()


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "left"])
def test_a_failed_transfer_waits_for_the_end_of_its_peer(pair: tuple[HostLink, HostLink], killed: bool) -> None:
    own = create_segment(open_runtime("host"), 1, TIMEOUT)
    watcher = Watcher(1, own, {}, {}, {0: pair[1]})
    ending = threading.Timer(0.1, functools.partial(cut, pair[0]) if killed else pair[0].close)
    ending.start()
    watcher.check_for_end(0)
    assert own.aborted == killed
    if killed:
        assert (own.record().code, own.record().peer) == (lib.PROXYCCL_ERROR_PEER_LOST, 0)
    else:
        assert watcher.presence(0) is Presence.LEFT
    ending.join()
    watcher.close()
    own.close()


def test_a_failed_transfer_of_a_part_tells_the_peer_that_was_lost(pair: tuple[HostLink, HostLink]) -> None:
    segments = [create_segment(open_runtime("host"), 1, TIMEOUT) for _ in range(2)]
    whole = FailureState(1, segments[0])
    part = FailureState(1, segments[1], whole)
    watcher = Watcher(1, segments[0], {}, {}, {0: pair[1]})
    watcher_of_part = Watcher(1, segments[1], {}, {}, {}, parent=watcher, members=[0, 1])
    whole.watch(watcher, whole.observer, str)
    part.watch(watcher_of_part, part.observer, str)
    cut(pair[0])
    part.file_proxy_failure(ProxyFailure(lib.PROXYCCL_ERROR_TRANSPORT, 0, None, -5, "the write failed", peer=0))
    for state in (whole, part):
        with pytest.raises(PeerLostError) as caught:
            state.check()
        assert caught.value.peer == 0
    for each in (watcher_of_part, watcher, *segments):
        each.close()


def test_telling_a_peer_that_is_gone_is_no_error(pair: tuple[HostLink, HostLink]) -> None:
    pair[1].close()
    for _ in range(3):
        pair[0].send(RECORD)


def test_strangers_are_refused_and_do_not_keep_the_peer_out() -> None:
    listener = Listener(0)
    own = token_of(listener)
    strangers = [
        call(listener, hello(1, bytes(16))),  # the token is wrong
        call(listener, hello(7, own)),  # rank 7 does not exist
        call(listener, b"GET /"),
    ]
    peer = call(listener, hello(1, own))
    links = listener.join([1], [], TIMEOUT)
    assert list(links) == [1]
    assert peer.recv(100) == own
    assert [stranger.recv(100) for stranger in strangers] == [b""] * len(strangers)
    links[1].close()
    listener.close()
    for connection in (peer, *strangers):
        connection.close()


def strangers_at(listener: Listener, count: int) -> list[socket.socket]:
    """Opens connections to the listener, and sends nothing or an incomplete request. Returns the connections."""
    return [call(listener, b"GET" if number % 2 else b"") for number in range(count)]


def is_hung_up_on(stranger: socket.socket) -> bool:
    """Returns True when the listener closes or resets the connection, False if it sends something."""
    try:
        return stranger.recv(100) == b""
    except ConnectionResetError:
        return True


def test_silent_strangers_do_not_hold_up_the_peer() -> None:
    listener = Listener(0)
    strangers = strangers_at(listener, 20)  # handling these connections one after another would take 40 s
    peer = call(listener, hello(1, token_of(listener)))
    began = time.monotonic()
    links = listener.join([1], [], TIMEOUT)
    assert time.monotonic() - began < host_links.GREETING_SECONDS
    assert list(links) == [1]
    assert all(map(is_hung_up_on, strangers))
    for each in (links[1], listener, peer, *strangers):
        each.close()


def test_a_hello_in_pieces_is_heard() -> None:
    listener = Listener(0)
    whole = hello(1, token_of(listener))
    peer = call(listener, whole[:7])
    rest = threading.Timer(0.3, peer.sendall, [whole[7:]])
    rest.start()
    links = listener.join([1], [], TIMEOUT)
    rest.join()
    assert peer.recv(100) == token_of(listener)
    for each in (links[1], listener, peer):
        each.close()


def test_who_is_silent_for_long_is_hung_up_on_while_others_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_links, "GREETING_SECONDS", 0.2)
    listener = Listener(0)
    stranger = call(listener, b"GET")
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(listener.join, [1], [], TIMEOUT)
        assert stranger.recv(100) == b""
        peer = call(listener, hello(1, token_of(listener)))
        links = joining.result(TIMEOUT)
    for each in (links[1], listener, peer, stranger):
        each.close()


def test_of_too_many_strangers_the_first_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_links, "MOST_GREETED", 3)
    monkeypatch.setattr(host_links, "GREETING_SECONDS", TIMEOUT)
    listener = Listener(0)
    strangers = strangers_at(listener, 5)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(listener.join, [1], [], TIMEOUT)
        assert all(map(is_hung_up_on, strangers[:2]))
        peer = call(listener, hello(1, token_of(listener)))
        links = joining.result(TIMEOUT)
    for each in (links[1], listener, peer, *strangers):
        each.close()


def test_strangers_give_way_where_no_descriptor_is_left() -> None:
    listener = Listener(0)
    strangers = strangers_at(listener, 6)
    peer = call(listener, hello(1, token_of(listener)))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    # RLIMIT_NOFILE limits the highest descriptor, so descriptors that are in use must be counted.
    used = {int(number) for number in os.listdir("/proc/self/fd")} - {free}
    left = itertools.islice((number for number in itertools.count(free) if number not in used), 5)
    # leaves 5 descriptors
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(left) + 1, before[1]))
    try:
        links = listener.join([1], [], TIMEOUT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for each in (links[1], listener, peer, *strangers):
        each.close()


def test_a_rank_that_nobody_calls_says_whom_it_missed() -> None:
    listener = Listener(0)
    with pytest.raises(PeerLostError, match="rank 1 of another host did not connect in time") as caught:
        listener.join([1, 2], [], 0.3)
    assert (caught.value.rank, caught.value.peer) == (0, 1)
    listener.close()


def test_a_rank_that_nobody_answers_says_what_it_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        for port, failure in ((silent.getsockname()[1], "no answer"), (unused.getsockname()[1], "refused")):
            offer = Offer(["127.0.0.1"], port, bytes(16))
            listener = Listener(1)
            with pytest.raises(PeerLostError, match=rf"no connection to rank 0 .*127\.0\.0\.1: .*{failure}") as caught:
                listener.join([0], [offer], 0.3)
            assert (caught.value.rank, caught.value.peer) == (1, 0)
            listener.close()


def test_many_addresses_of_a_peer_make_one_link() -> None:
    callee, caller = Listener(0), Listener(1)
    addresses = ["240.0.0.1", "127.0.0.1", "127.0.0.2", *callee.offer(1).addresses]  # 240.0.0.1 is not reachable
    offer = structs.replace(callee.offer(1), addresses=addresses)
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(callee.join, [1], [], TIMEOUT)
        links = caller.join([0], [offer], TIMEOUT)
        accepted = called.result(TIMEOUT)[1]
    accepted.send(RECORD)
    assert heard(links[0]) == RECORD
    for link in (links[0], accepted):
        link.close()
    callee.close()
    caller.close()


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_host_that_is_out_of_reach_for_a_moment_is_called_again(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a network link is down, a connection attempt may fail at once or later. The attempt must be repeated."""

    class Unreachable(socket.socket):
        """A socket whose first two calls of connect_ex fail with "unreachable"."""

        calls = 0

        def connect_ex(self, address: Any) -> int:
            Unreachable.calls += 1
            failing = Unreachable.calls <= 2
            return errno.EHOSTUNREACH if failing and when == "at once" else super().connect_ex(address)

        def send(self, *arguments: Any) -> int:
            if Unreachable.calls <= 2:
                raise OSError(errno.EHOSTUNREACH, "No route to host")
            return super().send(*arguments)

    callee, caller = Listener(0), Listener(1)
    offer = structs.replace(callee.offer(1), addresses=["127.0.0.1"])
    monkeypatch.setattr(host_links.socket, "socket", Unreachable)
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(callee.join, [1], [], TIMEOUT)
        links = caller.join([0], [offer], TIMEOUT)
        accepted = called.result(TIMEOUT)[1]
    assert Unreachable.calls == 3
    for link in (links[0], accepted, callee, caller):
        link.close()


def test_an_echo_is_no_answer() -> None:
    """A connection to a port without a listener may get that port as its source port; TCP then connects the socket to
    itself. This echo of the caller's bytes must not be taken for a peer's answer.
    """
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        server.settimeout(TIMEOUT)

        def echo() -> None:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(TIMEOUT)
                connection.sendall(connection.recv(100))

        echoed = pool.submit(echo)
        offer = Offer(["127.0.0.1"], server.getsockname()[1], b"\xab" * 16)
        listener = Listener(1)
        with pytest.raises(PeerLostError, match="another process listens there"):
            listener.join([0], [offer], TIMEOUT)
        echoed.result(TIMEOUT)
        listener.close()


def test_a_host_offers_addresses_that_others_may_reach() -> None:
    addresses = host_addresses()
    assert addresses
    assert not any(ipaddress.ip_address(address).is_link_local for address in addresses)
    loopback = [address.startswith("127.") for address in addresses]
    assert all(loopback) or not any(loopback)
