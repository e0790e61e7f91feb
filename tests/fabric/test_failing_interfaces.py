"""Several interfaces for each rank over libfabric's TCP provider, of which one or all fail. Hosts are network
namespaces of this machine.
"""

from __future__ import annotations

import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.checked_gather import CheckedGather
from support.hosts.networks import Hosts, hosts_or_skip
from support.paths import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.host_only(reason="ranks on hosts without GPUs"),
    pytest.mark.own_proxy(reason="says where the proxies run"),
]

PROGRAM = ROOT / "tests/support/programs/gathering.py"
NEWER_LIBRARY = Path(sys.prefix) / "lib/mpich/libfabric.so.1"
SECONDS = 60
DATA = (1, 2)  # the interfaces for data; the processes meet over interface 0


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_or_skip(2, interfaces=3) as made:
        yield made


def environment_of(provider: str) -> dict[str, str]:
    """Returns environment variables for ranks with two interfaces of the provider, of which each peer has its own
    endpoint: "net", or "tcp" of the libfabric that MPICH brings.
    """
    env = {"PROXYCCL_RUNTIME": "host", "PROXYCCL_PROXY": "thread", "PROXYCCL_TIMEOUT": str(SECONDS)}
    env |= {"PROXYCCL_TRANSPORT": "fabric", "PROXYCCL_FABRIC": f"provider={provider},interfaces=eth1,eth2"}
    if provider == "tcp":
        if not NEWER_LIBRARY.exists():
            pytest.skip("MPICH brings no libfabric")
        env["PROXYCCL_LIBFABRIC"] = str(NEWER_LIBRARY)
    return env


class Gathering:
    """Two ranks on two hosts, which gather checked arrays until the end of the `with` block. After the block, `outputs`
    are the ranks' outputs.
    """

    def __init__(self, hosts: Hosts, directory: Path, env: dict[str, str]) -> None:
        self._stop = directory / "stop"
        bootstrap = directory / "bootstrap"
        bootstrap.mkdir(mode=0o700)
        self.outputs = ["", ""]
        self.ranks = [
            hosts.fork(rank, str(PROGRAM), str(bootstrap), str(rank), str(self._stop), env=env) for rank in range(2)
        ]
        self._readers = [threading.Thread(target=self._read, args=(rank,)) for rank in range(2)]
        for reader in self._readers:
            reader.start()

    def _read(self, rank: int) -> None:
        for line in iter(self.ranks[rank].stdout.readline, b""):
            self.outputs[rank] += line.decode()

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come: {self.outputs}"
            assert all(rank.poll() is None for rank in self.ranks), self.outputs
            time.sleep(0.01)

    def warnings(self) -> list[int]:
        """Returns the number of each rank's warnings about a failed interface."""
        return [output.count("no longer reaches") for output in self.outputs]

    def wait_for_traffic(self, hosts: Hosts) -> None:
        """Waits until all interfaces carry parts of the arrays."""

        def counts() -> list[int]:
            return [hosts.received(host, interface) for host in range(2) for interface in DATA]

        before = counts()
        self.wait(
            lambda: min(now - then for now, then in zip(counts(), before, strict=True)) > 5 * CheckedGather.NBYTES,
            "traffic over all interfaces",
        )

    def __enter__(self) -> Gathering:
        self.wait(lambda: all("ready" in output for output in self.outputs), "the first gather")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.touch()
        try:
            for rank in self.ranks:
                rank.wait(SECONDS)
        finally:
            for rank in self.ranks:
                if rank.poll() is None:
                    rank.kill()
            for reader in self._readers:
                reader.join()


@pytest.mark.parametrize(
    ("provider", "proxy", "seed", "failures"),
    [
        ("net", "thread", 0, 2),
        ("tcp", "process", 0, 2),
        *(
            pytest.param(provider, proxy, seed, 5, marks=pytest.mark.full)
            for seed in range(1, 6)
            for provider in ("net", "tcp")
            for proxy in ("thread", "process")
        ),
    ],
)
def test_transfers_go_on_by_the_other_interface_until_the_interface_is_back(
    hosts: Hosts, tmp_path: Path, provider: str, proxy: str, seed: int, failures: int
) -> None:
    """Every other failure is a link without a carrier, and every other one a link that loses all packets. Sometimes an
    interface fails again before it is used again.
    """
    rng = random.Random(seed)
    with Gathering(hosts, tmp_path, environment_of(provider) | {"PROXYCCL_PROXY": proxy}) as gathering:
        for number in range(failures):
            host, interface, warned = rng.randrange(2), rng.choice(DATA), gathering.warnings()
            fail = hosts.cut if number % 2 == 0 else hosts.lose
            time.sleep(0.3 * rng.random())
            fail(host, interface)
            gathering.wait(
                lambda warned=warned: all(now > then for now, then in zip(gathering.warnings(), warned, strict=True)),
                "the warnings",
            )
            hosts.join(host, interface)
            if rng.random() < 0.25:
                time.sleep(0.3 * rng.random())
                fail(1 - host, interface)
                time.sleep(0.5 * rng.random())
                hosts.join(1 - host, interface)
            gathering.wait_for_traffic(hosts)
    for rank, output in enumerate(gathering.outputs):
        print(re.findall("slowest .*", output))
        assert "slowest" in output, gathering.outputs
        assert re.search(
            rf"the adapter eth[12] no longer reaches rank {1 - rank} \(.+\); all data goes by eth[12] "
            r"\(failure 1 of the connection\)",
            output,
        ), output


def test_a_paused_rank_is_not_taken_for_a_failed_interface(hosts: Hosts, tmp_path: Path) -> None:
    with Gathering(hosts, tmp_path, environment_of("net")) as gathering:
        gathering.ranks[1].send_signal(signal.SIGSTOP)
        time.sleep(4)  # after 2 s without an answer by one interface alone, the interface has failed
        gathering.ranks[1].send_signal(signal.SIGCONT)
        gathering.wait_for_traffic(hosts)
    assert gathering.warnings() == [0, 0], gathering.outputs
    assert all("slowest" in output for output in gathering.outputs), gathering.outputs


def test_a_failure_of_all_interfaces_ends_the_job_only_if_it_lasts(hosts: Hosts, tmp_path: Path) -> None:
    """TCP goes on by itself when a link is back, also with one interface."""
    with Gathering(hosts, tmp_path, environment_of("net") | {"PROXYCCL_TIMEOUT": "6"}) as gathering:
        try:
            for interface in DATA:
                hosts.cut(0, interface)
            time.sleep(2)
            for interface in DATA:
                hosts.join(0, interface)
            gathering.wait_for_traffic(hosts)
            for interface in DATA:
                hosts.cut(0, interface)
            gathering.wait(lambda: all("after" in output for output in gathering.outputs), "the errors")
        finally:
            for interface in DATA:
                hosts.join(0, interface)
    assert all("WaitTimeoutError" in output for output in gathering.outputs), gathering.outputs
