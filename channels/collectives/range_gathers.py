"""Gathers several ranges of an array in place by one schedule, so that ranks synchronize only once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxyccl.channels.calls._calls import Form
from proxyccl.channels.collectives.by_proxy import others
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.run import issue
from proxyccl.channels.schedules.memory import ScheduleSpan
from proxyccl.channels.segment.calls import CollectiveCall
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.runtime import StreamLike
from proxyccl.device.stream_operations import StreamOperations
from proxyccl.proxy.schedule import Schedule, SchedulePost, ScheduleReceive, ScheduleSend

Range = tuple[int, int]
"""The offset of a range in the array, and the size of one rank's part of the range. The parts are in the order of
ranks.
"""


class RangeGathers:
    """Gathers ranges of an array that each rank has registered. All ranks construct a `RangeGathers` together.

    Args:
        view: this rank's array, of the same size on all ranks.

    Attributes:
        are_possible: whether the proxies of all ranks reach the arrays; otherwise `gather` can't be called.
    """

    def __init__(self, collectives: Collectives, view: ArrayView) -> None:
        self._collectives, self._view = collectives, view
        self._by_proxy = collectives.by_proxy()
        self._prepare = self._form  # stored, because `Calls` distinguishes calls by this object's identity
        self._span: ScheduleSpan | None = self._by_proxy.memories.target(view.ptr, view.nbytes)
        reached = bytes([self._span is not None])
        answers = collectives.group.exchange.all_gather_bytes(reached, "gathers of ranges")
        self.are_possible = all(answer == b"\1" for answer in answers)

    def gather(self, ranges: Sequence[Range], stream: StreamLike) -> None:
        """Gathers each range: each rank contributes its part of the range, and all ranks get the whole range. All ranks
        call this together, with the same ranges.

        Raises as `Communicator.all_gather`.
        """
        parts = tuple(tuple(each) for each in ranges if each[1])
        if parts:
            issue(self._collectives, (), (), (self._prepare, parts), stream)

    def _form(self, _x: Any, _out: Any, options: tuple[Any, Any], _reached: bool, logged: bool) -> Form:
        _, parts = options
        call = CollectiveCall(
            "all_gather",
            algorithm="proxy",
            count=sum(nbytes for _, nbytes in parts),
            shape=tuple(number for part in parts for number in part),
        )
        of_array = (self._view.ptr, self._view.ptr + self._view.nbytes)
        return self._collectives.prepare_form(call, (), lambda: self._launch(parts), logged=logged, ranges=(of_array,))

    def _launch(self, parts: Sequence[Range]) -> StreamOperations:
        span, group, links, rings = self._span, self._by_proxy.group, self._by_proxy.links, self._by_proxy.rings
        assert span is not None
        peers = others(group)
        schedule = Schedule(
            posts=tuple(SchedulePost(links.posts[peer], span.memory.id_at(peer), span.offset) for peer in peers),
            sends=tuple(
                ScheduleSend(
                    links.sends[peer],
                    span.memory.source_id(peer),
                    span.offset + begin + group.rank * nbytes,
                    nbytes,
                    post_channel=links.posts[peer],
                    dst_offset=begin + group.rank * nbytes,
                )
                for begin, nbytes in parts
                for peer in peers
            ),
            receives=tuple(ScheduleReceive(links.sends[peer], sends=len(parts)) for peer in peers),
        )
        return rings.prepare([schedule, *rings.end()])
