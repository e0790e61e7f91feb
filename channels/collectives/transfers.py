"""Transfers between pairs of ranks: send and recv, grouped or alone, and the collectives that consist of transfers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from proxyccl.channels.arguments import (
    as_readable,
    input_view,
    new_like,
    output_view,
    overlap,
    readable_view,
    refuse_partial_overlap,
    require_writable,
    rows_of_all,
    share_shape,
)
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.group import Group
from proxyccl.channels.ranks import as_rank
from proxyccl.channels.segment.calls import CollectiveCall
from proxyccl.device.arguments.integers import as_integer, find_items
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import StreamLike


class Transfers:
    """Transfers that are issued together, at the end of the ``with`` block that collects them.

    No transfer waits for another, so sends and receives may have any order within the block. But transfers from one
    rank to another are matched in order: the n-th send with the n-th receive. A received array must not overlap another
    array of the block, unless this rank sends the array to itself in place. If arrays overlap, the end of the block
    raises ArgumentError, and issues nothing. If the block raises an exception, nothing is issued.
    """

    def __init__(self, collectives: Collectives, stream: StreamLike) -> None:
        self._collectives = collectives
        self._group = collectives.group
        self._stream = stream
        self._sent: list[Any] = []
        self._received: list[Any] = []
        self._to: list[int] = []
        self._of: list[int] = []

    def send(self, x: Any, peer: int) -> None:
        """Sends an array to a rank, which must receive the same number of bytes. `peer` may be this rank.

        Args:
            x: any contiguous array.
            peer: the rank.

        Raises:
            ArgumentError: an argument is wrong.
        """
        x = self._array(x, "x", received=False)
        self._to.append(self._peer(peer))
        self._sent.append(x)

    def recv(self, out: Any, peer: int) -> None:
        """Receives an array from a rank. `out` must be contiguous and writable."""
        out = self._array(out, "out", received=True)
        self._of.append(self._peer(peer))
        self._received.append(out)

    def _array(self, x: Any, argument: str, *, received: bool) -> Any:
        self._group.failure.require_usable()
        flows = self._collectives.made_flows
        if flows is not None and flows.calls.takes(x, received):
            return x
        view = readable_view(self._group, x, argument)
        if received:
            require_writable(view, argument)
        return view

    def _peer(self, peer: Any) -> int:
        return as_rank(self._group.world_size, peer, "peer")

    def __enter__(self) -> Transfers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._issue()
        finally:  # the next block starts with an empty collection
            for collected in (self._sent, self._received, self._to, self._of):
                collected.clear()

    def _issue(self) -> None:
        sent, received = tuple(self._sent), tuple(self._received)
        options = ("transfers", tuple(self._to), tuple(self._of))
        if self._collectives.made_flows is None:
            self._check()  # before the ranks wait for each other
        if issue(self._collectives, sent, received, options, self._stream, sets_up=True):
            return
        self._check()
        raise RuntimeError("the arrays of the transfers can't be read")

    def _check(self) -> None:
        """Raises ArgumentError if a transfer to this rank itself has two sizes, or if a received array overlaps another
        array. The C code refuses such transfers, but does not give the reason.
        """
        group, rank = self._group, self._group.rank
        group.failure.require_usable()
        sends = [(input_view(group, x, "x"), peer) for x, peer in zip(self._sent, self._to, strict=True)]
        receives = [(input_view(group, x, "out"), peer) for x, peer in zip(self._received, self._of, strict=True)]
        own = [[view for view, peer in side if peer == rank] for side in (sends, receives)]
        sizes = [[view.nbytes for view in side] for side in own]
        if sizes[0] != sizes[1]:
            raise ArgumentError("peer", f"this rank sends itself arrays of {sizes[0]} bytes and receives {sizes[1]}")
        copies = [(source, target) for source, target in zip(*own, strict=True) if source.ptr != target.ptr]
        sent = [view for view, peer in sends if peer != rank] + [source for source, _ in copies]
        received = [view for view, peer in receives if peer != rank] + [target for _, target in copies]
        for i, view in enumerate(received):
            if view.nbytes and any(each.nbytes and overlap(view, each) for each in (*sent, *received[:i])):
                raise ArgumentError(
                    "out", "overlaps another array of the same transfers; received arrays must not overlap other arrays"
                )


Agree = Callable[[tuple[Any, Any]], object]
"""Compares a call with the other ranks' calls, given its input and output."""


