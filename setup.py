"""Builds the C extension modules and their type stubs (metadata: pyproject.toml) and, with PROXYCCL_SHIP_KERNELS=1, the
shipped kernels for the CPU. Without this variable, the host runtime compiles each kernel at the kernel's first use,
which takes g++ three minutes for all kernels.
"""

import os
import re
import runpy
from pathlib import Path

from setuptools import Extension, setup

INCLUDE_DIRS = ["device/include", "device/kernels"]
CALLS = ("module", "table", "kept_forms", "form", "form_list", "flow_calls", "arrays", "reach")
EXPERT_CALLS = ("descriptor", "layer_form", "dispatch_form", "combine_form")
BUILD_SCRIPTS = ("device/build_native", "proxy/build_engine", "proxy/build_transfers")
JOBS = len(os.sched_getaffinity(0))
GENERATED = Path("build/host_kernels")


def kernel_libraries() -> dict[str, str]:
    """Returns the sources of the libraries of shipped kernels for the CPU, by name; several, to build in parallel."""
    types = runpy.run_path("device/arrays/element_types.py")["ELEMENT_TYPES"]
    dispatches = ("dispatch", "dispatch_masks", "dispatch_shared_masks")
    files = ("combine", "dispatch", "places", "quantize", "spread", "weigh")
    moves = (
        "moves",
        "packet_moves",
        "send_receive",
        "signal_peer",
        "engram_fetch",
        "copy_blocks",
        "float16_parts",
        "nvfp4_rows",
        "cast_weights",
    )
    experts = [f'#include "experts/{name}.h"\n' for name in files]
    typed = {each.name: ("combine", "expert_weigh", "expert_quantize") for each in types if each.tokens}
    typed |= {each.name: (*typed[each.name], *dispatches) for each in types if each.tokens and each.itemsize == 2}
    typed["bfloat16"] = (*typed["bfloat16"], "combine_signalled")
    typed["uint8"] = (*dispatches, "dispatch_ids", "dispatch_masks_store")
    for each in types:
        if each.name in typed:
            experts += [each.c_check()] + [
                f"PROXYCCL_TYPED_KERNEL({kernel}, {kernel}_{each.name}, {each.c_name})\n" for kernel in typed[each.name]
            ]
    norms = ""  # the files define the same macro, so it is undefined between them
    for file, kernels in (("add", ("add",)), ("all_reduce", ("one_shot", "two_shot"))):
        norms += f'#undef PROXYCCL_TYPED_KERNEL\n#include "{file}_rms_norm.h"\n'
        for each in types:
            for name in (f"{kernel}_rms_norm_packets{apart}" for kernel in kernels for apart in ("", "_apart")):
                if each.name in ("float16", "bfloat16"):
                    norms += f"PROXYCCL_TYPED_KERNEL({name}, {name}_{each.name}, {each.c_name})\n"
    return {
        "norms": norms,
        "moves": "".join(f'#include "{name}.h"\n' for name in moves),
        "experts": "".join(experts),
        **{
            each.name: f'#include "execute_plan.h"\n#include "host_library.h"\n{each.c_check()}'
            f"FOR_EACH_OPERATION({each.c_name}, {each.name})\n"
            f"PROXYCCL_TYPED_KERNEL(execute_plan, execute_plan_{each.name}, {each.c_name})\n"
            + (f"FOR_EACH_BITWISE_OPERATION({each.c_name}, {each.name})\n" if each.bitwise else "")
            for each in types
            if each.c_name
        },
        **{
            each.name: f'#include "execute_plan.h"\n{each.c_check()}'
            f"PROXYCCL_TYPED_KERNEL(execute_plan, execute_plan_{each.name}, {each.plan_name})\n"
            for each in types
            if each.plan_name
        },
    }


def written(path: Path, text: str) -> Path:
    """Writes a generated file, unless the file has this text already, so that an unchanged file is not built again."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


def headers_of(source: Path, found: set[Path]) -> set[Path]:
    """Returns the headers that a source includes, even indirectly, so that a changed header rebuilds its sources."""
    for name in re.findall(r'^#include "(.+)"', source.read_text(), re.MULTILINE):
        for directory in (source.parent, "device", *INCLUDE_DIRS):
            path = Path(os.path.normpath(Path(directory, name)))
            if path.exists() and path not in found:
                found.add(path)
                headers_of(path, found)
    return found


def headers_of_all(sources: list[str]) -> list[str]:
    """Returns the names of all headers that the sources include."""
    return sorted({str(header) for source in sources for header in headers_of(Path(source), set())})


# Libraries of kernels that the host runtime loads with dlopen. Declaring the libraries as extensions makes setuptools
# build and install them, although they are not Python modules.
shipped_kernels = [
    Extension(
        f"proxyccl.device._{source.stem}",
        sources=[str(source)],
        depends=headers_of_all([str(source)]),
        include_dirs=INCLUDE_DIRS,
        # -g0, because Python's own flags may request debug information, with which the build takes a third longer.
        extra_compile_args=["-std=c++17", "-O3", "-g0", "-fvisibility=hidden"],
        language="c++",
        py_limited_api=True,
    )
    for source in [written(GENERATED / f"kernels_{name}.cpp", text) for name, text in kernel_libraries().items()]
    if os.environ.get("PROXYCCL_SHIP_KERNELS") == "1"
]

# These extensions access Python objects, so they are not built by cffi.
of_objects = [
    Extension(
        name,
        sources=sources,
        depends=headers_of_all(sources),
        include_dirs=["device", *INCLUDE_DIRS],
        extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden"],
        py_limited_api=True,
    )
    for name, sources in {
        "proxyccl.channels.calls._calls": [
            *(f"channels/calls/{name}.c" for name in CALLS),
            *(f"channels/expert_parallel/{name}.c" for name in EXPERT_CALLS),
        ],
        "proxyccl.torch._device_calls": [f"faces/torch/{name}.c" for name in ("call_issuer", "queued_call")],
    }.items()
]

# The stubs are written next to their build scripts, where setuptools finds them as package data.
make_stub = runpy.run_path("device/build_stubs.py")["make_stub"]
for name in BUILD_SCRIPTS:
    written(*make_stub(Path(f"{name}.py")))

setup(
    cffi_modules=[f"{name}.py:ffi" for name in BUILD_SCRIPTS],
    ext_modules=[*of_objects, *shipped_kernels],
    options={
        "bdist_wheel": {"py_limited_api": "cp311"},
        "build": {"parallel": JOBS},
        "build_ext": {"parallel": JOBS},
    },
)
