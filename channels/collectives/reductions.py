"""The reduction operators."""

from __future__ import annotations

from proxyccl.channels.segment.calls import register_names
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.arrays.dtypes import reduction_dtypes
from proxyccl.device.errors import ArgumentError

BITWISE_OPS = ("band", "bor", "bxor")
"""Only for integers."""
OPS = ("sum", "prod", "min", "max", "avg", *BITWISE_OPS)


def require_op(op: str) -> None:
    """Raises ArgumentError if the name is not an operator."""
    if not isinstance(op, str) or op not in OPS:
        raise ArgumentError("op", f"unknown op {op!r}; expected one of {', '.join(OPS)}")


def require_reducible(source: ArrayView, op: str) -> None:
    """Raises ArgumentError for an array whose elements the operator can't reduce."""
    if not source.dtype.c_name:
        known = ", ".join(reduction_dtypes())
        raise ArgumentError("x", f"element type {source.dtype} can't be reduced; use one of {known}")
    if op in BITWISE_OPS and not source.dtype.bitwise:
        raise ArgumentError("op", f"{op!r} needs integers, not {source.dtype}")


register_names(*OPS)
