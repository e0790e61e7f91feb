"""Weights whose element type changes while they move: every element has the bits that ml_dtypes computes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from proxyccl.channels.weights.tiles import Tiles
from proxyccl.device.errors import ArgumentError
from proxyccl.transfer import Agent, TransferError
from proxyccl.weights import Shard, Sharding, WeightSource, WeightTarget
from support.running import wait_for

pytestmark = [pytest.mark.host_only("the host's memory moves alike on every runtime")]

FLOAT32, FLOAT16, BFLOAT16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
NAMES = ("a", "b", "c")
LEAST_STAGING = 4096

Array = NDArray[Any]
Expected = list[tuple[Array, Array]]
"""Arrays of a target, and the values that they must have."""
NewAgent = Callable[[str], Agent]


@pytest.fixture
def new_agent() -> Iterator[NewAgent]:
    with contextlib.ExitStack() as stack:
        yield lambda name: stack.enter_context(Agent(name))


def values(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int = 0) -> Array:
    """Returns values of many magnitudes, with zeros."""
    random = np.random.default_rng(seed)
    made = random.standard_normal(shape) * 2.0 ** random.integers(-28, 12, shape)
    made.flat[::11] = 0
    return made.astype(dtype)


def slices(sharding: Sharding, name: str) -> tuple[slice, ...]:
    box = sharding.box(name)
    return tuple(slice(first, first + extent) for first, extent in zip(box.start, box.shape, strict=True))


def offer(new_agent: NewAgent, tensors: dict[str, Array], dim: int = 0, **options: Any) -> list[WeightSource]:
    """Makes sources that divide each tensor's dimension `dim`."""
    sources = [WeightSource(new_agent(name), **options) for name in NAMES]
    for tensor, whole in tensors.items():
        sharding = Sharding(whole.shape, NAMES, [Shard(min(dim, whole.ndim - 1))])
        for name, source in zip(NAMES, sources, strict=True):
            source.add(tensor, whole[slices(sharding, name)].copy(), sharding=sharding)
    return sources


def receive(sources: list[WeightSource], *targets: WeightTarget, version: int = 1) -> None:
    with contextlib.ExitStack() as stack:
        for source in sources:
            stack.enter_context(source.offered(version))
        for target in targets:
            target.receive()


def quantized(whole: Array, amax: Array) -> tuple[Array, Array]:
    """Returns float8 elements, and their scales. `amax` has the extent of a block, or is a single number."""
    scales = np.where(amax > 1e-30, amax / np.float32(448), np.float32(1)).astype(np.float32)
    return (whole.astype(np.float32) * (np.float32(1) / scales)).astype(FLOAT8), scales


def amax_of_blocks(whole: Array) -> Array:
    """Returns, for each element of a matrix or of each matrix of a stack, the amax of the element's block."""
    made = np.empty(whole.shape, np.float32)
    for row in range(0, whole.shape[-2], 128):
        for column in range(0, whole.shape[-1], 128):
            block = (..., slice(row, row + 128), slice(column, column + 128))
            made[block] = np.nanmax(np.abs(whole[block].astype(np.float32)), (-2, -1), keepdims=True)
    return made


def assert_same_bits(got: Array, expected: Array) -> None:
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got.view(np.uint8), np.ascontiguousarray(expected).view(np.uint8))


