"""verl's checkpoint engine on ProxyCCL's agents. One process runs the workers of a trainer and of rollouts, and makes
verl's calls in verl's order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from proxyccl.channels.transfers.metadata import METADATA  # noqa: E402
from proxyccl.device.errors import ClosedError  # noqa: E402
from proxyccl.transfer import DisconnectedError, TransferTimeoutError  # noqa: E402
from support.fakes import verl_modules  # noqa: E402

pytestmark = [pytest.mark.host_only("the test's tensors are the host's")]

BUCKET = 4096


def weights(step: int, dtype: Any = torch.float32) -> dict[str, Any]:
    """Returns a step's weights: some shorter, some longer and one as long as a bucket, a scalar and an empty one."""
    shapes = {"a": (3, 5), "long": (50, 70), "b": (1000,), "scalar": (), "none": (0, 4), "bucket": (1024,), "c": (7,)}
    made = {
        name: (torch.arange(torch.Size(shape).numel()) * 7 + 100 * step + len(name)).reshape(shape).to(dtype)
        for name, shape in shapes.items()
    }
    return {**made, "element": made["a"][:1, 0]}  # contiguous despite its stride of 5, because it has one element


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    return verl_modules.install(monkeypatch)


class Workers:
    """The engines of all workers, which this class calls as verl's manager does."""

    def __init__(self, registry: Any, trainers: int, rollouts: int, **options: Any) -> None:
        import proxyccl.verl  # noqa: F401  verl imports the module given as custom_backend_module

        self.kind = registry.get("proxyccl")
        options = {"bucket_size": BUCKET, "timeout": 60, **options}
        self.trainers = [self.kind(is_master=rank == 0, **options) for rank in range(trainers)]
        self.rollouts = [self.kind(**options) for _ in range(rollouts)]

    def connect(self) -> None:
        """Makes the calls that precede each update."""
        metadata = [engine.prepare() for engine in (*self.trainers, *self.rollouts)]
        for engines, arguments in zip(
            (self.trainers, self.rollouts),
            self.kind.build_topology(len(self.trainers), len(self.rollouts), metadata),
            strict=True,
        ):
            assert {len(values) for values in arguments.values()} == {len(engines)}
            for index, engine in enumerate(engines):
                engine.init_process_group(**{name: values[index] for name, values in arguments.items()})

    def finalize(self) -> None:
        for engine in (*self.trainers, *self.rollouts):
            engine.finalize()

    async def update(self, step: int) -> list[dict[str, Any]]:
        """Sends on all trainers and receives on all rollouts. Returns the weights that each rollout got."""

        async def receive(engine: Any) -> dict[str, Any]:
            got = {}
            async for name, tensor in engine.receive_weights(global_steps=step):
                got[name] = tensor.clone()
                await asyncio.sleep(0)
            return got

        def generate() -> Iterator[tuple[str, Any]]:
            yield from weights(step).items()

        sends = [engine.send_weights(generate(), global_steps=step) for engine in self.trainers]
        results = await asyncio.gather(*sends, *map(receive, self.rollouts))
        return results[len(self.trainers) :]


@pytest.mark.parametrize(("trainers", "rollouts"), [(1, 1), (2, 3)])
def test_every_rollout_gets_every_weight(registry: Any, trainers: int, rollouts: int) -> None:
    workers = Workers(registry, trainers, rollouts)
    for step in (1, 2):
        workers.connect()
        for got in asyncio.run(workers.update(step)):
            assert list(got) == list(weights(step))
            for name, expected in weights(step).items():
                assert torch.equal(got[name], expected), name
                assert got[name].dtype == expected.dtype
        workers.finalize()


@pytest.mark.parametrize("finalizes", [False, True])
def test_an_update_after_one_that_failed(registry: Any, finalizes: bool) -> None:
    """After the model has refused the first weight, the rollout never reads the remaining buckets, but the next update
    must succeed.
    """
    workers = Workers(registry, 1, 1)
    (trainer,), (rollout,) = workers.trainers, workers.rollouts

    async def run() -> dict[str, Any]:
        workers.connect()
        sending = asyncio.create_task(trainer.send_weights(iter(weights(1).items())))
        receiving = rollout.receive_weights()
        await anext(receiving)
        await receiving.aclose()
        if finalizes:
            workers.finalize()
        workers.connect()
        (got,) = await workers.update(2)
        with pytest.raises(ClosedError):
            await sending
        return got

    for name, tensor in asyncio.run(run()).items():
        assert torch.equal(tensor, weights(2)[name]), name
    workers.finalize()


def test_weights_have_the_rollouts_type(registry: Any) -> None:
    workers = Workers(registry, 1, 1, rollout_dtype=torch.bfloat16)
    workers.connect()
    (got,) = asyncio.run(workers.update(1))
    for name, expected in weights(1).items():
        assert torch.equal(got[name], expected.to(torch.bfloat16)), name


def test_a_rollout_may_be_added_between_updates(registry: Any) -> None:
    workers = Workers(registry, 1, 1)
    workers.connect()
    asyncio.run(workers.update(1))
    workers.finalize()
    workers.rollouts.insert(0, Workers(registry, 0, 1).rollouts[0])
    workers.connect()
    assert all(torch.equal(got["long"], weights(2)["long"]) for got in asyncio.run(workers.update(2)))


def test_the_chain_visits_each_host_once(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(registry, 2, 5)
    metadata = [engine.prepare() for engine in (*workers.trainers, *workers.rollouts)]
    agents = [each["metadata"] for each in metadata]
    hosts = dict(zip(agents, "yxzxyzx", strict=True))
    monkeypatch.setattr("proxyccl.verl.checkpoint_engine.host_of", hosts.__getitem__)
    trainer, rollout = workers.kind.build_topology(2, 5, metadata)
    assert trainer["sends"] == [True, False]
    chain, following = [agents[0]], {agents[0]: trainer["following"][0]}
    following |= dict(zip(agents[2:], rollout["following"], strict=True))
    while (after := following[chain[-1]]) is not None:
        chain.append(after)
    assert "".join(hosts[agent] for agent in chain) == "yyzzxx"
    previous = dict(zip(agents[2:], rollout["previous"], strict=True))
    assert [previous[agent] for agent in chain[1:]] == chain[:-1]
    assert len({METADATA.decode(agent, "an agent").name for agent in chain}) == 6


def test_a_lost_neighbour_is_named(registry: Any) -> None:
    workers = Workers(registry, 1, 2)
    workers.connect()
    lost = workers.rollouts.pop()._agent
    lost.close()
    with pytest.raises(DisconnectedError) as caught:
        asyncio.run(workers.update(1))
    assert caught.value.peer == lost.name


def test_waits_are_bounded(registry: Any) -> None:
    workers = Workers(registry, 1, 1, timeout=0.2)
    workers.connect()

    async def send() -> None:
        await workers.trainers[0].send_weights(iter(weights(1).items()))

    with pytest.raises(TransferTimeoutError, match="to read a bucket"):
        asyncio.run(send())
    with pytest.raises(ValueError, match="bucket_size"):
        workers.kind(bucket_size=100)
    with pytest.raises(RuntimeError, match="init_process_group"):
        asyncio.run(anext(workers.kind(bucket_size=BUCKET).receive_weights()))
