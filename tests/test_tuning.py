"""Algorithms are chosen by size: by a table, which can be measured on the machine."""

from __future__ import annotations

import numpy as np
import pytest
from device_arrays import on_device, on_host
from running import run_ranks

from proxyccl import ArgumentError, Communicator
from proxyccl.channels.collectives.selection import ALGORITHMS, Selector
from proxyccl.channels.collectives.tuning import selector_from


def test_a_selector_takes_the_first_limit_that_fits() -> None:
    selector = Selector(((1024, "one_shot"), (65536, "ring")), "two_shot")
    assert [selector.choose(n) for n in (0, 1024, 1025, 65536, 65537)] == [
        "one_shot",
        "one_shot",
        "ring",
        "ring",
        "two_shot",
    ]


def test_a_selector_refuses_unknown_algorithms() -> None:
    with pytest.raises(ArgumentError, match="algorithm: 'tree'"):
        Selector(((1024, "tree"),))


def test_measured_times_become_limits_between_the_sizes() -> None:
    times = {
        1024: {"one_shot": 1.0, "ring": 2.0},
        4096: {"one_shot": 2.0, "ring": 3.0},
        16384: {"one_shot": 9.0, "ring": 4.0},
    }
    assert selector_from(times) == Selector(((8192, "one_shot"),), "ring")


def test_tuning_gives_all_ranks_the_same_table_and_right_results() -> None:
    def body(comm: Communicator) -> Selector:
        x = on_device(comm, np.ones(3000, np.float32))
        comm.all_reduce(x)  # a plan from before the tuning must not survive it
        selector = comm.tune(sizes=(1024, 16384), iterations=1)
        for count in (10, 3000, 30000):
            y = on_device(comm, np.full(count, comm.rank + 1, np.float32))
            comm.all_reduce(y)
            assert (on_host(y) == 3).all()
        return selector

    tables = run_ranks(2, body)
    assert tables[0] == tables[1]
    assert tables[0].beyond in ALGORITHMS
