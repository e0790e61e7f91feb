"""RDMA brought up over real devices: discovery, connecting endpoints, registered memory, options."""

from __future__ import annotations

import ctypes
import ipaddress
import json
import mmap
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from pyverbs.wr import SGE, SendWR

from proxyccl import (
    ArgumentError,
    RdmaDevice,
    RdmaOptions,
    ResourceError,
    RuntimeUnavailableError,
    TransportError,
    rdma_devices,
)
from proxyccl.proxy._engine import lib
from proxyccl.proxy.registrations import Registration
from proxyccl.proxy.verbs import pyverbs_api
from proxyccl.proxy.verbs.address import EndpointAddress
from proxyccl.proxy.verbs.devices import DeviceChoice, choose_devices
from proxyccl.proxy.verbs.endpoint import Endpoint, VerbsDevice
from proxyccl.proxy.verbs.registrations import Registrations
from proxyccl.proxy.verbs.requirements import missing
from proxyccl.tools import info
from support.soft_roce.wire import ADDRESSES, DEVICES, INTERFACES, packets_sent, run

TIMEOUT = 60.0
"""Bound of every wait, in seconds."""
PAGE = mmap.PAGESIZE
NOBODY = 65534


class Memory:
    """Anonymous memory with an address."""

    def __init__(self, nbytes: int) -> None:
        self.map = mmap.mmap(-1, nbytes)
        self.ptr = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.nbytes = nbytes


@pytest.fixture(scope="module")
def devices() -> list[RdmaDevice]:
    return rdma_devices()


class Ends:
    """The devices at both ends of the wire, opened with the same options, and a connected endpoint on each."""

    def __init__(self, devices: list[RdmaDevice], **options: Any) -> None:
        self.devices = []
        for name in DEVICES:
            wanted = RdmaOptions(device=name, **options)
            self.devices.append(VerbsDevice(choose_devices(devices, wanted)[0], wanted))
        self.endpoints = [device.endpoint() for device in self.devices]
        self.registrations = [Registrations(device) for device in self.devices]
        near, far = self.endpoints
        near.connect(far.address)
        far.connect(near.address)
        self.api = self.devices[0].api

    def post(self, operation: str, source: Registration, address: int, rkey: int, amount: int = 0) -> int:
        """Makes the first endpoint write, or fetch-and-add, to memory of the second endpoint. Returns the completion's
        status.
        """
        request = SendWR(
            opcode=self.api.enumerator(operation),
            num_sge=1,
            sg=[SGE(source.address, source.nbytes, source.local_key)],
            send_flags=self.api.enumerator("IBV_SEND_SIGNALED"),
        )
        if operation == "IBV_WR_RDMA_WRITE":
            request.set_wr_rdma(rkey, address)
        else:
            request.set_wr_atomic(rkey, address, amount)
        endpoint = self.endpoints[0]
        endpoint._qp.post_send(request)
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            count, completions = endpoint._cq.poll(1)
            if count:
                return int(completions[0].status)
        raise TimeoutError("no completion")

    def write(self, source: Registration, destination: Registration) -> int:
        return self.post("IBV_WR_RDMA_WRITE", source, destination.address, destination.key)

    def attributes(self, endpoint: Endpoint, *mask: str) -> Any:
        return endpoint._qp.query(sum(self.api.enumerator(f"IBV_QP_{name}") for name in mask))[0]

    def close(self) -> None:
        for device in self.devices:
            device.close()


@pytest.fixture
def ends(devices: list[RdmaDevice]) -> Iterator[Ends]:
    made = Ends(devices)
    yield made
    made.close()


def resources(device: str) -> dict[str, int]:
    """Returns the number of objects of each kind that a device has."""
    (counts,) = json.loads(run("rdma", "--json", "resource", "show", device))
    return {kind: counts[kind] for kind in ("pd", "cq", "qp", "mr")}


