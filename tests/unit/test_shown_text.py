"""Text from other programs is made safe before it is shown on a terminal or on a page."""

from __future__ import annotations

import json

import pytest

from proxyccl.device.shown_text import printed_json, shown, shown_in_json, shown_lines


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("agent é ✓ 日本", "agent é ✓ 日本"),
        ("a\nagent b\r\n", r"a\nagent b\r\n"),
        ("\x1b[31m\x9b1m\x07\x00\x7f", r"\x1b[31m\x9b1m\x07\x00\x7f"),
        ("\u202etxt\u2066\u2028end", r"\u202etxt\u2066\u2028end"),
        ("\udcff", r"\udcff"),
        ("\U000e0041", r"\U000e0041"),
        ("C:\\new", "C:\\new"),
    ],
)
def test_text_is_on_one_line_and_has_no_control_characters(text: str, line: str) -> None:
    assert shown(text) == line
    assert shown(text).isprintable()
    assert shown_lines(f"a\n{text.strip()}") == f"a\n{shown_lines(text.strip())}"


def test_lines_of_the_library_s_own_stay() -> None:
    assert shown_lines("a\n b\x1b") == "a\n b\\x1b"


NAMES = ['a\nb\x1b[31m\t"\\', "\x9b\x7f\u202e\U000e0041é", r"\n A"]


def test_json_is_the_same_for_a_terminal() -> None:
    document = json.dumps(NAMES, ensure_ascii=False)
    assert json.loads(printed_json(document)) == NAMES
    assert printed_json(document).isprintable()


def test_json_for_a_page_has_the_text_that_is_shown() -> None:
    for indent in (None, 1):
        document = json.dumps(NAMES, ensure_ascii=False, indent=indent)
        found = json.loads(shown_in_json(document))
        assert all(each.isprintable() for each in found)
        assert (found[0], found[1], found[2]) == (r'a\nb\u001b[31m\t"' + "\\", r"\x9b\x7f\u202e\U000e0041é", r"\n A")
