"""Exchanges: all-gathers of values, over the bootstrap, or over mailboxes if all ranks share a host.

Ranks use exchanges only to set up memory and connections, so no collective and no transfer waits for one. Each message
names its purpose, so ranks whose programs make different exchanges get an error at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import TypeVar

from proxyccl.channels.joining.bootstrap import Bootstrap
from proxyccl.channels.joining.one_caller import OneCaller
from proxyccl.channels.liveness.failure import FailureState
from proxyccl.channels.liveness.watcher import Watcher
from proxyccl.channels.segment.error_record import DIFFERENT_CALL
from proxyccl.channels.segment.process_descriptors import PeerProcess
from proxyccl.device.errors import (
    AbortedError,
    CommunicatorError,
    ExchangeError,
    MismatchError,
    PeerLostError,
    ProxyCCLError,
    ResourceError,
    raise_in_place_of,
)
from proxyccl.device.memory.descriptors import naming_exhaustion
from proxyccl.proxy.codec import Codec, ProtocolError

T = TypeVar("T")

HANDLE = Codec(bytes, 64 << 10, "memory handle")
FLAG = Codec(bool, 16, "flag")

_FAILED = b"\0failed\0"
"""The beginning of the message of a rank that can't take part; no purpose begins with these bytes."""
_LONGEST_REASON = 2000
_TELLING_SECONDS = 10.0
_TELLING_OPEN_SECONDS = 1.0
"""The longest that `telling` waits once the group is open, in seconds. This time is short because a failure then also
reaches all ranks by other paths."""
_LOOK_SECONDS = 0.02
"""Seconds between a waiting rank's checks whether another rank has left. A check costs as much as a message to each
rank, so shorter intervals would slow down the exchange."""
_RAN_OUT = (ResourceError, OSError, MemoryError)


