"""Waiting for data that peers store in their control segments."""

from __future__ import annotations

import time

import pytest

from proxyccl import AbortedError
from proxyccl.channels.segment.rendezvous import wait_until
from proxyccl.device.errors import WaitTimeoutError


def give_up() -> None:
    raise AbortedError("rank 0 ended the communicator")


def late() -> WaitTimeoutError:
    return WaitTimeoutError("late")


def test_what_came_before_the_end_of_the_wait_counts() -> None:
    answers = iter([False, True])  # the data arrives after the time-out, but before the wait raises its error
    wait_until(lambda: next(answers), time.monotonic() + 10, give_up, late)


def test_the_wait_ends_with_the_group() -> None:
    with pytest.raises(AbortedError, match="rank 0 ended"):
        wait_until(lambda: False, time.monotonic() + 10, give_up, late)
