"""torch's reductions of tensors in terms of the communicator's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from proxyccl.device.arrays.dtypes import reduction_dtypes
from torch.distributed import ReduceOp

_Kind = ReduceOp.RedOpType
_OPS = {
    _Kind.SUM: "sum",
    _Kind.AVG: "avg",
    _Kind.PRODUCT: "prod",
    _Kind.MIN: "min",
    _Kind.MAX: "max",
    _Kind.BAND: "band",
    _Kind.BOR: "bor",
    _Kind.BXOR: "bxor",
    _Kind.PREMUL_SUM: "sum",
}
PLAIN_OPS = {kind: op for kind, op in _OPS.items() if kind != _Kind.PREMUL_SUM}
"""The communicator's operators, by the kinds of torch's that need no factor."""
_BITWISE = {_Kind.BAND, _Kind.BOR, _Kind.BXOR}
_OF_COMPLEX = {_Kind.SUM, _Kind.AVG, _Kind.PREMUL_SUM}
_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
"""The types of a complex number's parts."""
_OF_BOOL = {
    _Kind.SUM: "max",
    _Kind.PRODUCT: "min",
    _Kind.MIN: "min",
    _Kind.MAX: "max",
    _Kind.BAND: "min",
    _Kind.BOR: "max",
    _Kind.BXOR: "bxor",
}
"""The same reductions on bytes of 0 and 1: a sum is true where any rank's value is, as in torch."""
REDUCIBLE = frozenset(getattr(torch, name) for name in reduction_dtypes() if hasattr(torch, name))


@dataclass(frozen=True)
class Reduction:
    """A reduction of tensors of one type.

    Attributes:
        op: the communicator's operator.
        view: the type in which it takes the elements; None for their own.
        factor: a factor by which each rank multiplies its values first, or None.
        flags: whether the elements are bools, whose bytes must be 0 or 1.
    """

    op: str
    view: torch.dtype | None = None
    factor: Any = None
    flags: bool = False

    def given(self, flat: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """The values that a rank contributes: a contiguous tensor of one dimension itself, or a tensor made of it.

        Args:
            flat: the tensor.
            into: holds the values if they are made, for example the tensor itself; None for a new one.
        """
        if self.flags:  # a tensor that is a view of other bytes may hold any
            return torch.ne(flat.view(torch.uint8), 0, out=into)
        if self.factor is None:
            return flat
        if not isinstance(self.factor, torch.Tensor):
            return torch.mul(flat, self.factor, out=into)
        factor = self.factor.to(flat.device).reshape(())  # without dimensions, so that the product has flat's type
        return torch.mul(flat, factor if factor.is_floating_point() else factor.to(flat.dtype), out=into)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor of one dimension as the communicator takes it. It shares the memory."""
        return flat if self.view is None else flat.view(self.view)


def plain_op(op: Any, dtype: torch.dtype) -> str | None:
    """The communicator's operator, if it takes tensors of the type unchanged; else None."""
    kind = getattr(op, "op", op)  # an operator such as ReduceOp.SUM has no `op`
    if dtype not in REDUCIBLE or kind == _Kind.PREMUL_SUM or (kind in _BITWISE and dtype.is_floating_point):
        return None
    return _OPS.get(kind)


def reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """The reduction that an operator of torch means for a type.

    Raises:
        ValueError: there is no such reduction.
        TypeError: elements of the type can't be reduced.
    """
    kind = getattr(op, "op", op)
    if kind not in _OPS:
        raise ValueError(f"op: {kind} is unknown; expected one of {', '.join(each.name for each in _OPS)}")
    if dtype is torch.bool:
        if kind not in _OF_BOOL:
            raise ValueError(f"op: {kind.name} of bool is not supported; expected one of {_names(_OF_BOOL)}")
        return Reduction(_OF_BOOL[kind], torch.uint8, flags=True)
    factor = op.__getstate__()[1] if kind == _Kind.PREMUL_SUM else None
    if dtype.is_complex:
        if kind not in _OF_COMPLEX:
            raise ValueError(f"op: {kind.name} of complex is not supported; expected one of {_names(_OF_COMPLEX)}")
        return Reduction(_OPS[kind], _PARTS[dtype], factor)
    if dtype not in REDUCIBLE:
        known = ", ".join(sorted(str(each) for each in REDUCIBLE))
        raise TypeError(f"tensor: elements of {dtype} can't be reduced; expected one of {known}, bool or complex")
    if kind in _BITWISE and dtype.is_floating_point:
        raise ValueError(f"op: {kind.name} of {dtype} is not supported; expected integers or bool")
    if factor is not None and not torch.can_cast(torch.as_tensor(factor).dtype, dtype):
        raise ValueError(
            f"op: PREMUL_SUM by {factor} is not supported for {dtype}; expected a factor that converts to it"
        )
    return Reduction(_OPS[kind], factor=factor)


def _names(kinds: Any) -> str:
    return ", ".join(kind.name for kind in kinds)
