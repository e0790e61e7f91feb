"""A mixture of experts on scikit-learn's digits, with the experts on different ranks.

An encoder turns each image into a token, a router sends the token to 2 experts, and a classifier reads the weighted sum
of their results. Every rank holds the encoder, the router, the classifier and a few of the experts, and takes its share
of each batch. Tokens travel to their experts by dispatch and come back by combine. Gradients also travel by dispatch
and combine, because combine is the adjoint of dispatch. As a check, rank 0 repeats the training alone, with all experts
in plain numpy; the final weights must agree within 1e-5.

    mpiexec -n 4 python -m mpi4py examples/moe_digits.py
    mpiexec -n 4 python -m mpi4py examples/moe_digits.py --proxied

Everything is float64, except the routing weights, which are float32 in both runs. An expert gets its tokens in the same
order in both runs. So the two runs differ only in the order in which the gradients of encoder, router and classifier
are summed over ranks.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from digits_data_parallel import Digits, Floats, batches, load
from numpy.typing import NDArray
from traffic import ProxyTraffic, channels_used, proxy_traffic

from proxyccl import Array, Communicator, DispatchCombine

PIXELS, HIDDEN, CLASSES = 64, 48, 10
EXPERTS, EXPERT_WIDTH, TOPK = 8, 24, 2
LEARNING_RATE = 0.3
TOLERANCE = 1e-5

Ids = NDArray[np.int32]
Weights = NDArray[np.float32]


@dataclass(frozen=True)
class Result:
    """The result of a run. Sizes and counts are sums over all ranks unless stated otherwise.

    Attributes:
        channel: the channel that moved the data: "SmChannel", "ProxyChannel", both, or "none" for one rank.
        calls: collective calls of one rank.
        tokens: tokens that were routed.
        rows: rows that dispatch and combine moved for these tokens, including gradients.
        rows_between_ranks: the rows that went from one rank to another.
        payload_bytes: bytes of the rows, and of the gradients passed to all_reduce.
        proxy: the proxies' traffic.
        seconds: time of the distributed training.
        exchange_seconds: the part of `seconds` that rank 0 spent in collectives, including copies to and from the
            device.
        accuracy: share of the test images that are classified correctly.
        reference_accuracy: the accuracy of the one-process run.
        difference: largest difference between a weight and the one-process run's.
    """

    name: str
    world_size: int
    experts: int
    channel: str
    epochs: int
    calls: int
    tokens: int
    rows: int
    rows_between_ranks: int
    payload_bytes: int
    proxy: ProxyTraffic
    seconds: float
    exchange_seconds: float
    accuracy: float
    reference_accuracy: float
    difference: float


class Expert:
    """Two layers with a tanh between them: [n, HIDDEN] to [n, HIDDEN]."""

    def __init__(self, number: int) -> None:
        rng = np.random.default_rng((1, number))
        self.weights = rng.normal(0.0, HIDDEN**-0.5, 2 * HIDDEN * EXPERT_WIDTH)
        up, down = np.split(self.weights, 2)  # views
        self.up, self.down = up.reshape(HIDDEN, EXPERT_WIDTH), down.reshape(EXPERT_WIDTH, HIDDEN)
        self._rows = self._inner = np.zeros((0, 0))

    def forward(self, rows: Floats) -> Floats:
        """Returns the expert's results for its rows."""
        self._rows, self._inner = rows, np.tanh(rows @ self.up)
        return self._inner @ self.down

    def backward(self, error: Floats, rate: float) -> Floats:
        """Updates the weights by gradient descent, and returns the gradient of the rows that forward() got."""
        inner_error = (error @ self.down.T) * (1.0 - self._inner**2)
        rows_error = inner_error @ self.up.T
        self.down -= rate * (self._inner.T @ error)
        self.up -= rate * (self._rows.T @ inner_error)
        return rows_error


class Layer(Protocol):
    """A mixture of experts: for each token, the weighted sum of its experts' results."""

    def forward(self, tokens: Floats, expert_ids: Ids, weights: Weights) -> Floats:
        """Computes results [T, HIDDEN] from tokens [T, HIDDEN], expert ids [T, TOPK] and weights [T, TOPK]."""
        ...

    def backward(self, error: Floats, rate: float) -> tuple[Floats, Floats]:
        """Returns the gradients of tokens and weights. The experts update their weights by gradient descent."""
        ...


