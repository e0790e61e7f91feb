"""The host runtime: runs kernels on the CPU, a fiber for each GPU thread.

It is what runs where there is no GPU, and what lets a race detector see a kernel. Device memory is anonymous shared
memory, so that ranks can be processes and nothing is left behind by one that is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.machinery
import os
import platform
import shutil
import subprocess
import threading
import weakref
from pathlib import Path
from typing import Any

from proxyccl.device import _native
from proxyccl.device.compile_cache import INCLUDE_DIR, KERNEL_DIR, cached, shipped_source
from proxyccl.device.errors import ArgumentError, CompileError, KernelError
from proxyccl.device.in_flight import InFlight
from proxyccl.device.kernel import Kernel, Module, kernel_names
from proxyccl.device.owned import Owned, OwnedStream
from proxyccl.device.runtime import EngineFunctions, LaunchDefaults, LaunchTarget, StreamLike, foreign_stream_handle
from proxyccl.device.shared_memory import SharedMemory

ffi, lib = _native.ffi, _native.lib

_MESSAGES = {
    lib.PROXYCCL_HOST_INVALID_VALUE: "a value is out of range",
    lib.PROXYCCL_HOST_NOT_FOUND: "not found",
    lib.PROXYCCL_HOST_NOT_READY: "not ready",
    lib.PROXYCCL_HOST_LAUNCH_FAILED: "the kernel failed: its threads deadlocked at a barrier "
    "that not all of them reach, or one overflowed its stack",
}


def _address(name: str) -> int:
    return int(ffi.cast("uintptr_t", ffi.addressof(lib, name)))


def _check(status: int, call: str) -> None:
    if status:
        raise KernelError(f"{call}: {_MESSAGES.get(status, f'status {status}')}")


class HostStream(OwnedStream):
    """A queue of host-runtime work, worked off by a thread of its own (or, for the proxy, by whoever queues)."""

    def __init__(self, *, run_inline: bool = False) -> None:
        out = ffi.new("void **")
        _check(lib.proxyccl_host_stream_create(out, run_inline), "stream create")
        self._stream = out[0]
        self.handle = int(ffi.cast("uintptr_t", self._stream))
        # A stream that nobody refers to any more finishes its work and takes its thread with it.
        super().__init__(lib.proxyccl_host_stream_destroy, self._stream)
        self._end = threading.Lock()

    def close(self) -> None:
        """Ends the stream when what is queued is done, and when nobody waits for that in `finish`."""
        with self._end:
            super().close()

    def finish(self) -> None:
        """Waits for all that was queued, whoever closes the stream meanwhile."""
        with self._end:
            if not self.closed:
                self.synchronize()

    def synchronize(self) -> None:
        """Waits for all that was queued."""
        self._require_open()
        _check(lib.proxyccl_host_stream_synchronize(self._stream), "stream synchronize")

    def query(self) -> bool:
        """Whether all that was queued is done."""
        self._require_open()
        status = lib.proxyccl_host_stream_query(self._stream)
        if status == lib.PROXYCCL_HOST_NOT_READY:
            return False
        _check(status, "stream query")
        return True

    def wait_event(self, event: HostEvent) -> None:
        """Later work on this stream runs after the event's last record."""
        self._require_open()
        _check(
            lib.proxyccl_host_stream_wait_event(self._stream, ffi.cast("void *", event.handle), 0), "stream wait event"
        )


class HostEvent(Owned):
    """A point in a host stream."""

    def __init__(self, runtime: HostRuntime) -> None:
        self._runtime = runtime
        out = ffi.new("void **")
        _check(lib.proxyccl_host_event_create(out), "event create")
        self._event = out[0]
        self.handle = int(ffi.cast("uintptr_t", self._event))
        super().__init__(lib.proxyccl_host_event_destroy, self._event)

    def record(self, stream: StreamLike = None) -> None:
        """Marks the stream's current end."""
        handle = ffi.cast("void *", self._runtime.stream_handle(stream))
        _check(lib.proxyccl_host_event_record(self._event, handle), "event record")

    def query(self) -> bool:
        """Whether the marked point was reached."""
        return int(lib.proxyccl_host_event_query(self._event)) == 0

    def synchronize(self) -> None:
        """Waits for the marked point."""
        _check(lib.proxyccl_host_event_synchronize(self._event), "event synchronize")

    def elapsed(self, start: Any) -> float:
        """Milliseconds from `start` to this event."""
        out = ffi.new("float *")
        _check(lib.proxyccl_host_event_elapsed(out, start._event, self._event), "event elapsed")
        return float(out[0])


