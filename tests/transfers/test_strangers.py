"""If an agent receives bytes that no agent would send, it closes that connection and is otherwise undisturbed."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from proxyccl.channels.transfers.metadata import METADATA
from proxyccl.channels.transfers.paths import unix_address
from proxyccl.channels.transfers.regions import Region, columns_of
from proxyccl.transfer import Agent, DisconnectedError
from support.agents import Mapped, force_path

FRAME = struct.Struct("<IIQ")
HELLO, MESSAGE, WRITE, READ, ANSWER, PERMIT, CHECK, ADDRESS = range(1, 9)
VERSION = 3
EACCES = errno.EACCES

pytestmark = pytest.mark.host_only("agents move the host's memory, whatever the runtime")


class Target:
    def __init__(self) -> None:
        self.agent = Agent("b", listen=["127.0.0.1"])
        self.memory = np.arange(200, dtype=np.uint8)
        self.region = self.agent.register((self.memory.ctypes.data, 100))
        described = METADATA.decode(self.agent.metadata(), "an agent")
        assert described.place is not None
        self.token, self.place = described.token, described.place

    def link(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(60)
        connection.connect(unix_address(self.token))
        return connection

    def greeted(self) -> socket.socket:
        """Returns a connection to the agent, after a greeting in the name of an agent "s"."""
        connection = self.link()
        connection.sendall(FRAME.pack(HELLO, VERSION, 17) + self.place.secret + b"s")
        return connection


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.agent.close()


def ends(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        data += connection.recv(nbytes - len(data))
    return data


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        FRAME.pack(HELLO, VERSION, 17) + bytes(16) + b"s",  # another secret
        FRAME.pack(HELLO, VERSION + 1, 17) + bytes(16) + b"s",
        FRAME.pack(HELLO, VERSION, 16) + bytes(16),  # no name
        FRAME.pack(HELLO, VERSION, 1 << 40),
        FRAME.pack(MESSAGE, 0, 1) + b"x",
        FRAME.pack(PERMIT, VERSION, 16) + bytes(16),  # another secret
        FRAME.pack(PERMIT, VERSION, 17) + bytes(17),
    ],
)
def test_a_link_without_the_secret_is_closed(target: Target, greeting: bytes) -> None:
    with target.link() as unix, socket.create_connection(target.place.addresses[0], 60) as tcp:
        assert exactly(tcp, len(target.token)) == target.token
        for connection in (unix, tcp):
            connection.sendall(greeting)
            assert ends(connection)
    assert target.agent.messages() == []


@pytest.mark.parametrize(
    "frame",
    [
        FRAME.pack(99, 0, 0),
        FRAME.pack(HELLO, VERSION, 17),
        FRAME.pack(ANSWER, 0, 0),
        FRAME.pack(PERMIT, VERSION, 16),
        FRAME.pack(MESSAGE, 0, 1 << 60),
        FRAME.pack(READ, 0, 0),
        FRAME.pack(READ, 513, 513),
        FRAME.pack(ADDRESS, 0, 9 * 512),  # of more interfaces than an agent may have
        FRAME.pack(CHECK, 513, 513),
        FRAME.pack(CHECK, 1, 8) + struct.pack("<QQ", 0, 9),
        FRAME.pack(WRITE, 1, 1 << 40),
        FRAME.pack(READ, 1, 8) + struct.pack("<QQ", 0, 9),  # the block's length, 9, exceeds the frame's length, 8
        FRAME.pack(READ, 2, 8) + struct.pack("<QQQQ", 0, 8, 0, 0),  # the second block is empty
        FRAME.pack(READ, 2, 8) + struct.pack("<QQQQ", 0, 2**64 - 1, 0, 9),  # the sum of the lengths wraps around
    ],
)
def test_an_invalid_frame_ends_its_link_alone(target: Target, frame: bytes) -> None:
    with target.greeted() as other, target.greeted() as connection:
        connection.sendall(frame)
        assert ends(connection)
        other.sendall(FRAME.pack(MESSAGE, 0, 5) + b"still")
        target.agent.wait_for_message(60)
        assert target.agent.messages() == [("s", b"still")]


@pytest.mark.parametrize("offset", [100, 95, 2**64 - 5])
def test_memory_that_is_not_registered_is_not_touched(target: Target, offset: int) -> None:
    block = struct.pack("<QQ", (target.region.address + offset) % 2**64, 10)
    before = target.memory.copy()
    with target.greeted() as connection:
        connection.sendall(FRAME.pack(READ, 1, 10) + block)
        assert connection.recv(100) == FRAME.pack(ANSWER, EACCES, 0)
        connection.sendall(FRAME.pack(WRITE, 1, 10) + block + bytes(10))
        assert connection.recv(100) == FRAME.pack(ANSWER, EACCES, 0)
        registered = struct.pack("<QQ", target.region.address + 90, 10)
        connection.sendall(FRAME.pack(CHECK, 2, 20) + registered + block)
        # the last field is the number of the refused block
        assert connection.recv(100) == FRAME.pack(ANSWER, EACCES, 1)
        connection.sendall(FRAME.pack(READ, 1, 10) + registered)
        assert connection.recv(FRAME.size + 10, socket.MSG_WAITALL)[: FRAME.size] == FRAME.pack(ANSWER, 0, 10)
    np.testing.assert_array_equal(target.memory, before)


@pytest.mark.parametrize(("end", "error"), [("free", errno.EFAULT), ("deregister", EACCES)])
def test_a_read_whose_memory_ends_while_it_is_sent(target: Target, mapped: Mapped, end: str, error: int) -> None:
    """Zeros replace the answer's remaining data, and a second header after the data reports the error."""
    nbytes = 1 << 19  # bytes: more than the socket's buffers hold
    ctypes.memset(mapped.address, 1, nbytes)
    region = target.agent.register((mapped.address, nbytes))
    with target.greeted() as connection:
        connection.sendall(FRAME.pack(READ, 1, nbytes) + struct.pack("<QQ", region.address, nbytes))
        assert exactly(connection, FRAME.size) == FRAME.pack(ANSWER, 0, nbytes)
        if end == "free":
            mapped.free()
        else:
            target.agent.deregister(region)
        data = exactly(connection, nbytes)
        assert data[:1000] == b"\1" * 1000
        assert data[-1000:] == bytes(1000)
        assert exactly(connection, FRAME.size) == FRAME.pack(ANSWER, error, 0)
        connection.sendall(FRAME.pack(MESSAGE, 0, 5) + b"still")
        target.agent.wait_for_message(60)


