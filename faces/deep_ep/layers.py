"""The layers of a buffer, and the ranks that a buffer excludes. All calls of one shape use the same layer, which all
ranks make together when a call first needs it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from proxyccl.channels.communicator import Communicator
from proxyccl.channels.expert_parallel.context import DispatchCombineContext
from proxyccl.channels.expert_parallel.layer import EPAll2AllLayer
from proxyccl.channels.expert_parallel.members import LAYER_SIZE
from proxyccl.channels.expert_parallel.options import FLOAT4, FLOAT8, MOST_BUFFERS
from proxyccl.channels.expert_parallel.output_buffers import KEPT_OUTPUTS
from proxyccl.channels.segment.calls import CollectiveCall
from proxyccl.deep_ep.arguments import refuse
from proxyccl.device.errors import ArgumentError, CapacityError, ClosedError, PeerLostError
from proxyccl.proxy.codec import Codec

_TOKENS = Codec(int, 32, "number of tokens")
_LEAST_TOKENS = 128
_MOST_FORMS = 64
_OUTPUTS = "PROXYCCL_DEEP_EP_OUTPUTS"


class Shape(NamedTuple):
    """The properties that two calls must share to use one layer, with the names of arguments of `EPAll2AllLayer`.

    Attributes:
        num_scales: the number of scales of a row; 0 if rows have no scales.
        float4: whether rows that have scales are in float4 instead of float8.
        enable_local_combine: has no effect across nodes.
    """

    layout: str
    hidden: int
    topk: int
    num_tot_experts: int
    dtype: str
    num_sm: int
    num_scales: int = 0
    max_recv_tokens: int | None = None
    expert_alignment: int | None = None
    enable_local_combine: bool = False
    float4: bool = False


class Turns(Struct):
    """The two layers that low-latency calls with hooks use alternately, so that two calls of one shape can be in
    progress at the same time. `next` is the index of the layer that the next call uses.
    """

    layers: tuple[EPAll2AllLayer, EPAll2AllLayer]
    next: int = 0


class Layers:
    """Makes and keeps the layers of a communicator. A layer is made when a call first needs it.

    Attributes:
        all: the layers by their contexts, in the order in which the ranks made them.
        forms: the objects that make calls like an earlier call. The key consists of a call's options and the shapes and
            types of the call's tensors, without the number of tokens.
        failure_raised: whether a call of the buffer has raised the failure of the communicator.
    """

    def __init__(self, communicator: Communicator, lost_ranks: Sequence[int] = ()) -> None:
        self.communicator, self.lost_ranks = communicator, lost_ranks
        self._growing: dict[Shape, EPAll2AllLayer] = {}
        self._of_size: dict[Shape, EPAll2AllLayer] = {}
        self._turns: dict[Shape, Turns] = {}
        self.all: dict[DispatchCombineContext, EPAll2AllLayer] = {}
        self.forms: dict[tuple[Any, ...], Any] = {}
        self.failure_raised = False

    def of_size(self, shape: Shape, max_tokens: int) -> EPAll2AllLayer:
        """Returns a layer for at most `max_tokens` tokens of a rank; all ranks pass the same number. The layer shares
        the memory of the shape's largest layer. If that layer is too small, the call makes a layer for at least twice
        as many tokens, so that few layers are made.
        """
        largest = self._of_size.get(shape)
        if largest is None:
            largest = self._of_size[shape] = self._make(shape, max_tokens)
        elif largest.ep_config.max_tokens < max_tokens:
            self.forms.clear()  # prepared calls refer to the smaller layer
            largest = self._of_size[shape] = self._make_larger(shape, max_tokens, 2 * largest.ep_config.max_tokens)
        return largest.narrowed(max_tokens)

    def turns(self, shape: Shape, max_tokens: int) -> Turns:
        """Returns the two layers of calls with hooks, with room for `max_tokens` tokens of a rank. The first layer is
        the shape's largest layer.
        """
        self.of_size(shape, max_tokens)
        largest = self._of_size[shape]
        if shape not in self._turns or self._turns[shape].layers[0] is not largest:
            self._turns[shape] = Turns((largest, self._make(shape, largest.ep_config.max_tokens)))
        return self._turns[shape]

    def add_form(self, key: tuple[Any, ...], form: Any) -> Any:
        if len(self.forms) == _MOST_FORMS:
            del self.forms[next(iter(self.forms))]
        self.forms[key] = form
        return form

    def dispatch(self, shape: Shape, x: Any, topk_idx: Any, topk_weights: Any) -> tuple[Any, Any, Any, EPAll2AllLayer]:
        """Dispatches with a layer that has room for all ranks' tokens, and makes a larger layer first if necessary. The
        dispatch is not recorded for a backward pass. Returns the rows, their weights, the descriptor and the layer.
        """
        if shape not in self._growing:
            group = self.communicator.group
            group.launches.agree(CollectiveCall(LAYER_SIZE))  # raises MismatchError if ranks make different calls
            everyone = group.exchange.all_gather(len(topk_idx), _TOKENS, "the size of a layer")
            # A layer with max_recv_tokens can't grow.
            room = (shape.max_recv_tokens or 0) // self.communicator.world_size
            self._growing[shape] = self._make(shape, max(_rounded(max(everyone)), room))
        while True:
            layer = self._growing[shape]
            try:
                return *layer.dispatch_unrecorded(x, topk_idx, topk_weights), layer
            except CapacityError as error:
                if shape.max_recv_tokens is not None:  # the caller has fixed the number of rows
                    raise
                self._growing[shape] = self._make(shape, _rounded(error.needed))

    def close(self) -> None:
        """Releases the layers. All ranks make this call together."""
        layers, self.all, self._growing, self._of_size, self._turns = self.all, {}, {}, {}, {}
        self.forms.clear()
        for layer in layers.values():
            layer.finalize()

    def _make_larger(self, shape: Shape, max_tokens: int, wished: int) -> EPAll2AllLayer:
        if wished > max_tokens:
            with contextlib.suppress(ArgumentError):  # raised on all ranks if `wished` is too large for a layer
                return self._make(shape, wished)
        return self._make(shape, max_tokens)

    def _make(self, shape: Shape, max_tokens: int) -> EPAll2AllLayer:
        communicator = self.communicator
        if communicator.closed:
            raise ClosedError("the communicator of the buffer was closed")
        ranks, local_ranks = communicator.world_size, communicator.local_world_size
        outputs = _kept_outputs() if shape.layout == "rank" else 0
        given = shape._asdict()
        float4, scales = given.pop("float4"), given.pop("num_scales")
        given["enable_local_combine"] &= local_ranks == ranks
        layer = EPAll2AllLayer(
            communicator,
            max_tokens,
            rank=communicator.rank,
            local_world_size=local_ranks,
            world_size=ranks,
            dispatch_dtype=None if not scales else FLOAT4 if float4 else FLOAT8,
            num_scales=scales or None,
            scales_by_columns=shape.layout == "padded" and scales > 0 and not float4,
            grows=shape.layout != "padded",
            output_buffers=outputs,
            keeps_outputs=outputs > 0,
            minus_one_drops=True,
            lost_ranks=self.lost_ranks,
            **given,
        )
        self.all[layer.ctx] = layer
        return layer


class Masks:
    """Records which of a buffer's original ranks were lost, and which ranks the caller has masked since the last
    dispatch. All rank numbers are those in the original buffer.

    Args:
        ranks: the number of ranks that the buffer had originally.

    Attributes:
        lost: the ranks that are no longer in the buffer's communicator, in ascending order.
        pending: the ranks that the caller masked, which the next dispatch excludes.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.lost: tuple[int, ...] = ()
        self.pending: set[int] = set()

    def update(self, rank: int, *, masked: bool) -> None:
        if rank not in self.lost:
            (self.pending.add if masked else self.pending.discard)(rank)
        elif not masked:
            raise self._refuse_return([rank])

    def clean(self) -> None:
        if self.lost:
            raise self._refuse_return(self.lost)
        self.pending.clear()

    def of(self, communicator: Communicator) -> set[int]:
        """Returns the lost and the masked ranks. If the communicator has failed and the failure names a lost rank, the
        result includes that rank.
        """
        masked = {*self.lost, *self.pending}
        failure = communicator.group.failure
        if failure.aborted:
            error = failure.exception()
            if isinstance(error, PeerLostError) and error.peer is not None:
                masked.add(self._present()[error.peer])
        return masked

    def numbers_in(self, communicator: Communicator) -> list[int]:
        """Returns the pending ranks' numbers in the communicator."""
        return [number for number, rank in enumerate(self._present()) if rank in self.pending]

    def lose_all_but(self, shrunk: Communicator) -> None:
        """Records that only the ranks of a shrunk communicator remain."""
        present = self._present()
        left = {present[member] for member in shrunk.members}
        self.lost = tuple(rank for rank in range(self._ranks) if rank not in left)
        self.pending -= set(self.lost)

    def _present(self) -> list[int]:
        return [rank for rank in range(self._ranks) if rank not in self.lost]

    @staticmethod
    def _refuse_return(ranks: object) -> NotImplementedError:
        return refuse("unmasking of lost ranks", f"call Buffer.grow with a communicator that has {ranks} again")


def _kept_outputs() -> int:
    value = os.environ.get(_OUTPUTS) or str(KEPT_OUTPUTS)
    if not value.isdecimal() or int(value) > MOST_BUFFERS:
        raise ArgumentError(_OUTPUTS, f"must be 0 to {MOST_BUFFERS}, not {value!r}")
    return int(value)


def _rounded(tokens: int) -> int:
    return max(_LEAST_TOKENS, 1 << (tokens - 1).bit_length()) if tokens else _LEAST_TOKENS
