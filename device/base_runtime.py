"""The base protocol of runtimes: memory, streams, events and copies.

`proxyccl.device.runtime.Runtime` adds kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from proxyccl.device.arguments.integers import find_integer
from proxyccl.device.errors import ArgumentError

StreamLike = Any
"""A `Stream`, None for the default stream, an integer handle, or an object with ``__cuda_stream__``, ``cuda_stream``
or ``ptr``.
"""


class Memory(Protocol):
    """A piece of memory that a runtime allocated or opened. `close` frees the memory; a second call does nothing."""

    ptr: int  # address for kernels and copies
    nbytes: int

    @property
    def closed(self) -> bool:
        """Whether the memory was freed."""

    def close(self) -> None:
        """Frees or unmaps the memory."""


class PinnedMemory(Memory, Protocol):
    """Memory that the CPU and the device can access, and that other processes of the node can map."""

    host_ptr: int  # address for the CPU; `ptr` is the address for the device
    descriptor: int  # the memory's file descriptor

    @property
    def handle(self) -> bytes:
        """The handle by which other processes of the node map this memory (`Runtime.open_pinned`)."""

    def export(self, host_ptr: int, nbytes: int) -> bytes:
        """Returns a handle of the `nbytes` bytes at `host_ptr`, an address within this memory."""


class Stream(Protocol):
    """A queue of device work."""

    @property
    def handle(self) -> int:
        """The driver's handle."""

    def synchronize(self) -> None:
        """Waits until all queued work is done. Raises KernelError if queued work failed."""

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
        """Makes the event complete when the work queued so far on the stream is done."""

    def query(self) -> bool:
        """Whether the work before the event is done."""

    def synchronize(self) -> None:
        """Waits until the work before the event is done."""

    def elapsed(self, start: Any) -> float:
        """Returns the milliseconds from event `start` to this event. `start` and this event must be complete."""

    def close(self) -> None:
        """Destroys the event."""


class DriverCalls(Struct, frozen=True):
    """Addresses of the driver's calls, for callers in C: the proxy's engine, launches and operations of streams.

    An address is 0 if the driver lacks the call, or if callers need not make it.
    """

    copy: int = 0  # copies between addresses of the device
    copy_many: int = 0  # makes several copies in one call
    set: int = 0  # sets bytes
    write64: int = 0  # makes a stream write a word of 8 bytes
    write32: int = 0  # makes a stream write a word of 4 bytes
    wait64: int = 0  # makes a stream wait for a word; not 0 if `batch` is 0
    batch: int = 0  # queues several operations, each a write of a word or a wait for a word, in one call
    event_record: int = 0  # records an event on a stream
    event_query: int = 0  # tells whether an event was reached
    wait_event: int = 0  # makes a stream wait for an event
    launch: int = 0  # launches a kernel, with cuLaunchKernel's signature
    synchronize: int = 0  # waits for a stream; 0 if a call without a stream may return before its work is done
    current: int = 0  # stores the calling thread's current context
    make_current: int = 0  # makes a context current on the calling thread
    context: int = 0  # the context that this runtime's kernels, streams and memory belong to
    capture_info: int = 0  # whether a stream is being captured, and the number of the capture
    exchange_capture_mode: int = 0  # exchanges the thread's capture mode
    relaxed: int = 0  # the capture mode that allows allocations and event queries
    allocate: int = 0  # allocates device memory without flags; 0 if the runtime's allocations need flags
    allocate_with_flags: int = 0  # allocates device memory with `flags`; 0 if `allocate` is not 0
    flags: int = 0  # the flags for `allocate_with_flags`
    free: int = 0  # frees memory, after it has waited for the device
    pointer_attribute: int = 0  # returns an attribute of an address
    # CU_POINTER_ATTRIBUTE_BUFFER_ID or its counterpart, which gives the number of the address's allocation.
    buffer_id: int = 0
    add_helper: int = 0  # registers a function that waiting kernels call (host/runtime.h); 0 on GPUs
    remove_helper: int = 0  # unregisters such a function


class StreamEvents(Struct, frozen=True):
    """The driver's calls and unused events with which C code orders a device's streams."""

    order: int  # address of a ProxycclStreamOrder (stream_order.h)
    take: Callable[[], int]  # takes an unused event and returns the event's handle
    give: Callable[[int], object]  # takes back an event from `take`, given its handle


