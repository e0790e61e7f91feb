"""Moves KV blocks from a prefill process to a decode process. Each process is an agent without a rank, and may start at
any time.

python examples/kv_blocks.py

The prefill process fills pages of its cache for each request and tells the decode process which pages hold it. The
decode process reads these pages into free pages of its own cache, layer by layer. A message then tells the prefill
process to free its pages. This example sends the agents' metadata through a pipe; any other transport would do.

Some requests are canceled: the prefill process then reuses their pages, perhaps while the decode process reads them. So
it grants the pages to the decode process, and revokes the grant before it reuses them.
"""

from __future__ import annotations

import json
import multiprocessing
from multiprocessing.connection import Connection

import numpy as np

from proxyccl.transfer import Agent, StaleReadError

LAYERS, PAGES, PAGE_BYTES = 4, 64, 16 << 10
REQUESTS = 8


def rows_of(address: int, pages: list[int]) -> np.ndarray:
    """Returns rows of (address, bytes) of pages, in all layers."""
    layers = np.arange(LAYERS, dtype=np.uint64)[:, None] * np.uint64(PAGES)
    places = (layers + np.array(pages, np.uint64)) * np.uint64(PAGE_BYTES)
    addresses = np.uint64(address) + places.ravel()
    return np.column_stack((addresses, np.full_like(addresses, PAGE_BYTES)))


def expected(request: int, layer: int, page: int) -> int:
    return (request * 31 + layer * 7 + page) % 251


def prefill(pipe: Connection) -> None:
    cache = np.zeros((LAYERS, PAGES, PAGE_BYTES), np.uint8)
    free = list(range(PAGES))
    used: dict[int, list[int]] = {}
    with Agent("prefill") as agent:
        region = agent.register(cache, label="cache")
        pipe.send_bytes(agent.metadata())
        decode = agent.add(pipe.recv_bytes())
        for request in range(REQUESTS):
            pages = used[request] = [free.pop() for _ in range(request % 5 + 1)]
            for layer in range(LAYERS):
                for position, page in enumerate(pages):
                    cache[layer, page] = expected(request, layer, position)
            grant = agent.grant(rows_of(region.address, pages))
            work = {"request": request, "pages": pages, "grant": grant.encoded.decode()}
            agent.notify(decode, json.dumps(work).encode())
            if request % 4 == 3:  # the request is canceled
                grant.revoke()
                cache[:, pages] = 255
        while used:
            agent.wait_for_message()
            for _, message in agent.messages():
                free += used.pop(int(message))
    assert len(free) == PAGES


def decode(pipe: Connection) -> None:
    cache = np.zeros((LAYERS, PAGES, PAGE_BYTES), np.uint8)
    free = list(range(PAGES))
    done = canceled = 0
    with Agent("decode") as agent:
        ours = agent.register(cache)
        peer = agent.add(pipe.recv_bytes())
        pipe.send_bytes(agent.metadata())
        theirs = next(region for region in agent.regions_of(peer) if region.label == "cache")
        print("path:", agent.connect(peer).name)
        while done + canceled < REQUESTS:
            agent.wait_for_message()
            for _, message in agent.messages():
                work = json.loads(message)
                pages = [free.pop() for _ in work["pages"]]
                blocks = np.insert(
                    rows_of(theirs.address, work["pages"]), 0, rows_of(ours.address, pages)[:, 0], axis=1
                )
                done_with = str(work["request"]).encode()
                try:
                    agent.read(peer, blocks, grant=work["grant"].encode()).wait()
                except StaleReadError:  # the pages hold data of another request
                    free += pages
                    canceled += 1
                    continue
                finally:
                    agent.notify(peer, done_with)
                for index in range(LAYERS):
                    for position, page in enumerate(pages):
                        assert (cache[index, page] == expected(work["request"], index, position)).all()
                done += 1
    print(f"OK: the pages of {done} requests have arrived, on {LAYERS} layers each; {canceled} were canceled")


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
