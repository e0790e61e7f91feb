"""Rows in the ranks' pinned memory, which a kernel of any rank reads."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from proxyccl import Communicator
from proxyccl.channels.arguments import input_view
from proxyccl.deep_ep.engram import StoredRows
from support.device_arrays import on_device, on_host
from support.devices import ON_HOST
from support.ranks import Ranks

pytestmark = pytest.mark.hip


@pytest.mark.parametrize("row_bytes", [6, 64], ids=["bytes", "words"])
def test_every_rank_reads_the_rows_of_all(row_bytes: int) -> None:
    entries = 21

    def body(comm: Communicator) -> None:
        stored = StoredRows(comm.group, 4096)
        stream = None if ON_HOST else comm.runtime.create_stream()
        for seed in range(2):
            rows = np.random.default_rng(seed).integers(0, 256, (comm.world_size, entries, row_bytes), dtype=np.uint8)
            stored.write(input_view(comm.group, on_device(comm, rows[comm.rank]), "rows"), row_bytes)
            wanted = (
                np.random.default_rng([seed, comm.rank]).integers(0, comm.world_size * entries, 300).astype(np.int32)
            )
            wanted[7], wanted[8] = -1, comm.world_size * entries
            indices, out = on_device(comm, wanted), on_device(comm, np.ones((300, row_bytes), np.uint8))
            stored.fetch(input_view(comm.group, indices, "indices"), input_view(comm.group, out, "out"), stream)
            comm.synchronize(stream)
            expected = rows.reshape(-1, row_bytes)[wanted.clip(0, comm.world_size * entries - 1)]
            expected[7:9] = 0
            np.testing.assert_array_equal(on_host(out), expected)
        comm.all_gather_bytes(b"", "all have read")
        stored.close()

    with Ranks(2) as ranks:
        ranks.run(body)
