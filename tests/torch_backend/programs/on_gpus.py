"""Runs one case with 2 to 4 ranks, each on its own GPU or all on a shared one. Started by torchrun: ``on_gpus.py
CASE``.

Rank 0 prints OK.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from proxyccl.channels.calls._calls import RECEIVED_BY_PROXIES
from proxyccl.device.arrays.array import as_view
from proxyccl.torch import on_gpu  # importing the package registers the backend, as torch before 2.15 needs

COUNT = 1 << 22  # 16 MiB of float32


def streams(device: torch.device) -> None:
    """Checks that asynchronous calls run after the current stream's earlier work, that work after `wait` runs after
    the calls, and that the calls' stream has a higher priority than torch's default.
    """
    for _ in range(20):
        x = torch.zeros(COUNT, device=device)
        torch.cuda._sleep(1_000_000)
        x += 1
        dist.all_reduce(x, async_op=True).wait()
        assert (x == 2).all()
        x = torch.ones(COUNT, device=device)
        work = dist.all_reduce(x, async_op=True)
        del x, work
        # If the backend did not record that it uses x, this tensor would get x's memory.
        other = torch.full((COUNT,), -1.0, device=device)
        torch.cuda.synchronize()
        assert (other == -1).all()
    y = torch.ones(COUNT, device=device)
    future = dist.all_reduce(y, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    assert (future.wait() == 4).all()
    side = torch.cuda.Stream(device)
    for _ in range(2):  # the first call is made by Python, the second by C
        several = [torch.zeros(COUNT, device=device) for _ in range(2)]
        torch.cuda._sleep(100_000_000)
        for each in several:
            each.add_(1)
        joint = dist.all_reduce_coalesced(several, async_op=True)
        with torch.cuda.stream(side):
            joint.wait()
            total = several[0] + several[1]
        side.synchronize()
        assert (total == 4).all()
    own = on_gpu.take_stream(device)
    assert own.priority < torch.cuda.Stream().priority, "lower numbers come first"
    on_gpu.give_back_stream(device, own)


def again(device: torch.device) -> None:
    """Repeats calls with the same memory: on several streams, coalesced, after the memory was freed, and in a graph."""
    ranks, side = dist.get_world_size(), torch.cuda.Stream(device)
    x, y = torch.ones(COUNT, device=device), torch.ones(8, device=device)
    value = 1
    for turn in range(10):
        with torch.cuda.stream(side if turn % 2 else torch.cuda.current_stream(device)):
            side.wait_stream(torch.cuda.default_stream(device))
            x.fill_(1)
            dist.all_reduce(x)
            dist.all_reduce(x, async_op=True).wait()
            assert (x == ranks**2).all()
        value *= ranks
        with dist._coalescing_manager(async_ops=True) as joint:
            dist.all_reduce(x)
            dist.all_reduce(y)
        joint.wait()
        assert (x == ranks**3).all()
        assert (y == value).all()
    for size in (COUNT, COUNT // 2, COUNT):
        del x
        x = torch.ones(size, device=device)  # probably gets the previous tensor's address
        for _ in range(2):
            x.fill_(1)
            dist.all_reduce(x)
            assert (x == ranks).all()
    x.untyped_storage().resize_(0)
    refused = ""
    try:
        dist.all_reduce(x)
    except ValueError as error:
        refused = str(error)
    assert "its storage was freed" in refused
    x.untyped_storage().resize_(COUNT * x.element_size())
    x.fill_(1)
    dist.all_reduce(x)
    assert (x == ranks).all()


def capture(device: torch.device) -> None:
    """Captures synchronous and asynchronous calls in a graph, replays it, and checks the results."""
    x = torch.ones(4096, device=device)
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x)
        dist.barrier(device_ids=[device.index])  # Python makes the first barrier, and C the second
        dist.barrier(device_ids=[device.index])
        dist.all_reduce(x, async_op=True).wait()
    for value in (1.0, 3.0):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert (x == 4 * value).all()


def priority(device: torch.device) -> None:
    """Checks that the group's own stream, and kernels that a graph captures from it, have the highest priority."""
    from cuda.bindings import driver as cu

    x = torch.ones(4096, device=device)
    for _ in range(3):
        dist.all_reduce(x, async_op=True).wait()
    torch.cuda.synchronize()
    _, _, highest = cu.cuCtxGetStreamPriorityRange()  # torch's streams do not reach this priority
    assert dist.group.WORLD._get_backend(device).calls.gpus.of(device).own_stream.priority == highest
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        dist.all_reduce(x, async_op=True).wait()
        x.add_(1)
    raw = cu.CUgraph(graph.raw_cuda_graph())
    _, _, count = cu.cuGraphGetNodes(raw, 0)
    _, nodes, _ = cu.cuGraphGetNodes(raw, count)
    kernels = [node for node in nodes if cu.cuGraphNodeGetType(node)[1] == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL]
    attribute = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PRIORITY
    assert sorted(cu.cuGraphKernelNodeGetAttribute(node, attribute)[1].priority for node in kernels) == [highest, 0]


def call_until(call: Callable[[], None], is_ready: Callable[[], bool], device: torch.device) -> None:
    """Makes calls until `is_ready` is true on all ranks. Peers get access to a tensor's memory only after many calls in
    a short time.
    """
    ready, end = torch.zeros(1, device=device), time.monotonic() + 10
    while not ready.item():
        assert time.monotonic() < end, "not all ranks are ready"
        for _ in range(32):
            call()
        ready.fill_(is_ready())
        dist.all_reduce(ready, dist.ReduceOp.MIN)


