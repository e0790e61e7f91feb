"""In a ring, ranks send into slots of their neighbours. A send does not wait for the neighbour's receive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from proxyccl import Communicator
from proxyccl.channels.arguments import input_view
from proxyccl.channels.schedules.ring_slots import RingSlots
from support.device_arrays import on_device, on_host
from support.devices import ON_HOST, world_sizes
from support.ranks import Ranks

pytestmark = pytest.mark.hip

SLOTS = 2


@pytest.fixture(scope="module", params=world_sizes(2, 3), ids=lambda n: f"{n}-ranks")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as group:
        yield group


class Neighbours:
    """A rank's `RingSlots` on a new communicator of all ranks, and a stream for calls (None on the host runtime)."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm.split(range(comm.world_size))
        self.slots = RingSlots(self.comm.group, 1 << 16, SLOTS)
        self.stream = None if ON_HOST else comm.runtime.create_stream()

    def send(self, values: Any, peer: int) -> None:
        self.slots.send(input_view(self.comm.group, values, "values"), peer, self.stream)

    def receive(self, out: Any, peer: int) -> None:
        self.slots.receive(input_view(self.comm.group, out, "out"), peer, self.stream)

    def close(self) -> None:
        self.comm.synchronize(self.stream)
        self.comm.close()


def numbers(rank: int, peer: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, peer, step]).integers(0, 256, 100 * step + 1, dtype=np.uint8)


def test_neighbours_get_what_was_sent_in_order_while_slots_are_used_again(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        near = Neighbours(comm)
        assert near.slots.neighbours == sorted({(comm.rank - 1) % comm.world_size, (comm.rank + 1) % comm.world_size})
        sent, got = [], []
        for step in range(0, 5 * SLOTS, SLOTS):
            for peer in near.slots.neighbours:
                for ahead in range(SLOTS):
                    sent.append(on_device(comm, numbers(comm.rank, peer, step + ahead)))
                    near.send(sent[-1], peer)
            for peer in near.slots.neighbours:
                for ahead in range(SLOTS):
                    expected = numbers(peer, comm.rank, step + ahead)
                    got.append((on_device(comm, np.zeros_like(expected)), expected))
                    near.receive(got[-1][0], peer)
        near.comm.synchronize(near.stream)
        for out, expected in got:
            np.testing.assert_array_equal(on_host(out), expected)
        near.close()

    ranks.run(body)


@pytest.mark.skipif(ON_HOST, reason="a call waits there")
def test_a_send_on_a_stream_needs_only_a_slot_of_its_own_rank(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        near = Neighbours(comm)
        outs = [on_device(comm, np.zeros(1000, np.uint8)) for _ in range(2 * SLOTS)]
        if comm.rank == 0:
            # The second half of the sends stays in rank 0's slots until rank 1 frees slots.
            for step in range(2 * SLOTS):
                comm.runtime.fill(outs[0].ptr, step, 1000, near.stream)
                near.send(outs[0], 1)
            comm.runtime.synchronize_stream(near.stream)  # the copies are done, though no rank has received
        comm.all_gather_bytes(b"", "rank 0 has sent")
        if comm.rank == 1:
            for out in outs:
                near.receive(out, 0)
            near.comm.synchronize(near.stream)
            for step, out in enumerate(outs):
                np.testing.assert_array_equal(on_host(out), np.full(1000, step, np.uint8))
        near.close()

    ranks.run(body)
