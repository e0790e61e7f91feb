"""Checks this machine for the requirements of verbs. The check must be cheap, because every rank makes the check and
few machines have an RDMA device.
"""

from __future__ import annotations

from pathlib import Path

from proxyccl.device.errors import RuntimeUnavailableError
from proxyccl.proxy._engine import lib
from proxyccl.proxy.placement import SYSFS
from proxyccl.proxy.verbs.pyverbs_api import DEVICES, load

NEEDS = "libibverbs' headers (Debian, Ubuntu: apt install libibverbs-dev; Fedora: dnf install rdma-core-devel)"
"""The transport's build requirements, in words."""


def missing(root: Path = SYSFS) -> str:
    """Returns, as text, the requirements of RDMA by verbs that this machine lacks, and how to install them; "" if it
    lacks none.
    """
    lacks = []
    if not any((root / DEVICES).glob("*")):
        lacks.append(f"no RDMA device in {root / DEVICES}")
    else:
        from proxyccl.proxy.verbs.devices import inactive_ports  # slow to import

        inactive = inactive_ports(root)
        if inactive is not None:
            lacks.append(f"no active port; there is {inactive}")
    try:
        load()
    except RuntimeUnavailableError as error:
        lacks.append(str(error))
    if not lib.proxyccl_verbs_built():
        lacks.append(f"the engine was built without {NEEDS}; reinstall proxyccl with them")
    return "; ".join(lacks)
