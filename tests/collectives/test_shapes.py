"""Ranks pass arrays of the same size but different shapes. all_reduce and reduce accept such arrays; other collectives
refuse them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from proxyccl import Communicator, MismatchError
from support.device_arrays import on_device, on_host
from support.running import run_ranks

pytestmark = pytest.mark.hip

CALLS: dict[str, Callable[[Communicator, Any], object]] = {
    "all_gather": lambda c, x: c.all_gather(x),
    "all_to_all": lambda c, x: c.all_to_all(x),
    "broadcast": lambda c, x: c.broadcast(x, 0),
    "gather": lambda c, x: c.gather(x, 0),
    "reduce_scatter": lambda c, x: c.reduce_scatter(x),
    "scatter": lambda c, x: c.scatter(x if c.rank == 0 else None, 0, out=x[: len(x) // 2]),
}


def shaped(comm: Communicator, shape: tuple[int, ...]) -> Any:
    return on_device(comm, np.ones(shape, np.float32))


def refused(comm: Communicator, call: Callable[[], object]) -> MismatchError:
    """Makes a call and returns its error. A rank that does not wait for others in the call gets the error in
    a barrier.
    """

    def calls() -> None:
        call()
        comm.barrier()
        comm.synchronize()

    with pytest.raises(MismatchError) as caught:
        calls()
    return caught.value


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("others", [(2, 4, 3), (4, 6), (24,)], ids=str)
def test_ranks_that_share_rows_agree_on_their_shape(call: str, others: tuple[int, ...]) -> None:
    def body(comm: Communicator) -> MismatchError:
        return refused(comm, lambda: CALLS[call](comm, shaped(comm, (4, 2, 3) if comm.rank == 0 else others)))

    errors = run_ranks(2, body)
    assert [error.argument for error in errors] == ["shape"] * 2
    assert any(f"{call} with an array of" in str(error) and "another shape on rank" in str(error) for error in errors)


def test_rows_of_all_to_all_v_have_one_shape() -> None:
    def body(comm: Communicator) -> MismatchError:
        x = shaped(comm, (2, 2, 3) if comm.rank == 0 else (2, 3, 2))
        return refused(comm, lambda: comm.all_to_all_v(x, [1, 1], [1, 1]))

    assert [error.argument for error in run_ranks(2, body)] == ["shape"] * 2


def test_a_reduction_takes_elements_in_order_whatever_their_shape() -> None:
    def body(comm: Communicator) -> None:
        for call in (comm.all_reduce, comm.reduce):
            x = shaped(comm, (4, 6) if comm.rank == 0 else (24,))
            call(x)
            comm.synchronize()
            if call == comm.all_reduce or comm.rank == 0:
                assert (on_host(x) == 2).all()

    run_ranks(2, body)


def test_a_scalar_is_a_vector_of_one() -> None:
    def body(comm: Communicator) -> None:
        x = shaped(comm, () if comm.rank == 0 else (1,))
        assert on_host(comm.all_gather(x)).tolist() == [1, 1]

    run_ranks(2, body)
