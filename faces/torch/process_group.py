"""Implements torch.distributed's process group, except the calls on tensors (`collectives`)."""

from __future__ import annotations

import atexit
import itertools
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from proxyccl.channels.communicator import Communicator
from proxyccl.device.errors import RuntimeUnavailableError
from proxyccl.torch import flight_recorder
from proxyccl.torch.collectives import Collectives, with_index
from proxyccl.torch.endpoints import Endpoints, Settings
from proxyccl.torch.errors import torch_errors
from proxyccl.torch.issuing import IS_BACKEND, IssuedCalls
from proxyccl.torch.on_gpu import compile_early
from proxyccl.torch.store_bootstrap import monitored_barrier
from proxyccl.torch_tensors.pools import allocator, require_torch
from proxyccl.torch_tensors.untraced import untraced

NAME = "proxyccl"
_MEETINGS_SECONDS = 1.0
"""How long a process that exits waits for threads that make communicators."""


class WholeGroup:
    """A mixin with the further methods that torch before 2.15 needs, where the process group is also the backend."""

    calls: Any  # the group's `IssuedCalls`, which also has the group's name and description
    bound_device_id: torch.device | None = None  # the device that was passed to `init_process_group`

    def setGroupName(self, name: str) -> None:  # noqa: N802  torch's names, here and below
        self.calls.group_name = name

    _set_group_name = setGroupName

    def getGroupName(self) -> str:  # noqa: N802
        """Returns the name by which torch's functional collectives find the group."""
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
    """Options of a process group: the `pg_options` of torch's `init_process_group`, `new_group` and `split_group`.

    Args:
        invariant: whether the bits of a reduced element depend only on the ranks' values of that element (see
            `Communicator`). If None, the default group's setting is used; for the default group, the setting of
            ``PROXYCCL_INVARIANT``.
        timeout: the bound of every wait in a group of `split_group`. torch's other functions take an argument `timeout`
            instead.
        suspendable: whether `suspend` of the group's backend may be called (see `Communicator`). If None, as for
            `invariant`, with ``PROXYCCL_SUSPENDABLE``.
    """

    def __init__(
        self,
        invariant: bool | None = None,
        timeout: timedelta = dist.default_pg_timeout,
        suspendable: bool | None = None,
    ) -> None:
        super().__init__(NAME, timeout=timeout)
        self.settings = Settings(invariant, suspendable)

    def __reduce__(self) -> tuple[type[Options], tuple[Any, ...]]:
        # torch copies the options of a group that it splits
        return Options, (self.settings.invariant, self._timeout, self.settings.suspendable)


