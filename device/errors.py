"""The exceptions of ProxyCCL.

An exception that ends a communicator derives from `CommunicatorError`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NoReturn


class ProxyCCLError(Exception):
    """Base of all exceptions of this library, which can all be pickled with their attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[ProxyCCLError], args: tuple[object, ...], attributes: dict[str, Any]) -> ProxyCCLError:
    # Bypasses __init__, whose parameters differ from `args`.
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    if notes := getattr(error, "__notes__", None):
        error.__notes__ = list(notes)  # not shared with the original
    return error


def raise_in_place_of(caught: BaseException, error: BaseException) -> NoReturn:
    """Raises `error` with `caught` as its cause, or without a cause if the two are the same exception.

    The frame drops its references to the errors, because an error's traceback refers to the frame: the cycle would keep
    all callers' arrays alive until a garbage collection.
    """
    try:
        if error is caught:
            raise caught
        raise error from caught
    finally:
        del caught, error


class ArgumentError(ProxyCCLError, ValueError):
    """An argument of a call is wrong, and the call had no effect. `argument` is the argument's name."""

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(f"{argument}: {message}")
        self.argument = argument


class HandleTypeError(ArgumentError, TypeError):
    """An argument of a launch is a handle of another kind than the kernel's parameter."""


class UntrustedPathError(ArgumentError):
    """A file or directory was not used, because another user owns it or can change it, or because it is a link."""


class AlreadyMappedError(ArgumentError):
    """Memory can't be mapped while this process maps freed memory of the same address in the exporting process."""


class ResourceError(ProxyCCLError):
    """A limited resource, such as memory ids, channel ids or device memory, is used up."""


class CapacityError(ProxyCCLError):
    """More data arrived than a fixed maximum allows, and nothing was overwritten. `needed` is the amount of data."""

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


class ClosedError(ProxyCCLError):
    """The object was closed, or its communicator had failed before."""


class SuspendedError(ProxyCCLError, RuntimeError):
    """The communicator, or the communicator of the call's array, is suspended, so the call moved no data; or `resume`
    was called on a communicator that is not suspended.
    """


class ConcurrentCallError(ProxyCCLError, RuntimeError):
    """Another thread of this rank is in a call that only one thread may make at a time.

    The call moved no data. Do not repeat a refused collective: the other ranks may have matched it as one of the calls
    that all ranks make in the same order.
    """


class ProtocolError(ProxyCCLError):
    """Another process sent an invalid message. The error's text names the sender, the field and the expected value."""


class RuntimeUnavailableError(ProxyCCLError):
    """This machine does not offer the requested runtime; the message says what is missing."""


class CompileError(ProxyCCLError):
    """A kernel did not compile, or there is no compiler. `log` is the compiler's output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.log = log


class KernelError(ProxyCCLError):
    """A launch was refused or a kernel failed."""


class DriverError(KernelError):
    """A call into a GPU's driver failed. If a kernel failed, any later call may raise this error."""

    def __init__(self, call: str, status: int, meaning: str) -> None:
        super().__init__(f"{call}: {meaning} (status {status})")
        self.status = status  # the driver's status code


class CommunicatorError(ProxyCCLError):
    """The communicator failed and can't be used. All reachable ranks were notified.

    An attribute is None if it is unknown or does not apply.

    Attributes:
        rank: the rank that found the failure.
        peer: the rank that the failure concerns.
        channel: channel id.
        operation: a description of the operation in progress.
        offset: byte offset of the transfer that failed.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        channel: int | None = None,
        operation: str | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.channel = channel
        self.operation = operation
        self.offset = offset


def renumbered(error: CommunicatorError, ranks: Sequence[int]) -> CommunicatorError:
    """Returns a copy of a communicator's error in which the ranks have another communicator's numbers.

    Args:
        error: the error of the first communicator.
        ranks: for each rank of the first communicator, its number in the other communicator.
    """
    if list(ranks) == list(range(len(ranks))):
        return error
    *others, last = ranks
    places = "0 and 1" if len(ranks) == 2 else f"0 to {len(ranks) - 1}"
    between = f"between ranks {', '.join(map(str, others))} and {last}, which are {places} here" if others else "alone"
    named = copy.copy(error)
    named.args = (f"{between}: {error}",)
    named.rank, named.peer = (None if number is None else ranks[number] for number in (error.rank, error.peer))
    return named


class WaitTimeoutError(CommunicatorError, TimeoutError):
    """A wait, in a kernel or on the CPU, took longer than its timeout."""


class PeerLostError(CommunicatorError):
    """The process of a rank ended."""


class ProxyLostError(CommunicatorError):
    """A rank's proxy hangs, or the node daemon that runs the proxy has ended or does not answer."""


class ContextLostError(CommunicatorError):
    """An error, most often in a kernel, destroyed a rank's GPU context, so the process can't use the GPU again."""


class TransportError(CommunicatorError):
    """A copy or an RDMA work request failed."""


class TriggerError(CommunicatorError):
    """A kernel or a schedule of the proxy used a channel wrongly: with an unused id, a range outside the memory, a
    range that packets can't carry whole, or packet flag 0. The host runtime also raises this error if two threads wait
    on a channel at once.
    """


class HandlerError(CommunicatorError):
    """A proxy's Python handler raised an exception, which on the handler's rank is this error's `__cause__`."""


class MismatchError(CommunicatorError, ValueError):
    """Ranks called a collective with different arguments. `argument` names the argument that differs."""

    def __init__(
        self, message: str, *, argument: str | None = None, rank: int | None = None, peer: int | None = None
    ) -> None:
        super().__init__(message, rank=rank, peer=peer)
        self.argument = argument


class ExchangeError(CommunicatorError):
    """A rank's message in an exchange of the bootstrap can't be decoded. `peer` is the sender's rank."""


class ExcludedError(CommunicatorError):
    """The other ranks shrank the communicator and continue without this rank, which arrived too late."""


class AbortedError(CommunicatorError):
    """Another rank aborted the communicator."""
