"""Issues the calls of a process group.

On a GPU, a synchronous call runs on the current stream. An asynchronous call runs on the group's stream, which first
waits for the current stream. On the CPU, a synchronous call runs in the caller's thread and an asynchronous one in the
group's thread. C issues a call on a GPU if an earlier call of the same kind has prepared a launch. A *flow* is the
sends to one peer, or the receives from one peer.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

from msgspec import Struct

import torch
from proxyccl.channels.collectives.tensor_calls import CallInC, TensorCalls
from proxyccl.device.errors import CommunicatorError
from proxyccl.device.process import forks
from proxyccl.torch import tensor_collectives as on_tensors
from proxyccl.torch._device_calls import ADDED_BETWEEN, CallIssuer, QueuedCall
from proxyccl.torch.endpoints import Endpoints
from proxyccl.torch.errors import raise_as_torch, torch_errors
from proxyccl.torch.executor import Flow, GroupThreads
from proxyccl.torch.flight_recorder import profiler_event
from proxyccl.torch.on_gpu import GroupOnGpu, GroupOnGpus
from proxyccl.torch.tensor_collectives import PLAIN_OPS, in_memory
from proxyccl.torch.under_way import UnderWay
from proxyccl.torch.work import DeviceWork, HostWork, JointWork, TransferWork, Unwaited
from torch.autograd import profiler

Tensors = Sequence[torch.Tensor]
IS_BACKEND = hasattr(torch._C._distributed_c10d.Backend, "split")
"""Whether a Python class can be a backend of a process group, which torch 2.15 introduced. In earlier versions, a
Python class can only replace a whole process group.
"""
_logger = logging.getLogger("proxyccl.torch")
_NO_TIME = timedelta(0)
_NO_EVENT = nullcontext()
CPU = torch.device("cpu")
_Named = tuple[str, Any]
"""The name of a call, and the call's options for C."""


class _InC:
    """Holds the `CallIssuer`s that issue one process group's collectives on one GPU.

    Attributes:
        collectives: issues the collectives that do not consist of transfers. barriers: issues the barriers.
        named: maps the name of a call, such as "all_gather", to the call's `_Named`. For a reduction, the value is a
            dict: operator's kind to `_Named`; for a broadcast, root to `_Named`.
    """

    def __init__(self, calls: TensorCalls, ranks: int, issuer: Callable[..., CallIssuer]) -> None:
        self.collectives, self.barriers = issuer(calls.call_kept), issuer(calls.call_kept, blocks=True)
        self._calls, self._issuer = calls, issuer
        self._exchanges: CallIssuer | None = None

        def named(name: str, **options: Any) -> _Named:
            return name, calls.options(name, **options)

        def reductions(name: str, root: int | None = None) -> dict[int, _Named]:
            return {kind.value: named(name, op=op, root=root) for kind, op in PLAIN_OPS.items()}

        self.named: dict[str, Any] = {
            "broadcast": {root: named("broadcast", root=root) for root in range(ranks)},
            **{reduce_to(root): reductions("reduce", root) for root in range(ranks)},
            **{name: reductions(name) for name in ("all_reduce", "reduce_scatter")},
            **{name: named(name) for name in ("all_gather", "all_to_all", "barrier")},
        }

    @property
    def exchanges(self) -> CallIssuer | None:
        """The issuer of collectives that consist of transfers; None until the transfers' resources exist."""
        if self._exchanges is None and (call := self._calls.call_transfers) is not None:
            self._exchanges = self._issuer(call)
        return self._exchanges

    @property
    def count(self) -> int:
        made = (self.collectives, self.barriers, self._exchanges)
        return sum(issuer.count for issuer in made if issuer is not None)


def reduce_to(root: int) -> str:
    return f"reduce to rank {root}"


class _Call(Struct, eq=False):
    """A call that Python issues instead of C. Attributes:
    name: the call's name, for messages.
    outs: the tensors that the call writes, which are its result.
    xs: the other tensors that the call uses.
    make: makes the call on the current stream.
    device: the tensors' device.
    waits: whether the call is synchronous.
    seconds: the call's time-out; None for the group's.
    flow: the peer of a single transfer, and whether the transfer is a send; None for a collective.
    blocks: whether a wait for a call on a GPU blocks the CPU until the call has ended.
    number: the call's number in the group.
    """

    name: str
    outs: Tensors
    xs: Tensors
    make: Callable[[], Any]
    device: torch.device
    waits: bool
    seconds: float | None
    flow: Flow | None
    blocks: bool
    number: int

    @property
    def peer(self) -> int | None:
        return None if self.flow is None else self.flow[0]

    @property
    def source(self) -> int:
        return _source_of(self.flow)


