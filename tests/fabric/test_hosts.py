"""The fabric transport between hosts, over libfabric's TCP provider: hosts are network namespaces of this machine."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hosts.networks import Hosts, hosts_or_skip
from support.once import run_make
from support.paths import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.host_only(reason="ranks on hosts without GPUs"),
    pytest.mark.own_proxy(reason="says where the proxies run"),
]

PROGRAM = ROOT / "tests/support/programs/on_hosts.py"
SECONDS = 120


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_or_skip(2) as made:
        yield made


class Job:
    """A job whose ranks run the test program on emulated hosts.

    Args:
        ranks: number of ranks on each host.
        directory: the directory through which the ranks find each other.
        what: the program's last argument.
        env: environment variables of all ranks.
    """

    def __init__(self, hosts: Hosts, ranks: list[int], directory: Path, what: str, **env: str) -> None:
        places = [host for host, count in enumerate(ranks) for _ in range(count)]
        env = {"PROXYCCL_RUNTIME": "host", "PROXYCCL_PROXY": "thread", "PROXYCCL_TIMEOUT": "60", **env}
        self.ranks = [
            hosts.fork(host, str(PROGRAM), str(directory), str(rank), str(len(places)), what, env=env)
            for rank, host in enumerate(places)
        ]

    def outputs(self) -> list[str]:
        try:
            return [rank.communicate(timeout=SECONDS)[0] for rank in self.ranks]
        finally:
            for rank in self.ranks:
                if rank.poll() is None:
                    rank.kill()

    def succeeds(self, transport: str = "fabric") -> list[str]:
        """Asserts that all ranks succeed, and use the given transport between hosts. Returns the ranks' outputs."""
        outputs = self.outputs()
        assert [rank.returncode for rank in self.ranks] == [0] * len(self.ranks), "\n".join(outputs)
        assert all(f"'{transport}'" in output for output in outputs), outputs
        return outputs


# "delivered" signals run only with --full, because the tests of floods and staged memory below also use "delivered".
@pytest.mark.parametrize(
    ("ranks", "env"),
    [
        ([2, 2], {}),
        pytest.param([1, 1], {"PROXYCCL_FABRIC": "signal=delivered"}, marks=pytest.mark.full),
        ([1, 1], {"PROXYCCL_PROXY": "process"}),
    ],
    ids=["two on each", "as if unordered", "in a daemon"],
)
def test_collectives_and_experts_run_between_hosts(
    hosts: Hosts, tmp_path: Path, ranks: list[int], env: dict[str, str]
) -> None:
    Job(hosts, ranks, tmp_path, "collectives", **env).succeeds()


@pytest.mark.parametrize(
    ("each", "what"), [(1, "one"), *(pytest.param(each, "collectives", marks=pytest.mark.full) for each in (1, 2))]
)
def test_mpiexec_starts_ranks_on_three_hosts(tmp_path: Path, each: int, what: str) -> None:
    program = [sys.executable, "-m", "mpi4py", str(PROGRAM), what]
    with hosts_or_skip(3, secure_shell=tmp_path) as hosts:
        job = hosts.mpiexec([each] * 3, program, tmp_path)
        try:
            output, _ = job.communicate(timeout=SECONDS)
        finally:
            job.kill()
    assert job.returncode == 0, output
    assert output.count("done by {") == 3 * each, output
    assert output.count("'fabric'") == 3 * each * 2 * each, output


SMALL_STAGES = "staging_bytes=32768,staging_chunk=8192"


# "ordered" signals run only with --full, because the test of execution plans below covers them.
@pytest.mark.parametrize(
    ("proxy", "signal"),
    [pytest.param("thread", "ordered", marks=pytest.mark.full), ("process", "delivered")],
    ids=["ordered", "unordered, in a daemon"],
)
def test_memory_that_can_not_be_registered_is_staged(hosts: Hosts, tmp_path: Path, proxy: str, signal: str) -> None:
    env = {"PROXYCCL_TRANSPORT": "staged_fabric", "PROXYCCL_PROXY": proxy}
    env["PROXYCCL_FABRIC"] = f"signal={signal},streams=2,{SMALL_STAGES}"
    Job(hosts, [1, 1], tmp_path, "collectives", **env).succeeds("staged_fabric")


