"""Makes torch.distributed's collectives by a communicator, and converts layouts, types and operators for its calls.

On a GPU each function makes its call on torch's current stream; on the CPU each function returns when the call is done.
Tensors need not be contiguous.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from proxyccl.channels.communicator import Communicator
from proxyccl.device.arrays.dtypes import reduction_dtypes
from proxyccl.device.arrays.libraries import require_tensor_memory
from proxyccl.torch._device_calls import StreamMark
from proxyccl.torch.on_gpu import wait_on_host
from proxyccl.torch_tensors.flat import flat_view
from torch.distributed import ReduceOp
from torch.distributed._functional_collectives import AsyncCollectiveTensor

Tensors = Sequence[torch.Tensor]
Transfers = tuple[str, Any, Any]
"""The options of a call that consists of transfers, as `FlowCalls.call` (_calls.pyi) takes them."""

# -- tensors as flat, contiguous memory, and back ---


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is contiguous, and not lazily negated or conjugated: its memory holds its elements."""
    return tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's elements in one dimension, without gradient: a view if the tensor is plain, else a copy."""
    return flat_view(tensor.contiguous().resolve_conj().resolve_neg())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of `flat(tensor)`, for calls that move data of any type and don't compute with it."""
    return flat(tensor).view(torch.uint8)


def put_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copies a result from `values`, of `flat` or `as_bytes`, to the tensor, unless `values` is a view of it."""
    if values.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(values.view(tensor.dtype).view(tensor.shape))


def put_back_all(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copies the results of a call to several tensors (`put_back`). One kernel copies all plain tensors."""
    plain = [is_plain(tensor) for tensor in tensors]
    targets = [tensor.detach() for tensor, chosen in zip(tensors, plain, strict=True) if chosen]
    copies = [each.view(tensor.shape) for each, tensor, chosen in zip(values, tensors, plain, strict=True) if chosen]
    if targets:
        torch._foreach_copy_(targets, copies)
    for tensor, each, chosen in zip(tensors, values, plain, strict=True):
        if not chosen:
            put_back(tensor, each)


