"""all_reduce in packets that fill whole lines of 128 bytes, which GPUs use for arrays above a size limit."""

from __future__ import annotations

import pytest

from proxyccl import Communicator
from support.cases.reference import Call
from support.devices import runtime_with_lines
from support.running import run_ranks

pytestmark = pytest.mark.host_only(reason="GPUs send so without being told, where their links carry whole lines")

COUNTS = (0, 1, 15, 241, 5003)


@pytest.mark.parametrize("ranks", [2, 3])
def test_elements_of_every_size_are_reduced_in_lines(ranks: int) -> None:
    """Calls are in place and out of place, in arrays of any alignment. Results have the bits of a sum in rank order."""

    def body(comm: Communicator) -> None:
        for algorithm in ("one_shot", "two_shot_packets"):
            for dtype in ("int8", "bfloat16", "float32", "float64"):
                for i, count in enumerate(COUNTS):
                    Call("all_reduce", dtype, "sum", algorithm, count, i % 3, i % 2 == 0).run(comm)

    run_ranks(ranks, body, make_runtime=runtime_with_lines)
