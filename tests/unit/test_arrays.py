"""Arrays are accepted through DLPack, array interfaces and buffers, and from numpy and ml_dtypes. ProxyCCL's arrays can
be exported through the same protocols.
"""

from __future__ import annotations

import array
import ctypes
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from proxyccl import ArgumentError, Array, ClosedError, Communicator, Runtime
from proxyccl.device._native import ffi
from proxyccl.device.arrays.array import as_view
from proxyccl.device.arrays.dlpack import export_dlpack
from proxyccl.device.arrays.dtypes import DTYPES as ALL_DTYPES
from proxyccl.device.arrays.dtypes import as_dtype, from_dlpack_type
from support.cases.reference import DTYPES, numpy_dtype
from support.devices import ON_HOST, RUNTIME, rank_runtime
from support.running import run_ranks

SHARED = pytest.mark.host_only(reason="numpy does not reach a GPU's memory")


@functools.cache
def runtime() -> Runtime:
    opened = rank_runtime(0)
    opened.activate()
    return opened


def make(shape: tuple[int, ...], dtype: str) -> Array:
    element = as_dtype(dtype)
    nbytes = int(np.prod(shape)) * element.itemsize
    return Array(runtime(), runtime().allocate(max(nbytes, 1)), shape, element)


class OnlyDLPack:
    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._values.__dlpack_device__()


class WithAddress:
    """An exporter of float32 with an address that may be invalid."""

    dtype = as_dtype("float32")

    def __init__(self, ptr: int, *, offset: int = 0, shape: tuple[int, ...] = (4,)) -> None:
        self.shape, self._ptr, self._offset = shape, ptr, offset

    def hold(self) -> Any:
        return ffi.cast("void *", self._ptr)

    def __dlpack__(self, **_: Any) -> Any:
        capsule = export_dlpack(self)
        address = ctypes.pythonapi.PyCapsule_GetPointer
        address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        offset = ctypes.c_uint64.from_address(address(capsule, b"dltensor") + 40)  # of DLTensor.byte_offset
        offset.value = self._offset
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class OnlyCudaInterface:
    def __init__(self, **changes: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (4,),
            "typestr": "<f4",
            "data": (0x1000, False),
            "version": 3,
            **changes,
        }


# -- imports ---


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "int32", "int64", "int8", "uint16", "complex64", "bool"]
)
def test_numpy_and_dlpack_are_seen_alike(dtype: str) -> None:
    values = np.zeros((3, 5), dtype)
    view = as_view(values, "x")
    assert (view.ptr, view.shape, view.dtype.name) == (values.ctypes.data, (3, 5), dtype)
    assert (view.size, view.nbytes, view.device, view.writable) == (15, values.nbytes, ("host", 0), True)
    other = as_view(OnlyDLPack(values), "x")
    assert (other.ptr, other.shape, other.dtype, other.device) == (view.ptr, view.shape, view.dtype, view.device)
    assert as_view(view, "x") is view


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_types_of_ml_dtypes_are_known(dtype: Any) -> None:
    values = np.zeros(7, dtype)
    view = as_view(values, "x")
    assert view.dtype.name == np.dtype(dtype).name
    assert view.dtype.numpy() == np.dtype(dtype)


@pytest.mark.parametrize(
    ("buffer", "dtype", "count"),
    [
        (bytearray(6), "uint8", 6),
        (array.array("d", [1, 2, 3]), "float64", 3),
        (array.array("i", [1, 2]), "int32", 2),
        (memoryview(bytearray(8)).cast("f"), "float32", 2),
        ((ctypes.c_int64 * 4)(), "int64", 4),
    ],
)
def test_buffers_are_taken(buffer: Any, dtype: str, count: int) -> None:
    view = as_view(buffer, "x")
    assert (view.dtype.name, view.size, view.writable) == (dtype, count, True)


def test_a_read_only_array_is_seen_as_such() -> None:
    values = np.ones(3)
    values.flags.writeable = False
    assert not as_view(values, "x").writable
    assert not as_view(b"abc", "x").writable


