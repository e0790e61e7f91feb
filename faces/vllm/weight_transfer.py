"""The backend's two engines for vLLM's weight transfer: one for vLLM's workers, one for the ranks of a trainer.

The interface is that of vLLM 0.33.0, `vllm.distributed.weight_transfer.base`. The trainer's ranks offer their shards in
place, without gathering them. Each worker reads a group of whole tensors into a staging buffer, passes the tensors to
the model's `load_weights`, and then reads the next group. The workers of a host share the data that they have read.
"""

from __future__ import annotations

import base64
import itertools
import math
import uuid
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from proxyccl.channels.transfers.agent import Agent
from proxyccl.channels.weights.card import tensors_of
from proxyccl.channels.weights.casts import LEAST_STAGING
from proxyccl.channels.weights.parts import FLOATS
from proxyccl.channels.weights.sharding import Replicate, Shard, Sharding
from proxyccl.channels.weights.source import WeightSource
from proxyccl.channels.weights.target import WeightTarget
from vllm.distributed.weight_transfer.base import Shard as VllmShard
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

_ALIGNMENT = 256
_Value = TypeVar("_Value")


@dataclass
class ProxyCCLWeightTransferInitInfo(WeightTransferInitInfo):
    """The trainer's first message to workers, which can be encoded as JSON.

    Attributes:
        cards: the results of `WeightSource.card` on the trainer's ranks, in base64.
        dtypes: the names of the declared element types, by the weights' names.
        bucket_bytes: the size of the staging buffer in bytes. If a tensor is larger, the buffer has that tensor's size.
            If the trainer has another element type, a second buffer has at most `bucket_bytes`.
        timeout: the time-out of each wait, in seconds.
    """

    cards: list[str]
    dtypes: dict[str, str]
    bucket_bytes: int
    timeout: float


@dataclass
class ProxyCCLWeightTransferUpdateInfo(WeightTransferUpdateInfo):
    """The trainer's message to workers in each update.

    Attributes:
        version: the version number of the weights that the trainer's ranks offer.
    """

    version: int


@dataclass
class ProxyCCLTrainerInitInfo(TrainerInitInfo):
    """A trainer's settings, besides the rank.

    Attributes:
        bucket_bytes: the size of each worker's staging buffer in bytes. If a tensor is larger, the buffer has that
            tensor's size.
        timeout: the time-out of each wait, in seconds.
    """

    backend: ClassVar[str] = "proxyccl"
    bucket_bytes: int = 256 << 20
    timeout: float = 300.0


class ProxyCCLWeightTransferEngine(
    WeightTransferEngine[ProxyCCLWeightTransferInitInfo, ProxyCCLWeightTransferUpdateInfo]
):
    """The engine of a worker, which reads weights and loads them into the worker's model."""

    init_info_cls = ProxyCCLWeightTransferInitInfo
    update_info_cls = ProxyCCLWeightTransferUpdateInfo

    _target: WeightTarget | None = None
    _agent: Agent | None = None

    def init_transfer_engine(self, init_info: ProxyCCLWeightTransferInitInfo) -> None:
        """Connects to the trainer's ranks. All workers call this at the same time."""
        self.shutdown()
        cards = [base64.b64decode(card) for card in init_info.cards]
        self._agent = Agent(f"vllm worker {uuid.uuid4().hex}", timeout=init_info.timeout)
        self._target = target = WeightTarget(self._agent, staging_bytes=max(LEAST_STAGING, init_info.bucket_bytes))
        dtypes = init_info.dtypes
        tensors = {name: (shape, getattr(torch, dtypes[name])) for name, (shape, _) in tensors_of(cards).items()}
        groups = _grouped({name: _nbytes(*each) for name, each in tensors.items()}, init_info.bucket_bytes)
        size = max(sum(places.values()) for places in groups)
        staging = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._groups: list[list[tuple[str, torch.Tensor]]] = []
        for group in groups:
            if self._groups:
                target.next_group()
            at, views = 0, []
            for name, room in group.items():
                shape, dtype = tensors[name]
                view = staging[at : at + _nbytes(shape, dtype)].view(dtype).view(shape)
                target.add(name, view)
                views.append((name, view))
                at += room
            self._groups.append(views)
        target.connect(cards, peers=_cards_of_other_workers(target.card()))

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: ProxyCCLWeightTransferUpdateInfo) -> None:
        """Reads a version of the weights, and loads it into the model.

        Raises:
            RuntimeError: the engine is not initialized.
            DisconnectedError: a rank of the trainer, or another worker, has ended or has closed its agent.
            TransferTimeoutError: the version did not arrive within the time-out.
        """
        if self._target is None:
            raise RuntimeError("init_transfer_engine has not been called")
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        def load(group: int) -> None:
            with disable_mtp_completeness_check():
                self.model.load_weights(self._groups[group])

        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        self._target.receive(update_info.version, stream=stream, each=load)

    def shutdown(self) -> None:
        """Disconnects from the trainer, and frees the staging buffer."""
        for each in (self._target, self._agent):
            if each is not None:
                each.close()
        self._target, self._agent, self._groups = None, None, []