class HostRuntime:
    """The CPU as a device. See `proxyccl.device.runtime.Runtime` for the methods.

    Args:
        device: any small number: every device is this machine's memory.
        async_copies: give the proxy's copies a thread for each peer, as a copy engine would; by default the proxy's
            thread makes them, which is faster where cores are few.
        cxxflags: added to every compile; shipped kernels are then compiled at run time too (a sanitizer, say).
    """

    name = "host"

    def __init__(self, device: int = 0, *, async_copies: bool = False, cxxflags: tuple[str, ...] = ()) -> None:
        if not isinstance(device, int) or device < 0:
            raise ArgumentError("device", f"must be a number from 0, not {device!r}")
        self.device = device
        self.device_id = f"host:{device}"
        self.in_flight = InFlight(self)
        self.launch_defaults = LaunchDefaults(
            threads=64,
            blocks=2,
            copy_blocks=2,
            bytes_per_block=32 * 1024,
            exchange_bytes=1024 * 1024,
            packet_threads=64,
            packet_blocks=2,
        )
        self._async_copies = async_copies
        self._cxxflags = (*os.environ.get("PROXYCCL_CXXFLAGS", "").split(), *cxxflags)
        self._allocations: dict[int, weakref.ref[SharedMemory]] = {}
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[HostStream] = weakref.WeakSet()
        self._streams_lock = threading.Lock()  # ranks that are threads may share a runtime
        self._default_stream = self.create_stream()
        self._modules: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"HostRuntime(device={self.device})"

    def activate(self, *, for_proxy: bool = False) -> None:
        """Nothing to do: there is no current device."""

    def current(self) -> contextlib.AbstractContextManager[None]:
        """The same."""
        return contextlib.nullcontext()

    def describe(self) -> str:
        """One line on this CPU."""
        return f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, {platform.machine()}"

    def allocate(self, nbytes: int) -> SharedMemory:
        """Zeroed shared memory. `host_ptr` equals `ptr`: the device is the CPU."""
        memory = SharedMemory.allocate(nbytes)
        with self._lock:
            self._allocations = {
                ptr: ref for ptr, ref in self._allocations.items() if (m := ref()) is not None and not m.closed
            }
            self._allocations[memory.ptr] = weakref.ref(memory)
        return memory

    def allocate_pinned(self, nbytes: int) -> SharedMemory:
        """The same: here device and pinned memory are one kind."""
        return self.allocate(nbytes)

    def export(self, ptr: int, nbytes: int) -> bytes:
        """A handle to a range of memory that this runtime allocated."""
        with self._lock:
            candidates = [m for ref in self._allocations.values() if (m := ref()) is not None and not m.closed]
        for memory in candidates:
            if memory.contains(ptr, nbytes):
                return memory.export(ptr, nbytes)
        raise ArgumentError(
            "array", "this memory is private to its process; allocate with Communicator.empty() what peers shall reach"
        )

    def open(self, handle: bytes) -> SharedMemory:
        """Maps what a process of this machine and user exported."""
        return SharedMemory.open(handle)

    def open_pinned(self, handle: bytes) -> SharedMemory:
        """The same."""
        return self.open(handle)

    def adopt_pinned(self, descriptor: int, nbytes: int) -> SharedMemory:
        """Maps what a process of this machine handed over."""
        return SharedMemory.adopt(descriptor, nbytes)

    def numa_node(self) -> None:
        """Its threads may run anywhere."""

    def dmabuf(self, ptr: int, nbytes: int) -> None:
        """Its memory is the host's."""

    def can_access_peer(self, device_id: str) -> bool:
        """Whether the other device is a host device: all of them are this machine's memory."""
        return device_id.startswith("host:")

    def create_stream(self, *, for_proxy: bool = False) -> HostStream:
        """A stream; one for the proxy runs its copies in the proxy's thread unless `async_copies` was asked for."""
        stream = HostStream(run_inline=for_proxy and not self._async_copies)
        with self._streams_lock:
            self._streams.add(stream)
        return stream

    def _all_streams(self) -> list[HostStream]:
        with self._streams_lock:
            return list(self._streams)

    def create_event(self) -> HostEvent:
        """An event."""
        return HostEvent(self)

    def stream_handle(self, stream: StreamLike) -> int:
        """The handle of a `HostStream`, or of the default stream for None."""
        if stream is None:
            return self._default_stream.handle
        if isinstance(stream, HostStream):
            stream._require_open()
            return stream.handle
        handle = foreign_stream_handle(stream)
        if not any(handle == own.handle for own in self._all_streams()):
            raise ArgumentError(
                "stream", f"{stream!r} is no stream of the host runtime; make one with runtime.create_stream()"
            )
        return handle

    def is_capturing(self, stream: int) -> bool:
        """Never: the host runtime has no graphs."""
        return False

    def order_streams(self, first: int, then: int) -> None:
        """Makes later work of `then` wait for what is queued on `first`; a closed stream has nothing queued."""
        if any(stream.handle == first and not stream.closed for stream in self._all_streams()):
            event = self.create_event()
            event.record(first)
            status = lib.proxyccl_host_stream_wait_event(ffi.cast("void *", then), ffi.cast("void *", event.handle), 0)
            _check(status, "stream wait event")

    def copy(self, dst: int, src: int, nbytes: int, stream: StreamLike = None) -> None:
        """Copies between two addresses; at once if no stream is given."""
        if stream is None:
            ctypes.memmove(dst, src, nbytes)
        else:
            self._queue_copy(dst, src, nbytes, stream)

    def _queue_copy(self, dst: int, src: int, nbytes: int, stream: StreamLike) -> None:
        handle = ffi.cast("void *", self.stream_handle(stream))
        _check(lib.proxyccl_host_copy(ffi.cast("void *", dst), ffi.cast("void *", src), nbytes, handle), "copy")

    def fill(self, dst: int, value: int, nbytes: int, stream: StreamLike = None) -> None:
        """Sets bytes; at once if no stream is given."""
        if stream is None:
            ctypes.memset(dst, value, nbytes)
        else:
            handle = ffi.cast("void *", self.stream_handle(stream))
            _check(lib.proxyccl_host_set(ffi.cast("void *", dst), value, nbytes, handle), "fill")

    def synchronize(self) -> None:
        """Waits for every stream made by this runtime."""
        done = self.in_flight.take()
        for stream in self._all_streams():  # those of other ranks too
            stream.finish()
        del done

    def compile(self, source: str, *, options: tuple[str, ...] = (), include_dirs: tuple[str, ...] = ()) -> Module:
        """Compiles kernels with the machine's C++ compiler."""
        names = kernel_names(source)
        if not names:
            raise ArgumentError("source", 'no kernel in it: a kernel is an extern "C" __global__ void function')
        library = self._load(compile_source(source, names, (*self._cxxflags, *options), include_dirs))
        return Module({name: self._kernel(library, name) for name in names})

    def shipped(
        self,
        file: str,
        kernel: str,
        dtype: str | None = None,
        op: str | None = None,
        *,
        compiled_only: bool = False,
    ) -> Kernel:
        """A shipped kernel from the library built at install, or compiled now where `cxxflags` were given."""
        name = "_".join(filter(None, (kernel, dtype, op)))
        if self._cxxflags:
            if compiled_only:
                raise CompileError(f"kernel {name} was not compiled beforehand with {' '.join(self._cxxflags)}")
            source = shipped_source(file, kernel, dtype, op)
            path = compile_source(source, [], (*self._cxxflags, f"-I{KERNEL_DIR}"), ())
        else:
            path = shipped_library(_LIBRARY_OF.get(file) or _LIBRARY_OF[dtype or ""])
        return self._kernel(self._load(path), name)

    def launch_target(self) -> LaunchTarget:
        """The launch call."""
        return LaunchTarget(_address("proxyccl_host_launch"))

    def check(self, status: int, call: str) -> None:
        """Raises KernelError unless status is 0."""
        _check(status, call)

    def engine_functions(self) -> EngineFunctions:
        """Addresses of the calls that the engine makes."""

        return EngineFunctions(
            copy=_address("proxyccl_host_copy"),
            write64=_address("proxyccl_host_write64"),
            event_record=_address("proxyccl_host_event_record"),
            event_query=_address("proxyccl_host_event_query"),
        )

    def pointer_device(self, ptr: int) -> int:
        """This one: every address is the CPU's."""
        return self.device

    def _load(self, path: Path) -> Any:
        with self._lock:
            if str(path) not in self._modules:
                out = ffi.new("void **")
                if lib.proxyccl_host_module_load(out, str(path).encode()):
                    raise CompileError(
                        f"can't load {path.name}: {ffi.string(lib.proxyccl_host_module_error()).decode()}"
                    )
                self._modules[str(path)] = out[0]
            return self._modules[str(path)]

    def _kernel(self, module: Any, name: str) -> Kernel:
        out = ffi.new("void **")
        if lib.proxyccl_host_module_function(out, module, name.encode()):
            raise ArgumentError("kernel", f"no kernel {name!r} in the module")
        table = lib.proxyccl_host_function_parameters(out[0])
        return Kernel(self, name, out[0], [(table[1 + i] >> 2, table[1 + i] & 3) for i in range(table[0])])


