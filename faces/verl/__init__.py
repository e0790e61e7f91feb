"""A checkpoint engine for verl, implemented by agents. Importing this module registers the engine as "proxyccl".

verl imports the module if the configuration of a checkpoint engine has ``custom_backend_module: proxyccl.verl``.
"""

from proxyccl.verl.checkpoint_engine import ProxyCCLCheckpointEngine

__all__ = ["ProxyCCLCheckpointEngine"]
