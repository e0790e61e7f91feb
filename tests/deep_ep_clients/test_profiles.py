"""In a GPU profile, exactly the kernels of low-latency calls have the names that DeepEP's programs search for."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import deep_ep  # noqa: E402

from proxyccl import Communicator  # noqa: E402
from support.cases.deep_ep_clients import Mixture  # noqa: E402
from support.devices import runtime_with_blocks, torch_device  # noqa: E402
from support.ranks import Ranks  # noqa: E402

RANKS, CALLS, PAUSE_SECONDS = 2, 4, 0.02


@pytest.mark.gpu_only
@pytest.mark.parametrize("hooks", [False, True])
def test_kernels_of_low_latency_calls(*, hooks: bool) -> None:
    buffers: dict[int, Any] = {}

    def received(hook: Any) -> None:
        if hooks:
            torch.cuda.current_stream().synchronize()
            time.sleep(PAUSE_SECONDS)
            hook()

    def body(comm: Communicator) -> None:
        mixture = Mixture.of(comm.rank, RANKS, torch_device(comm))
        if comm.rank not in buffers:
            buffers[comm.rank] = deep_ep.Buffer(comm, low_latency_mode=True)
        buffer = buffers[comm.rank]
        for _ in range(CALLS):
            rows, _, handle, _, hook = buffer.low_latency_dispatch(
                mixture.tokens, mixture.ids, mixture.most_tokens, mixture.experts, return_recv_hook=hooks
            )
            received(hook)
            made = rows[0].to(torch.bfloat16)
            _, _, hook = buffer.low_latency_combine(made, mixture.ids, mixture.weights, handle, return_recv_hook=hooks)
            received(hook)
        torch.cuda.synchronize()

    with Ranks(RANKS, make_runtime=runtime_with_blocks) as ranks:
        ranks.run(body)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            ranks.run(body)
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    for name in ("dispatch", "combine"):
        found = sorted((event for event in kernels if name in event.name), key=lambda event: event.time_range.start)
        assert len({event.name for event in found}) == 1
        assert all(f"::{name}" in event.name for event in found)
        assert len(found) == RANKS * CALLS * (2 if hooks else 1)
        for device in range(RANKS) if hooks else ():
            own = [event.time_range for event in found if event.device_index == device]
            for sent, came in zip(own[::2], own[1::2], strict=True):
                assert came.start - sent.end > PAUSE_SECONDS * 1e6 / 2
                between = [
                    event.name
                    for event in kernels
                    if event.device_index == device and sent.end <= event.time_range.start < came.start
                ]
                assert between == []
