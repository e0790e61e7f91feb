"""The runtime protocol without kernels: memory, streams, events, copies, and the addresses of the driver's calls.

Arrays, launches and `InFlight` need only this part of a runtime; `proxyccl.device.runtime.Runtime` adds kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any, Protocol

from msgspec import Struct

from proxyccl.device.arguments.integers import find_integer
from proxyccl.device.errors import ArgumentError

StreamLike = Any
"""A `Stream`, None for the default stream, an integer handle, or an object with ``__cuda_stream__``, ``cuda_stream``
or ``ptr``.
"""


class Memory(Protocol):
    """A piece of memory that a runtime allocated or opened. Freed by `close`, which may be called twice."""

    @property
    def ptr(self) -> int:
        """Address for kernels and copies."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    @property
    def closed(self) -> bool:
        """Whether the memory was freed."""

    def close(self) -> None:
        """Frees or unmaps the memory."""


class PinnedMemory(Memory, Protocol):
    """Memory that the CPU and the device both reach, and that other processes of the node can map."""

    @property
    def host_ptr(self) -> int:
        """Address for the CPU; `ptr` is the device's."""

    @property
    def handle(self) -> bytes:
        """The handle by which other processes of the node map this memory (`Runtime.open_pinned`)."""

    def export(self, host_ptr: int, nbytes: int) -> bytes:
        """Returns a handle of `nbytes` of this memory, from `host_ptr` on."""

    @property
    def descriptor(self) -> int:
        """The file descriptor of the memory."""


class Stream(Protocol):
    """A queue of device work."""

    @property
    def handle(self) -> int:
        """The driver's handle."""

    def synchronize(self) -> None:
        """Waits until all queued work is done. Raises KernelError if any of it failed."""

    def query(self) -> bool:
        """Whether all queued work is done."""

    def close(self) -> None:
        """Destroys the stream when its work is done. The driver may then reuse the handle."""


class Event(Protocol):
    """A point in a stream."""

    @property
    def handle(self) -> int:
        """The driver's handle."""

    def record(self, stream: StreamLike = None) -> None:
        """Marks the stream's current end."""

    def query(self) -> bool:
        """Whether the stream has reached the marked point."""

    def synchronize(self) -> None:
        """Waits for the marked point."""

    def elapsed(self, start: Any) -> float:
        """Returns the milliseconds from `start` to this event. The streams must have reached both events."""

    def close(self) -> None:
        """Destroys the event."""


class DriverCalls(Struct, frozen=True):
    """Addresses of the driver's calls, for callers in C: the proxy's engine, launches and operations of streams.

    The address is 0 if the driver lacks a call or does not need it. The host runtime has neither contexts nor captures.

    Attributes:
        copy: copies between addresses of the device.
        copy_many: makes several copies in one call.
        set: sets bytes.
        write64, write32: make a stream write a word.
        wait64: makes a stream wait for a word; needed if `batch` is 0.
        batch: queues several operations, each a write of a word or a wait for a word, in one call.
        event_record: records an event on a stream.
        event_query: tells whether an event was reached.
        wait_event: makes a stream wait for an event.
        launch: launches a kernel, with cuLaunchKernel's signature.
        synchronize: waits for a stream, where a call without a stream returns only when its work is done.
        current: stores the thread's current context.
        make_current: makes a context current. Threads that serve several devices call it.
        context: the context that this runtime's kernels, streams and memory belong to.
        is_capturing: whether a stream is being captured.
        exchange_capture_mode: exchanges the thread's capture mode.
        relaxed: the capture mode that allows allocations and event queries.
        allocate: allocates device memory; 0 if memory needs flags.
        allocate_with_flags: allocates with `flags`; needed if `allocate` is 0.
        flags: the flags for `allocate_with_flags`.
        free: frees memory, after it has waited for the device.
        pointer_attribute: returns an attribute of an address.
        buffer_id: CU_POINTER_ATTRIBUTE_BUFFER_ID or its counterpart, which gives the number of the address's
            allocation.
        add_helper, remove_helper: register helpers of waiting kernels (host/runtime.h); 0 unless kernels run on the
            CPU.
    """

    copy: int = 0
    copy_many: int = 0
    set: int = 0
    write64: int = 0
    write32: int = 0
    wait64: int = 0
    batch: int = 0
    event_record: int = 0
    event_query: int = 0
    wait_event: int = 0
    launch: int = 0
    synchronize: int = 0
    current: int = 0
    make_current: int = 0
    context: int = 0
    is_capturing: int = 0
    exchange_capture_mode: int = 0
    relaxed: int = 0
    allocate: int = 0
    allocate_with_flags: int = 0
    flags: int = 0
    free: int = 0
    pointer_attribute: int = 0
    buffer_id: int = 0
    add_helper: int = 0
    remove_helper: int = 0


