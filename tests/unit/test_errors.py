"""Exceptions can be sent to other processes, and copied; a copy equals the original."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

from proxyccl import ArgumentError, CompileError, MismatchError, ProxyCCLError, WaitTimeoutError
from proxyccl.channels.transfers.errors import TransferTimeoutError
from proxyccl.device.errors import CapacityError, DriverError

ERRORS = [
    ArgumentError("count", "3 is odd"),
    CapacityError("no room for 5 rows", needed=5),
    CompileError("no compiler", "line 1\nline 2"),
    DriverError("cuInit", 100, "no device"),
    MismatchError("count: 3 here, 4 on rank 1", argument="count", rank=0, peer=1),
    WaitTimeoutError("barrier: rank 2 did not come", peer=2, operation="barrier"),
    TransferTimeoutError("the write took 3 s"),
]


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_copy_is_like_the_error(error: ProxyCCLError, again: Callable[[ProxyCCLError], ProxyCCLError]) -> None:
    error.__notes__ = ["report: a file"]
    found = again(error)
    assert type(found) is type(error)
    assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error))
    found.add_note("of the copy")
    assert error.__notes__ == ["report: a file"]
