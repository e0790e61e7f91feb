"""Reads of granted blocks raise StaleReadError if the owner revokes the blocks before the read is complete."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from proxyccl.channels.transfers.errors import MetadataError
from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.errors import ArgumentError, ClosedError, ResourceError
from proxyccl.transfer import (
    ActiveError,
    Agent,
    CorruptReadError,
    DisconnectedError,
    NotGrantedError,
    NotRegisteredError,
    StaleReadError,
    State,
    Transfer,
)
from support.agents import child
from support.grants import BLOCKS, NBYTES, Held, Sides, messages_of, one_runtime

pytestmark = [
    pytest.mark.host_only("agents move the host's memory, whatever the runtime"),
    pytest.mark.filterwarnings("ignore:agent reader moves data:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


NEAR = ["process_vm", "shared_memory", "unix", "tcp"]


@pytest.fixture(params=[*NEAR, "unix, far", "tcp, far"])
def sides(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sides]:
    path, _, far = request.param.partition(", ")
    made = Sides(path, far=bool(far), monkeypatch=monkeypatch)
    yield made
    made.close()


def test_granted_blocks_arrive(sides: Sides) -> None:
    with sides.grant() as grant:
        read = sides.reader.read("owner", sides.rows(*range(BLOCKS)), grant=grant.encoded)
        read.wait()
        assert read.state is State.DONE
        assert read.done()
        assert (sides.target == sides.memory).all()
        again = sides.reader.prepare("read", "owner", sides.rows(1, 2), grant=grant.encoded)
        for _ in range(3):
            again.start().wait()
        assert grant.active
    assert not grant.active


def test_a_read_of_revoked_blocks_names_them_and_those_that_arrived(sides: Sides) -> None:
    grant = sides.grant()
    read = sides.reader.prepare("read", "owner", sides.rows(0, 3, 5), grant=grant.encoded)
    read.start().wait()
    grant.revoke([sides.address(3)])
    sides.memory[:] = 7
    with pytest.raises(StaleReadError, match="revoked 1 of 3 blocks") as raised:
        read.start().wait()
    assert list(raised.value.stale) == [1]
    assert raised.value.peer == "owner"
    others = sides.reader.read("owner", sides.rows(0, 5), grant=grant.encoded)
    others.wait()
    grant.revoke()
    with pytest.raises(StaleReadError):
        sides.reader.read("owner", sides.rows(0), grant=grant.encoded).wait()


def test_blocks_that_are_revoked_during_a_read_are_stale_and_the_others_arrived(sides: Sides) -> None:
    grant = sides.grant()
    read = sides.reader.prepare("read", "owner", sides.rows(0, 1, 2), grant=grant.encoded)
    held = Held(sides.reader, read, far=sides.far)
    grant.revoke([sides.address(1)])
    held.release()
    with pytest.raises(StaleReadError, match="during the read") as raised:
        read.wait()
    assert list(raised.value.stale) == [1]
    assert raised.value.whole == [0, 2]
    assert read.state is State.STALE
    with pytest.raises(StaleReadError):
        read.done()


@pytest.mark.parametrize("sides", NEAR, indirect=True)
def test_revoking_waits_for_reads_of_this_host(sides: Sides) -> None:
    grant, other = sides.grant(), sides.grant()
    prepare = sides.reader.prepare
    read = prepare("read", "owner", sides.rows(0, 1), grant=grant.encoded)
    elsewhere = prepare("read", "owner", sides.rows(3), grant=other.encoded)
    late = prepare("read", "owner", sides.rows(2), grant=grant.encoded)
    held, unaffected = (Held(sides.reader, each) for each in (read, elsewhere))
    with ThreadPoolExecutor(1) as threads:
        revoking = threads.submit(grant.revoke, wait=10.0)
        while grant.active:
            time.sleep(1e-4)
        with pytest.raises(StaleReadError, match="before the read began"):
            late.start()
        assert not revoking.done()
        held.release()
        assert revoking.result(20)
    expected = sides.memory[: 2 * NBYTES].copy()
    sides.memory[:] = 7
    read.wait()
    assert (sides.target[: 2 * NBYTES] == expected).all()
    unaffected.release()


@pytest.mark.parametrize("sides", NEAR, indirect=True)
def test_revoking_says_that_a_read_is_still_active(sides: Sides) -> None:
    grant = sides.grant()
    held = Held(sides.reader, sides.reader.prepare("read", "owner", sides.rows(0), grant=grant.encoded))
    assert not grant.revoke([sides.address(0)], wait=0.01)
    assert not grant.revoke()
    held.release()
    with pytest.raises(StaleReadError, match="during the read"):
        held.transfer.wait()
    assert grant.revoke()


@pytest.mark.parametrize("sides", ["tcp, far"], indirect=True)
def test_a_read_from_another_host_is_not_waited_for(sides: Sides) -> None:
    grant = sides.grant()
    held = Held(sides.reader, sides.reader.prepare("read", "owner", sides.rows(0), grant=grant.encoded), far=True)
    assert grant.revoke(wait=10.0)
    with pytest.raises(StaleReadError):
        held.transfer.wait()


def test_a_canceled_read_is_not_waited_for(sides: Sides) -> None:
    grant = sides.grant()
    held = Held(sides.reader, sides.reader.prepare("read", "owner", sides.rows(0), grant=grant.encoded), far=sides.far)
    held.transfer.cancel()
    assert grant.revoke()
    held.release()


def test_the_first_granted_transfer_to_a_killed_owner() -> None:
    def own(connection: socket.socket) -> None:
        with Agent("owner") as owner:
            block = np.zeros(NBYTES, np.uint8)
            owner.grant([(owner.register(block).address, NBYTES)], key=3)
            connection.send(owner.metadata())
            connection.recv(1)

    with child(own) as process, Agent("reader") as reader:
        reader.add(process.receive())
        reader.connect("owner")
        target = reader.register(np.zeros(NBYTES, np.uint8))
        row = target.address, reader.regions_of("owner")[0].address, NBYTES
        process.kill()
        with pytest.raises(DisconnectedError):  # from `read`, or from `wait` if the lost link is noticed first
            reader.read("owner", [row], grant=3).wait()


def test_a_killed_reader_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child of the killed reader stays alive. Another reader takes over the killed reader's place in the
    ledger.
    """
    sides = Sides("process_vm", monkeypatch=monkeypatch)
    grant, metadata = sides.grant(key=3), sides.owner.metadata()

    def read(connection: socket.socket) -> None:
        with Agent("child") as reader:
            target = np.zeros(NBYTES, np.uint8)
            row = (reader.register(target).address, sides.address(0), NBYTES)
            reader.add(metadata)
            held = Held(reader, reader.prepare("read", "owner", [row], grant=3))
            if os.fork() != 0:
                connection.send(held.transfer.state.name.encode())
            connection.recv(1)

    with child(read) as process:
        assert process.receive() == b"ACTIVE"
        assert not grant.revoke(wait=0.01)
        process.kill()
        assert grant.revoke(wait=10.0)
        with sides.grant() as other:
            sides.reader.read("owner", sides.rows(0), grant=other.encoded).wait()
        assert sides.grant(key=3).revoke()
    sides.close()


