"""`proxyccl_memmove` copies correctly with any alignment of target and source, also if they overlap."""

import numpy as np
import pytest

from proxyccl.device._native import ffi, lib

PAGE = 4096
LENGTHS = [0, 1, 2047, 2048, 2049, 2048 + 127, 5000, 3 * PAGE]
DISTANCES = [0, 1, 16, 63, 64, 2048, PAGE - 1]  # (target - source) modulo PAGE


def move(dst: np.ndarray, src: np.ndarray, nbytes: int) -> None:
    lib.proxyccl_memmove(ffi.from_buffer(dst), ffi.from_buffer(src), nbytes)


@pytest.mark.parametrize("nbytes", LENGTHS)
@pytest.mark.parametrize("distance", DISTANCES)
def test_bytes_arrive_and_no_others_change(nbytes: int, distance: int) -> None:
    source = np.random.default_rng(nbytes).integers(1, 256, 5 * PAGE, dtype=np.uint8)
    first = -source.ctypes.data % PAGE
    target = np.zeros(7 * PAGE, np.uint8)
    start = -target.ctypes.data % PAGE + PAGE + distance
    move(target[start:], source[first:], nbytes)
    np.testing.assert_array_equal(target[start : start + nbytes], source[first : first + nbytes])
    assert not target[:start].any()
    assert not target[start + nbytes :].any()


@pytest.mark.parametrize("shift", [-PAGE, -16, -1, 1, 16, 2047, PAGE, PAGE + 16, 2 * PAGE])
def test_ranges_may_overlap(shift: int) -> None:
    nbytes, first = 3 * PAGE, 2 * PAGE
    memory = np.random.default_rng(0).integers(0, 256, 8 * PAGE, dtype=np.uint8)
    expected = memory.copy()
    expected[first + shift : first + shift + nbytes] = memory[first : first + nbytes]
    move(memory[first + shift :], memory[first:], nbytes)
    np.testing.assert_array_equal(memory, expected)