def test_frames_in_single_bytes(target: Target) -> None:
    with target.greeted() as connection:
        block = struct.pack("<QQ", target.region.address, 3)
        for byte in FRAME.pack(WRITE, 1, 3) + block + b"abc" + FRAME.pack(MESSAGE, 0, 2) + b"hi":
            connection.sendall(bytes([byte]))
        assert connection.recv(100) == FRAME.pack(ANSWER, 0, 0)
        target.agent.wait_for_message(60)
    assert target.memory[:3].tobytes() == b"abc"


def test_an_answer_that_precedes_the_data_ends_the_link(target: Target) -> None:
    data = np.ones(512 << 10, np.uint8)
    remote = Region(target.region.address, len(data))
    with socket.socket() as listener, Agent("a", listen=()) as agent:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # keeps the sender's buffer small too
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        place = replace(target.place, addresses=[listener.getsockname()], host="another host")
        described = METADATA.decode(target.agent.metadata(), "an agent")
        columns = columns_of([remote], [1])
        agent.add(METADATA.encode(replace(described, place=place, rows=columns.tobytes(), labels=[])))
        force_path(agent, "tcp")
        region = agent.register(data)
        accepted: list[socket.socket] = []

        def accept() -> None:
            accepted.append(listener.accept()[0])
            accepted[0].sendall(target.token)

        accepting = threading.Thread(target=accept)
        accepting.start()
        write = agent.write("b", [(region.address, remote.address, len(data))])
        accepting.join()
        with accepted[0] as peer:
            exactly(peer, FRAME.size + 17)  # the greeting
            assert exactly(peer, FRAME.size + 16)[: FRAME.size] == FRAME.pack(WRITE, 1, len(data))
            peer.sendall(FRAME.pack(ANSWER, 0, 0))
            with pytest.raises(DisconnectedError, match="the peer sent an invalid frame"):
                write.wait()


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """Limits the descriptors of this process, and returns the limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 4 * len(os.listdir("/proc/self/fd")) + 800
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_strangers_that_stay_silent_hold_few_descriptors(few_descriptors: int, target: Target) -> None:
    before = len(os.listdir("/proc/self/fd"))
    most = few_descriptors // 4
    silent = [target.link() for _ in range(most + 36)]
    with target.greeted() as connection:
        connection.sendall(FRAME.pack(MESSAGE, 0, 2) + b"hi")
        target.agent.wait_for_message(60)  # when the message arrives, the agent has accepted all connections
        assert ends(silent[0])
        assert len(os.listdir("/proc/self/fd")) - before <= len(silent) + most + 2
    for each in silent:
        each.close()


def test_many_peers_connect_at_the_same_time(target: Target) -> None:
    peers = [socket.create_connection(target.place.addresses[0], 60) for _ in range(200)]
    for each in peers:  # a peer sends its greeting after it has received the token
        assert exactly(each, len(target.token)) == target.token
    for each in peers:
        each.sendall(FRAME.pack(HELLO, VERSION, 17) + target.place.secret + b"s" + FRAME.pack(MESSAGE, 0, 2) + b"hi")
    arrived = 0
    while arrived < len(peers):
        target.agent.wait_for_message(10)
        arrived += len(target.agent.messages())
    for each in peers:
        each.close()


def test_an_agent_that_accepts_no_connections_is_named(target: Target) -> None:
    token = os.urandom(16)
    with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as waiting, Agent("a") as agent:
        full.bind(unix_address(token))
        full.listen(0)
        waiting.connect(unix_address(token))
        described = METADATA.decode(target.agent.metadata(), "an agent")
        place = replace(target.place, addresses=[])
        agent.add(METADATA.encode(replace(described, token=token, place=place)))
        with pytest.raises(DisconnectedError, match=r"agent b can't be reached: its Unix socket: .* unavailable"):
            agent.connect("b")
