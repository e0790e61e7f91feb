"""The Python code for RDMA, without devices: options, addresses, the choice of a device, and missing parts.

tests/rdma/soft_roce tests this code with devices.
"""

from __future__ import annotations

import base64
import errno
import ipaddress
import itertools
import json
import logging
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from proxyccl import (
    ArgumentError,
    ClosedError,
    FabricOptions,
    RdmaDevice,
    RdmaGid,
    RdmaOptions,
    RdmaPort,
    ResourceError,
    RuntimeUnavailableError,
    TransportError,
    rdma_devices,
)
from proxyccl.device.environment import OLD_VARIABLES
from proxyccl.proxy._engine import ffi
from proxyccl.proxy.placement import NOWHERE, Place, process_numa_node
from proxyccl.proxy.remote_options import MTUS, RemoteSetup
from proxyccl.proxy.transports.table import remote_functions
from proxyccl.proxy.verbs import pyverbs_api, requirements
from proxyccl.proxy.verbs.address import GID_TYPES, LINK_LAYERS, EndpointAddress
from proxyccl.proxy.verbs.devices import DeviceChoice, choose_devices
from proxyccl.proxy.verbs.endpoint import Endpoint, VerbsDevice
from proxyccl.proxy.verbs.registrations import Registrations, VerbsContext
from proxyccl.proxy.verbs.requirements import missing
from proxyccl.tools import info
from support.devices import rank_runtime
from support.fakes import pyverbs as pyverbs_stand_in
from support.fakes.verbs import verbs_options
from support.sysfs import gid_files, put

pytestmark = pytest.mark.own_proxy(reason="a stand-in for RDMA, in its own process")

# -- options ---

WRONG_OPTIONS: dict[str, list[Any]] = {
    "devices": [
        (),
        "rxe0",
        ("rxe0",),
        ("rxe0", "rxe0"),
        ("rxe0", ""),
        ("rxe0", 1),
        [f"rxe{i}" for i in range(33)],
        {"rxe0", "rxe1"},
        {"rxe0": 1, "rxe1": 2},
        ("rxe0", "^rxe1"),
        ("=rxe0", "rxe1"),
        ("rxe 0", "rxe1"),
        ("rxe0,rxe1", "rxe2"),
        ("a", "a", "b"),
        (["a"], "b"),
        5,
    ],
    "device": ["", 3, b"rxe0", "rxe0,rxe1", "^rxe0", "rxe 0"],
    "rails": [0, 9, 2.0, "2", None],
    "port": [0, 255, -1, 1.0, "1", True],
    "gid_index": [-1, 1 << 16, "0"],
    "mtu": [0, 255, 1500, 8192, "1024", True],
    "service_level": [-1, 16, None],
    "traffic_class": [-1, 256, None],
    "timeout": [0, 32, 14.0, None],
    "retry_count": [-1, 8, None],
    "rnr_retry_count": [-1, 8, None],
    "send_depth": [0, 1, 1 << 16, None],
    "signal": ["", "read", None, 1],
    "gpu_writes": ["", "no", None, True],
    "staging_bytes": [0, 4095, (64 << 20) + 1, 1e6, None],
    "staging_chunk": [0, 63, (32 << 20) + 1, "4096", None],
}
FROM_ENVIRONMENT: dict[str, tuple[str, Any]] = {
    "device": ("3", "3"),
    "devices": ("mlx5_1,mlx5_0", ("mlx5_1", "mlx5_0")),
    "rails": ("4", 4),
    "port": ("2", 2),
    "gid_index": ("0", 0),
    "mtu": ("1024", 1024),
    "service_level": ("3", 3),
    "traffic_class": ("104", 104),
    "timeout": ("18", 18),
    "retry_count": ("0", 0),
    "rnr_retry_count": ("6", 6),
    "send_depth": ("64", 64),
    "signal": ("fetch_add", "fetch_add"),
    "gpu_writes": ("ordered", "ordered"),
    "staging_bytes": ("65536", 65536),
    "staging_chunk": ("4096", 4096),
}
OPTIONS = [field.name for field in fields(RdmaOptions)]


