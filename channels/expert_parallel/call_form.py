"""The common part of the forms of a layer's calls: how a call is issued, and the kernels before a dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxyccl.channels.calls.launches import CurrentStream, Launchable
from proxyccl.channels.expert_parallel.calls import call_name
from proxyccl.channels.expert_parallel.parts import LayerParts
from proxyccl.channels.segment.call_log import encode_fields
from proxyccl.channels.segment.calls import ROOT_FIELD
from proxyccl.device._native import ffi
from proxyccl.device.arrays.libraries import libraries
from proxyccl.device.kernel import Launch
from proxyccl.device.runtime import Runtime, StreamLike
from proxyccl.device.stream_operations import Operation, StreamOperations


def address_of(pointer: Any) -> int:
    """The address that a pointer of cffi has."""
    return int(ffi.cast("uintptr_t", pointer))


class CallForm:
    """A call of a layer with prepared arguments, for arrays of some kinds. C makes each call of the form, with the
    addresses and the numbers of tokens that it has.

    Args:
        parts: of the layer.
        arrays: of the call for which the form is prepared. The first is of the library that makes the results.
        name, dtype, most_tokens: of the call, as ranks compare it.
    """

    def __init__(self, parts: LayerParts, arrays: tuple[Any, ...], name: str, dtype: str, most_tokens: int = 0) -> None:
        self._parts, self._ctx, self._group = parts, parts.ctx, parts.ctx.group
        self._arrays = parts.ctx.arrays.like(arrays[0])
        self._is_torch = all(libraries[type(x)].is_torch for x in arrays if x is not None)
        self._on_host = parts.ctx.runtime_name == "host"
        self._fields = encode_fields(parts.ctx.logged(name, dtype, 0, most_tokens).encode())

    def common(self, first: Launchable, second: Launchable) -> tuple[Any, ...]:
        """How a call is issued, for C (layer_form.h): its launch or that of its first half, and that of other parts."""
        in_order = self._is_torch and not self._on_host
        current = libraries[self._arrays.kind].current_of_device() if in_order else None
        number = address_of(self._fields.fields) + ffi.sizeof("uint64_t") * ROOT_FIELD
        calls, device = self._group.launches.calls, self._group.runtime.device
        address = None if self._arrays.is_torch else self._arrays.address
        queued = self._stream, self._queue, device, number, address
        parts = self.prepared(first), self.prepared(second, compared=False)
        return calls, self._on_host, current, CurrentStream, *queued, *parts

    def prepared(self, launchable: Launchable, *, compared: bool = True) -> tuple[Any, ...]:
        """A launch of the call, for C (form.h). The first of a call is compared with the other ranks'."""
        issue, callers = self._group.launches.issuer(launchable)
        fields = self._fields if compared else ffi.NULL
        return issue, callers, address_of(fields), address_of(launchable.prepared), (fields, launchable)

    def _stream(self, x: Any, given: StreamLike) -> StreamLike:
        """The stream of a call: the caller's, or on a GPU the one where the library of `x` works now. An invalid stream
        is refused before the dispatch has a number.
        """
        stream = self._ctx.stream_for(given, x)
        return int(stream) if isinstance(stream, CurrentStream) and not self._is_torch else stream

    def _queue(
        self, desc: Any, prepared: tuple[Any, Launchable], stream: StreamLike, owners: tuple[object, ...]
    ) -> None:
        # The form's layer has the memory that kernels before a dispatch fill.
        self._ctx.queue(*prepared, stream, desc, (*owners, self))


def kernel_before(parts: LayerParts, *, is_pair: bool, quantizes: bool) -> tuple[list[Launch], tuple[int, ...]]:
    """Returns the launch of the kernel that makes the rows that a dispatch sends, or none; and the arguments of this
    kernel that C fills in (dispatch_form.c).

    Args:
        parts: of the layer.
        is_pair: whether the caller gives pairs of rows and scales, which the kernel packs.
        quantizes: whether the kernel makes float8 rows of tokens of the layer's type.
    """
    ctx = parts.ctx
    if is_pair:
        launch = ctx.pack_launch(ctx.packed_rows.ptr)
        rows_at, scales_at, _, tokens_at = (address_of(launch.packed(index)) for index in range(4))
        return [launch], (2, 0, rows_at, scales_at, tokens_at, ctx.packed_rows.ptr)
    if not quantizes:
        return [], (0, 0, 0, 0, 0, 0)
    assert ctx.quantize_launch is not None
    launch = ctx.quantize_launch.copy()
    call = ffi.cast("ProxycclCombine *", launch.packed(1))
    call.hidden, call.output = parts.options.config.hidden, ffi.cast("char *", ctx.packed_rows.ptr)
    return [launch], (1, address_of(call), 0, 0, 0, ctx.packed_rows.ptr)


def in_order(runtime: Runtime, operations: Sequence[Operation]) -> Launchable:
    """Makes operations of a stream one after the other; the last is a launch."""
    last = operations[-1]
    return last if len(operations) == 1 and isinstance(last, Launch) else StreamOperations(runtime, operations)


def name_of(call: str, weights: Any, *, halves: bool = False, indices: Any = None) -> str:
    """Returns the name of a call, which must be the same on all ranks."""
    return call_name(f"{call}_send" if halves else call, weights=weights is not None, indices=indices is not None)
