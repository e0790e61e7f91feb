"""The results of a process group's calls: torch's Work, for CPU tensors and for a device's."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from proxyccl.device import forks
from proxyccl.device.errors import DriverError
from proxyccl.device.gpu.stream_order import StreamMark
from proxyccl.torch.errors import as_torch_error, raise_as_torch, torch_errors
from proxyccl.torch.on_gpu import GroupOnGpu
from proxyccl.torch.unwaited import Unwaited

_NO_LIMIT = timedelta(0)
_LEAST = timedelta(microseconds=1)
_POLL_SECONDS = 2e-4
_futures = threading.Lock()
"""Held while a GPU's call is given a future, which happens too rarely for a lock in each Work."""
forks.hold_while_forking(_futures)


class _KeptWork(dist.Work):
    """A Work that may be kept until it is waited for.

    Attributes:
        _unwaited: where it is kept, or None. Its `forget` is called when this is waited for.
    """

    __slots__ = ("_unwaited",)
    _unwaited: Unwaited | None

    def keep_in(self, unwaited: Unwaited) -> None:
        """Has `forget` of `unwaited` be called when this is waited for."""
        self._unwaited = unwaited

    def _forget(self) -> None:
        if self._unwaited is not None:
            self._unwaited.forget(self)


def _require_process(process: forks.Process, ended: threading.Event) -> None:
    """Refuses a wait for `ended` in a fork's child, where no thread sets it."""
    if not ended.is_set():
        with torch_errors():
            process.require("the call")


