"""Later SmChannels reuse the semaphore words of earlier channels that all ranks have dropped."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from proxyccl import Communicator
from proxyccl.channels.handles import ChannelSet
from proxyccl.channels.sm_channel import SmChannel
from proxyccl.device._native import ffi
from support.cases.memory import recorded_mappings
from support.devices import world_sizes
from support.ranks import Ranks, collect_garbage
from support.running import run_ranks

pytestmark = pytest.mark.hip

SIGNAL = """
#include "proxyccl/sm_channel.h"
extern "C" __global__ void signal_all(proxyccl::SmChannelDeviceHandle* channels, int count) {
  for (int i = 0; i < count; ++i) channels[i].signal();
  for (int i = 0; i < count; ++i) channels[i].wait();
}
"""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(max(world_sizes(1, 2, 3))) as group:
        yield group


def places(channels: ChannelSet[SmChannel]) -> list[int]:
    handles = [ffi.from_buffer("ProxycclSmChannel *", channel.device_handle) for channel in channels]
    return [int(ffi.cast("uintptr_t", handle.semaphore.inbound)) for handle in handles]


def counts(comm: Communicator, channels: ChannelSet[SmChannel]) -> list[int]:
    """Returns the number of signals that came in on each channel."""
    found = np.zeros(len(channels), np.uint64)
    for number, place in enumerate(places(channels)):
        comm.runtime.copy(found[number:].ctypes.data, place, 8)
    return found.tolist()


def signal(comm: Communicator, channels: ChannelSet[SmChannel]) -> None:
    comm.compile(SIGNAL, "signal_all")(1, 1, channels, len(channels))
    comm.synchronize()
    comm.all_gather_bytes(b"")


def test_they_serve_again_when_all_ranks_have_dropped_them(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        memory = comm.register(comm.empty(64, "uint8"))
        channels = comm.sm_channels(memory, memory)
        first = places(channels)
        signal(comm, channels)
        assert counts(comm, channels) == [1] * len(channels)
        del channels
        collect_garbage()
        between = comm.sm_channels(memory, memory)  # in this call ranks exchange which words are free
        channels = comm.sm_channels(memory, memory)
        assert places(channels) == first
        assert not set(places(between)) & set(first)
        assert counts(comm, channels) == [0] * len(channels)
        comm.all_gather_bytes(b"")
        signal(comm, channels)
        assert counts(comm, channels) == [1] * len(channels)

    ranks.run(body)


def test_they_stay_while_one_rank_has_them(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        memory = comm.register(comm.empty(64, "uint8"))
        old = comm.sm_channels(memory, memory)
        first = places(old)
        kept = old if comm.rank == comm.world_size - 1 else None
        del old
        collect_garbage()
        later = [comm.sm_channels(memory, memory) for _ in range(3)]
        assert not {place for channels in later for place in places(channels)} & set(first)
        assert kept is None or places(kept) == first

    ranks.run(body)


def test_peers_map_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = recorded_mappings(monkeypatch)

    def body(comm: Communicator) -> None:
        memory = comm.register(comm.empty(64, "uint8"))
        kept = [comm.sm_channels(memory, memory)]
        comm.all_gather_bytes(b"")
        before = len(mapped)
        comm.all_gather_bytes(b"")
        kept += [comm.sm_channels(memory, memory) for _ in range(5)]
        comm.all_gather_bytes(b"")
        assert len(mapped) == before > 0

    run_ranks(2, body)


def test_more_than_a_block_holds(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        memory = comm.register(comm.empty(64, "uint8"))
        sets = [comm.sm_channels(memory, memory) for _ in range(200)]
        found = [place for channels in sets for place in places(channels)]
        assert len(set(found)) == len(found)
        for channels in sets[::66]:
            signal(comm, channels)
            assert counts(comm, channels) == [1] * len(channels)

    ranks.run(body)
