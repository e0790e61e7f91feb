"""Writes to a libfabric endpoint with its address but without its memory key, and prints the data that arrived."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np

from proxyccl import FabricOptions
from proxyccl.proxy.fabric.endpoint import FabricEndpoint
from proxyccl.proxy.fabric.library import choose_offers, fabric_offers, load
from support.bare_loops import fabric_serve, fabric_write

BYTES = 4096
SECONDS = 20


def main() -> None:
    options = FabricOptions(provider="tcp")
    offer = choose_offers(fabric_offers(), options)[0]
    own, strangers = (FabricEndpoint(offer, options) for _ in range(2))
    memory, sent = np.zeros(BYTES, np.uint8), np.ones(BYTES, np.uint8)
    ours, theirs = own.register(memory.ctypes.data, BYTES), strangers.register(sent.ctypes.data, BYTES)
    to = strangers.connect(own.address, 0)
    served = threading.Event()

    def serve() -> None:
        queue = own.connect(strangers.address, 0).queue
        while not served.is_set():
            fabric_serve(queue, 0.05)

    serving = threading.Thread(target=serve)
    serving.start()
    for key in (ours.key, ours.key ^ 1):
        memory[:] = 0
        taken = fabric_write(
            endpoint=to.endpoint,
            queue=to.queue,
            peer=to.peer,
            local=theirs.ptr,
            remote=ours.address,
            key=key,
            depth=to.depth,
            complete_every=1,
            timeout_ns=SECONDS * 10**9,
            bytes=BYTES,
            count=1,
        )
        print(f"{'written' if taken >= 0 else load().words(-taken)}: {int(memory.sum())} bytes", flush=True)
    served.set()
    serving.join()


if __name__ == "__main__":
    main()
