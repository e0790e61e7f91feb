"""After a registration has ended, transfers prepared with it move no data, even if the address is registered again."""

from __future__ import annotations

import base64
import gc
import json
import socket
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from proxyccl.channels.transfers import agent as agent_module
from proxyccl.channels.transfers import ledger
from proxyccl.channels.transfers.metadata import METADATA
from proxyccl.channels.transfers.regions import Regions
from proxyccl.device.errors import ArgumentError, ResourceError
from proxyccl.transfer import (
    Agent,
    DisconnectedError,
    FreedMemoryError,
    MetadataError,
    NameTakenError,
    NotRegisteredError,
    Region,
    State,
    UnknownAgentError,
    shared_empty,
)
from support.agents import PATHS, Child, Pair, child, force_path

NBYTES = 1 << 20

pytestmark = [
    pytest.mark.host_only("agents move the host's memory, whatever the runtime"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def serve_orders(connection: socket.socket) -> None:
    """Serves an agent "b", which executes the orders that the test sends. The agent answers b"sum" with the sum of its
    memory, and other orders with its metadata.
    """
    agent = Agent("b", listen=["127.0.0.1"])
    memory: Any = None
    regions: list[Region] = []
    while order := connection.recv(100):
        answer = b""
        match order:
            case b"shared" | b"private":
                memory = shared_empty(NBYTES) if order == b"shared" else np.zeros(NBYTES, np.uint8)
            case b"register":
                regions.append(agent.register(memory))
            case b"by address":
                regions.append(agent.register((memory.ctypes.data, NBYTES)))
            case b"deregister":
                agent.deregister(regions.pop())
            case b"free":
                memory = None
                gc.collect()
            case b"sum":
                answer = b"%d" % int(memory.sum())
        connection.send(answer or agent.metadata())


class Owner:
    """The process of `serve_orders`, and an agent "a" that has the metadata of the process's agent."""

    def __init__(self, process: Child) -> None:
        self._process = process
        self.agent = Agent("a", listen=["127.0.0.1"])
        self.memory = np.ones(NBYTES, np.uint8)
        self.near = self.agent.register(self.memory)

    def order(self, *orders: str) -> bytes:
        answer = b""
        for order in orders:
            self._process.connection.send(order.encode())
            answer = self._process.receive()
        return answer

    def blocks(self, far: Region) -> list[tuple[int, int, int]]:
        """Returns one block of all memory, from this process's address to `far`'s."""
        return [(self.near.address, far.address, NBYTES)]


@pytest.fixture
def owner() -> Iterator[Owner]:
    with child(serve_orders) as process:
        made = Owner(process)
        yield made
        made.agent.close()


_ENDS = [
    ["deregister"],
    ["deregister", "register"],
    ["deregister", "free"],
    ["deregister", "free", "{kind}", "register"],
    ["deregister", "free", "{kind}", "by address"],
]


@pytest.mark.parametrize(
    ("path", "kind", "how", "ends"),
    [
        *(("shared_memory", "shared", "register", ends) for ends in _ENDS),
        *((path, "private", "by address", ends) for ends in _ENDS for path in PATHS),
        *(
            (path, "shared", "by address", ends)
            for ends in (_ENDS[3], ["free"], ["free", "shared", "by address"])
            for path in ("shared_memory", *PATHS)
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else value,
)
def test_a_prepared_transfer_ends_with_its_registration(
    owner: Owner, path: str, kind: str, how: str, ends: Sequence[str]
) -> None:
    if path != "shared_memory":
        force_path(owner.agent, path)
    owner.agent.add(owner.order(kind, how))
    (far,) = owner.agent.regions_of("b")
    transfers = [owner.agent.prepare(operation, "b", owner.blocks(far)) for operation in ("read", "write")]
    for transfer in transfers:
        assert transfer.path.name == path
        transfer.start().wait()
    metadata = owner.order(*(end.format(kind=kind) for end in ends))
    owner.memory[:] = 2
    for transfer in transfers:
        with pytest.raises((NotRegisteredError, FreedMemoryError), match=f"{far.address:#x}"):
            transfer.start(b"never told").wait()
        with pytest.raises((NotRegisteredError, FreedMemoryError), match=f"{far.address:#x}"):
            owner.agent.prepare("write" if transfer.writes else "read", "b", owner.blocks(far)).start().wait()
    assert (owner.memory == 2).all()
    if ends[-1] in ("register", "by address"):
        if "free" in ends:  # the transfers wrote nothing to the new memory
            assert owner.order("sum") == b"0"
        owner.agent.add(metadata)
        new = owner.agent.regions_of("b")[-1]
        owner.agent.write("b", owner.blocks(new)).wait()
        assert owner.order("sum") == b"%d" % (2 * NBYTES)


@pytest.mark.parametrize("path", ["self", *PATHS])
def test_local_memory_that_was_deregistered(pair: Pair, path: str) -> None:
    blocks: Any = pair.whole()
    if path == "self":
        own = pair.a.register(pair.theirs)
        blocks = [(pair.our_region.address, own.address, own.nbytes)]
    else:
        force_path(pair.a, path)
    peer = "a" if path == "self" else "b"
    transfers = [pair.a.prepare(operation, peer, blocks) for operation in ("read", "write")]
    before = pair.theirs.copy()
    pair.a.deregister(pair.our_region)
    pair.a.register(pair.ours)  # registers the same address again
    for transfer in transfers:
        with pytest.raises(NotRegisteredError, match="this agent has deregistered its memory at 0x"):
            transfer.start(b"never told").wait()
    assert not pair.ours.any()
    np.testing.assert_array_equal(pair.theirs, before)
    assert not pair.b.messages()


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("path", ["unix", "tcp"])
def test_local_memory_that_is_deregistered_during_a_transfer(path: str, operation: str) -> None:
    pair = Pair(64 << 20)
    force_path(pair.a, path)
    pair.ours[:], pair.theirs[:] = 1, 2
    for _ in range(50):
        transfer = pair.a.prepare(operation, "b", pair.whole()).start()
        pair.a.deregister(pair.our_region)
        if transfer.state is not State.DONE:
            break
        pair.a.register(pair.ours)  # the transfer ended before its memory was deregistered
    pair.ours[:] = 3  # from now on, the program uses the memory for something else
    with pytest.raises(NotRegisteredError, match=f"this agent has deregistered .* {pair.our_region.address:#x}"):
        transfer.wait()
    assert (pair.ours == 3).all()
    assert not (pair.theirs == 3).any()
    small = np.zeros(10, np.uint8)
    region = pair.a.register(small)
    pair.a.read("b", [(region.address, pair.their_region.address, 10)]).wait()  # the link goes on
    np.testing.assert_array_equal(small, pair.theirs[:10])
    pair.close()


def test_memory_that_is_deregistered_while_a_transfer_is_prepared(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    both = shared_empty(2 * NBYTES)
    lower, upper = (pair.b.register(both[at : at + NBYTES]) for at in (0, NBYTES))
    pair.a.add(pair.b.metadata())
    pair.a.connect("b")
    find_kind = agent_module.kind_of

    def and_end_it(regions: Regions, *others: Any) -> str:
        kind = find_kind(regions, *others)
        if "remote" in others:
            pair.b.deregister(upper)
        return kind

    monkeypatch.setattr(agent_module, "kind_of", and_end_it)
    with pytest.raises(NotRegisteredError, match=f"{upper.address:#x}"):
        pair.a.prepare("write", "b", [(pair.our_region.address, upper.address, 100)])
    assert lower in pair.b.regions


def test_within_an_agent_the_remote_side_is_checked_too(pair: Pair) -> None:
    other = np.zeros(100, np.uint8)
    region = pair.a.register(other)
    transfer = pair.a.prepare("write", "a", [(pair.our_region.address, region.address, 100)])
    pair.ours[:] = 1
    pair.a.deregister(region)
    with pytest.raises(NotRegisteredError):
        transfer.start().wait()
    assert not other.any()


def test_a_region_that_is_registered_twice_stays_with_the_first_end(pair: Pair) -> None:
    again = pair.b.register(pair.theirs)
    assert again == pair.their_region
    transfer = pair.a.prepare("read", "b", pair.whole())
    pair.b.deregister(again)
    transfer.start().wait()
    pair.b.deregister(pair.their_region)
    with pytest.raises(NotRegisteredError):
        transfer.start().wait()
    with pytest.raises(NotRegisteredError):
        pair.b.deregister(again)


def test_other_registrations_may_end(pair: Pair) -> None:
    transfer = pair.a.prepare("read", "b", pair.whole())
    for _ in range(3):
        region = pair.b.register(np.zeros(10, np.uint8))
        transfer.start().wait()
        pair.b.deregister(region)
        pair.a.deregister(pair.a.register(np.zeros(10, np.uint8)))
        transfer.start().wait()
    np.testing.assert_array_equal(pair.ours, pair.theirs)


def test_metadata_that_come_late_do_not_bring_a_registration_back(pair: Pair) -> None:
    late = pair.b.metadata()
    pair.b.deregister(pair.their_region)
    pair.b.register(pair.theirs)
    pair.a.add(pair.b.metadata())
    pair.a.add(late)
    pair.a.read("b", pair.whole()).wait()
    np.testing.assert_array_equal(pair.ours, pair.theirs)


def test_metadata_of_a_former_agent_do_not_extend_the_later_one() -> None:
    stale: NDArray[np.uint8] = np.zeros(100, np.uint8)
    with Agent("a", listen=()) as a:
        with Agent("b", listen=()) as former:
            former.register(stale)
            metadata, part = former.metadata(), former.metadata(place=False)
        with Agent("b", listen=()) as later:
            a.add(later.metadata())
            with pytest.raises(UnknownAgentError):
                a.add(part)
            with pytest.raises(NameTakenError):
                a.add(metadata)
            assert a.regions_of("b") == []
            a.remove("b")
            a.add(metadata)
            with pytest.raises(DisconnectedError):
                a.connect("b")


def test_metadata_with_memory_that_no_process_has(pair: Pair) -> None:
    metadata = pair.b.metadata()
    known = METADATA.decode(metadata, "b")
    pair.a.remove("b")

    def is_refused(message: str, **changed: object) -> None:
        with pytest.raises(MetadataError, match=message):
            pair.a.add(json.dumps({**json.loads(metadata), **changed}).encode())

    wrong = {"start": (0, 2**64 - 10), "end": (1, 2**63), "number": (3, 0), "kind": (4, 2)}
    for column, value in wrong.values():
        columns = known.columns.copy()
        columns[column, -1] = value
        last = columns.shape[1] - 1
        is_refused(f"row {last} is not", rows=base64.b64encode(columns.tobytes()).decode())
    is_refused("not a multiple", rows=base64.b64encode(known.rows[:-8]).decode())
    is_refused("1 labels", labels=["x"])
    assert pair.a.peers == []
    with pytest.raises(ArgumentError, match=r"metadata: must be bytes, not str"):
        pair.a.add(metadata.decode())  # type: ignore[arg-type]


def test_a_region_that_metadata_lists_twice_is_known_once(pair: Pair) -> None:
    fields = json.loads(pair.b.metadata(pair.b.regions, place=False))
    columns = METADATA.decode(json.dumps(fields).encode(), "b").columns
    later = columns + np.array([[0], [0], [0], [1 << 20], [0]], np.uint64)
    fields["rows"] = base64.b64encode(np.hstack((columns, later)).tobytes()).decode()
    pair.a.add(json.dumps(fields).encode())
    assert pair.a.regions_of("b") == pair.b.regions


@pytest.mark.parametrize(
    ("region", "argument"),
    [
        (Region(0, 10, label="x" * 4097), "label"),
        (Region(0, 10, label="\ud800"), "label"),
        (Region(-1, 10), "address"),
        (Region(0, 2**64), "nbytes"),
        (Region(0, 10, device=-1), "device"),
        (Region(2**63 - 1, 1), "regions"),
        (Region(0, 10, kind="file"), "kind"),
    ],
)
def test_regions_that_no_peer_would_take(pair: Pair, region: Region, argument: str) -> None:
    with pytest.raises(ArgumentError) as error:
        pair.b.register_regions([Region(4096, 10), region])
    assert error.value.argument == argument
    assert pair.b.regions == [pair.their_region]
    pair.a.add(pair.b.metadata())


def test_an_agent_that_is_gone_leaves_nothing_mapped() -> None:
    memory = shared_empty(NBYTES)
    mapped = []
    for _ in range(3):
        with Agent("a", listen=()) as agent:
            agent.register(memory)
        del agent
        gc.collect()
        mapped.append(Path("/proc/self/maps").read_text().count("memfd:proxyccl"))
    assert mapped == mapped[:1] * 3


def test_regions_for_which_there_is_no_room_take_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with Agent("a", listen=()) as agent:
        monkeypatch.setattr(ledger, "_SLOTS", 5)  # the ledger itself takes a slot
        regions = [Region(4096 * (1 + index), 10) for index in range(4)]
        with pytest.raises(ResourceError, match="at most 4 registered regions"):
            agent.register_regions(regions)
        assert agent.regions == []
        agent.register_regions(regions[:3])
        assert agent.regions == regions[:3]


def test_registrations_that_have_ended_take_no_memory() -> None:
    memory = np.zeros(64, np.uint8)

    def used_after(registrations: int) -> int:
        for _ in range(registrations):
            agent.deregister(agent.register(memory))
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        with Agent("owner") as agent:
            before = used_after(2_000)
            assert used_after(10_000) - before < 500_000
    finally:
        tracemalloc.stop()


def test_labels_and_names_of_the_greatest_length(pair: Pair) -> None:
    pair.b.register(np.zeros(10, np.uint8), label="ä" * 4096)
    pair.a.add(pair.b.metadata())
    for name in ("\ud800", "x" * 1025):
        with pytest.raises(ArgumentError, match="name"):
            Agent(name)
    for listen in ("127.0.0.1", [5], ["\0"], ["\ud800"], ["a" * 300]):
        with pytest.raises(ArgumentError, match="listen"):
            Agent("c", listen=listen)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["process_vm", "unix"])
def test_many_regions_come_and_go_in_any_order(path: str) -> None:
    """The regions are short, adjacent and overlapping, and some are registered twice."""
    random, size, count = np.random.default_rng(3), 64, 600
    memory = random.integers(0, 256, size * count, dtype=np.uint8)
    target = np.zeros_like(memory)
    starts = random.permutation(count - 1) * size
    with Agent("a") as a, Agent("b") as b:
        force_path(a, path)
        near = a.register(target)
        regions = [Region(memory.ctypes.data + int(at), size * (1 + int(at) % 3)) for at in starts]
        regions = [region for region in regions if region.address + region.nbytes <= memory.ctypes.data + len(memory)]
        b.register_regions(regions[:200])
        for region in (*regions[200:], *regions[:100]):
            b.register_regions([region])
        for region in regions[::2]:
            b.deregister(region)
        for region in regions[:100:2]:  # these were registered twice
            b.deregister(region)
        left = sorted(set(b.regions), key=lambda region: region.address)
        assert set(left) == set(regions[1::2])
        a.add(b.metadata())
        blocks = [(near.address + r.address - memory.ctypes.data, r.address, r.nbytes) for r in left]
        expected = np.zeros_like(memory)
        for at, _, nbytes in np.array(blocks) - (near.address, 0, 0):
            expected[at : at + nbytes] = memory[at : at + nbytes]
        for block in blocks:
            a.read("b", [block]).wait()
        assert (target == expected).all()

        def overlap(one: Region, two: Region) -> bool:
            return one.address < two.address + two.nbytes and two.address < one.address + one.nbytes

        once = [one for one in left if one in regions[100:]]
        apart = [one for one in once if sum(overlap(one, two) for two in left) == 1]
        assert len(apart) > 30
        chosen = [block for block in blocks if block[1] in {region.address for region in apart}]
        reads = [a.prepare("read", "b", [block]) for block in chosen]
        b.deregister(*apart[:20])
        for number, read in enumerate(reads):
            if number < 20:
                with pytest.raises(NotRegisteredError):
                    read.start().wait()
            else:
                read.start().wait()