# "delivered" signals run only with --full, because plans don't depend on the kind of signal.
@pytest.mark.parametrize(
    ("ranks", "transport", "env"),
    [
        ([2, 2], "fabric", {}),
        pytest.param(
            [1, 1],
            "fabric",
            {"PROXYCCL_FABRIC": "signal=delivered", "PROXYCCL_PROXY": "process"},
            marks=pytest.mark.full,
        ),
        ([1, 1], "staged_fabric", {"PROXYCCL_TRANSPORT": "staged_fabric", "PROXYCCL_FABRIC": SMALL_STAGES}),
    ],
    ids=["two on each", "as if unordered, in a daemon", "staged"],
)
def test_execution_plans_run_between_hosts(
    hosts: Hosts, tmp_path: Path, ranks: list[int], transport: str, env: dict[str, str]
) -> None:
    Job(hosts, ranks, tmp_path, "plans", **env).succeeds(transport)


@pytest.fixture(scope="module")
def on_hip() -> dict[str, str]:
    """Returns environment variables that give ranks emulated GPUs."""
    run_make("rocm-on-host")
    return {"PROXYCCL_RUNTIME": "hip", "ROCM_PATH": str(ROOT / "build/rocm-on-host")}


# For short calls on GPUs whose data is staged, the CPU copies the data through pinned memory.
@pytest.mark.parametrize(
    ("ranks", "proxy"),
    [([1, 1], "process"), pytest.param([2, 2], "thread", marks=pytest.mark.full)],
    ids=["one on each, in a daemon", "two on each"],
)
def test_gpus_are_staged_by_a_provider_that_does_not_reach_them(
    hosts: Hosts, tmp_path: Path, on_hip: dict[str, str], ranks: list[int], proxy: str
) -> None:
    Job(hosts, ranks, tmp_path, "arrays", **on_hip, PROXYCCL_PROXY=proxy).succeeds("staged_fabric")


def test_a_provider_that_reaches_gpus_writes_their_memory(hosts: Hosts, tmp_path: Path, on_hip: dict[str, str]) -> None:
    run_make("fake-fabric")
    library = ROOT / "build/fake-fabric/libfake_library.so"
    env = {**on_hip, "PROXYCCL_LIBFABRIC": str(library), "PROXYCCL_FABRIC": "gpu_writes=ordered"}
    for output in Job(hosts, [1, 1], tmp_path, "one", **env).succeeds("fabric"):
        assert "registered for interface 2, device 0" in output, output  # FI_HMEM_ROCR


# Runs only with --full: unit/test_gpu_writes.py tests which GPUs order writes, and a test above tests staging.
@pytest.mark.full
def test_gpus_that_do_not_order_writes_are_staged(hosts: Hosts, tmp_path: Path, on_hip: dict[str, str]) -> None:
    """The provider can access the GPUs' memory, but these GPUs do not promise to keep the order of writes."""
    run_make("fake-fabric")
    library = ROOT / "build/fake-fabric/libfake_library.so"
    Job(hosts, [1, 1], tmp_path, "one", **on_hip, PROXYCCL_LIBFABRIC=str(library)).succeeds("staged_fabric")


@pytest.mark.parametrize(
    ("transport", "proxy"),
    [("fabric", "thread"), ("fabric", "process"), ("staged_fabric", "process")],
    ids=["direct", "in a daemon", "staged, in a daemon"],
)
def test_a_rank_uses_two_interfaces(tmp_path: Path, transport: str, proxy: str) -> None:
    env = {
        "PROXYCCL_TRANSPORT": transport,
        "PROXYCCL_PROXY": proxy,
        "PROXYCCL_FABRIC": "interfaces=eth0,eth1,streams=3",
    }
    with hosts_or_skip(2, interfaces=2) as hosts:
        Job(hosts, [1, 1], tmp_path, "collectives", **env).succeeds(transport)
        received = [hosts.received(host, interface) for host in range(2) for interface in range(2)]
    assert min(received) > 500_000, received  # half of the longest array has 600 KB