@pytest.mark.parametrize("to", FLOATS, ids=str)
@pytest.mark.parametrize("given", FLOATS, ids=str)
def test_elements_are_rounded_to_the_targets_type(new_agent: NewAgent, given: np.dtype[Any], to: np.dtype[Any]) -> None:
    """The parts are of odd shapes, some are empty, and no half of the staging buffer holds a row of `wide`."""
    shapes = {
        "matrix": (131, 67),
        "vector": (301,),
        "stack": (4, 5, 6),
        "few": (2, 9),
        "scalar": (1,),
        "wide": (3, 1999),
    }
    with np.errstate(over="ignore"):
        tensors = {name: values(shape, given) for name, shape in shapes.items()}
    tensors["vector"][:4] = (np.inf, -np.inf, 0.0, -0.0)
    sources = offer(new_agent, tensors)
    targets = [WeightTarget(new_agent(name), staging_bytes=LEAST_STAGING) for name in ("s", "t")]
    parts: Expected = []
    for name, whole in tensors.items():
        sharding = Sharding(whole.shape, ("s", "t"), [Shard(whole.ndim - 1)])
        with np.errstate(over="ignore"):
            expected = whole.astype(to)
        for place, target in zip(("s", "t"), targets, strict=True):
            own = expected[slices(sharding, place)]
            parts.append((np.ones_like(own), own))
            target.add(name, parts[-1][0], sharding=sharding)
    for target in targets:
        target.connect([source.card() for source in sources])
    receive(sources, *targets)
    for got, expected in parts:
        assert_same_bits(got, expected)
    read = sum(whole.nbytes for whole in tensors.values())
    assert sum(target.nbytes for target in targets) == read


def add_float8(
    target: WeightTarget, name: str, whole: Array, rows: slice, *, blocks: bool
) -> list[tuple[Array, Array]]:
    """Adds rows of a tensor in float8, and returns the arrays that receive them and their scales, each with the
    expected values. Without `blocks`, the whole tensor has one scale.
    """
    own = (slice(rows.start, rows.stop),) if whole.ndim == 1 else (..., rows, slice(None))
    amaxes = amax_of_blocks(whole) if blocks else np.nanmax(np.abs(whole.astype(np.float32))).reshape(1)
    elements, scales = quantized(whole, amaxes)
    expected = elements[own]
    expected_scales = scales[own][..., ::128, ::128] if blocks else scales
    got, got_scales = np.zeros(expected.shape, FLOAT8), np.zeros(expected_scales.shape, np.float32)
    start = [0] * whole.ndim
    start[max(0, whole.ndim - 2)] = rows.start
    target.add(name, got, start=start, size=whole.shape, scale=got_scales)
    return [(got, expected), (got_scales, expected_scales)]


@pytest.mark.parametrize("given", FLOATS, ids=str)
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("divided", [0, 1])
def test_all_shards_of_a_tensor_have_the_same_scales(
    new_agent: NewAgent, divided: int, blocks: bool, given: np.dtype[Any]
) -> None:
    """The parts of several sources meet within blocks, and the targets divide the tensors in another way."""
    tensors = {
        "matrix": values((300, 391), given, 1),
        "experts": values((3, 260, 130), given, 2),
        "zeros": np.zeros((140, 7), given),
    }
    if not blocks:
        tensors["vector"] = values((301,), given, 3)
    tensors["matrix"][3, 4] = np.nan
    sources = offer(new_agent, tensors, divided, amax=True)
    targets = [WeightTarget(new_agent(name), staging_bytes=LEAST_STAGING) for name in ("s", "t")]
    parts: Expected = []
    for name, whole in tensors.items():
        extent, middle = whole.shape[max(0, whole.ndim - 2)], 128 if blocks else 77
        for target, rows in zip(targets, (slice(0, middle), slice(middle, extent)), strict=True):
            parts += add_float8(target, name, whole, rows, blocks=blocks)
    for target in targets:
        target.connect([source.card() for source in sources])
    receive(sources, *targets)
    for got, expected in parts:
        assert_same_bits(got, expected)


def test_amaxes_are_measured_at_each_offer(new_agent: NewAgent) -> None:
    whole, got, scale = np.zeros((4, 4), np.float32), np.zeros((4, 4), FLOAT8), np.zeros((), np.float32)
    source, target = WeightSource(new_agent("a"), amax=True), WeightTarget(new_agent("s"))
    source.add("w", whole)
    target.add("w", got, scale=scale)
    target.connect([source.card()])
    for version, greatest in enumerate((3.0, 7.0, 0.5), 1):
        whole[:] = np.linspace(-greatest, 0, 16).reshape(4, 4)
        receive([source], target, version=version)
        expected, expected_scale = quantized(whole, np.float32(greatest))
        assert_same_bits(got, expected)
        assert scale == expected_scale


