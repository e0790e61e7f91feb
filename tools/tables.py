"""Prints tables, for all tools."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from proxyccl.device.shown_text import shown


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str  # the heading
    unit: str = ""  # the text under the title
    width: int = 10  # the width in characters
    spec: str = ""  # the format specification of values; the value None is printed as "-"
    left: bool = False  # whether to align to the left

    def cell(self, value: Any) -> str:
        return self.align("-" if value is None else format(value, self.spec))

    def align(self, text: str) -> str:
        return text.ljust(self.width) if self.left else text.rjust(self.width)


@dataclass(frozen=True)
class Table:
    """A table that is printed row by row."""

    columns: Sequence[Column]
    out: TextIO = field(default_factory=lambda: sys.stdout)

    def _line(self, cells: Sequence[str]) -> None:
        print(shown("  ".join(cells).rstrip()), file=self.out, flush=True)

    def header(self) -> None:
        self._line([column.align(column.title) for column in self.columns])
        if any(column.unit for column in self.columns):
            self._line([column.align(column.unit) for column in self.columns])

    def row(self, *values: Any) -> None:
        """Prints one row, given a value for each column."""
        self._line([column.cell(value) for column, value in zip(self.columns, values, strict=True)])
