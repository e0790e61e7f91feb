"""The runtime of a GPU, on any vendor's `Driver`.

What differs between vendors is in cuda.py and hip.py. Any thread may call any method. Each method makes the device
current and afterwards restores the thread's previous device.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from proxyccl.device._native import ffi
from proxyccl.device.arguments.texts import require_text, require_texts
from proxyccl.device.base_runtime import (
    Event,
    LaunchDefaults,
    StreamEvents,
    StreamLike,
)
from proxyccl.device.build.ahead_of_time import Shipped
from proxyccl.device.build.compile_cache import (
    CUDA_NAMES_DIR,
    INCLUDE_DIR,
    RTC_NAMES_DIR,
    compiled_image,
    image_is_there,
    shipped_options,
    shipped_source,
)
from proxyccl.device.build.kernel_names import (
    NO_KERNEL,
    in_plain_text,
    kernel_names,
    kernels_of_image,
    symbols_in_namespace,
    text_with_exports,
)
from proxyccl.device.driver import Driver
from proxyccl.device.errors import ArgumentError, CompileError, DriverError
from proxyccl.device.gpu import stream_order
from proxyccl.device.gpu.context import DeviceContext
from proxyccl.device.gpu.memory import GpuMemoryRuntime
from proxyccl.device.gpu.streams import GpuEvent, GpuStream, handle_of, stream_handle, synchronize
from proxyccl.device.gpu.unused_memory import UnusedMemory
from proxyccl.device.kernel import Kernel, Module, Parameter, parameters_of
from proxyccl.device.process import forks
from proxyccl.device.process.interrupts import wait_elsewhere
from proxyccl.device.stream_operations import StreamOperations, WriteValue

_logger = logging.getLogger("proxyccl")
_NAMES = (
    f"-I{CUDA_NAMES_DIR}",
    f"-I{RTC_NAMES_DIR}",
)  # last, so that headers of a CUDA toolkit in the program's own directories are preferred


class _LoadedModule:
    """A loaded image, which is unloaded when neither the runtime nor a kernel refers to the module.

    Unloading is deferred until the runtime next waits for the device, because the driver's call would wait too.
    """

    def __init__(self, context: DeviceContext, image: bytes, unused: UnusedMemory) -> None:
        self.handle: int = context.call(context.driver.load_module, image)  # the driver's handle
        self.symbols = symbols_in_namespace(image)
        release = functools.partial(context.call, context.driver.release, "ModuleUnload", self.handle)
        self._finalizer = forks.finalizer(self, unused.append, release)


class GpuRuntime(GpuMemoryRuntime):
    """One GPU of this process."""

    def __init__(self, driver: Driver, device: int = 0) -> None:
        super().__init__(driver, device)
        self.thread_stream = driver.thread_stream
        self.legacy_stream = driver.legacy_stream
        self.loads_lazily, self.queue_limit = driver.loads_lazily, driver.queue_limit
        self.pci_address, self.orders_rdma_writes = self.info.pci_address, self.info.orders_rdma_writes
        bundles = self.calls.copy_many != 0
        processors = self.info.multiprocessors  # the blocks wait for each other, so all must run at once
        small = driver.runtime == "cuda"  # see PROXYCCL_SMALL_BLOCKS in instance.h
        self.launch_defaults = LaunchDefaults(
            threads=512,
            blocks=min(132, processors),
            efficient_blocks=min(64, processors),
            copy_blocks=min(32, processors),
            small_threads=32 if small else 512,
            small_blocks=2 * processors if small else min(32, processors),  # a block waits only for blocks that run
            small_bytes=2 * 1024 if small else 16 * 1024,
            awaits_data=True,
            bytes_per_block=16 * 1024,
            data_bytes=8 * 1024 * 1024,
            result_bytes=4 * 1024 * 1024,
            flow_bytes=16 * 1024 * 1024,
            meeting_bytes=1024 * 1024,
            offered_bytes=4 * 1024 * 1024,
            proxied_kernel_bytes=0,
            pinned_kernel_bytes=256 * 1024,
            packet_threads=128,
            packet_blocks=min(64, processors),
            pair_packet_blocks=min(128, processors),
            packet_move_bytes=768 * 1024,
            line_bytes=48 * 1024 if driver.runtime == "cuda" else 0,
            line_blocks=min(132, processors),
            line_move_bytes=4 * 1024 * 1024,
            row_blocks=4 if driver.runtime == "cuda" and int(self.info.architecture[3:].rstrip("a")) >= 90 else 1,
            pinned_bytes=0 if bundles else 32 * 1024,
            staged_pinned_bytes=32 * 1024,
            own_box_bytes=768 * 1024 if bundles else 0,
            one_crossing_bytes=8 * 1024 * 1024,
        )
        self._lock = threading.Lock()
        self._warm: set[str] = set()  # devices, including this one, for which `warm_up` is done
        self._modules: dict[int, dict[str, _LoadedModule]] = {}  # by control block address
        self._shipped: dict[Shipped, Kernel] = {}
        self._copies = GpuStream(self.context)
        self._order = stream_order.of(driver, self.device)

    def __repr__(self) -> str:
        return f"GpuRuntime({self.name}, device={self.device})"

    def activate(self, *, for_proxy: bool = False) -> None:
        self.driver.make_current(self.context.handle)
        if for_proxy:
            # Without this call, the engine's queries of events would break other threads' captures.
            self.driver.relax_capture()

    @property
    def device_name(self) -> str:
        return self.info.name

    def describe(self) -> str:
        memory = self.info.memory_bytes / 2**30
        return (
            f"{self.info.name}, {self.info.architecture}, {self.info.multiprocessors} multiprocessors, "
            f"{memory:.0f} GiB, {self.driver.versions()}"
        )

    def warm_up(self, peers: Collection[str]) -> None:
        """Enables access to peers' memory, and makes a copy and a signal, so that the driver sets them up. Skips
        devices for which an earlier call has done this."""
        cold = {self.device_id, *peers} - self._warm
        self._warm |= cold
        for peer in range(self.driver.device_count()) if cold else ():
            other = peer != self.device and self.driver.device(peer).device_id in cold
            if other and self.driver.can_access_peer(self.device, peer):
                self.context.call(self.driver.enable_peer_access, self.driver.context(peer))
        if self.device_id in cold:
            stream, event, memory = self.create_stream(for_proxy=True), self.create_event(), self.allocate_pinned(16)
            self.copy(memory.ptr + 8, memory.ptr, 8, stream)
            StreamOperations(self, [WriteValue(memory.ptr, 1)])(stream)
            event.record(stream)
            event.synchronize()
            for each in (stream, event, memory):
                each.close()

    def numa_node(self) -> int | None:
        """Returns the device's NUMA node according to sysfs, or None."""
        path = Path("/sys/bus/pci/devices") / self.info.pci_address / "numa_node"
        number = int(path.read_text()) if path.exists() else -1
        return number if number >= 0 else None

    def _ordinal(self, device_id: str) -> int | None:
        every = range(self.driver.device_count())
        return next((each for each in every if self.driver.device(each).device_id == device_id), None)

    def can_access_peer(self, device_id: str) -> bool:
        """Whether this device's kernels can access the other device's memory.

        Returns True if this process does not see the other device, because drivers can map its memory nevertheless.
        """
        if not device_id.startswith(f"{self.name}:"):
            return False
        peer = self._ordinal(device_id)
        return peer in (None, self.device) or self.driver.can_access_peer(self.device, peer)

    def adds_at_peer(self, device_id: str) -> bool:
        peer = self._ordinal(device_id)
        return peer is not None and (peer == self.device or self.driver.adds_at_peer(self.device, peer))

    def copy(self, dst: int, src: int, nbytes: int, stream: StreamLike = None) -> None:
        """Copies between any two addresses. Without a stream, returns when the copy is done, and the copy does not wait
        for earlier work.
        """
        self._queue(functools.partial(self.driver.copy, dst, src, nbytes), stream)

    def fill(self, dst: int, value: int, nbytes: int, stream: StreamLike = None) -> None:
        """Sets bytes. Without a stream, returns when the bytes are set, and does not wait for earlier work."""
        self._queue(functools.partial(self.driver.call, "MemsetD8Async", dst, value, nbytes), stream)

    def _queue(self, call: Callable[[int], None], stream: StreamLike) -> None:
        with self.current():
            call(self._copies.handle if stream is None else self.stream_handle(stream))
            if stream is None:
                self.driver.call("StreamSynchronize", self._copies.handle)

    # -- streams ---

    def create_stream(self, *, for_proxy: bool = False, in_caller: bool = False) -> GpuStream:
        """Creates a stream. A proxy's stream has priority over other streams."""
        return GpuStream(self.context, first=for_proxy)

    def create_event(self, *, times: bool = True) -> GpuEvent:
        return GpuEvent(self.context, times=times)

    def stream_handle(self, stream: StreamLike) -> int:
        return stream_handle(self.context, stream)

    def capture_of(self, stream: int) -> int:
        return self._order.ask_capture(stream)

    def order_streams(self, first: int, then: int) -> None:
        # A captured stream can't be ordered with a stream that is not captured, so `alike` skips such a pair.
        self._order.follow(first, then, alike=True)

    def stream_events(self) -> StreamEvents:
        """Returns the address of this device's stream order, and functions that take and return its events."""
        address, idle, take, _ = self._order.in_c()
        return StreamEvents(address, take, idle.append)

    def wait_event(self, stream: int, event: Event) -> None:
        with self.current():
            self.driver.call("StreamWaitEvent", stream, event.handle, 0)

    def synchronize(self) -> None:
        """Waits for all work of the device's context, including the work of other libraries in this process."""
        with self.in_flight.ending():
            wait_elsewhere(functools.partial(self.context.call, self.driver.call, "CtxSynchronize"))
        self.unused.free()

    def synchronize_stream(self, stream: StreamLike) -> None:
        synchronize(self.context, handle_of(self.driver, stream))

    # -- kernels ---

    def compile(
        self, source: str, *, options: tuple[str, ...] = (), include_dirs: tuple[str, ...] = (), control: int = 0
    ) -> Module:
        require_text(source, "source")
        options, include_dirs = require_texts(options, "options"), require_texts(include_dirs, "include_dirs")
        compiler, extra = self.driver.compiler, (*(f"-I{directory}" for directory in include_dirs), *options)
        full = (*compiler.options(self.info.architecture), f"-I{INCLUDE_DIR}", *extra, *_NAMES)

        def image(text: str) -> bytes:
            if extra:  # not cached, because changes of other headers can't be detected
                return compiler.compile(text, full)
            return compiled_image(compiler, text, full)

        plain = in_plain_text(source, options)
        names = kernel_names(source) if plain else kernels_of_image(image(text_with_exports(source, ())))
        if not names:
            raise ArgumentError("source", NO_KERNEL)
        text = text_with_exports(source, names)
        module = self._load(text, full, lambda: image(text), control)
        return Module({name: self._kernel(module, name) for name in names})

    def _load_shipped(self, name: str, kernel: Shipped, compiled_only: bool) -> Kernel:
        source, compiler = shipped_source(*kernel), self.driver.compiler
        options = shipped_options(compiler, self.info.architecture)
        if compiled_only and not image_is_there(compiler, source, options):
            raise CompileError(
                f"kernel {name} was not compiled for {self.info.architecture} beforehand; run: proxyccl compile"
            )
        module = self._load(source, options, lambda: compiled_image(compiler, source, options))
        return self._kernel(module, name)

    def load_kernel(self, image: bytes, name: str, parameters: Sequence[tuple[int, int]], shared: int) -> Kernel:
        """Waits until no work of this runtime runs, and loads a kernel from an image of another compiler.

        Args:
            image: an image for this device's architecture.
            name: the kernel's name.
            parameters: size and kind of each parameter (kernel.py).
            shared: bytes of dynamic shared memory per block.
        """
        self.in_flight.wait()
        module = _LoadedModule(self.context, image, self.unused)
        with self.current():
            function = self.driver.module_function(module.handle, name)
            self.driver.allow_shared_memory(function, shared)
        table = [Parameter(*each) for each in parameters]
        return Kernel(self, name, ffi.cast("void *", function), table, module)

    def release_control(self, control: int) -> None:
        """Unloads the modules of a control block, except those whose kernels are still referenced."""
        with self._lock:
            modules = self._modules.pop(control, {})
        with contextlib.suppress(DriverError):  # if the device failed, no kernel reads the control block
            for module in modules.values():
                self._set_control(module, 0)

    def _load(
        self, source: str, options: tuple[str, ...], image: Callable[[], bytes], control: int = 0
    ) -> _LoadedModule:
        key = "\0".join((source, *options))
        with self._lock:
            modules = self._modules.setdefault(control, {})
            if key not in modules:
                made = image()
                self.in_flight.wait()
                module = _LoadedModule(self.context, made, self.unused)
                if control:
                    self._set_control(module, control)
                modules[key] = module
            return modules[key]

    def _set_control(self, module: _LoadedModule, control: int) -> None:
        with self.current():
            address, nbytes = self.driver.module_global(module.handle, "proxyccl_default_control")
        word = ffi.new("uint64_t *", control)
        self.copy(address, int(ffi.cast("uintptr_t", word)), nbytes)

    def _kernel(self, module: _LoadedModule, name: str) -> Kernel:
        with self.current():
            function = self.driver.module_function(module.handle, module.symbols.get(name, name))
            address, nbytes = self.driver.module_global(module.handle, f"proxyccl_parameters_{name}")
        table = ffi.new("uint32_t[]", nbytes // 4)
        self.copy(int(ffi.cast("uintptr_t", table)), address, nbytes)
        return Kernel(self, name, ffi.cast("void *", function), parameters_of(table), module)

    def check(self, status: int, call: str) -> None:
        if status:
            raise DriverError(call, status, self.driver.error_text(status))
