"""torchrun trains a model over the fabric transport on two hosts, which network namespaces of this machine simulate."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hosts.networks import INTERFACE, Hosts, hosts_or_skip

pytest.importorskip("torch")

TRAINING = Path(__file__).parent / "programs/training.py"
HOSTS = 2
SECONDS = 240


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_or_skip(HOSTS) as made:
        yield made


def losses(hosts: Hosts, backend: str, port: int) -> list[float]:
    """Runs a training on two ranks of each host, and returns the losses that it prints."""
    at = ["--nnodes", str(HOSTS), "--master-addr", hosts.address(0), "--master-port", str(port)]
    # gloo gets the name of the interface, because the hosts' names can't be resolved.
    env = {"OMP_NUM_THREADS": "1", "PROXYCCL_RUNTIME": "host", "GLOO_SOCKET_IFNAME": INTERFACE}
    launchers = [
        hosts.start(host, "-m", "torch.distributed.run", *at, "--node-rank", str(host), "--nproc-per-node", "2",
                    str(TRAINING), "ddp", backend, env=env)
        for host in range(HOSTS)
    ]  # fmt: skip
    outputs = [launcher.communicate(timeout=SECONDS)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0] * HOSTS, "\n".join(outputs)
    printed: list[float] = json.loads(next(line for line in outputs[0].splitlines() if re.match(r"\[\d+\.", line)))
    return printed


def test_a_training_on_two_hosts_has_the_losses_of_gloo(hosts: Hosts) -> None:
    ours = losses(hosts, "proxyccl", 29511)
    assert ours == pytest.approx(losses(hosts, "gloo", 29512), rel=1e-5)
    assert ours[-1] < ours[0]
