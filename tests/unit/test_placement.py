"""Which network adapter a rank uses, on recorded machines (support/machines)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from proxyccl import ArgumentError, RdmaOptions, rdma_devices
from proxyccl.proxy.placement import Place
from proxyccl.proxy.verbs.devices import choose_devices
from proxyccl.tools import info
from support.sysfs import expand, put

NEAREST = {
    "dgx_h100": ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"],
    "mi300x": [f"bnxt_re{i}" for i in range(8)],
    "one_adapter": ["mlx5_0", "mlx5_0"],
    "mixed": ["mlx5_0", "mlx5_0", "mlx5_3", "mlx5_3"],
}
"""For each machine, the adapter of each GPU's rank. On the mixed machine all ranks use InfiniBand."""


@pytest.mark.parametrize("machine", NEAREST)
def test_each_rank_uses_the_adapter_nearest_to_its_gpu(machine: str, tmp_path: Path) -> None:
    gpus = expand(machine, tmp_path)
    devices = rdma_devices(tmp_path)
    chosen = [
        choose_devices(devices, RdmaOptions(), Place(gpu), local_rank=rank, root=tmp_path)[0].device.name
        for rank, gpu in enumerate(gpus.values())
    ]
    assert chosen == NEAREST[machine]


@pytest.mark.parametrize("order", [sorted, list])
@pytest.mark.parametrize("machine", ["dgx_h100", "mi300x"])
def test_of_named_adapters_each_rank_uses_the_two_nearest_to_its_gpu(
    machine: str, order: Callable[[list[str]], list[str]], tmp_path: Path
) -> None:
    gpus, names = expand(machine, tmp_path), order(NEAREST[machine])
    options, devices = RdmaOptions(devices=names), rdma_devices(tmp_path)
    chosen = [
        [each.device.name for each in choose_devices(devices, options, Place(gpu), local_rank=rank, root=tmp_path)]
        for rank, gpu in enumerate(gpus.values())
    ]
    for rank, pair in enumerate(chosen):
        assert NEAREST[machine][rank] in pair
        assert pair == sorted(pair, key=names.index), "the order of the names is kept"
        assert {NEAREST[machine].index(name) // 4 for name in pair} == {rank // 4}, "both are on the GPU's NUMA node"
    assert sorted(itertools.chain(*chosen)) == sorted(2 * names), "each adapter serves two ranks"
    four = [
        sorted(
            each.device.name
            for each in choose_devices(
                devices, RdmaOptions(devices=names, rails=4), Place(gpu), local_rank=rank, root=tmp_path
            )
        )
        for rank, gpu in enumerate(gpus.values())
    ]
    assert four == [sorted(NEAREST[machine][rank // 4 * 4 :][:4]) for rank in range(8)], "those of the NUMA node"
    two = RdmaOptions(devices=[NEAREST[machine][-1], NEAREST[machine][0]])
    chosen = choose_devices(devices, two, Place(gpus["gpu0"]), root=tmp_path)
    assert tuple(each.device.name for each in chosen) == two.devices


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["mlx5_0", "mlx5_99"], "devices: no RDMA device 'mlx5_99'; there is mlx5_0, "),
        (["mlx5_2", "mlx5_99"], "devices: no RDMA device 'mlx5_99'; there is mlx5_0, "),
        (["mlx5_2", "mlx5_0"], r"devices: 'mlx5_2' has no active port; there is mlx5_2 port 1 \(down"),
    ],
)
def test_adapters_that_can_not_be_used_are_refused_by_the_option_that_names_them(
    names: list[str], message: str, tmp_path: Path
) -> None:
    expand("dgx_h100", tmp_path)
    put(tmp_path / "class/infiniband/mlx5_0/ports/1", {"state": "1: DOWN"})
    with pytest.raises(ArgumentError, match=message):
        choose_devices(rdma_devices(tmp_path), RdmaOptions(devices=names), root=tmp_path)


def test_a_named_adapter_whose_port_is_down_is_left_out_with_a_warning(tmp_path: Path) -> None:
    expand("dgx_h100", tmp_path)
    told: list[str] = []
    names = RdmaOptions(devices=["mlx5_2", "mlx5_3", "mlx5_0"], rails=3)
    chosen = choose_devices(rdma_devices(tmp_path), names, root=tmp_path, warn=told.append)
    assert [each.device.name for each in chosen] == ["mlx5_3", "mlx5_0"]
    (text,) = told
    assert "mlx5_2 port 1 (down" in text
    assert "mlx5_0" not in text


def test_a_named_adapter_of_the_other_kind_is_used(tmp_path: Path) -> None:
    gpus = expand("mixed", tmp_path)
    options = RdmaOptions(device="mlx5_1")
    assert (
        choose_devices(rdma_devices(tmp_path), options, Place(gpus["gpu3"]), root=tmp_path)[0].device.name == "mlx5_1"
    )


def test_a_gid_index_that_only_the_other_kind_has_chooses_that_kind(tmp_path: Path) -> None:
    gpus = expand("mixed", tmp_path)
    choice = choose_devices(rdma_devices(tmp_path), RdmaOptions(gid_index=3), Place(gpus["gpu3"]), root=tmp_path)[0]
    assert (choice.device.name, choice.gid_index) == ("mlx5_2", 3)


def test_the_binding_of_a_process_places_a_gpu_whose_numa_node_is_unknown(tmp_path: Path) -> None:
    gpus = expand("dgx_h100", tmp_path)
    put(tmp_path / "bus/pci/devices" / gpus["gpu0"], {"numa_node": "-1"})

    def chosen(gpu: str, node: int) -> tuple[str, int | None]:
        device = choose_devices(rdma_devices(tmp_path), RdmaOptions(), Place(gpu, node), root=tmp_path)[0].device
        return device.name, device.numa_node

    assert chosen(gpus["gpu0"], 1) == (NEAREST["dgx_h100"][0], 0), "the PCI path counts more than the binding"
    put(tmp_path / "class/infiniband/mlx5_0/ports/1", {"state": "1: DOWN"})
    for gpu in (gpus["gpu0"], "0000:99:00.0"):
        assert [chosen(gpu, node)[1] for node in range(2)] == [0, 1]


def test_without_its_nearest_adapter_a_rank_uses_another_of_its_numa_node(tmp_path: Path) -> None:
    gpus = expand("dgx_h100", tmp_path)
    put(tmp_path / "class/infiniband/mlx5_9/ports/1", {"state": "1: DOWN"})
    devices = rdma_devices(tmp_path)
    others = [
        choose_devices(devices, RdmaOptions(), Place(gpus["gpu5"]), local_rank=i, root=tmp_path)[0] for i in range(3)
    ]
    assert [choice.device.name for choice in others] == ["mlx5_10", "mlx5_11", "mlx5_6"]


def test_ranks_on_a_numa_node_without_a_gpu_share_its_adapters(tmp_path: Path) -> None:
    expand("mi300x", tmp_path)
    devices = rdma_devices(tmp_path)
    chosen = [
        choose_devices(devices, RdmaOptions(), Place(node=1), local_rank=i, root=tmp_path)[0].device.name
        for i in range(5)
    ]
    assert chosen == ["bnxt_re4", "bnxt_re5", "bnxt_re6", "bnxt_re7", "bnxt_re4"]


def test_a_gpu_that_sysfs_does_not_know_is_near_to_no_adapter(tmp_path: Path) -> None:
    expand("one_adapter", tmp_path)
    choice = choose_devices(rdma_devices(tmp_path), RdmaOptions(), Place("0000:99:00.0"), root=tmp_path)[0]
    assert choice.device.name == "mlx5_0"


@pytest.mark.parametrize(
    ("machine", "gpu", "expected"),
    [
        (
            "mixed",
            1,
            [
                "same NUMA node: mlx5_0 (InfiniBand, active, 200 Gbit/s, used by verbs); "
                "mlx5_1 (RoCE, active, 100 Gbit/s)",
                "other NUMA node: mlx5_2 (RoCE, active, 100 Gbit/s); mlx5_3 (InfiniBand, active, 200 Gbit/s); "
                "mlx5_bond_0 (RoCE, active, 50 Gbit/s)",
            ],
        ),
        (
            "dgx_h100",
            6,
            [
                "same PCIe switch: mlx5_10 (InfiniBand, active, 400 Gbit/s, used by verbs)",
                "same NUMA node: mlx5_6, mlx5_9, mlx5_11 (InfiniBand, active, 400 Gbit/s); "
                "mlx5_7 (RoCE, active, 200 Gbit/s); mlx5_8 (RoCE, down, 200 Gbit/s)",
                "other NUMA node: mlx5_0, mlx5_3, mlx5_4, mlx5_5 (InfiniBand, active, 400 Gbit/s); "
                "mlx5_1 (RoCE, active, 200 Gbit/s); mlx5_2 (RoCE, down, 200 Gbit/s)",
            ],
        ),
        (
            "one_adapter",
            1,
            [
                "other NUMA node: mlx5_0 (RoCE, active, 100 Gbit/s, used by verbs); mlx5_1 (RoCE, down, 40 Gbit/s)",
            ],
        ),
    ],
)
def test_info_lists_the_adapters_of_each_gpu_by_nearness(
    machine: str, gpu: int, expected: list[str], tmp_path: Path
) -> None:
    places = {name: Place(address) for name, address in expand(machine, tmp_path).items()}
    findings = list(info.placement(places, [], tmp_path))
    assert [finding.detail for finding in findings if finding.name == f"gpu{gpu}"] == expected
    assert all(finding.available for finding in findings)


def test_info_says_which_adapters_can_not_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = expand("one_adapter", tmp_path)
    monkeypatch.setenv("PROXYCCL_RDMA", "device=mlx5_9")
    *_, choice = info.placement({"cuda:0": Place(gpus["gpu0"])}, [], tmp_path)
    assert (choice.name, choice.available) == ("choice", False)
    assert choice.detail.startswith("device: no RDMA device 'mlx5_9'; there is mlx5_0, mlx5_1")
    monkeypatch.delenv("PROXYCCL_RDMA")
    put(tmp_path / "class/infiniband/mlx5_0/ports/1", {"state": "1: DOWN"})
    put(tmp_path / "class/infiniband/mlx5_0/ports/2", {"state": "2: INIT", "link_layer": "InfiniBand"})
    (finding,) = info.placement({"NUMA node 0": Place(node=0)}, [], tmp_path)
    down = "mlx5_0 port 1 (RoCE, down, 100 Gbit/s); mlx5_0 port 2 (InfiniBand, init, 0 Gbit/s)"
    assert (finding.detail, finding.available) == (f"same NUMA node: {down}; mlx5_1 (RoCE, down, 40 Gbit/s)", False)
