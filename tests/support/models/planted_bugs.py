"""Plants bugs, which the checkers of tests/models must find, in a copy of the shipped sources.

A copy contains all bugs of a program, and a number selects a bug at run time, so that one compilation is enough. The
text that a bug replaces must occur exactly once; otherwise an assertion fails.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.paths import ROOT

_COMMENTS = r"\s*(?:/\*(?:(?!\*/).)*\*/\s*)*"
SOURCES = ("device/include/proxyccl", "proxy/engine", "proxy/segment")


@dataclass(frozen=True)
class Bug:
    """A shipped text and its replacement. Both are statements if the shipped text ends with a semicolon or a brace,
    else expressions. `scenario` is the name of the scenario that must find the bug.
    """

    scenario: str
    name: str
    file: str
    shipped: str
    planted: str


def copy_sources(directory: Path) -> None:
    """Copies SOURCES to the same relative paths under `directory`."""
    for source in SOURCES:
        shutil.copytree(ROOT / source, directory / source, ignore=shutil.ignore_patterns("__pycache__"))


def replace(directory: Path, file: str, shipped: str, planted: str) -> None:
    """Replaces text of a file in the copy. In the file, comments may stand between the lines of `shipped`."""
    (path,) = [directory / source / file for source in SOURCES if (directory / source / file).exists()]
    text = path.read_text()
    found = re.findall(_COMMENTS.join(re.escape(line.strip()) for line in shipped.splitlines()), text, re.DOTALL)
    assert len(found) == 1, f"{file} has {len(found)} times: {shipped}"
    path.write_text(text.replace(found[0], planted))


def plant(directory: Path, bugs: Sequence[Bug], chosen: str) -> None:
    """Plants bugs in the copy. Bug number i, counted from 1, is active while the C expression `chosen` equals i."""
    for number, bug in enumerate(bugs, 1):
        condition = f"{chosen} == {number}"
        if bug.shipped.endswith((";", "}")):
            text = f"if ({condition}) {{ {bug.planted} }} else {{ {bug.shipped} }}"
        else:
            text = f"({condition} ? ({bug.planted}) : ({bug.shipped}))"
        replace(directory, bug.file, bug.shipped, text)
