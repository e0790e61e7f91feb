"""Implements a rank's transfers to itself, without a communicator. torch's batches may contain such transfers."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from proxyccl.device.errors import WaitTimeoutError
from proxyccl.torch.tensor_collectives import as_bytes, put_back

_T = TypeVar("_T")
_LOOK_SECONDS = 0.1
"""The interval at which a wait checks whether the group has ended."""
_Offers = queue.SimpleQueue[tuple[torch.Tensor, Any, "Future[Any]"]]
"""The tensors that this rank sends. Each entry consists of the tensor, an event after which the tensor may be read, and
a future whose result is an event after the copy. On a CPU, both events are None.
"""


class ToSelf:
    """A rank's transfers to itself. On each device, the i-th send matches the i-th receive. One thread calls `send` and
    another thread calls `recv`. Each call waits for the other thread's matching call.
    """

    def __init__(self, rank: int, require_open: Callable[[], None]) -> None:
        self._rank = rank
        self._require_open = require_open
        self._offers: dict[torch.device, _Offers] = {}

    def send(self, tensor: torch.Tensor, seconds: float) -> None:
        """Sends a tensor to this rank's next receive on the tensor's device. Makes the current stream wait for the
        copy. Raises ValueError if the matching receive's tensor has another size, and WaitTimeoutError if no receive
        was made within the time-out.
        """
        copied: Future[Any] = Future()
        self._offers_on(tensor.device).put((tensor, _event(tensor.device), copied))
        try:
            after = self._await(copied.result, "send", seconds)
        except BaseException:
            if copied.cancel():
                raise
            after = copied.result()  # a receive has taken the tensor
        _wait_for(tensor.device, after)

    def recv(self, tensor: torch.Tensor, seconds: float) -> None:
        """Receives the tensor of this rank's next send on the device. Raises the errors of `send`."""
        offers = self._offers_on(tensor.device)
        while True:
            source, ready, copied = self._await(lambda bound: offers.get(timeout=bound), "recv", seconds)
            if copied.set_running_or_notify_cancel():
                break  # a send that timed out is skipped
        try:
            self._copy(tensor, source, ready)
        except BaseException as error:
            copied.set_exception(error)
            raise
        copied.set_result(_event(tensor.device))

    def _copy(self, tensor: torch.Tensor, source: torch.Tensor, ready: Any) -> None:
        sent, expected = (each.numel() * each.element_size() for each in (source, tensor))
        if sent != expected:
            raise ValueError(
                f"peer: rank {self._rank} sends itself a tensor of {sent} bytes and receives one of {expected}"
            )
        _wait_for(tensor.device, ready)
        target = as_bytes(tensor)
        target.copy_(as_bytes(source))
        put_back(tensor, target)

    def _offers_on(self, device: torch.device) -> _Offers:
        return self._offers.setdefault(device, queue.SimpleQueue())

    def _await(self, ask: Callable[[float], _T], name: str, seconds: float) -> _T:
        """Calls `ask`, whose argument is a short time-out, until a call returns a result, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return ask(_LOOK_SECONDS)
            except (TimeoutError, queue.Empty):
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
