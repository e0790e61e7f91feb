"""Calls accept Python's and numpy's integers as numeric arguments, and refuse other types and numbers out of range."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from proxyccl import (
    ArgumentError,
    Communicator,
    FabricOptions,
    RdmaOptions,
    ResourceError,
    ThreadBootstrap,
    open_runtime,
)
from proxyccl.device.arguments.integers import find_integer
from proxyccl.proxy.thread import IdlePolicy
from support.device_arrays import on_device, on_host
from support.ranks import Ranks

pytestmark = pytest.mark.hip

KERNEL = """
#include "proxyccl/proxyccl.h"
extern "C" __global__ void store(int *x, int value) { if (threadIdx.x == 0 && blockIdx.x == 0) *x = value; }
"""
NUMBERS = [np.int64, np.uint8, np.array]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as group:
        yield group


class OfNone:
    """An object whose `__index__` raises an exception, as an array of several elements does."""

    def __index__(self) -> int:
        raise TypeError("only arrays of one element have an index")

    def __repr__(self) -> str:  # the default repr has an address, so pytest-xdist's workers would get different names
        return "OfNone()"


def ones(comm: Communicator, count: int = 4) -> Any:
    return on_device(comm, np.ones(count, np.float32))


@pytest.mark.parametrize(
    ("value", "number"),
    [(3, 3), (np.int64(-3), -3), (np.array(3), 3), (2**70, 2**70), (True, None), (np.True_, None), (3.0, None)],
)
def test_integers_are_what_has_an_index_but_no_truth_values(value: Any, number: int | None) -> None:
    assert find_integer(value) == number


@pytest.mark.parametrize("value", [None, "3", np.array([1, 2]), OfNone(), np.float64(3)])
def test_other_things_are_not_integers(value: Any) -> None:
    assert find_integer(value) is None


def store(comm: Communicator, i: Callable[[int], Any]) -> None:
    x, kernel = comm.empty(i(1), "int32"), comm.compile(KERNEL, "store")
    kernel(i(1), (i(32), i(1)), x, i(7), shared=i(0))
    kernel(i(1), i(1), np.uint64(x.ptr), i(7))
    comm.synchronize()
    assert x.numpy()[0] == 7


def transfer(comm: Communicator, i: Callable[[int], Any]) -> None:
    x, peer = ones(comm), i(1 - comm.rank)
    if comm.rank == 0:
        comm.send(x, peer)
    else:
        comm.recv(x, peer)
    with comm.transfers() as transfers:
        transfers.send(x, peer)
        transfers.recv(ones(comm), peer)


def split(comm: Communicator, i: Callable[[int], Any]) -> None:
    with comm.split([i(1), i(0)]) as part:
        assert part.members == (1, 0)


def shrink(comm: Communicator, i: Callable[[int], Any]) -> None:
    with comm.split([0, 1]) as part:
        if part.rank == 0:
            with part.shrink(exclude=[i(1)]) as shrunk:
                assert shrunk.world_size == 1


def channels(comm: Communicator, i: Callable[[int], Any]) -> None:
    x = comm.empty(64)
    comm.sm_channels(x, peers=[i(1 - comm.rank)])
    channel = comm.proxy_channels(x, peers=[i(1 - comm.rank)]).to(i(1 - comm.rank))
    channel.signal(i(1))
    channel.wait_until(i(1))
    registered = comm.register(x)
    assert registered.peer_nbytes(i(0)) == 256
    assert comm.transport(i(0)) == comm.transport(0)
    registered.peer_id(i(0))


TAKEN: dict[str, Callable[[Communicator, Callable[[int], Any]], object]] = {
    "broadcast": lambda c, i: on_host(c.broadcast(ones(c), i(1))),
    "reduce": lambda c, i: c.reduce(ones(c), root=i(0)),
    "gather": lambda c, i: c.gather(ones(c), i(1)),
    "scatter": lambda c, i: c.scatter(ones(c), i(0), out=ones(c, 2)),
    "all_to_all_v": lambda c, i: c.all_to_all_v(ones(c), [i(2), i(2)], np.array([2, 2])),
    "transfer": transfer,
    "store": store,
    "split": split,
    "shrink": shrink,
    "channels": channels,
    "empty": lambda c, i: c.empty((i(2), i(3))),
    "tune": lambda c, i: c.tune([i(64), i(128)], i(1), seconds=np.float32(0.01), save=False),
}


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("call", TAKEN)
def test_integers_of_numpy_are_taken(ranks: Ranks, call: str, kind: Callable[[int], Any]) -> None:
    if call == "transfer" and kind is np.array:
        kind = np.int16

    def body(comm: Communicator) -> None:
        TAKEN[call](comm, kind)
        comm.synchronize()

    ranks.run(body)


REFUSED: dict[str, tuple[str, Callable[[Communicator, Any], object]]] = {
    "broadcast": ("root", lambda c, v: c.broadcast(ones(c), v)),
    "reduce": ("root", lambda c, v: c.reduce(ones(c), root=v)),
    "gather": ("root", lambda c, v: c.gather(ones(c), v)),
    "scatter": ("root", lambda c, v: c.scatter(ones(c), v, out=ones(c, 2))),
    "send": ("peer", lambda c, v: c.send(ones(c), v)),
    "recv": ("peer", lambda c, v: c.recv(ones(c), v)),
    "all_to_all_v": ("send_counts", lambda c, v: c.all_to_all_v(ones(c), [v, 2], [2, 2])),
    "split": ("ranks", lambda c, v: c.split([v, c.rank])),
    "shrink": ("exclude", lambda c, v: c.shrink(exclude=[v])),
    "sm_channels": ("peers", lambda c, v: c.sm_channels(ones(c), peers=[v])),
    "proxy_channels": ("peers", lambda c, v: c.proxy_channels(ones(c), peers=[v])),
    "transport": ("peer", lambda c, v: c.transport(v)),
    "grid": ("grid", lambda c, v: c.compile(KERNEL, "store")(v, 1, c.empty(1), 1)),
    "block": ("block", lambda c, v: c.compile(KERNEL, "store")((1, 1), (1, v), c.empty(1), 1)),
    "shared": ("shared", lambda c, v: c.compile(KERNEL, "store")(1, 1, c.empty(1), 1, shared=v)),
    "address": ("args[0] of kernel store", lambda c, v: c.compile(KERNEL, "store")(1, 1, v, 1)),
    "empty": ("shape", lambda c, v: c.empty(v)),
    "empty of two": ("shape", lambda c, v: c.empty((v, 2**40))),
    "iterations": ("iterations", lambda c, v: c.tune([1024], v)),
    "sizes": ("sizes", lambda c, v: c.tune([1, v])),
    "stream": ("stream", lambda c, v: c.barrier(stream=v)),
    "op": ("op", lambda c, v: c.all_reduce(ones(c), v)),
    "cta_policy": ("cta_policy", lambda c, v: c.all_reduce(ones(c), cta_policy=v)),
    "data": ("data", lambda c, v: c.all_gather_bytes(v)),
    "purpose": ("purpose", lambda c, v: c.all_gather_bytes(b"", ["purpose", v])),  # type: ignore[arg-type]
    "selector": ("selector", lambda c, v: setattr(c.collectives, "selector", v)),
    "source": ("source", lambda c, v: c.compile([v])),  # type: ignore[arg-type]
    "name": ("name", lambda c, v: c.compile(KERNEL, [v])),  # type: ignore[arg-type]
    "options": ("options", lambda c, v: c.compile(KERNEL, options=v)),
    "include_dirs": ("include_dirs", lambda c, v: c.compile(KERNEL, include_dirs=[[v]])),  # type: ignore[list-item]
}
# These calls do not refuse 2**70 as out of range: a time limit ends the iterations, all_to_all_v finds too few rows,
# and `empty` finds no memory.
ELSEWHERE = {("iterations", 2**70), ("all_to_all_v", 2**70), ("empty", 2**70), ("empty of two", 2**70)}


@pytest.mark.parametrize("value", [True, -1, 2**70, 1.5, "1", OfNone()], ids=str)
@pytest.mark.parametrize("call", REFUSED)
def test_what_is_no_number_in_range_is_refused_by_name(ranks: Ranks, call: str, value: Any) -> None:
    if (call, value) in ELSEWHERE:
        return
    argument, function = REFUSED[call]

    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError) as caught:
            function(comm, value)
        assert caught.value.argument == argument

    ranks.run(body)


SEQUENCES: dict[str, tuple[str, Callable[[Communicator], object]]] = {
    "split": ("ranks", lambda c: c.split(0)),
    "shrink": ("exclude", lambda c: c.shrink(exclude=1)),
    "sm_channels": ("peers", lambda c: c.sm_channels(ones(c), peers=1)),
    "all_to_all_v": ("recv_counts", lambda c: c.all_to_all_v(ones(c), [2, 2], 4)),
    "tune": ("sizes", lambda c: c.tune(1024)),
}
# `__iter__` of a numpy array without dimensions raises, as does `__bool__` of an array of several elements.
SEQUENCES |= {
    "split by an array": ("ranks", lambda c: c.split(np.array(0))),  # type: ignore[arg-type]
    "all_to_all_v by an array": ("send_counts", lambda c: c.all_to_all_v(ones(c), np.array(4), [2, 2])),  # type: ignore[arg-type]
    "empty": ("shape", lambda c: c.empty(np.array(4.0))),  # type: ignore[arg-type]
    "grid": ("grid", lambda c: c.compile(KERNEL, "store")(np.array(1.0), 1, c.empty(1), 1)),  # type: ignore[operator]
    "op": ("op", lambda c: c.all_reduce(ones(c), np.array([0, 1]))),  # type: ignore[arg-type]
    "cta_policy": ("cta_policy", lambda c: c.all_reduce(ones(c), cta_policy=np.array([0, 1]))),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", SEQUENCES)
def test_what_is_not_a_sequence_or_a_name_is_refused_by_name(ranks: Ranks, call: str) -> None:
    argument, function = SEQUENCES[call]

    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError) as caught:
            function(comm)
        assert caught.value.argument == argument

    ranks.run(body)


def test_rows_that_no_memory_has_room_for_are_refused(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ResourceError, match="no memory has more than"):
            comm.all_to_all_v(ones(comm), [2, 2], [2**62, 2**62])

    ranks.run(body)


@pytest.mark.parametrize("world_size", [0, 2**20 + 1, 2**70, True, None])
def test_a_number_of_ranks_that_nobody_has_is_refused(world_size: Any) -> None:
    with pytest.raises(ArgumentError, match="world_size: must be an integer from 1 to 1048576"):
        ThreadBootstrap.create(world_size)


@pytest.mark.parametrize("name", ["idle", "rdma", "fabric", "runtime"])
def test_an_option_of_another_class_is_refused_by_name(name: str) -> None:
    (bootstrap,) = ThreadBootstrap.create(1)
    with pytest.raises(ArgumentError) as caught:
        Communicator(bootstrap, **{name: np.array([1, 2])})  # type: ignore[arg-type]
    assert caught.value.argument == name


@pytest.mark.parametrize("choice", [1, {0: "copy"}, {(0, 1, 2): "copy"}, {(0, 9): "copy"}, {(0, 1): 3}], ids=str)
def test_a_choice_of_transports_that_names_no_pair_is_refused(choice: Any) -> None:
    (bootstrap,) = ThreadBootstrap.create(1)
    with pytest.raises(ArgumentError, match="transport: "):
        Communicator(bootstrap, transport=choice)


def test_an_array_without_an_element_type_is_refused(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match="dtype: unknown element type 'None'"):
            comm.empty(4, None)

    ranks.run(body)


OPTIONS = {
    "local_world_size": 1,
    "fifos": 1,
    "proxy_threads": 1,
    "fifo_size": 64,
    "timeout": 20,
    "linger": 0,
}


@pytest.mark.parametrize("place", ["thread", "process"])
def test_options_may_be_integers_of_numpy(place: str) -> None:
    (bootstrap,) = ThreadBootstrap.create(np.int64(1))
    options: dict[str, Any] = {name: np.int32(value) for name, value in OPTIONS.items()}
    with Communicator(bootstrap, proxy=place, idle=IdlePolicy(np.float32(5), np.int64(500)), **options) as comm:
        assert (comm.timeout, comm.local_world_size) == (20.0, 1)
        assert [fifo.size for fifo in comm.proxy.fifos] == [64]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("value", [True, -1, 10**400, "1", float("nan")], ids=lambda value: str(value)[:5])
def test_an_option_that_is_no_number_in_range_is_refused_by_name(name: str, value: Any) -> None:
    (bootstrap,) = ThreadBootstrap.create(1)
    with pytest.raises(ArgumentError) as caught:
        Communicator(bootstrap, **{name: value}).close()
    assert caught.value.argument == name


def test_options_of_transports_may_be_integers_of_numpy() -> None:
    rdma = RdmaOptions(send_depth=np.int64(64), mtu=np.int64(1024), gid_index=np.int64(1))
    assert (rdma.send_depth, type(rdma.send_depth), type(rdma.mtu), type(rdma.gid_index)) == (64, int, int, int)
    assert type(FabricOptions(depth=np.int64(64)).depth) is int
    with pytest.raises(ArgumentError, match="depth: must be a whole number"):
        FabricOptions(depth=True)


def test_the_number_of_a_device_may_be_numpys() -> None:
    assert open_runtime(None, np.int64(0)).device == 0
    with pytest.raises(ArgumentError, match="device"):
        open_runtime(None, True)
