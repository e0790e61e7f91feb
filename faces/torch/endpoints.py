"""Makes the communicators of a process group when they are first used."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from proxyccl.channels.communicator import Communicator
from proxyccl.device.arguments.flags import as_flag
from proxyccl.device.errors import (
    AbortedError,
    ArgumentError,
    ClosedError,
    CommunicatorError,
    PeerLostError,
    WaitTimeoutError,
    raise_in_place_of,
    renumbered,
)
from proxyccl.device.runtimes import require_suspendable
from proxyccl.torch.errors import torch_errors
from proxyccl.torch.on_gpu import DeviceRuntimes, compile_early, runtime_name
from proxyccl.torch.store_bootstrap import StoreBootstrap
from proxyccl.torch.to_self import ToSelf

LINGER_SECONDS = 2.0
"""How long a process that exits waits for the last kernels of peers, which may still store to this rank's memory."""
_NO_SENDS = "no-sends-"
_Key = tuple[str, int | None, int | None]


class _Making:
    """An attempt to make a communicator. Several threads may wait for the end of the attempt."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held by the thread that makes the communicator; other threads wait for this lock
        self.error: BaseException | None = None  # the error that ended the attempt


class Settings(NamedTuple):
    """Arguments of a group's `Communicator`s. None means the setting of the group from which the group is made, or for
    the default group the setting of the environment.
    """

    invariant: bool | None = None
    suspendable: bool | None = None

    def within(self, whole: Settings) -> Settings:
        return Settings(*(theirs if own is None else own for own, theirs in zip(self, whole, strict=True)))


class Endpoints:
    """One rank's communicators: for each device, one of all ranks, and one with each peer for `send` and `recv`.

    `send` and `recv` involve only two ranks, so they can't use a communicator that all ranks must make together. Making
    a communicator waits for the other ranks. If a program must not wait, a thread makes the communicator.

    If all ranks of a new communicator have the communicator of their *parent*, the new communicator is split from the
    parent's; otherwise it is made from scratch. A group's parent is the default group, and a pair's parent is the
    pair's group. The ranks exchange addresses through their group's own store, so groups may be used first in any
    order.

    Args:
        store: the store for the ranks' addresses. No other group, and no earlier group of the same name, may have used
            this store.
        whole: the endpoints of the default group; None for the default group itself.
        members: the numbers that this group's ranks have in `whole`.
        runtimes: the runtimes of this rank's GPUs. If None, the runtimes of `whole` are shared; if `whole` is also
            None, new runtimes are opened.
        settings: passed to `Communicator`.

    Attributes:
        aborted: whether `abort` was called.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        timeout: float,
        whole: Endpoints | None = None,
        members: Sequence[int] = (),
        runtimes: DeviceRuntimes | None = None,
        settings: Settings = Settings(),  # noqa: B008  a constant
    ) -> None:
        self._open_store: Any = store
        self._bootstraps: list[StoreBootstrap] = []  # the bootstraps that use the store
        self._rank, self._world_size = rank, world_size
        self._timeout = timeout
        self._whole, self._members = whole, list(members)
        if runtimes is None:
            runtimes = DeviceRuntimes() if whole is None else whole._runtimes
        self._runtimes: DeviceRuntimes = runtimes
        self.settings = settings
        self._lock = threading.Lock()
        self._making: dict[_Key, _Making] = {}
        self._meetings: Counter[str] = Counter()  # by communicator's name: attempts that did not time out
        self._made: dict[_Key, Communicator] = {}
        self._checks: tuple[Callable[[], None], ...] = ()  # failure checks of the communicators that were made
        self._closed = self.aborted = False
        self._to_self = ToSelf(rank, self._require_open)

    @property
    def store(self) -> Any:
        """The store for the ranks' addresses. After `close`, raises ClosedError."""
        store = self._open_store
        if store is None:
            self._require_open()
        return store

    def of_all(self, device: torch.device) -> Communicator:
        """Returns the communicator of all ranks for a device; if none exists, all ranks make it in this call."""
        made = self._made.get((device.type, device.index, None))
        return made if made is not None else self._make(device, None)

    def set_suspendable(self, device: torch.device, suspendable: bool) -> None:
        """Sets whether communicators that are made from now on can be suspended.

        Raises ArgumentError if a communicator with the other setting exists, and RuntimeUnavailableError if the
        device's driver can't suspend memory.
        """
        suspendable = as_flag(suspendable, "suspendable")
        if suspendable:
            require_suspendable(runtime_name(device))
        if any(comm.group.device_memory.suspendable != suspendable for comm in self.made):
            raise ArgumentError("suspendable", f"is {suspendable}; expected the setting of the group's communicator")
        self.settings = self.settings._replace(suspendable=suspendable)

    def with_peer(self, device: torch.device, peer: int) -> Communicator:
        """Returns the communicator with a peer for a device; if none exists, both ranks make it in this call."""
        made = self._made.get((device.type, device.index, peer))
        return made if made is not None else self._make(device, peer)

    def has_met(self, device: torch.device, peer: int | None) -> bool:
        """Returns whether the communicator with a peer exists or, if `peer` is None, the communicator of all ranks."""
        return (device.type, device.index, peer) in self._made

    def to_self(self, tensor: torch.Tensor, *, sends: bool) -> None:
        """If `sends` is set, sends a tensor to this rank itself, otherwise receives one (`ToSelf`)."""
        (self._to_self.send if sends else self._to_self.recv)(tensor, self._timeout)

    @contextmanager
    def transferring(self, peer: int | None) -> Iterator[None]:
        """A context for calls on the communicator with a peer. Converts the rank numbers in errors that are raised
        inside the context to this group's. If `peer` is None, the context changes nothing.
        """
        try:
            yield
        except CommunicatorError as error:
            if peer is None:
                raise
            raise_in_place_of(error, self.with_ranks(error, peer))

    def with_ranks(self, error: Exception, peer: int) -> Exception:
        """Converts the rank numbers in an error of the communicator with a peer to this group's rank numbers. Returns
        errors other than a CommunicatorError unchanged.
        """
        return renumbered(error, sorted((self._rank, peer))) if isinstance(error, CommunicatorError) else error

    def check(self) -> None:
        """Raises the error that ended a communicator, if one has failed."""
        for check in self._checks:
            check()

    def _check_pair(self, peer: int, comm: Communicator) -> None:
        with self.transferring(peer):
            comm.check()

    @contextmanager
    def bounded(self, device: torch.device, peer: int | None, seconds: float | None) -> Iterator[None]:
        """A context that bounds a call's waits by `seconds`, or if that is None, by the group's time-out. The context
        changes the communicator's time-out, which affects no other call: its calls on the CPU run one by one.
        """
        if seconds is None:
            yield
            return
        comm = self._made.get((device.type, device.index, peer)) or self._make(device, peer, seconds)
        comm.timeout = seconds
        try:
            yield
        finally:
            comm.timeout = self._timeout

    def _make(self, device: torch.device, peer: int | None, seconds: float | None = None) -> Communicator:
        key = (device.type, device.index, peer)
        with self._lock:
            making = self._making.setdefault(key, _Making())
        with making.lock:
            self._require_open()
            if making.error is not None:
                raise making.error
            if key not in self._made:
                try:
                    comm = self._connect(device, peer, seconds or self._timeout)
                except BaseException as error:
                    making.error = error  # threads that wait for this attempt raise its error; a later call tries again
                    with self._lock:
                        del self._making[key]
                    raise
                with self._lock:
                    self._add(key, comm)
                    closed = self._closed
                if closed:
                    comm.close(wait=False)
            return self._made[key]

    def _add(self, key: _Key, comm: Communicator) -> None:
        self._made[key] = comm
        peer = key[2]
        check = comm.group.failure.check if peer is None else functools.partial(self._check_pair, peer, comm)
        self._checks = (*self._checks, check)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the process group was shut down")
        if self.aborted:
            raise AbortedError("the process group was aborted")

    def _connect(self, device: torch.device, peer: int | None, seconds: float) -> Communicator:
        runtime = runtime_name(device)
        whole: Endpoints | None
        if peer is None:
            name, rank, world_size = runtime, self._rank, self._world_size
            whole, members = self._whole, self._members
        else:
            low, high = sorted((self._rank, peer))
            name, rank, world_size = f"{runtime}-{low}-{high}", int(self._rank > peer), 2
            whole, members = self, [low, high]
        # The store's prefix has a count of attempts instead of the GPU's index, which may differ between ranks.
        place = dist.PrefixStore(f"proxyccl-{name}-{self._meetings[name]}", self.store)
        bootstrap = StoreBootstrap(place, rank, world_size)
        self._bootstraps.append(bootstrap)
        self._require_open()  # if `end_meetings` has begun, it may not have seen this bootstrap
        try:
            comm = self._meet(bootstrap, device, peer, whole, members, seconds)
        except WaitTimeoutError:  # a late rank can still join this rank's next attempt
            bootstrap.withdraw()
            raise
        except Exception:
            self._meetings[name] += 1
            raise
        self._meetings[name] += 1
        if peer is not None:
            try:
                with self.transferring(peer):
                    comm.prepare_transfers()
                    # When a driver creates a resource, it may wait for running kernels, and a transfer's kernel waits
                    # for the peer. So neither rank launches a transfer before both ranks have created all resources.
                    comm.all_gather_bytes(b"", "first transfer of two ranks")
            except BaseException:
                comm.close(wait=False)
                raise
        comm.timeout = self._timeout
        return comm

    def _meet(
        self,
        bootstrap: StoreBootstrap,
        device: torch.device,
        peer: int | None,
        whole: Endpoints | None,
        members: Sequence[int],
        seconds: float,
    ) -> Communicator:
        """Makes a communicator of the bootstrap's ranks. If all of these ranks have the communicator of `whole`, splits
        the new communicator from that communicator; `members` are the ranks' numbers in `whole`.
        """
        splittable = None if whole is None else whole.made_of_all(device)
        suspendable = self.settings.suspendable
        if splittable is not None and (
            splittable.suspended or suspendable not in (None, splittable.group.device_memory.suspendable)
        ):
            splittable = None  # a split communicator has its parent's memory and its setting of `suspendable`

        def give_up() -> None:
            self._require_open()
            with torch_errors():  # so that `transferring` does not renumber the ranks in errors of other communicators
                self.check()

        with self.transferring(peer):
            answer = b"" if splittable is None else b"1"
            splits = whole is not None and all(bootstrap.all_gather(answer, seconds, give_up))
        if splits:
            assert splittable is not None
            # This call is outside `transferring`, because a failed split's errors already have rank numbers of `whole`.
            return splittable.split(members, timeout=seconds, bootstrap=bootstrap, invariant=self.settings.invariant)
        with self.transferring(peer):
            own = self._runtimes.of(device)
            compile_early(bootstrap.rank, bootstrap.world_size)
            return Communicator(bootstrap, own, timeout=seconds, linger=LINGER_SECONDS, **self.settings._asdict())

    def made_of_all(self, device: torch.device) -> Communicator | None:
        """Returns the communicator of all ranks for a device, or None if no usable communicator exists."""
        made = self._made.get((device.type, device.index, None))
        return None if made is None or not made.group.failure.usable else made

    def part(self, store: Any, ranks: Sequence[int], timeout: float, settings: Settings) -> Endpoints:
        """Returns the endpoints of a subset of the group's ranks. This rank must be in `ranks`. The new communicators
        are split from the default group's, because the default group lives at least as long as any other group.
        """
        settings = settings.within(self.settings)
        whole = self if self._whole is None else self._whole
        members = [self._members[rank] for rank in ranks] if self._members else list(ranks)
        return Endpoints(store, list(ranks).index(self._rank), len(ranks), timeout, whole, members, settings=settings)

    def shrink(self, store: Any, excluded: Sequence[int], timeout: float) -> Endpoints:
        """Returns the endpoints of the ranks that are not excluded, all of which must call this function.

        Raises PeerLostError if a rank that is not excluded has failed, and the errors of `Communicator.shrink`.
        """
        members = [rank for rank in range(self._world_size) if rank not in excluded]
        own, count = members.index(self._rank), len(members)
        shrunk = Endpoints(store, own, count, timeout, runtimes=self._runtimes, settings=self.settings)
        with self._lock:
            made = {key: comm for key, comm in self._made.items() if key[2] is None}
        for key, comm in made.items():
            left = comm.shrink(exclude=excluded, timeout=timeout)
            shrunk._add(key, left)
            lost = sorted({*members} - {*left.members})
            if lost:
                shrunk.close()
                raise PeerLostError(
                    f"shrink: ranks {lost} were lost too; expected ranks_to_exclude to name them",
                    rank=self._rank,
                    peer=lost[0],
                    operation="shrink",
                )
        return shrunk

    @property
    def members(self) -> list[int]:
        return self._members or list(range(self._world_size))

    @property
    def made(self) -> list[Communicator]:
        with self._lock:
            return list(self._made.values())

    @property
    def failed(self) -> Communicator | None:
        return next((comm for comm in self.made if not comm.closed and comm.group.failure.aborted), None)

    def has_left(self, peer: int | None) -> bool:
        """Returns whether a peer or, if `peer` is None, any other rank has announced that it shut the group down."""
        with self._lock:
            made = list(self._made.items())
        for (_, _, other), comm in made:
            number = peer if other is None else None
            if other in (None, peer) and comm.group.has_left(number):
                return True
        return False

    def announce_no_sends(self) -> None:
        """Announces that this rank will send nothing more. If the store can't be reached, does nothing."""
        with suppress(dist.DistError):
            self.store.set(f"{_NO_SENDS}{self._rank}", b"")

    def sends_nothing(self, peer: int) -> bool:
        """Returns whether a peer has announced that it will send nothing more."""
        with suppress(dist.DistError):
            return bool(self.store.check([f"{_NO_SENDS}{peer}"]))
        return False

    def end_calls(self, peer: int | None, reason: str) -> None:
        """Ends calls with a peer by aborting the communicators with the peer or, if `peer` is None, of all ranks."""
        with self._lock:
            made = [comm for (_, _, other), comm in self._made.items() if other == peer]
        for comm in made:
            comm.abort(reason)

    def set_timeout(self, seconds: float) -> None:
        """Changes the time-out of every wait that begins from now on."""
        self._timeout = seconds
        for comm in self.made:
            comm.timeout = seconds

    def abort(self, reason: str) -> None:
        """Ends the communicators on all ranks. Threads of this process that wait for a peer to make a communicator
        raise AbortedError. Does not wait.
        """
        self.aborted = True
        for comm in self.made:
            comm.abort(reason)

    def in_order(self) -> list[Communicator]:
        """Returns the communicators that exist, in the same order of pairs on all ranks, so that each pair's ranks can
        make a collective call without a deadlock.
        """
        with self._lock:
            made = sorted(self._made.items(), key=lambda item: (item[0][0], -1 if item[0][2] is None else item[0][2]))
        return [comm for _, comm in made]

    def end_meetings(self) -> None:
        """Prevents further communicators. Threads that wait for a peer to make a communicator raise ClosedError."""
        with self._lock:
            self._closed = True
        while self._bootstraps:
            self._bootstraps.pop().close()

    def close(self) -> None:
        """Closes the communicators. Waits for this rank's own work, but not for other ranks."""
        self.end_meetings()
        for comm in self.made:
            comm.close(wait=False)
        self._open_store = None  # dropped, so that the program can close the store and reuse its port
