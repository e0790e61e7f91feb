"""A rank's choice among the providers that libfabric offers, and the options for the choice."""

from __future__ import annotations

import ipaddress
import itertools
import os
import platform
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proxyccl import ArgumentError, FabricOptions, RdmaOptions, RuntimeUnavailableError, rdma_devices
from proxyccl.channels.transfers import fabric
from proxyccl.device.errors import DriverError
from proxyccl.proxy.fabric.library import FabricOffer, best_of, choose_offers
from proxyccl.proxy.placement import Place
from proxyccl.proxy.remote_options import MOST_WIRES
from proxyccl.proxy.verbs.devices import choose_devices
from proxyccl.tools import info
from support.sysfs import expand, put


def offer(provider: str, domain: str, address: str | None = None, **facts: Any) -> FabricOffer:
    known: dict[str, Any] = {
        "address": ipaddress.ip_address(address) if address else None,
        "address_format": 2,
        "ordered": True,
        "parts": 4,
        "reads": True,
        "remote": True,
        "device_memory": False,
        "virtual_keys": False,
        "provider_keys": False,
        "key_bytes": 8,
        "depth": 256,
        "max_message": 1 << 40,
        "rate": 0.0,
        "source": (None, 0),
    }
    return FabricOffer(provider, domain, **{**known, **facts})


SHM = offer("shm", "shm", remote=False)
EFA = [offer("efa", f"rdmap{i}", ordered=False) for i in range(2)]
TCP = [
    offer("tcp;ofi_rxm", "lo", "127.0.0.1", remote=False),
    offer("tcp;ofi_rxm", "eth0", "fe80::1"),
    offer("tcp;ofi_rxm", "eth0", "fd77::1"),
    offer("tcp;ofi_rxm", "eth0", "10.0.0.1"),
    offer("tcp;ofi_rxm", "eth1", "10.1.0.1"),
]
UDP = offer("udp;ofi_rxd", "eth0", "10.0.0.1")


@pytest.mark.parametrize(
    ("offers", "options", "expected"),
    [
        ([SHM, *EFA, *TCP], {}, EFA[0]),
        ([SHM, UDP, *TCP], {}, TCP[3]),
        ([UDP, SHM], {}, UDP),
        (TCP[:3], {}, TCP[2]),
        ([*EFA, *TCP], {"provider": "tcp"}, TCP[3]),
        ([*EFA, *TCP], {"provider": "tcp;ofi_rxm"}, TCP[3]),
        ([SHM, *TCP], {"provider": "shm"}, SHM),
        ([*EFA, *TCP], {"interface": "eth"}, TCP[3]),
        (TCP, {"interface": "=eth1"}, TCP[4]),
        (TCP, {"interface": "^eth0,lo"}, TCP[4]),
        (TCP, {"interface": "^=eth0,lo"}, TCP[4]),
        (TCP, {"interface": "^=eth,lo"}, TCP[3]),
        (TCP, {"interface": "lo"}, TCP[0]),
        ([*EFA, *TCP], {"signal": "ordered"}, TCP[3]),
    ],
)
def test_the_offer_is_the_first_that_reaches_other_hosts_or_is_named(
    offers: list[FabricOffer], options: dict[str, str], expected: FabricOffer
) -> None:
    assert choose_offers(offers, FabricOptions(**options))[0] == expected


def test_of_an_offer_the_most_able_kind_is_taken_in_libfabrics_order() -> None:
    tcp = TCP[3]
    plain = [replace(offer, ordered=False) for offer in (*EFA, tcp, tcp)]
    for_gpus = [replace(offer, device_memory=True) for offer in EFA]
    assert best_of([[tcp, replace(tcp, depth=1)], plain]) == [*EFA, tcp]
    assert best_of([for_gpus, [tcp], plain]) == [*for_gpus, tcp]
    assert best_of([[], [tcp], [SHM]]) == [SHM, tcp]


def test_ranks_of_a_host_share_its_devices() -> None:
    assert [choose_offers([*EFA, *TCP], FabricOptions(), local_rank=i)[0] for i in range(3)] == [*EFA, EFA[0]]
    assert choose_offers(TCP, FabricOptions(), local_rank=1)[0] == TCP[3]