def test_ranks_with_different_numbers_of_interfaces_are_refused(tmp_path: Path) -> None:
    program, reason = str(PROGRAM), "it uses 1 interfaces, and this rank 2; expected the same number"
    with hosts_or_skip(2, interfaces=2) as hosts:
        env = {"PROXYCCL_RUNTIME": "host", "PROXYCCL_TRANSPORT": "fabric"}
        ranks = [
            hosts.fork(rank, program, str(tmp_path), str(rank), "2", "one", env={**env, "PROXYCCL_FABRIC": options})
            for rank, options in enumerate(("interfaces=eth0,eth1", "interface=eth0"))
        ]
        outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    assert reason in outputs[0], outputs


def test_ipv6_is_enough_and_a_provider_is_chosen_by_name(tmp_path: Path) -> None:
    with hosts_or_skip(2, ipv4=False) as hosts:
        Job(hosts, [1, 1], tmp_path, "one", PROXYCCL_FABRIC="provider=net").succeeds()


# "ordered" signals run only with --full, because the limit on outstanding writes doesn't depend on the signals.
@pytest.mark.parametrize("signal", [pytest.param("ordered", marks=pytest.mark.full), "delivered"])
def test_a_flood_through_few_writes_loses_nothing(hosts: Hosts, tmp_path: Path, signal: str) -> None:
    few = {"PROXYCCL_FABRIC": f"depth=2,signal={signal}"}
    Job(hosts, [1, 1], tmp_path, "flood", **few).succeeds()


def test_a_killed_rank_is_noticed_on_other_hosts_and_those_that_are_left_go_on(hosts: Hosts, tmp_path: Path) -> None:
    job = Job(hosts, [1, 2], tmp_path, "go_on")
    *others, killed = job.outputs()
    assert "done" not in killed
    for output in others:
        assert "PeerLostError" in output, output
        assert "rank 2" in output, output
        assert "went on with (0, 1)" in output, output
    assert [rank.returncode for rank in job.ranks] == [0, 0, -9]


@pytest.mark.parametrize(("each", "times"), [(1, 2), pytest.param(2, 6, marks=pytest.mark.full)])
def test_connections_that_meet_are_made(hosts: Hosts, tmp_path: Path, each: int, times: int) -> None:
    """The ranks of each pair repeatedly connect to each other at the same time."""
    Job(hosts, [each] * 2, tmp_path, "meetings", MEETINGS=str(times)).succeeds()


def test_a_stranger_without_the_key_changes_nothing(hosts: Hosts) -> None:
    stranger = hosts.fork(0, str(ROOT / "tests/support/programs/stranger.py"), env={})
    output, _ = stranger.communicate(timeout=SECONDS)
    own, other = (line for line in output.splitlines() if line.endswith("bytes"))
    assert own == "written: 4096 bytes", output
    assert other.endswith(": 0 bytes"), output
    assert not other.startswith("written"), output


@pytest.mark.parametrize("interfaces", [1, 2])
def test_a_cut_network_ends_the_job(tmp_path: Path, interfaces: int) -> None:
    """A cut of one of two networks also ends the job."""
    env = {"PROXYCCL_FABRIC": "interfaces=eth0,eth1"} if interfaces == 2 else {}
    with hosts_or_skip(2, interfaces=interfaces) as hosts:
        job = Job(hosts, [1, 1], tmp_path, "cut", **env)
        for rank in job.ranks:
            assert any(line == b"ready\n" for line in iter(rank.stdout.readline, b"")), "no rank came so far"
        hosts.cut(1, interfaces - 1)
        for output in job.outputs():
            assert "WaitTimeoutError" in output or "PeerLostError" in output, output


def test_hosts_without_libfabric_are_told_what_to_install(hosts: Hosts, tmp_path: Path) -> None:
    outputs = Job(hosts, [1, 1], tmp_path, "collectives", PROXYCCL_LIBFABRIC="/nowhere/libfabric.so.1").outputs()
    for output, words in itertools.product(
        outputs, ("no remote transport between ranks", "libfabric can't be loaded", "apt install")
    ):
        assert words in output, output
