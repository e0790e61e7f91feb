"""Two ranks exchange short transfers, and reduce short tensors, with other data in each call. Each rank prints OK.

Several jobs that run this program on the same GPUs interrupt each other's kernels at any instruction.
"""

from __future__ import annotations

import sys

import torch

from proxyccl import Communicator

CALLS, WORDS = 300, (*range(1, 200, 7), 3000, 40_000, 300_000)

with Communicator(timeout=60) as comm, torch.cuda.device(comm.runtime.device):
    device = torch.device("cuda", comm.runtime.device)

    def data(call: int, sender: int, words: int) -> torch.Tensor:
        return torch.arange(words, device=device, dtype=torch.int32) * 7919 + (call * 104_729 + sender * 31 + words)

    wrong = torch.zeros(2, dtype=torch.int64, device=device)
    for call in range(CALLS):
        received = [torch.zeros(words, dtype=torch.int32, device=device) for words in WORDS]
        with comm.transfers() as transfers:
            for words, out in zip(WORDS, received, strict=True):
                transfers.send(data(call, comm.rank, words), 1 - comm.rank)
                transfers.recv(out, 1 - comm.rank)
        for words, out in zip(WORDS, received, strict=True):
            wrong[0] += (out != data(call, 1 - comm.rank, words)).sum()
        for words in (3000, 40_000):
            total = comm.all_reduce(data(call, comm.rank, words))
            wrong[1] += (total != data(call, 0, words) + data(call, 1, words)).sum()
    assert wrong.tolist() == [0, 0], f"wrong elements of transfers and of sums: {wrong.tolist()}"
sys.stdout.write("OK\n")
