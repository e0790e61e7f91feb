"""Boards, on which ranks leave data that outlives the ranks: in a host's control segments, and in a directory."""

from __future__ import annotations

import ctypes
from pathlib import Path

from proxyccl import FileBootstrap
from proxyccl.channels.joining.survivors import MOST_ATTEMPTS, MOST_GROWTHS, SegmentBoard, Survivors, settle_growth
from proxyccl.channels.segment.rendezvous import Rendezvous
from support.cases.boards import check_boards

RANKS = 3


def test_a_board_in_segments() -> None:
    memories = [ctypes.create_string_buffer(Rendezvous.nbytes()) for _ in range(RANKS)]
    rendezvous = {rank: Rendezvous(ctypes.addressof(memory)) for rank, memory in enumerate(memories)}
    check_boards([SegmentBoard(rank, rendezvous) for rank in range(RANKS)])


def test_a_group_that_has_grown_often_has_room_for_all_attempts_of_a_shrink() -> None:
    memory = ctypes.create_string_buffer(Rendezvous.nbytes())
    board = SegmentBoard(0, {0: Rendezvous(ctypes.addressof(memory))})
    for number in range(MOST_GROWTHS):
        assert settle_growth(board, number, grown=True)
    alone = Survivors(board, 0, 1, (), lambda _: False, timeout=1)
    for attempt in range(MOST_ATTEMPTS):
        assert not alone.all_joined(alone.assemble(attempt, b""), joined=False)


def test_a_board_in_a_directory(tmp_path: Path) -> None:
    check_boards([FileBootstrap(tmp_path / "made", rank, RANKS).board() for rank in range(RANKS)])
