"""vLLM's NixlConnector with grants, by vLLM's own schedulers' and workers' parts of the connector."""

from __future__ import annotations

from support.paths import EXAMPLES
from support.running import run_alone

FREED, OTHERS = "blocks that were freed before the read", "other blocks than the request's"
SILENT, ERRORS = "other data, without an error", "load errors of blocks [4, 5, 6]"


def test_reads_of_freed_and_of_other_blocks_are_load_errors_with_grants() -> None:
    done = run_alone(EXAMPLES / "vllm_kv_connector.py")
    assert done.returncode == 0, done.stderr
    received = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    for connector, outcome in (("GrantingNixlConnector", ERRORS), ("NixlPullConnector", SILENT)):
        assert received[f"the request's blocks, {connector}"] == "the request's data"
        assert received[f"{FREED}, {connector}"] == received[f"{OTHERS}, {connector}"] == outcome
