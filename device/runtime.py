"""The runtime protocol: what a device and its driver must offer, and no more.

Three runtimes implement it: host (a CPU emulates the GPU), cuda and hip. It knows nothing of ranks. The proxy's
engine does not call it: it gets the addresses in `engine_functions()` and calls the driver itself.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from proxyccl.device.errors import ArgumentError

if TYPE_CHECKING:
    from proxyccl.device.in_flight import InFlight
    from proxyccl.device.kernel import Kernel, Module

StreamLike = Any
"""A `Stream`, None for the default stream, an integer handle, or an object with ``__cuda_stream__``, ``cuda_stream``
or ``ptr``.
"""


class Memory(Protocol):
    """A piece of memory that a runtime allocated or opened. Freed by `close`, which may be called twice."""

    @property
    def ptr(self) -> int:
        """Address for kernels and copies."""
        ...

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        ...

    @property
    def closed(self) -> bool:
        """Whether it was freed."""
        ...

    def close(self) -> None:
        """Frees or unmaps it."""
        ...


class PinnedMemory(Memory, Protocol):
    """Memory that the CPU and the device both reach, and that other processes of the node can map."""

    @property
    def host_ptr(self) -> int:
        """Address for the CPU; `ptr` is the device's."""
        ...

    @property
    def handle(self) -> bytes:
        """By which other processes of the node map it with `Runtime.open_pinned`."""
        ...

    def export(self, host_ptr: int, nbytes: int) -> bytes:
        """The same for a part of it."""
        ...

    @property
    def descriptor(self) -> int:
        """The file that it is."""
        ...


class Stream(Protocol):
    """A queue of device work."""

    @property
    def handle(self) -> int:
        """The driver's handle."""
        ...

    def synchronize(self) -> None:
        """Waits until all that was queued is done. Raises KernelError if any of it failed."""
        ...

    def query(self) -> bool:
        """Whether all that was queued is done."""
        ...

    def close(self) -> None:
        """Destroys the stream when its work is done."""
        ...


class Event(Protocol):
    """A point in a stream."""

    @property
    def handle(self) -> int:
        """The driver's handle."""
        ...

    def record(self, stream: StreamLike = None) -> None:
        """Marks the stream's current end."""
        ...

    def query(self) -> bool:
        """Whether the marked point was reached."""
        ...

    def synchronize(self) -> None:
        """Waits for the marked point."""
        ...

    def elapsed(self, start: Any) -> float:
        """Milliseconds from `start` to this event; both were reached."""
        ...

    def close(self) -> None:
        """Destroys the event."""
        ...


@dataclass(frozen=True)
class EngineFunctions:
    """Addresses of the driver calls that the engine makes (proxy/engine/runtime_table.h).

    `make_current` takes a `LaunchTarget.context`; 0 where there is none. Threads that serve several devices call it.
    """

    copy: int
    write64: int
    event_record: int
    event_query: int
    make_current: int = 0


@dataclass(frozen=True)
class LaunchTarget:
    """Where launches go (launch.h).

    Attributes:
        call: address of the driver's launch call, with cuLaunchKernel's signature.
        current: address of a call that stores the thread's current context; 0 where there is none.
        context: the context that this runtime's kernels belong to.
    """

    call: int
    current: int = 0
    context: int = 0


@dataclass(frozen=True)
class LaunchDefaults:
    """Shapes that suit the device.

    Attributes:
        threads: threads in a block of the shipped kernels.
        blocks: most blocks that a shipped collective uses.
        copy_blocks: most blocks that a proxied collective uses.
        bytes_per_block: a collective takes another block for each so many bytes that a rank contributes.
        exchange_bytes: what a rank takes in from all others at a time, in each of the buffers of team.h.
        packet_threads: a packet kernel takes another block for each so many packets; beyond packet_blocks its blocks
            grow, up to `threads`.
        packet_blocks: most blocks of a packet kernel.
    """

    threads: int
    blocks: int
    copy_blocks: int
    bytes_per_block: int
    exchange_bytes: int
    packet_threads: int
    packet_blocks: int