def test_a_message_arrives_only_of_reads_that_are_not_stale(sides: Sides) -> None:
    grant = sides.grant()
    read = sides.reader.prepare("read", "owner", sides.rows(0), grant=grant.encoded)
    read.start(b"whole").wait()
    held = Held(sides.reader, read, far=sides.far, message=b"stale")
    grant.revoke()
    held.release()
    with pytest.raises(StaleReadError):
        read.wait()
    assert messages_of(sides) == [b"whole"]


@pytest.mark.parametrize("sides", ["tcp, far"], indirect=True)
def test_a_start_that_is_refused_neither_replaces_nor_repeats_the_message(sides: Sides) -> None:
    with sides.grant() as grant:
        read = sides.reader.prepare("read", "owner", sides.rows(0), grant=grant.encoded)
        held = Held(sides.reader, read, message=b"first")
        with pytest.raises(ActiveError):
            read.start(b"second")
        held.release()
        read.wait()
        with pytest.raises(ArgumentError, match="message"):
            read.start(bytes((1 << 28) + 1))
        assert read.done()
    assert messages_of(sides) == [b"first"]


def test_readers_name_a_grant_by_its_key(sides: Sides) -> None:
    grant = sides.grant(key=7)
    read = sides.reader.prepare("read", "owner", sides.rows(0, 2), grant=7)
    read.start().wait()
    assert (sides.target[:NBYTES] == sides.memory[:NBYTES]).all()
    sides.reader.read("owner", sides.rows(1), grant=grant.encoded).wait()
    with pytest.raises(StaleReadError):  # nobody has granted with this key
        sides.reader.read("owner", sides.rows(0), grant=8).wait()
    grant.revoke([sides.address(5)])
    with pytest.raises(StaleReadError) as raised:
        read.start().wait()
    assert list(raised.value.stale) == [0, 1]
    with sides.grant(key=7 + 65536), pytest.raises(ResourceError, match="key 7 "):
        sides.grant(key=7)
    for key in (-1, 1 << 40, "7"):
        with pytest.raises(ArgumentError, match="key"):
            sides.grant(key=key)
        with pytest.raises(ArgumentError, match="grant"):
            sides.reader.read("owner", sides.rows(0), grant=key)  # type: ignore[arg-type]