class _Coalescing(threading.local):
    """Holds the Works of the calls that a thread coalesces; None while the thread does not coalesce."""

    works: list[DeviceWork | HostWork | JointWork] | None = None


class IssuedCalls:
    """Issues the calls of one rank of a process group.

    Attributes:
        rank: this rank's number in the group.
        process: the process that made the group; in a forked child, calls raise an error.
        threads, gpus: the group's threads, and its state on each GPU.
        between_all: the options of collectives that consist of transfers, by the call's name or by (name, root).
        coalescing: for each thread, the Works of its calls between torch's `start_coalescing` and `end_coalescing`.
        under_way: the calls in progress.
        unwaited: keeps Works alive until the program waits for them.
        group_name, group_desc: the group's name and description.
    """

    def __init__(self, rank: int, size: int, endpoints: Endpoints) -> None:
        self.rank, self._size, self._endpoints = rank, size, endpoints
        self.process = forks.here()
        everyone = tuple(range(size))
        self.between_all: dict[Any, on_tensors.Transfers] = {
            "all_gather": ("all_gather", "all", everyone),
            "all_to_all": ("all_to_all", everyone, everyone),
            **{("scatter", root): ("scatter", everyone if rank == root else (), root) for root in everyone},
            **{("gather", root): ("gather", root, everyone if rank == root else ()) for root in everyone},
        }
        self.threads = GroupThreads(rank, endpoints)
        self.gpus = GroupOnGpus(endpoints.check)
        self._in_c: dict[int, _InC] = {}  # collectives by GPU index; added once the communicator exists
        self._transferring: dict[tuple[int, int, bool], CallIssuer] = {}  # transfers by GPU index and flow
        self._numbers = itertools.count(1)  # numbers the group's calls
        self._collectives = 0  # the number of collectives that Python issued
        self._waited = itertools.count(1)  # counts synchronous calls on GPUs, of which one in ADDED_BETWEEN has a mark
        self.coalescing = _Coalescing()
        self.group_name = self.group_desc = ""
        self.unwaited = Unwaited()
        self.under_way = UnderWay(lambda: endpoints.failed is None)

    @property
    def collectives(self) -> int:
        """The number of collectives so far, equal on all ranks. Transfers are not counted: their number may differ."""
        return self._collectives + sum(made.count for made in self._in_c.values())

    @property
    def issued_in_c(self) -> int:
        transfers = sum(issuer.count for issuer in self._transferring.values())
        return transfers + sum(made.count for made in self._in_c.values())

    def oldest(self) -> str:
        oldest = self.under_way.oldest()
        name = "no call" if oldest is None else f"{oldest[1]}, call {oldest[0]}"
        return f"{name} of rank {self.rank}"

    @property
    def members(self) -> list[int]:
        """The numbers of this group's ranks in the default group."""
        return self._endpoints.members

    # -- calls on a GPU that C issues ---

    def in_c(self, x: Any, out: Any, opts: Any, attribute: str | None, name: str) -> Any:
        """Makes a call on a GPU by one call into C. If no prepared launch is kept for the call, returns NotImplemented.
        For the arguments see `CallIssuer.issue`, for the names `_InC.named`.
        """
        made = self._in_c.get((x[0] if type(x) is list else x).get_device())
        if made is None or profiler._is_profiler_enabled:  # `_issue` makes the calls while a profiler runs
            return NotImplemented
        try:
            return made.collectives.issue(x, out, opts, attribute, made.named[name])
        except Exception as error:
            raise_as_torch(error)

    def exchange_in_c(self, on: torch.Tensor, x: Any, out: Any, opts: Any, options: on_tensors.Transfers) -> Any:
        """Makes a collective that consists of transfers (`on_tensors.exchange`) by one call into C, or returns
        NotImplemented. Several tensors must be passed as a tuple. The call runs on the GPU of the tensor `on`.
        """
        made = self._in_c.get(on.get_device())
        if made is None or profiler._is_profiler_enabled or (exchanges := made.exchanges) is None:
            return NotImplemented
        try:
            return exchanges.issue(x, out, opts, None, (options[0], options))
        except Exception as error:
            raise_as_torch(error)

    def barrier(self, device: torch.device, opts: Any) -> Any:
        """Waits until all ranks have called this function; for a GPU, makes the current stream wait.

        A barrier on the CPU first waits for earlier work on the GPUs that the group has used, as NCCL's barrier does,
        because torch names a GPU only if the program has passed `device_ids`.
        """
        made = None if device.index is None else self._in_c.get(device.index)
        if made is not None and not profiler._is_profiler_enabled:
            with torch_errors():
                work = made.barriers.issue((), (), opts, None, made.named["barrier"])
            if work is not NotImplemented:
                return work
        marks = self.gpus.marks() if device == CPU else []
        return self.collective("barrier", (), (), opts, on_tensors.barrier, device, marks, device=device, blocks=True)

    def _make_issuer(
        self,
        gpu: GroupOnGpu,
        stream: int,
        call: CallInC,
        *,
        flow: tuple[torch.device, Flow] | None = None,
        blocks: bool = False,
    ) -> CallIssuer:
        return CallIssuer(
            gpu.in_c,
            call,
            self.process,
            stream,
            self._numbers,
            self.under_way.log(flow),
            functools.partial(self.under_way.forget_ended, flow),
            DeviceWork,
            self._handed_out,
            _source_of(None if flow is None else flow[1]),
            blocks,
        )

    # -- other calls ---

    def require_process(self) -> None:
        """Raises an error in a forked child. Call this before taking a lock, which the fork may have found taken."""
        if not self.process.is_here:
            with torch_errors():
                self.process.require("the process group")

    def collective(
        self,
        name: str,
        outs: Tensors,
        xs: Tensors,
        opts: Any,
        function: Callable[..., None],
        *arguments: Any,
        device: torch.device | None = None,
        blocks: bool = False,
    ) -> Any:
        """Makes a call that all ranks make, by ``function(communicator, *arguments)``. The device defaults to the
        tensors' device; see `_Call` for the other arguments.

        Returns:
            The call's Work; None for a synchronous call on a GPU, because the current stream already orders the call.
        """
        self.require_process()
        self._collectives += 1
        where = (xs or outs)[0].device if device is None else device

        def make() -> None:
            comm = self._endpoints.of_all(where)
            comm.group.failure.require_awake()  # the transfers of `on_tensors.exchange` resume no group
            function(comm, *arguments)

        number = next(self._numbers)
        return self._issue(_Call(name, outs, xs, make, where, _waits(opts), _seconds_of(opts), None, blocks, number))

    def _issue(self, call: _Call) -> Any:
        shown: Any = _NO_EVENT
        if profiler._is_profiler_enabled:
            group = self.group_name, self.group_desc
            shown = profiler_event(call.name, call.outs, call.xs, ranks=self.members, group=group)
        with shown:
            if call.device.type == "cpu":
                work: Any = self._issue_on_cpu(call)
            elif call.flow is not None or self._is_queued(call.device, waits=call.waits):
                work = self._issue_queued(call)
            else:
                work = self._issue_on_gpu(call)
        return work if work is None else self._handed_out(work, waits=call.waits)

    def _handed_out(self, work: Any, *, waits: bool = False) -> Any:
        """Adds a Work to the coalesced calls, or else keeps the Work alive if torch does not. Returns the Work."""
        if self.coalescing.works is not None:
            self.coalescing.works.append(work)
        elif not waits and not IS_BACKEND:
            self.unwaited.add(work)
        return work

    def _is_queued(self, device: torch.device, *, waits: bool) -> bool:
        """Returns whether a collective on a GPU must be queued to the group's thread. An asynchronous collective is
        queued until the communicator exists, because other ranks may first wait for this rank in another group. A
        synchronous collective is never queued, but waits here until the queued collectives have been issued.
        """
        executor = self.threads.find(device, None)
        is_idle = executor is None or executor.is_idle
        if is_idle and self._endpoints.has_met(device, None):
            return False
        gpu = self.gpus.of(device)
        if not waits and not gpu.order.is_capturing(gpu.current()):
            return True
        if executor is not None:
            executor.run_here(lambda: None, after_others=True)
        return False

    def _issue_on_cpu(self, call: _Call) -> HostWork:
        work = HostWork(call.outs, self.threads.callbacks_of(CPU), call.source)
        self.under_way.add(call.flow, call.number, call.name, None)

        def run() -> None:
            failure: BaseException | None = None
            try:
                with torch.inference_mode(), self._endpoints.bounded(CPU, call.peer, call.seconds):
                    call.make()
            except BaseException as error:  # the Work's `wait` raises the error
                failure = error
            if not isinstance(failure, CommunicatorError):
                self.under_way.end(call.flow, call.number)
            elif call.flow is not None:
                self._log_failed_meeting(call, failure)
            work.finish(failure)

        executor = self.threads.of(CPU, call.flow)
        if not (call.waits and executor.run_here(run)):
            executor.submit(run)
        if call.waits:
            work.wait()
        return work

    def _issue_on_gpu(self, call: _Call) -> DeviceWork | None:
        device, gpu = call.device, self.gpus.of(call.device)
        with torch_errors(), torch.no_grad():
            stream = gpu.current()
            if call.waits:
                call.make()
            else:
                gpu.order.follow(stream, gpu.own)
                stream = gpu.own
                with torch.cuda.stream(gpu.own_stream):
                    call.make()
            if device.index not in self._in_c:
                calls = self._endpoints.of_all(device).tensor_calls
                self._in_c[device.index] = _InC(calls, self._size, functools.partial(self._make_issuer, gpu, gpu.own))
        captured = gpu.order.is_capturing(stream)
        if call.waits and not call.blocks:
            if not captured:
                mark = None if next(self._waited) % ADDED_BETWEEN else gpu.in_c.mark(stream)
                self.under_way.add(None, call.number, call.name, mark)
            return None
        # A captured call does not run, so the host can't wait for the call.
        blocks = call.blocks and not captured
        queued = QueuedCall(gpu.in_c, call.xs, call.outs, stream, captured, blocks, -1)
        queued.mark_end()
        if not captured:
            self.under_way.add(None, call.number, call.name, queued.mark)
        return DeviceWork.of(queued)

    def _issue_queued(self, call: _Call) -> DeviceWork:
        """Queues a transfer on its flow's stream, or an asynchronous collective on the group's stream.

        If the communicator exists, the caller's thread queues the call immediately. If the communicator does not exist,
        the flow's or the group's thread makes the communicator and queues the call: the program's thread must not wait
        for a peer, because the peer may be waiting for a call that the program makes later. The call runs after the
        work that is on the program's current stream.
        """
        device, flow, peer = call.device, call.flow, call.peer
        gpu = self.gpus.of(device)
        stream = gpu.own_stream if flow is None else self.gpus.stream_of(device, flow)
        order = None if flow is None else (device, flow)
        current, handle = gpu.current(), stream.cuda_stream
        ready = gpu.in_c.mark(current)
        is_captured = gpu.order.is_capturing(current)
        queued = QueuedCall(gpu.in_c, call.xs, call.outs, handle, is_captured, call.blocks, call.source)
        work = TransferWork.of_transfer(queued, self.threads.callbacks_of(device))
        executor, has_met = self.threads.of(device, flow), self._endpoints.has_met(device, peer)
        if not is_captured:
            marks = work.marks  # lets the lambda keep the marks alive, but not the Work's tensors
            self.under_way.add(order, call.number, call.name, lambda: bool(marks) and marks[0].query())
        elif not has_met:
            expected = "an earlier transfer with that rank, which creates the resources of transfers"
            if peer == self.rank:
                expected = "a copy, because the peer is this rank itself"
            raise RuntimeError(f"{call.name}: a graph is being captured; expected {expected}")

        def run() -> None:
            failure: BaseException | None = None
            try:
                with torch.inference_mode(), torch.cuda.stream(stream):
                    ready.hold(handle)
                    call.make()
            except BaseException as error:  # the Work's `wait` raises the error
                failure = error
                if not is_captured and not isinstance(error, CommunicatorError):
                    self.under_way.end(order, call.number)
                self._log_failed_meeting(call, error)
            work.issued(failure)

        if has_met and executor.run_here(run, after_others=is_captured):
            work.raise_failure()
        else:
            executor.submit(run)
        return work

    def _log_failed_meeting(self, call: _Call, error: BaseException) -> None:
        """Logs why no communicator could be made, because the watchdog checks only communicators that exist."""
        if isinstance(error, CommunicatorError) and not self._endpoints.has_met(call.device, call.peer):
            _logger.error("%s, call %d of rank %d: %s", call.name, call.number, self.rank, error)

    # -- transfers ---

    def transfer(self, tensors: Tensors, peer: int, *, sends: bool) -> Any:
        """Sends a tensor to a peer or receives one from it. Returns the Work, or None while calls are coalesced.

        An error ends the coalescing, because torch's `batch_isend_irecv` then calls no `end_coalescing`.
        """
        try:
            work = self._transfer(tensors, peer, sends=sends)
        except BaseException:
            self.coalescing.works = None
            raise
        return None if self.coalescing.works is not None else work

    def _transfer(self, tensors: Tensors, peer: int, *, sends: bool) -> Any:
        (x,) = tensors
        named, flow = _by_flow(peer, int(self.rank < peer), sends), (peer, sends)
        work = self._transfer_in_c(x, flow, named)
        if work is NotImplemented:
            tensors = in_memory(tensors)
            require_rank(peer, self._size, "peer")
            (tensor,) = tensors

            def make() -> None:
                if peer == self.rank:
                    self._endpoints.to_self(tensor, sends=sends)
                    return
                comm = self._endpoints.with_peer(tensor.device, peer)
                with self._endpoints.transferring(peer):
                    on_tensors.exchange(comm, *_sides(tensor, flow), named[1])

            self.require_process()
            outs, xs = ((), tensors) if sends else (tensors, ())
            number = next(self._numbers)
            return self._issue(_Call(named[0], outs, xs, make, tensor.device, False, None, flow, False, number))
        return work

    def _transfer_in_c(self, x: torch.Tensor, flow: Flow, named: _Named) -> Any:
        """Makes a transfer by one call into C. Returns NotImplemented if no prepared launch or no communicator exists,
        or if an earlier transfer of the flow is still queued.
        """
        number = x.get_device()
        executor = None if number < 0 else self.threads.find(x.device, flow)
        if executor is None or not executor.is_idle or profiler._is_profiler_enabled:
            return NotImplemented
        calls = self._transferring.get((number, *flow))
        if calls is None and (calls := self._transfers_of(x.device, flow)) is None:
            return NotImplemented
        try:
            return calls.issue(*_sides(x, flow), None, None, named)
        except Exception as error:
            raise_as_torch(self._endpoints.with_ranks(error, flow[0]))

    def _transfers_of(self, device: torch.device, flow: Flow) -> CallIssuer | None:
        if not self._endpoints.has_met(device, flow[0]):
            return None
        comm = self._endpoints.with_peer(device, flow[0])
        call, stream = comm.tensor_calls.call_transfers, self.gpus.stream_of(device, flow).cuda_stream
        assert call is not None  # `with_peer` has prepared the transfers
        made = self._make_issuer(self.gpus.of(device), stream, call, flow=(device, flow))
        return self._transferring.setdefault((device.index, *flow), made)

    # -- coalescing ---

    def joint(
        self, call: Callable[..., Any], xs: Tensors, outs: Tensors, opts: Any, attribute: str | None, name: str
    ) -> Any:
        """Makes a call for each tensor, and returns one Work for all the calls. First tries `in_c` with the arguments
        from `xs` to `name`. torch's functional collectives pass one tensor.
        """
        if len(xs) == 1:
            (x,), (out,) = xs, outs
            return call(*((x,) if out is x else (out, x)), opts)
        issued = self.in_c(xs, outs, opts, attribute, name)
        if issued is not NotImplemented and type(issued) is not tuple:
            return issued
        collected: list[DeviceWork | HostWork | JointWork] = []
        done, first = (0, None) if issued is NotImplemented else issued
        if first is not None:
            collected.append(first)
        outer, self.coalescing.works = self.coalescing.works, collected
        try:
            for x, out in zip(xs[done:], outs[done:], strict=True):
                call(*((x,) if out is x else (out, x)), opts)
        finally:
            self.coalescing.works = outer
        return self._handed_out(JointWork(collected), waits=_waits(opts)) if collected else None

    def close(self) -> None:
        """Gives the streams back for use by other groups, after the communicators were closed."""
        self._in_c.clear()
        self._transferring.clear()
        self.gpus.close()


def require_rank(rank: int, size: int, argument: str) -> None:
    """Raises ValueError if a number is not a rank of the group; otherwise the call would wait until the time-out."""
    if not 0 <= rank < size:
        raise ValueError(f"{argument}: {rank} is not a rank of the group; expected 0 to {size - 1}")


@functools.cache
def _by_flow(peer: int, number: int, sends: bool) -> tuple[str, on_tensors.Transfers]:
    """Returns a transfer's name and options. `number` is the peer's rank in the pair's communicator."""
    name = f"send to rank {peer}" if sends else f"recv from rank {peer}"
    return name, ((name, number, ()) if sends else (name, (), number))


def _sides(tensor: torch.Tensor, flow: Flow) -> tuple[Any, Any]:
    return (tensor, ()) if flow[1] else ((), tensor)


def _source_of(flow: Flow | None) -> int:
    return flow[0] if flow is not None and not flow[1] else -1


def _waits(opts: Any) -> bool:
    return opts is not None and not getattr(opts, "asyncOp", True)


def _seconds_of(opts: Any) -> float | None:
    given = getattr(opts, "timeout", None)
    return given.total_seconds() if isinstance(given, timedelta) and given > _NO_TIME else None
