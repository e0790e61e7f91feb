"""Encoding and decoding a 128-bit trigger preserves every field, in Python, in a kernel, and between the two."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxyccl import ArgumentError, Communicator, Operation, Trigger
from proxyccl.device._native import ffi, lib
from proxyccl.proxy.trigger import MAX_MEMORIES, operation_name
from support.ranks import Ranks

WIDTHS = {
    "size": 31,
    "get": 1,
    "src_offset": 32,
    "dst_offset": 32,
    "src_memory": 9,
    "dst_memory": 9,
    "operation": 3,
    "channel": 10,
}
OPERATIONS = st.integers(0, 7).flatmap(
    lambda bits: st.sampled_from([Operation(bits), Operation(bits | 8 * (bits & 1))])
)
TRIGGERS = st.builds(
    Trigger,
    operation=OPERATIONS,
    src_memory=st.integers(0, MAX_MEMORIES - 1),
    **{
        name: st.integers(0, (1 << bits) - 1)
        for name, bits in WIDTHS.items()
        if name not in ("operation", "get", "src_memory")
    },
)


@given(TRIGGERS)
def test_decoding_is_the_inverse_of_encoding(trigger: Trigger) -> None:
    assert Trigger.decode(*trigger.encode()) == trigger


@given(TRIGGERS)
def test_the_parity_bit_is_the_rings_own(trigger: Trigger) -> None:
    word0, word1 = trigger.encode()
    assert word0 < 1 << 64
    assert word1 < 1 << 63
    assert Trigger.decode(word0, word1 | 1 << 63) == trigger


@given(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 63) - 1))
def test_every_value_of_the_other_bits_is_a_trigger(word0: int, word1: int) -> None:
    assert Trigger.decode(word0, word1).encode() == (word0, word1)


@pytest.mark.parametrize(("src_memory", "size"), [(508, 1), (509, 2), (510, 4), (511, 8)])
def test_a_value_takes_the_place_of_size_and_source(src_memory: int, size: int) -> None:
    trigger = Trigger(Operation.DATA, 5, size, src_memory, 0, 7, 9, (1 << 64) - 3)
    word0, word1 = trigger.encode()
    assert word0 == (1 << 64) - 3
    assert word1 == Trigger(Operation.DATA, 5, 0, 0, 0, 7, 9).encode()[1] | src_memory << 32
    assert Trigger.decode(word0, word1) == trigger


@pytest.mark.parametrize(("src_memory", "value"), [(3, 1), (511, None), (511, -1), (511, 1 << 64)])
def test_a_value_and_a_source_exclude_each_other(src_memory: int, value: int | None) -> None:
    with pytest.raises(ArgumentError, match=r"^value: is "):
        Trigger(Operation.DATA, src_memory=src_memory, value=value).encode()


def test_a_size_has_32_bits_where_nothing_is_transferred() -> None:
    trigger = Trigger(Operation.FLUSH, size=(1 << 32) - 1)
    assert Trigger.decode(*trigger.encode()) == trigger


@pytest.mark.parametrize(
    "trigger", [Trigger(Operation.GET), Trigger(Operation.DATA | Operation.GET, src_memory=511, value=1)]
)
def test_a_get_transfers_from_a_memory(trigger: Trigger) -> None:
    with pytest.raises(ArgumentError, match=r"^operation: is a get; expected DATA with it, and no value"):
        trigger.encode()


@pytest.mark.parametrize("field", [name for name in WIDTHS if name != "get"])
def test_a_field_that_is_too_large_is_refused_by_name(field: str) -> None:
    values = {"operation": Operation.DATA, field: 1 << WIDTHS[field]}
    with pytest.raises(ArgumentError, match=field):
        Trigger(**values).encode()  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=field):
        Trigger(**{**values, field: -1}).encode()  # type: ignore[arg-type]


@pytest.mark.parametrize("field", [name for name in WIDTHS if name != "get"])
@pytest.mark.parametrize("value", [1.5, "1", None, True])
def test_a_field_that_is_not_an_integer_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=rf"^{field}: must be an integer from 0 on, not {value!r}"):
        Trigger(**{"operation": Operation.DATA, field: value}).encode()  # type: ignore[arg-type]


def test_the_layout_is_the_documented_one() -> None:
    """The order of the fields is that of the table in trigger.h."""
    assert sum(WIDTHS.values()) + 1 == 128
    assert ffi.sizeof("ProxycclTrigger") == 16
    positions = [
        (0, lib.PROXYCCL_SIZE_SHIFT, 31),
        (31, lib.PROXYCCL_GET_SHIFT, 1),
        (32, lib.PROXYCCL_SRC_OFFSET_SHIFT, 32),
        (64, 64 + lib.PROXYCCL_DST_OFFSET_SHIFT, 32),
        (96, 64 + lib.PROXYCCL_SRC_MEMORY_SHIFT, 9),
        (105, 64 + lib.PROXYCCL_DST_MEMORY_SHIFT, 9),
        (114, 64 + lib.PROXYCCL_OP_SHIFT, 3),
        (117, 64 + lib.PROXYCCL_CHANNEL_SHIFT, 10),
        (127, 64 + lib.PROXYCCL_PARITY_SHIFT, 1),
    ]
    assert all(expected == actual for expected, actual, _ in positions)


MAKE = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void make(ProxyChannelDeviceHandle channel, unsigned op, unsigned dst, unsigned dst_offset,
                                unsigned src, unsigned src_offset, unsigned size) {
  const ProxycclTrigger trigger = makeTrigger(op, channel.channel, dst, dst_offset, src, src_offset, size);
  Fifo{channel.fifo}.push(trigger, channel.control);
  channel.flush();
}
extern "C" __global__ void put(ProxyChannelDeviceHandle channel, unsigned long dst_offset, unsigned long src_offset,
                               unsigned long size) {
  channel.putWithSignalAndFlush(dst_offset, src_offset, size);
}
"""


