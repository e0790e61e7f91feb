"""A rank of `programs.py`: torchrun --nproc-per-node 2 programs_rank.py fsdp-bf16 issue …

The rank prints each measured row on a line.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable

import programs_calls
import programs_trainings
import torch.distributed as dist
from program import end_if_it_hangs
from programs_ranks import Ranks, Variant

CALLS: dict[str, Callable[..., None]] = {
    "issue": programs_calls.measure_issue,
    "experts": programs_calls.measure_experts,
    "proxied-graphs": programs_calls.measure_proxied_graphs,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=[*programs_trainings.CASES, *CALLS])
    parser.add_argument("--quick", action="store_true", help="measure less")
    parser.add_argument("--together", action="store_true", help="also time steps of trainings that follow one another")
    parser.add_argument("--variant", type=Variant.parse, action="append", help="of ours in trainings; see Variant")
    parser.add_argument("--seconds", type=float, default=60, help="after which a rank that hangs shows where")
    parsed = parser.parse_args()
    end_if_it_hangs(parsed.seconds / 2)
    ranks = Ranks()
    ranks.report_facts()
    variants = parsed.variant or [Variant.parse("default")]
    for part in parsed.parts:
        if part in CALLS:
            CALLS[part](ranks, quick=parsed.quick)
            continue
        for together in (False, True) if parsed.together else (False,):
            case = programs_trainings.CASES[part]
            programs_trainings.measure(ranks, case, variants, quick=parsed.quick, together=together)
            gc.collect()  # reference cycles keep models alive
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
