"""The Triton device functions compile for NVIDIA and AMD without a GPU, into the right instructions.

The tests find the widths, orders and scopes of synchronising accesses in the compiler's output.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget

from proxyccl import RuntimeUnavailableError
from proxyccl.device.kernel import FLOAT, INTEGER, POINTER
from proxyccl.triton import compiled as compiled_kernels
from proxyccl.triton.compiled import target_of
from support.kernels.triton_compiling import compile_accesses, without_interpreter
from support.once import made_once, shared_directory
from support.paths import PROGRAMS

pytestmark = [pytest.mark.slow, pytest.mark.host_only(reason="needs only a compiler")]

NATIVE = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 9)
"""Whether Triton has atomic loads and stores, and compiles for AMD without ROCm."""
ARCHITECTURES = ["sm_80", "sm_90", *(["gfx90a", "gfx942"] if NATIVE else [])]
OLDER = {"sm_80", "gfx90a"}  # of each vendor


def marked(architecture: str, *more: str) -> object:
    """Returns a test parameter for an architecture. Older architectures run only with --full, because only the names of
    their instructions differ.
    """
    return pytest.param(architecture, *more, marks=pytest.mark.full if architecture in OLDER else [])


class Compiled:
    """Each kernel's code for each architecture. The first test that needs an architecture compiles all its kernels."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, architecture: str, kernel: str) -> str:
        """Returns the code of a kernel, in PTX or AMD's assembly. For kernels that take long to compile, `architecture`
        contains a second word, the group of kernels (triton_accesses.py).
        """
        return (made_once(self._directory / architecture, compile_accesses) / kernel).read_text()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(made_once(shared_directory(tmp_path_factory) / "triton", lambda _: None))


def body(code: str, kernel: str, nvidia: bool) -> str:
    """Returns the kernel's compiled text, without the functions that the kernel calls."""
    pattern = rf"\.entry {kernel}\(.*?^}}" if nvidia else rf"^{kernel}:.*?\.section"
    found = re.search(pattern, code, re.DOTALL | re.MULTILINE)
    assert found is not None, kernel
    return re.sub(r"^\s*\.loc\s.*\n", "", found[0], flags=re.MULTILINE)


def ordered_by_nvidia(compiled: Compiled, architecture: str, kernel: str) -> list[str]:
    """Returns the opcodes of fences and of volatile or ordered accesses, each once, in program order."""
    text = body(compiled.read(architecture, kernel), kernel, nvidia=True)
    opcodes = re.findall(r"^\s*(?:@\S+\s+)?((?:ld|st|atom|red|fence)\.[\w.]+)", text, re.MULTILINE)
    orders = {"volatile", "relaxed", "acquire", "release", "acq_rel", "wt"}
    found = [opcode.replace(".global", "") for opcode in opcodes if orders & set(opcode.split("."))]
    return list(dict.fromkeys(found))


# Opcodes of atomic loads and stores. Before Triton 3.9, additions of 0 replace loads, and exchanges replace stores.
NVIDIA = {
    "relaxed_signal": ["ld.relaxed.gpu.b64", "st.relaxed.sys.b64"],
    "signal": ["ld.relaxed.gpu.b64", "fence.release.sys", "st.relaxed.sys.b64"],
    "poll": ["ld.relaxed.gpu.b64", "ld.relaxed.sys.b64", "fence.acquire.sys"],
    "wait": ["ld.relaxed.gpu.b64", "ld.relaxed.sys.b64", "fence.acquire.sys"],
    # A packet is 8 bytes of data and flag, accessed by one instruction with system scope.
    "put_packets": ["st.relaxed.sys.b64"],
    "get_packets": ["ld.relaxed.sys.b64"],
    "sync_grid": [
        "ld.relaxed.gpu.b64",  # loads the current generation
        "atom.gpu.acq_rel.add.u64",  # counts the arriving block
        "st.relaxed.gpu.b64",  # resets the count; another store after the release below publishes the next generation
        "fence.release.gpu",
        "ld.relaxed.sys.b64",
        "fence.acquire.sys",
    ],
}
NVIDIA_OLDER = {
    "relaxed_signal": ["ld.gpu.relaxed.b64", "atom.sys.relaxed.exch.b64"],
    "signal": ["ld.gpu.relaxed.b64", "atom.sys.release.exch.b64"],
    "poll": ["ld.gpu.relaxed.b64", "ld.sys.acquire.b64"],
    "wait": ["ld.gpu.relaxed.b64", "ld.sys.acquire.b64"],
    "put_packets": ["st.wt.b64"],
    "get_packets": ["ld.volatile.b64", "ld.relaxed.sys.b64"],  # the first poll, and the loop's polls in inline assembly
    "sync_grid": [
        "ld.gpu.relaxed.b64",
        "atom.gpu.acq_rel.add.u64",
        "atom.gpu.relaxed.exch.b64",
        "atom.gpu.release.exch.b64",
        "ld.sys.acquire.b64",
    ],
}
EXPECTED = NVIDIA if NATIVE else NVIDIA_OLDER