class StreamEvents(Struct, frozen=True):
    """Events for a caller in C that orders a device's streams itself.

    Attributes:
        order: address of a ProxycclStreamOrder (stream_order.h).
        take: takes an unused event and returns the event's handle.
        give: puts an event back that is no longer used.
    """

    order: int
    take: Callable[[], int]
    give: Callable[[int], object]


Allocations = tuple[tuple[int, int], ...]
"""The allocations that contain a range, in order: for each allocation an address in the range, and the driver's
number of the allocation.
"""


class LaunchDefaults(Struct, frozen=True):
    """Launch shapes that suit the device.

    Attributes:
        threads: threads in a block of the shipped kernels.
        blocks: most blocks that a shipped collective uses.
        efficient_blocks: the limit in place of `blocks` under the policy `efficiency`, which uses fewer multiprocessors
            and takes a little longer.
        copy_blocks: most blocks that a proxied collective uses.
        small_threads: threads in a block of the kernel of a reduction by proxy (`PROXYCCL_SMALL_KERNEL`).
        small_blocks: most blocks of that kernel.
        small_bytes: least bytes of each rank's data that a block of that kernel reduces at a time.
        awaits_data: whether the kernel of a short reduction by proxy is launched as soon as all ranks have joined, and
            itself waits for their data.
        bytes_per_block: a collective takes one block for each multiple of this number of bytes that a rank contributes.
        exchange_bytes: the bytes that a rank receives from all others at a time, in each buffer for rounds (team.h).
        pipeline_bytes: the bytes in each buffer for pipelines.
        meeting_bytes: least bytes of a share for which ranks exchange the addresses of their outputs before sending.
        offered_bytes: most bytes of an in-place all_reduce whose ranks load each other's inputs directly.
        proxied_kernel_bytes: longest share that a kernel moves to peers of other nodes, through the proxy, by default.
            A schedule moves a longer share: its ranks synchronize first, and nothing is staged. 0: schedules move all.
        pinned_kernel_bytes: most bytes that a kernel sends to peers of other nodes through pinned memory, by default,
            where transports stage the data of all remote peers. 0: no kernel does so.
        packet_threads: a packet kernel takes one block for each multiple of this number of packets. If that would be
            more than packet_blocks blocks, the blocks get more threads instead, up to `threads`.
        packet_blocks: most blocks of a packet kernel.
        pair_packet_blocks: most blocks of a packet kernel of two ranks, each of which sends to one peer only.
        packet_move_bytes: most bytes that a rank sends to all others in packets, in an all_gather or an all_to_all. 0:
            none are sent in packets.
        line_bytes: least bytes from one rank to another that are sent as lines (lines.h) instead of packets, if all
            links carry whole lines. 0: lines are not used.
        line_blocks: most blocks of a kernel whose packets are lines; under the policy `efficiency` at most
            efficient_blocks.
        line_move_bytes: the limit in place of packet_move_bytes where lines may be used.
        row_blocks: blocks of the clusters that share a row in a kernel whose packets are lines; 1 without clusters.
        pinned_bytes: most bytes that a schedule moves through pinned memory, because a copy engine takes longer to
            start than such a copy takes. 0: none, for example if one call issues the copies to all peers.
        staged_pinned_bytes: most bytes for each peer if transports stage the data of all remote peers, because a
            daemon's short copies wait for the kernels of its clients.
        own_box_bytes: most bytes for each peer for which a schedule's stream copies the rank's own data through a
            peer's memory. Copy engines make such copies; the driver makes a local copy with a kernel, which waits for a
            multiprocessor.
            0: none.
        one_crossing_bytes: a reduction by proxy sends everything to every rank, so that the data crosses a link once,
            if a rank receives at most this many bytes from all others. For more bytes it is faster if each rank reduces
            one share and sends the result to all, although the data then crosses links twice.
    """

    threads: int
    blocks: int
    efficient_blocks: int
    copy_blocks: int
    small_threads: int
    small_blocks: int
    small_bytes: int
    awaits_data: bool
    bytes_per_block: int
    exchange_bytes: int
    pipeline_bytes: int
    meeting_bytes: int
    offered_bytes: int
    proxied_kernel_bytes: int
    pinned_kernel_bytes: int
    packet_threads: int
    packet_blocks: int
    pair_packet_blocks: int
    packet_move_bytes: int
    line_bytes: int
    line_blocks: int
    line_move_bytes: int
    row_blocks: int
    pinned_bytes: int
    staged_pinned_bytes: int
    own_box_bytes: int
    one_crossing_bytes: int