def test_discovery_tells_what_is_there(devices: list[RdmaDevice]) -> None:
    assert not missing()
    assert [device.name for device in devices] == list(DEVICES)
    for device, interface, address in zip(devices, INTERFACES, ADDRESSES, strict=True):
        (port,) = device.ports
        assert (port.number, port.state, port.link_layer, port.netdev) == (1, "active", "ethernet", interface)
        assert (port.active_mtu, port.lid) == (4096, 0)
        assert port.best_gid is not None
        assert (port.best_gid.address, port.best_gid.type) == (f"::ffff:{address}", "RoCE v2")
        assert port.rate > 0
        assert (device.atomics, device.problem, device.numa_node) == (True, "", None)
        for limit in (
            port.max_message,
            device.max_queue_pairs,
            device.max_work_requests,
            device.max_completions,
            device.max_registrations,
            device.max_registered_bytes,
        ):
            assert limit is not None
            assert limit >= 1000
        assert len(device.guid) == 19
    assert [choose_devices(devices, RdmaOptions(), local_rank=i)[0].device.name for i in range(2)] == list(DEVICES)


def test_info_shows_what_is_there_and_nothing_missing(devices: list[RdmaDevice]) -> None:
    findings = info.findings()["RDMA"]
    assert [finding.name for finding in findings] == [*DEVICES, "pyverbs", "engine", "memory"]
    assert findings[-1].detail == f"{DEVICES[0]} reaches memory of host:0: transport verbs"
    assert all(finding.available and not finding.advice for finding in findings)
    assert findings[0].detail == str(devices[0].ports[0])
    assert f"MTU 4096, {INTERFACES[0]}, GID 1 ::ffff:{ADDRESSES[0]} (RoCE v2)" in findings[0].detail


def test_info_shows_whose_memory_goes_through_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registrations, "unsupported_reason", lambda registrations, runtime, gpu_writes: "no way")
    *_, finding = info.findings()["RDMA"]
    assert (finding.name, finding.available) == ("memory", False)
    assert finding.detail == f"{DEVICES[0]} cannot reach memory of host:0: no way"
    assert "the transport staged" in finding.advice
    monkeypatch.setenv("PROXYCCL_RDMA", "device=mlx5_99")
    *_, finding = info.findings()["RDMA"]
    assert (finding.name, finding.available) == ("memory", False)
    assert "mlx5_99" in finding.detail


def test_a_megabyte_crosses_between_two_endpoints(ends: Ends) -> None:
    source, destination = Memory(1 << 20), Memory(1 << 20)
    source.map[:] = os.urandom(1 << 20)
    registered = [
        registrations.register(memory.ptr, memory.nbytes)
        for registrations, memory in zip(ends.registrations, (source, destination), strict=True)
    ]
    before = packets_sent(INTERFACES[0])
    assert ends.write(*registered) == ends.api.enumerator("IBV_WC_SUCCESS")
    assert destination.map[:] == source.map[:]
    assert packets_sent(INTERFACES[0]) - before >= (1 << 20) // ends.endpoints[0].mtu
    assert ends.endpoints[0].signal == "write"
    far = EndpointAddress.decode(ends.endpoints[1].address)
    assert f"queue pair {far.qp_number} at {ADDRESSES[1]}" in str(ends.endpoints[0].peer)


def test_an_atomic_advances_a_counter(devices: list[RdmaDevice]) -> None:
    ends = Ends(devices, signal="fetch_add")
    assert ends.endpoints[0].signal == "fetch_add"
    counter = Memory(PAGE)
    counter.map[:8] = (1000).to_bytes(8, "little")
    far = ends.registrations[1].register(counter.ptr, 8)
    options = ends.endpoints[0].engine_options(far.key)
    assert options.signal == lib.PROXYCCL_VERBS_FETCH_ADD
    scratch = Registration(options.scratch, 8, options.scratch, 0, options.scratch_lkey)
    for _ in range(3):
        assert ends.post("IBV_WR_ATOMIC_FETCH_AND_ADD", scratch, far.address, far.key, amount=1) == 0
    assert int.from_bytes(counter.map[:8], "little") == 1003
    assert ctypes.c_uint64.from_address(options.scratch).value == 1002
    ends.close()


