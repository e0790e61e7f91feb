"""Errors as torch's programs expect them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from proxyccl.device.errors import ClosedError, CommunicatorError, KernelError, ResourceError, WaitTimeoutError
from torch.distributed import DistBackendError


def as_torch_error(error: BaseException) -> BaseException:
    """A failure of a communicator as torch's DistBackendError, with our type and text and the error as its cause.

    Errors of an argument stay ValueErrors.
    """
    if not isinstance(error, CommunicatorError | ClosedError | KernelError | ResourceError):
        return error
    if isinstance(error, ValueError):
        return error
    kind = type(error).__name__
    if isinstance(error, WaitTimeoutError):
        kind = f"Timed out with {kind}"  # the words that torch's programs search for
    translated: RuntimeError = DistBackendError(f"proxyccl: {kind}: {error}")
    translated.__cause__ = error
    return translated


@contextmanager
def torch_errors() -> Iterator[None]:
    """Converts exceptions raised within by `as_torch_error`."""
    try:
        yield
    except Exception as error:
        translated = as_torch_error(error)
        if translated is error:
            raise
        raise translated from error
