"""Empty packages that replace packages which SGLang imports but these tests do not use: torchvision, whose wheels need
torch's wheels for GPUs, and kernels for NVIDIA GPUs, whose wheels are larger than the rest together.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, ClassVar
from unittest import mock


class _Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if self.__name__.startswith("torchvision") else mock.MagicMock(name=name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_ours = name.split(".")[0] in self._packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(*, on_gpus: bool) -> None:
    """Makes imports find empty packages. The empty torchvision, only for CPUs, is installed after transformers has
    recorded that torchvision is missing.
    """
    from transformers.utils import import_utils

    if not on_gpus:
        import_utils.is_torchvision_available()
        import_utils.is_torchvision_v2_available()
    sys.meta_path.append(_Finder(("sgl_kernel", "flashinfer", "deep_gemm") if on_gpus else ("torchvision",)))
