"""Plans between shardings are simulated: the targets get the right tensors, and each byte enters a node only once."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from proxyccl.channels.weights import plan as planner
from proxyccl.channels.weights.card import CARD, Card
from proxyccl.channels.weights.parts import Part, part_of
from proxyccl.channels.weights.plan import Read, plan
from proxyccl.channels.weights.sharding import Box, Replicate, Shard, Sharding
from proxyccl.device.arrays.array import as_view
from proxyccl.device.errors import ArgumentError

pytestmark = [pytest.mark.no_proxy]


@dataclass
class Memory:
    """A holder's bytes, and its parts of tensors. A part's address is its offset in `data`."""

    data: NDArray[np.uint8]
    parts: list[Part] = field(default_factory=list)

    def values(self, part: Part) -> NDArray[Any]:
        """The part's elements, as an array that shares this memory."""
        return np.ndarray(part.shape, part.dtype, self.data, part.address if part.nbytes else 0, part.strides)


def held(name: str, size: tuple[int, ...], dtype: str, boxes: list[Box]) -> Memory:
    """Returns a holder's memory with consecutive boxes of a tensor. Every second box is a slice of a larger array, and
    so not contiguous.
    """
    itemsize, parts, at = np.dtype(dtype).itemsize, [], 0
    for number, box in enumerate(boxes):
        margin = number % 2  # number of unused elements at each row's end
        shape = (*box.shape[:-1], box.shape[-1] + margin) if box.shape else ()
        strides = [itemsize * int(np.prod(shape[dim + 1 :])) for dim in range(len(shape))]
        parts.append(Part(name, dtype, itemsize, size, box.start, box.shape, at, tuple(strides)))
        at += itemsize * int(np.prod(shape))
    return Memory(np.zeros(at, np.uint8), parts)


def copy(reads: list[Read], memory: Memory, others: dict[str, Memory], *, relayed: bool) -> None:
    for read in reads:
        if read.relayed == relayed:
            for here, there, nbytes in read.blocks.tolist():
                memory.data[here : here + nbytes] = others[read.peer].data[there : there + nbytes]


def simulate(
    sources: dict[str, Memory], targets: dict[str, Memory], nodes: dict[str, int] | None = None
) -> dict[str, list[Read]]:
    reads = plan(
        {name: each.parts for name, each in sources.items()},
        {name: each.parts for name, each in targets.items()},
        nodes,
    )
    for relayed in (False, True):
        for name, memory in targets.items():
            copy(reads[name], memory, targets if relayed else sources, relayed=relayed)
    return reads


def cut_small() -> Any:
    """Lets plans cut even the smallest boxes to balance the load."""
    return mock.patch.object(planner, "_SHORTEST", 1)


SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


@st.composite
def shardings(draw: st.DrawFn, size: tuple[int, ...], prefix: str) -> Sharding:
    mesh_shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    names = np.array([f"{prefix}{n}" for n in range(np.prod(mesh_shape))], dtype=object).reshape(mesh_shape)
    placement = st.one_of(st.just(Replicate()), st.integers(0, len(size) - 1).map(Shard))
    return Sharding(size, names.tolist(), [draw(placement) for _ in mesh_shape])


