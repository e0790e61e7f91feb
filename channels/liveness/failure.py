"""The state of a rank's group: whether the rank can still use the group and, if not, the exception with the reason."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from proxyccl.channels.liveness.watcher import Watcher
from proxyccl.channels.segment.calls import CALL_FIELDS
from proxyccl.channels.segment.control import ControlSegment
from proxyccl.channels.segment.error_record import DIFFERENT_CALL, ErrorRecord, bounded, exception_from
from proxyccl.device._native import lib
from proxyccl.device.errors import (
    ClosedError,
    CommunicatorError,
    MismatchError,
    ProxyLostError,
    SuspendedError,
    WaitTimeoutError,
)
from proxyccl.device.process import forks
from proxyccl.device.process.interrupts import raise_interrupt
from proxyccl.proxy.interface import ProxyFailure

_OWNED = "the communicator"
_LIVE = frozenset({"open", "suspended"})


class Observer:
    """Callbacks that inform reports of a group's failures and of the ranks' exchanges. The methods of this base class
    do nothing.
    """

    def failed(self) -> None:
        """The watcher's thread calls this method when the group has failed."""

    def asked(self) -> None:
        """The watcher's thread calls this method, which must not block, when a peer has asked this process for a
        report."""

    def annotate(self, error: BaseException) -> None:
        """Adds the path of the written report to an exception that is about to be raised."""

    def exchanging(self, purpose: str) -> AbstractContextManager[None]:
        """Returns a context for an exchange, which reports show while it runs and after it has failed."""
        return nullcontext()

    def close(self) -> None:
        """The group calls this method when the group is released."""


def _copied(error: CommunicatorError) -> CommunicatorError:
    """Copies an exception before it is stored or raised, because a raised exception keeps alive the frames that it has
    passed, and the arrays of these frames.
    """
    copied = copy.copy(error)
    if error.__cause__ is not None:  # assigning a cause, even None, would hide the exception's context
        copied.__cause__ = error.__cause__
    return copied