def test_a_block_that_is_granted_again_is_another_generation(sides: Sides) -> None:
    former = sides.grant()
    former.revoke()
    with sides.grant() as later:
        with pytest.raises(StaleReadError):
            sides.reader.read("owner", sides.rows(0), grant=former.encoded).wait()
        sides.reader.read("owner", sides.rows(0), grant=later.encoded).wait()


def test_blocks_outside_the_grant_are_refused_before_anything_moves(sides: Sides) -> None:
    grant = sides.owner.grant([(sides.address(2), NBYTES)])
    beyond = (sides.here.address, sides.address(2) + 1, NBYTES)
    for row in (*sides.rows(1), *sides.rows(3), beyond):
        with pytest.raises(NotGrantedError, match="block 1: "):
            sides.reader.read("owner", [*sides.rows(2), row], grant=grant.encoded)
    assert not sides.target.any()


def test_a_lease_ends(sides: Sides) -> None:
    grant = sides.grant(lease=0.02)
    time.sleep(0.03)
    assert not grant.active
    with pytest.raises(StaleReadError):
        sides.reader.read("owner", sides.rows(0), grant=grant.encoded).wait()


@pytest.mark.parametrize("sides", NEAR, indirect=True)
@pytest.mark.parametrize("key", [None, 3])
def test_readers_on_the_host_notice_the_end_of_a_lease_by_themselves(sides: Sides, key: int | None) -> None:
    one_runtime()  # making it may take longer than the lease
    early = None if key is None else sides.reader.prepare("read", "owner", sides.rows(0), grant=key)
    grant = sides.grant(lease=0.2, key=key)
    read = early or sides.reader.prepare("read", "owner", sides.rows(0), grant=grant.encoded)
    held = Held(sides.reader, read)
    time.sleep(0.25)
    held.release()
    with pytest.raises(StaleReadError, match="during the read"):
        read.wait()
    with pytest.raises(StaleReadError, match="before the read began"):
        read.start()
    if key is not None:
        grant.revoke()
        with sides.grant(key=key + 65536):  # a grant in the same place of the ledger, without a lease
            sides.reader.read("owner", sides.rows(0), grant=key + 65536).wait()


