"""Implements torch's Work, which asynchronous calls of a process group return."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch._jit_internal
import torch.distributed as dist
from proxyccl.device.process import forks
from proxyccl.torch._device_calls import QueuedCall, StreamMark
from proxyccl.torch.errors import as_torch_error, raise_as_torch, torch_errors
from proxyccl.torch.executor import Executor
from proxyccl.torch.on_gpu import wait_on_host
from proxyccl.torch.wrapped_work import registered
from proxyccl.torch_tensors.untraced import untraced

_NO_LIMIT = timedelta(0)
_LEAST = timedelta(microseconds=1)
_futures = threading.Lock()
"""Held while a future is made for a call on a GPU. Programs rarely ask for futures, so all calls share one lock."""
forks.hold_while_forking(_futures)
_MOST_UNWAITED, _MOST_ASKED_FOR = 64, 64  # a number of Works, and of elements of a result
_PLAIN_TENSOR = frozenset((torch.Tensor,))
_extract_by_pickling: Any = getattr(torch._jit_internal, "_extract_tensors", None)


def _extract_tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in the value of a future. Replaces torch's function, by which a GPU's future finds the
    devices of its value. torch's function pickles the value. For the result of a Work, which is a list of tensors,
    pickling would take a third of the CPU's time of DDP's calls.
    """
    if type(value) is list and _PLAIN_TENSOR.issuperset(map(type, value)):
        return value
    found: list[torch.Tensor] = _extract_by_pickling(value)
    return found


torch._jit_internal._extract_tensors = _extract_tensors


class Unwaited:
    """Keeps alive a group's latest Works for which the program has not waited. Each Work keeps tensors alive, so only
    `_MOST_UNWAITED` Works are kept.

    Before torch 2.15, if a program passes a Work to torch's C++ code, as DDP's `join` does, only the Work's C++ part
    stays alive. Once the Python part is freed, the C++ code does not find `wait`, and waits forever.

    The methods need no lock, because each step is one atomic operation on a dict or a list.
    """

    def __init__(self) -> None:
        self._works: OrderedDict[int, _KeptWork] = OrderedDict()
        self._waited_for: list[_KeptWork] = []

    def add(self, work: _KeptWork) -> None:
        """Keeps a Work until the program waits for it or asks for its future, or until many newer Works are kept."""
        work._unwaited = self
        works = self._works
        while self._waited_for:
            try:
                waited_for = self._waited_for.pop()
            except IndexError:  # another thread took the entry
                break
            works.pop(id(waited_for), None)
        works[id(work)] = work
        if len(works) > _MOST_UNWAITED:
            works.popitem(last=False)

    def drop(self, work: _KeptWork) -> None:
        """Drops a Work now. DDP asks for the future of each call, and does not use the Work afterwards. A Work that is
        freed now costs less of the CPU's time than one that is freed many calls later, when the CPU's caches no longer
        hold it.
        """
        self._works.pop(id(work), None)

    def forget(self, work: _KeptWork) -> None:
        """Drops a Work for which the program waits. If the result is small, only the next `add` drops the Work, because
        C++ code that has waited, such as DDP's `join`, may then ask for a small result.
        """
        if id(work) in self._works:
            if sum(tensor.numel() for tensor in work.result()) <= _MOST_ASKED_FOR:
                self._waited_for.append(work)
            else:
                self.drop(work)


@untraced
class _KeptWork(dist.Work):
    __slots__ = ("_unwaited",)
    _unwaited: Unwaited | None

    def synchronize(self) -> None:
        self.wait()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def get_future(self) -> Any:
        """Returns a future of the call's result."""
        future = registered(self)
        if future is None:
            future = self._make_future()
            if self._unwaited is not None:
                self._unwaited.drop(self)
        return future

    def _make_future(self) -> Any:
        raise NotImplementedError

    def _gpus(self) -> set[torch.device]:
        """Returns the GPUs on which the calls run."""
        return set()

    def _forget(self) -> None:
        if self._unwaited is not None:
            self._unwaited.forget(self)


def _require_process(process: forks.Process, ended: threading.Event) -> None:
    """Raises an error in a forked child, where no thread sets `ended`."""
    if not ended.is_set():
        with torch_errors():
            process.require("the call")


