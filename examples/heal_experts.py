"""Serves a mixture of experts that loses a rank, continues, and replaces the rank.

    python examples/heal_experts.py

Four ranks serve eight experts; some experts have places on two ranks. In the middle of a step, rank 2 is killed.

1. The other ranks shrink the layer and repeat the step. Experts with a second place stay; the slots of other experts
   are dropped.
2. A new process reads the weights of rank 2's experts, by an agent from ranks that have these weights, and otherwise
   from a checkpoint. When it is ready, the others grow the layer: the new process has the number of rank 2.
3. Expert 7 gets a second place, on rank 3. While the ranks continue, an agent reads the weights from rank 2. When the
   weights have arrived, all ranks change the placement between two steps.

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
from proxyccl.transfer import Agent, Transfer

RANKS, PER_RANK, EXPERTS, TOKENS, HIDDEN, TOPK = 4, 3, 8, 16, 256, 2
BEFORE = (0, 1, 2, 3, 0, 4, 5, 1, 7, 6, 2, -1)  # the expert of each rank's three places
AFTER = (*BEFORE[:-1], 7)
LOST, LAST_STEP, STEPS_MEANWHILE = 2, 50, 100


def checkpoint(expert: int) -> np.ndarray:
    """Returns an expert's weights. The expert multiplies each element of a token by a small integer."""
    return np.random.default_rng(expert).integers(1, 9, HIDDEN).astype(np.float32)


class Weights:
    """The weights of a rank's places, which other ranks may read.

    Args:
        directory: a directory in which ranks find the metadata of other ranks' agents.
        number: the rank's number.
        generation: 0, or 1 for the process that takes the place of the lost rank.
    """

    def __init__(self, directory: Path, number: int, generation: int) -> None:
        self.array = np.zeros((PER_RANK, HIDDEN), np.float32)
        self._directory, self._first = directory, number * PER_RANK
        self.agent = Agent(f"{number}.{generation}")
        self._region = self.agent.register(self.array, label="weights")
        if generation:
            self._load([place for place in range(len(BEFORE)) if place // PER_RANK != number])
        else:
            self._load([])
        draft = directory / f"draft-{self.agent.name}"
        draft.write_bytes(self.agent.metadata())
        draft.rename(directory / f"agent-{self.agent.name}")

    def _load(self, others: list[int]) -> None:
        found = {BEFORE[place]: place for place in others}
        for local, expert in enumerate(BEFORE[self._first : self._first + PER_RANK]):
            if expert in found:
                self.read(self._first + local, found[expert], generation=0).wait()
            elif expert >= 0:
                self.array[local] = checkpoint(expert)

    def read(self, into: int, source: int, generation: int) -> Transfer:
        """Starts to read the weights in another rank's place `source` into this rank's place `into`."""
        card = self._directory / f"agent-{source // PER_RANK}.{generation}"
        peer = self.agent.add(card.read_bytes())
        theirs = next(region for region in self.agent.regions_of(peer) if region.label == "weights")
        nbytes = self.array[0].nbytes
        row = (
            self._region.address + (into - self._first) * nbytes,
            theirs.address + source % PER_RANK * nbytes,
            nbytes,
        )
        return self.agent.read(peer, [row])


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
    """Runs one rank until the layer has healed and expert 7 has its second place."""
    here, joined = Path(directory), generation > 0
    weights = Weights(here, number, generation)
    whole = FileBootstrap(here / f"group-{generation}", number, RANKS)
    if joined:
        (here / "ready").touch()
    comm = Communicator(whole, "host", timeout=10)
    sizes = TOKENS, HIDDEN, TOPK, number, len(BEFORE), comm.local_world_size, RANKS
    layer = EPAll2AllLayer(comm, *sizes, dtype="float32", placement=BEFORE)
    began = step = max(steps_of(layer, 0))  # a new process begins with the step of the other ranks
    moving: Transfer | None = None
    last, after = time.perf_counter(), 0
    what = ""  # the event since the last step
    while after < STEPS_MEANWHILE:
        try:
            if layer.lost_ranks and agree(layer, (here / "ready").exists()):
                shrunk = layer
                comm = comm.grow(FileBootstrap(here / "group-1", number, RANKS))
                layer, joined, what = shrunk.grow(comm), True, "all ranks are there again"
                shrunk.finalize()  # closes its communicator, which `shrink` made
                began = step = max(steps_of(layer, step))
            elif joined and layer.placement == BEFORE and step >= began + STEPS_MEANWHILE:
                if number == 3 and moving is None:
                    moving = weights.read(AFTER.index(7, 9), BEFORE.index(7), generation=1)
                if agree(layer, number != 3 or (moving is not None and moving.done())):
                    layer.place(AFTER)
                    what = "expert 7 has a second place"
            serve(layer, weights.array, number, step, dies=(number, generation, step) == (LOST, 0, LAST_STEP))
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
    weights.agent.close()


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
