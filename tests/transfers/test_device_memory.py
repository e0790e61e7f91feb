"""Transfers of device memory, on the host runtime or on GPUs, between agents for each device and between two
processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from nixl._api import nixl_agent

from proxyccl.channels.transfers import copier
from proxyccl.channels.transfers.metadata import METADATA
from proxyccl.channels.transfers.published import find_agents
from proxyccl.channels.transfers.regions import VRAM
from proxyccl.channels.transfers.tracing import AgentTracer
from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.errors import ArgumentError, ResourceError
from proxyccl.device.stream_operations import StreamOperations
from proxyccl.transfer import (
    ActiveError,
    Agent,
    DisconnectedError,
    NotRegisteredError,
    StaleReadError,
    State,
    TransferTimeoutError,
    strided,
)
from support.agents import PATHS, force_path, metadata_of
from support.devices import RUNTIME, rank_runtime
from support.paths import PROGRAMS, TESTS
from support.stream_words import wait_value, write_value

NBYTES = 16 << 20  # half of it is a block that counts as long

pytestmark = pytest.mark.filterwarnings("ignore:agent .* through a socket:RuntimeWarning")


def array_of(number: int, nbytes: int = NBYTES) -> Array:
    runtime = rank_runtime(number)
    return Array(runtime, runtime.allocate(nbytes), (nbytes,), as_dtype("uint8"))


class OnDevices:
    """Agents a and b, each with an array on its own device and one in host memory.

    Attributes:
        arrays: the device arrays of a and of b.
        hosts: the numpy arrays of a and of b.
        regions: regions of the device arrays.
        host_regions: regions of the numpy arrays.
    """

    def __init__(self) -> None:
        self.a, self.b = (Agent(name, listen=()) for name in "ab")
        random = np.random.default_rng(11)
        self.arrays = [array_of(number) for number in range(2)]
        self.hosts = [random.integers(0, 256, NBYTES, dtype=np.uint8) for _ in range(2)]
        self.arrays[1].upload(random.integers(0, 256, NBYTES, dtype=np.uint8))
        self.regions = [agent.register(array) for agent, array in zip((self.a, self.b), self.arrays, strict=True)]
        self.host_regions = [agent.register(host) for agent, host in zip((self.a, self.b), self.hosts, strict=True)]
        self.a.add(self.b.metadata())

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def pair() -> Iterator[OnDevices]:
    made = OnDevices()
    yield made
    made.close()


def blocks_of(here: int, there: int) -> Any:
    """Returns short blocks of all alignments, whose order differs between the two memories, and a long block."""
    random = np.random.default_rng(3)
    starts = np.arange(0, (3 << 20) - 4099, 4099, dtype=np.uint64)
    rows = np.stack((starts, random.permutation(starts), random.integers(0, 4099, len(starts))), 1).astype(np.uint64)
    rows = np.concatenate((rows, [[NBYTES // 2, NBYTES // 2, NBYTES // 2]])).astype(np.uint64)
    return rows + np.array([here, there, 0], np.uint64)


def expected(before: Any, source: Any, rows: Any, to: int, base: tuple[int, int]) -> Any:
    """Returns the contents that the target memory must have after `rows` (a's address, b's address, bytes) are copied.
    The target is agent a's memory if `to` is 0, else agent b's.
    """
    after = before.copy()
    for row in (rows - np.array([*base, 0], np.uint64)).astype(int):
        after[row[to] : row[to] + row[2]] = source[row[1 - to] : row[1 - to] + row[2]]
    return after


@pytest.mark.hip
def test_granted_memory_of_a_device(pair: OnDevices) -> None:
    there, here = pair.regions[1], pair.regions[0]
    grant = pair.b.grant([(there.address, 1 << 20), (there.address + (1 << 20), 4096)])
    rows = [(here.address, there.address, 1 << 20), (here.address + (1 << 20), there.address + (1 << 20), 4096)]
    read = pair.a.prepare("read", "b", rows, grant=grant.encoded).start()
    read.wait()
    count = (1 << 20) + 4096
    assert (pair.arrays[0].numpy()[:count] == pair.arrays[1].numpy()[:count]).all()
    grant.revoke([there.address])
    with pytest.raises(StaleReadError) as raised:
        read.start().wait()
    assert list(raised.value.stale) == [0]


@pytest.mark.hip
def test_a_trace_has_the_direction_and_the_blocks_of_what_a_device_copies(pair: OnDevices) -> None:
    (agent,) = [each for each in find_agents() if each.name == "a" and each.pid == os.getpid()]
    write = pair.a.prepare("write", "b", blocks_of(pair.regions[0].address, pair.regions[1].address))
    tracer = AgentTracer(agent, 60)
    write.start().wait()
    (traced,) = tracer.stop().transfers
    assert (traced.writes, traced.nbytes, traced.blocks) == (True, write.nbytes, write.blocks)


@pytest.mark.hip
@pytest.mark.parametrize("here", ["device", "host"])
@pytest.mark.parametrize("there", ["device", "host"])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_blocks_arrive_where_they_belong(pair: OnDevices, operation: str, here: str, there: str) -> None:
    ours = pair.regions[0] if here == "device" else pair.host_regions[0]
    theirs = pair.regions[1] if there == "device" else pair.host_regions[1]
    arrays = [
        pair.arrays[side].numpy() if kind == "device" else pair.hosts[side].copy()
        for side, kind in enumerate((here, there))
    ]
    rows = blocks_of(ours.address, theirs.address)
    to = 0 if operation == "read" else 1
    wanted = expected(arrays[to], arrays[1 - to], rows, to, (ours.address, theirs.address))
    transfer = pair.a.prepare(operation, "b", rows)
    transfer.start(b"arrived").wait()
    pair.b.wait_for_message()
    side = (here, there)[to]
    np.testing.assert_array_equal(pair.arrays[to].numpy() if side == "device" else pair.hosts[to], wanted)
    assert ("copy engine and kernel" in transfer.path.name) == ("device" in (here, there))


def test_a_registration_that_fails_leaves_nothing(pair: OnDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ResourceError("the test refuses")

    with Agent("c", listen=()) as agent:
        with monkeypatch.context() as patch:
            patch.setattr(copier.Copier, "take_pinned", refuse)
            with pytest.raises(ResourceError, match="the test refuses"):
                agent.register(pair.arrays[0])
        assert not agent.regions
        region = agent.register(pair.arrays[0])
        assert agent.regions == [region]


def test_a_path_is_named(pair: OnDevices) -> None:
    one = pair.a.prepare("read", "b", [(pair.regions[0].address, pair.regions[1].address, 8)])
    assert one.path.name == "copy engine"
    many = pair.a.prepare("write", "b", strided(pair.regions[0].address, pair.regions[1].address, 64, 100, 128))
    assert many.path.name == "kernel"
    assert many.blocks == 100
    assert pair.a.connect("b").name == "process_vm"


def test_blocks_of_separate_registrations_are_not_joined(pair: OnDevices) -> None:
    """Two registrations may be two allocations, and a driver's copy must not extend over both."""
    to, source, half = pair.arrays[0], pair.arrays[1], NBYTES // 2
    with Agent("c", listen=()) as agent:
        for whole in pair.regions:
            for start in (whole.address, whole.address + half):
                agent.register_regions([structs.replace(whole, address=start, nbytes=half)])
        transfer = agent.read("c", [(to.ptr, source.ptr, half), (to.ptr + half, source.ptr + half, half)])
        assert transfer.blocks == 2
        transfer.wait()
    np.testing.assert_array_equal(to.numpy(), source.numpy())


