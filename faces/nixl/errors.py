"""NIXL's exceptions, and which of them stands for each of ours. The text begins with NIXL's name of the status."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

from proxyccl.channels.transfers import errors as ours
from proxyccl.device.errors import ArgumentError, ClosedError, ProxyCCLError
from proxyccl.nixl.enums import nixl_status_t


class _NixlError(RuntimeError):
    status: ClassVar[nixl_status_t]

    def __init__(self, message: str = "") -> None:
        super().__init__(f"{self.status.name}: {message}" if message else self.status.name)


class nixlNotPostedError(_NixlError):
    """The transfer was never posted."""

    status = nixl_status_t.NIXL_ERR_NOT_POSTED


class nixlInvalidParamError(_NixlError):
    """An argument is wrong."""

    status = nixl_status_t.NIXL_ERR_INVALID_PARAM


class nixlBackendError(_NixlError):
    """The transfer failed, or the kind of memory is not supported."""

    status = nixl_status_t.NIXL_ERR_BACKEND


class nixlNotFoundError(_NixlError):
    """An agent, a backend or registered memory is unknown."""

    status = nixl_status_t.NIXL_ERR_NOT_FOUND


class nixlMismatchError(_NixlError):
    """Bytes are not an agent's metadata."""

    status = nixl_status_t.NIXL_ERR_MISMATCH


class nixlNotAllowedError(_NixlError):
    """Another agent of the name is known."""

    status = nixl_status_t.NIXL_ERR_NOT_ALLOWED


class nixlRepostActiveError(_NixlError):
    """The transfer is active."""

    status = nixl_status_t.NIXL_ERR_REPOST_ACTIVE


class nixlUnknownError(_NixlError):
    """Anything else."""

    status = nixl_status_t.NIXL_ERR_UNKNOWN


class nixlNotSupportedError(_NixlError):
    """ProxyCCL does not have the feature."""

    status = nixl_status_t.NIXL_ERR_NOT_SUPPORTED


class nixlRemoteDisconnectError(_NixlError):
    """The other agent has ended, or can't be reached."""

    status = nixl_status_t.NIXL_ERR_REMOTE_DISCONNECT


class nixlCancelledError(_NixlError):
    """The transfer was canceled."""

    status = nixl_status_t.NIXL_ERR_CANCELED


class nixlNoTelemetryError(_NixlError):
    """Telemetry is not enabled."""

    status = nixl_status_t.NIXL_ERR_NO_TELEMETRY


_THEIRS: dict[type[ProxyCCLError], type[_NixlError]] = {  # the first that fits
    ours.NotStartedError: nixlNotPostedError,
    ours.UnknownAgentError: nixlNotFoundError,
    ours.NotRegisteredError: nixlNotFoundError,
    ours.MetadataError: nixlMismatchError,
    ours.NameTakenError: nixlNotAllowedError,
    ours.ActiveError: nixlRepostActiveError,
    ours.DisconnectedError: nixlRemoteDisconnectError,
    ours.CanceledError: nixlCancelledError,
    ours.NoPathError: nixlNotSupportedError,
    ours.TransferError: nixlBackendError,
    ArgumentError: nixlInvalidParamError,
    ClosedError: nixlCancelledError,
    ProxyCCLError: nixlUnknownError,
}


def in_nixl(error: ProxyCCLError) -> _NixlError:
    """NIXL's exception for one of ours."""
    return next(theirs for kind, theirs in _THEIRS.items() if isinstance(error, kind))(str(error))


@contextlib.contextmanager
def in_nixls_words() -> Iterator[None]:
    """Raises NIXL's exception for each of ours."""
    try:
        yield
    except ProxyCCLError as error:
        raise in_nixl(error) from error
