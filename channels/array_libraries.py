"""Imports modules that depend on an array library when calls first need them.

The public package registers the name of each module, so the core imports no array library itself. Each module supplies
one part, whose name is for example "torch: untraced".
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

_modules: dict[str, str] = {}


def provide(part: str, module: str) -> None:
    """Registers the module that supplies a part, without importing it."""
    _modules[part] = module


def load(part: str) -> Any:
    """Returns the module that supplies a part; imports it on first use. The caller declares the module's functions in a
    Protocol class.

    Raises:
        KeyError: no module was registered for the part.
        ImportError: the array library is missing.
    """
    return importlib.import_module(_modules[part])


def keep_opaque(cls: type) -> None:
    """If torch is installed, makes torch's compiler call the methods of a public class and of its bases, instead of
    tracing them.
    """
    if "torch" in sys.modules:
        _keep_opaque(cls, sys.modules["torch"])


@functools.cache
def _keep_opaque(cls: type, _torch: ModuleType) -> None:
    for each in cls.__mro__[:-1]:  # without `object`
        load("torch: untraced").untraced(each)