@untraced
class ProcessGroupProxyCCL(Collectives, *_bases):  # type: ignore[misc]  # the bases depend on torch
    """A torch.distributed process group of ProxyCCL, which torch creates in `init_process_group` and `new_group`.

    Sends and receives between two ranks match in order; tags are ignored.

    Args:
        store: the torch store through which the ranks exchange addresses.
        rank: this rank's number in the group.
        size: number of ranks.
        timeout: the bound of every wait.
        whole: the group whose communicators may be split to make this group's; None if there is no such group.
        members: the ranks' numbers in `whole`.
        endpoints: the communicators of these ranks; None if they do not exist yet.
        settings: see `Options`.

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
        settings: Settings = Settings(),  # noqa: B008  a constant
    ) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._timeout = rank, size, timeout
        seconds = timeout.total_seconds()
        if endpoints is None:
            store = _unused_part(store, rank)
            endpoints = (
                Endpoints(store, rank, size, seconds, settings=settings)
                if whole is None
                else whole.endpoints.part(store, members, seconds, settings)
            )
        self.endpoints: Endpoints = endpoints
        self.calls = IssuedCalls(rank, size, endpoints)
        self._barriers = itertools.count()
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
        invariant, suspendable = self.endpoints.settings
        return Options(invariant, self._timeout, suspendable)

    def set_timeout(self, timeout: timedelta) -> None:
        """Changes the time-out of every later wait."""
        self.calls.require_process()
        self._timeout = timeout
        self.endpoints.set_timeout(timeout.total_seconds())

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: every rank counts its calls from 0, so the ranks need not agree on a first number."""

    def _get_sequence_number_for_group(self) -> int:
        return self.calls.collectives  # torch compares this number between ranks at its debug level DETAIL

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Makes the group's communicator for a device. All ranks must call this function."""
        if device is not None:
            self.endpoints.of_all(with_index(device))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Waits for all ranks to call this function. Rank 0 raises a RuntimeError that names missing ranks."""
        given: timedelta | None = getattr(timeout, "timeout", timeout)  # torch 2.15 passes an options object
        seconds = (self._timeout if given is None or given < timedelta(0) else given).total_seconds()
        store = dist.PrefixStore("proxyccl-monitored-barrier", self._store)
        number = next(self._barriers)
        monitored_barrier(store, number, self._rank, self._size, seconds, wait_all_ranks=wait_all_ranks)

    # -- split and shrink ---

    supports_splitting = supports_coalescing = True
    """Whether torch may call `split`, and whether it may call `start_coalescing` and `end_coalescing`."""
    supports_shrinking = IS_BACKEND
    """Whether torch may call `shrink`: only for a backend, because torch makes a process group around the result."""

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> ProcessGroupProxyCCL | None:
        """Makes a group of the given ranks, in the given order. All of them must call this function. Returns None on
        ranks outside the new group.

        Args:
            store: the store through which this group's ranks exchange addresses.
            ranks: the members of the new group, by their numbers in this group.
            opts: torch's options, of which only the time-out is used, and if they are `Options`, the settings.
        """
        if self._rank not in ranks:
            return None
        name = f"split-{'-'.join(map(str, ranks))}"
        timeout = getattr(opts, "_timeout", None) or self._timeout
        members = list(ranks)
        own = members.index(self._rank)
        of_part = dist.PrefixStore(name, store)
        settings = getattr(opts, "settings", Settings())
        part = ProcessGroupProxyCCL(of_part, own, len(members), timeout, whole=self, members=members, settings=settings)
        part.calls.group_name = getattr(opts, "group_name", "") or name
        return part

    def shrink(self, ranks_to_exclude: list[int], shrink_flags: int = 0, opts_override: Any = None) -> Any:
        """Makes a group of the ranks that are not excluded, in the same order. All of them must call this function.

        Args:
            ranks_to_exclude: the excluded ranks, by their numbers in this group: all ranks that have failed, and
                possibly others.
            shrink_flags: with torch's SHRINK_ABORT, aborts calls in progress on all ranks; with 0, waits for these
                calls.
            opts_override: torch's options, of which only the time-out is used; None keeps this group's time-out.
        """
        if shrink_flags:
            self.abort()
        timeout = getattr(opts_override, "_timeout", None) or self._timeout
        excluded = sorted(ranks_to_exclude)
        store = dist.PrefixStore(f"shrunk-without-{'-'.join(map(str, excluded))}", self._store)
        with torch_errors():
            endpoints = self.endpoints.shrink(store, excluded, timeout.total_seconds())
        number = self._rank - sum(rank < self._rank for rank in excluded)
        return ProcessGroupProxyCCL(store, number, self._size - len(excluded), timeout, endpoints=endpoints)

    # -- memory that calls use in place, like registered memory ---

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Returns whether `allocate_tensor` can allocate registered memory on a device: whether the device is a GPU for
        which the group has a communicator.
        """
        made = self.endpoints.made_of_all(with_index(device))
        if device.type == "cpu" or made is None:
            return False
        try:
            require_torch(made.runtime.name)
        except RuntimeUnavailableError:
            return False
        return True

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates an uninitialised tensor of `size` elements in memory that calls use in place, as if registered."""
        device = with_index(device)
        with torch_errors(), self._communicator(device).memory_pool():
            return torch.empty(size, dtype=dtype, device=device)

    @property
    def mem_allocator(self) -> Any:
        """The allocator to pass to `torch.cuda.MemPool` for a pool that `register_mem_pool` can register."""
        return allocator(torch).allocator()

    def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
        """Registers the memory that `mem_allocator`'s pools on the current device have now or allocate later."""
        device = torch.device("cuda", torch.cuda.current_device())
        with torch_errors(), self._communicator(device).memory_pool():
            pass

    def deregister_mem_pool(self, pool: Any) -> None:
        """Does nothing: a pool's memory is deregistered when the pool frees it."""

    def _communicator(self, device: torch.device) -> Communicator:
        made = self.endpoints.made_of_all(device)
        if made is None:
            raise RuntimeError(
                f"proxyccl: the group has no communicator for {device} yet; call a collective on it first, or "
                "init_process_group(device_id=…)"
            )
        return made

    # -- sleep ---

    def suspend(self, save: bool = True, resume_on_call: bool = False) -> None:
        """Gives the device memory of the group's communicators back to the device until `resume`, after its queued
        calls have ended. All ranks call this together. See `Communicator.suspend`; the group needs
        `Options(suspendable=True)`, or ``PROXYCCL_SUSPENDABLE=1`` before it is made. With `resume_on_call`, sends and
        receives between two ranks still need `resume`.
        """
        self.calls.require_process()
        self.calls.threads.await_calls(time.monotonic() + self._timeout.total_seconds())
        with torch_errors():
            for communicator in self.endpoints.in_order():
                if not communicator.suspended:  # as after an earlier call that failed on another communicator
                    communicator.suspend(save=save, resume_on_call=resume_on_call)

    def resume(self) -> None:
        """Allocates the device memory again, after `suspend`. All ranks call this together."""
        self.calls.require_process()
        self.calls.threads.await_calls(time.monotonic() + self._timeout.total_seconds())
        with torch_errors():
            for communicator in self.endpoints.in_order():
                if communicator.suspended:
                    communicator.resume()

    def memory_stats(self) -> dict[str, int]:
        """Returns the bytes of device memory of this group's communicators, under the names of NCCL's backend:
        "suspend" is the memory that `suspend` frees, "persist" all other memory, "total" the sum of both; "suspended"
        is 1 after `suspend`, else 0.
        """
        communicators = self.endpoints.in_order()
        blocks, short = (
            sum(each.group.device_memory.nbytes(blocks=kind) for each in communicators) for kind in (True, False)
        )
        suspended = int(any(each.suspended for each in communicators))
        return {"suspend": blocks, "suspended": suspended, "persist": short, "total": blocks + short}

    # -- shutdown ---

    def abort(self) -> None:
        """Ends the group on all ranks. Does not wait."""
        self.calls.require_process()
        self.endpoints.abort("torch aborted the process group")

    def shutdown(self) -> None:
        """Ends the group on this rank, without waiting for other ranks to do so. In a forked child, does nothing.

        Unless the group has failed, first waits for the calls that are queued in the group's threads, at most for the
        group's time-out. A call that needs a rank that has already ended the group is aborted after two seconds.
        """
        if not self.calls.process.is_here:
            return
        self.calls.threads.await_calls(time.monotonic() + self._timeout.total_seconds(), leaves=True)
        if self.endpoints.failed is not None:  # the watchdog may not have noticed the failure yet
            flight_recorder.write_failure()
        self.endpoints.end_meetings()
        self.calls.threads.end()
        self.endpoints.close()
        self.calls.close()
        flight_recorder.groups.pop(self, None)


