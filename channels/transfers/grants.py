"""Grants: an owner of memory lets others read or write blocks until the owner revokes the grant. A reader or writer
learns whether the grant was revoked before its transfer was complete.

A reader that has copied a granted block checks the block's number in the owner's ledger afterwards (pairing grant in
MEMORY_ORDER.md). The owner changes the number before it overwrites the block. So if the number is unchanged after the
copy, the copy is whole. A sequence lock works in the same way. A write is different: the owner waits until the write
has ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Self

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from proxyccl.channels.timeouts import as_seconds
from proxyccl.channels.transfers.blocks import Rows, as_rows, find_outside
from proxyccl.channels.transfers.checksums import checksums_of
from proxyccl.channels.transfers.errors import (
    ActiveError,
    CorruptReadError,
    DisconnectedError,
    MetadataError,
    NotGrantedError,
    StaleReadError,
    StaleWriteError,
)
from proxyccl.channels.transfers.ledger import Ledger
from proxyccl.channels.transfers.metadata import LONGEST_NAME
from proxyccl.channels.transfers.transfer import Check, Granted, State, Transfer, set_check, set_grant
from proxyccl.device.errors import ArgumentError, ProxyCCLError
from proxyccl.device.process import forks
from proxyccl.proxy._transfers import ffi
from proxyccl.proxy.codec import Codec, Message, Uint64
from proxyccl.proxy.hosts import boot_id

if TYPE_CHECKING:
    from proxyccl.channels.transfers.paths import Link

_LIMIT = 64 << 20
_COLUMNS = 3


class GrantMessage(Message, frozen=True):
    """The description of a grant, which its owner sends to readers.

    Attributes:
        agent, token: the owner's name and token.
        host: the boot id of the owner's machine.
        writes: whether the grant is for writes, rather than reads.
        deadline: the end of the lease in ns of the host's CLOCK_MONOTONIC; 0 without a lease.
        rows: uint64 of shape (N, 3), as bytes: each block's address, size and number, sorted by address.
        checksums: uint32 of shape (N,), as bytes: each block's CRC-32; b"" without checksums.
    """

    format: Literal["proxyccl-grant-3"]
    agent: Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
    token: Annotated[bytes, Meta(max_length=64)]
    host: Annotated[str, Meta(max_length=64)]
    writes: bool
    deadline: Uint64
    rows: bytes
    checksums: bytes = b""

    def __post_init__(self) -> None:
        if len(self.rows) % (_COLUMNS * 8):
            raise ValueError("rows is not an array of three columns")
        if self.checksums and len(self.checksums) * _COLUMNS * 8 != len(self.rows) * 4:
            raise ValueError("there is not one checksum for each block")

    @property
    def blocks(self) -> Rows:
        return np.frombuffer(self.rows, np.uint64).reshape(-1, _COLUMNS)


GRANT = Codec(GrantMessage, _LIMIT, "grant", MetadataError)


class Grant:
    """Blocks of this agent's memory that others may read, or write, until `revoke`. `Agent.grant` makes a grant.
    Closing the agent revokes all its grants, but dropping the `Grant` does not.

    Any thread may call the methods. As a context manager, revokes the grant at the end of the block, and does not wait
    for transfers under way: if the grant allows writes, reuse its memory only after `revoke` has returned True. A
    forked child can neither revoke its parent's grant nor end it by leaving such a block.

    Attributes:
        encoded: the bytes that peers pass as `grant` to `Agent.read`, `Agent.write` and `Agent.prepare`.
    """

    def __init__(self, ledger: Ledger, message: GrantMessage) -> None:
        self.encoded = GRANT.encode(message)
        self._ledger, self._deadline = ledger, message.deadline
        self._addresses, _, numbers = message.blocks.T
        self._numbers = np.ascontiguousarray(numbers)
        self._process = forks.here()

    def __repr__(self) -> str:
        return f"Grant({int(self._ledger.holds_each(self._numbers).sum())} of {len(self._numbers)} blocks)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.is_here:
            self.revoke()

    @property
    def active(self) -> bool:
        """Whether transfers of some of the blocks may start. If the lease has ended, revokes the grant. For a grant for
        writes, only `revoke` says whether all writes have ended."""
        if self._deadline and time.monotonic_ns() >= self._deadline and self._process.is_here:
            self.revoke()
        return bool(self._ledger.holds_each(self._numbers).any())

    def revoke(self, addresses: Any = None, *, wait: float = 0.0) -> bool:
        """Revokes blocks. Later reads or writes of the blocks raise StaleReadError or StaleWriteError, and so does a
        transfer that is still active when this returns.

        If the grant is for reads, the program may overwrite the blocks, or deregister and free them, when this returns.
        If the grant is for writes, the program may do so when this returns True, because no byte of a write arrives
        after that. If this returns False, bytes of active writes may still arrive: call this again to wait for the end
        of these writes.

        Args:
            addresses: the addresses of the blocks to revoke; None for all blocks.
            wait: the longest time in seconds to wait for active transfers of the grant, so that they complete. This
                includes transfers of blocks that are not revoked. The wait ends early when no agent of this host
                transfers. Readers on other hosts are not waited for, nor is a reader that can't map this agent's
                ledger, which the reader's RuntimeWarning says.

        Returns:
            Whether no transfer of the grant by an agent of this host was still active when the blocks were revoked.
            Transfers of a killed process do not count.

        Raises:
            ArgumentError: an address is not that of a block of this grant, or `wait` is not a time.
            ClosedError: this process is a forked child.
        """
        self._process.require("the grant")
        seconds = as_seconds(wait, "wait", "must be a number of seconds", may_be_none=True)
        numbers = self._numbers
        if addresses is not None:
            wanted = _as_addresses(addresses)
            at = np.minimum(np.searchsorted(self._addresses, wanted), len(self._addresses) - 1)
            unknown = wanted[self._addresses[at] != wanted]
            if len(unknown):
                raise ArgumentError("addresses", f"{int(unknown[0]):#x} is not the address of a granted block")
            numbers = numbers[at]
        self._ledger.revoke(numbers, ends=False)
        try:
            return self._ledger.wait(int(self._numbers[0]), seconds)
        finally:
            self._ledger.revoke(numbers)


def _as_addresses(addresses: Any) -> Rows:
    """Returns a caller's addresses as uint64 of shape (N,). Raises ArgumentError if they are not integers."""
    try:
        wanted = np.asarray(addresses).ravel()
    except ValueError:  # numpy raises this for lists of different lengths
        wanted = None
    if wanted is None or (len(wanted) and wanted.dtype.kind not in "iu"):
        raise ArgumentError("addresses", f"must be addresses of granted blocks, not {addresses!r:.100}")
    return wanted.astype(np.uint64)


