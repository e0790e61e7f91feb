"""Finds phrases in the project's prose that a native engineer of the field would not write, and says what to write.

 python docs/dialect.py

The script reads the tracked Markdown, the comments, docstrings and messages of Python and C, and the comments of
Makefile and TOML. Code is left out, and so is CHANGELOG.md, which is history. `make lint` runs it. A phrase is listed
only if it is wrong nearly everywhere.
"""

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = (".md", ".py", ".h", ".hpp", ".c", ".cpp", ".toml", "Makefile")
EXEMPT = ("CHANGELOG.md", "docs/dialect.py", "tests/unit/test_dialect.py")

_COMPARISON = r"(longer|more|less|other|later|earlier|faster|slower|larger|smaller|better|worse)\b"
_BEHIND = (
    r"(?<!\bwait )(?<!\bwaits )(?<!\bwaiting )behind (it|that|them|this|these|those|all|what|its|their|an?|the"
    r"|each|every|any|one|earlier|which|whom)\b"
)
PHRASES = {
    _BEHIND: "after",  # the pattern does not match "left behind", "a call behind" or "wait behind a put"
    rf"(?<!\bthere )(is|are|was|were) no (?!{_COMPARISON})[a-z]": "is not a, are not",
    r"to be had\b|(can't|can not|cannot) be had\b|is had\b": "supported, available",
    r"knows? no (?!such\b)": "does not know about",
    r"but for (?!no\b)": "except",
    r"so many (?!of\b|that\b)": "this many, a number of",
    r"waits? for nobody\b": "does not wait",
    r"for ever\b": "forever",
    r"what (stands for|is no|was no|lies in|lies at)\b": "a noun: the array that holds it",
    r"(?<=\"\"\")(what|who|whoever) ": "a noun first: the array that holds it",
    r"of one's own\b": "your own",
    r"any more\b(?! (than|of)\b)": "no longer, still",
    r"without a word\b": "silently",
    r"not looked at\b": "ignored",
    r"the own\b": "its own, this rank's, local",
    r"otherwise as (`|\w+\(\))": "otherwise like",
    r"as of `": "as for, like",
    r"comes? round\b": "wraps around",
    r"(ranks?|peers?|threads?|those) that (is|are) left\b(?! (behind|to)\b)": "remaining",
}
"""By pattern, which begins at a word's beginning, the words to use instead."""

_COMPILED = [(re.compile(rf"\b(?:{pattern})", re.IGNORECASE), better) for pattern, better in PHRASES.items()]
_ANY = re.compile(rf"\b(?:{'|'.join(PHRASES)})", re.IGNORECASE)  # a search for one joined pattern is faster
_C_PROSE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def _of_markdown(text: str) -> Iterator[tuple[int, str]]:
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield number, re.sub(r"`[^`]*`", "`", line)


def _of_python(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)):
            yield token.start[0], token.string


def _of_c(text: str) -> Iterator[tuple[int, str]]:
    for match in _C_PROSE.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match.group()


def _of_settings(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.search(r"(?:^|\s)#(.*)", line):
            yield number, match[1]


def findings(name: str, text: str) -> list[str]:
    """Returns a line for each phrase found in a file's prose: the phrase's file and line, and the words to use instead.
    The suffix of the file's name determines the language.
    """
    read = _READERS.get(name.rpartition(".")[2], _of_c)
    pieces = list(_joined(read(text)))
    found = []
    for lines in pieces:
        flat, starts = "", []
        for number, line in lines:
            starts.append((len(flat), number))
            flat += line + " "
        for pattern, better in _COMPILED:
            for match in pattern.finditer(flat):
                number = max(n for at, n in starts if at <= match.start())
                found.append(f'{name}:{number}: "{match.group()}": write: {better}')
    return found


_READERS = {"md": _of_markdown, "py": _of_python, "toml": _of_settings, "Makefile": _of_settings}
"""The prose of a file, by the end of its name; C otherwise."""


def _joined(pieces: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Yields runs of consecutive lines, without comment characters, because a phrase may continue in the next line."""
    block: list[tuple[int, str]] = []
    for first, piece in pieces:
        for number, line in enumerate(piece.splitlines(), first):
            bare = line.strip().lstrip("#/*> ").strip()
            if block and (number != block[-1][0] + 1 or not bare):
                yield block
                block = []
            if bare:
                block.append((number, bare))
    if block:
        yield block


def main() -> int:
    """Prints the phrases found. Returns the exit code: 1 if a phrase was found, else 0."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = []
    for name in listed.splitlines():
        if name.endswith(SUFFIXES) and name not in EXEMPT and (ROOT / name).is_file():
            text = (ROOT / name).read_text()
            flat = re.sub(r"[\s#/*>]+", " ", text)
            if _ANY.search(flat):  # a file without a match need not be parsed
                found += findings(name, text)
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
