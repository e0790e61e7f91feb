"""Makes the calls of one group of SGLang on a process group and on the process group's communicator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from proxyccl.channels.communicator import Communicator
from proxyccl.device.errors import ArgumentError
from proxyccl.torch.operators import communicator_of
from proxyccl.torch.process_group import NAME
from sglang.srt.distributed.utils import all_gather_single, reduce_scatter_single

_SHORT_BYTES = 8 << 20
"""The largest sum that is written to a new tensor; larger sums overwrite their input, to save memory."""
_NORMED = (torch.bfloat16, torch.float16)


class GroupCalls:
    """Takes the place of SGLang's `PyNcclCommunicator`. All ranks of the group construct it together.

    Args:
        group: a process group. If its backend is not "proxyccl", a new group of the same ranks is made, whose calls may
            run at the same time as those of other groups.
        device: where the tensors are: a torch device, or the number of a GPU.
        library_path: the path of NCCL's library, which is not used.
        is_symmetric_memory_enabled: must be False.
        cta_policy: must be None.

    Attributes:
        rank: this rank's number in the group.
        world_size: the number of ranks.
        group: the process group that makes the calls; `group` itself if it has only one rank.
        device: the device.
        short: the calls for short messages, by the group's communicator; None with one rank.
        available: whether the group has several ranks.
        disabled: whether the group has only one rank. If `disabled` is True, calls do nothing.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device | str | int,
        library_path: str | None = None,
        is_symmetric_memory_enabled: bool = False,
        cta_policy: int | None = None,
    ) -> None:
        refuse_symmetric_memory(asked=is_symmetric_memory_enabled)
        if cta_policy is not None:
            raise ArgumentError(
                "cta_policy",
                f"expected None, because SGLang sets it to gather KV shards by memory that NCCL registers, not "
                f"{cta_policy}; set SGLANG_ENABLE_KV_SHARD_ZERO_SM_GATHER=0",
            )
        if not isinstance(group, dist.ProcessGroup):
            raise ArgumentError("group", f"expected a torch process group, not {type(group).__name__}")
        self._ranks = dist.get_process_group_ranks(group)
        self.rank, self.world_size = dist.get_rank(group), len(self._ranks)
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self.available = self.world_size > 1
        self.disabled = not self.available
        if self.available and dist.get_backend(group) != NAME:
            group = dist.new_group(self._ranks, backend=NAME, use_local_synchronization=True)
        self.group = group
        self.short = ShortCalls(communicator_of(group, self.device)) if self.available else None

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        if self.available:
            dist.all_reduce(tensor, op, group=self.group)

    def outplace_all_reduce(
        self, in_tensor: torch.Tensor, out_tensor: torch.Tensor | None = None, op: Any = dist.ReduceOp.SUM
    ) -> torch.Tensor | None:
        if self.short is None:
            return None
        if op == dist.ReduceOp.SUM and self.short.should_custom_ar(in_tensor):
            return self.short.custom_all_reduce(in_tensor, out=out_tensor)
        out = in_tensor.clone() if out_tensor is None else out_tensor.copy_(in_tensor)
        dist.all_reduce(out, op, group=self.group)
        return out

    def all_gather(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, sizes: Sequence[int] | None = None
    ) -> None:
        if not self.available:
            return
        if sizes is None:
            all_gather_single(output_tensor, input_tensor, group=self.group)
        else:
            dist.all_gather(list(output_tensor.split(list(sizes))), input_tensor, group=self.group)

    def reduce_scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        sizes: Sequence[int] | None = None,
    ) -> None:
        if not self.available:
            return
        if sizes is None:
            reduce_scatter_single(output_tensor, input_tensor, op, group=self.group)
        else:
            dist.reduce_scatter(output_tensor, list(input_tensor.split(list(sizes))), op, group=self.group)

    def all_to_all_single(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor) -> None:
        """Exchanges equal parts of the flattened tensors."""
        if self.available:
            dist.all_to_all_single(output_tensor.view(-1), input_tensor.view(-1), group=self.group)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        if self.available:
            dist.broadcast(tensor, self._ranks[src], group=self.group)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        if self.available:
            dist.send(tensor, self._ranks[dst], group=self.group)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        if self.available:
            dist.recv(tensor, self._ranks[src], group=self.group)

    def group_start(self) -> None:
        """Does nothing: each call is complete by itself."""

    group_end = group_start

    @contextmanager
    def change_state(self, enable: bool | None = None) -> Iterator[None]:
        """Does nothing: the calls are the same in captures and outside."""
        yield


class ShortCalls:
    """Takes the place of SGLang's class for short messages, whose object is a group's `ca_comm`. SGLang recognizes
    AITER's class by additional methods, so this class must not have methods of those names.

    Args:
        communicator: the group's communicator.

    Attributes:
        disabled: False.
        enable_register_for_capturing: False: SGLang's fusions for single models need AITER's communicator.
    """

    disabled = False
    enable_register_for_capturing = False

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def should_custom_ar(self, x: torch.Tensor) -> bool:
        """Returns whether `custom_all_reduce` takes a tensor. The result is the same on all ranks."""
        return bool(x.is_floating_point() and x.is_contiguous() and x.nbytes <= _SHORT_BYTES)

    def custom_all_reduce(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the sum, in a new tensor or in `out`."""
        out = torch.empty_like(x) if out is None else out
        self._communicator.all_reduce(x, out=out)
        return out

    def capture(self) -> AbstractContextManager[None]:
        """Returns a context that does nothing: a capture needs no preparation."""
        return nullcontext()

    def add_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the ranks' rows and the residual. Returns the RMSNorm of the result, and the result, in new tensors."""
        rows = self._communicator.all_reduce_rms_norm(
            x,
            residual,
            weight.detach(),
            eps,
            out=torch.empty_like(x),
            residual_out=torch.empty_like(residual),
        )
        return rows.out, rows.residual

    def fused_allreduce_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the results of `add_and_norm`, or None if `add_and_norm` does not take the tensors. With
        AITER, SGLang calls this method.
        """
        return self.add_and_norm(x, residual, weight, eps) if takes_rows(x, residual, weight) else None


def takes_rows(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether `ShortCalls.add_and_norm` takes these tensors. The result is the same on all ranks."""
    return (
        x.dtype in _NORMED
        and x.dtype == residual.dtype == weight.dtype
        and x.shape == residual.shape
        and all(each.is_contiguous() for each in (x, residual, weight))
    )


def refuse_symmetric_memory(*, asked: bool) -> None:
    """Raises NotImplementedError if SGLang would register memory with NCCL."""
    if asked:
        raise NotImplementedError(
            "proxyccl: --enable-symm-mem registers memory with NCCL, which PROXYCCL_SGLANG=1 replaces; start the "
            "server without it"
        )