def test_the_cuda_array_interface_is_a_gpus() -> None:
    view = as_view(OnlyCudaInterface(), "x", gpu="hip")
    assert (view.ptr, view.shape, view.dtype.name, view.device) == (0x1000, (4,), "float32", ("hip", -1))
    assert not as_view(OnlyCudaInterface(data=(0x1000, True)), "x").writable


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (object(), "expected an array .*__dlpack__.*, not object"),
        ("text", "expected an array .*__dlpack__.*, not str"),
        (3.5, "expected an array .*, not float"),
        ([1, 2, 3], "expected an array .*, not list"),
        (None, "expected an array .*, not NoneType"),
        (np.zeros((4, 4))[:, :2], "not contiguous"),
        (np.zeros((4, 4)).T, "not contiguous"),
        (np.zeros(8)[::2], "not contiguous"),
        (np.zeros(8)[::-1], "not contiguous"),
        (OnlyDLPack(np.zeros((4, 4)).T), "not contiguous"),
        (OnlyCudaInterface(strides=(8,)), "not contiguous"),
        (OnlyCudaInterface(typestr="|V3"), "unknown element type"),
        (np.zeros(3, "M8[s]"), "unknown element type"),
        (np.zeros(3, "S4"), "unknown element type"),
        (np.zeros(3, [("a", "f4")]), "unknown element type"),
        (np.zeros(3, object), "unknown element type"),
        (np.zeros(3, np.longdouble), "unknown element type"),
        (np.zeros(3, ">f4"), "byte order"),
        (OnlyCudaInterface(typestr=">f4"), "byte order"),
    ],
)
def test_what_is_no_contiguous_array_of_a_known_type_is_refused(x: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"x: .*{message}"):
        as_view(x, "x")


def test_contiguity_ignores_strides_of_single_dimensions() -> None:
    assert as_view(np.zeros((4, 4))[:1], "x").shape == (1, 4)
    assert as_view(np.zeros((4, 1, 4))[:, :1], "x").shape == (4, 1, 4)
    assert as_view(np.zeros((4, 0))[:, ::2], "x").size == 0
    assert as_view(np.float64(3).reshape(()), "x").shape == ()


WITHOUT_MEMORY = {
    "DLPack": lambda: WithAddress(0),
    "DLPack with an offset": lambda: WithAddress(0, offset=64),
    "CUDA array interface": lambda: OnlyCudaInterface(data=(0, False)),
    "CUDA array interface, None": lambda: OnlyCudaInterface(data=(None, False)),
    "buffer": lambda: (ctypes.c_float * 4).from_address(0),
}


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_an_array_at_address_0_is_refused(kind: str) -> None:
    with pytest.raises(ArgumentError, match=r"dst: the array of shape \(4,\) has no memory: its address is 0"):
        as_view(WITHOUT_MEMORY[kind](), "dst")


def test_an_empty_array_needs_no_memory() -> None:
    assert as_view(OnlyCudaInterface(shape=(0, 3), data=(0, False)), "x").nbytes == 0
    assert as_view(WithAddress(0, shape=(3, 0)), "x").nbytes == 0


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.ma.masked_array(np.ones(3), [0, 1, 0]), r"the array is masked; pass x\.filled\(\)"),
        (np.ma.masked_array(np.ones(3)), r"pass x\.filled\(\)"),
        (OnlyCudaInterface(mask=OnlyCudaInterface(typestr="|b1")), "has a mask"),
    ],
)
def test_a_masked_array_is_refused(x: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"x: .*{message}"):
        as_view(x, "x")


def test_masked_values_are_not_uploaded() -> None:
    x = make((3,), "float32").fill(1)
    with pytest.raises(ArgumentError, match=r"values: the array is masked; pass x\.filled\(\)"):
        x.upload(np.ma.masked_array([2, 2, 2], [0, 1, 0]))
    assert x.numpy().tolist() == [1, 1, 1]


@pytest.mark.parametrize("device", [4, 7, 14])
def test_devices_that_nobody_knows_are_refused(device: int) -> None:
    class Elsewhere(OnlyDLPack):
        def __dlpack_device__(self) -> tuple[int, int]:
            return device, 0

    with pytest.raises(ArgumentError, match=f"device type {device}"):
        as_view(Elsewhere(np.zeros(3)), "x")


def test_the_view_keeps_its_exporter_alive() -> None:
    values = np.ones(5)
    exporter = OnlyDLPack(values)
    alive = weakref.ref(exporter)
    view = as_view(exporter, "x")
    del exporter
    gc.collect()
    assert alive() is not None
    del view
    gc.collect()
    assert alive() is None


# -- element types ---


@pytest.mark.parametrize("name", ALL_DTYPES)
def test_element_types_are_known_by_name_numpy_and_dlpack(name: str) -> None:
    dtype = as_dtype(name)
    assert as_dtype(dtype) is dtype
    assert str(dtype) == name
    assert from_dlpack_type(*dtype.dlpack, dtype.lanes) is dtype
    assert from_dlpack_type(*dtype.dlpack, 4) is None
    if name != "float4_e2m1fn_x2":  # numpy has no such type
        assert as_dtype(dtype.numpy()) is dtype
        assert dtype.numpy().itemsize == dtype.itemsize


def test_torchs_types_are_known_by_their_names() -> None:
    torch_dtype = type("dtype", (), {"__module__": "torch", "__str__": lambda _: "torch.bfloat16"})()
    assert as_dtype(torch_dtype).name == "bfloat16"


