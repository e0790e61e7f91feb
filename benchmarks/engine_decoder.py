"""Times a decoder built of an inference engine's groups, layers and graph capture, with ProxyCCL and with the engine's
own communicators.

    python benchmarks/engine_decoder.py --engine vllm --json benchmarks/results/vllm_decoder_2.json
    python benchmarks/engine_decoder.py --engine sglang --json benchmarks/results/sglang_decoder_2.json

A Llama of 8 layers with random weights decodes one token for each sequence: embedding, layers with norms, matrix
products and attention over a context that does not grow, the head, and the choice of the next token. The ranks are one
tensor-parallel group. With vLLM, torch compiles the step with the pass manager of vLLM's platform; with SGLang, the
step is not compiled, as in SGLang's default. On GPUs the step is captured by the engine's `graph_capture` and replayed;
on CPUs it is called. The contenders alternate, each in new processes: ProxyCCL; ProxyCCL without fused norms; the
engine without the plug-in, which uses NCCL and the engine's own all_reduce (gloo on CPUs); the engine without its own
all_reduce, which uses torch's symmetric memory (vLLM) or NCCL (SGLang); and the engine with norms fused by FlashInfer.
A contender whose packages or devices are missing is skipped, and named. All contenders start with the same weights, and
their logits are compared.

For vLLM the program needs `proxyccl[torch]` and `packages/vllm` in vLLM's Python environment. For a machine without
network access, copy these files for vLLM 0.26.0 (torch 2.11, CUDA 13, Python 3.12) into a folder that PYTHONPATH names:

- the .py files and the dist-info folder of vLLM's wheel (8 MB zipped), because vLLM asks for its own version;
- `_C_stable_libtorch.abi3.so` of that wheel (56 MB compressed by xz): vLLM's platform for CUDA imports this file;
- the wheels, except torch's, that requirements-vllm.lock lists for that Python (30 MB), and proxyccl's wheel;
- packages/vllm/proxyccl_vllm and its dist-info, which has the entry point: pip install --target FOLDER packages/vllm.

For SGLang the program needs `proxyccl[torch]` in SGLang's Python environment. On a machine without network access, the
`kernels` and `srt` folders of SGLang's wheel with its other small files and its dist-info folder (12 MB zipped) and the
wheels that requirements-sglang.lock lists (16 MB) are enough. SGLang then compiles its all_reduce, norm and activation
with nvcc when they are first called. FlashInfer and the package sgl_kernel are not needed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

# This program is not an MPI rank, so mpi4py must not initialise MPI.
os.environ["MPI4PY_RC_INITIALIZE"] = "false"

from program import common_arguments, nvidia_driver, output_of

from proxyccl.device.runtimes import find_runtime
from proxyccl.tools import options
from proxyccl.tools.results import Fields, machine, versions, write_json
from proxyccl.tools.tables import Column, Table

_RANK = Path(__file__).with_name("engine_decoder_rank.py")
_MOST_DIFFERENCE = 0.1
"""The greatest difference of logits between contenders, as a part of the greatest logit: roundings of bfloat16."""


@dataclass(frozen=True)
class Model:
    """The decoder: The shapes of Llama 3 8B, or small shapes for CPUs."""

    layers: int = 8
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    intermediate: int = 14336
    vocabulary: int = 32000
    context: int = 512


SMALL = Model(2, 256, 8, 4, 32, 512, 1024, 32)


def config_of(model: Model) -> Fields:
    """Returns the configuration of a Llama, as transformers reads it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


