"""Bootstraps: all-gathers of a few bytes, by which ranks find each other and set up faster connections.

The protocol is small on purpose, so that any launcher can offer it.
"""

from __future__ import annotations

import functools
import logging
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from proxyccl.channels import array_libraries
from proxyccl.channels.joining.boards import BUNDLE, BoardBootstrap
from proxyccl.channels.liveness.program_end import watch_mpi
from proxyccl.channels.segment.rendezvous import wait_until
from proxyccl.device.arguments.integers import as_integer
from proxyccl.device.errors import ArgumentError, ExchangeError, PeerLostError, WaitTimeoutError

_logger = logging.getLogger("proxyccl")
MOST_RANKS = 1 << 20
"""The most ranks of a communicator: more than any machine has GPUs, and few enough that a list of ranks fits in memory.
"""
_abandoned: list[tuple[Any, object]] = []
"""Abandoned requests to MPI, and their buffers, to which MPI may still write."""


class Bootstrap(Protocol):
    """Joins `world_size` ranks. All ranks make the same calls in the same order.

    To split a communicator that spans hosts, a bootstrap also needs `subset(members, key)`. Only the ranks in `members`
    call `subset`. `subset` returns a bootstrap of these ranks, numbered by their indices in `members`. `key` is a
    number that no other subset has. After a time-out the members may make the same subset again. To keep late ranks
    from reading old messages, each rank first calls `withdraw()` of its old subset, if that method exists. To shrink a
    communicator that spans hosts, a bootstrap also needs `board()`, which returns a `survivors.Board` that outlives
    each of the ranks.
    """

    @property
    def rank(self) -> int:
        """This rank's number."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def all_gather(self, data: bytes, timeout: float, give_up: Callable[[], None]) -> list[bytes]:
        """Returns every rank's bytes, in rank order. Ranks may pass different lengths.

        Args:
            data: this rank's bytes.
            timeout: the longest wait, in seconds.
            give_up: called while waiting; it raises to end the wait early.

        Raises:
            WaitTimeoutError: not all ranks called this within `timeout`.
        """

    def close(self) -> None:
        """Frees the bootstrap's resources."""


def require_place(rank: object, world_size: object) -> tuple[int, int]:
    """Converts a rank's number and the number of ranks, which may be numpy's integers, to plain integers.

    Raises:
        ArgumentError: an argument is not an integer, `world_size` is not from 1 to `MOST_RANKS`, or `rank` is not from
            0 to `world_size - 1`.
    """
    expected = f"must be an integer from 1 to {MOST_RANKS}"
    size = as_integer(world_size, "world_size", expected, 1, MOST_RANKS)
    return as_integer(rank, "rank", f"must be an integer from 0 to {size - 1}", 0, size - 1), size


def require_mpi(comm: Any) -> None:
    """Raises ArgumentError unless `comm` is None or an MPI intracommunicator."""
    from mpi4py import MPI

    if comm is not None and not isinstance(comm, MPI.Intracomm):
        raise ArgumentError("comm", f"must be an MPI intracommunicator, not {type(comm).__name__}")


