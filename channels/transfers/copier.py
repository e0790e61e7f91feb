"""Copies blocks by a device's copy engine or, if there are many short blocks, by a kernel."""

from __future__ import annotations

import functools
import mmap
import threading
from typing import TYPE_CHECKING

import numpy as np

from proxyccl.channels.transfers.blocks import Rows
from proxyccl.device._native import ffi as native
from proxyccl.device.base_runtime import PinnedMemory, Stream
from proxyccl.device.ffi_types import set_functions
from proxyccl.device.kernel import Kernel, Launch
from proxyccl.device.runtime import Runtime
from proxyccl.proxy._transfers import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxyccl.proxy._transfers import ProxycclDeviceCopiesPointer, ProxycclStagingPointer

_STREAMS = 4
"""The number of streams. Transfers use them in turn, so that a short transfer does not wait for a long one."""

_LONG_BYTES = 8 << 20
"""The block size from which the copy engine is as fast as a kernel, although it takes two or three microseconds to
begin. Shorter blocks are slower: between two H200 it moved 500 blocks of 1 MiB at 205 GB/s, the kernel at 350 GB/s.
"""

_FEW = 4
"""The number of short blocks that the copy engine copies in the time that a kernel takes to start."""

_PIECES = (4 << 10, 64 << 10)
"""The least and the most bytes of a piece that a warp copies."""

_BLOCKS = 32
"""The most multiprocessors that the kernel occupies."""

_THREADS = 1024
_WARP = 32
_WORD = 8
_LINE = 64

Place = tuple[PinnedMemory, int]
"""Pinned memory, and an offset in it."""


class Table:
    """Uninitialised pinned memory from a copier's pool, which gets the memory back when nothing refers to this object.

    Attributes:
        nbytes: the requested size; the memory may be larger.
        host_ptr, ptr: the addresses at which the CPU and the device access the memory.
    """

    def __init__(self, copier: Copier, nbytes: int) -> None:
        self.nbytes = nbytes
        # Each piece has its own cache lines, because the device and the CPU may write at the same time.
        size = max(_LINE, 1 << (nbytes - 1).bit_length())
        self._free, self._place = copier.take_pinned(size)
        memory, offset = self._place
        self.host_ptr, self.ptr = memory.host_ptr + offset, memory.ptr + offset

    def __del__(self) -> None:
        if hasattr(self, "_place"):
            self._free.append(self._place)  # doesn't take the lock, which this thread may already hold


class Stages:
    """Pinned memory that is registered with libfabric, described by fields of the engine's ProxycclStaging."""

    fields: dict[str, int | list[int]]


