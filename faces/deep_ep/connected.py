"""`Connected`, the base class of `Buffer` and `ElasticBuffer`, has a communicator, its layers, and a stream for
asynchronous calls. `ElasticBase` is the common base of the classes that together make `ElasticBuffer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from proxyccl.channels.communicator import Communicator
from proxyccl.channels.expert_parallel.layer import EPAll2AllLayer
from proxyccl.channels.timeouts import timeout_from
from proxyccl.deep_ep.arguments import Names
from proxyccl.deep_ep.elastic_handle import EPHandle
from proxyccl.deep_ep.handles import Handle, Routing, routing_of
from proxyccl.deep_ep.layers import Layers
from proxyccl.deep_ep.utils import EventHandle, EventOverlap, order_of
from proxyccl.device.arguments.flags import as_flag
from proxyccl.device.errors import ArgumentError, CapacityError, ClosedError, CommunicatorError

T = TypeVar("T")
LEAST_TIMEOUT_SECONDS = 100.0
"""The smallest time-out of a buffer's waits. A shorter time-out could end a wait for a rank that compiles kernels
between two calls.
"""


class Connected:
    """The communicator, the layers and the stream of a buffer.

    Attributes:
        communicator: the communicator of the buffer's ranks, for calls that DeepEP lacks.
    """

    def __init__(self, source: Any, *, explicitly_destroy: bool, timeout: float = LEAST_TIMEOUT_SECONDS) -> None:
        self.group, self.explicitly_destroy = source, as_flag(explicitly_destroy, "explicitly_destroy")
        self._owned = not isinstance(source, Communicator)
        if self._owned:  # the communicator uses torch's current GPU
            device = torch.cuda.current_device() if torch.cuda.is_available() else None
            source = Communicator(source, device=device, timeout=max(timeout, timeout_from(None)))
        self.communicator: Communicator = source
        self._rank_and_ranks = source.rank, source.world_size
        self._stream: Any = torch.cuda.Stream() if self.communicator.runtime.name != "host" else None
        self._layers: Layers | None = Layers(self.communicator)

    def destroy(self) -> None:
        """Releases the memory. All ranks make this call together. A second call does nothing.

        Raises:
            ArgumentError: the buffer was made without `explicitly_destroy`.
        """
        if not self.explicitly_destroy:
            raise ArgumentError("explicitly_destroy", "must be True to destroy a buffer")
        if self._layers is not None:
            self._close_parts()
            self._layers = None
            if self._owned:
                self.communicator.close()

    def grow(self, communicator: Communicator) -> None:
        """Continues on a communicator in which new processes have the places of all lost ranks. All ranks of the buffer
        make this call together. The new processes construct a buffer on their communicator. DeepEP has no such call.

        Handles of earlier dispatches, and captured graphs, can no longer be used. The other memory of an
        `ElasticBuffer`, for pipelines, sessions and stored rows, is released, and must be made again. Ranks that were
        masked since the last dispatch stay masked; the new processes mask the same ranks.

        Args:
            communicator: the result of `Communicator.grow` of the buffer's `communicator`, or of the communicator that
                `shrink` made from it. Each rank has its number in the buffer. The caller closes the communicator after
                `destroy`.

        Raises:
            ArgumentError: the communicator's rank or number of ranks is not the buffer's, the buffer has this
                communicator already, or a `Buffer` was made without enable_shrink.
            CommunicatorError: a rank was lost while the old communicator was closed. The buffer has grown.
        """
        self._usable()
        if not isinstance(communicator, Communicator):
            raise ArgumentError("communicator", f"must be a Communicator, not {type(communicator).__name__}")
        if (found := (communicator.rank, communicator.world_size)) != (own := self._rank_and_ranks):
            raise ArgumentError("communicator", f"has (rank, ranks) = {found}; expected the buffer's, {own}")
        if communicator is self.communicator:
            raise ArgumentError("communicator", "is the buffer's own; expected the result of its `grow`")
        before, owned = self.communicator, self._owned
        # If the old communicator fails, it releases the memory itself, and the next call reports the lost rank.
        with contextlib.suppress(CommunicatorError):
            self._close_parts()
        self.communicator, self._owned, self._layers = communicator, False, Layers(communicator)
        if owned:
            before.close()

    def _close_parts(self) -> None:
        """Releases the memory of this buffer's calls. All ranks make this call together."""
        self._usable().close()

    def get_comm_stream(self) -> Any:
        """Returns the stream of asynchronous calls, a torch.cuda.Stream; None if the buffer is for CPU tensors."""
        return self._stream

    def _usable(self) -> Layers:
        if self._layers is None:
            raise ClosedError("the buffer was destroyed")
        return self._layers

    def _require_current(self, handle: Any, *layouts: str) -> Routing:
        routing, layers = routing_of(handle), self._layers
        if layers is None or routing.layer.ctx not in layers.all:
            self._usable()
            raise ArgumentError(
                "handle", "comes from a dispatch before ranks were lost, or from another buffer; dispatch again"
            )
        return routing_of(handle, *layouts) if routing.layer.layout not in layouts else routing

    def _once(self, finish: Callable[[], None], layer: EPAll2AllLayer, names: Names) -> Callable[[], None]:
        was_called = False

        def hook() -> None:
            nonlocal was_called
            if was_called:
                raise ArgumentError("hook", "was called already; a hook can be called only once")
            if layer.ctx not in self._usable().all:
                raise ArgumentError("hook", "comes from a call before ranks were lost; dispatch again")
            with self._told(names):
                finish()
            was_called = True

        return hook

    def _note(self, error: ArgumentError | CapacityError | CommunicatorError, names: Names) -> None:
        if not isinstance(error, CommunicatorError):
            names.rename(error)
        elif self._layers is not None and not self.communicator.closed and self.communicator.group.failure.aborted:
            self._layers.failure_raised = True

    @contextlib.contextmanager
    def _told(self, names: Names) -> Iterator[None]:
        """A context manager for a call: puts DeepEP's names into errors, and records that the call has raised the
        communicator's failure.
        """
        try:
            yield
        except (ArgumentError, CapacityError, CommunicatorError) as error:
            self._note(error, names)
            raise

    def _run(
        self,
        call: Callable[[], T],
        events: tuple[EventHandle | EventOverlap | None, ...],
        used: Any,
        names: Names,
        *,
        apart: bool,
    ) -> tuple[T, EventOverlap]:
        """Calls `call` on the current stream, or on the buffer's stream if `apart` is set. Returns the result and the
        event of the call.

        Args:
            events: the events that the call waits for, each an event or None. An asynchronous call whose first event is
                None waits for the current stream.
            used: the tensors and handles that the call uses, in nested tuples.
            names: DeepEP's names of a layer's arguments, for error messages.
            apart: whether the call is asynchronous, so that the current stream does not wait for the call.
        """
        if apart is False and events.count(None) == len(events):
            try:
                return call(), EventOverlap()
            except (ArgumentError, CapacityError, CommunicatorError) as error:
                self._note(error, names)
                raise
        for event in events:
            if event is not None and not isinstance(event, (EventHandle, EventOverlap)):
                raise ArgumentError("previous_event", f"must be an event or None, not {type(event).__name__}")
        with self._told(names):
            return self._run_on_stream(call, events, used, apart=as_flag(apart, "apart"))

    def _run_on_stream(
        self, call: Callable[[], T], events: tuple[EventHandle | EventOverlap | None, ...], used: Any, *, apart: bool
    ) -> tuple[T, EventOverlap]:
        awaited = [each.event if isinstance(each, EventOverlap) else each for each in events]

        def wait() -> None:
            for event in awaited:
                if event is not None:
                    event.current_stream_wait()

        if self._stream is None or not apart:
            wait()
            return call(), EventOverlap(EventHandle() if apart else None)
        current, own = torch.cuda.current_stream(), self._stream
        torch.cuda.set_stream(own)
        try:
            if awaited[0] is None:
                order_of(self.communicator.runtime.device).follow(current.cuda_stream, own.cuda_stream)
            wait()
            result = call()
            event = EventHandle()
        finally:
            torch.cuda.set_stream(current)
        if not torch.cuda.is_current_stream_capturing():  # a CUDA graph keeps its tensors' memory
            for tensor in _tensors(used):
                tensor.record_stream(self._stream)
            for tensor in _tensors(result):
                tensor.record_stream(current)
        return result, EventOverlap(event)


