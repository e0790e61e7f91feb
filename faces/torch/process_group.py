"""The process group: torch.distributed's calls, on tensors of CPUs and GPUs.

It checks arguments and decides where a call runs. Synchronous calls run on the current stream, or in the caller's
thread; asynchronous ones on a stream of the group that waits for the current one, or in a thread of the group.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from proxyccl.channels.collectives.request import CTA_POLICIES, CtaPolicy
from proxyccl.channels.collectives.tensor_calls import CallInC
from proxyccl.channels.communicator import Communicator
from proxyccl.device.errors import CommunicatorError
from proxyccl.device.process import forks
from proxyccl.torch import flight_recorder, own_streams, pools
from proxyccl.torch import tensor_collectives as on_tensors
from proxyccl.torch._device_calls import ADDED_BETWEEN, CallIssuer
from proxyccl.torch.device_calls import DeviceCalls, reduce_to
from proxyccl.torch.device_runtimes import compile_early
from proxyccl.torch.endpoints import LINGER_SECONDS, Endpoints
from proxyccl.torch.errors import raise_as_torch, torch_errors
from proxyccl.torch.executor import Executor
from proxyccl.torch.monitored_barrier import monitored_barrier
from proxyccl.torch.on_gpu import GroupOnGpu
from proxyccl.torch.overlaps import LEAST_BYTES, Overlaps, Watched
from proxyccl.torch.profiled import event as profiler_event
from proxyccl.torch.tensors import in_memory
from proxyccl.torch.under_way import UnderWay
from proxyccl.torch.unwaited import Unwaited
from proxyccl.torch.watchdog import watch
from proxyccl.torch.whole_group import WholeGroup
from proxyccl.torch.work import DeviceWork, HostWork, JointWork, TransferWork
from proxyccl.torch_tensors.untraced import untraced
from torch.autograd import profiler

Tensors = Sequence[torch.Tensor]
NAME = "proxyccl"

IS_BACKEND = hasattr(torch._C._distributed_c10d.Backend, "split")
"""Whether Python can be a backend of torch's process group (torch 2.15), or only a whole process group."""
_TorchBase: Any = torch._C._distributed_c10d.Backend if IS_BACKEND else dist.ProcessGroup
_bases: tuple[Any, ...] = (_TorchBase,) if IS_BACKEND else (WholeGroup, _TorchBase)
_logger = logging.getLogger("proxyccl.torch")
_NO_TIME = timedelta(0)
_NO_EVENT = nullcontext()
_FEW, _LARGE_BYTES = 4, 1 << 20
"""Tensors of a coalesced call are not joined if there are at most this many, or if they have this size on average."""
_LOOK_SECONDS = 0.05
"""How often `shutdown`, while it waits for calls, looks whether ranks have left."""
_CPU = torch.device("cpu")
_Flow = tuple[int, bool]
"""A peer, and whether this rank sends to it."""


@functools.cache
def _by_flow(peer: int, number: int, sends: bool) -> tuple[str, on_tensors.Transfers]:
    """The name and the options of a transfer with a peer, which has this number in their communicator."""
    name = f"send to rank {peer}" if sends else f"recv from rank {peer}"
    return name, ((name, number, ()) if sends else (name, (), number))


class _Choice:
    """How a call is made on a GPU.

    Args:
        collective: its name.
        policy: that the ranks chose; None for the usual one.
        watched: measures what the program does meanwhile; None for a call that is not measured.
        queued: the size and a function that tells the output's address, of a call for which the ranks choose when its
            turn has come.

    Attributes:
        name: of the call, for `DeviceCalls`.
    """

    __slots__ = ("_collective", "_policy", "_queued", "_watched", "name")

    def __init__(
        self,
        collective: str,
        policy: CtaPolicy | None = None,
        watched: Watched | None = None,
        queued: tuple[int, Callable[[], int]] | None = None,
    ) -> None:
        self._collective, self._policy, self._watched, self._queued = collective, policy, watched, queued
        self.name = collective if policy is None else f"{collective}, {policy}"

    def policy(self, comm: Communicator) -> CtaPolicy | None:
        """The policy, in the call's turn."""
        if self._queued is None or not comm.tensor_calls.chooses:
            return self._policy
        nbytes, output = self._queued
        return comm.tensor_calls.choose_policy(self._collective, nbytes, beside=False, output=output)

    def watch(self, work: Any) -> Any:
        """The call's Work, which measures if it shall."""
        if self._watched is not None and isinstance(work, DeviceWork):
            work.watch(self._watched)
        return work


_choices = {
    (name, policy): _Choice(name, policy)
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    for policy in (None, *CTA_POLICIES)
}


class _Coalescing(threading.local):
    """The Work that a thread collects; None while it collects none."""

    works: list[DeviceWork | HostWork | JointWork] | None = None


class _Callbacks(threading.local):
    """The depth of the callbacks that a thread runs: 0 if it runs none."""

    depth = 0


_callbacks = _Callbacks()


