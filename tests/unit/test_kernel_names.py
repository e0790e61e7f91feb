"""The search finds every kernel in a source, in any notation, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from proxyccl.device.build.kernel_names import in_plain_text, kernel_names, kernels_of_image, symbols_in_namespace
from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import Runtime
from support.devices import rank_runtime

C = 'extern "C" '


@pytest.mark.parametrize(
    "source",
    [
        C + "__global__ void k(int* p) {}",
        C + "__global__ void __launch_bounds__(128) k(int* p) {}",
        C + "__global__ __launch_bounds__(128, 2) void k(int* p) {}",
        C + "__launch_bounds__(kThreads * (1 + 1)) __global__ void k(int* p) {}",
        C + "__global__ void k(int* p) __attribute__((unused)) {}",
        C + "void __global__ k(int* p) {}",
        C + "__attribute__((used)) __global__ void __attribute__((noinline)) k(void (*f)(int), int (&a)[2]) {}",
        C + "[[maybe_unused]] __global__ __maxnreg__(64) void\nk\n(\nint* p /* { */) // ;\n{}",
        C + "{\n__global__ void k() {}\n}",
        C + "__global__ void k();\n" + C + "__global__ void k() {}",
        "template <class T> __device__ void helper(T) {}\n" + C + "__global__ void k() { helper<int>(1); }",
        "constexpr char c = '{', s[] = \"__global__ void no() {\";\n" + C + "__global__ void k() {}",
        'const char* raw = R"x(\n__global__ void no() {}\n)x";\n' + C + "__global__ void k() {}",
        "constexpr int n = 1'000;  // it's __global__ void no() {}\n" + C + "__global__ void k() {}",
        "#define NOTHING(x) \\\n  x\n#pragma once\n" + C + "__global__ void k() {}",
    ],
)
def test_a_kernel_is_found_however_it_is_written(source: str) -> None:
    assert in_plain_text(source)
    assert kernel_names(source) == ["k"]


@pytest.mark.parametrize(
    "source",
    [
        "template <class T> __global__ void k(T* p) {}",
        "template <class T, int n = (1 + 2)> __global__ void __launch_bounds__(n) k(T* p) {}",
        C + "__global__ void k(int* p);",
        "// " + C + "__global__ void k(int* p) {}",
        "/* " + C + "\n__global__ void k(int* p) {} */",
        "__device__ void k(int* p) {}",
    ],
)
def test_what_is_no_kernel_is_not_taken_for_one(source: str) -> None:
    assert kernel_names(source) == []


def test_kernels_come_in_the_order_of_the_source_each_once() -> None:
    source = (
        "__global__ void b() { if (1) {} }\n__global__ void a(int) {}\n__global__ void b();\n__global__ void c() {}"
    )
    assert kernel_names(source) == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("#define KERNEL(name) \\\n  " + C + "__global__ void name", ()),
        ("#ifdef FAST\n", ()),
        ("#  if 1\n", ()),
        ('#include "mine.h"\n', ()),
        ("#include <cmath>\n", ()),
        ("KERNEL void k() {}", ("-DKERNEL=__global__",)),
    ],
)
def test_a_source_that_hides_kernels_is_known(source: str, options: tuple[str, ...]) -> None:
    assert not in_plain_text(source, options)


@pytest.mark.parametrize(
    "source",
    [
        '#include "proxyccl/proxyccl.h"\n#include <proxyccl/sync.h>\n',
        "#define N 4\n#undef N\n#pragma unroll\n",
        '// #include "mine.h"\n/* #if */',
    ],
)
def test_our_headers_and_other_macros_hide_nothing(source: str) -> None:
    assert in_plain_text(source)


def test_kernels_are_read_from_an_image() -> None:
    cubin = b"\0.text.one\0.nv.constant0.one\0.nv.constant0.one\0.nv.constant0._Z3twoPi\0.nv.constant3\0.text.helper\0"
    assert kernels_of_image(cubin) == ["one"]
    assert kernels_of_image(b"\0one.kd\0b\0two.kd\0_Z3oddv.kd\0") == ["one", "two"]


def test_kernels_of_the_namespace_are_found_by_their_names_there() -> None:
    mangled = "_ZN8proxyccl12dispatch_idsE15ProxycclExperts16ProxycclDispatch"
    for image in (f"\0.nv.constant0.{mangled}\0.nv.constant0.k\0", f"\0k.kd\0{mangled}.kd\0_ZN4mine1kEv.kd\0"):
        assert symbols_in_namespace(image.encode()) == {"dispatch_ids": mangled}


HIDDEN = r"""
#include "proxyccl/proxyccl.h"
#include "more.h"
#define ADDS(name, n) extern "C" __global__ void __launch_bounds__(64) name(int* out) { *out = VALUE + n; }
#define NAMED(prefix, number) ADDS(prefix##_##number, number)
ADDS(one, 1)
NAMED(plus, 2)
#if VALUE == 40
ADDS(of_40, 3)
#else
extern "C" __global__ void of_others(int* out) { *out = missing; }
#endif
template <class T> __global__ void no_kernel(T* out) { *out = 0; }
__device__ int unused() { return VALUE; }
"""


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return rank_runtime(0)


def test_kernels_of_macros_and_conditions_are_found(runtime: Runtime, tmp_path: Path) -> None:
    (tmp_path / "more.h").write_text('extern "C" __global__ void of_a_header(int* out) { *out = VALUE; }\n')
    module = runtime.compile(HIDDEN, options=("-DVALUE=40",), include_dirs=(str(tmp_path),))
    assert {kernel.name for kernel in module} == {"one", "plus_2", "of_40", "of_a_header"}
    out, value = runtime.allocate(4), np.zeros(1, np.int32)
    for name, expected in (("one", 41), ("plus_2", 42), ("of_40", 43), ("of_a_header", 40)):
        module[name](1, 1, out.ptr)
        runtime.synchronize()
        runtime.copy(value.ctypes.data, out.ptr, 4)
        assert value[0] == expected


def test_a_source_left_without_kernels_is_refused(runtime: Runtime) -> None:
    with pytest.raises(ArgumentError, match=r"^source: no kernel in it"):
        runtime.compile("#if 0\n" + C + "__global__ void k() {}\n#endif\n")
