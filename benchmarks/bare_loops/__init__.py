"""Loops in C that write through verbs or libfabric, or that drain or fill a ring, without ProxyCCL's engine. Benchmarks
compare the engine with these loops. `make bare-loops` builds them.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import cffi

from proxyccl.proxy.ring import Ring

_HERE = Path(__file__).parent
_LIBRARY = _HERE.parent.parent / "build/bare-loops/libbare_loops.so"


@functools.cache
def _library() -> tuple[Any, Any]:
    if not _LIBRARY.exists():
        raise FileNotFoundError(f"{_LIBRARY} does not exist; run: make bare-loops")
    ffi = cffi.FFI()
    for header in _HERE.glob("*.h"):
        ffi.cdef("\n".join(line for line in header.read_text().split("\n") if not line.startswith("#")))
    return ffi, ffi.dlopen(str(_LIBRARY))


def verbs_write(**options: int) -> int:
    """Posts RDMA writes on a queue pair, with a limited number outstanding, until all writes are complete.

    Args:
        options: the fields of ProxycclVerbsBareWrites (verbs_loop.h).

    Returns:
        Nanoseconds from the first post to the last completion, or a negative status of the transport `verbs`.
    """
    ffi, lib = _library()
    return int(lib.proxyccl_verbs_bare_writes(ffi.new("ProxycclVerbsBareWrites *", options)))


def fabric_write(**options: int) -> int:
    """Posts writes on a libfabric endpoint, with a limited number outstanding, until all writes are complete.

    Args:
        options: the fields of ProxycclFabricBareWrites (fabric_loop.h).

    Returns:
        Nanoseconds from the first write to the last completion, or a negative libfabric error.
    """
    ffi, lib = _library()
    return int(lib.proxyccl_fabric_bare_writes(ffi.new("ProxycclFabricBareWrites *", options)))


def fabric_serve(queue: int, seconds: float) -> int:
    """Polls a libfabric completion queue for a given time, because the provider receives writes only while the queue is
    polled. Returns 0 or a libfabric error.
    """
    return int(_library()[1].proxyccl_fabric_bare_serve(queue, int(seconds * 1e9)))


def produce(ring: Ring, first: int, words: tuple[int, int], count: int, timeout: float) -> int:
    """Pushes copies of one trigger from the calling thread, and waits whenever the ring is full. No other thread may
    push during this call.

    Args:
        ring: the ring to push to.
        first: ticket of the first copy.
        words: the trigger's words (`Trigger.encode`).
        count: number of copies.
        timeout: of the whole call, in seconds.

    Returns:
        The number of copies pushed before the time-out.
    """
    place = ring.slots_host, ring.tail_host, ring.size_log2
    return int(_library()[1].proxyccl_bare_produce(*place, first, count, *words, int(timeout * 1e9)))


def drain(ring: Ring, count: int, timeout: float) -> int:
    """Takes triggers out of a new ring, without executing the triggers.

    Args:
        ring: the ring.
        count: number of triggers to take.
        timeout: of the whole call, in seconds.

    Returns:
        The number of triggers taken.
    """
    place = ring.slots_host, ring.tail_host, ring.size_log2
    return int(_library()[1].proxyccl_bare_drain(*place, count, int(timeout * 1e9)))
