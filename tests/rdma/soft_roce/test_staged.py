"""Staged RDMA, in which data goes through pinned memory on both sides: all ranks choose this transport together, and
channels and collectives give correct results.
"""

from __future__ import annotations

import numpy as np
import pytest

from proxyccl import AbortedError, Array, Communicator, Runtime
from proxyccl.proxy.verbs.registrations import Registrations
from support.cases.random_transfers import run_random_transfers
from support.cases.reference import Call
from support.ranks import Ranks
from support.soft_roce.kernels import KERNELS
from support.soft_roce.nodes import LOCAL, RANKS, TIMEOUT, rdma_of
from support.soft_roce.wire import DEVICES

BETWEEN = {(a, b): "staged" for a in range(LOCAL) for b in range(LOCAL, RANKS)}
SMALL = {"staging_bytes": 32 << 10, "staging_chunk": 8 << 10}  # small, so that most puts wrap around the ring's end


def ranks(local: int, transport: object) -> Ranks:
    return Ranks(
        2 * local,
        options_of=lambda rank: rdma_of(rank, local, **SMALL),
        local_world_size=local,
        timeout=TIMEOUT,
        transport=transport,
    )


def bytes_of(rank: int, size: int) -> np.ndarray:
    return np.random.default_rng(rank).integers(0, 256, size, dtype=np.uint8)


def exchanged(comm: Communicator, part: int) -> dict[int, str]:
    """Puts to every other rank, signals, and checks the data received. Returns the transport to each peer."""
    target = comm.empty(comm.world_size * part, "uint8").fill(0)
    channels = comm.proxy_channels(target, bytes_of(comm.rank, part))
    comm.compile(KERNELS, "exchange")(1, 1, channels, len(channels), comm.rank, part)
    comm.synchronize()
    got = target.numpy().reshape(comm.world_size, part)
    assert all(np.array_equal(got[channel.peer], bytes_of(channel.peer, part)) for channel in channels)
    return {channel.peer: channel.transport for channel in channels}


def test_puts_values_gets_and_signals_keep_their_order() -> None:
    def body(comm: Communicator) -> None:
        assert run_random_transfers(comm, 1).transport == "staged"

    with ranks(1, "staged") as pair:
        pair.run(body)


@pytest.mark.full
def test_channels_and_collectives_are_the_same_over_it() -> None:
    def body(comm: Communicator) -> tuple[Array, object]:
        there = [peer for peer in range(RANKS) if peer // LOCAL != comm.rank // LOCAL]
        staged = {peer: "staged" if peer in there else "copy" for peer in range(RANKS) if peer != comm.rank}
        assert exchanged(comm, 50_003) == staged
        assert {peer: comm.transport(peer) for peer in staged} == staged
        Call("all_reduce", "int64", "sum", None, 5003, seed=1).run(comm)
        Call("all_to_all", "int32", "sum", "proxy", 5003, seed=2).run(comm)
        target = comm.empty(200_000, "uint8").fill(0)
        channels = comm.proxy_channels(target, bytes_of(comm.rank, 200_000), peers=[(comm.rank + LOCAL) % RANKS])
        comm.compile(KERNELS, "leave")(1, 1, channels, 200_000)
        return target, channels

    with ranks(LOCAL, BETWEEN) as nodes:
        left = nodes.run(body)
    for rank, (target, _) in enumerate(left):  # all puts arrived before any rank closed, without a wait
        assert np.array_equal(target.numpy(), bytes_of((rank + LOCAL) % RANKS, 200_000))


def put_and_flush(comm: Communicator) -> None:
    """Lets rank 0 put and flush; when its flush word is set, the data must be in rank 1's memory."""
    size = 100_000
    target = comm.empty(size, "uint8").fill(0)
    channels = comm.proxy_channels(target, bytes_of(comm.rank, size))
    if comm.rank == 0:
        comm.compile(KERNELS, "put_only")(1, 1, channels, size)
        comm.synchronize()
    comm.all_gather_bytes(b"flushed")
    if comm.rank == 1:
        assert np.array_equal(target.numpy(), bytes_of(0, size))


def abort_a_wait(comm: Communicator) -> None:
    channels = comm.proxy_channels(comm.empty(8, "uint8"))
    if comm.rank == 0:
        comm.compile(KERNELS, "wait")(1, 1, channels)
    comm.all_gather_bytes(b"waiting")
    if comm.rank == 1:
        comm.abort("enough")
    with pytest.raises(AbortedError, match="ended the communicator"):
        comm.synchronize()


def test_ranks_that_can_not_register_memory_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rank can't register memory, all ranks learn the reason and use the staged transport."""
    probe = Registrations.unsupported_reason

    def unsupported_reason(registrations: Registrations, runtime: Runtime, gpu_writes: str) -> str:
        return "no way" if registrations._device.name == DEVICES[1] else probe(registrations, runtime, gpu_writes)

    monkeypatch.setattr(Registrations, "unsupported_reason", unsupported_reason)

    def body(comm: Communicator) -> None:
        assert [info.unsupported["verbs"] for info in comm.topology.ranks] == ["", "no way"]
        assert exchanged(comm, 3001) == {1 - comm.rank: "staged"}
        put_and_flush(comm)
        abort_a_wait(comm)

    with ranks(1, None) as pair:
        pair.run(body)
