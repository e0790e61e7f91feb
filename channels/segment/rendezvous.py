"""Rendezvous: the ranks of a host exchange messages and form groups without a bootstrap.

Each rank has a rendezvous in its control segment, which the other ranks map (rendezvous.h).
"""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from proxyccl.device.errors import ProxyCCLError, ResourceError, WaitTimeoutError
from proxyccl.proxy._engine import ffi, lib

if TYPE_CHECKING:
    from proxyccl.proxy._engine import ProxycclLetterPointer  # this name exists only in the stub, not in cffi

_MOST_REFUSALS = 4
MOST_INVITATIONS: int = lib.PROXYCCL_INVITATIONS - _MOST_REFUSALS
MOST_DECISIONS: int = lib.PROXYCCL_DECISIONS
_FIRST_PAUSE_SECONDS = 1e-5
_LONGEST_PAUSE_SECONDS = 1e-3


def ranks_missing(exchange: str, missing: Sequence[int], rank: int) -> WaitTimeoutError:
    """Returns the error that `rank` raises if other ranks were missing in an exchange; `exchange` describes the
    exchange in words.
    """
    return WaitTimeoutError(
        f"{exchange}: ranks {list(missing)} did not come in time",
        rank=rank,
        peer=missing[0] if missing else None,
        operation="bootstrap",
    )


def key_of(*what: object) -> int:
    """Returns a 64-bit key for an invitation, computed from these values."""
    digest = hashlib.sha256(repr(what).encode()).digest()
    return int.from_bytes(digest[:8], "little") | 1  # 0 is not a valid key


class Rendezvous:
    """The rendezvous of this rank or of a peer.

    Args:
        address: the rendezvous's CPU address. Zeroed memory is an unused rendezvous.
    """

    def __init__(self, address: int) -> None:
        self._shared = ffi.cast("ProxycclRendezvous *", address)
        self._lock = threading.Lock()
        self._used: set[int] = set()
        self._refusals = 0

    @staticmethod
    def nbytes() -> int:
        return ffi.sizeof("ProxycclRendezvous")

    def post(self, part: bytes, message_bytes: int) -> None:
        lib.proxyccl_mailbox_post(self._shared, part, len(part), message_bytes)

    def read(self, number: int, letter: ProxycclLetterPointer) -> bool:
        return bool(lib.proxyccl_mailbox_read(self._shared, number, letter))

    def invite(self, key: int, handle: bytes) -> int:
        """For the owner: publishes a handle under a key. Returns a number for `withdraw`.

        Raises:
            ResourceError: there are too many invitations already, or the handle is too long.
        """
        if len(handle) > lib.PROXYCCL_INVITATION_BYTES:
            raise ResourceError(
                f"an invitation has {len(handle)} bytes, and at most {lib.PROXYCCL_INVITATION_BYTES} fit"
            )
        with self._lock:
            place = next((place for place in range(MOST_INVITATIONS) if place not in self._used), None)
            if place is None:
                raise ResourceError(f"a communicator is split at most {MOST_INVITATIONS} times at once")
            self._used.add(place)
            lib.proxyccl_invite(self._shared, place, key, handle, len(handle))
            return place

    def withdraw(self, place: int) -> None:
        with self._lock:
            lib.proxyccl_invitation_withdraw(self._shared, place)
            self._used.discard(place)

    def refuse(self, key: int, reason: str) -> None:
        """For the owner: publishes under a key the reason why this rank can't take part. Later calls may replace the
        reason.
        """
        message = reason.encode()[: lib.PROXYCCL_INVITATION_BYTES]
        with self._lock:
            place = MOST_INVITATIONS + self._refusals % _MOST_REFUSALS
            self._refusals += 1
            lib.proxyccl_invitation_withdraw(self._shared, place)
            lib.proxyccl_invite(self._shared, place, key, message, len(message))

    def find(self, key: int) -> bytes | None:
        """For a peer: returns the handle under a key, or None if there is none."""
        copy = ffi.new("ProxycclInvitation *")
        found = lib.proxyccl_invitation_find(self._shared, key, copy)
        return bytes(ffi.buffer(copy.handle, copy.handle_bytes)) if found else None

    def decide(self, question: int, value: int) -> int:
        """For any rank: proposes a value above 0 for a question. Returns the value that was proposed first, by any
        rank.
        """
        return int(lib.proxyccl_decide(self._shared, question, value))

    def decision(self, question: int) -> int | None:
        """Returns the value that was first proposed for a question; None if there is none."""
        return int(lib.proxyccl_decision(self._shared, question)) or None


class Mailboxes:
    """A `Bootstrap` over the mailboxes of a group whose ranks share a host.

    Args:
        peers: the rendezvous of all other ranks, by rank.
    """

    def __init__(self, rank: int, own: Rendezvous, peers: Mapping[int, Rendezvous]) -> None:
        self.rank, self.world_size = rank, len(peers) + 1
        self._own, self._peers = own, peers
        self._letters = 0

    def all_gather(self, data: bytes, timeout: float, give_up: Callable[[], None]) -> list[bytes]:
        """See `Bootstrap.all_gather`. A message longer than a mailbox is sent in parts (letters)."""
        deadline = time.monotonic() + timeout
        messages = {peer: bytearray() for peer in self._peers}
        longest, sent = len(data), 0
        letter = ffi.new("ProxycclLetter *")
        while True:
            part = data[sent : sent + lib.PROXYCCL_MAILBOX_BYTES]
            self._own.post(part, len(data))
            sent += lib.PROXYCCL_MAILBOX_BYTES
            for peer, rendezvous in self._peers.items():
                if not rendezvous.read(self._letters, letter):
                    posted = functools.partial(rendezvous.read, self._letters, letter)
                    wait_until(posted, deadline, give_up, self._late)
                messages[peer] += ffi.buffer(letter.data, letter.part_bytes)
                longest = max(longest, letter.message_bytes)
            self._letters += 1
            if sent >= longest:
                break
        everyone = {**{peer: bytes(message) for peer, message in messages.items()}, self.rank: data}
        return [everyone[rank] for rank in range(self.world_size)]

    def _late(self) -> WaitTimeoutError:
        letter = ffi.new("ProxycclLetter *")
        missing = [peer for peer, rendezvous in self._peers.items() if not rendezvous.read(self._letters, letter)]
        return ranks_missing("the bootstrap's all_gather over mailboxes", missing, self.rank)

    def close(self) -> None:
        """Does nothing: the control segment owns the mailbox."""


def wait_until(
    found: Callable[[], object], deadline: float, give_up: Callable[[], None], late: Callable[[], Exception]
) -> None:
    """Like `wait_at_most`, but raises the error that `late` returns at the deadline."""
    if not wait_at_most(found, deadline, give_up):
        raise late()


def wait_at_most(
    found: Callable[[], object],
    deadline: float,
    give_up: Callable[[], None] = lambda: None,
    longest_pause: float = _LONGEST_PAUSE_SECONDS,
) -> bool:
    """Calls `found` with increasing pauses until it returns true. Returns False at the deadline.

    Args:
        found: called repeatedly.
        deadline: the latest time, by `time.monotonic`.
        give_up: called before each pause; may raise a ProxyCCLError to end the wait.
        longest_pause: the longest pause, in seconds.
    """
    pause = _FIRST_PAUSE_SECONDS
    while not found():
        try:
            give_up()
        except ProxyCCLError:
            if found():  # the awaited event may have preceded the failure, so the wait succeeded
                return True
            raise
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, longest_pause)
    return True