@pytest.fixture(autouse=True)
def _no_options_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROXYCCL_RDMA", *OLD_VARIABLES):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_out_of_range_is_refused_by_name(name: str) -> None:
    for value in WRONG_OPTIONS[name]:
        with pytest.raises(ArgumentError) as caught:
            RdmaOptions(**{name: value})
        assert caught.value.argument == name
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_come_from_the_environment_and_arguments_win(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, value = FROM_ENVIRONMENT[name]
    assert getattr(RdmaOptions(), name) != value
    monkeypatch.setenv("PROXYCCL_RDMA", f"{name}={text}")
    assert RdmaOptions.from_environment() == replace(RdmaOptions(), **{name: value})
    assert RdmaOptions.from_environment(**{name: None}) == replace(RdmaOptions(), **{name: value})
    others = {
        "device": "mlx5_0",
        "devices": ("rxe0", "rxe1"),
        "signal": "write",
        "gpu_writes": "auto",
        "mtu": 256,
        "staging_bytes": 8192,
        "staging_chunk": 64,
    }
    other = others.get(name, 7)
    assert RdmaOptions.from_environment(**{name: other}) == replace(RdmaOptions(), **{name: other})
    monkeypatch.setenv("PROXYCCL_RDMA", "")
    assert RdmaOptions.from_environment() == RdmaOptions()


def test_a_variable_lists_several_options_whose_values_may_have_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_RDMA", "device=mlx5_0, mtu=4096")
    assert RdmaOptions.from_environment() == RdmaOptions(device="mlx5_0", mtu=4096)
    monkeypatch.setenv("PROXYCCL_FABRIC", "interface=^=eth0,eth1,provider=tcp;ofi_rxm")
    assert FabricOptions.from_environment() == FabricOptions(interface="^=eth0,eth1", provider="tcp;ofi_rxm")


def test_an_argument_that_names_adapters_replaces_all_names_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_RDMA", "devices=rxe0,rxe2,mtu=4096")
    assert RdmaOptions.from_environment(device="rxe1") == RdmaOptions(device="rxe1", mtu=4096)
    monkeypatch.setenv("PROXYCCL_RDMA", "mtu=4096,device=rxe1")
    assert RdmaOptions.from_environment(devices=["rxe0", "rxe2"]) == RdmaOptions(devices=("rxe0", "rxe2"), mtu=4096)
    monkeypatch.setenv("PROXYCCL_FABRIC", "interfaces=eth0,eth1")
    assert FabricOptions.from_environment(interface="eth2") == FabricOptions(interface="eth2")
    monkeypatch.setenv("PROXYCCL_FABRIC_INTERFACE", "eth2")
    assert FabricOptions.from_environment() == FabricOptions(interfaces=("eth0", "eth1"))
    monkeypatch.setenv("PROXYCCL_FABRIC", "interfaces=eth0,eth1,interface=eth2")
    with pytest.raises(ArgumentError, match="interfaces: must be None, because interface is 'eth2'"):
        FabricOptions.from_environment()


def test_older_variables_of_one_option_are_read_if_the_list_lacks_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_RDMA_MTU", "1024")
    monkeypatch.setenv("PROXYCCL_RDMA_PORT", "2")
    monkeypatch.setenv("PROXYCCL_RDMA", "port=1")
    assert RdmaOptions.from_environment() == RdmaOptions(port=1, mtu=1024)
    monkeypatch.setenv("PROXYCCL_RDMA_MTU", "1025")
    with pytest.raises(ArgumentError, match=r"^PROXYCCL_RDMA_MTU: must be one of 256"):
        RdmaOptions.from_environment()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("mlx5_0", "'mlx5_0' is unknown"),
        ("devise=mlx5_0", "'devise' is unknown; expected one of device, devices, rails, port"),
        ("mtu=256,mtu=512", "'mtu' is listed twice"),
    ],
)
def test_a_malformed_list_is_refused(text: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_RDMA", text)
    with pytest.raises(ArgumentError, match=rf"^PROXYCCL_RDMA: must be a list of OPTION=VALUE; {reason}"):
        RdmaOptions.from_environment()


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("device", "devices")])
@pytest.mark.parametrize("text", ["none", "-1", "99999999", "0x4", "1.5", "²"])
def test_a_wrong_variable_is_named(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_RDMA", f"{name}={text}")
    with pytest.raises(ArgumentError) as caught:
        RdmaOptions.from_environment()
    assert caught.value.argument == f"PROXYCCL_RDMA: {name}"


def test_what_is_no_option_is_refused() -> None:
    with pytest.raises(
        ArgumentError, match=r"^depth: unknown option of RDMA; expected one of device, devices, rails, port"
    ):
        RdmaOptions.from_environment(depth=3)


# -- addresses ---

ADDRESSES = st.builds(
    EndpointAddress,
    qp_number=st.integers(2, 0xFFFFFE),
    psn=st.integers(0, 0xFFFFFF),
    gid=st.binary(min_size=16, max_size=16).filter(any),
    gid_type=st.sampled_from(GID_TYPES),
    link_layer=st.sampled_from(LINK_LAYERS),
    lid=st.integers(1, 0xBFFF),
    port=st.integers(1, 254),
    mtu=st.sampled_from(MTUS),
    atomics=st.integers(0, 255),
    reads=st.integers(0, 255),
)
ROCE = EndpointAddress(
    17, 5, ipaddress.IPv6Address("::ffff:10.9.0.2").packed, "RoCE v2", "ethernet", 0, 1, 4096, atomics=16, reads=16
)


@given(ADDRESSES)
@example(ROCE)
def test_an_address_survives_its_way(address: EndpointAddress) -> None:
    assert EndpointAddress.decode(address.encode()) == address


@given(st.binary(max_size=600))
def test_any_bytes_are_no_address(data: bytes) -> None:
    with pytest.raises(ArgumentError, match=r"^peer: "):
        EndpointAddress.decode(data)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("qp_number", 0),
        ("qp_number", 0xFFFFFF),
        ("qp_number", "17"),
        ("psn", 1 << 24),
        ("gid", base64.b64encode(bytes(16)).decode()),
        ("gid", base64.b64encode(bytes(15)).decode()),
        ("gid_type", "RoCE v3"),
        ("lid", 0xC000),
        ("lid", None),
        ("link_layer", "token ring"),
        ("port", 0),
        ("port", 255),
        ("mtu", 0),
        ("mtu", 1500),
        ("reads", 256),
        ("version", 3),
    ],
)
def test_an_address_with_a_wrong_field_is_refused_by_its_name(name: str, wrong: object) -> None:
    fields = {**json.loads(ROCE.encode()), name: wrong}
    with pytest.raises(ArgumentError, match=rf"^peer: invalid endpoint's address from the peer: .*{name}"):
        EndpointAddress.decode(json.dumps(fields).encode())


def test_an_address_on_infiniband_has_a_lid() -> None:
    fields = {**json.loads(ROCE.encode()), "link_layer": "infiniband"}
    with pytest.raises(ArgumentError, match="lid is 0"):
        EndpointAddress.decode(json.dumps(fields).encode())


