"""The parts of the core's calls that depend on an array library: where they are, for a core that imports none of them.

The public package provides the name of each part's module. A part is imported when a call first needs it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

_modules: dict[str, str] = {}
_opaque: set[type] = set()


def provide(part: str, module: str) -> None:
    """Names the module of a part. Nothing is imported."""
    _modules[part] = module


def load(part: str) -> Any:
    """The module of a part, imported on first use. The caller says in a protocol what it expects of the module.

    Raises:
        KeyError: nobody provides the part.
        ImportError: the array library is missing.
    """
    return importlib.import_module(_modules[part])


def keep_opaque(cls: type) -> None:
    """Has torch's compiler, if torch is there, call the methods of a public class rather than trace them."""
    if cls not in _opaque and "torch" in sys.modules:
        load("torch: untraced").untraced(cls)
        _opaque.add(cls)
