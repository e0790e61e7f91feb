"""ElasticBuffer's sessions: all-gathers whose results stay in the buffer's memory until the session ends."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from proxyccl.channels.communicator import Communicator
from proxyccl.channels.expert_parallel.arguments import whole_number
from proxyccl.channels.expert_parallel.geometry import aligned
from proxyccl.channels.memory import RegisteredMemory
from proxyccl.deep_ep.arguments import bytes_of
from proxyccl.deep_ep.config import ELASTIC_ALIGNMENT, MOST_BYTES
from proxyccl.deep_ep.connected import ElasticBase
from proxyccl.device.errors import ArgumentError

_ALIGNMENT = 32
_MOST_GATHERS = 32

Shape = Sequence[int]
Handle = Callable[[], None]


class SessionCalls(ElasticBase):
    """The calls for sessions. In a session, the proxies make all-gathers on the buffer's stream."""

    _gathered: RegisteredMemory | None = None  # the memory of the results
    _bytes: torch.Tensor | None = None  # a view of that memory as a tensor of bytes
    _most_session_bytes = _most_gathers = 0
    _session = 0
    _in_session = False
    _offset = _gathers = 0  # in the current session: bytes used, number of calls of all_gather
    _awaited: list[torch.cuda.Event]  # events after gathers whose handles were not called yet

    @staticmethod
    def get_agrs_num_max_session_bytes(group: Any, shapes: Shape | Sequence[Shape], dtype: torch.dtype) -> int:
        """Returns the number of bytes that all-gathers of tensors of these shapes take in a session.

        Args:
            group: the group of ranks; see `ElasticBuffer`.
            shapes: the shape of one rank's tensor, or a sequence of shapes for several tensors.
            dtype: the type of the tensors' elements.
        """
        sizes = _sizes(shapes, dtype)[1]
        return sum(aligned(size_of(group) * nbytes, _ALIGNMENT) for nbytes in sizes)

    @staticmethod
    def get_agrs_buffer_size_hint(group: Any, num_max_session_bytes: int) -> int:
        """Returns the smallest `num_bytes` with which a buffer has room for sessions of this many bytes: a multiple of
        2 MiB.

        Raises:
            ArgumentError: the number is not an integer, or negative.
        """
        return aligned(whole_number("num_max_session_bytes", num_max_session_bytes, 0, MOST_BYTES), ELASTIC_ALIGNMENT)

    def agrs_set_config(self, num_max_session_bytes: int, num_max_all_gathers_per_session: int) -> None:
        """Allocates the memory of sessions. All ranks make this call together, with the same arguments. The CPU waits
        for the earlier work of all ranks.

        Args:
            num_max_session_bytes: the largest number of bytes that the results of a session's all-gathers take
                together; see `get_agrs_num_max_session_bytes`.
            num_max_all_gathers_per_session: the largest number of calls of `all_gather` in a session, at most 32.

        Raises:
            ArgumentError: a number is out of range or more than `num_bytes`, a session is open, or the group has only
                one rank.
            CommunicatorError: a peer failed; see its subclasses.
        """
        self._usable()
        nbytes = aligned(whole_number("num_max_session_bytes", num_max_session_bytes, 1, MOST_BYTES), _ALIGNMENT)
        most = whole_number("num_max_all_gathers_per_session", num_max_all_gathers_per_session, 1, _MOST_GATHERS)
        if int(num_max_session_bytes) > self.num_bytes:
            raise ArgumentError(
                "num_max_session_bytes", f"is {num_max_session_bytes}; num_bytes of the buffer is {self.num_bytes}"
            )
        if self.num_ranks == 1:
            raise ArgumentError("group", "has one rank; sessions need two")
        self._require_session(is_open=False)
        self.barrier(with_cpu_sync=True)
        if self._gathered is None or self._gathered.nbytes < nbytes:
            self._close_sessions()
            array = self.communicator.empty(nbytes, "uint8")
            self._gathered = self.communicator.register(array)
            self._bytes = torch.from_dlpack(array)
        self._most_session_bytes, self._most_gathers = nbytes, most

    def create_agrs_session(self) -> None:
        """Begins a session. Raises ArgumentError if a session is open already."""
        self._usable()
        self._require_session(is_open=False)
        self._in_session, self._session = True, self._session + 1
        self._offset = self._gathers = 0
        self._awaited = []

    def destroy_agrs_session(self) -> None:
        """Ends the session. The next session may overwrite the results as soon as the current stream of this rank has
        reached this call. Raises ArgumentError if no session is open.
        """
        self._usable()
        self._require_session(is_open=True)
        self._in_session = False
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            for event in self._awaited:  # writes to the next session's in-place tensors must come later
                event.wait()

    @contextlib.contextmanager
    def agrs_new_session(self, enabled: bool = True) -> Iterator[None]:
        """A context manager that begins a session and ends it after the block; without effect if `enabled` is False."""
        if not enabled:
            yield
            return
        self.create_agrs_session()
        try:
            yield
        finally:
            self.destroy_agrs_session()

    def agrs_get_inplace_tensor(
        self, shapes: Shape | Sequence[Shape], dtype: torch.dtype
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Returns this rank's part of the results of the next `all_gather`. If the caller writes its tensors into this
        part, `all_gather` need not copy them.

        Args:
            shapes: the shape of this rank's tensor for the next call of `all_gather`, or a sequence of shapes for
                several tensors, in order.
            dtype: the type of the tensors' elements.

        Returns:
            A tensor, or for a sequence of shapes a tuple of tensors.

        Raises:
            ArgumentError: no session is open, or the session has no room for the results.
        """
        batched, sizes = _sizes(shapes, dtype)
        given: Any = shapes if batched else (shapes,)
        places = self._places("shapes", sizes)
        tensors = tuple(
            self._part(begin + self.rank_idx * nbytes, nbytes).view(dtype).view(tuple(shape))
            for begin, nbytes, shape in zip(places, sizes, given, strict=True)
        )
        return tensors if batched else tensors[0]

    def all_gather(self, t: torch.Tensor | Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Gathers tensors of all ranks. All ranks make this call together, with tensors of the same shapes and types.

        The tensors are read on the buffer's stream, after the work that is queued on the current stream.

        Args:
            t: a contiguous tensor, or a sequence of such tensors. Tensors that `agrs_get_inplace_tensor` returned are
                not copied.

        Returns:
            A tuple: for each tensor a result of shape [num_ranks, …], which is valid until the session ends, and then a
            handle. Calling the handle makes the current stream wait for the results.

        Raises:
            ArgumentError: an argument is wrong, no session is open, or the session has no room for the results.
            MismatchError: another rank gathers tensors of other sizes.
            CommunicatorError: a peer failed; see its subclasses.
        """
        given = (t,) if isinstance(t, torch.Tensor) else tuple(t)
        flat = [bytes_of(self.communicator.group, "t", each)[0] for each in given]
        places = self._places("t", [len(each) for each in flat])
        for each, begin in zip(flat, places, strict=True):
            self._require_place(each, begin)
        current = self._current_stream()
        if self._stream is not None:
            self._stream.wait_stream(current)
        results = []
        with torch.no_grad(), contextlib.nullcontext() if current is None else torch.cuda.stream(self._stream):
            for tensor, each, begin in zip(given, flat, places, strict=True):
                own = self._placed(each, begin)
                whole = self._part(begin, self.num_ranks * len(each))
                if len(each):
                    self.communicator.all_gather(own, out=whole, algorithm="proxy", stream=self._stream)
                results.append(whole.view(tensor.dtype).view(self.num_ranks, *tensor.shape))
        last = places[-1] + self.num_ranks * len(flat[-1])
        self._offset, self._gathers = aligned(last, _ALIGNMENT), self._gathers + 1
        return *results, self._handle(current)

    def _placed(self, mine: torch.Tensor, begin: int) -> torch.Tensor:
        """Copies a tensor to this rank's part of a result, and returns the part."""
        own = self._part(begin + self.rank_idx * len(mine), len(mine))
        if len(mine) and mine.data_ptr() != own.data_ptr():
            own.copy_(mine)
            if self._stream is not None and not torch.cuda.is_current_stream_capturing():
                mine.record_stream(self._stream)
        return own

    def _handle(self, current: Any) -> Handle:
        session, event = self._session, None
        if self._stream is not None:
            event = self._stream.record_event()
            self._awaited.append(event)

        def handle() -> None:
            if not self._in_session or session != self._session:
                raise ArgumentError("handle", "comes from a session that has ended")
            if event is None:
                return
            if torch.cuda.current_stream() != current:
                raise ArgumentError("handle", "must be called on the stream on which all_gather was called")
            event.wait()
            if event in self._awaited:
                self._awaited.remove(event)

        return handle

    def _places(self, argument: str, sizes: Sequence[int]) -> list[int]:
        """Returns the offsets of the next call's results in the session's memory. `sizes` are the bytes of one rank's
        tensors.
        """
        self._usable()
        if not sizes:
            raise ArgumentError(argument, "is empty; expected at least one")
        if self._bytes is None:
            raise ArgumentError("num_max_session_bytes", "is not known; call agrs_set_config first")
        self._require_session(is_open=True)
        if self._gathers == self._most_gathers:
            raise ArgumentError(
                argument,
                f"has no room: num_max_all_gathers_per_session is {self._most_gathers}; begin another session",
            )
        places, end = [], self._offset
        for nbytes in sizes:
            places.append(end)
            end = aligned(end + self.num_ranks * nbytes, _ALIGNMENT)
        if end > self._most_session_bytes:
            raise ArgumentError(
                argument,
                f"needs {end - self._offset} bytes; the session has {self._most_session_bytes - self._offset} left of "
                f"num_max_session_bytes, {self._most_session_bytes}; begin another session",
            )
        return places

    def _require_place(self, mine: torch.Tensor, begin: int) -> None:
        memory = self._part(0, self._most_session_bytes).data_ptr()
        at = mine.data_ptr() - memory
        if len(mine) and 0 <= at < self._most_session_bytes and at != begin + self.rank_idx * len(mine):
            raise ArgumentError(
                "t", "lies in the session's memory at another place than agrs_get_inplace_tensor gives for this call"
            )

    def _require_session(self, *, is_open: bool) -> None:
        if self._in_session and not is_open:
            raise ArgumentError("session", "is open; call destroy_agrs_session first")
        if is_open and not self._in_session:
            raise ArgumentError("session", "is not open; call create_agrs_session first")

    def _part(self, begin: int, nbytes: int) -> torch.Tensor:
        assert self._bytes is not None
        return self._bytes[begin : begin + nbytes]

    def _close_sessions(self) -> None:
        gathered, self._gathered, self._bytes = self._gathered, None, None
        self._in_session = False
        if gathered is not None and not self.communicator.closed:  # closing ended the registration
            self.communicator.deregister(gathered)


def size_of(group: Any) -> int:
    """Returns the number of ranks of a group, which is a `Communicator`, an MPI communicator or a process group."""
    if isinstance(group, Communicator):
        return group.world_size
    return int(group.Get_size() if hasattr(group, "Get_size") else group.size())


def _sizes(shapes: Any, dtype: Any) -> tuple[bool, list[int]]:
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError("dtype", f"must be a torch.dtype, not {dtype!r}")
    try:
        given = tuple(shapes)
        batched = bool(given) and isinstance(given[0], (tuple, list))
        sizes = [math.prod(int(n) for n in shape) * dtype.itemsize for shape in (given if batched else (given,))]
    except (TypeError, ValueError):
        raise ArgumentError("shapes", f"must be a shape or several, not {shapes!r}") from None
    if any(nbytes < 0 for nbytes in sizes):
        raise ArgumentError("shapes", f"can't be negative: {shapes!r}")
    return batched, sizes