# -- discovery in a fake sysfs ---


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Makes a fake sysfs with a RoCE device of two ports, the second of which is down, an InfiniBand device, and two
    NUMA nodes.
    """
    roce = tmp_path / "class/infiniband/mlx5_1"
    put(roce, {"node_guid": "0c42:a103:0065:d5aa", "device/numa_node": "1"})
    put(roce / "ports/1", {"state": "4: ACTIVE", "link_layer": "Ethernet", "rate": "100 Gb/sec (4X EDR)", "lid": "0x0"})
    put(roce / "ports/1", gid_files(0, "fe80::1", "IB/RoCE v1", "eth1"))
    put(roce / "ports/1", gid_files(1, "fe80::1", "RoCE v2", "eth1"))
    put(roce / "ports/1", gid_files(2, "::ffff:10.0.0.1", "IB/RoCE v1", "eth1"))
    put(roce / "ports/1", gid_files(3, "::"))
    put(roce / "ports/1", gid_files(10, "::ffff:10.0.0.1", "RoCE v2", "eth1"))
    put(roce / "ports/2", {"state": "1: DOWN", "link_layer": "Ethernet", "rate": "40 Gb/sec (4X QDR)"})
    ib = tmp_path / "class/infiniband/mlx5_0"
    put(ib, {"node_guid": "0c42:a103:0065:d5ab", "device/numa_node": "0"})
    put(ib, {"device/net/ib1/dev_port": "1", "device/net/ib0/dev_port": "0"})
    put(
        ib / "ports/1", {"state": "4: ACTIVE", "link_layer": "InfiniBand", "rate": "2.5 Gb/sec (1X SDR)", "lid": "0x1f"}
    )
    put(ib / "ports/1", gid_files(0, "fe80::c42:a103:65:d5ab", "IB/RoCE v1"))
    put(tmp_path / "devices/system/node", {"node0/distance": "10 21", "node1/distance": "21 10"})
    put(tmp_path / "devices/system/node", {"node0/cpulist": "0-1,4", "node1/cpulist": "2-3"})
    return tmp_path


def test_devices_are_read_from_sysfs(sysfs: Path) -> None:
    ib, roce = rdma_devices(sysfs)
    assert (ib.name, ib.guid, ib.numa_node) == ("mlx5_0", "0c42:a103:0065:d5ab", 0)
    assert ib.ports == (
        RdmaPort(1, "active", "infiniband", 2.5, 31, "ib0", (RdmaGid(0, "fe80::c42:a103:65:d5ab", "IB", None),)),
    )
    assert (roce.name, roce.numa_node) == ("mlx5_1", 1)
    first, second = roce.ports
    assert (first.state, first.link_layer, first.rate, first.lid, first.netdev) == (
        "active",
        "ethernet",
        100,
        0,
        "eth1",
    )
    assert first.gids == (
        RdmaGid(0, "fe80::1", "RoCE v1", "eth1"),
        RdmaGid(1, "fe80::1", "RoCE v2", "eth1"),
        RdmaGid(2, "::ffff:10.0.0.1", "RoCE v1", "eth1"),
        RdmaGid(10, "::ffff:10.0.0.1", "RoCE v2", "eth1"),
    )
    assert second == RdmaPort(2, "down", "ethernet", 40, 0, None, ())
    # These attributes are None, because sysfs lacks them and only pyverbs can query them.
    assert roce.atomics is roce.max_queue_pairs is roce.max_registrations is None
    assert first.active_mtu is first.max_message is None


def test_there_may_be_no_device_and_no_infiniband_at_all(tmp_path: Path) -> None:
    assert rdma_devices(tmp_path) == []
    (tmp_path / "class/infiniband").mkdir(parents=True)
    assert rdma_devices(tmp_path) == []


def test_a_device_that_tells_nothing_is_listed(tmp_path: Path) -> None:
    put(tmp_path / "class/infiniband/odd0", {"device/numa_node": "-1", "ports/10/rate": "", "ports/9/gids/0": "what"})
    (device,) = rdma_devices(tmp_path)
    assert (device.guid, device.numa_node) == ("", None)
    assert device.ports == (RdmaPort(9, "unknown", "", 0, 0, None, ()), RdmaPort(10, "unknown", "", 0, 0, None, ()))


@pytest.mark.parametrize(("cores", "node"), [({0, 4}, 0), ({2, 3}, 1), ({1, 2}, None), ({9}, None)])
def test_a_process_bound_to_a_numa_node(
    cores: set[int], node: int | None, sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    assert process_numa_node(sysfs) == node


# -- choosing ---


def gids(*addresses: tuple[str, str]) -> tuple[RdmaGid, ...]:
    return tuple(RdmaGid(index, address, kind, "eth0") for index, (address, kind) in enumerate(addresses))


V4 = gids(("fe80::1", "RoCE v2"), ("::ffff:10.0.0.1", "RoCE v2"))


def roce_device(name: str, numa_node: int | None = None, *, rate: float = 100, state: str = "active") -> RdmaDevice:
    return RdmaDevice(name, "", numa_node, (RdmaPort(1, state, "ethernet", rate, 0, "eth0", V4),))


def chosen(
    devices: list[RdmaDevice], near: int | None = None, local_rank: int = 0, **options: Any
) -> tuple[str, int, int]:
    choice = choose_devices(
        devices, RdmaOptions(**options), Place(node=near), local_rank=local_rank, root=Path("/nowhere")
    )[0]
    return choice.device.name, choice.port, choice.gid_index


def test_the_nearest_device_is_chosen(sysfs: Path) -> None:
    there = [roce_device("a", 0), roce_device("b", 1), roce_device("c")]
    assert chosen(there, 0) == ("a", 1, 1)
    assert chosen(there, 1) == ("b", 1, 1)
    # A NUMA node without a device uses the nearest device or, if distances are unknown, a device whose node is known.
    assert choose_devices(there[1:], RdmaOptions(), Place(node=0), root=sysfs)[0].device.name == "b"
    put(sysfs / "devices/system/node", {"node2/distance": "30 20 10", "node2/cpulist": ""})
    assert choose_devices(there, RdmaOptions(), Place(node=2), root=sysfs)[0].device.name == "b"
    put(sysfs / "devices/system/node", {"node2/distance": "20 30 10"})
    assert choose_devices(there, RdmaOptions(), Place(node=2), root=sysfs)[0].device.name == "a"


def test_of_equally_near_devices_the_fastest_is_chosen() -> None:
    assert chosen([roce_device("a", 0, rate=25), roce_device("b", 0, rate=400)], 0)[0] == "b"
    assert chosen([roce_device("a", 0, rate=25), roce_device("b", 1, rate=400)], 0)[0] == "a"
    assert chosen([roce_device("a", 0, rate=25), roce_device("b", 1, rate=400)])[0] == "b"


def test_ranks_spread_over_equal_devices() -> None:
    there = [roce_device("a", 0), roce_device("b", 0), roce_device("c", 1)]
    assert [chosen(there, 0, local_rank)[0] for local_rank in range(4)] == ["a", "b", "a", "b"]
    assert [chosen(there, None, local_rank)[0] for local_rank in range(4)] == ["a", "b", "c", "a"]


def test_ports_that_are_down_or_have_no_address_are_passed_over() -> None:
    down, bare = roce_device("a", 0, state="down"), roce_device("b", 0)
    bare = replace(bare, ports=(replace(bare.ports[0], gids=()),))
    broken = replace(roce_device("c", 0), problem="ibv_open_device of c: Permission denied (errno 13)")
    assert chosen([down, bare, broken, roce_device("d", 1)], 0)[0] == "d"
    with pytest.raises(RuntimeUnavailableError) as caught:
        chosen([down, bare, broken])
    assert str(caught.value) == (
        "no RDMA device has an active port; there is a port 1 (down), b port 1 (active, no GID), "
        "c port 1 (ibv_open_device of c: Permission denied (errno 13))"
    )
    with pytest.raises(RuntimeUnavailableError, match="there is none"):
        chosen([])


@pytest.mark.parametrize(
    ("table", "index"),
    [
        (V4, 1),
        (gids(("fe80::1", "RoCE v1"), ("fe80::1", "RoCE v2"), ("fd00::1", "RoCE v2")), 2),
        (gids(("fe80::1", "RoCE v1"), ("fe80::1", "RoCE v2")), 1),
        (gids(("fe80::1", "RoCE v1"), ("::ffff:10.0.0.1", "RoCE v1")), 0),
        (gids(("::ffff:10.0.0.2", "RoCE v2"), ("::ffff:10.0.0.1", "RoCE v2")), 0),
        (gids(("fe80::1", "IB"), ("fe80::2", "IB")), 0),
    ],
)
def test_a_routable_gid_is_preferred(table: tuple[RdmaGid, ...], index: int) -> None:
    device = roce_device("a")
    assert chosen([replace(device, ports=(replace(device.ports[0], gids=table),))])[2] == index


def test_options_override_the_choice() -> None:
    a, b = roce_device("a", 0), roce_device("b", 1)
    both = replace(b, ports=(*b.ports, replace(b.ports[0], number=2)))
    assert chosen([a, both], 0, device="b") == ("b", 1, 1)
    assert chosen([a, both], 0, port=2) == ("b", 2, 1)
    assert chosen([a, both], 0, device="b", port=2, gid_index=0) == ("b", 2, 0)
    more = replace(
        a, name="c", numa_node=1, ports=(replace(a.ports[0], gids=(*V4, RdmaGid(5, "::1", "RoCE v2", None))),)
    )
    assert chosen([a, more], 0, gid_index=5) == ("c", 1, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "z"}, "device: no RDMA device 'z'; there is a, b"),
        ({"device": "b"}, "device: 'b' has no active port; there is b port 1 (down)"),
        ({"device": "a", "port": 3}, "port: a has no port 3; it has 1"),
        ({"port": 3}, "port: 3 has no active port; there is a port 1 (active), b port 1 (down)"),
        (
            {"gid_index": 9},
            "gid_index: no active port has a GID 9; there is a port 1: GID 0 fe80::1 (RoCE v2), "
            "GID 1 ::ffff:10.0.0.1 (RoCE v2)",
        ),
    ],
)
def test_an_option_that_names_what_is_not_there(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        chosen([roce_device("a"), roce_device("b", state="down")], **options)
    assert str(caught.value) == message


# -- pyverbs, or parts of it, are missing ---


@pytest.fixture
def fresh_pyverbs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes it look as if pyverbs had not been imported, and restores its modules after the test."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    pyverbs_api.load.cache_clear()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        del sys.modules[name]
    pyverbs_api.load.cache_clear()


@pytest.fixture
def stand_in(fresh_pyverbs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Installs the stand-in as pyverbs, and returns the capabilities of the stand-in's device."""
    pyverbs_stand_in.write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return pyverbs_stand_in.device()


