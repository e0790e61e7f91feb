"""Two RDMA devices for each rank (rails)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from proxyccl import Communicator, RdmaOptions
from support.ranks import Ranks
from support.soft_roce.nodes import TIMEOUT
from support.soft_roce.wire import Wire, add_second, packets_sent, remove_second

RAILS = ("rxe0", "rxe2"), ("rxe1", "rxe3")
NBYTES = 1_000_003


@pytest.fixture
def second() -> Iterator[Wire]:
    """The wire between the second devices of the two ranks."""
    add_second()
    wire = Wire(2)
    try:
        yield wire
    finally:
        wire.restore()
        remove_second()


def two_ranks(transport: str = "verbs", **options: object) -> Ranks:
    """Returns two ranks on two nodes, with two devices each."""
    return Ranks(
        2,
        options_of=lambda rank: {"rdma": RdmaOptions(devices=RAILS[rank], **options)},
        local_world_size=1,
        timeout=TIMEOUT,
        transport={(0, 1): transport},
    )


@pytest.mark.usefixtures("second")
@pytest.mark.parametrize(
    ("transport", "signal"),
    [("verbs", "write"), ("staged", "write"), pytest.param("verbs", "fetch_add", marks=pytest.mark.full)],
)
def test_long_puts_are_divided_between_two_devices(transport: str, signal: str) -> None:
    def body(comm: Communicator) -> None:
        x = np.random.default_rng(comm.rank).integers(0, 256, NBYTES, np.uint8)
        for _ in range(3):
            gathered = comm.all_gather(x, algorithm="proxy")
        for rank in range(2):
            expected = np.random.default_rng(rank).integers(0, 256, NBYTES, np.uint8)
            assert (np.asarray(gathered)[rank * NBYTES : (rank + 1) * NBYTES].ravel() == expected).all()

    with two_ranks(transport, signal=signal) as ranks:
        before = [packets_sent(f"veth{i}") for i in range(4)]
        ranks.run(body)
        sent = [packets_sent(f"veth{i}") - packets for i, packets in enumerate(before)]
    # Each rank sends 3 MB in packets of at most 4 KiB: at least a third of them by each device.
    assert min(sent) > 3 * NBYTES // 4096 // 3, sent
