"""The behaviour of NIXL 1.5.1, observed case by case, which the interface must reproduce."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import nixl._bindings as nb
import numpy as np
import pytest
from nixl._api import nixl_agent, nixl_agent_config

from proxyccl import ClosedError
from proxyccl.nixl import metadata_exchange
from proxyccl.nixl.metadata_exchange import Request, Sender
from proxyccl.transfer import ActiveError, Agent, Transfer
from support.agents import child

pytestmark = pytest.mark.host_only("agents move the host's memory, whatever the runtime")
SIZE = 1 << 20


class Two:
    """Two agents, "agent0" and "agent1", with a registered buffer each."""

    def __init__(self, size: int = SIZE, connect: bool = True, **conf: Any) -> None:
        self.agents = [nixl_agent(f"agent{number}", nixl_agent_config(**conf)) for number in range(2)]
        self.buffers = [(np.arange(size) * (number + 3) % 251).astype(np.uint8) for number in range(2)]
        self.registered = [
            agent.register_memory([(buffer.ctypes.data, size, 0, "")], "DRAM")
            for agent, buffer in zip(self.agents, self.buffers, strict=True)
        ]
        self.a, self.b = self.agents
        if connect:
            self.a.add_remote_agent(self.b.get_agent_metadata())
            self.b.add_remote_agent(self.a.get_agent_metadata())

    def descs(self, which: int, offset: int = 0, nbytes: int = 4096) -> Any:
        return self.a.get_xfer_descs([(self.buffers[which].ctypes.data + offset, nbytes, 0)], "DRAM")

    def transfer(self, operation: str = "READ", message: bytes = b"") -> Any:
        return self.a.initialize_xfer(operation, self.descs(0), self.descs(1), "agent1", message)


@pytest.fixture
def two() -> Iterator[Two]:
    return Two()


@contextlib.contextmanager
def not_found() -> Iterator[None]:
    with pytest.raises(nb.nixlNotFoundError, match="NIXL_ERR_NOT_FOUND"):
        yield


@contextlib.contextmanager
def invalid() -> Iterator[None]:
    with pytest.raises(nb.nixlInvalidParamError, match="NIXL_ERR_INVALID_PARAM"):
        yield


def finished(agent: Any, handle: Any, state: str = "PROC") -> str:
    deadline = time.monotonic() + 60
    while state == "PROC" and time.monotonic() < deadline:
        state = agent.check_xfer_state(handle)
    return state


def notified(agent: Any, count: int) -> dict[str, list[bytes]]:
    got: dict[str, list[bytes]] = {}
    deadline = time.monotonic() + 60
    while sum(map(len, got.values())) < count and time.monotonic() < deadline:
        for name, messages in agent.get_new_notifs().items():
            got.setdefault(name, []).extend(messages)
    return got


def test_names_that_are_not_known() -> None:
    a = Two(connect=False).a
    descs = a.get_xfer_descs([(1, 2, 0)], "DRAM")
    a.remove_remote_agent("zz")
    assert a.check_remote_metadata("zz") is False
    for call in (
        lambda: a.send_notif("zz", b"1"),
        lambda: a.make_connection("zz"),
        lambda: a.prep_xfer_dlist("zz", descs),
        lambda: a.initialize_xfer("READ", descs, descs, "zz"),
    ):
        with not_found():
            call()


def test_metadata_of_nobody_and_of_itself() -> None:
    two = Two(connect=False)
    for junk in (b"junk", b"", two.b.get_agent_metadata()[:100]):
        with pytest.raises(nb.nixlMismatchError):
            two.a.add_remote_agent(junk)
    with invalid():
        two.a.add_remote_agent(two.a.get_agent_metadata())


def test_return_types() -> None:
    two = Two(connect=False)
    name = two.a.add_remote_agent(two.b.get_agent_metadata())
    assert name == b"agent1"
    handle = two.a.initialize_xfer("WRITE", two.descs(0), two.descs(1), name, "stringnotif")
    assert finished(two.a, handle, two.a.transfer(handle)) == "DONE"
    assert notified(two.b, 1) == {"agent0": [b"stringnotif"]}
    assert two.a.query_xfer_backend(handle) == "UCX"
    assert two.a.estimate_xfer_cost(handle) == (0, 0, "UNKNOWN")
    assert two.a.release_xfer_handle(handle) is None
    assert handle.release() is None
    assert isinstance(two.b.get_agent_metadata(), bytes)


def test_names_as_bytes(two: Two) -> None:
    name = b"agent1"
    local = two.a.prep_xfer_dlist("NIXL_INIT_AGENT", two.descs(0))
    remote = two.a.prep_xfer_dlist(name, two.descs(1))
    index = np.array([0], np.int64)
    handle = two.a.make_prepped_xfer("READ", local, index, remote, index, notif_msg=b"x")
    assert finished(two.a, handle, two.a.transfer(handle)) == "DONE"
    two.a.send_notif(name, notif_msg=b"y")
    assert two.a.check_remote_metadata(name) is True
    two.a.release_dlist_handle(local)
    two.a.remove_remote_agent(name)
    assert notified(two.b, 2) == {"agent0": [b"x", b"y"]}
    two.a.send_notif(b"agent0", b"z")
    assert two.a.check_remote_xfer_done(b"agent0", b"z")


def test_memory_that_is_not_registered(two: Two) -> None:
    here, there = (buffer.ctypes.data for buffer in two.buffers)
    bad = two.a.get_xfer_descs([(4096, 100, 0)], "DRAM")
    over = [two.a.get_xfer_descs([(start + SIZE - 10, 100, 0)], "DRAM") for start in (here, there)]
    device = two.a.get_xfer_descs([(here, 100, 7)], "DRAM")
    for name, descs in (("", bad), ("", over[0]), ("agent1", bad), ("agent1", over[1]), ("", device)):
        with not_found():
            two.a.prep_xfer_dlist(name, descs)
    with not_found():
        two.a.initialize_xfer("READ", bad, two.descs(1, nbytes=100), "agent1")
    with invalid():  # the error is about the different lengths, not about `bad`
        two.a.initialize_xfer("READ", bad, two.descs(1), "agent1")


def test_sides_that_do_not_fit(two: Two) -> None:
    start = two.buffers[1].ctypes.data
    pairs = two.a.get_xfer_descs([(start, 10, 0), (start, 10, 0)], "DRAM")
    with invalid():
        two.a.initialize_xfer("READ", two.descs(0, 0, 10), pairs, "agent1")
    with invalid():
        two.a.initialize_xfer("READ", two.descs(0, 0, 10), two.descs(1, 0, 20), "agent1")
    local = two.a.prep_xfer_dlist("", two.descs(0, 0, 100))
    remote = two.a.prep_xfer_dlist("agent1", two.descs(1, 0, 200))
    same = two.a.prep_xfer_dlist("agent1", two.descs(1, 0, 100))
    for left, ours, right, theirs in (
        (local, [0], remote, [0]),
        (local, [0, 0], same, [0]),
        (local, [5], same, [0]),
        (local, [-1], same, [0]),
        (local, [], same, []),
        (same, [0], local, [0]),
        (local, [0], local, [0]),
        (same, [0], same, [0]),
    ):
        with invalid():
            two.a.make_prepped_xfer("READ", left, ours, right, theirs)
    with pytest.raises(ValueError, match="1D"):
        two.a.make_prepped_xfer("READ", local, np.zeros((1, 1), np.int32), same, [0])
    with pytest.raises(KeyError):
        two.a.make_prepped_xfer("RD", local, [0], same, [0])


def test_nothing_to_transfer(two: Two) -> None:
    empty = nb.nixlXferDList(nb.DRAM_SEG)
    with not_found():
        two.a.prep_xfer_dlist("", empty)
    with not_found():
        two.a.initialize_xfer("READ", empty, empty, "agent1")
    two.a.prep_xfer_dlist("", two.descs(0, 0, 0))
    handle = two.a.initialize_xfer("READ", two.descs(0, 0, 0), two.descs(1, 0, 0), "agent1")
    assert two.a.transfer(handle) == "DONE"
    with pytest.raises(IndexError):
        two.a.get_xfer_descs([], "DRAM")
    two.a.register_memory([(two.buffers[0].ctypes.data, 0, 0, "")], "DRAM")


def test_loopback(two: Two) -> None:
    remote = two.a.prep_xfer_dlist("agent0", two.descs(0, 8192))
    local = two.a.prep_xfer_dlist("", two.descs(0, 0))
    handle = two.a.make_prepped_xfer("WRITE", local, [0], remote, [0], b"self")
    assert finished(two.a, handle, two.a.transfer(handle)) == "DONE"
    assert (two.buffers[0][:4096] == two.buffers[0][8192 : 8192 + 4096]).all()
    handle = two.a.initialize_xfer("READ", two.descs(0, 0), two.descs(0, 16384), "agent0", b"n2")
    assert finished(two.a, handle, two.a.transfer(handle)) == "DONE"
    assert (two.buffers[0][:4096] == two.buffers[0][16384 : 16384 + 4096]).all()
    assert two.a.get_new_notifs() == {"agent0": [b"self", b"n2"]}
    assert two.a.send_notif("agent0", b"to self") is None


def test_states_and_posting_again(two: Two) -> None:
    handle = two.transfer(message=b"n")
    with pytest.raises(nb.nixlNotPostedError):
        two.a.check_xfer_state(handle)
    with pytest.raises(nb.nixlNoTelemetryError):
        two.a.get_xfer_telemetry(handle)
    for message in (b"", b"", b"other"):
        assert finished(two.a, handle, two.a.transfer(handle, message)) == "DONE"
        assert two.a.check_xfer_state(handle) == "DONE"
    assert notified(two.b, 3) == {"agent0": [b"n", b"n", b"other"]}


def test_releasing_an_active_transfer() -> None:
    two = Two(size=8 << 20)
    handle = two.a.initialize_xfer("READ", two.descs(0, 0, 8 << 20), two.descs(1, 0, 8 << 20), "agent1", b"n")
    two.a.transfer(handle)
    two.a.release_xfer_handle(handle)
    two.buffers[0][:] = 1
    assert "released=True" in repr(handle)
    two.a.release_xfer_handle(handle)
    assert (two.buffers[0] == 1).all()


def test_metadata_that_extend(two: Two) -> None:
    extra = np.zeros(65536, np.uint8)
    registered = two.b.register_memory([(extra.ctypes.data, 65536, 0, "")], "DRAM")
    descs = two.a.get_xfer_descs([(extra.ctypes.data, 4096, 0)], "DRAM")
    with not_found():
        two.a.initialize_xfer("READ", two.descs(0), descs, "agent1")
    assert two.a.add_remote_agent(two.b.get_agent_metadata()) == b"agent1"
    two.a.initialize_xfer("READ", two.descs(0), descs, "agent1")
    two.b.deregister_memory(registered)
    assert two.a.add_remote_agent(two.b.get_agent_metadata()) == b"agent1"
    with not_found():
        two.a.initialize_xfer("READ", two.descs(0), descs, "agent1")
    with not_found():
        two.b.deregister_memory(registered)


def test_partial_metadata() -> None:
    two = Two(connect=False)
    memory = two.registered[1]
    with not_found():
        two.a.add_remote_agent(two.b.get_partial_agent_metadata(memory, False))
    assert two.a.check_remote_metadata("agent1") is False
    two.a.add_remote_agent(two.b.get_partial_agent_metadata(nb.nixlRegDList(nb.DRAM_SEG), True))
    assert two.a.check_remote_metadata("agent1") is True
    assert two.a.check_remote_metadata("agent1", two.descs(1)) is False
    assert two.a.add_remote_agent(two.b.get_partial_agent_metadata(memory, False)) == b"agent1"
    assert two.a.check_remote_metadata("agent1", two.descs(1)) is True
    with not_found():
        two.b.get_partial_agent_metadata(two.b.get_reg_descs([(4096, 10, 0, "")], "DRAM"), True)


def test_a_removed_agent(two: Two) -> None:
    local, remote = two.a.prep_xfer_dlist("", two.descs(0)), two.a.prep_xfer_dlist("agent1", two.descs(1))
    handle, done = (two.a.make_prepped_xfer("READ", local, [0], remote, [0]) for _ in range(2))
    finished(two.a, done, two.a.transfer(done))
    two.a.remove_remote_agent("agent1")
    assert two.a.check_remote_metadata("agent1") is False
    with not_found():
        two.a.transfer(handle)
    assert two.a.check_xfer_state(done) == "DONE"
    with not_found():
        two.a.make_prepped_xfer("READ", local, [0], remote, [0])
    two.a.release_xfer_handle(handle)
    two.a.release_dlist_handle(remote)
    assert two.a.add_remote_agent(two.b.get_agent_metadata()) == b"agent1"
    handle = two.transfer()
    assert finished(two.a, handle, two.a.transfer(handle)) == "DONE"


def test_registering_again(two: Two) -> None:
    two.a.prep_xfer_dlist("", two.descs(0))
    two.a.deregister_memory(two.registered[0])
    with not_found():
        two.a.prep_xfer_dlist("", two.descs(0))
    two.a.register_memory(two.registered[0])
    two.a.register_memory(two.registered[0])
    two.a.register_memory([(two.buffers[0].ctypes.data, 1 << 19, 0, "")], "DRAM")
    two.a.register_memory([(4096, 4096, 0, "")], "DRAM")  # the library does not check that the memory is mapped


def test_notifications(two: Two) -> None:
    sent = [*(b"m%d" % number for number in range(5)), b"\0\xff"]
    for message in sent:
        two.a.send_notif("agent1", message)
    two.a.send_notif("agent1", "text")
    assert notified(two.b, 7) == {"agent0": [*sent, b"text"]}
    two.a.send_notif("agent1", b"abc123")
    two.a.send_notif("agent1", b"abd")
    while len(two.b.update_notifs().get("agent0", [])) < 2:
        pass
    assert two.b.check_remote_xfer_done("agent0", b"bc1") is False
    assert two.b.check_remote_xfer_done("agent0", b"bc1", tag_is_prefix=False) is True
    assert two.b.update_notifs() == {"agent0": [b"abd"]}
    two.a.send_notif("agent1", b"")
    two.a.send_notif("agent1", os.urandom(1 << 20))
    assert [len(message) for message in notified(two.b, 2)["agent0"]] == [0, 1 << 20]
    for _ in range(20000):
        two.a.send_notif("agent1", b"flood")
    assert len(notified(two.b, 20000)["agent0"]) == 20000


def test_two_agents_of_one_name() -> None:
    first, second, other = (nixl_agent(name, nixl_agent_config()) for name in ("same", "same", "other"))
    assert other.add_remote_agent(first.get_agent_metadata()) == b"same"
    with pytest.raises(nb.nixlNotAllowedError):
        other.add_remote_agent(second.get_agent_metadata())


def test_agents_without_backends() -> None:
    agent = nixl_agent("x", nixl_agent_config(backends=[]))
    with invalid():
        agent.get_agent_metadata()
    with not_found():
        agent.register_memory([(4096, 10, 0, "")], "DRAM")
    assert agent.create_backend("UCX") is None
    with invalid():
        agent.create_backend("UCX")
    with not_found():
        agent.create_backend("UVX")
    with pytest.raises(nb.nixlBackendError, match=r"private|can't be shared"):
        agent.register_memory([(4096, 10, 0, "")], "VRAM")
    with pytest.raises(KeyError):
        agent.register_memory([(4096, 10, 0, "")], "DRAM", backends=["NONE"])
    with pytest.raises(nb.nixlNotSupportedError):
        agent.query_memory([(0, 0, 0, "file")], "UCX", "FILE")
    assert agent.get_plugin_list() == ["UCX", "LIBFABRIC"]
    assert agent.get_plugin_mem_types("UCX") == agent.get_backend_mem_types("UCX") == ["DRAM_SEG", "VRAM_SEG"]
    assert agent.get_plugin_params("UVX") == agent.get_backend_params("UVX") == {}


def test_only_one_side_knows_the_other() -> None:
    two = Two(connect=False)
    two.a.add_remote_agent(two.b.get_agent_metadata())
    handle = two.transfer("WRITE", b"hi")
    assert finished(two.a, handle, two.a.transfer(handle)) == "DONE"
    assert notified(two.b, 1) == {"agent0": [b"hi"]}
    assert (two.buffers[0][:4096] == two.buffers[1][:4096]).all()
    with not_found():
        two.b.send_notif("agent0", b"back")


def test_a_peer_that_is_killed() -> None:
    buffer = np.ones(SIZE, np.uint8)

    def serve(connection: Any) -> None:
        agent = nixl_agent("agent1")
        agent.register_memory([(buffer.ctypes.data, SIZE, 0, "")], "DRAM")
        connection.send(agent.get_agent_metadata())
        connection.recv(1)

    with child(serve) as process:
        two = Two(connect=False)
        two.a.add_remote_agent(process.receive())
        there = two.a.get_xfer_descs([(buffer.ctypes.data, 4096, 0)], "DRAM")
        read, write, done = (
            two.a.initialize_xfer(operation, two.descs(0), there, "agent1", b"x")
            for operation in ("READ", "WRITE", "READ")
        )
        assert finished(two.a, done, two.a.transfer(done)) == "DONE"
        process.kill()
        for handle in (read, write):
            for call in (two.a.transfer, two.a.check_xfer_state):
                with pytest.raises(nb.nixlRemoteDisconnectError):
                    call(handle)
        with pytest.raises(nb.nixlRemoteDisconnectError):  # noqa: PT012  the loop calls until the error is raised
            while True:
                two.a.send_notif("agent1", b"x")
        assert two.a.check_remote_metadata("agent1") is True
        assert two.a.check_xfer_state(done) == "DONE"
        two.a.release_xfer_handle(read)
        two.a.remove_remote_agent("agent1")


@pytest.mark.parametrize("variable", [None, "y", "no"])
def test_telemetry(variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if variable is not None:
        monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", variable)
    two = Two(capture_telemetry=variable != "y")
    start = two.buffers[0].ctypes.data
    local = two.a.get_xfer_descs([(start, 64, 0), (start + 64, 64, 0)], "DRAM")
    start = two.buffers[1].ctypes.data
    remote = two.a.get_xfer_descs([(start, 64, 0), (start + 64, 64, 0)], "DRAM")
    handle = two.a.initialize_xfer("WRITE", local, remote, "agent1")
    if variable != "no":
        with pytest.raises(nb.nixlNotPostedError):
            two.a.get_xfer_telemetry(handle)
    before = time.time_ns() // 1000
    finished(two.a, handle, two.a.transfer(handle))
    if variable == "no":  # the environment variable overrides the agent's option
        with pytest.raises(nb.nixlNoTelemetryError):
            two.a.get_xfer_telemetry(handle)
        return
    telemetry = two.a.get_xfer_telemetry(handle)
    assert (telemetry.descCount, telemetry.totalBytes, telemetry.path) == (2, 128, "process_vm")
    assert telemetry.startTime >= before
    assert telemetry.xferDuration >= telemetry.postDuration >= 1


def test_lists_of_descriptors(two: Two) -> None:
    rows = [(1000, 105, 0), (2000, 30, 0), (1010, 20, 3)]
    descs = nb.nixlXferDList(nb.DRAM_SEG, rows)
    registered = nb.nixlRegDList(nb.VRAM_SEG, [(*row, b"\0x") for row in rows])
    for each in (descs, registered):
        assert pickle.loads(pickle.dumps(each)) == each
        assert two.a.deserialize_descs(two.a.get_serialized_descs(each)) == each
    assert registered.trim() == nb.nixlXferDList(nb.VRAM_SEG, np.array(rows, np.uint64)) != descs
    assert nb.nixlRegDList(nb.DRAM_SEG, np.array(rows, np.int64))[0] == (1000, 105, 0, b"")
    assert descs.descCount() == len(descs) == 3
    assert descs.index((2000, 30, 0)) == 1
    with not_found():
        descs.index((1, 2, 3))
    descs.remDesc(1)
    descs.append((5, 6, 7))
    assert list(descs) == [rows[0], rows[2], (5, 6, 7)]
    descs.clear()
    assert descs.isEmpty()
    registered.remDesc(-1)
    assert two.a.deserialize_descs(two.a.get_serialized_descs(registered)) == registered
    assert list(registered) == [(*row, b"\0x") for row in rows[:2]]
    data = two.a.get_serialized_descs(registered)
    for junk in (b"", b"junk", data[:-1], data + b"x", pickle.dumps(registered)):
        with pytest.raises(nb.nixlMismatchError):
            two.a.deserialize_descs(junk)
    for wrong in (np.zeros((1, 2), np.uint64), np.zeros((1, 3)), np.zeros((3, 3), np.uint64).T):
        with pytest.raises(ValueError, match="descs must be"):
            nb.nixlXferDList(nb.DRAM_SEG, wrong)
    with pytest.raises(ValueError, match="exactly 3"):
        nb.nixlXferDList(nb.DRAM_SEG, [(1, 2)])
    with pytest.raises(TypeError):
        nb.nixlXferDList(nb.DRAM_SEG, [[1, 2, 3]])


def test_blocks_of_strided_rows(two: Two) -> None:
    here, there = (buffer.ctypes.data for buffer in two.buffers)
    kept = two.buffers[0].copy()
    ours = np.array([(here, 64, 0, 128, 10), (here + 4096, 32, 0, 64, 5)], np.uint64)
    theirs = np.array([(there, 64, 0, 64, 10), (there + 8192, 32, 0, 32, 5)], np.int64)
    local = two.a.prep_xfer_dlist("", ours, "DRAM")
    remote = two.a.prep_xfer_dlist("agent1", theirs, mem_type="DRAM")
    handle = two.a.make_prepped_xfer("READ", local, [9, 10, 14], remote, np.array([1, 10, 11], np.int32))
    assert finished(two.a, handle, two.a.transfer(handle)) == "DONE"
    for at, source, nbytes in ((9 * 128, 64, 64), (4096, 8192, 32), (4096 + 4 * 64, 8224, 32)):
        kept[at : at + nbytes] = two.buffers[1][source : source + nbytes]
    assert np.array_equal(two.buffers[0], kept)
    for indices in ([15], [-1], []):
        with invalid():
            two.a.make_prepped_xfer("READ", local, indices, remote, indices)
    with invalid():
        two.a.make_prepped_xfer("READ", local, [0], remote, [10])  # their lengths differ


def test_strided_rows_that_are_refused(two: Two) -> None:
    here, there = (buffer.ctypes.data for buffer in two.buffers)

    def prepare(*row: int, agent: str = "", dtype: Any = np.uint64, mem_type: str | None = "DRAM") -> Any:
        return two.a.prep_xfer_dlist(agent, np.array([row], dtype), mem_type)

    prepare(here, 64, 0, SIZE - 64, 2)
    for row in (
        (here, 64, 0, 128, 0),
        (here, 0, 0, 128, 2),
        (here, 64, 0, 63, 1),
        (here, 64, 0, SIZE - 63, 2),
        (here, 64, 0, 1 << 63, 3),
        (here, 64, 7, 64, 2),
    ):
        with not_found():
            prepare(*row)
    with not_found():
        prepare(there, 64, 0, SIZE, 2, agent="agent1")
    with not_found():
        two.a.prep_xfer_dlist("", np.empty((0, 5), np.uint64), "DRAM")
    with pytest.raises(ValueError, match="mem_type"):
        prepare(here, 64, 0, 64, 2, mem_type=None)
    with pytest.raises(ValueError, match="uint64 or int64"):
        prepare(here, 64, 0, 64, 2, dtype=np.float64)
    with pytest.raises(TypeError):
        two.a.agent.prepXferDlist("", nb.DRAM_SEG, [(here, 64, 0, 64, 2)])


def test_input_that_makes_no_list(two: Two) -> None:
    three, four = [(1, 2, 3)], [(1, 2, 3, "")]
    assert two.a.get_xfer_descs(four) is None
    assert two.a.get_xfer_descs(four, "DRAM") is None
    assert two.a.get_xfer_descs(three) is None
    assert two.a.get_xfer_descs(two.registered[0]) is None
    assert two.a.get_reg_descs(three, "DRAM") is None
    assert two.a.get_reg_descs(two.descs(0)) is None
    assert two.a.get_xfer_descs(["text"]) is None
    with pytest.raises(KeyError):
        two.a.get_xfer_descs(three, "V-RAM")
    with pytest.raises(TypeError):
        two.a.register_memory(three, "DRAM")


def test_metadata_that_are_forgotten_while_they_are_checked(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    find = Agent.find_side

    def forgotten_first(*arguments: Any) -> object:
        two.a.remove_remote_agent("agent1")
        return find(*arguments)

    monkeypatch.setattr(Agent, "find_side", forgotten_first)
    assert two.a.check_remote_metadata("agent1") is False


def test_a_list_that_was_prepared_for_a_former_agent_of_the_name() -> None:
    two = Two()
    lists = two.a.prep_xfer_dlist("NIXL_INIT_AGENT", two.descs(0)), two.a.prep_xfer_dlist("agent1", two.descs(1))
    two.a.make_prepped_xfer("READ", lists[0], [0], lists[1], [0])
    later = nixl_agent("agent1")
    later.register_memory([(two.buffers[1].ctypes.data, SIZE, 0, "")], "DRAM")
    two.a.remove_remote_agent("agent1")
    two.a.add_remote_agent(later.get_agent_metadata())
    with not_found():
        two.a.make_prepped_xfer("WRITE", lists[0], [0], lists[1], [0])
    two.a.prep_xfer_dlist("agent1", two.descs(1))


@pytest.mark.parametrize("side", [0, 1])
def test_a_list_whose_memory_was_deregistered_and_registered_anew(two: Two, side: int) -> None:
    lists = two.a.prep_xfer_dlist("NIXL_INIT_AGENT", two.descs(0)), two.a.prep_xfer_dlist("agent1", two.descs(1))
    handle = two.a.make_prepped_xfer("WRITE", lists[0], [0], lists[1], [0])
    assert finished(two.a, handle, two.a.transfer(handle)) == "DONE"
    before = two.buffers[1].copy()
    owner = two.agents[side]
    owner.deregister_memory(two.registered[side])
    owner.register_memory([(two.buffers[side].ctypes.data, SIZE, 0, "")], "DRAM")
    two.buffers[0][:] = 9
    with not_found():
        two.a.transfer(handle)
    with not_found():
        two.a.make_prepped_xfer("WRITE", lists[0], [0], lists[1], [0])
    np.testing.assert_array_equal(two.buffers[1], before)


def test_handles_of_another_agent_are_not_valid(two: Two) -> None:
    two.transfer()  # gives a a handle with the number of b's next handle
    theirs = two.b.initialize_xfer("READ", two.descs(1), two.descs(0), "agent0")
    for call in (two.a.transfer, two.a.check_xfer_state):
        with invalid():
            call(theirs)
    ours, lists = two.a.prep_xfer_dlist("agent1", two.descs(1)), two.b.prep_xfer_dlist("NIXL_INIT_AGENT", two.descs(1))
    with invalid():
        two.a.make_prepped_xfer("READ", lists, [0], ours, [0])


def test_a_late_request_of_a_former_agent_does_not_remove_the_later_one() -> None:
    listens, port = listening("listens")
    former, later = nixl_agent("other"), nixl_agent("other")
    listens.add_remote_agent(later.get_agent_metadata())
    listens.agent.forgetSender(former.get_agent_metadata())
    assert listens.check_remote_metadata("other") is True
    later.invalidate_local_metadata("127.0.0.1", port)
    eventually(lambda: not listens.check_remote_metadata("other"))


def listening(name: str) -> tuple[Any, int]:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port: int = taken.getsockname()[1]
    return nixl_agent(name, nixl_agent_config(True, True, port)), port


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_metadata_by_sockets() -> None:
    listens, port = listening("listens")
    other = nixl_agent("other")
    other.send_local_metadata("127.0.0.1", port)
    other.fetch_remote_metadata("listens", "127.0.0.1", port)
    eventually(lambda: listens.check_remote_metadata("other") and other.check_remote_metadata("listens"))
    listens.send_notif("other", b"known")
    assert notified(other, 1) == {"listens": [b"known"]}
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    other.invalidate_local_metadata("127.0.0.1", port)
    eventually(lambda: not listens.check_remote_metadata("other"))
    with invalid():
        other.send_local_metadata()


def test_requests_for_metadata_that_fail_end_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    listens, port = listening("listens")
    other = nixl_agent("other")
    sender = Sender(other.agent)
    sender.send("node..cluster", port, Request.LOAD, b"")  # IDNA can't encode this host name
    sender.send("127.0.0.1", port, Request.INVALIDATE, b"\xff")
    sender.send("127.0.0.1", port, Request.LOAD, other.get_agent_metadata())
    eventually(lambda: bool(listens.check_remote_metadata("other")))
    failures = [record.levelname for record in caplog.records if record.levelno >= logging.WARNING]
    assert failures == ["ERROR", "WARNING"]


def test_requests_for_metadata_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    listens, port = listening("listens")
    done: list[str] = []

    def load(_: bytes) -> None:
        time.sleep(0.1)
        done.append("load")

    monkeypatch.setattr(listens.agent, "loadRemoteMD", load)
    monkeypatch.setattr(listens.agent, "forgetSender", lambda _: done.append("invalidate"))
    other = nixl_agent("other")
    other.send_local_metadata("127.0.0.1", port)
    other.invalidate_local_metadata("127.0.0.1", port)
    eventually(lambda: len(done) == 2)
    assert done == ["load", "invalidate"]


@pytest.mark.parametrize("said", [b"", b"PXM1"])
def test_peers_that_say_nothing_hold_up_no_other(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that connect, or begin a request, and then send nothing must not delay other peers."""
    monkeypatch.setattr(metadata_exchange, "_SECONDS", 120)
    kept = listening("listens")
    other = nixl_agent("other")
    with contextlib.ExitStack() as silent:
        for _ in range(300):
            silent.enter_context(socket.create_connection(("127.0.0.1", kept[1]))).sendall(said)
        other.fetch_remote_metadata("listens", "127.0.0.1", kept[1])
        eventually(lambda: bool(other.check_remote_metadata("listens")))


