"""An agent with memory of a device, of so many bytes, and a page of the host's. It prints its metadata in hexadecimal
digits. When a message comes, it expects byte n to be n, doubles all, and prints the message.
"""

from __future__ import annotations

import sys

import numpy as np

from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.transfer import Agent
from support.devices import device_count, rank_runtime

OFFSET = 4096  # within its allocation

nbytes = int(sys.argv[1])
runtime = rank_runtime(device_count() - 1)
array = Array(runtime, runtime.allocate(OFFSET + nbytes), (OFFSET + nbytes,), as_dtype("uint8"))
agent = Agent("other", listen=())
agent.register((array.ptr + OFFSET, nbytes), kind="vram", device=runtime.device)
agent.register(np.zeros(4096, np.uint8))
print(agent.metadata().hex(), flush=True)
for _ in range(2):
    agent.wait_for_message(60)
    ((_, message),) = agent.messages()
    values = array.numpy()
    assert (values[OFFSET:] == np.arange(nbytes, dtype=np.uint64).astype(np.uint8)).all()
    array.upload(values * 2)
    print(message.decode(), flush=True)