def as_granted(blocks: Any) -> Rows:
    """Converts a caller's blocks to rows of (address, bytes), sorted by address.

    Raises:
        ArgumentError: `blocks` is not of shape (N, 2), is empty, or contains blocks that are empty or overlap.
    """
    rows = as_rows(blocks, columns=2)
    if not len(rows) or not rows[:, 1].all():
        raise ArgumentError("blocks", "must be at least one block, and none of them empty")
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    if (rows[1:, 0] < rows[:-1, 0] + rows[:-1, 1]).any():
        raise ArgumentError("blocks", "must not overlap")
    return rows


class Found(Struct, frozen=True, eq=False):
    """The granted blocks of a transfer.

    Attributes:
        owner: the name of the grant's agent.
        writes: whether the transfer is a write.
        rows: a copy of the transfer's blocks, as the caller has passed them.
        numbers: for each of the rows, the number of its granted block.
        grant: the number of the grant's first block.
        deadline: an array of one number, which is the end of the lease in ns of this host's CLOCK_MONOTONIC; 0 without
            a lease, or on another host. If the grant has a key, the array is a part of the owner's ledger.
        checksums: for each of the rows, the checksum of its granted block, which then is exactly the row's remote
            bytes; None without checksums.
    """

    owner: str
    writes: bool
    rows: Rows
    numbers: NDArray[np.uint64]
    grant: int
    deadline: NDArray[np.uint64]
    checksums: NDArray[np.uint32] | None = None

    @property
    def is_late(self) -> bool:
        return 0 < int(self.deadline[0]) <= time.monotonic_ns()

    def raise_stale(self, stale: NDArray[np.bool_], text: str, *, copied: bool = True) -> NoReturn:
        """Raises StaleReadError or StaleWriteError. `copied` says whether the other blocks' data arrived whole."""
        generations = {index: int(self.numbers[index]) for index in np.flatnonzero(stale).tolist()}
        if self.writes:
            raise StaleWriteError(text, self.owner, generations)
        raise StaleReadError(text, self.owner, generations, np.flatnonzero(~stale).tolist() if copied else [])

    def find_corrupt(self) -> NDArray[np.bool_] | None:
        """Returns a mask of the rows whose local bytes differ from their checksums; None if there is no such row, or
        if the grant has no checksums.
        """
        if self.checksums is None:
            return None
        corrupt: NDArray[np.bool_] = checksums_of(self.rows[:, 0:3:2]) != self.checksums
        return corrupt if corrupt.any() else None

    def raise_corrupt(self, corrupt: NDArray[np.bool_]) -> NoReturn:
        first = int(corrupt.argmax())
        raise CorruptReadError(
            f"the data of {np.count_nonzero(corrupt)} of {len(corrupt)} blocks of agent {self.owner} differs from "
            f"their checksums; the first is block {first} at {int(self.rows[first, 1]):#x}",
            self.owner,
            np.flatnonzero(corrupt).tolist(),
        )

    def raise_revoked(self, stale: NDArray[np.bool_], when: str, *, copied: bool = True) -> NoReturn:
        first = int(stale.argmax())
        text = (
            f"agent {self.owner} revoked {np.count_nonzero(stale)} of {len(stale)} blocks {when}; the first is block "
            f"{first} at {int(self.rows[first, 1]):#x}, generation {int(self.numbers[first])}"
        )
        self.raise_stale(stale, text, copied=copied)


