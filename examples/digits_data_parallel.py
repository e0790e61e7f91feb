"""Data-parallel training of a classifier on scikit-learn's digits; the gradients are summed by `all_reduce`.

Every rank holds all weights and takes its share of each batch. The ranks exchange only sums of gradients, so the
weights do not depend on the number of ranks, up to rounding. As a check, rank 0 repeats the training alone; the final
weights must agree within 1e-5.

    mpiexec -n 4 python -m mpi4py examples/digits_data_parallel.py
    mpiexec -n 4 python -m mpi4py examples/digits_data_parallel.py --algorithm proxy

The distributed run and rank 0's run keep the weights in float64 and round the gradients to float32, so they differ only
in the order of summation.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from traffic import ProxyTraffic, channels_used, proxy_traffic

from proxyccl import Communicator

LAYERS = (64, 48, 10)
LEARNING_RATE = 0.2
TOLERANCE = 1e-5
SAMPLES, TEST_SAMPLES = 1797, 360  # the number of scikit-learn's digits, and of test digits

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Digits:
    """Images [n, 64] with values from 0 to 1, and the images' labels [n]."""

    images: Floats
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Result:
    """The result of a run. Sizes and counts are sums over all ranks unless stated otherwise.

    Attributes:
        channel: the channel that moved the gradients: "SmChannel", "ProxyChannel", both, or "none" for one rank.
        calls: all-reduces of one rank.
        payload_bytes: bytes of the gradients passed to all_reduce.
        proxy: the proxies' traffic.
        seconds: time of the distributed training.
        exchange_seconds: the part of `seconds` in which rank 0 exchanged gradients, including copies to and from the
            device.
        accuracy: share of the test images that are classified correctly.
        reference_accuracy: the accuracy of the one-process run.
        difference: largest difference between a weight and the one-process run's.
    """

    name: str
    world_size: int
    algorithm: str
    channel: str
    epochs: int
    calls: int
    payload_bytes: int
    proxy: ProxyTraffic
    seconds: float
    exchange_seconds: float
    accuracy: float
    reference_accuracy: float
    difference: float


class Perceptron:
    """Two layers with a tanh between them. All weights are in one vector, so their gradient is one message."""

    def __init__(self, weights: Floats) -> None:
        inputs, hidden, outputs = LAYERS
        self.weights = weights
        cuts = np.cumsum([inputs * hidden, hidden, hidden * outputs])
        first, bias1, second, bias2 = np.split(weights, cuts)  # views
        self.layer1, self.bias1 = first.reshape(inputs, hidden), bias1
        self.layer2, self.bias2 = second.reshape(hidden, outputs), bias2

    @classmethod
    def random(cls, seed: int) -> Perceptron:
        """Makes a model with random weights, scaled for tanh."""
        inputs, hidden, outputs = LAYERS
        size = inputs * hidden + hidden + hidden * outputs + outputs
        return cls(np.random.default_rng(seed).normal(0.0, inputs**-0.5, size))

    def forward(self, images: Floats) -> tuple[Floats, Floats]:
        """Returns hidden activations [n, hidden] and class probabilities [n, classes]."""
        hidden = np.tanh(images @ self.layer1 + self.bias1)
        logits = hidden @ self.layer2 + self.bias2
        odds = np.exp(logits - logits.max(axis=1, keepdims=True, initial=0.0))
        return hidden, odds / odds.sum(axis=1, keepdims=True)

    def gradient(self, samples: Digits) -> Floats:
        """Returns the gradient of the summed cross-entropy; zeros without samples."""
        hidden, error = self.forward(samples.images)
        error[np.arange(len(samples)), samples.labels] -= 1.0
        hidden_error = (error @ self.layer2.T) * (1.0 - hidden**2)
        parts = (samples.images.T @ hidden_error, hidden_error.sum(axis=0), hidden.T @ error, error.sum(axis=0))
        return np.concatenate([part.ravel() for part in parts])

    def accuracy(self, samples: Digits) -> float:
        """Returns the share of the samples whose label is the most probable class."""
        return float(np.mean(self.forward(samples.images)[1].argmax(axis=1) == samples.labels))


def load(comm: Communicator) -> tuple[Digits, Digits]:
    """Returns training and test samples, shuffled. Rank 0 reads them for all ranks, which make this call together."""
    table = comm.empty((SAMPLES, LAYERS[0] + 1), "float64")
    if comm.rank == 0:
        from sklearn.datasets import load_digits  # only rank 0 reads the digits, because this takes seconds

        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(SAMPLES)
        table.upload(np.column_stack([images / 16.0, labels])[order])
    rows = comm.broadcast(table).numpy()
    samples, cut = Digits(rows[:, :-1], rows[:, -1].astype(np.int64)), TEST_SAMPLES
    return Digits(samples.images[cut:], samples.labels[cut:]), Digits(samples.images[:cut], samples.labels[:cut])