def test_a_later_agent_of_the_name_has_not_granted_what_the_former_one_has(sides: Sides) -> None:
    grant = sides.grant()
    sides.reader.remove("owner")
    sides.owner.close()
    with Agent("owner", listen=["127.0.0.1"]) as later:
        later.register(sides.memory)
        sides.reader.add(later.metadata())
        with pytest.raises(StaleReadError, match="former agent"):
            sides.reader.read("owner", sides.rows(0), grant=grant.encoded)


def test_within_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    with Agent("owner") as owner:
        memory = np.zeros(2 * NBYTES, np.uint8)
        region = owner.register(memory)
        with owner.grant([(region.address, NBYTES)]) as grant:
            row = (region.address + NBYTES, region.address, NBYTES)
            owner.read("owner", [row], grant=grant.encoded).wait()
            held = Held(owner, owner.prepare("read", "owner", [row], grant=grant.encoded))
            assert not grant.revoke()
            held.release()
        with pytest.raises(StaleReadError):
            owner.read("owner", [row], grant=grant.encoded).wait()
        assert owner.regions[0] == region


def test_wrong_arguments(sides: Sides) -> None:
    for blocks in ([], [(1, 2, 3)], [(1, 2), (3,)], [(sides.address(0), 0)], [(-1, 4)], [("a", 1)]):
        with pytest.raises(ArgumentError, match="blocks"):
            sides.owner.grant(blocks)
    with pytest.raises(ArgumentError, match="overlap"):
        sides.owner.grant([(sides.address(0), NBYTES), (sides.address(1) - 1, 2)])
    with pytest.raises(NotRegisteredError):
        sides.owner.grant([(sides.address(BLOCKS), 1)])
    with pytest.raises(ArgumentError, match="lease"):
        sides.grant(lease=-1.0)
    with sides.grant() as grant:
        for wait in (-1.0, "1", True):
            with pytest.raises(ArgumentError, match="wait"):
                grant.revoke(wait=wait)  # type: ignore[arg-type]
        for addresses in ([sides.address(0) + 1], [-1], [1.5], ["x"], [None], "x", [[1], [2, 3]], [True], [1 << 64]):
            with pytest.raises(ArgumentError, match="granted block"):
                grant.revoke(addresses)
        for other in (grant, "x", [grant.encoded]):
            with pytest.raises(ArgumentError, match="bytes of a grant, or a key"):
                sides.reader.read("owner", sides.rows(0), grant=other)  # type: ignore[arg-type]
        for kind in (bytearray, memoryview):
            sides.reader.read("owner", sides.rows(0), grant=kind(grant.encoded)).wait()
    for writes in ("yes", [], None, 1):
        with pytest.raises(ArgumentError, match="writes"):
            sides.grant(writes=writes)
    for garbage in (b"", b"{}", grant.encoded[:-9]):
        with pytest.raises(MetadataError):
            sides.reader.read("owner", sides.rows(0), grant=garbage)


def test_a_thread_that_looks_at_the_state_does_not_hide_a_stale_read(sides: Sides) -> None:
    """The thread may see the end of the previous read while the next read starts."""
    ended = threading.Event()

    def look(read: Transfer) -> None:
        while not ended.is_set():
            assert read.state is not State.NEW

    for value in range(1, 30):
        sides.memory[:] = value
        grant = sides.grant()
        read = sides.reader.prepare("read", "owner", sides.rows(*range(BLOCKS)), grant=grant.encoded)
        read.start().wait()
        ended.clear()
        with ThreadPoolExecutor(1) as threads:
            looking = threads.submit(look, read)
            try:
                for _ in range(3):
                    read.start().wait()
                    assert (sides.target == value).all()
                grant.revoke()
                sides.memory[:] = 255
                with pytest.raises(StaleReadError):
                    read.start().wait()
            finally:
                ended.set()
            looking.result(10)