def test_a_transfer_may_start_again_and_ends_by_itself(pair: OnDevices) -> None:
    """If no caller queries the transfer's state, the agent's thread notices the end and sends the message."""
    transfer = pair.a.prepare("write", "b", [(pair.regions[0].address, pair.regions[1].address, NBYTES)])
    for value in (1, 2, 3):
        pair.arrays[0].fill(value)
        transfer.start(b"%d" % value)
        pair.b.wait_for_message(60)
        assert pair.b.messages() == [("a", b"%d" % value)]
        assert (pair.arrays[1].numpy() == value).all()
        transfer.wait()
    assert 0 < transfer.times.posted <= transfer.times.ended


def test_memory_that_cannot_be_pinned_is_left_to_the_driver(pair: OnDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(ptr: int, nbytes: int) -> None:
        raise ResourceError("the test refuses")

    monkeypatch.setattr(type(pair.arrays[0].runtime), "pin", staticmethod(refuse))
    many = strided(pair.host_regions[0].address, pair.regions[0].address, 64, 100, 128)
    with pytest.warns(RuntimeWarning, match="driver's buffers: the test refuses"):
        transfer = pair.a.prepare("write", "a", many)
    assert transfer.path.name == "copy engine (staged by the driver)"  # a GPU kernel can't access unpinned memory
    transfer.start().wait()
    wanted = np.zeros(12800, np.uint8).reshape(100, 128)
    wanted[:, :64] = pair.hosts[0][:12800].reshape(100, 128)[:, :64]
    np.testing.assert_array_equal(pair.arrays[0].numpy()[:12800].reshape(100, 128), wanted)


@pytest.mark.hip
@pytest.mark.parametrize("number", [None, pytest.param(0, marks=pytest.mark.gpu_only)])
def test_on_a_stream(pair: OnDevices, number: int | None) -> None:
    """Stream 0 is CUDA's default stream, which all threads of a process share and torch uses."""
    runtime = pair.arrays[0].runtime
    stream: Any = runtime.create_stream() if number is None else number
    transfer = pair.a.prepare("write", "b", [(pair.regions[0].address, pair.regions[1].address, NBYTES)])
    for value in range(1, 6):
        runtime.fill(pair.arrays[0].ptr, value, NBYTES, stream)
        transfer.start(b"", stream=stream)
        runtime.fill(pair.arrays[0].ptr, 0, NBYTES, stream)
        transfer.wait()
        assert (pair.arrays[1].numpy() == value).all()
    runtime.synchronize_stream(stream)


@pytest.mark.parametrize("path", PATHS)
def test_the_hosts_memory_on_a_stream(pair: OnDevices, path: str) -> None:
    """The agent's CPU copies between host memories: the stream signals the agent and waits for the copy."""
    far = Agent("far", listen=["127.0.0.1"])
    theirs = np.zeros(NBYTES, np.uint8)
    region = far.register(theirs)
    force_path(pair.a, path)
    pair.a.add(far.metadata())
    runtime = pair.arrays[0].runtime
    stream, here = runtime.create_stream(), pair.host_regions[0].address
    transfer = pair.a.prepare("write", "far", [(here, region.address, NBYTES)])
    assert transfer.path.name == path
    for value in range(1, 5):
        runtime.fill(pair.arrays[0].ptr, value, NBYTES, stream)
        runtime.copy(here, pair.arrays[0].ptr, NBYTES, stream)
        transfer.start(b"%d" % value, stream=stream)
        runtime.copy(here, pair.arrays[1].ptr, NBYTES, stream)
        if value == 1:
            transfer.wait()  # later transfers have no waiting caller, so the agent's thread begins them
        stream.synchronize()
        assert (theirs == value).all()
        assert transfer.done()
    transfer.start(stream=stream).cancel()
    stream.synchronize()
    far.close()


def test_a_stream_is_released_whatever_becomes_of_its_transfer(pair: OnDevices) -> None:
    runtime = pair.arrays[0].runtime
    first, second = runtime.create_stream(), runtime.create_stream()
    gate = runtime.allocate_pinned(8)
    transfer = pair.a.prepare("write", "b", [(pair.host_regions[0].address, pair.host_regions[1].address, NBYTES)])
    before = pair.hosts[1].copy()
    wait_value(runtime, gate.ptr, 1, first)
    transfer.start(stream=first)  # the stream is blocked before the transfer
    with pytest.raises(TransferTimeoutError):
        transfer.wait(0.05)
    with pytest.raises(ActiveError):
        transfer.start(stream=second)
    transfer.cancel()
    write_value(runtime, gate.ptr, 1, second)
    first.synchronize()
    np.testing.assert_array_equal(pair.hosts[1], before)
    wait_value(runtime, gate.ptr, 2, first)
    transfer.start(stream=first)
    pair.a.close()
    write_value(runtime, gate.ptr, 2, second)
    first.synchronize()
    second.synchronize()
    np.testing.assert_array_equal(pair.hosts[1], before)


def test_a_stream_that_comes_to_a_canceled_transfer_begins_no_other(pair: OnDevices) -> None:
    runtime = pair.arrays[0].runtime
    first, second, third = (runtime.create_stream() for _ in range(3))
    gate = runtime.allocate_pinned(8)
    blocks = [(pair.host_regions[0].address, pair.host_regions[1].address, NBYTES)]
    before = pair.hosts[1].copy()
    wait_value(runtime, gate.ptr, 1, first)
    pair.a.prepare("write", "b", blocks).start(stream=first).cancel()  # and dropped
    wait_value(runtime, gate.ptr, 2, second)
    transfer = pair.a.prepare("write", "b", blocks).start(stream=second)
    write_value(runtime, gate.ptr, 1, third)
    first.synchronize()
    with pytest.raises(TransferTimeoutError):
        transfer.wait(0.05)
    np.testing.assert_array_equal(pair.hosts[1], before)
    write_value(runtime, gate.ptr, 2, third)
    transfer.wait()
    second.synchronize()
    np.testing.assert_array_equal(pair.hosts[1], pair.hosts[0])


def test_an_exception_while_a_stream_is_told_cancels_the_transfer(
    pair: OnDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    stream = pair.arrays[0].runtime.create_stream()
    transfer = pair.a.prepare("write", "b", [(pair.host_regions[0].address, pair.host_regions[1].address, 8)])
    with monkeypatch.context() as patch:
        patch.setattr(StreamOperations, "__call__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            transfer.start(stream=stream)
    assert transfer.state is State.CANCELED
    transfer.start(stream=stream).wait()
    stream.synchronize()


def test_a_canceled_transfer_touches_nothing_more(pair: OnDevices) -> None:
    transfer = pair.a.prepare("read", "b", blocks_of(pair.regions[0].address, pair.regions[1].address))
    for _ in range(20):
        transfer.start(b"canceled")
        transfer.cancel()
        assert transfer.state in (State.CANCELED, State.DONE)
        pair.arrays[0].fill(0)
        assert not pair.arrays[0].numpy().any()


def test_memory_within_an_agent(pair: OnDevices) -> None:
    region, host = pair.regions[1], pair.host_regions[1]
    pair.b.read("b", [(host.address, region.address, NBYTES)]).wait()
    np.testing.assert_array_equal(pair.hosts[1], pair.arrays[1].numpy())


def test_memory_at_an_address_where_other_memory_was(pair: OnDevices) -> None:
    """A peer's new memory often has the address of its freed memory, whose mapping the agent must not use."""
    here, at = pair.host_regions[0].address, 1 << 40
    number = 0
    for value, nbytes in ((1, NBYTES), (2, NBYTES), (3, NBYTES // 2)):
        array = array_of(1)
        array.fill(value)
        region = pair.b.register((array.ptr, nbytes), device=array.runtime.device, kind=VRAM)
        (exported,) = METADATA.decode(pair.b.metadata([region]), "an agent").shares
        share = structs.replace(exported, region=structs.replace(exported.region, address=at))
        metadata, number = metadata_of(pair.b, share.region, share, former=number)
        pair.a.add(metadata)
        pair.a.read("b", [(here, at, nbytes)]).wait()
        assert (pair.hosts[0][:nbytes] == value).all()
    with pytest.raises(NotRegisteredError):
        pair.a.read("b", [(here, at + NBYTES // 2, 8)]).wait()


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("kinds", [("device", "device"), ("host", "device"), ("device", "host")])
def test_a_registration_that_ended(pair: OnDevices, kinds: tuple[str, str], side: int) -> None:
    regions = [pair.regions[each] if kinds[each] == "device" else pair.host_regions[each] for each in (0, 1)]
    transfer = pair.a.prepare("read", "b", [(regions[0].address, regions[1].address, NBYTES)])
    transfer.start().wait()
    owner = (pair.a, pair.b)[side]
    owner.deregister(regions[side])
    owner.register(pair.arrays[side] if kinds[side] == "device" else pair.hosts[side])
    with pytest.raises(NotRegisteredError, match=f"has deregistered its memory at {regions[side].address:#x}"):
        transfer.start().wait()


def test_wrong_memory(pair: OnDevices) -> None:
    device, host, theirs = pair.regions[0].address, pair.host_regions[0].address, pair.regions[1].address
    with pytest.raises(NotRegisteredError, match=r"block 1: .* remote address .* by agent b"):
        pair.a.prepare("read", "b", [(device, theirs, 8), (device, theirs + NBYTES - 4, 8)])
    with pytest.raises(ArgumentError, match=r"block 1 at local address .* another kind of memory"):
        pair.a.prepare("read", "b", [(device, theirs, 8), (host, theirs, 8)])
    with pytest.raises(ArgumentError, match=r"can't be shared|private|is not memory of"):
        pair.a.register((pair.hosts[0].ctypes.data, 100), kind="vram")
    with pytest.raises(ArgumentError, match="kind"):
        pair.a.register((device, 100), kind="file")
    with pytest.raises(ArgumentError, match="stream"):
        pair.a.prepare("read", "b", [(host, pair.host_regions[1].address, 8)]).start(stream="a stream")
    before = pair.a.regions
    with pytest.raises(ArgumentError):
        pair.a.register((pair.hosts[0].ctypes.data, 100), kind="vram")
    assert pair.a.regions == before


def test_an_array_without_elements_has_no_address(pair: OnDevices) -> None:
    empty = [agent.register((0, 0), kind="vram") for agent in (pair.a, pair.b)]
    pair.a.add(pair.b.metadata())
    here, there = (region.address for region in pair.regions)
    pair.a.read("b", [(0, 0, 0)]).wait()
    pair.a.read("b", [(0, 0, 0), (here, there, NBYTES)]).wait()
    np.testing.assert_array_equal(pair.arrays[0].numpy(), pair.arrays[1].numpy())
    pair.a.deregister(empty[0])
    assert pair.a.regions == [pair.regions[0], pair.host_regions[0]]


def test_a_peer_that_was_removed(pair: OnDevices) -> None:
    transfer = pair.a.prepare("read", "b", [(pair.regions[0].address, pair.regions[1].address, NBYTES)])
    transfer.start()
    pair.a.remove("b")
    pair.a.add(pair.b.metadata())
    pair.a.read("b", [(pair.regions[0].address, pair.regions[1].address, NBYTES)]).wait()
    np.testing.assert_array_equal(pair.arrays[0].numpy(), pair.arrays[1].numpy())


@pytest.mark.hip
@pytest.mark.parametrize("allocator", ["allocated", pytest.param("torch", marks=pytest.mark.gpu_only)])
def test_between_processes(pair: OnDevices, allocator: str) -> None:
    """Transfers memory within a larger allocation, and torch's expandable segments. Then kills the other process."""
    if allocator == "torch":
        pytest.importorskip("torch")
    command = [sys.executable, str(PROGRAMS / "device_agent.py"), str(NBYTES), allocator]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", ""))),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            peer = pair.a.add(bytes.fromhex(process.stdout.readline().decode()))
            theirs = pair.a.regions_of(peer)[0]
            here = pair.regions[0].address
            values = np.arange(NBYTES, dtype=np.uint64).astype(np.uint8)
            pair.arrays[0].upload(values)
            writing = pair.a.write(peer, [(here, theirs.address, NBYTES)], message=b"written")
            writing.wait()
            way = "VMM" if allocator == "torch" else "shared memory" if RUNTIME == "host" else "IPC"
            assert writing.path.name == f"copy engine ({way})"
            assert process.stdout.readline() == b"written\n"  # the other process found and doubled the values
            pair.arrays[0].fill(1)
            before = pair.a.regions_of(peer)[1]  # this region, in the same allocation, holds zeros
            pair.a.read(peer, [(here, before.address, before.nbytes)]).wait()
            assert not pair.arrays[0].numpy()[: before.nbytes].any()
            pair.arrays[0].fill(0)
            many = strided(here, theirs.address, 4096, NBYTES // 8192, 8192)
            reading = pair.a.read(peer, many)
            reading.wait()
            wanted = np.zeros(NBYTES, np.uint8)
            for start in range(0, NBYTES, 8192):
                wanted[start : start + 4096] = values[start : start + 4096] * 2
            np.testing.assert_array_equal(pair.arrays[0].numpy(), wanted)
            pair.a.write(peer, [(pair.host_regions[0].address, theirs.address, NBYTES)]).wait()
            pair.a.read(peer, [(here, theirs.address, NBYTES)]).wait()
            np.testing.assert_array_equal(pair.arrays[0].numpy(), pair.hosts[0])
            page = pair.a.regions_of(peer)[2].address
            staged = pair.a.write(peer, strided(here, page, 1000, 3000, 2000, 1000))
            staged.wait()
            assert "staged" in staged.path.name
            pair.a.read(peer, [(here, page, 3_000_000)]).wait()
            wanted = np.concatenate([pair.hosts[0][start : start + 1000] for start in range(0, 6_000_000, 2000)])
            np.testing.assert_array_equal(pair.arrays[0].numpy()[:3_000_000], wanted)
            stream = pair.arrays[0].runtime.create_stream()
            pair.arrays[0].runtime.fill(here, 5, NBYTES, stream)
            staged.start(stream=stream)
            pair.arrays[0].runtime.fill(here, 0, NBYTES, stream)
            staged.wait()
            stream.synchronize()
            pair.a.read(peer, [(here, page, 3_000_000)]).wait()
            assert (pair.arrays[0].numpy()[:3_000_000] == 5).all()
        finally:
            process.kill()
    with pytest.raises(DisconnectedError):  # noqa: PT012  the loop ends when the agent notices the lost link
        while True:
            reading.start().wait()


@pytest.mark.parametrize("kinds", [("VRAM", "VRAM"), ("DRAM", "VRAM"), ("VRAM", "DRAM")])
def test_nixls_descriptors(kinds: tuple[str, str]) -> None:
    """NIXL's clients name memory by kind and address; this test uses only NIXL's interface."""
    agents = [nixl_agent(f"nixl{number}") for number in range(2)]
    arrays = [array_of(number, 1 << 16) for number in range(2)]
    hosts = [np.full(1 << 16, 7 + number, np.uint8) for number in range(2)]
    arrays[0].fill(1)
    arrays[1].fill(2)
    places = []
    for agent, array, host in zip(agents, arrays, hosts, strict=True):
        device = array.runtime.device
        agent.register_memory([(array.ptr, 1 << 16, device, "")], "VRAM")
        agent.register_memory([(host.ctypes.data, 1 << 16, 0, "")], "DRAM")
        places.append({"VRAM": (array.ptr, device), "DRAM": (host.ctypes.data, 0)})
    peer = agents[0].add_remote_agent(agents[1].get_agent_metadata())
    lists = []
    for kind, place in zip(kinds, places, strict=True):
        address, device = place[kind]
        rows = [(address + 256 * number, 128, device) for number in range(100)]
        lists.append(agents[0].get_xfer_descs(rows, kind))
    handle = agents[0].initialize_xfer("READ", lists[0], lists[1], peer, b"read")
    state = agents[0].transfer(handle)
    while state == "PROC":
        state = agents[0].check_xfer_state(handle)
    assert state == "DONE"
    got = arrays[0].numpy() if kinds[0] == "VRAM" else hosts[0]
    before, value = (1 if kinds[0] == "VRAM" else 7), (2 if kinds[1] == "VRAM" else 8)
    wanted = np.full((256, 256), before)
    wanted[:100, :128] = value
    np.testing.assert_array_equal(got.reshape(256, 256), wanted)
    agents[0].release_xfer_handle(handle)