class FailureState:
    """The state of a rank's group: opening, open or closed, and whether any rank has failed.

    Args:
        control: the rank's control segment, whose abort word is set if a rank has failed.
        parent: the failure state of the communicator that this communicator was split from.

    Attributes:
        state: "opening", "open", "suspended" or "closed". A suspended group fails, and can be closed, like an open one.
        resume_on_call: resumes the suspended group for a call that all ranks make; None if such calls raise
            SuspendedError.
        cause: a text about this rank's own failure, for the exception on this rank.
        observer: the callbacks for failures, which do nothing before `watch`.
    """

    def __init__(self, rank: int, control: ControlSegment, parent: FailureState | None = None) -> None:
        self._rank = rank
        self._parent = parent
        self._control = control
        self.state = "opening"
        self.resume_on_call: Callable[[], None] | None = None
        self._process = forks.here()
        self._watcher: Watcher | None = None
        self._stopped_proxy: Callable[[], str] = str
        self._exception: CommunicatorError | None = None
        self._lock = threading.RLock()  # reentrant: a signal handler may call `exception`
        self.cause = ""
        self.observer = Observer()

    def __str__(self) -> str:
        return self.state

    def watch(self, watcher: Watcher, observer: Observer, stopped_proxy: Callable[[], str]) -> None:
        """Opens the group: from this call on, the watcher sends failures to the peers, and the observer reports them.

        Args:
            stopped_proxy: returns a text that describes this rank's proxy process if the process is stopped, otherwise
                "".
        """
        self._watcher, self.observer, self._stopped_proxy = watcher, observer, stopped_proxy
        self.state = "open"

    def suspend(self) -> None:
        """Suspends the open group: until `resume`, `require_usable` raises SuspendedError."""
        self.state = "suspended"

    def resume(self) -> None:
        self.resume_on_call = None
        if self.state == "suspended":  # another thread may have closed the group
            self.state = "open"

    @property
    def suspended(self) -> bool:
        return self.state == "suspended"

    def close(self) -> None:
        """Closes the group: from this call on, `require_usable` raises ClosedError."""
        self.state = "closed"

    def require_own_process(self) -> None:
        """Raises ClosedError if this process is a forked child of the process that made the group."""
        self._process.require(_OWNED)

    @property
    def inherited(self) -> bool:
        """Whether this process is a forked child of the process that made the group."""
        return not self._process.is_here

    @property
    def usable(self) -> bool:
        """Whether the group is open or suspended, and no rank has failed."""
        return self.state in _LIVE and not self._control.aborted

    @property
    def closed(self) -> bool:
        return self.state == "closed"

    @property
    def aborted(self) -> bool:
        """Whether a rank has failed. False once a closed group is released."""
        return self._control.aborted

    def check(self) -> None:
        """If a rank has failed, raises the group's failure. In a forked child process, raises ClosedError."""
        if not self._process.is_here:
            self.require_own_process()
        if self.state != "closed" and self._control.aborted:
            raise self.exception()

    def require_usable(self) -> None:
        """If the group is closed or suspended, raises ClosedError or SuspendedError. If a rank has failed, raises the
        group's failure.
        """
        if self.state == "closed":
            self.require_own_process()
            raise ClosedError("the communicator is closed")
        if self.state in _LIVE and self._control.aborted:
            raise self.exception()
        if self.state == "suspended":
            raise SuspendedError("the communicator is suspended; expected resume on all ranks before this call")

    def require_awake(self) -> None:
        """Checks the group for a call that all ranks make: like `require_usable`, but first resumes a group that was
        suspended with `resume_on_call`, except in a capture. Also raises the errors of `Group.resume`.
        """
        if self.state == "suspended" and self.resume_on_call is not None:
            self.resume_on_call()
        self.require_usable()

    def exception(self) -> CommunicatorError:
        """After a rank has failed, returns a new copy of the group's failure. If the failure is a signal handler's
        exception, raises that exception.
        """
        raise_interrupt()
        with self._lock:
            if self._exception is None:
                self._pass_on()
                self._exception = self._of_parent() or self._of_stopped_proxy(
                    exception_from(self._control.record(), self._rank, self.cause)
                )
            error = _copied(self._exception)
        self.observer.annotate(error)
        return error

    def _of_parent(self) -> CommunicatorError | None:
        if self._parent is None or self._control.record().code != lib.PROXYCCL_ERROR_PARENT:
            return None
        return self._parent.exception() if self._parent.aborted else None

    def find_cause(self) -> None:
        """Determines the exception right after a failure, because a stopped proxy may continue before the exception is
        raised."""
        with self._lock:
            if self._exception is None and self._control.record().code == lib.PROXYCCL_ERROR_TIMEOUT:
                self._exception = self._of_stopped_proxy(exception_from(self._control.record(), self._rank, self.cause))

    def _of_stopped_proxy(self, error: CommunicatorError) -> CommunicatorError:
        """Returns `error` or, if it is a time-out and this rank's proxy is stopped, a ProxyLostError, because the
        stopped proxy is the likely reason for the time-out.
        """
        if not isinstance(error, WaitTimeoutError) or not (stopped := self._stopped_proxy()):
            return error
        message = f"the node daemon of this rank is lost: {stopped}; {error}"
        peer, channel, operation = error.peer, error.channel, error.operation
        return ProxyLostError(message, rank=self._rank, peer=peer, channel=channel, operation=operation)

    def abort(self, reason: str) -> None:
        """Makes the group fail on all ranks, without waiting. Raises ClosedError in a forked child process."""
        self.require_own_process()
        if self.state in _LIVE:
            self.cause = self.cause or reason
            self._control.raise_abort(ErrorRecord(lib.PROXYCCL_ERROR_LOCAL, self._rank, cause=bounded(self.cause)))
            self._pass_on()

    def file_lost_context(self, status: int) -> None:
        """Makes the group fail because an error destroyed this rank's GPU context. `status` is the driver's error
        code."""
        if self.state in _LIVE:
            self._control.raise_abort(ErrorRecord(lib.PROXYCCL_ERROR_CONTEXT_LOST, self._rank, status=status))

    def file_mismatch(
        self, peer: int, cause: Callable[[str, str], str], field: int = CALL_FIELDS.index(DIFFERENT_CALL)
    ) -> None:
        """Makes the group fail because a peer's call differs from this rank's call. Does not wait, because the
        watcher's thread calls this method too.

        Args:
            cause: returns a text that describes both calls. The two arguments are the words for this rank in the text:
                "this rank" and "here" in this rank's error, "rank N" and "on rank N" in other ranks' errors.
            field: the index in CALL_FIELDS of the argument that differs.
        """
        name = f"rank {self._rank}"
        self.cause, elsewhere = cause("this rank", "here"), bounded(cause(name, f"on {name}"))
        self._control.raise_abort(
            ErrorRecord(lib.PROXYCCL_ERROR_MISMATCH, self._rank, peer, wait=field, cause=elsewhere)
        )

    def file_exchange_failure(self, error: CommunicatorError) -> CommunicatorError:
        """Makes the group fail because an exchange failed on this rank. Does nothing if a rank has failed already.

        Returns the exception to raise: `error` or, if it is a time-out and this rank's proxy is stopped, a
        ProxyLostError.
        """
        if self._control.aborted:
            return self._of_stopped_proxy(error)
        error = self._of_stopped_proxy(error)
        codes = {
            WaitTimeoutError: lib.PROXYCCL_ERROR_TIMEOUT,
            MismatchError: lib.PROXYCCL_ERROR_MISMATCH,
            ProxyLostError: lib.PROXYCCL_ERROR_PROXY_LOST,
        }
        code = codes.get(type(error), lib.PROXYCCL_ERROR_LOCAL)
        self._exception, self.cause = _copied(error), str(error)
        self._control.raise_abort(ErrorRecord(code, self._rank, error.peer, cause=bounded(self.cause)))
        self._pass_on()
        self.observer.annotate(error)
        return error

    def file_proxy_failure(self, failure: ProxyFailure) -> None:
        if failure.code == lib.PROXYCCL_ERROR_TRANSPORT and failure.peer is not None and self._watcher is not None:
            self._watcher.check_for_end(failure.peer)
        trigger = failure.trigger
        self.cause = failure.reason
        self._control.raise_abort(
            ErrorRecord(
                code=failure.code,
                rank=self._rank,
                peer=failure.peer,
                wait=failure.wait,
                expected=failure.schedule,
                operation=int(trigger.operation) if trigger else 0,
                channel=failure.channel,
                status=failure.status,
                offset=failure.offset,
                size=trigger.size if trigger else 0,
                cause=bounded(failure.reason),
            )
        )
        with self._lock:
            if self._exception is None:
                self._exception = self._of_parent()
            if self._exception is None:
                self._exception = exception_from(self._control.record(), self._rank, failure.reason)
                self._exception.__cause__ = failure.exception
        self._pass_on()

    def _pass_on(self) -> None:
        # While the group opens, there is no watcher: other ranks notice a failure because their exchange fails.
        if self._watcher is not None:
            self._watcher.pass_on()