class BaseRuntime(Protocol):
    """A device and its driver. Methods with a body are those of a device without a driver.

    Attributes:
        name: one of "host", "cuda" and "hip".
        device: number of the device that this runtime object uses.
        device_id: identifies the physical device on this machine, the same in every process.
        launch_defaults: launch shapes that suit the device.
        thread_stream: the handle that means each thread's own default stream; None if there is none.
        legacy_stream: the handle of the stream whose work runs after all work on the threads' default streams; None if
            threads have no default streams.
        calls: the driver's calls, for callers in C.
    """

    name: str
    device: int
    device_id: str
    launch_defaults: LaunchDefaults
    thread_stream: int | None
    legacy_stream: int | None
    calls: DriverCalls

    def activate(self, *, for_proxy: bool = False) -> None:
        """Makes the device current on the calling thread; `for_proxy` if the thread runs the engine."""
        return

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Makes the device current within a `with` block."""
        return contextlib.nullcontext()

    @property
    def device_name(self) -> str:
        """The vendor's name for the device's model."""

    def describe(self) -> str:
        """Returns one line of text on the device."""

    def allocate(self, nbytes: int) -> Memory:
        """Allocates zeroed device memory that can be exported. Raises ResourceError if too little is left."""

    def share_across_namespaces(self) -> None:
        """Makes later calls of `allocate` return memory that processes of other PID namespaces can also map.

        Raises RuntimeUnavailableError if the driver does not support such memory.
        """
        return

    def expect_reuse(self, ptr: int, nbytes: int) -> None:
        """Hints that a range of memory will be used repeatedly. The range may be any memory; contents do not change."""
        return

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        """Allocates zeroed pinned host memory that other processes can map."""

    def pin(self, ptr: int, nbytes: int) -> Memory | None:
        """Pins host memory that other code allocated, until the result is closed, so that copies to and from the device
        are not staged. Returns None if there is nothing to pin.

        Raises ResourceError if the driver refuses.
        """
        return None

    def export(self, ptr: int, nbytes: int) -> bytes:
        """Returns a handle by which other processes can open the memory at `ptr`, which must not be freed during the
        call.

        Raises ArgumentError if the memory can't be shared.
        """

    def end_export(self, handle: bytes) -> None:
        """Ends an `export`, after which other processes can't rely on the handle. Until then some drivers keep the
        memory allocated even if its owner frees it.
        """
        return

    def open(self, handle: bytes) -> Memory:
        """Maps memory that this or another process exported. Raises ArgumentError if the handle is invalid."""

    def open_pinned(self, handle: bytes) -> PinnedMemory:
        """Maps another process's pinned memory, by its `handle`."""

    def adopt_pinned(self, descriptor: int, nbytes: int) -> PinnedMemory:
        """Maps another process's pinned memory, by its `descriptor`, which the returned memory will close.

        Raises ArgumentError if the file has fewer bytes.
        """

    def keep_pins(self) -> Callable[[], None]:
        """Keeps memory of other devices pinned, if unpinning waits for the kernels of all devices of the process.

        Returns a function to call when those kernels have ended, after which the memory may be unpinned.
        """
        return lambda: None

    def warm_up(self, peers: Collection[str]) -> None:
        """Prepares copies to peers: makes the driver do now what it would otherwise do at the first copy to each peer.

        Args:
            peers: the peers' device_ids. Devices that this process does not see, or can't reach, are skipped.
        """
        return

    def numa_node(self) -> int | None:
        """The NUMA node nearest to the device; None if unknown."""
        return None

    @property
    def loads_lazily(self) -> bool:
        """Whether the driver may load a kernel only at the kernel's first launch, which blocks all other driver
        calls of the process.
        """
        return False

    @property
    def queue_limit(self) -> str | None:
        """The setting by which streams share fewer of the device's queues than usual, such as
        ``CUDA_DEVICE_MAX_CONNECTIONS=1``; None if there is none.
        """
        return None

    @property
    def orders_rdma_writes(self) -> bool:
        """Whether a kernel that sees a word written by RDMA, in any memory, also sees earlier RDMA writes to the
        device."""

    def dmabuf(self, ptr: int, nbytes: int) -> tuple[int, int] | None:
        """Returns the descriptor of a DMA-BUF that contains device memory, for another device's driver, and the
        memory's offset in it.

        The caller closes the descriptor. Returns None if the driver does not offer one, or for host memory.
        """
        return None

    def can_access_peer(self, device_id: str) -> bool:
        """Whether this device's kernels can access memory of the device with this `device_id`."""

    def adds_at_peer(self, device_id: str) -> bool:
        """Whether this device's kernels can add atomically to reachable memory of the device with this id.

        Returns False if the driver does not report such atomics: over PCIe, or if this process does not see the device.
        """

    def pointer_device(self, ptr: int) -> int | None:
        """Returns the device that owns an address; None if no device does."""

    def memory_left(self) -> tuple[int, int]:
        """Returns the device's free memory and total memory, in bytes."""

    def whole_allocation(self, ptr: int, nbytes: int) -> tuple[int, int] | None:
        """Returns address and size of the allocation that contains a range, or of several adjacent allocations that
        together contain it; None if the driver knows no such allocation."""

    def allocations(self, ptr: int, nbytes: int) -> Allocations:
        """Returns the allocations that contain a range; an empty tuple if the driver knows none.

        No other allocation of this process ever gets the same number, not even one at the same address.
        """

    def free_later(self, ptr: int) -> None:
        """Frees memory that `calls.allocate` allocated, at the next wait for the device."""

    def create_stream(self, *, for_proxy: bool = False, in_caller: bool = False) -> Stream:
        """Creates a stream.

        Args:
            for_proxy: the stream is for the engine's copies, and need not take launches.
            in_caller: each call that queues work returns when the work is done. Only the host runtime has such streams;
                GPUs ignore the option.
        """

    def create_event(self, *, times: bool = True) -> Event:
        """Creates an event. Without `times` the event does not support `elapsed`, and costs a little less."""

    def stream_handle(self, stream: StreamLike) -> int:
        """Returns the driver's handle of the stream given to a call, which may be of any kind in `StreamLike`.

        Raises:
            ArgumentError: `stream` is not a stream; or the calling thread captures torch's or cupy's current stream
                into a graph, and the graph would miss the call.
        """

    def is_capturing(self, stream: int) -> bool:
        """Whether work queued on the stream with this handle goes into a graph."""
        return False

    def order_streams(self, first: int, then: int) -> None:
        """Makes later work of stream handle `then` wait for work queued on `first`; both must exist."""

    def stream_events(self) -> StreamEvents:
        """Returns the `StreamEvents` with which callers in C order this device's streams."""

    def wait_event(self, stream: int, event: Event) -> None:
        """Makes later work of the stream with this handle wait for the event's last record."""

    def copy(self, dst: int, src: int, nbytes: int, stream: StreamLike = None) -> None:
        """Copies between any two addresses. Without a stream, returns when the copy is done."""

    def fill(self, dst: int, value: int, nbytes: int, stream: StreamLike = None) -> None:
        """Sets bytes to a value. Without a stream, returns when the bytes are set."""

    def synchronize(self) -> None:
        """Waits for all work of the device's default stream and of the streams that `create_stream` made."""

    def synchronize_stream(self, stream: StreamLike) -> None:
        """Waits for all work queued on a stream. Raises KernelError if any of it failed."""

    def check(self, status: int, call: str) -> None:
        """Raises an exception that names the call and the driver's message unless status is 0."""


def foreign_stream_handle(stream: StreamLike) -> int:
    """Returns the handle of another library's stream.

    Raises:
        ArgumentError: the object is not a stream.
    """
    handle = find_integer(stream)
    if handle is not None and 0 <= handle < 1 << 64:
        return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version_and_handle = protocol() if callable(protocol) else protocol
        return int(version_and_handle[1])
    for attribute in ("handle", "cuda_stream", "ptr"):
        value = getattr(stream, attribute, None)
        if isinstance(value, int):
            return value
    raise ArgumentError(
        "stream",
        f"expected a stream, a stream's handle as an integer, or None, not "
        f"{type(stream).__name__ if handle is None else handle}",
    )