def test_a_read_whose_data_differs_from_the_checksums_names_the_blocks(sides: Sides) -> None:
    grant = sides.grant(checksums=True)
    read = sides.reader.prepare("read", "owner", sides.rows(6, 0, 3), grant=grant.encoded)
    read.start(b"whole").wait()
    assert messages_of(sides) == [b"whole"]
    sides.memory[3 * NBYTES + 5] ^= 1  # as if the link had corrupted the data
    read.start(b"never sent")
    with pytest.raises(CorruptReadError, match="the data of 1 of 3 blocks of agent owner differs") as raised:
        read.wait()
    assert raised.value.corrupt == [2]
    assert read.state is State.CORRUPT
    assert messages_of(sides) == []
    sides.memory[3 * NBYTES + 5] ^= 1
    read.start().wait()
    assert read.state is State.DONE
    held = Held(sides.reader, read, far=sides.far)
    grant.revoke()
    held.release()
    with pytest.raises(StaleReadError, match="during the read"):
        read.wait()
    with pytest.raises(StaleReadError):
        read.start().wait()


@pytest.mark.parametrize("sides", ["process_vm"], indirect=True)
def test_a_caller_may_change_its_array_of_blocks_during_a_read(sides: Sides) -> None:
    grant = sides.grant(checksums=True)
    rows = np.array(sides.rows(1), np.uint64)
    read = sides.reader.prepare("read", "owner", rows, grant=grant.encoded).start()
    rows[:] = sides.rows(2)
    read.wait()
    assert (sides.target[NBYTES : 2 * NBYTES] == sides.memory[NBYTES : 2 * NBYTES]).all()
    sides.memory[0] ^= 1
    rows[:] = sides.rows(0)
    read = sides.reader.prepare("read", "owner", rows, grant=grant.encoded).start()
    rows[:] = sides.rows(1)
    with pytest.raises(CorruptReadError, match=f"the first is block 0 at {sides.address(0):#x}"):
        read.wait()


@pytest.mark.parametrize("sides", ["process_vm"], indirect=True)
def test_checksums_are_of_whole_blocks_of_host_memory(sides: Sides) -> None:
    grant = sides.grant(checksums=True)
    parts = np.array(sides.rows(0, 1))
    parts[1, 2] -= 1
    with pytest.raises(NotGrantedError, match="block 1 is a part of a granted block"):
        sides.reader.prepare("read", "owner", parts, grant=grant.encoded)
    runtime = one_runtime()
    array = Array(runtime, runtime.allocate(NBYTES), (NBYTES,), as_dtype("uint8"))
    device = sides.reader.register(array)
    into_device = [(device.address, sides.address(0), NBYTES)]
    with pytest.raises(ArgumentError, match="grant: has checksums"):
        sides.reader.prepare("read", "owner", into_device, grant=grant.encoded)
    with pytest.raises(ArgumentError, match="checksums: must be False for memory of a device"):
        sides.reader.grant([(device.address, NBYTES)], checksums=True)
    for options in ({"writes": True}, {"key": 1}):
        with pytest.raises(ArgumentError, match="checksums: must be False"):
            sides.grant(checksums=True, **options)
    with pytest.raises(ArgumentError, match="checksums: must be True or False"):
        sides.grant(checksums=1)


def test_closing_the_owner_revokes_its_grants(sides: Sides) -> None:
    grant = sides.grant()
    read = sides.reader.prepare("read", "owner", sides.rows(0), grant=grant.encoded)
    sides.owner.close()
    assert not grant.active
    with pytest.raises((StaleReadError, DisconnectedError)):
        read.start().wait()


