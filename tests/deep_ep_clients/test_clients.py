"""Programs that import deep_ep: ranks are threads, or processes with gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import deep_ep  # noqa: E402

from proxyccl import Communicator  # noqa: E402
from support.cases.deep_ep_clients import CLIENTS, USED, Mixture, megatron, nemo, require_close  # noqa: E402
from support.devices import ON_HOST, runtime_with_blocks, torch_device  # noqa: E402
from support.processes import run_processes  # noqa: E402
from support.ranks import Ranks  # noqa: E402

WORLDS: list[tuple[int, dict[str, int]]] = [(1, {}), (3, {}), (4, {"local_world_size": 2})]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_gets_what_its_experts_make(ranks: Ranks, client: str) -> None:
    def body(comm: Communicator) -> None:
        mixture = Mixture.of(comm.rank, comm.world_size, torch_device(comm))
        require_close(CLIENTS[client](comm, mixture), mixture, float8="float8" in client or "SGLang" in client)

    ranks.run(body)


@pytest.mark.parametrize("client", USED)
def test_clients_find_their_names(client: str) -> None:
    for name in USED[client].split():
        found = deep_ep
        for part in name.split("."):
            found = getattr(found, part)


def test_a_branchs_buffer_is_absent() -> None:
    with pytest.raises(ImportError):  # after this error, Megatron-LM uses `Buffer`
        from deep_ep import HybridEPBuffer  # noqa: F401


def test_a_wrapped_constructor_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    made, construct = [], deep_ep.Buffer.__init__

    def wrapped(self: Any, *arguments: Any, **options: Any) -> None:
        construct(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(deep_ep.Buffer, "__init__", wrapped)

    def body(comm: Communicator) -> None:
        buffer = deep_ep.Buffer(comm, 0, 0, low_latency_mode=True)
        assert made == [buffer]
        whole = buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
        assert (whole.numel(), whole.dtype) == (0, torch.int8)
        buffer.low_latency_clean_mask_buffer()

    with Ranks(1, make_runtime=runtime_with_blocks) as one:
        one.run(body)


@pytest.mark.parametrize("client", [megatron, nemo])
def test_gradients(ranks: Ranks, client: Callable[..., Any]) -> None:
    def body(comm: Communicator) -> None:
        mixture = Mixture.of(comm.rank, comm.world_size, torch_device(comm))
        _, tokens, weights = client(comm, mixture)
        factors = torch.where(mixture.ids >= 0, mixture.weights * (mixture.ids + 1), 0).sum(1, keepdim=True)
        torch.testing.assert_close(tokens.float(), factors.expand_as(tokens), rtol=0.02, atol=0.02)
        sums = mixture.tokens.float().sum(1, keepdim=True)
        expected = torch.where(mixture.ids >= 0, sums * (mixture.ids + 1), 0)
        torch.testing.assert_close(weights, expected, rtol=0.02, atol=0.5)

    ranks.run(body)


@pytest.mark.host_only(reason="more processes than most machines have GPUs")
def test_clients_go_on_without_a_killed_rank() -> None:
    for rank, ended in enumerate(run_processes(3, Path(__file__).parent / "programs" / "lost_rank.py")):
        assert ended.returncode == (-9 if rank == 2 else 0), ended.stderr
        assert ended.stdout == ("" if rank == 2 else f"{rank} PeerLostError [0, 0, 1] [0, 0, 1]\n")


def test_a_group_of_gloo_is_enough() -> None:
    program = Path(__file__).parent / "programs" / "gloo_clients.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if ON_HOST:
        assert (
            done.stdout.count("of all ranks") == 2
        )  # count occurrences, not lines: both ranks may print at the same time
        assert done.stdout.count("of the node") == 1


@pytest.mark.slow
@pytest.mark.host_only(reason="a sanitizer of the CPU's")
def test_kernels_compute_no_address_from_a_null_pointer() -> None:
    program = Path(__file__).parent / "programs" / "empty_tensors.py"
    flags = "-O0 -g1 -fsanitize=undefined"
    environment = {**os.environ, "PROXYCCL_CXXFLAGS": flags}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runtime error" not in done.stderr, done.stderr
