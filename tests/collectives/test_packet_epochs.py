"""Results stay right although packet flags wrap around after 2**32 epochs and slots are reused every two epochs."""

from __future__ import annotations

import numpy as np
import pytest

from proxyccl import Communicator
from proxyccl.device._native import ffi
from support.cases.reference import numpy_dtype
from support.device_arrays import on_device, on_host
from support.devices import runtime_with_blocks, runtime_with_lines
from support.running import run_ranks

pytestmark = pytest.mark.host_only(reason="writes the kernels' counters, which only the host runtime's CPU can")

ALGORITHMS = ("one_shot", "recursive_doubling", "two_shot_packets")
IN_LINES = ROWS = ("one_shot", "two_shot_packets")
FORMS = {"packets": runtime_with_blocks, "lines": runtime_with_lines}
# Arrays of LONG or LONGER elements take several epochs, because the slots of both blocks hold only 4096 packets of two
# int32 (3 * 4096 for two_shot_packets) or, in lines, 2 * 2048 / 8 * 15 units of four int32.
LONG = 50_000
LONGER = 110_000


@pytest.mark.parametrize(
    "start",
    # Kernels clear packets at multiples of 2**30. Without --full, tests start only just before the wrap to epoch 0.
    [pytest.param(start, marks=pytest.mark.full) for start in (0, 2**30 - 7, 2**31 - 5)] + [2**32 - 9],
)
@pytest.mark.parametrize("form", FORMS)
def test_results_stay_right_when_epochs_wrap(start: int, form: str) -> None:
    algorithms = IN_LINES if form == "lines" else ALGORITHMS

    def body(comm: Communicator) -> list[int]:
        packets = comm.collectives.team().packets
        assert packets is not None
        scratch = packets.scratch[-1]
        epochs = ffi.cast("uint32_t *", scratch.epochs.ptr)
        for block in range(scratch.blocks):
            epochs[block] = start
        comm.barrier()
        generator = np.random.default_rng(start)
        weight = on_device(comm, np.ones(64, numpy_dtype("bfloat16")))
        for i in range(24):
            x = generator.integers(0, 1000, int(generator.integers(1, LONG)), dtype=np.int32)
            y = x + comm.rank
            comm.all_reduce(y, algorithm=algorithms[i % len(algorithms)])
            assert np.array_equal(y, 3 * x + 3), f"call {i}"
            rows = generator.integers(0, 9, (int(generator.integers(1, 20)), 64))
            given = on_device(comm, (rows + comm.rank).astype(numpy_dtype("bfloat16")))
            got = comm.all_reduce_rms_norm(given, None, weight, 0.0, algorithm=ROWS[i % len(ROWS)])
            assert np.array_equal(on_host(got.residual).astype(np.int64), 3 * rows + 3), f"rows {i}"
        return [epochs[block] for block in range(scratch.blocks)]

    ends = run_ranks(3, body, make_runtime=FORMS[form])
    assert ends == [ends[0]] * 3
    assert all((end - start) % 2**32 > 24 for end in ends[0])


@pytest.mark.parametrize(
    ("algorithm", "form"), [*((each, "packets") for each in ALGORITHMS), *((each, "lines") for each in IN_LINES)]
)
def test_calls_of_several_epochs_follow_each_other(algorithm: str, form: str, pytestconfig: pytest.Config) -> None:
    times = 40 if pytestconfig.getoption("--full") else 15

    def body(comm: Communicator) -> None:
        x = np.arange(LONGER if form == "lines" else LONG, dtype=np.int32)
        for _ in range(times):
            y = x + comm.rank
            comm.all_reduce(y, algorithm=algorithm)
            assert np.array_equal(y, 3 * x + 3)

    run_ranks(3, body, make_runtime=FORMS[form])
