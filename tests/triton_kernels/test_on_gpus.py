"""Features that only GPUs have: torch's streams and graphs, and tensors as arguments of kernels in Triton."""

from __future__ import annotations

import pytest

import proxyccl.triton as pt
from proxyccl import ArgumentError, Communicator
from support.kernels import triton as kernels
from support.running import run_ranks

pytestmark = pytest.mark.gpu_only


def test_a_captured_launch_is_replayed() -> None:
    torch = pytest.importorskip("torch")

    def body(comm: Communicator) -> None:
        device = torch.device("cuda", comm.runtime.device)
        torch.cuda.set_device(device)
        x = torch.zeros(24, device=device)
        x[:8] = torch.arange(8) + comm.rank
        (channel,) = comm.proxy_channels(x)
        kernel = pt.compile(comm, kernels.exchange, grid=1)
        stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            kernel(channel, x, 8, BLOCK=16)
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                kernel(channel, x, 8, BLOCK=16)
                kernel(channel, x, 8, BLOCK=16)
            x[16:] = 0
            graph.replay()
            graph.replay()
            stream.synchronize()
        comm.drain()
        assert x[16:].tolist() == [i + (1 - comm.rank) + 16 for i in range(8)]
        assert channel.counters.puts == 5

    run_ranks(2, body)


def test_a_launch_that_a_capture_would_miss_is_refused() -> None:
    torch = pytest.importorskip("torch")

    def body(comm: Communicator) -> None:
        torch.cuda.set_device(comm.runtime.device)
        x = comm.empty(300, "float32").fill(1)  # x is not a torch tensor, so the launch has no current stream
        kernel, graph = pt.compile(comm, kernels.scale, grid=1), torch.cuda.CUDAGraph()
        kernel(x, 100, 2.0, BLOCK=128)
        comm.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            with pytest.raises(ArgumentError, match=r"expected stream=torch\.cuda\.current_stream\(\)"):
                kernel(x, 100, 2.0, BLOCK=128)
            kernel(x, 100, 2.0, BLOCK=128, stream=torch.cuda.current_stream())
        graph.replay()
        torch.cuda.synchronize()
        assert (x.numpy()[:100] == 4).all()

    run_ranks(1, body)


def test_a_variant_that_was_not_compiled_is_refused_in_a_capture() -> None:
    torch = pytest.importorskip("torch")

    def body(comm: Communicator) -> None:
        torch.cuda.set_device(comm.runtime.device)
        x = torch.ones(300, device="cuda")
        kernel = pt.compile(comm, kernels.scale, grid=1)
        with (
            torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
            pytest.raises(ArgumentError, match="was not called with such arguments before"),
        ):
            kernel(x, 100, 2.0, BLOCK=128)

    run_ranks(1, body)
