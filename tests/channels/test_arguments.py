"""An invalid argument raises an error that names the argument, moves no data, and leaves the communicator usable."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxyccl import ArgumentError, Communicator, CompileError, KernelError, RuntimeUnavailableError, open_runtime
from proxyccl.channels.collectives.selection import ALGORITHMS, SizeTable, sending_no_sums
from proxyccl.channels.joining.bootstrap import ThreadBootstrap, as_bootstrap
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.host import HostRuntime
from proxyccl.device.runtimes import open_driver
from support.device_arrays import barrier, on_device, on_host
from support.ranks import Ranks
from support.running import run_ranks

F32 = np.float32
HOST_ARRAYS = pytest.mark.host_only(reason="GPUs' collectives refuse arrays of the host")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as group:
        yield group


def device(comm: Communicator, values: Any, dtype: Any = F32) -> Any:
    return on_device(comm, np.asarray(values, dtype))


def ones(comm: Communicator, shape: int | tuple[int, ...] = 4, dtype: Any = F32) -> Any:
    return on_device(comm, np.ones(shape, dtype))


def read_only(comm: Communicator) -> Any:
    x = ones(comm)
    if isinstance(x, ArrayView):
        return replace(x, writable=False)
    x.flags.writeable = False
    return x


def misaligned(comm: Communicator) -> Any:
    x = on_device(comm, np.zeros(17, np.uint8))
    if isinstance(x, ArrayView):
        return replace(x, ptr=x.ptr + 1, shape=(4,), dtype=as_dtype("float32"))
    return x[1:].view(F32)


COLLECTIVES: list[Any] = [
    ("x", lambda c: c.all_reduce([1, 2]), "expected an array .*, not list"),
    ("x", lambda c: c.all_reduce(np.ones((4, 4), F32)[:, 1]), "not contiguous"),
    ("x", lambda c: c.all_reduce(ones(c, 4, np.complex64)), "can't be reduced; use one of float16"),
    ("x", lambda c: c.all_reduce(ones(c, 4, bool)), "can't be reduced"),
    ("x", lambda c: c.all_reduce(np.ones(4, ">f4")), "byte order"),
    ("x", lambda c: c.all_reduce(read_only(c)), "read-only"),
    pytest.param("x", lambda c: c.all_reduce(b"12345678"), "read-only", marks=HOST_ARRAYS),
    ("x", lambda c: c.all_reduce(misaligned(c)), "not aligned"),
    (
        "op",
        lambda c: c.all_reduce(ones(c, 4), "median"),
        "unknown op 'median'; expected one of sum, prod, min, max, avg",
    ),
    ("op", lambda c: c.all_reduce(ones(c, 4), None), "unknown op None; expected one of sum"),
    ("op", lambda c: c.all_reduce(ones(c, 4), "bxor"), "'bxor' needs integers, not float32"),
    (
        "algorithm",
        lambda c: c.all_reduce(ones(c, 4), algorithm="quick"),
        "'quick'; expected one of one_shot",
    ),
    ("out", lambda c: c.all_reduce(ones(c, 4), out=ones(c, 5)), r"shape \(5,\); expected \(4,\)"),
    ("out", lambda c: c.all_reduce(ones(c, 4), out=ones(c, (2, 2))), "shape"),
    (
        "out",
        lambda c: c.all_reduce(ones(c, 4), out=ones(c, 4, np.float64)),
        "float64; expected the type of x, float32",
    ),
    ("out", lambda c: c.all_reduce(ones(c, 4), out=read_only(c)), "read-only"),
    ("out", lambda c: c.all_reduce((x := ones(c, 8))[:4], out=x[2:6]), "overlaps x in part"),
    ("stream", lambda c: c.all_reduce(ones(c, 4), stream="default"), "expected a stream, .*, not str"),
    pytest.param(
        "stream",
        lambda c: c.all_reduce(ones(c, 4), stream=12345),
        "expected a stream of the host runtime",
        marks=pytest.mark.host_only(reason="a driver does not tell whether a number is a stream"),
    ),
    ("x", lambda c: c.reduce_scatter(ones(c, 5)), "does not divide by the world size 2"),
    ("x", lambda c: c.reduce_scatter(device(c, 3)), "does not divide"),
    ("op", lambda c: c.reduce_scatter(ones(c, 4), "mean"), "unknown op 'mean'; expected one of"),
    (
        "algorithm",
        lambda c: c.reduce_scatter(ones(c, 4), algorithm="ring"),
        "unknown algorithm 'ring'; expected one of kernels, proxy",
    ),
    ("out", lambda c: c.reduce_scatter(ones(c, 4), out=ones(c, 4)), "shape"),
    ("out", lambda c: c.reduce_scatter(x := ones(c, 4), out=x[1:3]), "overlaps"),
    ("x", lambda c: c.all_gather("text"), "expected an array"),
    ("out", lambda c: c.all_gather(ones(c, 4), out=ones(c, 4)), r"expected \(8,\)"),
    ("out", lambda c: c.all_gather((x := ones(c, 8))[1:5], out=x), "overlaps"),
    (
        "algorithm",
        lambda c: c.all_gather(ones(c, 4), algorithm="two_shot"),
        "unknown algorithm 'two_shot'; expected one of kernels, proxy",
    ),
    ("algorithm", lambda c: c.broadcast(ones(c, 4), algorithm=["proxy"]), "must be a name or None"),
    (
        "cta_policy",
        lambda c: c.all_reduce(ones(c, 4), cta_policy="none"),
        "'none' is not one of 'default', 'efficiency', 'zero'",
    ),
    ("cta_policy", lambda c: c.all_to_all(ones(c, 4), cta_policy=0), "0 is not one of 'default', 'efficiency', 'zero'"),
    ("symmetric", lambda c: c.all_gather(ones(c, 4), symmetric=1), "must be True or False, not 1"),
    *(
        (
            "algorithm",
            lambda c, collective=collective, name=name: getattr(c, collective)(
                ones(c, 4), algorithm=name, cta_policy="zero"
            ),
            f"'{name}' occupies multiprocessors; with cta_policy 'zero' expected None or 'proxy'",
        )
        for collective, name in (("all_reduce", "two_shot"), ("reduce_scatter", "kernels"), ("broadcast", "kernels"))
    ),
    ("sizes", lambda c: c.tune(sizes=()), "in rising order"),
    ("sizes", lambda c: c.tune(sizes=(4096, 1024)), "in rising order"),
    ("sizes", lambda c: c.tune(sizes=(0, 1024)), "positive numbers of bytes"),
    ("iterations", lambda c: c.tune(iterations=0), "must be a positive integer"),
    ("seconds", lambda c: c.tune(seconds=0), "must be a positive number of seconds"),
    ("x", lambda c: c.all_to_all(ones(c, 3)), "does not divide"),
    ("out", lambda c: c.all_to_all((x := ones(c, 8))[:4], out=x[1:5]), "overlaps"),
    ("root", lambda c: c.broadcast(ones(c, 4), 2), "a rank from 0 to 1"),
    ("root", lambda c: c.broadcast(ones(c, 4), -1), "a rank from 0 to 1"),
    ("root", lambda c: c.broadcast(ones(c, 4), "0"), "a rank from 0 to 1"),
    ("stream", lambda c: c.barrier(stream=object()), "expected a stream"),
]


@pytest.mark.parametrize(("argument", "call", "message"), COLLECTIVES)
def test_a_wrong_argument_of_a_collective_is_named(
    ranks: Ranks, argument: str, call: Callable[[Communicator], object], message: str
) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match=message) as caught:
            call(comm)
        assert caught.value.argument == argument
        assert str(caught.value).startswith(f"{argument}: ")
        assert isinstance(caught.value, ValueError)
        assert (on_host(comm.all_reduce(ones(comm))) == 2).all()

    ranks.run(body)


def test_a_closed_stream_is_refused(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        stream = comm.runtime.create_stream()
        stream.close()
        stream.close()
        with pytest.raises(ArgumentError, match="stream: the stream is closed"):
            comm.all_reduce(ones(comm), stream=stream)

    ranks.run(body)


def test_a_call_that_was_made_before_is_checked_again() -> None:
    def body(comm: Communicator) -> None:
        x = comm.empty(4).fill(1)
        for _ in range(4):
            comm.all_reduce(x)
            comm.broadcast(x, 0)
        with pytest.raises(ArgumentError, match="op: "):
            comm.all_reduce(x, ["sum"])  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="algorithm: "):
            comm.all_reduce(x, algorithm=["ring"])  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=r"root: must be a rank .* not 0\.0"):
            comm.broadcast(x, 0.0)  # type: ignore[arg-type]

    run_ranks(2, body)


@HOST_ARRAYS
def test_an_array_of_another_device_is_refused(ranks: Ranks) -> None:
    class OnGpu:
        def __init__(self) -> None:
            self.__cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3}

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def __dlpack__(self, *, stream: int | None = None) -> Any:
            return np.ones(4, F32).__dlpack__()

    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match="lies on cuda:0, the communicator uses host:0"):
            comm.all_reduce(OnGpu())
        with pytest.raises(ArgumentError, match="array: lies on cuda"):
            comm.register(OnGpu())

    with Ranks(1) as one:
        one.run(body)
    assert ranks.world_size == 2


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"timeout": float("inf")}, "timeout"),
        ({"timeout": "2"}, "timeout"),
        ({"local_world_size": 0}, "local_world_size"),
        ({"local_world_size": 2}, "local_world_size"),
        ({"local_world_size": "1"}, "local_world_size"),
        ({"runtime": "opencl"}, "runtime"),
        ({"device": -1}, "device"),
    ],
)
def test_a_wrong_option_of_the_communicator_is_named(options: dict[str, Any], argument: str) -> None:
    (bootstrap,) = ThreadBootstrap.create(1)
    with pytest.raises(ArgumentError) as caught:
        Communicator(bootstrap, **{"timeout": 5, **options})
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PROXYCCL_TIMEOUT", "soon"),
        ("PROXYCCL_LOCAL_WORLD_SIZE", "0"),
        ("PROXYCCL_LOCAL_WORLD_SIZE", "two"),
        ("PROXYCCL_PROXY", "cloud"),
    ],
)
def test_a_wrong_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    (bootstrap,) = ThreadBootstrap.create(1)
    with pytest.raises(ArgumentError, match=variable):
        Communicator(bootstrap)


def test_a_missing_daemon_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROXYCCL_PROXY", "daemon")
    monkeypatch.setenv("PROXYCCL_DAEMON_SOCKET", str(tmp_path / "socket"))
    (bootstrap,) = ThreadBootstrap.create(1)
    with pytest.raises(RuntimeUnavailableError, match=f"proxyccl daemon --socket {tmp_path}"):
        Communicator(bootstrap)


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_TIMEOUT", "17")
    monkeypatch.setenv("PROXYCCL_LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("PROXYCCL_RUNTIME", "cuda")

    def body(comm: Communicator) -> tuple[float, int]:
        return comm.timeout, comm.local_world_size

    assert run_ranks(2, body, runtime="host", timeout=20, local_world_size=2) == [(20, 2)] * 2


def test_the_environment_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_TIMEOUT", "17")
    monkeypatch.setenv("PROXYCCL_RUNTIME", "host")
    (bootstrap,) = ThreadBootstrap.create(1)
    with Communicator(bootstrap) as comm:
        assert comm.timeout == 17
        assert comm.runtime.name == "host"


@pytest.mark.parametrize("name", ["cuda", "hip"])
def test_a_runtime_that_is_missing_is_named(name: str) -> None:
    with contextlib.suppress(RuntimeUnavailableError):
        open_driver(name)
        pytest.skip(f"{name} is here")
    with pytest.raises(RuntimeUnavailableError, match=name):
        open_runtime(name)


@pytest.mark.parametrize("value", [3, "mpi", object()])
def test_what_is_no_bootstrap_is_refused(value: object) -> None:
    with pytest.raises(ArgumentError, match="bootstrap"):
        as_bootstrap(value)


@pytest.mark.parametrize("shape", [-1, (2, -3), 1.5, "8", (2, None)])
def test_a_shape_is_made_of_numbers_from_zero(ranks: Ranks, shape: Any) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match="shape"):
            comm.empty(shape)

    ranks.run(body)


def test_shapes_may_be_numpy_integers(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        assert comm.empty(np.int64(3)).shape == (3,)
        assert comm.empty((np.int32(2), 3)).shape == (2, 3)
        assert comm.empty(()).shape == ()
        with pytest.raises(ArgumentError, match="dtype"):
            comm.empty(3, "float31")

    ranks.run(body)


# -- kernels ---

KERNELS = r"""
extern "C" __global__ void take(int i, unsigned char b, float f, double d, const int* p) {
  if (threadIdx.x == 0 && p) ((int*)p)[0] = i + b + (int)f + (int)d;
}
extern "C" __global__ void other() {}
"""
TAKES_ONE = """
#include "proxyccl/proxyccl.h"
extern "C" __global__ void one(proxyccl::SmChannelDeviceHandle channel) {}
"""


@pytest.mark.parametrize(
    ("grid", "block", "args", "argument"),
    [
        (0, 1, (1, 2, 3.0, 4.0, None), "grid"),
        ((1, 1, 1, 1), 1, (1, 2, 3.0, 4.0, None), "grid"),
        (1.5, 1, (1, 2, 3.0, 4.0, None), "grid"),
        (1, -1, (1, 2, 3.0, 4.0, None), "block"),
        (1, (), (1, 2, 3.0, 4.0, None), "block"),
        (1, 1, (1, 2), "args"),
        (1, 1, (1.5, 2, 3.0, 4.0, None), r"args\[0\]"),
        (1, 1, (1 << 32, 2, 3.0, 4.0, None), r"args\[0\]"),
        (1, 1, (1, 256, 3.0, 4.0, None), r"args\[1\]"),
        (1, 1, (1, 2, "3", 4.0, None), r"args\[2\]"),
        (1, 1, (1, 2, 3.0, None, None), r"args\[3\]"),
        (1, 1, (1, 2, 3.0, 4.0, "pointer"), r"args\[4\]"),
    ],
)
def test_a_wrong_argument_of_a_launch_is_named(
    ranks: Ranks, grid: Any, block: Any, args: tuple[Any, ...], argument: str
) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match=argument):
            comm.compile(KERNELS, "take")(grid, block, *args)

    ranks.run(body)


def test_a_set_of_channels_is_not_taken_for_one(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match=r"args\[0\].*not a ChannelSet; pass one of its elements"):
            comm.compile(TAKES_ONE, "one")(1, 1, comm.sm_channels(comm.empty(4)))

    ranks.run(body)


def test_a_launch_that_the_device_cannot_take_is_a_kernel_error(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        kernel = comm.compile(KERNELS, "other")
        with pytest.raises(KernelError, match="kernel other with grid"):
            kernel(1, 4096)
        with pytest.raises(KernelError, match="refused"):
            kernel(1, 1, shared=1 << 30)

    ranks.run(body)


def test_kernels_are_had_by_name(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        module = comm.compile(KERNELS)
        assert [kernel.name for kernel in module] == ["take", "other"]
        assert len(module) == 2
        assert "take, other" in repr(module)
        assert "5 parameters" in repr(module.take)
        with pytest.raises(ArgumentError, match="unknown kernel 'third'; this source has take, other"):
            comm.compile(KERNELS, "third")
        with pytest.raises(AttributeError, match="third"):
            _ = module.third
        with pytest.raises(ArgumentError, match="say which"):
            module(1, 1)
        comm.compile('extern "C" __global__ void only() {}')(1, 1)
        out = comm.empty(1, "int32").fill(0)
        module.take(1, 1, 1, 2, 3.5, 4.5, out)
        comm.synchronize()
        assert out.numpy()[0] == 10

    ranks.run(body)


@pytest.mark.parametrize("name", ["wait", "read", "time"])
def test_a_kernel_may_have_the_name_of_a_function_of_the_process(ranks: Ranks, name: str) -> None:
    def body(comm: Communicator) -> None:
        out = comm.empty(1, "int32").fill(0)
        kernel = comm.compile(f'extern "C" __global__ void {name}(int* out) {{ out[0] = 7; }}', name)
        kernel(1, 1, out)
        comm.synchronize()
        assert out.numpy()[0] == 7

    ranks.run(body)


def test_a_bad_source_shows_the_compilers_words(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(CompileError, match="nonsense") as caught:
            comm.compile('extern "C" __global__ void f() { nonsense; }')
        assert "kernel source" in caught.value.log
        with pytest.raises(ArgumentError, match="no kernel in it"):
            comm.compile("int x;")

    ranks.run(body)


@pytest.mark.host_only(reason="GPUs' compilers are libraries")
def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CompileError, match="apt install g"):
        HostRuntime().compile('extern "C" __global__ void nobody_compiled_this() {}')


# -- selection ---


def test_a_table_takes_known_algorithms_only() -> None:
    with pytest.raises(ArgumentError, match="algorithm"):
        SizeTable(((1024, "quick"),))
    with pytest.raises(ArgumentError, match="algorithm"):
        SizeTable(beyond="quick")


@settings(max_examples=50)
@given(st.integers(0, 1 << 40))
def test_a_table_chooses_by_size(nbytes: int) -> None:
    table = SizeTable(((100, "one_shot"), (1000, "recursive_doubling")), "ring")
    expected = "one_shot" if nbytes <= 100 else "recursive_doubling" if nbytes <= 1000 else "ring"
    assert table.choose(nbytes) == expected


@pytest.mark.parametrize("ranks_", [2, 3, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_long_sums_are_not_sent_for_short_values(algorithm: str, ranks_: int) -> None:
    chosen = sending_no_sums(algorithm, ranks_)
    assert chosen not in ("recursive_doubling", "ring")
    assert chosen == algorithm or algorithm in ("recursive_doubling", "ring")


def test_the_selector_can_be_replaced(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        before = comm.collectives.selector
        for algorithm in ("ring", "proxy", "recursive_doubling"):
            comm.collectives.selector = before.with_table("all_reduce", SizeTable((), algorithm))
            assert (on_host(comm.all_reduce(ones(comm, 1000))) == 2).all()
        comm.collectives.selector = before
        barrier(comm)

    ranks.run(body)
