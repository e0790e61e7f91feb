"""A mixture of experts on scikit-learn's digits: router, experts on different ranks, combine.

The router sends each image to 2 experts. Every rank has a share of the images and a few of the experts. Training images
are sent to their experts together with their labels, and each expert fits a ridge regression to its rows. Test images
are sent to their experts too, and return as the weighted sum of the experts' scores. Every rank's result must equal
that of one process with all experts in plain numpy.

    mpiexec -n 4 python -m mpi4py examples/expert_parallel_digits.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
from digits_data_parallel import Digits, Floats, load
from numpy.typing import NDArray

from proxyccl import Communicator, EPAll2AllLayer

PIXELS, CLASSES = 64, 10
HIDDEN = PIXELS + CLASSES  # a row is an image followed by its one-hot class, or by zeros if the class is unknown
EXPERTS, TOPK = 8, 2
TOLERANCE = 1e-9


class Expert:
    """A ridge regression from images to scores of the classes."""

    def fit(self, rows: Floats) -> None:
        """Fits the expert to rows with known classes."""
        x, known = self._with_one(rows), rows[:, PIXELS:]
        self._weights = np.linalg.solve(x.T @ x + np.eye(PIXELS + 1), x.T @ known)

    def forward(self, rows: Floats) -> Floats:
        """Returns the rows, with the classes replaced by scores."""
        return np.concatenate([np.zeros_like(rows[:, :PIXELS]), self._with_one(rows) @ self._weights], axis=1)

    @staticmethod
    def _with_one(rows: Floats) -> Floats:
        return np.concatenate([rows[:, :PIXELS], np.ones((len(rows), 1))], axis=1)


class Router:
    """Sends an image to the experts whose prototypes are nearest to it."""

    def __init__(self, prototypes: Floats) -> None:
        self._prototypes = prototypes

    def __call__(self, images: Floats) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Returns each image's experts, [n, TOPK], and the experts' weights."""
        scores = images @ self._prototypes.T - (self._prototypes**2).sum(axis=1) / 2
        chosen = np.argsort(-scores, axis=1, kind="stable")[:, :TOPK].astype(np.int32)
        odds = np.exp(np.take_along_axis(scores, chosen, axis=1) - scores.max(axis=1, keepdims=True))
        return chosen, (odds / odds.sum(axis=1, keepdims=True)).astype(np.float32)


def as_rows(samples: Digits, *, known: bool) -> Floats:
    """Returns rows, each an image followed by its one-hot class, or by zeros."""
    classes = np.eye(CLASSES)[samples.labels] if known else np.zeros((len(samples), CLASSES))
    return np.concatenate([samples.images, classes], axis=1)


def alone(training: Digits, test: Digits, router: Router, num_experts: int) -> Floats:
    """Computes the test images' scores in one process that has all experts."""
    experts = [Expert() for _ in range(num_experts)]
    ids, _ = router(training.images)
    for number, expert in enumerate(experts):
        expert.fit(as_rows(training, known=True)[(ids == number).any(axis=1)])
    ids, weights = router(test.images)
    made = np.stack([expert.forward(as_rows(test, known=False)) for expert in experts])
    slots = made[ids, np.arange(len(test))[:, None]]
    scores: Floats = (weights[..., None] * slots).sum(axis=1)[:, PIXELS:]
    return scores


class DistributedExperts:
    """This rank's experts, and the layer that sends rows to experts."""

    def __init__(self, comm: Communicator, layer: EPAll2AllLayer) -> None:
        self._comm, self._layer = comm, layer
        self._experts = [Expert() for _ in range(layer.ep_config.num_experts_per_rank)]

    def _upload(self, values: NDArray[Any]) -> Any:
        return self._comm.empty(values.shape, values.dtype).upload(values)

    def _dispatch(self, rows: Floats, ids: NDArray[np.int32], weights: NDArray[np.float32]) -> tuple[Any, ...]:
        """Dispatches rows. Returns a list with the rows of each of this rank's experts, the rows' weights, and the
        descriptor.
        """
        arrays = (self._upload(x) for x in (rows, ids, weights))
        received, row_weights, desc = self._layer.dispatch(*arrays)
        first = self._comm.rank * len(self._experts)
        counts = desc.counts.numpy()[:, first : first + len(self._experts)].sum(axis=0)
        return np.split(received.numpy(), np.cumsum(counts)[:-1]), row_weights, desc

    def fit(self, rows: Floats, ids: NDArray[np.int32], weights: NDArray[np.float32]) -> None:
        """Dispatches rows of known classes; each expert learns from the rows that all ranks routed to it."""
        for expert, part in zip(self._experts, self._dispatch(rows, ids, weights)[0], strict=True):
            expert.fit(part)

    def forward(self, rows: Floats, ids: NDArray[np.int32], weights: NDArray[np.float32]) -> Floats:
        """Returns for each row the weighted sum of its experts' results."""
        parts, row_weights, desc = self._dispatch(rows, ids, weights)
        made = np.concatenate([expert.forward(part) for expert, part in zip(self._experts, parts, strict=True)])
        combined: Floats = self._layer.combine(self._upload(made), desc, weights=row_weights).numpy()
        return combined


def share_of(samples: Digits, comm: Communicator) -> tuple[Digits, slice]:
    """Returns this rank's share of the samples, and the samples' positions."""
    own = slice(len(samples) * comm.rank // comm.world_size, len(samples) * (comm.rank + 1) // comm.world_size)
    return Digits(samples.images[own], samples.labels[own]), own


def main() -> None:
    with Communicator() as comm:
        training, test = load(comm)
        num_experts = -(-EXPERTS // comm.world_size) * comm.world_size
        router = Router(training.images[:num_experts])
        own_training, own_test = share_of(training, comm)[0], share_of(test, comm)[0]

        with EPAll2AllLayer(
            ep_group=comm,
            max_tokens=-(-len(training) // comm.world_size),
            hidden=HIDDEN,
            topk=TOPK,
            rank=comm.rank,
            num_tot_experts=num_experts,
            local_world_size=comm.local_world_size,
            world_size=comm.world_size,
            dtype="float64",
        ) as layer:
            experts = DistributedExperts(comm, layer)
            experts.fit(as_rows(own_training, known=True), *router(own_training.images))
            scores = experts.forward(as_rows(own_test, known=False), *router(own_test.images))[:, PIXELS:]

        wanted = alone(training, test, router, num_experts)
        difference = float(np.abs(scores - wanted[share_of(test, comm)[1]]).max(initial=0.0))
        assert difference <= TOLERANCE, f"the scores differ from the one-process run's by {difference:.2e}"
        right = comm.empty(1, "int64").upload((scores.argmax(axis=1) == own_test.labels).sum())
        accuracy = int(comm.all_reduce(right).numpy()[0]) / len(test)
        assert accuracy == np.mean(wanted.argmax(axis=1) == test.labels)
        if comm.rank == 0:
            print(f"OK: {num_experts} experts on {comm.world_size} ranks classify {accuracy:.1%} of the test images")


if __name__ == "__main__":
    main()
