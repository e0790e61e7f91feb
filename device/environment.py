"""The names of all environment variables that ProxyCCL reads, so that a misspelt name is noticed.

docs/reference/environment.md explains each variable.
"""

from __future__ import annotations

import os
import warnings

_PREFIX = "PROXYCCL_"
VARIABLES = (
    "PROXYCCL_CACHE",
    "PROXYCCL_CTA_POLICY",
    "PROXYCCL_CXXFLAGS",
    "PROXYCCL_DAEMON_SOCKET",
    "PROXYCCL_DEEP_EP_OUTPUTS",
    "PROXYCCL_FABRIC",
    "PROXYCCL_HOSTS",
    "PROXYCCL_INVARIANT",
    "PROXYCCL_LEND_BYTES",
    "PROXYCCL_LIBFABRIC",
    "PROXYCCL_LOCAL_WORLD_SIZE",
    "PROXYCCL_PROXY",
    "PROXYCCL_RDMA",
    "PROXYCCL_REPORTS",
    "PROXYCCL_REPORT_DIR",
    "PROXYCCL_RUNTIME",
    "PROXYCCL_SGLANG",
    "PROXYCCL_SOCKETS",
    "PROXYCCL_SUSPENDABLE",
    "PROXYCCL_TIMEOUT",
    "PROXYCCL_TRANSFER_PATHS",
    "PROXYCCL_TRANSPORT",
)
"""The variables that users set."""
OLD_VARIABLES = tuple(
    f"PROXYCCL_{prefix}_{option.upper()}"
    for prefix, options in {
        "RDMA": "device port gid_index mtu service_level traffic_class timeout retry_count rnr_retry_count send_depth "
        "signal gpu_writes staging_bytes staging_chunk",
        "FABRIC": "provider interface depth signal gpu_writes staging_bytes staging_chunk streams",
    }.items()
    for option in options.split()
)
"""Older variables, each for one option that users now set in `PROXYCCL_RDMA` or `PROXYCCL_FABRIC`."""
OF_TESTS = (
    "PROXYCCL_FAULTS_CASE",
    "PROXYCCL_MODELS_DEPTH",
    "PROXYCCL_NVRTC",
    "PROXYCCL_REQUIRE_FABRIC",
    "PROXYCCL_REQUIRE_MODELS",
    "PROXYCCL_REQUIRE_RDMA",
)
"""The variables of the project's tests and Makefile."""

_warned: set[str] = set()


def set_variables() -> dict[str, str]:
    """Returns the environment variables with ProxyCCL's prefix, sorted by name."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_PREFIX)}


def problem_with(name: str) -> str:
    """Returns "" for a known variable; for an unknown one, a message that suggests the nearest known name."""
    if name in (*VARIABLES, *OLD_VARIABLES, *OF_TESTS):
        return ""
    from difflib import get_close_matches  # imported in this function, because misspelt names are rare

    # Names are compared without the prefix, which would make any two names similar.
    nearest = get_close_matches(name.removeprefix(_PREFIX), [known.removeprefix(_PREFIX) for known in VARIABLES], 1)
    return f"ignored: ProxyCCL has no variable {name}" + (f"; did you mean {_PREFIX}{nearest[0]}?" if nearest else "")


def warn_of_unknown() -> None:
    """Issues one warning for each unknown variable with ProxyCCL's prefix."""
    for name in os.environ:
        if name.startswith(_PREFIX) and name not in _warned and (problem := problem_with(name)):
            _warned.add(name)
            warnings.warn(problem, RuntimeWarning, stacklevel=3)
