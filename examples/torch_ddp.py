"""Data-parallel training with PyTorch's DDP over ProxyCCL: torchrun --nproc-per-node 4 examples/torch_ddp.py

The example trains on GPUs if there is one for each rank, otherwise on the CPU, and checks that all ranks end with the
same weights.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import proxyccl.torch  # noqa: F401  torch 2.15 and later find the backend without this line


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("proxyccl")

    torch.manual_seed(rank)  # ranks begin with different weights, which DDP replaces by rank 0's
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=1e-2)
    for _ in range(100):
        x = torch.randn(64, 16, device=device)
        loss = nn.functional.mse_loss(parallel(x), x.sin().sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()  # gradients are reduced while the backward pass runs
        optimizer.step()

    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyones = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, weights)
    assert all(torch.equal(weights, others) for others in everyones)
    dist.all_reduce(loss.detach(), dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"OK: {dist.get_world_size()} ranks on {device.type} have the same weights, loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
