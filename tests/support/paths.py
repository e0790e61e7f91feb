"""Paths of folders in the source tree."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
PROGRAMS = TESTS / "support/programs"
ROOT = TESTS.parent
EXAMPLES = ROOT / "examples"
