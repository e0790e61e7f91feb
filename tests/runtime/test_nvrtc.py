"""The device side compiles for NVIDIA, with the run-time compiler from PyPI; no GPU is needed.

The tests check the widths, orders and scopes of the accesses that synchronise in the compiler's PTX.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proxyccl.channels.expert_parallel.geometry import AS_BYTES, DISPATCH_KERNELS, STORE_KERNEL
from proxyccl.device.build.compile_cache import KERNEL_DIR, shipped_source
from proxyccl.device.build.kernel_names import kernel_names, kernels_of_image, symbols_in_namespace
from support.kernels.device_sources import (
    ACCESSES,
    ALGORITHMS,
    HIDDEN_KERNELS,
    REDUCTIONS,
    USER_KERNEL,
    headers,
    reductions_of,
    shipped_without_dtype,
    symbol_of,
)
from support.kernels.mscclpp import MSCCLPP_KERNELS
from support.kernels.nvrtc import CUBIN, PTX, Nvrtc

pytestmark = [pytest.mark.slow, pytest.mark.host_only(reason="needs only a compiler")]


@pytest.fixture(scope="session")
def nvrtc() -> Nvrtc:
    return Nvrtc()


# The headers that users include. Other headers belong to the library's kernels.
FOR_USERS = ("proxyccl/", "mscclpp/")


@pytest.mark.parametrize(
    "of_users", [pytest.param(True, id="for users"), pytest.param(False, id="of kernels", marks=pytest.mark.full)]
)
def test_every_header_compiles_alone(nvrtc: Nvrtc, of_users: bool) -> None:
    # PTX suffices, because unused templates and inline functions become no instructions.
    chosen = [header for header in headers("cuda") if header.startswith(FOR_USERS) == of_users]
    assert chosen
    for header in chosen:
        nvrtc.compile(f'#include "{header}"\n', PTX)


# Under NVRTC, libcu++ declares these types, and so does every CUDA header that includes libcu++, such as
# <cooperative_groups.h>. The tests declare these types, because NVRTC's package contains no such headers.
LIBCUXX_TYPES = """
using int8_t = signed char;
using int16_t = signed short;
using int32_t = signed int;
using int64_t = signed long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using uintptr_t = uint64_t;
"""


@pytest.mark.parametrize("position", ["before", "after"])
def test_the_integer_types_are_those_of_cudas_own_headers(nvrtc: Nvrtc, position: str) -> None:
    ours = '#include "proxyccl/proxyccl.h"\n'
    both = LIBCUXX_TYPES + ours if position == "before" else ours + LIBCUXX_TYPES
    cubin = nvrtc.compile(f'{both}extern "C" __global__ void both(uint64_t* p) {{ ++*p; }}\n', CUBIN)
    assert b".text.both\0" in cubin


# Without --full, only bfloat16 is compiled, because it has instructions of its own. The other types' arithmetic is C++,
# which the collectives' tests compile for the host.
EXAMPLE = "bfloat16"


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        pytest.param(*reduction, id=reduction[0], marks=[] if reduction[0] == EXAMPLE else pytest.mark.full)
        for reduction in REDUCTIONS
    ],
)
def test_shipped_reductions_compile(nvrtc: Nvrtc, dtype: str, op: str) -> None:
    # PTX suffices, because the types differ little for the assembler, which takes most of the time.
    ptx = nvrtc.compile(reductions_of(dtype, op), PTX).decode()
    for algorithm in ALGORITHMS:
        name = f"{algorithm}_{dtype}_{op.lower()}"
        assert f".entry {name}(" in ptx
        assert f" proxyccl_parameters_{name}[" in ptx
    assert leaves_registers(ptx)


def leaves_registers(ptx: str) -> bool:
    """Returns whether every kernel declares its block's size or limits its registers.

    A kernel with neither declaration compiles, but may use too many registers for a launch.
    """
    return ptx.count(".visible .entry") == ptx.count(".maxntid 512") + ptx.count(".maxnreg 32") > 0


@pytest.mark.full  # only with --full, because the interpreter below has the same accesses
def test_shipped_reductions_assemble(nvrtc: Nvrtc) -> None:
    cubin = nvrtc.compile(reductions_of("bfloat16", "Sum"), CUBIN)
    for algorithm in ALGORITHMS:
        name = f"{algorithm}_bfloat16_sum"
        assert f".text.{name}\0".encode() in cubin
        assert f"proxyccl_parameters_{name}\0".encode() in cubin


@pytest.mark.parametrize("path", shipped_without_dtype(), ids=lambda path: path.stem)
def test_shipped_kernels_without_a_dtype_compile(nvrtc: Nvrtc, path: Path) -> None:
    names = re.findall(r"^PROXYCCL_EXPORT_KERNEL\((\w+)\)$", path.read_text(), re.MULTILINE)
    ptx = nvrtc.compile(f'#include "{path.relative_to(KERNEL_DIR)}"\n', PTX).decode()
    for name in names:
        assert f".entry {symbol_of(name, ptx)}(" in ptx
    if path.stem == "moves":
        assert leaves_registers(ptx)


def dispatch_of(kernel: str) -> str:
    return shipped_source("experts/dispatch.h", kernel, AS_BYTES, None)


# Without --full, one dispatch suffices, because all dispatches are instances of the same templates.
@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, marks=[] if kernel == "dispatch_ids" else pytest.mark.full)
        for kernel in (*DISPATCH_KERNELS.values(), STORE_KERNEL)
    ],
)
def test_dispatches_compile(nvrtc: Nvrtc, kernel: str) -> None:
    ptx = nvrtc.compile(dispatch_of(kernel), PTX).decode()
    assert f".entry {symbol_of(f'{kernel}_{AS_BYTES}', ptx)}(" in ptx
    assert leaves_registers(ptx)


@pytest.mark.full
def test_a_dispatch_assembles(nvrtc: Nvrtc) -> None:
    cubin = nvrtc.compile(dispatch_of("dispatch_ids"), CUBIN)
    # Profilers show this symbol as proxyccl::dispatch_ids_uint8(…).
    assert b".text._ZN8proxyccl18dispatch_ids_uint8E" in cubin
    assert list(symbols_in_namespace(cubin)) == ["dispatch_ids_uint8"]


@pytest.mark.parametrize("kernel", ["one_shot_rms_norm_lines_4", "two_shot_rms_norm_packets_apart"])
def test_norms_compile(nvrtc: Nvrtc, kernel: str) -> None:
    cubin = nvrtc.compile(shipped_source("all_reduce_rms_norm.h", kernel, "bfloat16", None), CUBIN)
    assert f".text.{kernel}_bfloat16\0".encode() in cubin


def test_the_interpreter_of_execution_plans_compiles(nvrtc: Nvrtc) -> None:
    cubin = nvrtc.compile(shipped_source("execute_plan.h", "execute_plan", "bfloat16", None), CUBIN)
    assert b".text.execute_plan_bfloat16\0" in cubin


@pytest.mark.parametrize("arch", [CUBIN, "-arch=sm_80"])
def test_a_kernel_that_uses_everything_compiles(nvrtc: Nvrtc, arch: str) -> None:
    cubin = nvrtc.compile(USER_KERNEL, arch)
    for name in ("sm_channel", "newer_names", "proxy_channel", "ring", "block_and_warp"):
        assert f".text.{name}\0".encode() in cubin


COPIES = """
#include "proxyccl/proxyccl.h"
extern "C" __global__ void copies(proxyccl::DeviceHandle<proxyccl::SmChannel> channel, uint64_t bytes) {
  channel.put(1, 2, bytes, threadIdx.x, blockDim.x);
  channel.get(1, 2, bytes, threadIdx.x, blockDim.x);
  channel.put<4>(1, 2, bytes, threadIdx.x, blockDim.x);
}
"""
# EIATTR_REGCOUNT gives a function's number of registers.
_REGISTERS = re.compile(rb"\x04\x2f\x08\x00.{4}(.{4})", re.DOTALL)


def test_a_block_of_1024_threads_has_registers_for_copies(nvrtc: Nvrtc) -> None:
    counts = [int.from_bytes(count, "little") for count in _REGISTERS.findall(nvrtc.compile(COPIES, CUBIN))]
    assert counts
    assert max(counts) <= 65536 // 1024


def test_kernels_in_mscclpps_terms_compile(nvrtc: Nvrtc) -> None:
    names = kernel_names(MSCCLPP_KERNELS)
    assert kernels_of_image(nvrtc.compile(MSCCLPP_KERNELS, CUBIN)) == sorted(names) != []


@pytest.mark.parametrize("arch", [CUBIN, "-arch=sm_80", "-arch=sm_100"])
def test_an_image_tells_which_kernels_it_has(nvrtc: Nvrtc, arch: str) -> None:
    assert kernels_of_image(nvrtc.compile(HIDDEN_KERNELS, arch)) == ["calls", "nothing", "plus_1"]


# For each kernel in ACCESSES, its accesses that have a memory order or are volatile. Plain accesses are omitted.
STRAIGHT = {
    # The fence and the 16-byte store, which cannot tear, release the trigger. engine/ring.h acquires the second word.
    "store_trigger": ["fence.acq_rel.sys", "st.relaxed.sys.global.b128"],
    # One access of 16 bytes at system scope, because volatile means relaxed.sys in PTX.
    "write_ll16": ["st.volatile.global.v2.u64"],
    "read_ll16": ["ld.volatile.global.v2.u64"],
    "write_ll8": ["st.relaxed.sys.b64"],
    "read_ll8": ["ld.relaxed.sys.b64"],
    # The peer that waits for the signal acquires this release across the link.
    "signal": ["st.release.sys.b64"],
    "relaxed_signal": ["st.relaxed.sys.b64"],
    # `red` has no result, so that a signal waits for no answer from the peer.
    "add_signal": ["red.release.sys.global.add.u64"],
    "add_relaxed_signal": ["red.relaxed.sys.global.add.u64"],
    # `poll` loads the count of consumed signals and the count of received signals, and then consumes a signal.
    "poll": ["ld.relaxed.gpu.b64", "ld.acquire.sys.b64", "atom.cas.acq_rel.gpu.b64"],
    # An element whose alignment equals its size is one access; other elements are one access per aligned piece.
    "read_int4": ["ld.relaxed.sys.global.b128"],
    "write_int4": ["st.relaxed.sys.global.b128"],
    "write_packet": ["st.relaxed.sys.global.b128"],
    "read_pair": ["ld.relaxed.sys.b32"] * 2,
    "write_colour": ["st.relaxed.sys.b8"] * 3,
}
# The sets give the kinds of accesses, not their number, because the compiler may duplicate an access in a loop.
LOOPS = {
    "push": {
        "atom.add.relaxed.gpu.u64",  # Takes a ticket.
        "ld.acquire.gpu.b64",  # Loads the cached tail, to check for room in the ring.
        "atom.exch.acquire.gpu.b32",  # Takes the lock of the cached tail.
        "ld.acquire.sys.b64",  # Loads the tail that the host stores.
        "st.release.gpu.b64",  # Updates the cached tail.
        "st.release.gpu.b32",  # Releases the lock of the cached tail.
        "ld.relaxed.gpu.b64",  # Loads the value that a time-out reports.
        "fence.acq_rel.sys",  # Releases the trigger.
        "st.relaxed.sys.global.b128",  # Stores the trigger.
    },
    "sync_ring": {"ld.acquire.sys.b64"},
    # `red` raises the count of consumed signals; it has no result for which the thread would wait.
    "wait_until": {"ld.acquire.sys.b64", "red.relaxed.gpu.global.max.u64"},
    "sync_grid": {
        "ld.relaxed.gpu.b32",  # Loads the current generation.
        "atom.add.acq_rel.gpu.u32",  # Counts the block's arrival.
        "st.relaxed.gpu.b32",  # Resets the count to 0.
        "st.release.gpu.b32",  # Publishes the next generation.
        "ld.acquire.gpu.b32",  # Waits for the next generation.
    },
}


def ordered_accesses(ptx: str, kernel: str) -> list[str]:
    """Returns the opcodes of a kernel's accesses that have a memory order or are volatile."""
    body = re.search(rf"\.entry {kernel}\(.*?^}}", ptx, re.DOTALL | re.MULTILINE)
    assert body is not None, kernel
    opcodes = re.findall(r"^\s*(?:@\S+\s+)?((?:ld|st|atom|red|fence)\.[\w.]+)", body[0], re.MULTILINE)
    orders = {"volatile", "relaxed", "acquire", "release", "acq_rel"}
    return [opcode for opcode in opcodes if orders & set(opcode.split("."))]


@pytest.fixture(scope="session")
def accesses_ptx(nvrtc: Nvrtc) -> str:
    return nvrtc.compile(ACCESSES, PTX).rstrip(b"\0").decode()


@pytest.mark.parametrize("kernel", STRAIGHT)
def test_an_access_is_one_instruction_of_the_right_kind(accesses_ptx: str, kernel: str) -> None:
    assert ordered_accesses(accesses_ptx, kernel) == STRAIGHT[kernel]


def test_two_words_of_a_trigger_are_stored_behind_an_acquire(nvrtc: Nvrtc) -> None:
    """Before sm_90, a trigger is two stores. The fence orders the first store after the load of the tail."""
    ptx = nvrtc.compile(ACCESSES, "-arch=compute_80").rstrip(b"\0").decode()
    stores = ["fence.acq_rel.gpu", "st.relaxed.sys.b64", "st.release.sys.b64"]
    assert ordered_accesses(ptx, "store_trigger") == stores


@pytest.mark.parametrize("kernel", LOOPS)
def test_waits_have_the_right_orders_and_scopes(accesses_ptx: str, kernel: str) -> None:
    assert set(ordered_accesses(accesses_ptx, kernel)) == LOOPS[kernel]
