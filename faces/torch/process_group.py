"""The process group: torch.distributed's interface of a group, except the calls on tensors."""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from proxyccl.channels.communicator import Communicator
from proxyccl.device.errors import RuntimeUnavailableError
from proxyccl.torch import flight_recorder
from proxyccl.torch.collectives import Collectives, with_index
from proxyccl.torch.endpoints import Endpoints
from proxyccl.torch.errors import torch_errors
from proxyccl.torch.issuing import IS_BACKEND, IssuedCalls
from proxyccl.torch.on_gpu import compile_early
from proxyccl.torch.store_bootstrap import monitored_barrier
from proxyccl.torch_tensors.pools import allocator, require_torch
from proxyccl.torch_tensors.untraced import untraced

NAME = "proxyccl"


class WholeGroup:
    """A mixin with the methods, except the calls on tensors, that torch before 2.15 needs of a process group in Python.
    The group acts as its own backend.

    Attributes:
        calls: the group's calls, which hold its name and description.
        bound_device_id: the device that was passed to `init_process_group`.
    """

    calls: Any
    bound_device_id: torch.device | None = None

    def setGroupName(self, name: str) -> None:  # noqa: N802  torch's names, here and below
        self.calls.group_name = name

    _set_group_name = setGroupName

    def getGroupName(self) -> str:  # noqa: N802
        """The name by which torch's functional collectives find the group."""
        return str(self.calls.group_name)

    group_name = property(getGroupName)

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self.calls.group_desc = description

    _set_group_desc = setGroupDesc

    def getGroupDesc(self) -> str:  # noqa: N802
        return str(self.calls.group_desc)

    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])

    def _get_backend(self, _: torch.device) -> WholeGroup:
        return self

    def _has_hooks(self) -> bool:
        return False

    def _register_on_completion_hook(self, _: Callable[..., None]) -> None:
        raise RuntimeError("proxyccl: hooks on completion need torch 2.15")

    def _wait_for_pending_works(self) -> None:
        pass


_TorchBase: Any = torch._C._distributed_c10d.Backend if IS_BACKEND else dist.ProcessGroup
_bases: tuple[Any, ...] = (_TorchBase,) if IS_BACKEND else (WholeGroup, _TorchBase)


_TorchOptions: Any = torch._C._distributed_c10d.Backend.Options


class Options(_TorchOptions):
    """Options of a process group, for the argument `pg_options` of torch's `init_process_group`, `new_group` and
    `split_group`.

    Args:
        invariant: as for `Communicator`: the bits of a reduction depend only on the ranks' values of each element. None
            for the default group's setting, and for the default group for ``PROXYCCL_INVARIANT``.
        timeout: the bound of every wait. torch's functions take the time-out as an argument of their own, except
            `split_group`.
    """

    def __init__(self, invariant: bool | None = None, timeout: timedelta = dist.default_pg_timeout) -> None:
        super().__init__(NAME, timeout=timeout)
        self.invariant = invariant

    def __reduce__(self) -> tuple[type[Options], tuple[Any, ...]]:
        return Options, (self.invariant, self._timeout)  # torch copies the options of a group that it splits


