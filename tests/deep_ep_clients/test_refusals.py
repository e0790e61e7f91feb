"""Errors name DeepEP's arguments, are raised before data moves, and explain the state of a handle or a hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import deep_ep  # noqa: E402

from proxyccl import ArgumentError, CapacityError, ClosedError, Communicator, MismatchError  # noqa: E402
from support.devices import ON_HOST, runtime_with_blocks, torch_device  # noqa: E402
from support.ranks import Ranks  # noqa: E402
from support.running import run_ranks  # noqa: E402

TOKENS, HIDDEN, MOST, EXPERTS, TOPK = 4, 512, 8, 8, 2
WRONG: list[Any] = [-1, True, 1.5, "2", 2**62, 2**64, None]
LAYERS_NAMES = ("exp_indices", "max_recv_tokens", "ep_a2a_layout_desc", "num_tot_experts", "dispatch_recv")


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2, make_runtime=runtime_with_blocks) as ranks:
        yield ranks


def refused(argument: str, call: Callable[[], object], match: str = ".") -> None:
    with pytest.raises(ArgumentError, match=match) as caught:
        call()
    assert caught.value.argument == argument, caught.value
    assert str(caught.value).startswith(f"{argument}: ")
    assert not any(name in str(caught.value) for name in LAYERS_NAMES), caught.value


class Given:
    """A rank's tensors, and calls whose arguments are valid unless a test passes others."""

    def __init__(self, comm: Communicator) -> None:
        device = torch_device(comm)
        self.x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
        self.ids = torch.tensor([[0, 5]] * TOKENS, device=device)
        self.weights = torch.ones(TOKENS, TOPK, device=device)
        self.buffer = deep_ep.Buffer(comm, explicitly_destroy=True)
        self.elastic = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=MOST, explicitly_destroy=True)
        self.layout = self.buffer.get_dispatch_layout(self.ids, EXPERTS)

    def normal(self, **options: Any) -> Any:
        good = {
            "x": self.x,
            "topk_idx": self.ids,
            "topk_weights": self.weights,
            "is_token_in_rank": self.layout[3],
            "num_tokens_per_expert": self.layout[2],
        }
        return self.buffer.dispatch(**{**good, **options})

    def low_latency(self, **options: Any) -> Any:
        good = {
            "x": self.x,
            "topk_idx": self.ids,
            "num_max_dispatch_tokens_per_rank": MOST,
            "num_experts": EXPERTS,
            "use_fp8": False,
        }
        return self.buffer.low_latency_dispatch(**{**good, **options})

    def expandable(self, **options: Any) -> Any:
        good = {"x": self.x, "topk_idx": self.ids, "topk_weights": self.weights, "num_experts": EXPERTS}
        return self.elastic.dispatch(**{**good, **options})

    def destroy(self) -> None:
        self.buffer.destroy()
        self.elastic.destroy()