class Exchange:
    """Makes all-gathers between the ranks of a group. All ranks make the same all-gathers in the same order.

    Args:
        bootstrap: transfers the messages.
        timeout: the longest that an exchange may take, in seconds.
        give_up: called repeatedly while an exchange waits, until `guard` is called; it may raise to end the wait.

    Attributes:
        made: the number of exchanges that this rank has begun.
        processes: by rank, the peers' processes. Before `guard` is called, this rank's wait fails if one of these
            processes ends.
    """

    def __init__(self, bootstrap: Bootstrap, timeout: float, give_up: Callable[[], None] = lambda: None) -> None:
        self.rank = bootstrap.rank
        self.world_size = bootstrap.world_size
        self.timeout = timeout
        self._bootstrap = bootstrap
        self._guard: tuple[FailureState, Watcher] | None = None
        self._give_up = give_up
        self._one_caller = OneCaller()
        self._inside = 0  # the depth of nested `telling` contexts
        self._ended = False
        self._next_look = 0.0
        self.made = 0
        self.processes: Mapping[int, PeerProcess] = {}

    def carry_over(self, bootstrap: Bootstrap) -> None:
        """Makes later exchanges use another bootstrap; all ranks call this together."""
        self._bootstrap = bootstrap

    def guard(self, failure: FailureState, watcher: Watcher) -> None:
        """From this call on, a failure of any rank makes this rank's current exchange fail. The group fails if an
        exchange fails, or if this rank waits in an exchange although a peer has closed the communicator.
        """
        self._guard = failure, watcher

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Returns a context for this rank's work between exchanges: if the work raises an error, the peers' next
        exchange fails with this error. An error that an exchange raises is not sent, because all ranks raise this
        error. After `guard`, only errors about exhausted resources are sent, and the group survives only if all ranks
        send such an error.

        Raises:
            ResourceError: no file descriptor is left.
        """
        self._inside += 1
        try:
            with naming_exhaustion("this rank's part of the communicator"):
                yield
        except CommunicatorError:
            raise
        except Exception as error:
            if self._inside == 1 and (self._guard is None or isinstance(error, _RAN_OUT)):
                self._tell(error)
            raise
        finally:
            self._inside -= 1

    def end(self) -> None:
        """Refuses further exchanges, because the group is closed and its bootstrap may be closed."""
        self._ended = True

    def _tell(self, error: Exception) -> None:
        # If the group was closed, nothing is sent, because the peers already know of the failure.
        if self._ended or (self._guard is not None and self._guard[0].inherited):
            return
        reason = f"{type(error).__name__}: {error}"
        longest = _TELLING_SECONDS if self._guard is None else _TELLING_OPEN_SECONDS
        everyone: list[bytes] = []
        self.made += 1
        # A peer that gets no message notices the failure by its time-out.
        with contextlib.suppress(ProxyCCLError, OSError):
            message = _FAILED + reason.encode()[:_LONGEST_REASON]
            everyone = self._bootstrap.all_gather(message, min(self.timeout, longest), self._give_up_wait)
        in_step = bool(everyone) and all(theirs.startswith(_FAILED) for theirs in everyone)
        if self._guard is not None and not in_step:
            self._guard[0].abort(reason)

    def _give_up_wait(self) -> None:
        if self._guard is None:
            self._give_up()
        else:
            self._guard[0].check()

    def all_gather(self, value: T, codec: Codec[T], purpose: str, timeout: float | None = None) -> list[T]:
        """Returns every rank's value, in rank order.

        Args:
            value: this rank's value.
            codec: encodes values of this type.
            purpose: the exchange's purpose in words, which must be the same on all ranks.
            timeout: the longest wait of this all-gather, in seconds; None for the exchange's time-out.

        Raises:
            WaitTimeoutError: not all ranks arrived within the time-out.
            MismatchError: a peer calls this with another purpose, or has closed the communicator.
            ExchangeError: `codec` can't decode a rank's message; the error names the rank.
            PeerLostError: before `guard` is called, a rank's process has ended.
            CommunicatorError: a rank has failed.
        """
        everyone = self.all_gather_bytes(codec.encode(value), purpose, timeout)
        return [self._decode(data, codec, purpose, peer) for peer, data in enumerate(everyone)]

    def _decode(self, data: bytes, codec: Codec[T], purpose: str, peer: int) -> T:
        try:
            return codec.decode(data, f"rank {peer}")
        except ProtocolError as cause:
            raise self._file(
                ExchangeError(f"{purpose}: {cause}", rank=self.rank, peer=peer, operation="bootstrap")
            ) from cause

    def barrier(self, purpose: str) -> None:
        """Waits until all ranks have made this call. Raises the errors of `all_gather`."""
        self.all_gather_bytes(b"", purpose)

    def all_gather_bytes(self, data: bytes, purpose: str, timeout: float | None = None) -> list[bytes]:
        """Returns every rank's bytes. Raises the errors of `all_gather`, ConcurrentCallError if another thread is in an
        exchange, and ClosedError in a forked child process.
        """
        if self._guard is not None:
            self._guard[0].require_own_process()
        tag = purpose.encode() + b"\0"
        with self._one_caller.only(purpose):
            self.made += 1
            observing = nullcontext() if self._guard is None else self._guard[0].observer.exchanging(purpose)
            try:
                with observing:
                    longest = self.timeout if timeout is None else timeout
                    everyone = self._bootstrap.all_gather(tag + data, longest, lambda: self._check(purpose))
                    self._require_purpose(everyone, purpose, tag)
            except CommunicatorError as error:
                raise_in_place_of(error, self._file(error))
            except BaseException as error:  # raised by a signal handler; this rank has missed an exchange
                if self._guard is not None:
                    self._guard[0].abort(f"{purpose} was interrupted by {type(error).__name__}")
                raise
        return [theirs[len(tag) :] for theirs in everyone]

    def _require_purpose(self, everyone: list[bytes], purpose: str, tag: bytes) -> None:
        for peer, theirs in enumerate(everyone):
            if theirs.startswith(_FAILED):
                reason = theirs.removeprefix(_FAILED).decode(errors="replace")
                message = f"{purpose}: rank {peer} can't take part: {reason}"
                raise AbortedError(message, rank=peer, operation="bootstrap")
            if not theirs.startswith(tag):
                there = theirs.partition(b"\0")[0][:100].decode(errors="replace")
                raise self._mismatch(peer, purpose, there)

    def _check(self, purpose: str) -> None:
        self._give_up_wait()
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        if self._guard is None:
            self.require_processes(purpose)
            return
        _, watcher = self._guard
        peer = watcher.left_before(self.made)
        if peer is not None:
            raise self._mismatch(peer, purpose, None)

    def require_processes(self, purpose: str) -> None:
        """Raises PeerLostError if one of `processes` has ended."""
        for peer, process in self.processes.items():
            try:
                has_ended = process.is_ending
            except OSError:  # no descriptor is left to look at the process
                has_ended = False
            if has_ended:
                message = f"{purpose}: the process of rank {peer} has ended"
                raise PeerLostError(message, rank=self.rank, peer=peer, operation="bootstrap")

    def _mismatch(self, peer: int, purpose: str, there: str | None) -> CommunicatorError:
        def cause(this_rank: str, here: str) -> str:
            if there is None:
                return f"{this_rank} calls {purpose!r}, and rank {peer} has closed the communicator"
            return f"{this_rank} and rank {peer} make different calls: {purpose!r} {here}, {there!r} on rank {peer}"

        if self._guard is not None:
            self._guard[0].file_mismatch(peer, cause)
            return self._guard[0].exception()
        message = f"{DIFFERENT_CALL}: {cause('this rank', 'here')}"
        return MismatchError(message, argument=DIFFERENT_CALL, rank=self.rank, peer=peer)

    def _file(self, error: CommunicatorError) -> CommunicatorError:
        return error if self._guard is None else self._guard[0].file_exchange_failure(error)