@pytest.mark.parametrize("architecture", [marked("sm_80"), marked("sm_90")])
@pytest.mark.parametrize("kernel", EXPECTED)
def test_accesses_have_the_right_orders_and_scopes_on_nvidia(
    compiled: Compiled, architecture: str, kernel: str
) -> None:
    expected = EXPECTED[kernel]
    if architecture == "sm_80":  # sm_80 has one fence for acquire and release
        expected = [re.sub(r"fence\.(acquire|release)", "fence.acq_rel", opcode) for opcode in expected]
    assert ordered_by_nvidia(compiled, architecture, kernel) == list(dict.fromkeys(expected))


def test_a_trigger_is_one_store_of_one_thread_from_sm_90_on(compiled: Compiled) -> None:
    code = body(compiled.read("sm_90", "store_trigger"), "store_trigger", nvidia=True)
    assert re.search(
        r"mov\.u32 thread, %tid\.x;\s*setp\.eq\.u32 first, thread, 0;.*"
        r"@first fence\.acq_rel\.sys;\s*@first st\.relaxed\.sys\.global\.b128",
        code,
        re.DOTALL,
    )
    assert code.count("b128 [") == 1


@pytest.mark.full
def test_a_trigger_is_two_stores_before_sm_90(compiled: Compiled) -> None:
    older = ordered_by_nvidia(compiled, "sm_80", "store_trigger")
    words = ["st.relaxed.sys.b64", "fence.acq_rel.sys"]
    assert older == (words if NATIVE else ["atom.sys.relaxed.exch.b64", "atom.sys.release.exch.b64"])


def test_a_push_takes_its_ticket_and_the_room_that_it_knows_of_with_relaxed_order(compiled: Compiled) -> None:
    found = ordered_by_nvidia(compiled, "sm_90", "push")
    assert any(re.fullmatch(r"atom(\.gpu|\.relaxed|\.add|\.u64){4}", opcode) for opcode in found)
    assert any(re.fullmatch(r"atom(\.gpu|\.acquire|\.exch|\.b32){4}", opcode) for opcode in found)  # the refresh lock
    assert found[-2:] == ["fence.acq_rel.sys", "st.relaxed.sys.b128"]


@pytest.mark.skipif(not NATIVE, reason="this Triton compiles for AMD with ROCm's linker alone")
@pytest.mark.parametrize(("architecture", "scope"), [marked("gfx90a", ""), marked("gfx942", " sc0 sc1")])
class TestAmd:
    """On AMD a barrier does not wait for stores, so each wave must write back its stores first."""

    def code(self, compiled: Compiled, architecture: str, kernel: str) -> str:
        text = body(compiled.read(architecture, kernel), kernel, nvidia=False)
        lines = (line.split(";")[0].rstrip() for line in text.splitlines())
        return "\n".join(line for line in lines if line and not line.lstrip().startswith("."))

    def test_a_barrier_of_the_threads_writes_back_first(
        self, compiled: Compiled, architecture: str, scope: str
    ) -> None:
        code = self.code(compiled, architecture, "sync_threads")
        assert re.search(rf"buffer_wbl2{scope}\n\s*s_waitcnt vmcnt\(0\)\n.*s_barrier", code, re.DOTALL)

    @pytest.mark.parametrize("kernel", ["signal", "store_trigger"])
    def test_a_release_waits_for_the_stores(
        self, compiled: Compiled, architecture: str, scope: str, kernel: str
    ) -> None:
        code = self.code(compiled, architecture, kernel)
        no_access = r"(?:(?!\s*(?:global|buffer|flat)_).*\n)*"
        released = rf"buffer_wbl2{scope}\n\s*s_waitcnt vmcnt\(0\)\n{no_access}\s*global_store_dwordx2 .*{scope}\n"
        assert re.search(released, code)

    def test_packets_are_single_accesses_at_system_scope(
        self, compiled: Compiled, architecture: str, scope: str
    ) -> None:
        stores = re.findall(r"global_store_dwordx2 .*", self.code(compiled, architecture, "put_packets"))
        assert stores
        assert all(store.endswith(scope) for store in stores)
        wanted = scope or " glc"
        loads = re.findall(r"global_load_dwordx2 .*", self.code(compiled, architecture, "get_packets"))
        assert sum(load.endswith(wanted) for load in loads) >= 2  # one load before the polling loop, one in the loop

    def test_an_acquire_drops_what_the_caches_hold(self, compiled: Compiled, architecture: str, scope: str) -> None:
        code = self.code(compiled, architecture, "poll")
        dropped = r"buffer_inv sc0 sc1" if scope else r"buffer_invl2\n\s*buffer_wbinvl1_vol"
        wanted = scope or " glc"
        assert re.search(rf"global_load_dwordx2 .*{wanted}\n\s*s_waitcnt vmcnt\(0\)\n\s*{dropped}\n", code)


