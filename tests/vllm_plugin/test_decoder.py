"""The benchmark of a decoder, as a program: it compares the logits of vLLM with and without the plug-in."""

from __future__ import annotations

import json
from pathlib import Path

from support.paths import ROOT
from support.running import run_alone


def test_a_decoder_gets_the_same_logits_with_and_without_the_plug_in(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    options = ["--engine", "vllm", "--small", "--quick", "--batches", "3", "--contenders", "ProxyCCL", "vLLM's own"]
    done = run_alone(ROOT / "benchmarks/engine_decoder.py", *options, "--json", str(results), timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text())["contenders"]
    assert [found[title]["backend"] for title in ("ProxyCCL", "vLLM's own")] == ["proxyccl", "gloo"]
    assert found["ProxyCCL"]["joined norms"] == 5  # one after the embedding, and two in each of two layers
