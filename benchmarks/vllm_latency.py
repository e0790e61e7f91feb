"""Measures the time per token of a complete vLLM, with ProxyCCL and with vLLM's own communicators.

    python benchmarks/vllm_latency.py --json benchmarks/results/vllm_latency_2.json

vLLM's `LLM` generates tokens with the decoder of `engine_decoder.py`, whose weights are random (load_format="dummy"),
at tensor parallelism 2 with vLLM's usual options: compiled, in CUDA graphs. The time of a token is the difference of
two generations of different lengths, divided by the difference of lengths, so prefills cancel. The contenders are those
of `engine_decoder.py --engine vllm`, each in a new process; they get the same prompts, and the first tokens are shown.

The program needs the packages that `engine_decoder.py` names, and vLLM's attention kernels (`_vllm_fa3_C.abi3.so`, 14
MB by xz); for `--attention TRITON_ATTN` an empty file vllm_flash_attn/_vllm_fa2_C.py is enough. With a CPU build of
vLLM, `--small` runs on CPUs. On a machine with fewer NUMA nodes than ranks, vLLM then also needs the environment
variable VLLM_CPU_OMP_THREADS_BIND=nobind.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# This program is not an MPI rank, so mpi4py must not initialise MPI.
os.environ["MPI4PY_RC_INITIALIZE"] = "false"

from engine_decoder import SMALL, Contender, Model, config_of, contenders_of
from program import RESULT, common_arguments, nvidia_driver, output_of

from proxyccl.tools import options
from proxyccl.tools.results import Fields, machine, versions, write_json
from proxyccl.tools.tables import Column, Table

_JOB_SECONDS = 500.0
_PROMPT = 64
_SHORT, _LONG = 16, 144
"""The lengths of the two generations, in tokens."""


def engine_options(folder: str, asked: Any) -> dict[str, Any]:
    """Returns the options of vLLM's `LLM`, for the model in a folder."""
    return {
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "tensor_parallel_size": asked["ranks"],
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": max(asked["batches"]),
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": 1,
        "additional_config": {"proxyccl_fused_norms": asked["fused"]} if asked["plug_in"] else {},
        "disable_custom_all_reduce": not asked["custom"],
        "compilation_config": {"pass_config": {"fuse_allreduce_rms": asked["fused"] and not asked["plug_in"]}},
        **({"attention_backend": asked["attention"]} if asked["attention"] else {}),
        **({"quantization": asked["quantization"]} if asked["quantization"] else {}),
    }


def generate(asked: Any) -> None:
    """Measures a contender in this process, and prints the result as a line."""
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_of(Model(**asked["model"]))))
        llm = LLM(**engine_options(folder, asked))
        seconds: dict[int, float] = {}
        tokens: dict[int, list[int]] = {}
        for batch in asked["batches"]:
            prompts = [{"prompt_token_ids": [3 + (i + j) % 900 for j in range(_PROMPT)]} for i in range(batch)]
            times: dict[int, list[float]] = {_SHORT: [], _LONG: []}
            for repeat in range(1 + asked["repeats"]):  # the first repeat fills caches
                for length, found in times.items():
                    params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0, detokenize=False)
                    begin = time.perf_counter()
                    made = llm.generate(prompts, params, use_tqdm=False)
                    if repeat:
                        found.append(time.perf_counter() - begin)
            short, long = (statistics.median(times[length]) for length in (_SHORT, _LONG))
            seconds[batch] = (long - short) / (_LONG - _SHORT)
            tokens[batch] = list(made[0].outputs[0].token_ids[:8])
    print(RESULT + json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


def run(contender: Contender, asked: Fields) -> Fields:
    """Runs a contender in a new process. Returns, for each batch size, the seconds per token and the first tokens.

    Raises:
        SystemExit: the process failed, or did not end in time.
    """
    given = json.dumps({**asked, **contender.options})
    environment = {**contender.environment, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--generate", given]
    output = output_of(contender.title, command, environment, _JOB_SECONDS)
    lines = [line.removeprefix(RESULT) for line in output.splitlines() if line.startswith(RESULT)]
    if not lines:
        raise SystemExit(f"{contender.title}: no result\n{output[-20000:]}")
    found: Fields = json.loads(lines[-1])
    return found


def main() -> int:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("-n", "--ranks", type=options.count, default=2, help="number of ranks (default %(default)s)")
    parser.add_argument("--batches", type=options.count, nargs="+", default=[1, 8, 64, 256], help="sequences")
    parser.add_argument("--small", action="store_true", help="a small decoder")
    parser.add_argument("--attention", help="vLLM's name of an attention backend, such as TRITON_ATTN")
    parser.add_argument("--quantization", help="vLLM's name of a quantization, such as fp8")
    parser.add_argument("--contenders", nargs="+", help="titles, in order (default: all)")
    parser.add_argument("--generate", type=json.loads, metavar="OPTIONS", help="measure in this process")
    parsed = parser.parse_args()
    if parsed.generate is not None:
        generate(parsed.generate)
        return 0
    chosen = contenders_of("vllm", parsed.contenders)
    asked = {
        "model": vars(SMALL if parsed.small else Model()),
        "ranks": parsed.ranks,
        "batches": parsed.batches,
        "repeats": 1 if parsed.quick else 5,
        "attention": parsed.attention,
        "quantization": parsed.quantization,
    }
    print(f"# ProxyCCL {versions().get('proxyccl', '')}: a token of vLLM, {parsed.ranks} ranks")
    print(f"# {machine()['cpu']}, {machine()['cores']} cores, load {machine()['load']}", flush=True)
    found = {each.title: run(each, asked) for each in chosen}
    for title, each in found.items():
        print(f"# {title}: first tokens {each['tokens']}")
    table = Table((Column("batch", "", 6), *(Column(each.title, "(ms)", 24, ".3f") for each in chosen)))
    table.header()
    for batch in map(str, parsed.batches):
        table.row(batch, *(1e3 * found[each.title]["seconds"][batch] for each in chosen))
    if parsed.json is not None:
        facts = {"world_size": parsed.ranks, "nvidia_driver": nvidia_driver(), "asked": asked}
        write_json(parsed.json, {"benchmark": "vllm_latency", **facts, "contenders": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
