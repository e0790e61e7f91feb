"""After an owner has revoked a grant for writes, and the writers have ended, no byte of their writes arrives."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.nixl._api import nixl_agent
from proxyccl.nixl.errors import nixlBackendError, nixlNotFoundError
from proxyccl.transfer import Agent, NoPathError, NotGrantedError, StaleReadError, StaleWriteError, State, Transfer
from support.agents import child
from support.grants import BLOCKS, NBYTES, Held, Sides, messages_of, one_runtime

pytestmark = [
    pytest.mark.host_only("agents move the host's memory, whatever the runtime"),
    pytest.mark.filterwarnings("ignore:agent reader moves data:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.fixture(params=["process_vm", "shared_memory"])
def sides(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sides]:
    made = Sides(request.param, monkeypatch=monkeypatch)
    made.target[:] = 9
    yield made
    made.close()


def test_granted_writes_arrive(sides: Sides) -> None:
    with sides.grant(writes=True) as grant:
        write = sides.reader.write("owner", sides.rows(1, 2), grant=grant.encoded, message=b"written")
        write.wait()
        assert write.state is State.DONE
        assert (sides.memory[NBYTES : 3 * NBYTES] == 9).all()
        write.start().wait()
        assert messages_of(sides) == [b"written"]
        assert grant.revoke([sides.address(2)])
        with pytest.raises(StaleWriteError, match="revoked 1 of 2 blocks before the write began") as raised:
            write.start()
        assert list(raised.value.stale) == [1]
        sides.reader.write("owner", sides.rows(1), grant=grant.encoded).wait()
    with pytest.raises(StaleWriteError):
        sides.reader.write("owner", sides.rows(1), grant=grant.encoded)


def test_revoking_lets_an_active_write_complete(sides: Sides) -> None:
    grant = sides.grant(writes=True)
    held = Held(sides.reader, sides.reader.prepare("write", "owner", sides.rows(0), grant=grant.encoded))
    with ThreadPoolExecutor(1) as threads:
        revoking = threads.submit(grant.revoke, wait=10.0)
        while grant.active:
            time.sleep(1e-4)
        held.release()
        assert revoking.result(20)
    assert (sides.memory[:NBYTES] == 9).all()
    held.transfer.wait()


def test_a_write_that_begins_after_its_grant_was_revoked_moves_nothing(sides: Sides) -> None:
    grant = sides.grant(writes=True)
    expected = sides.memory.copy()
    held = Held(sides.reader, sides.reader.prepare("write", "owner", sides.rows(0, 1), grant=grant.encoded))
    assert not grant.revoke()
    held.release()
    with pytest.raises(StaleWriteError, match="during the write"):
        held.transfer.wait()
    assert grant.revoke()
    assert (sides.memory == expected).all()


@pytest.mark.parametrize("path", ["unix", "tcp", "tcp, far"])
def test_paths_on_which_bytes_may_arrive_later_are_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides(path.partition(",")[0], far="far" in path, monkeypatch=monkeypatch)
    with sides.grant(writes=True) as grant, sides.grant(writes=True, key=1):
        for named in (grant.encoded, 1):
            with pytest.raises(NoPathError, match=rf"a write with a grant .* not {path[:3]}.* from dram to dram"):
                sides.reader.write("owner", sides.rows(0), grant=named)
    assert not sides.target.any()
    sides.close()


def test_memory_of_devices_is_refused(sides: Sides) -> None:
    runtime = one_runtime()
    region = sides.owner.register(Array(runtime, runtime.allocate(64), (64,), as_dtype("uint8")))
    sides.reader.add(sides.owner.metadata())
    with sides.owner.grant([(region.address, 64)], writes=True) as grant:
        row = (sides.here.address, region.address, 64)
        with pytest.raises(NoPathError, match="from dram to vram"):
            sides.reader.write("owner", [row], grant=grant.encoded)


def test_a_grant_allows_one_direction(sides: Sides) -> None:
    expected = sides.memory.copy()
    with sides.grant(key=5) as reads, sides.owner.grant([(sides.address(0), NBYTES)], key=6, writes=True) as writes:
        with pytest.raises(NotGrantedError, match="reads of the blocks only"):
            sides.reader.write("owner", sides.rows(0), grant=reads.encoded)
        with pytest.raises(NotGrantedError, match="writes of the blocks only"):
            sides.reader.read("owner", sides.rows(0), grant=writes.encoded)
        with pytest.raises(NotGrantedError, match="block 0"):
            sides.reader.write("owner", sides.rows(1), grant=writes.encoded)
        with pytest.raises(StaleWriteError):
            sides.reader.write("owner", sides.rows(0), grant=5)
        with pytest.raises(StaleReadError):
            sides.reader.read("owner", sides.rows(0), grant=6)
        assert (sides.memory == expected).all()
        sides.reader.write("owner", sides.rows(0), grant=6).wait()
        assert (sides.memory[:NBYTES] == 9).all()


def test_within_an_agent() -> None:
    with Agent("owner") as owner:
        memory = np.arange(100, dtype=np.uint8)
        region = owner.register(memory)
        row = (region.address, region.address + 50, 50)
        with owner.grant([row[1:]], writes=True) as grant:
            owner.write("owner", [row], grant=grant.encoded).wait()
            assert (memory[50:] == memory[:50]).all()
            held = Held(owner, owner.prepare("write", "owner", [row], grant=grant.encoded))
            assert not grant.revoke()
            held.release()
            assert grant.revoke(wait=10.0)


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("path", ["process_vm", "shared_memory"])
def test_a_writer_in_another_process_is_stopped(path: str, killed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides(path, nbytes=1 << 20, monkeypatch=monkeypatch)
    grant, metadata = sides.grant(writes=True), sides.owner.metadata()

    def write(connection: socket.socket) -> None:
        with Agent("child") as writer:
            source = np.full(BLOCKS * sides.nbytes, 9, np.uint8)
            here = writer.register(source).address
            writer.add(metadata)
            rows = [(here, sides.address(block), sides.nbytes) for block in range(BLOCKS)]
            write = writer.prepare("write", "owner", rows, grant=grant.encoded)
            write.start().wait()
            connection.send(b"begun")
            try:
                while True:
                    write.start().wait()
            except StaleWriteError:
                connection.send(b"stale")
                connection.recv(1)

    with child(write) as process:
        assert process.receive() == b"begun"
        time.sleep(random.uniform(0, 0.01))
        if killed:
            process.kill()
        assert grant.revoke(wait=10.0)
        sides.memory[:] = 255
        if not killed:
            assert process.receive() == b"stale"
        assert (sides.memory == 255).all()
    sides.close()


def complete(transfer: Transfer) -> None:
    transfer.start().wait()


@pytest.mark.parametrize("rounds", [30, pytest.param(1_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", ["process_vm", "shared_memory"])
def test_no_byte_arrives_after_the_writers_have_ended(path: str, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner revokes at a random moment of a write of several pieces, and overwrites the blocks at once."""
    sides = Sides(path, nbytes=1 << 19, monkeypatch=monkeypatch)
    outcomes = set()
    with ThreadPoolExecutor(1) as threads:
        for _ in range(rounds):
            grant = sides.grant(writes=True)
            write = sides.reader.prepare("write", "owner", sides.rows(*range(BLOCKS)), grant=grant.encoded)
            writing = threads.submit(complete, write)
            time.sleep(random.uniform(0, 1e-3))
            ended = grant.revoke(wait=random.choice([0.0, 1e-4, 10.0]))
            assert ended or grant.revoke(wait=10.0)
            sides.memory[:] = 255
            outcomes.add(writing.exception(10) is None)
            assert isinstance(writing.exception(), StaleWriteError | None)
            assert (sides.memory == 255).all()
    sides.close()
    assert outcomes == {True, False} or rounds < 1000


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
@pytest.mark.parametrize("way", ["list", "prepared", "granted when prepared"])
def test_a_list_of_nixl_carries_its_grant(way: str, operation: str) -> None:
    owner, reader = (nixl_agent(f"{name}, {way}, {operation}") for name in ("owner", "reader"))
    memory, target = np.full(4 * NBYTES, 5, np.uint8), np.zeros(4 * NBYTES, np.uint8)
    rows, here = ([(array.ctypes.data + block * NBYTES, NBYTES, 0) for block in range(4)] for array in (memory, target))
    for agent, blocks in ((owner, rows), (reader, here)):
        agent.register_memory([(*block, "") for block in blocks], "DRAM")
    name = reader.add_remote_agent(owner.get_agent_metadata())
    descs = owner.get_xfer_descs(rows, "DRAM")
    grant = owner.grant(descs, writes=operation == "WRITE")
    remote = reader.deserialize_descs(owner.get_serialized_descs(descs))
    assert remote == descs
    plain = reader.get_xfer_descs(rows, "DRAM")
    local = reader.get_xfer_descs(here, "DRAM")

    def move(operation: str) -> str:
        if way != "list":
            ours, theirs = reader.prep_xfer_dlist("", local), reader.prep_xfer_dlist(name, remote)
            if way == "granted when prepared":
                theirs = reader.granted_dlist(reader.prep_xfer_dlist(name, plain), grant.encoded)
            handle = reader.make_prepped_xfer(operation, ours, range(4), theirs, range(4))
        else:
            handle = reader.initialize_xfer(operation, local, remote, name)
        state = reader.transfer(handle)
        while state == "PROC":
            state = reader.check_xfer_state(handle)
        return state

    assert move(operation) == "DONE"
    expected = 5 if operation == "READ" else 0
    assert (memory == expected).all()
    assert (target == expected).all()
    with pytest.raises(nixlNotFoundError, match="of the blocks only"):
        move("READ" if operation == "WRITE" else "WRITE")
    assert grant.revoke()
    with pytest.raises(nixlBackendError) as raised:
        move(operation)
    assert isinstance(raised.value.__cause__, StaleReadError if operation == "READ" else StaleWriteError)
