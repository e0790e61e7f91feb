"""The communicators of a process group, made when they are first used."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from proxyccl.channels.communicator import Communicator
from proxyccl.device.errors import (
    AbortedError,
    ClosedError,
    CommunicatorError,
    PeerLostError,
    WaitTimeoutError,
    raise_in_place_of,
    renumbered,
)
from proxyccl.torch.on_gpu import DeviceRuntimes, runtime_name
from proxyccl.torch.store_bootstrap import StoreBootstrap
from proxyccl.torch.to_self import ToSelf

LINGER_SECONDS = 2.0
"""The wait at the process's end for the last kernels of peers, which store to this rank's memory."""
_Key = tuple[str, int | None, int | None]


class _Making:
    """An attempt to make a communicator."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # the making thread holds it; other threads wait for it
        self.error: BaseException | None = None  # the error that ended the attempt


class Endpoints:
    """The communicators of one rank: one of all ranks for each device, and one with each peer for single transfers.

    A single send or recv involves only two ranks, so it can't use resources that all ranks must make together. It
    also runs concurrently with other calls, so its resources are made with its communicator. Making a communicator
    waits for the other ranks. Where a program must not wait, a thread makes it; `has_met` says whether the communicator
    exists, so that nothing waits.

    A communicator is split from an existing communicator, if all its ranks have made that communicator: the default
    group's, or for two ranks their group's. The ranks meet in the group's own store in either case, so calls of several
    groups never meet each other, whatever ranks they have and in whatever order they are first used.

    Args:
        store: where the ranks meet. It belongs to this group alone; no earlier group of the same name has used it.
        whole: the endpoints of the default group; None for the default group itself.
        members: these ranks' numbers in `whole`.
        runtimes: the runtimes of this rank's GPUs; None to share the runtimes of `whole`, or without `whole` to open
            new runtimes.
        invariant: as for `Communicator`; None for the setting of `whole`.

    Attributes:
        invariant: the argument, or the setting of `whole`.
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
        invariant: bool | None = None,
    ) -> None:
        self._open_store: Any = store
        self._bootstraps: list[StoreBootstrap] = []  # the bootstraps that use the store
        self._rank, self._world_size = rank, world_size
        self._timeout = timeout
        self._whole, self._members = whole, list(members)
        if runtimes is None:
            runtimes = DeviceRuntimes() if whole is None else whole._runtimes
        self._runtimes: DeviceRuntimes = runtimes
        self.invariant: bool | None = whole.invariant if invariant is None and whole is not None else invariant
        self._lock = threading.Lock()
        self._making: dict[_Key, _Making] = {}
        self._meetings: Counter[str] = Counter()  # by communicator: attempts that ended without a time-out
        self._made: dict[_Key, Communicator] = {}
        self._checks: tuple[Callable[[], None], ...] = ()  # failure checks of the communicators that were made
        self._closed = self._aborted = False
        self._to_self = ToSelf(rank, self._require_open)

    @property
    def store(self) -> Any:
        """The store where the ranks meet. After `close`, raises the error that a call would raise."""
        store = self._open_store
        if store is None:
            self._require_open()
        return store

    def of_all(self, device: torch.device) -> Communicator:
        """The communicator of all ranks for a device. All ranks call this together."""
        made = self._made.get((device.type, device.index, None))
        return made if made is not None else self._make(device, None)

    def with_peer(self, device: torch.device, peer: int) -> Communicator:
        """The communicator with a peer for a device. Both ranks call this."""
        made = self._made.get((device.type, device.index, peer))
        return made if made is not None else self._make(device, peer)

    def has_met(self, device: torch.device, peer: int | None) -> bool:
        """Whether the communicator with a peer (for None: the communicator of all ranks) exists, so that a call need
        not wait for it.
        """
        return (device.type, device.index, peer) in self._made

    def to_self(self, tensor: torch.Tensor, *, sends: bool) -> None:
        """Sends a tensor to this rank itself, or receives one; see `ToSelf`."""
        (self._to_self.send if sends else self._to_self.recv)(tensor, self._timeout)

    @contextmanager
    def transferring(self, peer: int | None) -> Iterator[None]:
        """A context for calls on the communicator with a peer: errors raised inside are renumbered to this group's
        ranks. Errors of the communicator of all ranks stay as they are.
        """
        try:
            yield
        except CommunicatorError as error:
            if peer is None:
                raise
            raise_in_place_of(error, self.with_ranks(error, peer))

    def with_ranks(self, error: Exception, peer: int) -> Exception:
        """Returns the error of a communicator with a peer, renumbered to this group's ranks; returns other errors
        unchanged.
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
        """Bounds a call's waits by a time-out other than the group's; None keeps the group's. A communicator's calls on
        the CPU run one after the other."""
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
        if self._aborted:
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
        # Ranks may number their GPUs differently, so the store's prefix has a count of attempts, not a GPU's index.
        place = dist.PrefixStore(f"proxyccl-{name}-{self._meetings[name]}", self.store)
        bootstrap = StoreBootstrap(place, rank, world_size)
        self._bootstraps.append(bootstrap)
        try:
            comm = self._meet(bootstrap, device, peer, whole, members, seconds)
        except WaitTimeoutError:  # a rank that was too late may still meet this rank's next attempt
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
                    # A driver may wait for running kernels when it creates a resource. A kernel of the pair's transfers
                    # waits for the peer's kernel. So neither rank launches a kernel before both have created all their
                    # resources.
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
        """Makes a communicator of the bootstrap's ranks: split from the communicator of `whole`, where the ranks are
        `members`, if all of them have that communicator; otherwise a new communicator.
        """
        splittable = None if whole is None else whole.made_of_all(device)
        with self.transferring(peer):
            answer = b"" if splittable is None else b"1"
            splits = whole is not None and all(bootstrap.all_gather(answer, seconds, self._require_open))
        if splits:
            assert splittable is not None
            # Errors of a failed split name ranks of `whole`.
            return splittable.split(members, timeout=seconds, bootstrap=bootstrap, invariant=self.invariant)
        with self.transferring(peer):
            own = self._runtimes.of(device)
            return Communicator(bootstrap, own, timeout=seconds, linger=LINGER_SECONDS, invariant=self.invariant)

    def made_of_all(self, device: torch.device) -> Communicator | None:
        """The communicator of all ranks for a device; None if it was not made or has failed."""
        made = self._made.get((device.type, device.index, None))
        return None if made is None or not made.group.failure.usable else made

    def part(self, store: Any, ranks: Sequence[int], timeout: float, invariant: bool | None = None) -> Endpoints:
        """The endpoints of some ranks of the group, including this one. These endpoints are split from the default
        group's endpoints, which live as long as any other group's. `invariant` is None for this group's setting.
        """
        if invariant is None:
            invariant = self.invariant
        whole = self if self._whole is None else self._whole
        members = [self._members[rank] for rank in ranks] if self._members else list(ranks)
        return Endpoints(store, list(ranks).index(self._rank), len(ranks), timeout, whole, members, invariant=invariant)

    def shrink(self, store: Any, excluded: Sequence[int], timeout: float) -> Endpoints:
        """The endpoints of the remaining ranks, which call this together. Arguments as for the constructor.

        Raises as `Communicator.shrink`, and PeerLostError if a rank that is not excluded was lost.
        """
        members = [rank for rank in range(self._world_size) if rank not in excluded]
        own, count = members.index(self._rank), len(members)
        shrunk = Endpoints(store, own, count, timeout, runtimes=self._runtimes, invariant=self.invariant)
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
        """Whether a rank, or with None any other rank, has shut the group down, as far as this rank's communicators
        know.
        """
        with self._lock:
            made = list(self._made.items())
        for (_, _, other), comm in made:
            number = peer if other is None else None
            if other in (None, peer) and comm.group.has_left(number):
                return True
        return False

    def end_calls(self, peer: int | None, reason: str) -> None:
        """Aborts the communicators with a peer, or with None the communicators of all ranks. That ends their calls in
        progress.
        """
        with self._lock:
            made = [comm for (_, _, other), comm in self._made.items() if other == peer]
        for comm in made:
            comm.abort(reason)

    def set_timeout(self, seconds: float) -> None:
        """Changes the bound of every wait from now on."""
        self._timeout = seconds
        for comm in self.made:
            comm.timeout = seconds

    def abort(self, reason: str) -> None:
        """Ends the communicators on all ranks, and the threads here that wait for a peer to make one. Does not wait."""
        self._aborted = True
        for comm in self.made:
            comm.abort(reason)

    def end_meetings(self) -> None:
        """Makes no communicator after this call; threads that wait for a peer to make one raise ClosedError."""
        with self._lock:
            self._closed = True

    def close(self) -> None:
        """Closes the communicators. Waits for this rank's own work, but for no other rank."""
        self.end_meetings()
        for comm in self.made:
            comm.close(wait=False)
        self._open_store = None  # the program may now end the store, to reuse its port
        while self._bootstraps:
            self._bootstraps.pop().close()
