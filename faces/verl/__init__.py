"""verl's checkpoint engine by agents: the backend "proxyccl", which is registered when this module is imported.

verl imports it where its configuration of a rollout's checkpoint engine has ``custom_backend_module: proxyccl.verl``.
"""

from proxyccl.verl.checkpoint_engine import ProxyCCLCheckpointEngine

__all__ = ["ProxyCCLCheckpointEngine"]