def transfers(device: torch.device) -> None:
    """Checks sends and receives between two ranks, as single calls and in one batch."""
    rank = dist.get_rank()
    x, y = torch.full((COUNT,), float(rank), device=device), torch.empty(COUNT, device=device)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)])
    for work in works:
        work.wait()
    assert (y == 1 - rank).all()
    if rank == 0:
        dist.send(x + 7, 1)
    else:
        dist.recv(y, 0)
        assert (y == 7).all()


def ring(device: torch.device) -> None:
    """Lets every rank send to the next rank before it receives, in single calls and in a batch, in two groups."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for group in (None, dist.new_group(list(range(ranks)))):
        for batched in (False, True):
            x, y = torch.full((COUNT,), float(rank), device=device), torch.empty(COUNT, device=device)
            to, source = (rank + 1) % ranks, (rank - 1) % ranks
            if batched:
                ops = [dist.P2POp(dist.isend, x, to, group), dist.P2POp(dist.irecv, y, source, group)]
                works = dist.batch_isend_irecv(ops)
            else:
                works = [dist.isend(x, to, group), dist.irecv(y, source, group)]
            for work in works:
                work.wait()
            assert (y == source).all()


def memory(device: torch.device) -> None:
    """Checks that memory from the backend's allocator counts as registered, even if it is in a torch pool."""
    backend = dist.group.WORLD._get_backend(device)
    dist.all_reduce(torch.ones(1, device=device))
    assert backend.supports_tensor_alloc(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    backend.register_mem_pool(pool)
    with torch.cuda.use_mem_pool(pool):
        pooled = torch.empty(COUNT, device=device)
    symmetric = backend.endpoints.of_all(device).group.symmetric
    for x in (backend.allocate_tensor(COUNT, dtype=torch.float32, device=device), pooled):
        for _ in range(3):
            x.fill_(1)
            dist.all_reduce(x)
            assert (x == 2).all()
            torch.cuda.synchronize()
        assert symmetric.find(x.data_ptr(), x.nbytes) is not None


def lent(device: torch.device) -> None:
    """Checks that peers get access to torch's memory that calls use often. When torch frees this memory, the device
    must get the memory back, and the backend must not mistake new memory at the same address for the freed memory.

    A driver may unmap a peer's memory only after the process's running kernels. So no rank makes a call, whose kernel
    would wait for the other ranks, before all ranks have their memory back.
    """
    store, ranks = dist.distributed_c10d._get_default_store(), range(dist.get_world_size())
    for turn in range(3):
        nbytes, before = gather_into_lent(device, turn)
        start = time.monotonic()
        torch.cuda.empty_cache()
        while torch.cuda.mem_get_info()[0] < before + nbytes * 0.9:
            assert time.monotonic() < start + 10, "it stays occupied"
            time.sleep(0.001)
        print(f"rank {dist.get_rank()}: free again after {(time.monotonic() - start) * 1e3:.0f} ms", flush=True)
        store.set(f"free {turn} {dist.get_rank()}", "")
        store.wait([f"free {turn} {rank}" for rank in ranks], timedelta(seconds=20))


def gather_into_lent(device: torch.device, turn: int) -> tuple[int, int]:
    """Gathers into one tensor by kernels and by proxy, before and after peers get access to the tensor's memory.
    Returns the tensor's size and the device memory that is free while the tensor exists, in bytes.
    """
    ranks, count = dist.get_world_size(), 8 << 20  # 32 MiB per rank
    comm = dist.group.WORLD._get_backend(device).endpoints.of_all(device)
    reach_of = comm.group.launches.calls.reach_of
    x = torch.full((count,), float(dist.get_rank() + turn), device=device)
    out = torch.empty(ranks * count, device=device)
    view = as_view(out, "out")

    def gather(*, by_proxy: bool = False) -> None:
        out.fill_(-1)
        if by_proxy:
            comm.all_gather(x, out=out, algorithm="proxy")
        else:
            dist.all_gather_into_tensor(out, x)
        assert (out.view(ranks, count)[:, 9] == torch.arange(ranks, device=device) + turn).all()

    call_until(gather, lambda: bool(reach_of(view.ptr, view.nbytes) & 1), device)
    gather()
    gather(by_proxy=True)
    call_until(gather, lambda: bool(reach_of(view.ptr, view.nbytes) & RECEIVED_BY_PROXIES), device)
    gather(by_proxy=True)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return out.nbytes, torch.cuda.mem_get_info()[0]


def mixed(device: torch.device) -> None:
    """Checks CPU and GPU tensors in one group, and the barrier on the GPU."""
    assert dist.get_backend_config() == "cpu:gloo,cuda:proxyccl"
    for x in (torch.ones(8), torch.ones(8, device=device)):
        dist.all_reduce(x)
        assert (x == 2).all()
    dist.barrier(device_ids=[device.index])


def main() -> None:
    case = sys.argv[1]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:proxyccl" if case == "mixed" else "proxyccl", timeout=timedelta(seconds=60))
    cases = (streams, again, capture, priority, transfers, ring, memory, lent, mixed)
    {each.__name__: each for each in cases}[case](device)
    torch.cuda.synchronize()
    dist.barrier()
    is_first = dist.get_rank() == 0
    dist.destroy_process_group()
    if is_first:
        print("OK", flush=True)


if __name__ == "__main__":
    main()