def in_memory(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors; for an AsyncCollectiveTensor, waits for its functional collective and returns the wrapped
    tensor. Raises RuntimeError if a tensor is not dense, or is on neither a CPU nor a GPU, and ArgumentError if a
    tensor is a DTensor, or its storage was freed.
    """
    found = [tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor for tensor in tensors]
    for tensor in found:
        if tensor.layout != torch.strided:
            raise RuntimeError(f"tensor: has layout {tensor.layout}; expected a dense tensor (torch.strided)")
        if tensor.device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"tensor: lies on {tensor.device}; expected cpu or cuda")
        require_tensor_memory(tensor, "tensor")
    return found


def require_same_dtype(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors[1:]:
        if tensor.dtype != tensors[0].dtype:
            raise TypeError(f"tensor: has type {tensor.dtype}; expected the others' type, {tensors[0].dtype}")


# -- reductions ---

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
"""Maps the kinds of torch's operators without a factor to the communicator's operators."""
_BITWISE = {_Kind.BAND, _Kind.BOR, _Kind.BXOR}
_OF_COMPLEX = {_Kind.SUM, _Kind.AVG, _Kind.PREMUL_SUM}
_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
"""Maps a complex type to the type of the real and imaginary parts."""
_OF_BOOL = {
    _Kind.SUM: "max",
    _Kind.PRODUCT: "min",
    _Kind.MIN: "min",
    _Kind.MAX: "max",
    _Kind.BAND: "min",
    _Kind.BOR: "max",
    _Kind.BXOR: "bxor",
}
"""The operators that reduce bools as bytes of 0 or 1. torch's sum of bools, true if any is, is a maximum."""
REDUCIBLE = frozenset(getattr(torch, name) for name in reduction_dtypes() if hasattr(torch, name))


@dataclass(frozen=True)
class Reduction:
    """How tensors of one type are reduced."""

    op: str  # the communicator's operator
    # The dtype as which the operator reads the elements; None for the elements' own dtype.
    view: torch.dtype | None = None
    factor: Any = None  # the factor by which each rank first multiplies its values; None if there is none
    flags: bool = False  # whether the elements are bools, whose bytes must be converted to 0 or 1 before the reduction

    def given(self, flat: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the values that a rank contributes to the reduction. If no value changes, returns `flat` itself.
        Changed values are written to `into`, which may be `flat`, or if `into` is None, to a new tensor.
        """
        if self.flags:  # if a bool tensor is a view of other memory, its bytes may have any value
            return torch.ne(flat.view(torch.uint8), 0, out=into)
        if self.factor is None:
            return flat
        if not isinstance(self.factor, torch.Tensor):
            return torch.mul(flat, self.factor, out=into)
        factor = self.factor.to(flat.device).reshape(())  # a factor without dimensions does not change the dtype
        return torch.mul(flat, factor if factor.is_floating_point() else factor.to(flat.dtype), out=into)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns a one-dimensional view of a contiguous tensor, with the dtype that the operator reads."""
        return flat if self.view is None else flat.view(self.view)


def plain_op(op: Any, dtype: torch.dtype) -> str | None:
    """Returns the communicator's operator for an operator of torch. If elements of this type must be converted first,
    or can't be reduced, returns None.
    """
    kind = getattr(op, "op", op)  # an operator such as ReduceOp.SUM has no `op`
    if dtype not in REDUCIBLE or kind == _Kind.PREMUL_SUM or (kind in _BITWISE and dtype.is_floating_point):
        return None
    return _OPS.get(kind)


def reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """Returns how to carry out an operator of torch for elements of a type. Raises ValueError if the operator is
    unknown, or is not supported for this type, and TypeError if elements of the type can't be reduced.
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


# -- collectives ---


def all_reduce(comm: Communicator, tensor: torch.Tensor, op: Any) -> None:
    _reduce_all(comm, "all_reduce", tensor, tensor, op)


def reduce_scatter(comm: Communicator, output: torch.Tensor, x: torch.Tensor, op: Any) -> None:
    _reduce_all(comm, "reduce_scatter", output, x, op)


def _reduce_all(comm: Communicator, name: str, output: torch.Tensor, x: torch.Tensor, op: Any) -> None:
    plain, calls = plain_op(op, x.dtype), comm.tensor_calls
    if plain is not None and is_plain(x) and (output is x or is_plain(output)):
        calls.make(calls.options(name, plain), x, output)
        return
    how, result = reduction(op, x.dtype), flat(output)
    given = how.given(result, into=result) if output is x else how.given(flat(x))
    calls.make(calls.options(name, how.op), how.of(given), how.of(result))
    put_back(output, result)


def reduce(comm: Communicator, tensor: torch.Tensor, op: Any, root: int) -> None:
    how = reduction(op, tensor.dtype)
    values = tensor if plain_op(op, tensor.dtype) is not None and is_plain(tensor) else flat(tensor)
    given = how.given(values)
    calls = comm.tensor_calls
    calls.make(calls.options("reduce", how.op, root), how.of(given), how.of(values) if comm.rank == root else ())
    if comm.rank == root:
        put_back(tensor, values)


def all_reduce_coalesced(comm: Communicator, tensors: Tensors, op: Any) -> None:
    """Reduces several tensors over all ranks, in place. All tensors of one type are joined and reduced by one call."""
    for same in _by_dtype(tensors):
        if len(same) == 1:
            all_reduce(comm, same[0], op)
            continue
        values = torch.cat([flat(tensor) for tensor in same])
        all_reduce(comm, values, op)
        put_back_all(same, values.split([tensor.numel() for tensor in same]))


def _by_dtype(tensors: Tensors) -> list[list[torch.Tensor]]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def broadcast(comm: Communicator, tensor: torch.Tensor, root: int) -> None:
    _move(comm, "broadcast", tensor, tensor, root=root)


def all_gather(comm: Communicator, output: torch.Tensor, x: torch.Tensor) -> None:
    """Concatenates the ranks' tensors on every rank. The tensors have the same size."""
    _move(comm, "all_gather", output, x)


def all_to_all(comm: Communicator, output: torch.Tensor, x: torch.Tensor) -> None:
    """Sends the i-th share of each rank's tensor to rank i."""
    _move(comm, "all_to_all", output, x)


def _move(comm: Communicator, name: str, output: torch.Tensor, x: torch.Tensor, **options: Any) -> None:
    result, calls = _moved(output), comm.tensor_calls
    calls.make(calls.options(name, **options), result if output is x else _moved(x), result)
    put_back(output, result)


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if is_plain(tensor) else as_bytes(tensor)


def all_gather_coalesced(comm: Communicator, outputs: Tensors, inputs: Tensors) -> None:
    if len(inputs) == 1:
        all_gather(comm, outputs[0], inputs[0])
        return
    own = torch.cat([as_bytes(x) for x in inputs])
    everyone = own.new_empty((comm.world_size, len(own)))
    all_gather(comm, everyone, own)
    at = 0
    for output, x in zip(outputs, inputs, strict=True):
        size = x.numel() * x.element_size()
        part = everyone[:, at : at + size].clone(memory_format=torch.contiguous_format)  # is aligned for any type
        put_back(output, part.view(-1))
        at += size


def reduce_scatter_coalesced(comm: Communicator, outputs: Tensors, inputs: Tensors, op: Any) -> None:
    """Makes a `reduce_scatter` of several tensors. All tensors of one type are joined and reduced by one call."""
    for same in _by_dtype(inputs):
        chosen = [i for i, x in enumerate(inputs) if x.dtype == same[0].dtype]
        if len(chosen) == 1:
            reduce_scatter(comm, outputs[chosen[0]], inputs[chosen[0]], op)
            continue
        rows = torch.cat([flat(inputs[i]).view(comm.world_size, -1) for i in chosen], dim=1)
        share = rows.new_empty(rows.shape[1])
        reduce_scatter(comm, share, rows, op)
        parts = share.split([outputs[i].numel() for i in chosen])
        for i, part in zip(chosen, parts, strict=True):
            put_back(outputs[i], part)


def reduce_scatter_lists(comm: Communicator, output: torch.Tensor, parts: Tensors, op: Any) -> None:
    """Reduces each tensor of a list over all ranks; rank i receives the i-th result. The tensors of a list may differ
    in size, but the i-th tensors of all ranks have the same size.
    """
    require_same_dtype([output, *parts])
    longest = max(part.numel() for part in parts)
    if all(part.numel() == longest for part in parts):
        reduce_scatter(comm, output, torch.cat([flat(part) for part in parts]), op)
        return
    rows = parts[0].new_zeros((comm.world_size, longest))
    for row, part in zip(rows, parts, strict=True):
        row[: part.numel()] = flat(part)
    share = rows.new_empty(longest)
    reduce_scatter(comm, share, rows, op)
    put_back(output, share[: output.numel()])


def exchange(comm: Communicator, x: Any, out: Any, options: Transfers) -> None:
    """Sends tensors to ranks and receives tensors from ranks by one call; see `FlowCalls.call` (_calls.pyi).

    Copies only tensors that are not plain (`is_plain`).
    """
    if comm.tensor_calls.exchange(x, out, options):
        return
    _, to, of = options
    outputs = [(tensor, as_bytes(tensor), peer) for tensor, peer in _parts(comm, out, of)]
    with comm.transfers() as transfers:
        for tensor, peer in _parts(comm, x, to):
            transfers.send(as_bytes(tensor), peer)
        for _, values, peer in outputs:
            transfers.recv(values, peer)
    for tensor, values, _ in outputs:
        put_back(tensor, values)


def _parts(comm: Communicator, given: Any, ranks: Any) -> list[tuple[torch.Tensor, int]]:
    """Divides a tensor, or a list of tensors, into one part for each peer. Returns (part, peer's rank) pairs."""
    if isinstance(given, tuple | list):
        return list(zip(given, ranks, strict=True))
    if isinstance(ranks, int):
        return [(given, ranks)]
    if ranks == "all":
        return [(given, rank) for rank in range(comm.world_size)]
    rows = [given.size(0) // comm.world_size] * comm.world_size if ranks == "even" else list(ranks)
    return [(part, rank) for rank, part in enumerate(given.split(rows))]


def all_gather_lists(comm: Communicator, outputs: Tensors, x: torch.Tensor, options: Transfers) -> None:
    """Gathers every rank's tensor into a list. The ranks' tensors may differ in size."""
    require_same_dtype([x, *outputs])
    exchange(comm, x, tuple(outputs), options)


def barrier(comm: Communicator, device: torch.device, marks: Sequence[StreamMark]) -> None:
    """Waits until all ranks have called this function; for a GPU, makes the current stream wait. The host first waits
    until GPUs have passed the marks. If this takes longer than the communicator's time-out, aborts the communicator.
    """
    failure, deadline = comm.group.failure, time.monotonic() + comm.timeout

    def passed() -> bool:
        failure.check()
        return all(mark.query() for mark in marks)

    if not wait_on_host(passed, deadline):
        comm.abort(f"a GPU did not complete the work before a barrier within {comm.timeout:g} s")
        failure.check()
    comm.barrier(stream=None if device.type == "cpu" else torch._C._cuda_getCurrentRawStream(device.index))
