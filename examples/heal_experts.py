"""Serves a mixture of experts that loses a rank, continues, and replaces the rank.

    python examples/heal_experts.py

Four ranks serve eight experts; some experts have places on two ranks. In the middle of a step, rank 2 is killed.

1. The other ranks shrink the layer and repeat the step. Experts with a second place stay; the slots of other experts
   are dropped.
2. A new process loads the weights of experts that no other rank has from a checkpoint. When it is ready, the others
   grow the layer: the new process has the number of rank 2.
3. Expert 1 gets its second place on rank 2 again, and expert 7 gets a second place on rank 3. While the ranks continue,
   `place` reads the weights from ranks that have them. When the weights have arrived, all ranks change the placement
   between two steps.

Every rank checks every result of every step exactly. The example starts its ranks itself, because mpiexec ends the
whole job when a rank ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from proxyccl import Communicator, CommunicatorError, EPAll2AllLayer, FileBootstrap

RANKS, PER_RANK, EXPERTS, TOKENS, HIDDEN, TOPK = 4, 3, 8, 16, 256, 2
BEFORE = (0, 1, 2, 3, 0, 4, 5, 1, 7, 6, 2, -1)  # the expert of each rank's three places
JOINED = (0, 1, 2, 3, 0, 4, 5, -1, 7, 6, 2, -1)  # when rank 2 was replaced: without the expert that rank 0 has too
AFTER = (*BEFORE[:-1], 7)
LOST, LAST_STEP, STEPS_AFTER = 2, 50, 100


def checkpoint(expert: int) -> np.ndarray:
    """Returns an expert's weights, which multiply the elements of a token; for -1, no expert, zeros."""
    if expert < 0:
        return np.zeros(HIDDEN, np.float32)
    return np.random.default_rng(expert).integers(1, 9, HIDDEN).astype(np.float32)


def serve(layer: EPAll2AllLayer, weights: np.ndarray, number: int, step: int, *, dies: bool = False) -> None:
    """Sends this rank's tokens of a step to their experts, and checks the combined results."""
    rng = np.random.default_rng([step, number])
    tokens = rng.integers(0, 50, (TOKENS, HIDDEN)).astype(np.float32)
    ids = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.int32), (TOKENS, 1)), axis=1)[:, :TOPK].copy()
    rows, _, desc = layer.dispatch(tokens, ids)
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    first = layer.ctx.communicator.rank * PER_RANK
    counts = desc.counts.sum(axis=0)[first : first + PER_RANK]
    out = layer.combine(rows * np.repeat(weights, counts, axis=0), desc)
    here = {e for place, e in enumerate(layer.placement) if place // PER_RANK not in layer.lost_ranks}
    factors = np.stack([checkpoint(e) if e in here else np.zeros(HIDDEN, np.float32) for e in range(EXPERTS)])
    np.testing.assert_array_equal(out, tokens * factors[ids].sum(axis=1))


def agree(layer: EPAll2AllLayer, ready: bool) -> bool:
    """Returns whether all ranks are ready; the same on all ranks, which make this call together."""
    return all(theirs == b"1" for theirs in layer.ctx.communicator.all_gather_bytes(b"1" if ready else b"0"))


def steps_of(layer: EPAll2AllLayer, step: int) -> list[int]:
    return [int.from_bytes(theirs) for theirs in layer.ctx.communicator.all_gather_bytes(step.to_bytes(4))]


def rank_main(directory: str, number: int, generation: int) -> None:
    """Runs one rank until the layer has healed and the experts have their places of `AFTER`."""
    here, placement = Path(directory), JOINED if generation else BEFORE
    weights = np.stack([checkpoint(expert) for expert in placement[number * PER_RANK :][:PER_RANK]])
    whole = FileBootstrap(here / f"group-{generation}", number, RANKS)
    if generation:
        (here / "ready").touch()
    comm = Communicator(whole, "host", timeout=10)
    sizes = TOKENS, HIDDEN, TOPK, number, len(BEFORE), comm.local_world_size, RANKS
    layer = EPAll2AllLayer(comm, *sizes, dtype="float32", placement=placement)
    step = max(steps_of(layer, 0))  # a new process begins with the step of the other ranks
    last, after = time.perf_counter(), 0
    what = ""  # the event since the last step
    while after < STEPS_AFTER:
        try:
            if layer.lost_ranks and agree(layer, (here / "ready").exists()):
                shrunk = layer
                shrunk.place(JOINED)
                comm = comm.grow(FileBootstrap(here / "group-1", number, RANKS))
                layer, what = shrunk.grow(comm), "all ranks are there again"
                shrunk.finalize()  # closes its communicator, which `shrink` made
                step = max(steps_of(layer, step))
                continue
            if layer.placement == JOINED and layer.place(AFTER, [weights]):
                what = "experts 1 and 7 have second places"
            serve(layer, weights, number, step, dies=(number, generation, step) == (LOST, 0, LAST_STEP))
        except CommunicatorError as error:
            layer = layer.shrink()
            comm = layer.ctx.communicator
            step, what = min(steps_of(layer, step)), f"{type(error).__name__}, ranks {layer.lost_ranks} are lost"
            continue
        now = time.perf_counter()
        if number == 0 and what:
            print(f"step {step}: {what}; right results after {now - last:.3f} s", flush=True)
        last, what, step, after = now, "", step + 1, after + (layer.placement == AFTER)
    layer.finalize()
    comm.close()


def main() -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        ranks = [context.Process(target=rank_main, args=(directory, rank, 0)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        ranks[LOST].join()
        assert ranks[LOST].exitcode == -signal.SIGKILL
        ranks[LOST] = context.Process(target=rank_main, args=(directory, LOST, 1))
        ranks[LOST].start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        sys.exit(f"a rank failed; exit codes {[process.exitcode for process in ranks]}")
    print(f"OK: all results are exact; rank {LOST} was killed and replaced")


if __name__ == "__main__":
    main()
