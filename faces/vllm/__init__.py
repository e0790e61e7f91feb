"""The backend "proxyccl" of vLLM's weight transfer, implemented by agents. vLLM calls `register`, which is an entry
point of vLLM's plugins.
"""

from __future__ import annotations

_MODULE = "proxyccl.vllm.weight_transfer"
_registered = False


def register() -> None:
    """Registers the backend "proxyccl" with vLLM's two factories of weight transfer engines, for workers and for
    trainers.
    """
    global _registered  # noqa: PLW0603
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    if not _registered:
        WeightTransferEngineFactory.register_engine("proxyccl", _MODULE, "ProxyCCLWeightTransferEngine")
        WeightTransferTrainerFactory.register_engine("proxyccl", _MODULE, "ProxyCCLTrainerWeightTransferEngine")
        _registered = True
