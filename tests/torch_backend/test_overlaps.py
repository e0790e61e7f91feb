"""Long calls use fewer multiprocessors if earlier calls of the same kind ran at the same time as the program's
computations. HIP's runtime on the host simulates the GPUs; the ranks are threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from proxyccl import Communicator  # noqa: E402
from support.fakes import torch_on_hip  # noqa: E402
from support.running import wait_for  # noqa: E402
from support.stream_words import wait_value  # noqa: E402
from support.torch_groups import options, run  # noqa: E402

RANKS = 2
SHORT, MIDDLE, LONG = 1 << 18, 1 << 20, 1 << 22  # numbers of float32 elements: 1, 4 and 16 MiB
MOST_CALLS = 200


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROXYCCL_CTA_POLICY", raising=False)
    torch_on_hip.use(monkeypatch)


class Rank:
    """A rank with a tensor on its GPU. The methods make calls and return the policy that the ranks chose."""

    def __init__(self, group: Any, count: int) -> None:
        self.group, self.rank = group, group.rank()
        self.x = torch_on_hip.on_gpu(torch.ones(count), self.rank)
        self.comm: Communicator = group.endpoints.of_all(self.x.device)
        self._word = self.comm.runtime.allocate_pinned(8)
        self._value = 0
        self.call(waits=True)  # the first call loads the kernel, which would wait for busy streams

    @property
    def stream(self) -> int:
        """The handle of the current stream."""
        return int(torch.cuda.current_stream(self.x.device).cuda_stream)

    @property
    def policy(self) -> str:
        """The policy of the latest call."""
        ((_, fields),) = self.comm.group.launches.recent_calls(1)
        return fields["algorithm"].rpartition("cta_policy ")[2] if "cta_policy" in fields["algorithm"] else "default"

    @contextmanager
    def busy(self, stream: int) -> Iterator[None]:
        """Keeps a stream busy during the block. Work that the block queues on the stream runs only after the block."""
        self._value += 1
        wait_value(self.comm.runtime, self._word.ptr, self._value, stream)
        try:
            yield
        finally:
            ctypes.c_uint32.from_address(self._word.ptr).value = self._value

    def call(self, *, waits: bool = False) -> Any:
        """Makes an all_reduce and returns its Work."""
        return self.group.allreduce([self.x], options("Allreduce", waits=waits, reduceOp=dist.ReduceOp.SUM))

    def waited_at_once(self) -> str:
        """Queues a call, and a wait for the call, behind other work, so that the GPU never computes during the call.
        Returns the call's policy.
        """
        with self.busy(self.stream):
            work = self.call()
            chosen = self.policy
            work.wait()
        torch_on_hip.on_cpu(self.x)
        return chosen

    def computing_beside(self) -> str:
        """Makes a call and keeps the stream busy until the call has ended. Returns the call's policy."""
        work = self.call()
        chosen = self.policy
        with self.busy(self.stream):
            work.wait()
            wait_for(work.is_completed, "the call has ended")
        torch_on_hip.on_cpu(self.x)
        return chosen

    def with_future(self) -> str:
        """Makes a call and waits for its future and its Work, as DDP does. Returns the call's policy."""
        work = self.call()
        work.get_future().wait()
        work.wait()
        torch_on_hip.on_cpu(self.x)
        return self.policy

    def until(self, one: Callable[[], str], expected: str) -> None:
        assert any(one() == expected for _ in range(MOST_CALLS)), f"never {expected}"


def on_ranks(body: Callable[[Rank], None], count: int, ranks: int = RANKS) -> None:
    def on_rank(group: Any) -> None:
        device = torch.device("cuda", group.rank())
        torch.cuda.current_stream(device)
        group.eager_connect_single_device(device)
        body(Rank(group, count))

    run(on_rank, ranks)


def test_a_call_that_is_waited_for_at_once_takes_all_multiprocessors() -> None:
    def body(rank: Rank) -> None:
        assert [rank.waited_at_once() for _ in range(4)] == ["default"] * 4

    on_ranks(body, MIDDLE)


