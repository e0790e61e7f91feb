"""Builds the C extension modules and the host-compiled shipped kernels (metadata: pyproject.toml)."""

from pathlib import Path

from setuptools import Extension, setup

HEADERS = [
    str(path) for folder in ("device/include/proxyccl", "device/kernels") for path in sorted(Path(folder).glob("*.h"))
]

# Not Python modules: libraries of kernels that the host runtime loads with dlopen. As extensions they are built,
# installed and made part of the wheel by the same machinery as the others.
shipped_kernels = [
    Extension(
        f"proxyccl.device.{source.stem.replace('kernels', '_kernels', 1)}",
        sources=[str(source)],
        depends=HEADERS,
        include_dirs=["device/include", "device/kernels"],
        extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden"],
        language="c++",
        py_limited_api=True,
    )
    for source in sorted(Path("device/kernels/host").glob("kernels_*.cpp"))
]

setup(
    cffi_modules=["device/build_native.py:ffi", "proxy/build_engine.py:ffi"],
    ext_modules=shipped_kernels,
    options={"bdist_wheel": {"py_limited_api": "cp311"}, "build_ext": {"parallel": 2}},
)
