"""The device side compiles for AMD, with the real HIPRTC through hip-python; no GPU is needed.

The tests disassemble the code and check the widths, scopes and waits of accesses that synchronise. HIPRTC comes from
Debian's testing distribution (support/hip/fetch_hiprtc.py); if it is not available, these tests are skipped.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxyccl.channels.expert_parallel.geometry import AS_BYTES, DISPATCH_KERNELS, STORE_KERNEL
from proxyccl.device.build.compile_cache import INCLUDE_DIR, KERNEL_DIR, shipped_source
from proxyccl.device.build.kernel_names import kernel_names, kernels_of_image
from proxyccl.device.errors import RuntimeUnavailableError
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
from support.paths import ROOT, TESTS

pytestmark = pytest.mark.slow

try:
    from proxyccl.device.gpu.hip_compiler import compile_options
except RuntimeUnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

HIP = TESTS / "support/hip"
HIPRTC = ROOT / "build/hiprtc"
LIBRARIES = HIPRTC / "root/usr/lib/x86_64-linux-gnu"
ARCHITECTURES = ("gfx90a", "gfx942", "gfx950")
# Without --full, gfx942 represents gfx950, because both have the same scopes, waits and fences. gfx90a differs.
SPELLED = [pytest.param(each, marks=pytest.mark.full if each == "gfx950" else []) for each in ARCHITECTURES]
# Without --full, one architecture suffices for tests whose results do not depend on the architecture's instructions.
EXAMPLE = [pytest.param(each, marks=[] if each == "gfx942" else pytest.mark.full) for each in ARCHITECTURES]


class Hiprtc:
    """The compiler, in a separate process that runs under its own C library.

    With `as_for_users`, `compile` uses the options for users; otherwise it uses -O1, which saves a third of the time.
    `instructions` always uses the options for users.
    """

    def __init__(self, as_for_users: bool) -> None:
        self._level = () if as_for_users else ("-O1",)
        self._worker = subprocess.Popen(
            [
                str(LIBRARIES / "ld-linux-x86-64.so.2"),
                *("--library-path", str(LIBRARIES)),
                *(sys.executable, str(HIP / "hiprtc_worker.py")),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "ROCM_PATH": str(HIPRTC)},
        )

    def compile(self, source: str, architecture: str) -> bytes:
        """Compiles a source and returns the code object. A warning fails the test, like an error."""
        return base64.b64decode(self._request(source, architecture, *self._level)["code"])

    def instructions(self, source: str, architecture: str) -> str:
        """Compiles a source and returns the disassembled code object."""
        return self._request(source, architecture, disassemble=architecture)["assembly"]

    def _request(self, source: str, architecture: str, *more: str, disassemble: str = "") -> dict[str, str]:
        options = [*compile_options(architecture), f"-I{INCLUDE_DIR}", f"-I{KERNEL_DIR}", *more]
        request = {"source": source, "options": options, "disassemble": disassemble}
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._worker.stdin.write(json.dumps(request) + "\n")
        self._worker.stdin.flush()
        line = self._worker.stdout.readline()
        assert line, f"the compiler's process ended with {self._worker.wait(10)}"
        answer: dict[str, str] = json.loads(line)
        assert (answer["status"], answer["log"]) == (0, ""), answer["log"]
        return answer

    def close(self) -> None:
        """Sends an empty line to end the process. Closing the pipe may not suffice: a forked rank may hold a copy."""
        assert self._worker.stdin is not None
        self._worker.stdin.write("\n")
        self._worker.stdin.close()
        self._worker.wait(30)


@pytest.fixture(scope="session")
def hiprtc(pytestconfig: pytest.Config) -> Iterator[Hiprtc]:
    fetched = subprocess.run(
        [sys.executable, str(HIP / "fetch_hiprtc.py"), str(HIPRTC)],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    if fetched.returncode == 2:
        pytest.skip(f"no HIPRTC: {fetched.stdout.strip()}")
    assert fetched.returncode == 0, fetched.stderr
    compiler = Hiprtc(as_for_users=pytestconfig.getoption("--full"))
    yield compiler
    compiler.close()


@pytest.fixture(params=SPELLED)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def exports(code: bytes, name: str) -> bool:
    """Returns whether a code object has the kernel `name` (as the descriptor NAME.kd) and its parameter table."""
    symbol = symbol_of(name, code.decode("latin-1"))
    return f"\0{symbol}.kd\0".encode() in code and f"\0proxyccl_parameters_{name}\0".encode() in code


def test_every_header_compiles(hiprtc: Hiprtc) -> None:
    # One architecture suffices, because unused templates and inline functions become no instructions. test_nvrtc.py
    # checks that each header compiles alone, because NVRTC takes only a fifth of HIPRTC's time.
    hiprtc.compile("".join(f'#include "{header}"\n' for header in headers("hip")), "gfx942")


# bfloat16 has instructions of its own, so all architectures compile its reductions; only gfx942 compiles other types.
# Without --full, only bfloat16 on gfx942 is compiled: NVRTC compiles the other types' arithmetic, and the tests of
# accesses below cover the other architectures.
KINDS = ("float64", "bfloat16", "int8")
INSTANCES = [
    pytest.param(
        architecture,
        *reduction,
        id=f"{architecture}-{reduction[0]}",
        marks=[] if (architecture, reduction[0]) == ("gfx942", "bfloat16") else pytest.mark.full,
    )
    for architecture in ARCHITECTURES
    for reduction in REDUCTIONS
    if reduction[0] == "bfloat16" or (architecture == "gfx942" and reduction[0] in KINDS)
]


@pytest.mark.parametrize(("architecture", "dtype", "op"), INSTANCES)
def test_shipped_reductions_compile(hiprtc: Hiprtc, architecture: str, dtype: str, op: str) -> None:
    code = hiprtc.compile(reductions_of(dtype, op), architecture)
    for algorithm in ALGORITHMS:
        assert exports(code, f"{algorithm}_{dtype}_{op.lower()}")


# Without --full, only moves.h is compiled, for gfx942. NVRTC compiles the other kernels' C++, and the tests of accesses
# below cover the other architectures.
EXAMPLES = {"moves"}
KERNELS = [
    pytest.param(
        architecture,
        path,
        id=f"{architecture}-{path.stem}",
        marks=[] if path.stem in EXAMPLES and architecture == "gfx942" else pytest.mark.full,
    )
    for architecture in ARCHITECTURES
    for path in shipped_without_dtype()
]
assert {path.stem for path in shipped_without_dtype()} > EXAMPLES


@pytest.mark.parametrize(("architecture", "path"), KERNELS)
def test_shipped_kernels_without_a_dtype_compile(hiprtc: Hiprtc, architecture: str, path: Path) -> None:
    names = re.findall(r"^PROXYCCL_EXPORT_KERNEL\((\w+)\)$", path.read_text(), re.MULTILINE)
    code = hiprtc.compile(f'#include "{path.relative_to(KERNEL_DIR)}"\n', architecture)
    for name in names:
        assert exports(code, name)


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, marks=[] if kernel == "dispatch_ids" else pytest.mark.full)
        for kernel in (*DISPATCH_KERNELS.values(), STORE_KERNEL)
    ],
)
def test_dispatches_compile(hiprtc: Hiprtc, kernel: str) -> None:
    code = hiprtc.compile(shipped_source("experts/dispatch.h", kernel, AS_BYTES, None), "gfx942")
    assert exports(code, f"{kernel}_{AS_BYTES}")


def test_norms_compile(hiprtc: Hiprtc) -> None:
    kernel = "two_shot_rms_norm_packets"
    assert exports(
        hiprtc.compile(shipped_source("all_reduce_rms_norm.h", kernel, "float16", None), "gfx942"), f"{kernel}_float16"
    )


@pytest.mark.full  # without --full, only NVRTC compiles the interpreter
def test_the_interpreter_of_execution_plans_compiles(hiprtc: Hiprtc) -> None:
    code = hiprtc.compile(shipped_source("execute_plan.h", "execute_plan", "bfloat16", None), "gfx942")
    assert exports(code, "execute_plan_bfloat16")


@pytest.mark.parametrize("architecture", EXAMPLE)
def test_a_kernel_that_uses_everything_compiles(hiprtc: Hiprtc, architecture: str) -> None:
    # Masks of lanes have 64 bits in HIP, and 32 bits in CUDA.
    code = hiprtc.compile(USER_KERNEL.replace("0xffffffffu", "~0ull"), architecture)
    for name in ("sm_channel", "newer_names", "proxy_channel", "ring", "block_and_warp"):
        assert exports(code, name)


def test_kernels_in_mscclpps_terms_compile(hiprtc: Hiprtc) -> None:
    code = hiprtc.compile(MSCCLPP_KERNELS, "gfx942")
    assert kernels_of_image(code) == sorted(kernel_names(MSCCLPP_KERNELS))


@pytest.mark.parametrize("architecture", EXAMPLE)
def test_an_image_tells_which_kernels_it_has(hiprtc: Hiprtc, architecture: str) -> None:
    assert kernels_of_image(hiprtc.compile(HIDDEN_KERNELS, architecture)) == ["calls", "nothing", "plus_1"]


PUBLISH = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" {
__global__ void publish(uint64_t* data, uint64_t* flag) {
  data[threadIdx.x] = 1;
  syncThreadsSystem();
  if (threadIdx.x == 0) storeReleaseSystem<uint64_t>(flag, 1);
}
__global__ void publish_packets(LL16Packet* packets, uint64_t* flag) {
  packets[threadIdx.x].write({1, 2}, 3);
  packets[threadIdx.x + blockDim.x].write({1, 2}, 3);
  syncThreadsSystem();
  if (threadIdx.x == 0) storeReleaseSystem<uint64_t>(flag, 1);
}
__global__ void publish_to_the_device(uint64_t* data, uint64_t* flag) {
  data[threadIdx.x] = 1;
  syncThreadsDevice();
  if (threadIdx.x == 0) storeReleaseDevice<uint64_t>(flag, 1);
}
__global__ void wait_for_signal(Semaphore semaphore, Control* control) {
  semaphore.wait(control, PROXYCCL_WAIT_SM_SIGNAL, 0, 0);
}
__global__ void wait_for_packet(LL16Packet* packet, uint64_t* out, Control* control) {
  *out = readPacket(packet, 1, control, 0).x;
}
__global__ void wait_for_small_packet(LL8Packet* packet, uint64_t* out, Control* control) {
  *out = readPacket(packet, 1, control, 0);
}
__global__ void wait_for_ring(Fifo fifo, Control* control) { fifo.sync(0, control); }
__global__ void wait_for_grid(DeviceSyncer* syncer, Control* control) { syncer->sync(gridDim.x, control); }
}
"""


