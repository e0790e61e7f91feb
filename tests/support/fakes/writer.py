"""Builds and loads C libraries of fake devices, and wraps the functions that all of them have."""

from __future__ import annotations

import functools
from pathlib import Path
from types import TracebackType
from typing import Any

import cffi

from support.once import run_make
from support.paths import ROOT


@functools.cache
def load(name: str, stem: str) -> tuple[Any, Any]:
    """Builds the library of STEM.h with `make fake-NAME`, and loads it. Returns cffi's ffi and lib."""
    run_make(f"fake-{name}")
    ffi = cffi.FFI()
    header = Path(__file__).with_name(f"{stem}.h").read_text()
    ffi.cdef("\n".join(line for line in header.split("\n") if not line.startswith("#")))
    return ffi, ffi.dlopen(str(ROOT / f"build/fake-{name}/lib{stem}.so"))


class FakeWriter:
    """A fake device that executes requests on this process's memory. Leaving its `with` block asserts that no request
    was invalid.

    Args:
        options: arguments of the library's function that opens a device.
    """

    # The arguments of `load`, and the prefixes of the names of the library's functions and types.
    _library: tuple[str, str]
    _functions: str
    _types: str

    def __init__(self, *options: int) -> None:
        self._ffi, self._lib = load(*self._library)
        self._handle = getattr(self._lib, f"{self._functions}open")(*options)

    def _call(self, function: str, *arguments: Any) -> Any:
        return getattr(self._lib, self._functions + function)(self._handle, *arguments)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        breach = self.breach
        self._call("close")
        assert breach is None or error is not None, breach

    @property
    def breach(self) -> str | None:
        """Returns a description of the first invalid request, or None if all were valid."""
        text = self._call("breach")
        return self._ffi.string(text).decode() if text else None

    @property
    def counts(self) -> Any:
        """The library's counters."""
        counts = self._ffi.new(f"{self._types}Counts *")
        self._call("counts", counts)
        return counts

    def allow(self, requests: int) -> None:
        """Limits how many more requests are executed; -1: no limit."""
        self._call("allow", requests)

    def dawdle(self, most: int, seed: int) -> None:
        """Makes each poll execute a random number of requests, at most `most`. A fake endpoint also refuses some
        requests at random, which must then be posted again.
        """
        self._call("dawdle", most, seed)

    @property
    def signals(self) -> list[tuple[int, int, int]]:
        """Returns for each executed signal: (address of the word, the word's new value, number of bytes put before the
        signal).
        """
        out: list[tuple[int, int, int]] = []
        signal = self._ffi.new(f"{self._types}Signal *")
        while self._call("signal", len(out), signal):
            out.append((signal.remote, signal.value, signal.bytes_before))
        return out