class LocalExperts:
    """A `Layer` with all experts in this process, in plain numpy."""

    def __init__(self, experts: list[Expert]) -> None:
        self.experts = experts

    def forward(self, tokens: Floats, expert_ids: Ids, weights: Weights) -> Floats:
        """See `Layer`."""
        self._ids, self._weights = expert_ids, weights
        self._slots = np.zeros((*expert_ids.shape, HIDDEN))
        for number, expert in enumerate(self.experts):
            token, k = np.nonzero(expert_ids == number)
            self._slots[token, k] = expert.forward(tokens[token])
        output: Floats = (weights[..., None] * self._slots).sum(axis=1)
        return output

    def backward(self, error: Floats, rate: float) -> tuple[Floats, Floats]:
        """See `Layer`."""
        tokens_error = np.zeros_like(error)
        for number, expert in enumerate(self.experts):
            token, k = np.nonzero(self._ids == number)
            back = expert.backward(self._weights[token, k][:, None] * error[token], rate)
            np.add.at(tokens_error, token, back)
        return tokens_error, (self._slots * error[:, None]).sum(axis=2)


@dataclass
class Tally:
    """Counts the data that a rank has moved."""

    calls: int = 0
    tokens: int = 0
    rows: int = 0
    rows_between_ranks: int = 0
    all_reduce_bytes: int = 0
    seconds: float = 0.0

    def timed(self, call: Callable[[], Any]) -> Any:
        """Makes a call, adds its time to the total, and returns its result."""
        began = time.perf_counter()
        result = call()
        self.seconds += time.perf_counter() - began
        self.calls += 1
        return result


