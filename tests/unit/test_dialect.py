"""docs/dialect.py, which `make lint` runs, finds its list's phrases in prose, but not in code."""

from __future__ import annotations

import runpy
from collections.abc import Callable

import pytest

from support.paths import ROOT

findings: Callable[[str, str], list[str]] = runpy.run_path(str(ROOT / "docs/dialect.py"))["findings"]


@pytest.mark.parametrize(
    ("name", "text", "line", "better"),
    [
        ("a.md", "Title\n\nA signal travels behind its data.\n", 3, "after"),
        ("a.md", "A handler is\nno member.\n", 1, "is not a"),
        ("a.py", 'x = 1\n"""One.\n\nRows without ids are not to be had.\n"""\n', 4, "supported"),
        ("a.py", "x = 1  # it takes so many bytes\n", 1, "this many"),
        ("a.py", 'raise ValueError(f"{x} is no rank")\n', 1, "is not a"),
        ("a.h", "int x; /* all of them,\n        * but for the last */\n", 2, "except"),
        ("a.cpp", "int x;\n// Waits for nobody.\n", 2, "does not wait"),
        ("a.c", 'const char *x = "the id is no memory";\n', 1, "is not a"),
        ("a.h", "/* copies from the own memory */\n", 1, "local"),
        ("a.md", "Otherwise as `wait`.\n", 1, "otherwise like"),
        ("a.py", "# flags come round\n", 1, "wraps around"),
        ("a.md", "The ranks that\nare left go on.\n", 1, "remaining"),
        ("a.py", 'def f():\n    """What a rank gets."""\n', 2, "a noun first"),
        ("a.c", "/* The link is not used any more. */\n", 1, "no longer"),
        ("Makefile", "a:\n\ttrue # the output comes behind the tables\n", 2, "after"),
    ],
)
def test_a_planted_phrase_is_found_with_its_line_and_what_to_write(
    name: str, text: str, line: int, better: str
) -> None:
    (found,) = findings(name, text)
    assert found.startswith(f"{name}:{line}: ")
    assert better in found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "a.md",
            "Where there is no GPU it is no longer needed; it is a call behind, and waits behind the put.\n"
            "The ranks that are left behind end, otherwise as before.\n",
        ),
        ("a.md", "```python\nx = 1  # behind the data\n```\n\nThe name is `behind the data`.\n"),
        ("a.py", "behind = [each for each in range(4)]\nis_no = behind\n"),
        ("a.c", "int behind(int the) { return the; }\n"),
        ("a.py", 'x = 1\n"""Waits while it takes any more of them."""\n'),
        ("Makefile", "behind the:\n\techo behind the\n"),
    ],
)
def test_good_english_and_code_pass(name: str, text: str) -> None:
    assert findings(name, text) == []
