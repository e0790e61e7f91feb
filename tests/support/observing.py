"""Support for tests of counters and traces: kernels with a known number of triggers, and functions that observe
proxies.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys

from proxyccl import Communicator
from proxyccl.__main__ import main
from proxyccl.channels.handles import ChannelSet
from proxyccl.channels.proxy_channel import ProxyChannel
from proxyccl.proxy.observe import publications
from proxyccl.proxy.observe.publications import Publication
from proxyccl.proxy.observe.reader import Observer, ServiceView
from support.device_arrays import barrier
from support.running import TIMEOUT, wait_for

KERNELS = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void mixed(DeviceHandle<ProxyChannel>* channels, int puts, int signals, int flushes) {
  for (int i = 0; i < puts; ++i) channels[0].put(0, 0, 100);
  for (int i = 0; i < signals; ++i) channels[0].signal();
  for (int i = 0; i < flushes; ++i) channels[0].flush();
}
extern "C" __global__ void to_each(DeviceHandle<ProxyChannel>* channels, int count) {
  for (int i = 0; i < count; ++i) {
    channels[i].put(0, 0, 100);
    channels[i].signal();
  }
}
extern "C" __global__ void flush_large(DeviceHandle<ProxyChannel>* channels, uint64_t bytes, int times) {
  for (int i = 0; i < times; ++i) {
    channels[0].put(0, 0, bytes);
    channels[0].flush();
  }
}
extern "C" __global__ void gets(DeviceHandle<ProxyChannel>* channels, int count) {
  for (int i = 0; i < count; ++i) channels[0].get(0, 0, 100);
  channels[0].flush();
}
extern "C" __global__ void empty_puts(DeviceHandle<ProxyChannel>* channels, int count) {
  for (int i = 0; i < count; ++i) channels[0].put(0, 0, 0);
  channels[0].flush();
}
extern "C" __global__ void custom(ProxyChannelDeviceHandle channel, int count) {
  for (int i = 0; i < count; ++i) channel.custom(i);
}
"""


def channels_of(comm: Communicator, nbytes: int = 1024) -> ChannelSet[ProxyChannel]:
    """Makes channels to all other ranks, between memories of `nbytes` bytes. Returns the channels after a barrier."""
    channels = comm.proxy_channels(comm.empty(nbytes, "uint8"))
    barrier(comm)
    return channels


def look(comm: Communicator) -> ServiceView:
    """Returns a snapshot of this rank's proxy, read from the counters that the proxy publishes for other processes."""
    ((_, publication),) = publications.find(comm.job, {comm.rank})
    with Observer(publication) as observer:
        return observer.snapshot()


def wait_until_traced(publication: Publication) -> None:
    """Waits until all workers of a service trace everything: tracing is on, and each worker has ended the pass over
    its rings that it was making when tracing began.
    """
    with Observer(publication) as observer:
        workers = [observer.worker_stats(number) for number in range(publication.workers)]
        wait_for(lambda: all(stats.trace_until for stats in workers), "it is traced")
    wait_for_looks(publication)


def wait_for_looks(publication: Publication) -> None:
    """Waits until each worker of a service has begun another pass over its rings."""
    with Observer(publication) as observer:
        workers = [observer.worker_stats(number) for number in range(publication.workers)]
        before = [stats.looks for stats in workers]
        for stats, looks in zip(workers, before, strict=True):
            wait_for(lambda stats=stats, looks=looks: stats.looks > looks, "its workers look")


def command(*arguments: str) -> subprocess.Popen[str]:
    """Starts the `proxyccl` command in a separate process."""
    return subprocess.Popen(
        [sys.executable, "-m", "proxyccl", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )


def output_of(process: subprocess.Popen[str]) -> str:
    """Waits for a command, asserts that it succeeded, and returns its stdout."""
    out, error = process.communicate(timeout=3 * TIMEOUT)
    assert process.returncode == 0, error
    return out


def called(*arguments: str) -> tuple[int, str, str]:
    """Runs the `proxyccl` command in this process, to save time. Returns the exit status, stdout and stderr."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        status = main(list(arguments))
    return status, out.getvalue(), error.getvalue()
