"""Ranks of one host in different PID namespaces, as in containers: they are refused with advice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from proxyccl import RuntimeUnavailableError
from proxyccl.channels.joining.whereabouts import Whereabouts, require_shared_namespaces
from proxyccl.proxy.daemon import connection
from proxyccl.proxy.daemon.connection import daemon_process, missing_in_daemon
from support.daemons import running_daemon

RANK = """
import sys
from proxyccl import Communicator, FileBootstrap, RuntimeUnavailableError
try:
    with Communicator(FileBootstrap(sys.argv[1], int(sys.argv[2]), 2), "host", timeout=60):
        print("met")
except RuntimeUnavailableError as error:
    print(error)
"""
ELSEWHERE = ["unshare", "--pid", "--fork"]


@pytest.mark.host_only("any runtime will do")
@pytest.mark.parametrize(
    ("mount", "refusal"),
    [
        (["--mount-proc"], "rank 0 and rank 1 of host .* are in different PID namespaces.*--pid=host.*hostPID"),
        ([], "rank 1: /proc does not show this PID namespace.*unshare --mount-proc"),
    ],
    ids=["own /proc", "the host's /proc"],
)
def test_all_ranks_hear_that_one_is_in_another_namespace(mount: list[str], refusal: str, tmp_path: Path) -> None:
    able = subprocess.run([*ELSEWHERE, *mount, "true"], capture_output=True, text=True, check=False, timeout=120)
    if able.returncode:
        pytest.skip(f"no PID namespace can be made here: {able.stderr.strip()}")
    starts: list[list[str]] = [[], [*ELSEWHERE, *mount]]
    ranks = [
        subprocess.Popen(
            [*start, sys.executable, "-c", RANK, str(tmp_path), str(rank)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, start in enumerate(starts)
    ]  # fmt: skip
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert re.search(refusal, out), err


def test_namespaces_count_for_each_host() -> None:
    a, b, unknown = Whereabouts("a/1", "pid:[1]"), Whereabouts("b/2", "pid:[2]"), Whereabouts("c/3", "")
    require_shared_namespaces([a, b, a, b, unknown])
    with pytest.raises(RuntimeUnavailableError, match="ranks 0, 2 and rank 1 of host a are in different PID names"):
        require_shared_namespaces([a, Whereabouts("a/1", "pid:[2]"), a, b])
    with pytest.raises(RuntimeUnavailableError, match="ranks 1, 2: /proc does not show"):
        require_shared_namespaces([a, unknown, unknown])


def test_a_node_daemon_in_another_namespace_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "socket"
    monkeypatch.setenv("PROXYCCL_DAEMON_SOCKET", str(path))
    with running_daemon(path) as daemon:
        number = daemon.process.pid
        assert daemon_process(path) == number
        monkeypatch.setattr(connection, "peer_credentials", lambda _: (0, os.geteuid()))  # as seen from outside
        refusal = f"another PID namespace, where it is process {number}, .*--pid=host"
        with pytest.raises(RuntimeUnavailableError, match=refusal):
            daemon_process(path)
        assert "another PID namespace" in missing_in_daemon(10)[0]