def hide_pyverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name == "pyverbs":
                raise ModuleNotFoundError("No module named 'pyverbs'", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    pyverbs_api.load.cache_clear()


def engine_built(monkeypatch: pytest.MonkeyPatch, built: int) -> None:
    monkeypatch.setattr(requirements, "lib", SimpleNamespace(proxyccl_verbs_built=lambda: built))


@pytest.mark.usefixtures("fresh_pyverbs")
def test_a_missing_pyverbs_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_pyverbs(monkeypatch)
    with pytest.raises(RuntimeUnavailableError) as caught:
        pyverbs_api.load()
    for word in ("python3-pyverbs ibverbs-providers", "dnf install python3-pyverbs", "--system-site-packages", "ln -s"):
        assert word in str(caught.value)


@pytest.mark.usefixtures("fresh_pyverbs")
def test_a_pyverbs_for_another_python_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, {"pyverbs/__init__.py": "", "pyverbs/addr.cpython-399-x86_64-linux-gnu.so": ""})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        RuntimeUnavailableError, match=r"pyverbs was built for another version of Python .*pyverbs\.addr"
    ):
        pyverbs_api.load()


@pytest.mark.usefixtures("stand_in")
def test_a_pyverbs_that_does_not_fit_is_told(tmp_path: Path) -> None:
    put(tmp_path, {"pyverbs/device.py": "raise ImportError('libibverbs.so.1: version `IBVERBS_1.99 not found')"})
    with pytest.raises(RuntimeUnavailableError, match=r"does not fit this machine's libibverbs .*IBVERBS_1\.99"):
        pyverbs_api.load()


