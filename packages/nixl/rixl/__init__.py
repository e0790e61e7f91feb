"""The same as `nixl`, by the name of NIXL's edition for ROCm."""

import sys

from proxyccl.nixl import (
    DEFAULT_COMM_PORT,
    _api,
    _bindings,
    _utils,
    logging,
    nixl_agent,
    nixl_agent_config,
    nixl_backend_handle,
    nixl_prepped_dlist_handle,
    nixl_thread_sync_t,
    nixl_xfer_handle,
)

for _module in (_api, _bindings, _utils, logging):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module

__all__ = [
    "DEFAULT_COMM_PORT",
    "_api",
    "_bindings",
    "_utils",
    "logging",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]