class Instructions:
    """Each kernel's instructions that access memory or order accesses.

    An entry is an opcode with its scope's modifiers, such as "global_store_dwordx2 sc0 sc1". Waits for memory and
    barriers are entries, too.
    """

    def __init__(self, assembly: str) -> None:
        self.kernels: dict[str, list[tuple[int, str]]] = {}
        self._jumps: dict[str, list[tuple[int, int]]] = {}
        for line in assembly.splitlines():
            if label := re.fullmatch(r"(\w+):", line):
                entries = self.kernels[label[1]] = []
                jumps = self._jumps[label[1]] = []
                continue
            if not (found := re.match(r"\s+(\S+)(.*?)//\s*([0-9A-F]+): ", line)):
                continue
            opcode, operands, address = found[1], found[2], int(found[3], 16)
            if opcode.startswith(("global_", "flat_", "buffer_")):
                scope = [word for word in operands.split() if word in {"sc0", "sc1", "nt", "glc", "slc"}]
                entries.append((address, " ".join([opcode, *scope])))
            elif opcode == "s_barrier" or (opcode == "s_waitcnt" and "vmcnt(0)" in operands):
                entries.append((address, opcode))
            elif opcode.startswith(("s_branch", "s_cbranch")):
                words = int(operands.split()[0])
                jumps.append((address, address + 4 + 4 * (words - (words >> 15 << 16))))

    def __getitem__(self, kernel: str) -> list[str]:
        return [entry for _, entry in self.kernels[kernel]]

    def repeated(self, kernel: str) -> set[str]:
        """Returns a kernel's entries that are inside a loop."""
        loops = [(target, jump) for jump, target in self._jumps[kernel] if target <= jump]
        return {entry for address, entry in self.kernels[kernel] if any(a <= address <= b for a, b in loops)}