def test_a_kernels_triggers_arrive_as_they_were_made() -> None:
    """A kernel packs triggers and Python unpacks them, over many laps of a small ring."""
    with Ranks(1, fifo_size=4) as ranks:
        seen: list[Trigger] = []

        def prepare(comm: Communicator) -> tuple[object, object, object]:
            kernels = comm.compile(MAKE)
            channel = comm.handler_channel(seen.append)
            return comm, kernels["make"], channel

        comm, make, channel = ranks.run(prepare)[0]

        @settings(max_examples=100, deadline=None)
        @given(TRIGGERS)
        def check(trigger: Trigger) -> None:
            seen.clear()
            fields = (trigger.dst_memory, trigger.dst_offset, trigger.src_memory, trigger.src_offset, trigger.size)
            make(1, 1, channel, int(trigger.operation), *fields)
            comm.synchronize()
            expected = Trigger(
                trigger.operation,
                channel.id,
                trigger.size,
                trigger.src_memory,
                trigger.src_offset,
                trigger.dst_memory,
                trigger.dst_offset,
            )
            assert seen == [expected, Trigger(Operation.FLUSH, channel.id)]

        check()


def test_a_put_of_more_than_a_trigger_can_say_becomes_several() -> None:
    """Puts more than 4 GiB at offsets beyond the first window. The triggers must cover the transfer, in order."""
    with Ranks(1) as ranks:

        def body(comm: Communicator) -> None:
            seen: list[Trigger] = []
            channel = comm.handler_channel(seen.append)
            size, dst, src = (9 << 30) + 5, (5 << 30) + 3, (1 << 30) + 7
            comm.compile(MAKE)["put"](1, 1, channel, dst, src, size)
            comm.synchronize()
            assert sum(trigger.size for trigger in seen) == size
            for trigger in seen:
                assert trigger.dst_memory << 32 | trigger.dst_offset == dst
                assert trigger.src_memory << 32 | trigger.src_offset == src
                dst += trigger.size
                src += trigger.size
            last = Operation.DATA | Operation.SIGNAL | Operation.FLUSH
            assert [trigger.operation for trigger in seen] == [Operation.DATA] * (len(seen) - 1) + [last]

        ranks.run(body)


def test_operations_have_names() -> None:
    assert operation_name(Operation.DATA | Operation.SIGNAL | Operation.FLUSH) == "data+signal+flush"
    assert operation_name(Operation.CUSTOM) == "custom"
    assert operation_name(Operation.DATA | Operation.GET | Operation.SIGNAL | Operation.FLUSH) == "get+signal+flush"
