"""Runs a few cases in which ranks first use torch groups in random orders. `make test-faults` runs more cases."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from support.faults.torch_groups import run_case

pytestmark = pytest.mark.host_only(reason="its tensors are on the CPU")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_groups_give_their_own_results_whatever_their_order(seed: int) -> None:
    assert run_case(seed) == ""
