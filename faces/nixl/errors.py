"""NIXL's exceptions, and the mapping from ProxyCCL's errors to them. An exception's text begins with the name of its
nixl_status_t.
"""

from __future__ import annotations

from typing import ClassVar

from proxyccl.channels.transfers import errors as ours
from proxyccl.device.errors import ArgumentError, ClosedError, ProxyCCLError
from proxyccl.nixl.enums import nixl_status_t


class _NixlError(RuntimeError):
    status: ClassVar[nixl_status_t]

    def __init__(self, message: str = "") -> None:
        super().__init__(f"{self.status.name}: {message}" if message else self.status.name)


class nixlNotPostedError(_NixlError):
    status = nixl_status_t.NIXL_ERR_NOT_POSTED


class nixlInvalidParamError(_NixlError):
    status = nixl_status_t.NIXL_ERR_INVALID_PARAM


class nixlBackendError(_NixlError):
    status = nixl_status_t.NIXL_ERR_BACKEND


class nixlNotFoundError(_NixlError):
    status = nixl_status_t.NIXL_ERR_NOT_FOUND


class nixlMismatchError(_NixlError):
    status = nixl_status_t.NIXL_ERR_MISMATCH


class nixlNotAllowedError(_NixlError):
    status = nixl_status_t.NIXL_ERR_NOT_ALLOWED


class nixlRepostActiveError(_NixlError):
    status = nixl_status_t.NIXL_ERR_REPOST_ACTIVE


class nixlUnknownError(_NixlError):
    status = nixl_status_t.NIXL_ERR_UNKNOWN


class nixlNotSupportedError(_NixlError):
    status = nixl_status_t.NIXL_ERR_NOT_SUPPORTED


class nixlRemoteDisconnectError(_NixlError):
    status = nixl_status_t.NIXL_ERR_REMOTE_DISCONNECT


class nixlCancelledError(_NixlError):
    status = nixl_status_t.NIXL_ERR_CANCELED


class nixlNoTelemetryError(_NixlError):
    status = nixl_status_t.NIXL_ERR_NO_TELEMETRY


_THEIRS: dict[type[ProxyCCLError], type[_NixlError]] = {  # subclasses precede base classes
    ours.NotStartedError: nixlNotPostedError,
    ours.UnknownAgentError: nixlNotFoundError,
    ours.NotRegisteredError: nixlNotFoundError,
    ours.NotGrantedError: nixlNotFoundError,
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
    return next(theirs for kind, theirs in _THEIRS.items() if isinstance(error, kind))(str(error))


class in_nixls_words:
    """A context manager that raises NIXL's exceptions instead of ours."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ProxyCCLError):
            raise in_nixl(error) from error
