"""The operators and the kernels of the shipped collectives. A new collective needs a row in this table, and a class in
`moves.py` or `reductions.py`.
"""

from __future__ import annotations

from msgspec import Struct

from proxyccl.channels.segment.calls import register_names
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.arrays.dtypes import reduction_dtypes
from proxyccl.device.build.ahead_of_time import Shipped
from proxyccl.device.errors import ArgumentError
from proxyccl.device.kernel import Kernel
from proxyccl.device.runtime import Runtime

BITWISE_OPS = ("band", "bor", "bxor")
"""Operators that take only integers."""
OPS = ("sum", "prod", "min", "max", "avg", *BITWISE_OPS)


def require_op(op: str) -> None:
    if not isinstance(op, str) or op not in OPS:
        raise ArgumentError("op", f"unknown op {op!r}; expected one of {', '.join(OPS)}")


def require_reducible(source: ArrayView, op: str) -> None:
    """Raises ArgumentError for an array whose elements the operator can't reduce."""
    if not source.dtype.c_name:
        known = ", ".join(reduction_dtypes())
        raise ArgumentError("x", f"element type {source.dtype} can't be reduced; use one of {known}")
    if op in BITWISE_OPS and not source.dtype.bitwise:
        raise ArgumentError("op", f"{op!r} needs integers, not {source.dtype}")


class CollectiveKernel(Struct, frozen=True):
    file: str
    name: str  # the kernel's name in `file`
    reduces: bool = False  # whether there is a kernel for each element type and operator

    def load(self, runtime: Runtime, dtype: str | None = None, op: str | None = None) -> Kernel:
        """Returns the compiled kernel; if it reduces, the kernel for an element type and an operator."""
        return runtime.shipped(self.file, self.name, dtype, op)


ALL_REDUCE_KERNELS: dict[str, CollectiveKernel] = {
    "one_shot": CollectiveKernel("all_reduce_one_shot.h", "all_reduce_one_shot", reduces=True),
    "recursive_doubling": CollectiveKernel(
        "all_reduce_recursive_doubling.h", "all_reduce_recursive_doubling", reduces=True
    ),
    "two_shot_packets": CollectiveKernel("all_reduce_two_shot_packets.h", "all_reduce_two_shot_packets", reduces=True),
    "two_shot": CollectiveKernel("all_reduce_two_shot.h", "all_reduce_two_shot", reduces=True),
    "ring": CollectiveKernel("all_reduce_ring.h", "all_reduce_ring", reduces=True),
    "proxy": CollectiveKernel("all_reduce_by_proxy.h", "all_reduce_by_proxy", reduces=True),
}
"""The kernels of all_reduce by algorithm. `hierarchical` consists of other kernels; if a peer is not mapped, `two_shot`
uses the kernel of `proxy`.
"""

REDUCTION_OF_SCHEDULES = CollectiveKernel("reduce_arrived.h", "reduce_arrived", reduces=True)
"""The kernel that reduces data that the proxies have moved."""

WIDEN_FLOAT16 = CollectiveKernel("float16_parts.h", "widen_float16")
NARROW_FLOAT16 = CollectiveKernel("float16_parts.h", "narrow_float16")
"""The kernels by which a hierarchical all_reduce converts float16 to float32 and back."""

LINE_KERNELS: dict[str, CollectiveKernel] = {
    "one_shot": CollectiveKernel("all_reduce_one_shot.h", "all_reduce_one_shot_lines", reduces=True),
    "two_shot_packets": CollectiveKernel("all_reduce_two_shot_packets.h", "all_reduce_two_shot_lines", reduces=True),
    **{name: CollectiveKernel("packet_moves.h", f"{name}_lines") for name in ("all_gather", "all_to_all")},
}
"""The kernels whose packets are lines, for longer messages; by algorithm or by collective."""

PACKET_MOVES = {name: CollectiveKernel("packet_moves.h", f"{name}_packets") for name in ("all_gather", "all_to_all")}
"""The kernels that move short shares, by collective."""

NORM_KERNELS = {
    "one_shot": CollectiveKernel("all_reduce_rms_norm.h", "one_shot_rms_norm"),
    "two_shot_packets": CollectiveKernel("all_reduce_rms_norm.h", "two_shot_rms_norm"),
    None: CollectiveKernel("add_rms_norm.h", "add_rms_norm"),
}
"""The kernels that also add residuals and normalize rows, by algorithm; the key None is for rows that another launch
has reduced. Each kernel exists for each element type, once for packets and once for lines; "packets" or "lines" ends
its name.
"""

_REDUCED_IN_LINES = tuple(kernel for kernel in LINE_KERNELS.values() if kernel.reduces)
_ALL_REDUCE = (
    *ALL_REDUCE_KERNELS.values(),
    *_REDUCED_IN_LINES,
    REDUCTION_OF_SCHEDULES,
    WIDEN_FLOAT16,
    NARROW_FLOAT16,
)
SEND_RECEIVE = CollectiveKernel("send_receive.h", "send_receive")

COLLECTIVES: dict[str, tuple[CollectiveKernel, ...]] = {
    **dict.fromkeys(("all_reduce", "reduce"), _ALL_REDUCE),
    "reduce_scatter": (CollectiveKernel("reduce_scatter.h", "reduce_scatter", reduces=True), REDUCTION_OF_SCHEDULES),
    "all_gather": (CollectiveKernel("moves.h", "all_gather"), PACKET_MOVES["all_gather"], LINE_KERNELS["all_gather"]),
    "all_to_all": (CollectiveKernel("moves.h", "all_to_all"), PACKET_MOVES["all_to_all"], LINE_KERNELS["all_to_all"]),
    "broadcast": (CollectiveKernel("moves.h", "broadcast"),),
    **dict.fromkeys(("send", "recv", "all_to_all_v", "gather", "scatter"), (SEND_RECEIVE,)),
    "barrier": (CollectiveKernel("moves.h", "barrier"),),
}


KERNELS_OF_STEPS: tuple[Shipped, ...] = tuple(
    (kernel.file, kernel.name, dtype, op)
    for kernel in sorted(
        {kernel for kernels in COLLECTIVES.values() for kernel in kernels},
        key=lambda kernel: (kernel.reduces, kernel.file, kernel.name),
    )
    for dtype in (("bfloat16", "float32") if kernel.reduces else (None,))
    for op in (("avg", "sum") if kernel.name == "reduce_scatter" else ("sum",) if kernel.reduces else (None,))
)
"""The kernels that training steps and forward passes use, in the order of use. FSDP2 averages; other programs sum."""

register_names(*OPS, *COLLECTIVES, "all_reduce_rms_norm")
