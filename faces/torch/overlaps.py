"""Predicts whether a long call will overlap with the program's computation, to decide how many multiprocessors the call
takes.

The overlap of some calls is measured, and predicts the overlap of later calls of the same kind.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from proxyccl.channels.collectives.request import CTA_POLICIES, CtaPolicy
from proxyccl.channels.collectives.tensor_calls import LONG_BYTES, TensorCalls
from proxyccl.channels.communicator import Communicator
from proxyccl.device.runtime import Event, Runtime
from proxyccl.torch._device_calls import StreamMark
from proxyccl.torch.on_gpu import GroupOnGpu

LEAST_BYTES = 4 << 20
"""The smallest size of a call, in bytes, for which the ranks choose a policy. A shorter call takes at most half of the
multiprocessors.
"""
_FIRST, _BETWEEN = 4, 16
"""The first `_FIRST` calls of a kind are measured, and after them one in `_BETWEEN` calls."""
_SHARE = 0.25
"""A call has overlapped if the program computed for at least this part of the call's time."""
_SURE = 2
"""The largest absolute value of a kind's score: the number of calls that overlapped minus the number that did not. The
limit lets a few calls change a prediction.
"""
_MOST_PENDING = 16
_LATE_SECONDS = 0.002
"""The GPU is late if it has not finished the work that the program had queued this long before, or longer, in seconds.
"""

_Kind = tuple[str, int, str, int]
"""The kind of a call: the collective's name and the bit length of its size, then the same two values for the group's
previous asynchronous call.
"""


class Watched:
    """Measures, by events on streams, how long the program's stream works between a call and the wait for that call."""

    def __init__(self, overlaps: Overlaps, kind: _Kind, stream: int) -> None:
        self._overlaps, self.kind = overlaps, kind
        self._begun, self._ended, self._waited = overlaps.events()
        self._begun.record(stream)
        self._began = time.perf_counter()
        self._idle = 0.0  # milliseconds in which the GPU waited for the CPU

    def issued(self, stream: int) -> None:
        """Records an event at the call's end. The call must be the latest work on the stream."""
        self._ended.record(stream)

    def waits(self) -> None:
        """Records that the program's current stream is about to wait for the call."""
        gpu = self._overlaps.gpu
        stream = gpu.current()
        if gpu.order.is_capturing(stream):
            return
        if self._begun.query():  # the GPU had nothing to do and waited for the CPU
            self._idle = 1e3 * (time.perf_counter() - self._began)
        self._waited.record(stream)
        self._overlaps.pending.append(self)

    def continues(self) -> None:
        """Records the call as overlapping: the program takes the Work's future instead of waiting, as DDP does."""
        self._overlaps.learn(self.kind, computes=True)
        self.give_back()

    def computes(self) -> bool | None:
        """Returns whether the call overlapped with the program's computation; None if the call has not ended yet."""
        if not self._waited.query() or not self._ended.query():
            return None
        return self._waited.elapsed(self._begun) - self._idle >= _SHARE * self._ended.elapsed(self._begun)

    def give_back(self) -> None:
        self._overlaps.idle.append((self._begun, self._ended, self._waited))


