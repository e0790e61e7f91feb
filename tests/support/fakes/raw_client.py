"""A client of the node daemon that can send any message, and a ring that floods the daemon with triggers."""

from __future__ import annotations

import base64
import ctypes
import json
import socket
import threading
from types import TracebackType
from typing import Any

import numpy as np

from proxyccl import Trigger
from proxyccl.channels.segment.control import ControlSegment, segment_bytes
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.proxy.daemon.protocol import LAYOUT, LONGEST_FRAME, VERSION
from proxyccl.proxy.ring import ring_bytes
from proxyccl.proxy.shared_words import SharedWords
from support.daemons import RunningDaemon

RING = 64
OFFSET = ControlSegment.service_offset
HELLO = {"hello": VERSION, "layout": LAYOUT}
OPTIONS = {
    "runtime": "host",
    "device_id": "host:0",
    "fifo_size": RING,
    "threads": 1,
    "shared_offset": OFFSET,
    "semaphores_offset": ControlSegment.semaphore_offset(0),
}


DONE = {"kind": "answer", "result": None}
DRAINED = ENDED = {"kind": "answer", "result": True}


def opening(**changed: Any) -> dict[str, Any]:
    """Returns a request to open a service, with some options changed."""
    return {"do": "open", "options": OPTIONS | changed}


def frame_of(message: dict[str, Any]) -> bytes:
    """Returns a message as JSON, with bytes in base64. The message need not be valid."""
    return json.dumps(message, default=lambda data: base64.b64encode(data).decode()).encode()


class RawClient:
    """A client that sends any message, even one that is malformed or makes false claims."""

    def __init__(self, daemon: RunningDaemon) -> None:
        self.connection = daemon.connect()
        self.segment = SharedMemory.allocate(segment_bytes())
        self.ring = SharedMemory.allocate(ring_bytes(RING))
        self.buffer = SharedMemory.allocate(4096)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connection.close()

    def say(self, frame: bytes | dict[str, Any], *descriptors: int) -> dict[str, Any] | None:
        """Sends a message, and returns the daemon's answer, or None if the daemon closed the connection."""
        data = frame if isinstance(frame, bytes) else frame_of(frame)
        try:
            socket.send_fds(self.connection, [data], list(descriptors))
            answer = self.connection.recv(LONGEST_FRAME)
        except (BrokenPipeError, ConnectionResetError):
            return None
        return json.loads(answer) if answer else None

    def result(self, request: dict[str, Any]) -> Any:
        """Sends a request that must succeed, and returns its result."""
        answer = self.say(request)
        assert answer is not None
        return answer["result"]

    def open(self, **changed: Any) -> dict[str, Any] | None:
        """Sends the hello message, asks for a service with one ring, and starts the service. Returns the daemon's
        answer to the request for a service, or None if the daemon closed the connection.
        """
        assert self.say(HELLO) is not None
        answer = self.say(opening(**changed), self.segment.descriptor, self.ring.descriptor)
        if answer is not None and answer["kind"] == "answer":
            assert self.say({"do": "start"}) == DONE
        return answer

    def opens(self) -> bool:
        """Returns whether `open` succeeds."""
        answer = self.open()
        return answer is not None and answer["kind"] == "answer"

    def use(self) -> dict[str, Any]:
        """Adds a memory, and a channel from this rank to itself. Returns their ids."""
        handle = self.buffer.export(self.buffer.ptr, 4096)
        first = self.result({"do": "add_memory", "keys": [], "handle": handle, "nbytes": 4096})
        connection = self.result({"do": "connect_copy", "peer": 0})["number"]
        channel, _ = self.result({"do": "reserve_channel", "connection": connection})
        return {"first": first, "connection": connection, "channel": channel}

    def set_channel(self, used: dict[str, Any], offset: int = 0, nbytes: int = 8) -> dict[str, Any]:
        """Returns a request that makes the channel that `use` made signal a word in the buffer."""
        word = self.buffer.export(self.buffer.ptr + offset, nbytes)
        return {"do": "set_channel", "channel": used["channel"], "connection": used["connection"], "word": word}

    def schedule(self, used: dict[str, Any]) -> dict[str, Any]:
        """Returns a schedule that copies bytes within the buffer over the channel that `use` made."""
        send = {
            "channel": used["channel"],
            "src_memory": used["first"],
            "src_offset": 0,
            "nbytes": 512,
            "dst_memory": used["first"],
            "dst_offset": 2048,
        }
        return {"sends": [send]}

    @property
    def schedule_words(self) -> Any:
        """The words through which a stream starts schedules and waits for them."""
        return SharedWords(self.segment, OFFSET).schedule_words

    def ended(self) -> bool:
        """Waits until the daemon sends a message or closes the connection. Returns whether the connection was
        closed.
        """
        try:
            return self.connection.recv(LONGEST_FRAME) == b""
        except ConnectionResetError:
            return True


class Ringing:
    """A thread that keeps writing a schedule's number to the bell word during the `with` block."""

    def __init__(self, words: Any, number: int) -> None:
        self._words, self._number = words, number
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._words.bell = self._number

    def __enter__(self) -> Ringing:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()


class Flood:
    """A ring that always looks full of new triggers: a thread keeps flipping the bit that marks new triggers."""

    def __init__(self, ring: SharedMemory, trigger: Trigger) -> None:
        self._stop = threading.Event()
        self._slots = np.frombuffer((ctypes.c_uint64 * (2 * RING)).from_address(ring.ptr), np.uint64)
        self._slots[0::2], self._slots[1::2] = trigger.encode()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._slots[1::2] ^= np.uint64(1 << 63)

    def end(self) -> None:
        """Stops the thread."""
        self._stop.set()
        self._thread.join()
