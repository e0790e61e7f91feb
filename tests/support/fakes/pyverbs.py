"""A fake package `pyverbs` for tests without RDMA, whose classes record their arguments. Like the real
package, it configures the root logger when it is imported.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

BASE = """
import logging
from types import SimpleNamespace as Record
logging.basicConfig(level=logging.INFO)

class PyverbsError(Exception):
    def __init__(self, message, error_code=-1):
        super().__init__(message)
        self.error_code = error_code

log = []  # (what, name or address or ...)
made = []  # all objects, in their order
device = Record(inline=16, atomic=1, reads=4, refused={})  # refused: class -> errno

class Object:
    def __init__(self, *args, **kwargs):
        kind = type(self).__name__
        error = device.refused.get(kind)
        if callable(error):
            error = error(*args, **kwargs)
        if error:
            raise PyverbsError(f"Failed to make a {kind}", error)
        self.args, self.kwargs = args, kwargs
        self.__dict__.update(kwargs)
        log.append(("open", kind))
        made.append(self)
    def __enter__(self):
        return self
    def __exit__(self, *exception):
        self.close()
    def close(self):
        log.append(("close", type(self).__name__))
"""
MODULES = {
    "addr": "from .pyverbs_error import Object\nclass AHAttr(Object): pass\nclass GID(Object): pass\n"
    "class GlobalRoute(Object): pass\n",
    "cq": """
from .pyverbs_error import Object
class CQ(Object):
    left = 0  # completions
    def poll(self, entries):
        taken = min(entries, self.left)
        self.left -= taken
        return taken, []
""",
    "device": """
from .pyverbs_error import Object, Record, device
class Context(Object):
    def query_device(self):
        return Record(atomic_caps=device.atomic, max_qp=100, max_qp_wr=128, max_cqe=64, max_mr=1000,
                      max_mr_size=1 << 40, max_qp_rd_atom=device.reads, max_qp_init_rd_atom=128)
    def query_port(self, number):
        return Record(active_mtu=4, max_msg_sz=1 << 23)
""",
    "mr": """
from .pyverbs_error import Object, log
class MR(Object):
    count = 0
    def __init__(self, pd, length, access, **kwargs):
        super().__init__(pd, length, access, **kwargs)
        MR.count += 1
        self.buf, self.lkey, self.rkey = kwargs.get("address", 4096), MR.count, MR.count + 1000
class DmaBufMR(MR): pass
""",
    "pd": "from .pyverbs_error import Object\nclass PD(Object): pass\n",
    "pyverbs_error": BASE,
    "qp": """
from .pyverbs_error import Object, device
class QPCap(Object): pass
class QPAttr(Object): pass
class QPInitAttr(Object):
    @property
    def max_inline_data(self):
        return device.inline
class QP(Object):
    qp_num = 77
    states = ()  # the states of all calls of modify
    def modify(self, attributes, mask):
        self.states = *self.states, attributes.qp_state
    def to_init(self, attributes): pass
    def to_rtr(self, attributes): self.attributes = attributes
    def to_rts(self, attributes): pass
""",
}
ENUMERATORS = {
    "ibv_access_flags": {
        "IBV_ACCESS_LOCAL_WRITE": 1,
        "IBV_ACCESS_REMOTE_WRITE": 2,
        "IBV_ACCESS_REMOTE_READ": 4,
        "IBV_ACCESS_REMOTE_ATOMIC": 8,
    },
    "ibv_atomic_cap": {"IBV_ATOMIC_NONE": 0},
    "ibv_qp_type": {"IBV_QPT_RC": 2},
    "ibv_qp_state": {"IBV_QPS_RESET": 0, "IBV_QPS_ERR": 6},
    "ibv_qp_attr_mask": {"IBV_QP_STATE": 1},
}


def write(root: Path, *, enums: str = "enums", in_module: bool = True) -> None:
    """Writes the package into a directory.

    Args:
        enums: the module that has the enumerators.
        in_module: whether the enumerators are also attributes of the module, and not only of their classes.
    """
    package = root / "pyverbs"
    (package).mkdir()
    (package / "__init__.py").write_text("")
    for name, text in MODULES.items():
        (package / f"{name}.py").write_text(text)
    lines = ["import enum"]
    for kind, members in ENUMERATORS.items():
        lines.append(f"{kind} = enum.IntFlag('{kind}', {members})")
        if in_module:
            lines.extend(f"{name} = {kind}.{name}" for name in members)
    (package / f"{enums}.py").write_text("\n".join(lines))


def device() -> SimpleNamespace:
    """Returns the fake device's capabilities, which a test may change."""
    import pyverbs.pyverbs_error

    return pyverbs.pyverbs_error.device


def log() -> list[tuple[str, str]]:
    """Returns the opening and closing of objects in order, each as a pair of event and name."""
    import pyverbs.pyverbs_error

    return pyverbs.pyverbs_error.log


def latest(kind: str) -> Any:
    """Returns the object that was made last of a class of the package."""
    import pyverbs.pyverbs_error

    return next(each for each in reversed(pyverbs.pyverbs_error.made) if type(each).__name__ == kind)