class Overlaps:
    """Predicts the overlap of a process group's long calls on one GPU.

    Attributes:
        pending: measured calls whose results have not been read yet.
        idle: events for reuse, three for each measured call.
    """

    def __init__(self, gpu: GroupOnGpu, runtime: Runtime, calls: TensorCalls) -> None:
        self.gpu = gpu
        self._runtime, self._calls = runtime, calls
        self.pending: deque[Watched] = deque(maxlen=_MOST_PENDING)
        self.idle: list[tuple[Event, Event, Event]] = []
        self._shown: defaultdict[_Kind, int] = defaultdict(int)  # scores; see `_SURE`
        self._made: defaultdict[_Kind, int] = defaultdict(int)
        self._before = "", 0
        self._checked: tuple[float, StreamMark | None, bool] = 0.0, None, False  # see `_is_late`

    def choose(
        self, collective: str, nbytes: int, output: Callable[[], int], *, waits: bool
    ) -> tuple[CtaPolicy, Watched | None]:
        """Chooses the policy of the next call (`TensorCalls.choose_policy`), together with the other ranks. Returns the
        policy and, if the call's overlap is to be measured, a `Watched`, else None. `waits` says whether the call is on
        the current stream.
        """
        stream = self.gpu.current()
        watched = None
        if waits:
            beside = stream != 0 and not self.gpu.order.is_capturing(stream)  # as FSDP2's calls
        else:
            size = nbytes.bit_length()
            kind = (collective, size, *self._before)
            self._before = collective, size
            self._made[kind] = number = self._made[kind] + 1
            if number <= _FIRST or number % _BETWEEN == 0:
                self._learn_pending()
                watched = None if self.gpu.order.is_capturing(stream) else Watched(self, kind, stream)
            beside = self._shown[kind] > 0
        late = beside and nbytes >= LONG_BYTES and self._is_late(stream, computing=0 if waits else stream)
        return self._calls.choose_policy(collective, nbytes, beside=beside, late=late, output=output), watched

    def _is_late(self, stream: int, computing: int) -> bool:
        """Returns whether the GPU is late with the work of the program's stream `computing`. `stream` is the current
        stream. Once in `_LATE_SECONDS` at most, checks the work that the program had queued at the last check, because
        a check takes as much of the CPU's time as the rest of a choice.
        """
        if self.gpu.order.is_capturing(stream):
            return False
        now = time.perf_counter()
        began, mark, late = self._checked
        if now - began >= _LATE_SECONDS:
            late = mark is not None and not mark.query()
            self._checked = now, self.gpu.in_c.mark(computing), late
        return late

    def _learn_pending(self) -> None:
        while self.pending:
            try:
                watched = self.pending.popleft()
            except IndexError:  # another thread has taken the last entry
                return
            computes = watched.computes()
            if computes is None:
                self.pending.appendleft(watched)
                return
            self.learn(watched.kind, computes=computes)
            watched.give_back()

    def learn(self, kind: _Kind, *, computes: bool) -> None:
        """Records whether a call of this kind overlapped with the program's computation."""
        self._shown[kind] = max(-_SURE, min(_SURE, self._shown[kind] + (1 if computes else -1)))

    def events(self) -> tuple[Event, Event, Event]:
        try:
            return self.idle.pop()
        except IndexError:
            create: Any = self._runtime.create_event
            return create(), create(), create()


class Choice:
    """The policy of a call on a GPU, and whether the call is measured.

    Args:
        policy: the policy that the ranks chose; None if the communicator decides.
        watched: measures the call's overlap; None if the call is not measured.
        queued: if the ranks choose the policy only when a thread issues the call, the call's size in bytes and a
            function that returns the output's address; otherwise None.

    Attributes:
        name: the call's name, by which C finds the options.
    """

    __slots__ = ("_collective", "_policy", "_queued", "_watched", "name")

    def __init__(
        self,
        collective: str,
        policy: CtaPolicy | None = None,
        watched: Watched | None = None,
        queued: tuple[int, Callable[[], int]] | None = None,
    ) -> None:
        self._collective, self._policy, self._watched, self._queued = collective, policy, watched, queued
        self.name = collective if policy is None else f"{collective}, {policy}"

    def policy(self, comm: Communicator) -> CtaPolicy | None:
        """Returns the policy of a call that is being issued. If the call was queued, first chooses the policy together
        with the other ranks.
        """
        if self._queued is None or not comm.tensor_calls.chooses:
            return self._policy
        nbytes, output = self._queued
        return comm.tensor_calls.choose_policy(self._collective, nbytes, beside=False, late=False, output=output)

    def watch(self, work: Any) -> Any:
        """Returns the call's Work; if `watched` is set, first makes the Work measure the overlap."""
        if self._watched is not None:
            work.watch(self._watched)
        return work


CHOICES = {
    (name, policy): Choice(name, policy)
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    for policy in (None, *CTA_POLICIES)
}
"""The choices of calls that are neither measured nor queued."""
