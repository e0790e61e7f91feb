"""Checks that every implementation of `Board` (survivors.py) must pass."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from proxyccl.channels.joining.survivors import Board

_QUESTIONS = 20


def check_boards(boards: Sequence[Board]) -> None:
    """Checks that all ranks read a posted note, and get the same answer if all ranks answer a question concurrently.

    Args:
        boards: the boards of all ranks, indexed by rank.
    """
    boards[1].post(7, b"here\0")
    for board in boards:
        assert board.read(1, 7) == b"here\0"
        assert board.read(0, 7) is None
        assert board.read(1, 8) is None
        assert board.settled(3) is None
    together = Barrier(len(boards))

    def answer(rank: int) -> list[bytes]:
        given = []
        for question in range(_QUESTIONS):
            together.wait(30)
            given.append(boards[rank].settle(question, b"\0answer of %d" % rank))
            assert boards[rank].settled(question) == given[-1]
        return given

    with ThreadPoolExecutor(len(boards)) as pool:
        answers = list(pool.map(answer, range(len(boards))))
    assert all(theirs == answers[0] for theirs in answers)
    assert set(answers[0]) <= {b"\0answer of %d" % rank for rank in range(len(boards))}
