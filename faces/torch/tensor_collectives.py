"""The collectives of torch.distributed on tensors, by a communicator's.

Each function takes the communicator, and makes the call on the stream that is current for torch; on the CPU it returns
when the call is done. Tensors need not be contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from proxyccl.channels.collectives.request import CtaPolicy
from proxyccl.channels.communicator import Communicator
from proxyccl.torch.reductions import plain_op, reduction
from proxyccl.torch.tensors import as_bytes, flat, is_plain, put_back, put_back_all, require_same_dtype

Tensors = Sequence[torch.Tensor]
Transfers = tuple[str, Any, Any]
"""The options of a call that consists of transfers, as `FlowCalls.call` (_calls.pyi) takes them."""


def all_reduce(comm: Communicator, tensor: torch.Tensor, op: Any, policy: CtaPolicy | None = None) -> None:
    """Reduces a tensor over all ranks, in place. `policy`, here and below: None for the usual one."""
    plain = plain_op(op, tensor.dtype)
    calls = comm.tensor_calls
    if plain is not None and is_plain(tensor):
        calls.make(calls.options("all_reduce", plain, cta_policy=policy), tensor, tensor)
        return
    how = reduction(op, tensor.dtype)
    values = flat(tensor)
    given = how.of(how.given(values, into=values))
    calls.make(calls.options("all_reduce", how.op, cta_policy=policy), given, given)
    put_back(tensor, values)


def reduce(comm: Communicator, tensor: torch.Tensor, op: Any, root: int) -> None:
    """Reduces a tensor over all ranks, in place on `root`."""
    how = reduction(op, tensor.dtype)
    values = tensor if plain_op(op, tensor.dtype) is not None and is_plain(tensor) else flat(tensor)
    given = how.given(values)
    calls = comm.tensor_calls
    calls.make(calls.options("reduce", how.op, root), how.of(given), how.of(values) if comm.rank == root else ())
    if comm.rank == root:
        put_back(tensor, values)


def all_reduce_coalesced(comm: Communicator, tensors: Tensors, op: Any) -> None:
    """Reduces tensors over all ranks, in place: those of one type by one call."""
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
    """Copies a rank's tensor to all ranks."""
    values = _moved(tensor)
    calls = comm.tensor_calls
    calls.make(calls.options("broadcast", root=root), values, values)
    put_back(tensor, values)


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its memory holds its elements in order, else a copy of its bytes."""
    return tensor if is_plain(tensor) else as_bytes(tensor)


def all_gather(comm: Communicator, output: torch.Tensor, x: torch.Tensor, policy: CtaPolicy | None = None) -> None:
    """Concatenates the ranks' tensors of one size."""
    values, calls = _moved(output), comm.tensor_calls
    calls.make(calls.options("all_gather", cta_policy=policy), _moved(x), values)
    put_back(output, values)


def all_gather_coalesced(comm: Communicator, outputs: Tensors, inputs: Tensors) -> None:
    """`all_gather` of several tensors, by one call."""
    if len(inputs) == 1:
        all_gather(comm, outputs[0], inputs[0])
        return
    own = torch.cat([as_bytes(x) for x in inputs])
    everyone = own.new_empty((comm.world_size, len(own)))
    all_gather(comm, everyone, own)
    at = 0
    for output, x in zip(outputs, inputs, strict=True):
        size = x.numel() * x.element_size()
        part = everyone[:, at : at + size].clone(memory_format=torch.contiguous_format)  # aligned for any type
        put_back(output, part.view(-1))
        at += size


def reduce_scatter(
    comm: Communicator, output: torch.Tensor, x: torch.Tensor, op: Any, policy: CtaPolicy | None = None
) -> None:
    """Reduces a tensor over all ranks and gives each its share."""
    plain, calls = plain_op(op, x.dtype), comm.tensor_calls
    if plain is not None and is_plain(x) and is_plain(output):
        calls.make(calls.options("reduce_scatter", plain, cta_policy=policy), x, output)
        return
    how = reduction(op, x.dtype)
    share = flat(output)
    options = calls.options("reduce_scatter", how.op, cta_policy=policy)
    calls.make(options, how.of(how.given(flat(x))), how.of(share))
    put_back(output, share)


def reduce_scatter_coalesced(comm: Communicator, outputs: Tensors, inputs: Tensors, op: Any) -> None:
    """`reduce_scatter` of several tensors: those of one type by one call."""
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
    """Reduces a list of tensors, one for each rank, of any sizes that the ranks agree on."""
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
    """Sends tensors to ranks and receives tensors from ranks, all by one call.

    It serves the calls with a tensor for each rank: for these, nothing is copied before or after the call.

    Args:
        comm: the communicator.
        x, out, options: as for `FlowCalls.call` (_calls.pyi).
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
    """The tensors that one side of `exchange` consists of, each with its rank."""
    if isinstance(given, tuple | list):
        return list(zip(given, ranks, strict=True))
    if isinstance(ranks, int):
        return [(given, ranks)]
    if ranks == "all":
        return [(given, rank) for rank in range(comm.world_size)]
    rows = [given.size(0) // comm.world_size] * comm.world_size if ranks == "even" else list(ranks)
    return [(part, rank) for rank, part in enumerate(given.split(rows))]


def all_gather_lists(comm: Communicator, outputs: Tensors, x: torch.Tensor, options: Transfers) -> None:
    """Every rank's tensor, of any sizes, into a list."""
    require_same_dtype([x, *outputs])
    exchange(comm, x, tuple(outputs), options)


def all_to_all(comm: Communicator, output: torch.Tensor, x: torch.Tensor, policy: CtaPolicy | None = None) -> None:
    """The i-th share of each rank goes to rank i."""
    values, calls = _moved(output), comm.tensor_calls
    calls.make(calls.options("all_to_all", cta_policy=policy), _moved(x), values)
    put_back(output, values)


def all_to_all_v(comm: Communicator, output: torch.Tensor, x: torch.Tensor, options: Transfers) -> None:
    """The same with rows of any number."""
    target = output if output.is_contiguous() else output.contiguous()
    exchange(comm, x.contiguous(), target, options)
    put_back(output, target)


def barrier(comm: Communicator, device: torch.device) -> None:
    """Waits until all ranks have arrived: on the current stream of a GPU, or on the CPU."""
    comm.barrier(stream=None if device.type == "cpu" else torch._C._cuda_getCurrentRawStream(device.index))
