"""Bugs that tests/models plants in a copy of the shipped sources, and that its checkers must find.

A copy has all bugs of a program at once, each selected by a number, so that they cost one compilation. The text that a
bug replaces must be there exactly once: a change of the source that a bug no longer fits fails the build.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.paths import ROOT

SOURCES = ("device/include/proxyccl", "proxy/engine", "proxy/segment")


@dataclass(frozen=True)
class Bug:
    """Text of a shipped file and its replacement: a statement if it ends with a semicolon or a brace, an expression
    otherwise. The scenario is the one that must find it.
    """

    scenario: str
    name: str
    file: str
    shipped: str
    planted: str


def copy_sources(directory: Path) -> None:
    """Copies the shipped device headers and engine, at their places in the tree."""
    for source in SOURCES:
        shutil.copytree(ROOT / source, directory / source, ignore=shutil.ignore_patterns("__pycache__"))


def replace(directory: Path, file: str, shipped: str, planted: str) -> None:
    """Replaces text of a file in the copy."""
    (path,) = [directory / source / file for source in SOURCES if (directory / source / file).exists()]
    text = path.read_text()
    assert text.count(shipped) == 1, f"{file} has {text.count(shipped)} times: {shipped}"
    path.write_text(text.replace(shipped, planted))


def plant(directory: Path, bugs: Sequence[Bug], chosen: str) -> None:
    """Plants bugs in the copy; number i, from 1, is there while the C expression `chosen` equals i."""
    for number, bug in enumerate(bugs, 1):
        condition = f"{chosen} == {number}"
        if bug.shipped.endswith((";", "}")):
            text = f"if ({condition}) {{ {bug.planted} }} else {{ {bug.shipped} }}"
        else:
            text = f"({condition} ? ({bug.planted}) : ({bug.shipped}))"
        replace(directory, bug.file, bug.shipped, text)
