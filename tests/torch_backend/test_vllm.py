"""vLLM's weight transfer on ProxyCCL's agents, with vLLM's order of calls. Two trainer ranks and two workers are
threads of this process.
"""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.fakes import vllm_modules  # noqa: E402
from support.fakes.vllm_modules import Model, ParamMeta, Replicate, Shard  # noqa: E402

pytestmark = [pytest.mark.host_only("the test's tensors are the host's")]

SHAPES = {"rows": (7, 6), "columns": (4, 10), "everywhere": (5,), "large": (64, 8), "scalar": ()}


class Meeting:
    """Lets all threads of a role (trainer or worker) exchange values."""

    def __init__(self, count: int) -> None:
        self._values: dict[int, Any] = {}
        self._come = threading.Barrier(count)
        self._go = threading.Barrier(count, action=self._values.clear)  # the next gather may be among different ranks

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Waits until all threads have passed their values, and returns all values in the order of ranks."""
        self._values[rank] = value
        self._come.wait(60)
        values = [self._values[each] for each in sorted(self._values)]
        self._go.wait(60)
        return values


class Source:
    """A trainer rank's shards of the weights. `version` selects the weights' values."""

    def __init__(self, rank: int, dtype: Any = None) -> None:
        self.rank, self.version, self.dtype = rank, 0, dtype or torch.float32
        mesh: dict[str, Any] = {"owners": (0, 1)}
        layouts = {"rows": mesh | {"placements": (Shard(0),)}, "columns": mesh | {"placements": (Shard(1),)}}
        layouts["large"] = mesh | {"mesh_shape": (2, 1), "placements": (Shard(0), Replicate())}
        self.metadata = [ParamMeta(name, self.dtype, shape, **layouts.get(name, {})) for name, shape in SHAPES.items()]
        self.memory = {name: self.shard(name).clone() for name in SHAPES}

    def implements_iter_local(self) -> bool:
        return True

    def shard(self, name: str) -> Any:
        whole = expected(name, self.version)
        dim = {"rows": 0, "columns": 1, "large": 0}.get(name)
        return whole if dim is None else whole.chunk(2, dim)[self.rank]

    def iter_local(self) -> Any:
        """Yields the rank's shards. One shard is a new tensor each time, as if the trainer had converted its dtype."""
        for name, memory in self.memory.items():
            memory.copy_(self.shard(name))
            yield name, memory.clone() if name == "columns" else memory


def expected(name: str, version: int, dtype: Any = None) -> Any:
    shape = SHAPES[name]
    whole = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    return (whole * 3 + 1000 * version + len(name)).to(dtype or torch.float32)