@st.composite
def boxes(draw: st.DrawFn, size: tuple[int, ...]) -> Box:
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in size]
    return Box(tuple(first for first, _ in ends), tuple(last - first for first, last in ends))


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Memory], dict[str, Memory], dict[str, int], NDArray[Any]]:
    """Draws a tensor, sources on one or two meshes, targets on a mesh with further random boxes, and their nodes."""
    size = draw(SIZES)
    dtype = draw(st.sampled_from(("uint8", "int16", "float64")))
    tensor = np.arange(1, np.prod(size, dtype=int) + 1).reshape(size).astype(dtype)
    sources: dict[str, Memory] = {}
    for prefix in draw(st.sampled_from((["s"], ["s", "z"]))):
        sharding = draw(shardings(size, prefix))
        sources |= {str(name): held("w", size, dtype, [sharding.box(name)]) for name in sharding.holders}
    for memory in sources.values():
        for part in memory.parts:
            memory.values(part)[...] = tensor[tuple(map(slice, part.start, part.end))]
    sharding = draw(shardings(size, "t"))
    wanted = {str(name): [sharding.box(name), *draw(st.lists(boxes(size), max_size=2))] for name in sharding.holders}
    targets = {name: held("w", size, dtype, each) for name, each in wanted.items()}
    nodes = {name: draw(st.integers(0, 2)) for name in (*sources, *targets) if draw(st.booleans())}
    return sources, targets, nodes, tensor


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_target_gets_its_parts(case: tuple[dict[str, Memory], dict[str, Memory], dict[str, int], Any]) -> None:
    sources, targets, nodes, tensor = case
    with cut_small():
        reads = simulate(sources, targets, nodes)
    for name, memory in targets.items():
        for part in memory.parts:
            np.testing.assert_array_equal(memory.values(part), tensor[tuple(map(slice, part.start, part.end))])
        peers = [(read.peer, read.relayed) for read in reads[name]]
        assert len(set(peers)) == len(peers)
        for read in reads[name]:
            if read.relayed:
                assert nodes[read.peer] == nodes[name]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_each_byte_enters_a_node_once(data: st.DataObject) -> None:
    size = data.draw(SIZES)
    source, target = data.draw(shardings(size, "s")), data.draw(shardings(size, "t"))
    sources = {str(name): held("w", size, "int16", [source.box(name)]) for name in source.holders}
    targets = {str(name): held("w", size, "int16", [target.box(name)]) for name in target.holders}
    nodes = {name: data.draw(st.integers(0, 1)) for name in targets}
    with cut_small():
        reads = simulate(sources, targets, nodes)
    for node in (0, 1):
        wanted = np.zeros(size, np.bool_)
        for name in targets:
            if nodes[name] == node:
                box = target.box(name)
                wanted[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))] = True
        entered = sum(
            read.nbytes for name in targets for read in reads[name] if nodes[name] == node and not read.relayed
        )
        assert entered == 2 * wanted.sum()


def matrix(rows: int, columns: int, holders: str, placement: Shard | Replicate) -> dict[str, Memory]:
    sharding = Sharding((rows, columns), list(holders), [placement])
    return {name: held("w", (rows, columns), "int64", [sharding.box(name)]) for name in holders}


def test_replicas_share_the_work_evenly() -> None:
    sources = matrix(3000, 100, "abc", Replicate())
    reads = simulate(sources, matrix(3000, 100, "t", Replicate()))
    assert {read.peer: read.nbytes for read in reads["t"]} == dict.fromkeys("abc", 800_000)


def test_a_source_of_the_targets_node_is_preferred() -> None:
    reads = simulate(matrix(8, 8, "ab", Replicate()), matrix(8, 8, "st", Replicate()), {"a": 1, "b": 2, "s": 2, "t": 1})
    assert [read.peer for read in reads["s"] + reads["t"]] == ["b", "a"]


def test_targets_of_a_node_pass_on_equal_shares() -> None:
    reads = simulate(
        matrix(1200, 100, "a", Replicate()), matrix(1200, 100, "stu", Replicate()), dict.fromkeys("stu", 0)
    )
    for name in "stu":
        assert {read.peer: read.nbytes for read in reads[name]} == dict.fromkeys({*"astu"} - {name}, 320_000)


def test_columns_of_rows_are_strided_and_rows_are_one_block() -> None:
    by_rows, by_columns = matrix(6, 8, "ab", Shard(0)), matrix(6, 8, "st", Shard(1))
    reads = simulate(by_rows, by_columns)["t"]
    assert [len(read.blocks) for read in reads] == [3, 3]
    assert (reads[0].blocks == [[0, 32, 32], [32, 96, 32], [64, 160, 32]]).all()
    (whole,) = simulate(by_rows, matrix(6, 8, "s", Replicate()))["s"][:1]
    assert whole.blocks.tolist() == [[0, 0, 192]]


