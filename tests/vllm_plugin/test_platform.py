"""The platform that the plug-in chooses, and the configurations that it refuses."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import proxyccl_vllm
import pytest
import torch
from proxyccl_vllm.communicator import ProxyCCLCommunicator
from proxyccl_vllm.platform import ProxyCCLPlatform
from vllm import platforms
from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform


def test_it_extends_the_platform_that_vllm_would_choose() -> None:
    assert current_platform.is_cpu()
    assert isinstance(current_platform, platforms.cpu.CpuPlatform)


@pytest.mark.parametrize("found", [(), ("xpu",), ("cuda", "xpu")], ids=str)
def test_it_declines_other_devices(found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: dict[str, Callable[[], str | None]] = dict.fromkeys(platforms.builtin_platform_plugins, lambda: None)
    monkeypatch.setattr(platforms, "builtin_platform_plugins", chosen | dict.fromkeys(found, lambda: "a.Platform"))
    assert proxyccl_vllm.detect() is None


def test_a_failure_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM itself goes on silently with its own platform."""
    monkeypatch.setitem(sys.modules, "proxyccl.torch", None)  # lets the import fail
    with pytest.raises(ImportError):
        proxyccl_vllm.detect()
    assert "vLLM goes on without ProxyCCL" in caplog.text


def test_batch_invariance_makes_reductions_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("PROXYCCL_INVARIANT", "0")
    monkeypatch.delenv("PROXYCCL_INVARIANT")
    assert proxyccl_vllm.detect() is not None
    assert os.environ["PROXYCCL_INVARIANT"] == "1"


def test_vllms_own_fusion_is_off_and_its_cache_knows_of_ours() -> None:
    config = VllmConfig()
    assert config.compilation_config.pass_config.fuse_allreduce_rms is False
    assert config.additional_config == {"proxyccl_fused_norms": True}
    off = VllmConfig(additional_config={"proxyccl_fused_norms": False})
    assert off.compute_hash() != config.compute_hash()
    with pytest.raises(ValueError, match="proxyccl_fused_norms is 'false'; expected true or false"):
        VllmConfig(additional_config={"proxyccl_fused_norms": "false"})


def test_groups_and_memory_of_nccl_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = VllmConfig()
    config.parallel_config.enable_elastic_ep = True
    with pytest.raises(ValueError, match=r"enable_elastic_ep: .* expected False"):
        current_platform.check_and_update_config(config)
    config.parallel_config.enable_elastic_ep = False
    monkeypatch.setenv("VLLM_USE_NCCL_SYMM_MEM", "1")
    with pytest.raises(ValueError, match="VLLM_USE_NCCL_SYMM_MEM: expected 0"):
        current_platform.check_and_update_config(config)


def test_rebalancing_of_experts_by_nccl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = VllmConfig()
    monkeypatch.setattr(config.parallel_config.eplb_config, "communicator", "pynccl")
    current_platform.check_and_update_config(config)
    monkeypatch.setattr(config.parallel_config, "enable_eplb", True)
    with pytest.raises(ValueError, match=r"eplb_config\.communicator: is 'pynccl', .* expected .* 'torch_nccl'"):
        current_platform.check_and_update_config(config)


def test_sleep_of_groups_is_refused_on_amd_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    config = VllmConfig()
    monkeypatch.setattr(config, "model_config", mock.Mock(spec=ModelConfig, enable_nccl_comm_suspend=True))
    monkeypatch.setattr(ProxyCCLPlatform, "device_name", "rocm")
    monkeypatch.setattr(platforms.cpu.CpuPlatform, "check_and_update_config", lambda _: None)
    with pytest.raises(ValueError, match=r"enable_nccl_comm_suspend: .* expected False"):
        ProxyCCLPlatform.check_and_update_config(config)


def test_groups_that_are_not_torchs_are_refused() -> None:
    group: Any = object()
    with pytest.raises(NotImplementedError, match=r"'ep:0' is not a group of torch\.distributed"):
        ProxyCCLCommunicator(group, torch.device("cpu"), group, "ep:0", tcp_store_group=group)
