"""verl's checkpoint engine. The interface is that of verl 0.9.1, `verl.checkpoint_engine.base`.

In verl, all ranks of a trainer gather each weight, and the first rank sends the weight. Weights are sent in buckets,
along a chain of all rollout workers in which the workers of a host are neighbours.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import torch

from proxyccl.channels.timeouts import timeout_from
from proxyccl.channels.transfers.agent import Agent
from proxyccl.channels.transfers.metadata import host_of
from proxyccl.device.arguments.integers import round_up
from proxyccl.torch_tensors.flat import byte_view
from proxyccl.verl.chain import Chain, Piece
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

_ALIGNMENT = 256


@CheckpointEngineRegistry.register("proxyccl")
class ProxyCCLCheckpointEngine(CheckpointEngine):
    """Moves weights from trainer workers to rollout workers.

    Args:
        bucket_size: the size of a bucket in bytes. Each worker has two buckets.
        device: the device of the buckets: "cuda" or "cpu"; None means the GPU, or the CPU if there is no GPU.
        rollout_dtype: the element type to which weights are converted before sending; None leaves them unchanged.
        is_master: without effect; verl sets it on the trainer's first rank.
        timeout: the time-out of each wait for a neighbour, in seconds.
    """

    def __init__(
        self,
        bucket_size: int,
        device: str | None = None,
        rollout_dtype: torch.dtype | None = None,
        is_master: bool = False,
        timeout: float = 600.0,
    ) -> None:
        self.bucket_size = bucket_size // _ALIGNMENT * _ALIGNMENT
        if not self.bucket_size:
            raise ValueError(f"bucket_size: expected at least {_ALIGNMENT} bytes, got {bucket_size}")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.rollout_dtype = rollout_dtype
        self.is_master = is_master
        self._timeout = timeout_from(timeout)
        self._agent: Agent | None = None
        self._buckets: list[torch.Tensor] = []
        self._chain: Chain | None = None

    def prepare(self) -> dict[str, Any]:
        """Makes this update's agent and this update's buckets. Returns the agent's metadata.

        If an earlier update was not finalized, `prepare` first ends that update, because verl does not call `finalize`
        after a failure. Waits of the earlier update then raise ClosedError.
        """
        self.finalize()
        self._agent = Agent(f"verl {uuid.uuid4().hex}", timeout=self._timeout)
        self._buckets = [torch.empty(self.bucket_size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        for bucket in self._buckets:
            self._agent.register(bucket)
        return {"metadata": self._agent.metadata()}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Returns the arguments of `init_process_group` as two dicts, for the trainer workers and for the rollout
        workers. Each dict maps the name of an argument to a list with one value for each worker.

        Args:
            actor_wg_world_size, rollout_world_size: the number of trainer workers, and the number of rollout workers.
            metadata: the results of `prepare` on all workers, with the trainer workers first.
        """
        agents = [each["metadata"] for each in metadata]
        rollouts = agents[actor_wg_world_size:]
        hosts = [host_of(agent) for agent in rollouts]
        first_host = [host_of(agents[0]), *hosts]  # hosts in the order of the chain
        order = sorted(range(rollout_world_size), key=lambda index: (first_host.index(hosts[index]), index))
        chain = [agents[0], *(rollouts[index] for index in order)]
        place = {index: position for position, index in enumerate(order, 1)}
        others = actor_wg_world_size - 1
        trainer: dict[str, list[Any]] = {
            "sends": [True] + [False] * others,
            "previous": [None] * actor_wg_world_size,
            "following": [chain[1]] + [None] * others,
        }
        rollout: dict[str, list[Any]] = {
            "sends": [False] * rollout_world_size,
            "previous": [chain[place[index] - 1] for index in range(rollout_world_size)],
            "following": [(*chain, None)[place[index] + 1] for index in range(rollout_world_size)],
        }
        return trainer, rollout

    def init_process_group(self, *, sends: bool, previous: bytes | None, following: bytes | None) -> None:
        """Joins the chain, if this worker is a part of the chain. `build_topology` returns the arguments."""
        if sends or previous is not None:
            assert self._agent is not None
            first, second = self._agent.regions
            self._chain = Chain(self._agent, (first, second), previous, following)

    def finalize(self) -> None:
        """Leaves the chain, and frees the buckets."""
        if self._agent is not None:
            self._agent.close()
        self._agent, self._chain, self._buckets = None, None, []

    @torch.no_grad()
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Sends weights, if this is the trainer's first rank. The trainer's other ranks only run the generator, because
        the generator gathers each weight from all ranks.

        Args:
            weights: a generator of (name, tensor) pairs, asynchronous or not.
            global_steps: the trainer's step.

        Raises:
            DisconnectedError: the first rollout worker has ended, or has closed its agent.
            TransferTimeoutError: the first rollout worker did not read a bucket within the time-out.
            ClosedError: the next update was prepared before this update had ended.
        """
        if self._chain is None:
            async for _ in _each(weights):
                pass
            return
        chain, buckets, number, at = self._chain, self._buckets, 0, 0
        pieces: list[Piece] = []

        async def flush(*, last: bool) -> None:
            nonlocal number, at, pieces
            self._synchronize()
            chain.offer(number, at, pieces, last=last)
            number, at, pieces = number + 1, 0, []
            await chain.until_free(number)

        async for name, tensor in _each(weights):
            weight = tensor.detach()
            if self.rollout_dtype is not None:
                weight = weight.to(self.rollout_dtype)
            flat = byte_view(weight.contiguous())
            first = 0
            while True:
                room = self.bucket_size - at
                if room < min(self.bucket_size, flat.numel() - first):  # a weight shorter than a bucket is not cut
                    await flush(last=False)
                    continue
                nbytes = min(room, flat.numel() - first)
                buckets[number % 2][at : at + nbytes].copy_(flat[first : first + nbytes], non_blocking=True)
                dtype = str(weight.dtype).removeprefix("torch.")
                pieces.append(Piece(name, dtype, list(weight.shape), first, at, nbytes))
                at += round_up(nbytes, _ALIGNMENT)
                first += nbytes
                if first == flat.numel():
                    break
        await flush(last=True)
        await chain.until_free(number + 1)

    @torch.no_grad()
    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) pairs. A tensor is valid until the next pair is requested.

        Args:
            global_steps: the trainer's step.

        Raises:
            RuntimeError: this worker is not in the chain.
            DisconnectedError: a neighbour in the chain has ended, or has closed its agent.
            TransferTimeoutError: a neighbour did not offer or read a bucket within the time-out.
            ClosedError: the next update was prepared before this update had ended.
        """
        if self._chain is None:
            raise RuntimeError("init_process_group has not been called")
        chain, buckets = self._chain, self._buckets  # local references, because `prepare` may replace the attributes
        number, whole = 0, torch.empty(0, dtype=torch.uint8, device=self.device)
        bucket = await chain.fetch(number)
        while True:
            memory = buckets[number % 2]
            following = None if bucket.last else asyncio.ensure_future(chain.fetch(number + 1))
            try:
                for piece in bucket.pieces:
                    dtype = getattr(torch, piece.dtype)
                    part = memory[piece.offset : piece.offset + piece.nbytes]
                    nbytes = torch.Size(piece.shape).numel() * dtype.itemsize
                    if piece.nbytes == nbytes:
                        yield piece.name, part.view(dtype).view(piece.shape)
                        continue
                    if piece.first == 0:
                        whole = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                    whole[piece.first : piece.first + piece.nbytes].copy_(part, non_blocking=True)
                    if piece.first + piece.nbytes == nbytes:
                        yield piece.name, whole.view(dtype).view(piece.shape)
                self._synchronize()  # waits, because the next bucket may overwrite this bucket
                if following is None:
                    break
                number, bucket = number + 1, await following
            finally:
                if following is not None:
                    following.cancel()
        await chain.until_free(number + 2)

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


async def _each(weights: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if hasattr(weights, "__aiter__"):
        async for pair in weights:
            yield pair
    else:
        for pair in weights:
            yield pair