class ProxyCCLTrainerWeightTransferEngine(TrainerWeightTransferEngine[ProxyCCLTrainerInitInfo]):
    """The engine of a trainer, on each rank of torch's default process group.

    Workers read a parameter in place if its memory is the same in each update, and cast it to the declared type. The
    engine copies other parameters, and parameters whose type can't be cast, into its own memory, which workers read.
    The engine never writes to the trainer's memory.
    """

    init_info_cls = ProxyCCLTrainerInitInfo

    @classmethod
    def trainer_init(cls, init_info: ProxyCCLTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Makes the engine and registers this rank's shards. The sender also connects the workers.

        Raises:
            ValueError: `source` is None.
            TypeError: the source has no local shards (`iter_local`).
        """
        if source is None:
            raise ValueError("a source of weights is needed")
        if not source.implements_iter_local():
            raise TypeError(f"{type(source).__name__} has no iter_local(): shards are read where they lie")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        engine._begin(init_info)
        return engine

    def _begin(self, init_info: ProxyCCLTrainerInitInfo) -> None:
        self._init_info = init_info
        self._version = 0
        self._agent = Agent(_name(self.rank), timeout=init_info.timeout)
        self._weights = WeightSource(self._agent)
        self._declared = {meta.name: meta for meta in self.source.metadata}
        self._kept: dict[str, torch.Tensor] = {}
        self._in_place: dict[str, int] = {}  # addresses of the parameters that workers read in place
        self._look()
        self._look()  # the second call finds the shards whose memory differs each time, so that they are copied
        self._register()
        if self.is_sender:
            self._connect_workers()

    def _look(self) -> bool:
        """Updates the memory that the workers read from the source's current shards. Returns whether a part of that
        memory is new and must be registered.
        """
        new = False
        for name, tensor in self.source.iter_local():
            address = tensor.data_ptr()
            if name in self._kept and name not in self._in_place:
                self._kept[name].copy_(tensor.detach())
            elif self._in_place.get(name) != address:
                # A parameter whose memory has changed is copied, because the trainer may use the earlier memory for
                # something else.
                dtype = self._declared[name].dtype
                if {_dtype_name(dtype), _dtype_name(tensor.dtype)} <= {*FLOATS}:
                    dtype = tensor.dtype  # the workers cast
                made = tensor.detach().to(dtype, copy=name in self._kept).contiguous()
                if made.data_ptr() == address:
                    self._in_place[name] = address
                else:
                    self._in_place.pop(name, None)
                self._kept[name] = made
                new = True
        return new

    def _register(self) -> None:
        for name, kept in self._kept.items():
            self._weights.add(name, kept, sharding=_sharding(self._declared[name]))
        self._cards = _gather(self._weights.card())  # the cards are kept until the workers have received them

    def _connect_workers(self) -> None:
        encoded = [base64.b64encode(card).decode() for card in self._cards]
        info = {
            "cards": encoded,
            "dtypes": {name: _dtype_name(meta.dtype) for name, meta in self._declared.items()},
            "bucket_bytes": self._init_info.bucket_bytes,
            "timeout": self._init_info.timeout,
        }
        self.client.init_weight_transfer_engine(info)
        self._cards = []

    def send_weights(self) -> None:
        """Offers the weights until all workers have read them. If the memory of a parameter has changed on any rank,
        the workers first connect again.

        Raises:
            RuntimeError: the sender could not update the workers. On the sender, the client's exception is raised
                instead.
        """
        if any(_gather(self._look())):
            self._weights.close()
            self._weights = WeightSource(self._agent)
            self._register()
        for device in {kept.device for kept in self._kept.values()}:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        self._version += 1
        failure: Exception | None = None
        with self._weights.offered(self._version):
            if self.is_sender:
                try:
                    if self._cards:
                        self._connect_workers()
                    self.client.start_weight_update()
                    self.client.update_weights({"version": self._version})
                    self.client.finish_weight_update()
                except Exception as error:
                    failure = error  # is raised below, when the other ranks know of it
            reason = _gather(None if failure is None else repr(failure))[0]  # the first rank is the sender
        if failure is not None:
            raise failure
        if reason is not None:
            raise RuntimeError(f"the sender could not update the workers: {reason}")

    def shutdown(self) -> None:
        self._agent.close()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(rank: int) -> str:
    return f"trainer {rank}"


def _sharding(meta: Any) -> Sharding | None:
    """Returns a parameter's sharding, whose mesh consists of the names of ranks' agents; None if every rank has the
    whole parameter.
    """
    if meta.owners is None:
        return None
    mesh = np.array([_name(rank) for rank in meta.owners], object).reshape(meta.mesh_shape)
    placements = meta.placements or [None] * mesh.ndim
    return Sharding(
        meta.shape,
        mesh.tolist(),
        [Shard(each.dim) if isinstance(each, VllmShard) else Replicate() for each in placements],
    )


def _gather(value: _Value, group: dist.ProcessGroup | None = None) -> list[_Value]:
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _cards_of_other_workers(card: bytes) -> list[bytes]:
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    cards = _gather(card, group.cpu_group) if group.world_size > 1 else [card]
    return [each for rank, each in enumerate(cards) if rank != group.rank_in_group]


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * int(dtype.itemsize)


def _grouped(nbytes: dict[str, int], most: int) -> list[dict[str, int]]:
    """Splits tensors into groups of at most `most` bytes; a larger tensor is a group of its own. `nbytes` maps the
    tensors' names to their sizes in bytes. Returns a dict like `nbytes` for each group, with sizes rounded up to
    multiples of 256.
    """
    room = {name: -(-each // _ALIGNMENT) * _ALIGNMENT for name, each in nbytes.items()}
    ends = itertools.accumulate(room.values())
    groups: list[dict[str, int]] = []
    begin = 0
    for (name, each), end in zip(room.items(), ends, strict=True):
        if not groups or end - begin > most:
            groups.append({})
            begin = end - each
        groups[-1][name] = each
    return groups
