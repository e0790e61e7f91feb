"""NIXL's Python interface: ``from proxyccl.nixl import nixl_agent``. With the distribution proxyccl-nixl, programs can
also import this package as `nixl`.

The names, arguments, defaults, types and errors are those of NIXL 1.5.1. The package translates calls to calls of
`proxyccl.transfer.Agent`, and implements NIXL's exchange of metadata by sockets. A call that uses an unsupported
feature raises an error that names the feature.
"""

from proxyccl.nixl._api import (
    DEFAULT_COMM_PORT,
    nixl_agent,
    nixl_agent_config,
    nixl_backend_handle,
    nixl_prepped_dlist_handle,
    nixl_xfer_handle,
)
from proxyccl.nixl.enums import nixl_thread_sync_t

__all__ = [
    "DEFAULT_COMM_PORT",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]
