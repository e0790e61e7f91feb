"""When the engine refuses a trigger, its error names the source or the destination, with id and offset."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from proxyccl import Communicator, Operation, Trigger, TriggerError
from proxyccl.proxy.trigger import WINDOW_BYTES
from support.hanging import caught
from support.running import TIMEOUT, run_ranks

PUSH = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void push(ProxyChannelDeviceHandle ring, unsigned long word0, unsigned long word1) {
  Fifo{ring.fifo}.push(ProxycclTrigger{word0, word1}, ring.control);
}
"""
SIZE = 4096
NOBODYS = 400
VALUE_OF_8 = 511
GET = Operation.DATA | Operation.GET


def channel_to_itself(comm: Communicator) -> int:
    links = comm.group.links
    channel = comm.proxy.reserve_channel(links.connection(0))
    word, handle = links.semaphore(0, channel), links.semaphore_handle(0, channel)
    comm.proxy.set_channel(channel, links.connection(0), word, handle=handle)
    return channel


def refused(fields: Callable[[int, int], dict[str, Any]]) -> TriggerError:
    """Pushes a trigger on one rank, and returns the rank's error. `fields(memory, window)` returns the trigger's
    fields; `window` is the id of the second window of an unmapped address range.
    """

    def body(comm: Communicator) -> TriggerError:
        memory = comm.register(comm.empty(SIZE, "uint8")).id
        window = comm.proxy.add_memory(1 << 32, WINDOW_BYTES + SIZE) + 1
        defaults = {"operation": Operation.DATA, "size": 16, "src_memory": memory, "dst_memory": memory}
        trigger = Trigger(channel=channel_to_itself(comm), **{**defaults, **fields(memory, window)})
        comm.compile(PUSH, "push")(1, 1, comm.handler_channel(lambda _: None), *trigger.encode())
        error = caught(comm.synchronize)
        deadline = time.monotonic() + TIMEOUT
        while error is None and time.monotonic() < deadline:
            time.sleep(0.005)
            error = caught(comm.check)
        assert isinstance(error, TriggerError), error
        return error

    return run_ranks(1, body, proxy="thread", fifos=1)[0]


@pytest.mark.parametrize(
    ("fields", "reason", "offset"),
    [
        (lambda m, w: {"src_memory": NOBODYS, "src_offset": 8, "dst_offset": 24}, "source memory id is not", 8),
        (lambda m, w: {"dst_memory": NOBODYS, "src_offset": 8, "dst_offset": 24}, "destination memory id is not", 24),
        (lambda m, w: {"src_offset": SIZE - 8, "dst_offset": 24}, "leaves the source memory", SIZE - 8),
        (lambda m, w: {"src_offset": 8, "dst_offset": SIZE - 8}, "leaves the destination memory", SIZE - 8),
        (lambda m, w: {"src_memory": w, "src_offset": SIZE - 8}, "leaves the source memory", SIZE - 8),
        (lambda m, w: {"dst_memory": w, "dst_offset": SIZE - 8}, "leaves the destination memory", SIZE - 8),
        (lambda m, w: {"src_memory": w + 1, "src_offset": 8}, "source memory id is not", 8),
        (lambda m, w: {"dst_memory": w + 1, "dst_offset": 8}, "destination memory id is not", 8),
        (lambda m, w: {"operation": GET, "src_memory": NOBODYS}, "source memory id is not", 0),
        (lambda m, w: {"operation": GET, "dst_memory": NOBODYS}, "destination memory id is not", 0),
        (lambda m, w: {"operation": GET, "src_offset": SIZE - 8}, "leaves the source memory", SIZE - 8),
        (lambda m, w: {"operation": GET, "dst_offset": SIZE - 8}, "leaves the destination memory", SIZE - 8),
    ],
)
@pytest.mark.parametrize("more", [Operation.SIGNAL | Operation.FLUSH])
def test_a_refused_transfer_names_its_side(
    fields: Callable[[int, int], dict[str, Any]], reason: str, offset: int, more: Operation
) -> None:
    def with_more(memory: int, window: int) -> dict[str, Any]:
        found = fields(memory, window)
        return {**found, "operation": found.get("operation", Operation.DATA) | more}

    error = refused(with_more)
    assert reason in str(error)
    assert f"of 16 bytes at offset {offset}" in str(error)
    assert error.offset == offset


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (lambda m, w: {"dst_memory": NOBODYS, "dst_offset": 24}, "the destination memory id is not registered"),
        (lambda m, w: {"dst_offset": SIZE - 4}, "the value leaves the destination memory"),
        (lambda m, w: {"dst_memory": w, "dst_offset": SIZE - 4}, "the value leaves the destination memory"),
    ],
)
def test_a_refused_value_names_its_destination(fields: Callable[[int, int], dict[str, Any]], reason: str) -> None:
    error = refused(lambda m, w: {"src_memory": VALUE_OF_8, "value": 1 << 40, **fields(m, w)})
    assert reason in str(error)
    assert "of 8 bytes" in str(error)
    assert "source: a value; destination: memory id" in str(error)


def test_an_error_names_both_memories() -> None:
    ids: list[int] = []

    def fields(memory: int, window: int) -> dict[str, Any]:
        ids[:] = memory, window
        return {"src_memory": window, "src_offset": 8, "dst_offset": SIZE}

    text = str(refused(fields))
    source = f"source: memory id {ids[1]} of {SIZE} bytes, offset 8"
    assert f"({source}; destination: memory id {ids[0]} of {SIZE} bytes, offset {SIZE})" in text


def test_a_signal_that_is_refused_has_no_size() -> None:
    text = str(refused(lambda m, w: {"operation": Operation.SIGNAL, "src_memory": VALUE_OF_8, "value": 0}))
    assert "refused: signal to rank 0 on channel" in text
    assert "bytes" not in text