class MpiBootstrap:
    """A `Bootstrap` of the ranks of an MPI communicator, by default `MPI.COMM_WORLD`.

    The first `all_gather` duplicates the MPI communicator, so that the bootstrap's messages never mix with the
    program's messages.
    """

    def __init__(self, comm: Any = None) -> None:
        from mpi4py import MPI

        require_mpi(comm)
        if hasattr(MPI, "_set_abort_status"):  # whether `python -m mpi4py` can pass on an exit status
            watch_mpi(MPI)
        parent = MPI.COMM_WORLD if comm is None else comm
        self._mpi = MPI
        self._parent = parent
        self._comm: Any = None
        self._out_of_step = False  # whether an all_gather was abandoned
        self._post = _MpiPost(self)
        self.rank: int = parent.Get_rank()
        self.world_size: int = parent.Get_size()

    def all_gather(self, data: bytes, timeout: float, give_up: Callable[[], None]) -> list[bytes]:
        """See `Bootstrap.all_gather`.

        Raises:
            PeerLostError: MPI reports that a rank has died.
            ExchangeError: an earlier call of this rank was interrupted, so MPI would match this call with other ranks'
                earlier calls.
        """
        if self._out_of_step:
            raise ExchangeError(
                "the bootstrap's all_gather over MPI: an earlier call was abandoned, and MPI still matches the "
                "other ranks' messages with that call; make a new MpiBootstrap on all ranks",
                rank=self.rank,
                operation="bootstrap",
            )
        deadline = time.monotonic() + timeout
        self._out_of_step = True
        try:
            if self._comm is None:
                comm, request = self._parent.Idup()
                self._wait(request, (comm,), deadline, give_up)
                self._comm = comm
            size = np.array([len(data)], np.int64)
            sizes = np.zeros(self.world_size, np.int64)
            self._wait(self._comm.Iallgather(size, sizes), (size, sizes), deadline, give_up)
            offsets = np.concatenate(([0], np.cumsum(sizes)))
            out = np.zeros(int(offsets[-1]), np.uint8)
            send = np.frombuffer(data, np.uint8)
            spec = [out, sizes, offsets[:-1], self._mpi.BYTE]
            self._wait(self._comm.Iallgatherv(send, spec), (send, spec), deadline, give_up)
        except self._mpi.Exception as error:
            give_up()
            raise PeerLostError(
                f"the bootstrap's all_gather over MPI: {error.Get_error_string()}",
                rank=self.rank,
                operation="bootstrap",
            ) from error
        self._out_of_step = False
        return [out[offsets[i] : offsets[i + 1]].tobytes() for i in range(self.world_size)]

    def _wait(self, request: Any, buffers: object, deadline: float, give_up: Callable[[], None]) -> None:
        try:
            wait_until(request.Test, deadline, give_up, self._late)
        except BaseException:
            _abandoned.append((request, buffers))
            raise

    def _late(self) -> WaitTimeoutError:
        return WaitTimeoutError(
            "the bootstrap's all_gather over MPI: not all ranks came in time", rank=self.rank, operation="bootstrap"
        )

    def subset(self, members: Sequence[int], key: int) -> MpiSubset:
        """Returns the bootstrap of some ranks (see `Bootstrap`). Call `all_gather` of this bootstrap before that of the
        subset, because the first `all_gather` makes the MPI communicator that the subset's messages use."""
        return MpiSubset(self._post, members, key)

    def close(self) -> None:
        """Frees the duplicated MPI communicator, unless MPI is finalised or an interrupted `all_gather` may still use
        it."""
        if self._comm is not None and not self._out_of_step and not self._mpi.Is_finalized():
            self._comm.Free()
            self._comm = None


class _MpiPost:
    HEADER = struct.Struct("<QQ")
    _TAG = 1
    _WITHDRAWN = 2**64 - 1
    """Sent in place of a round's number when the sender takes back its messages to the subset."""

    def __init__(self, bootstrap: MpiBootstrap) -> None:
        self._bootstrap = bootstrap
        self._lock = threading.Lock()
        self._came: dict[tuple[int, int, int], bytes] = {}  # received messages, by sender, key and round
        self._sent: list[Any] = []

    @property
    def rank(self) -> int:
        return self._bootstrap.rank

    def send(self, receiver: int, key: int, number: int, data: bytes) -> None:
        message = self.HEADER.pack(key, number) + data
        with self._lock:
            self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
            request = self._bootstrap._comm.Isend([message, self._bootstrap._mpi.BYTE], dest=receiver, tag=self._TAG)
            self._sent.append((request, message))

    def take(self, sender: int, key: int, number: int) -> bytes | None:
        mpi, status = self._bootstrap._mpi, self._bootstrap._mpi.Status()
        with self._lock:
            while (message := self._bootstrap._comm.Improbe(tag=self._TAG, status=status)) is not None:
                data = bytearray(status.Get_count(mpi.BYTE))
                message.Recv([data, mpi.BYTE])
                whose, (subset, place) = status.Get_source(), self.HEADER.unpack_from(data)
                if place == self._WITHDRAWN:
                    self._came = {name: sent for name, sent in self._came.items() if name[:2] != (whose, subset)}
                else:
                    self._came[whose, subset, place] = bytes(data[self.HEADER.size :])
            return self._came.pop((sender, key, number), None)

    def withdraw(self, receiver: int, key: int) -> None:
        self.send(receiver, key, self._WITHDRAWN, b"")