def test_of_named_interfaces_a_rank_uses_the_two_nearest_in_their_order(tmp_path: Path) -> None:
    def domains(offers: list[FabricOffer], names: list[str], *place: Any, **keywords: Any) -> list[str]:
        return [each.domain for each in choose_offers(offers, FabricOptions(interfaces=names), *place, **keywords)]

    assert domains([*EFA, *TCP], ["eth1", "eth0"]) == ["eth1", "eth0"]
    assert domains([*EFA, *TCP], ["rdmap1", "rdmap0"]) == ["rdmap1", "rdmap0"]
    like_another = [*TCP, offer("tcp;ofi_rxm", "eth10", "10.2.0.1")]
    assert domains(like_another[::-1], ["eth1", "eth0"]) == ["eth1", "eth0"]
    gpus = expand("p5_efa", tmp_path)
    names = [device.name for device in rdma_devices(tmp_path)]
    offers = of_efa(tmp_path)
    chosen = [domains(offers, names, Place(gpus["gpu0"]), local_rank=i, root=tmp_path) for i in range(3)]
    beside = [name for name in names if 1 <= int(gpus["gpu0"][5:7], 16) - int(name[5:-2]) <= 4]
    assert [name for pair in chosen[:2] for name in pair] == [f"{name}-rdm" for name in beside]
    assert chosen[2] == chosen[0]
    for i, interface in enumerate(("eth0", "eth1", "eth10")):
        put(tmp_path / "class/net" / interface / "device", {"numa_node": f"{i % 2}"})
    assert domains(like_another, ["eth1", "eth10", "eth0"], Place(node=0), root=tmp_path) == ["eth10", "eth0"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["eth0", "eth"], "interfaces: must name different interfaces of one provider, not tcp;ofi_rxm on eth0"),
        (["eth0", "rdmap"], "interfaces: must name different interfaces of one provider, not tcp;ofi_rxm on eth0"),
        (["eth0", "eth9"], "interfaces: 'eth9' is not one of"),
    ],
)
def test_interfaces_that_can_not_be_used_together_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        choose_offers([*EFA, *TCP], FabricOptions(interfaces=names))


def of_efa(root: Path) -> list[FabricOffer]:
    return [offer("efa", f"{device.name}-rdm", ordered=False) for device in rdma_devices(root)]


def driver_of(gpus: list[str], current: int = 0) -> Any:
    """Returns a driver of GPUs at these PCI addresses, of which one is the thread's current device."""
    return SimpleNamespace(
        device_count=lambda: len(gpus),
        current_device=lambda: current,
        device=lambda number: SimpleNamespace(pci_address=gpus[number]),
    )


def first_agents(monkeypatch: pytest.MonkeyPatch, process: int) -> None:
    """Makes the next agents the first ones of a process."""
    monkeypatch.setattr(fabric, "_agents_at", defaultdict(itertools.count))
    monkeypatch.setattr(os, "getpid", lambda: process)


@pytest.mark.parametrize("named", [False, True])
def test_agents_use_the_nearest_devices_of_their_gpus_in_turns(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = list(expand("p5_efa", tmp_path).values())
    offers = of_efa(tmp_path)
    options = FabricOptions(interfaces=tuple(each.domain for each in offers) if named else None)
    rails = 2 if named else 1
    first_agents(monkeypatch, 7)
    for turn, (current, gpu) in itertools.product(range(5), enumerate(gpus)):
        chosen = fabric.choose_agent_offers(offers, options, driver_of(gpus, current), tmp_path)
        numbers = sorted((rails * (current + turn) + rail) % 4 for rail in range(rails))
        assert [each.domain for each in chosen] == [f"rdmap{int(gpu[5:7], 16) - 4 + n}s0-rdm" for n in numbers]


def test_processes_that_see_one_gpu_or_none_start_with_different_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {8, 9})  # cores of NUMA node 1
    gpu = next(iter(expand("p5_efa", tmp_path).values()))
    offers = of_efa(tmp_path)

    def refuse() -> int:
        raise DriverError("cuCtxGetCurrent", 3, "not initialized")

    in_a_forked_child = SimpleNamespace(current_device=refuse)
    of_gpu, of_node = range(79, 83), range(147, 202)
    for driver, devices in ((driver_of([gpu]), of_gpu), (None, of_node), (in_a_forked_child, of_node)):
        chosen = set()
        for process in range(7, 7 + 16):
            first_agents(monkeypatch, process)
            chosen |= {each.domain for each in fabric.choose_agent_offers(offers, FabricOptions(), driver, tmp_path)}
        assert chosen == {each.domain for each in offers if int(each.domain[5:-6]) in devices}


def test_agents_use_the_same_ones_of_named_interfaces_with_addresses() -> None:
    """Interfaces with addresses may be on separate networks, so all agents use the first names."""
    options = FabricOptions(interfaces=["eth1", "eth0"])
    for rails, expected in ((1, ["eth1"]), (2, ["eth1", "eth0"])):
        chosen = [fabric.choose_agent_offers(TCP, replace(options, rails=rails), None) for _ in range(3)]
        assert [[each.domain for each in each_agent] for each_agent in chosen] == [expected] * 3


