"""C loops that only drive a ring or a queue pair. Benchmarks compare the engine with them; tests push with them.

They are an extension of their own, which the engine does not need.
"""

from __future__ import annotations

from typing import Any

from proxyccl.proxy import _bare_loops
from proxyccl.proxy.ring import RingMemory

ffi, lib = _bare_loops.ffi, _bare_loops.lib


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


def write(**options: Any) -> int:
    """Keeps RDMA writes outstanding on a queue pair until all are complete.

    Args:
        options: the fields of ProxycclVerbsBareWrites (verbs_loop.h).

    Returns:
        Nanoseconds from the first post to the last completion; or a status of the transport `verbs`, negative.
    """
    return int(lib.proxyccl_verbs_bare_writes(ffi.new("ProxycclVerbsBareWrites *", options)))


def fabric_write(**options: Any) -> int:
    """Keeps writes outstanding on an endpoint of libfabric until all are complete.

    Args:
        options: the fields of ProxycclFabricBareWrites (fabric_loop.h).

    Returns:
        Nanoseconds from the first write to the last completion; or the number of libfabric's error, negative.
    """
    return int(lib.proxyccl_fabric_bare_writes(ffi.new("ProxycclFabricBareWrites *", options)))


def fabric_serve(queue: int, seconds: float) -> int:
    """Polls a completion queue of libfabric for so long, so that writes arrive. Returns 0 or the number of an error."""
    return int(lib.proxyccl_fabric_bare_serve(queue, int(seconds * 1e9)))
