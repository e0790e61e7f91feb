"""C loops that only drain or fill a ring. Benchmarks compare the engine with them; tests push with them."""

from __future__ import annotations

from proxyccl.proxy.ring import RingMemory
from proxyccl.tools._ring_loops import lib


def produce(ring: RingMemory, first: int, words: tuple[int, int], count: int, timeout: float) -> int:
    """Pushes copies of one trigger from this thread, and waits for room. Nobody else may push meanwhile.

    Args:
        ring: the ring to push to.
        first: ticket of the first copy.
        words: the trigger's words (`Trigger.encode`).
        count: number of copies.
        timeout: in seconds, for all of them.

    Returns:
        The number of copies that found room.
    """
    return int(
        lib.proxyccl_bare_produce(
            ring.slots_host, ring.tail_host, ring.size_log2, first, count, *words, int(timeout * 1e9)
        )
    )


def drain(ring: RingMemory, count: int, timeout: float) -> int:
    """Takes triggers out of a fresh ring and does nothing with them.

    Args:
        ring: the ring.
        count: number of triggers to take.
        timeout: in seconds, for all of them.

    Returns:
        The number of triggers taken.
    """
    return int(lib.proxyccl_bare_drain(ring.slots_host, ring.tail_host, ring.size_log2, count, int(timeout * 1e9)))
