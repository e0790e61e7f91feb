"""Boards, on which ranks leave data that outlives the ranks: in a host's control segments, and in a directory."""

from __future__ import annotations

import ctypes
from pathlib import Path

from proxyccl import FileBootstrap
from proxyccl.channels.joining.survivors import SegmentBoard
from proxyccl.channels.segment.rendezvous import Rendezvous
from support.cases.boards import check_boards

RANKS = 3


def test_a_board_in_segments() -> None:
    memories = [ctypes.create_string_buffer(Rendezvous.nbytes()) for _ in range(RANKS)]
    rendezvous = {rank: Rendezvous(ctypes.addressof(memory)) for rank, memory in enumerate(memories)}
    check_boards([SegmentBoard(rank, rendezvous) for rank in range(RANKS)])


def test_a_board_in_a_directory(tmp_path: Path) -> None:
    check_boards([FileBootstrap(tmp_path / "made", rank, RANKS).board() for rank in range(RANKS)])