def test_the_engine_gets_the_queue_pair(ends: Ends) -> None:
    near, far = (endpoint.engine_options(signal_rkey=5) for endpoint in ends.endpoints)
    assert near.qp not in {0, far.qp}
    assert (near.send_depth, near.cq_depth, near.signal_rkey) == (256, 256, 5)
    assert near.max_message >= 1 << 20
    assert near.signal == lib.PROXYCCL_VERBS_WRITE
    assert ends.endpoints[0]._cq.cqe >= near.cq_depth


def test_a_wrong_key_is_a_remote_access_error(ends: Ends) -> None:
    source, destination = Memory(PAGE), Memory(PAGE)
    near = ends.registrations[0].register(source.ptr, PAGE)
    far = ends.registrations[1].register(destination.ptr, PAGE)
    source.map[:] = b"x" * PAGE
    assert ends.write(near, replace(far, key=far.key ^ 0xFFFF00)) == ends.api.enumerator("IBV_WC_REM_ACCESS_ERR")
    assert destination.map[:] == bytes(PAGE)


def test_what_a_peer_may_not_reach_stays_as_it_was(ends: Ends) -> None:
    source, destination = Memory(2 * PAGE), Memory(2 * PAGE)
    near = ends.registrations[0].register(source.ptr, 2 * PAGE)
    far = ends.registrations[1].register(destination.ptr, PAGE)
    source.map[:] = b"x" * 2 * PAGE
    assert ends.write(near, far) == ends.api.enumerator("IBV_WC_REM_ACCESS_ERR")
    assert destination.map[PAGE:] == bytes(PAGE)


@pytest.mark.parametrize("index", [99, 1 << 15])
def test_a_gid_index_that_is_not_there_is_named(devices: list[RdmaDevice], index: int) -> None:
    with pytest.raises(ArgumentError, match=rf"gid_index: no active port has a GID {index}; there is .*{ADDRESSES[0]}"):
        choose_devices(devices, RdmaOptions(gid_index=index))[0]
    with pytest.raises(ArgumentError, match=rf"gid_index: {DEVICES[0]} port 1 has no GID {index}; there is GID 0 .*"):
        VerbsDevice(DeviceChoice(devices[0], 1, index), RdmaOptions())


def test_a_device_that_went_is_told(devices: list[RdmaDevice]) -> None:
    with pytest.raises(RuntimeUnavailableError, match=r"ibv_open_device of mlx5_9: .*ibverbs-providers"):
        VerbsDevice(DeviceChoice(replace(devices[0], name="mlx5_9"), 1, 0), RdmaOptions())


def in_another_process(body: Callable[[], Any]) -> Any:
    processes = multiprocessing.get_context("fork")
    here, there = processes.Pipe(duplex=False)
    process = processes.Process(target=lambda: there.send(body()), daemon=True)
    process.start()
    assert here.poll(TIMEOUT), "the other process hangs or failed"
    result = here.recv()
    process.join(TIMEOUT)
    assert process.exitcode == 0
    return result


@pytest.fixture
def device_file() -> Iterator[Path]:
    """Yields the path of the first device's file. After the test, restores the file's name and mode."""
    (entry,) = (path for path in Path("/sys/class/infiniband_verbs").glob("uverbs*") if device_of(path) == DEVICES[0])
    file, aside = Path("/dev/infiniband", entry.name), Path("/dev/aside")
    mode = file.stat().st_mode
    yield file
    if aside.exists():
        aside.rename(file)
    file.chmod(mode)


def device_of(entry: Path) -> str:
    return (entry / "ibdev").read_text().strip()


