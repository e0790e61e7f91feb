"""RDMA may write to a GPU's memory only if the device or the caller promises that such writes arrive before signals."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxyccl import RuntimeUnavailableError
from proxyccl.device.gpu import cuda, hip
from proxyccl.device.runtime import Runtime
from proxyccl.proxy.fabric.endpoint import FabricEndpoint
from proxyccl.proxy.registrations import Registration
from proxyccl.proxy.verbs.registrations import Registrations


class _Counts:
    def __init__(self) -> None:
        self.registered = 0

    def register(self, ptr: int, nbytes: int, *arguments: Any, **options: Any) -> Registration:
        self.registered += 1
        return Registration(ptr, nbytes, ptr, 0, 0)

    def release(self, registration: Registration) -> None:
        """Ends a registration."""


class VerbsRegistrar(_Counts, Registrations):  # type: ignore[misc]
    pass


class FabricRegistrar(_Counts, FabricEndpoint):  # type: ignore[misc]
    pass


def gpu(orders: bool) -> Runtime:
    """Returns a runtime with a device that does or does not order RDMA writes."""
    memory = SimpleNamespace(ptr=4096, nbytes=4096, close=lambda: None)
    return cast(
        Runtime,
        SimpleNamespace(
            name="cuda",
            device_name="GPU",
            orders_rdma_writes=orders,
            current=contextlib.nullcontext,
            allocate=lambda nbytes: memory,
            dmabuf=lambda ptr, nbytes: None,
            pointer_device=lambda ptr: 0 if ptr == memory.ptr else None,
        ),
    )


CASES = [(True, "auto", True), (False, "auto", False), (False, "ordered", True)]


@pytest.mark.parametrize(("orders", "gpu_writes", "reached"), CASES)
def test_verbs_register_memory_of_devices_that_order_writes(orders: bool, gpu_writes: str, reached: bool) -> None:
    registrar, runtime = VerbsRegistrar(), gpu(orders)
    reason = registrar.unsupported_reason(runtime, gpu_writes)
    assert bool(reason) != reached
    if reached:
        registrar.register_of(runtime, gpu_writes, 4096, 64)
        assert registrar.registered == 2
    else:
        assert "PROXYCCL_RDMA=gpu_writes=ordered" in reason
        with pytest.raises(RuntimeUnavailableError, match="GPU does not say that it orders RDMA writes"):
            registrar.register_of(runtime, gpu_writes, 4096, 64)
        assert registrar.registered == 0


@pytest.mark.parametrize(("orders", "gpu_writes", "reached"), CASES)
def test_a_fabric_registers_memory_of_devices_that_order_writes(orders: bool, gpu_writes: str, reached: bool) -> None:
    registrar, runtime = FabricRegistrar(), gpu(orders)
    if reached:
        registrar.register_of(runtime, gpu_writes, 4096, 64)
    else:
        with pytest.raises(RuntimeUnavailableError, match=r"orders RDMA writes .* PROXYCCL_FABRIC=gpu_writes=ordered"):
            registrar.register_of(runtime, gpu_writes, 4096, 64)
        registrar.register_of(runtime, gpu_writes, 8192, 64)  # this address is pinned host memory
    assert registrar.registered == 1


@pytest.mark.parametrize(("ordering", "ordered"), [(0, False), (100, True), (200, True)])
def test_nvidia_driver_is_asked_for_the_order(monkeypatch: pytest.MonkeyPatch, ordering: int, ordered: bool) -> None:
    kinds = cuda.cu.CUdevice_attribute
    asked = kinds.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
    driver = SimpleNamespace(
        CUdevice_attribute=kinds,
        CUGPUDirectRDMAWritesOrdering=cuda.cu.CUGPUDirectRDMAWritesOrdering,
        cuDeviceGet=lambda ordinal: (0, ordinal),
        cuDeviceGetAttribute=lambda which, handle: (0, ordering if which == asked else 9),
        cuDeviceGetName=lambda size, handle: (0, b"GPU\0"),
        cuDeviceGetPCIBusId=lambda size, handle: (0, b"0000:3B:00.0\0"),
        cuDeviceGetUuid=lambda handle: (0, SimpleNamespace(bytes=bytes(16))),
        cuDeviceTotalMem=lambda handle: (0, 1 << 30),
    )
    monkeypatch.setattr(cuda, "cu", driver)
    assert object.__new__(cuda.CudaDriver).device(0).orders_rdma_writes is ordered


@pytest.mark.parametrize(("ordering", "ordered"), [(None, False), (0, False), (100, True)])
def test_amd_driver_is_asked_where_it_knows_the_attribute(
    monkeypatch: pytest.MonkeyPatch, ordering: int | None, ordered: bool
) -> None:
    name = "hipDeviceAttributeGPUDirectRDMAWritesOrdering"
    kinds = SimpleNamespace(**({} if ordering is None else {name: name}))
    properties = SimpleNamespace(
        name="GPU",
        uuid=SimpleNamespace(bytes=bytes(16)),
        gcnArchName="gfx942",
        multiProcessorCount=304,
        totalGlobalMem=1 << 30,
        pciDomainID=0,
        pciBusID=3,
        pciDeviceID=0,
    )
    monkeypatch.setattr(hip.hip, "hipDeviceAttribute_t", kinds)
    monkeypatch.setattr(hip.hip, "hipGetDeviceProperties", lambda device: (0, properties))
    monkeypatch.setattr(hip.hip, "hipDeviceGetAttribute", lambda kind, device: (0, ordering))
    assert object.__new__(hip.HipDriver).device(0).orders_rdma_writes is ordered
