"""Compiles Triton kernels for GPUs that this machine lacks, and writes a file for each kernel.
The argument is a directory, whose name contains the architecture. If the name also contains "values", compiles a kernel
that calls many functions; if "examples", the examples' kernels; otherwise, a kernel for each synchronising access.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

import proxyccl.triton as pt
from proxyccl.triton import basics, target
from proxyccl.triton.arguments import CONSTEXPR, Argument
from proxyccl.triton.compiled import compile_kernel, target_of


@triton.jit
def store_trigger(slot, low, high):
    target.store_trigger(slot, basics.u64(low), basics.u64(high))


@triton.jit
def sync_threads(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), 1.0)
    pt.sync_threads_system()


@triton.jit
def signal(sm):
    pt.sm_signal(sm)


@triton.jit
def relaxed_signal(sm):
    pt.sm_relaxed_signal(sm)


@triton.jit
def poll(sm, out):
    tl.store(out, pt.sm_poll(sm).to(tl.int32))


@triton.jit
def put_packets(sm, x, BLOCK: tl.constexpr):
    pt.put_packets(sm, 0, tl.load(x + tl.arange(0, BLOCK)), 7)


@triton.jit
def get_packets(sm, x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), pt.get_packets(sm, 0, 7, BLOCK, tl.float32))


@triton.jit
def wait(proxy, out):
    tl.store(out, pt.wait(proxy).to(tl.int32))


@triton.jit
def push(proxy):
    pt.signal(proxy)


@triton.jit
def sync_grid(barrier):
    pt.sync_grid(barrier)


@triton.jit
def values(proxy, sm, x, n):
    """Calls the functions that send a value in a trigger or a signal, and those of asynchronous flushes."""
    pt.put_value(proxy, 8, n, tl.int8)
    pt.put_value(proxy, 8, 1.5, tl.float16)
    pt.put_value_with_signal(proxy, 8, tl.load(x), tl.float32)
    pt.put_value_with_signal(proxy, 8, 5, tl.int64)
    pt.signal(proxy, n + 3)
    ticket = pt.flush_async(proxy)
    if pt.wait_until(proxy, n) & (pt.is_flushed(proxy, ticket) == 0):
        tl.store(x, pt.wait_flushed(proxy, ticket).to(tl.float32))
    pt.sm_signal(sm, n + 3)
    pt.sm_wait_until(sm, 7)


@triton.jit
def everything(proxy, sm, barrier, x, n, BLOCK: tl.constexpr):
    """Calls every function of `proxyccl.triton` that `values` does not call, with arguments of every kind."""
    i = tl.arange(0, BLOCK)
    channel = pt.channel(proxy, n)
    pt.put(channel, 0, 0, n)
    pt.put(channel, 0, 0, n, dst_memory=3, src_memory=n)
    pt.put_with_signal(channel, 8, 0, 1 << 33)
    if pt.put_with_signal_and_flush(channel, 0, n, 4):
        tl.store(x, pt.flush(channel).to(tl.float32))
    while (pt.poll(channel) == 0) & (pt.ended(channel) == 0):
        tl.store(x, 1.0)
    peer = pt.channel(sm, n)
    tl.store(pt.remote(peer, tl.float32) + i, tl.load(x + i), i < pt.remote_bytes(peer) // 4)
    if pt.sm_wait(peer) & (pt.sm_ended(peer) == 0):
        tl.store(x, 1.0)
    pt.put_packets(peer, 64, tl.load(x + i), n, count=n)
    tl.store(x + i, pt.get_packets(peer, 64, n, BLOCK, tl.float32, count=n))
    if pt.sync_grid(barrier):
        tl.store(x, 2.0)


EXAMPLES = Path(__file__).parent.parent.parent.parent / "examples"
EXAMPLE_KERNELS = {
    "triton_diffusion": ["diffuse"],
    "triton_all_to_all": ["all_to_all"],
    "triton_all_reduce": ["one_shot"],
    "triton_overlapped_gemm": ["gemm_all_reduce", "all_gather_gemm"],
}
FLOAT16, INT32 = Argument("*fp16", 0, aligned=True), Argument("*i32", 0, aligned=True)
PROXY, SM, BARRIER, FLOAT32 = (Argument(kind, 0, aligned=True) for kind in ("*u64", "*i64", "*u32", "*fp32"))
EXAMPLE_ARGUMENTS = {
    **dict.fromkeys(("a", "b", "c", "memory"), FLOAT16),
    **dict.fromkeys(("u", "x"), FLOAT32),
    **dict.fromkeys(("left", "right", "channels"), PROXY),
    "barrier": BARRIER,
    "done": INT32,
    "calls": INT32,
    "BLOCK": Argument(CONSTEXPR, 1024),
    **{name: Argument(CONSTEXPR, 64) for name in ("BM", "BN", "BK")},
}

TYPES = {"proxy": "*u64", "sm": "*i64", "barrier": "*u32", "slot": "*u64", "x": "*fp32", "out": "*i32", "n": "i32"}


def arguments(kernel: triton.JITFunction) -> dict[str, Argument]:
    made = {name: Argument(TYPES.get(name, "i64"), 0, aligned=name != "n") for name in kernel.arg_names}
    return made | ({"BLOCK": Argument(CONSTEXPR, 256)} if "BLOCK" in made else {})


def example_kernels() -> list[tuple[triton.JITFunction, dict[str, Argument]]]:
    sys.path.insert(0, str(EXAMPLES))
    found = []
    for module, names in EXAMPLE_KERNELS.items():
        known = {**EXAMPLE_ARGUMENTS, **({"channels": SM} if module == "triton_all_reduce" else {})}
        for name in names:
            kernel = getattr(importlib.import_module(module), name)
            found.append((kernel, {each: known.get(each, Argument("i32", 48)) for each in kernel.arg_names}))
    return found


def main() -> None:
    kernels = [(each, arguments(each)) for each in globals().values() if isinstance(each, triton.JITFunction)]
    directory = Path(sys.argv[1])
    architecture, *more = directory.name.split()
    nvidia = architecture.startswith("sm_")
    made_for = target_of(architecture) if nvidia else GPUTarget("hip", architecture, 64)
    chosen = [(kernel, given) for kernel, given in kernels if (kernel is values) == bool(more)]
    for kernel, given in example_kernels() if more == ["examples"] else chosen:
        compiled = compile_kernel(kernel, given, made_for, {"num_warps": 4})
        (directory / kernel.__name__).write_text(compiled.asm["ptx" if nvidia else "amdgcn"])


if __name__ == "__main__":
    main()