def test_a_device_that_may_not_be_opened_has_the_reason(devices: list[RdmaDevice], device_file: Path) -> None:
    def look() -> list[RdmaDevice]:
        os.setuid(NOBODY)
        return rdma_devices()

    device_file.chmod(0o600)
    first, second = in_another_process(look)
    assert "this process needs to read and write /dev/infiniband/uverbs*" in first.problem
    assert (first.name, first.atomics, first.ports[0].gids) == (DEVICES[0], None, devices[0].ports[0].gids)
    assert second == devices[1]
    assert choose_devices([first, second], RdmaOptions())[0].device == second


def test_a_device_without_its_file_is_listed_with_the_reason(devices: list[RdmaDevice], device_file: Path) -> None:
    device_file.rename("/dev/aside")
    first, second = rdma_devices()
    assert "either its file in /dev/infiniband is missing, or libibverbs' driver" in first.problem
    assert second == devices[1]


def test_the_limit_of_locked_memory_is_named(devices: list[RdmaDevice]) -> None:
    def register() -> str:
        memory = Memory(1 << 20)
        with VerbsDevice(choose_devices(devices, RdmaOptions())[0], RdmaOptions()) as device:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
            os.setuid(NOBODY)  # RLIMIT_MEMLOCK does not limit root
            with pytest.raises(ResourceError) as caught:
                Registrations(device).register(memory.ptr, memory.nbytes)
            return str(caught.value)

    assert in_another_process(register).endswith("this process may lock 64 KiB of memory in all (ulimit -l)")


