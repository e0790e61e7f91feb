"""Raises errors for status codes of the host runtime's C functions."""

from __future__ import annotations

from proxyccl.device._native import lib
from proxyccl.device.errors import KernelError, ProxyCCLError

_MESSAGES = {
    lib.PROXYCCL_HOST_INVALID_VALUE: "a value is out of range",
    lib.PROXYCCL_HOST_OUT_OF_MEMORY: "this process can start no more threads, or map no more memory",
    lib.PROXYCCL_HOST_NOT_FOUND: "not found",
    lib.PROXYCCL_HOST_NOT_READY: "not ready",
    lib.PROXYCCL_HOST_IN_HANDLER: "a signal's handler can't use a stream while it interrupts a call that waits; "
    "expected it to return, to raise or to abort the communicator",
    lib.PROXYCCL_HOST_LAUNCH_FAILED: "the kernel failed: its threads deadlocked at a barrier "
    "that not all of them reach, or one overflowed its stack",
}


def check_status(status: int, call: str, kind: type[ProxyCCLError] = KernelError) -> None:
    """Raises `kind` with the call's name and the meaning of `status`, unless `status` is 0."""
    if status:
        raise kind(f"{call}: {_MESSAGES.get(status, f'status {status}')}")
