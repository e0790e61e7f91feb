"""all_reduce_rms_norm: reduces rows, adds the residual and applies RMSNorm, in one launch if ranks exchange packets."""

from __future__ import annotations

import functools
import math
import struct
from typing import Any, NamedTuple

from proxyccl.channels.arguments import input_view, new_like, overlap, require_writable
from proxyccl.channels.calls._calls import Form
from proxyccl.channels.calls.launches import Launchable
from proxyccl.channels.collectives.collective import Call
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.packet_team import ALIGNMENT, RowShape
from proxyccl.channels.collectives.reductions import launchable_of, steps_of_all_reduce
from proxyccl.channels.collectives.request import Request, request_of
from proxyccl.channels.collectives.run import issue
from proxyccl.channels.collectives.table import NORM_KERNELS
from proxyccl.channels.group import Group
from proxyccl.channels.segment.calls import CollectiveCall
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.arrays.dtypes import DType, as_dtype
from proxyccl.device.errors import ArgumentError
from proxyccl.device.kernel import Launch
from proxyccl.device.runtime import Runtime, StreamLike

FLOAT8 = "float8_e4m3fn"
_DTYPES = ("bfloat16", "float16")
_OUTPUTS = ("out", "residual_out", "scales")
_MOST_NUMBER = 3e38
_MOST_WIDTH = 1 << 18
"""The longest row: a block's shared memory has four numbers for each group of a row's packets."""
_NORMS_AT_ONCE = 4
"""The most blocks of the kernel that normalizes rows after another launch has reduced them, as a multiple of the blocks
of a collective.
"""


class NormedRows(NamedTuple):
    """The results of `Communicator.all_reduce_rms_norm`.

    Attributes:
        out: the normalized rows; None if the call has no weight.
        residual: the sums of the ranks' rows and the residual.
        scales: with `quantize="float8"`, each row's scale; otherwise None.
    """

    out: Any
    residual: Any
    scales: Any


class _Options(NamedTuple):
    """The options of a call, as `Calls` (_calls.pyi) takes them."""

    prepare: Any  # prepares the call
    # `algorithm`, `cta_policy`, `eps`, `weight_bias`: the caller's arguments.
    algorithm: Any
    cta_policy: Any
    eps: float
    weight_bias: float
    # `inputs`, `outputs`: the names of the arguments that are arrays.
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class _Rows(NamedTuple):
    """The views of a call's arrays, by name, and the rows' shape."""

    views: dict[str, ArrayView]
    rows: int
    width: int

    def launch(
        self,
        runtime: Runtime,
        shape: RowShape,
        algorithm: str | None,
        x: int,
        options: _Options,
        blocks: int,
        *team: bytes,
    ) -> Launch:
        kernel = NORM_KERNELS[algorithm]
        parts = ["lines" if shape.lines else "packets", *([str(shape.blocks)] * (shape.blocks > 1))]
        name = "_".join((kernel.name, *parts, *([] if self._whole(x) else ["apart"])))
        found = (self.views.get(each) for each in ("residual", "weight", "out", "residual_out", "scales", "quantize"))
        arrays = (x, *(None if view is None else view.ptr for view in found))
        sizes = (shape.share, shape.row_packets, shape.packets, shape.epochs, shape.keeps)
        shipped = runtime.shipped(kernel.file, name, self.views["x"].dtype.name)
        arguments = (*team, *arrays, self.rows, self.width, options.eps, options.weight_bias, *sizes)
        return shipped.prepare(blocks, shape.threads, *arguments, shared=shape.shared_bytes)

    @property
    def row_bytes(self) -> int:
        return self.width * self.views["x"].dtype.itemsize

    def _whole(self, x: int) -> bool:
        """Returns whether all rows, those of `x` included, are aligned to ALIGNMENT. The alignment may differ between
        ranks, because it does not change the packets.
        """
        addresses = [x, *(view.ptr for name, view in self.views.items() if name not in ("x", "scales", "quantize"))]
        return all(number % ALIGNMENT == 0 for number in (self.row_bytes, *addresses))


