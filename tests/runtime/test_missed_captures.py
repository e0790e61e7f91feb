"""While a thread captures a stream into a graph, the thread's calls on other streams are refused, because the graph
would miss these calls.

The captures are fakes (support/fakes/captures.py); tests/gpu/test_gpu.py uses graphs of torch and cupy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from proxyccl import ArgumentError, Communicator, DispatchCombine, EPAll2AllLayer
from proxyccl.device.stream_operations import StreamOperations, WriteValue
from support.devices import RUNTIME
from support.running import run_ranks

if RUNTIME != "hip":
    pytest.skip("captures have stand-ins on the HIP runtime: make test-hip", allow_module_level=True)

from support.fakes.captures import are_there, capture, use
from support.stream_words import write_value

pytestmark = [pytest.mark.hip, pytest.mark.skipif(not are_there(), reason="HIP's library is not the stand-in")]

KERNEL = """
#include "proxyccl/proxyccl.h"
extern "C" __global__ void put_seven(int* out) { out[0] = 7; }
"""
EXPRESSIONS = {"torch": r"torch\.cuda\.current_stream\(\)", "cupy": r"cupy\.cuda\.get_current_stream\(\)"}


def refused(current_of: str) -> Any:
    return pytest.raises(
        ArgumentError, match=f"^stream: .* captures another stream .*; expected stream={EXPRESSIONS[current_of]}$"
    )


class Calls:
    """Calls of a communicator, each as ``call(stream)``.

    Attributes:
        alone: calls that one rank can make alone.
        together: calls that all ranks make together.
    """

    def __init__(self, comm: Communicator) -> None:
        runtime, peer = comm.runtime, 1 - comm.rank
        x, y = (comm.empty(64, "int32").fill(1) for _ in range(2))
        both = comm.empty(128, "int32").fill(0)
        words = comm.empty(8, "int64").fill(0)
        kernel = comm.compile(KERNEL, "put_seven")
        launch, window = kernel.prepare(1, 1, y), comm.window(both)
        operations = StreamOperations(runtime, [WriteValue(words.ptr, 1)])
        experts = DispatchCombine(comm, hidden=16, max_tokens=4, experts_per_rank=1, topk=1)
        layer = EPAll2AllLayer(comm, 4, 16, 1, comm.rank, 2, 2, 2, dtype="float32", max_recv_tokens=8)
        tokens, ids = comm.empty((4, 16), "float32").fill(1), comm.empty((4, 1), "int32").fill(peer)

        def route(stream: Any) -> None:
            experts.prepare(tokens, ids, stream=stream)

        def dispatch(stream: Any) -> None:
            rows, _, desc = layer.dispatch(tokens, ids, stream=stream)
            layer.combine(rows, desc, stream=stream)

        def exchange(stream: Any) -> None:
            with comm.transfers(stream=stream) as transfers:
                transfers.send(x, peer)
                transfers.recv(y, peer)

        self.alone: dict[str, Callable[[Any], object]] = {
            "kernel": lambda stream: kernel(1, 1, y, stream=stream),
            "prepared launch": launch,
            "operations": operations,
            "word": lambda stream: write_value(runtime, words.ptr, 1, stream),
            "put": lambda stream: window.put(x, peer, stream=stream),
            "get": lambda stream: window.get(x, peer, stream=stream),
        }
        self.together: dict[str, Callable[[Any], object]] = {
            "all_reduce": lambda stream: comm.all_reduce(x, stream=stream),
            "all_gather": lambda stream: comm.all_gather(x, out=both, stream=stream),
            "barrier": lambda stream: comm.barrier(stream=stream),
            "transfers": exchange,
            "signal": lambda stream: window.signal(peer, stream=stream),
            "wait for a signal": lambda stream: window.wait_signal(peer, stream=stream),
            "all_to_all_v": lambda stream: comm.all_to_all_v(x, [32, 32], [32, 32], out=y, stream=stream),
            "experts": route,
            "layer": dispatch,
        }


@pytest.mark.parametrize("current_of", ["torch", "cupy"])
def test_a_call_that_a_capture_would_miss_is_refused(monkeypatch: pytest.MonkeyPatch, current_of: str) -> None:
    """Rank 0 refuses calls before ranks compare calls, so later calls match although rank 1 omits the refused calls."""

    def body(comm: Communicator) -> None:
        calls, other = Calls(comm), comm.runtime.create_stream()
        every = calls.alone | calls.together
        for turn in range(3):  # later iterations reuse the prepared calls
            for call in every.values():
                call(other.handle if turn else None)
        comm.synchronize()
        use(comm, monkeypatch)
        if comm.rank == 0:
            with capture(comm.runtime, current_of):
                for name, call in every.items():
                    for stream in (None, other, other.handle, 0):
                        with refused(current_of):
                            call(stream)
                            pytest.fail(f"{name} on {stream!r} is not refused")
        else:
            for call in calls.alone.values():  # this thread captures nothing
                call(None)
        comm.all_gather_bytes(b"")
        for call in every.values():
            call(None)
        comm.synchronize()

    run_ranks(2, body)


def test_calls_of_a_capture_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are accepted on the captured stream, and on another stream that is also captured."""

    def body(comm: Communicator) -> None:
        calls, runtime = Calls(comm), comm.runtime
        capturable = {name: calls.together[name] for name in ("all_reduce", "all_gather", "barrier", "transfers")}
        for call in capturable.values():
            call(None)
        comm.synchronize()
        use(comm, monkeypatch)
        with capture(runtime, None) as joined, capture(runtime, "torch") as current:
            for call in (calls.alone | capturable).values():
                for stream in (current, current.handle, joined, joined.handle):
                    call(stream)
        comm.synchronize()

    run_ranks(2, body)


def test_copies_and_marks_beside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """During a capture, copies and events are allowed on other streams, because a graph would not miss them."""

    def body(comm: Communicator) -> None:
        runtime, other, x = comm.runtime, comm.runtime.create_stream(), comm.empty(4, "int32").fill(3)
        event = runtime.create_event()
        use(comm, monkeypatch)
        with capture(runtime, "torch"):
            for call in (
                lambda: runtime.copy(x.ptr, x.ptr + 8, 8, other),
                lambda: runtime.fill(x.ptr, 0, 8, other.handle),
                event.record,
            ):
                with refused("torch"):
                    call()
            event.record(other)
            comm.synchronize(other)
            assert (x.upload(np.arange(4)).numpy() == np.arange(4)).all()

    run_ranks(1, body)
