"""Fakes the parts of vLLM that weight transfer engines need, with the names, arguments and order of calls of vLLM
0.33.0 (2026-11; vllm/distributed/weight_transfer/base.py and factory.py, vllm/v1/worker/gpu_worker.py).
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

import pytest

InitInfo = TypeVar("InitInfo")
UpdateInfo = TypeVar("UpdateInfo")


@dataclass(frozen=True)
class Replicate:
    """Placement on a mesh axis: every rank has the whole parameter."""


@dataclass(frozen=True)
class Shard:
    """Placement on a mesh axis: each rank has a slice along dimension `dim`."""

    dim: int


@dataclass(frozen=True)
class ParamMeta:
    """A parameter and its layout."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[Any, ...] | None = None


@dataclass
class WeightTransferInitInfo:
    """Base class of a worker's settings."""


@dataclass
class WeightTransferUpdateInfo:
    """Base class of the settings of one weight update."""


@dataclass
class TrainerInitInfo:
    """Base class of a trainer's settings."""

    backend: ClassVar[str]
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        """Whether the trainer's engine on this rank starts weight updates through its client."""
        return self.rank == 0


class WeightTransferEngine(Generic[InitInfo, UpdateInfo]):
    """Base class of a worker's engine."""

    init_info_cls: Any
    update_info_cls: Any

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.device, self.model, self.model_config = device, model, vllm_config.model_config

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        """Returns a worker's settings from a dictionary of the settings' fields."""
        return self.init_info_cls(**init_dict)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Calls `receive_weights` as vLLM's worker does."""
        self.receive_weights(self.update_info_cls(**update_info))  # type: ignore[attr-defined]


class TrainerWeightTransferEngine(Generic[InitInfo]):
    """Base class of a trainer's engine."""

    def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True, rank: int = 0) -> None:
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank


class _Factory:
    def __init__(self) -> None:
        self.registry: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module: str, class_name: str) -> None:
        """Registers an engine's class. Refuses a name that is already registered."""
        if name in self.registry:
            raise ValueError(name)
        self.registry[name] = (module, class_name)

    def engine(self, name: str) -> Any:
        """Imports and returns the class that was registered under a name."""
        module, class_name = self.registry[name]
        return getattr(importlib.import_module(module), class_name)


class Model:
    """A model that stores copies of loaded weights, and accepts weights only during a reload."""

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {}
        self.reloading = False
        self.calls = 0

    def load_weights(self, weights: Any) -> None:
        """Stores copies of the tensors by name. A reload must be in progress."""
        assert self.reloading
        self.calls += 1
        self.weights |= {name: tensor.clone() for name, tensor in weights}


def _initialize(model: Model) -> None:
    model.reloading = True


def _finalize(model: Model, _: Any) -> None:
    model.reloading = False


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
    yield


def install(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Puts the stand-in modules into sys.modules. Returns an object whose `workers` and `trainers` are the
    factories.
    """
    found = SimpleNamespace(workers=_Factory(), trainers=_Factory())
    names = (Replicate, Shard, ParamMeta, WeightTransferInitInfo, WeightTransferUpdateInfo, TrainerInitInfo)
    base = {each.__name__: each for each in (*names, WeightTransferEngine, TrainerWeightTransferEngine)}
    loader = "vllm.model_executor.model_loader"
    modules: dict[str, dict[str, Any]] = {
        **{name: {} for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer", loader[:19], loader)},
        "vllm.distributed.weight_transfer.base": base,
        "vllm.distributed.weight_transfer.factory": {
            "WeightTransferEngineFactory": found.workers,
            "WeightTransferTrainerFactory": found.trainers,
        },
        f"{loader}.reload": {"initialize_layerwise_reload": _initialize, "finalize_layerwise_reload": _finalize},
        f"{loader}.mtp_validation": {"disable_mtp_completeness_check": _unchecked},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    for name in [name for name in sys.modules if name.startswith("proxyccl.vllm")]:
        monkeypatch.delitem(sys.modules, name)
    return found