def find_blocks(message: GrantMessage, rows: Rows, *, writes: bool) -> Found:
    """Finds for each row of (local address, remote address, bytes) the granted block that contains the remote bytes.

    Raises:
        NotGrantedError: the remote bytes of a row do not lie within one granted block, or are a part of a block with a
            checksum, or the grant is for transfers in the other direction.
    """
    if message.writes != writes:
        allowed = "writes" if message.writes else "reads"
        raise NotGrantedError(f"agent {message.agent} has granted {allowed} of the blocks only", message.agent)
    starts, sizes, numbers = message.blocks.T
    index = find_outside(starts, starts + sizes, rows[:, 1], rows[:, 2])
    if index is not None:
        address, nbytes = int(rows[index, 1]), int(rows[index, 2])
        raise NotGrantedError(
            f"block {index}: {nbytes} bytes at remote address {address:#x} lie in no granted block of agent "
            f"{message.agent}",
            message.agent,
        )
    at = np.searchsorted(starts, rows[:, 1], "right") - 1
    checksums = None
    if message.checksums:
        checksums = np.frombuffer(message.checksums, np.uint32)[at]
        partly = (rows[:, 1] != starts[at]) | (rows[:, 2] != sizes[at])
        if partly.any():
            text = f"block {partly.argmax()} is a part of a granted block, whose checksum needs the whole block"
            raise NotGrantedError(text, message.agent)
    deadline = message.deadline if message.host == boot_id() else 0
    number, deadlines = int(numbers[0]), np.array([deadline], np.uint64)
    return Found(message.agent, writes, rows, numbers[at], number, deadlines, checksums)


class BlocksOfHost(Granted):
    """The granted blocks of an agent whose ledger this process has mapped, so that the engine checks the grant. Raises
    the errors of `Ledger.place`.
    """

    def __init__(self, found: Found, ledger: Ledger) -> None:
        self._found, self._ledger, self._place = found, ledger, ledger.place()

    def guard(self, transfer: Transfer) -> None:
        """Makes a transfer that was not started check the grant."""
        found = self._found
        words = self._ledger.pointer, ffi.cast("uint64_t *", found.numbers.ctypes.data), len(found.numbers)
        deadline = ffi.cast("uint64_t *", found.deadline.ctypes.data)
        in_engine = ffi.new("ProxycclGranted *", [*words, found.grant, deadline, self._place.number])
        set_grant(transfer, self, in_engine)

    def raise_stale(self, *, started: bool = True) -> None:
        found = self._found
        stale = np.ones(len(found.numbers), bool) if found.is_late else ~self._ledger.holds_each(found.numbers)
        what = "write" if found.writes else "read"
        found.raise_revoked(stale, f"during the {what}" if started else f"before the {what} began", copied=started)


