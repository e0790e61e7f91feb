"""Lists the contenders, and the other people's programs that `programs.py` runs, by family. Needs no torch.

The programs are unchanged; a contender sets the backend of torch's default group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TURN, PROBLEM, GO = "TURN", "PROBLEM ", "GO"
"""The line that a job's first rank prints when the ranks have come to a turn, the beginning of its line with the reason
why a program was not run, and the line by which `programs.py` lets the ranks begin a turn.
"""

OURS = "proxyccl"
CONTENDERS: dict[str, dict[str, str]] = {
    OURS: {},
    "peer": {},
    f"{OURS}, default": {"PROXYCCL_CTA_POLICY": "default"},
    f"{OURS}, zero": {"PROXYCCL_CTA_POLICY": "zero"},
    f"{OURS}, unlent": {"PROXYCCL_LEND_BYTES": "0"},
}
"""The variables of each contender. The peer is NCCL, or gloo on CPUs."""

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        title: the program's name on the results page.
        function: the module and name of the program's function, which takes the `World` and the options.
        options: the function's keyword arguments.
        needs: modules that the program imports.
        ranks: the least number of ranks with which the program can run.
        needs_gpu: whether the program can't run on CPUs.
        rounding: the allowed difference between the outputs of two contenders, relative to the largest output.
        variants: whether the program also runs with ProxyCCL settings other than the defaults.
        seconds: the time after which the program is ended.
    """

    title: str
    function: str
    options: dict[str, Any]
    needs: tuple[str, ...] = ()
    ranks: int = 1
    rounding: float = 0.02
    needs_gpu: bool = False
    variants: bool = True
    seconds: float = 45


def _of(title: str, function: str, *needs: str, about: dict[str, Any] | None = None, **options: Any) -> Program:
    return Program(title, function, options, needs, **about or {})


_FRAMEWORKS, _TORCH = "others_frameworks", "others_torch"
FAMILIES: dict[str, tuple[Program, ...]] = {
    "accelerate": tuple(
        _of(
            f"Accelerate {how}, Llama",
            f"{_FRAMEWORKS}:accelerate_llama",
            "accelerate",
            "transformers",
            about={"needs_gpu": sharded},  # Accelerate shards no model on CPUs
            sharded=sharded,
        )
        for how, sharded in (("DDP", False), ("FSDP2", True))
    ),
    "deepspeed": tuple(
        _of(
            f"DeepSpeed ZeRO-{stage}, Llama",
            f"{_FRAMEWORKS}:deepspeed_llama",
            "deepspeed",
            "transformers",
            stage=stage,
        )
        for stage in (2, 3)
    ),
    "lightning": (_of("Lightning DDP, SyncBatchNorm", f"{_FRAMEWORKS}:lightning_ddp", "pytorch_lightning"),),
    "transformers": tuple(
        _of(
            f"transformers tp_plan, {what}{', compiled' if compiled else ''}",
            f"{_FRAMEWORKS}:llama_tp",
            "transformers",
            "accelerate",
            about={"seconds": 90, "variants": not compiled},
            what=what,
            compiled=compiled,
        )
        for what in ("forward", "generate")
        for compiled in (False, True)
    ),
    "tensor-parallel": (
        _of("DTensor TP, sequence parallel", f"{_TORCH}:tensor_parallel", copies=1, sharded=False),
        _of("DTensor TP, sequence parallel, under FSDP2", f"{_TORCH}:tensor_parallel", copies=1, sharded=True),
        _of(
            "two copies of DTensor TP, sequence parallel, under FSDP2",
            f"{_TORCH}:tensor_parallel",
            about={"ranks": 4},
            copies=2,
            sharded=True,
        ),
    ),
    "fsdp": (
        _of("FSDP2", f"{_TORCH}:fsdp2", offload=False),
        _of("FSDP2, CPU offload", f"{_TORCH}:fsdp2", offload=True),
    ),
    "functional": tuple(
        _of(f"functional collectives, {'compiled' if compiled else 'eager'}", f"{_TORCH}:functional", compiled=compiled)
        for compiled in (False, True)
    ),
    "context-parallel": tuple(
        _of(
            f"context parallel, {rotation}",
            f"{_TORCH}:context_parallel_attention",
            about={"needs_gpu": True},
            rotation=rotation,
        )
        for rotation in ("allgather", "alltoall")
    ),
    "new-tensors": tuple(
        _of(
            f"{call}, new tensors, {nbytes >> 10} KiB",
            f"{_TORCH}:new_tensors",
            call=call,
            about={"rounding": 1e-6},
            nbytes=nbytes,
        )
        for call in ("all_reduce", "all_gather")
        for nbytes in (4 << 10, 256 << 10, 16 << 20)
    ),
    "decoder": tuple(
        _of(
            f"decoder, batch {batch}, {'graph' if graph else 'eager'}",
            f"{_TORCH}:decoder",
            about={"needs_gpu": graph},
            batch=batch,
            graph=graph,
        )
        for batch in (1, 256)
        for graph in (False, True)
    ),
    "checkpoint": tuple(
        _of(f"DCP {what} of FSDP2", f"{_TORCH}:checkpoint", about={"rounding": 1e-6}, what=what)
        for what in ("save", "load")
    ),
    "pipelines": tuple(
        _of(f"pipeline, {schedule}", f"{_TORCH}:pipeline", about={"ranks": 2}, schedule=schedule)
        for schedule in SCHEDULES
    ),
}


def named(title: str) -> tuple[str, Program]:
    """Returns the family and the program of a title."""
    every = {program.title: (family, program) for family, programs in FAMILIES.items() for program in programs}
    return every[title]