def issue(
    collectives: Collectives,
    x: Any,
    out: Any,
    options: tuple[Agree | str, Any, Any],
    stream: StreamLike,
    *,
    sets_up: bool = False,
) -> bool:
    """Makes a call by C code. Returns False, and issues nothing, if Python must check the arguments first.

    Args:
        x, out, options, stream: as for `FlowCalls.call`.
        sets_up: whether this call may be the group's first, in which all ranks together construct their `Flows`. If
            false, a first call returns False.
    """
    flows, group = collectives.made_flows, collectives.group
    if flows is None and not sets_up:
        return False
    if stream is None and not collectives.on_host:
        arrays = [each for given in (x, out) for each in (given if isinstance(given, tuple | list) else (given,))]
        owners = [each.owner if isinstance(each, ArrayView) else each for each in arrays]
        stream = group.launches.stream_for(None, *owners) if owners else None
    if flows is None:
        group.failure.require_usable()
        if stream is not None or not collectives.on_host:
            group.runtime.stream_handle(stream)  # raises an error for an invalid stream before ranks wait
        if not isinstance(options[0], str):
            options[0]((x, out))
        flows = collectives.flows()
    if isinstance(options[0], str):
        group.vain_waits.makes_transfers = True
    return flows.calls.call(x, out, options, stream)


def _agree(group: Group, name: str, root: int, whole: int | None, arrays: tuple[Any, Any]) -> None:
    """Compares a collective's call with the other ranks' calls. `whole` is the index of the array whose count and shape
    must be the same on all ranks; None if only the shape of the input's rows must be the same.
    """
    array = arrays[whole or 0]
    dtype, shape = as_dtype(array.dtype), tuple(array.shape)
    count, compared = (0, shape[1:]) if whole is None else (math.prod(shape), shape)
    group.launches.agree(CollectiveCall(name, dtype.name, root=root, count=count, shape=compared))


def _counts(ranks: int, counts: Sequence[int], argument: str) -> list[int]:
    expected = f"expected {ranks} numbers of rows, one for each rank"
    values = find_items(counts) or []
    if len(values) != ranks:
        raise ArgumentError(argument, f"{expected}, not {counts!r}")
    return [as_integer(rows, argument, "expected a number of rows for each rank", 0) for rows in values]


