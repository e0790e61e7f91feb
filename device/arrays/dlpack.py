"""Imports other libraries' arrays by DLPack's C structs, and exports this library's arrays."""

from __future__ import annotations

import ctypes
import operator
from typing import Any

from proxyccl.device._native import ffi
from proxyccl.device.arrays.dtypes import from_dlpack_type
from proxyccl.device.arrays.view import ArrayView, require_contiguous, require_memory
from proxyccl.device.errors import ArgumentError

# DLPack device types (dlpack.h, DLDeviceType).
_DL_CPU, _DL_CUDA, _DL_CUDA_HOST, _DL_ROCM, _DL_ROCM_HOST, _DL_CUDA_MANAGED = 1, 2, 3, 10, 11, 13
_DL_RUNTIME = {
    _DL_CPU: "host",
    _DL_CUDA: "cuda",
    _DL_CUDA_MANAGED: "cuda",
    _DL_ROCM: "hip",
    _DL_CUDA_HOST: "cuda",
    _DL_ROCM_HOST: "hip",
}


def dlpack_device(runtime: str, device: int) -> tuple[int, int]:
    """Returns DLPack's device type and number for a device of a runtime."""
    return {"host": _DL_CPU, "cuda": _DL_CUDA, "hip": _DL_ROCM}[runtime], device


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_DLTENSOR = b"dltensor"
_REFUSALS = (BufferError, RuntimeError, TypeError, ValueError)
"""Errors of libraries that can't export an array, for example because its memory was donated or deleted."""

# The objects that keep each exported tensor's memory alive until its consumer calls the deleter.
_exported: dict[int, tuple[object, ...]] = {}


def _release_export(managed: Any) -> None:
    _exported.pop(ctypes.addressof(managed.contents), None)


def _drop_capsule(capsule: int) -> None:
    # A consumer that takes the tensor renames the capsule, so a capsule that still has its first name owns the tensor.
    holder = ctypes.cast(capsule, ctypes.py_object)
    if _is_valid(holder, _DLTENSOR):
        _exported.pop(int(_get_pointer(holder, _DLTENSOR)), None)


_deleter = _Deleter(_release_export)
_capsule_destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_drop_capsule)


def export_dlpack(array: Any) -> Any:
    """Returns a DLPack capsule of an `Array`, which keeps the array alive until the consumer releases it."""
    device_type, device = array.__dlpack_device__()
    shape = (ctypes.c_int64 * len(array.shape))(*array.shape)
    managed = _DLManagedTensor()
    tensor = managed.tensor
    held = array.hold()
    tensor.data, tensor.device_type, tensor.device_id = int(ffi.cast("uintptr_t", held)), device_type, device
    tensor.ndim, tensor.shape, tensor.strides, tensor.byte_offset = len(array.shape), shape, None, 0
    tensor.dtype.code, tensor.dtype.bits = array.dtype.dlpack
    tensor.dtype.lanes = array.dtype.lanes
    managed.deleter = _deleter
    address = ctypes.addressof(managed)
    _exported[address] = (managed, shape, held)
    return _new_capsule(address, _DLTENSOR, ctypes.cast(_capsule_destructor, ctypes.c_void_p))


def from_dlpack(x: Any, argument: str) -> ArrayView:
    """Returns a view of an array that has ``__dlpack__``. Raises ArgumentError if the array has no memory, is not
    contiguous, has an unknown element type or device, or its library refuses the export.
    """
    try:
        device_type, device = map(operator.index, x.__dlpack_device__())
    except _REFUSALS as error:
        raise ArgumentError(argument, f"the array's library does not report its device: {error}") from error
    runtime = _DL_RUNTIME.get(device_type)
    if runtime is None:
        raise ArgumentError(argument, f"DLPack device type {device_type} is not supported; expected CPU, CUDA or ROCm")
    # On a GPU, stream -1 tells the exporter not to synchronize, because the caller chooses and orders the collective's
    # stream.
    try:
        capsule = x.__dlpack__() if runtime == "host" else x.__dlpack__(stream=-1)
        managed = int(_get_pointer(capsule, _DLTENSOR))
    except _REFUSALS as error:
        raise ArgumentError(argument, f"the array's library refuses a DLPack export: {error}") from error
    tensor = _DLManagedTensor.from_address(managed).tensor
    dtype = from_dlpack_type(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
    if dtype is None:
        raise ArgumentError(
            argument, f"DLPack type code {tensor.dtype.code} of {tensor.dtype.bits} bits is not supported"
        )
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if tensor.strides:
        require_contiguous(shape, [tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim)], dtype, argument)
    require_memory(tensor.data or 0, shape, argument)
    return ArrayView((tensor.data or 0) + tensor.byte_offset, shape, dtype, (runtime, device), True, (x, capsule))