@pytest.mark.usefixtures("stand_in")
def test_a_pyverbs_that_lacks_something_is_told(tmp_path: Path) -> None:
    put(tmp_path, {"pyverbs/qp.py": "class QP: pass"})
    with pytest.raises(RuntimeUnavailableError, match=r"too old or too new: .*QPAttr"):
        pyverbs_api.load()


@pytest.mark.usefixtures("stand_in")
def test_importing_pyverbs_leaves_the_programs_logging_alone() -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        root.handlers.clear()  # a remaining handler would make logging.basicConfig do nothing
        root.setLevel(logging.WARNING)
        pyverbs_api.load()
        assert (root.handlers, root.level) == ([], logging.WARNING)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@pytest.mark.usefixtures("fresh_pyverbs")
@pytest.mark.parametrize(
    ("enums", "in_module"), [("enums", True), ("libibverbs_enums", True), ("libibverbs_enums", False)]
)
def test_enumerators_of_each_version(
    enums: str, in_module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyverbs_stand_in.write(tmp_path, enums=enums, in_module=in_module)
    monkeypatch.syspath_prepend(tmp_path)
    api = pyverbs_api.load()
    assert api.enumerator("IBV_ACCESS_REMOTE_ATOMIC") == 8
    assert api.enumerator("IBV_ATOMIC_NONE") == 0
    with pytest.raises(RuntimeUnavailableError, match="it has no IBV_QPT_NEW"):
        api.enumerator("IBV_QPT_NEW")


@pytest.mark.usefixtures("stand_in")
def test_pyverbs_errors_carry_the_call_and_errnos_words() -> None:
    api = pyverbs_api.load()
    for number, kind in (
        (errno.ENOMEM, ResourceError),
        (errno.EINVAL, RuntimeUnavailableError),
        (-22, RuntimeUnavailableError),
    ):
        with pytest.raises(kind) as caught, api.calling("ibv_create_qp", "a queue pair on rxe0"):
            raise api.PyverbsError("Failed to create QP", number)
        words = f"{os.strerror(abs(number))} (errno {abs(number)})"
        assert str(caught.value) == f"ibv_create_qp of a queue pair on rxe0: {words}"
    with (
        pytest.raises(RuntimeUnavailableError, match="ibv_open_device of x: Failed to find device x"),
        api.calling("ibv_open_device", "x"),
    ):
        raise api.PyverbsError("Failed to find device x")


def test_what_is_missing_is_one_sentence(
    sysfs: Path, stand_in: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = tmp_path_factory.mktemp("sys")
    engine_built(monkeypatch, 1)
    assert not missing(sysfs)
    assert missing(nowhere) == f"no RDMA device in {nowhere}/class/infiniband"
    engine_built(monkeypatch, 0)
    assert "without libibverbs' headers (Debian, Ubuntu: apt install libibverbs-dev" in str(missing(sysfs))
    put(sysfs / "class/infiniband/mlx5_0/ports/1", {"state": "2: INIT"})
    put(sysfs / "class/infiniband/mlx5_1/ports/1", {"state": "1: DOWN"})
    hide_pyverbs(monkeypatch)
    lacks = str(missing(sysfs))
    assert "\n" not in lacks
    for part in (
        "no active port; there is mlx5_0 port 1 (init), mlx5_1 port 1 (down), mlx5_1 port 2 (down, no GID)",
        "pyverbs is not installed",
        "the engine was built without",
    ):
        assert part in lacks


# -- endpoints and registrations, over a stand-in for pyverbs ---


@pytest.fixture
def opened(stand_in: SimpleNamespace) -> Iterator[Callable[..., VerbsDevice]]:
    made: list[VerbsDevice] = []

    def open_device(gid: int = 1, **options: Any) -> VerbsDevice:
        made.append(VerbsDevice(DeviceChoice(roce_device("rxe0"), 1, gid), RdmaOptions(**options)))
        return made[-1]

    yield open_device
    for device in made:
        device.close()


Open = Callable[..., VerbsDevice]


@pytest.mark.usefixtures("stand_in")
def test_info_shows_whether_each_chosen_adapter_reaches_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "missing", lambda root: "")
    monkeypatch.setattr(info, "rdma_devices", lambda *_: [roce_device(f"rxe{i}") for i in range(3)])
    monkeypatch.setenv("PROXYCCL_RDMA", "devices=rxe1,rxe2")
    found = [finding.detail for finding in info.findings()["RDMA"] if finding.name == "memory"]
    assert [text.partition(" ")[0] for text in found] == ["rxe1", "rxe2"], found


@pytest.mark.parametrize(
    ("inline", "atomic", "asked", "signal"),
    [
        (16, 1, "auto", "write"),
        (8, 0, "auto", "write"),
        (0, 1, "auto", "fetch_add"),
        (16, 1, "fetch_add", "fetch_add"),
        (16, 1, "write", "write"),
        (16, 0, "write", "write"),
        (7, 0, "auto", None),
        (0, 1, "write", None),
        (16, 0, "fetch_add", None),
    ],
)
def test_signals_are_what_the_device_can_do(
    inline: int, atomic: int, asked: str, signal: str | None, stand_in: SimpleNamespace, opened: Open
) -> None:
    stand_in.inline, stand_in.atomic = inline, atomic
    device = opened(signal=asked)
    if signal is not None:
        assert device.endpoint().signal == signal
        return
    with pytest.raises(
        RuntimeUnavailableError, match=f"signal '{asked}' is not supported: rxe0 takes {inline} bytes inline"
    ):
        device.endpoint()
    assert pyverbs_stand_in.log()[-2:] == [("close", "QP"), ("close", "CQ")]


def test_a_device_that_refuses_inline_data_is_asked_for_none(stand_in: SimpleNamespace, opened: Open) -> None:
    stand_in.inline = 0
    stand_in.refused["QP"] = lambda pd, init: init.cap.max_inline_data and errno.EINVAL
    assert opened().endpoint().signal == "fetch_add"
    with pytest.raises(
        RuntimeUnavailableError, match="ibv_create_qp of a queue pair with 64 requests on rxe0: Invalid"
    ):
        opened(signal="write").endpoint()
    stand_in.refused["QP"] = errno.ENOMEM
    with pytest.raises(ResourceError, match="Cannot allocate memory"):
        opened().endpoint()


def test_queues_are_as_deep_as_the_device_lets_them(opened: Open) -> None:
    assert opened().endpoint().send_depth == 64
    assert opened(send_depth=16).endpoint().send_depth == 16


def test_options_and_choices_beyond_the_port_are_refused(opened: Open) -> None:
    with pytest.raises(ArgumentError, match="mtu: 4096 exceeds the active MTU of rxe0 port 1, 2048"):
        opened(mtu=4096)
    with pytest.raises(
        ArgumentError, match=r"gid_index: rxe0 port 1 has no GID 7; there is GID 0 fe80::1 \(RoCE v2\), GID 1"
    ):
        opened(gid=7)
    opens, closes = (pyverbs_stand_in.log().count((what, "Context")) for what in ("open", "close"))
    assert opens == closes == 1


@pytest.mark.parametrize(("own", "peer", "used"), [(4, 16, 4), (16, 4, 4), (16, 0, 0), (0, 16, 0), (64, 64, 16)])
def test_both_devices_limit_the_reads(own: int, peer: int, used: int, opened: Open, stand_in: SimpleNamespace) -> None:
    stand_in.reads = own
    device = opened()
    endpoint = device.endpoint()
    assert EndpointAddress.decode(endpoint.address).reads == device.reads == min(own, 16)
    assert bool(device.access & 4) == bool(own), "peers may read memory"
    endpoint.connect(structs.replace(ROCE, reads=peer).encode())
    attributes = pyverbs_stand_in.latest("QP").attributes
    assert (attributes.max_dest_rd_atomic, attributes.max_rd_atomic) == (min(own, 16), used)


@pytest.mark.parametrize(("own", "peer", "used"), [(None, 4096, 2048), (1024, 4096, 1024), (None, 512, 512)])
def test_the_smaller_mtu_of_both_ends_is_used(own: int | None, peer: int, used: int, opened: Open) -> None:
    endpoint = opened(mtu=own, traffic_class=104, service_level=3, timeout=18, retry_count=5).endpoint()
    assert EndpointAddress.decode(endpoint.address).mtu == (own or 2048)
    endpoint.connect(structs.replace(ROCE, mtu=peer).encode())
    attributes = pyverbs_stand_in.latest("QP").attributes
    assert (endpoint.mtu, 128 << attributes.path_mtu) == (used, used)
    assert (attributes.dest_qp_num, attributes.rq_psn) == (17, 5)
    assert (attributes.timeout, attributes.retry_cnt, attributes.rnr_retry) == (18, 5, 7)
    assert (attributes.max_dest_rd_atomic, attributes.max_rd_atomic) == (4, 4)
    path = attributes.ah_attr
    assert (path.is_global, path.sl, path.gr.traffic_class, path.gr.sgid_index) == (1, 3, 104, 1)
    assert path.gr.dgid.args == ("0000:0000:0000:0000:0000:ffff:0a09:0002",)
    assert str(endpoint.peer) == "queue pair 17 at 10.9.0.2 (RoCE v2)"


def test_what_can_not_be_connected_is_refused(stand_in: SimpleNamespace, opened: Open) -> None:
    endpoint = opened(signal="fetch_add").endpoint()
    with pytest.raises(ArgumentError, match="peer: invalid endpoint's address"):
        endpoint.connect(b"hello")
    with pytest.raises(ArgumentError, match=r"peer: it is on ethernet with a GID of RoCE v1, and rxe0 on"):
        endpoint.connect(structs.replace(ROCE, gid_type="RoCE v1").encode())
    with pytest.raises(ArgumentError, match="peer: its device supports no atomics"):
        endpoint.connect(structs.replace(ROCE, atomics=0).encode())
    with pytest.raises(ArgumentError, match="endpoint: is not connected; call connect first"):
        endpoint.engine_options(1)
    endpoint.connect(ROCE.encode())
    with pytest.raises(ArgumentError, match=r"is connected to queue pair 17 at 10.9.0.2"):
        endpoint.connect(ROCE.encode())


@pytest.mark.usefixtures("stand_in")
def test_an_address_that_is_not_known_yet_is_tried_again(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    device = opened()
    tries: list[int] = []

    def not_yet(attributes: Any) -> None:
        tries.append(1)
        if len(tries) < 3:
            raise device.api.PyverbsError("Failed to modify QP state to RTR", errno.ETIMEDOUT)

    endpoint = device.endpoint()
    monkeypatch.setattr(pyverbs_stand_in.latest("QP"), "to_rts", not_yet)
    endpoint.connect(ROCE.encode())
    assert len(tries) == 3
    tries.clear()
    late = device.endpoint()
    monkeypatch.setattr(pyverbs_stand_in.latest("QP"), "to_rts", not_yet)
    with pytest.raises(
        TransportError, match=r"ibv_modify_qp of rxe0 to queue pair 17 at 10.9.0.2 .*: Connection timed out"
    ):
        late.connect(ROCE.encode(), timeout=0)
    assert late.peer is None


def test_a_queue_pair_that_is_none_is_not_handed_to_the_engine(opened: Open) -> None:
    endpoint = opened().endpoint()
    endpoint.connect(ROCE.encode())
    with pytest.raises(RuntimeUnavailableError, match=r"the queue pair of a QP of pyverbs .* can't be found"):
        endpoint.engine_options(1)


def test_both_ends_connect_again_with_other_packet_numbers(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port was down in between, and its GID has another index now."""
    device = opened()
    endpoint, qp, cq = device.endpoint(), pyverbs_stand_in.latest("QP"), pyverbs_stand_in.latest("CQ")
    other, other_qp = opened().endpoint(), pyverbs_stand_in.latest("QP")
    with pytest.raises(ArgumentError, match="endpoint: is not connected; call connect first"):
        endpoint.reconnect(1)
    endpoint.connect(other.address)
    other.connect(endpoint.address)
    at_first = qp.attributes.sq_psn
    now = roce_device("rxe0", state="down")
    monkeypatch.setattr("proxyccl.proxy.verbs.endpoint.rdma_devices", lambda: [now])
    assert not endpoint.reconnect(1)
    gid = now.ports[0].gids[1]
    port = replace(now.ports[0], state="active", gids=(replace(gid, index=5),))
    now = replace(now, ports=(port,))
    assert endpoint.stop()
    cq.left = 100
    numbers = {at_first}
    for failure in (1, 2, 3):
        assert endpoint.reconnect(failure)
        assert other.reconnect(failure)
        assert other_qp.attributes.rq_psn == qp.attributes.sq_psn
        numbers.add(qp.attributes.sq_psn)
    assert len(numbers) == 4
    assert (cq.left, qp.states, qp.attributes.ah_attr.gr.sgid_index) == (0, (6, 0, 0, 0), 5)

    def refused(*_: Any) -> None:
        raise device.api.PyverbsError("Failed to modify QP state to RTR", errno.ETIMEDOUT)

    monkeypatch.setattr(qp, "to_rtr", refused)
    assert not endpoint.reconnect(4)
    monkeypatch.setattr(qp, "modify", refused)
    assert not endpoint.stop()


RAILS = ("rxe0", "rxe2", "rxe4")


@pytest.fixture
def open_rails(stand_in: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], VerbsContext]]:
    """A function that opens this number of devices for a rank."""
    monkeypatch.setattr("proxyccl.proxy.verbs.registrations.rdma_devices", lambda: list(map(roce_device, RAILS)))
    monkeypatch.setattr(Endpoint, "engine_options", lambda endpoint, signal_rkey: verbs_options(1))
    runtime = rank_runtime(0)
    with ExitStack() as opened:
        segment = runtime.allocate_pinned(4096)
        opened.callback(segment.close)
        setup = RemoteSetup(runtime, segment, range(8), NOWHERE, 0, 1)

        def open_rails(count: int) -> VerbsContext:
            context = VerbsContext(setup, RdmaOptions(devices=RAILS, rails=count))
            opened.callback(context.close)
            return context

        yield open_rails


Rails = Callable[[int], VerbsContext]


def connected(transport: str, own: VerbsContext, peer: VerbsContext) -> Any:
    """Returns the options of a connection between endpoints of two ranks."""
    make_endpoint = remote_functions(transport).make_endpoint
    ends = make_endpoint(own), make_endpoint(peer)
    options = ends[0].connect(ends[1].info, 1, lambda: False)
    for end in ends:
        end.close()
    return options


@pytest.mark.parametrize("counts", [(2, 2), (2, 3), (3, 2)])
def test_each_wire_of_a_staged_connection_has_a_thread_and_an_adapter_that_takes_over(
    open_rails: Rails, counts: tuple[int, int]
) -> None:
    """With different numbers of adapters, no adapter takes over, because it could be in a separate network."""
    own, peer = counts
    options = connected("staged", open_rails(own), open_rails(peer))
    assert ([wire.number for wire in options.wires], options.ends) == ([0, 1], own)
    rails = [[rail.adapter for rail in getattr(wire.options, "rails", ())] for wire in options.wires]
    assert rails == ([["rxe0", "rxe2"], ["rxe2", "rxe0"]] if own == peer else [[], []])


def test_a_recovery_waits_longer_than_an_adapter_and_a_slow_peer(open_rails: Rails) -> None:
    options = connected("verbs", open_rails(2), open_rails(2))
    assert options.native.limit_ns / 1e9 == pytest.approx(4 * 4.096e-6 * 2**14 * 7 + 30)


@pytest.mark.parametrize("counts", [(3, 3), (3, 2), (2, 3)])
def test_two_ranks_use_the_smaller_number_of_adapters(open_rails: Rails, counts: tuple[int, int]) -> None:
    own, peer = counts
    options = connected("verbs", open_rails(own), open_rails(peer))
    assert tuple(rail.adapter for rail in options.rails) == RAILS[: min(counts)]
    assert options.native.count == min(counts)
    assert options.native.mail


@pytest.mark.parametrize(("transport", "counts"), itertools.product(["verbs", "staged"], [(1, 2), (3, 1)]))
def test_a_rank_with_one_adapter_is_connected_without_rails(
    open_rails: Rails, transport: str, counts: tuple[int, int]
) -> None:
    options = connected(transport, *map(open_rails, counts))
    (wire,) = [options] if transport == "verbs" else [wire.options for wire in options.wires]
    assert ffi.typeof(wire) is ffi.typeof("ProxycclVerbsOptions *")


def test_closing_goes_from_the_inside_out_and_once(opened: Open) -> None:
    device = opened(signal="fetch_add")
    endpoint, other = device.endpoint(), device.endpoint()
    registrations = Registrations(device)
    registrations.register(4096, 10)
    other.close()
    pyverbs_stand_in.log().clear()
    device.close()
    closed = [kind for what, kind in pyverbs_stand_in.log() if what == "close"]
    assert sorted(closed[:3]) == ["CQ", "MR", "QP"]
    assert closed.index("QP") < closed.index("CQ")
    assert closed[3:] == ["PD", "Context"]
    for thing in (device, endpoint, other, registrations, device):
        thing.close()
    assert len(pyverbs_stand_in.log()) == 5
    for call in (device.endpoint, lambda: endpoint.address, lambda: registrations.register(4096, 10)):
        with pytest.raises(ClosedError):
            call()


def test_a_range_is_registered_once_and_kept_for_its_allocation(opened: Open) -> None:
    registrations = Registrations(opened())
    first = registrations.register(4096, 100, allocation="a")
    assert registrations.register(4096, 100, allocation="a") is first
    registrations.release(first)
    registrations.release(first)
    assert registrations.register(4096, 100, allocation="a") is first
    # Each of these differs from the first registration: in its allocation, in its size, or by having no allocation.
    others = [
        registrations.register(4096, 100, allocation="b"),
        registrations.register(4096, 101, allocation="a"),
        registrations.register(4096, 100),
    ]
    assert len({registration.local_key for registration in (first, *others)}) == 4
    assert (first.how, first.address) == ("host", 4096)


def test_what_no_allocation_names_is_not_kept(opened: Open) -> None:
    registrations = Registrations(opened())
    first = registrations.register(4096, 100)
    assert registrations.register(4096, 100) is first
    registrations.release(first)
    registrations.release(first)
    assert pyverbs_stand_in.log()[-1] == ("close", "MR")
    assert registrations.register(4096, 100).local_key != first.local_key
    registrations.release(first)
    with pytest.raises(ArgumentError, match=r"registration: .* is not in use"):
        registrations.release(first)


def test_the_least_recently_used_go_first(opened: Open) -> None:
    class Few(Registrations):
        KEEP, KEEP_BYTES = 3, 1000

    registrations = Few(opened())

    def use(name: str, nbytes: int = 100) -> int:
        registration = registrations.register(4096, nbytes, allocation=name)
        registrations.release(registration)
        return registration.local_key

    kept = {name: use(name) for name in "abc"}
    assert use("a") == kept["a"]
    use("d")
    assert use("a") == kept["a"]
    assert use("c") == kept["c"]
    assert use("b") != kept["b"]
    big = use("big", 950)  # the cache can hold 950 more bytes only after it has discarded a and c
    assert use("a") != kept["a"]
    assert use("big", 950) != big
    assert use("bigger", 1001) != use("bigger", 1001)


def test_gpu_memory_is_registered_by_dma_buf_or_address(stand_in: SimpleNamespace, opened: Open) -> None:
    registrations = Registrations(opened())
    descriptors: list[int] = []

    def dmabuf() -> tuple[int, int]:
        descriptors.append(os.open("/dev/null", os.O_RDONLY))
        return descriptors[-1], 512

    registration = registrations.register(1 << 40, 100, dmabuf)
    assert (registration.how, registration.ptr, registration.address) == ("dma-buf", 1 << 40, 512)
    registration = registrations.register(1 << 40, 101, lambda: None)
    assert (registration.how, registration.address) == ("peer memory", 1 << 40)
    stand_in.refused["DmaBufMR"] = errno.EOPNOTSUPP
    registration = registrations.register(1 << 40, 102, dmabuf)
    assert (registration.how, registration.address) == ("peer memory", 1 << 40)
    stand_in.refused["MR"] = errno.EFAULT
    with pytest.raises(RuntimeUnavailableError) as caught:
        registrations.register(1 << 40, 103, dmabuf)
    assert str(caught.value) == (
        "ibv_reg_mr of 103 bytes of a GPU's memory on rxe0: Bad address (errno 14); "
        "ibv_reg_dmabuf_mr of 103 bytes of a DMA-BUF on rxe0: Operation not supported (errno 95)"
    )
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_no_room_is_told_with_the_limit_of_locked_memory(
    stand_in: SimpleNamespace, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    registrations = Registrations(opened())
    stand_in.refused["MR"] = errno.ENOMEM
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    with pytest.raises(ResourceError) as caught:
        registrations.register(4096, 1 << 30)
    assert str(caught.value) == (
        "ibv_reg_mr of 1073741824 bytes of host memory on rxe0: Cannot allocate memory (errno 12); "
        "this process may lock 8192 KiB of memory in all (ulimit -l)"
    )
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with pytest.raises(ResourceError, match=r"Cannot allocate memory \(errno 12\)$"):
        registrations.register(4096, 1 << 30)
    stand_in.refused.clear()
    assert registrations.register(4096, 1 << 30).how == "host"


@pytest.mark.parametrize(
    ("ptr", "nbytes", "name"),
    [(0, 1, "ptr"), (None, 1, "ptr"), (1, 0, "nbytes"), (1, -1, "nbytes"), (1, 1.5, "nbytes")],
)
def test_a_range_that_is_none_is_refused(ptr: Any, nbytes: Any, name: str, opened: Open) -> None:
    with pytest.raises(ArgumentError) as caught:
        Registrations(opened()).register(ptr, nbytes)
    assert caught.value.argument == name
