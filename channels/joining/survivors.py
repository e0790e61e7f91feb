"""Lets the remaining ranks of a group agree on which ranks remain, even if some of these ranks end during the protocol.

Because an exchange would need every rank, each rank leaves notes and answers questions on a board that outlives the
ranks. The first answer to a question is final, so all ranks read the same answer. tests/models/protocols/survivors.pml
is a model of the protocol.

In each attempt a rank posts that it has arrived, and waits until each other rank has arrived, has ended, or is late.
The first rank whose wait is over answers which ranks are members. Each member maps the others' segments, posts that the
mapping is complete, and waits until all members have posted or a member has ended. The first member whose wait is over
answers whether the attempt succeeded. After a failed attempt, the remaining members try again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from enum import IntEnum
from typing import Protocol

from msgspec import Struct

from proxyccl.channels.segment.rendezvous import MOST_DECISIONS, MOST_INVITATIONS, Rendezvous, key_of, wait_at_most
from proxyccl.device.errors import ExcludedError, MismatchError

MOST_ATTEMPTS = 12
"""The most attempts, for which the board in the segments has room. Every attempt except the last loses a rank."""
_TOKEN_BYTES = 4
_SUCCEEDED, _FAILED = b"succeeded", b"failed"


class Board(Protocol):
    """Storage that outlives each of the ranks, where ranks leave numbered notes and answer numbered questions."""

    def post(self, number: int, note: bytes) -> None:
        """Stores a note of this rank, of at most 244 bytes, which is never removed."""

    def read(self, rank: int, number: int) -> bytes | None:
        """Returns a rank's note; None while there is no note."""

    def settle(self, number: int, answer: bytes) -> bytes:
        """Stores an answer of at most 244 bytes to question `number`, unless the question has an answer. Returns the
        question's first answer, which is the same on all ranks.
        """

    def settled(self, number: int) -> bytes | None:
        """Returns the first answer to a question; None while there is no answer."""


class NotePlace(Protocol):
    """A key-value store that outlives each of the ranks."""

    def write_once(self, name: str, data: bytes) -> object:
        """Stores a value under a name, unless the name has a value."""

    def read(self, name: str) -> bytes | None:
        """Returns the value of a name; None if there is none."""


class NoteBoard:
    """A `Board` that stores its notes and answers in a `NotePlace`."""

    def __init__(self, place: NotePlace, rank: int) -> None:
        self._place, self._rank = place, rank

    def post(self, number: int, note: bytes) -> None:
        self._place.write_once(f"note-{number}-{self._rank}", note)

    def read(self, rank: int, number: int) -> bytes | None:
        return self._place.read(f"note-{number}-{rank}")

    def settle(self, number: int, answer: bytes) -> bytes:
        self._place.write_once(f"answer-{number}", answer)
        settled = self.settled(number)
        assert settled is not None  # answers are permanent
        return settled

    def settled(self, number: int) -> bytes | None:
        return self._place.read(f"answer-{number}")


class SegmentBoard:
    """A `Board` in the control segments of a group whose ranks share a host.

    Args:
        rank: this rank.
        rendezvous: the `Rendezvous` in each rank's control segment, by rank.
    """

    def __init__(self, rank: int, rendezvous: Mapping[int, Rendezvous]) -> None:
        self._own, self._rendezvous = rendezvous[rank], rendezvous
        self._rank = rank
        self._first = rendezvous[0]

    def post(self, number: int, note: bytes) -> None:
        self._own.invite(key_of("survivors", "note", number), note)

    def read(self, rank: int, number: int) -> bytes | None:
        return self._rendezvous[rank].find(key_of("survivors", "note", number))

    def settle(self, number: int, answer: bytes) -> bytes:
        """See `Board`. Each rank's answer is in its own segment, and a word in rank 0's segment names the rank that
        answered first."""
        self._own.invite(key_of("survivors", "answer", number), answer)
        return self._answer(self._first.decide(number, self._rank + 1), number)

    def settled(self, number: int) -> bytes | None:
        standing = self._first.decision(number)
        return None if standing is None else self._answer(standing, number)

    def _answer(self, standing: int, number: int) -> bytes:
        answer = self._rendezvous[standing - 1].find(key_of("survivors", "answer", number))
        if answer is None:
            raise RuntimeError(f"rank {standing - 1} settled question {number} without an answer")
        return answer


class _Subject(IntEnum):
    ARRIVED = 0
    EXCLUDED = 1
    MEMBERS = 2
    JOINED = 3
    OUTCOME = 4

    def of(self, attempt: int) -> int:
        return len(_Subject) * attempt + self


_FIRST_GROWTH = len(_Subject) * MOST_ATTEMPTS
MOST_GROWTHS = MOST_DECISIONS - _FIRST_GROWTH
"""The most times that a group grows; the board has a question for each growth."""
assert MOST_GROWTHS > 0
assert MOST_INVITATIONS >= MOST_DECISIONS  # in segments, each note and each answer takes an invitation