@untraced
class ProcessGroupProxyCCL(*_bases):  # type: ignore[misc]  # the bases depend on torch
    """The ranks of a torch.distributed group, by ProxyCCL. torch makes it: `init_process_group`, `new_group`.

    Sends and receives between two ranks meet in order; their tags are ignored.

    Args:
        store: where the ranks meet.
        rank: this rank's number in the group.
        size: number of ranks.
        timeout: bound of every wait.
        whole: the group that these ranks are a part of, or None.
        members: the ranks' numbers there.
        endpoints: of these ranks, if they exist already, with a store of their own.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        whole: ProcessGroupProxyCCL | None = None,
        members: Sequence[int] = (),
        endpoints: Endpoints | None = None,
    ) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._timeout = rank, size, timeout
        seconds = timeout.total_seconds()
        if endpoints is None:
            store = _unused_part(store, rank)
            endpoints = (
                Endpoints(store, rank, size, seconds)
                if whole is None
                else whole._endpoints.part(store, members, seconds)
            )
        self._endpoints: Endpoints = endpoints
        self._process = forks.here()
        self._executors: dict[tuple[torch.device, _Flow | int | None], Executor] = {}
        self._gpus: dict[torch.device, GroupOnGpu] = {}
        self._flow_streams: dict[tuple[torch.device, _Flow], Any] = {}
        self._overlaps: dict[int, Overlaps | None] = {}  # by the GPU's number, once it has made a long call
        self._made: dict[int, DeviceCalls] = {}  # by the GPU's number, once its communicator was made: collectives, …
        self._transferring: dict[tuple[int, int, bool], CallIssuer] = {}  # … and transfers, by GPU and flow
        everyone = tuple(range(size))
        self._to_all = {root: ("scatter", everyone if rank == root else (), root) for root in everyone}
        self._from_all = {root: ("gather", root, everyone if rank == root else ()) for root in everyone}
        self._all_gather, self._all_to_all = ("all_gather", "all", everyone), ("all_to_all", everyone, everyone)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)  # of the group's calls
        self._sequence = 0  # of the latest, except those that C has issued
        self._collectives = 0  # that C has not issued
        self._waited = itertools.count(1)  # synchronous ones on GPUs, of which few have a mark
        self._barriers = itertools.count()
        self._splits = itertools.count()
        self._coalescing = _Coalescing()
        self._group_name = self._group_desc = ""
        self._unwaited = Unwaited()
        self._under_way = UnderWay(lambda: self._endpoints.failed is None)
        flight_recorder.groups[self] = None
        watch(self)

    # -- torch's interface of every group ---

    def getBackendName(self) -> str:  # noqa: N802  torch's names, here and below
        """The backend's name."""
        return NAME

    name = _get_backend_name = getBackendName

    def rank(self) -> int:
        """This rank's number in the group."""
        return self._rank

    getRank = rank  # noqa: N815

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    getSize = size  # noqa: N815

    @property
    def endpoints(self) -> Endpoints:
        """The communicators of the group."""
        return self._endpoints

    @property
    def _store(self) -> Any:
        with torch_errors():
            return self._endpoints.store

    @property
    def options(self) -> Any:
        """torch's options of a backend: its name and time-out."""
        return torch._C._distributed_c10d.Backend.Options(NAME, timeout=self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Changes the bound of every wait from now on."""
        self._require_process()
        self._timeout = timeout
        self._endpoints.set_timeout(timeout.total_seconds())

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: every rank counts its calls from 0."""

    def _get_sequence_number_for_group(self) -> int:
        # The ranks' numbers must be equal, so transfers do not count: torch compares them at its debug level DETAIL.
        return self._collectives + sum(calls.count for made in self._made.values() for calls in made.all)

    @property
    def supports_splitting(self) -> bool:
        """Whether torch may call `split`."""
        return True

    @property
    def supports_coalescing(self) -> bool:
        """Whether torch may collect calls between `start_coalescing` and `end_coalescing`."""
        return True

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> ProcessGroupProxyCCL | None:
        """A group of some of this group's ranks, in their order; None on the others. All ranks call this together.

        Args:
            store: where the ranks of this group meet.
            ranks: numbers in this group.
            opts: options; their time-out counts.
        """
        number = next(self._splits)
        if self._rank not in ranks:
            return None
        name = f"split-{number}-{'-'.join(map(str, ranks))}"
        timeout = getattr(opts, "_timeout", None) or self._timeout
        members = list(ranks)
        own = members.index(self._rank)
        of_part = dist.PrefixStore(name, store)
        part = ProcessGroupProxyCCL(of_part, own, len(members), timeout, whole=self, members=members)
        part._group_name = getattr(opts, "group_name", "") or name
        return part

    @property
    def supports_shrinking(self) -> bool:
        """Whether torch may call `shrink`: it then makes its own process group around a backend."""
        return IS_BACKEND

    def get_group_store(self) -> Any:
        """Where the ranks meet."""
        return self._store

    def shrink(self, ranks_to_exclude: list[int], shrink_flags: int = 0, opts_override: Any = None) -> Any:
        """A group of the ranks that are not excluded, in their order. They alone call this, together.

        Args:
            ranks_to_exclude: numbers in this group: all lost ranks, and possibly others.
            shrink_flags: torch's SHRINK_ABORT to end calls in progress, on all ranks; 0 to wait for them.
            opts_override: options; their time-out counts.
        """
        global _default  # noqa: PLW0603  torch has one default group
        if shrink_flags:
            self.abort()
        timeout = getattr(opts_override, "_timeout", None) or self._timeout
        excluded = sorted(ranks_to_exclude)
        store = dist.PrefixStore(f"shrunk-without-{'-'.join(map(str, excluded))}", self._store)
        with torch_errors():
            endpoints = self._endpoints.shrink(store, excluded, timeout.total_seconds())
        number = self._rank - sum(rank < self._rank for rank in excluded)
        shrunk = ProcessGroupProxyCCL(store, number, self._size - len(excluded), timeout, endpoints=endpoints)
        if _default is not None and _default() is self:
            _default = weakref.ref(shrunk)
        return shrunk

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether `allocate_tensor` gives registered memory: on GPUs, once the group's communicator exists."""
        return pools.allocates(self._endpoints, _with_index(device))

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of `size` elements, uninitialised, in memory that counts as registered."""
        with torch_errors():
            return pools.allocate(self._endpoints, size, dtype, _with_index(device))

    @property
    def mem_allocator(self) -> Any:
        """The allocator for a `torch.cuda.MemPool` whose memory `register_mem_pool` registers."""
        return pools.pool_allocator()

    def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
        """Has the memory of pools of `mem_allocator` on the current device count as registered, now and later."""
        with torch_errors():
            pools.use_pool(self._endpoints, torch.device("cuda", torch.cuda.current_device()))

    def deregister_mem_pool(self, pool: Any) -> None:
        """Nothing to do: memory is deregistered when the pool frees it."""

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Makes the communicator of a device now. All ranks call this together."""
        if device is not None:
            self._endpoints.of_all(_with_index(device))

    def abort(self) -> None:
        """Ends the group on all ranks. Does not wait."""
        self._require_process()
        self._endpoints.abort("torch aborted the process group")

    def shutdown(self) -> None:
        """Ends the group on this rank, after the calls that its threads still have: for these it waits, at most for the
        group's time-out, unless the group has failed; and at most two seconds for one that needs a rank which has ended
        the group. Does not wait for other ranks to end it. Nothing in a fork's child.
        """
        if not self._process.is_here:
            return
        self._await_calls(time.monotonic() + self._timeout.total_seconds())
        if self._endpoints.failed is not None:  # the watchdog may not have seen it
            flight_recorder.write_failure()
        self._endpoints.end_meetings()
        until = time.monotonic() + LINGER_SECONDS
        for (_, of), executor in self._all_executors.items():
            executor.end()
            if not isinstance(of, int) and not executor.runs_here:  # calls that have failed use the memory until then
                executor.wait_until_idle(until - time.monotonic())
        self._endpoints.close()
        self._made.clear()
        self._overlaps.clear()
        self._transferring.clear()
        while self._flow_streams:
            (device, _), stream = self._flow_streams.popitem()
            own_streams.give_back(device, stream)
        while self._gpus:
            _, gpu = self._gpus.popitem()
            gpu.give_back()
        flight_recorder.groups.pop(self, None)

    def _await_calls(self, deadline: float) -> None:
        """Waits for the calls that the group's threads have, as `shutdown` says."""
        in_vain: dict[Any, tuple[int, float]] = {}  # the calls of a thread whose peers left, and when they are given up
        while self._endpoints.failed is None:
            busy = {key: executor for key, executor in self._all_executors.items() if not executor.is_idle}
            now = time.monotonic()
            if not busy or now > deadline or any(executor.runs_here for executor in busy.values()):
                return
            for key, executor in busy.items():
                _, of = key
                peer = of[0] if isinstance(of, tuple) else None
                if isinstance(of, int) or peer == self._rank or not self._endpoints.has_left(peer):
                    continue
                ended, until = in_vain.get(key, (-1, 0.0))
                if ended != executor.ended:  # those that the rank has made before it left do end
                    in_vain[key] = executor.ended, now + LINGER_SECONDS
                elif now > until:
                    self._endpoints.end_calls(peer, "it was shut down, and a call waited for a rank that has left")
                    return
            next(iter(busy.values())).wait_until_idle(min(deadline - now, _LOOK_SECONDS))

    @property
    def _all_executors(self) -> dict[tuple[torch.device, _Flow | int | None], Executor]:
        with self._lock:
            return dict(self._executors)

    # -- issuing calls ---

    def _require_process(self) -> None:
        """Raises in a fork's child, before any lock is taken: a thread of the parent's may have held it at the fork."""
        if not self._process.is_here:
            with torch_errors():
                self._process.require("the process group")

    def _issue(
        self,
        name: str,
        outs: Tensors,
        xs: Tensors,
        function: Callable[[], Any],
        *,
        device: torch.device,
        opts: Any = None,
        blocks: bool = False,
        flow: _Flow | None = None,
    ) -> Any:
        """Runs a call, or queues it. Returns its Work: None for a call on the current stream, which torch need not wait
        for.

        Args:
            name: for messages.
            outs: the tensors that it writes, which are its result.
            xs: the others that it uses.
            function: the call, on the stream that is then current.
            device: of the tensors.
            opts: torch's options, which say whether the program continues meanwhile.
            blocks: whether the end of a device's call is waited for on the CPU.
            flow: for a single transfer, the peer and whether it is a send: it runs concurrently with other calls.
        """
        self._require_process()
        self._sequence = next(self._numbers)
        self._collectives += flow is None
        waits = _waits(opts)
        work: DeviceWork | HostWork | None
        with self._event(name, outs, xs) if profiler._is_profiler_enabled else _NO_EVENT:
            if device.type == "cpu":
                work = self._issue_on_cpu(name, outs, function, flow, _seconds_of(opts), waits=waits)
            elif flow is not None or self._is_queued(device, waits=waits):
                work = self._issue_queued(name, outs, xs, function, device, flow, blocks=blocks)
            else:
                work = self._issue_on_device(name, outs, xs, function, device, waits=waits, blocks=blocks)
        return work if work is None else self._handed_out(work, waits=waits)

    def _collective(
        self,
        name: str,
        device: torch.device,
        outs: Tensors,
        xs: Tensors,
        opts: Any,
        function: Callable[[Communicator], None],
        *,
        blocks: bool = False,
    ) -> Any:
        """`_issue` for a call of all ranks: `function` makes the call with their communicator for the device."""

        def call() -> None:
            function(self._endpoints.of_all(device))

        return self._issue(name, outs, xs, call, device=device, opts=opts, blocks=blocks)

    def _event(self, name: str, outs: Tensors, xs: Tensors) -> AbstractContextManager[None]:
        """The call in torch's profiler."""
        group = self._group_name, self._group_desc
        return profiler_event(name, outs, xs, ranks=self._endpoints.members, group=group)

    def _handed_out(self, work: Any, *, waits: bool = False) -> Any:
        """A Work for torch, which is kept where torch does not."""
        if self._coalescing.works is not None:
            self._coalescing.works.append(work)
        elif not waits and not IS_BACKEND:
            self._unwaited.add(work)
        return work

    def _is_queued(self, device: torch.device, *, waits: bool) -> bool:
        """Whether a collective on a GPU goes to the group's thread. Asynchronous ones do until the ranks have met:
        others may use other groups first, and wait there for this rank. A synchronous one waits for the queued ones.
        """
        executor = self._executors.get((device, None))
        is_idle = executor is None or executor.is_idle
        if is_idle and self._endpoints.has_met(device, None):
            return False
        gpu = self._gpu(device)
        if not waits and not gpu.order.is_capturing(gpu.current()):
            return True
        if executor is not None:
            executor.run_here(lambda: None, after_others=True)
        return False

    def _choose(self, collective: str, output: torch.Tensor, nbytes: int, opts: Any) -> _Choice:
        """The choice of kernels for a call, which the ranks make together if the call is long.

        Args:
            collective: its name.
            output: the tensor that the call writes.
            nbytes: size of the larger of a rank's input and output.
            opts: torch's options.
        """
        number = output.get_device()
        if nbytes < LEAST_BYTES or number < 0:
            return _choices[collective, None]
        self._require_process()
        waits = _waits(opts)
        try:
            overlaps = self._overlaps[number]
        except KeyError:
            if self._is_queued(output.device, waits=waits):
                return _Choice(collective, queued=(nbytes, output.data_ptr))
            overlaps = self._overlaps[number] = self._overlaps_of(output.device)
        if overlaps is None:
            return _choices[collective, None]
        try:
            policy, watched = overlaps.choose(collective, nbytes, output.data_ptr, waits=waits)
        except Exception as error:
            raise_as_torch(error)
        return _choices[collective, policy] if watched is None else _Choice(collective, policy, watched)

    def _overlaps_of(self, device: torch.device) -> Overlaps | None:
        """None where the ranks never choose. The ranks have met, so collectives of the GPU are no longer queued."""
        with torch_errors():
            comm = self._endpoints.of_all(device)
            calls = comm.tensor_calls
            return Overlaps(self._gpu(device), comm.runtime, calls) if calls.chooses else None

    def _issue_in_c(self, x: Any, out: Any, opts: Any, attribute: str | None, name: str) -> Any:
        """Makes a call on a GPU by one call into C, if its form is kept.

        Args:
            x, out, opts, attribute: as for `CallIssuer.issue`.
            name: of the call; see `DeviceCalls`.

        Returns:
            As `CallIssuer.issue`.
        """
        made = self._made.get((x[0] if type(x) is list else x).get_device())
        if made is None:
            return NotImplemented
        return self._issue_by(made.collectives, x, out, opts, attribute, made.named[name])

    @staticmethod
    def _issue_by(calls: CallIssuer | None, x: Any, out: Any, opts: Any, attribute: str | None, named: Any) -> Any:
        if calls is None or profiler._is_profiler_enabled:  # `_issue` makes calls that a profiler shows
            return NotImplemented
        try:
            return calls.issue(x, out, opts, attribute, named)
        except Exception as error:
            raise_as_torch(error)

    def _exchange(self, on: torch.Tensor, x: Any, out: Any, opts: Any, options: on_tensors.Transfers) -> Any:
        """As `_issue_in_c`, for a call that is transfers between all ranks; a list of tensors is a tuple here.

        Args:
            on: one of the tensors.
            x, out, opts: as for `_issue_in_c`.
            options: as for `on_tensors.exchange`.
        """
        made = self._made.get(on.get_device())
        if made is None:
            return NotImplemented
        return self._issue_by(made.exchanges, x, out, opts, None, (options[0], options))

    def _issue_on_device(
        self,
        name: str,
        outs: Tensors,
        xs: Tensors,
        function: Callable[[], Any],
        device: torch.device,
        *,
        waits: bool,
        blocks: bool,
    ) -> DeviceWork | None:
        gpu = self._gpu(device)
        with torch_errors(), torch.no_grad():
            stream = gpu.current()
            if waits:
                function()
            else:
                gpu.order.follow(stream, gpu.own)
                stream = gpu.own
                with torch.cuda.stream(gpu.own_stream):
                    function()
            if device.index not in self._made:
                calls = self._endpoints.of_all(device).tensor_calls
                self._made[device.index] = DeviceCalls(calls, self._size, functools.partial(self._issuer, gpu, gpu.own))
        captured = gpu.order.is_capturing(stream)
        if waits and not blocks:
            if not captured:
                mark = None if next(self._waited) % ADDED_BETWEEN else gpu.in_c.mark(stream)
                self._under_way.add(None, self._sequence, name, mark)
            return None
        # A graph's memory is its own, and a captured call is not in progress: the host can't wait for its end.
        call = gpu.queued_call(outs, xs, stream, keeps=not captured, blocks=blocks and not captured)
        call.mark_end()
        if not captured:
            self._under_way.add(None, self._sequence, name, call.mark)
        return DeviceWork.of(call)

    def _issuer(
        self,
        gpu: GroupOnGpu,
        stream: int,
        call: CallInC,
        *,
        flow: tuple[torch.device, _Flow] | None = None,
        blocks: bool = False,
    ) -> CallIssuer:
        """The issuer of calls on a stream; `flow` is theirs if they are transfers, as `_under_way` knows it."""
        return CallIssuer(
            gpu.in_c,
            call,
            self._process,
            stream,
            self._numbers,
            self._under_way.log(flow),
            functools.partial(self._under_way.forget_ended, flow),
            DeviceWork,
            self._handed_out,
            _source_of(None if flow is None else flow[1]),
            blocks,
        )

    def _issue_queued(
        self,
        name: str,
        outs: Tensors,
        xs: Tensors,
        function: Callable[[], Any],
        device: torch.device,
        flow: _Flow | None,
        *,
        blocks: bool,
    ) -> DeviceWork:
        """Queues a transfer on its flow's stream, or an asynchronous collective on the group's: at once if the ranks
        have met, else by the flow's or the group's thread.

        The thread waits for the peers, which the program must not: a peer may wait for another call first. The call
        follows the work queued on the program's stream by now.
        """
        gpu = self._gpu(device)
        stream = gpu.own_stream if flow is None else self._stream_of(device, flow)
        peer = None if flow is None else flow[0]
        order = None if flow is None else (device, flow)
        current, handle = gpu.current(), stream.cuda_stream
        ready = gpu.in_c.mark(current)
        call = gpu.queued_call(outs, xs, handle, keeps=False, blocks=blocks, source=_source_of(flow))
        work = TransferWork.of_transfer(call, self._callbacks_of(device))
        executor, has_met = self._executor(device, flow), self._endpoints.has_met(device, peer)
        number, is_captured = self._sequence, gpu.order.is_capturing(current)
        if not is_captured:
            self._under_way.add(order, number, name, work.passed)
        elif not has_met:
            expected = "a transfer with that rank before, which makes what transfers need"
            if peer == self._rank:
                expected = "a copy, as this is that rank itself"
            raise RuntimeError(f"{name}: a graph is being captured; expected {expected}")

        def run() -> None:
            failure: BaseException | None = None
            try:
                with torch.no_grad(), torch.cuda.stream(stream):
                    ready.hold(handle)
                    function()
                    if not is_captured:
                        for tensor in (*outs, *xs):
                            tensor.record_stream(stream)
            except BaseException as error:  # it is raised where the work is waited for
                failure = error
                if not is_captured and not isinstance(error, CommunicatorError):
                    self._under_way.end(order, number)
                self._log_failed_meeting(name, number, device, peer, error)
            work.issued(failure)

        if has_met and executor.run_here(run, after_others=is_captured):
            work.raise_failure()
        else:
            executor.submit(run)
        return work

    def _issue_on_cpu(
        self,
        name: str,
        outs: Tensors,
        function: Callable[[], None],
        flow: _Flow | None,
        seconds: float | None,
        *,
        waits: bool,
    ) -> HostWork:
        work = HostWork(outs, self._callbacks_of(_CPU), _source_of(flow))
        number = self._sequence
        self._under_way.add(flow, number, name, None)
        peer = None if flow is None else flow[0]

        def run() -> None:
            failure: BaseException | None = None
            try:
                with torch.no_grad(), self._endpoints.bounded(_CPU, peer, seconds):
                    function()
            except BaseException as error:  # it is raised where the work is waited for
                failure = error
            if not isinstance(failure, CommunicatorError):
                self._under_way.end(flow, number)
            elif peer is not None:
                self._log_failed_meeting(name, number, _CPU, peer, failure)
            work.finish(failure)

        executor = self._executor(_CPU, flow)
        if not (waits and executor.run_here(run)):
            executor.submit(run)
        if waits:
            work.wait()
        return work

    def _log_failed_meeting(
        self, name: str, number: int, device: torch.device, peer: int | None, error: BaseException
    ) -> None:
        """Logs why ranks have no communicator, which the watchdog can't see, for programs that wait elsewhere."""
        if isinstance(error, CommunicatorError) and not self._endpoints.has_met(device, peer):
            _logger.error("%s, call %d of rank %d: %s", name, number, self._rank, error)

    def oldest_call(self) -> str:
        """The oldest call that is not known to have ended, in words."""
        oldest = self._under_way.oldest()
        return (
            f"no call of rank {self._rank}" if oldest is None else f"{oldest[1]}, call {oldest[0]} of rank {self._rank}"
        )

    def record(self) -> flight_recorder.GroupRecord:
        """The group's calls, for a dump."""
        return flight_recorder.GroupRecord(
            name=self._group_name,
            description=self._group_desc or "undefined",
            ranks=self._endpoints.members,
            rank=self._rank,
            calls=self._under_way.recorded(),
        )

    def _callbacks_of(self, device: torch.device) -> Executor:
        """Completes futures of the calls that this thread makes.

        Their callbacks may make calls and wait for their futures. So they run neither in the thread that runs calls,
        nor, for the calls of a callback, in that callback's thread. Each depth has one thread, which completes futures
        in order: so callbacks of all ranks make their calls in the same order.
        """
        return self._executor(device, _callbacks.depth + 1)

    def _executor(self, device: torch.device, of: _Flow | int | None) -> Executor:
        """The thread of a flow, of callbacks of a depth, or, for None, of all other calls."""
        with self._lock:
            if (device, of) not in self._executors:
                if isinstance(of, int):
                    suffix = f"-callbacks-{of}"
                else:
                    suffix = f"-{of[0]}-{'send' if of[1] else 'recv'}" if of else ""
                begin = functools.partial(_begin_thread, device, of)
                self._executors[device, of] = Executor(f"proxyccl-torch-{self._rank}{suffix}", begin)
            return self._executors[device, of]

    def _stream_of(self, device: torch.device, flow: _Flow) -> Any:
        with self._lock:
            if (device, flow) not in self._flow_streams:
                self._flow_streams[device, flow] = own_streams.take(device)
            return self._flow_streams[device, flow]

    def _gpu(self, device: torch.device) -> GroupOnGpu:
        with self._lock:
            if device not in self._gpus:
                self._gpus[device] = GroupOnGpu(device, self._endpoints.check)
            return self._gpus[device]

    # -- collectives: torch's two spellings are aliases ---

    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = None, *_: Any) -> Any:
        """Reduces a tensor over all ranks, in place."""
        (x,) = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        choice = self._choose("all_reduce", x, _nbytes(x), opts)
        work = self._issue_in_c(x, x, opts, "reduceOp", choice.name)
        if work is NotImplemented:
            op, (tensor,) = _op_of(opts), in_memory([x])

            def call(comm: Communicator) -> None:
                on_tensors.all_reduce(comm, tensor, op, choice.policy(comm))

            work = self._collective("all_reduce", tensor.device, [tensor], (), opts, call)
        return choice.watch(work)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """Reduces several tensors over all ranks, in place."""
        if _goes_apart(tensors):
            name = _name_of_short("all_reduce", tensors)
            return self._joint(self.allreduce, tensors, tensors, opts, "reduceOp", name)
        op, tensors = _op_of(opts), in_memory(tensors)

        def call(comm: Communicator) -> None:
            on_tensors.all_reduce_coalesced(comm, tensors, op)

        return self._collective("all_reduce of several tensors", tensors[0].device, tensors, (), opts, call)

    def broadcast(self, tensors: Tensors | torch.Tensor, opts: Any = None, *_: Any) -> Any:
        """Copies a rank's tensor to all ranks."""
        (x,) = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        work = self._issue_in_c(x, x, opts, "rootRank", "broadcast")
        if work is not NotImplemented:
            return work
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        (tensor,) = in_memory([x])
        self._require_rank(root, "root")
        return self._collective(
            "broadcast", tensor.device, [tensor], (), opts, lambda comm: on_tensors.broadcast(comm, tensor, root)
        )

    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        """Reduces a tensor over all ranks, in place on one."""
        (x,) = tensors
        self._require_rank(opts.rootRank, "root")
        result = x if opts.rootRank == self._rank else ()
        work = self._issue_in_c(x, result, opts, "reduceOp", reduce_to(opts.rootRank))
        if work is not NotImplemented:
            return work
        (tensor,) = in_memory([x])

        def call(comm: Communicator) -> None:
            on_tensors.reduce(comm, tensor, opts.reduceOp, opts.rootRank)

        return self._collective("reduce", tensor.device, [tensor], (), opts, call)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None, *_: Any) -> Any:
        """Every rank's tensor into a list."""
        (x,), (given,) = inputs, map(tuple, outputs)
        work = self._exchange(x, x, given, opts, self._all_gather)
        if work is not NotImplemented:
            return work
        x, *parts = in_memory([x, *given])
        self._require_one_each(parts, "output_tensors")

        def call(comm: Communicator) -> None:
            on_tensors.all_gather_lists(comm, parts, x, self._all_gather)

        return self._collective("all_gather", x.device, parts, [x], opts, call)

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Any:
        """Concatenates the ranks' tensors of one size."""
        choice = self._choose("all_gather", output, _nbytes(output), opts)
        work = self._issue_in_c(x, output, opts, None, choice.name)
        if work is NotImplemented:
            output, x = in_memory([output, x])
            self._require_gathered(output, x)

            def call(comm: Communicator) -> None:
                on_tensors.all_gather(comm, output, x, choice.policy(comm))

            work = self._collective("all_gather_single", x.device, [output], [x], opts, call)
        return choice.watch(work)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """`all_gather_single` of several tensors."""
        if _goes_apart(inputs):
            name = _name_of_short("all_gather", outputs)
            return self._joint(self.all_gather_single, inputs, outputs, opts, None, name)
        outputs, inputs = in_memory(outputs), in_memory(inputs)
        for output, x in zip(outputs, inputs, strict=True):
            self._require_gathered(output, x)

        def call(comm: Communicator) -> None:
            on_tensors.all_gather_coalesced(comm, outputs, inputs)

        return self._collective("all_gather_single of several tensors", inputs[0].device, outputs, inputs, opts, call)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """`allgather` of several tensors: by rank, a list of them."""
        outputs, inputs = [in_memory(of_rank) for of_rank in outputs], in_memory(inputs)
        written = [tensor for of_rank in outputs for tensor in of_rank]
        sent, to = inputs * self._size, [rank for rank in range(self._size) for _ in inputs]
        of = [rank for rank, of_rank in enumerate(outputs) for _ in of_rank]

        def call(comm: Communicator) -> None:
            on_tensors.exchange(comm, sent, written, ("all_gather", to, of))

        return self._collective("all_gather of several tensors", inputs[0].device, written, inputs, opts, call)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any, *_: Any) -> Any:
        """Every rank's tensor into a list on one rank."""
        (x,), root = inputs, opts.rootRank
        given = tuple(outputs[0]) if self._rank == root else ()
        self._require_rank(root, "root")
        options = self._from_all[root]
        work = self._exchange(x, x, given, opts, options)
        if work is not NotImplemented:
            return work
        if self._rank == root:
            self._require_one_each(given, "gather_list")
        x, *parts = in_memory([x, *given])
        return self._collective(
            "gather", x.device, parts, [x], opts, lambda comm: on_tensors.exchange(comm, x, tuple(parts), options)
        )

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any, *_: Any) -> Any:
        """A tensor of one rank's list for each rank."""
        (output,), root = outputs, opts.rootRank
        given = tuple(inputs[0]) if self._rank == root else ()
        self._require_rank(root, "root")
        options = self._to_all[root]
        work = self._exchange(output, given, output, opts, options)
        if work is not NotImplemented:
            return work
        if self._rank == root:
            self._require_one_each(given, "scatter_list")
        output, *parts = in_memory([output, *given])

        def call(comm: Communicator) -> None:
            on_tensors.exchange(comm, tuple(parts), output, options)

        return self._collective("scatter", output.device, [output], parts, opts, call)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None, *_: Any) -> Any:
        """Reduces a list with a tensor for each rank, and gives each its own."""
        (output,), (parts,), op = outputs, inputs, _op_of(opts)
        output, *parts = in_memory([output, *parts])
        self._require_one_each(parts, "input_list")
        own = parts[self._rank].numel()
        if output.numel() != own:
            raise ValueError(f"output: has {output.numel()} elements; expected {own}, those of this rank's input")

        def call(comm: Communicator) -> None:
            on_tensors.reduce_scatter_lists(comm, output, parts, op)

        return self._collective("reduce_scatter", output.device, [output], parts, opts, call)

    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Any:
        """Reduces a tensor over all ranks and gives each its share."""
        choice = self._choose("reduce_scatter", output, _nbytes(x), opts)
        work = self._issue_in_c(x, output, opts, "reduceOp", choice.name)
        if work is NotImplemented:
            op, (output, x) = _op_of(opts), in_memory([output, x])
            self._require_share(output, x)

            def call(comm: Communicator) -> None:
                on_tensors.reduce_scatter(comm, output, x, op, choice.policy(comm))

            work = self._collective("reduce_scatter_single", x.device, [output], [x], opts, call)
        return choice.watch(work)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """`reduce_scatter_single` of several tensors."""
        if _goes_apart(inputs):
            name = _name_of_short("reduce_scatter", inputs)
            return self._joint(self.reduce_scatter_single, inputs, outputs, opts, "reduceOp", name)
        op, outputs, inputs = _op_of(opts), in_memory(outputs), in_memory(inputs)
        for output, x in zip(outputs, inputs, strict=True):
            self._require_share(output, x)
        device = inputs[0].device

        def call(comm: Communicator) -> None:
            on_tensors.reduce_scatter_coalesced(comm, outputs, inputs, op)

        return self._collective("reduce_scatter_single of several tensors", device, outputs, inputs, opts, call)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
        *_: Any,
    ) -> Any:
        """Rows of a tensor to each rank: evenly many, or as the splits say."""
        even = not output_splits and not input_splits
        options = ("all_to_all_single", input_splits or "even", output_splits or "even")
        choice = self._choose("all_to_all", output, _nbytes(x) if even else 0, opts)
        if even:
            work = self._issue_in_c(x, output, opts, None, choice.name)
        else:
            work = self._exchange(x, x, output, opts, options)
        if work is NotImplemented:
            output, x = in_memory([output, x])
            _require_dtype(output, x)
            for tensor, splits in ((output, output_splits), (x, input_splits)):
                self._require_splits(tensor, splits)

            def call(comm: Communicator) -> None:
                if even:
                    on_tensors.all_to_all(comm, output, x, choice.policy(comm))
                else:
                    on_tensors.all_to_all_v(comm, output, x, options)

            work = self._collective("all_to_all_single", x.device, [output], [x], opts, call)
        return choice.watch(work)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, *_: Any) -> Any:
        """A list's i-th tensor to rank i."""
        targets, sources = tuple(outputs), tuple(inputs)
        if sources:
            work = self._exchange(sources[0], sources, targets, opts, self._all_to_all)
            if work is not NotImplemented:
                return work
        outputs, inputs = tuple(in_memory(outputs)), tuple(in_memory(inputs))
        self._require_one_each(outputs, "output_tensor_list")
        self._require_one_each(inputs, "input_tensor_list")

        def call(comm: Communicator) -> None:
            on_tensors.exchange(comm, inputs, outputs, self._all_to_all)

        return self._collective("all_to_all", inputs[0].device, outputs, inputs, opts, call)

    def barrier(self, opts: Any = None, *_: Any) -> Any:
        """Waits on the CPU, or after the work queued on a device, until all ranks have arrived. Ids of devices mean
        nothing where there is no GPU.
        """
        device = getattr(opts, "device", None) or _CPU
        if getattr(opts, "device_ids", None):
            device = torch.device("cuda", opts.device_ids[0]) if torch.cuda.is_available() else _CPU
        device = _with_index(device)
        made = None if device.index is None else self._made.get(device.index)
        if made is not None:
            work = self._issue_by(made.barriers, (), (), opts, None, made.named["barrier"])
            if work is not NotImplemented:
                return work
        return self._collective(
            "barrier", device, (), (), opts, lambda comm: on_tensors.barrier(comm, device), blocks=True
        )

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Waits until all ranks have arrived; rank 0 raises an error that names the missing ones.

        Raises:
            RuntimeError: a rank did not arrive in time.
        """
        given: timedelta | None = getattr(timeout, "timeout", timeout)  # torch 2.15 gives options
        seconds = (self._timeout if given is None or given < _NO_TIME else given).total_seconds()
        store = dist.PrefixStore("proxyccl-monitored-barrier", self._store)
        number = next(self._barriers)
        monitored_barrier(store, number, self._rank, self._size, seconds, wait_all_ranks=wait_all_ranks)

    # -- transfers ---

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Any:
        """Sends a tensor to a rank."""
        return self._transfer(tensors, peer, sends=True)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> Any:
        """Receives a tensor from a rank."""
        return self._transfer(tensors, peer, sends=False)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        """Not supported: a rank receives into memory that it has offered to one peer."""
        raise RuntimeError("proxyccl: recv from any source is not supported; name the rank")

    recvAnysource = recv_anysource  # noqa: N815

    def _transfer(self, tensors: Tensors, peer: int, *, sends: bool) -> Any:
        (x,) = tensors
        named, flow = _by_flow(peer, int(self._rank < peer), sends), (peer, sends)
        work = self._transfer_at_once(x, flow, named)
        if work is NotImplemented:
            tensors = in_memory(tensors)
            self._require_rank(peer, "peer")
            (tensor,) = tensors

            def call() -> None:
                if peer == self._rank:
                    (self._endpoints.send_to_self if sends else self._endpoints.recv_from_self)(tensor)
                    return
                comm = self._endpoints.with_peer(tensor.device, peer)
                with self._endpoints.transferring(peer):
                    on_tensors.exchange(comm, *_sides(tensor, flow), named[1])

            outs, xs = ((), tensors) if sends else (tensors, ())
            work = self._issue(named[0], outs, xs, call, device=tensor.device, flow=flow)
        return None if self._coalescing.works is not None else work

    def _transfer_at_once(self, x: torch.Tensor, flow: _Flow, named: tuple[str, on_tensors.Transfers]) -> Any:
        """As `_issue_in_c`, for a transfer: once the ranks have met, and while no other of its flow is queued."""
        number = x.get_device()
        executor = None if number < 0 else self._executors.get((x.device, flow))
        if executor is None or not executor.is_idle or profiler._is_profiler_enabled:
            return NotImplemented
        calls = self._transferring.get((number, *flow))
        if calls is None and (calls := self._transfers_of(x.device, flow)) is None:
            return NotImplemented
        try:
            return calls.issue(*_sides(x, flow), None, None, named)
        except Exception as error:
            raise_as_torch(self._endpoints.with_ranks(error, flow[0]))

    def _transfers_of(self, device: torch.device, flow: _Flow) -> CallIssuer | None:
        """Makes the transfers of a flow; None if the ranks have not met."""
        if not self._endpoints.has_met(device, flow[0]):
            return None
        comm = self._endpoints.with_peer(device, flow[0])
        call, stream = comm.tensor_calls.call_transfers, self._stream_of(device, flow).cuda_stream
        assert call is not None  # `with_peer` has prepared them
        made = self._issuer(self._gpu(device), stream, call, flow=(device, flow))
        return self._transferring.setdefault((device.index, *flow), made)

    # -- coalescing ---

    def _joint(
        self, call: Callable[..., Any], xs: Tensors, outs: Tensors, opts: Any, attribute: str | None, name: str | None
    ) -> Any:
        """Makes a call for each tensor, with one Work for all; arguments from `xs` on as for `_issue_in_c`, which is
        not tried without a name."""
        issued = NotImplemented if name is None else self._issue_in_c(xs, outs, opts, attribute, name)
        if issued is not NotImplemented and type(issued) is not tuple:
            return issued
        collected: list[DeviceWork | HostWork | JointWork] = []
        done, first = (0, None) if issued is NotImplemented else issued
        if first is not None:
            collected.append(first)
        outer, self._coalescing.works = self._coalescing.works, collected
        try:
            for x, out in zip(xs[done:], outs[done:], strict=True):
                call(*((x,) if out is x else (out, x)), opts)
        finally:
            self._coalescing.works = outer
        return self._handed_out(JointWork(collected), waits=_waits(opts)) if collected else None

    def start_coalescing(self, device: Any = None) -> None:
        """Collects the Work of the thread's calls that follow. Each runs as it comes; no transfer waits for another."""
        self._coalescing.works = []

    _start_coalescing = start_coalescing

    def end_coalescing(self, device: Any = None) -> Any:
        """Ends `start_coalescing`.

        Returns:
            One Work of all calls since then.
        """
        collected, self._coalescing.works = self._coalescing.works, None
        if collected is None:
            raise RuntimeError("end_coalescing: there was no start_coalescing before it")
        return JointWork(collected)

    _end_coalescing = end_coalescing

    # -- arguments ---

    def _require_rank(self, rank: int, argument: str) -> None:
        # Before anything is made or queued: no peer would answer, and a wait would end by the time-out.
        if not 0 <= rank < self._size:
            raise ValueError(f"{argument}: {rank} is not a rank of the group; expected 0 to {self._size - 1}")

    def _require_one_each(self, tensors: Tensors, argument: str) -> None:
        if len(tensors) != self._size:
            raise ValueError(f"{argument}: has {len(tensors)} tensors; expected {self._size}, one for each rank")

    def _require_gathered(self, output: torch.Tensor, x: torch.Tensor) -> None:
        _require_dtype(output, x)
        if output.numel() != self._size * x.numel():
            raise ValueError("output tensor size must be equal to world_size times input tensor size")

    def _require_share(self, output: torch.Tensor, x: torch.Tensor) -> None:
        _require_dtype(output, x)
        if x.numel() != self._size * output.numel():
            raise ValueError("input tensor must be the same size as output size times world size")

    def _require_splits(self, tensor: torch.Tensor, splits: Sequence[int]) -> None:
        if splits:
            if len(splits) != self._size:
                raise RuntimeError("Number of tensor splits not equal to group size")
            if sum(splits) != tensor.size(0):
                raise RuntimeError("Split sizes doesn't match total dim 0 size")
        elif tensor.size(0) % self._size:
            raise RuntimeError("Tensor's dim 0 does not divide equally across group size")


