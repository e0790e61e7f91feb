"""Runs an agent with BYTES bytes of device memory and 3 MB of host memory. Prints the agent's metadata in hexadecimal.
On each message, checks that byte n of the device memory is n (modulo 256), doubles all bytes, and prints the message.

python device_agent.py BYTES allocated|torch
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from proxyccl.transfer import Agent
from support.devices import device_count, rank_runtime

OFFSET = 4096  # offset of the memory in its allocation

nbytes = int(sys.argv[1])
runtime = rank_runtime(device_count() - 1)
agent = Agent("other", listen=["127.0.0.1"])
memory: Any
if sys.argv[2] == "torch":
    import torch

    memory = torch.zeros(OFFSET + nbytes, dtype=torch.uint8, device=f"cuda:{runtime.device}")
    torch.cuda.synchronize(runtime.device)
    ptr = memory.data_ptr() + OFFSET
    agent.register(memory[OFFSET:])
else:
    memory = runtime.allocate(OFFSET + nbytes)
    ptr = memory.ptr + OFFSET
    agent.register((ptr, nbytes), kind="vram", device=runtime.device)
agent.register((ptr - OFFSET, 4000), kind="vram", device=runtime.device)
agent.register(np.zeros(3_000_000, np.uint8))
print(agent.metadata().hex(), flush=True)
for _ in range(2):
    agent.wait_for_message(60)
    ((_, message),) = agent.messages()
    values = np.empty(nbytes, np.uint8)
    runtime.copy(values.ctypes.data, ptr, nbytes)
    assert (values == np.arange(nbytes, dtype=np.uint64).astype(np.uint8)).all()
    values *= 2
    runtime.copy(ptr, values.ctypes.data, nbytes)
    print(message.decode(), flush=True)
