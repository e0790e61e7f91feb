"""Training that continues after the loss of a rank: the other ranks shrink the communicator and do all work.

The training is that of digits_data_parallel.py. In the middle of the training, one rank is killed. A collective needs
every rank, so no remaining rank is then more than one step ahead of another. A rank that is ahead undoes its last step,
and all ranks repeat that step, so every step takes effect exactly once. The example checks this: the weights must be
bitwise equal to those of a training that shrinks its communicator on purpose at the same step, and agree within 1e-5
with those of a training in one process.

    python examples/digits_after_a_loss.py
    python examples/digits_after_a_loss.py --ranks 5 --lose 0

The example starts its ranks itself, because mpiexec ends the whole job when a rank ends.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import time

import numpy as np
from digits_data_parallel import LEARNING_RATE, TOLERANCE, Digits, Perceptron, batches, load, train

from proxyccl import Communicator, CommunicatorError, FileBootstrap

BATCH = 64


def agree(comm: Communicator, step: int) -> int:
    """Returns the earliest step that some rank has not completed. All ranks make this call together."""
    return min(int.from_bytes(theirs, "little") for theirs in comm.all_gather_bytes(step.to_bytes(4, "little")))


def train_on(
    comm: Communicator, model: Perceptron, training: Digits, epochs: int, lost: int, *, planned: bool
) -> Communicator:
    """Trains, and continues after the loss of a rank. Returns the communicator of the remaining ranks.

    In the middle of the training, rank `lost` is killed; in the planned variant, this rank returns instead. The other
    ranks continue.
    """
    steps = [chosen for epoch in range(epochs) for chosen in batches(len(training), BATCH, seed=epoch)]
    first_rank = comm.rank
    bucket = comm.empty(model.weights.size, "float32")
    before = model.weights.copy()
    step = 0
    while step < len(steps):
        if planned and step == len(steps) // 2:
            if comm.rank == lost:
                return comm
            comm = comm.shrink(exclude=[lost])
        chosen = steps[step]
        share = chosen[len(chosen) * comm.rank // comm.world_size : len(chosen) * (comm.rank + 1) // comm.world_size]
        bucket.upload(model.gradient(Digits(training.images[share], training.labels[share])).astype(np.float32))
        if first_rank == lost and step == len(steps) // 2 and not planned:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            comm.all_reduce(bucket)
        except CommunicatorError as error:
            began = time.perf_counter()
            comm = comm.shrink()
            first = agree(comm, step)
            if first < step:
                step, model.weights[:] = first, before
            seconds = time.perf_counter() - began
            if comm.rank == 0:
                left = f"{comm.world_size} of {comm.world_size + 1} ranks go on after {seconds:.3f} s"
                print(f"step {step}: {str(error).splitlines()[0]}; {left}")
            continue
        before[:] = model.weights
        model.weights -= LEARNING_RATE / len(chosen) * bucket.numpy()
        step += 1
    return comm


def rank_main(directory: str, rank: int, ranks: int, epochs: int, lost: int) -> None:
    """Runs one rank of the training."""
    expected, model = Perceptron.random(seed=0), Perceptron.random(seed=0)
    with Communicator(FileBootstrap(f"{directory}/planned", rank, ranks)) as comm:
        training, test = load(comm)
        shrunk = train_on(comm, expected, training, epochs, lost, planned=True)
        if rank != lost:
            shrunk.close()
    comm = Communicator(FileBootstrap(f"{directory}/lost", rank, ranks))
    comm = train_on(comm, model, training, epochs, lost, planned=False)
    assert np.array_equal(model.weights, expected.weights), "the weights differ from those of a planned shrink"
    if comm.rank == 0:
        alone = Perceptron.random(seed=0)
        train(alone, training, epochs, BATCH)
        difference = float(np.max(np.abs(model.weights - alone.weights)))
        print("the weights are those of a training that had fewer ranks from there as planned")
        print(f"accuracy {model.accuracy(test):.4f}, one process {alone.accuracy(test):.4f}", end="; ")
        print(f"largest difference of a weight {difference:.1e}")
        assert difference <= TOLERANCE, f"the weights differ from the one-process run's by {difference:.2e}"
    comm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Training on scikit-learn's digits that loses a rank and continues.")
    parser.add_argument("--ranks", type=int, default=4, help="processes to start (default 4)")
    parser.add_argument("--lose", type=int, default=1, help="the rank that is killed (default 1)")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the training samples (default 4)")
    options = parser.parse_args()
    if not 0 <= options.lose < options.ranks or options.ranks < 2:
        parser.error("--lose must be one of at least 2 ranks")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        rest = options.ranks, options.epochs, options.lose
        ranks = [context.Process(target=rank_main, args=(directory, rank, *rest)) for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for rank, process in enumerate(ranks) if rank != options.lose):
        sys.exit(f"a rank failed; exit codes {[process.exitcode for process in ranks]}")
    print(f"rank {options.lose} was killed; the other {options.ranks - 1} have trained to the end")


if __name__ == "__main__":
    main()
