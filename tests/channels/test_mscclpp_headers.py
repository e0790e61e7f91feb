"""Kernels written for MSCCL++ compile unchanged, and work on our channels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from proxyccl import AbortedError, Array, Communicator, CompileError, TriggerError, WaitTimeoutError
from support.device_arrays import barrier, on_host
from support.kernels.mscclpp import MSCCLPP_KERNELS
from support.ranks import Ranks

pytestmark = pytest.mark.hip

THREADS = 32
HALF = 2048


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def shared(communicator: Communicator, values: np.ndarray) -> Array:
    """The values in memory that peers reach."""
    return communicator.empty(values.shape, values.dtype).upload(values)


def own_bytes(communicator: Communicator) -> np.ndarray:
    """2 * HALF bytes that identify rank and position."""
    return (np.arange(2 * HALF) * 7 + 100 * communicator.rank).astype(np.uint8)


def test_a_memory_channel_puts_signals_and_gets_with_the_remote_offset_first(pair: Ranks) -> None:
    def body(communicator: Communicator) -> tuple[np.ndarray, np.ndarray]:
        data = shared(communicator, own_bytes(communicator))
        channels = communicator.sm_channels(data)
        kernels = communicator.compile(MSCCLPP_KERNELS)
        kernels.memory_put(1, THREADS, channels, HALF)
        communicator.synchronize()
        put = on_host(data)
        barrier(communicator)
        kernels.memory_get(1, THREADS, channels, 64, HALF, 100)
        communicator.synchronize()
        barrier(communicator)
        return put, on_host(data)

    for rank, (put, got) in enumerate(pair.run(body)):
        mine, theirs = ((np.arange(2 * HALF) * 7 + 100 * r).astype(np.uint8) for r in (rank, 1 - rank))
        np.testing.assert_array_equal(put, np.concatenate([mine[:HALF], theirs[:HALF]]))
        np.testing.assert_array_equal(got[HALF : HALF + 100], theirs[64:164])


def test_a_memory_channels_elements_members_and_packets(pair: Ranks) -> None:
    def body(communicator: Communicator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        data = shared(communicator, np.zeros(4096, np.uint8))
        out = shared(communicator, np.zeros(THREADS, np.int32))
        kernels = communicator.compile(MSCCLPP_KERNELS)
        channels = communicator.sm_channels(data)
        kernels.memory_elements(1, THREADS, channels[0], out)
        communicator.synchronize()
        barrier(communicator)
        elements, copied = on_host(out), on_host(data)[128:192].view(np.int32)
        mine = own_bytes(communicator)[:256]
        communicator.runtime.copy(data.ptr, mine.ctypes.data, mine.nbytes)
        barrier(communicator)
        first = shared(communicator, np.zeros(2, np.uint32))
        kernels.memory_packets(1, THREADS, channels, 1024, 256, 3, first)
        communicator.synchronize()
        barrier(communicator)
        return elements, copied, on_host(data)[256:512], on_host(first)

    results = pair.run(body)
    for rank, (elements, copied, received, first) in enumerate(results):
        np.testing.assert_array_equal(elements, 2 * (100 + np.arange(THREADS)))
        np.testing.assert_array_equal(copied, 100 + np.arange(16))
        theirs = (np.arange(256) * 7 + 100 * (1 - rank)).astype(np.uint8)
        np.testing.assert_array_equal(received, theirs)
        np.testing.assert_array_equal(first, theirs[:8].view(np.uint32))


def test_port_channels_put_by_offsets_by_memory_ids_and_by_raw_triggers(pair: Ranks) -> None:
    def body(communicator: Communicator) -> list[np.ndarray]:
        memory = communicator.register(shared(communicator, own_bytes(communicator)))
        target_array = shared(communicator, np.zeros(2 * HALF, np.uint8))
        target = communicator.register(target_array)
        channels = communicator.proxy_channels(target, memory)
        peer = 1 - communicator.rank
        kernels = communicator.compile(MSCCLPP_KERNELS)
        seen = []

        def look() -> None:
            communicator.synchronize()
            barrier(communicator)
            seen.append(on_host(target_array))
            communicator.runtime.copy(target_array.ptr, np.zeros(2 * HALF, np.uint8).ctypes.data, 2 * HALF)
            barrier(communicator)

        kernels.port_put(1, THREADS, channels, HALF)
        look()
        kernels.base_port_put(1, THREADS, channels, target.peer_id(peer), memory.source_id(peer), HALF)
        look()
        handle = channels[0].device_handle
        kernels.raw_trigger(1, 1, handle, handle[: kernels.raw_trigger.parameters[1][0]], HALF)
        look()
        return seen

    for rank, (put, by_id, raw) in enumerate(pair.run(body)):
        theirs = (np.arange(2 * HALF) * 7 + 100 * (1 - rank)).astype(np.uint8)
        np.testing.assert_array_equal(put[HALF:], theirs[:HALF])
        assert not put[:HALF].any()
        np.testing.assert_array_equal(by_id, theirs)
        np.testing.assert_array_equal(raw[:HALF], theirs[:HALF])


def test_a_grid_has_syncers_semaphores_atomics_vectors_and_packets(pair: Ranks) -> None:
    def body(communicator: Communicator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        out = shared(communicator, np.zeros(2 * THREADS, np.int32))
        words = shared(communicator, np.zeros(2, np.int32))
        kernels = communicator.compile(MSCCLPP_KERNELS)
        kernels.grid(2, THREADS, out, words.ptr, words.ptr + 4)
        boxes = shared(communicator, np.zeros((8, 2), np.uint32))
        kernels.packets(1, 8, boxes)
        communicator.synchronize()
        return on_host(out), on_host(words), on_host(boxes)

    for out, words, boxes in pair.run(body):
        assert out[:3].tolist() == [6, 1, 4]
        np.testing.assert_array_equal(out[3:], [i % THREADS for i in range(3, 2 * THREADS)])
        assert words.tolist() == [0, 7]
        np.testing.assert_array_equal(boxes, [[i, 1] for i in range(8)])


WAITS = r"""
#include <mscclpp/assert_device.hpp>
#include <mscclpp/packet_device.hpp>
#include <mscclpp/poll_device.hpp>
extern "C" __global__ void spin(int* word) { POLL_MAYBE_JAILBREAK((*word == 0), -1); }
extern "C" __global__ void check(int* word) { MSCCLPP_ASSERT_DEVICE(*word != 0, "it has a value"); }
extern "C" __global__ void pack(int* word) { mscclpp::copyToPackets(nullptr, word, 12, 0, 1, 1); }
extern "C" __global__ void unpack(int* word) {
  mscclpp::getPackets<mscclpp::LL8Packet>(nullptr, 0, word, 0, 6, 0, 1, 1);
}
"""


@pytest.mark.parametrize(
    ("kernel", "error", "text"),
    [
        ("spin", WaitTimeoutError, "a condition of its kernel"),
        ("check", AbortedError, "ended the communicator"),
        (
            "pack",
            TriggerError,
            "called copyToPackets: 12 bytes at offset 0 of the memory; expected multiples of 8 bytes",
        ),
        ("unpack", TriggerError, "called copyFromPackets: 6 bytes .* expected multiples of 4 bytes"),
    ],
)
def test_waits_and_assertions_end_the_communicator(kernel: str, error: type[Exception], text: str) -> None:
    def body(communicator: Communicator) -> None:
        communicator.timeout = 0.2
        communicator.compile(WAITS, kernel)(1, 1, shared(communicator, np.zeros(1, np.int32)))
        with pytest.raises(error, match=text):
            communicator.synchronize()

    with Ranks(1) as alone:
        alone.run(body)


@pytest.mark.parametrize(
    ("header", "use"),
    [
        ("switch_channel_device.hpp", "mscclpp::SwitchChannelDeviceHandle{}.broadcast<float>(0, 1);"),
        ("port_channel_device.hpp", "mscclpp::PortChannelDeviceHandle{}.atomicAdd(0, int64_t(1));"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(pair: Ranks, header: str, use: str) -> None:
    source = f'#include <mscclpp/{header}>\nextern "C" __global__ void uses() {{ {use} }}\n'

    def body(communicator: Communicator) -> Any:
        with pytest.raises(CompileError, match="is not offered") as refusal:
            communicator.compile(source)
        return refusal.value

    pair.run(body)
