"""The platform's class: vLLM's own class for the device, with groups on ProxyCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.utils.import_utils import resolve_obj_by_qualname

from proxyccl_vllm import chosen_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FUSED_NORMS = "proxyccl_fused_norms"
"""The key in vLLM's `additional_config` that switches the pass off, and that tells vLLM's cache of the pass."""


def _base() -> Any:
    name = chosen_platform()
    if name is None:
        raise RuntimeError("proxyccl-vllm: vLLM's platform is neither CUDA, ROCm nor the CPU")
    return resolve_obj_by_qualname(name)


class ProxyCCLPlatform(_base()):  # type: ignore[misc]
    """vLLM's platform for the device, whose groups use ProxyCCL."""

    dist_backend = "proxyccl"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "proxyccl_vllm.communicator.ProxyCCLCommunicator"

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        return "proxyccl_vllm.fused_norms.PassManager"

    @classmethod
    def use_custom_op_collectives(cls) -> bool:
        """Returns True: collectives are operators in compiled graphs, which the pass matches."""
        return True

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Switches off the parts of vLLM that ProxyCCL replaces.

        Raises:
            ValueError: an option asks for groups, communicators or memory of NCCL, or for sleep of groups on AMD GPUs,
                or the option that switches the pass off is neither true nor false.
        """
        super().check_and_update_config(vllm_config)
        parallel = vllm_config.parallel_config
        if parallel.enable_elastic_ep:
            raise ValueError("enable_elastic_ep: its groups need NCCL; expected False with proxyccl-vllm")
        if envs.VLLM_USE_NCCL_SYMM_MEM:
            raise ValueError("VLLM_USE_NCCL_SYMM_MEM: expected 0 with proxyccl-vllm, which does not use NCCL")
        if parallel.enable_eplb and parallel.eplb_config.communicator == "pynccl":
            raise ValueError(
                "eplb_config.communicator: is 'pynccl', which needs NCCL's communicator; expected with proxyccl-vllm "
                "'torch_nccl', which uses ProxyCCL and needs use_async=False, or 'torch_gloo'"
            )
        if cls.device_name == "rocm" and getattr(vllm_config.model_config, "enable_nccl_comm_suspend", False):
            raise ValueError("enable_nccl_comm_suspend: the driver can't suspend memory of AMD GPUs; expected False")
        vllm_config.compilation_config.pass_config.fuse_allreduce_rms = False  # FlashInfer's, or AITER's
        if isinstance(vllm_config.additional_config, dict):
            fused = vllm_config.additional_config.setdefault(FUSED_NORMS, True)
            if fused not in (True, False):
                raise ValueError(f"additional_config: {FUSED_NORMS} is {fused!r}; expected true or false")