def test_the_ranks_learn_that_the_program_computes_beside_a_call_and_that_it_does_not() -> None:
    def body(rank: Rank) -> None:
        assert rank.computing_beside() == "default", "nothing is known yet"
        rank.until(rank.computing_beside, "efficiency")
        rank.until(rank.waited_at_once, "default")

    on_ranks(body, MIDDLE)


def test_ranks_that_have_learned_different_things_choose_alike() -> None:
    def body(rank: Rank) -> None:
        one = rank.computing_beside if rank.rank == 0 else rank.waited_at_once
        chosen = [one() for _ in range(24)]
        assert rank.comm.all_gather_bytes(repr(chosen).encode()) == [repr(chosen).encode()] * RANKS

    on_ranks(body, MIDDLE)


def test_what_the_ranks_choose_does_not_change_a_sum() -> None:
    """With three ranks, the rounded sum depends on the order of addition."""

    def body(rank: Rank) -> None:
        values = torch.randn(MIDDLE, generator=torch.Generator().manual_seed(rank.rank))
        results = set()

        def sums(one: Callable[[], str]) -> str:
            rank.x = torch_on_hip.on_gpu(values.clone(), rank.rank)
            chosen = one()
            results.add(torch_on_hip.on_cpu(rank.x).numpy().tobytes())
            return chosen

        for one, expected in ((rank.waited_at_once, "default"), (rank.computing_beside, "efficiency")):
            rank.until(lambda one=one: sums(one), expected)
        assert len(results) == 1

    on_ranks(body, MIDDLE, 3)


def test_a_long_reduction_whose_future_is_taken_is_by_proxy_while_the_gpu_is_late() -> None:
    def body(rank: Rank) -> None:
        rank.comm.all_reduce(rank.x, cta_policy="zero")  # loads the kernel, which waits for busy streams
        assert [rank.with_future() for _ in range(4)] == ["default", "default", "efficiency", "efficiency"]
        with rank.busy(rank.stream):
            futures = []

            def beside_late_work() -> str:
                futures.append(rank.call().get_future())
                return rank.policy

            rank.until(beside_late_work, "zero")
        for future in futures:
            future.wait()
        torch_on_hip.on_cpu(rank.x)

    on_ranks(body, LONG)


def test_a_long_reduction_on_a_stream_of_the_programs_own_is_by_proxy_while_the_default_stream_is_late() -> None:
    def body(rank: Rank) -> None:
        for _ in range(2):
            rank.comm.runtime.synchronize_stream(0)
            rank.comm.all_gather_bytes(b"")
            rank.call(waits=True)
            assert rank.policy == "efficiency"
        with rank.busy(0):

            def is_by_proxy() -> bool:
                rank.call(waits=True)
                return rank.policy == "zero"

            wait_for(is_by_proxy, "a thread connects the ranks to their proxies")
        torch_on_hip.on_cpu(rank.x)

    on_ranks(body, LONG)


@pytest.mark.parametrize("named", ["default", "efficiency"])
def test_a_policy_that_the_program_names_is_that_of_all_calls(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_CTA_POLICY", named)

    def body(rank: Rank) -> None:
        assert [rank.with_future() for _ in range(3)] == [named] * 3

    on_ranks(body, LONG)


def test_short_calls_have_no_choice() -> None:
    def body(rank: Rank) -> None:
        assert [rank.with_future() for _ in range(3)] == ["efficiency"] * 3

    on_ranks(body, SHORT)


def test_calls_leave_multiprocessors_to_another_communicator_of_any_of_the_ranks() -> None:
    """Calls must leave multiprocessors free, because two communicators' kernels may wait for peers at the same time."""

    def body(rank: Rank) -> None:
        assert rank.waited_at_once() == "default"
        if rank.rank < 2:
            rank.comm.split([0, 1]).close()
        rank.comm.all_gather_bytes(b"")
        assert rank.waited_at_once() == "efficiency"

    on_ranks(body, MIDDLE, 3)