class ElasticBase(Connected):
    """The ranks and the size of an ElasticBuffer, for the classes that define its methods. `ElasticBuffer` sets and
    describes the attributes.
    """

    rank_idx: int
    num_ranks: int
    num_rdma_ranks: int
    num_bytes: int
    num_cpu_bytes: int

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Makes the current stream wait until all ranks have made this call.

        Args:
            use_comm_stream: whether to wait for the calls on the buffer's stream as well.
            with_cpu_sync: whether the CPU waits for all streams of the GPU, before and after the barrier.
            sequential: without effect.
        """
        self._usable()
        use_comm_stream = as_flag(use_comm_stream, "use_comm_stream")
        waits = as_flag(with_cpu_sync, "with_cpu_sync") and self._stream is not None
        if waits:
            self.communicator.synchronize()
        current = self._current_stream()
        stream = self._stream if use_comm_stream else current
        if stream is not current:
            stream.wait_stream(current)
        self.communicator.barrier(stream=stream)
        if stream is not current:
            current.wait_stream(stream)
        if waits:
            self.communicator.synchronize()

    def _current_stream(self) -> Any:
        return None if self._stream is None else torch.cuda.current_stream()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for each in values:
            yield from _tensors(each)
    elif isinstance(values, (Handle, EPHandle)):
        yield from _tensors((values.routing.desc.held, *vars(values).values()))