class Client:
    """Calls all workers concurrently, as vLLM does."""

    def __init__(self, engines: list[Any]) -> None:
        self.engines = engines

    def _all(self, call: Callable[[Any], Any]) -> None:
        with ThreadPoolExecutor(len(self.engines)) as pool:
            list(pool.map(call, self.engines))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._all(lambda engine: engine.init_transfer_engine(engine.parse_init_info(init_info)))

    def start_weight_update(self) -> None:
        self._all(lambda engine: engine.start_weight_update())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._all(lambda engine: engine.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all(lambda engine: engine.finish_weight_update())


class Job:
    """The workers' engines, and the values from which `trainers` makes the trainers' engines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = vllm_modules.install(monkeypatch)
        import proxyccl.vllm

        proxyccl.vllm.register()
        proxyccl.vllm.register()  # vLLM may load its plugins again
        from proxyccl.vllm import weight_transfer

        self.module = weight_transfer
        ranks, trainers, workers = threading.local(), Meeting(2), Meeting(2)
        self.ranks = ranks
        monkeypatch.setattr(weight_transfer, "_gather", lambda card: trainers.gather(ranks.rank, card))

        def of_others(card: bytes) -> list[bytes]:
            me = threading.get_ident()
            return [each for ident, each in workers.gather(me, (me, card)) if ident != me]

        monkeypatch.setattr(weight_transfer, "_cards_of_other_workers", of_others)
        self.models = [Model(), Model()]
        config = SimpleNamespace(model_config=None, parallel_config=None)
        make = found.workers.engine("proxyccl")
        self.workers = [make(None, config, torch.device("cpu"), model) for model in self.models]
        self.trainer = found.trainers.engine("proxyccl")
        self.client = Client(self.workers)

    def trainers(self, sources: list[Source], body: Callable[[Any, Source], None], bucket_bytes: int) -> None:
        """Runs `body(engine, source)` in one thread per source, and shuts the engines down."""

        def run(source: Source) -> None:
            self.ranks.rank = source.rank
            info = self.module.ProxyCCLTrainerInitInfo(rank=source.rank, bucket_bytes=bucket_bytes, timeout=60)
            engine = self.trainer.trainer_init(info, client=self.client, source=source)
            try:
                body(engine, source)
            finally:
                engine.shutdown()

        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(run, source) for source in sources]:
                future.result()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Job(monkeypatch)
    yield made
    for worker in made.workers:
        worker.shutdown()


def require_loaded(job: Job, version: int, dtype: Any = None) -> None:
    """Asserts that every worker's model has the weights of a version."""
    for model in job.models:
        for name in SHAPES:
            assert torch.equal(model.weights[name], expected(name, version, dtype)), name


@pytest.mark.parametrize(("bucket_bytes", "loads"), [(1 << 20, 1), (1024, 3)])
def test_every_worker_loads_every_version(job: Job, bucket_bytes: int, loads: int) -> None:
    checked = threading.Barrier(2)

    def body(engine: Any, source: Source) -> None:
        for version in (1, 2, 3):
            source.version = version
            engine.send_weights()
            checked.wait(60)
            for model in job.models:
                assert not model.reloading
                assert model.calls == version * loads
            require_loaded(job, version)
            checked.wait(60)

    job.trainers([Source(0), Source(1)], body, bucket_bytes)


def test_memory_that_a_parameter_has_left_is_not_written(job: Job) -> None:
    """If a trainer sends weights from other memory in one round, the workers connect again, even if the first attempt
    fails.
    """
    connect, connected = job.client.init_weight_transfer_engine, []
    fail, checked = threading.Event(), threading.Barrier(2)

    def init(info: dict[str, Any]) -> None:
        if fail.is_set():
            fail.clear()
            raise ConnectionError("no worker answers")
        connected.append(info)
        connect(info)

    job.client.init_weight_transfer_engine = init  # type: ignore[method-assign]

    def body(engine: Any, source: Source) -> None:
        trained = source.memory
        average = {name: memory.clone() for name, memory in trained.items()}
        for version in (1, 2, 3, 4):
            swapped = version == 2 and source.rank == 1
            source.version, source.memory, left = version, *((average, trained) if swapped else (trained, average))
            before = {name: memory.clone() for name, memory in left.items()}
            if version == 2:
                fail.set()
                with pytest.raises(ConnectionError if source.rank == 0 else RuntimeError, match="no worker"):
                    engine.send_weights()
            engine.send_weights()
            checked.wait(60)
            for name in SHAPES:
                assert torch.equal(left[name], before[name]), name
            require_loaded(job, version)
            checked.wait(60)
        assert len(connected) == 2

    job.trainers([Source(0), Source(1)], body, 1 << 20)


def test_a_parameters_storage_may_be_freed_between_rounds(job: Job) -> None:
    """Some trainers move weights elsewhere between rounds: they free the tensors' storage but keep the tensors."""
    checked = threading.Barrier(2)

    def body(engine: Any, source: Source) -> None:
        for version in (1, 2, 3):
            source.version = version
            engine.send_weights()
            checked.wait(60)
            require_loaded(job, version)
            for memory in source.memory.values():
                memory.untyped_storage().resize_(0)
                memory.untyped_storage().resize_(version << 20)
            checked.wait(60)

    job.trainers([Source(0), Source(1)], body, 1 << 20)


def test_weights_have_the_declared_type_without_a_copy_in_the_trainer(job: Job) -> None:
    def body(engine: Any, source: Source) -> None:
        source.version = 1
        engine.send_weights()
        assert engine._kept["rows"].data_ptr() == source.memory["rows"].data_ptr()

    job.trainers([Source(0, torch.bfloat16), Source(1, torch.bfloat16)], body, 1 << 20)
    require_loaded(job, 1, torch.bfloat16)


def test_another_trainer_may_follow(job: Job) -> None:
    def body(engine: Any, source: Source) -> None:
        source.version += 1
        engine.send_weights()

    for _ in range(2):
        job.trainers([Source(0), Source(1)], body, 1 << 20)
    assert torch.equal(job.models[1].weights["rows"], expected("rows", 1))


def test_every_rank_of_the_trainer_learns_of_a_failure(job: Job) -> None:
    def fail(weights: Any) -> None:
        raise KeyError("unknown weight")

    job.models[1].load_weights = fail  # type: ignore[method-assign]

    def body(engine: Any, source: Source) -> None:
        with pytest.raises(KeyError if source.rank == 0 else RuntimeError, match="unknown weight"):
            engine.send_weights()

    job.trainers([Source(0), Source(1)], body, 1 << 20)


def test_vllm_finds_the_plugin() -> None:
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="proxyccl")
    assert entry.load().__name__ == "register"


def test_wrong_sources_are_refused(job: Job) -> None:
    info = job.module.ProxyCCLTrainerInitInfo(rank=0)
    with pytest.raises(ValueError, match="source"):
        job.trainer.trainer_init(info, client=None, source=None)
    full = SimpleNamespace(implements_iter_local=lambda: False)
    with pytest.raises(TypeError, match="iter_local"):
        job.trainer.trainer_init(info, client=None, source=full)
    with pytest.raises(RuntimeError, match="init_transfer_engine"):
        job.workers[0].update_weights({"version": 1})
