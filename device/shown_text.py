"""Text from other programs as terminals and pages show it: names of agents, hosts and programs, errors of peers."""

from __future__ import annotations

import re

_CONTROL = r"\\(?:[bfnrt]|u[0-9a-f]{4})"
_IN_JSON = re.compile(rf'\\["\\/]|{_CONTROL}|[^\x00-\x7e]')


def shown(text: object) -> str:
    """The text on one line. Characters that do not print become escapes as in Python: newlines, a terminal's control
    sequences, marks that reorder text.
    """
    line = str(text)
    return line if line.isprintable() else "".join(map(_escaped, line))


def shown_lines(text: object) -> str:
    """The library's own text of several lines: each as by `shown`."""
    return "\n".join(map(shown, str(text).split("\n")))


def printed_json(document: str) -> str:
    """The same JSON, for a terminal too: an encoder escapes only those of the characters that ASCII has."""
    return _IN_JSON.sub(lambda found: _json_escape(found[0]), document)


def shown_in_json(document: str) -> str:
    """JSON whose strings are as by `shown`, for a page that shows them."""
    return _IN_JSON.sub(lambda found: _shown_token(found[0]), document)


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _json_escape(token: str) -> str:
    if token.isprintable():  # also an escape
        return token
    units = token.encode("utf-16-be")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def _shown_token(token: str) -> str:
    if re.fullmatch(_CONTROL, token):
        return f"\\{token}"
    return token if token.isprintable() else f"\\{_escaped(token)}"
