"""The buffers and launches of dispatch and combine, and the CPU's wait for a dispatch's number of rows."""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any

from proxyccl.channels.calls.launches import CurrentStream, Launchable
from proxyccl.channels.communicator import Communicator
from proxyccl.channels.expert_parallel.arguments import whole_number
from proxyccl.channels.expert_parallel.arrays import ExpertArrays
from proxyccl.channels.expert_parallel.config import MAX_SLOTS, SCALED_DTYPES, EPConfig
from proxyccl.channels.expert_parallel.geometry import AS_BYTES, DISPATCH_KERNELS, STORE_KERNEL, blocks_for
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.members import FINALIZE, Members, Nodes
from proxyccl.channels.expert_parallel.options import LayerOptions
from proxyccl.channels.expert_parallel.placement import ExpertPlaces
from proxyccl.channels.expert_parallel.tables import RECEIVED, TableLayouts
from proxyccl.channels.expert_parallel.workspace import ExpertWorkspace
from proxyccl.channels.memory import allocate
from proxyccl.channels.segment.calls import CollectiveCall
from proxyccl.device._native import ffi, lib
from proxyccl.device.arrays.array import Array, ArrayView
from proxyccl.device.errors import ClosedError, WaitTimeoutError
from proxyccl.device.kernel import Launch
from proxyccl.device.runtime import StreamLike
from proxyccl.device.sleepers import ProxiedStruct

ROUTE: int = lib.PROXYCCL_EXPERT_ROUTE
GATHER: int = lib.PROXYCCL_EXPERT_GATHER
SEND: int = lib.PROXYCCL_EXPERT_SEND
RECEIVE: int = lib.PROXYCCL_EXPERT_RECEIVE
LAYOUT: int = lib.PROXYCCL_EXPERT_LAYOUT
TELL: int = lib.PROXYCCL_EXPERT_TELL

_SPINS = 2000  # polls of the count between two checks for failed ranks; on a GPU the count arrives after about 20 us
_HOST_THREADS = 16