class Allocation(NamedTuple):
    """An allocation that contains a part of a range."""

    ptr: int  # an address in the allocation and in the range
    # The allocation's number. In a process no two allocations ever have the same number.
    number: int
    # A C pointer to the word in which `Blocks` keep the number of memory that can be suspended; None for other memory.
    word: Any = None


Allocations = tuple[Allocation, ...]
"""The allocations that contain a range, in order."""


class LaunchDefaults(Struct, frozen=True):
    """Default sizes of launches, and thresholds between kernels and schedules, for a device."""

    threads: int  # threads per block of the shipped kernels
    blocks: int  # maximum number of blocks that a shipped collective uses
    # Replaces `blocks` under the policy `efficiency`, which trades some speed for fewer multiprocessors.
    efficient_blocks: int
    copy_blocks: int  # maximum number of blocks that a proxied collective uses
    # Threads per block of a `PROXYCCL_SMALL_KERNEL`, the kernel of a reduction whose data the proxy moves.
    small_threads: int
    small_blocks: int  # maximum number of blocks of a `PROXYCCL_SMALL_KERNEL`
    small_bytes: int  # least bytes of each rank's data per block of a `PROXYCCL_SMALL_KERNEL`
    # Whether the kernel of a short reduction by proxy is launched before the other ranks' data has arrived, and waits
    # for the data itself.
    awaits_data: bool
    bytes_per_block: int  # bytes of a rank's contribution for which a collective launches one block
    # Bytes, from all other ranks together, that a rank receives per round, or piece of a reduction (team.h).
    data_bytes: int
    result_bytes: int  # bytes, from all other ranks together, that a rank receives as results of a piece
    flow_bytes: int  # bytes of all slots in which a rank receives transfers (flows.h)
    # Least bytes of a share for which each rank tells the others the address of its output before they send.
    meeting_bytes: int
    offered_bytes: int  # maximum bytes of an in-place all_reduce in which ranks load the other ranks' inputs directly
    # Longest share, in bytes, that a kernel sends through the proxy to ranks of other nodes by default. Schedules send
    # longer shares, without staging. 0: kernels send none.
    proxied_kernel_bytes: int
    # Maximum bytes that a kernel sends through pinned memory to ranks of other nodes by default, if the transports to
    # all remote ranks stage data. 0: none.
    pinned_kernel_bytes: int
    # Packets for which a packet kernel launches one block. For more than packet_blocks * packet_threads packets, blocks
    # get more threads, up to `threads`.
    packet_threads: int
    packet_blocks: int  # maximum number of blocks of a packet kernel
    pair_packet_blocks: int  # maximum number of blocks of a packet kernel between two ranks
    # Maximum bytes that a rank sends, to all others together, as packets in an all_gather or all_to_all. 0: packets are
    # not used.
    packet_move_bytes: int
    # Least bytes from one rank to another that are sent as lines (lines.h) instead of packets, if all links carry whole
    # lines. 0: lines are not used.
    line_bytes: int
    line_blocks: int  # maximum number of blocks of a kernel that sends lines
    line_move_bytes: int  # replaces packet_move_bytes if all links carry whole lines
    # Maximum number of blocks per cluster in a kernel that sends lines and normalizes rows, a power of two; a cluster
    # handles one row at a time. 1 without clusters.
    row_blocks: int
    # Maximum bytes that a schedule moves through pinned memory instead of by copy engine, which starts more slowly. 0:
    # none.
    pinned_bytes: int
    # Maximum bytes per peer that a schedule moves through pinned memory, if all remote ranks' transports stage data.
    staged_pinned_bytes: int
    # Maximum bytes, per peer, that a schedule's stream copies within the device by two copies through a peer's memory.
    # Copy engines make the two copies; the driver makes a direct copy by a kernel, which may wait for a multiprocessor.
    # 0: none.
    own_box_bytes: int
    # Maximum bytes that a rank receives, from all others together, in a reduction by proxy that sends all data to all
    # ranks in one step. A larger reduction takes two steps: each rank reduces one share, then sends the result to all.
    one_crossing_bytes: int
    # Replaces data_bytes and result_bytes in a team whose kernels send through pinned memory.
    pinned_buffer_bytes: int = 1 << 20


