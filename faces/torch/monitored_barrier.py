"""A barrier over a store that says which ranks are missing: it needs no communicator, so it works when one is stuck."""

from __future__ import annotations

import time
from typing import Any

_PAUSE_SECONDS = 0.002


def monitored_barrier(
    store: Any, number: int, rank: int, world_size: int, seconds: float, *, wait_all_ranks: bool
) -> None:
    """Waits until all ranks have arrived: rank 0 waits for the others and releases them.

    torch's gloo backend does the same; programs search for its messages.

    Args:
        store: a torch.distributed store.
        number: of the barrier; the same on all ranks, and a new one for each.
        rank: this rank.
        world_size: number of ranks.
        seconds: the bound of the wait.
        wait_all_ranks: whether rank 0 waits for the time-out to name all missing ranks, and not only the first.

    Raises:
        RuntimeError: a rank did not arrive in time.
    """
    deadline = time.monotonic() + seconds
    milliseconds = round(1000 * seconds)
    if rank:
        store.set(f"{number}/{rank}", b"")
        if not _wait(store, f"{number}/go", deadline):
            raise RuntimeError(
                f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
                f"for send/recv from rank 0 within {milliseconds} ms. Please check rank 0 logs for faulty rank."
            )
        return
    if seconds <= 0:
        raise RuntimeError(f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {milliseconds} ms")
    missing = []
    for peer in range(1, world_size):
        if not _wait(store, f"{number}/{peer}", deadline):
            missing.append(peer)
            if not wait_all_ranks:
                raise RuntimeError(f"[Rank 0]: Rank {peer} failed to pass monitoredBarrier in {milliseconds} ms")
    if missing:
        ranks = ", ".join(map(str, missing))
        raise RuntimeError(f"[Rank 0]: Ranks {ranks} failed to pass monitoredBarrier in {milliseconds} ms")
    store.set(f"{number}/go", b"")


def _wait(store: Any, key: str, deadline: float) -> bool:
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_SECONDS)
    return True
