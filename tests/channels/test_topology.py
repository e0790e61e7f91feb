"""Tests which ranks share a node (a real or a simulated one), and several communicators at the same time."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from proxyccl import ArgumentError, Array, Communicator, Runtime, RuntimeUnavailableError, ThreadBootstrap
from proxyccl.channels.collectives import reductions
from proxyccl.channels.joining.topology import RANK_INFO, RankInfo, Topology, chosen_local_world_size, encode_choice
from proxyccl.channels.peer_links import PeerLinks
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.proxy.interface import Connection
from support.cases.reference import ALGORITHMS, MOVES, Call
from support.device_arrays import barrier, on_device, on_host
from support.devices import most_ranks, rank_runtime, require_devices
from support.ranks import Ranks
from support.running import TIMEOUT, run_ranks


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return rank_runtime(0)


@pytest.fixture(scope="module")
def own(runtime: Runtime) -> RankInfo:
    return RankInfo.own(runtime)


def processes(*infos: RankInfo, local: int | None = None) -> list[RankInfo]:
    """Returns `infos` with a different process for each rank and `local` as the number of ranks per node."""
    return [
        replace(info, process=replace(info.process, token=bytes([rank])), local_world_size=local)
        for rank, info in enumerate(infos)
    ]


@pytest.mark.gpu_only
def test_threads_on_one_gpu_are_refused(runtime: Runtime, own: RankInfo) -> None:
    with pytest.raises(ArgumentError, match=r"device: ranks 0 and 2 are threads of one process on the same GPU"):
        Topology.find(1, [own, *processes(own), own], runtime)


def test_ranks_of_one_host_are_a_node(runtime: Runtime, own: RankInfo) -> None:
    topology = Topology.find(1, processes(*[own] * 3), runtime)
    assert topology.nodes == (0, 0, 0)
    assert (topology.world_size, topology.node_count) == (3, 1)
    assert (topology.local_rank, topology.local_world_size) == (1, 3)
    assert topology.all_accessible()


def test_hosts_are_nodes_in_the_order_of_their_first_ranks(runtime: Runtime, own: RankInfo) -> None:
    other = replace(own, host="elsewhere")
    topology = Topology.find(3, processes(own, other, own, other), runtime)
    assert topology.nodes == (0, 1, 0, 1)
    assert topology.node_ranks == [1, 3]
    assert topology.local_rank == 1
    assert topology.accessible == (False, True, False, True)
    assert not topology.all_accessible()
    assert [topology.same_host(peer) for peer in range(4)] == [False, True, False, True]


def test_a_local_world_size_makes_nodes_of_consecutive_ranks(runtime: Runtime, own: RankInfo) -> None:
    topology = Topology.find(2, processes(*[own] * 6, local=2), runtime)
    assert topology.nodes == (0, 0, 1, 1, 2, 2)
    assert (topology.node_ranks, topology.local_rank, topology.node_count) == ([2, 3], 0, 3)
    assert topology.accessible == (False, False, True, True, False, False)
    assert all(topology.same_host(peer) for peer in range(6))


@pytest.mark.parametrize("local", [0, -1, 2, 4, 1.0])
def test_a_local_world_size_must_divide(local: Any) -> None:
    with pytest.raises(ArgumentError, match=f"local_world_size: {local} does not divide the world size 3"):
        chosen_local_world_size(local, 3)


def test_all_ranks_use_one_runtime(runtime: Runtime, own: RankInfo) -> None:
    with pytest.raises(ArgumentError, match=r"runtime: .* found abacus, "):
        Topology.find(0, [own, replace(own, runtime="abacus")], runtime)


def test_devices_that_are_no_peers_are_not_accessible(runtime: Runtime, own: RankInfo) -> None:
    topology = Topology.find(0, [own, replace(own, device_id="abacus:1")], runtime)
    assert topology.accessible == (True, False)


def test_what_a_rank_tells_survives_the_bootstrap(own: RankInfo) -> None:
    assert RANK_INFO.decode(RANK_INFO.encode(own), "rank 0") == own


# -- nodes that `local_world_size` simulates ---


# Without --full, one case has one rank per node and the other has two nodes of two ranks.
# test_a_local_world_size_makes_nodes_of_consecutive_ranks has three nodes.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            nodes, marks=[] if nodes in ((2, 1), (4, 2)) else pytest.mark.full, id="{}-ranks-{}-local".format(*nodes)
        )
        for nodes in ((2, 1), (4, 1), (4, 2), (6, 2), (6, 3))
        if nodes[0] <= most_ranks()
    ],
)
def nodes(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    world_size, local = request.param
    with Ranks(world_size, local_world_size=local) as group:
        yield group


def test_collectives_cross_nodes(nodes: Ranks) -> None:
    def body(comm: Communicator) -> None:
        mapped = comm.local_world_size == comm.world_size
        assert not mapped
        for turn, algorithm in enumerate(("two_shot", "ring", "proxy", None)):
            for count in (1, 17, 5003):
                Call("all_reduce", "float32", "sum", algorithm, count, turn, seed=turn).run(comm)
                Call("all_reduce", "int64", "avg", algorithm, count, in_place=False, seed=turn).run(comm)
        for collective in ("reduce_scatter", *MOVES):
            for algorithm in (None, "proxy"):
                Call(collective, "float32", "sum", algorithm, 2001, root=comm.world_size - 1).run(comm)
        Call("all_reduce", "float32", "sum", "two_shot", 1_100_001).run(comm)
        Call("all_reduce", "float32", "sum", "ring", 1_100_001).run(comm)
        comm.barrier()

    nodes.run(body)


# Two examples suffice, because the hierarchical algorithm's steps do not depend on the type and operation.
EXAMPLES = {("bfloat16", "sum"), ("int64", "avg")}
REDUCTIONS = [
    pytest.param(dtype, op, marks=[] if (dtype, op) in EXAMPLES else pytest.mark.full)
    for dtype in ("int64", "float32", "bfloat16")
    for op in ("sum", "avg", "max", "prod")
]


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_a_hierarchy_reduces_what_is_between_nodes_once(nodes: Ranks, dtype: str, op: str) -> None:
    def body(comm: Communicator) -> None:
        if not comm.topology.has_levels():
            with pytest.raises(ArgumentError, match="several nodes with equally many ranks"):
                comm.all_reduce(on_device(comm, np.ones(4, np.float32)), algorithm="hierarchical")
            return
        for turn, count in enumerate((1, comm.local_world_size, 17, 5003, 300_001)):
            Call("all_reduce", dtype, op, "hierarchical", count, turn % 5, in_place=turn % 2 == 0, seed=turn).run(comm)

    nodes.run(body)


# The first half of the ranks has the first value, the second half the second value. The result of all ranks fits the
# type, but the result of one node alone would overflow.
UNEVEN = {
    ("float16", "sum"): (60000.0, -58976.0),
    ("float16", "prod"): (512.0, 2.0**-8),
    ("float16", "avg"): (60000.0, 50000.0),
    ("bfloat16", "avg"): (3e38, 2e38),
}


@pytest.mark.parametrize(("dtype", "op"), UNEVEN)
def test_what_fits_as_a_whole_does_not_overflow_in_parts(
    nodes: Ranks, dtype: str, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reductions, "WIDE_PARTS_BYTES", 40_000)  # makes the longest call reduce in several parts
    values = [UNEVEN[dtype, op][rank >= nodes.world_size // 2] for rank in range(nodes.world_size)]
    exact = {"sum": math.fsum, "prod": math.prod, "avg": lambda each: math.fsum(each) / len(each)}[op](values)

    def body(comm: Communicator) -> None:
        def whole(count: int) -> Any:
            return on_device(comm, np.full(count, values[comm.rank], as_dtype(dtype).numpy()))

        for count, algorithm in itertools.product((5, 20_003), (None, "two_shot")):
            root = whole(count)
            results = [
                comm.all_reduce(whole(count), op, algorithm=algorithm),
                comm.reduce_scatter(whole(count * comm.world_size), op),
            ]
            comm.reduce(root, op, 1, algorithm=algorithm)
            barrier(comm)
            for result in (*results, *([root] if comm.rank == 1 else [])):
                np.testing.assert_allclose(on_host(result).astype(np.float64), exact, rtol=2.0**-8)

    nodes.run(body)


@pytest.mark.parametrize("op", ["avg", *(pytest.param(op, marks=pytest.mark.full) for op in ("sum", "min"))])
def test_integers_come_out_of_a_hierarchy_as_on_one_node(op: str) -> None:
    def body(comm: Communicator) -> bytes:
        values = np.random.default_rng(comm.rank).integers(-(1 << 60), 1 << 60, 1001)
        return on_host(comm.all_reduce(on_device(comm, values.copy()), op)).tobytes()

    assert run_ranks(4, body, local_world_size=2) == run_ranks(4, body)


def test_a_rank_uses_only_ranks_of_its_node_and_of_its_number_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, connected = PeerLinks.connection, defaultdict[PeerLinks, set[int]](set)

    def recorded(links: PeerLinks, peer: int, *, private: bool = False) -> Connection:
        connected[links].add(peer)
        return connect(links, peer, private=private)

    monkeypatch.setattr(PeerLinks, "connection", recorded)

    def body(comm: Communicator) -> list[int]:
        for count in (1, 1001, 300_001):  # odd counts are not divisible by a node's two ranks
            x = comm.empty(count, "float32").fill(comm.rank)
            comm.all_reduce(x)
            comm.barrier()
            assert np.all(on_host(x) == sum(range(comm.world_size)))
        return sorted(connected[comm.group.links])

    with Ranks(6, local_world_size=2) as ranks:
        assert ranks.run(body) == [[2, 4], [3, 5], [0, 4], [1, 5], [0, 2], [1, 3]]


# -- the choice of transports ---

VERBS, FABRIC = ("verbs", "staged"), ("fabric", "staged_fabric")
REMOTE = {"missing": dict.fromkeys((*VERBS, *FABRIC), "")}


def test_copies_within_a_node_and_rdma_between(runtime: Runtime, own: RankInfo) -> None:
    here, there = replace(own, **REMOTE), replace(own, host="elsewhere", **REMOTE)
    topology = Topology.find(0, processes(here, here, there, there), runtime)
    assert topology.transports() == {1: "copy", 2: "verbs", 3: "verbs"}
    assert topology.has_remote_pairs()


def test_rehearsed_nodes_use_rdma_where_there_is_some(runtime: Runtime, own: RankInfo) -> None:
    with_remote = Topology.find(0, processes(*[replace(own, **REMOTE)] * 4, local=2), runtime)
    assert with_remote.transports() == {1: "copy", 2: "verbs", 3: "verbs"}
    without = Topology.find(0, processes(*[own] * 4, local=2), runtime)
    assert without.transports() == {1: "copy", 2: "copy", 3: "copy"}
    assert not without.has_remote_pairs()


def test_a_pair_is_staged_where_a_rank_can_not_register(runtime: Runtime, own: RankInfo) -> None:
    choice = encode_choice({(0, 3): "verbs", (1, 3): "staged", (2, 4): "copy"}, 6)
    infos = processes(*[replace(own, transport=choice, **REMOTE)] * 6, local=2)
    found = Topology.find(0, infos, runtime)
    assert found.transports() == {1: "copy", 2: "verbs", 3: "verbs", 4: "verbs", 5: "verbs"}
    told = found.with_unsupported_reasons([{"verbs": reason} for reason in ("", "", "no way", "no way", "", "")])
    assert told.ranks[2].unsupported["verbs"] == "no way"
    assert told.transports() == {1: "copy", 2: "staged", 3: "verbs", 4: "verbs", 5: "verbs"}
    expected = {(1, 3): "staged", (3, 1): "staged", (2, 3): "copy", (2, 4): "copy", (4, 3): "staged", (1, 5): "verbs"}
    assert {pair: told.transport(*pair) for pair in expected} == expected
    assert (found.nodes, found.accessible) == (told.nodes, told.accessible)


def test_a_staged_pair_uses_rdma(runtime: Runtime, own: RankInfo) -> None:
    infos = processes(*[replace(own, transport=encode_choice("staged", 2), **REMOTE)] * 2)
    topology = Topology.find(0, infos, runtime)
    assert topology.transports() == {1: "staged"}
    assert topology.has_remote_pairs()


def test_hosts_without_a_remote_transport_are_told_what_is_missing(runtime: Runtime, own: RankInfo) -> None:
    lacks = {**dict.fromkeys(VERBS, "there is no RDMA device"), **dict.fromkeys(FABRIC, "there is no libfabric")}
    there = replace(own, host="elsewhere", missing=lacks)
    topology = Topology.find(0, processes(replace(own, **REMOTE), there), runtime)
    message = "ranks 0 and 1: rank 1 lacks it: there is no RDMA device; there is no libfabric"
    with pytest.raises(RuntimeUnavailableError, match=message):
        topology.transports()
    bystander = Topology.find(2, processes(replace(own, **REMOTE), there, replace(own, **REMOTE)), runtime)
    with pytest.raises(RuntimeUnavailableError, match="rank 1 lacks it"):
        bystander.has_remote_pairs()


def test_hosts_without_rdma_use_a_fabric_and_rehearsed_nodes_do_not(runtime: Runtime, own: RankInfo) -> None:
    lacks = {**dict.fromkeys(VERBS, "there is no RDMA device"), **dict.fromkeys(FABRIC, "")}
    here = replace(own, missing=lacks)
    elsewhere = replace(here, host="elsewhere")
    assert Topology.find(0, processes(here, elsewhere), runtime).transports() == {1: "fabric"}
    both = replace(elsewhere, missing={**dict.fromkeys(lacks, "")})
    assert Topology.find(0, processes(replace(here, missing=both.missing), both), runtime).transports() == {1: "verbs"}
    assert Topology.find(0, processes(here, here, local=1), runtime).transports() == {1: "copy"}


def test_a_pair_is_forced_on_either_transport(runtime: Runtime, own: RankInfo) -> None:
    choice = encode_choice({(1, 0): "verbs", (0, 2): "copy"}, 4)
    infos = processes(*[replace(own, transport=choice, **REMOTE)] * 4, local=2)
    assert Topology.find(0, infos, runtime).transports() == {1: "verbs", 2: "copy", 3: "verbs"}


def test_the_transports_of_all_pairs_are_found_from_few(runtime: Runtime, own: RankInfo) -> None:
    varied = random.Random(1)
    for _ in range(200):
        able = [{**dict.fromkeys(VERBS, missing), **dict.fromkeys(FABRIC, "")} for missing in ("", "no device")]
        hosts, ranks = varied.randint(1, 4), 2 * varied.randint(1, 6)
        infos = sorted(
            (
                replace(
                    own,
                    host=f"host{varied.randrange(hosts)}",
                    missing=varied.choice(able[: varied.randint(1, 2)]),
                    unsupported=varied.choice([{}, {"verbs": "no way"}, {"fabric": "no way"}]),
                    transport=encode_choice({}, ranks),
                )
                for _ in range(ranks)
            ),
            key=lambda info: info.host,
        )
        local = varied.choice([None, 1, 2])
        topology = Topology.find(0, processes(*infos, local=local), runtime)
        every_pair = {topology.transport(a, b) for a in range(ranks) for b in range(a)}
        assert topology.all_transports == every_pair, (infos, local)


@pytest.mark.parametrize(
    ("choice", "host", "missing", "message"),
    [
        ("copy", "elsewhere", "", "they do not share a host"),
        ("verbs", "", "no device", "rank 0 lacks it: no device"),
        ("staged", "", "no device", "rank 0 lacks it: no device"),
    ],
)
def test_a_transport_that_cant_be_is_refused(
    runtime: Runtime, own: RankInfo, choice: str, host: str, missing: str, message: str
) -> None:
    here = replace(own, missing=dict.fromkeys(("verbs", "staged"), missing), transport=encode_choice(choice, 2))
    infos = processes(here, replace(here, host=host or here.host))
    with pytest.raises(RuntimeUnavailableError, match=message):
        Topology.find(0, infos, runtime).transports()


@pytest.mark.parametrize("choice", ["rdma", {(0, 1): "pigeon"}, {(0, 0): "copy"}, {(0,): "copy"}, {(-1, 0): "copy"}])
def test_a_choice_that_is_none_is_refused(choice: Any) -> None:
    with pytest.raises(ArgumentError, match="transport: "):
        encode_choice(choice, 3)


def test_the_environment_chooses_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_TRANSPORT", "copy")
    assert encode_choice(None, 3) == encode_choice("copy", 3) != encode_choice({}, 3)
    monkeypatch.setenv("PROXYCCL_TRANSPORT", "pigeon")
    with pytest.raises(ArgumentError, match="PROXYCCL_TRANSPORT: 'pigeon' is not one of copy, verbs, staged"):
        encode_choice(None, 3)


@pytest.mark.parametrize(("option", "chosen"), [("transport", "copy"), ("local_world_size", 1)])
def test_all_ranks_choose_alike(option: str, chosen: Any) -> None:
    require_devices(2)
    bootstraps = ThreadBootstrap.create(2)

    def body(rank: int) -> None:
        with pytest.raises(ArgumentError, match=f"{option}: rank 1 chose"):
            Communicator(bootstraps[rank], rank_runtime(rank), timeout=TIMEOUT, **{option: chosen if rank else None})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(body, range(2)))


@pytest.mark.parametrize("algorithm", ["one_shot", "recursive_doubling", "two_shot_packets"])
def test_packets_need_mapped_memory(nodes: Ranks, algorithm: str) -> None:
    def body(comm: Communicator) -> None:
        message = "needs every rank's memory mapped, and some is not; expected one of two_shot, ring, proxy"
        with pytest.raises(ArgumentError, match=f"{algorithm} {message}"):
            comm.all_reduce(on_device(comm, np.ones(4, np.float32)), algorithm=algorithm)
        comm.barrier()

    nodes.run(body)


def test_local_ranks_count_within_their_node() -> None:
    def body(comm: Communicator) -> tuple[int, int]:
        return comm.local_rank, comm.local_world_size

    assert run_ranks(4, body, local_world_size=2) == [(0, 2), (1, 2), (0, 2), (1, 2)]


def test_the_environment_rehearses_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_LOCAL_WORLD_SIZE", "1")
    assert run_ranks(3, lambda comm: comm.topology.node_count) == [3, 3, 3]


# -- several communicators and streams at the same time ---


def test_communicators_of_the_same_ranks_are_apart() -> None:
    def body(comm: Communicator) -> None:
        calls = [Call("all_reduce", "float32", "sum", algorithm, 3001, seed=3) for algorithm in ALGORITHMS]
        stream = comm.runtime.create_stream()
        for second in others[comm.rank]:
            for call in calls:
                started = call.start(comm, stream)
                call.run(second)
                started.finish()

    more = [ThreadBootstrap.create(3) for _ in range(2)]
    with Ranks(3) as ranks:
        others = ranks.run(lambda comm: [Communicator(bootstraps[comm.rank], timeout=TIMEOUT) for bootstraps in more])
        ranks.run(body)
        ranks.run(lambda comm: [other.close() for other in others[comm.rank]])


@pytest.mark.hip
def test_streams_of_the_caller_are_kept_in_order() -> None:
    """The library runs calls on different streams one after another, because all calls share scratch memory."""

    def body(comm: Communicator) -> None:
        streams = [comm.runtime.create_stream() for _ in range(3)]
        for turn in range(3):
            started = [
                Call("all_reduce", "float32", "sum", algorithm, 3001 + i, seed=turn + i).start(
                    comm, streams[(turn + i) % 3]
                )
                for i, algorithm in enumerate(ALGORITHMS)
            ]
            Call("all_gather", "int32", count=99, seed=turn).run(comm)
            for call in started:
                call.finish()

    with Ranks(3) as ranks:
        ranks.run(body)


@pytest.mark.hip
def test_a_collective_on_a_stream_does_not_wait_for_the_others() -> None:
    def body(comm: Communicator) -> None:
        stream = comm.runtime.create_stream()
        x = on_device(comm, np.full(8, comm.rank + 1.0))
        barrier(comm)
        if comm.rank == 0:
            comm.all_reduce(x, stream=stream)  # returns before rank 1 makes its call
            comm.all_gather_bytes(b"issued")
        else:
            comm.all_gather_bytes(b"")
            comm.all_reduce(x, stream=stream)
        comm.synchronize(stream)
        assert (on_host(x) == 3).all()

    run_ranks(2, body)


@pytest.mark.hip
def test_arrays_of_asynchronous_calls_are_kept_alive() -> None:
    def fresh(comm: Communicator, value: int) -> np.ndarray | Array:
        if comm.runtime.name == "host":
            return np.full(50_000, value, np.int64)
        return comm.empty(50_000, "int64").fill(value)

    def body(comm: Communicator) -> None:
        stream = comm.runtime.create_stream()
        results = [comm.all_reduce(fresh(comm, 1), out=fresh(comm, 0), stream=stream) for _ in range(30)]
        comm.synchronize()
        assert all((on_host(result) == 2).all() for result in results)

    run_ranks(2, body)


@pytest.mark.hip
@pytest.mark.parametrize("form", ["handle", "cuda_stream", "__cuda_stream__", "ptr"])
def test_streams_of_other_libraries_are_taken_by_their_handles(form: str) -> None:
    def body(comm: Communicator) -> None:
        own = comm.runtime.create_stream()
        foreign: object = own.handle
        if form == "__cuda_stream__":
            foreign = type("Stream", (), {"__cuda_stream__": lambda _: (0, own.handle)})()
        elif form != "handle":
            foreign = type("Stream", (), {form: own.handle})()
        x = on_device(comm, np.ones(5, np.float32))
        comm.all_reduce(x, stream=foreign)
        comm.synchronize(foreign)
        assert (on_host(x) == 2).all()

    run_ranks(2, body)