class NormCalls:
    """The method of `Communicator` for reductions that also normalize rows."""

    _group: Group
    _collectives: Collectives

    def all_reduce_rms_norm(
        self,
        x: Any,
        residual: Any,
        weight: Any,
        eps: float,
        *,
        weight_bias: float = 0.0,
        out: Any = None,
        residual_out: Any = None,
        scales: Any = None,
        quantize: Any = None,
        algorithm: str | None = None,
        cta_policy: str | None = None,
        stream: StreamLike = None,
    ) -> NormedRows:
        """Adds the ranks' rows and a residual, and normalizes each row by RMSNorm. All ranks call this together, with
        the same residual, weight and options; only the places of results may differ.

        The result `residual` is the sum of the ranks' `x`, with the same bits as from `all_reduce`, plus the argument
        `residual`, rounded to the element type. The result `out` is ``residual / sqrt(mean(residual**2) + eps) *
        (weight + weight_bias)`` with the mean of each row, computed in float32 and rounded once. A row's bits may
        depend on the number of rows only if `tune` has chosen algorithms that add in different orders, which
        `invariant` prevents. Within a node, the call is one launch if rows are multiples of 16 bytes.

        Args:
            x: this rank's rows: a contiguous array [..., width] of float16 or bfloat16, with a width of at most
                262,144; the same shape on all ranks.
            residual: an array like `x`; None to add nothing.
            weight: an array [width] of the type of `x`; None to add without normalizing.
            eps: added to the mean of squares.
            weight_bias: added to each weight, in float32; 1 for Gemma's norms. Needs a weight unless it is 0.
            out: where `out` goes: an array like `x`, of float8_e4m3fn with `quantize`; may be `x` or `residual`; None
                for a new array.
            residual_out: where `residual` goes: an array like `x`; may be `x` or `residual`; None for a new array.
            scales: where the scales go: an array [..., 1] of float32; None for a new array.
            quantize: "float8" for one scale per row, returned in `scales`: the row's greatest magnitude divided by 448;
                or an array of one float32, the scale of all rows. With `quantize`, `out` is the normalized row divided
                by its scale, and saturates at 448. None rounds to the type of `x`.
            algorithm, cta_policy: as for `all_reduce`. With "one_shot" and "two_shot_packets" the call is one launch;
                with other algorithms it is an all_reduce, followed by a launch that normalizes the rows, even under the
                policy "zero".
            stream: as for `all_reduce`.

        Returns:
            `out`, `residual` and `scales`. `out` is None without `weight`; `scales` is None without
                `quantize="float8"`.

        Raises the errors of `all_reduce`, MismatchError also if ranks differ in `eps`, `weight_bias` or `quantize`, or
        in whether they pass a residual and a weight; and ArgumentError for an array of a wrong shape or type, for
        arrays that overlap in part, and for options that contradict each other.
        """
        collectives = self._collectives
        by_row = isinstance(quantize, str)
        if by_row and quantize != "float8":
            raise ArgumentError("quantize", f"must be None, 'float8' or an array of one float32, not {quantize!r}")
        if weight is None and (quantize is not None or out is not None or weight_bias):
            raise ArgumentError(
                "weight", "expected an array, because `out`, `quantize` and `weight_bias` need normed rows"
            )
        if scales is not None and not by_row:
            raise ArgumentError("scales", "expected None without quantize='float8'")
        inputs = {"x": x, "residual": residual, "weight": weight, "quantize": None if by_row else quantize}
        outputs = {"out": out, "residual_out": residual_out, "scales": scales}
        made = ["residual_out", *([] if weight is None else ["out"]), *(["scales"] if by_row else [])]
        missing = [name for name in made if outputs[name] is None]
        if missing:
            source = input_view(self._group, x, "x")
            outputs.update((name, _new(collectives, source, name, float8=quantize is not None)) for name in missing)
        inputs, outputs = (
            {name: each for name, each in arrays.items() if each is not None} for arrays in (inputs, outputs)
        )
        prepare = collectives.preparing.get(NormCalls)
        if prepare is None:
            prepare = collectives.preparing.setdefault(NormCalls, functools.partial(_prepare, collectives))
        epsilon = _as_float32("eps", eps, 0)
        bias = _as_float32("weight_bias", weight_bias, -_MOST_NUMBER) if weight_bias else 0.0
        options = tuple(_Options(prepare, algorithm, cta_policy, epsilon, bias, (*inputs,), (*outputs,)))
        issue(collectives, (*inputs.values(),), (*outputs.values(),), options, stream, names=((*inputs,), (*outputs,)))
        return NormedRows(outputs.get("out"), outputs["residual_out"], outputs.get("scales"))


def _as_float32(name: str, given: Any, least: float) -> float:
    try:
        value = math.nan if isinstance(given, (bool, str)) else float(given)
    except (TypeError, ValueError):
        value = math.nan
    if not least <= value <= _MOST_NUMBER:
        bound = "" if least < 0 else f"from {least} on "
        raise ArgumentError(name, f"must be a number {bound}that a float32 can hold, not {given!r}")
    return value


def _new(collectives: Collectives, x: ArrayView, name: str, *, float8: bool) -> Any:
    if name == "scales":
        return new_like(collectives.group, x, (*x.shape[:-1], 1), as_dtype("float32"))
    return new_like(collectives.group, x, x.shape, as_dtype(FLOAT8) if float8 and name == "out" else None)