def batches(samples: int, batch: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yields the sample numbers of each batch of an epoch. The last batch may be shorter."""
    order = np.random.default_rng(seed).permutation(samples)
    return (order[start : start + batch] for start in range(0, samples, batch))


def train(
    model: Perceptron,
    samples: Digits,
    epochs: int,
    batch: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    sum_over_ranks: Callable[[NDArray[np.float32]], NDArray[np.float32]] = lambda gradient: gradient,
    after_epoch: Callable[[int], None] = lambda epoch: None,
) -> None:
    """Trains by stochastic gradient descent on this rank's share of each batch. The ranks' shares differ by at most one
    sample, and may be empty.

    Args:
        model: the model to train; its weights are changed in place.
        samples: all training samples, the same on all ranks.
        epochs: the number of passes over the samples.
        batch: samples in a batch, over all ranks.
        rank: this rank's number.
        world_size: number of ranks.
        sum_over_ranks: returns the sum of all ranks' gradients.
        after_epoch: called after each epoch with the number of epochs done.
    """
    for epoch in range(epochs):
        for chosen in batches(len(samples), batch, seed=epoch):
            share = chosen[len(chosen) * rank // world_size : len(chosen) * (rank + 1) // world_size]
            own = model.gradient(Digits(samples.images[share], samples.labels[share]))
            model.weights -= LEARNING_RATE / len(chosen) * sum_over_ranks(own.astype(np.float32))
        after_epoch(epoch + 1)


def run(comm: Communicator, *, epochs: int = 20, batch: int = 64, algorithm: str | None = None) -> Result:
    """Trains on all ranks, then alone on rank 0, and compares the weights. All ranks make this call together.

    Returns:
        The result; `reference_accuracy` and `difference` are 0 except on rank 0.

    Raises:
        AssertionError: the weights differ from rank 0's, or by more than 1e-5 from those of the one-process run.
    """
    training, test = load(comm)
    # Each rank starts with different random weights, which rank 0's weights replace.
    model = Perceptron.random(seed=comm.rank)
    weights = comm.empty(model.weights.size, "float64").upload(model.weights)
    comm.broadcast(weights, root=0)
    model.weights[:] = weights.numpy()
    start = model.weights.copy()

    bucket = comm.empty(model.weights.size, "float32")
    calls, exchange_seconds = 0, 0.0

    def sum_over_ranks(gradient: NDArray[np.float32]) -> NDArray[np.float32]:
        nonlocal calls, exchange_seconds
        began = time.perf_counter()
        bucket.upload(gradient)
        comm.all_reduce(bucket, algorithm=algorithm)
        total = bucket.numpy()
        exchange_seconds += time.perf_counter() - began
        calls += 1
        return total

    def report(epoch: int) -> None:
        if comm.rank == 0 and (epoch == epochs or epoch % max(1, epochs // 5) == 0):
            print(f"epoch {epoch:3d} of {epochs}: accuracy {model.accuracy(test):.4f}", flush=True)

    before = proxy_traffic(comm)
    began = time.perf_counter()
    train(
        model,
        training,
        epochs,
        batch,
        rank=comm.rank,
        world_size=comm.world_size,
        sum_over_ranks=sum_over_ranks,
        after_epoch=report,
    )
    seconds = time.perf_counter() - began
    moved = proxy_traffic(comm) - before

    # All ranks have the same sums, so their weights are bitwise equal.
    weights.upload(model.weights)
    comm.broadcast(weights, root=0)
    assert np.array_equal(weights.numpy(), model.weights), f"the weights of rank {comm.rank} differ from rank 0's"

    reference_accuracy = difference = 0.0
    if comm.rank == 0:
        alone = Perceptron(start)
        train(alone, training, epochs, batch)
        reference_accuracy = alone.accuracy(test)
        difference = float(np.max(np.abs(model.weights - alone.weights)))
        assert difference <= TOLERANCE, f"the weights differ from the one-process run's by {difference:.2e}"
    return Result(
        name="data-parallel",
        world_size=comm.world_size,
        algorithm=algorithm or "chosen by size",
        channel=channels_used(comm, proxied=algorithm == "proxy"),
        epochs=epochs,
        calls=calls,
        payload_bytes=calls * bucket.nbytes * comm.world_size,
        proxy=moved,
        seconds=seconds,
        exchange_seconds=exchange_seconds,
        accuracy=model.accuracy(test),
        reference_accuracy=reference_accuracy,
        difference=difference,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Data-parallel training on scikit-learn's digits.")
    parser.add_argument("--algorithm", help="algorithm of all_reduce, such as proxy or ring (default: chosen by size)")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training samples (default 20)")
    parser.add_argument("--batch", type=int, default=64, help="samples in a batch, over all ranks (default 64)")
    parser.add_argument("--json", action="store_true", help="end with a line for programs: RESULT {...}")
    options = parser.parse_args()
    with Communicator() as comm:
        result = run(comm, epochs=options.epochs, batch=options.batch, algorithm=options.algorithm)
        if comm.rank != 0:
            return
        print(
            f"{result.world_size} ranks, {result.calls} all-reduces over {result.channel} in {result.seconds:.2f} s, "
            f"{result.proxy.puts} puts by the proxies"
        )
        print(
            f"accuracy {result.accuracy:.4f}, one process {result.reference_accuracy:.4f}; "
            f"largest difference of a weight {result.difference:.1e}"
        )
        if options.json:
            print("RESULT", json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
