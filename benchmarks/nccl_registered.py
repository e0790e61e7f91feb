"""NCCL's collectives on memory that is registered with it as symmetric.

For such memory NCCL uses its kernels for symmetric memory, where it has them; under its zero-CTA policy, copy engines
make all_gather and all_to_all. NCCL has registration and policy from 2.28 on (`ncclCommWindowRegister`,
`NCCL_CTA_POLICY_ZERO`), and torch's process group passes them on.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_FIRST_VERSION = (2, 28)
CTA_POLICY_DEFAULT, CTA_POLICY_ZERO = 0, 2


def why_missing() -> str:
    """Returns why this installation can't register memory with NCCL as symmetric; "" if it can."""
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
    """A separate process group of NCCL, with two registered arrays. All ranks make it together.

    Args:
        device: this rank's.
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
        dist.all_reduce(torch.ones(4, device=device), group=self.group)  # the first call connects the ranks
        backend.register_mem_pool(self._pool, symm=True)

    def arrays(self, count: int, dtype: torch.dtype) -> tuple[Any, Any]:
        """Returns an input and an output of `count` elements, which lie in the same memory at each call."""
        nbytes = count * dtype.itemsize
        source, out = (array[:nbytes].view(dtype) for array in self._arrays)
        return source, out
