"""Fakes the parts of verl that checkpoint engines need, with the names, arguments and order of calls of verl 0.9.1
(2026-09; verl/checkpoint_engine/base.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import pytest


class CheckpointEngine:
    """Base of engines."""


class CheckpointEngineRegistry:
    """Engines by name."""

    classes: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def register(backend: str) -> Callable[[Any], Any]:
        """Returns a decorator that registers a class under the backend's name."""

        def keep(cls: Any) -> Any:
            CheckpointEngineRegistry.classes[backend] = cls
            return cls

        return keep

    @classmethod
    def get(cls, backend: str) -> Any:
        """Returns the class that was registered under a name."""
        return cls.classes[backend]


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts the stand-in modules into sys.modules, and returns the registry."""
    for name in ("verl", "verl.checkpoint_engine", "verl.checkpoint_engine.base"):
        module = ModuleType(name)
        vars(module).update(__path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    base: Any = sys.modules["verl.checkpoint_engine.base"]
    base.CheckpointEngine, base.CheckpointEngineRegistry = CheckpointEngine, CheckpointEngineRegistry
    for name in [name for name in sys.modules if name.startswith("proxyccl.verl")]:
        monkeypatch.delitem(sys.modules, name)
    return CheckpointEngineRegistry