def _goes_apart(tensors: Tensors) -> bool:
    """Whether tensors of one coalesced call are better not joined in one array: few, or large ones. C can
    issue both, and the memory is read and written once. All ranks answer the same.
    """
    if not tensors or not tensors[0].is_cuda:
        return False
    count = len(tensors)
    return count <= _FEW or sum(x.numel() * x.element_size() for x in tensors) >= count * _LARGE_BYTES


def _nbytes(x: torch.Tensor) -> int:
    return int(x.numel() * x.element_size())


def _name_of_short(collective: str, tensors: Tensors) -> str | None:
    """The name for `_joint` of calls with these tensors; None if one is long: the ranks choose for each call."""
    return collective if all(_nbytes(x) < LEAST_BYTES for x in tensors) else None


def _waits(opts: Any) -> bool:
    """Whether torch's options say that the program does not continue meanwhile."""
    return opts is not None and not getattr(opts, "asyncOp", True)


def _begin_thread(device: torch.device, of: _Flow | int | None) -> None:
    """Called by a thread of `ProcessGroupProxyCCL._executor` first."""
    if device.type != "cpu":  # a thread begins on device 0, and would open that device when it returns to it
        torch.cuda.set_device(device)
    if isinstance(of, int):
        _callbacks.depth = of


def _sides(tensor: torch.Tensor, flow: _Flow) -> tuple[Any, Any]:
    """A transfer's tensor as input and output for `on_tensors.exchange`."""
    return (tensor, ()) if flow[1] else ((), tensor)


