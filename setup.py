"""Builds the C extension modules and the host-compiled shipped kernels (metadata: pyproject.toml)."""

import re
from pathlib import Path

from setuptools import Extension, setup

INCLUDE_DIRS = ["device/include", "device/kernels"]


def headers_of(source: Path, found: set[Path]) -> set[Path]:
    """The project's headers that a source includes, so that a change rebuilds only what depends on it."""
    for name in re.findall(r'^#include "(.+)"', source.read_text(), re.MULTILINE):
        for path in (Path(directory, name) for directory in INCLUDE_DIRS):
            if path.exists() and path not in found:
                found.add(path)
                headers_of(path, found)
    return found


# Not Python modules: libraries of kernels that the host runtime loads with dlopen. As extensions they are built,
# installed and made part of the wheel by the same machinery as the others.
shipped_kernels = [
    Extension(
        f"proxyccl.device._{source.stem}",
        sources=[str(source)],
        depends=sorted(str(header) for header in headers_of(source, set())),
        include_dirs=INCLUDE_DIRS,
        extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden"],
        language="c++",
        py_limited_api=True,
    )
    for source in sorted(Path("device/kernels/host").glob("kernels_*.cpp"))
]

setup(
    cffi_modules=["device/build_native.py:ffi", "proxy/build_engine.py:ffi"],
    ext_modules=shipped_kernels,
    options={"bdist_wheel": {"py_limited_api": "cp311"}, "build": {"parallel": 2}, "build_ext": {"parallel": 2}},
)
