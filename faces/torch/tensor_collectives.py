"""The collectives of torch.distributed on tensors, by a communicator's.

Each function takes the communicator, and makes the call on the stream that is current for torch; on the CPU it returns
when the call is done. Tensors need not be contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from proxyccl.channels.collectives.flows import FlowCall
from proxyccl.channels.collectives.request import CtaPolicy
from proxyccl.channels.communicator import Communicator
from proxyccl.torch.reductions import plain_op, reduction
from proxyccl.torch.tensors import as_bytes, flat, is_plain, put_back, put_back_all, require_same_dtype

Tensors = Sequence[torch.Tensor]
Made = tuple[str, torch.Tensor | None, torch.Tensor | None, str | None, int | None, CtaPolicy | None] | FlowCall
"""The one call of a communicator that a call was, on the tensors' own memory: its name, input, output, operator, root
and policy, which `TensorCalls.keep` takes; or its transfers, for `TensorCalls.keep_transfers`."""


def all_reduce(comm: Communicator, tensor: torch.Tensor, op: Any, *, overlapped: bool = False) -> Made | None:
    """Reduces a tensor over all ranks, in place. `overlapped`: it is long, and the program computes meanwhile."""
    plain = plain_op(op, tensor.dtype)
    policy = comm.tensor_calls.overlapped_policy if overlapped else None
    if plain is not None and is_plain(tensor):
        comm.all_reduce(tensor, plain, cta_policy=policy)
        return "all_reduce", tensor, tensor, plain, None, policy
    how = reduction(op, tensor.dtype)
    values = flat(tensor)
    comm.all_reduce(how.of(how.given(values, into=values)), how.op, cta_policy=policy)
    put_back(tensor, values)
    return None


def reduce(comm: Communicator, tensor: torch.Tensor, op: Any, root: int) -> Made | None:
    """Reduces a tensor over all ranks, in place on `root`."""
    how = reduction(op, tensor.dtype)
    values = flat(tensor)
    given = how.given(values)
    comm.reduce(how.of(given), how.op, root, out=how.of(values))
    if comm.rank == root:
        put_back(tensor, values)
    in_place = given is values and is_plain(tensor)
    return ("reduce", how.of(values), how.of(values), how.op, root, None) if in_place else None


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


def broadcast(comm: Communicator, tensor: torch.Tensor, root: int) -> Made | None:
    """Copies a rank's tensor to all ranks."""
    values = as_bytes(tensor)
    comm.broadcast(values, root)
    put_back(tensor, values)
    return ("broadcast", values, values, None, root, None) if is_plain(tensor) else None


def all_gather(comm: Communicator, output: torch.Tensor, x: torch.Tensor, *, overlapped: bool = False) -> Made | None:
    """Concatenates the ranks' tensors of one size. `overlapped` as for `all_reduce`."""
    own, values = as_bytes(x), as_bytes(output)
    policy = comm.tensor_calls.overlapped_policy if overlapped else None
    comm.all_gather(own, out=values, cta_policy=policy)
    put_back(output, values)
    return ("all_gather", own, values, None, None, policy) if is_plain(x) and is_plain(output) else None


def all_gather_coalesced(comm: Communicator, outputs: Tensors, inputs: Tensors) -> None:
    """`all_gather` of several tensors, by one call."""
    if len(inputs) == 1:
        all_gather(comm, outputs[0], inputs[0])
        return
    own = torch.cat([as_bytes(x) for x in inputs])
    everyone = own.new_empty((comm.world_size, len(own)))
    comm.all_gather(own, out=everyone.view(-1))
    at = 0
    for output, x in zip(outputs, inputs, strict=True):
        size = x.numel() * x.element_size()
        part = everyone[:, at : at + size].clone(memory_format=torch.contiguous_format)  # aligned for any type
        put_back(output, part.view(-1))
        at += size


