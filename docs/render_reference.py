"""Renders the reference for readers without the site: each page with the signatures and docstrings that it names.

python docs/render_reference.py            writes docs/reference/PAGE.rendered.md for each PAGE.md with such directives
python docs/render_reference.py --check    exits with 1 and lists the pages that would change; `make lint` runs it

On the site Sphinx expands the directives of the pages, and leaves the rendered pages out. GitHub and editors show
directives as text, so the rendered pages are committed.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).parent / "reference"
HEADERS = REFERENCE.parent.parent / "device/include/proxyccl"
SUFFIX = ".rendered.md"
WIDTH = 100

BLOCK = re.compile(r"^```\{(eval-rst|doxygenstruct|doxygenfunction)\} ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(r"^\.\. auto(?:class|function|exception):: (\S+)\n((?:   .*\n)*)", re.MULTILINE)
DIRECTIVES = re.compile(rf"(?:{DIRECTIVE.pattern})|^```\{{doxygen", re.MULTILINE)
GITHUB_NOTE = re.compile(r"^% .*\n\n?", re.MULTILINE)
SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$")
ENTRY = re.compile(r"^(\*{0,2}\w[^:`]*): (.*)$")
DOCUMENTED = re.compile(r"^ *///.*\n(?: *///.*\n)*", re.MULTILINE)
COMMENT = re.compile(r"^ */// ?", re.MULTILINE)


# -- Python ---


class _Bare(str):
    """A part of a signature that is printed without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _annotation(given: Any) -> Any:
    return given if given is inspect.Parameter.empty else _Bare(given if isinstance(given, str) else given.__name__)


def _default(given: Any) -> Any:
    return _Bare("...") if callable(given) and given is not inspect.Parameter.empty else given


def _signature(name: str, value: Callable[..., Any]) -> str:
    found = inspect.signature(value)
    parameters = [
        one.replace(annotation=_annotation(one.annotation), default=_default(one.default))
        for one in found.parameters.values()
        if one.name != "self"
    ]
    returned = "" if inspect.isclass(value) else _annotation(found.return_annotation)
    result = found.replace(parameters=parameters, return_annotation=inspect.Parameter.empty)
    arrow = f" -> {returned}" if returned and returned is not inspect.Parameter.empty else ""
    line = f"{name}{result}{arrow}"
    if len(line) <= WIDTH:
        return line
    pieces, bare_star = [], False
    for one in parameters:
        if one.kind is one.VAR_POSITIONAL:
            bare_star = True
        if one.kind is one.KEYWORD_ONLY and not bare_star:
            pieces.append("*")
            bare_star = True
        pieces.append(str(one))
    return f"{name}(\n" + "".join(f"    {piece},\n" for piece in pieces) + f"){arrow}"


def _docstring(value: Any) -> str:
    """Returns a docstring of Google's style as Markdown. Ends the program if a public name has no docstring."""
    out: list[str] = []
    section = ""
    text = inspect.getdoc(value)
    if not text:
        raise SystemExit(f"{value.__module__}.{value.__qualname__} is in the reference and has no docstring")
    for line in text.splitlines():
        if found := SECTION.match(line):
            section = found[1]
            out += [f"{'Arguments' if section == 'Args' else section}:", ""]
        elif section and line and not line.startswith(" "):
            section = ""
            out.append(line)
        elif section in {"Returns", "Yields"}:
            out.append(line.strip())
        elif section and (entry := ENTRY.match(line.removeprefix("    "))):
            out.append(f"- `{entry[1]}`: {entry[2]}")
        elif section:
            out.append("  " + line.strip() if line.strip() else "")
        else:
            out.append(re.sub(r"::$", ":", line))
    return re.sub(r"``(.+?)``", r"`\1`", "\n".join(out)).strip()


def _members(cls: type, *, inherited: bool) -> Iterator[tuple[str, Any]]:
    seen = set()
    for base in cls.__mro__ if inherited else (cls,):
        if base.__module__.startswith("proxyccl"):
            for name, value in vars(base).items():
                if not name.startswith("_") and name not in seen:
                    seen.add(name)
                    yield name, value


def _member(cls: type, name: str, value: Any) -> str:
    if isinstance(value, property):
        returned = inspect.signature(value.fget).return_annotation
        head, text = f"{name}: {returned}  # property", _docstring(value.fget)
    elif isinstance(value, classmethod | staticmethod):
        kind = type(value).__name__
        head, text = f"@{kind}\n{_signature(name, getattr(cls, name))}", _docstring(value.__func__)
    elif inspect.isfunction(value):
        head, text = _signature(name, value), _docstring(value)
    else:
        return ""
    return f"#### {cls.__name__}.{name}\n\n```py\n{head}\n```\n\n{text}" if text else ""