def _prepare(collectives: Collectives, x: Any, out: Any, given: tuple[Any, ...], _reached: bool, logged: bool) -> Form:
    options = _Options(*given)
    named = dict(zip((*options.inputs, *options.outputs), (*x, *out), strict=True))
    request = request_of("all_reduce", options.algorithm, options.cta_policy, False, collectives.standing.cta_policy)
    rows = _check(collectives.group, named)
    source = rows.views["x"]
    numbers = struct.pack("2f", options.eps, options.weight_bias)
    entry = CollectiveCall(
        "all_reduce_rms_norm",
        source.dtype.name,
        "sum",
        request.name,
        count=source.size,
        shape=(rows.rows, rows.width, numbers, *options.inputs, "scales" in options.outputs),
    )
    views = tuple(rows.views.values())
    return collectives.prepare_form(entry, views, lambda: _launch(collectives, rows, request, options), logged=logged)


def _check(group: Group, named: dict[str, Any]) -> _Rows:
    views = {name: input_view(group, array, name) for name, array in named.items()}
    x = views["x"]
    if x.dtype.name not in _DTYPES:
        raise ArgumentError("x", f"has element type {x.dtype}; expected one of {', '.join(_DTYPES)}")
    if not x.shape or not 0 < x.shape[-1] <= _MOST_WIDTH:
        raise ArgumentError("x", f"has shape {x.shape}; expected rows of 1 to {_MOST_WIDTH} elements")
    width = x.shape[-1]
    like, by_row = x.shape, (*x.shape[:-1], 1)
    float8, float32 = as_dtype(FLOAT8), as_dtype("float32")
    normed = float8 if "scales" in views or "quantize" in views else x.dtype
    expected: dict[str, tuple[tuple[int, ...] | None, DType]] = {
        "residual": (like, x.dtype),
        "weight": ((width,), x.dtype),
        "quantize": (None, float32),
        "out": (like, normed),
        "residual_out": (like, x.dtype),
        "scales": (by_row, float32),
    }
    for name, view in views.items():
        shape, dtype = expected.get(name, (like, x.dtype))
        if view.dtype != dtype:
            raise ArgumentError(name, f"has element type {view.dtype}; expected {dtype}")
        if shape is None and view.size != 1:
            raise ArgumentError(name, f"has {view.size} elements; expected one, the scale of all rows")
        if shape is not None and view.shape != shape:
            raise ArgumentError(name, f"has shape {view.shape}; expected {shape}")
        if name in _OUTPUTS:
            require_writable(view, name)
    _refuse_overlaps(views)
    return _Rows(views, x.size // width, width)


def _launch(collectives: Collectives, rows: _Rows, request: Request, options: _Options) -> Launchable:
    group, source, row_bytes = collectives.group, rows.views["x"], rows.row_bytes
    dtype = source.dtype
    runtime, defaults = group.runtime, group.runtime.launch_defaults
    alone = group.world_size == 1
    chosen = "alone" if alone else collectives.choose("all_reduce", request, dtype, source.nbytes)
    packets = None if alone or chosen == "hierarchical" else collectives.team().packets
    if request.algorithm is None and chosen not in ("proxy", "hierarchical"):
        chosen = "one_shot" if chosen == "one_shot" or group.world_size == 2 else "two_shot_packets"
    if packets is not None and chosen in NORM_KERNELS and row_bytes % ALIGNMENT == 0:
        shape = packets.row_shape(rows.rows, row_bytes)
        blocks, team = packets.of_rows(shape, rows.rows, request.cta_policy)
        return rows.launch(runtime, shape, chosen, source.ptr, options, blocks, team)
    lines = packets is not None and len(packets.scratch) > 1  # if packets are lines, sums have another order
    shape = RowShape.of(defaults, row_bytes, None, lines=lines)
    blocks = min(rows.rows, _NORMS_AT_ONCE * defaults.blocks)
    if alone:
        return rows.launch(runtime, shape, None, source.ptr, options, blocks)
    summed = collectives.scratch(source.nbytes)
    target = ArrayView(summed.ptr, source.shape, dtype, source.device, True, summed)
    reduced = steps_of_all_reduce(collectives, Call(None, None, source, target, "sum", None, request), chosen)
    return launchable_of(collectives, [*reduced, rows.launch(runtime, shape, None, summed.ptr, options, blocks)])


def _refuse_overlaps(views: dict[str, ArrayView]) -> None:
    names = [*views]
    for number, name in enumerate(names):
        for other in names[:number]:
            a, b = views[other], views[name]
            whole = a.ptr == b.ptr and a.nbytes == b.nbytes and other in ("x", "residual")
            if overlap(a, b) and not (whole and name != "weight"):
                raise ArgumentError(name, f"overlaps {other}; expected an array in separate memory")