class DistributedExperts:
    """A `Layer` of this rank's experts, which exchanges tokens with the experts of other ranks."""

    def __init__(self, comm: Communicator, max_tokens: int, algorithm: str | None) -> None:
        per_rank = -(-EXPERTS // comm.world_size)
        self._comm = comm
        self._moe = DispatchCombine(
            comm,
            hidden=HIDDEN,
            max_tokens=max_tokens,
            experts_per_rank=per_rank,
            topk=TOPK,
            dtype="float64",
            algorithm=algorithm,
        )
        self.experts = [Expert(comm.rank * per_rank + i) for i in range(per_rank)]
        self.num_experts = self._moe.num_experts
        self.tally = Tally()

    def _upload(self, values: NDArray[Any]) -> Array:
        return self._comm.empty(values.shape, values.dtype).upload(values)

    def _prepare(self, tokens: Floats, expert_ids: Ids, weights: Weights) -> None:
        self._counts = self._moe.prepare(self._upload(tokens), self._upload(expert_ids), self._upload(weights))
        self.tally.tokens += len(tokens)

    def _dispatch(self, values: Floats | None, *, weighted: bool) -> list[Floats]:
        """Dispatches the prepared tokens, or other values with the same routing. Returns a list with the rows of each
        of this rank's experts.
        """
        x = None if values is None else self._upload(values)
        rows: Floats = self._moe.dispatch(x, weighted=weighted)[0].numpy()
        self._count_rows()
        return np.split(rows, np.cumsum(self._counts)[:-1])

    def _combine(self, rows: list[Floats], *, weighted: bool) -> Floats:
        self._count_rows()
        result: Floats = self._moe.combine(self._upload(np.concatenate(rows)), weighted=weighted).numpy()
        return result

    def _count_rows(self) -> None:
        sent = self._moe.rows_sent
        self.tally.rows += int(sent.sum())
        self.tally.rows_between_ranks += int(sent.sum() - sent[self._comm.rank])

    def forward(self, tokens: Floats, expert_ids: Ids, weights: Weights) -> Floats:
        """See `Layer`."""
        self.tally.timed(lambda: self._prepare(tokens, expert_ids, weights))
        rows = self.tally.timed(lambda: self._dispatch(None, weighted=False))
        self._results = [expert.forward(part) for expert, part in zip(self.experts, rows, strict=True)]
        output: Floats = self.tally.timed(lambda: self._combine(self._results, weighted=True))
        return output

    def backward(self, error: Floats, rate: float) -> tuple[Floats, Floats]:
        """See `Layer`.

        Combine is the adjoint of dispatch, so the gradient, scaled by the weights, is dispatched to the experts, and
        the experts' gradients are combined.
        """
        errors = self.tally.timed(lambda: self._dispatch(error, weighted=True))
        back = [expert.backward(part, rate) for expert, part in zip(self.experts, errors, strict=True)]
        tokens_error: Floats = self.tally.timed(lambda: self._combine(back, weighted=False))
        # The gradient of a routing weight needs the expert's result, so the expert's rank computes the gradient.
        plain = self.tally.timed(lambda: self._dispatch(error, weighted=False))
        dots = np.concatenate([(a * b).sum(axis=1) for a, b in zip(self._results, plain, strict=True)])
        weights_error: Floats = self.tally.timed(lambda: self._moe.collect(self._upload(dots)).numpy())
        return tokens_error, weights_error


def softmax(scores: Floats) -> Floats:
    """Returns the softmax over the last axis."""
    odds = np.exp(scores - scores.max(axis=1, keepdims=True, initial=0.0))
    normalised: Floats = odds / odds.sum(axis=1, keepdims=True)
    return normalised


@dataclass(frozen=True)
class Forward:
    """Intermediate results of a forward pass, from which the gradient is computed."""

    tokens: Floats
    expert_ids: Ids
    weights: Weights
    classified: Floats
    probabilities: Floats


class Model:
    """Encoder, router and classifier around a mixture of experts. One vector holds the weights of encoder, router and
    classifier."""

    def __init__(self, layer: Layer, num_experts: int) -> None:
        rng = np.random.default_rng(0)
        shapes = ((PIXELS, HIDDEN), (HIDDEN, num_experts), (HIDDEN, CLASSES))
        sizes = [rows * columns for rows, columns in shapes]
        self.weights = np.concatenate([rng.normal(0.0, rows**-0.5, rows * columns) for rows, columns in shapes])
        parts = np.split(self.weights, np.cumsum(sizes)[:-1])
        self.encoder, self.router, self.classifier = (  # views
            part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)
        )
        self.layer = layer

    def forward(self, images: Floats) -> Forward:
        """Classifies images [n, PIXELS]."""
        tokens = np.tanh(images @ self.encoder)
        scores = tokens @ self.router
        expert_ids = np.argsort(-scores, axis=1, kind="stable")[:, :TOPK].astype(np.int32)
        weights = softmax(np.take_along_axis(scores, expert_ids, axis=1)).astype(np.float32)
        classified = tokens + self.layer.forward(tokens, expert_ids, weights)
        return Forward(tokens, expert_ids, weights, classified, softmax(classified @ self.classifier))

    def gradient(self, samples: Digits, rate: float) -> Floats:
        """Returns the gradient of the summed cross-entropy for this process's samples.

        The experts get the samples of all processes, and update their weights in this call, with this learning rate.
        """
        seen = self.forward(samples.images)
        error = seen.probabilities
        error[np.arange(len(samples)), samples.labels] -= 1.0
        mixed_error = error @ self.classifier.T
        tokens_error, weights_error = self.layer.backward(mixed_error, rate)
        weights = seen.weights.astype(np.float64)
        chosen_error = weights * (weights_error - (weights * weights_error).sum(axis=1, keepdims=True))
        scores_error = np.zeros((len(samples), self.router.shape[1]))
        np.put_along_axis(scores_error, seen.expert_ids, chosen_error, axis=1)
        hidden_error = mixed_error + tokens_error + scores_error @ self.router.T
        encoder_error = hidden_error * (1.0 - seen.tokens**2)
        parts = (samples.images.T @ encoder_error, seen.tokens.T @ scores_error, seen.classified.T @ error)
        return np.concatenate([part.ravel() for part in parts])

    def correct(self, samples: Digits) -> int:
        """Returns the number of samples whose label is the most probable class."""
        return int((self.forward(samples.images).probabilities.argmax(axis=1) == samples.labels).sum())