# Which of the libraries that setup.py builds holds the kernels of a file where it has one of its own, or else those for
# an element type; "": those that only move bytes.
_LIBRARY_OF = {
    "expert_dispatch.h": "experts",
    "expert_combine.h": "experts",
    "expert_quantize.h": "experts",
    "": "moves",
    "float32": "float",
    "float64": "float",
    "int32": "int",
    "int64": "int",
    "float16": "float16",
    "bfloat16": "float16",
}


def shipped_library(group: str) -> Path:
    """A library of host-compiled shipped kernels, built when the package was installed."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(_native.__file__).parent / f"_kernels_{group}{suffix}"
        if path.exists():
            return path
    raise CompileError(
        f"the library of shipped kernels _kernels_{group} is missing from the installation; reinstall proxyccl"
    )


def find_compiler() -> list[str]:
    """The C++ compiler's command.

    Raises:
        CompileError: there is none; the message says what to install.
    """
    explicit = os.environ.get("CXX", "").split()
    for command in [explicit] if explicit else [["g++"], ["c++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise CompileError(
        "kernels of your own need a C++ compiler on the host runtime, and none was found. "
        "Install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; Alpine: apk add g++) "
        "or name it in CXX."
    )


@functools.cache
def compiler_version(command: tuple[str, ...]) -> str:
    """The first line that the compiler says of itself."""
    out = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False, timeout=30)
    return out.stdout.split("\n", 1)[0]


def compile_source(source: str, names: list[str], options: tuple[str, ...], include_dirs: tuple[str, ...]) -> Path:
    """Compiles a source into a shared object and returns its path in the cache.

    Raises:
        CompileError: no compiler, or the source does not compile; carries the compiler's messages.
    """
    compiler = find_compiler()
    flags = ["-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{INCLUDE_DIR}"]
    flags += [f"-I{directory}" for directory in include_dirs]
    flags += options
    exports = "".join(f"PROXYCCL_EXPORT_KERNEL({name})\n" for name in names)
    text = f'#include "proxyccl/kernel.h"\n#line 1 "kernel source"\n{source}\n{exports}'

    def build(target: Path) -> None:
        command = [*compiler, *flags, "-x", "c++", "-", "-o", str(target)]
        result = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=600)
        if result.returncode:
            raise CompileError(f"{compiler[0]} could not compile the kernel source", result.stderr)

    key = text
    if include_dirs or options:  # headers that are not ours may come in, and they may change
        command = [*compiler, *flags, "-E", "-x", "c++", "-"]
        result = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=600)
        if result.returncode:
            raise CompileError(f"{compiler[0]} could not preprocess the kernel source", result.stderr)
        key = result.stdout
    return cached((key, *flags, *compiler, compiler_version(tuple(compiler))), ".so", build)


def cpu_name() -> str:
    """What /proc/cpuinfo calls the CPU."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
