"""Ranks of vLLM with the installed plug-in: processes in which vLLM's own functions make groups for CPU tensors.

vLLM's wheel is built for GPUs and finds no device here, so the fixtures let vLLM detect a CPU. All other code is vLLM's
own, which finds the plug-in by its entry point.
"""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.platforms

from support.fakes import vllm_kernels

vllm.platforms.builtin_platform_plugins["cpu"] = lambda: "vllm.platforms.cpu.CpuPlatform"
vllm_kernels.register()

from vllm.config import CompilationConfig, PassConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

SECONDS = 120
_fork = multiprocessing.get_context("fork")


class Rank:
    """A process that runs functions on request. The process's groups exist until the process exits."""

    def __init__(self, rank: int, world_size: int, store: Path, **parallel: int) -> None:
        self.connection, theirs = _fork.Pipe()
        self.process = _fork.Process(target=_serve, args=(theirs, rank, world_size, store, parallel), daemon=True)
        self.process.start()
        theirs.close()

    def request(self, body: Callable[..., Any], *arguments: Any) -> None:
        self.connection.send(pickle.dumps((body, arguments)))

    def answer(self) -> Any:
        """Returns the result of the last request."""
        return _result(self.receive())

    def receive(self) -> tuple[str | None, Any]:
        """Returns the last request's error (or None) and result."""
        assert self.connection.poll(SECONDS), "the rank did not answer"
        answer: tuple[str | None, Any] = self.connection.recv()
        return answer


class Ranks:
    """The ranks of one job."""

    def __init__(self, world_size: int, **parallel: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        store = Path(self.folder.name) / "store"
        self.ranks = [Rank(rank, world_size, store, **parallel) for rank in range(world_size)]
        for rank in self.ranks:
            rank.answer()

    def run(self, body: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Runs a module's function on all ranks at the same time. Returns the results by rank."""
        for rank in self.ranks:
            rank.request(body, *arguments)
        return [_result(answer) for answer in [rank.receive() for rank in self.ranks]]

    def close(self) -> None:
        """Ends the ranks, which destroy their groups first."""
        for rank in self.ranks:
            rank.connection.send(None)
        self.folder.cleanup()
        for rank in self.ranks:
            rank.process.join(SECONDS)
            assert rank.process.exitcode == 0


def _result(answer: tuple[str | None, Any]) -> Any:
    failure, result = answer
    assert not failure, failure
    return result


def _serve(connection: Any, rank: int, world_size: int, store: Path, parallel: dict[str, int]) -> None:
    torch.set_num_threads(1)
    of_gpus = dict.fromkeys(("fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant"), False)  # these passes need a GPU
    config = VllmConfig(compilation_config=CompilationConfig(pass_config=PassConfig(**of_gpus)))
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    with set_current_vllm_config(config, check_compile=False):
        _attempt(connection, functools.partial(_begin, rank, world_size, store, config.parallel_config))
        while (request := connection.recv()) is not None:
            body, arguments = pickle.loads(request)
            _attempt(connection, functools.partial(body, *arguments))
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def _begin(rank: int, world_size: int, store: Path, parallel_config: Any) -> None:
    parallel_state.init_distributed_environment(
        world_size, rank, f"file://{store}", rank, current_platform.dist_backend
    )
    parallel_state.initialize_model_parallel(world_size // parallel_config.data_parallel_size)


def _attempt(connection: Any, body: Callable[[], Any]) -> None:
    try:
        connection.send((None, body()))
    except Exception:
        connection.send((traceback.format_exc(), None))


@pytest.fixture(scope="session", params=[2, 3], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """The ranks of a tensor-parallel group."""
    made = Ranks(request.param)
    yield made
    made.close()


@pytest.fixture
def make_ranks() -> Iterator[Callable[..., Ranks]]:
    """Makes ranks for one test, which may kill them."""
    made: list[Ranks] = []

    def make(world_size: int, **parallel: int) -> Ranks:
        made.append(Ranks(world_size, **parallel))
        return made[-1]

    yield make
    for ranks in made:
        for rank in ranks.ranks:
            rank.process.kill()
            rank.process.join()
        ranks.folder.cleanup()
