"""The common part of calls of a layer that were made before: which arrays are like the caller's, and how to issue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxyccl.channels.expert_parallel.calls import call_name
from proxyccl.channels.expert_parallel.context import logged_number
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.parts import LayerParts
from proxyccl.channels.launches import CurrentStream
from proxyccl.channels.segment.call_log import encode_fields
from proxyccl.channels.segment.calls import ROOT_FIELD
from proxyccl.device._native import ffi, lib
from proxyccl.device.arrays.libraries import libraries
from proxyccl.device.kernel import Launch
from proxyccl.device.runtime import Runtime, StreamLike
from proxyccl.device.stream_operations import CopyBytes, StreamOperations

Kinds = tuple[Any, ...]
Launchable = Launch | StreamOperations
COPY_LATER = CopyBytes(1, 2, 1)
"""A copy whose numbers are set before each call."""


def kind_of(x: Any) -> Any:
    """An argument's type, element type and place: one that was checked stands for all others of its kind. None for
    None; of a pair of rows and scales both kinds.
    """
    if x is None:
        return None
    if type(x) is tuple:
        return tuple(kind_of(each) for each in x)
    return type(x), libraries[type(x)].kind(x)


def of_one_library(kinds: Kinds) -> bool:
    """Whether arrays of these kinds all belong to one library, and that library gives them kinds."""
    known: list[Any] = []
    for kind in kinds:
        if kind is not None:
            known += [kind] if isinstance(kind[0], type) else kind
    return all(kind[0] is known[0][0] and kind[1] is not None for kind in known)


class RepeatedCall:
    """A call with prepared arguments, for arrays like those of a call that was made in full.

    Args:
        parts: of the layer.
        like: an array of the call.
        name, dtype: of the call, as ranks compare it.
    """

    def __init__(self, parts: LayerParts, like: Any, name: str, dtype: str) -> None:
        self._parts, self._ctx, self._group = parts, parts.ctx, parts.ctx.group
        library = libraries[type(like)]
        self._memory, self._current, self._is_torch = library.memory, library.stream, library.is_torch
        self._on_host = parts.ctx.runtime_name == "host"
        self._fields = encode_fields(parts.ctx.logged(name, dtype, 0).encode())

    def _stream(self, x: Any, given: StreamLike) -> StreamLike:
        """The stream of a call: the caller's, or on a GPU the one where the library of `x` works now. An invalid stream
        is refused before the dispatch has a number.
        """
        if given is not None:
            self._group.runtime.stream_handle(given)
            return given
        if self._on_host:
            return None
        found = self._current(x)
        return CurrentStream(found) if self._is_torch else found

    def _at(self, x: Any, shape: tuple[int, ...], nbytes: int) -> int:
        """The address of an array of a known kind; 0 if its shape is another, or only another check can tell."""
        return self._memory(x, nbytes) if x.shape == shape else 0

    def _issue(
        self,
        desc: EPAllToAllLayoutDesc,
        launchable: Launchable,
        stream: StreamLike,
        owners: tuple[object, ...],
        *,
        compared: bool = True,
    ) -> None:
        """Queues a prepared launch, unless its ranks' calls differ. `owners` and the descriptor's tables are kept until
        the stream has passed it, where their memory is not used again in the stream's order.
        """
        if not isinstance(stream, CurrentStream):
            owners = (*owners, *desc.table_owners)
        else:
            owners = () if desc.stream == stream else desc.table_owners
        fields: Any = ffi.NULL
        if compared:
            fields = self._fields
            fields.fields[ROOT_FIELD] = logged_number(desc.number)
        self._group.launches.issue(fields, launchable, stream, owners)


class GivenTokens:
    """The tokens of dispatches, whose rows a kernel before quantizes or packs with their scales if need be.

    Args:
        parts: of the layer.
        like: the tokens of an earlier call, or a pair of rows and scales.
        quantizes: whether tokens of the layer's type become float8 before they are sent.

    Attributes:
        before: the launch of that kernel; None if there is none.
        row_bytes: of the rows that are sent.
    """

    def __init__(self, parts: LayerParts, like: Any, *, quantizes: bool) -> None:
        ctx, options = parts.ctx, parts.options
        config = options.config
        self._is_pair = isinstance(like, tuple)
        self._memory = libraries[type(like[0] if self._is_pair else like)].memory
        self._hidden, self._scales = config.hidden, config.hidden // options.scale_elements
        self._given_bytes = config.hidden * (1 if self._is_pair else config.token.itemsize)
        self.row_bytes = self._given_bytes
        self.before: Launch | None = None
        self._fill: Callable[[int, int, int, int], None] | None = None
        if self._is_pair:
            self.before = ctx.pack_launch()
            self._fill = _packing(self.before)
        elif quantizes:
            assert ctx.quantize_launch is not None
            self.before = ctx.quantize_launch.copy()
            self._fill = _quantizing(self.before, config.hidden)
        if self.before is not None:
            self.row_bytes = config.hidden + ctx.scale_bytes
            self._new_packed = ctx.arrays.maker(like[0] if self._is_pair else like, "uint8")
            self._address = ctx.arrays.address

    def count(self, x: Any) -> int:
        """The number of tokens; 0 if there are none, or if they do not fit."""
        if not self._is_pair:
            shape = x.shape
            return shape[0] if len(shape) == 2 and shape[1] == self._hidden else 0
        shape = x[0].shape
        fits = len(shape) == 2 and shape[1] == self._hidden and x[1].shape == (shape[0], self._scales)
        return shape[0] if fits else 0

    def take(self, x: Any, tokens: int) -> tuple[int, Any]:
        """The address of the rows that are sent, and the array that holds them if it is not the caller's. The address
        is 0 if only another check can tell.
        """
        scales_at = 0
        if self._is_pair:
            scales_at = self._memory(x[1], tokens * self._scales * 4)
            at = self._memory(x[0], tokens * self._given_bytes) if scales_at else 0
        else:
            at = self._memory(x, tokens * self._given_bytes)
        if self._fill is None or not at:
            return at, None
        packed = self._new_packed((tokens, self.row_bytes))
        packed_at = self._address(packed)
        self._fill(tokens, at, scales_at, packed_at)
        return packed_at, packed


def _quantizing(launch: Launch, hidden: int) -> Callable[[int, int, int, int], None]:
    call = ffi.cast("ProxycclCombine *", launch.packed(1))
    call.hidden = hidden
    fill = lib.proxyccl_expert_combine_fill
    return lambda tokens, rows, _, packed: fill(call, 0, tokens, rows, 0, 0, 0, packed)


def _packing(launch: Launch) -> Callable[[int, int, int, int], None]:
    places = [ffi.cast("uint64_t *", launch.packed(index)) for index in range(3)]
    count = ffi.cast("uint32_t *", launch.packed(3))

    def fill(tokens: int, rows: int, scales: int, packed: int) -> None:
        places[0][0], places[1][0], places[2][0], count[0] = rows, scales, packed, tokens

    return fill


def launchable_after(runtime: Runtime, before: Launch | None, launch: Launch) -> Launchable:
    """Launches `launch`, after another launch if there is one."""
    return launch if before is None else StreamOperations(runtime, [before, launch])


def name_of(call: str, weights: Any, *, halves: bool) -> str:
    """The name under which ranks compare a call."""
    return call_name(f"{call}_send" if halves else call, weights=weights is not None)