@pytest.mark.parametrize("value", ["float31", "", object(), "torch.float32", np.dtype("U3"), None, {}])
def test_unknown_element_types_are_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"dtype: unknown element type .*; expected one of float16"):
        as_dtype(value)


# -- exports ---


@SHARED
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_shares_its_memory_with_numpy(dtype: str) -> None:
    x = make((2, 3), dtype).upload(np.arange(6).reshape(2, 3))
    shared = np.asarray(x).view(numpy_dtype(dtype))
    assert shared.shape == (2, 3)
    shared[1, 2] = 40
    assert x.numpy()[1, 2] == 40
    copy = x.numpy()
    copy[0, 0] = 9
    assert x.numpy()[0, 0] == 0


@SHARED
@pytest.mark.parametrize("dtype", ["float32", "int64", "complex64"])
def test_an_array_shares_its_memory_over_dlpack(dtype: str) -> None:
    x = make((4, 2), dtype).fill(1)
    assert x.__dlpack_device__() == (1, 0)
    shared = np.from_dlpack(x)
    assert shared.dtype == np.dtype(dtype)
    assert shared.ctypes.data == x.ptr
    x.fill(3)
    assert (shared == 3).all()


def test_dlpack_makes_no_copy_and_says_so() -> None:
    x = make((4,), "float32")
    for request in ({"copy": True}, {"dl_device": (7, 0)}):
        with pytest.raises(BufferError, match="where it lies"):
            x.__dlpack__(**request)
    if ON_HOST:
        assert np.from_dlpack(x, copy=False).ctypes.data == x.ptr


@SHARED
def test_dlpack_keeps_the_memory_until_the_consumer_lets_go() -> None:
    x = make((1000,), "int32").fill(5)
    memory = weakref.ref(x.memory)
    shared = np.from_dlpack(x)
    del x
    gc.collect()
    assert memory() is not None
    assert (shared == 5).all()
    del shared
    gc.collect()
    assert memory() is None


def test_a_capsule_that_nobody_takes_lets_go_too() -> None:
    x = make((10,), "int32")
    memory = weakref.ref(x.memory)
    capsule = x.__dlpack__()
    del x
    gc.collect()
    assert memory() is not None
    del capsule
    gc.collect()
    assert memory() is None


def test_our_own_export_is_taken_back() -> None:
    x = make((3, 4), "bfloat16")

    class Exporter:
        def __dlpack__(self, **options: Any) -> Any:
            return x.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return x.__dlpack_device__()

    view = as_view(Exporter(), "x")
    assert (view.ptr, view.shape, view.dtype.name) == (x.ptr, (3, 4), "bfloat16")


def test_an_array_offers_only_the_interface_that_is_true() -> None:
    x = make((2,), "float32")
    assert hasattr(x, "__array_interface__") == ON_HOST
    assert hasattr(x, "__cuda_array_interface__") != ON_HOST
    with pytest.raises(AttributeError, match="no attribute 'strides'"):
        _ = x.strides


def test_an_array_says_what_it_is() -> None:
    x = make((2, 3), "float16")
    assert repr(x) == f"Array(shape=(2, 3), dtype=float16, device={RUNTIME}:0)"
    assert (len(x), x.size, x.nbytes) == (2, 6, 12)
    with pytest.raises(TypeError, match="0-d"):
        len(make((), "float16"))


def test_upload_broadcasts_and_converts_as_numpy_does() -> None:
    x = make((2, 3), "float32").upload([1, 2, 3])
    assert np.array_equal(x.numpy(), [[1, 2, 3], [1, 2, 3]])
    assert x.fill(7) is x
    with pytest.raises(ValueError, match="broadcast"):
        x.upload([1, 2])
    assert make((0, 3), "float32").fill(1).numpy().shape == (0, 3)


@SHARED
@pytest.mark.parametrize(
    "view",
    [np.asarray, np.from_dlpack, lambda x: np.asarray(x)[1:], lambda x: memoryview(np.asarray(x)), Array.__dlpack__],
    ids=["numpy", "DLPack", "part", "memoryview", "capsule"],
)
def test_an_array_is_not_freed_while_another_library_has_a_view(view: Callable[[Array], Any]) -> None:
    x = make((4,), "float32").fill(3)
    first, second = view(x), np.asarray(x)
    with pytest.raises(BufferError, match=r"can't be freed: other libraries have views of it \(2\)"):
        x.free()
    del first
    with pytest.raises(BufferError, match=r"can't be freed: other libraries have views of it \(1\)"):
        x.free()
    assert (second == 3).all()  # the failed free() leaves the array usable
    assert x.numpy().tolist() == [3] * 4
    del second
    x.free()
    with pytest.raises(ClosedError):
        _ = x.ptr


