"""The common part of calls of a layer that were made before: which arrays are like the caller's, and how to issue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxyccl.channels.expert_parallel.calls import call_name
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.parts import LayerParts
from proxyccl.channels.launches import CurrentStream, Launchable
from proxyccl.channels.segment.call_log import encode_fields
from proxyccl.channels.segment.calls import ROOT_FIELD
from proxyccl.device._native import ffi
from proxyccl.device.arrays.libraries import libraries
from proxyccl.device.kernel import Launch
from proxyccl.device.runtime import Runtime, StreamLike
from proxyccl.device.stream_operations import StreamOperations

Kinds = tuple[Any, ...]


def kind_of(x: Any) -> Any:
    """An argument's type, element type and place: one that was checked stands for all others of its kind. None for
    None; of a pair of rows and scales both kinds.
    """
    if x is None:
        return None
    if type(x) is tuple:
        return tuple(kind_of(each) for each in x)
    return type(x), libraries[type(x)].kind(x)


def describe_kind(x: Any) -> tuple[Any, ...] | None:
    """The same of an array for C (given_arrays.h)."""
    if x is None:
        return None
    library = libraries[type(x)]
    kind = library.kind(x)
    if not library.is_torch:
        return type(x), False, None, -1, 1, kind, library.kind, library.memory
    assert kind is not None
    return type(x), True, *kind, x.element_size(), None, None, None


def of_one_library(kinds: Kinds) -> bool:
    """Whether arrays of these kinds all belong to one library, and that library gives them kinds."""
    known: list[Any] = []
    for kind in kinds:
        if kind is not None:
            known += [kind] if isinstance(kind[0], type) else kind
    return all(kind[0] is known[0][0] and kind[1] is not None for kind in known)


def address_of(pointer: Any) -> int:
    """The address that a pointer of cffi has."""
    return int(ffi.cast("uintptr_t", pointer))


class RepeatedCall:
    """A call with prepared arguments, for arrays like those of a call that was made in full.

    Args:
        parts: of the layer.
        like: an array of the call.
        name, dtype, most_tokens: of the call, as ranks compare it.
    """

    def __init__(self, parts: LayerParts, like: Any, name: str, dtype: str, most_tokens: int = 0) -> None:
        self._parts, self._ctx, self._group = parts, parts.ctx, parts.ctx.group
        self._library, self._like_kind = libraries[type(like)], describe_kind(like)
        self._on_host = parts.ctx.runtime_name == "host"
        self._fields = encode_fields(parts.ctx.logged(name, dtype, 0, most_tokens).encode())

    def issuer(self) -> tuple[Any, ...]:
        """How the call reaches its stream, for C (issuer.h)."""
        assert self._like_kind is not None
        follows_torch = self._library.is_torch and not self._on_host
        current, device = (self._library.current_of_device(), self._like_kind[3]) if follows_torch else (None, None)
        number = address_of(self._fields.fields) + ffi.sizeof("uint64_t") * ROOT_FIELD
        calls = self._group.launches.prepared_calls
        return calls, self._on_host, current, CurrentStream, self._stream, self._queue, device, number

    def prepared(self, launchable: Launchable, *, compared: bool = True) -> tuple[Any, ...]:
        """A launch of the call, for C (prepared_calls.h). The first of a call is compared with the other ranks'."""
        issue, callers = self._group.launches.issuer(launchable)
        fields = self._fields if compared else ffi.NULL
        return issue, callers, address_of(fields), address_of(launchable.prepared), (fields, launchable)

    def _stream(self, x: Any, given: StreamLike) -> StreamLike:
        """The stream of a call that names one; on a GPU also of one that does not: where the library of `x` works now.
        An invalid stream is refused before the dispatch has a number.
        """
        stream = self._library.stream(x) if given is None else given
        self._group.runtime.stream_handle(stream)
        return stream

    def _queue(
        self,
        desc: EPAllToAllLayoutDesc,
        prepared: tuple[Any, Launchable],
        stream: StreamLike,
        owners: tuple[object, ...],
    ) -> None:
        """Queues a launch, unless its ranks' calls differ. `owners` and the descriptor's tables are kept until the
        stream has passed it, where their memory is not used again in the stream's order.
        """
        if not isinstance(stream, CurrentStream):
            owners = (*owners, *desc.table_owners)
        else:
            owners = () if desc.stream == stream else desc.table_owners
        self._group.launches.issue(*prepared, stream, owners)


class GivenTokens:
    """The tokens of dispatches, whose rows a kernel before quantizes or packs with their scales if need be.

    Args:
        parts: of the layer.
        like: the tokens of an earlier call, or a pair of rows and scales.
        quantizes: whether tokens of the layer's type become float8 before they are sent.

    Attributes:
        before: the launch of that kernel; None if there is none.
        row_bytes: of the rows that are sent.
        given_bytes: of the rows that are given.
        kinds: of the rows and of their scales, for C.
        filled: the arguments of `before` that C fills in (repeated_dispatch.c).
    """

    def __init__(self, parts: LayerParts, like: Any, *, quantizes: bool) -> None:
        ctx, options = parts.ctx, parts.options
        config, is_pair = options.config, isinstance(like, tuple)
        rows, scales = like if is_pair else (like, None)
        self.kinds = describe_kind(rows), describe_kind(scales)
        self.scales = options.scales
        self.given_bytes = self.row_bytes = config.hidden * (1 if is_pair else config.token.itemsize)
        self.before: Launch | None = None
        self.filled = (0, 0, 0, 0, 0, 0)
        if is_pair:
            self.before = ctx.pack_launch(packed=ctx.packed_rows.ptr)
            rows_at, scales_at, _, tokens_at = (address_of(self.before.packed(index)) for index in range(4))
            self.filled = (2, 0, rows_at, scales_at, tokens_at, ctx.packed_rows.ptr)
        elif quantizes:
            assert ctx.quantize_launch is not None
            self.before = ctx.quantize_launch.copy()
            call = ffi.cast("ProxycclCombine *", self.before.packed(1))
            call.hidden, call.output = config.hidden, ffi.cast("char *", ctx.packed_rows.ptr)
            self.filled = (1, address_of(call), 0, 0, 0, ctx.packed_rows.ptr)
        if self.before is not None:
            self.row_bytes = config.hidden + ctx.scale_bytes


def launchable_after(runtime: Runtime, before: Launch | None, launch: Launch) -> Launchable:
    """Launches `launch`, after another launch if there is one."""
    return launch if before is None else StreamOperations(runtime, [before, launch])


def name_of(call: str, weights: Any, *, halves: bool) -> str:
    """The name under which ranks compare a call."""
    return call_name(f"{call}_send" if halves else call, weights=weights is not None)


Maker = Callable[[], Any]
"""Makes an array."""
