"""all_reduce_rms_norm: reduces rows, adds the residual and applies RMSNorm, in one launch if ranks exchange packets. If
the residual is divided among the ranks, each rank reduces and normalizes its own rows, which the ranks then gather.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

from proxyccl.channels.arguments import input_view, new_like, overlap, require_writable, share_shape
from proxyccl.channels.calls._calls import Form
from proxyccl.channels.calls.launches import Launchable
from proxyccl.channels.collectives.collective import Call
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.moves import ALL_GATHER
from proxyccl.channels.collectives.packet_team import ALIGNMENT, RowShape
from proxyccl.channels.collectives.reductions import REDUCE_SCATTER, part_of, steps_of_all_reduce
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
_JOINED = ("one_shot", "two_shot_packets", "two_shot")
"""The algorithms of all_reduce that add in the order of the ranks, as the kernels that also normalize do."""
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
        residual: the sums of the ranks' rows and the residual; with a divided residual, only this rank's share.
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
    """The views of a call's arrays, by name, and the rows' shape.

    Attributes:
        divided: whether each rank has only its share of the residual and of the sums.
    """

    views: dict[str, ArrayView]
    rows: int
    width: int
    divided: bool = False

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

    def of_rank(self, rank: int, ranks: int) -> _Rows:
        """Returns a rank's share of the rows, for a divided residual."""
        counts = {name: view.size // ranks for name, view in self.views.items() if name in ("x", "out", "scales")}
        own = {name: part_of(self.views[name], rank * count, count) for name, count in counts.items()}
        return _Rows({**self.views, **own}, self.rows // ranks, self.width)

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

        The residual may be *divided* among the ranks, as in sequence parallelism: `residual` and `residual_out` are
        then arrays [M / world_size, ..., width], this rank's share of `x`, whose first dimension is M. Each rank
        reduces and normalizes its share, and then the ranks gather `out` and `scales`. The call consists of a
        `reduce_scatter`, a launch that normalizes, and one `all_gather` for each of the two results. The sums have the
        bits of `reduce_scatter`, so within a node all results have the same bits as without the division.

        Args:
            x: this rank's rows: a contiguous array [..., width] of float16 or bfloat16, with a width of at most
                262,144; the same shape on all ranks.
            residual: an array like `x`, or this rank's share; None to add nothing.
            weight: an array [width] of the type of `x`; None to add without normalizing.
            eps: added to the mean of squares.
            weight_bias: added to each weight, in float32; 1 for Gemma's norms. Needs a weight unless it is 0.
            out: where `out` goes: an array like `x`, of float8_e4m3fn with `quantize`; may be `x` or `residual`; None
                for a new array.
            residual_out: where `residual` goes: an array like the argument `residual`; may be `x` or `residual`; None
                for a new array. Without a residual, an array of this rank's share divides the sums.
            scales: where the scales go: an array [..., 1] of float32; None for a new array.
            quantize: "float8" for one scale per row, returned in `scales`: the row's greatest magnitude divided by 448;
                or an array of one float32, the scale of all rows. With `quantize`, `out` is the normalized row divided
                by its scale, and saturates at 448. None rounds to the type of `x`.
            algorithm, cta_policy: as for `all_reduce`. With "one_shot" and "two_shot_packets" the call is one launch;
                with other algorithms it is an all_reduce, followed by a launch that normalizes the rows, even under the
                policy "zero". With a divided residual: as for `reduce_scatter`.
            stream: as for `all_reduce`.

        Returns:
            `out`, `residual` and `scales`. `out` is None without `weight`; `scales` is None without
                `quantize="float8"`.

        Raises the errors of `all_reduce`, MismatchError also if ranks differ in `eps`, `weight_bias` or `quantize`, in
        whether they pass a residual and a weight, or in whether they divide the residual; and ArgumentError for an
        array of a wrong shape or type, for arrays that overlap in part, and for options that contradict each other.
        """
        collectives = self._collectives
        by_row = isinstance(quantize, str)
        if by_row and quantize != "float8":
            raise ArgumentError("quantize", f"must be None, 'float8' or an array of one float32, not {quantize!r}")
        epsilon = _as_float32("eps", eps, 0)
        bias = _as_float32("weight_bias", weight_bias, -_MOST_NUMBER)
        if weight is None and (quantize is not None or out is not None or bias):
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
            kept = source if residual is None else input_view(self._group, residual, "residual")
            kinds = _kinds(source, kept.shape, quantizes=quantize is not None)
            outputs.update((name, new_like(self._group, source, *kinds[name])) for name in missing)
        inputs, outputs = (
            {name: each for name, each in arrays.items() if each is not None} for arrays in (inputs, outputs)
        )
        prepare = collectives.preparing.get(NormCalls)
        if prepare is None:
            prepare = collectives.preparing.setdefault(NormCalls, _Preparer(collectives))
        options = tuple(_Options(prepare, algorithm, cta_policy, epsilon, bias, (*inputs,), (*outputs,)))
        issue(collectives, (*inputs.values(),), (*outputs.values(),), options, stream, names=((*inputs,), (*outputs,)))
        return NormedRows(outputs.get("out"), outputs["residual_out"], outputs.get("scales"))


def _kinds(x: ArrayView, kept: tuple[int, ...], *, quantizes: bool) -> dict[str, tuple[tuple[int, ...], DType]]:
    """Returns the shape and the element type of each array, by name. `kept` is the shape of the residual and the sums.
    The scale "quantize" may have any shape of one element.
    """
    float32, normed = as_dtype("float32"), as_dtype(FLOAT8) if quantizes else x.dtype
    return {
        "x": (x.shape, x.dtype),
        **dict.fromkeys(("residual", "residual_out"), (kept, x.dtype)),
        "weight": (x.shape[-1:], x.dtype),
        "quantize": ((1,), float32),
        "out": (x.shape, normed),
        "scales": ((*x.shape[:-1], 1), float32),
    }


def _as_float32(name: str, given: Any, least: float) -> float:
    try:
        value = math.nan if isinstance(given, (bool, str)) else float(given)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not least <= value <= _MOST_NUMBER:
        bound = "" if least < 0 else f"from {least} on "
        raise ArgumentError(name, f"must be a number {bound}that a float32 can hold, not {given!r}")
    return value


class _Preparer:
    """Prepares one group's calls. A group has one `_Preparer`, because `Calls` compares it by identity."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(self, x: Any, out: Any, given: tuple[Any, ...], _reached: bool, logged: bool) -> Form:
        collectives, options = self._collectives, _Options(*given)
        named = dict(zip((*options.inputs, *options.outputs), (*x, *out), strict=True))
        rows = self._check(named)
        request = request_of(
            "reduce_scatter" if rows.divided else "all_reduce",
            options.algorithm,
            options.cta_policy,
            False,
            collectives.standing.cta_policy,
        )
        source = rows.views["x"]
        numbers = struct.pack("2f", options.eps, options.weight_bias)
        entry = CollectiveCall(
            "all_reduce_rms_norm",
            source.dtype.name,
            "sum",
            request.name,
            count=source.size,
            shape=(rows.rows, rows.width, numbers, *options.inputs, "scales" in options.outputs, rows.divided),
        )
        views = tuple(rows.views.values())
        return collectives.prepare_form(entry, views, lambda: self._launch(rows, request, options), logged=logged)

    def _check(self, named: dict[str, Any]) -> _Rows:
        group = self._collectives.group
        views = {name: input_view(group, array, name) for name, array in named.items()}
        x = views["x"]
        if x.dtype.name not in _DTYPES:
            raise ArgumentError("x", f"has element type {x.dtype}; expected one of {', '.join(_DTYPES)}")
        if not x.shape or not 0 < x.shape[-1] <= _MOST_WIDTH:
            raise ArgumentError("x", f"has shape {x.shape}; expected rows of 1 to {_MOST_WIDTH} elements")
        width, kept = x.shape[-1], views.get("residual", views["residual_out"]).shape
        may_divide = len(x.shape) > 1 and kept != x.shape and x.shape[0] % group.world_size == 0
        divided = may_divide and kept == share_shape(group, x)
        kinds = _kinds(x, kept if divided else x.shape, quantizes="scales" in views or "quantize" in views)
        for name, view in views.items():
            shape, dtype = kinds[name]
            if view.dtype != dtype:
                raise ArgumentError(name, f"has element type {view.dtype}; expected {dtype}")
            if name == "quantize" and view.size != 1:
                raise ArgumentError(name, f"has {view.size} elements; expected one, the scale of all rows")
            if name != "quantize" and view.shape != shape:
                raise ArgumentError(name, f"has shape {view.shape}; expected {shape}")
            if name in _OUTPUTS:
                require_writable(view, name)
        _refuse_overlaps(views)
        return _Rows(views, x.size // width, width, divided)

    def _launch(self, rows: _Rows, request: Request, options: _Options) -> Launchable:
        collectives, source = self._collectives, rows.views["x"]
        group, dtype, row_bytes = collectives.group, source.dtype, rows.row_bytes
        runtime, defaults = group.runtime, group.runtime.launch_defaults
        alone = group.world_size == 1
        packets = None if alone or group.topology.has_levels() else collectives.team().packets
        chosen = "none"
        if not (alone or rows.divided):
            chosen = collectives.choose("all_reduce", request, dtype, source.nbytes)
        if request.algorithm is None and chosen in _JOINED:
            chosen = "one_shot" if chosen == "one_shot" or group.world_size == 2 else "two_shot_packets"
        if packets is not None and chosen in NORM_KERNELS and row_bytes % ALIGNMENT == 0:
            shape = packets.row_shape(rows.rows, row_bytes, request.cta_policy)
            blocks, team = packets.of_rows(shape, rows.rows, request.cta_policy)
            return rows.launch(runtime, shape, chosen, source.ptr, options, blocks, team)
        lines = packets is not None and len(packets.scratch) > 1  # sends lines, which add squares in another order
        shape = RowShape.of(defaults, row_bytes, None, lines=lines)
        own = rows.of_rank(group.rank, group.world_size) if rows.divided else rows
        blocks = min(own.rows, _NORMS_AT_ONCE * defaults.blocks)
        if alone:
            return rows.launch(runtime, shape, None, source.ptr, options, blocks)
        summed = collectives.scratch(own.views["x"].nbytes)
        target = ArrayView(summed.ptr, own.views["x"].shape, dtype, source.device, True, summed)
        call = Call(None, None, source, target, "sum", None, request)
        norm = own.launch(runtime, shape, None, summed.ptr, options, blocks)
        if not rows.divided:
            return collectives.launchable([*steps_of_all_reduce(collectives, call, chosen), norm])
        steps = [*REDUCE_SCATTER.steps(collectives, call), norm]
        for name in ("out", "scales"):
            if name in own.views:
                gather = Call(None, None, own.views[name], rows.views[name], None, None, request)
                steps += ALL_GATHER.steps(collectives, gather)
        return collectives.launchable(steps)


def _refuse_overlaps(views: dict[str, ArrayView]) -> None:
    names = [*views]
    for number, name in enumerate(names):
        for other in names[:number]:
            a, b = views[other], views[name]
            whole = a.ptr == b.ptr and a.nbytes == b.nbytes and other in ("x", "residual")
            if overlap(a, b) and not (whole and name != "weight"):
                raise ArgumentError(name, f"overlaps {other}; expected an array in separate memory")
