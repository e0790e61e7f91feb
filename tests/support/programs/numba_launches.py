"""Launches Numba kernels without a device. Prints each kernel's argument types and whether the kernel was linked.

With the argument "newest", first removes the names that NumPy 2.5 removed from NumPy.
"""

# ruff: noqa: E402  (NumPy is changed before proxyccl.numba is imported)

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[3] / "examples")]

import numba.np.arrayobj  # noqa: F401  (Numba must be imported before row_stack is removed)
import numpy as np

if "newest" in sys.argv and hasattr(np, "row_stack"):
    del np.row_stack
    np.__all__.remove("row_stack")

import numba_diffusion
from numba import cuda
from numba.cuda import dispatcher
from numba.cuda.cudadrv import devices

import proxyccl.numba as pn
from proxyccl import Communicator
from proxyccl.device.arrays.array import Array
from support.kernels import numba as kernels
from support.running import run_ranks

CONTEXT = SimpleNamespace(device=SimpleNamespace(compute_capability=(9, 0)))


def launched(kernel: Any, *_: Any) -> None:
    """Prints a compiled and linked kernel instead of launching it."""
    types = ", ".join(str(of) for of in kernel.argument_types)
    print(kernel.fndesc.qualname, types, bytes(kernel.library.get_cubin().code).startswith(b"\x7fELF"), sep=": ")


devices._runtime = SimpleNamespace(ensure_context=nullcontext, get_or_create_context=lambda _: CONTEXT)
dispatcher._Kernel.bind = lambda kernel: None
dispatcher._Kernel.launch = launched


def rank_main(comm: Communicator) -> None:
    memory = comm.empty(16, "float32")
    channels = comm.proxy_channels(memory)

    def on_gpu(dtype: str) -> Any:
        array = comm.empty(16, dtype)
        return cuda.as_cuda_array(Array(SimpleNamespace(name="cuda", device=0), array.memory, array.shape, array.dtype))

    if comm.rank == 0:
        left = right = channels.to(1)
        numba_diffusion.diffuse[1, 128](pn.address(left), pn.address(right), on_gpu("float32"), 6, 200)
        cuda.jit(kernels.everything)[1, 32](pn.address(channels), 0, 16, on_gpu("int32"))
        cuda.jit(kernels.waits)[1, 1](pn.address(left), on_gpu("int32"))


run_ranks(2, rank_main)