class TransferCalls:
    """The methods of `Communicator` for transfers between pairs of ranks, and for the collectives that consist of
    transfers.
    """

    _group: Group
    _collectives: Collectives

    def prepare_transfers(self) -> None:
        """Sets up transfers between ranks. All ranks call this together.

        Without this call, the first `send`, `recv` or `transfers` sets up the transfers, and waits for all ranks. Call
        `prepare_transfers` first if not all ranks take part in the first transfer, or if transfers and collectives run
        in different threads: if two threads of a rank wait for all ranks at the same time, the communicator fails, or
        one of the threads raises ConcurrentCallError.
        """
        self._group.failure.require_usable()
        self._collectives.flows()

    def send(self, x: Any, peer: int, *, stream: StreamLike = None) -> None:
        """Sends an array to a rank, which receives it with `recv`. A rank's sends to a peer arrive in order.

        Data that does not fit into the peer's scratch memory (some hundred KiB) waits for the peer's `recv`.

        A transfer of an empty array does nothing. If only one rank's array is empty, no error is raised, and the other
        rank's transfer is matched with the pair's next transfer.

        Args:
            x: any contiguous array, with the number of bytes that the peer receives.
            peer: another rank.
            stream: as for `all_reduce`. Transfers on different streams run concurrently; transfers with the same peer
                in the same direction run in order.

        Raises:
            ArgumentError: an argument is wrong, and nothing was sent.
            MismatchError: the peer receives a different number of bytes, and neither number is 0.
            CommunicatorError: a rank failed; see its subclasses.
        """
        if issue(self._collectives, x, (), ("send", peer, ()), stream):
            return
        with Transfers(self._collectives, stream) as transfers:
            transfers.send(x, self._another(peer))

    def recv(self, out: Any, peer: int, *, stream: StreamLike = None) -> Any:
        """Receives an array from a rank. The arguments and errors are those of `send`. Returns `out`."""
        if issue(self._collectives, (), out, ("recv", (), peer), stream):
            return out
        with Transfers(self._collectives, stream) as transfers:
            transfers.recv(out, self._another(peer))
        return out

    def transfers(self, *, stream: StreamLike = None) -> Transfers:
        """Returns a context that collects sends and receives, and issues them together, by one launch, at the end of
        the ``with`` block.

        ``with comm.transfers() as t: t.send(x, right); t.recv(y, left)``. Within a block no transfer waits for another.
        So the order of transfers with different peers does not matter, and an array that is received may not overlap
        another array of the block.

        Args:
            stream: as for `all_reduce`.
        """
        self._group.failure.require_usable()
        return Transfers(self._collectives, stream)

    def all_to_all_v(
        self,
        x: Any,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        out: Any = None,
        stream: StreamLike = None,
    ) -> Any:
        """Sends consecutive rows of `x` to the ranks in order, and receives the other ranks' rows in rank order.

        Args:
            x: shape [sum(send_counts), …]; any element type. The dimensions after the first are the same on all ranks.
            send_counts: for each rank, the number of rows that this rank sends to that rank.
            recv_counts: for each rank, the number of rows that this rank receives from that rank; the same number as in
                that rank's ``send_counts``.
            out: shape [sum(recv_counts), …]; None for a new array.
            stream: as for `all_reduce`.

        Returns:
            `out`, or the new array. Raises the errors of `all_reduce`; and MismatchError if a count differs from the
            peer's count and neither is 0: see `send`.
        """
        group = self._group
        if out is None:
            source = input_view(group, x, "x")
            rows = sum(_counts(group.world_size, recv_counts, "recv_counts"))
            out = new_like(group, source, (rows, *source.shape[1:]))
        agree = functools.partial(_agree, group, "all_to_all_v", 0, None)
        if issue(self._collectives, x, out, (agree, send_counts, recv_counts), stream):
            return out
        source = input_view(group, x, "x")
        send_counts = _counts(group.world_size, send_counts, "send_counts")
        recv_counts = _counts(group.world_size, recv_counts, "recv_counts")
        if not source.shape or source.shape[0] != sum(send_counts):
            raise ArgumentError(
                "x", f"has shape {source.shape}; expected {sum(send_counts)} rows, the sum of send_counts"
            )
        target = output_view(group, out, x, source, (sum(recv_counts), *source.shape[1:]))
        if source.nbytes and target.nbytes and overlap(source, target):
            raise ArgumentError("out", "overlaps x; the output must not overlap the input")
        own = group.rank
        if send_counts[own] != recv_counts[own]:
            raise ArgumentError(
                "recv_counts", f"this rank sends itself {send_counts[own]} rows and receives {recv_counts[own]}"
            )
        self._issue_views(source, target, (send_counts, recv_counts), stream, agree)
        return out

    def gather(self, x: Any, root: int = 0, *, out: Any = None, stream: StreamLike = None) -> Any:
        """Concatenates `x` of all ranks along the first dimension, in rank order, on rank `root`.

        Args:
            x: shape [n, …], the same on all ranks; any element type.
            root: the rank that gets the result.
            out: shape [world_size * n, …], only on `root`; None for a new array. On `root`, `x` may be `root`'s rows of
                `out`.
            stream: as for `all_reduce`.

        Returns:
            On `root`, `out` or the new array; None on other ranks. Raises the errors of `all_reduce`.
        """
        group = self._group
        root = as_rank(group.world_size, root, "root")
        is_root = group.rank == root
        if is_root and out is None:
            source = input_view(group, x, "x")
            out = new_like(group, source, rows_of_all(group, source))
        agree = functools.partial(_agree, group, "gather", root, 0)
        ends = root, "even" if is_root else ()
        if issue(self._collectives, x, out if is_root else (), (agree, *ends), stream):
            return out if is_root else None
        source, target = input_view(group, x, "x"), None
        if is_root:
            target = output_view(group, out, x, source, rows_of_all(group, source))
            refuse_partial_overlap(root, source, target)
        self._issue_views(source, target, ends, stream, agree)
        return out if is_root else None

    def scatter(self, x: Any = None, root: int = 0, *, out: Any = None, stream: StreamLike = None) -> Any:
        """Gives each rank one share of rank `root`'s `x`.

        Args:
            x: shape [world_size * n, …], only on `root`; any element type.
            root: the rank whose array is distributed.
            out: shape [n, …], the same on all ranks; None for a new array. On `root`, `out` may be `root`'s rows of
                `x`.
            stream: as for `all_reduce`.

        Returns:
            `out`, or the new array. Raises the errors of `all_reduce`.
        """
        group = self._group
        root = as_rank(group.world_size, root, "root")
        is_root = group.rank == root
        if is_root and out is None:
            source = input_view(group, x, "x")
            out = new_like(group, source, share_shape(group, source))
        agree = functools.partial(_agree, group, "scatter", root, 1)
        ends = "even" if is_root else (), root
        if out is None:
            raise ArgumentError("out", f"expected an array: this rank gets its share of rank {root}'s")
        if issue(self._collectives, x if is_root else (), out, (agree, *ends), stream):
            return out
        given = input_view(group, x, "x") if is_root else None
        if given is None:
            target = input_view(group, out, "out")
            require_writable(target, "out")
        else:
            target = output_view(group, out, x, given, share_shape(group, given))
            refuse_partial_overlap(root, given, target)
        self._issue_views(given, target, ends, stream, agree)
        return out

    def _another(self, peer: Any) -> int:
        rank = as_rank(self._group.world_size, peer, "peer")
        if rank == self._group.rank:
            raise ArgumentError("peer", f"rank {rank} is this rank itself; `transfers` copies within a rank")
        return rank

    def _issue_views(
        self, x: ArrayView | None, out: ArrayView | None, ranks: tuple[Any, Any], stream: StreamLike, agree: Agree
    ) -> None:
        """Makes a collective's call whose arguments were checked.

        Args:
            x, out: the views of input and output; None if this rank has none.
            ranks: the last two options of `FlowCalls.call`.
        """
        agree_once = functools.cache(lambda: agree((x, out)))  # logs the call once
        given, taken = (() if view is None else as_readable(self._group, view) for view in (x, out))
        if not issue(self._collectives, given, taken, (lambda _: agree_once(), *ranks), stream, sets_up=True):
            self._group.failure.require_usable()
            raise RuntimeError(f"the views {x} and {out} can't be read")