@atexit.register
def _end_meetings() -> None:
    """Ends the threads that wait for peers over torch's store, because a thread inside the store's C++ code at the end
    of Python would abort the process.
    """
    deadline = time.monotonic() + _MEETINGS_SECONDS
    groups = [group for group in list(flight_recorder.groups) if group.calls.process.is_here]
    for group in groups:
        group.endpoints.end_meetings()
    for group in groups:
        group.calls.threads.await_meetings(deadline)


def _default_group() -> ProcessGroupProxyCCL | None:
    """Returns torch's default group; None if it does not exist, or is of other backends."""
    world: Any = dist.GroupMember.WORLD
    of_devices = [] if world is None else [world._get_backend(device) for device in world._device_types]
    return next((each for each in of_devices if isinstance(each, ProcessGroupProxyCCL)), None)


def _end_aborted() -> None:
    """Shuts down the aborted groups that torch no longer knows: torch's `_abort_process_group` calls no `shutdown`, and
    these groups would keep their memory, threads and store.
    """
    aborted = [group for group in list(flight_recorder.groups) if group.endpoints.aborted]
    if aborted:
        known = {of._get_backend(device) for of in dist.distributed_c10d._world.pg_map for device in of._device_types}
        for group in aborted:
            if group not in known:
                group.shutdown()


