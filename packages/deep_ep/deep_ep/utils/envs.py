"""Sets up a program's process group and random seeds, and returns the speeds of the links between its ranks."""

from __future__ import annotations

import os
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from proxyccl.proxy.hosts import host_name

_known: dict[str, int] = {"local_seed": 0, "global_seed": 0}  # init_dist adds local_rank


def init_seed(global_seed: int) -> None:
    """Seeds torch and `random` with a seed that differs between ranks."""
    _known.update(global_seed=global_seed, local_seed=global_seed + dist.get_rank())
    torch.manual_seed(get_local_seed())
    random.seed(get_local_seed())


def get_local_seed() -> int:
    """Returns this rank's seed."""
    return _known["local_seed"]


def get_global_seed() -> int:
    """Returns the seed that was given to all ranks."""
    return _known["global_seed"]


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Prints a text on each rank, or on the first rank of each node, and waits until all ranks have printed it."""
    if "local_rank" not in _known:
        raise RuntimeError("call init_dist first")
    if not once_in_node or _known["local_rank"] == 0:
        print(s, flush=True)
    dist.barrier()


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, Any]:
    """Makes the process group of a program that spawned a process for each GPU of its node. Sets torch's default type
    to bfloat16, and torch's default device to the process's GPU. Without GPUs, ranks use gloo and CPU tensors.

    The environment variables MASTER_ADDR and MASTER_PORT are the address of the first node, WORLD_SIZE is the number of
    nodes, and RANK is the number of this node.

    Args:
        local_rank, num_local_ranks: this process's number on its node, and the number of processes on the node.
        seed: for `init_seed`.

    Returns:
        This rank, the number of ranks, and a group of all ranks.
    """
    _known["local_rank"] = local_rank
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "8361")
    nodes, node = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    on_gpu = torch.cuda.is_available()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"tcp://{address}:{port}",
        world_size=nodes * num_local_ranks,
        rank=node * num_local_ranks + local_rank,
        device_id=torch.device("cuda", local_rank) if on_gpu else None,
    )
    torch.set_default_dtype(torch.bfloat16)
    if on_gpu:
        torch.set_default_device("cuda")
        torch.cuda.set_device(local_rank)
    init_seed(seed)
    ranks = dist.get_world_size()
    return dist.get_rank(), ranks, dist.new_group(list(range(ranks)))


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """Returns the number of a group's nodes, and the number of the group's ranks on each node.
    PROXYCCL_LOCAL_WORLD_SIZE rehearses nodes.
    """
    ranks, rehearsed = group.size(), os.environ.get("PROXYCCL_LOCAL_WORLD_SIZE")
    if rehearsed:
        return ranks // int(rehearsed), int(rehearsed)
    hosts = [None] * ranks
    dist.all_gather_object(hosts, host_name(), group)
    nodes = len(set(hosts))
    return nodes, ranks // nodes


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Returns (number of nodes, number of ranks on each node). Without the hybrid mode, returns (1, number of
    ranks).
    """
    return get_physical_domain_size(group) if allow_hybrid_mode else (1, group.size())


def check_nvlink_connections(group: Any) -> None:
    """Does nothing, because ranks whose GPUs can't access each other's memory send rows by proxies."""


def check_torch_deterministic() -> None:
    """Does nothing, because in deterministic mode torch fills a new output on the stream that uses the output."""


def get_nvlink_gbs(factor: float = 0.9) -> float:
    """Returns the total speed of the first GPU's NVLinks, times a factor, in GB/s; 0 if the speed is not known."""
    try:
        links = subprocess.run(["nvidia-smi", "nvlink", "-s", "-i", "0"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return sum(map(float, re.findall(r"Link \d+: ([\d.]+) GB/s", links.stdout))) * factor


def get_rdma_gbs(nic_name: str | None = None) -> float:
    """Returns the speed of a NIC's first port in GB/s; 0 if the speed is not known. Without an argument, EP_NIC_NAME
    names the NIC.
    """
    rate = re.match(r"\d+", _of_nic(nic_name, "ports/1/rate"))
    return int(rate[0]) / 8 if rate else 0


def check_fast_rdma_atomic_support(nic_name: str | None = None) -> bool:
    """Returns whether a NIC is an MT4131, whose RDMA atomics DeepEP takes to be fast."""
    return _of_nic(nic_name, "hca_type") == "MT4131"


def _of_nic(name: str | None, attribute: str) -> str:
    nic = name or os.environ.get("EP_NIC_NAME", "mlx5_0")
    path = Path("/sys/class/infiniband") / nic / attribute
    return path.read_text().strip() if path.exists() else ""
