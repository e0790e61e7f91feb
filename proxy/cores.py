"""Cores that a thread may run on: reads and writes lists of cores, and asks for a process's affinity."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from proxyccl.device.errors import ArgumentError

_NODES = Path("/sys/devices/system/node")
_DIGITS = 5  # of a core's number


def parse_cores(text: str, near: int | None = None) -> list[int]:
    """Parses a list of cores. Returns their numbers.

    Args:
        text: numbers and ranges, such as ``0-3,8``; ``node:1`` for the cores of a NUMA node; ``near`` for those of the
            node `near`.
        near: the NUMA node next to the device; None if there is no device, or its node is unknown.

    Raises:
        ArgumentError: the text is not a valid list of cores.
    """
    if text == "near":
        if near is None:
            raise ArgumentError("cores", "no NUMA node is known to be near; name the cores, or node:NUMBER")
        text = f"node:{near}"
    if text.startswith("node:"):
        listed = _NODES / f"node{text.removeprefix('node:')}" / "cpulist"
        try:
            text = listed.read_text().strip()
        except OSError:
            raise ArgumentError("cores", f"this machine has no NUMA node {text.removeprefix('node:')!r}") from None
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        if not all(end.isdecimal() and len(end) <= _DIGITS for end in ends) or int(ends[0]) > int(ends[1]):
            raise ArgumentError("cores", f"{part!r} is neither a core's number nor a range such as 0-3")
        cores.update(range(int(ends[0]), int(ends[1]) + 1))
    return sorted(cores)


def encode_cores(cores: Iterable[int]) -> str:
    """Encodes cores as text for `decode_cores`."""
    return f"{sum(1 << core for core in set(cores)):x}"


def decode_cores(text: str) -> set[int]:
    """Decodes a text of `encode_cores`. Raises ValueError for any other text."""
    mask = int(text or "0", 16)
    return {core for core in range(mask.bit_length()) if mask >> core & 1}


def cores_of(pid: int) -> set[int]:
    """The cores that a process of this machine may run on; empty if the process has ended or is not visible here."""
    try:
        return os.sched_getaffinity(pid)
    except ProcessLookupError:
        return set()
