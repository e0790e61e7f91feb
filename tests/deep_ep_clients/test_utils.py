"""The modules of deep_ep.utils that DeepEP's tests and benchmarks import."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import deep_ep  # noqa: E402
from deep_ep.utils import envs, gate, math, refs, testing  # noqa: E402

MODULES = {
    "deep_ep": "Buffer Config ElasticBuffer EPHandle EventHandle EventOverlap __version__ get_logical_domain_size "
    "get_physical_domain_size topk_idx_t utils",
    "deep_ep.buffer": "Buffer Config EventHandle EventOverlap",
    "deep_ep.buffers.legacy": "Buffer",
    "deep_ep.buffers.elastic": "ElasticBuffer EPHandle",
    "deep_ep.utils": "EventHandle EventOverlap check_nvlink_connections",
    "deep_ep.utils.event": "EventHandle EventOverlap",
    "deep_ep.utils.envs": "init_dist init_seed dist_print get_local_seed get_global_seed get_physical_domain_size "
    "get_logical_domain_size check_nvlink_connections check_torch_deterministic get_nvlink_gbs get_rdma_gbs "
    "check_fast_rdma_atomic_support",
    "deep_ep.utils.math": "calc_diff safe_div ceil_div align per_token_cast_to_fp8 per_token_cast_back inplace_unique "
    "create_grouped_scores hash_tensor hash_tensors count_bytes",
    "deep_ep.utils.testing": "bench bench_kineto flush_l2_cache empty_suppress suppress_stdout_stderr",
    "deep_ep.utils.gate": "get_unbalanced_scores get_precise_unbalanced_scores get_random_unbalanced_scores",
    "deep_ep.utils.refs": "dispatch combine generate_pre_combine_data ordered_accumulate",
    "deep_ep.utils.semantic": "value_or",
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_have_deep_eps_names(name: str) -> None:
    module = importlib.import_module(name)
    assert [each for each in MODULES[name].split() if not hasattr(module, each)] == []


def test_there_is_one_class_of_each_name() -> None:
    legacy, elastic = (importlib.import_module(f"deep_ep.buffers.{name}") for name in ("legacy", "elastic"))
    assert legacy.Buffer is deep_ep.Buffer
    assert elastic.ElasticBuffer is deep_ep.ElasticBuffer


def test_float8_there_and_back() -> None:
    x = torch.randn(5, 300, dtype=torch.float32)
    rows, scales = math.per_token_cast_to_fp8(x)
    assert (rows.shape, rows.dtype) == (x.shape, torch.float8_e4m3fn)
    assert (scales.shape, scales.dtype) == ((5, 3), torch.float32)
    assert math.calc_diff(math.per_token_cast_back(rows, scales), x) < 1e-3
    powers = torch.exp2(torch.ceil(torch.log2(torch.rand(5, 4, dtype=torch.float32))))
    packed = (powers.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)
    assert packed.shape == (5, 1)
    ones = torch.ones(5, 512, dtype=torch.float32).to(torch.float8_e4m3fn)
    for words in (packed, packed.t().contiguous().t()):  # two strides are possible, because the tensor has one column
        assert torch.equal(math.per_token_cast_back(ones, words), math.per_token_cast_back(ones, powers))
    assert math.per_token_cast_back(rows[:0], scales[:0]).shape == (0, 300)
    assert math.calc_diff(x, x) == 0


def test_small_arithmetic() -> None:
    x = torch.tensor([[3, 1, 3, -1], [-1, -1, -1, -1], [0, 0, 2, 2]])
    math.inplace_unique(x, 4)
    assert x.tolist() == [[3, 1, -1, -1], [-1] * 4, [2, 0, -1, -1]]
    scores = math.create_grouped_scores(torch.ones(2, 6), torch.tensor([[0], [2]]), 3)
    assert scores.tolist() == [[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]]
    assert (math.ceil_div(7, 4), math.align(7, 4), math.safe_div(0, 0), math.safe_div(6, 3)) == (2, 8, 0, 2)
    words = torch.tensor([3, 5], dtype=torch.int32)
    assert (math.hash_tensor(words), math.hash_tensors(words, None, (words, words[:1]))) == (8, 3)
    assert math.count_bytes(words, None, (words.to(torch.int8),)) == 10


@pytest.mark.parametrize("ratio", [1.0, 2.0, 4.0])
@pytest.mark.parametrize(("ranks", "per_rank", "topk"), [(8, 8, 6), (4, 4, 2), (16, 1, 3)])
def test_the_first_rank_gets_more_tokens(ranks: int, per_rank: int, topk: int, ratio: float) -> None:
    torch.manual_seed(1)
    tokens, experts = 4096, ranks * per_rank

    def went(precise: bool) -> list[float]:
        scores = gate.get_unbalanced_scores(tokens, experts, ranks, topk, ratio, precise)
        assert (scores.shape, scores.dtype) == ((tokens, experts), torch.float32)
        ids = scores.topk(topk).indices // per_rank
        goes = torch.zeros(tokens, ranks).scatter_(1, ids, 1.0)
        return goes.sum(0).tolist()

    if topk > ranks / ratio * per_rank or -(-topk // per_rank) > int((ranks - 1) / ratio) + 1:
        with pytest.raises(ValueError, match=r"^ratio: "):
            went(precise=True)
        return
    first, *others = went(precise=True)
    assert max(others) - min(others) <= 1
    assert first == pytest.approx(ratio * sum(others) / len(others), rel=0.01)
    first, *others = went(precise=False)
    if ratio == 1:
        assert first == pytest.approx(sum(others) / len(others), rel=0.1)
    else:
        assert first > 1.1 * sum(others) / len(others)


def test_sums_of_references_are_made_in_order() -> None:
    data = torch.tensor([[[1.0], [256.0], [1.0], [1.0]]], dtype=torch.bfloat16)
    ids, bias = torch.tensor([[0, 1, 0, 3]]), torch.full((1, 1), 0.5)
    assert refs.ordered_accumulate(data).item() == 260  # the exact sum, 259, is rounded once to bfloat16
    assert refs.combine(data, ids, 1, 4, 4, None, False, False).item() == 260
    # The sums of ranks 0 and 1 are 2 and 256; the sums of the nodes are 258 and 1.
    assert refs.combine(data, ids, 2, 2, 4, None, True, True).item() == 260
    assert refs.combine(data, ids, 1, 2, 4, (bias, bias), True, False).item() == 260


def test_seeds_and_links() -> None:
    assert envs.get_rdma_gbs("no such nic") == 0
    assert not envs.check_fast_rdma_atomic_support("no such nic")
    assert envs.get_nvlink_gbs() >= 0
    envs.check_nvlink_connections(None)
    envs.check_torch_deterministic()
    with testing.suppress_stdout_stderr(), testing.empty_suppress():
        subprocess.run([sys.executable, "-c", "print(1)"], check=True)
