"""Boards that outlive ranks: in the segments of a host, and in a directory."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from proxyccl import ArgumentError, FileBootstrap
from proxyccl.channels.rendezvous import Rendezvous
from proxyccl.channels.survivors import SegmentBoard
from support.boards import check_boards

RANKS = 3


def test_a_board_in_segments() -> None:
    memories = [ctypes.create_string_buffer(Rendezvous.nbytes()) for _ in range(RANKS)]
    rendezvous = {rank: Rendezvous(ctypes.addressof(memory)) for rank, memory in enumerate(memories)}
    check_boards([SegmentBoard(rank, rendezvous) for rank in range(RANKS)])


def test_a_board_in_a_directory(tmp_path: Path) -> None:
    check_boards([FileBootstrap(tmp_path / "made", rank, RANKS).board() for rank in range(RANKS)])


def test_a_directory_is_for_one_job(tmp_path: Path) -> None:
    FileBootstrap(tmp_path, 1, RANKS)
    with pytest.raises(ArgumentError, match=r"directory: .* was used by a rank 1 before; expected a fresh one"):
        FileBootstrap(tmp_path, 1, RANKS)
    with pytest.raises(ArgumentError, match="rank: must be from 0 to 2, not 3"):
        FileBootstrap(tmp_path, 3, RANKS)