@untraced
class HostWork(_KeptWork):
    """The Work of a call on CPU tensors. The call ends when `finish` is called. `callbacks` is the thread that
    completes the call's future. `source` is the rank that sends a receive's data; -1 for other calls.
    """

    def __init__(self, result: Sequence[torch.Tensor], callbacks: Executor, source: int = -1) -> None:
        super().__init__()
        self._process = forks.here()
        self._unwaited = None
        self._result = list(result)
        self._callbacks = callbacks
        self._source = source
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._future: Any = None
        self._completed: Any = None

    def finish(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._error = None if error is None else as_torch_error(error)
            self._done.set()
            completed = self._completed
        if completed is not None:
            self._callbacks.submit(functools.partial(completed.set_result, None))

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Waits for the end of the call, and raises the call's error, or RuntimeError after the time-out."""
        _require_process(self._process, self._done)
        self._forget()
        seconds = timeout.total_seconds()
        if not self._done.wait(seconds if 0 < seconds < threading.TIMEOUT_MAX else None):
            raise _timed_out(timeout)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._result

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def _make_future(self) -> Any:
        with self._lock:
            if self._future is not None:
                return self._future
            done = self._done.is_set()
            if not done:
                self._callbacks.start()  # starts the thread now, so that a failed start raises an error here
            completed = torch._C.Future([])
            # torch's C++ sees a future's error only if `then` has raised it.
            self._future = completed.then(self._future_value)
            if not done:
                self._completed = completed  # `finish` will complete the future
                return self._future
        completed.set_result(None)
        return self._future

    def _future_value(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise RuntimeError(str(self._error))
        return self._result


@untraced
class DeviceWork(_KeptWork):
    """The Work of a call that is queued on a stream of a GPU.

    The Work keeps the tensors alive until the caller's stream waits for the call. If the Work is freed without such a
    wait, torch's allocator is told that the call's stream uses the tensors' memory. The constructor has no arguments,
    so that `CallIssuer` can make a Work in C.
    """

    __slots__ = ("_call",)
    _call: QueuedCall

    @classmethod
    def of(cls, call: QueuedCall) -> Self:
        work = cls()
        work._call = call
        work._unwaited = None
        return work

    def raise_failure(self) -> None:
        """If an error prevented the call from being queued, raises this error."""
        if self._call.error is not None:
            raise_as_torch(self._call.error)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Makes the current stream wait for the call. If the communicator has failed, raises the failure.

        If `timeout` is positive, also blocks the host until the call has ended. Raises RuntimeError if the call did not
        end within the time-out.
        """
        if self._unwaited is not None:
            self._unwaited.forget(self)
        call = self._call
        try:
            if timeout is not _NO_LIMIT and timeout > _NO_LIMIT:
                self._wait_on_host(time.monotonic() + timeout.total_seconds(), timeout)
            elif call.blocks:
                self._wait_on_host(math.inf, timeout)
            call.hold()
        except Exception as error:
            raise_as_torch(error)
        return True

    def _wait_on_host(self, deadline: float, timeout: timedelta) -> None:
        self.raise_failure()
        if not wait_on_host(self._query, deadline):
            raise _timed_out(timeout)

    def _query(self) -> bool:
        return self._call.mark is not None and self._call.mark.query()

    def is_completed(self) -> bool:
        """Returns whether the device has completed the call or an error prevented the call from being queued."""
        if self._call.error is not None:
            return True
        with torch_errors():
            return self._query()

    def exception(self) -> BaseException | None:
        """Returns the error that prevented the call's queueing, or else the communicator's failure, or None."""
        try:
            self._call.check()
        except Exception as error:
            return as_torch_error(error)
        return None

    def result(self) -> list[torch.Tensor]:
        return self._call.outputs()

    def source_rank(self) -> int:
        return self._call.source

    _source_rank = source_rank

    def _gpus(self) -> set[torch.device]:
        return {self._call.gpu.owner.device}

    def _make_future(self) -> Any:
        """Returns a future of the call's result. During its callbacks, the current stream waits for the call."""
        call = self._call
        with _futures:
            if call.future is not None:
                return call.future
            # torch's own backends return this type too; its subclass torch.futures.Future takes twice as long to make.
            completed = torch._C.Future([call.gpu.owner.device])
            issued = self._note(completed)
            if issued and call.error is None:
                call.future = completed
            else:  # the call may fail, and torch's C++ sees a future's error only if `then` has raised it
                call.future = completed.then(self._future_value)
        if issued:
            self._complete(completed)
        return call.future

    def _note(self, _: Any) -> bool:
        """Returns whether the call is issued. Otherwise keeps the future, which will be completed later."""
        return True

    def _complete(self, completed: Any) -> None:
        call = self._call
        call.gpu.owner.call_on(call.stream, completed.set_result, self.result() if call.error is None else [])

    def _future_value(self, completed: Any) -> list[torch.Tensor]:
        if self._call.error is not None:
            raise RuntimeError(str(as_torch_error(self._call.error)))
        result: list[torch.Tensor] = completed.value()
        return result


@untraced
class TransferWork(DeviceWork):
    """The Work of a call that a thread may have to queue later, when the call's communicator exists. Most of these
    calls are transfers. Once `issued` was called, the call is queued on a stream of a GPU.
    """

    __slots__ = ("_callbacks", "_completed", "_issued", "_process", "marks")
    marks: list[StreamMark]  # a list that is empty until the call is queued, and then holds the mark of the call's end
    _callbacks: Executor
    _completed: Any  # the future that `issued` completes; None if nobody has asked for a future
    _issued: threading.Event
    _process: forks.Process

    @classmethod
    def of_transfer(cls, call: QueuedCall, callbacks: Executor) -> Self:
        """Makes the Work of a call. `callbacks` is the thread that completes the call's future."""
        work = cls.of(call)
        work.marks = []
        work._callbacks = callbacks
        work._completed = None
        work._process = forks.here()
        work._issued = threading.Event()
        return work

    def issued(self, error: BaseException | None = None) -> None:
        """Records that the call has been queued on the stream, or could not be queued because of `error`."""
        call = self._call
        if error is None:
            call.mark_end()
            if call.mark is not None:
                self.marks.append(call.mark)
        with _futures:
            if error is not None:
                call.error = error
            self._issued.set()
            completed = self._completed
        if completed is not None:
            self._callbacks.submit(functools.partial(self._complete, completed))

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Blocks the host until the call is issued; if the communicator does not exist yet, this may take up to the
        group's time-out. Once the call is issued, waits as `DeviceWork.wait` does.
        """
        begin = time.monotonic()
        _require_process(self._process, self._issued)
        has_limit = timeout > _NO_LIMIT
        if not self._issued.wait(min(timeout.total_seconds(), threading.TIMEOUT_MAX) if has_limit else None):
            raise _timed_out(timeout)
        if has_limit:
            with torch_errors():
                self._wait_on_host(begin + timeout.total_seconds(), timeout)
        return super().wait()

    def is_completed(self) -> bool:
        return self._issued.is_set() and super().is_completed()

    def _make_future(self) -> Any:
        """Returns `DeviceWork`'s future; if the call is not issued yet, a thread of the group runs the callbacks."""
        if not self._issued.is_set():
            self._callbacks.start()  # starts the thread now, so that a failed start raises an error here
        return super()._make_future()

    def _note(self, completed: Any) -> bool:
        if not self._issued.is_set():
            self._completed = completed
        return self._issued.is_set()


def _timed_out(timeout: timedelta) -> RuntimeError:
    return RuntimeError(f"Timed out: the call did not end within {timeout.total_seconds():g} s")


@untraced
class JointWork(_KeptWork):
    """One Work for several calls."""

    def __init__(self, works: Sequence[DeviceWork | HostWork | JointWork]) -> None:
        super().__init__()
        self._unwaited = None
        self._works = list(works)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Calls `wait` of each Work. The time-out bounds the total time."""
        self._forget()
        deadline = time.monotonic() + timeout.total_seconds() if timeout > _NO_LIMIT else None
        for work in self._works:
            left = timeout if deadline is None else max(timedelta(seconds=deadline - time.monotonic()), _LEAST)
            work.wait(left)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def _gpus(self) -> set[torch.device]:
        return set().union(*(work._gpus() for work in self._works))

    def _make_future(self) -> Any:
        """Returns a future of all results. During its callbacks, the current streams wait for the calls."""
        ended = torch._C.Future(sorted(self._gpus(), key=str))
        if self._gpus() and torch.cuda.is_current_stream_capturing():
            self.wait()  # torch would call `then`'s function on a stream that only a wait for the future joins
            ended.set_result(self.result())
            return ended
        futures = [work.get_future() for work in self._works]
        joint = ended.then(lambda _: [tensor for future in futures for tensor in future.wait()])
        # The future of `collect_all` has no devices, so no stream waits in its callbacks.
        torch.futures.collect_all(futures).add_done_callback(lambda _: ended.set_result(None))
        return joint
