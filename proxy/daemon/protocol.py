"""What a rank and the node daemon say to each other: frames over a Unix socket of sequenced packets.

A frame is one JSON object of at most `LONGEST_FRAME` bytes, and may carry file descriptors. The client's first says the
version; every request gets one answer, in order and with the request's number, and the daemon tells of a failure
unasked. Nothing that comes in is trusted: `Fields` gives values by name and type, or raises.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proxyccl.device._native import ffi as native
from proxyccl.device.errors import ArgumentError, ProxyCCLError
from proxyccl.proxy._engine import ffi as engine
from proxyccl.proxy.service import SharedWords

VERSION = 4
LONGEST_FRAME = 64 * 1024
MOST_DESCRIPTORS = 65
"""The segment and 64 rings."""

LAYOUT = [int(native.sizeof("ProxycclControl")), SharedWords.BYTES, int(engine.sizeof("ProxycclObserved"))]
"""What both must have built alike: sizes of what they share memory with."""

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class ProtocolError(ProxyCCLError):
    """The other side said what makes no sense."""


class Fields:
    """A frame's fields, by name and type."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def integer(self, name: str, low: int = 0, high: int = 2**64 - 1) -> int:
        """A number from `low` to `high`."""
        value = self._values.get(name)
        if type(value) is not int or not low <= value <= high:
            raise ProtocolError(f"{name}: {value!r:.100} is no integer from {low} to {high}")
        return value

    def optional(self, name: str, low: int = 0, high: int = 2**64 - 1) -> int | None:
        """The same, or None."""
        return None if self._values.get(name) is None else self.integer(name, low, high)

    def integers(self, name: str, high: int = 2**64 - 1) -> list[int]:
        """Numbers from 0 to `high`."""
        value = self._values.get(name)
        if not isinstance(value, list) or any(type(item) is not int or not 0 <= item <= high for item in value):
            raise ProtocolError(f"{name}: {value!r:.100} is no list of integers from 0 to {high}")
        return list(value)

    def flag(self, name: str) -> bool:
        """Yes or no."""
        value = self._values.get(name)
        if not isinstance(value, bool):
            raise ProtocolError(f"{name}: {value!r:.100} is neither true nor false")
        return value

    def number(self, name: str, low: float, high: float) -> float:
        """A number, of seconds say."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ProtocolError(f"{name}: {value!r:.100} is no number from {low} to {high}")
        return float(value)

    def text(self, name: str) -> str:
        """A string."""
        value = self._values.get(name)
        if not isinstance(value, str):
            raise ProtocolError(f"{name}: {value!r:.100} is no text")
        return value

    def values(self, name: str) -> dict[str, Any]:
        """Values by name."""
        value = self._values.get(name)
        if not isinstance(value, dict):
            raise ProtocolError(f"{name}: {value!r:.100} is no object")
        return value

    def data(self, name: str) -> bytes:
        """Bytes, which travel in hexadecimal."""
        try:
            return bytes.fromhex(self.text(name))
        except ValueError:
            raise ProtocolError(f"{name}: these are no bytes in hexadecimal") from None


def encode(message: dict[str, Any]) -> bytes:
    """A message as a frame."""
    frame = json.dumps(message, separators=(",", ":")).encode()
    if len(frame) > LONGEST_FRAME:
        raise ProtocolError(f"a frame of {len(frame)} bytes, where {LONGEST_FRAME} are the most")
    return frame


def decode(frame: bytes, flags: int = 0) -> Fields:
    """The fields of a frame, which was received with these flags.

    Raises:
        ProtocolError: it is none.
    """
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise ProtocolError(
            f"a frame that did not come whole: of more than {LONGEST_FRAME} bytes, with more than {MOST_DESCRIPTORS} "
            "descriptors, or with more than this process may still open (ulimit -n)"
        )
    try:
        message = json.loads(frame)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame that is no JSON: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"a frame that is no object but {type(message).__name__}")
    return Fields(message)


def send(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = (), flags: int = 0) -> None:
    """Sends a frame. Raises OSError as the socket does."""
    socket.send_fds(connection, [encode(message)], list(descriptors), flags)


def receive(connection: socket.socket) -> tuple[Fields, list[int]] | None:
    """The next frame and its descriptors, which belong to the caller; None at the end.

    Raises:
        ProtocolError: what came is no frame.
        OSError: as the socket does.
    """
    frame, descriptors, flags, _ = socket.recv_fds(connection, LONGEST_FRAME, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    try:
        if not frame and not descriptors:
            return None
        return decode(frame, flags), descriptors
    except ProtocolError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def limit_waits(connection: socket.socket, send_seconds: float, receive_seconds: float) -> None:
    """Bounds what the socket waits for; 0 for no bound.

    These are the system's time-outs and not Python's, under which a send that must not wait would wait all the same.
    """
    for option, seconds in ((socket.SO_SNDTIMEO, send_seconds), (socket.SO_RCVTIMEO, receive_seconds)):
        parts = divmod(int(seconds * 1e6), 1_000_000)
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *parts))


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user


def socket_path(path: str | os.PathLike[str] | None = None) -> Path:
    """Where the daemon listens: the path given, else ``PROXYCCL_DAEMON_SOCKET``, else one of this user's.

    Raises:
        ArgumentError: it is too long for a socket.
    """
    chosen = path or os.environ.get("PROXYCCL_DAEMON_SOCKET")
    if not chosen:
        runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
        chosen = f"{runtime_dir}/proxyccl.sock" if runtime_dir else f"/tmp/proxyccl-{os.geteuid()}/daemon.sock"
    if len(os.fsencode(chosen)) > 107:
        raise ArgumentError("socket", f"{os.fspath(chosen)!r} is longer than the 107 bytes that a socket may have")
    return Path(chosen)