def _source_of(flow: _Flow | None) -> int:
    """The rank that sends to a transfer; -1 for other calls, and for a send."""
    return flow[0] if flow is not None and not flow[1] else -1


def _op_of(opts: Any) -> Any:
    """The operator of options, of an operator itself, or the default: torch passes all three."""
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def _seconds_of(opts: Any) -> float | None:
    """The time-out that options set for one call, in seconds; None for the group's."""
    given = getattr(opts, "timeout", None)
    return given.total_seconds() if isinstance(given, timedelta) and given > _NO_TIME else None


def _with_index(device: torch.device) -> torch.device:
    """The device with its number, by default the current one's; a CPU has no number."""
    if device.type == "cpu":
        return torch.device("cpu")
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())


def _require_dtype(output: torch.Tensor, x: torch.Tensor) -> None:
    if output.dtype != x.dtype:
        raise TypeError(f"output tensor must have the same type as input tensor: {output.dtype} and {x.dtype}")


_default: weakref.ref[ProcessGroupProxyCCL] | None = None


def _create(options: Any, _: Any) -> ProcessGroupProxyCCL:
    """Called by torch to make a group: first the default one, for which it does not name ranks."""
    global _default  # noqa: PLW0603  torch has one default group
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    if not IS_BACKEND:
        _await_other_backends(store, rank, size, timeout)
    members = list(options.global_ranks_in_group)
    whole = None if _default is None or not members else _default()
    group = ProcessGroupProxyCCL(store, rank, size, timeout, whole=whole, members=members)
    group._group_name = options.group_id
    if not members:
        compile_early(rank, size)
        _default = weakref.ref(group)
    return group


