"""Sends tokens to the ranks of their experts with EPAll2AllLayer, and the experts' results back.

    mpiexec -n 4 python -m mpi4py examples/expert_parallel.py              # numpy arrays, on the CPU
    mpiexec -n 4 python -m mpi4py examples/expert_parallel.py --torch      # torch tensors, on GPUs if there are any
    torchrun --nproc-per-node 8 examples/expert_parallel.py --torch

Every expert sets negative values to zero. So each token must come back as topk times the result of one expert, which
every rank checks.
"""

from __future__ import annotations

import argparse
import os
import socket
from typing import Any

import numpy as np

from proxyccl import Communicator, EPAll2AllLayer


def your_expert_ffn(rows: Any) -> Any:
    """Sets negative values to zero, as a stand-in for this rank's experts."""
    return rows.clip(0)


def with_torch(options: argparse.Namespace) -> str:
    import torch
    import torch.distributed as dist

    # Initialize distributed runtime
    rank, world_size, local_world_size = initialize_distributed()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    # The expert-parallel group is all ranks.
    ep_group = dist.group.WORLD

    # Create layer
    ep_layer = EPAll2AllLayer(
        ep_group=ep_group,
        max_tokens=options.max_tokens,
        hidden=options.hidden,
        topk=options.topk,
        rank=rank,
        num_tot_experts=options.experts_per_rank * world_size,
        local_world_size=local_world_size,
        world_size=world_size,
        dtype=torch.bfloat16,
        weight_dtype=torch.float32,
        num_sm=20,
        use_aot=options.use_aot,
    )

    # Simulate input
    shape, experts = (options.tokens, options.topk), options.experts_per_rank * world_size
    tokens = torch.randn(options.tokens, options.hidden, dtype=torch.bfloat16, device=device)
    expert_ids = torch.randint(0, experts, shape, dtype=torch.int32, device=device)
    routing_weights = torch.softmax(torch.randn(shape, device=device), dim=-1).float()

    # Dispatch
    recv_tokens, recv_weights, layout_desc = ep_layer.dispatch(
        input=tokens,
        exp_indices=expert_ids,
        weight=routing_weights,
    )

    # Expert FFN computation (example)
    # recv_tokens: [recv_count, hidden]
    expert_output = your_expert_ffn(recv_tokens)

    # Combine
    combined = ep_layer.combine(expert_output, layout_desc)
    # combined: [tokens, hidden] - back to original token positions

    assert recv_weights.shape == recv_tokens.shape[:1]
    assert torch.equal(combined, (options.topk * your_expert_ffn(tokens.float())).bfloat16())

    # Cleanup
    ep_layer.finalize()
    dist.destroy_process_group()
    return report(rank, world_size, len(recv_tokens), f"torch on {device}")


def initialize_distributed() -> tuple[int, int, int]:
    """Initialises torch.distributed for the processes that torchrun or mpiexec started.

    Returns:
        This process's rank, the number of processes, and the number of processes on this machine.
    """
    import torch
    import torch.distributed as dist

    if "MASTER_ADDR" not in os.environ:  # torchrun sets MASTER_ADDR and the variables below
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        node = world.Split_type(MPI.COMM_TYPE_SHARED)
        with socket.socket() as free:
            free.bind(("", 0))
            meeting = "localhost" if node.size == world.size else socket.gethostname(), str(free.getsockname()[1])
        address, port = world.bcast(meeting)
        os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size), "LOCAL_RANK": str(node.rank)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(node.size), "MASTER_ADDR": address, "MASTER_PORT": port}
        node.Free()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo")  # this process group moves no tokens; it only connects the layer's ranks
    return dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])


def with_numpy(options: argparse.Namespace) -> str:
    """Runs the example with numpy arrays, which need the host runtime."""
    with Communicator(runtime="host") as ep_group:
        experts = options.experts_per_rank * ep_group.world_size
        ep_layer = EPAll2AllLayer(
            ep_group=ep_group,
            max_tokens=options.max_tokens,
            hidden=options.hidden,
            topk=options.topk,
            rank=ep_group.rank,
            num_tot_experts=experts,
            local_world_size=ep_group.local_world_size,
            world_size=ep_group.world_size,
            dtype=np.float32,
            use_aot=options.use_aot,
        )
        rng = np.random.default_rng(ep_group.rank)
        tokens = rng.standard_normal((options.tokens, options.hidden), np.float32)
        expert_ids = rng.integers(0, experts, (options.tokens, options.topk), np.int32)
        scores = np.exp(rng.standard_normal(expert_ids.shape, np.float32))
        routing_weights = scores / scores.sum(axis=1, keepdims=True)

        recv_tokens, recv_weights, layout_desc = ep_layer.dispatch(tokens, expert_ids, routing_weights)
        expert_output = your_expert_ffn(recv_tokens)
        combined = ep_layer.combine(expert_output, layout_desc)
        weighted = ep_layer.combine(expert_output, layout_desc, weights=recv_weights)

        assert np.allclose(combined, options.topk * your_expert_ffn(tokens), rtol=1e-6)
        assert np.allclose(weighted, your_expert_ffn(tokens), rtol=1e-5)  # the weights of each token add up to one
        ep_layer.finalize()
        return report(ep_group.rank, ep_group.world_size, len(recv_tokens), "numpy")


def report(rank: int, world_size: int, rows: int, arrays: str) -> str:
    return f"OK: {world_size} ranks, {arrays}; rank {rank} received {rows} rows for its experts"


def main() -> None:
    parser = argparse.ArgumentParser(description="Sends tokens to their experts and back with EPAll2AllLayer.")
    parser.add_argument("--torch", action="store_true", help="use torch's tensors, on GPUs if there are any")
    parser.add_argument("--use-aot", action="store_true", help="use only kernels that `proxyccl compile` has compiled")
    sizes = {"max-tokens": 256, "tokens": 128, "hidden": 7168, "topk": 8, "experts-per-rank": 8}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    options = parser.parse_args()
    line = (with_torch if options.torch else with_numpy)(options)
    if "rank 0 " in line:
        print(line)


if __name__ == "__main__":
    main()