@dataclass(frozen=True)
class Contender:
    """A job that the program starts.

    Attributes:
        title: its name in tables.
        plug_in: whether the engine uses ProxyCCL.
        fused: whether norms are fused with their all_reduce: by ProxyCCL, or without the plug-in by FlashInfer.
        custom: whether the engine may use its own all_reduce.
        needs: a package without which the contender is skipped; if there is one, the contender also needs GPUs.
    """

    title: str
    plug_in: bool = False
    fused: bool = False
    custom: bool = True
    needs: str = ""

    @property
    def options(self) -> Fields:
        return {"fused": self.fused, "custom": self.custom, "plug_in": self.plug_in}

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables, which switch the plug-ins of both engines on or off."""
        return {
            **os.environ,
            "VLLM_PLUGINS": "proxyccl_platform" if self.plug_in else "",
            "VLLM_NO_USAGE_STATS": "1",
            "PROXYCCL_SGLANG": str(int(self.plug_in)),
            # As in vLLM's default, the driver says whether GPUs reach each other. SGLang would try each pair of GPUs in
            # processes that import SGLang once more, and a rank waits for them without a bound.
            "SGLANG_SKIP_P2P_CHECK": "1",
        }


_OURS = (Contender("ProxyCCL", plug_in=True, fused=True), Contender("ProxyCCL, norms apart", plug_in=True))
_FLASHINFER = Contender("FlashInfer", fused=True, needs="flashinfer")
CONTENDERS = {
    "vllm": (
        *_OURS,
        Contender("vLLM's own"),
        Contender("symmetric memory", custom=False, needs="torch"),
        _FLASHINFER,
    ),
    "sglang": (*_OURS, Contender("SGLang's own"), Contender("NCCL", custom=False, needs="torch"), _FLASHINFER),
}
"""For each engine, its contenders. They run in this order."""


def contenders_of(engine: str, titles: list[str] | None) -> list[Contender]:
    """Returns an engine's contenders with the given titles (None: all) that can run here, and prints the names of the
    other ones.

    Raises:
        SystemExit: the engine is not installed, a title is unknown, or no contender can run.
    """
    if find_spec(engine) is None:
        raise SystemExit(f"--engine: the package {engine} is not installed in this Python environment")
    known = {each.title: each for each in CONTENDERS[engine]}
    titles = [*known] if titles is None else titles
    unknown = [title for title in titles if title not in known]
    if unknown:
        raise SystemExit(f"--contenders: {unknown[0]!r} is unknown; expected titles of {[*known]}")
    on_cpus = (os.environ.get("PROXYCCL_RUNTIME") or find_runtime()) == "host"
    chosen = []
    for each in (known[title] for title in titles):
        missing = "GPUs" if each.needs and on_cpus else each.needs if each.needs and not find_spec(each.needs) else ""
        if missing:
            print(f"# {each.title}: skipped, because it needs {missing}", flush=True)
        else:
            chosen.append(each)
    if not chosen:
        raise SystemExit("--contenders: none of them can run here")
    return chosen


def run(contender: Contender, ranks: int, model: Model, seconds: int, asked: Fields) -> list[Fields]:
    """Runs a job of at most `seconds`. Returns each rank's results: `seconds` and `logits` by batch, and facts.

    Raises:
        SystemExit: the job failed, did not end in time, or did not use the contender's communicators.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked = {**asked, "model": asdict(model), "dump_after": 0.8 * seconds, **contender.options}
        Path(folder, "config.json").write_text(json.dumps(config_of(model)))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*launcher, os.fspath(_RANK), json.dumps(asked), folder]
        output_of(contender.title, command, contender.environment, seconds)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    facts = found[0]["facts"]
    if (facts["backend"] == "proxyccl") != contender.plug_in:
        raise SystemExit(f"{contender.title}: the groups' backend is {facts['backend']}; is the plug-in installed?")
    if contender.custom and not contender.plug_in and facts["device"] != "cpu" and not facts["own all_reduce"]:
        raise SystemExit(f"{contender.title}: the engine does not use its own all_reduce")
    return found


def require_alike(ours: Fields, theirs: Fields, title: str) -> None:
    """Exits with an error if two contenders' logits differ by more than rounding errors."""
    for batch, logits in ours["logits"].items():
        greatest = max(abs(each) for each in theirs["logits"][batch])
        apart = max(abs(a - b) for a, b in zip(logits, theirs["logits"][batch], strict=True))
        if not apart <= _MOST_DIFFERENCE * greatest:
            raise SystemExit(f"{title}: logits of batch {batch} differ by {apart:g} of {greatest:g}")


def main() -> int:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=[*CONTENDERS], required=True, help="the inference engine")
    parser.add_argument("-n", "--ranks", type=options.count, default=2, help="number of ranks (default %(default)s)")
    parser.add_argument("--batches", type=options.count, nargs="+", default=[1, 8, 64, 256], help="sequences")
    parser.add_argument("--job-seconds", type=options.count, default=400, help="limit of a job (default %(default)s)")
    parser.add_argument("--small", action="store_true", help="a small decoder, for CPUs")
    parser.add_argument("--contenders", nargs="+", help="titles, in order (default: all)")
    parsed = parser.parse_args()
    chosen = contenders_of(parsed.engine, parsed.contenders)
    model = SMALL if parsed.small else Model()
    facts = {"model": asdict(model), "world_size": parsed.ranks, "nvidia_driver": nvidia_driver()}
    facts |= {"runtime": os.environ.get("PROXYCCL_RUNTIME") or find_runtime()}
    print(f"# ProxyCCL {versions().get('proxyccl', '')}: a step of a decoder by {parsed.engine}, {parsed.ranks} ranks")
    print(f"# {machine()['cpu']}, {machine()['cores']} cores, load {machine()['load']}", flush=True)
    table = Table((Column("batch", "", 6), *(Column(each.title, "(ms)", 24, ".3f") for each in chosen)))
    seconds: dict[str, dict[str, list[float]]] = {each.title: {} for each in chosen}
    first: dict[str, Fields] = {}
    asked = {"engine": parsed.engine, "batches": parsed.batches, "repeats": 5 if parsed.quick else 20}
    end = time.monotonic() + parsed.seconds
    while not first or (not parsed.quick and time.monotonic() < end):
        for contender in chosen:
            of_ranks = run(contender, parsed.ranks, model, parsed.job_seconds, asked)
            first.setdefault(contender.title, of_ranks[0])
            require_alike(of_ranks[0], first[chosen[0].title], contender.title)
            for batch in of_ranks[0]["seconds"]:
                slowest = max(each["seconds"][batch] for each in of_ranks)
                seconds[contender.title].setdefault(batch, []).append(slowest)
    for title, found in first.items():
        print(f"# {title}: {', '.join(f'{name} {value}' for name, value in found['facts'].items())}")
    table.header()
    best = {title: {batch: min(each) for batch, each in rows.items()} for title, rows in seconds.items()}
    for batch in map(str, parsed.batches):
        table.row(batch, *(1e3 * best[each.title][batch] for each in chosen))
    if parsed.json is not None:
        described = {title: found["facts"] for title, found in first.items()}
        results = {"contenders": described, "step_s": best, "samples_s": seconds}
        write_json(parsed.json, {"benchmark": f"{parsed.engine}_decoder", **facts, **results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