def _unused_part(store: Any, rank: int) -> dist.PrefixStore:
    """The part of a group's store that no group of the same name has used before, such as one that the program has
    destroyed: a store may outlive groups. The ranks make groups of one name in the same order, so each counts its own.
    """
    # torchrun may keep the store when it restarts a job, and ranks that were lost may have made fewer groups.
    of_attempt = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return dist.PrefixStore(f"group-{of_attempt.add(f'groups-of-{rank}', 1)}", of_attempt)


def _await_other_backends(store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Waits until no rank is still making the backend of another device, such as gloo's in "cpu:gloo,cuda:proxyccl".

    When this process group is made, torch drops that backend and so closes its connections, which other ranks may
    still wait for. There is none if ours is made first, for CPUs: torch gives each device a store with its prefix.
    """
    own, of_first = f"device-of-{rank}", dist.PrefixStore("cpu/", store.underlying_store)
    mark = os.urandom(8)
    store.set(own, mark)
    if of_first.check([own]) and of_first.get(own) == mark:
        return
    store = _unused_part(dist.PrefixStore("others", store), rank)
    if store.add("came", 1) == size:
        store.set("all came", b"")
    store.wait(["all came"], timeout)


def register() -> None:
    """Makes the backend known to torch. Calling it twice does nothing."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
