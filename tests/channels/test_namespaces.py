"""Ranks of one host in different PID namespaces, as in containers, pass descriptors to each other."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxyccl import ArgumentError, Communicator, RuntimeUnavailableError
from proxyccl.channels import memory
from proxyccl.channels.group import Group
from proxyccl.channels.joining.whereabouts import Whereabouts, find_hosts
from proxyccl.channels.segment.process_descriptors import PeerProcess
from proxyccl.device.gpu import memory as gpu_memory
from proxyccl.device.gpu.memory import MemoryHandle
from proxyccl.device.memory.handle_kinds import MAPPED_BLOCKS
from proxyccl.proxy.hosts import boot_id, host_name
from support.containers import Containers
from support.daemons import running_daemon
from support.devices import RUNTIME, require_devices
from support.packages.debian import UnavailableError
from support.paths import ROOT
from support.running import run_ranks

pytestmark = pytest.mark.slow

PROGRAM = str(ROOT / "tests/support/programs/contained.py")
SECONDS = 250


@pytest.fixture(scope="module")
def containers() -> Iterator[Containers]:
    require_devices(2)
    if RUNTIME == "hip":
        pytest.skip("memory of AMD GPUs is not passed between PID namespaces")
    try:
        with Containers(2) as made:
            yield made
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Makes a directory that both containers see."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield Path(made)


def run(containers: Containers, directory: Path, *arguments: str, env: dict[str, str]) -> list[str]:
    ranks = [containers.start(rank, PROGRAM, str(directory), str(rank), *arguments, env=env) for rank in range(2)]
    return [rank.communicate(SECONDS)[0] for rank in ranks]


def test_containers_of_one_network_work_together_without_a_file(
    containers: Containers, tmp_path: Path, sockets: Path
) -> None:
    outputs = run(containers, tmp_path, "work", env={"PROXYCCL_SOCKETS": str(sockets)})
    path = "copy, memory by descriptors over an abstract socket"
    for rank, output in enumerate(outputs):
        shown = rf"paths: {{'{path}': \[{1 - rank}\]}}\nseen: \[{rank}\]\n"
        assert re.fullmatch(rf"ways: network\n(.*\n)*{shown}done\n", output), outputs
    assert not list(sockets.iterdir())


@pytest.mark.host_only("the path has another name on GPUs")
def test_agents_in_containers_name_their_path(containers: Containers, tmp_path: Path, sockets: Path) -> None:
    for output in run(containers, tmp_path, "agents", env={"PROXYCCL_SOCKETS": str(sockets)}):
        unseen = "by unix (its process is not visible in this PID namespace)\n"
        assert f"{unseen}by shared_memory\nby copy engine (shared memory)\n" in output


def test_containers_that_share_a_directory_alone_notice_a_lost_rank(
    containers: Containers, tmp_path: Path, sockets: Path
) -> None:
    outputs = run(containers, tmp_path, "lose", "apart", env={"PROXYCCL_SOCKETS": str(sockets)})
    assert re.fullmatch(r"ways: directory\n(.*\n)*lost: the process of rank 1 ended .*\ndone\n", outputs[0]), outputs
    assert len(list(sockets.iterdir())) == 1  # the next listener removes the killed rank's socket
    outputs = run(containers, tmp_path / "again", "work", "apart", env={"PROXYCCL_SOCKETS": str(sockets)})
    assert all(re.fullmatch(r"ways: directory\n(.*\n)*done\n", each) for each in outputs), outputs
    assert not list(sockets.iterdir())


@pytest.mark.parametrize("place", ["thread", "process", "daemon"])
def test_containers_that_share_the_daemons_socket_alone_are_introduced_by_it(
    containers: Containers, tmp_path: Path, sockets: Path, place: str
) -> None:
    with running_daemon(sockets / "daemon") as daemon:
        env = {"PROXYCCL_DAEMON_SOCKET": str(sockets / "daemon"), "PROXYCCL_PROXY": place}
        env["PROXYCCL_SOCKETS"] = str(tmp_path / "none")
        outputs = run(containers, tmp_path / "work", "work", "apart", env=env)
        assert all(re.fullmatch(r"ways: daemon\n(.*\n)*done\n", each) for each in outputs), (outputs, daemon.log)
        outputs = run(containers, tmp_path / "lose", "lose", "apart", env=env)
        assert re.fullmatch(r"ways: daemon\n(.*\n)*lost: the process of rank 1 ended .*\ndone\n", outputs[0]), outputs


def process(view: int, token: bytes = b"") -> PeerProcess:
    return PeerProcess(1, view, token)


HERE = Whereabouts("a/1", process(7), ("network 1", "directory 1:2"))


def test_containers_of_one_machine_are_one_host() -> None:
    own_name = Whereabouts("b/1", process(8), ("network 2", "directory 1:2"))
    elsewhere = Whereabouts("a/2", process(7))
    assert find_hosts([HERE, own_name, elsewhere]) == ["a/1", "a/1", "a/2"]
    assert [HERE.way(HERE), HERE.way(own_name), HERE.way(elsewhere)] == ["", "directory", ""]
    # The names that ranks have with PROXYCCL_HOSTS=name.
    assert find_hosts([Whereabouts("a/1/a", process(7)), Whereabouts("b/1/b", process(8))]) == [
        "a/1/a",
        "b/1/b",
    ]


def test_ranks_that_share_nothing_hear_what_is_missing() -> None:
    alone = Whereabouts("b/1", process(8), ("network 2",), ("/s: No such file or directory", "no node daemon at /d"))
    with pytest.raises(RuntimeUnavailableError) as raised:
        find_hosts([HERE, alone, HERE, alone])
    for words in (
        r"ranks 0, 2 and ranks 1, 3 are on one machine \(a, b\), but can't pass each other descriptors of memory",
        r"they share no PID \(or user\) namespace, network namespace or directory of sockets",
        r"\(ranks 1, 3: /s: No such file or directory, no node daemon at /d\)",
        r"PROXYCCL_SOCKETS.*PROXYCCL_DAEMON_SOCKET.*--network=host.*--pid=host.*PROXYCCL_HOSTS=name",
    ):
        assert re.search(words, str(raised.value))


def test_a_process_without_proc_is_its_own_neighbour_alone() -> None:
    blind = Whereabouts("a/1", process(0, b"a"))
    assert find_hosts([blind, blind]) == ["a/1", "a/1"]
    with pytest.raises(RuntimeUnavailableError, match="they share no /proc that shows them, network"):
        find_hosts([blind, Whereabouts("a/1", process(0, b"b"))])


def test_ranks_that_tell_hosts_apart_otherwise_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"PROXYCCL_HOSTS: .* same .*; rank 0 has 'machine', rank 2 'name'"):
        find_hosts([HERE, HERE, Whereabouts("a/1/a", process(7))])


def test_hosts_are_told_apart_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "pod")
    machine = boot_id()
    assert host_name() == f"pod/{machine}"
    monkeypatch.setenv("PROXYCCL_HOSTS", "name")
    assert host_name() == f"pod/{machine}/pod"
    monkeypatch.setenv("PROXYCCL_HOSTS", "pod")
    with pytest.raises(ArgumentError, match="PROXYCCL_HOSTS: must be machine or name, not 'pod'"):
        host_name()


# -- memory of GPUs ---


@pytest.mark.host_only("it makes handles of no GPU")
def test_a_gpus_plain_memory_is_refused_in_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle_of(raw: bytes) -> bytes:
        handle = MemoryHandle.pack(0, 4096, 1, 0, 64, raw)
        return handle[:8] + bytes(16) + handle[24:]  # names another process

    plain, blocks = handle_of(bytes(64)), handle_of(MAPPED_BLOCKS + bytes(56))
    assert not any(MemoryHandle.unpack(handle)[0] for handle in (plain, blocks))
    monkeypatch.setattr(gpu_memory, "proc_view", lambda: 7)
    assert not MemoryHandle.unpack(blocks)[0]
    with pytest.raises(ArgumentError, match=r"does not pass PID.*Communicator\.empty\(\).*expandable_segments:True"):
        MemoryHandle.unpack(plain)


@pytest.mark.host_only("it stands in for a GPU's memory")
def test_registering_plain_memory_is_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: Communicator) -> None:
        array = comm.empty(1000)
        comm.all_gather_bytes(b"made")
        with pytest.raises(
            ArgumentError, match="peers or the node daemon are in other PID namespaces, and memory of cud"
        ):
            comm.register(array)
        comm.all_gather_bytes(b"refused")

    monkeypatch.setattr(Group, "crosses_namespaces", True)
    monkeypatch.setattr(memory, "passes_namespaces", lambda _: False)
    run_ranks(2, body)