@SHARED
def test_a_view_outlives_the_array() -> None:
    view = np.asarray(make((1000,), "float32").fill(3))
    gc.collect()
    make((1000,), "float32").fill(4)
    assert (view == 3).all()


@SHARED
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)])
def test_numpy_sees_an_array_of_any_shape(shape: tuple[int, ...]) -> None:
    x = make(shape, "int32").fill(7)
    view = np.asarray(x)
    assert (view.shape, view.dtype.name, view.flags.writeable) == (shape, "int32", True)
    assert (view == 7).all()
    if view.size:
        assert view.ctypes.data == x.ptr


def test_freed_memory_is_refused() -> None:
    x = make((2,), "float32")
    x.free()
    x.free()
    for use in (lambda: x.ptr, x.numpy, lambda: np.asarray(x) if ON_HOST else x.__cuda_array_interface__, x.__dlpack__):
        with pytest.raises(ClosedError, match="freed"):
            use()


@pytest.mark.host_only(reason="test_gpu.py covers all kinds of GPU arrays")
def test_collectives_take_every_kind_of_array() -> None:
    def body(comm: Communicator) -> None:
        expected = [3.0] * 4
        plain = np.full(4, comm.rank + 1, np.float32)
        assert comm.all_reduce(plain) is plain
        assert plain.tolist() == expected
        through_dlpack = np.full(4, comm.rank + 1, np.float32)
        comm.all_reduce(OnlyDLPack(through_dlpack))
        assert through_dlpack.tolist() == expected
        numbers = array.array("d", [comm.rank + 1] * 4)
        comm.all_reduce(numbers)
        assert numbers.tolist() == expected
        own = comm.empty(4, "float32").fill(comm.rank + 1)
        comm.all_reduce(own)
        assert own.numpy().tolist() == expected
        half = np.full(4, comm.rank + 1, ml_dtypes.bfloat16)
        comm.all_reduce(half)
        assert half.tolist() == expected
        gathered = comm.all_gather(b"\1\2")  # a read-only input
        assert gathered.tolist() == [1, 2, 1, 2]

    run_ranks(2, body)


class OfDLPack:
    """An exporter of DLPack that returns the given device and capsule. Raises the capsule if it is an exception."""

    def __init__(self, device: Any, capsule: Any) -> None:
        self._device, self._capsule = device, capsule

    def __dlpack_device__(self) -> Any:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        if isinstance(self._capsule, Exception):
            raise self._capsule
        return self._capsule


def closed_memory() -> memoryview:
    memory = memoryview(bytearray(16))
    memory.release()
    return memory


@pytest.mark.parametrize(
    "make",
    [
        lambda: OfDLPack((1, 0), RuntimeError("Array has been deleted")),  # jax raises this error for donated memory
        lambda: OfDLPack((1, 0), TypeError("no")),
        lambda: OfDLPack((1, 0), None),
        lambda: OfDLPack((1, 0), np.ones(4).__dlpack__(max_version=(1, 0))),
        lambda: OfDLPack(None, None),
        lambda: OfDLPack((1,), None),
        lambda: OnlyCudaInterface(shape=4),
        lambda: OnlyCudaInterface(shape=(-1,)),
        lambda: OnlyCudaInterface(shape=("a",)),
        lambda: OnlyCudaInterface(typestr="zz"),
        lambda: OnlyCudaInterface(data=None),
        lambda: OnlyCudaInterface(data=("a", False)),
        lambda: OnlyCudaInterface(data=(-4096, False)),
        lambda: OnlyCudaInterface(data=(2**64, False)),
        lambda: OnlyCudaInterface(strides=(4, 4)),
        lambda: OnlyCudaInterface(strides=4),
        closed_memory,
        ctypes.c_void_p * 4,  # numpy has no type for these elements
    ],
)
def test_an_exporter_that_fails_or_contradicts_itself_is_refused_by_name(make: Callable[[], Any]) -> None:
    with pytest.raises(ArgumentError) as caught:
        as_view(make(), "x")
    assert caught.value.argument == "x"


def test_memory_of_a_gpu_is_not_taken_for_the_hosts() -> None:
    """If an array with only the CUDA array interface were taken for host memory, a host kernel would read a GPU's
    address.
    """
    assert as_view(OnlyCudaInterface(), "x", gpu="host").place == "cuda"
    assert as_view(OnlyCudaInterface(), "x", gpu="hip").place == "hip"


@pytest.mark.parametrize("values", ["abc", object(), [1, 2], {}], ids=lambda x: type(x).__name__)
def test_values_that_an_array_can_not_hold_are_refused(values: Any) -> None:
    runtime = rank_runtime(0)
    x = Array(runtime, runtime.allocate(4), (4,), as_dtype("uint8"))
    with pytest.raises(ArgumentError, match="values: can't be converted to"):
        x.upload(values)