@pytest.mark.parametrize("number", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_many_registrations(ends: Ends, number: int) -> None:
    source, destination = Memory(number * 512), Memory(number * 512)
    source.map[:] = os.urandom(number * 512)
    near = ends.registrations[0].register(source.ptr, source.nbytes)
    before = resources(DEVICES[1])["mr"]
    pieces = [
        ends.registrations[1].register(destination.ptr + 512 * i, 512, allocation="destination") for i in range(number)
    ]
    assert resources(DEVICES[1])["mr"] == before + number
    assert len({piece.key for piece in pieces}) == number
    for i in (0, 67, number - 1):
        piece = replace(near, ptr=source.ptr + 512 * i, address=source.ptr + 512 * i, nbytes=512)
        assert ends.write(piece, pieces[i]) == 0
        assert destination.map[512 * i : 512 * i + 512] == source.map[512 * i : 512 * i + 512]
    for piece in pieces:
        ends.registrations[1].release(piece)
    assert resources(DEVICES[1])["mr"] == before + 64


def test_memory_that_is_none_can_not_be_registered(ends: Ends) -> None:
    with pytest.raises(RuntimeUnavailableError, match=r"ibv_reg_mr of 100 bytes of host memory on .*: Bad address"):
        ends.registrations[0].register(PAGE, 100)


def test_a_device_that_takes_no_dma_buf_takes_the_address(ends: Ends) -> None:
    memory = Memory(PAGE)
    descriptors: list[int] = []

    def dmabuf() -> tuple[int, int]:
        descriptors.append(os.memfd_create("no DMA-BUF"))
        return descriptors[-1], 0

    registration = ends.registrations[0].register(memory.ptr, PAGE, dmabuf)
    assert (registration.how, registration.address) == ("peer memory", memory.ptr)
    with pytest.raises(RuntimeUnavailableError, match=r"Bad address .*ibv_reg_dmabuf_mr of 100 bytes of a DMA-BUF on"):
        ends.registrations[0].register(PAGE, 100, dmabuf)
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.mark.parametrize("mtu", [256, *(pytest.param(mtu, marks=pytest.mark.full) for mtu in (1024, 4096))])
def test_the_mtu_is_what_was_asked_for(devices: list[RdmaDevice], mtu: int) -> None:
    ends = Ends(devices, mtu=mtu)
    source, destination = Memory(1 << 16), Memory(1 << 16)
    near = ends.registrations[0].register(source.ptr, 1 << 16)
    far = ends.registrations[1].register(destination.ptr, 1 << 16)
    before = packets_sent(INTERFACES[0])
    assert ends.write(near, far) == 0
    packets = (1 << 16) // mtu
    # Other packets cross the wire too, but fewer than the packets of the write.
    assert packets <= packets_sent(INTERFACES[0]) - before < 2 * packets
    assert 128 << ends.attributes(ends.endpoints[0], "PATH_MTU").path_mtu == mtu
    ends.close()


def test_the_smaller_mtu_of_two_ends_is_used(devices: list[RdmaDevice]) -> None:
    options = RdmaOptions(device=DEVICES[0]), RdmaOptions(device=DEVICES[1], mtu=512)
    opened = [VerbsDevice(choose_devices(devices, wanted)[0], wanted) for wanted in options]
    near, far = (device.endpoint() for device in opened)
    near.connect(far.address)
    far.connect(near.address)
    assert (near.mtu, far.mtu) == (512, 512)
    for device in opened:
        device.close()


def test_retries_and_the_rest_reach_the_device(devices: list[RdmaDevice]) -> None:
    ends = Ends(devices, timeout=18, retry_count=3, rnr_retry_count=2, traffic_class=104, send_depth=32)
    told = ends.attributes(ends.endpoints[0], "TIMEOUT", "RETRY_CNT", "RNR_RETRY", "AV", "CAP")
    assert (told.timeout, told.retry_cnt, told.rnr_retry) == (18, 3, 2)
    assert told.ah_attr.traffic_class == 104
    assert told.cap.max_send_wr >= ends.endpoints[0].send_depth == 32
    ends.close()


def test_a_device_has_no_more_mtu_than_its_port(devices: list[RdmaDevice]) -> None:
    run("ip", "link", "set", INTERFACES[0], "mtu", "1500")
    try:
        options = RdmaOptions(device=DEVICES[0], mtu=4096)
        with pytest.raises(ArgumentError, match=f"mtu: 4096 exceeds the active MTU of {DEVICES[0]} port 1, 1024"):
            VerbsDevice(choose_devices(devices, options)[0], options)
    finally:
        run("ip", "link", "set", INTERFACES[0], "mtu", "4200")


def test_an_address_that_nobody_has_is_given_up(devices: list[RdmaDevice]) -> None:
    with VerbsDevice(choose_devices(devices, RdmaOptions())[0], RdmaOptions()) as device:
        endpoint = device.endpoint()
        gid = ipaddress.IPv6Address("::ffff:10.9.0.77").packed
        nobody = structs.replace(EndpointAddress.decode(endpoint.address), gid=gid)
        with pytest.raises(TransportError, match=r"ibv_modify_qp of .* at 10\.9\.0\.77 \(RoCE v2\): .* \(errno \d+\)"):
            endpoint.connect(nobody.encode(), timeout=0.5)


def test_closing_leaves_nothing_behind(devices: list[RdmaDevice]) -> None:
    before = [resources(name) for name in DEVICES]
    ends = Ends(devices, signal="fetch_add")
    memory = Memory(PAGE)
    ends.registrations[0].register(memory.ptr, PAGE)
    ends.registrations[0].release(ends.registrations[0].register(memory.ptr, 100, allocation=1))
    ends.endpoints[0].engine_options(0)
    first = ends.devices[0].endpoint()
    first.close()
    first.close()
    assert resources(DEVICES[0])["qp"] == before[0]["qp"] + 1
    assert resources(DEVICES[0])["mr"] == before[0]["mr"] + 3
    ends.close()
    ends.close()
    assert [resources(name) for name in DEVICES] == before


def test_pyverbs_tells_its_version() -> None:
    version = pyverbs_api.load().version
    assert version.partition(".")[0].isdigit(), version
