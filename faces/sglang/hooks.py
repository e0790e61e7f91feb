"""The hooks by which SGLang's collectives become ProxyCCL's. The module imports SGLang, so the plug-in imports it only
if the hooks are switched on.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from proxyccl.channels.collectives.request import SUSPENDABLE, flag_from
from proxyccl.sglang import sleep
from proxyccl.sglang.group_calls import GroupCalls, ShortCalls, refuse_symmetric_memory, takes_rows
from proxyccl.torch.process_group import NAME
from sglang.srt.distributed.device_communicators.pynccl_allocator import is_symmetric_memory_enabled
from sglang.srt.environ import envs
from sglang.srt.layers import flashinfer_comm_fusion, layernorm
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.layers.layer_boundary.residual.add_norm import FUSE_ALLREDUCE_MAX_BATCH_SIZE
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_exec

_SRT = "sglang.srt"
_logger = logging.getLogger(__name__)
_library = torch.library.Library("proxyccl", "FRAGMENT")  # destroying `_library` unregisters operators
_library.define(
    "sglang_all_reduce_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool use_attn_tp_group) "
    "-> (Tensor, Tensor)"
)


def register() -> None:
    """Registers all hooks with SGLang, which applies them when its plug-ins have been loaded."""
    state = f"{_SRT}.distributed.parallel_state"
    fusion = f"{_SRT}.layers.flashinfer_comm_fusion"
    communicator = f"{_SRT}.distributed.device_communicators.pynccl.PyNcclCommunicator"
    applies = f"{_SRT}.layers.layer_boundary.residual.add_norm.flashinfer_ar_fusion_applies"
    HookRegistry.register(f"{state}.get_default_distributed_backend", _backend, HookType.AROUND)
    HookRegistry.register(f"{state}.GroupCoordinator.__init__", _init_coordinator, HookType.AROUND)
    HookRegistry.register(communicator, GroupCalls, HookType.REPLACE)
    HookRegistry.register(applies, _fusion_applies, HookType.REPLACE)
    HookRegistry.register(f"{fusion}.flashinfer_allreduce_residual_rmsnorm", _all_reduce_norm, HookType.REPLACE)
    HookRegistry.register(f"{fusion}.pre_initialize_workspaces", _no_workspaces, HookType.REPLACE)
    if flag_from(None, SUSPENDABLE, SUSPENDABLE):
        updater = f"{_SRT}.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        HookRegistry.register(f"{updater}.release_memory_occupation", sleep.release, HookType.AROUND)
        HookRegistry.register(f"{updater}.resume_memory_occupation", sleep.resume, HookType.AROUND)


def _backend(original: Callable[[str], str], device: str) -> str:
    """Returns the torch backend of SGLang's groups for devices. If inference must be deterministic, also makes these
    groups invariant.
    """
    chosen = original(device)
    if chosen not in ("nccl", "gloo"):
        return chosen
    if envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.get():
        os.environ.setdefault("PROXYCCL_INVARIANT", "1")
    return NAME


def _init_coordinator(original: Callable[..., None], coordinator: Any, *args: Any, **kwargs: Any) -> None:
    call = inspect.signature(original).bind(coordinator, *args, **kwargs)
    call.apply_defaults()
    if call.arguments["torch_distributed_backend"] != NAME:
        original(*call.args, **call.kwargs)
        return
    refuse_symmetric_memory(asked=is_symmetric_memory_enabled())
    names = ("use_pynccl", "use_custom_allreduce")
    pynccl, short = wanted = [call.arguments[name] for name in names]
    call.arguments.update(dict.fromkeys(names, False))
    original(*call.args, **call.kwargs)
    for name, value in zip(names, wanted, strict=True):
        setattr(coordinator, name, value)
    if coordinator.world_size > 1 and (pynccl or short):
        calls = GroupCalls(coordinator.device_group, coordinator.device)
        coordinator.pynccl_comm = calls if pynccl else None
        coordinator.ca_comm = calls.short if short else None
        _logger.info("Using ProxyCCL for the group %r.", coordinator.unique_name)


def _fusion_applies(batch_size: int) -> bool:
    """Returns whether SGLang may leave a batch's all_reduce to the norm that follows it."""
    comm = get_exec().comm
    return (
        not layernorm._use_aiter
        and not is_dp_attention_enabled()
        and not comm.enforce_disable_flashinfer_allreduce_fusion
        and comm.flashinfer_allreduce_fusion_backend != "cutedsl"
        and not envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.get()
        and 0 < batch_size <= FUSE_ALLREDUCE_MAX_BATCH_SIZE
    )


def _all_reduce_norm(
    input_tensor: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    max_token_num: int = 2048,
    use_oneshot: bool | None = None,
    trigger_completion_at_end: bool = False,
    fp32_acc: bool = True,
    use_attn_tp_group: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns a pair of None if the group has no `ShortCalls` or `takes_rows` is False. Ignores the arguments that tune
    FlashInfer's kernels.
    """
    short = _short_calls(use_attn_tp_group)
    if short is None or not takes_rows(input_tensor, residual, weight):
        return None, None
    if torch.compiler.is_compiling():
        made: tuple[torch.Tensor, torch.Tensor] = torch.ops.proxyccl.sglang_all_reduce_rms_norm(
            input_tensor, residual, weight, eps, use_attn_tp_group
        )
        return made
    return short.add_and_norm(input_tensor, residual, weight, eps)


def _add_and_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, use_attn_tp_group: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    short = _short_calls(use_attn_tp_group)
    assert short is not None  # `_all_reduce_norm` declines a group without `ShortCalls`
    return short.add_and_norm(x, residual, weight, eps)


def _short_calls(use_attn_tp_group: bool) -> ShortCalls | None:
    """Returns the calls of the group whose sums SGLang leaves to norms; None if SGLang made the group without
    communicators. The result is None on all ranks or on none.
    """
    _, _, coordinator = flashinfer_comm_fusion.resolve_fusion_group(use_attn_tp_group=use_attn_tp_group)
    calls: GroupCalls | None = coordinator.pynccl_comm
    short: ShortCalls | None = coordinator.ca_comm or (None if calls is None else calls.short)
    return short


_library.impl("sglang_all_reduce_rms_norm", _add_and_norm, "CompositeExplicitAutograd")


@torch.library.register_fake("proxyccl::sglang_all_reduce_rms_norm", lib=_library)
def _fake(x: torch.Tensor, residual: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(residual)


def _no_workspaces(*_: Any, **__: Any) -> None:
    """Does nothing: the norm needs no memory of FlashInfer's."""