class MpiSubset(BoardBootstrap):
    """A `Bootstrap` of some ranks of an `MpiBootstrap`. The ranks use point-to-point messages, because making an MPI
    communicator would need all ranks of the `MpiBootstrap`.
    """

    where, is_shared = "MPI", False

    def __init__(self, post: _MpiPost, members: Sequence[int], key: int) -> None:
        super().__init__(members.index(post.rank), len(members))
        self._post, self._members, self._key = post, members, key

    def _put(self, number: int, of: str, data: bytes, readers: Sequence[int]) -> None:
        for reader in readers:
            self._post.send(self._members[reader], self._key, number, data)

    def _get(self, number: int, names: Sequence[str]) -> dict[str, bytes]:
        senders = {name: self._members[0 if name == BUNDLE else int(name)] for name in names}
        taken = {name: self._post.take(sender, self._key, number) for name, sender in senders.items()}
        return {name: data for name, data in taken.items() if data is not None}

    def _remove(self, number: int, of: str) -> None:
        """Does nothing, because receiving an MPI message removes it."""

    def withdraw(self) -> None:
        for peer in self._others:
            self._post.withdraw(self._members[peer], self._key)


class ThreadBootstrap(BoardBootstrap):
    """A `Bootstrap` of ranks that are threads of one process, made by `ThreadBootstrap.create(world_size)`."""

    def __init__(self, messages: dict[tuple[int, str], bytes], rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self._messages = messages

    @classmethod
    def create(cls, world_size: int) -> list[ThreadBootstrap]:
        """Makes one bootstrap for each of `world_size` threads."""
        _, size = require_place(0, world_size)
        messages: dict[tuple[int, str], bytes] = {}
        return [cls(messages, rank, size) for rank in range(size)]

    def _put(self, number: int, of: str, data: bytes, readers: Sequence[int]) -> None:
        self._messages[number, of] = data

    def _get(self, number: int, names: Sequence[str]) -> dict[str, bytes]:
        return {name: data for name in names if (data := self._messages.get((number, name))) is not None}

    def _remove(self, number: int, of: str) -> None:
        self._messages.pop((number, of), None)


def of_process_group(group: Any = None) -> Bootstrap:
    """Returns a bootstrap of the ranks of a torch process group; None stands for torch's default group."""
    made: Bootstrap = array_libraries.load("torch: bootstrap").TorchBootstrap(group)
    return made


_SIZES = {
    "torchrun": "WORLD_SIZE",
    "Slurm": "SLURM_STEP_NUM_TASKS",
    "MPICH's mpiexec": "PMI_SIZE",
    "Open MPI's mpiexec": "OMPI_COMM_WORLD_SIZE",
}
"""The variables in which launchers pass the number of processes that they start."""


def _traces_of_others() -> str:
    for launcher, name in _SIZES.items():
        size = os.environ.get(name, "")
        if size.isdecimal() and int(size) > 1:
            return f"{launcher} started {size} processes ({name})"
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        return "multiprocessing started this process"
    return ""


@functools.cache
def _warn_of_one_rank(others: str) -> None:
    _logger.warning(
        "the communicator has one rank, this process: MPI's world has no other, but %s. Give Communicator a bootstrap "
        "of all ranks, such as a FileBootstrap or a torch process group, or start them with the mpiexec of the MPI "
        "that this Python uses. If one rank is meant, pass MPI.COMM_SELF",
        others,
    )


def library_of_group(value: Any) -> str | None:
    """Returns "torch" for a torch process group, "mpi4py" for an MPI communicator, and None for any other object.

    Checks all base classes, because before torch 2.15 each backend written in Python has its own class of process
    group.
    """
    packages = {base.__module__.split(".")[0] for base in type(value).__mro__}
    return next((name for name in ("torch", "mpi4py") if name in packages), None)


def as_bootstrap(value: Any) -> tuple[Bootstrap, bool]:
    """Converts a caller's argument to a bootstrap.

    The argument is a `Bootstrap`, an MPI communicator, a torch process group, or None for `MPI.COMM_WORLD`.

    Returns:
        The bootstrap, and whether the caller must close it because this function made it.
    """
    if value is None:
        bootstrap = MpiBootstrap()
        if bootstrap.world_size == 1 and (others := _traces_of_others()):
            _warn_of_one_rank(others)
        return bootstrap, True
    if hasattr(value, "all_gather") and hasattr(value, "world_size"):
        require_place(getattr(value, "rank", None), value.world_size)
        return value, False
    library = library_of_group(value)
    if library == "mpi4py":
        return MpiBootstrap(value), True
    if library == "torch":
        return of_process_group(value), True
    raise ArgumentError(
        "bootstrap", f"must be a Bootstrap, an MPI communicator or a torch process group, not {type(value).__name__}"
    )
