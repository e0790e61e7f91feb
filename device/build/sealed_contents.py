"""File contents that show whether they are complete: length and digest stand at their end.

There they do no harm: the loader of a shared object reads no further than its last section.
"""

from __future__ import annotations

import hashlib
import struct

_MARK = b"proxyccl"
_SEAL = struct.Struct("<8sQ32s")
"""Mark, length of the content in bytes, and its SHA-256."""


def sealed(content: bytes) -> bytes:
    """A content with its seal."""
    return content + _SEAL.pack(_MARK, len(content), hashlib.sha256(content).digest())


def unsealed(data: bytes) -> bytes | None:
    """The inverse of `sealed`; None if anything was cut off, added or changed."""
    content = data[: -_SEAL.size]
    return content if data == sealed(content) else None
