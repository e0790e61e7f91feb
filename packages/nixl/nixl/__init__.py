"""NIXL's interface, implemented by ProxyCCL. The modules of this package are those of `proxyccl.nixl`, under NIXL's
names.
"""

import sys

from proxyccl.nixl import *  # noqa: F403  the package re-exports NIXL's public names
from proxyccl.nixl import __all__, _api, _bindings, _utils, logging  # noqa: F401

for _module in (_api, _bindings, _utils, logging):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