def test_info_lists_devices_of_efa_and_interfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = expand("p5_efa", tmp_path)
    put(tmp_path / "class/net/eth0", {"operstate": "up", "speed": "25000", "device/numa_node": "1"})
    offers = [SHM, *of_efa(tmp_path), *TCP[:4]]
    findings = info.placement({name: Place(address) for name, address in gpus.items()}, offers, tmp_path)
    efa = "(for libfabric alone, active, 100 Gbit/s"
    assert [finding.detail for finding in findings if finding.name == "gpu1"] == [
        f"same PCIe switch: rdmap96s0, rdmap98s0, rdmap99s0 {efa}); rdmap97s0 {efa}, used by fabric (efa))",
        f"same NUMA node: rdmap79s0 … rdmap133s0, 12 adapters {efa})",
        f"other NUMA node: eth0 (network interface, up, 25 Gbit/s); rdmap147s0 … rdmap201s0, 16 adapters {efa})",
    ]
    monkeypatch.setenv("PROXYCCL_FABRIC", "provider=shm")
    (finding,) = info.placement({"NUMA node 0": Place(node=0)}, [SHM], tmp_path / "without adapters")
    assert finding.detail == "unknown place: shm (this host alone, used by fabric (shm))"


def test_efa_devices_are_used_by_libfabric_and_not_by_verbs(tmp_path: Path) -> None:
    gpus = expand("p5_efa", tmp_path)
    devices = rdma_devices(tmp_path)
    assert len(devices) == 32
    with pytest.raises(RuntimeUnavailableError, match=r"rdmap79s0 port 1 .* without reliable connections"):
        choose_devices(devices, RdmaOptions(), Place(gpus["gpu0"]), root=tmp_path)[0]
    offers = of_efa(tmp_path)
    for rank, gpu in enumerate(gpus.values()):
        beside = int(gpu[5:7], 16)
        chosen = {
            choose_offers(offers, FabricOptions(), Place(gpu), local_rank=i, root=tmp_path)[0].domain for i in range(8)
        }
        assert chosen == {f"rdmap{beside - i}s0-rdm" for i in range(1, 5)}, rank


@pytest.mark.parametrize(
    ("offers", "options", "message"),
    [
        (TCP, {"provider": "efa"}, "provider: no provider 'efa'; there is tcp;ofi_rxm"),
        (TCP, {"interface": "=eth"}, "interface: '=eth' is not one of lo, eth0, eth1"),
        (EFA, {"signal": "ordered"}, "signal: no such provider keeps the order"),
    ],
)
def test_what_is_not_there_is_named(offers: list[FabricOffer], options: dict[str, str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        choose_offers(offers, FabricOptions(**options))[0]


def test_streams_alone_bring_the_bytes_of_a_write_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert [known.in_order for known in (TCP[3], offer("tcp", "eth0"), UDP, SHM, EFA[0])] == [True, True, *3 * [False]]
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not TCP[3].in_order


@pytest.mark.parametrize("offers", [[], [SHM], TCP[:2]])
def test_offers_that_reach_no_other_host_are_no_fabric(offers: list[FabricOffer]) -> None:
    with pytest.raises(RuntimeUnavailableError, match="no provider of libfabric reaches other hosts"):
        choose_offers(offers, FabricOptions())[0]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("provider", "tcp", "tcp"),
        ("interface", "^lo", "^lo"),
        ("interfaces", "eth0,eth1", ("eth0", "eth1")),
        ("depth", "16", 16),
        ("signal", "delivered", "delivered"),
        ("gpu_writes", "ordered", "ordered"),
        ("staging_bytes", "8192", 8192),
        ("staging_chunk", "64", 64),
        ("streams", "3", 3),
    ],
)
def test_the_environment_gives_what_arguments_do_not(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object
) -> None:
    monkeypatch.setenv("PROXYCCL_FABRIC", f"{name}={text}")
    assert getattr(FabricOptions.from_environment(), name) == value
    other: dict[str, Any] = {
        "provider": "net",
        "interface": "eth0",
        "interfaces": ("a", "b"),
        "depth": 3,
        "signal": "ordered",
    }
    other |= {"gpu_writes": "auto", "staging_bytes": 4096, "staging_chunk": 128, "streams": 2}
    assert getattr(FabricOptions.from_environment(**{name: other[name]}), name) == other[name]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("provider", ""),
        ("provider", 3),
        ("interface", "="),
        ("interface", "eth 0"),
        ("interface", "eth0,^eth1"),
        ("interfaces", "eth0"),
        ("interfaces", {"eth0", "eth1"}),
        ("interfaces", ("eth0", "^eth1")),
        ("interfaces", ("eth0", "eth0")),
        ("interfaces", [f"eth{i}" for i in range(33)]),
        ("depth", 1),
        ("depth", "many"),
        ("depth", True),
        ("signal", ""),
        ("gpu_writes", "no"),
        ("streams", 0),
        ("streams", MOST_WIRES + 1),
    ],
)
def test_options_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"^{name}: must be"):
        FabricOptions(**{name: value})
    with pytest.raises(ArgumentError, match=r"^depht: unknown option"):
        FabricOptions.from_environment(depht=3)


def test_spaces_around_names_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_FABRIC", "interface=^=eth0, eth1")
    assert (
        FabricOptions.from_environment()
        == FabricOptions(interface="^=eth0, eth1")
        == FabricOptions(interface="^=eth0,eth1")
    )
    assert FabricOptions(interfaces="eth0, eth1") == FabricOptions(interfaces=["eth0", "eth1"])