class Scopes:
    """The modifiers and instructions by which an architecture accesses memory at device and system scope."""

    def __init__(self, architecture: str) -> None:
        # Stores of gfx90a have no modifiers, because the page decides whether a store bypasses the caches.
        old = architecture == "gfx90a"
        self.system_load = " glc" if old else " sc0 sc1"
        self.system_store = "" if old else " sc0 sc1"
        self.device_load = " glc" if old else " sc1"
        self.device_store = "" if old else " sc1"
        self.write_back = ["buffer_wbl2" + self.system_store, "s_waitcnt"]
        self.invalidate = ["buffer_invl2", "buffer_wbinvl1_vol"] if old else ["buffer_inv sc0 sc1"]
        self.device_write_back = ["s_waitcnt"] if old else ["buffer_wbl2 sc1", "s_waitcnt"]
        self.device_invalidate = "buffer_wbinvl1_vol" if old else "buffer_inv sc1"


def merged(entries: list[str]) -> list[str]:
    """Returns the entries, with consecutive waits merged into one."""
    return [entry for i, entry in enumerate(entries) if entry != "s_waitcnt" or entries[i - 1 : i] != ["s_waitcnt"]]


class Assembled(dict[str, Instructions]):
    """The instructions for each architecture, which the first test that reads them compiles."""

    def __init__(self, compiler: Hiprtc) -> None:
        self._compiler = compiler

    def __missing__(self, architecture: str) -> Instructions:
        return self.setdefault(
            architecture, Instructions(self._compiler.instructions(ACCESSES + PUBLISH, architecture))
        )


