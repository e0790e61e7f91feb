"""Dispatch and combine between ranks: launches, arguments, and the word that the CPU needs of a dispatch."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from proxyccl.channels.collectives.operations import encode_call
from proxyccl.channels.expert_parallel.config import EPConfig
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.workspace import ExpertWorkspace
from proxyccl.device._native import ffi, lib
from proxyccl.device.arrays import Array, ArrayView
from proxyccl.device.dtypes import DType, as_dtype
from proxyccl.device.errors import ArgumentError, ClosedError, WaitTimeoutError
from proxyccl.device.kernel import Launch

if TYPE_CHECKING:
    from proxyccl.channels.communicator import Communicator
    from proxyccl.device.runtime import StreamLike

ROUTE: int = lib.PROXYCCL_EXPERT_ROUTE
GATHER: int = lib.PROXYCCL_EXPERT_GATHER
SEND: int = lib.PROXYCCL_EXPERT_SEND
RECEIVE: int = lib.PROXYCCL_EXPERT_RECEIVE
LAYOUT: int = lib.PROXYCCL_EXPERT_LAYOUT
SCALED_ELEMENTS: int = lib.PROXYCCL_SCALED_ELEMENTS

_SPINS = 2000  # looks at the report before the thread gives way: a count takes some 20 us on a GPU
_HOST_THREADS = 16
_TOKENS_PER_BLOCK = 4


@dataclass(frozen=True)
class DispatchInputs:
    """What a dispatch is given, and reads until its end.

    Attributes:
        tokens: [T, elements of a row].
        expert_ids: int32 [T, topk].
        weights: [T, topk], or None.
        scatter: int32 [tokens of all ranks, topk], or None: the caller's own rows.
    """

    tokens: ArrayView
    expert_ids: ArrayView
    weights: ArrayView | None = None
    scatter: ArrayView | None = None


class DispatchCombineContext:
    """The buffers of an expert-parallel layer, and its dispatch and combine as kernels know them.

    All ranks make it together, with `create`, and make the same calls in the same order. `EPAll2AllLayer` and
    `DispatchCombine` are what it is for; by itself it is for whoever schedules phases by hand.

    Attributes:
        ep_config: sizes and types.
        communicator: the ranks.
        workspace: memory that peers reach.
    """

    def __init__(
        self,
        communicator: Communicator,
        config: EPConfig,
        *,
        capacity: int = 2,
        num_sm: int = 20,
        local_combine: bool = False,
        proxied: bool = False,
        owns_communicator: bool = False,
        use_aot: bool = False,
        quantized: bool = False,
    ) -> None:
        if not isinstance(capacity, int) or capacity < 1:
            raise ArgumentError("capacity", f"must be a positive integer, not {capacity!r}")
        if not isinstance(num_sm, int) or isinstance(num_sm, bool) or num_sm < 1:
            raise ArgumentError("num_sm", f"must be a positive integer, not {num_sm!r}")
        runtime = communicator.runtime
        threads = _HOST_THREADS if runtime.name == "host" else lib.PROXYCCL_EXPERT_THREADS
        # Every block must hear all others, so there are no more than have something to do.
        self.blocks = min(num_sm, runtime.launch_defaults.blocks, -(-config.max_tokens // _TOKENS_PER_BLOCK))
        self.ep_config = config
        self.communicator = communicator
        self._owns_communicator = owns_communicator
        self.runtime_name = runtime.name
        shipped = functools.partial(runtime.shipped, compiled_only=use_aot)
        told, announced = (shipped("expert_dispatch.h", f"expert_dispatch{kind}") for kind in ("", "_announced"))
        scale = shipped("expert_combine.h", "expert_scale", config.token.name)
        combines = {
            name: shipped("expert_combine.h", "expert_combine", name)
            for name in {config.token.name, config.weight.name}
        }
        quantize = shipped("expert_quantize.h", "expert_quantize", config.token.name) if quantized else None
        self._pack = shipped("expert_quantize.h", "expert_pack") if quantized else None
        if use_aot:  # those that are asked for later are loaded now
            shipped("expert_dispatch.h", "expert_spread")
            shipped("moves.h", "barrier")
        self.workspace = ExpertWorkspace(
            communicator,
            config,
            blocks=self.blocks,
            threads=threads,
            local_combine=local_combine,
            proxied=proxied,
        )
        communicator.keep(self.workspace)  # a rank may be done with a call, and forget its layer, before its peers are
        self._capacity = capacity * config.max_tokens * config.topk
        self._output_buf: tuple[Array, Array] | None = None
        self._dispatch_call = ffi.new("ProxycclDispatch *")
        self._combine_call = ffi.new("ProxycclCombine *")
        experts = bytes(ffi.buffer(self.workspace.experts))
        self._grid = (self.blocks, threads)
        dispatch = announced if self.workspace.experts.id_packets else told
        self._dispatch = dispatch.prepare(*self._grid, experts, bytes(ffi.buffer(self._dispatch_call)))

        filled = bytes(ffi.buffer(self._combine_call))
        self._combine = {name: kernel.prepare(*self._grid, experts, filled) for name, kernel in combines.items()}
        self._scale = scale.prepare(*self._grid, experts, filled)
        self._quantize = quantize.prepare(*self._grid, experts, filled) if quantize is not None else None
        self._scale_bytes = 4 * config.hidden // SCALED_ELEMENTS if quantized else 0
        self._number = 0
        self._closed = False

    @classmethod
    def create(cls, ep_config: EPConfig, capacity: int = 2, *, ep_group: Any = None) -> DispatchCombineContext:
        """Makes the buffers; all ranks call it together.

        Args:
            ep_config: the same on all ranks but for `rank`.
            capacity: rows of `dispatch_output_buf`, as a multiple of max_tokens * topk.
            ep_group: a `Communicator`, an MPI communicator or a torch process group; None for MPI's world.

        Raises:
            ArgumentError: an argument is wrong, or differs between ranks.
            ResourceError: no memory or channel ids are left.
        """
        communicator, owned = as_communicator(ep_group, ep_config)
        with closing_if_refused(communicator, owned=owned):
            agree_on(communicator, ep_config)
            return cls(communicator, ep_config, capacity=capacity, owns_communicator=owned)

    def finalize(self) -> None:
        """Releases the buffers. All ranks call it together; calling it twice does nothing."""
        if self._closed:
            return
        self._closed = True
        comm = self.communicator
        if not comm.closed and not comm.control.aborted:
            comm.synchronize()
            comm.drain()
            comm.all_gather_bytes(b"", "finalize")  # nobody frees what a peer may still write to
            comm.let_go(self.workspace)
            self.workspace.close()
        if self._owns_communicator:
            comm.close()

    def require_usable(self) -> None:
        """Raises ClosedError after `finalize`, and what ended the communicator."""
        if self._closed:
            raise ClosedError("the expert-parallel layer was finalized")
        self.communicator.require_usable()

    # -- the output buffer ---

    @property
    def dispatch_output_buf(self) -> Array:
        """[rows, hidden]: room for what a dispatch brings, for callers that keep it in one place."""
        return self.reallocate_dispatch_output_buf(0)[0]

    def reallocate_dispatch_output_buf(self, dispatch_recv_tokens: int) -> tuple[Array, Array]:
        """Makes the output buffer larger if it has fewer rows. Not collective: peers don't reach into it.

        Args:
            dispatch_recv_tokens: rows that are needed.

        Returns:
            The buffer, [rows, hidden] of the token type, and one for the rows' weights, [rows].
        """
        self.require_usable()
        if not isinstance(dispatch_recv_tokens, int) or dispatch_recv_tokens < 0:
            raise ArgumentError("dispatch_recv_tokens", f"must be a number of rows, not {dispatch_recv_tokens!r}")
        if self._output_buf is None or self._output_buf[0].shape[0] < dispatch_recv_tokens:
            rows = self._capacity = max(self._capacity, dispatch_recv_tokens)
            config = self.ep_config
            self._output_buf = (
                self.communicator.empty((rows, config.hidden), config.token),
                self.communicator.empty((rows,), config.weight),
            )
        return self._output_buf

    # -- dispatch ---

    def describe(self, call: str, given: DispatchInputs) -> EPAllToAllLayoutDesc:
        """A descriptor for a new dispatch, on whose call the ranks agree."""
        self._number += 1
        name = call + (" with weights" if given.weights is not None else "")
        name += " by indices" if given.scatter is not None else ""
        self._agree(name, self.ep_config.token.name, self._number)
        tokens = given.tokens
        return EPAllToAllLayoutDesc(self, self._number, tokens.shape[0], tokens.owner, scatter=given.scatter)

    def begin(self, phases: int, desc: EPAllToAllLayoutDesc, given: DispatchInputs, stream: StreamLike) -> None:
        """Queues the start of a dispatch: its counts, and its rows where `phases` has SEND."""
        call = self._fill_inputs(phases, desc, given)
        self._launch(self._dispatch, call, stream, (desc, desc.table_owners, given))

    def await_rows(self, desc: EPAllToAllLayoutDesc) -> int:
        """Waits, on the CPU and for this dispatch alone, until its number of rows is known. Returns it.

        Raises:
            CommunicatorError: a peer failed.
        """
        report, ticket, comm = self.workspace.report, desc.number, self.communicator
        deadline = time.monotonic() + 2 * comm.timeout
        spins = 0
        while report.ticket != ticket:
            spins += 1
            if spins % _SPINS == 0:
                comm.check()
                if time.monotonic() > deadline:
                    raise WaitTimeoutError(f"the counts of dispatch {ticket} did not come within {comm.timeout:g} s")
                time.sleep(1e-5)
        comm.check()
        return int(report.rows)

    def bad_expert(self, argument: str) -> ArgumentError | None:
        """What is to be said of the first bad expert id of the last dispatch whose rows are known, if there is one."""
        report, config = self.workspace.report, self.ep_config
        if report.bad_rank == lib.PROXYCCL_NO_PEER:
            return None
        token, k = divmod(int(report.bad_slot), config.topk)
        return ArgumentError(
            argument,
            f"[{token}, {k}] on rank {report.bad_rank} is none of the {config.num_experts} experts, nor "
            f"{config.num_experts}, which drops the slot",
        )

    def bad_indices(self) -> bool:
        """Whether full_scatter_indices were no permutation, in a dispatch that has ended since this was last asked."""
        report = self.workspace.report
        bad, report.bad_index = bool(report.bad_index), 0
        return bad

    def most_rows(self) -> int:
        """The most rows of any rank in the dispatches that have ended since this was last asked."""
        report = self.workspace.report
        most, report.most_rows = int(report.most_rows), 0
        return most

    def receive(
        self,
        phases: int,
        desc: EPAllToAllLayoutDesc,
        given: DispatchInputs,
        rows: int,
        output: tuple[ArrayView | None, ...] | None,
        received: ArrayView | None,
        stream: StreamLike,
    ) -> None:
        """Queues the end of a dispatch, into the first `rows` rows of `output`, which are rows, weights, and scales in
        a layer that has them; None takes nothing in.
        """
        desc.size_rows(rows if output is not None else 0)
        call = self._fill_inputs(phases, desc, given)
        if output is not None:
            call.capacity, call.scale_bytes = rows, self._scale_bytes
            for name, view in zip(("output", "output_weights", "output_scales"), output, strict=False):
                if view is not None:
                    setattr(call, name, ffi.cast("char *", view.ptr))
        if received is not None:
            call.received = ffi.cast("int32_t *", received.ptr)
        first_rows = desc.pointer("first_rows") if given.scatter is not None and desc.rows else 0
        fill = (lambda handle: self._fill(first_rows, 4 * rows, handle)) if first_rows else None
        kept = (desc, desc.table_owners, given, output, received)
        self._launch(self._dispatch, call, stream, kept, before=fill)

    def repeat(self, desc: EPAllToAllLayoutDesc, tokens: ArrayView, output: ArrayView, stream: StreamLike) -> None:
        """Queues a dispatch of other tokens by a layout that exists. They may have another element type and length."""
        call = self._fill_dispatch(SEND | RECEIVE, tokens, desc)
        call.again, call.capacity, call.output = 1, desc.rows, ffi.cast("char *", output.ptr)
        own = desc.pointer("expert_ids") + 4 * self.workspace.node * self.ep_config.max_tokens * self.ep_config.topk
        call.expert_ids = ffi.cast("int32_t *", own)
        self._agree("redispatch", tokens.dtype.name, desc.number)
        self._launch(self._dispatch, call, stream, (desc, desc.table_owners, tokens.owner, output.owner))

    def quantize(self, tokens: ArrayView, stream: StreamLike) -> ArrayView:
        """Queues what makes float8 rows of tokens, with their scales behind them: uint8 [T, hidden + scales]."""
        assert self._quantize is not None
        packed = self._packed(tokens)
        call = self._combine_call
        call.tokens, call.hidden = tokens.shape
        call.rows, call.output = ffi.cast("char *", tokens.ptr), ffi.cast("char *", packed.ptr)
        self._launch(self._quantize, call, stream, (tokens.owner, packed.owner))
        return packed

    def pack(self, rows: ArrayView, scales: ArrayView, stream: StreamLike) -> ArrayView:
        """Queues the same from rows that are in float8 already, and their scales."""
        assert self._pack is not None
        packed = self._packed(rows)
        pointers = (rows.ptr, scales.ptr, packed.ptr)
        launch = self._pack.prepare(*self._grid, *pointers, rows.shape[0], rows.shape[1], self._scale_bytes)
        self.communicator.launch(launch, stream, (rows.owner, scales.owner, packed.owner))
        return packed

    def _packed(self, rows: ArrayView) -> ArrayView:
        shape = (rows.shape[0], self.ep_config.hidden + self._scale_bytes)
        return self.communicator.collectives.input(self.new_array(rows.owner, shape, "uint8"), "input")

    def _fill_inputs(self, phases: int, desc: EPAllToAllLayoutDesc, given: DispatchInputs) -> Any:
        call = self._fill_dispatch(phases, given.tokens, desc)
        call.expert_ids = ffi.cast("int32_t *", given.expert_ids.ptr)
        call.weights = ffi.cast("char *", given.weights.ptr if given.weights is not None else 0)
        call.scatter = ffi.cast("int32_t *", given.scatter.ptr if given.scatter is not None else 0)
        return call

    def _fill_dispatch(self, phases: int, tokens: ArrayView, desc: EPAllToAllLayoutDesc) -> Any:
        call = self._dispatch_call
        ffi.memmove(call, bytes(ffi.sizeof("ProxycclDispatch")), ffi.sizeof("ProxycclDispatch"))
        call.phases, call.tokens, call.ticket = phases, tokens.shape[0], desc.number
        call.row_bytes = tokens.shape[1] * tokens.dtype.itemsize
        call.input = ffi.cast("char *", tokens.ptr)
        desc.fill(call.layout)
        return call

    # -- combine ---

    def combine(
        self,
        call: str,
        phases: int,
        desc: EPAllToAllLayoutDesc,
        rows: ArrayView,
        weights: ArrayView | None,
        output: ArrayView | None,
        stream: StreamLike,
    ) -> None:
        """Queues a combine, or the part of one that `phases` says."""
        filled = self._combine_call
        filled.phases, filled.tokens = phases, desc.num_dispatch_token_cur_rank
        filled.hidden = rows.shape[1]
        filled.rows = ffi.cast("char *", rows.ptr)
        filled.weights = ffi.cast("float *", weights.ptr if weights is not None else 0)
        filled.output = ffi.cast("char *", output.ptr if output is not None else 0)
        desc.fill(filled.layout)
        if phases & SEND:
            self._agree(call + (" with weights" if weights is not None else ""), rows.dtype.name, desc.number)
        owners = (desc, desc.table_owners, rows.owner, weights and weights.owner, output and output.owner)
        self._launch(self._combine[rows.dtype.name], filled, stream, owners)

    def scale(self, rows: ArrayView, weights: ArrayView, stream: StreamLike) -> None:
        """Queues the multiplication of rows by their weights, float32 [R], in place. Each product is rounded."""
        call = self._combine_call
        call.tokens, call.hidden = weights.shape[0], rows.shape[1]
        call.rows = call.output = ffi.cast("char *", rows.ptr)
        call.weights = ffi.cast("float *", weights.ptr)
        self._launch(self._scale, call, stream, (rows.owner, weights.owner))

    def collected_type(self, values: ArrayView) -> str:
        """The type of values that `collect` can bring back: theirs, if it is the tokens' or the weights'."""
        name = values.dtype.name
        return name if name in self._combine else self.ep_config.weight.name

    def collect(self, desc: EPAllToAllLayoutDesc, values: ArrayView, stream: StreamLike) -> Any:
        """Queues what brings a value for each row back to its slot: [T, topk] of the values' type, zero where there is
        none. It is a combine of rows that are zero but for the slot's own column.
        """
        config, comm, element = self.ep_config, self.communicator, values.dtype
        matrix = self.new_array(values.owner, (desc.rows, config.topk), element)
        slots = self.new_array(values.owner, (desc.num_dispatch_token_cur_rank, config.topk), element)
        spread, slotted = comm.collectives.input(matrix, "values"), comm.collectives.input(slots, "values")
        kernel = comm.runtime.shipped("expert_dispatch.h", "expert_spread")
        launch = kernel.prepare(
            *self._grid, values.ptr, desc.pointer("row_slots"), spread.ptr, desc.rows, config.topk, element.itemsize
        )
        if desc.rows:
            comm.launch(launch, stream, (values.owner, desc, desc.table_owners, matrix))
        self.combine("collect", SEND | RECEIVE, desc, spread, None, slotted, stream)
        return slots

    # -- launching ---

    def stream_for(self, stream: StreamLike, x: Any) -> StreamLike:
        """The stream of a call; what is none is refused before anything is agreed."""
        stream = self.communicator.stream_for(stream, x)
        self.communicator.runtime.stream_handle(stream)
        return stream

    def _agree(self, call: str, dtype: str, number: int) -> None:
        self.communicator.agree(encode_call(call, dtype, root=number % 2**31, count=self.ep_config.hidden))

    def _launch(
        self, launch: Launch, call: Any, stream: StreamLike, owners: tuple[object, ...], before: Any = None
    ) -> None:
        raw = bytes(ffi.buffer(call))

        def plan(handle: StreamLike) -> None:
            launch.replace(1, raw)
            if before is not None:
                before(handle)
            launch(handle)

        self.communicator.launch(plan, stream, owners)

    def _fill(self, ptr: int, nbytes: int, handle: StreamLike) -> None:
        self.communicator.runtime.fill(ptr, 0xFF, nbytes, handle)

    # -- arrays ---

    def new_array(self, like: Any, shape: tuple[int, ...], dtype: DType | str) -> Any:
        """A new array of the library that `like` is of: torch's, numpy's on the host, else `Communicator.empty`'s."""
        element = as_dtype(dtype)
        if hasattr(like, "new_empty"):
            return like.new_empty(shape, dtype=getattr(sys.modules["torch"], element.name))
        if self.runtime_name == "host" and not isinstance(like, Array):
            return np.empty(shape, element.numpy())
        return self.communicator.empty(shape, element)

    @staticmethod
    def address(array: Any) -> int:
        """Where an array of `new_array` lies."""
        if hasattr(array, "data_ptr"):
            return int(array.data_ptr())
        return int(array.ptr if isinstance(array, Array) else array.__array_interface__["data"][0])

    def download_view(self, view: ArrayView) -> NDArray[Any]:
        """The same of a view."""
        self.communicator.synchronize()
        values = np.empty(view.shape, view.dtype.numpy())
        if view.nbytes:
            self.communicator.runtime.copy(values.ctypes.data, view.ptr, view.nbytes)
        return values

    def download(self, array: Any) -> NDArray[Any]:
        """A copy in host memory, when what is queued has been done."""
        if isinstance(array, Array):
            return array.numpy()
        self.communicator.synchronize()
        if hasattr(array, "detach"):
            copied: NDArray[Any] = array.detach().cpu().numpy()
            return copied
        return np.asarray(array.get() if hasattr(array, "get") else array)

    def upload(self, like: Any, values: NDArray[Any]) -> Any:
        """Values in an array of the library that `like` is of."""
        array = self.new_array(like, values.shape, str(values.dtype))
        if isinstance(array, Array):
            return array.upload(values)
        if hasattr(array, "copy_"):
            return array.copy_(sys.modules["torch"].from_numpy(values))
        array[...] = values
        return array

    # -- who is where ---

    def counterpart(self, node: int) -> int:
        """The rank of a node (as the configuration counts them) with this rank's number within its own."""
        config = self.ep_config
        members = self.communicator.topology.node_members()
        if len(members) == config.num_nodes:
            return members[node][self.communicator.local_rank]
        return node * config.local_world_size + config.rank % config.local_world_size

    def node_of(self, rank: int) -> int:
        """A rank's node, as the kernels count them."""
        return next(n for n, members in enumerate(self.workspace.members) if rank in members)


