"""Makes vLLM's calls of a group on the communicator of the group's device group."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
from vllm.logger import init_logger

from proxyccl import RuntimeUnavailableError
from proxyccl.torch import communicator_of

logger = init_logger("vllm.proxyccl")  # vLLM shows the messages of its own loggers alone


class ProxyCCLCommunicator(CudaCommunicator):  # type: ignore[misc]
    """A device communicator without NCCL. Methods return new tensors unless their docstrings say otherwise.

    Args:
        cpu_group: a group of gloo with the same ranks.
        device: the rank's device.
        device_group: a group of the backend "proxyccl".
        unique_name: vLLM's name of the group, such as "tp:0".
        options: further options of vLLM's class.

    Attributes:
        group_name: a name by which torch finds the device group. The name contains vLLM's name and is the same in each
            run, unlike torch's own name, which contains the number of groups that the process has made; a cached graph
            contains the name and may outlive the process.

    Raises:
        NotImplementedError: the group is not a group of torch.distributed.
        ArgumentError: the device group has another backend.
    """

    def __init__(
        self,
        cpu_group: dist.ProcessGroup,
        device: torch.device | None = None,
        device_group: dist.ProcessGroup | None = None,
        unique_name: str = "",
        **options: Any,
    ) -> None:
        if device_group is None or options.get("tcp_store_group") is not None:
            raise NotImplementedError(f"proxyccl-vllm: the group {unique_name!r} is not a group of torch.distributed")
        of_experts = unique_name.split(":", maxsplit=1)[0] == "ep"
        with mock.patch.object(pynccl, "PyNcclCommunicator", return_value=None):
            super().__init__(cpu_group, device, device_group, unique_name if of_experts else "", **options)
        self.unique_name = unique_name
        config = get_current_vllm_config_or_none()
        if config is not None and getattr(config.model_config, "enable_nccl_comm_suspend", False):  # vLLM 0.26 lacks it
            os.environ.setdefault("PROXYCCL_SUSPENDABLE", "1")
        self._communicator = communicator_of(device_group, self.device)
        self.group_name = f"proxyccl {unique_name}"
        torch._C._distributed_c10d._register_process_group(self.group_name, device_group)
        logger.info_once("Using ProxyCCL for the group '%s'.", unique_name)

    def destroy(self) -> None:
        torch._C._distributed_c10d._unregister_process_group(self.group_name)
        super().destroy()

    def suspend(self) -> None:
        """Gives the group's device memory back until `resume`. All ranks call this together. If the group can't be
        suspended, as a group of several hosts, logs a warning and keeps the memory.
        """
        try:
            self.device_group._get_backend(self.device).suspend()
        except RuntimeUnavailableError as error:
            logger.warning("The group '%s' keeps its memory: %s", self.unique_name, error)

    def resume(self) -> None:
        """Allocates the memory again, unless the group is not suspended. All ranks call this together."""
        self.device_group._get_backend(self.device).resume()

    def _log_all_reduce_backend_selection(self) -> None:
        """Logs nothing, because vLLM's own reductions are not used."""

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        x = input_.contiguous()
        return self._communicator.all_reduce(x, out=torch.empty_like(x))

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        dim = self._as_dim(input_, dim)
        x = input_.contiguous()
        out = x.new_empty((self.world_size * x.shape[0], *x.shape[1:]))
        self._communicator.all_gather(x, out=out)
        return out if dim == 0 else out.view(self.world_size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)

    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """Gathers along dimension 0; the ranks' sizes may differ."""
        if dim != 0:
            raise NotImplementedError(f"all_gatherv: dim is {dim}; expected 0")
        if not isinstance(input_, torch.Tensor):
            return [self.all_gatherv(each, dim, sizes) for each in input_]
        if self._are_even(sizes, input_.shape[0], "all_gatherv"):
            return self.all_gather(input_, 0)
        assert sizes is not None
        out = input_.new_empty((sum(sizes), *input_.shape[1:]))
        dist.all_gather(list(out.split(sizes)), input_.contiguous(), group=self.device_group)
        return out

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self.reduce_scatterv(input_, dim)

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """Adds the ranks' tensors, and returns this rank's share along a dimension; the shares' sizes may differ."""
        dim = self._as_dim(input_, dim)
        x = input_.movedim(dim, 0).contiguous()
        out = x.new_empty((self._share(x, sizes), *x.shape[1:]))
        self._reduce_scatter(x, out, sizes)
        return out.movedim(0, dim).contiguous()

    def reduce_scatterv_into_output(
        self, input_: torch.Tensor, output: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Does the same as `reduce_scatterv` along dimension 0, and writes to `output`."""
        if self._as_dim(input_, dim) != 0:
            raise NotImplementedError(f"reduce_scatterv_into_output: dim is {dim}; expected 0")
        x = input_.contiguous()
        shape = (self._share(x, sizes), *x.shape[1:])
        if tuple(output.shape) != shape or not output.is_contiguous():
            raise ValueError(f"output: has shape {tuple(output.shape)}; expected a contiguous tensor of shape {shape}")
        self._reduce_scatter(x, output, sizes)
        return output

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrites the tensor with the tensor of the rank `src`, and returns it."""
        result: torch.Tensor = DeviceCommunicatorBase.broadcast(self, tensor, src)
        return result

    def batch_isend_irecv(self, p2p_ops: list[dist.P2POp]) -> None:
        for work in dist.batch_isend_irecv(p2p_ops):
            work.wait()

    def _as_dim(self, input_: torch.Tensor, dim: int) -> int:
        if not -input_.dim() <= dim < input_.dim():
            raise ValueError(f"dim: is {dim}; expected a dimension of a tensor of shape {tuple(input_.shape)}")
        return dim % input_.dim()

    def _are_even(self, sizes: list[int] | None, own: int, call: str) -> bool:
        if sizes is None:
            return True
        if len(sizes) != self.world_size or sizes[self.rank_in_group] != own:
            raise ValueError(
                f"{call}: sizes are {sizes}; expected one for each of {self.world_size} ranks, "
                f"and {own} for rank {self.rank_in_group}"
            )
        return len(set(sizes)) == 1

    def _share(self, x: torch.Tensor, sizes: list[int] | None) -> int:
        if sizes is None:
            if x.shape[0] % self.world_size:
                raise ValueError(f"input_: its size {x.shape[0]} is not a multiple of {self.world_size} ranks")
            return x.shape[0] // self.world_size
        if len(sizes) != self.world_size or sum(sizes) != x.shape[0]:
            raise ValueError(f"sizes: are {sizes}; expected {self.world_size} sizes whose sum is {x.shape[0]}")
        return sizes[self.rank_in_group]

    def _reduce_scatter(self, x: torch.Tensor, out: torch.Tensor, sizes: list[int] | None) -> None:
        if sizes is None or len(set(sizes)) == 1:
            self._communicator.reduce_scatter(x, out=out)
        else:
            dist.reduce_scatter(out, list(x.split(sizes)), group=self.device_group)