@pytest.fixture(scope="session")
def assembled(hiprtc: Hiprtc) -> Assembled:
    return Assembled(hiprtc)


def test_an_access_is_one_instruction_of_the_right_kind(assembled: Assembled, architecture: str) -> None:
    kernels, to = assembled[architecture], Scopes(architecture)
    # After the acquire (of the load that finds room in the ring), both words of a trigger bypass the caches. The kernel
    # stores the second word, with the parity bit, only after all earlier stores have arrived.
    store = "global_store_dwordx2" + to.system_store
    assert merged(kernels["store_trigger"]) == [to.device_invalidate, store, *to.write_back, store]
    # A packet is one store of 16 bytes, and no wait follows it.
    assert kernels["write_ll16"] == ["global_store_dwordx4" + to.system_store]
    assert kernels["write_ll8"] == [store]
    assert kernels["read_ll16"][:2] == ["global_load_dwordx4" + to.system_load, "s_waitcnt"]
    assert kernels["read_ll8"][:2] == ["global_load_dwordx2" + to.system_load, "s_waitcnt"]
    # The first store is to the sender's own counter.
    assert merged(kernels["signal"]) == ["global_store_dwordx2", *to.write_back, store]
    assert kernels["relaxed_signal"] == ["global_store_dwordx2", store]
    assert [entry.split()[0] for entry in merged(kernels["add_signal"])][-1] == "global_atomic_add_x2"
    assert merged(kernels["add_signal"])[:-1] == to.write_back
    acquired = kernels["poll"].index(to.invalidate[0])
    assert kernels["poll"][acquired - 2 : acquired] == ["global_load_dwordx2" + to.system_load, "s_waitcnt"]
    # An element whose alignment equals its size is one access; other elements are one access per aligned piece.
    assert kernels["read_int4"][0] == "global_load_dwordx4" + to.system_load
    assert kernels["write_int4"] == ["global_store_dwordx4" + to.system_store]
    assert kernels["write_packet"] == ["global_store_dwordx4" + to.system_store]
    assert kernels["read_pair"][:2] == ["global_load_dword" + to.system_load] * 2
    assert kernels["write_colour"] == ["global_store_byte" + to.system_store] * 3


@pytest.mark.parametrize(
    ("kernel", "store"), [("publish", "global_store_dwordx2"), ("publish_packets", "global_store_dwordx4")]
)
def test_every_wave_writes_back_before_the_block_meets(
    assembled: Assembled, architecture: str, kernel: str, store: str
) -> None:
    entries, to = merged(assembled[architecture][kernel]), Scopes(architecture)
    barrier = entries.index("s_barrier")
    before = entries[:barrier]
    assert before[-len(to.write_back) :] == to.write_back
    assert all(entry.startswith(store) for entry in before[: -len(to.write_back)])
    assert entries[barrier + 1 :] == [*to.write_back, "global_store_dwordx2" + to.system_store]


def test_a_grid_barrier_covers_the_stores_of_every_wave(assembled: Assembled, architecture: str) -> None:
    to = Scopes(architecture)
    entries = merged(assembled[architecture]["publish_to_the_device"])
    assert entries == [
        *("global_store_dwordx2", *to.device_write_back),
        "s_barrier",
        *(*to.device_write_back, "global_store_dwordx2" + to.device_store),
    ]
    syncer = assembled[architecture]["wait_for_grid"]
    assert syncer[: syncer.index("s_barrier")][-1] == "s_waitcnt"


@pytest.mark.parametrize(
    ("kernel", "load"),
    [
        ("wait_for_signal", "global_load_dwordx2"),
        ("wait_for_packet", "global_load_dwordx4"),
        ("wait_for_small_packet", "global_load_dwordx2"),
        ("wait_for_ring", "global_load_dwordx2"),
    ],
)
def test_a_wait_reads_memory_each_time(assembled: Assembled, architecture: str, kernel: str, load: str) -> None:
    assert {load + Scopes(architecture).system_load, "s_waitcnt"} <= assembled[architecture].repeated(kernel)


def test_a_grid_wait_reads_memory_each_time(assembled: Assembled, architecture: str) -> None:
    to = Scopes(architecture)
    wanted = {"global_load_dword" + to.device_load, "s_waitcnt", to.device_invalidate}
    assert wanted <= assembled[architecture].repeated("wait_for_grid")


def test_a_push_reads_the_host_only_under_the_lock(assembled: Assembled, architecture: str) -> None:
    entries, to = assembled[architecture]["push"], Scopes(architecture)
    assert sum(entry.startswith("global_atomic_add_x2") for entry in entries) == 1
    assert "global_load_dwordx2" + to.system_load in assembled[architecture].repeated("push")
    assert entries[-1] == "global_store_dwordx2" + to.system_store
    assert entries[-2] == "s_waitcnt"