def _create(options: Any, own_options: Any) -> ProcessGroupProxyCCL:
    """Makes a group for torch. torch passes no list of ranks for the default group, and programs pass none for a group
    whose processes are not all in the default group, such as a trainer and its servers. `own_options` are the program's
    `pg_options`, possibly another backend's options.
    """
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    if not IS_BACKEND:
        _await_other_backends(store, rank, size, timeout)
    _end_aborted()
    members = list(options.global_ranks_in_group)
    whole = _default_group() if members else None
    settings = getattr(own_options, "settings", Settings())
    group = ProcessGroupProxyCCL(store, rank, size, timeout, whole=whole, members=members, settings=settings)
    group.calls.group_name = options.group_id
    if not members:
        compile_early(rank, size)
    return group


_split_in_torch = dist.ProcessGroup.split_group


def _split_group(
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    timeout: Any = None,
    opts: Any = None,
    group_name: str | None = None,
    group_desc: str | None = None,
    device_types: Sequence[torch.device] | None = None,
) -> Any:
    """Makes a group of the given ranks as torch does, and returns None on other ranks. If `split` returns None, torch's
    C++ ends the process, so on these ranks torch may split only backends of other libraries.
    """
    if group.rank() not in ranks:
        devices = device_types or group._device_types
        device_types = [each for each in devices if not isinstance(group._get_backend(each), ProcessGroupProxyCCL)]
        if not device_types:
            return None
    return _split_in_torch(group, ranks, timeout, opts, group_name, group_desc, device_types)


_gather_single_in_torch: Any = getattr(dist.ProcessGroup, "gather_single", None)  # exists from torch 2.15 on


def _gather_single(group: dist.ProcessGroup, output: torch.Tensor, x: torch.Tensor, opts: Any) -> Any:
    """Gathers the ranks' tensors in one tensor of the root, as torch does. torch's C++ does not pass this call to a
    backend in Python, so for this library's backend, the call is a `gather` of parts of `output`.
    """
    if not isinstance(group._get_backend(x.device), ProcessGroupProxyCCL):
        return _gather_single_in_torch(group, output, x, opts)
    is_root = group.rank() == opts.rootRank
    parts = [list(output.detach().view(group.size(), x.numel()))] if is_root else []
    return group.gather(parts, [x], opts)


def _unused_part(store: Any, rank: int) -> dist.PrefixStore:
    """Returns a prefix of a group's store that no earlier group of the same name has used, because a destroyed group
    may have left keys in the store. All ranks make groups of a name in the same order, and so count them alike.
    """
    # torchrun may keep the store when it restarts a job, and a failed rank may have made fewer groups than its peers.
    # So each attempt of the job has its own counts.
    of_attempt = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return dist.PrefixStore(f"group-{of_attempt.add(f'groups-of-{rank}', 1)}", of_attempt)


def _await_other_backends(store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Waits until every rank has made the other device's backend, such as gloo in "cpu:gloo,cuda:proxyccl".

    torch before 2.15 drops the other device's backend when it makes this process group, and so closes connections that
    other ranks may still be opening. If torch makes this group first, as the CPU's backend, no other backend exists,
    and this function returns immediately. In that case, this rank's value is in the store with the prefix "cpu/", which
    torch uses for the CPU's backend.
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
    """Registers the backend with torch, unless it is registered already."""
    if NAME not in dist.Backend.backend_list:
        if IS_BACKEND:
            dist.ProcessGroup.split_group = _split_group
            dist.ProcessGroup.gather_single = _gather_single
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
