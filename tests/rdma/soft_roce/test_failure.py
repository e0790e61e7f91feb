"""Failures of a communicator over RDMA: each ends in a named exception on every rank, in bounded time."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from proxyccl import ArgumentError, Communicator, ProxyCCLError, RuntimeUnavailableError, TransportError
from proxyccl.proxy.interface import Keys
from support.paths import PROGRAMS
from support.processes import run_processes
from support.soft_roce.kernels import KERNELS
from support.soft_roce.nodes import failure_of, rdma_of, two_nodes
from support.soft_roce.wire import Wire

PROGRAM = PROGRAMS / "failure.py"


def reduce_for_ever(comm: Communicator) -> None:
    x = np.ones(5000, np.float32)
    while True:
        comm.all_reduce(x, "max")


def test_a_link_that_goes_down_is_a_transport_error_on_all_ranks(wire: Wire) -> None:
    def body(comm: Communicator) -> ProxyCCLError:
        for _ in range(3):
            comm.all_reduce(np.ones(5000, np.float32))
        comm.all_gather_bytes(b"")
        if comm.rank == 0:
            wire.cut(end=0)
        return failure_of(lambda: reduce_for_ever(comm))

    # The queue pair gives up within a second: it retries 3 times, after time-outs of 2 ** 12 * 4.096 µs.
    with two_nodes(local=1, retry_count=3, timeout=12) as pair:
        errors = pair.run(body)
    assert all(isinstance(error, TransportError) for error in errors), errors
    # The end whose link is down can't send (LOC_QP_OP); the other end exhausts its retries.
    assert all(re.search("IBV_WC_(LOC_QP_OP|RETRY_EXC)_ERR", str(error)) for error in errors), errors


def test_a_wrong_key_is_refused_by_the_peer_and_named() -> None:
    def body(comm: Communicator) -> ProxyCCLError:
        add = comm.proxy.add_remote_memory

        def add_with_wrong_keys(address: int, nbytes: int, keys: Keys, *further: Any) -> int:
            return add(address, nbytes, tuple(key + 12345 for key in keys), *further)

        with pytest.MonkeyPatch.context() as patch:
            if comm.rank == 0:
                patch.setattr(comm.proxy, "add_remote_memory", add_with_wrong_keys)
            channels = comm.proxy_channels(comm.register(np.zeros(100, np.uint8)))
        if comm.rank == 0:
            comm.compile(KERNELS, "put_only")(1, 1, channels, 100)
        return failure_of(lambda: comm.barrier() if comm.rank else comm.synchronize())

    with two_nodes(local=1) as pair:
        mine, theirs = pair.run(body)
    assert isinstance(mine, TransportError)
    assert "IBV_WC_REM_ACCESS_ERR" in str(mine)
    assert mine.peer == 1
    assert isinstance(theirs, TransportError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "mlx5_99"}, "mlx5_99"),
        *(pytest.param({name: 99}, name, marks=pytest.mark.full) for name in ("gid_index", "port")),
    ],
)
def test_a_missing_device_port_or_gid_is_named_on_every_rank(options: dict[str, object], message: str) -> None:
    def options_of(rank: int) -> dict[str, object]:
        return {"rdma": replace(rdma_of(rank, 1)["rdma"], **options)} if rank == 0 else rdma_of(rank, 1)

    group = two_nodes(local=1)
    group.options_of = options_of
    with group, pytest.raises((ArgumentError, RuntimeUnavailableError), match=message):
        group.run(lambda comm: None)


@pytest.mark.full  # test_daemon.py has the same test with the proxies in a daemon
def test_a_killed_rank_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_LOCAL_WORLD_SIZE", "1")
    survivor, victim = run_processes(2, PROGRAM, "killed_in_a_collective:two_shot")
    assert victim.returncode == -9
    assert "rank 0: PeerLostError peer=1" in survivor.stdout, survivor.stdout + survivor.stderr
