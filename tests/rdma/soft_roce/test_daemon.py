"""RDMA of ranks whose proxies run in the node daemon, which owns the queue pairs and registrations.

two_machines.py tests two daemons, one per node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from proxyccl import AbortedError, Communicator, TransportError
from proxyccl.proxy.interface import Keys
from support.cases.reference import Call
from support.daemons import RunningDaemon, running_daemon
from support.paths import PROGRAMS
from support.processes import run_processes
from support.ranks import Ranks
from support.soft_roce.kernels import KERNELS
from support.soft_roce.nodes import LOCAL, TIMEOUT, failure_of, rdma_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with running_daemon(tmp_path_factory.mktemp("daemon") / "socket") as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def _in_daemon(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_PROXY", "daemon")
    monkeypatch.setenv("PROXYCCL_DAEMON_SOCKET", str(daemon.path))


def two_nodes(local: int = LOCAL, transport: object = None) -> Ranks:
    return Ranks(
        2 * local,
        options_of=lambda rank: rdma_of(rank, local, staging_bytes=32 << 10, staging_chunk=8 << 10),
        local_world_size=local,
        timeout=TIMEOUT,
        transport=transport,
    )


def open_devices(daemon: RunningDaemon) -> list[str]:
    """Returns the RDMA devices that the daemon has open, with one entry for each rank that uses one."""
    files = (os.readlink(path) for path in Path(f"/proc/{daemon.process.pid}/fd").iterdir())
    return [file for file in files if "uverbs" in file]


def bytes_of(rank: int, size: int) -> np.ndarray:
    return np.random.default_rng(rank).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize(
    ("between", "local"),
    [
        ("verbs", 1),
        pytest.param("verbs", LOCAL, marks=pytest.mark.full),
        pytest.param("staged", LOCAL, marks=pytest.mark.full),
    ],
)
def test_channels_and_collectives_are_the_same(daemon: RunningDaemon, between: str, local: int) -> None:
    part, ranks = 50_003, 2 * local

    def body(comm: Communicator) -> None:
        target = comm.empty(ranks * part, "uint8").fill(0)
        source = comm.empty(part, "uint8").upload(bytes_of(comm.rank, part))
        memories = comm.register(target), comm.register(source)
        channels = comm.proxy_channels(*memories)
        assert {c.peer: c.transport for c in channels} == {
            peer: "copy" if peer // local == comm.rank // local else between
            for peer in range(ranks)
            if peer != comm.rank
        }
        comm.compile(KERNELS, "exchange")(1, 1, channels, len(channels), comm.rank, part)
        comm.synchronize()
        got = target.numpy().reshape(ranks, part)
        assert all(np.array_equal(got[channel.peer], bytes_of(channel.peer, part)) for channel in channels)
        Call("all_reduce", "int64", "sum", None, 5003, seed=1).run(comm)
        Call("all_to_all", "int32", "sum", "proxy", 5003, seed=2).run(comm)
        comm.barrier()
        for memory in memories:
            memory.close()
        comm.barrier()

    with two_nodes(local, {(a, b): between for a in range(local) for b in range(local, ranks)}) as nodes:
        nodes.run(body)
    assert not open_devices(daemon)


def test_a_key_that_is_none_of_the_client_ends_its_job_alone(daemon: RunningDaemon) -> None:
    """Another job's key is valid on the device, but not in the client's protection domain."""

    def body(comm: Communicator) -> tuple[int, Keys]:
        verbs = comm.register(comm.empty(100, "uint8"))._exposed["verbs"]
        return verbs.address, verbs.local_keys

    def thief(comm: Communicator) -> BaseException:
        memory = comm.register(comm.empty(100, "uint8"))
        if comm.rank == 0:
            address, keys = stolen[0]
            memory._id = comm.proxy.add_remote_memory(address, 100, keys)
        channels = comm.proxy_channels(memory)
        if comm.rank == 0:
            comm.compile(KERNELS, "put_only")(1, 1, channels, 100)
        return failure_of(lambda: comm.barrier() if comm.rank else comm.synchronize())

    with two_nodes(local=1) as owners:
        stolen = owners.run(body)
        with two_nodes(local=1) as thieves:
            errors = thieves.run(thief)
        assert all(isinstance(error, TransportError) for error in errors), errors
        assert re.search("IBV_WC_LOC_(PROT|QP_OP)_ERR", str(errors[0])), errors[0]  # Soft-RoCE reports QP_OP
        owners.run(lambda comm: Call("all_reduce", "int64", "sum", "proxy", 100, seed=1).run(comm))


@pytest.mark.full
def test_a_staged_peer_is_refused_what_was_taken_back() -> None:
    def body(comm: Communicator) -> BaseException:
        memory, kept = (comm.register(comm.empty(100, "uint8").fill(9)) for _ in range(2))
        channels = comm.proxy_channels(memory, kept)
        comm.all_gather_bytes(b"made")
        if comm.rank == 1:
            memory.close()
        comm.all_gather_bytes(b"closed")
        if comm.rank == 0:
            comm.compile(KERNELS, "put_only")(1, 1, channels, 100)
        return failure_of(lambda: comm.barrier() if comm.rank else comm.synchronize())

    with two_nodes(1, "staged") as pair:
        errors = pair.run(body)
    assert any(isinstance(error, TransportError) for error in errors), errors
    assert all(isinstance(error, TransportError | AbortedError) for error in errors), errors
    assert "outside the memory that this rank offers" in " ".join(map(str, errors))


@pytest.mark.full  # test_failure.py has the same test without a daemon
def test_a_device_that_is_not_there_is_named_and_nothing_is_left(daemon: RunningDaemon) -> None:
    def options_of(rank: int) -> dict[str, object]:
        return {"rdma": replace(rdma_of(rank, 1)["rdma"], device="mlx5_99")} if rank == 0 else rdma_of(rank, 1)

    before = daemon.resources()
    group = two_nodes(local=1)
    group.options_of = options_of
    with group, pytest.raises(Exception, match="mlx5_99"):
        group.run(lambda comm: None)
    assert daemon.settles(before)


def test_a_killed_rank_ends_the_others_and_its_queue_pairs_go(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROXYCCL_LOCAL_WORLD_SIZE", "1")
    before = daemon.resources()
    survivor, victim = run_processes(2, PROGRAMS / "failure.py", "killed_in_a_collective:two_shot")
    assert victim.returncode == -9
    assert "rank 0: PeerLostError peer=1" in survivor.stdout, survivor.stdout + survivor.stderr
    assert daemon.settles(before)
    assert not open_devices(daemon)
