"""Defines the device functions by which Numba kernels use ProxyChannels.

NVRTC compiles proxy_channel.h to LTO-IR, and Numba's linker inlines the functions into a kernel. In a kernel, a channel
is the address of its device handle.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy

from proxyccl.channels.handles import ChannelSet
from proxyccl.channels.proxy_channel import ProxyChannel
from proxyccl.device.build.compile_cache import compiled_image, shipped_options
from proxyccl.device.errors import ArgumentError, RuntimeUnavailableError

try:
    import numba_cuda  # noqa: F401  (without numba_cuda, `numba.cuda` is an older module)

    from numba import cuda
except ImportError as error:
    raise RuntimeUnavailableError(
        f"numba: its Python packages are missing ({error}); install them with: pip install 'proxyccl[numba]'"
    ) from None


def _load_numpy_functions() -> None:
    """Makes Numba-CUDA load its implementations of NumPy's functions while ``numpy.row_stack`` exists. Numba-CUDA 0.30
    uses ``numpy.row_stack``, which NumPy 2.5 removed, so otherwise the first launch would raise AttributeError.
    """
    namespace: Any = numpy
    if hasattr(numpy, "row_stack"):
        return
    namespace.row_stack = numpy.vstack
    try:
        import_module("numba.cuda.np.arrayobj")
    finally:
        del namespace.row_stack


_load_numpy_functions()

# By Numba's convention, the first parameter points to the function's result, and a return value of 0 means that the
# function raised no exception.
_SOURCE = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
using Channel = const ProxyChannelDeviceHandle*;
extern "C" {
__device__ int proxyccl_put(void*, Channel channel, uint64_t dst_offset, uint64_t src_offset, uint64_t size) {
  channel->put(dst_offset, src_offset, size);
  return 0;
}
__device__ int proxyccl_signal(void*, Channel channel) {
  channel->signal();
  return 0;
}
__device__ int proxyccl_put_with_signal(void*, Channel channel, uint64_t dst_offset, uint64_t src_offset,
                                        uint64_t size) {
  channel->putWithSignal(dst_offset, src_offset, size);
  return 0;
}
__device__ int proxyccl_put_with_signal_and_flush(bool* done, Channel channel, uint64_t dst_offset,
                                                  uint64_t src_offset, uint64_t size) {
  *done = channel->putWithSignalAndFlush(dst_offset, src_offset, size);
  return 0;
}
__device__ int proxyccl_flush(bool* done, Channel channel) {
  *done = channel->flush();
  return 0;
}
__device__ int proxyccl_wait(bool* came, Channel channel) {
  *came = channel->wait();
  return 0;
}
__device__ int proxyccl_poll(bool* came, Channel channel) {
  *came = channel->poll();
  return 0;
}
__device__ int proxyccl_ended(bool* ended, Channel channel) {
  *ended = aborted(channel->control);
  return 0;
}
__device__ int proxyccl_channel(Channel* one, Channel channels, int64_t i) {
  *one = channels + i;
  return 0;
}
}
"""


def device_functions(architecture: str) -> bytes:
    """Compiles this module's device functions to LTO-IR for an architecture such as "sm_90". Compiling needs no device.
    Raises RuntimeUnavailableError if cuda-bindings or NVRTC is not installed, and CompileError if NVRTC does not
    support the architecture.
    """
    from proxyccl.device.gpu.cuda_compiler import CudaLinkCompiler

    compiler = CudaLinkCompiler()
    return compiled_image(compiler, _SOURCE, shipped_options(compiler, architecture))


class _DeviceFunctions(cuda.LTOIR):  # type: ignore[misc]  # numba has no types
    """The code that Numba links into a kernel, compiled for the device that is current when Numba links."""

    def __init__(self) -> None:
        super().__init__(None, name="proxyccl.ltoir")

    @property
    def data(self) -> bytes:
        major, minor = cuda.get_current_device().compute_capability[:2]
        return device_functions(f"sm_{major}{minor}")


_LINKED = _DeviceFunctions()


def _declare(name: str, result: str, *parameters: str) -> Any:
    return cuda.declare_device(f"proxyccl_{name}", f"{result}(uint64, {', '.join(parameters)})", link=_LINKED)


_RANGE = ("uint64", "uint64", "uint64")  # destination offset, source offset, size, in bytes

put = _declare("put", "none", *_RANGE)
signal = _declare("signal", "none")
put_with_signal = _declare("put_with_signal", "none", *_RANGE)
put_with_signal_and_flush = _declare("put_with_signal_and_flush", "boolean", *_RANGE)
flush = _declare("flush", "boolean")
wait = _declare("wait", "boolean")
poll = _declare("poll", "boolean")
ended = _declare("ended", "boolean")
channel = _declare("channel", "uint64", "int64")


def address(channels: ProxyChannel | ChannelSet[ProxyChannel]) -> int:
    """Returns the address to pass to a kernel for a channel or a set of channels. The channels must stay alive while
    kernels use them. If the set is empty because the rank has no peers, returns 0.

    Raises:
        ArgumentError: `channels` is neither a ProxyChannel with a device handle nor a set of ProxyChannels.
    """
    if isinstance(channels, ChannelSet):
        known = channels.kind is ProxyChannel
    else:
        known = isinstance(channels, ProxyChannel) and channels.device_pointer != 0
    if not known:
        raise ArgumentError("channels", f"expected a ProxyChannel or a set of them, not {channels!r}")
    return channels.device_pointer
