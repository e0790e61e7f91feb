"""Converts errors to the types and texts that torch's programs expect."""

from __future__ import annotations

from types import TracebackType
from typing import NoReturn

from proxyccl.device.errors import (
    ClosedError,
    CommunicatorError,
    KernelError,
    ResourceError,
    WaitTimeoutError,
    raise_in_place_of,
)
from proxyccl.torch.flight_recorder import write_failure
from torch.distributed import DistBackendError


def as_torch_error(error: BaseException) -> BaseException:
    """Converts a communicator's failure to a DistBackendError that has the failure as its cause. Returns a ValueError,
    such as an ArgumentError, and errors of other libraries unchanged. For the first failure in the process, writes a
    flight record (`write_failure`).
    """
    if isinstance(error, CommunicatorError):
        write_failure()
    if not isinstance(error, CommunicatorError | ClosedError | KernelError | ResourceError):
        return error
    if isinstance(error, ValueError):
        return error
    kind = type(error).__name__
    if isinstance(error, WaitTimeoutError):
        kind = f"Timed out with {kind}"  # programs that use torch search errors for these words
    translated: RuntimeError = DistBackendError(f"proxyccl: {kind}: {error}")
    translated.__cause__ = error
    return translated


def raise_as_torch(error: BaseException) -> NoReturn:
    """Converts a caught exception by `as_torch_error` and raises the result."""
    try:
        raise_in_place_of(error, as_torch_error(error))
    finally:
        del error  # breaks the reference cycle of the error, its traceback and this frame


class torch_errors:  # noqa: N801  callers use the class like a function
    """A context that uses `as_torch_error` to convert exceptions."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, Exception) and as_torch_error(error) is not error:
            raise_as_torch(error)