class Runtime(Protocol):
    """A device, its driver, and its kernels."""

    @property
    def name(self) -> str:
        """One of "host", "cuda" and "hip"."""
        ...

    @property
    def device(self) -> int:
        """Number of the device that this runtime object uses."""
        ...

    @property
    def in_flight(self) -> InFlight:
        """What the runtime keeps alive for queued launches."""
        ...

    @property
    def launch_defaults(self) -> LaunchDefaults:
        """Launch shapes that suit the device."""
        ...

    def activate(self, *, for_proxy: bool = False) -> None:
        """Makes the device current on the calling thread, for good; `for_proxy` on a thread that runs the engine."""
        ...

    def current(self) -> AbstractContextManager[None]:
        """Makes the device current within a block."""
        ...

    def describe(self) -> str:
        """One line on the device."""
        ...

    def allocate(self, nbytes: int) -> Memory:
        """Zeroed device memory that can be exported. Raises ResourceError when there is none left."""
        ...

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        """Zeroed pinned host memory that other processes can map."""
        ...

    def export(self, ptr: int, nbytes: int) -> bytes:
        """A handle by which other processes can open the memory at ptr.

        Raises ArgumentError where it can't be shared.
        """
        ...

    def open(self, handle: bytes) -> Memory:
        """Maps what another process (or this one) exported. Raises ArgumentError for bytes that are no valid handle."""
        ...

    def open_pinned(self, handle: bytes) -> PinnedMemory:
        """Maps another process's pinned memory, by its `handle`."""
        ...

    def adopt_pinned(self, descriptor: int, nbytes: int) -> PinnedMemory:
        """The same by its `descriptor`, which belongs to this call. Raises ArgumentError where it has fewer bytes."""
        ...

    def numa_node(self) -> int | None:
        """The NUMA node that the device is next to; None where that is not known."""
        ...

    def dmabuf(self, ptr: int, nbytes: int) -> tuple[int, int] | None:
        """A file descriptor by which another device's driver reaches device memory, and the memory's offset in it.

        The caller closes it. None where the driver has none to give, or the memory is the host's.
        """
        ...

    def can_access_peer(self, device_id: str) -> bool:
        """Whether kernels here can touch memory of the device with this `device_id`."""
        ...

    @property
    def device_id(self) -> str:
        """Names the physical device among all of the machine's, the same in every process."""
        ...

    def pointer_device(self, ptr: int) -> int | None:
        """The device whose memory an address lies in; None for memory of no device."""
        ...

    def create_stream(self, *, for_proxy: bool = False) -> Stream:
        """A stream; `for_proxy` makes one for the engine's copies, which need not take launches."""
        ...

    def create_event(self) -> Event:
        """An event."""
        ...

    def stream_handle(self, stream: StreamLike) -> int:
        """The driver's handle of a stream of any kind. Raises ArgumentError for what is none."""
        ...

    def is_capturing(self, stream: int) -> bool:
        """Whether what is queued on the stream with this handle goes into a graph."""
        ...

    def order_streams(self, first: int, then: int) -> None:
        """Makes later work of stream handle `then` wait for what is queued on `first`; both must exist."""
        ...

    def copy(self, dst: int, src: int, nbytes: int, stream: StreamLike = None) -> None:
        """Copies between any two addresses; returns when it is done if no stream is given."""
        ...

    def fill(self, dst: int, value: int, nbytes: int, stream: StreamLike = None) -> None:
        """Sets bytes; returns when it is done if no stream is given."""
        ...

    def synchronize(self) -> None:
        """Waits for all work of the device's default stream and the streams made here."""
        ...

    def compile(self, source: str, *, options: tuple[str, ...] = (), include_dirs: tuple[str, ...] = ()) -> Module:
        """Compiles a source (cached on disk). Raises CompileError."""
        ...

    def shipped(
        self,
        file: str,
        kernel: str,
        dtype: str | None = None,
        op: str | None = None,
        *,
        compiled_only: bool = False,
    ) -> Kernel:
        """A kernel that ships, for an element type where it has one, and an operation where it is a reduction. With
        `compiled_only` it raises CompileError instead of compiling it.
        """
        ...

    def launch_target(self) -> LaunchTarget:
        """Where launches go."""
        ...

    def check(self, status: int, call: str) -> None:
        """Raises an exception that names the call and the driver's message unless status is 0."""
        ...

    def engine_functions(self) -> EngineFunctions:
        """The driver calls for the engine."""
        ...


def foreign_stream_handle(stream: StreamLike) -> int:
    """The handle of another library's stream.

    Raises:
        ArgumentError: the object is no stream.
    """
    if isinstance(stream, int):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version_and_handle = protocol() if callable(protocol) else protocol
        return int(version_and_handle[1])
    for attribute in ("handle", "cuda_stream", "ptr"):
        value = getattr(stream, attribute, None)
        if isinstance(value, int):
            return value
    raise ArgumentError("stream", f"{type(stream).__name__} is no stream")
