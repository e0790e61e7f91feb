"""The modules that depend on an array library, so that the core need not import any array library.

The public package provides the name of each part's module. A part is imported when a call first needs it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

_modules: dict[str, str] = {}
_opaque: set[type] = set()


def provide(part: str, module: str) -> None:
    """Registers the name of a part's module, without importing the module."""
    _modules[part] = module


def load(part: str) -> Any:
    """Returns the module of a part, imported on first use. The caller defines a Protocol class for the functions that
    it expects in the module.

    Raises:
        KeyError: no module was registered for the part.
        ImportError: the array library is missing.
    """
    return importlib.import_module(_modules[part])


def keep_opaque(cls: type) -> None:
    """If torch is installed, makes torch's compiler call the methods of a public class instead of tracing them."""
    if cls not in _opaque and "torch" in sys.modules:
        load("torch: untraced").untraced(cls)
        _opaque.add(cls)