class BaseRuntime(Protocol):
    """A device and its driver. A method's body in this class is for devices without a driver.

    Attributes:
        name: one of "host", "cuda" and "hip".
        device: the driver's number of the device.
        device_id: identifies the physical device on this machine, the same in every process.
        launch_defaults: launch shapes that suit the device.
        thread_stream: the handle of the calling thread's own default stream; None if threads have no default streams.
        legacy_stream: the handle of the default stream that all threads share (CU_STREAM_LEGACY in CUDA); None if there
            is none.
        calls: the driver's calls, for callers in C.
        orders_rdma_writes: whether a kernel that sees a word written by RDMA, in host or device memory, also sees all
            earlier RDMA writes to the device's memory.
        pci_address: the device's PCI address in the form of sysfs; None for a device without one.
        loads_lazily: whether the driver may load a kernel only at its first launch. Loading blocks all other driver
            calls of the process.
        queue_limit: the environment setting that reduces the device's hardware queues, such as
            ``CUDA_DEVICE_MAX_CONNECTIONS=1``; None if none is set.
    """

    name: str
    device: int
    device_id: str
    launch_defaults: LaunchDefaults
    thread_stream: int | None
    legacy_stream: int | None
    calls: DriverCalls
    orders_rdma_writes: bool
    pci_address: str | None = None
    loads_lazily: bool = False
    queue_limit: str | None = None

    def activate(self, *, for_proxy: bool = False) -> None:
        """Makes the device current on the calling thread. `for_proxy` says that the thread runs the engine."""
        return

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Makes the device current within a `with` block."""
        return contextlib.nullcontext()

    @property
    def device_name(self) -> str:
        """The vendor's name of the device's model, such as "NVIDIA H200"."""

    def describe(self) -> str:
        """Returns a one-line description of the device."""

    def allocate(self, nbytes: int) -> Memory:
        """Allocates zeroed device memory that can be exported. Raises ResourceError if too little memory is left."""

    def allocate_block(self, nbytes: int) -> Memory:
        """Allocates zeroed device memory, like `allocate`, that `suspend` can give back temporarily. A GPU's driver
        rounds `nbytes` up to 2 MiB. AMD's driver supports no such memory.
        """
        return self.allocate(nbytes)

    def suspend(self, blocks: Sequence[Memory]) -> None:
        """Gives memory of `allocate_block` back to the device. The contents are lost, and the addresses stay reserved.

        No work may still use the memory, and all processes that map it must have unmapped it (`set_mapped`). The memory
        can be closed while it is suspended.
        """
        return

    def resume(self, blocks: Sequence[Memory]) -> None:
        """Allocates memory again, zeroed, at the addresses of suspended memory. Raises ResourceError if too little
        memory is left; all of `blocks` then stay suspended.
        """
        return

    def set_mapped(self, process: bytes, bases: Collection[int], mapped: bool) -> None:
        """Unmaps memory from `open` that lies in a process's blocks, or maps it at the same addresses again, after the
        process has resumed the blocks. Meanwhile the addresses stay reserved. Further calls do nothing.

        Args:
            process: the token of the process that allocated the blocks.
            bases: the blocks' addresses in that process.

        Raises:
            ArgumentError: the memory can't be mapped.
        """
        return

    def share_across_namespaces(self) -> None:
        """Makes later calls of `allocate` return memory that processes of other PID namespaces can also map.

        Raises RuntimeUnavailableError if the driver can't share memory between namespaces.
        """
        return

    def expect_reuse(self, ptr: int, nbytes: int) -> None:
        """Hints that a range of memory will be used repeatedly. Contents do not change."""
        return

    def allocate_pinned(self, nbytes: int) -> PinnedMemory:
        """Allocates zeroed pinned host memory that other processes can map."""

    def pin(self, ptr: int, nbytes: int) -> Memory | None:
        """Pins host memory of other libraries until the returned object is closed, so that copies to and from the
        device are not staged. Returns None if the device has no need of pinning.

        Raises ResourceError if the driver refuses to pin the memory.
        """
        return None

    def export(self, ptr: int, nbytes: int) -> bytes:
        """Returns a handle by which other processes can open the memory at `ptr`. Nobody may free the memory during the
        call.

        Raises ArgumentError if the memory can't be shared.
        """

    def end_export(self, handle: bytes) -> None:
        """Invalidates a handle from `export`. Until this call some drivers keep the memory allocated even if its owner
        frees it.
        """
        return

    def open(self, handle: bytes) -> Memory:
        """Maps memory that this or another process exported. Raises ArgumentError if the handle is invalid."""

    def open_pinned(self, handle: bytes) -> PinnedMemory:
        """Maps another process's pinned memory, given its `PinnedMemory.handle`."""

    def adopt_pinned(self, descriptor: int, nbytes: int) -> PinnedMemory:
        """Maps another process's pinned memory by its file descriptor. The returned object closes the descriptor.

        Raises ArgumentError if the file has less than `nbytes` bytes.
        """

    def keep_pins(self) -> Callable[[], None]:
        """Makes the process's other devices delay unpinning, if the driver waits for the kernels of all devices before
        it unpins memory.

        Returns a function that ends the delay, to be called when this device's kernels have ended.
        """
        return lambda: None

    def warm_up(self, peers: Collection[str]) -> None:
        """Makes the driver set up copies to peers now instead of at the first copy to each peer.

        Args:
            peers: the peers' device_ids. Devices that this process can't see or access are skipped.
        """
        return

    def numa_node(self) -> int | None:
        """The NUMA node nearest to the device; None if unknown."""
        return None

    def dmabuf(self, ptr: int, nbytes: int) -> tuple[int, int] | None:
        """Returns the file descriptor of a DMA-BUF that contains device memory, and the memory's offset in the DMA-BUF.

        The caller closes the descriptor. Returns None for host memory, and if the driver does not support DMA-BUF.
        """
        return None

    def can_access_peer(self, device_id: str) -> bool:
        """Whether this device's kernels can access memory of the device with this `device_id`."""

    def adds_at_peer(self, device_id: str) -> bool:
        """Whether this device's kernels can add atomically to accessible memory of the device with this id.

        Returns False if the driver reports that the link has no atomic adds, as over PCIe, or if this process does not
        see the device.
        """

    def pointer_device(self, ptr: int) -> int | None:
        """Returns the device that owns an address; None if no device does."""

    def memory_left(self) -> tuple[int, int]:
        """Returns the device's free memory and total memory, in bytes."""

    def whole_allocation(self, ptr: int, nbytes: int) -> tuple[int, int] | None:
        """Returns address and size of the allocation, or of the adjacent allocations, that contain a range. Returns
        None if the range is in no allocation of the driver's."""

    def allocations(self, ptr: int, nbytes: int) -> Allocations:
        """Returns the allocations that contain a range; an empty tuple if the driver knows none."""

    def free_later(self, ptr: int) -> None:
        """Frees memory from `calls.allocate` when the runtime next waits for the device."""

    def create_stream(self, *, for_proxy: bool = False, in_caller: bool = False) -> Stream:
        """Creates a stream.

        Args:
            for_proxy: whether the engine will use the stream, for copies only.
            in_caller: whether the host runtime does the stream's work within the calls that queue it. GPUs ignore this
                option.
        """

    def create_event(self, *, times: bool = True) -> Event:
        """Creates an event. Without `times` the event does not support `elapsed`, and is faster to record."""

    def stream_handle(self, stream: StreamLike) -> int:
        """Returns the driver's handle of a stream.

        Raises:
            ArgumentError: `stream` is not a stream, or the calling thread captures torch's or cupy's current stream
                into a graph while work on `stream` would not be captured.
        """

    def capture_of(self, stream: int) -> int:
        """Returns the number of the capture that records the work of the stream with this handle into a graph; 0 if
        the stream is not captured. No two captures of a process have the same number."""
        return 0

    def order_streams(self, first: int, then: int) -> None:
        """Makes later work of stream `then` wait for the work queued so far on stream `first`. `first` and `then` are
        handles."""

    def stream_events(self) -> StreamEvents:
        """Returns what C code needs to order this device's streams."""

    def wait_event(self, stream: int, event: Event) -> None:
        """Makes later work of a stream, given by its handle, wait for the event's last record."""

    def copy(self, dst: int, src: int, nbytes: int, stream: StreamLike = None) -> None:
        """Copies between any two addresses. Without a stream, returns when the copy is done."""

    def fill(self, dst: int, value: int, nbytes: int, stream: StreamLike = None) -> None:
        """Sets bytes to a value. Without a stream, returns when the bytes are set."""

    def synchronize(self) -> None:
        """Waits for all work of the device's default stream and of the streams that `create_stream` made."""

    def synchronize_stream(self, stream: StreamLike) -> None:
        """Waits for all work queued on a stream. Raises KernelError if queued work failed."""

    def check(self, status: int, call: str) -> None:
        """Raises an exception with the call's name and the driver's message if `status` is not 0."""


def foreign_stream_handle(stream: StreamLike) -> int:
    """Returns the handle of another library's stream object.

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