class Fence(Check):
    """Checks after a read that none of its blocks was revoked before the end of the copy, and that the checksums of the
    grant match.

    Args:
        of_host: the check by the engine, if the owner's ledger is mapped; otherwise None.
        look: if the ledger can't be mapped, a transfer that reads the words of the numbers into `words`, in the order
            of `np.unique`; otherwise None.
    """

    def __init__(
        self, found: Found, of_host: BlocksOfHost | None, look: Transfer | None, words: NDArray[np.uint64]
    ) -> None:
        self._found, self._of_host, self._look, self._words = found, of_host, look, words
        self._unique, self._places = np.unique(found.numbers, return_inverse=True)
        self._link: Link | None = None
        self._message: bytes | None = None  # of the last start
        self._lock = threading.Lock()  # held while `look` is started, polled or canceled
        self._started = 0  # the time of the last start
        self._looks = False  # whether `look` was started, and its result was not yet taken
        # The time of a start, and its outcome, in one object, because threads read it without a lock.
        self._settled = 0, State.NEW
        self._stale: tuple[NDArray[np.bool_], str] | None = None  # the stale blocks, and when they were revoked
        self._corrupt: NDArray[np.bool_] | None = None  # the corrupt blocks

    def guard(self, transfer: Transfer) -> None:
        """Makes a transfer that was not started check the grant."""
        if self._of_host is not None:
            self._of_host.guard(transfer)
        self._link = set_check(transfer, self)

    def begin(self, message: bytes | None, start: Callable[[], int]) -> None:
        with self._lock:
            if self._looks:
                owner = self._found.owner
                raise ActiveError(f"the read of agent {owner} is active: its grant is being checked", owner)
            self._started, self._message = start(), message

    def poll(self, started: int) -> State:
        settled, outcome = self._settled
        if started <= settled:
            return outcome
        with self._lock:
            settled, outcome = self._settled
            if started <= settled:
                return outcome
            if started < self._started:
                return State.ACTIVE  # since a later start
            if self._look is None:
                return self._settle(np.zeros(len(self._places), bool), "")
            try:
                if not self._looks:
                    self._look.start()
                    self._looks = True
                if not self._look.done():
                    return State.ACTIVE
            except ProxyCCLError as error:
                return self._settle(np.ones(len(self._places), bool), f"or can't be asked: {error}")
            words, numbers = self._words, self._unique
            revoked = (words != numbers) & (words != ~numbers) | self._found.is_late
            return self._settle(revoked[self._places], "during the read")

    def wait(self, seconds: float) -> None:
        if self._look is not None:
            with contextlib.suppress(ProxyCCLError):  # `poll` finds the reason
                self._look.wait(max(seconds, 1e-6))

    def raise_stale(self, *, started: bool = True) -> None:
        if self._of_host is not None and (not started or self._settled[0] < self._started):
            self._of_host.raise_stale(started=started)
        elif self._corrupt is not None:
            self._found.raise_corrupt(self._corrupt)
        else:
            assert self._stale is not None
            self._found.raise_revoked(*self._stale)

    def cancel(self, timeout: float | None) -> None:
        with self._lock:
            if self._looks:
                assert self._look is not None
                self._look.cancel(timeout)
                self._looks, self._settled = False, (self._started, State.CANCELED)

    def _settle(self, stale: NDArray[np.bool_], when: str) -> State:
        outcome = State.DONE
        self._corrupt = None if stale.any() else self._found.find_corrupt()
        if stale.any():
            self._stale, outcome = (stale, when), State.STALE
        elif self._corrupt is not None:
            outcome = State.CORRUPT
        elif self._message is not None:
            assert self._link is not None
            try:
                self._link.tell(self._message)
            except DisconnectedError:
                outcome = State.LOST
        self._looks, self._settled = False, (self._started, outcome)
        return outcome
