"""Operations by which streams write a word of memory or wait for its value, without a kernel."""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Iterator

import pytest

from proxyccl.device.errors import ArgumentError, KernelError
from proxyccl.device.runtime import PinnedMemory, Runtime
from proxyccl.device.runtimes import open_runtime
from proxyccl.device.stream_operations import CopyBytes, SetBits, StreamOperations, WaitValue, WriteValue
from support.devices import RUNTIME
from support.stream_words import wait_value, write_value

pytestmark = pytest.mark.hip

SECONDS = 30.0


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    opened = open_runtime(RUNTIME)
    with opened.current():
        yield opened


@pytest.fixture
def words(runtime: Runtime) -> Iterator[PinnedMemory]:
    memory = runtime.allocate_pinned(4096)
    yield memory
    runtime.synchronize()
    memory.close()


def word(memory: PinnedMemory, number: int) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(memory.host_ptr + 128 * number)


def at(memory: PinnedMemory, number: int) -> int:
    return memory.ptr + 128 * number


def await_value(seen: ctypes.c_uint64, value: int) -> None:
    deadline = time.monotonic() + SECONDS
    while seen.value != value:
        assert time.monotonic() < deadline, f"the word is {seen.value}; expected {value}"
        time.sleep(0.0005)


def test_a_stream_writes_a_word_behind_its_earlier_work(runtime: Runtime, words: PinnedMemory) -> None:
    stream, memory = runtime.create_stream(), runtime.allocate(1 << 20)
    runtime.fill(memory.ptr, 7, memory.nbytes, stream)
    runtime.copy(at(words, 1), memory.ptr, 8, stream)
    write_value(runtime, at(words, 0), (1 << 63) - 1, stream)
    await_value(word(words, 0), (1 << 63) - 1)
    assert word(words, 1).value == int.from_bytes(bytes([7]) * 8, "little")
    stream.synchronize()


@pytest.mark.parametrize("stored", [5, 6, (1 << 63) - 1])
def test_a_stream_waits_until_a_word_is_at_least_a_value(runtime: Runtime, words: PinnedMemory, stored: int) -> None:
    stream = runtime.create_stream()
    wait_value(runtime, at(words, 0), 5, stream)
    write_value(runtime, at(words, 1), 1, stream)
    for short in (0, 4):
        word(words, 0).value = short
        time.sleep(0.05)
        assert word(words, 1).value == 0
        assert not stream.query()
    word(words, 0).value = stored
    stream.synchronize()
    assert word(words, 1).value == 1


def test_several_operations_are_issued_in_order_again_and_again(runtime: Runtime, words: PinnedMemory) -> None:
    """A stream that starts a proxy's schedule queues these operations: write a word, wait for another word, and reset
    the second word.
    """
    stream = runtime.create_stream()
    ring = StreamOperations(
        runtime, [WriteValue(at(words, 0), 3), WaitValue(at(words, 1), 1), WriteValue(at(words, 1), 0)]
    )
    rounds = 200
    for _ in range(rounds):
        ring(stream)
    for _ in range(rounds):
        await_value(word(words, 0), 3)
        word(words, 0).value = 0
        word(words, 1).value = 1
    stream.synchronize()
    assert (word(words, 0).value, word(words, 1).value) == (0, 0)


def test_a_wait_holds_up_its_own_stream_alone(runtime: Runtime, words: PinnedMemory) -> None:
    waiting, other = runtime.create_stream(), runtime.create_stream()
    wait_value(runtime, at(words, 0), 1, waiting)
    write_value(runtime, at(words, 1), 1, other)
    other.synchronize()
    assert word(words, 1).value == 1
    assert not waiting.query()
    word(words, 0).value = 1
    waiting.synchronize()


@pytest.mark.host_only(reason="the host runtime's streams have threads")
def test_a_waiting_stream_takes_next_to_no_core(runtime: Runtime, words: PinnedMemory) -> None:
    stream = runtime.create_stream()
    wait_value(runtime, at(words, 0), 1, stream)
    time.sleep(0.2)
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(1)
    after = resource.getrusage(resource.RUSAGE_SELF)
    word(words, 0).value = 1
    stream.synchronize()
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


@pytest.mark.host_only(reason="the host runtime's own")
def test_the_proxys_inline_stream_takes_no_wait(runtime: Runtime, words: PinnedMemory) -> None:
    stream = runtime.create_stream(for_proxy=True)
    write_value(runtime, at(words, 0), 1, stream)
    assert word(words, 0).value == 1
    with pytest.raises(KernelError):
        wait_value(runtime, at(words, 0), 2, stream)


@pytest.mark.parametrize("value", [-1, 1 << 63])
def test_values_that_drivers_compare_differently_are_refused(runtime: Runtime, words: PinnedMemory, value: int) -> None:
    with pytest.raises(ArgumentError, match="value"):
        write_value(runtime, at(words, 0), value)


@pytest.mark.parametrize("ptr", [0, -8, 12])
def test_what_is_no_word_is_refused(runtime: Runtime, ptr: int) -> None:
    with pytest.raises(ArgumentError, match="ptr"):
        wait_value(runtime, ptr, 1)


def test_no_operation_is_refused(runtime: Runtime) -> None:
    with pytest.raises(ArgumentError, match="operations"):
        StreamOperations(runtime, [])


def test_copies_and_kernels_take_their_turn_between_words(runtime: Runtime, words: PinnedMemory) -> None:
    stream = runtime.create_stream()
    add = runtime.compile('extern "C" __global__ void add(uint64_t* word) { *word += 1; }').add
    arrays = [runtime.allocate(8) for _ in range(2)]
    for array in arrays:
        runtime.fill(array.ptr, 0, 8)
    runtime.synchronize()
    operations = StreamOperations(
        runtime,
        [
            WaitValue(at(words, 0), 1),
            CopyBytes(arrays[0].ptr, at(words, 1), 8),
            CopyBytes(arrays[1].ptr, arrays[0].ptr, 0),
            SetBits(arrays[1].ptr, 4),
            SetBits(arrays[0].ptr, 0),
            add.prepare(1, 1, arrays[0].ptr),
            CopyBytes(at(words, 2), arrays[0].ptr, 8),
            CopyBytes(at(words, 3), arrays[1].ptr, 8),
            WriteValue(at(words, 0), 0),
        ],
    )
    for turn in range(3):
        operations(stream)
        assert word(words, 2).value == (40 + turn if turn else 0)
        word(words, 1).value = 40 + turn
        word(words, 0).value = 1
        stream.synchronize()
        assert [word(words, number).value for number in range(4)] == [0, 40 + turn, 41 + turn, 2**32 - 1]
    for array in arrays:
        array.close()


@pytest.mark.host_only(reason="the host runtime refuses what its inline stream can't do")
def test_what_is_behind_a_refused_operation_is_queued_all_the_same(runtime: Runtime, words: PinnedMemory) -> None:
    stream = runtime.create_stream(for_proxy=True)
    operations = [
        WriteValue(at(words, 0), 1),
        CopyBytes(at(words, 1), at(words, 0), 8),
        WaitValue(at(words, 0), 2),
        CopyBytes(at(words, 2), at(words, 1), 8),
    ]
    with pytest.raises(KernelError, match="stream operations"):
        StreamOperations(runtime, operations)(stream)
    assert word(words, 2).value == 1
