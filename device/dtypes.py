"""Element types by name, as kernels, numpy, torch and DLPack spell them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from proxyccl.device.errors import ArgumentError


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: as numpy and torch spell it: ``"float32"``, ``"bfloat16"``, …
        itemsize: bytes.
        c_name: the type in kernels (``reduce.h``), or "" where kernels only move it.
        dlpack: DLPack's (type code, bits).
    """

    name: str
    itemsize: int
    c_name: str
    dlpack: tuple[int, int]

    def __str__(self) -> str:
        return self.name

    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype. bfloat16 and float8 need the package ml_dtypes.

        Raises:
            ArgumentError: ml_dtypes is not installed.
        """
        if self.name in _EXTENDED:
            try:
                import ml_dtypes
            except ImportError:
                raise ArgumentError("dtype", f"numpy has no {self.name}; install the package ml_dtypes") from None
            extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, self.name))
            return extended
        return np.dtype(self.name)


_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6
_EXTENDED = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})

DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("float16", 2, "proxyccl::Half", (_FLOAT, 16)),
        DType("bfloat16", 2, "proxyccl::BFloat16", (_BFLOAT, 16)),
        DType("float32", 4, "float", (_FLOAT, 32)),
        DType("float64", 8, "double", (_FLOAT, 64)),
        DType("int32", 4, "int32_t", (_INT, 32)),
        DType("int64", 8, "int64_t", (_INT, 64)),
        DType("int8", 1, "", (_INT, 8)),
        DType("int16", 2, "", (_INT, 16)),
        DType("uint8", 1, "", (_UINT, 8)),
        DType("uint16", 2, "", (_UINT, 16)),
        DType("uint32", 4, "", (_UINT, 32)),
        DType("uint64", 8, "", (_UINT, 64)),
        DType("bool", 1, "", (_BOOL, 8)),
        DType("complex64", 8, "", (_COMPLEX, 64)),
        DType("complex128", 16, "", (_COMPLEX, 128)),
        DType("float8_e4m3fn", 1, "", (10, 8)),
        DType("float8_e5m2", 1, "", (12, 8)),
    )
}
_BY_DLPACK = {dtype.dlpack: dtype for dtype in DTYPES.values()}


def as_dtype(value: Any, argument: str = "dtype") -> DType:
    """The `DType` for a name, a numpy dtype or scalar type, a torch dtype, or a `DType`.

    Raises:
        ArgumentError: it is none that is known.
    """
    if isinstance(value, DType):
        return value
    if isinstance(value, str):
        name = value
    elif type(value).__module__.split(".")[0] == "torch":
        name = str(value).removeprefix("torch.")
    else:
        try:
            native = np.dtype(value)
        except TypeError:
            name = repr(value)
        else:
            if not native.isnative:
                raise ArgumentError(argument, f"{native.str!r} has another byte order than this machine")
            name = native.name
    if name not in DTYPES:
        raise ArgumentError(argument, f"{name!r} is not a known element type; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def from_dlpack_type(code: int, bits: int, lanes: int) -> DType | None:
    """The `DType` of a DLPack type, or None."""
    return _BY_DLPACK.get((code, bits)) if lanes == 1 else None
