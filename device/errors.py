"""The exceptions of ProxyCCL.

The exceptions live in the lowest package, so that every package can raise them. An exception that ends a communicator
derives from `CommunicatorError` and names the rank, peer, channel, operation and offset, as far as they are known.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NoReturn


class ProxyCCLError(Exception):
    """Base of all exceptions of this library. Each can be pickled, with its attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[ProxyCCLError], args: tuple[object, ...], attributes: dict[str, Any]) -> ProxyCCLError:
    # Bypasses __init__, whose parameters differ from `args`.
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    if notes := getattr(error, "__notes__", None):
        error.__notes__ = list(notes)  # a separate list for the copy
    return error


def raise_in_place_of(caught: BaseException, error: BaseException) -> NoReturn:
    """Raises `error` with `caught` as its cause; if the two are the same exception, raises that exception again.

    No frame keeps a reference to the error: the error's traceback refers to the frame, and the cycle would keep all
    callers' arrays alive until a garbage collection.
    """
    try:
        if error is caught:
            raise caught
        raise error from caught
    finally:
        del caught, error


class ArgumentError(ProxyCCLError, ValueError):
    """An argument is wrong; the call had no effect. `argument` is its name."""

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(f"{argument}: {message}")
        self.argument = argument


class HandleTypeError(ArgumentError, TypeError):
    """A kernel's argument is a handle of another kind than its parameter takes."""


class UntrustedPathError(ArgumentError):
    """A file or directory belongs to another user, can be changed by another user, or is a link. Its contents were not
    used."""


class AlreadyMappedError(ArgumentError):
    """Memory can't be mapped while this process still maps earlier memory that had the same address at its owner."""


class ResourceError(ProxyCCLError):
    """A limited resource ran out, such as memory ids, channel ids or device memory."""


class CapacityError(ProxyCCLError):
    """More data arrived than a fixed maximum allows. `needed` is the amount of data; nothing was overwritten."""

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


class ClosedError(ProxyCCLError):
    """The object was closed, or its communicator had failed before."""


class ConcurrentCallError(ProxyCCLError, RuntimeError):
    """Another thread of this rank is in a call that only one thread may make at a time.

    The call had no effect. But a collective can't be called again: ranks may have compared the call, so it counts as
    one of the calls that all ranks make in the same order.
    """


class ProtocolError(ProxyCCLError):
    """Another process sent an invalid message. The text names the sender, the field and the expected value."""


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
    """A call into a GPU's driver failed. A kernel's failure may show in any later call.

    Attributes:
        status: the driver's status code.
    """

    def __init__(self, call: str, status: int, meaning: str) -> None:
        super().__init__(f"{call}: {meaning} (status {status})")
        self.status = status


class CommunicatorError(ProxyCCLError):
    """The communicator failed and can't be used. All reachable ranks were notified.

    Attributes are None if they do not apply or are not known.

    Attributes:
        rank: the rank that found the failure.
        peer: the rank that the failure concerns.
        channel: channel id.
        operation: the operation in progress, in words.
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
    """Returns a communicator's error with its ranks renumbered as in another communicator.

    Args:
        error: an error that names ranks by their indices in `ranks`.
        ranks: by index, the ranks' numbers in the other communicator.
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
    """A bounded wait, in a kernel or on the CPU, ran out."""


class PeerLostError(CommunicatorError):
    """The process of a rank ended."""


class ProxyLostError(CommunicatorError):
    """The node daemon that ran a rank's proxy ended or does not answer, or its proxy hangs."""


class ContextLostError(CommunicatorError):
    """An error, most often in a kernel, ended a rank's context on its GPU. The rank's process can no longer use the
    GPU.
    """


class TransportError(CommunicatorError):
    """A copy or a work request failed."""


class TriggerError(CommunicatorError):
    """A kernel pushed a trigger with an unused id or a range outside its memory, passed an SmChannel a range outside
    its memory or one that packets can't carry whole, used packet flag 0, or (host runtime) waited on a channel with two
    threads at once. It is also raised if a schedule of the proxy has an unused id or a range outside its memory.
    """


class HandlerError(CommunicatorError):
    """A Python handler of the proxy raised an exception. On the handler's rank, that exception is this error's
    `__cause__`."""


class MismatchError(CommunicatorError, ValueError):
    """Ranks called a collective with different arguments. `argument` names the argument that differs."""

    def __init__(
        self, message: str, *, argument: str | None = None, rank: int | None = None, peer: int | None = None
    ) -> None:
        super().__init__(message, rank=rank, peer=peer)
        self.argument = argument


class ExchangeError(CommunicatorError):
    """A rank's message in an exchange of the bootstrap can't be read. `peer` is that rank."""


class ExcludedError(CommunicatorError):
    """The other ranks shrank the communicator, and continue without this rank, which arrived too late."""


class AbortedError(CommunicatorError):
    """Another rank ended the communicator for its own reason."""