@pytest.mark.parametrize("architecture", [marked(architecture) for architecture in ARCHITECTURES])
def test_a_kernel_that_uses_everything_compiles(compiled: Compiled, architecture: str) -> None:
    assert "everything" in compiled.read(architecture, "everything")


@pytest.mark.parametrize("architecture", [marked("sm_80"), marked("sm_90")])
def test_a_kernel_s_parameters_are_those_that_a_launch_passes(compiled: Compiled, architecture: str) -> None:
    code = body(compiled.read(architecture, "everything"), "everything", nvidia=True).split("\n)")[0]
    bits = [int(each) for each in re.findall(r"^\s*\.param \.[a-z](\d+)", code, re.MULTILINE)]
    assert bits[:5] == [64, 64, 64, 64, 32]  # the parameters: three channels or barriers, an array and a number
    assert bits[5:] in ([64], [64, 64])  # parameters that Triton adds; a launch passes null pointers for them


def test_a_triton_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("proxyccl.triton.basics")
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setattr(triton, "__version__", "3.3.1")
    with pytest.raises(RuntimeUnavailableError, match=r"needs Triton 3\.4 or later, not 3\.3\.1"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_amd_needs_a_newer_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_kernels, "VERSION", (3, 8))
    assert target_of("sm_90") == GPUTarget("cuda", 90, 32)
    with pytest.raises(RuntimeUnavailableError, match=r"needs Triton 3\.9 or later on AMD"):
        target_of("gfx942")
    monkeypatch.setattr(compiled_kernels, "VERSION", (3, 10))
    assert target_of("gfx942:sramecc+:xnack-") == GPUTarget("hip", "gfx942", 64)


def test_a_variant_is_loaded_once_and_launched_with_its_arguments() -> None:
    program = [sys.executable, str(PROGRAMS / "triton_launches.py")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100, check=True, env=without_interpreter())
    parameters = [(8, POINTER), (4, INTEGER), (4, FLOAT), (8, POINTER), (8, POINTER)]
    loaded = f"load scale True {parameters} 0"
    filled = f"load fill True {[(8, POINTER)] * 3} 0"
    launched = "launch (1, 1, 1) 128 (4096, None, None) None 0"
    assert done.stdout.splitlines() == [
        loaded,
        "launch (4, 2, 1) 64 (4096, 64, 2.0, None, None) None 0",
        "launch (8, 2, 1) 64 (8192, 128, 3.0, None, None) 9 0",
        loaded,
        "launch (4, 2, 1) 64 (4100, 65, 3.0, None, None) None 0",
        *[filled, launched, filled, launched, launched],
        filled,
        "launch (1, 1, 1) 128 (<ProxyChannel to rank 1>, None, None) None 0",  # the launch wakes the channel's proxy
        f"load typed True {[(8, POINTER), (8, INTEGER), (8, FLOAT), (1, INTEGER), *[(8, POINTER)] * 2]} 0",
        "launch (1, 1, 1) 128 (4096, 1, 2.0, 3, None, None) None 0",
        "num_ctas: clusters of programs can't be launched; expected 1, not 2",
        *["args: kernel scale was not called with such arguments before; call it once before the capture"] * 2,
        "Triton can't compile wrong_kind for 90: at 3:4: expected an SmChannel",
        "Triton can't compile put_half for 90: at 3:4: expected an integer",
    ]


@pytest.mark.parametrize(
    "architecture", ["sm_90", *([pytest.param("gfx942", marks=pytest.mark.full)] if NATIVE else [])]
)
def test_values_compile(compiled: Compiled, architecture: str) -> None:
    assert "values" in compiled.read(f"{architecture} values", "values")


# Runs only with --full: other tests run these kernels in the interpreter, and their functions are compiled above.
@pytest.mark.full
@pytest.mark.parametrize("architecture", ["sm_90", *(["gfx942"] if NATIVE else [])])
@pytest.mark.parametrize("kernel", ["diffuse", "all_to_all", "one_shot", "gemm_all_reduce", "all_gather_gemm"])
def test_the_examples_compile(compiled: Compiled, architecture: str, kernel: str) -> None:
    assert kernel in compiled.read(f"{architecture} examples", kernel)
