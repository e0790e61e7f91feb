"""Transfers of a rank to itself, which torch's batches may have. No communicator takes part."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from proxyccl.device.errors import WaitTimeoutError
from proxyccl.torch.tensor_collectives import as_bytes, put_back

_LOOK_SECONDS = 0.1
"""How often a wait looks whether the group has ended."""


class _Meeting:
    """Where a send and a receive of one device meet: one of each at a time, as each direction has one thread.

    Attributes:
        offered: the tensor that is sent, and the event after which it may be read; None where there is none.
        taken: whether it was copied, by now or as it never will be.
        event: after the copy; None on a CPU.
        error: why the copy was refused.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.offered: tuple[torch.Tensor, Any] | None = None
        self.taken = False
        self.event: Any = None
        self.error: ValueError | None = None


class ToSelf:
    """The transfers of a rank to itself: on each device its sends meet its receives in order.

    `send` and `recv` are called by a thread each, on the stream that is then current, and wait for the other.
    """

    def __init__(self, rank: int, require_open: Callable[[], None]) -> None:
        self._rank = rank
        self._require_open = require_open
        self._lock = threading.Lock()
        self._meetings: dict[torch.device, _Meeting] = {}

    def send(self, tensor: torch.Tensor, seconds: float) -> None:
        """Sends a tensor to this rank's next receive on the device. The current stream then comes after the copy.

        Raises:
            ValueError: the receive is of another size.
            WaitTimeoutError: there was no receive.
        """
        meeting = self._meeting(tensor.device)
        with meeting.changed:
            meeting.taken, meeting.event, meeting.error = False, None, None
            meeting.offered = (tensor, _event(tensor.device))
            meeting.changed.notify_all()
            try:
                self._await(meeting, lambda: meeting.taken, "send", seconds)
            finally:
                meeting.offered = None
            if meeting.error is not None:
                raise meeting.error
            _wait_for(tensor.device, meeting.event)

    def recv(self, tensor: torch.Tensor, seconds: float) -> None:
        """Receives this rank's next send on the device. As `send`."""
        meeting = self._meeting(tensor.device)
        with meeting.changed:
            self._await(meeting, lambda: meeting.offered is not None, "recv", seconds)
            assert meeting.offered is not None
            (source, ready), meeting.offered = meeting.offered, None
            try:
                sent, expected = (each.numel() * each.element_size() for each in (source, tensor))
                if sent != expected:
                    meeting.error = ValueError(
                        f"peer: rank {self._rank} sends itself a tensor of {sent} bytes and receives one of {expected}"
                    )
                    raise meeting.error
                _wait_for(tensor.device, ready)
                target = as_bytes(tensor)
                target.copy_(as_bytes(source))
                put_back(tensor, target)
                meeting.event = _event(tensor.device)
            finally:
                meeting.taken = True
                meeting.changed.notify_all()

    def _meeting(self, device: torch.device) -> _Meeting:
        with self._lock:
            return self._meetings.setdefault(device, _Meeting())

    def _await(self, meeting: _Meeting, ready: Callable[[], bool], name: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not meeting.changed.wait_for(ready, _LOOK_SECONDS):
            self._require_open()
            if time.monotonic() > deadline:
                other = "recv" if name == "send" else "send"
                raise WaitTimeoutError(
                    f"{name} of rank {self._rank} to itself: it made no {other} within {seconds:g} s",
                    rank=self._rank,
                    peer=self._rank,
                    operation=name,
                )


def _event(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.cuda.current_stream(device).record_event()


def _wait_for(device: torch.device, event: Any) -> None:
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
