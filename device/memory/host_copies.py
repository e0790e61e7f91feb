"""Copies between device memory and unpinned host memory that exceed a driver's speed.

For unpinned memory a driver copies with one thread, which also takes the page faults of new memory. Here several
threads copy, each through a pinned buffer, so that copies by the device and by the CPU overlap.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from proxyccl.device._native import ffi, lib
from proxyccl.device.base_runtime import BaseRuntime, PinnedMemory
from proxyccl.device.errors import ResourceError
from proxyccl.device.process.cores import usable_cores

_PIECE_BYTES = 8 << 20
_MOST_THREADS = 4

Copy = tuple[int, int, int]
"""The addresses of a copy's destination and source, and the number of bytes."""


def allocate_host(nbytes: int) -> mmap.mmap:
    """Returns zeroed unpinned memory, of huge pages if the system has them, because these cause few page faults. Raises
    ResourceError if there is too little memory.
    """
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ResourceError(f"{nbytes} bytes of host memory: {error}") from None
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def copy_with_host(runtime: BaseRuntime, copies: Sequence[Copy], *, to_host: bool) -> None:
    """Copies between device memory and unpinned host memory, and returns when all copies are done.

    Args:
        runtime: the runtime of the device.
        copies: the copies, in any order.
        to_host: whether the host memory is the destination or the source of every copy.

    Raises:
        KernelError: a copy failed.
        ResourceError: too little memory can be pinned.
    """
    pieces = [
        (to + start, source + start, min(_PIECE_BYTES, nbytes - start))
        for to, source, nbytes in copies
        for start in range(0, nbytes, _PIECE_BYTES)
    ]
    if not pieces:
        return
    threads = min(_MOST_THREADS, usable_cores(), len(pieces))
    longest = max(nbytes for *_, nbytes in pieces)
    buffers: SimpleQueue[PinnedMemory] = SimpleQueue()

    def copy(piece: Copy) -> None:
        to, source, nbytes = piece
        buffer = buffers.get()
        try:
            if to_host:
                runtime.copy(buffer.ptr, source, nbytes)
                _copy_on_host(to, buffer.host_ptr, nbytes)
            else:
                _copy_on_host(buffer.host_ptr, source, nbytes)
                runtime.copy(to, buffer.ptr, nbytes)
        finally:
            buffers.put(buffer)

    with contextlib.ExitStack() as ends:
        for _ in range(threads):
            buffer = runtime.allocate_pinned(longest)
            ends.callback(buffer.close)
            buffers.put(buffer)
        for _ in ends.enter_context(ThreadPoolExecutor(threads, "proxyccl-host-copy")).map(copy, pieces):
            pass


def _copy_on_host(to: int, source: int, nbytes: int) -> None:
    lib.proxyccl_memmove(ffi.cast("void *", to), ffi.cast("void *", source), nbytes)  # releases the GIL