def test_a_forked_child_does_not_revoke_its_parent_s_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides("process_vm", monkeypatch=monkeypatch)
    grant = sides.grant()

    def leave_and_revoke(connection: socket.socket) -> None:
        with grant:
            pass
        try:
            grant.revoke()
        except ClosedError as error:
            connection.send(str(error).encode())

    with child(leave_and_revoke) as process:
        assert b"the grant belongs to process" in process.receive()
    sides.reader.read("owner", sides.rows(0), grant=grant.encoded).wait()
    sides.close()


def test_each_stale_read_is_an_error_of_its_own(sides: Sides) -> None:
    grant = sides.grant()
    read = sides.reader.prepare("read", "owner", sides.rows(0), grant=grant.encoded)
    held = Held(sides.reader, read, far=sides.far)
    grant.revoke()
    held.release()
    errors = []
    for _ in range(2):
        with pytest.raises(StaleReadError) as raised:
            read.wait()
        errors.append(raised.value)
    assert errors[0] is not errors[1]


def test_grants_add_no_regions_of_the_program(sides: Sides) -> None:
    with sides.grant() as grant:
        for block in range(3):
            sides.reader.read("owner", sides.rows(block), grant=grant.encoded).wait()
    assert sides.owner.regions == [sides.there]
    assert sides.reader.regions == [sides.here]
    assert sides.reader.regions_of("owner") == [sides.there]


@pytest.mark.parametrize("rounds", [60, pytest.param(2_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["stale", "consumed", "out of range", "lease"])
def test_a_read_that_succeeds_has_the_granted_data(case: str, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner overwrites each block as soon as it has revoked the block, at a random moment of the read."""
    for path, share in (("process_vm", 0.6), ("unix", 0.2), ("unix, far", 0.2)):
        sides = Sides(path.partition(",")[0], far="far" in path, nbytes=1 << 17, monkeypatch=monkeypatch)
        with ThreadPoolExecutor(1) as threads:
            outcomes = [one_read(sides, case, threads) for _ in range(int(rounds * share))]
        sides.close()
        monkeypatch.undo()
        assert any(outcomes) or rounds < 1000  # a few reads may all be in time


def one_read(sides: Sides, case: str, threads: ThreadPoolExecutor) -> bool:
    """Makes a read while the owner revokes its blocks. Returns whether the read was refused. Asserts that
    the data of a read that was not refused is the granted data.
    """
    value = random.randrange(1, 250)
    sides.memory[:] = value
    lease = random.uniform(1e-5, 1e-3) if case == "lease" else None
    grant = sides.grant(BLOCKS - 1 if case == "out of range" else BLOCKS, lease=lease)
    begun = threading.Event()

    def reuse() -> None:
        begun.wait(10)
        end = time.perf_counter() + random.uniform(0, 8e-4)
        while grant.active and (case == "lease" or time.perf_counter() < end):
            time.sleep(0)
        grant.revoke()
        sides.memory[:] = 255

    encoded, rows = grant.encoded, sides.rows(*range(BLOCKS))
    reusing = threads.submit(reuse)
    if case == "consumed":  # the first read ends the grant, and the second one comes too late
        sides.reader.read("owner", rows, grant=encoded).wait()
        begun.set()
        reusing.result(10)
    if case == "out of range":
        begun.set()
        unregistered = [*rows, (sides.here.address, sides.address(BLOCKS), sides.nbytes)]
        try:
            with pytest.raises(NotGrantedError, match=f"block {BLOCKS - 1}: "):
                sides.reader.read("owner", rows, grant=encoded)
            with pytest.raises(NotRegisteredError):
                sides.reader.read("owner", unregistered, grant=encoded)
        finally:
            reusing.result(10)
        assert not sides.target.any()
        return True
    sides.target[:] = 0
    begun.set()
    try:
        sides.reader.read("owner", rows, grant=encoded).wait()
    except StaleReadError as error:
        for block in error.whole:
            assert (sides.target[block * sides.nbytes : (block + 1) * sides.nbytes] == value).all()
        refused = True
    else:
        assert (sides.target == value).all()
        refused = False
    reusing.result(10)
    return refused
