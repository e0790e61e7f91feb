"""One rank of a program that uses SGLang's groups and layers. The program prints each case's error (or "") as JSON.

python collectives.py RANK RANKS PORT plain|captured|deterministic|lost|off|asleep
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from unittest import mock

from started import DEVICE, ON_GPUS, expecting, print_outcomes  # isort: skip  # before SGLang's other modules
import torch
import torch.distributed as dist
from sglang.srt.distributed import communication_op as of_tp
from sglang.srt.distributed import parallel_state as state
from sglang.srt.layers import flashinfer_comm_fusion as fusion
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context, get_parallel, get_resources

RANK, RANKS, PORT = map(int, sys.argv[1:4])
MODE = sys.argv[4]


def on(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns a rank's values: integers, whose sums need no rounding."""
    generator = torch.Generator("cpu").manual_seed(rank)
    return torch.randint(-8, 9, shape, generator=generator, device="cpu").to(DEVICE, dtype)


def total(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([on(rank, *shape, dtype=dtype) for rank in range(RANKS)]).sum(0).to(dtype)


def equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


get_parallel().override_permanently(
    tp_size=RANKS, pp_size=1, moe_ep_size=1, attn_dp_size=1, attn_cp_size=1, moe_dp_size=1, attn_dcp_size=1,
    shared_experts_tp_size=None, tp_rank=RANK, pp_rank=0, attn_tp_size=RANKS, attn_tp_rank=RANK, moe_tp_size=RANKS,
)  # fmt: skip
backend = state.get_default_distributed_backend(DEVICE.type)
state.init_distributed_environment(
    backend=backend,
    world_size=RANKS,
    rank=RANK,
    local_rank=RANK,
    timeout=60,
    distributed_init_method=f"tcp://127.0.0.1:{PORT}",
)
state.initialize_model_parallel()
group = get_parallel().tp_group
if not ON_GPUS:  # SGLang registers its operators only for GPUs, but their Python functions also accept CPU tensors.
    for_cpu = torch.library.Library("sglang", "FRAGMENT")
    for op in (
        state.inplace_all_reduce,
        state.outplace_all_reduce,
        state.reg_reduce_scatter_tensor,
        state.reg_all_to_all_single,
    ):
        for_cpu.impl(op.__name__, op.__wrapped__, "CPU")


def groups() -> None:
    assert dist.get_backend() == backend == "proxyccl"
    assert dist.get_backend(group.device_group) == "proxyccl"
    assert dist.get_backend(group.cpu_group) == "gloo"
    assert group.pynccl_comm.short is group.ca_comm
    assert not hasattr(group.ca_comm, "reduce_scatter")  # SGLang would call such a method as AITER's
    assert group.pynccl_comm.group is group.device_group  # the plug-in made no second group


def all_reduce() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        equal(of_tp.tensor_model_parallel_all_reduce(on(RANK, 33, 64, dtype=dtype)), total(33, 64, dtype=dtype))


def all_reduce_by_each_method() -> None:
    for method in ("ca", "pynccl", "auto"):
        x = on(RANK, 16, 8)
        equal(state.outplace_all_reduce(x, group.unique_name, method), total(16, 8))
        equal(x, on(RANK, 16, 8))
    state.inplace_all_reduce(x, group.unique_name)
    equal(x, total(16, 8))


def all_reduce_of_long_and_strided_tensors() -> None:
    calls = group.pynccl_comm
    large = torch.ones(3 << 20)
    assert not group.ca_comm.should_custom_ar(large)
    equal(calls.outplace_all_reduce(large), torch.full_like(large, RANKS))
    strided = on(RANK, 8, 6).T
    assert not group.ca_comm.should_custom_ar(strided)
    equal(calls.outplace_all_reduce(strided), total(8, 6).T)


def all_reduce_in_compiled_code() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return state.outplace_all_reduce(x + 0, group.unique_name, "auto") * 2

    equal(torch.compile(call, backend="eager", fullgraph=True)(on(RANK, 16, 8)), total(16, 8) * 2)


def gathers() -> None:
    parts = [on(rank, 6, 10) for rank in range(RANKS)]
    for dim in (0, -1):
        equal(of_tp.tensor_model_parallel_all_gather(on(RANK, 6, 10), dim), torch.cat(parts, dim))
    sizes = [5 + 2 * rank for rank in range(RANKS)]
    (gathered,) = group.all_gatherv(on(RANK, sizes[RANK], 4), sizes=sizes)
    equal(gathered, torch.cat([on(rank, sizes[rank], 4) for rank in range(RANKS)]))
    _, second = group.all_gatherv([on(RANK, 3, 4), on(RANK, 3, 2)])
    equal(second, torch.cat([on(rank, 3, 2) for rank in range(RANKS)]))
    got = of_tp.tensor_model_parallel_gather(on(RANK, 6, 10), 0, -1)
    assert (got is None) == (RANK > 0)
    if got is not None:
        equal(got, torch.cat(parts, -1))


def scatters() -> None:
    whole = total(4 * RANKS, 6)
    out = torch.empty(4, 6)
    group.reduce_scatter_tensor(out, on(RANK, 4 * RANKS, 6))
    equal(out, whole.chunk(RANKS)[RANK])
    sizes = [1] * (RANKS - 1) + [3 * RANKS + 1]
    equal(group.reduce_scatterv(on(RANK, 4 * RANKS, 6), sizes=sizes), whole.split(sizes)[RANK])


def exchanges() -> None:
    out = torch.empty(2 * RANKS, 3)
    group.all_to_all_single(out, on(RANK, 2 * RANKS, 3))
    equal(out, torch.cat([on(rank, 2 * RANKS, 3).chunk(RANKS)[RANK] for rank in range(RANKS)]))
    equal(group.broadcast(on(RANK, 16), src=1), on(1, 16))
    if RANK < 2:
        for sender in (0, 1):
            if sender == RANK:
                group.send(on(sender, 9, 3), 1 - sender)
            else:
                equal(group.recv(torch.Size([9, 3]), torch.float32, sender), on(sender, 9, 3))
    got = of_tp.broadcast_tensor_dict({"a": on(0, 4), "b": 3} if RANK == 0 else None)
    assert got["b"] == 3
    equal(got["a"], on(0, 4))
    assert group.all_gather_object(RANK) == list(range(RANKS))
    assert group.broadcast_object_list([{"x": 1}] if RANK == 0 else [None])[0] == {"x": 1}


def communicators_beside_a_group() -> None:
    from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator

    beside = PyNcclCommunicator(group.cpu_group, group.device)
    assert beside.group is not group.device_group
    x = on(RANK, 5)
    beside.all_reduce(x)
    equal(x, total(5))
    one = PyNcclCommunicator(dist.new_group([RANK], backend="gloo", use_local_synchronization=True), DEVICE)
    assert (one.available, one.disabled) == (False, True)
    with mock.patch.object(dist, "new_group", side_effect=AssertionError), expecting("cta_policy: .*KV_SHARD"):
        PyNcclCommunicator(group.cpu_group, group.device, cta_policy=2)


def new_groups_are_logged() -> None:
    from unittest import TestCase

    with TestCase().assertLogs("proxyccl.sglang", "INFO") as logged:
        made = state.init_model_parallel_group([list(range(RANKS))], RANK, "proxyccl", group_name="more")
    assert "Using ProxyCCL for the group 'more" in logged.output[0]
    made.destroy()


def symmetric_memory_is_refused() -> None:
    from proxyccl.sglang import hooks

    with (
        mock.patch.object(hooks, "is_symmetric_memory_enabled", return_value=True),
        mock.patch.object(dist, "new_group", side_effect=AssertionError),
        expecting("--enable-symm-mem"),
    ):
        state.init_model_parallel_group([list(range(RANKS))], RANK, "proxyccl")


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def norms() -> None:
    for kind in (RMSNorm, GemmaRMSNorm):
        layer = kind(64).to(torch.bfloat16)
        layer.weight.data = on(7, 64, dtype=torch.bfloat16) / 8
        weight = layer.weight + 1 if kind is GemmaRMSNorm else layer.weight
        if kind is GemmaRMSNorm:
            layer.gemma_weight = weight
        for rows in (1, 5):
            x, residual = on(RANK, rows, 64, dtype=torch.bfloat16), on(9, rows, 64, dtype=torch.bfloat16)
            kept = residual.clone()
            with mock.patch.object(group.ca_comm, "custom_all_reduce", side_effect=AssertionError):
                out, sums = layer.forward_with_allreduce_fusion(x, residual)
            expected = (total(rows, 64) + residual.float()).bfloat16()
            equal(sums, expected)
            torch.testing.assert_close(out, normed(expected, weight, layer.variance_epsilon), rtol=2**-7, atol=0)
            equal(residual, kept)


def norms_in_compiled_code() -> None:
    layer = RMSNorm(64).to(torch.bfloat16)
    x, residual = on(RANK, 3, 64, dtype=torch.bfloat16), on(9, 3, 64, dtype=torch.bfloat16)
    expected = layer.forward_with_allreduce_fusion(x, residual)

    def call(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return fusion.flashinfer_allreduce_residual_rmsnorm(x, residual, layer.weight, layer.variance_epsilon)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(x, residual), expected, strict=True):
        equal(got, want)


def norms_of_other_types_fall_back() -> None:
    layer = RMSNorm(64)
    x, residual = on(RANK, 5, 64), on(9, 5, 64)
    out, sums = layer.forward_with_allreduce_fusion(x, residual)
    equal(sums, total(5, 64) + on(9, 5, 64))
    torch.testing.assert_close(out, normed(sums, layer.weight, layer.variance_epsilon))


def norms_of_a_group_without_communicators_fall_back() -> None:
    layer = RMSNorm(64).to(torch.bfloat16)
    x, residual = on(RANK, 5, 64, dtype=torch.bfloat16), on(9, 5, 64, dtype=torch.bfloat16)
    with mock.patch.multiple(group, pynccl_comm=None, ca_comm=None):
        got = fusion.flashinfer_allreduce_residual_rmsnorm(x, residual, layer.weight, layer.variance_epsilon)
    assert got == (None, None)


def fusion_follows_sglangs_settings() -> None:
    from sglang.srt.layers.layer_boundary import exit as at_exit
    from sglang.srt.layers.layer_boundary.residual.add_norm import flashinfer_ar_fusion_applies as applies

    assert at_exit.flashinfer_ar_fusion_applies is applies  # modules that imported it earlier use the new one
    fuses = MODE != "deterministic"

    def call(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if applies(x.shape[0]) else x

    with get_context().override_server_args():  # SGLang's defaults
        equal(torch.compile(call, backend="eager", fullgraph=True)(on(0, 4)), on(0, 4) * (2 if fuses else 1))
    with mock.patch("proxyccl.sglang.hooks.get_exec") as settings:
        comm = settings().comm
        comm.enforce_disable_flashinfer_allreduce_fusion, comm.flashinfer_allreduce_fusion_backend = False, None
        assert [applies(size) for size in (0, 1, 2048, 2049)] == [False, fuses, fuses, False]
        comm.flashinfer_allreduce_fusion_backend = "cutedsl"
        assert not applies(1)
        comm.enforce_disable_flashinfer_allreduce_fusion, comm.flashinfer_allreduce_fusion_backend = True, None
        assert not applies(1)


def layers() -> None:
    up = ColumnParallelLinear(32, 32 * RANKS, bias=False, params_dtype=torch.float32)
    down = RowParallelLinear(32 * RANKS, 32, bias=False, params_dtype=torch.float32)
    whole_up, whole_down, x = on(1, 32 * RANKS, 32), on(2, 32, 32 * RANKS), on(3, 7, 32)
    up.weight_loader(up.weight, whole_up)
    down.weight_loader(down.weight, whole_down)
    equal(down(torch.relu(up(x)[0]))[0], torch.relu(x @ whole_up.T) @ whole_down.T)
    table = VocabParallelEmbedding(64 * RANKS, 16, params_dtype=torch.float32)
    rows = on(4, 64 * RANKS, 16)
    table.weight_loader(table.weight, rows)
    ids = torch.arange(0, 64 * RANKS, 5)
    equal(table(ids), rows[ids])


def captured() -> None:
    """SGLang's sizes of batches, in graphs that are captured as SGLang captures them, and replayed with other data."""
    layer = RMSNorm(512).to(torch.bfloat16)
    for rows in (1, 2, 8, 160, 512):
        x, residual = (torch.empty(rows, 512, dtype=torch.bfloat16) for _ in range(2))
        graph = torch.cuda.CUDAGraph()
        with state.graph_capture() as context, torch.cuda.graph(graph, stream=context.stream):
            reduced = of_tp.tensor_model_parallel_all_reduce(x)
            normed_rows, sums = layer.forward_with_allreduce_fusion(x, residual)
            gathered = of_tp.tensor_model_parallel_all_gather(x, 0)
        for turn in range(3):
            x.copy_(on(RANK, rows, 512, dtype=torch.bfloat16) * turn)
            residual.copy_(on(9, rows, 512, dtype=torch.bfloat16))
            graph.replay()
            equal(reduced, total(rows, 512, dtype=torch.bfloat16) * turn)
            equal(sums, (total(rows, 512) * turn + residual.float()).bfloat16())
            want = normed(sums, layer.weight, layer.variance_epsilon)
            torch.testing.assert_close(normed_rows, want, rtol=2**-7, atol=0)
            parts = [on(rank, rows, 512, dtype=torch.bfloat16) * turn for rank in range(RANKS)]
            equal(gathered, torch.cat(parts))


def deterministic_sums() -> None:
    assert os.environ["PROXYCCL_INVARIANT"] == "1"  # tests/collectives checks the effect of this setting
    out = torch.empty(4, 4)
    group.reduce_scatter_tensor(out, on(RANK, 4 * RANKS, 4))
    equal(out, total(4 * RANKS, 4).chunk(RANKS)[RANK])


def nothing_is_replaced() -> None:
    assert dist.get_backend(group.device_group) == backend == ("nccl" if ON_GPUS else "gloo")
    assert not hasattr(group.pynccl_comm, "short")
    assert not HookRegistry._hooks
    assert "deep_ep" not in sys.modules
    assert "proxyccl" in dist.Backend.backend_list  # trainers broadcast weights in groups of this backend


def memory_goes_back_with_sglangs() -> None:
    from deep_ep import Buffer
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput as Release
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput as Resume
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    get_context().override_server_args().install()  # SGLang's defaults
    model, saver = torch.nn.Linear(2, 2), mock.MagicMock()
    updater = SchedulerWeightUpdaterManager(
        tp_worker=mock.MagicMock(**{"model_runner.model": model}),
        draft_worker=None,
        memory_saver_adapter=saver,
        flush_cache=lambda: True,
        is_fully_idle=lambda **_: True,
    )
    pairs = [
        state.init_model_parallel_group(ranks, RANK, backend, group_name=f"pairs{i}")
        for i, ranks in enumerate([[[0, 1], [2]], [[0], [1, 2]]])
    ]
    buffer = Buffer(group.device_group, num_nvl_bytes=1 << 20)
    get_resources().buffers["deepep_ep_state"] = SimpleNamespace(buffer=buffer)

    def asleep() -> list[bool]:
        groups = [group, *(pair for pair in pairs if pair.world_size > 1)]
        stats = [each.device_group._get_backend(DEVICE).memory_stats() for each in groups]
        return [buffer.communicator.suspended, *(bool(each["suspended"]) for each in stats)]

    for _ in range(2):
        all_reduce()
        updater.release_memory_occupation(Release())
        assert all(asleep())
        updater.resume_memory_occupation(Resume(tags=["weights"]))
        assert all(asleep())
        all_reduce()  # a collective of a loader resumes its group alone
        of_buffer, of_group, *of_pairs = asleep()
        assert of_buffer
        assert not of_group
        assert all(of_pairs)
        updater.release_memory_occupation(Release(tags=["weights"]))
        assert all(asleep())
        updater.resume_memory_occupation(Resume())
        assert not any(asleep())
    assert saver.pause.call_count == saver.resume.call_count == 2 * 4

    with mock.patch("proxyccl.sglang.sleep.get_parallel") as settings:
        settings().tp_group.ranks, settings().enable_dp_attention_local_control_broadcast = [RANK], False
        updater.release_memory_occupation(Release())
        assert [index for index, each in enumerate(asleep()) if each] == [0]  # the other groups reach further
        updater.resume_memory_occupation(Resume())
        assert not any(asleep())
        settings().tp_group.ranks, settings().enable_dp_attention_local_control_broadcast = group.ranks, True
        updater.release_memory_occupation(Release())
        assert not any(asleep())


def a_lost_rank() -> None:
    if RANK == 1:
        os._exit(3)
    with expecting(r"the process of rank 1 ended"):
        for _ in range(1000):
            of_tp.tensor_model_parallel_all_reduce(on(RANK, 16, 8))
            state.outplace_all_reduce(on(RANK, 16, 8), group.unique_name, "ca")


def end() -> None:
    state.destroy_model_parallel()
    state.destroy_distributed_environment()


CASES = {
    "plain": (
        groups,
        all_reduce,
        all_reduce_by_each_method,
        all_reduce_of_long_and_strided_tensors,
        all_reduce_in_compiled_code,
        gathers,
        scatters,
        exchanges,
        communicators_beside_a_group,
        new_groups_are_logged,
        symmetric_memory_is_refused,
        norms,
        norms_in_compiled_code,
        *(() if ON_GPUS else (norms_of_other_types_fall_back,)),  # SGLang's own kernel is not installed
        norms_of_a_group_without_communicators_fall_back,
        fusion_follows_sglangs_settings,
        layers,
        end,
    ),
    "captured": (captured, end),
    "deterministic": (groups, all_reduce, deterministic_sums, fusion_follows_sglangs_settings, end),
    "asleep": (memory_goes_back_with_sglangs, end),
    "lost": (a_lost_rank,),
    "off": (nothing_is_replaced, end),
}
print_outcomes(CASES[MODE])
if MODE == "lost":
    os._exit(0)  # the destructors of torch's gloo groups may wait for the lost rank
