"""Measures the time of GPU work with events, and the time of kernels with a profiler."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

_CACHE_BYTES = 256_000_000
_SLEEP_CYCLES = 20_000_000  # about 10 ms


def flush_l2_cache(enabled: bool = True) -> None:
    """Writes more bytes than a GPU's L2 cache holds."""
    if enabled:
        torch.empty(_CACHE_BYTES // 4, dtype=torch.int32, device="cuda").zero_()


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Measures the GPU work that a call queues. Returns the average, least and greatest time in seconds, which leave
    out the first measured call.

    Args:
        fn: makes the call.
        num_warmups, num_tests: the number of calls before the measurement, and the number of measured calls.
        post_fn: called after each measured call.
        flush_l2: see `flush_l2_cache`.
    """
    torch.cuda.synchronize()
    for _ in range(num_warmups):
        fn()
    spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_tests)]
    for begin, end in spans:
        flush_l2_cache(flush_l2)
        begin.record()
        fn()
        end.record()
        if post_fn is not None:
            post_fn()
    torch.cuda.synchronize()
    seconds = [begin.elapsed_time(end) / 1e3 for begin, end in spans[1:]]
    return statistics.fmean(seconds), min(seconds), max(seconds)


class empty_suppress(contextlib.nullcontext[None]):  # noqa: N801 - DeepEP has this name
    """Suppresses nothing."""


@contextlib.contextmanager
def suppress_stdout_stderr() -> Iterator[None]:
    """Discards all output of the process to stdout and stderr, also output from C."""
    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as undo:
        for stream in (1, 2):
            kept = os.dup(stream)
            undo.callback(os.close, kept)
            undo.callback(os.dup2, kept, stream)
            os.dup2(nowhere.fileno(), stream)
        yield


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
) -> Any:
    """Measures the kernels whose names contain a text. Returns the average time in seconds; 0 if there are no such
    kernels. With EP_USE_NVIDIA_TOOLS=1, nothing is measured, because another tool profiles, and each result is 1.
    EP_DISABLE_BARRIER_PROFILING=1 disables barrier_comm_profiling.

    Args:
        fn: makes a call.
        kernel_names: the texts; all kernels that match a text must have the same name.
        num_tests: the number of calls for warm-up, and also the number of profiled calls.
        suppress_kineto_output: see `suppress_stdout_stderr`.
        trace_path: the path of a file for the profile as a trace, or None.
        flush_l2: see `flush_l2_cache`.
        barrier_comm_profiling: whether the ranks start each call together, after all ranks have queued the call.
        num_kernels_per_period: the number of kernels of the same name in one call. If this number is greater than 1,
            the result is a list with a time for each of these kernels.
        barrier: a function that makes the ranks start together; None for an all-reduce.

    Returns:
        The time, or a list of times for a tuple of texts.
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    if int(os.environ.get("EP_USE_NVIDIA_TOOLS", "0")):
        return 1 if isinstance(kernel_names, str) else (1,) * len(names)
    together = barrier_comm_profiling and not int(os.environ.get("EP_DISABLE_BARRIER_PROFILING", "0"))
    token = torch.ones(1, dtype=torch.float32, device="cuda")
    begin = barrier or (lambda: dist.all_reduce(token))
    fn()
    torch.cuda.synchronize()
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with (
        suppress_stdout_stderr() if suppress_kineto_output else empty_suppress(),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA], schedule=schedule, acc_events=True
        ) as profile,
    ):
        for _ in range(2):
            for _ in range(num_tests):
                flush_l2_cache(flush_l2)
                if together:
                    torch.cuda._sleep(_SLEEP_CYCLES)
                    begin()
                fn()
            torch.cuda.synchronize()
            profile.step()
    if trace_path is not None:
        profile.export_chrome_trace(trace_path)
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    times = [_seconds(kernels, name, num_kernels_per_period) for name in names]
    return times[0] if isinstance(kernel_names, str) else times


def _seconds(kernels: list[Any], name: str, per_period: int) -> float | list[float]:
    found = sorted((event for event in kernels if name in event.name), key=lambda event: event.time_range.start)
    different = {event.name for event in found}
    if len(different) > 1:
        raise AssertionError(f"{name!r} names several kernels: {', '.join(sorted(different))}")
    if len(found) % per_period:
        raise AssertionError(f"there are {len(found)} kernels {name!r}; expected a multiple of {per_period}")
    seconds = [event.time_range.elapsed_us() / 1e6 for event in found]
    averages = [statistics.fmean(seconds[first::per_period]) if seconds else 0.0 for first in range(per_period)]
    return averages if per_period > 1 else averages[0]
