"""Defines the device functions by which Numba kernels use ProxyChannels.

NVRTC compiles proxy_channel.h to LTO-IR, and Numba's linker inlines the functions into a kernel. In a kernel, a channel
is the address of its device handle.
"""

from __future__ import annotations

from collections.abc import Sequence
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
_FUNCTION = """
extern "C" __device__ int proxyccl_{name}({result}* result, Channel channel{parameters}) {{
  {statement};
  return 0;
}}
"""
_SOURCE = [
    '#include "proxyccl/proxyccl.h"\nusing namespace proxyccl;\nusing Channel = const ProxyChannelDeviceHandle*;\n'
]


def device_functions(architecture: str) -> bytes:
    """Compiles this module's device functions to LTO-IR for an architecture such as "sm_90". Compiling needs no device.
    Raises RuntimeUnavailableError if cuda-bindings or NVRTC is not installed, and CompileError if NVRTC does not
    support the architecture.
    """
    from proxyccl.device.gpu.cuda_compiler import CudaLinkCompiler

    compiler = CudaLinkCompiler()
    return compiled_image(compiler, "".join(_SOURCE), shipped_options(compiler, architecture))


class _DeviceFunctions(cuda.LTOIR):  # type: ignore[misc]  # numba has no types
    """The code that Numba links into a kernel, compiled for the device that is current when Numba links."""

    def __init__(self) -> None:
        super().__init__(None, name="proxyccl.ltoir")

    @property
    def data(self) -> bytes:
        major, minor = cuda.get_current_device().compute_capability[:2]
        return device_functions(f"sm_{major}{minor}")


_LINKED = _DeviceFunctions()


def _declare(name: str, statement: str, result: str = "none", parameters: Sequence[str] = ()) -> Any:
    """Defines a device function in C++, and declares it to Numba. In the statement, `channel` is the first parameter,
    and a, b and c are the further parameters, whose types are given by Numba's names.
    """
    c_types = {"none": "void", "boolean": "bool", "uint64": "uint64_t", "int64": "int64_t"}
    given = "".join(f", {c_types[each]} {letter}" for each, letter in zip(parameters, "abc", strict=False))
    _SOURCE.append(_FUNCTION.format(name=name, result=c_types[result], parameters=given, statement=statement))
    signature = f"{result}({', '.join(('uint64', *parameters))})"
    return cuda.declare_device(f"proxyccl_{name}", signature, link=_LINKED)


_RANGE = ("uint64", "uint64", "uint64")  # destination offset, source offset, size, in bytes

put = _declare("put", "channel->put(a, b, c)", "none", _RANGE)
signal = _declare("signal", "channel->signal()")
put_with_signal = _declare("put_with_signal", "channel->putWithSignal(a, b, c)", "none", _RANGE)
put_with_signal_and_flush = _declare(
    "put_with_signal_and_flush", "*result = channel->putWithSignalAndFlush(a, b, c)", "boolean", _RANGE
)
flush = _declare("flush", "*result = channel->flush()", "boolean")
wait = _declare("wait", "*result = channel->wait()", "boolean")
poll = _declare("poll", "*result = channel->poll()", "boolean")
ended = _declare("ended", "*result = aborted(channel->control)", "boolean")
channel = _declare("channel", "*result = reinterpret_cast<uint64_t>(channel + a)", "uint64", ["int64"])


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
