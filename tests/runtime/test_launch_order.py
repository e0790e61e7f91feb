"""The calls of a communicator outside captures wait for each other, and so do the calls of each capture, also if calls
of other captures are in between.

A wait for work of another capture would invalidate the capture. The captures are fakes (support/fakes/captures.py),
whose work runs when it is queued, so no two calls without an order may run at the same time in these tests.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from proxyccl import Communicator
from support.devices import RUNTIME
from support.running import run_ranks

if RUNTIME != "hip":
    pytest.skip("captures have stand-ins on the HIP runtime: make test-hip", allow_module_level=True)

from proxyccl.device.gpu.hip_bindings import library
from support.fakes.captures import are_there
from support.stream_words import check_order, wait_value

pytestmark = [pytest.mark.hip, pytest.mark.skipif(not are_there(), reason="HIP's library is not the stand-in")]


@pytest.mark.parametrize("kind", ["all_reduce", "transfers"])
@pytest.mark.parametrize("by_number", [False, True], ids=["object", "number"])
@pytest.mark.parametrize(
    ("calls", "ordered"),
    [
        ("a0 b1 c0", True),
        ("a0 b1 . b0", True),
        ("a1 b1", True),
        ("a1 b2 c1", True),
        ("a1 b0 c1", True),
        ("c1 a0 b1", True),
        ("a1 c0 c1", True),
        ("a1 b2", False),
        ("a1 b0", False),
        ("a0 b1", False),
    ],
)
def test_the_last_call_waits_for_the_first_if_both_are_in_one_capture_or_in_none(
    calls: str, ordered: bool, by_number: bool, kind: str
) -> None:
    """Each call is a stream's letter, then the number of the capture that records the stream, or 0. All captures end at
    a point.
    """

    def body(comm: Communicator) -> None:
        runtime, peer = comm.runtime, 1 - comm.rank
        x, y = (comm.empty(64, "int32").fill(1) for _ in range(2))
        streams = {letter: runtime.create_stream() for letter in "abc"}

        def call(stream: Any) -> None:
            stream = stream.handle if by_number else stream
            if kind == "all_reduce":
                comm.all_reduce(x, stream=stream)
            else:
                with comm.transfers(stream=stream) as transfers:
                    transfers.send(x, peer)
                    transfers.recv(y, peer)

        for stream in streams.values():
            call(stream)
        comm.synchronize()
        word = runtime.allocate_pinned(8)
        wait_value(runtime, word.ptr, 1, streams[calls[0]])
        for letter, capture in (call.ljust(2) for call in f"{calls} .".split()):
            if letter == ".":
                for each in streams.values():
                    library().hipOnHostCapture(ctypes.c_void_p(each.handle), 0)
                continue
            stream = streams[letter]
            library().hipOnHostCapture(ctypes.c_void_p(stream.handle), int(capture))
            call(stream)
        check_order(runtime, word.ptr, stream, ordered=ordered)
        comm.synchronize()

    run_ranks(2, body)
