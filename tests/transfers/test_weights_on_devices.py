"""Weights between device memories, with and without a stream."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.transfer import Agent
from proxyccl.weights import Shard, Sharding, WeightSource, WeightTarget
from support.devices import rank_runtime

SIZE = (96, 64)


def array_of(number: int, shape: tuple[int, ...], dtype: str = "float32") -> Array:
    runtime, kind = rank_runtime(number), as_dtype(dtype)
    return Array(runtime, runtime.allocate(kind.itemsize * int(np.prod(shape))), shape, kind)


@pytest.mark.parametrize("peers", [False, True])
def test_rows_of_two_devices_become_columns_of_two(peers: bool) -> None:
    rows = Sharding(SIZE, ["a", "b"], [Shard(0)])
    columns = {"s": slice(0, 40), "t": slice(24, 64)}  # both targets read columns 24 to 39
    agents = {name: Agent(name, listen=()) for name in "abst"}
    sources, theirs = [WeightSource(agents[name]) for name in "ab"], [array_of(n, (48, 64)) for n in range(2)]
    for source, array in zip(sources, theirs, strict=True):
        source.add("w", array, sharding=rows)
    targets = [WeightTarget(agents[name]) for name in "st"]
    ours = [array_of(number, (96, 40)) for number in range(2)]
    for target, array, slices in zip(targets, ours, columns.values(), strict=True):
        target.add("w", array, start=(0, slices.start), size=SIZE)
    cards = [target.card() for target in targets]
    for target, other in zip(targets, cards[::-1], strict=True):
        target.connect([source.card() for source in sources], peers=[other] if peers else [])
    for version in (1, 2):
        whole = np.arange(np.prod(SIZE), dtype=np.float32).reshape(SIZE) * version
        for array, part in zip(theirs, np.split(whole, 2), strict=True):
            array.upload(part)
        bodies = [lambda source=source, version=version: source.offer(version, targets=2) for source in sources]
        bodies += [lambda target=targets[1]: target.receive()]
        threads = [threading.Thread(target=body) for body in bodies]
        for thread in threads:
            thread.start()
        stream = ours[0].runtime.create_stream()
        assert targets[0].receive(stream=stream).version == version
        for thread in threads:
            thread.join()
        for array, slices in zip(ours, columns.values(), strict=True):
            np.testing.assert_array_equal(array.numpy(), whole[:, slices])
    for agent in agents.values():
        agent.close()


def test_elements_are_cast_on_the_targets_device() -> None:
    whole = np.random.default_rng(1).standard_normal((300, 260)).astype(np.float32)
    rows = Sharding(whole.shape, ["a", "b"], [Shard(0)])
    with Agent("a") as a, Agent("b") as b, Agent("s") as s:
        sources = [WeightSource(agent, amax=True) for agent in (a, b)]
        for number, source in enumerate(sources):
            part = array_of(number, (150, 260)).upload(whole[150 * number :][:150])
            source.add("w", part, sharding=rows)
            source.add("f", part, sharding=rows)
        target = WeightTarget(s, staging_bytes=1 << 16)
        bfloat16, float8 = array_of(0, whole.shape, "bfloat16"), array_of(0, whole.shape, "float8_e4m3fn")
        scales = array_of(0, (3, 3))
        target.add("w", bfloat16)
        target.add("f", float8, scale=scales)
        target.connect([source.card() for source in sources])
        with sources[0].offered(1), sources[1].offered(1):
            target.receive(stream=bfloat16.runtime.create_stream())
        target.close()
    np.testing.assert_array_equal(bfloat16.numpy(), whole.astype(bfloat16.dtype.numpy()))
    blocks = [np.split(each, (128, 256), 1) for each in np.split(whole, (128, 256))]
    expected = np.array([[np.abs(block).max() for block in each] for each in blocks]) / np.float32(448)
    np.testing.assert_array_equal(scales.numpy(), expected)
    each_scale = np.repeat(np.repeat(expected, 128, 0), 128, 1)[:300, :260]
    np.testing.assert_array_equal(float8.numpy(), (whole * (1 / each_scale)).astype(float8.dtype.numpy()))
