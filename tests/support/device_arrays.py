"""Copies arrays to and from memory that a communicator's kernels can access.

On the host a test's numpy array is used directly, because the library must accept any numpy array: views, odd offsets,
memory from any allocator. On a GPU the array's values are copied into device memory, and the test holds a view that can
be sliced like a numpy array.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxyccl import Array, Communicator
from proxyccl.device.arrays.array import ArrayView

# A driver may wait until the device is idle before it frees memory. A rank that waits would not make its next call, but
# other ranks' kernels on the same device may wait for that call. So arrays are kept as long as their communicator.
_kept: weakref.WeakKeyDictionary[Communicator, list[Array]] = weakref.WeakKeyDictionary()


class DeviceView(ArrayView):
    """A view of device memory, contiguous in C order, whose slices along the first dimension are views too."""

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice) -> DeviceView:
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError("a slice of a DeviceView has step 1")
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        return dataclasses.replace(self, ptr=self.ptr + start * row, shape=(max(0, stop - start), *self.shape[1:]))

    def numpy(self) -> NDArray[Any]:
        """Waits for the device, and returns a copy in host memory."""
        assert isinstance(self.owner, Array)
        whole = self.owner.numpy().reshape(-1).view(np.uint8)
        start = self.ptr - self.owner.ptr
        return whole[start : start + self.nbytes].view(self.dtype.numpy()).reshape(self.shape)


def on_device(comm: Communicator, values: Any) -> Any:
    """Returns the values in memory that the communicator's kernels can access: on the host, the numpy array itself."""
    host = np.asarray(values)
    if comm.runtime.name == "host":
        return host
    array = comm.empty(host.shape, host.dtype).upload(host)
    _kept.setdefault(comm, []).append(array)
    view = array.view()
    return DeviceView(view.ptr, view.shape, view.dtype, view.device, view.writable, array)


def on_host(x: Any) -> NDArray[Any]:
    """Returns the values of an array of any kind; for memory of a GPU, waits for the device first."""
    if isinstance(x, Array | DeviceView):
        return x.numpy()
    return np.asarray(x)


def barrier(comm: Communicator) -> None:
    """Makes a barrier and waits for its end, because on a GPU `Communicator.barrier` only queues the barrier. On
    return, all ranks have arrived, and their queued work is complete.
    """
    comm.barrier()
    comm.synchronize()


def overwrite(array: Any, values: Any) -> None:
    """Replaces the values of an array that the library made."""
    if isinstance(array, Array):
        array.upload(values)
    else:
        array[...] = values
