"""Makes vLLM's calls of a group on the communicator of the group's device group."""

from __future__ import annotations

from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
from vllm.logger import init_logger

from proxyccl import ArgumentError, ResourceError, RuntimeUnavailableError
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
        sleeps = config is not None and getattr(config.model_config, "enable_nccl_comm_suspend", False)  # not in 0.26
        self._communicator = communicator_of(device_group, self.device, suspendable=True if sleeps else None)
        self.group_name = f"proxyccl {unique_name}"
        torch._C._distributed_c10d._register_process_group(self.group_name, device_group)
        logger.info_once("Using ProxyCCL for the group '%s'.", unique_name)

    def destroy(self) -> None:
        torch._C._distributed_c10d._unregister_process_group(self.group_name)
        super().destroy()

    def suspend(self) -> None:
        """Gives the group's device memory back until `resume`. All ranks call this together. If the group can't be
        suspended, such as a group of several hosts, or too little host memory is left, logs a warning and keeps the
        memory.
        """
        try:
            self.device_group._get_backend(self.device).suspend()
        except (ArgumentError, RuntimeUnavailableError, dist.DistBackendError) as error:  # on all ranks
            if isinstance(error, dist.DistBackendError) and not isinstance(error.__cause__, ResourceError):
                raise
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
        if not isinstance(input_, torch.Tensor):
            return [self.all_gatherv(each, dim, sizes) for each in input_]
        if self._as_dim(input_, dim) != 0:
            raise NotImplementedError(f"all_gatherv: dim is {dim}; expected 0")
        sizes = self._sizes(sizes, input_.shape[0], "own")
        if len(set(sizes)) == 1:
            return self.all_gather(input_, 0)
        out = input_.new_empty((sum(sizes), *input_.shape[1:]))
        dist.all_gather(list(out.split(sizes)), input_.contiguous(), group=self.device_group)
        return out

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self.reduce_scatterv(input_, dim)

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """Adds the ranks' tensors, and returns this rank's share along a dimension; the shares' sizes may differ."""
        dim = self._as_dim(input_, dim)
        return self._reduce_scatter(input_.movedim(dim, 0), None, sizes).movedim(0, dim).contiguous()

    def reduce_scatterv_into_output(
        self, input_: torch.Tensor, output: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Does the same as `reduce_scatterv` along dimension 0, and writes to `output`."""
        if self._as_dim(input_, dim) != 0:
            raise NotImplementedError(f"reduce_scatterv_into_output: dim is {dim}; expected 0")
        return self._reduce_scatter(input_, output, sizes)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrites the tensor with the tensor of the rank `src`, and returns it."""
        if not 0 <= src < self.world_size:
            raise ArgumentError("src", f"is {src}; expected a rank of {self.world_size}")
        result: torch.Tensor = DeviceCommunicatorBase.broadcast(self, tensor, src)
        return result

    def batch_isend_irecv(self, p2p_ops: list[dist.P2POp]) -> None:
        for work in dist.batch_isend_irecv(p2p_ops):
            work.wait()

    def _as_dim(self, input_: torch.Tensor, dim: int) -> int:
        if not -input_.dim() <= dim < input_.dim():
            raise ArgumentError("dim", f"is {dim}; expected a dimension of a tensor of shape {tuple(input_.shape)}")
        return dim % input_.dim()

    def _sizes(self, sizes: list[int] | None, rows: int, kind: Literal["own", "sum"]) -> list[int]:
        """Returns the number of rows of each rank. `rows` is the number of this rank ("own"), or the sum of all."""
        world = self.world_size
        if sizes is None:
            if kind == "sum" and rows % world:
                raise ArgumentError("input_", f"its size {rows} is not a multiple of {world} ranks")
            return [rows if kind == "own" else rows // world] * world
        found = sum(sizes if kind == "sum" else sizes[self.rank_in_group :][:1])
        if len(sizes) != world or min(sizes) < 0 or found != rows:
            known = "sum" if kind == "sum" else f"item {self.rank_in_group}"
            raise ArgumentError("sizes", f"are {sizes}; expected {world} sizes from 0 on whose {known} is {rows}")
        return sizes

    def _reduce_scatter(self, x: torch.Tensor, output: torch.Tensor | None, sizes: list[int] | None) -> torch.Tensor:
        """Adds the ranks' tensors, and returns this rank's rows, in `output` or in a new tensor."""
        x, sizes = x.contiguous(), self._sizes(sizes, x.shape[0], "sum")
        shape = (sizes[self.rank_in_group], *x.shape[1:])
        out = x.new_empty(shape) if output is None else output
        if out.shape != shape or not out.is_contiguous():
            raise ArgumentError("output", f"is {tuple(out.shape)}; expected a contiguous tensor of shape {shape}")
        if len(set(sizes)) == 1:
            self._communicator.reduce_scatter(x, out=out)
        else:
            dist.reduce_scatter(out, list(x.split(sizes)), group=self.device_group)
        return out
