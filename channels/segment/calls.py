"""The fields of a collective call that must agree between ranks, which the call log compares.

A field is a 64-bit number (calls.h). Names and shapes are logged as digests. A new collective needs no number, because
its module registers its name.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Sequence

from msgspec import Struct

from proxyccl.device.arrays.dtypes import DTYPES

CALL_FIELDS = ("collective", "dtype", "op", "algorithm", "root", "count", "shape")
"""The fields of a ProxycclCall (calls.h), in order. `shape` also encodes registered arrays and the call's object: see
`CollectiveCall`.
"""
ROOT_FIELD = CALL_FIELDS.index("root")
OBJECT_FIELD = CALL_FIELDS.index("shape")
_NAMED = frozenset({"collective", "dtype", "op", "algorithm"})
SHAPED = dict.fromkeys(
    ("all_gather", "all_to_all", "all_to_all_v", "broadcast", "gather", "reduce_scatter", "scatter"), "in another shape"
) | {"all_reduce_rms_norm": "in another shape or with other options"}
"""Collectives whose arrays, or rows of all_to_all_v, have one shape on all ranks: in these, a rank gets rows that other
ranks passed, or blocks consist of whole rows. Other collectives take an array's elements in order. The values are the
words of errors for another `shape`.
"""
ANY_ALGORITHM = "any"
"""The logged name if the caller leaves the choice of the algorithm to the library."""

_texts: dict[int, str] = {}


def register_names(*names: str) -> None:
    """Registers names of collectives, operators or algorithms for the call log. Every rank registers its names before
    its first call.

    Raises:
        ValueError: another name has the same digest.
    """
    for name in names:
        known = _texts.setdefault(_digest(name), name)
        if known != name:
            raise ValueError(f"{name!r} and {known!r} have the same digest; rename one of them")


def _digest(name: str) -> int:
    return zlib.crc32(name.encode())


class CollectiveCall(Struct, frozen=True):
    """The fields of a collective call that ranks compare."""

    collective: str  # the collective's registered name
    dtype: str = "uint8"  # the element type's name
    op: str = "sum"  # the reduction operator
    algorithm: str = ANY_ALGORITHM  # the registered name of the requested algorithm
    root: int = 0  # the root's rank; 0 for a collective without a root
    count: int = 0  # the number of elements that each rank contributes or receives, depending on the collective
    # The shape of the array that each rank passes or receives, and options that change the result; compared for the
    # collectives `SHAPED`.
    shape: tuple[object, ...] = ()
    # The digests of the registered arrays that peers access in place; the same on all ranks.
    registered: tuple[int, ...] = ()
    # The number of the call's object (`Launches.number_object`); 0 for calls of the communicator. Calls of objects have
    # neither shape nor registered arrays.
    of: int = 0

    def encode(self) -> tuple[int, ...]:
        """Returns the values of CALL_FIELDS. Raises KeyError for a name that is not registered."""
        names = (self.collective, self.dtype, self.op, self.algorithm)
        digests = [_digest(name) for name in names]
        for digest in digests:
            _texts[digest]
        # The shape of a vector is omitted, because `count` determines it.
        shape = self.shape if self.collective in SHAPED and len(self.shape) > 1 else ()
        return (*digests, self.root, self.count, self.of or _arrays_digest(shape, self.registered))


@functools.lru_cache(maxsize=1024)
def _arrays_digest(shape: tuple[object, ...], registered: tuple[int, ...]) -> int:
    if not shape and not registered:
        return 0
    text = f"{','.join(map(str, shape))};{','.join(map(str, registered))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def name_of(digest: int, otherwise: str) -> str:
    """Returns the registered name with this digest, or `otherwise` if the digest is 0."""
    return _texts.get(digest, f"unknown ({digest:#x})") if digest else otherwise


def describe_call(fields: Sequence[int]) -> dict[str, str]:
    """Returns the fields of a logged call as text, by name. Omits `shape`, which is logged only as a digest."""
    return {
        name: name_of(value, "unknown (0x0)") if name in _NAMED else str(value)
        for name, value in zip(CALL_FIELDS, fields, strict=True)
        if name != "shape"
    }


register_names(ANY_ALGORITHM, *DTYPES)
