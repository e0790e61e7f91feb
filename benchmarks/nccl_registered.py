"""NCCL's collectives on memory that is registered with NCCL as symmetric. On symmetric memory NCCL runs special
kernels; with its zero-CTA policy, it uses copy engines for all_gather and all_to_all. The registration and the policy
need NCCL 2.28 (`ncclCommWindowRegister`, `NCCL_CTA_POLICY_ZERO`), and are requested through torch's process group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_FIRST_VERSION = (2, 28)
CTA_POLICY_DEFAULT, CTA_POLICY_ZERO = 0, 2


def why_missing() -> str:
    """Returns the reason why this installation can't register memory with NCCL as symmetric, or ""."""
    version = torch.cuda.nccl.version()
    if version < _FIRST_VERSION:
        return f"it needs NCCL {'.'.join(map(str, _FIRST_VERSION))}, and torch has {'.'.join(map(str, version))}"
    for owner, name in (
        (dist.ProcessGroupNCCL.NCCLConfig, "cta_policy"),
        (dist.ProcessGroupNCCL, "mem_allocator"),
        (dist.ProcessGroupNCCL, "register_mem_pool"),
    ):
        if not hasattr(owner, name):
            return f"torch {torch.__version__} has no {owner.__name__}.{name}"
    return ""


class RegisteredNccl:
    """A separate process group of NCCL, with two registered arrays. All ranks make the group together.

    Args:
        device: this rank's device.
        nbytes: size of each array.
        cta_policy: NCCL's.

    Attributes:
        group: the process group.
        nbytes: size of each array.

    Raises:
        RuntimeError: NCCL refuses to register the memory.
        TypeError: torch can't register memory as symmetric.
    """

    def __init__(self, device: torch.device, nbytes: int, cta_policy: int) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options.config.cta_policy = cta_policy
        self.nbytes = nbytes
        self.group = dist.new_group(backend="nccl", pg_options=options)
        backend = self.group._get_backend(device)
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self._arrays = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        dist.all_reduce(torch.ones(4, device=device), group=self.group)  # NCCL connects the ranks in the first call
        backend.register_mem_pool(self._pool, symm=True)

    def arrays(self, count: int, dtype: torch.dtype) -> tuple[Any, Any]:
        """Returns an input and an output of `count` elements. Every call returns the same memory."""
        nbytes = count * dtype.itemsize
        source, out = (array[:nbytes].view(dtype) for array in self._arrays)
        return source, out
