"""For a repeated collective call, one C function compares the ranks' calls, launches the kernel, and may wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from proxyccl.channels.segment.call_log import CALL_ABORTED, CALL_DIFFERED, CALL_DIFFERS, CallLog, encode_fields
from proxyccl.channels.segment.control import ControlSegment, create_segment
from proxyccl.device._native import ffi as native
from proxyccl.proxy._engine import ffi, lib
from support.devices import rank_runtime
from support.running import TIMEOUT

pytestmark = pytest.mark.host_only(reason="its own driver")

WAITED, OTHER = 0x10, 0x20
_LAUNCH = f"int(void *, {', '.join(7 * ['unsigned'])}, void *, void **, void **)"
CALL = encode_fields((1,) * lib.PROXYCCL_CALL_FIELDS)


class Driver:
    """A fake driver that records launches and waits for streams.

    Attributes:
        done: the calls made, in order: "launch" for a launch, the stream's handle for a wait.
        launched, ended: the statuses that a launch and a wait return.
        meanwhile: a function that a wait calls.
    """

    def __init__(self, log: CallLog) -> None:
        self.done: list[Any] = []
        self.launched = self.ended = 0
        self.meanwhile: Any = None
        self._launch = native.new("ProxycclLaunch *")
        self._call = ffi.callback(_LAUNCH, self._note_launch)
        self._synchronize = ffi.callback("int(void *)", self._note_wait)
        self._launch.call = native.cast("void *", int(ffi.cast("uintptr_t", self._call)))
        log.wait_on(WAITED, int(ffi.cast("uintptr_t", self._synchronize)))
        self._log = log

    def _note_launch(self, *_: Any) -> int:
        self.done.append("launch")
        return self.launched

    def _note_wait(self, stream: Any) -> int:
        self.done.append(int(ffi.cast("uintptr_t", stream)))
        if self.meanwhile is not None:
            self.meanwhile()
        return self.ended

    def issue(self, stream: int) -> int:
        return self._log.issue(CALL, self._launch, stream)


@pytest.fixture
def segment() -> Iterator[ControlSegment]:
    made = create_segment(rank_runtime(0), 0, TIMEOUT)
    yield made
    made.close()


@pytest.fixture
def driver(segment: ControlSegment) -> Driver:
    return Driver(CallLog(segment, {}, 0))


def control_of(segment: ControlSegment) -> Any:
    return native.cast("ProxycclControl *", segment.host_pointer)


@pytest.mark.parametrize(("stream", "done"), [(WAITED, ["launch", WAITED]), (OTHER, ["launch"])])
def test_calls_wait_on_one_stream(driver: Driver, stream: int, done: list[Any]) -> None:
    assert driver.issue(stream) == 0
    assert driver.done == done


def test_a_call_returns_the_first_status_that_is_not_success(driver: Driver) -> None:
    driver.ended = 5
    assert driver.issue(WAITED) == 5
    driver.launched = 3
    assert driver.issue(WAITED) == 3
    assert driver.issue(OTHER) == 3


@pytest.mark.parametrize("word", ["abort", "failed_rank"])
def test_a_failure_during_the_wait_ends_the_call(driver: Driver, segment: ControlSegment, word: str) -> None:
    """A failure is announced before any kernel is stopped. A call whose wait ends after the announcement must fail,
    because its kernel may have received a stopped kernel's data.
    """
    driver.ended = 5
    driver.meanwhile = lambda: setattr(control_of(segment), word, 1)
    assert driver.issue(WAITED) == CALL_ABORTED


def test_a_call_behind_an_abort_launches_nothing(driver: Driver, segment: ControlSegment) -> None:
    control_of(segment).abort = 1
    assert driver.issue(WAITED) == CALL_ABORTED
    assert driver.done == []


class Pair:
    """The call logs of two ranks, each of which reads the other's."""

    def __init__(self) -> None:
        self.segments = [create_segment(rank_runtime(0), rank, TIMEOUT) for rank in range(2)]
        self.logs = [CallLog(self.segments[rank], {1 - rank: self.segments[1 - rank]}, rank) for rank in range(2)]

    def close(self) -> None:
        for segment in self.segments:
            segment.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def call_of(value: int) -> Any:
    return encode_fields((value,) * lib.PROXYCCL_CALL_FIELDS)


def test_a_difference_among_calls_that_were_overwritten_is_found_with_the_first_that_is_compared(pair: Pair) -> None:
    """Rank 0 is more calls ahead than the log has entries. Only the first calls of the two ranks differ."""
    ahead, behind = pair.logs
    entries = lib.PROXYCCL_CALL_LOG_ENTRIES
    assert ahead.agree(call_of(7)) == 0
    for number in range(2, entries + 3):
        assert ahead.agree(call_of(number)) == 0
    assert behind.agree(call_of(1)) == 0  # the peer's entries of calls 1 and 2 were overwritten
    assert behind.agree(call_of(2)) == 0
    assert behind.agree(call_of(3)) == CALL_DIFFERED
    assert behind.difference() == (0, (3,) * lib.PROXYCCL_CALL_FIELDS)


def test_calls_that_were_overwritten_and_did_not_differ_are_no_difference(pair: Pair) -> None:
    ahead, behind = pair.logs
    entries = lib.PROXYCCL_CALL_LOG_ENTRIES
    for log in (ahead, behind):
        for number in range(1, entries + 3):
            assert log.agree(call_of(number)) == 0
    assert ahead.agree(call_of(1)) == 0
    assert behind.agree(call_of(2)) == CALL_DIFFERS


def test_calls_are_compared_when_their_numbers_come_round(pair: Pair) -> None:
    before = (1 << lib.PROXYCCL_CALL_NUMBER_BITS) - 2
    for log in pair.logs:
        log._callers.sequence = before
    for number in range(1, 5):  # the log stores call 2 as number 0, because the numbers wrap around
        assert [log.agree(call_of(number)) for log in pair.logs] == [0, 0]
        assert [log.recent(1)[0][0] for log in pair.logs] == [before + number] * 2
    assert pair.logs[0].agree(call_of(5)) == 0
    assert pair.logs[1].agree(call_of(6)) == CALL_DIFFERS