def as_communicator(group: Any, config: EPConfig) -> tuple[Communicator, bool]:
    """The communicator of a group, and whether it was made here. See `EPAll2AllLayer` for what a group may be.

    Raises:
        ArgumentError: rank, world_size or local_world_size are not the group's.
    """
    from proxyccl.channels.communicator import Communicator

    owned = not isinstance(group, Communicator)
    communicator = group if not owned else _open(group, config.local_world_size)
    with closing_if_refused(communicator, owned=owned):
        for argument, mine, actual in (
            ("rank", config.rank, communicator.rank),
            ("world_size", config.world_size, communicator.world_size),
            ("local_world_size", config.local_world_size, communicator.local_world_size),
        ):
            if mine != actual:
                raise ArgumentError(argument, f"is {mine}, the group's is {actual}")
        communicator.require_usable()
    return communicator, owned


@contextlib.contextmanager
def closing_if_refused(communicator: Communicator, *, owned: bool) -> Iterator[None]:
    """A block whose exception closes the communicator, if it was made for what the block makes."""
    try:
        yield
    except BaseException:
        if owned:
            communicator.close(_collective=False)
        raise


def _open(group: Any, local_world_size: int) -> Communicator:
    from proxyccl.channels.communicator import Communicator

    kind = type(group).__module__.split(".")[0]
    if kind == "torch":
        return Communicator.from_torch(group, local_world_size=local_world_size)
    if group is None or kind == "mpi4py":
        return Communicator.from_mpi(group, local_world_size=local_world_size)
    raise ArgumentError(
        "ep_group", f"must be a Communicator, an MPI communicator or a torch process group, not {type(group).__name__}"
    )


def agree_on(
    communicator: Communicator, config: EPConfig, others: Mapping[str, Any] = {}, names: Mapping[str, str] = {}
) -> None:
    """Refuses arguments that differ between ranks, on all of them and by name. All ranks call it together.

    Args:
        communicator: the ranks.
        config: compared but for `rank`.
        others: further arguments that must agree.
        names: what the caller calls some of the configuration's fields.
    """
    fields: dict[str, Any] = {name: value for name, value in asdict(config).items() if name != "rank"}
    fields |= {"token_dtype": config.token.name, "weight_dtype": config.weight.name, "offset_dtype": "int32"}
    mine = json.dumps(dict(others) | {names.get(name, name): value for name, value in fields.items()}).encode()
    everyone = [json.loads(data) for data in communicator.all_gather_bytes(mine, "an expert-parallel layer")]
    for rank, theirs in enumerate(everyone):
        for argument, value in everyone[0].items():
            if theirs.get(argument) != value:
                raise ArgumentError(
                    argument,
                    f"is {value!r} on rank 0 and {theirs.get(argument)!r} on rank {rank}; give all ranks the same",
                )
