"""Collectives whose kernels send to other nodes through pinned memory, as on GPUs whose data would be staged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from proxyccl import Communicator, WaitTimeoutError
from proxyccl.channels.collectives.request import Request
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.host import HostRuntime
from proxyccl.proxy.remote_options import FabricOptions
from support.cases.reference import Call
from support.packages.fabric import this_library
from support.running import TIMEOUT, impatient, run_ranks
from support.transports import needs_fabric

pytestmark = [
    pytest.mark.host_only(reason="sets what a GPU's runtime says of itself"),
    needs_fabric,
]

LONGEST = 6 << 10  # kernels send at most this many bytes by default
BUFFER = 16 << 10


@pytest.fixture(autouse=True)
def _like_a_gpu(library: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    small = {"pinned_kernel_bytes": LONGEST, "one_crossing_bytes": 4096, "pinned_buffer_bytes": BUFFER}
    set_defaults(monkeypatch, proxied_kernel_bytes=0, **small)
    with this_library(library, monkeypatch):
        yield


def set_defaults(monkeypatch: pytest.MonkeyPatch, **defaults: int) -> None:
    """Changes fields of the launch defaults of host runtimes that are made from now on."""
    make = HostRuntime.__init__

    def with_defaults(self: HostRuntime, *args: object, **options: object) -> None:
        make(self, *args, **options)  # type: ignore[arg-type]
        self.launch_defaults = structs.replace(self.launch_defaults, **defaults)

    monkeypatch.setattr(HostRuntime, "__init__", with_defaults)


def run_nodes(ranks: int, each: int, body: Callable[[Communicator], None]) -> None:
    """Runs `body` in `ranks` ranks on nodes of `each` ranks. Between nodes, data is staged."""
    staged = {(a, b): "staged_fabric" for a in range(ranks) for b in range(a) if a // each != b // each}
    fabric = FabricOptions.from_environment(streams=2)
    run_ranks(ranks, body, local_world_size=each, transport=staged, fabric=fabric)


def run(ranks: int, each: int, call: Call, *, by_kernels: bool) -> None:
    """Checks a call with the default algorithm, and with an algorithm that uses kernels. By default the call must use
    kernels if `by_kernels`, else the proxy.
    """

    def body(comm: Communicator) -> None:
        collectives, dtype = comm.collectives, as_dtype(call.dtype)
        if call.collective != "all_reduce":
            nbytes = max(call.sizes(ranks)) * dtype.itemsize
            chosen = collectives.choose(call.collective, Request(), dtype, nbytes)
            assert collectives.goes_by_schedule(chosen) == (not by_kernels)
        call.run(comm)
        assert (collectives.made_by_proxy is None) == by_kernels
        algorithm = "two_shot" if call.collective == "all_reduce" else "kernels"
        for turn in range(3):
            replace(call, algorithm=algorithm, seed=turn, rounded_parts=0).run(comm)
        assert collectives.team().pinned
        comm.barrier()

    run_nodes(ranks, each, body)


@pytest.mark.slow
@pytest.mark.parametrize("longer", [False, True])
@pytest.mark.parametrize(
    ("collective", "ranks", "each"),
    [("all_gather", 2, 1), ("all_to_all", 3, 1), ("all_gather", 4, 2), ("all_to_all", 4, 2), ("reduce_scatter", 4, 2)],
)
def test_short_shares_go_by_kernels(collective: str, ranks: int, each: int, longer: bool) -> None:
    longest = LONGEST // (ranks - each) // 2
    call = Call(collective, "float16", "max", None, longest + 1 if longer else longest - 3, 1, in_place=longer)
    run(ranks, each, call, by_kernels=not longer)


@pytest.mark.parametrize("longer", [False, True])
@pytest.mark.parametrize(("dtype", "ranks", "each"), [("int32", 2, 1), ("bfloat16", 3, 1), ("bfloat16", 4, 2)])
def test_all_reductions_go_by_kernels(dtype: str, ranks: int, each: int, longer: bool) -> None:
    nbytes = LONGEST * each // (ranks // each - 1) if each > 1 else LONGEST // (ranks - 1) * ranks
    count = nbytes // as_dtype(dtype).itemsize
    parts = 2 if each > 1 else 0
    call = Call("all_reduce", dtype, "avg", None, count + each if longer else count - 5, rounded_parts=parts)
    run(ranks, each, call, by_kernels=not longer)


def test_long_puts_of_pinned_memory_are_copied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    set_defaults(monkeypatch, pinned_buffer_bytes=1 << 20)
    run(2, 1, Call("all_gather", "int64", count=100_003), by_kernels=False)


def test_a_rank_that_never_comes_is_named() -> None:
    failed = threading.Event()

    def body(comm: Communicator) -> None:
        share, out = np.ones(100, np.float32), np.empty(200, np.float32)
        comm.all_gather(share, out=out)
        impatient(comm)
        if comm.rank == 1:
            assert failed.wait(TIMEOUT)
            return
        with pytest.raises(WaitTimeoutError, match="from rank 1"):
            comm.all_gather(share, out=out)
        failed.set()

    run_nodes(2, 1, body)