def _python(name: str, options: str) -> str:
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    parts = [f"### {attribute}"]
    has_signature = not inspect.isclass(value) or not (
        getattr(value, "_is_protocol", False) or issubclass(value, enum.Enum | BaseException)
    )
    if has_signature and ":no-members:" not in options:
        parts.append(f"```py\n{_signature(attribute, value)}\n```")
    if inspect.isclass(value) and issubclass(value, BaseException):
        parts.append(f"Subclass of `{value.__bases__[0].__name__}`.")
    parts.append(_docstring(value))
    if inspect.isclass(value) and ":no-members:" not in options:
        inherited = ":inherited-members:" in options
        parts += [_member(value, *member) for member in _members(value, inherited=inherited)]
    return "\n\n".join(part for part in parts if part)


# -- kernels ---


def _declared(text: str) -> Iterator[tuple[str, str, str]]:
    """Yields (name, declaration, comment) for each function of C++ source that has a comment for Doxygen."""
    for comment in DOCUMENTED.finditer(text):
        end = opened = text.index("(", comment.end())
        depth = 1
        while depth:
            end += 1
            depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += len(" const") if text.startswith(") const", end) else 0
        declaration = textwrap.dedent(text[comment.end() : end + 1])
        head, mark, rest = declaration.partition("PROXYCCL_DEVICE ")
        declaration = head + rest.replace("\n" + " " * len(mark), "\n")  # keeps parameters aligned with the first one
        yield re.findall(r"\w+", text[:opened])[-1], declaration, COMMENT.sub("", comment[0])


def _said(comment: str) -> str:
    out: list[str] = []
    for line in re.sub(r"(?<![\w`])\*(?=\w)", r"\\*", comment).splitlines():  # escapes pointers' stars for Markdown
        in_list = bool(out) and out[-1].startswith(("- ", "  "))
        if tag := re.match(r"@(t?param|return) *(\S+)(.*)$", line):
            if out and out[-1] and not in_list:
                out.append("")
            out.append(f"- Returns {tag[2]}{tag[3]}" if tag[1] == "return" else f"- `{tag[2]}`: {tag[3].strip()}")
        else:
            out.append(f"  {line.strip()}" if in_list and line.strip() else line)
    return "\n".join(out)


def _declaration(level: str, name: str, declaration: str, comment: str) -> str:
    heading = f"{level} {name}\n\n" if level else ""
    return f"{heading}```c++\n{declaration};\n```\n\n{_said(comment)}"


def _struct(name: str, options: str) -> str:
    start = re.compile(rf"^struct (?:alignas\(\d+\) )?{name}\b.*\{{$", re.MULTILINE)
    (text,) = (text for path in HEADERS.glob("*.h") if start.search(text := path.read_text()))
    found = start.search(text)
    assert found is not None
    body = text[found.end() : text.index("\n};\n", found.end())].partition("\n private:")[0]
    only = re.search(r":members: (.+)", options)
    chosen = re.split(r",\s*", only[1]) if only else None
    parts, last = [f"### {name}"], ""
    for one in _declared(body):
        if chosen is None or one[0] in chosen:
            parts.append(_declaration("" if one[0] == last else "####", *one))  # overloads share a heading
            last = one[0]
    return "\n\n".join(parts)


def _function(name: str) -> str:
    (found,) = (one for path in sorted(HEADERS.glob("*.h")) for one in _declared(path.read_text()) if one[0] == name)
    return _declaration("###", *found)


# -- pages ---


def rendered(page: Path, names: set[str]) -> str:
    """Returns a page of the reference with its directives rendered.

    Args:
        page: the page as the site has it.
        names: the pages that have a rendered version; links to these pages lead to that version.
    """

    def expanded(block: re.Match[str]) -> str:
        kind, name, body = block[1], block[2].rpartition("::")[2], block[3]
        if kind == "eval-rst":
            return "\n\n".join(_python(*one.groups()) for one in DIRECTIVE.finditer(body))
        return _function(name) if kind == "doxygenfunction" else _struct(name, body)

    text = GITHUB_NOTE.sub("", page.read_text())
    text = re.sub(r"\]\(([\w]+)\.md\b", lambda to: f"]({to[1]}{SUFFIX if to[1] in names else '.md'}", text)
    text = BLOCK.sub(expanded, text)
    return f"<!-- Made by docs/render_reference.py from {page.name}. -->\n\n{text}"


def main() -> int:
    """Writes or checks the rendered pages. Returns the exit code."""
    pages = [
        page
        for page in sorted(REFERENCE.glob("*.md"))
        if not page.name.endswith(SUFFIX) and DIRECTIVES.search(page.read_text())
    ]
    stale = []
    for page in pages:
        target, text = page.with_name(page.stem + SUFFIX), rendered(page, {page.stem for page in pages})
        if not target.exists() or target.read_text() != text:
            stale.append(str(target.relative_to(REFERENCE.parent.parent)))
            if "--check" not in sys.argv:
                target.write_text(text)
    if stale:
        print("\n".join(stale) + ("\nare stale: run make signatures" if "--check" in sys.argv else "\nwritten"))
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