def test_an_exchange_of_metadata_is_bounded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_exchange, "_SECONDS", 0.2)
    kept = listening("listens")
    with socket.create_connection(("127.0.0.1", kept[1])) as slow:
        slow.sendall(struct.pack("<4sBQ", b"PXM1", Request.LOAD, 1 << 20))

        def is_closed() -> bool:
            try:
                slow.sendall(b"x")
            except ConnectionError:
                return True
            return False

        eventually(is_closed)


@pytest.mark.parametrize("error", [ClosedError, ActiveError])
def test_a_collected_handle_raises_nothing_and_keeps_no_transfer(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transfer can't be closed: the handle is a forked child's, or an adapter still writes the transfer's data."""

    def close(self: Transfer) -> None:
        raise error("busy")

    raised: list[Any] = []
    two = Two()
    handle = two.transfer()
    alive = weakref.ref(two.a.agent._transfer(int(handle._handle)).transfer)
    with monkeypatch.context() as patched:
        patched.setattr(Transfer, "close", close)
        patched.setattr(sys, "unraisablehook", raised.append)
        del handle
    assert not raised
    assert alive() is None


def test_a_listener_that_has_answered_keeps_no_agent() -> None:
    listens, port = listening("listens")
    other = nixl_agent("other")
    other.fetch_remote_metadata("listens", "127.0.0.1", port)
    eventually(lambda: bool(other.check_remote_metadata("listens")))
    alive = weakref.ref(listens.agent)
    del listens
    eventually(lambda: alive() is None)


@pytest.mark.parametrize(
    ("mode", "listens", "expected"),
    [(None, False, 0), (None, True, 1), (nb.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW, True, 2)],
)
def test_the_mode_of_synchronization_reaches_the_bindings_as_a_number(
    mode: Any, listens: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    make = nb.nixlAgent

    def make_and_note(name: str, config: Any) -> Any:
        given.append(config.syncMode)
        return make(name, config)

    monkeypatch.setattr(nb, "nixlAgent", make_and_note)
    nixl_agent("synchronized", nixl_agent_config(sync_mode=mode, enable_listen_thread=listens, listen_port=0))
    assert given == [expected]


def test_an_agent_needs_a_name() -> None:
    with pytest.raises(ValueError, match="name"):
        nixl_agent("")
    with pytest.raises(TypeError, match="sync_mode must be a nixl_thread_sync_t"):
        nixl_agent_config(sync_mode=1)  # type: ignore[arg-type]


def test_the_names_of_rocms_edition() -> None:
    import rixl
    from rixl import _api, _bindings

    assert rixl.nixl_agent is nixl_agent
    assert (_api.nixl_agent, _bindings) == (nixl_agent, nb)