def test_expert_ids_are_read_in_all_their_bits(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        given = Given(comm)
        calls = {
            "normal": given.normal,
            "expanded": lambda topk_idx: given.expandable(topk_idx=topk_idx, do_expand=True),
            "elastic": given.expandable,
        }
        if ON_HOST:  # on GPUs these calls don't wait for the ids, so they can't check the ids
            calls["low latency"] = given.low_latency
            calls["float8"] = lambda topk_idx: given.low_latency(topk_idx=topk_idx, use_fp8=True)
            calls["worst tokens"] = lambda topk_idx: given.normal(topk_idx=topk_idx, num_worst_tokens=2 * MOST)
            calls["no wait"] = lambda topk_idx: given.expandable(topk_idx=topk_idx, do_cpu_sync=False)
        for name, call in calls.items():
            for bad in (2**32 + 1, EXPERTS, -5, -2, 2**31, -(2**32), 2**63 - 1):
                ids = given.ids.clone()
                if comm.rank == 1:
                    ids[2, 1] = bad
                refused("topk_idx", lambda c=call, i=ids: c(topk_idx=i), r"\[2, 1\] on rank 1 .* or -1, which drops")
            ids = torch.where(given.ids == 5, -1, given.ids)
            for dtype in (torch.int32, torch.int64):
                assert call(topk_idx=ids.to(dtype)) is not None, name
            for dtype in (torch.int16, torch.uint8, torch.float32, torch.bool):
                refused("topk_idx", lambda c=call, d=dtype: c(topk_idx=given.ids.to(d)), "expected torch.int32 or")
        given.destroy()

    pair.run(body)


@pytest.mark.skipif(not ON_HOST, reason="on GPUs nothing waits for the counts of low-latency mode")
@pytest.mark.parametrize("use_fp8", [False, True])
def test_too_many_rows_of_an_expert_are_told(pair: Ranks, use_fp8: bool) -> None:
    def body(comm: Communicator) -> None:
        given = Given(comm)
        x = torch.ones(MOST, HIDDEN, dtype=torch.bfloat16)
        twice = torch.full((MOST, TOPK), 5)
        with pytest.raises(CapacityError, match=r"^an expert received 32 rows"):
            given.low_latency(x=x, topk_idx=twice, use_fp8=use_fp8)
        _, counts, handle, _, hook = given.low_latency(x=x, topk_idx=twice, use_fp8=use_fp8, return_recv_hook=True)
        with pytest.raises(CapacityError, match=r"^an expert received 32 rows"):
            hook()
        assert counts.tolist() == ([0, 2 * MOST, 0, 0] if comm.rank == 1 else [0] * 4)
        if comm.rank == 1:  # rank 0's tokens fill the space, so none of rank 1's are stored
            assert handle[1][1].tolist() == [2 * MOST, 2 * MOST << 32]
        given.destroy()

    pair.run(body)


def test_what_ranks_pass_differently_is_told_by_deep_eps_names(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        given, other = Given(comm), comm.rank == 1
        to_ranks = {"topk_idx": None, "topk_weights": None}
        for what, call in [
            ("num_worst_tokens", lambda: given.normal(num_worst_tokens=16 + other)),
            ("num_worst_tokens", lambda: given.normal(**to_ranks, num_worst_tokens=16 + other)),
            ("config", lambda: given.normal(config=deep_ep.Config(8 + 2 * other))),
            ("x", lambda: given.normal(x=given.x.float() if other else given.x)),
            ("num_max_dispatch_tokens_per_rank", lambda: given.low_latency(num_max_dispatch_tokens_per_rank=9 + other)),
            ("use_fp8", lambda: given.low_latency(use_fp8=other)),
        ]:
            refused(what, call, "on rank 0 and .* on rank 1; expected equal values")
        given.destroy()

    pair.run(body)


def test_wrong_arguments_are_refused_by_deep_eps_names(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        given = Given(comm)
        x, ids, weights, buffer = given.x, given.ids, given.weights, given.buffer
        stats = torch.zeros(1, dtype=torch.int32, device=x.device)
        many = x.repeat(4, 1)
        for what, options in [
            ("x", {"x": x.float().cpu().numpy()}),
            ("x", {"x": x[0]}),
            ("x", {"x": x.to(torch.int32)}),
            ("x", {"x": x[:, ::2]}),
            ("x", {"x": (x, weights, x)}),
            ("topk_idx", {"topk_idx": ids[:3]}),
            ("topk_idx", {"topk_idx": ids.tolist()}),
            ("topk_idx", {"topk_idx": ids.repeat(1, 9), "topk_weights": weights.repeat(1, 9)}),
            ("topk_weights", {"topk_weights": weights.double()}),
            ("topk_weights", {"topk_weights": weights[:, :1].contiguous()}),
            ("num_tokens_per_expert", {"num_tokens_per_expert": [1, 2]}),
            ("num_tokens_per_expert", {"num_tokens_per_expert": given.layout[2][:7]}),
            ("is_token_in_rank", {"is_token_in_rank": given.layout[3][:, :1]}),
            ("config", {"config": 20}),
            ("previous_event", {"previous_event": 3}),
        ]:
            refused(what, lambda o=options: given.normal(**o))
        to_ranks = {"topk_idx": None, "topk_weights": None}
        for what, options in [
            ("topk_weights", {"topk_idx": None}),
            ("is_token_in_rank", {**to_ranks, "is_token_in_rank": None}),
            ("is_token_in_rank", {**to_ranks, "is_token_in_rank": given.layout[3][:2]}),
            ("is_token_in_rank", {**to_ranks, "is_token_in_rank": given.layout[3].to("meta")}),
            ("num_tokens_per_expert", {**to_ranks, "num_tokens_per_expert": given.layout[2].to("meta")}),
            ("num_tokens_per_expert", {**to_ranks, "num_tokens_per_expert": given.layout[2].float()}),
            ("num_tokens_per_expert", {**to_ranks, "num_tokens_per_expert": given.layout[2][:7]}),
        ]:
            refused(what, lambda o=options: given.normal(**o))
        for what, options in [
            ("x", {"x": x.float()}),
            ("x", {"x": x[:, :96].contiguous(), "use_fp8": True}),
            ("x", {"x": many, "topk_idx": ids.repeat(4, 1)}),
            ("topk_idx", {"topk_idx": ids[:3]}),
            ("num_experts", {"num_experts": 7}),
            ("cumulative_local_expert_recv_stats", {"cumulative_local_expert_recv_stats": stats}),
        ]:
            refused(what, lambda o=options: given.low_latency(**o))
            refused(what, lambda o=options: given.low_latency(**o, return_recv_hook=True))
        for what, options in [
            ("topk_weights", {"topk_weights": weights.double()}),
            ("num_experts", {"num_experts": 7}),
            ("cumulative_local_expert_recv_stats", {"cumulative_local_expert_recv_stats": stats}),
            ("num_max_tokens_per_rank", {"num_max_tokens_per_rank": 2**30, "do_cpu_sync": False}),
            ("expert_alignment", {"expert_alignment": 2**30, "do_cpu_sync": False, "do_expand": True}),
            ("expert_alignment", {"expert_alignment": 2**30, "do_expand": True}),
        ]:
            refused(what, lambda o=options: given.expandable(**o))

        rows, _, row_weights, _, handle, _ = given.normal()
        for what, options in [
            ("x", {"x": rows[:1]}),
            ("x", {"x": rows.float()}),
            ("topk_weights", {"topk_weights": row_weights.double()}),
            ("topk_weights", {"topk_weights": row_weights[:1]}),
            ("bias", {"bias": x[:1]}),
            ("bias", {"bias": (x, 3)}),
        ]:
            refused(what, lambda o=options: buffer.combine(**{"x": rows, "handle": handle, **o}))
        refused("x", lambda: buffer.dispatch(x[:2], handle=handle))
        expanded, _, of_rows, elastic, _ = given.expandable(do_expand=True)
        refused("topk_weights", lambda: given.elastic.combine(expanded, elastic, topk_weights=weights))
        refused("topk_weights", lambda: given.elastic.dispatch(x, topk_weights=of_rows, handle=elastic, do_expand=True))
        rows, _, handle, _, _ = given.low_latency()
        for what, options in [
            ("x", {"x": rows[:1]}),
            ("x", {"x": rows.float()}),
            ("topk_weights", {"topk_weights": weights[:1]}),
            ("topk_weights", {"topk_weights": None}),
            ("out", {"out": x[:1]}),
            ("out", {"out": x.float()}),
        ]:
            good = {"x": rows, "topk_idx": ids, "topk_weights": weights, "handle": handle}
            refused(what, lambda o=options, g=good: buffer.low_latency_combine(**{**g, **o}))
            refused(what, lambda o=options, g=good: buffer.low_latency_combine(**{**g, **o}, return_recv_hook=True))
        given.destroy()

    pair.run(body)


def test_too_many_tokens_are_told_by_deep_eps_names(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        given = Given(comm)
        rows = given.normal(num_worst_tokens=2 * MOST)
        assert rows[0].shape[0] == 2 * MOST
        x = given.x.repeat(50, 1)
        ids, weights = given.ids.repeat(50, 1), given.weights.repeat(50, 1)
        layout = given.buffer.get_dispatch_layout(ids, EXPERTS)
        options = {"x": x, "topk_idx": ids, "topk_weights": weights, "is_token_in_rank": layout[3]}
        refused("x", lambda: given.normal(num_worst_tokens=2 * MOST, **options), "of num_worst_tokens / ranks and the")
        del options["is_token_in_rank"]
        with pytest.raises(CapacityError, match=r"^a rank dispatches 200 tokens; num_max_tokens_per_rank is 8$"):
            given.expandable(**options)
        if ON_HOST:
            few = given.x.repeat(8, 1), given.ids.repeat(8, 1), given.weights.repeat(8, 1)
            layout = given.buffer.get_dispatch_layout(few[1], EXPERTS)
            with pytest.raises(CapacityError, match=r"those beyond num_worst_tokens, 16, were left out"):
                given.normal(x=few[0], topk_idx=few[1], topk_weights=few[2], is_token_in_rank=layout[3],
                             num_worst_tokens=2 * MOST)  # fmt: skip
        given.destroy()

    pair.run(body)


def test_handles_and_hooks_say_what_became_of_them(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        given, other = Given(comm), Given(comm)
        buffer, x, ids, weights = given.buffer, given.x, given.ids, given.weights

        def combine(rows: Any, handle: Any, **options: Any) -> Any:
            return buffer.low_latency_combine(rows, ids, weights, handle, **options)

        rows, _, handle, _, hook = given.low_latency(return_recv_hook=True)
        for hooked in (False, True):
            refused("handle", lambda h=hooked: combine(rows, handle, return_recv_hook=h), "not received; call its hook")
        refused("handle", lambda: handle[1], "not received; call its hook")
        assert handle[2] == MOST
        assert buffer.get_next_low_latency_combine_buffer(handle).shape == rows.shape
        more = given.low_latency(return_recv_hook=True)
        more[4]()  # in any order
        hook()
        refused("hook", hook, "was called already")
        assert handle[1].shape == (EXPERTS // 2, 2)

        results, _, first = combine(rows, handle, return_recv_hook=True)
        first()
        refused("hook", first, "was called already")
        assert (results == 2).all()
        assert (combine(more[0], more[2])[0] == 2).all()

        received, *_, normal, _ = given.normal()
        refused("handle", lambda: combine(rows, normal), "comes from a dispatch in normal mode")
        refused("handle", lambda: buffer.get_next_low_latency_combine_buffer(normal), "normal mode")
        refused("handle", lambda: buffer.combine(received, handle), "comes from a dispatch in low-latency mode")
        refused("handle", lambda: buffer.dispatch(x, handle=handle), "comes from a dispatch in low-latency mode")
        for call in (
            lambda: other.buffer.combine(received, normal),
            lambda: other.buffer.dispatch(x, handle=normal),
            lambda: other.buffer.low_latency_combine(rows, ids, weights, handle),
            lambda: other.buffer.get_next_low_latency_combine_buffer(handle),
        ):
            refused("handle", call, "from another buffer")

        last = given.low_latency(return_recv_hook=True)[4]
        given.destroy()
        for call in (last, hook, first, lambda: buffer.get_next_low_latency_combine_buffer(handle)):
            with pytest.raises((ClosedError, ArgumentError), match=r"buffer was destroyed|called already"):
                call()
        with pytest.raises(ClosedError, match="the buffer was destroyed"):
            last()
        other.destroy()

    pair.run(body)


def test_numbers_are_integers_within_bounds(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        given = Given(comm)
        for value in WRONG:
            calls: dict[str, Callable[[], object]] = {
                "num_nvl_bytes": lambda v=value: deep_ep.Buffer(comm, num_nvl_bytes=v),
                "num_rdma_bytes": lambda v=value: deep_ep.Buffer(comm, num_rdma_bytes=v),
                "num_qps_per_rank": lambda v=value: deep_ep.Buffer(comm, num_qps_per_rank=v),
                "new_num_sms": lambda v=value: deep_ep.Buffer.set_num_sms(v),
                "num_max_nvl_chunked_send_tokens": lambda v=value: deep_ep.Config(20, v),
                "num_experts": lambda v=value: given.buffer.get_dispatch_layout(given.ids, v),
                "expert_alignment": lambda v=value: given.normal(expert_alignment=v),
                "num_worst_tokens": lambda v=value: given.normal(num_worst_tokens=v),
                "num_max_dispatch_tokens_per_rank": lambda v=value: given.low_latency(
                    num_max_dispatch_tokens_per_rank=v
                ),
                **{
                    name: lambda v=value, n=name: deep_ep.ElasticBuffer(comm, **{n: v})
                    for name in ("num_bytes", "num_max_tokens_per_rank", "hidden", "num_topk", "sl_idx",
                                 "num_allocated_qps")
                },
                "num_sms": lambda v=value: given.expandable(num_sms=v),
            }  # fmt: skip
            for argument, call in calls.items():
                if (value is None and argument == "num_bytes") or (value == 2**62 and argument.endswith("_bytes")):
                    continue
                refused(argument, call)
            for argument, call in {
                "num_experts": lambda v=value: given.low_latency(num_experts=v),
            }.items():
                refused(argument, call)
        for value in (-1, True, "2", None, float("nan"), float("inf")):
            for argument in ("num_cpu_timeout_secs", "num_gpu_timeout_secs"):
                refused(argument, lambda v=value, a=argument: deep_ep.ElasticBuffer(comm, **{a: v}))
        number = np.int64(MOST)
        given.low_latency(num_max_dispatch_tokens_per_rank=number, num_experts=np.int32(EXPERTS))
        deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=number, num_gpu_timeout_secs=1.5)
        given.destroy()

    pair.run(body)


@pytest.mark.parametrize("value", WRONG)
def test_size_hints_are_of_integers_within_bounds(value: Any) -> None:
    config, buffer = deep_ep.Config(), deep_ep.Buffer
    numbers = ("num_max_dispatch_tokens_per_rank", "hidden", "num_ranks", "num_experts")
    for hint in (config.get_nvl_buffer_size_hint, config.get_rdma_buffer_size_hint):
        refused("hidden_bytes", lambda: hint(value, 16))  # noqa: B023  (the lambda is called at once)
        refused("num_ranks", lambda: hint(1024, value))  # noqa: B023
    for argument in numbers:
        sizes = dict.fromkeys(numbers, 8) | {argument: value}
        refused(argument, lambda: buffer.get_low_latency_rdma_size_hint(**sizes))  # noqa: B023


def test_flags_that_are_neither_are_refused_before_rows_move(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        given, neither = Given(comm), torch.tensor([True, False])
        for flag in ("use_fp8", "round_scale", "use_ue8m0", "async_finish", "return_recv_hook"):
            refused(flag, lambda f=flag: given.low_latency(**{f: neither}))  # type: ignore[misc]
        refused("async_finish", lambda: given.normal(async_finish=neither))
        for flag in ("do_expand", "do_zero_padding", "do_cpu_sync", "do_handle_copy", "async_with_compute_stream"):
            refused(flag, lambda f=flag: given.expandable(**{f: neither}))  # type: ignore[misc]
        refused("explicitly_destroy", lambda: deep_ep.Buffer(comm, explicitly_destroy=neither))
        refused("enable_shrink", lambda: deep_ep.Buffer(comm, enable_shrink=neither))
        given.low_latency(use_fp8=np.True_)
        given.destroy()

    pair.run(body)


@pytest.mark.parametrize("known", ["", "normal", "low_latency", "normal low_latency"])
@pytest.mark.parametrize("other", ["low_latency", "without ids"])
def test_ranks_in_different_modes_are_told_at_once(known: str, other: str) -> None:
    """Ranks in different modes get an error immediately. Each pair of modes is tested with and without earlier calls,
    because the first call of a mode creates the mode's layer or exchange.
    """

    def body(comm: Communicator) -> None:
        given = Given(comm)
        calls: dict[str, Callable[[], Any]] = {
            "normal": given.normal,
            "low_latency": given.low_latency,
            "without ids": lambda: given.normal(topk_idx=None, topk_weights=None),
        }
        for call in known.split():
            calls[call]()

        def call() -> None:
            calls[other if comm.rank else "normal"]()
            comm.synchronize()

        with pytest.raises(MismatchError) as caught:
            call()
        assert caught.value.argument == "collective"

    run_ranks(2, body, make_runtime=runtime_with_blocks)
