"""Schedules that copy to all peers in one driver call (a bundle). Only CUDA has a driver call for several copies, so
the tests add such a call to the host runtime.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from msgspec.structs import replace

from proxyccl import Communicator, TransportError
from proxyccl.device.host.runtime import HostRuntime
from proxyccl.device.runtime import DriverCalls
from support.cases.span_calls import COLLECTIVES, SpanCalls
from support.device_arrays import barrier, on_device, on_host
from support.running import run_ranks

pytestmark = [
    pytest.mark.host_only(reason="it replaces the host runtime's copies"),
    pytest.mark.own_proxy(reason="replaces the copies in the ranks' process only"),
]

RANKS = 3
_COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
_WORDS = ctypes.POINTER(ctypes.c_uint64)
_COPY_MANY = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(_WORDS, _WORDS, ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t),
    *(ctypes.c_void_p, _WORDS, ctypes.c_size_t, ctypes.c_void_p),
)


class CopyMany:
    """A driver call that makes several copies and counts them.

    Attributes:
        functions: the host runtime's driver calls, with this call added.
        counts: the number of copies in each call.
        status: 0 to copy, or a status to return instead of copying.
        awaits_data: whether short reductions' kernels are launched before the peers' data arrives, and wait for it.
    """

    def __init__(self) -> None:
        functions = HostRuntime.calls
        copy = _COPY(functions.copy)
        self.counts: list[int] = []
        self.status = 0
        self.awaits_data = False

        @_COPY_MANY
        def copy_many(
            dst: list[int], src: list[int], nbytes: list[int], count: int, _: int, first: list[int], kinds: int, to: int
        ) -> int:
            assert (first[0], kinds) == (0, 1)
            if self.status:
                return self.status
            self.counts.append(count)
            return max(copy(dst[i], src[i], nbytes[i], to) for i in range(count))

        self._kept = copy_many
        address = ctypes.cast(copy_many, ctypes.c_void_p).value or 0
        self.functions: DriverCalls = replace(functions, copy_many=address)


@pytest.fixture
def copy_many(monkeypatch: pytest.MonkeyPatch) -> CopyMany:
    """Adds the driver call to the host runtime, and makes the host runtime reduce in small chunks."""
    made = CopyMany()
    defaults = HostRuntime().launch_defaults
    monkeypatch.setattr(HostRuntime, "calls", made.functions)
    make = HostRuntime.__init__

    def with_own_box(self: HostRuntime, *args: object, **options: object) -> None:
        make(self, *args, **options)  # type: ignore[arg-type]
        small = {"small_blocks": 3, "small_bytes": 256, "awaits_data": made.awaits_data}
        self.launch_defaults = replace(defaults, own_box_bytes=4096, **small)

    monkeypatch.setattr(HostRuntime, "__init__", with_own_box)
    return made


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_moves_and_reductions_in_bundles(copy_many: CopyMany, in_place: bool, waits: bool) -> None:
    """Depending on the length, arrays are reduced in pieces, in one exchange, or through pinned memory without bundles.
    With `waits`, kernels are launched before the data arrives.
    """
    copy_many.awaits_data = waits

    def body(comm: Communicator) -> None:
        by_proxy = comm.collectives.by_proxy()
        by_proxy.shortest_piece = by_proxy.memories.pinned_bytes = 1024
        by_proxy.one_crossing_bytes = 2048
        assert by_proxy.memories.own_box_bytes == 4096 * (RANKS - 1)
        calls = SpanCalls(comm, 20_000 * comm.world_size)
        for seed in range(18):
            share = (0, 1, 300, 2000, 20_000)[seed % 5]
            calls.run(COLLECTIVES[seed % 3], share, seed, in_place=in_place, root=seed % comm.world_size)
            count = (1, 200, 5000, 30_011)[seed % 4]
            x = on_device(comm, np.full(count, comm.rank + seed, np.float32))
            out = x if in_place else on_device(comm, np.zeros(count, np.float32))
            comm.all_reduce(x, out=out, algorithm="proxy")
            comm.synchronize()
            assert (on_host(out) == sum(rank + seed for rank in range(RANKS))).all()

    run_ranks(RANKS, body)
    assert max(copy_many.counts) == RANKS - 1


def test_calls_queued_on_one_stream_are_bundled_in_order(copy_many: CopyMany) -> None:
    share = 1000

    def body(comm: Communicator) -> None:
        calls, stream = SpanCalls(comm, share * comm.world_size), comm.runtime.create_stream()
        x, out = calls.spans("all_gather", share, 0, in_place=True)
        calls.load(x, out, 7)
        for i in range(40):
            calls.issue("all_gather", x, out, stream=stream)
            calls.issue("broadcast", out, out, i % comm.world_size, stream)
        comm.synchronize(stream)
        calls.check("all_gather", share, x, out, 7)

    run_ranks(RANKS, body)
    assert copy_many.counts == [RANKS - 1] * 40 * (RANKS + 1), "a bundle went before all its peers had joined"


def test_a_refused_bundle_ends_the_group_by_name(copy_many: CopyMany) -> None:
    def body(comm: Communicator) -> BaseException | None:
        calls = SpanCalls(comm, 5000 * comm.world_size)
        calls.run("all_to_all", 5000, 0)
        barrier(comm)
        copy_many.status = 700
        x, out = calls.spans("all_to_all", 5000, 1, in_place=False)
        try:
            while True:  # a bundle of one copy is an ordinary copy
                calls.issue("all_to_all", x, out)
                comm.synchronize()
        except TransportError as error:
            return error

    errors = run_ranks(RANKS, body)
    assert any("status 700" in str(error) for error in errors), errors
