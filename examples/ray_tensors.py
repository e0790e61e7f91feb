"""Moves tensors from one Ray actor to another by ProxyCCL's transport, which needs ray and torch:

    python examples/ray_tensors.py

A trainer makes weights, and samplers get references to them. Each sampler reads the weights out of the trainer's
memory; the trainer's process does nothing. One sampler reads into tensors that it already has.
"""

from __future__ import annotations

import ray
import torch
from ray.experimental import set_target_for_ref

import proxyccl.ray

LAYERS, WIDTH = 4, 512
proxyccl.ray.register()  # must be called before the classes that use the transport are defined


def weights_of(step: int) -> list[torch.Tensor]:
    return [torch.full((WIDTH, WIDTH), float(10 * step + layer)) for layer in range(LAYERS)]


@ray.remote(enable_tensor_transport=True)
class Trainer:
    """Makes weights."""

    @ray.method(tensor_transport=proxyccl.ray.NAME)
    def weights(self, step: int) -> list[torch.Tensor]:
        """Returns the weights of a step, which stay in this actor's memory."""
        return weights_of(step)


@ray.remote(enable_tensor_transport=True)
class Sampler:
    """Receives weights. Both methods return the number of received bytes."""

    def __init__(self) -> None:
        self.buffers = [torch.zeros(WIDTH, WIDTH) for _ in range(LAYERS)]

    def check(self, step: int, weights: list[torch.Tensor]) -> int:
        """Checks weights that Ray has fetched."""
        expected = weights_of(step)
        assert len(weights) == LAYERS
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, expected, strict=True))
        return sum(each.nbytes for each in weights)

    def check_in_place(self, step: int, reference: list[ray.ObjectRef]) -> int:
        """Reads weights into this actor's tensors, and checks them."""
        set_target_for_ref(reference[0], self.buffers)
        weights = ray.get(reference[0])
        assert all(ours is buffer for ours, buffer in zip(weights, self.buffers, strict=True))
        return self.check(step, weights)


def main() -> None:
    ray.init(num_cpus=4, include_dashboard=False)
    trainer = Trainer.remote()
    samplers = [Sampler.remote() for _ in range(2)]
    nbytes = 0
    for step in range(5):
        weights = trainer.weights.remote(step)
        nbytes += sum(ray.get([sampler.check.remote(step, weights) for sampler in samplers]))
        nbytes += ray.get(samplers[0].check_in_place.remote(step, [weights]))
    print(f"OK: {nbytes >> 20} MiB of weights came from the trainer's memory")
    ray.shutdown()


if __name__ == "__main__":
    main()
