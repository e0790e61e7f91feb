"""Checks the dependencies between C files: no file depends on a top-level folder above its own (see ROOMS), headers
don't include each other in a cycle, and sources don't call each other in a cycle.
"""

from __future__ import annotations

import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("device", "proxy", "channels", "faces", "tools")
"""The top-level folders, from the lowest to the highest."""

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_DEFINED = re.compile(r"^(static )?(?!typedef|#)\w[\w *]*?\b(\w+)\((?:[^;{}()]|\([^()]*\))*\) \{", re.MULTILINE)
_CALLED = re.compile(r"\b(\w+)\(")
_INCLUDED = re.compile(r'#include "([\w./]+)"')


def main() -> None:
    """Ends the process, with a message if a file breaks the order."""
    paths = [each for room in ROOMS for each in (ROOT / room).rglob("*.*") if each.suffix in {".c", ".cpp", ".h"}]
    texts = {path: _COMMENT.sub("", path.read_text()) for path in paths}
    defined = {path: _DEFINED.findall(text) for path, text in texts.items() if path.suffix != ".h"}
    owner = {name: path for path, names in defined.items() for static, name in names if not static}
    uses: dict[Path, set[Path]] = {}
    for path, text in texts.items():
        called = {*_CALLED.findall(text)} - {name for _, name in defined[path]} if path in defined else set()
        included = [[each for each in paths if str(each).endswith(f"/{name}")] for name in _INCLUDED.findall(text)]
        beside = [[each for each in found if each.parent == path.parent] or found for found in included]
        uses[path] = {owner[name] for name in called & owner.keys()}.union(*beside)
    level = {path: ROOMS.index(path.relative_to(ROOT).parts[0]) for path in paths}
    wrong = [f"{path} uses {each}" for path in paths for each in uses[path] if level[each] > level[path]]
    try:
        TopologicalSorter(uses).prepare()
    except CycleError as error:
        wrong.append("a circle: " + ", ".join(str(each.relative_to(ROOT)) for each in error.args[1]))
    sys.exit("\n".join(wrong) or 0)


main()
