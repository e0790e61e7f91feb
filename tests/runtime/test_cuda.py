"""The CUDA runtime's errors on machines without CUDA. On machines with GPUs, other tests cover the CUDA runtime."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from proxyccl import RuntimeUnavailableError
from proxyccl.device._native import ffi, lib
from proxyccl.device.gpu import cuda
from proxyccl.device.runtimes import open_driver, open_runtime

pytestmark = pytest.mark.host_only(reason="it asks for CUDA by name")


def driver_is_here() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(driver_is_here(), reason="NVIDIA's driver is here")
def test_a_missing_driver_is_named() -> None:
    for attempt in (lambda: open_runtime("cuda"), lambda: open_driver("cuda")):
        with pytest.raises(RuntimeUnavailableError, match="cuda: NVIDIA's driver is not installed"):
            attempt()


@pytest.mark.parametrize(
    ("driver", "compiler", "message"),
    [
        (11080, 11, r"supports CUDA 11\.8; 12\.0 or later is needed"),
        (
            12040,
            13,
            r"supports CUDA 12\.4 and is older than the compiler, NVRTC 13; .*pip install 'nvidia-cuda-nvrtc<13'",
        ),
    ],
)
def test_a_driver_that_is_too_old_is_refused(driver: int, compiler: int, message: str) -> None:
    with pytest.raises(RuntimeUnavailableError, match=message):
        cuda.check_versions(driver, compiler)


def test_a_driver_runs_code_of_its_major_version_or_older() -> None:
    cuda.check_versions(13000, 13)
    cuda.check_versions(13000, 12)


def test_the_driver_tells_how_it_loads_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = cuda.cu.CUmoduleLoadingMode
    for mode, lazily in ((modes.CU_MODULE_EAGER_LOADING, False), (modes.CU_MODULE_LAZY_LOADING, True)):
        driver = SimpleNamespace(CUmoduleLoadingMode=modes, cuModuleGetLoadingMode=lambda mode=mode: (0, mode))
        monkeypatch.setattr(cuda, "cu", driver)
        assert object.__new__(cuda.CudaDriver).loads_lazily is lazily


QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_COPY_CONNECTIONS")


@pytest.mark.parametrize("name", QUEUES)
@pytest.mark.parametrize(("value", "limits"), [("1", True), ("7", True), ("8", False), ("", False), ("x", False)])
def test_fewer_queues_than_usual_are_named(
    name: str, value: str, limits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in QUEUES:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    assert object.__new__(cuda.CudaDriver).queue_limit == (f"{name}={value}" if limits else None)


def test_operations_of_a_stream_have_the_drivers_layout() -> None:
    """The copy of CUDA's struct in stream_operations.h must have the layout of the struct in the Python binding."""
    driver = pytest.importorskip("cuda.bindings.driver")
    theirs, ours = driver.CUstreamBatchMemOpParams(), ffi.new("ProxycclStreamOperation *")
    theirs.waitValue.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_64
    theirs.waitValue.address, theirs.waitValue.value64 = 0x1122334455667788, 0x0102030405060708
    theirs.waitValue.flags = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
    ours.kind, ours.address, ours.value = lib.PROXYCCL_STREAM_WAIT, 0x1122334455667788, 0x0102030405060708
    assert bytes(ffi.buffer(ours)) == ctypes.string_at(theirs.getPtr(), ffi.sizeof(ours[0]))
    assert int(driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_64) == lib.PROXYCCL_STREAM_WRITE