@pytest.mark.parametrize(("extent", "count"), [*itertools.product((0, 1, 5, 8, 9), (1, 3, 4))])
def test_a_dimension_is_divided_like_chunks_of_torch(extent: int, count: int) -> None:
    sharding = Sharding((extent,), list(range(count)), [Shard(0)])
    chunk = -(-extent // count)
    expected = [len(range(extent)[rank * chunk : (rank + 1) * chunk]) for rank in range(count)]
    assert [sharding.box(rank).shape for rank in range(count)] == [(n,) for n in expected]


def test_the_first_of_two_axes_divides_a_dimension_first() -> None:
    sharding = Sharding((10, 2), [["a", "b"], ["c", "d"]], [Shard(0), Shard(0)])
    assert [sharding.box(name).start[0] for name in "abcd"] == [0, 3, 5, 8]


def test_slices_of_a_fused_array_are_parts() -> None:
    fused = np.zeros((6, 4), np.float32)
    view = as_view(fused, "array")
    part = part_of("k", view, (2, 1), (8, 4), np.s_[4:6, 1:])
    assert (part.address, part.shape, part.strides) == (view.ptr + 4 * 16 + 4, (2, 3), (16, 4))
    with pytest.raises(ArgumentError, match="step of 1"):
        part_of("k", view, within=slice(0, 6, 2))
    with pytest.raises(ArgumentError, match="from 0 to 2 in dimension 0"):
        part_of("k", view, (4, 0), (8, 4))
    with pytest.raises(ArgumentError, match="at least 6 in dimension 0"):
        part_of("k", view, (0, 0), (5, 4))


def test_numpys_integers_place_a_part() -> None:
    view = as_view(np.zeros((2, 4), np.float32), "array")
    parts = [part_of("w", view, numbers([0, 4]), numbers([2, 8])) for numbers in (tuple, np.array)]
    plain, from_numpy = (CARD.encode(Card("proxyccl-weights-3", b"", 1, 0, [part], [0])) for part in parts)
    assert from_numpy == plain


def test_wrong_arguments_are_named() -> None:
    whole = matrix(4, 4, "a", Replicate())
    half = {"a": held("w", (4, 4), "int64", [Box((0, 0), (2, 4))])}
    with pytest.raises(ArgumentError, match=r"no source has w from \(2, 0\) on, of shape \(2, 4\)"):
        simulate(half, matrix(4, 4, "s", Replicate()))
    with pytest.raises(ArgumentError, match="a is a source too"):
        simulate(whole, whole)
    with pytest.raises(ArgumentError, match="w: s has dtype 'float64', to which 'int64' is not cast"):
        simulate(whole, {"s": held("w", (4, 4), "float64", [Box((0, 0), (4, 4))])})
    with pytest.raises(ArgumentError, match="no source has other"):
        simulate(whole, {"s": held("other", (4,), "int64", [Box((0,), (4,))])})
    for mesh, placements in ((["a", "a"], [Shard(0)]), (["a"], []), (["a"], [Shard(2)]), ([["a"], ["b", "c"]], [])):
        with pytest.raises(ArgumentError):
            Sharding((4, 4), mesh, placements)
    with pytest.raises(ArgumentError, match="'z' is not in the mesh"):
        Sharding((4, 4), ["a"], [Replicate()]).box("z")


def test_many_tensors_stay_balanced_between_replicas() -> None:
    random = np.random.default_rng(1)
    sources: dict[str, list[Part]] = {"a": [], "b": [], "c": []}
    targets: dict[str, list[Part]] = {"t": []}
    for number in range(60):
        rows = int(random.integers(1, 400))
        for name in sources:
            sources[name] += held(f"w{number}", (rows, 64), "int64", [Box((0, 0), (rows, 64))]).parts
        targets["t"] += held(f"w{number}", (rows, 64), "int64", [Box((0, 0), (rows, 64))]).parts
    sent = Counter({read.peer: read.nbytes for read in plan(sources, targets)["t"]})
    assert max(sent.values()) - min(sent.values()) <= 128 << 10
