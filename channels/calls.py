"""What the call log compares: the fields of a collective call that must agree between ranks.

A field is a 64-bit number (calls.h). Names are logged as digests of their text, so a new collective needs no number of
its own: its module registers the name. A vector of counts is logged as a digest too.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from proxyccl.device.dtypes import DTYPES

CALL_FIELDS = ("collective", "dtype", "op", "algorithm", "root", "count", "counts")
"""The fields of a ProxycclCall (calls.h), in order."""
_NAMED = frozenset({"collective", "dtype", "op", "algorithm"})
ANY_ALGORITHM = "any"
"""Logged where the caller leaves the algorithm to the library."""

_texts: dict[int, str] = {}


def register_names(*names: str) -> None:
    """Makes names of collectives, operators or algorithms known to the call log, on every rank before its first call.

    Raises:
        ValueError: another name has the same digest.
    """
    for name in names:
        known = _texts.setdefault(_digest(name), name)
        if known != name:
            raise ValueError(f"{name!r} and {known!r} have the same digest; rename one of them")


def _digest(name: str) -> int:
    return zlib.crc32(name.encode())


@dataclass(frozen=True)
class CollectiveCall:
    """A collective call as ranks compare it.

    Attributes:
        collective: registered name.
        dtype: element type by name.
        op: reduction operator.
        algorithm: what the callers ask of it, as a registered name.
        root: rank, or 0.
        count: elements that each rank contributes, or that each gets.
        counts: elements by rank, for collectives whose shares differ in length; the same vector on all ranks.
    """

    collective: str
    dtype: str = "uint8"
    op: str = "sum"
    algorithm: str = ANY_ALGORITHM
    root: int = 0
    count: int = 0
    counts: Sequence[int] = ()

    def encode(self) -> tuple[int, ...]:
        """The values of CALL_FIELDS. Raises KeyError for a name that is not registered."""
        names = (self.collective, self.dtype, self.op, self.algorithm)
        digests = [_digest(name) for name in names]
        for digest in digests:
            _texts[digest]
        return (*digests, self.root, self.count, _vector_digest(self.counts))


def _vector_digest(counts: Sequence[int]) -> int:
    if not counts:
        return 0
    text = ",".join(str(int(count)) for count in counts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def describe_call(fields: Sequence[int]) -> dict[str, str]:
    """The fields of a logged call in words, by name. `counts` is there only if the call has such a vector."""
    described = {
        name: _texts.get(value, f"unknown ({value:#x})") if name in _NAMED else str(value)
        for name, value in zip(CALL_FIELDS, fields, strict=True)
    }
    if described["counts"] == "0":
        del described["counts"]
    return described


register_names(ANY_ALGORITHM, *DTYPES)