def share_of(samples: Digits, chosen: NDArray[np.int64], rank: int, world_size: int) -> Digits:
    """Returns a rank's share of the chosen samples. Shares differ by at most one sample, and may be empty."""
    own = chosen[len(chosen) * rank // world_size : len(chosen) * (rank + 1) // world_size]
    return Digits(samples.images[own], samples.labels[own])


def train(
    model: Model,
    samples: Digits,
    epochs: int,
    batch: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    sum_over_ranks: Callable[[Floats], Floats] = lambda gradient: gradient,
    after_epoch: Callable[[int], None] = lambda epoch: None,
) -> None:
    """Trains by stochastic gradient descent on this rank's share of each batch."""
    for epoch in range(epochs):
        for chosen in batches(len(samples), batch, seed=epoch):
            rate = LEARNING_RATE / len(chosen)
            own = model.gradient(share_of(samples, chosen, rank, world_size), rate)
            model.weights -= rate * sum_over_ranks(own)
        after_epoch(epoch + 1)


def run(comm: Communicator, *, epochs: int = 20, batch: int = 128, proxied: bool = False) -> Result:
    """Trains on all ranks, then alone on rank 0, and compares the weights. All ranks make this call together.

    Returns:
        The result; `reference_accuracy` and `difference` are 0 except on rank 0.

    Raises:
        AssertionError: a weight differs by more than 1e-5 from the one-process run's, or from rank 0's.
    """
    training, test = load(comm)
    algorithm = "proxy" if proxied else None
    share = -(-max(batch, len(test)) // comm.world_size)  # the largest number of tokens of a rank
    layer = DistributedExperts(comm, share, algorithm)
    model = Model(layer, layer.num_experts)
    tally = layer.tally
    bucket = comm.empty(model.weights.size, "float64")

    def sum_over_ranks(gradient: Floats) -> Floats:
        tally.all_reduce_bytes += bucket.nbytes
        total: Floats = tally.timed(lambda: comm.all_reduce(bucket.upload(gradient), algorithm=algorithm).numpy())
        return total

    def accuracy() -> float:
        own = share_of(test, np.arange(len(test)), comm.rank, comm.world_size)
        correct = comm.empty(1, "int64").upload(model.correct(own))
        total = tally.timed(lambda: comm.all_reduce(correct, algorithm=algorithm).numpy())
        return int(total[0]) / len(test)

    def report(epoch: int) -> None:
        if epoch == epochs or epoch % max(1, epochs // 5) == 0:
            reached = accuracy()
            if comm.rank == 0:
                print(f"epoch {epoch:3d} of {epochs}: accuracy {reached:.4f}", flush=True)

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
    own_totals = np.array([tally.tokens, tally.rows, tally.rows_between_ranks, tally.all_reduce_bytes])
    totals = comm.empty(own_totals.size, "int64").upload(own_totals)
    tokens, rows, rows_between_ranks, all_reduce_bytes = (int(n) for n in comm.all_reduce(totals).numpy())
    calls, exchange_seconds, reached = tally.calls, tally.seconds, accuracy()

    # All ranks have the same sums, so their weights, except the experts', are bitwise equal.
    weights = comm.empty(model.weights.size, "float64").upload(model.weights)
    comm.broadcast(weights, root=0)
    assert np.array_equal(weights.numpy(), model.weights), f"the weights of rank {comm.rank} differ from rank 0's"
    own_experts = np.concatenate([expert.weights for expert in layer.experts])
    all_experts = comm.all_gather(comm.empty(own_experts.size, "float64").upload(own_experts)).numpy()

    reference_accuracy = difference = 0.0
    if comm.rank == 0:
        experts = [Expert(number) for number in range(layer.num_experts)]
        alone = Model(LocalExperts(experts), layer.num_experts)
        train(alone, training, epochs, batch)
        reference_accuracy = alone.correct(test) / len(test)
        apart = [model.weights - alone.weights, all_experts - np.concatenate([expert.weights for expert in experts])]
        difference = max(float(np.max(np.abs(part))) for part in apart)
        assert difference <= TOLERANCE, f"the weights differ from the one-process run's by {difference:.2e}"
    return Result(
        name="mixture of experts",
        world_size=comm.world_size,
        experts=layer.num_experts,
        channel=channels_used(comm, proxied=proxied),
        epochs=epochs,
        calls=calls,
        tokens=tokens,
        rows=rows,
        rows_between_ranks=rows_between_ranks,
        payload_bytes=rows * HIDDEN * 8 + all_reduce_bytes,
        proxy=moved,
        seconds=seconds,
        exchange_seconds=exchange_seconds,
        accuracy=reached,
        reference_accuracy=reference_accuracy,
        difference=difference,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="A mixture of experts on scikit-learn's digits.")
    parser.add_argument("--proxied", action="store_true", help="have triggers move all data")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training samples (default 20)")
    parser.add_argument("--batch", type=int, default=128, help="samples in a batch, over all ranks (default 128)")
    parser.add_argument("--json", action="store_true", help="end with a line for programs: RESULT {...}")
    options = parser.parse_args()
    with Communicator() as comm:
        result = run(comm, epochs=options.epochs, batch=options.batch, proxied=options.proxied)
        if comm.rank != 0:
            return
        print(
            f"{result.world_size} ranks, {result.experts} experts: {result.tokens:,} tokens made {result.rows:,} rows, "
            f"{result.rows_between_ranks:,} of them between ranks over {result.channel}"
        )
        print(
            f"{result.payload_bytes / 1e6:.1f} MB in {result.calls:,} collectives, {result.proxy.triggers:,} triggers, "
            f"{result.seconds:.2f} s, of which {result.exchange_seconds:.2f} s were exchanges"
        )
        print(
            f"accuracy {result.accuracy:.4f}, one process {result.reference_accuracy:.4f}; "
            f"largest difference of a weight {result.difference:.1e}"
        )
        if options.json:
            print("RESULT", json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
