"""Makes text from other programs, such as names and errors, safe to show on terminals and web pages."""

from __future__ import annotations

import re

_CONTROL = r"\\(?:[bfnrt]|u[0-9a-f]{4})"
_IN_JSON = re.compile(rf'\\["\\/]|{_CONTROL}|[^\x00-\x7e]')


def shown(text: object) -> str:
    """Returns the text on one line. Characters that are not printable, such as newlines, terminal control characters
    and bidirectional marks, become Python's escapes.
    """
    line = str(text)
    return line if line.isprintable() else "".join(map(_escaped, line))


def shown_lines(text: object) -> str:
    """Returns `shown` of each line of a text."""
    return "\n".join(map(shown, str(text).split("\n")))


def printed_json(document: str) -> str:
    """Returns equivalent JSON in which all characters that are not printable are escaped; JSON encoders escape only the
    unprintable ASCII characters."""
    return _IN_JSON.sub(lambda found: _json_escape(found[0]), document)


def shown_in_json(document: str) -> str:
    """Returns JSON whose strings are replaced by `shown` of the strings, for a web page."""
    return _IN_JSON.sub(lambda found: _shown_token(found[0]), document)


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _json_escape(token: str) -> str:
    if token.isprintable():  # (not printable: becomes an escape)
        return token
    units = token.encode("utf-16-be")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def _shown_token(token: str) -> str:
    if re.fullmatch(_CONTROL, token):
        return f"\\{token}"
    return token if token.isprintable() else f"\\{_escaped(token)}"
