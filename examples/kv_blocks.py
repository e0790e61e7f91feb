"""Moves KV blocks from a prefill process to a decode process. Each process is an agent without a rank, and may start at
any time.

python examples/kv_blocks.py

The prefill process fills pages of its cache for each request and tells the decode process which pages hold it. The
decode process reads these pages into free pages of its own cache, layer by layer. A message of the transfer tells the
prefill process to free its pages. This example sends the agents' metadata through a pipe; any other transport would do.
"""

from __future__ import annotations

import json
import multiprocessing
from multiprocessing.connection import Connection

import numpy as np

from proxyccl.transfer import Agent

LAYERS, PAGES, PAGE_BYTES = 4, 64, 16 << 10
REQUESTS = 8


def expected(request: int, layer: int, page: int) -> int:
    return (request * 31 + layer * 7 + page) % 251


def prefill(pipe: Connection) -> None:
    cache = np.zeros((LAYERS, PAGES, PAGE_BYTES), np.uint8)
    free = list(range(PAGES))
    used: dict[int, list[int]] = {}
    with Agent("prefill") as agent:
        agent.register(cache, label="cache")
        pipe.send_bytes(agent.metadata())
        decode = agent.add(pipe.recv_bytes())
        for request in range(REQUESTS):
            pages = used[request] = [free.pop() for _ in range(request % 5 + 1)]
            for layer in range(LAYERS):
                for position, page in enumerate(pages):
                    cache[layer, page] = expected(request, layer, position)
            agent.notify(decode, json.dumps({"request": request, "pages": pages}).encode())
        while used:
            agent.wait_for_message()
            for _, message in agent.messages():
                free += used.pop(int(message))
    assert len(free) == PAGES


def decode(pipe: Connection) -> None:
    cache = np.zeros((LAYERS, PAGES, PAGE_BYTES), np.uint8)
    free = list(range(PAGES))
    done = 0
    with Agent("decode") as agent:
        ours = agent.register(cache)
        peer = agent.add(pipe.recv_bytes())
        pipe.send_bytes(agent.metadata())
        theirs = next(region for region in agent.regions_of(peer) if region.label == "cache")
        print("path:", agent.connect(peer).name)
        while done < REQUESTS:
            agent.wait_for_message()
            for _, message in agent.messages():
                work = json.loads(message)
                pages = [free.pop() for _ in work["pages"]]
                layer = np.arange(LAYERS, dtype=np.uint64)[:, None] * np.uint64(PAGES)
                blocks = np.empty((LAYERS * len(pages), 3), np.uint64)
                for column, region, numbers in ((0, ours, pages), (1, theirs, work["pages"])):
                    places = (layer + np.array(numbers, np.uint64)) * np.uint64(PAGE_BYTES)
                    blocks[:, column] = np.uint64(region.address) + places.ravel()
                blocks[:, 2] = PAGE_BYTES
                agent.read(peer, blocks, message=str(work["request"]).encode()).wait()
                for index in range(LAYERS):
                    for position, page in enumerate(pages):
                        assert (cache[index, page] == expected(work["request"], index, position)).all()
                done += 1
    print(f"OK: the pages of {done} requests have arrived, on {LAYERS} layers each")


def main() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(theirs,))
    process.start()
    theirs.close()
    decode(ours)
    process.join()
    assert process.exitcode == 0


if __name__ == "__main__":
    main()