class DispatchCombineContext:
    """The buffers of an expert-parallel layer, and the launches of its dispatch and combine.

    All ranks construct a `DispatchCombineContext` together, with `create`.

    Attributes:
        ep_config: sizes and types.
        members: the ranks, as a communicator.
        number: the layer's number, which ranks compare in the layer's calls.
        group: the same ranks, as a `Group`.
        arrays: makes the arrays of results.
        nodes: the placement of the ranks on nodes.
        workspace: memory that peers reach.
        tables: the layouts of the descriptors' tables.
        grid: the kernels' number of blocks, and number of threads per block.
        dispatch_plain, dispatch_stored: the launch of a dispatch, and the launch of a whole dispatch to output buffers.
        dispatch_scaled, quantize_launch: the launch of a dispatch that quantizes rows as it stores them, and the launch
            of the kernel that quantizes rows before a dispatch; None if not needed.
        pack: the kernel that packs float8 rows and their scales before a dispatch; None if not needed.
        combines: the launches of combines, by the rows' element type.
        signalled_combine: a function that returns a launch of a combine of rows that another kernel still computes.
        places: replaces expert ids by places if ranks are lost or the layer has a placement; otherwise None.
        numbers: yields the dispatches' numbers.
    """

    def __init__(self, members: Members, options: LayerOptions, number: int) -> None:
        self.ep_config, self.number, self.members = options.kernel_config, number, members
        self.group = group = members.group
        runtime, config = group.runtime, self.ep_config
        self.runtime_name, self.arrays = runtime.name, ExpertArrays(group)
        # A block needs a thread for each rank of a node, and for each node.
        threads = max(_HOST_THREADS, config.world_size) if runtime.name == "host" else lib.PROXYCCL_EXPERT_THREADS
        self.blocks = min(runtime.launch_defaults.blocks, blocks_for(config.max_tokens, options.num_sm))
        self.grid = (self.blocks, threads)
        shipped = functools.partial(runtime.shipped, compiled_only=options.use_aot)
        if options.use_aot:  # loads all kernels, also those that only later calls or other layers use
            for name in (*DISPATCH_KERNELS.values(), STORE_KERNEL):
                shipped("experts/dispatch.h", name, AS_BYTES)
            shipped("experts/spread.h", "expert_spread")
            shipped("moves.h", "barrier")
        token = config.token.name
        weigh = shipped("experts/weigh.h", "expert_weigh", token)
        combines = {name: shipped("experts/combine.h", "combine", name) for name in {token, config.weight.name}}
        quantize = shipped("experts/quantize.h", "expert_quantize", token) if options.quantizes else None
        self.pack = shipped("experts/quantize.h", "expert_pack") if options.quantized else None
        self._packed_bytes = options.pair_width + options.scale_bytes if options.quantized else 0
        self.nodes = Nodes.of_group(group, config, proxied=options.proxied)
        with group.exchange.telling():
            self.workspace = ExpertWorkspace(group, self.nodes, options, self.grid)
        self.workspace.experts.dropping_ids = options.dropping_ids
        self.tables = TableLayouts(options, self.nodes)
        group.keep(self.workspace)  # peers may still be in a call when this rank drops its layer
        self._capacity = options.capacity * config.max_tokens * config.topk
        self._output_buf: tuple[Array, Array] | None = None
        experts = ProxiedStruct.of(bytes(ffi.buffer(self.workspace.experts)), self.workspace.sleepers)
        name, stores = DISPATCH_KERNELS[self.workspace.announces], self.workspace.outputs is not None

        def dispatch(name: str, dtype: str) -> Launch:
            empty = bytes(ffi.sizeof("ProxycclDispatch"))
            return shipped("experts/dispatch.h", name, dtype).prepare(*self.grid, experts, empty)

        self.dispatch_plain = self.dispatch_stored = dispatch(name, AS_BYTES)
        if stores and self.workspace.announces == "masks":
            self.dispatch_stored = dispatch(STORE_KERNEL, AS_BYTES)
        scales = options.quantizes and stores and token in SCALED_DTYPES
        self.dispatch_scaled = dispatch(name, token) if scales else None
        nothing = bytes(ffi.sizeof("ProxycclCombine"))
        self.combines = {name: kernel.prepare(*self.grid, experts, nothing) for name, kernel in combines.items()}
        grid = self.grid

        def signalled_combine() -> Launch:
            return shipped("experts/combine.h", "combine_signalled", token).prepare(*grid, experts, nothing)

        self.signalled_combine = signalled_combine
        # Peers do not wait for this kernel, so it may occupy the whole device.
        self._weighing = ffi.new("ProxycclWeighing *")
        weighing = bytes(ffi.buffer(self._weighing))
        self._weigh = weigh.prepare(runtime.launch_defaults.blocks, threads, experts, weighing)
        self.quantize_launch = quantize.prepare(*self.grid, experts, nothing) if quantize is not None else None
        replaces = options.lost_ranks or options.placement is not None
        self.places = ExpertPlaces(group, options, self.nodes, self.grid, number) if replaces else None
        self.numbers = itertools.count(1)
        self.closed = False

    @classmethod
    def create(cls, ep_config: EPConfig, capacity: int = 2, *, ep_group: Any = None) -> DispatchCombineContext:
        """Makes the buffers. All ranks call this together.

        Args:
            ep_config: sizes and types, the same on all ranks except for `rank`.
            capacity: rows of `dispatch_output_buf`, as a multiple of max_tokens * topk.
            ep_group: a `Communicator`, an MPI communicator or a torch process group; None for MPI's world.

        Raises:
            ArgumentError: an argument is wrong, or differs between ranks.
            ResourceError: no memory or channel ids are left.
        """
        sizes = ep_config.max_tokens, ep_config.hidden, ep_config.topk, ep_config.rank, ep_config.num_experts
        ranks = ep_config.local_world_size, ep_config.world_size
        options = LayerOptions(*sizes, *ranks, ep_config.token_dtype, ep_config.weight_dtype, capacity=capacity)
        members = Members.of(ep_group, ep_config)
        with members.closed_on_error():
            number = members.agree_on(ep_config.compared(), f"a context ({ep_config.describe()})")
            return cls(members, options, number)

    @property
    def communicator(self) -> Communicator:
        """The communicator of the layer's ranks."""
        return self.members.communicator

    def finalize(self) -> None:
        """Releases the buffers. All ranks call this together; further calls do nothing."""
        if self.closed:
            return
        self.closed = True
        group = self.group
        if group.failure.usable:
            if self.places is not None:  # after a failure, `shrink` may still need the move's weights
                self.places.end_move()
            if not group.failure.suspended:  # `suspend` has ended all ranks' work
                group.launches.agree(CollectiveCall(FINALIZE))
                group.synchronize()
                group.links.drain()
                group.exchange.barrier("finalize")  # before this barrier a peer may write to this rank's memory
            group.let_go(self.workspace)
            self.workspace.close()
        self.members.close()

    def require_usable(self) -> None:
        """Raises ClosedError after `finalize`, or the errors of `FailureState.require_awake`."""
        if self.closed:
            raise ClosedError("the expert-parallel layer was finalized")
        self.group.failure.require_awake()

    # -- the output buffer ---

    @property
    def dispatch_output_buf(self) -> Array:
        """[rows, hidden]: a buffer for received rows, for callers that reuse one buffer."""
        return self.reallocate_dispatch_output_buf(0)[0]

    def reallocate_dispatch_output_buf(self, dispatch_recv_tokens: int) -> tuple[Array, Array]:
        """Makes the output buffer larger if it has too few rows. Ranks call this independently, because peers don't
        access the buffer.

        Args:
            dispatch_recv_tokens: the number of rows that the buffer needs.

        Returns:
            The buffer, [rows, hidden] of the token type, and a buffer for the rows' weights, [rows].
        """
        self.group.failure.require_usable()  # not `require_awake`: other ranks may not make this call
        self.require_usable()
        dispatch_recv_tokens = whole_number("dispatch_recv_tokens", dispatch_recv_tokens, 0, MAX_SLOTS)
        self.ep_config.require_room(dispatch_recv_tokens, "dispatch_recv_tokens")
        if self._output_buf is None or self._output_buf[0].shape[0] < dispatch_recv_tokens:
            rows = self._capacity = max(self._capacity, dispatch_recv_tokens)
            config = self.ep_config
            self._output_buf = (
                allocate(self.group, (rows, config.hidden), config.token, "experts"),
                allocate(self.group, (rows,), config.weight, "experts"),
            )
        return self._output_buf

    # -- counts of dispatches ---

    def await_rows(self, desc: EPAllToAllLayoutDesc) -> int:
        """Waits on the CPU until the number of rows of this dispatch is known, and returns the number. The stream's
        work may still be running when this function returns.

        Raises:
            CommunicatorError: a peer failed.
        """
        received, ticket, group = self.workspace.received_rows, desc.number, self.group
        deadline = time.monotonic() + 2 * group.timeout
        # On a GPU this loop doesn't sleep at first, because a sleep takes longer than most waits. On the host runtime
        # the loop sleeps soon, because the kernels' threads need this core.
        spins, patient = 0, _SPINS if self.runtime_name == "host" else 10 * _SPINS
        while received.ticket != ticket:
            spins += 1
            if spins % _SPINS == 0:
                group.failure.check()
                if time.monotonic() > deadline:
                    raise WaitTimeoutError(f"dispatch {ticket}: counts did not arrive in {2 * group.timeout:g} s")
                if spins > patient:
                    time.sleep(1e-5)
        group.failure.check()
        return int(received.rows)

    # -- launches of forms ---

    @functools.cached_property
    def packed_rows(self) -> Array:
        """Memory for the packed float8 rows of the dispatch in flight; only one dispatch is in flight at a time."""
        return allocate(self.group, (self.ep_config.max_tokens, self._packed_bytes), "uint8", "experts")

    def weigh(
        self,
        values: ArrayView,
        weights: ArrayView | None,
        stream: StreamLike,
        *,
        desc: EPAllToAllLayoutDesc | None = None,
        others: ArrayView | None = None,
        products: ArrayView | None = None,
    ) -> None:
        """Queues the multiplication of rows by their weights, in place. Each product is rounded to the rows' type.

        Args:
            values: [R, hidden] of the tokens' type.
            weights: float32 [R]; None for 1.
            stream: where to queue the kernel.
            desc: the rows' dispatch, if rows that the dispatch did not fill are to be set to zero; otherwise None.
            others: [R, hidden] of the tokens' type, for `products`; None without products.
            products: float32 [R]: receives each row's scalar product with the same row of `others`, computed before
                the row is multiplied.
        """
        slots = desc.pointer("row_slots") if desc is not None and desc.has_gaps else 0
        received = desc.pointer(RECEIVED) if desc is not None and desc.counts_rows and not slots else 0
        if weights is None and others is None and not slots and not received:
            return  # all rows are filled, so none is set to zero
        call = self._weighing
        call.rows, call.hidden = values.shape[0], values.shape[1]
        call.values = ffi.cast("char *", values.ptr)
        call.weights = ffi.cast("float *", weights.ptr if weights is not None else 0)
        call.others = ffi.cast("char *", others.ptr if others is not None else 0)
        call.products = ffi.cast("float *", products.ptr if products is not None else 0)
        call.row_slots, call.received = ffi.cast("int32_t *", slots), ffi.cast("int32_t *", received)
        views = (values, weights, others, products)
        kept = tuple(view.owner for view in views if view is not None)
        self._weigh.replace(1, bytes(ffi.buffer(call)))
        self.queue(ffi.NULL, self._weigh, stream, desc, kept)

    # -- launching ---

    def stream_for(self, stream: StreamLike, x: Any) -> StreamLike:
        """Returns the stream of a call. Raises an error for an invalid stream before the ranks compare the call."""
        found = self.group.launches.stream_for(stream, x)
        self.group.runtime.stream_handle(found)
        return found

    def queue(
        self,
        call: Any,
        launch: Launchable,
        stream: StreamLike,
        desc: EPAllToAllLayoutDesc | None,
        owners: tuple[object, ...],
    ) -> None:
        """Compares the ranks' calls, unless `call` is NULL, and queues a launch. Keeps `owners` and the descriptor
        until the stream has completed the launch, unless the stream's order already protects their memory from reuse.
        """
        described = () if desc is None else (desc,)
        if not isinstance(stream, CurrentStream):
            owners = (*owners, *described)
        else:
            owners = () if desc is None or desc.stream == stream else described
        self.group.launches.issue(call, launch, stream, owners)