def settle_growth(board: Board, number: int, *, grown: bool) -> bool:
    """Returns whether the ranks of a group continue with the grown group; the result is the same on all ranks. `grown`
    says whether this rank knows that all ranks have joined the grown group. `number` counts the group's growths, from
    0.
    """
    return board.settle(_FIRST_GROWTH + number, _SUCCEEDED if grown else _FAILED) == _SUCCEEDED


class Assembly(Struct, frozen=True):
    """The ranks that will form a new group, if each of them can map the others' segments."""

    attempt: int  # the number of the attempt to form a group, from 0
    members: tuple[int, ...]  # the ranks' numbers in the old group, in ascending order
    notes: Mapping[int, bytes]  # each member's note from `assemble`
    token: str  # a random text in hexadecimal, the same on all members


class Survivors:
    """One rank's part in the protocol of this module.

    Args:
        rank: this rank.
        world_size: the number of ranks of the old group.
        excluded: ranks that must not be members; the same on all ranks.
        has_ended: returns whether a rank can no longer take part; once True for a rank, always True.
        timeout: the longest wait for the other ranks, in seconds. Ranks that arrive after the wait are excluded.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        world_size: int,
        excluded: Collection[int],
        has_ended: Callable[[int], bool],
        timeout: float,
    ) -> None:
        self._board, self._rank, self._timeout = board, rank, timeout
        self._has_ended = has_ended
        self._excluded = _encode(excluded)
        self._candidates = [peer for peer in range(world_size) if peer != rank and peer not in excluded]

    def assemble(self, attempt: int, note: bytes) -> Assembly:
        """Posts that this rank has arrived, with a note for the members, and waits for the other ranks. `attempt` is
        the number of the attempt, from 0. Call `all_joined` after each call of `assemble`.

        Raises:
            ExcludedError: this rank came too late, so it is not a member.
            MismatchError: another rank's `excluded` differs.
        """
        board, question = self._board, _Subject.MEMBERS.of(attempt)
        board.post(_Subject.EXCLUDED.of(attempt), self._excluded)
        board.post(_Subject.ARRIVED.of(attempt), note)
        missing = set(self._candidates)

        def all_came() -> bool:
            for peer in sorted(missing):
                ended = self._has_ended(peer)  # checked first, because the peer may arrive and then end
                if board.read(peer, _Subject.ARRIVED.of(attempt)) is not None:
                    theirs = board.read(peer, _Subject.EXCLUDED.of(attempt)) or b""
                    if theirs != self._excluded:
                        raise MismatchError(
                            f"exclude: {list(_decode(self._excluded))} here, {list(_decode(theirs))} on rank {peer}",
                            argument="exclude",
                            rank=self._rank,
                            peer=peer,
                        )
                    missing.discard(peer)
                elif ended:
                    missing.discard(peer)
            return not missing or board.settled(question) is not None

        wait_at_most(all_came, time.monotonic() + self._timeout)
        came = [peer for peer in self._candidates if board.read(peer, _Subject.ARRIVED.of(attempt)) is not None]
        answer = board.settle(question, os.urandom(_TOKEN_BYTES) + _encode([self._rank, *came]))
        members = _decode(answer[_TOKEN_BYTES:])
        self._candidates = [peer for peer in members if peer != self._rank]
        if self._rank not in members:
            raise ExcludedError(
                f"rank {self._rank} came too late: ranks {list(members)} continue without it", rank=self._rank
            )
        notes = {peer: board.read(peer, _Subject.ARRIVED.of(attempt)) or b"" for peer in members}
        return Assembly(attempt, members, notes, answer[:_TOKEN_BYTES].hex())

    def all_joined(self, assembly: Assembly, *, joined: bool) -> bool:
        """Waits for the other members, and returns whether all could join. The result is the same on all members.

        Args:
            assembly: the result of `assemble`.
            joined: whether this rank has mapped all members' segments.
        """
        board, subject = self._board, _Subject.JOINED.of(assembly.attempt)
        question = _Subject.OUTCOME.of(assembly.attempt)
        if joined:
            board.post(subject, b"")
        missing = set(assembly.members)
        lost = not joined

        def over() -> bool:
            nonlocal lost
            for peer in sorted(missing):
                ended = peer != self._rank and self._has_ended(peer)
                if board.read(peer, subject) is not None:
                    missing.discard(peer)
                else:
                    lost |= ended
            return not missing or lost or board.settled(question) is not None

        wait_at_most(over, time.monotonic() + self._timeout)
        return board.settle(question, _FAILED if missing else _SUCCEEDED) == _SUCCEEDED


def _encode(ranks: Collection[int]) -> bytes:
    bits = sum(1 << rank for rank in ranks)
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def _decode(encoded: bytes) -> tuple[int, ...]:
    bits = int.from_bytes(encoded, "little")
    return tuple(rank for rank in range(bits.bit_length()) if bits >> rank & 1)
