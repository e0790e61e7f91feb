"""Checks the dependencies between C files: no file depends on a top-level folder above its own (see ROOMS), each quoted
include names a file of these folders, only the kernels' headers (device/include) include a header of CUDA, HIP or MPI,
headers don't include each other in a cycle, and sources don't call each other in a cycle.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("device", "proxy", "channels", "faces", "tools")
"""The top-level folders, from the lowest to the highest."""

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_DEFINED = re.compile(r"^(static )?(?!typedef|#)\w[\w *]*?\b(\w+)\((?:[^;{}()]|\([^()]*\))*\) \{", re.MULTILINE)
_CALLED = re.compile(r"\b(\w+)\(")
_INCLUDED = re.compile(r'# *include "([^"]+)"')
_VENDORS = re.compile(r"# *include <((?:cuda|hip|mpi)[^>]*)>")
_HEADERS, _SOURCES = {".h", ".hpp"}, {".c", ".cpp"}


def included(path: Path, name: str, paths: Collection[Path]) -> set[Path]:
    """Returns the files among `paths` that `#include "name"` in a file may mean: the file at this path from the file's
    folder or, if there is none, all files whose paths end with `name`.
    """
    beside = (path.parent / name).resolve()
    return {beside} if beside in paths else {each for each in paths if str(each).endswith(f"/{name}")}


def main() -> None:
    """Ends the process, with a message if a file breaks the order."""
    paths = [each for room in ROOMS for each in (ROOT / room).rglob("*.*") if each.suffix in _HEADERS | _SOURCES]
    texts = {path: _COMMENT.sub("", path.read_text()) for path in paths}
    defined = {path: _DEFINED.findall(text) for path, text in texts.items() if path.suffix in _SOURCES}
    owner = {name: path for path, names in defined.items() for static, name in names if not static}
    uses: dict[Path, set[Path]] = {}
    wrong = []
    for path, text in texts.items():
        called = {*_CALLED.findall(text)} - {name for _, name in defined[path]} if path in defined else set()
        headers = {name: included(path, name, texts) for name in _INCLUDED.findall(text)}
        wrong += [f"{path} includes {name}, which is in no room" for name, found in headers.items() if not found]
        if ROOT / "device" / "include" not in path.parents:
            wrong += [f"{path} includes {name}" for name in _VENDORS.findall(text)]
        uses[path] = {owner[name] for name in called & owner.keys()}.union(*headers.values())
    level = {path: ROOMS.index(path.relative_to(ROOT).parts[0]) for path in paths}
    wrong += [f"{path} uses {each}" for path in paths for each in uses[path] if level[each] > level[path]]
    try:
        TopologicalSorter(uses).prepare()
    except CycleError as error:
        wrong.append("a circle: " + ", ".join(str(each.relative_to(ROOT)) for each in error.args[1]))
    sys.exit("\n".join(wrong) or 0)


main()
