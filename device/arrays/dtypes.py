"""Finds element types by numpy's, torch's or DLPack's names. `element_types.py` has the table.

numpy takes 0.1 s to import, so it is imported only when an array needs it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from proxyccl.device.arrays.element_types import ELEMENT_TYPES, ElementType
from proxyccl.device.errors import ArgumentError

if TYPE_CHECKING:
    import numpy as np


class DType(ElementType):
    """An element type; see `ElementType` for its attributes."""

    def __str__(self) -> str:
        return self.name

    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype. Raises ArgumentError if ml_dtypes, for bfloat16 and float8, is missing or lacks the type."""
        import numpy as np

        with contextlib.suppress(TypeError):
            return np.dtype(self.name)
        try:
            import ml_dtypes
        except ImportError:
            raise ArgumentError("dtype", f"numpy has no {self.name}; install the package ml_dtypes") from None
        if not hasattr(ml_dtypes, self.name):
            raise ArgumentError("dtype", f"numpy has no {self.name}; expected an array of another library")
        extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, self.name))
        return extended


DTYPES: dict[str, DType] = {row.name: DType(**vars(row)) for row in ELEMENT_TYPES}
_KNOWN: dict[Any, DType] = {}  # caches other libraries' types, because reading a type's name takes microseconds
_BY_DLPACK = {(*dtype.dlpack, dtype.lanes): dtype for dtype in DTYPES.values()}


def as_dtype(value: Any, argument: str = "dtype") -> DType:
    """Returns the `DType` for a name, a numpy dtype or scalar type, a torch dtype, or a `DType`. Raises ArgumentError
    if the element type is unknown.
    """
    if isinstance(value, DType):
        return value
    try:
        return _KNOWN[value]
    except KeyError:
        known = _KNOWN[value] = _find_dtype(value, argument)
        return known
    except TypeError:  # unhashable values
        return _find_dtype(value, argument)


def _find_dtype(value: Any, argument: str) -> DType:
    if value is None:
        name = "None"  # numpy would read None as float64
    elif isinstance(value, str):
        name = value
    elif type(value).__module__.split(".")[0] == "torch":
        name = str(value).removeprefix("torch.")
    else:
        import numpy as np

        try:
            native = np.dtype(value)
        except (TypeError, ValueError):
            name = repr(value)
        else:
            if not native.isnative:
                raise ArgumentError(argument, f"expected this machine's byte order, not {native.str!r}")
            name = native.name
    if name not in DTYPES:
        raise ArgumentError(argument, f"unknown element type {name!r}; expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def from_dlpack_type(code: int, bits: int, lanes: int) -> DType | None:
    """Returns the `DType` of a DLPack type; None if unknown."""
    return _BY_DLPACK.get((code, bits, lanes))


def reduction_dtypes() -> list[str]:
    """Returns the names of the element types for which the library has reduction kernels."""
    return [name for name, dtype in DTYPES.items() if dtype.c_name]


def token_dtypes() -> list[str]:
    """Returns the names of the element types that tokens of the expert-parallel layer can have."""
    return [name for name, dtype in DTYPES.items() if dtype.tokens]