def reduce_scatter(comm: Communicator, output: torch.Tensor, x: torch.Tensor, op: Any) -> Made | None:
    """Reduces a tensor over all ranks and gives each its share."""
    how = reduction(op, x.dtype)
    values, share = flat(x), flat(output)
    given = how.given(values)
    source, target = how.of(given), how.of(share)
    comm.reduce_scatter(source, how.op, out=target)
    put_back(output, share)
    in_place = given is values and is_plain(x) and is_plain(output)
    return ("reduce_scatter", source, target, how.op, None, None) if in_place else None


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


def exchange(comm: Communicator, sends: Mapping[int, Tensors], receives: Mapping[int, Tensors]) -> Made | None:
    """Sends tensors to ranks and receives tensors from ranks, all by one launch.

    It serves the calls with a tensor for each rank: for these, nothing is copied before or after the launch.
    """
    outputs = [(tensor, as_bytes(tensor)) for tensors in receives.values() for tensor in tensors]
    values = iter(outputs)
    with comm.transfers() as transfers:
        for peer, tensors in sends.items():
            for tensor in tensors:
                transfers.send(as_bytes(tensor), peer)
        for peer, tensors in receives.items():
            for _ in tensors:
                transfers.recv(next(values)[1], peer)
    for tensor, received in outputs:
        put_back(tensor, received)
    used = [*sends.values(), *receives.values()]
    in_place = all(is_plain(tensor) for tensors in used for tensor in tensors)
    return transfers.issued if in_place else None


def all_gather_lists(comm: Communicator, outputs: Tensors, x: torch.Tensor) -> Made | None:
    """Every rank's tensor, of any sizes, into a list."""
    require_same_dtype([x, *outputs])
    return exchange(comm, {rank: [x] for rank in range(comm.world_size)}, _by_rank(outputs))


def gather(comm: Communicator, outputs: Tensors, x: torch.Tensor, root: int) -> Made | None:
    """Every rank's tensor into a list on `root`."""
    return exchange(comm, {root: [x]}, {rank: [out] for rank, out in enumerate(outputs)} if comm.rank == root else {})


def scatter(comm: Communicator, output: torch.Tensor, inputs: Tensors, root: int) -> Made | None:
    """A tensor of `root`'s list for each rank."""
    return exchange(comm, {rank: [x] for rank, x in enumerate(inputs)} if comm.rank == root else {}, {root: [output]})


def all_to_all(comm: Communicator, output: torch.Tensor, x: torch.Tensor) -> Made | None:
    """The i-th share of each rank goes to rank i."""
    own, values = as_bytes(x), as_bytes(output)
    comm.all_to_all(own, out=values)
    put_back(output, values)
    return ("all_to_all", own, values, None, None, None) if is_plain(x) and is_plain(output) else None


def all_to_all_v(
    comm: Communicator, output: torch.Tensor, x: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
) -> Made | None:
    """The same with rows of any number; empty splits mean even ones."""
    ranks = comm.world_size
    target = output if output.is_contiguous() else output.contiguous()
    sends = x.contiguous().split(list(input_splits) or [x.size(0) // ranks] * ranks)
    receives = target.split(list(output_splits) or [target.size(0) // ranks] * ranks)
    made = exchange(comm, _by_rank(sends), _by_rank(receives))
    put_back(output, target)
    return made if is_plain(x) and is_plain(output) else None


def all_to_all_lists(comm: Communicator, outputs: Tensors, inputs: Tensors) -> Made | None:
    """A list's i-th tensor goes to rank i."""
    return exchange(comm, _by_rank(inputs), _by_rank(outputs))


def barrier(comm: Communicator, device: torch.device) -> Made:
    """Waits until all ranks have arrived: on the current stream of a GPU, or on the CPU."""
    comm.barrier(stream=None if device.type == "cpu" else torch._C._cuda_getCurrentRawStream(device.index))
    return "barrier", None, None, None, None, None


def _by_rank(tensors: Tensors) -> dict[int, Tensors]:
    return {rank: [tensor] for rank, tensor in enumerate(tensors)}
