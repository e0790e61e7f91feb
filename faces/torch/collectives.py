"""Checks the arguments of torch.distributed's collectives and transfers, and makes the calls.

Each method first asks C to issue the call, which succeeds if a prepared launch for such calls is kept. If C does not
issue the call, the method checks the arguments, and `IssuedCalls` makes the call by `tensor_collectives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from proxyccl.torch import tensor_collectives as on_tensors
from proxyccl.torch.issuing import CPU, IssuedCalls, reduce_to, require_rank
from proxyccl.torch.tensor_collectives import in_memory
from proxyccl.torch.work import JointWork
from proxyccl.torch_tensors.untraced import untraced

Tensors = Sequence[torch.Tensor]
_FEW, _LARGE_BYTES = 4, 1 << 20
"""The tensors of a coalesced call are not joined in one array if there are at most `_FEW` tensors, or if their average
size is at least `_LARGE_BYTES`.
"""


@untraced
class Collectives:
    """A mixin that gives a process group its calls on tensors."""

    calls: IssuedCalls  # the group's calls
    _rank: int
    _size: int

    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = None, *_: Any) -> Any:
        (x,) = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        work = self.calls.in_c(x, x, opts, "reduceOp", "all_reduce")
        if work is not NotImplemented:
            return work
        (x,) = tensors = in_memory([x])
        return self.calls.collective("all_reduce", tensors, (), opts, on_tensors.all_reduce, x, _op_of(opts))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        if _goes_apart(tensors):
            return self.calls.joint(self.allreduce, tensors, tensors, opts, "reduceOp", "all_reduce")
        name, tensors = "all_reduce of several tensors", in_memory(tensors)
        function = on_tensors.all_reduce_coalesced
        return self.calls.collective(name, tensors, (), opts, function, tensors, _op_of(opts))

    def broadcast(self, tensors: Tensors | torch.Tensor, opts: Any = None, *_: Any) -> Any:
        (x,) = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        work = self.calls.in_c(x, x, opts, "rootRank", "broadcast")
        if work is not NotImplemented:
            return work
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        (x,) = tensors = in_memory([x])
        require_rank(root, self._size, "root")
        return self.calls.collective("broadcast", tensors, (), opts, on_tensors.broadcast, x, root)

    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        (x,), root = tensors, opts.rootRank
        require_rank(root, self._size, "root")
        work = self.calls.in_c(x, x if root == self._rank else (), opts, "reduceOp", reduce_to(root))
        if work is not NotImplemented:
            return work
        (x,) = tensors = in_memory([x])
        return self.calls.collective("reduce", tensors, (), opts, on_tensors.reduce, x, opts.reduceOp, root)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None, *_: Any) -> Any:
        (x,), (given,), options = inputs, map(tuple, outputs), self.calls.between_all["all_gather"]
        work = self.calls.exchange_in_c(x, x, given, opts, options)
        if work is not NotImplemented:
            return work
        x, *parts = in_memory([x, *given])
        self._require_one_each(parts, "output_tensors")
        return self.calls.collective("all_gather", parts, [x], opts, on_tensors.all_gather_lists, parts, x, options)

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Any:
        """Concatenates the ranks' tensors on every rank. The tensors have the same size."""
        work = self.calls.in_c(x, output, opts, None, "all_gather")
        if work is not NotImplemented:
            return work
        output, x = in_memory([output, x])
        self._require_gathered(output, x)
        return self.calls.collective("all_gather_single", [output], [x], opts, on_tensors.all_gather, output, x)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        if _goes_apart(inputs):
            return self.calls.joint(self.all_gather_single, inputs, outputs, opts, None, "all_gather")
        name, outputs, inputs = "all_gather_single of several tensors", in_memory(outputs), in_memory(inputs)
        for output, x in zip(outputs, inputs, strict=True):
            self._require_gathered(output, x)
        function = on_tensors.all_gather_coalesced
        return self.calls.collective(name, outputs, inputs, opts, function, outputs, inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """Gathers several tensors from every rank; `outputs[rank]` receives the tensors of that rank."""
        outputs, inputs = [in_memory(of_rank) for of_rank in outputs], in_memory(inputs)
        written = [tensor for of_rank in outputs for tensor in of_rank]
        to = [rank for rank in range(self._size) for _ in inputs]
        of = [rank for rank, of_rank in enumerate(outputs) for _ in of_rank]
        name, arguments = "all_gather of several tensors", (inputs * self._size, written, ("all_gather", to, of))
        return self.calls.collective(name, written, inputs, opts, on_tensors.exchange, *arguments)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any, *_: Any) -> Any:
        (x,), root = inputs, opts.rootRank
        given = tuple(outputs[0]) if self._rank == root else ()
        require_rank(root, self._size, "root")
        options = self.calls.between_all["gather", root]
        work = self.calls.exchange_in_c(x, x, given, opts, options)
        if work is not NotImplemented:
            return work
        if self._rank == root:
            self._require_one_each(given, "gather_list")
        x, *parts = in_memory([x, *given])
        return self.calls.collective("gather", parts, [x], opts, on_tensors.exchange, x, tuple(parts), options)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any, *_: Any) -> Any:
        """Sends each rank one tensor from the root's list."""
        (output,), root = outputs, opts.rootRank
        given = tuple(inputs[0]) if self._rank == root else ()
        require_rank(root, self._size, "root")
        options = self.calls.between_all["scatter", root]
        work = self.calls.exchange_in_c(output, given, output, opts, options)
        if work is not NotImplemented:
            return work
        if self._rank == root:
            self._require_one_each(given, "scatter_list")
        output, *parts = in_memory([output, *given])
        return self.calls.collective(
            "scatter", [output], parts, opts, on_tensors.exchange, tuple(parts), output, options
        )

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None, *_: Any) -> Any:
        """Reduces each tensor of a list over all ranks; rank i receives the i-th result."""
        (output,), (parts,) = outputs, inputs
        output, *parts = in_memory([output, *parts])
        self._require_one_each(parts, "input_list")
        own = parts[self._rank].numel()
        if output.numel() != own:
            raise ValueError(f"output: has {output.numel()} elements; expected {own}, as many as this rank's input")
        function, arguments = on_tensors.reduce_scatter_lists, (output, parts, _op_of(opts))
        return self.calls.collective("reduce_scatter", [output], parts, opts, function, *arguments)

    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Any:
        """Reduces a tensor over all ranks; each rank receives its share."""
        work = self.calls.in_c(x, output, opts, "reduceOp", "reduce_scatter")
        if work is not NotImplemented:
            return work
        output, x = in_memory([output, x])
        self._require_share(output, x)
        name, arguments = "reduce_scatter_single", (output, x, _op_of(opts))
        return self.calls.collective(name, [output], [x], opts, on_tensors.reduce_scatter, *arguments)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        if _goes_apart(inputs):
            name = "reduce_scatter"
            return self.calls.joint(self.reduce_scatter_single, inputs, outputs, opts, "reduceOp", name)
        name, outputs, inputs = "reduce_scatter_single of several tensors", in_memory(outputs), in_memory(inputs)
        for output, x in zip(outputs, inputs, strict=True):
            self._require_share(output, x)
        function, arguments = on_tensors.reduce_scatter_coalesced, (outputs, inputs, _op_of(opts))
        return self.calls.collective(name, outputs, inputs, opts, function, *arguments)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
        *_: Any,
    ) -> Any:
        """Sends `input_splits[i]` rows of a tensor to rank i; without splits, an equal number to each rank."""
        even = not output_splits and not input_splits
        options = ("all_to_all_single", input_splits or "even", output_splits or "even")
        if even:
            work = self.calls.in_c(x, output, opts, None, "all_to_all")
        else:
            work = self.calls.exchange_in_c(x, x, output, opts, options)
        if work is not NotImplemented:
            return work
        output, x = in_memory([output, x])
        _require_dtype(output, x)
        for tensor, splits in ((output, output_splits), (x, input_splits)):
            self._require_splits(tensor, splits)
        function: Any = on_tensors.all_to_all if even else on_tensors.exchange
        arguments = (output, x) if even else (x, output, options)
        return self.calls.collective("all_to_all_single", [output], [x], opts, function, *arguments)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, *_: Any) -> Any:
        """Sends the i-th tensor of a list to rank i."""
        targets, sources, options = tuple(outputs), tuple(inputs), self.calls.between_all["all_to_all"]
        if sources:
            work = self.calls.exchange_in_c(sources[0], sources, targets, opts, options)
            if work is not NotImplemented:
                return work
        targets, sources = tuple(in_memory(targets)), tuple(in_memory(sources))
        self._require_one_each(targets, "output_tensor_list")
        self._require_one_each(sources, "input_tensor_list")
        return self.calls.collective(
            "all_to_all", targets, sources, opts, on_tensors.exchange, sources, targets, options
        )

    def barrier(self, opts: Any = None, *_: Any) -> Any:
        """Waits until all ranks have called this function; for a GPU, makes the current stream wait. Without a GPU, the
        options' device ids are ignored.
        """
        device = getattr(opts, "device", None) or CPU
        if getattr(opts, "device_ids", None):
            device = torch.device("cuda", opts.device_ids[0]) if torch.cuda.is_available() else CPU
        return self.calls.barrier(with_index(device), opts)

    # -- transfers and coalescing ---

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Any:
        return self.calls.transfer(tensors, peer, sends=True)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> Any:
        return self.calls.transfer(tensors, peer, sends=False)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        """Raises RuntimeError, because a receive must name the rank that sends."""
        raise RuntimeError("proxyccl: recv from any source is not supported; name the rank")

    recvAnysource = recv_anysource  # noqa: N815

    def start_coalescing(self, device: Any = None) -> None:
        self.calls.coalescing.works = []

    _start_coalescing = start_coalescing

    def end_coalescing(self, device: Any = None) -> Any:
        collected, self.calls.coalescing.works = self.calls.coalescing.works, None
        if collected is None:
            raise RuntimeError("end_coalescing: expected a start_coalescing before it, and no failed transfer since")
        return JointWork(collected)

    _end_coalescing = end_coalescing

    # -- arguments ---

    def _require_one_each(self, tensors: Tensors, argument: str) -> None:
        if len(tensors) != self._size:
            raise ValueError(f"{argument}: has {len(tensors)} tensors; expected {self._size}, one for each rank")

    def _require_gathered(self, output: torch.Tensor, x: torch.Tensor) -> None:
        _require_dtype(output, x)
        if output.numel() != self._size * x.numel():
            raise ValueError("output tensor size must be equal to world_size times input tensor size")

    def _require_share(self, output: torch.Tensor, x: torch.Tensor) -> None:
        _require_dtype(output, x)
        if x.numel() != self._size * output.numel():
            raise ValueError("input tensor must be the same size as output size times world size")

    def _require_splits(self, tensor: torch.Tensor, splits: Sequence[int]) -> None:
        if splits:
            if len(splits) != self._size:
                raise RuntimeError("Number of tensor splits not equal to group size")
            if sum(splits) != tensor.size(0):
                raise RuntimeError("Split sizes doesn't match total dim 0 size")
        elif tensor.size(0) % self._size:
            raise RuntimeError("Tensor's dim 0 does not divide equally across group size")


def with_index(device: torch.device) -> torch.device:
    """Returns the device; if it is a GPU without an index, returns the current GPU."""
    if device.type == "cpu":
        return CPU
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())


def _goes_apart(tensors: Tensors) -> bool:
    """Returns whether a coalesced call makes one call for each tensor, because the tensors are few or large, instead of
    copying the tensors to one array. All ranks return the same value.
    """
    if not tensors or not tensors[0].is_cuda:
        return False
    count = len(tensors)
    return count <= _FEW or sum(x.numel() * x.element_size() for x in tensors) >= count * _LARGE_BYTES


def _op_of(opts: Any) -> Any:
    """Returns the reduction's operator. torch passes the operator, an object with it as `reduceOp`, or None for SUM."""
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def _require_dtype(output: torch.Tensor, x: torch.Tensor) -> None:
    if output.dtype != x.dtype:
        raise TypeError(f"output tensor must have the same type as input tensor: {output.dtype} and {x.dtype}")