@untraced
class ProcessGroupProxyCCL(Collectives, *_bases):  # type: ignore[misc]  # the bases depend on torch
    """A torch.distributed process group whose calls ProxyCCL makes. torch creates it in `init_process_group` and
    `new_group`.

    Sends and receives between two ranks match in order; tags are ignored.

    Args:
        store: where the ranks meet.
        rank: this rank's number in the group.
        size: number of ranks.
        timeout: the bound of every wait.
        whole: the group that these ranks are a part of, or None.
        members: the ranks' numbers in `whole`.
        endpoints: the endpoints of these ranks, with their own store, if they exist already.
        invariant: as for `Options`.

    Attributes:
        endpoints: the communicators of the group.
        calls: the group's calls.
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
        invariant: bool | None = None,
    ) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._timeout = rank, size, timeout
        seconds = timeout.total_seconds()
        if endpoints is None:
            store = _unused_part(store, rank)
            endpoints = (
                Endpoints(store, rank, size, seconds, invariant=invariant)
                if whole is None
                else whole.endpoints.part(store, members, seconds, invariant)
            )
        self.endpoints: Endpoints = endpoints
        self.calls = IssuedCalls(rank, size, endpoints)
        self._barriers = itertools.count()
        self._splits = itertools.count()
        flight_recorder.watch(self)

    def getBackendName(self) -> str:  # noqa: N802  torch's names, here and below
        return NAME

    name = _get_backend_name = getBackendName

    def rank(self) -> int:
        return self._rank

    getRank = rank  # noqa: N815

    def size(self) -> int:
        return self._size

    getSize = size  # noqa: N815

    @property
    def _store(self) -> Any:
        with torch_errors():
            return self.endpoints.store

    def get_group_store(self) -> Any:
        return self._store

    @property
    def options(self) -> Any:
        return Options(self.endpoints.invariant, self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Changes the bound of every later wait."""
        self.calls.require_process()
        self._timeout = timeout
        self.endpoints.set_timeout(timeout.total_seconds())

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: every rank counts its calls from 0, so ranks need not agree on a start."""

    def _get_sequence_number_for_group(self) -> int:
        return self.calls.collectives  # torch compares this number between ranks at its debug level DETAIL

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Makes the communicator of a device now. All ranks call this together."""
        if device is not None:
            self.endpoints.of_all(with_index(device))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Waits until all ranks have arrived; rank 0 raises a RuntimeError that names the missing ones."""
        given: timedelta | None = getattr(timeout, "timeout", timeout)  # torch 2.15 gives options
        seconds = (self._timeout if given is None or given < timedelta(0) else given).total_seconds()
        store = dist.PrefixStore("proxyccl-monitored-barrier", self._store)
        number = next(self._barriers)
        monitored_barrier(store, number, self._rank, self._size, seconds, wait_all_ranks=wait_all_ranks)

    # -- groups that are made of this group ---

    supports_splitting = supports_coalescing = True
    """Whether torch may call `split`, and collect calls between `start_coalescing` and `end_coalescing`."""
    supports_shrinking = IS_BACKEND
    """Whether torch may call `shrink`: it then makes its own process group around a backend."""

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> ProcessGroupProxyCCL | None:
        """Makes a group of some of this group's ranks, in their order. All ranks call this together; it returns None on
        ranks outside the new group.

        Args:
            store: where the ranks of this group meet.
            ranks: numbers in this group.
            opts: options: the time-out, and with `Options` also whether reductions are invariant.
        """
        number = next(self._splits)
        if self._rank not in ranks:
            return None
        name = f"split-{number}-{'-'.join(map(str, ranks))}"
        timeout = getattr(opts, "_timeout", None) or self._timeout
        members = list(ranks)
        own = members.index(self._rank)
        of_part = dist.PrefixStore(name, store)
        invariant = getattr(opts, "invariant", None)
        part = ProcessGroupProxyCCL(
            of_part, own, len(members), timeout, whole=self, members=members, invariant=invariant
        )
        part.calls.group_name = getattr(opts, "group_name", "") or name
        return part

    def shrink(self, ranks_to_exclude: list[int], shrink_flags: int = 0, opts_override: Any = None) -> Any:
        """Makes a group of the ranks that are not excluded, in their order. Only these ranks call this, together.

        Args:
            ranks_to_exclude: numbers in this group: all lost ranks, and possibly others.
            shrink_flags: torch's SHRINK_ABORT to end calls in progress, on all ranks; 0 to wait for them.
            opts_override: options, of which only the time-out is used.
        """
        global _default  # noqa: PLW0603  torch has one default group
        if shrink_flags:
            self.abort()
        timeout = getattr(opts_override, "_timeout", None) or self._timeout
        excluded = sorted(ranks_to_exclude)
        store = dist.PrefixStore(f"shrunk-without-{'-'.join(map(str, excluded))}", self._store)
        with torch_errors():
            endpoints = self.endpoints.shrink(store, excluded, timeout.total_seconds())
        number = self._rank - sum(rank < self._rank for rank in excluded)
        shrunk = ProcessGroupProxyCCL(store, number, self._size - len(excluded), timeout, endpoints=endpoints)
        if _default is not None and _default() is self:
            _default = weakref.ref(shrunk)
        return shrunk

    # -- memory that counts as registered, so that calls use it in place ---

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether `allocate_tensor` returns registered memory: true on GPUs, once the group's communicator exists."""
        made = self.endpoints.made_of_all(with_index(device))
        if device.type == "cpu" or made is None:
            return False
        try:
            require_torch(made.runtime.name)
        except RuntimeUnavailableError:
            return False
        return True

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of `size` elements, uninitialised, in memory that counts as registered."""
        device = with_index(device)
        with torch_errors(), self._communicator(device).memory_pool():
            return torch.empty(size, dtype=dtype, device=device)

    @property
    def mem_allocator(self) -> Any:
        """The allocator for a `torch.cuda.MemPool` whose memory `register_mem_pool` registers."""
        return allocator(torch).allocator()

    def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
        """Registers the memory of pools of `mem_allocator` on the current device, also memory that they allocate
        later.
        """
        device = torch.device("cuda", torch.cuda.current_device())
        with torch_errors(), self._communicator(device).memory_pool():
            pass

    def deregister_mem_pool(self, pool: Any) -> None:
        """Does nothing: memory is deregistered when the pool frees it."""

    def _communicator(self, device: torch.device) -> Communicator:
        made = self.endpoints.made_of_all(device)
        if made is None:
            raise RuntimeError(
                f"proxyccl: the group has no communicator for {device} yet; call a collective on it first, or "
                "init_process_group(device_id=…)"
            )
        return made

    # -- the end ---

    def abort(self) -> None:
        """Ends the group on all ranks. Does not wait."""
        self.calls.require_process()
        self.endpoints.abort("torch aborted the process group")

    def shutdown(self) -> None:
        """Ends the group on this rank, without waiting for other ranks to end it. Waits first for the calls that are
        queued in the group's threads, unless the group has failed: at most for the group's time-out, and at most two
        seconds for a call that needs a rank which has ended the group. Does nothing in a fork's child.
        """
        if not self.calls.process.is_here:
            return
        self.calls.threads.await_calls(time.monotonic() + self._timeout.total_seconds())
        if self.endpoints.failed is not None:  # the watchdog may not have seen it
            flight_recorder.write_failure()
        self.endpoints.end_meetings()
        self.calls.threads.end()
        self.endpoints.close()
        self.calls.close()
        flight_recorder.groups.pop(self, None)


_default: weakref.ref[ProcessGroupProxyCCL] | None = None


def _create(options: Any, own_options: Any) -> ProcessGroupProxyCCL:
    """Makes a group for torch. torch makes the default group first, and does not name its ranks. `own_options` are
    `Options`, or the options of another backend, which are ignored, so that programs need not name one.
    """
    global _default  # noqa: PLW0603  torch has one default group
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    if not IS_BACKEND:
        _await_other_backends(store, rank, size, timeout)
    members = list(options.global_ranks_in_group)
    whole = None if _default is None or not members else _default()
    invariant = getattr(own_options, "invariant", None)
    group = ProcessGroupProxyCCL(store, rank, size, timeout, whole=whole, members=members, invariant=invariant)
    group.calls.group_name = options.group_id
    if not members:
        compile_early(rank, size)
        _default = weakref.ref(group)
    return group


def _unused_part(store: Any, rank: int) -> dist.PrefixStore:
    """The part of a group's store that no group of the same name has used before, such as one that the program has
    destroyed: a store may outlive groups. The ranks make groups of one name in the same order, so each rank counts them
        by itself.
    """
    # torchrun may keep the store when it restarts a job, and ranks that were lost may have made fewer groups.
    of_attempt = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return dist.PrefixStore(f"group-{of_attempt.add(f'groups-of-{rank}', 1)}", of_attempt)


def _await_other_backends(store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Waits until no rank is still making the backend of another device, such as gloo's in "cpu:gloo,cuda:proxyccl".

    When this process group is made, torch drops that backend and so closes its connections, which other ranks may
    still wait for. No other backend exists if ours is made first, for CPUs: torch gives each device a store with its
    prefix.
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