class HostWork(_KeptWork):
    """A call on CPU tensors. It is done when `finish` was called.

    Args:
        result: the tensors that it writes.
        source: the rank that sends to it; -1 for none.
    """

    def __init__(self, result: Sequence[torch.Tensor], source: int = -1) -> None:
        super().__init__()
        self._process = forks.here()
        self._unwaited = None
        self._result = list(result)
        self._source = source
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._future: Any = None
        self._completed: Any = None

    def finish(self, error: BaseException | None = None) -> None:
        """Ends it, with an error or with success."""
        with self._lock:
            self._error = None if error is None else as_torch_error(error)
            self._done.set()
            completed = self._completed
        if completed is not None:
            completed.set_result(None)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Waits for the end. Raises the call's error.

        Raises:
            RuntimeError: it did not end within the time.
        """
        _require_process(self._process, self._done)
        self._forget()
        seconds = timeout.total_seconds()
        if not self._done.wait(seconds if 0 < seconds < threading.TIMEOUT_MAX else None):
            raise _timed_out(timeout)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Waits for the end."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call has ended, possibly with an error."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether it has ended successfully."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """What it raised."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that it writes."""
        return self._result

    def source_rank(self) -> int:
        """The rank that sends to it."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A future of `result`."""
        with self._lock:
            if self._future is not None:
                return self._future
            completed = torch.futures.Future()
            # torch's C++ sees a future's error only if `then` has raised it.
            self._future = completed.then(self._future_value)
            if not self._done.is_set():
                self._completed = completed  # for `finish`
                return self._future
        completed.set_result(None)
        return self._future

    def _future_value(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise RuntimeError(str(self._error))
        return self._result


class DeviceWork(_KeptWork):
    """A call that is queued on a stream of a GPU.

    Nothing that only some callers need is made before they ask. The tensors of a call on the group's own stream are
    kept until the caller's stream waits for the call; if nobody has waited, their memory is then marked as used there.

    Args:
        result: the tensors that it writes.
        gpu: the GPU, with the group's own stream.
        stream: the handle of the call's stream.
        end: marks the call's end on the group's own stream; None for a call on the stream that was current, which the
            program's later work follows anyway.
        check: raises the error that ended the communicator.
        tensors: those that the group's own stream uses, and that nobody has recorded there.
        blocks: whether `wait` waits for the call's end on the CPU, too.
        error: the error of marking the end.
    """

    __slots__ = ("_blocks", "_check", "_end", "_error", "_future", "_gpu", "_result", "_stream", "_unrecorded")
    _source = -1

    def __init__(
        self,
        result: Sequence[torch.Tensor],
        gpu: GroupOnGpu,
        stream: int,
        end: StreamMark | None,
        check: Callable[[], None],
        tensors: Sequence[torch.Tensor] = (),
        *,
        blocks: bool = False,
        error: BaseException | None = None,
    ) -> None:
        dist.Work.__init__(self)
        self._unwaited = None
        self._result = result
        self._gpu = gpu
        self._stream = stream
        self._end = end
        self._check = check
        self._unrecorded = tensors
        self._blocks = blocks
        self._error = error
        self._future: Any = None

    def __del__(self) -> None:
        # What the caller's stream does not wait for may still be used when its memory is free for another tensor.
        for tensor in self._unrecorded:
            tensor.record_stream(self._gpu.torch_stream(self._stream))

    def raise_failure(self) -> None:
        """Raises the error that kept the call from its stream, if one has."""
        if self._error is not None:
            raise self._error

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Makes the current stream wait. Raises the error that ended the communicator, if it is known.

        With a time-out the host waits too, for the end of the call.

        Raises:
            RuntimeError: it did not end within the time.
        """
        self._forget()
        if self._error is not None:
            raise self._error
        try:
            if timeout > _NO_LIMIT:
                self._wait_on_host(time.monotonic() + timeout.total_seconds(), timeout)
            elif self._blocks:
                self._wait_on_host(math.inf, timeout)
            self._check()
            if self._end is not None:
                self._end.hold(self._gpu.current())
                self._unrecorded = ()
        except Exception as error:
            raise_as_torch(error)
        return True

    def _wait_on_host(self, deadline: float, timeout: timedelta) -> None:
        end = self._end if self._end is not None else self._gpu.order.mark(self._stream)
        while not end.query():
            if time.monotonic() > deadline:
                raise _timed_out(timeout)
            time.sleep(_POLL_SECONDS)

    def synchronize(self) -> None:
        """Makes the current stream wait."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the device has done the call, or an error has ended it."""
        if self._error is not None:
            return True
        with torch_errors():
            return (self._end if self._end is not None else self._gpu.order.mark(self._stream)).query()

    def is_success(self) -> bool:
        """Whether the device has done the call, and the communicator can still be used."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error that kept the call from its stream, or ended the communicator."""
        if self._error is not None:
            return self._error
        try:
            self._check()
        except Exception as error:
            return as_torch_error(error)
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors that it writes."""
        return list(self._result)

    def source_rank(self) -> int:
        """The rank that sends to it."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A future of `result`, whose callbacks run on streams that wait for the call."""
        with _futures:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future(devices=[self._gpu.device])
            issued = self._is_issued()
        if issued:
            self._complete(future)
        return future

    def _is_issued(self) -> bool:
        return True

    def _complete(self, future: Any) -> None:
        if self._error is not None:
            future.set_exception(self._error)
            return
        with torch.cuda.stream(self._gpu.torch_stream(self._stream)):
            future.set_result(self.result())


class TransferWork(DeviceWork):
    """A transfer, which a stream of a GPU holds once `issued` was called.

    Args:
        result, gpu, stream, check: as for `DeviceWork`.
        source: the rank that sends to it; -1 for none.
    """

    __slots__ = ("_issued", "_process", "_source")

    def __init__(
        self, result: Sequence[torch.Tensor], gpu: GroupOnGpu, stream: int, check: Callable[[], None], source: int
    ) -> None:
        super().__init__(result, gpu, stream, None, check)
        self._process = forks.here()
        self._source = source
        self._issued = threading.Event()

    def issued(self, error: BaseException | None = None) -> None:
        """Records that the transfer is queued on the stream, or the error that kept it from being queued."""
        if error is None:
            try:
                self._end = self._gpu.order.mark(self._stream)
            except DriverError as failure:  # the device's context is lost
                error = failure
        with _futures:
            self._error = None if error is None else as_torch_error(error)
            self._issued.set()
            future = self._future
        if future is not None:
            self._complete(future)

    def has_passed(self) -> bool:
        """Whether the stream has got past it."""
        return self._end is not None and self._end.query()

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """As `DeviceWork.wait`. First it waits until the transfer is issued: for the peer of a first transfer, at most
        for the group's time-out.
        """
        begin = time.monotonic()
        _require_process(self._process, self._issued)
        has_limit = timeout > _NO_LIMIT
        if not self._issued.wait(min(timeout.total_seconds(), threading.TIMEOUT_MAX) if has_limit else None):
            raise _timed_out(timeout)
        if has_limit:
            self.raise_failure()
            with torch_errors():
                self._wait_on_host(begin + timeout.total_seconds(), timeout)
        return super().wait()

    def is_completed(self) -> bool:
        """Whether the device has done the transfer, or an error has ended it."""
        return self._issued.is_set() and super().is_completed()

    def _is_issued(self) -> bool:
        return self._issued.is_set()


def _timed_out(timeout: timedelta) -> RuntimeError:
    return RuntimeError(f"Timed out: the call did not end within {timeout.total_seconds():g} s")


class JointWork(_KeptWork):
    """Several calls, which end together.

    Args:
        works: the Work of each.
    """

    def __init__(self, works: Sequence[DeviceWork | HostWork | JointWork]) -> None:
        super().__init__()
        self._unwaited = None
        self._works = list(works)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Waits for all of them, each in its own way. The time-out covers all together."""
        self._forget()
        deadline = time.monotonic() + timeout.total_seconds() if timeout > _NO_LIMIT else None
        for work in self._works:
            left = timeout if deadline is None else max(timedelta(seconds=deadline - time.monotonic()), _LEAST)
            work.wait(left)
        return True

    def synchronize(self) -> None:
        """Waits for all of them."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether all have ended, possibly with errors."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all have ended successfully."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """The first error."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        """The tensors that they write."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Any:
        """A future of `result`."""
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(self._future_value)

    def _future_value(self, ended: Any) -> list[torch.Tensor]:
        return [tensor for future in ended.value() for tensor in future.value()]
