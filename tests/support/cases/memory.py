"""Makes and checks collective calls on views of given memory."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from proxyccl import Array, Communicator, Runtime
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.runtime import Memory
from support.cases.reference import Call, Values, numpy_dtype, poison
from support.device_arrays import barrier
from support.devices import rank_runtime
from support.running import TIMEOUT

if TYPE_CHECKING:  # programs of ranks import this module
    import pytest


def view_of(base: Any, offset: int, count: int, dtype: str) -> ArrayView:
    """Returns a view of `count` elements of an array's memory, `offset` bytes after its start."""
    whole = base.view() if isinstance(base, Array) else base
    return replace(whole, ptr=whole.ptr + offset, shape=(count,), dtype=as_dtype(dtype), owner=base)


def upload(comm: Communicator, view: ArrayView, values: Values) -> None:
    comm.runtime.copy(view.ptr, values.ctypes.data, values.nbytes)


def download(comm: Communicator, view: ArrayView) -> Values:
    values = np.empty(view.shape, numpy_dtype(view.dtype.name))
    comm.runtime.copy(values.ctypes.data, view.ptr, values.nbytes)
    return values


def symmetric(comm: Communicator, nbytes: int) -> Array:
    """Returns a new array after all peers have mapped it."""
    array = comm.empty(nbytes, "uint8")
    deadline = time.monotonic() + TIMEOUT
    while not registered(comm, array.view()):
        assert time.monotonic() < deadline, "peers did not map the array"
        time.sleep(0.001)
    return array


def make_call(comm: Communicator, call: Call, source: Any, target: Any, offset: int = 0) -> bytes:
    """Makes a call with slices of two arrays, each `offset` elements after the array's start, and checks the result."""
    size_in, size_out = call.sizes(comm.world_size)
    at = offset * as_dtype(call.dtype).itemsize
    x, out = view_of(source, at, size_in, call.dtype), view_of(target, at, size_out, call.dtype)
    if call.in_place and call.collective == "all_gather":
        x = replace(x, ptr=out.ptr + comm.rank * call.count * out.dtype.itemsize)
    if call.in_place and call.collective == "reduce_scatter":
        out = replace(out, ptr=x.ptr + comm.rank * call.count * out.dtype.itemsize)
    if not call.in_place or call.collective == "all_gather":
        upload(comm, out, poison(size_out, numpy_dtype(call.dtype)))
    upload(comm, x, call.input(comm.rank, comm.world_size))
    barrier(comm)
    call.issue(comm, x, out, None)
    comm.synchronize()
    result = download(comm, out)
    call.check(result, comm.rank, comm.world_size)
    return result.tobytes()


def room_for(call: Call, world_size: int) -> int:
    return (max(call.sizes(world_size)) + 64) * as_dtype(call.dtype).itemsize


def registered(comm: Communicator, array: ArrayView) -> bool:
    """Returns whether the kernels of all peers can access an array."""
    comm.group.symmetric.update()
    return bool(comm.group.launches.calls.reach_of(array.ptr, array.nbytes) & 1)


def recorded_mappings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Runtime, Memory]]:
    """Returns a list to which each later mapping of a peer's memory is added, after the runtime that maps it."""
    kind, mapped = type(rank_runtime(0)), []
    open_handle = kind.open

    def noted(runtime: Runtime, handle: bytes) -> Memory:
        memory = open_handle(runtime, handle)
        mapped.append((runtime, memory))
        return memory

    monkeypatch.setattr(kind, "open", noted)
    return mapped


def gather_and_check(
    comm: Communicator, call: Call, source: Array, target: Array, algorithm: str | None = None
) -> None:
    """Gathers into `target` and checks the result. The next call with similar arrays reuses the prepared call."""
    source.upload(call.input(comm.rank, comm.world_size))
    target.fill(-1)
    barrier(comm)
    comm.all_gather(source, out=target, algorithm=algorithm)
    comm.synchronize()
    call.check(target.numpy(), comm.rank, comm.world_size)