def test_peers_pass_on_elements_that_were_cast(new_agent: NewAgent) -> None:
    whole = values((256, 256), FLOAT32)
    sources = offer(new_agent, {"w": whole, "f": whole}, amax=True)
    targets = [WeightTarget(new_agent(name)) for name in ("s", "t")]
    parts: Expected = []
    for target in targets:
        parts.append((np.zeros(whole.shape, BFLOAT16), whole.astype(BFLOAT16)))
        target.add("w", parts[-1][0])
        parts += add_float8(target, "f", whole, slice(0, 256), blocks=True)
    cards = [target.card() for target in targets]
    for target, other in zip(targets, cards[::-1], strict=True):
        target.connect([source.card() for source in sources], peers=[other])
    assert sum(target.nbytes for target in targets) == 2 * whole.nbytes + whole.size * (2 + 1)
    with contextlib.ExitStack() as stack:
        for source in sources:
            stack.enter_context(source.offered(1))
        threads = [threading.Thread(target=target.receive) for target in targets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for got, expected in parts:
        assert_same_bits(got, expected)


@pytest.mark.parametrize("ranks", [2, 8])
def test_each_rank_has_its_heads_of_fused_projections(new_agent: NewAgent, ranks: int) -> None:
    """The rows of a rank's array are [q; k; v] of its heads. With 8 ranks, two ranks have the same head of k and v."""
    heads, head_dim, hidden = {"q": 8, "k": 4, "v": 4}, 3, 10
    tensors = {name: values((total * head_dim, hidden), FLOAT32, total) for name, total in heads.items()}
    sources = offer(new_agent, tensors)
    targets: list[WeightTarget] = []
    parts: Expected = []
    for rank in range(ranks):
        target = WeightTarget(new_agent(f"s{rank}"))
        own = {}
        for name, total in heads.items():
            first, count = rank * total // ranks, max(1, total // ranks)
            own[name] = tensors[name][first * head_dim : (first + count) * head_dim].astype(BFLOAT16)
        fused, at = np.zeros((sum(map(len, own.values())), hidden), BFLOAT16), 0
        for name, rows in own.items():
            first_row = rank * heads[name] // ranks * head_dim
            within = slice(at, at + len(rows))
            target.add(name, fused, within=within, start=(first_row, 0), size=tensors[name].shape)
            at = within.stop
        target.connect([source.card() for source in sources])
        targets.append(target)
        parts.append((fused, np.concatenate(list(own.values()))))
    receive(sources, *targets)
    for got, expected in parts:
        assert_same_bits(got, expected)


def test_an_error_names_the_tensors_that_are_incomplete(new_agent: NewAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source is lost when the first of three tensors is cast, and the second one was read. Each tensor fills a half
    of the staging buffer.
    """
    agent, reader = new_agent("a"), new_agent("s")
    source, target = WeightSource(agent), WeightTarget(reader, staging_bytes=LEAST_STAGING)
    wholes = {name: np.full(LEAST_STAGING // 8, 5, np.float32) for name in ("u", "v", "w")}
    got = {name: np.zeros(whole.shape, BFLOAT16) for name, whole in wholes.items()}
    for name, whole in wholes.items():
        source.add(name, whole)
        target.add(name, got[name])
    target.connect([source.card()])
    launch = Tiles.launch

    def lose(tiles: Tiles, *arguments: Any) -> None:
        launch(tiles, *arguments)
        agent.close()
        wait_for(lambda: reader.lost("a"), "the reader notices the loss")

    with source.offered(1):
        monkeypatch.setattr(Tiles, "launch", lose)
        with pytest.raises(TransferError) as caught:
            target.receive()
    assert caught.value.__notes__ == ["incomplete tensors: u, v"]
    assert target.incomplete == ["u", "v"]
    assert [name for name, array in got.items() if (array != 0).any()] == ["u", "v"]
    again = WeightSource(new_agent("b"))
    for name, whole in wholes.items():
        again.add(name, whole)
    target.connect([again.card()])
    receive([again], target)
    assert target.incomplete == []
    assert all((array == 5).all() for array in got.values())


def test_what_can_not_be_cast_is_refused(new_agent: NewAgent) -> None:
    agents = {name: new_agent(name) for name in "abs"}

    def connect(given: Any, to: Any, scale: Any = None, **options: Any) -> None:
        source, target = WeightSource(agents["a"], **options), WeightTarget(agents["s"])
        source.add("w", np.zeros((200, 300), given))
        target.add("w", np.zeros((200, 300), to), scale=scale)
        target.connect([source.card()])

    scale = np.zeros(1, np.float32)
    with pytest.raises(ArgumentError, match="w: s has dtype 'bfloat16', to which 'float64' is not cast"):
        connect(np.float64, BFLOAT16)
    with pytest.raises(ArgumentError, match="w: s has dtype 'float32', to which 'float8_e4m3fn' is not cast"):
        connect(FLOAT8, np.float32)
    with pytest.raises(ArgumentError, match=r"w: s has float8_e4m3fn without scales; pass scale= to add"):
        connect(np.float32, FLOAT8, amax=True)
    with pytest.raises(ArgumentError, match=r"w: s makes scales, but a was made without WeightSource\(amax=True\)"):
        connect(np.float32, FLOAT8, scale)
    with pytest.raises(ArgumentError, match=r"needs one of float32, float16, bfloat16, not float8_e4m3fn"):
        connect(FLOAT8, FLOAT8, scale, amax=True)
    with pytest.raises(ArgumentError, match="is only for arrays in float8_e4m3fn, not bfloat16"):
        connect(np.float32, BFLOAT16, scale, amax=True)
    with pytest.raises(ArgumentError, match="expected a writable array of float32, not float64"):
        connect(np.float32, FLOAT8, np.zeros(1), amax=True)
    with pytest.raises(ArgumentError, match=r"expected shape \(\) or \(1,\), or \(2, 3\) for blocks of 128 x 128"):
        connect(np.float32, FLOAT8, np.zeros((3, 2), np.float32), amax=True)
    target = WeightTarget(agents["s"])
    with pytest.raises(ArgumentError, match=r"begins within a block that has one scale; .* not \(100, 0\)"):
        target.add(
            "w", np.zeros((100, 300), FLOAT8), start=(100, 0), size=(200, 300), scale=np.zeros((2, 3), np.float32)
        )
    with pytest.raises(ArgumentError, match=r"expected shape \(\) or \(1,\), but the shape is \(2,\)"):
        target.add("v", np.zeros(200, FLOAT8), scale=np.zeros(2, np.float32))
    with pytest.raises(ArgumentError, match="staging_bytes"):
        WeightTarget(agents["s"], staging_bytes=LEAST_STAGING - 1)


def test_targets_that_share_their_reads_have_the_same_type(new_agent: NewAgent) -> None:
    (source,), targets = offer(new_agent, {"w": values((4, 4), FLOAT32)})[:1], []
    for name, dtype in (("s", BFLOAT16), ("t", FLOAT16)):
        targets.append(WeightTarget(new_agent(name)))
        targets[-1].add("w", np.zeros((1, 4), dtype), start=(0, 0), size=(4, 4))
    with pytest.raises(ArgumentError, match="w: t has dtype 'float16', others 'bfloat16'"):
        targets[0].connect([source.card()], peers=[targets[1].card()])