class Copier:
    """Prepares copies that one device makes. Any thread may use a copier.

    Attributes:
        runtime: the device's runtime.
        calls: the driver's functions, which the engine calls.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        calls = runtime.calls
        self.calls = ffi.new("ProxycclCopier *", {"context": calls.context, "relaxed": calls.relaxed})
        names = ("copy", "write64", "event_record", "event_query", "current", "make_current", "exchange_capture_mode")
        set_functions(ffi, self.calls, calls, *names)
        self._lock = threading.Lock()
        self._free: dict[int, list[Place]] = {}
        self._event = runtime.create_event(times=False)
        self._streams: list[Stream] = []
        self._turn = 0
        if runtime.loads_lazily:  # loaded early, because loading waits for kernels, which may wait for a transfer
            _ = self._kernel

    @functools.cached_property
    def _kernel(self) -> Kernel:
        return self.runtime.shipped("copy_blocks.h", "copy_blocks")

    def plan(self, rows: Rows, *, kernels_reach: bool) -> tuple[ProxycclDeviceCopiesPointer, str, object]:
        """Prepares copies from rows of (target, source, bytes), in device addresses. `kernels_reach` is False if some
        memory is unpinned host memory, on which a kernel would fault. Returns the engine's description of the copies, a
        text such as "copy engine and kernel", and the objects that the description refers to.
        """
        short = (rows[:, 2] < _LONG_BYTES) & kernels_reach
        if np.count_nonzero(short) <= _FEW:
            by_engine, launch, table = np.ascontiguousarray(rows), None, None
        else:
            by_engine = np.ascontiguousarray(rows[~short])
            launch, table = self._launch(rows[short])
        by = "copy engine" if launch is None else "copy engine and kernel" if len(by_engine) else "kernel"
        stream, word = self._next_stream(), Table(self, _WORD)
        copies = ffi.new(
            "ProxycclDeviceCopies *",
            {
                "rows": ffi.cast("uint64_t *", by_engine.ctypes.data),
                "count": len(by_engine),
                "launch": 0 if launch is None else int(native.cast("uintptr_t", launch.prepared)),
                "blocks": len(rows),
                "bytes": int(rows[:, 2].sum()),
                "stream": stream.handle,
                "event": self._event.handle,
                "word": word.host_ptr,
                "word_on_device": word.ptr,
            },
        )
        return copies, by, (copies, by_engine, launch, table, word)

    def _launch(self, rows: Rows) -> tuple[Launch, Table]:
        on_host = self.runtime.name == "host"  # on the host runtime, each thread of the kernel acts as a warp
        blocks, threads = (1, 1) if on_host else (min(_BLOCKS, self.runtime.launch_defaults.blocks), _THREADS)
        warps = 1 if on_host else blocks * threads // _WARP
        share = int(rows[:, 2].sum()) // warps
        pieces = cut(rows, min(max(share, _PIECES[0]), _PIECES[1]) // 16 * 16)
        table = Table(self, pieces.nbytes)
        to, source = (native.cast("void *", each) for each in (table.host_ptr, pieces.ctypes.data))
        native.memmove(to, source, pieces.nbytes)
        blocks = min(blocks, len(pieces))
        return self._kernel.prepare(blocks, threads, table.ptr, len(pieces)), table

    def staging(self, registered: Callable[[Table], Stages] | None = None) -> tuple[ProxycclStagingPointer, object]:
        """Returns the engine's description of pinned staging buffers, and objects that must live as long as the
        description. `registered`, if given, registers the buffers with libfabric.
        """
        count, nbytes = lib.PROXYCCL_STAGES, lib.PROXYCCL_STAGE_BYTES
        table = Table(self, count * nbytes)
        stages = None if registered is None else registered(table)
        streams = [self._next_stream() for _ in range(count + 1)]
        events = [self.runtime.create_event(times=False) for _ in range(count + 1)]
        made = ffi.new(
            "ProxycclStaging *",
            {
                "copier": self.calls,
                "memory": [table.ptr + number * nbytes for number in range(count)],
                "streams": [stream.handle for stream in streams],
                "events": [event.handle for event in events],
                **({} if stages is None else stages.fields),
            },
        )
        return made, (made, stages, table, events, self)

    def _next_stream(self) -> Stream:
        with self._lock:
            self._turn += 1
            if len(self._streams) < _STREAMS:
                self._streams.append(self.runtime.create_stream())
            return self._streams[self._turn % len(self._streams)]

    def take_pinned(self, size: int) -> tuple[list[Place], Place]:
        """Takes pinned memory from the pool, or allocates new memory, because pinning takes longer than a transfer.
        `size` is a power of two. Returns the list to which the caller must append the memory after use, and the memory.
        """
        free = self._free.setdefault(size, [])
        with self._lock:
            if free:
                return free, free.pop()
        room = max(size, mmap.PAGESIZE)
        memory = self.runtime.allocate_pinned(room)
        free += [(memory, offset) for offset in range(size, room, size)]
        return free, (memory, 0)


def cut(rows: Rows, most: int) -> Rows:
    """Cuts rows of (target, source, bytes) into pieces of at most `most` bytes each."""
    counts = (rows[:, 2] + np.uint64(most - 1)) // np.uint64(most)
    if (counts <= 1).all():
        return np.ascontiguousarray(rows)
    repeated = np.repeat(rows, counts.astype(np.intp), axis=0)
    first = np.repeat(np.cumsum(counts) - counts, counts.astype(np.intp))
    offsets = (np.arange(len(repeated), dtype=np.uint64) - first) * np.uint64(most)
    repeated[:, 0] += offsets
    repeated[:, 1] += offsets
    repeated[:, 2] = np.minimum(repeated[:, 2] - offsets, np.uint64(most))
    return repeated
