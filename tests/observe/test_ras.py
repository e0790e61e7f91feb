"""Clients of NCCL's RAS subsystem: the requests of `ncclras` (NCCL 2.30, src/ras/client.cc), and SGLang's requests."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxyccl import ArgumentError, Communicator, CommunicatorError, ResourceError
from proxyccl.proxy.processes import is_stopped
from proxyccl.tools import ras
from support.daemons import running_daemon
from support.device_arrays import barrier
from support.ranks import Ranks
from support.running import TIMEOUT, wait_for

pytestmark = pytest.mark.no_proxy

NCCL_COUNTED = ["Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"]
"""ncclFuncStr of NCCL's src/init.cc: all are present in each rank's counts."""


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("NCCL_RAS_ADDR", raising=False)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Starts a server, and yields its port."""
    with ras.serve("127.0.0.1:0") as where:
        yield int(where.rpartition(":")[2])


class Client:
    """A client like `ncclras`. The answer to a status command lasts until the server closes the connection; other
    answers are one line.
    """

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT)
        self._file = self._socket.makefile("rwb")

    def ask(self, command: str) -> str:
        self._file.write(command.encode() + b"\n")
        self._file.flush()
        return self._file.readline().decode()

    def rest(self, command: str) -> str:
        """Sends a command, and returns everything that the server sends before it closes the connection."""
        self._file.write(command.encode() + b"\n")
        self._file.flush()
        text = self._file.read().decode()
        self._socket.close()
        return text


def ncclras(port: int, *, timeout: int | None = None, format: str = "", verbose: bool = False) -> str:
    """Makes the requests of `ncclras -t TIMEOUT -f FORMAT -v`, checks the answers, and returns its output."""
    client = Client(port)
    assert client.ask("CLIENT PROTOCOL 2") == "SERVER PROTOCOL 2\n"
    if timeout is not None:
        assert client.ask(f"TIMEOUT {timeout}") == "OK\n"
    if format:
        assert client.ask(f"SET FORMAT {format}") == "OK\n"
    return client.rest("VERBOSE STATUS" if verbose else "STATUS")


def status(port: int) -> Any:
    return json.loads(ncclras(port, timeout=5, format="json"))


def agreeing_calls(comm: Communicator) -> None:
    x = comm.empty(8, "float32")
    comm.all_reduce(x, out=x)
    comm.all_reduce(x, out=x)
    comm.barrier()


def test_the_status_has_each_rank_and_its_calls(port: int) -> None:
    with Ranks(2) as ranks:
        ranks.run(agreeing_calls)
        document = status(port)
        (found,) = document["communicators"]
        assert document["communicators_count"] == 1
        assert time.mktime(time.strptime(document["timestamp"], "%Y-%m-%d %H:%M:%S")) == pytest.approx(
            time.time(), abs=TIMEOUT
        )
        assert re.fullmatch("0x[0-9a-f]+", found["hash"])
        assert re.fullmatch("0x[0-9a-f]+:0x[0-9a-f]+", found["secondary_hash"])
        assert (found["size"], found["ranks_count"], found["missing_ranks_count"]) == (2, 2, 0)
        assert found["missing_ranks"] == []
        for number, rank in enumerate(found["ranks"]):
            assert (rank["rank"], rank["pid"]) == (number, os.getpid())
            assert list(rank["collective_counts"])[:5] == NCCL_COUNTED
            assert rank["collective_counts"]["AllReduce"] == 2
            assert rank["collective_counts"]["Broadcast"] == 0
            assert rank["status"] == {
                "init_state": 0,
                "async_error": 0,
                "finalize_called": False,
                "destroy_flag": False,
                "abort_flag": False,
            }
        text = ncclras(port)
        assert text.startswith("ProxyCCL version")
        assert re.search(r"^ +0 +1 +1 +2 +2 +\d +RUNNING +OK$", text, re.MULTILINE)
    assert status(port)["communicators"] == []
    assert "No communicator data collected!" in ncclras(port)


def test_sglang_sends_both_commands_at_once_and_skips_the_first_answer(port: int) -> None:
    with Ranks(2) as ranks, socket.create_connection(("127.0.0.1", port), TIMEOUT) as client:
        ranks.run(agreeing_calls)
        client.sendall(b"SET FORMAT json\nSTATUS\n")
        data = b"".join(iter(lambda: client.recv(4096), b""))
        assert len(json.loads(data[data.index(b"{") :])["communicators"][0]["ranks"]) == 2


def test_a_rank_that_is_ahead_is_a_mismatch(port: int) -> None:
    def barriers() -> list[int]:
        return [rank["collective_counts"]["barrier"] for rank in status(port)["communicators"][0]["ranks"]]

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            wait_for(lambda: barriers() == [1, 2], "rank 1 waits in its second barrier")
            text = ncclras(port, verbose=True)
            assert "MISMATCH" in text
            assert "  Communicator ranks have different barrier operation counts\n" in text
            line = r"^  Rank 1 has launched up to operation 2 -- GPU \d+ managed by process \d+ on"
            assert re.search(line, text, re.MULTILINE)
        comm.barrier()

    with Ranks(2) as ranks:
        ranks.run(agreeing_calls)
        ranks.run(body)
        assert "MISMATCH" not in ncclras(port)


def test_a_failure_is_an_error_and_an_abort(port: int) -> None:
    def fail(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.abort("enough")
        with pytest.raises(CommunicatorError):
            barrier(comm)

    with Ranks(2) as ranks:
        ranks.run(agreeing_calls)
        ranks.run(fail)
        for rank in status(port)["communicators"][0]["ranks"]:
            assert rank["status"]["abort_flag"]
            assert rank["status"]["async_error"] == 3  # ncclInternalError
        text = ncclras(port)
        assert re.search(r"ABORT +ERROR", text, re.MULTILINE)
        assert "  Asynchronous errors on 2 ranks\n" in text
        assert "enough" in text


PROGRAM = """
import sys
from proxyccl import Communicator, FileBootstrap
comm = Communicator(FileBootstrap(sys.argv[1], int(sys.argv[2]), 2), "host", timeout=60)
print("made", flush=True)
sys.stdin.read()
"""


def test_a_stopped_and_a_killed_process_are_missing(port: int, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "meeting"), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "made\n"
        assert len(status(port)["communicators"][0]["ranks"]) == 2
        for number, dead in ((signal.SIGSTOP, False), (signal.SIGKILL, True)):
            ranks[1].send_signal(number)
            if dead:
                ranks[1].wait()
            else:
                wait_for(lambda: is_stopped(ranks[1].pid), "it is stopped")
            (found,) = status(port)["communicators"]
            assert [rank["rank"] for rank in found["ranks"]] == [0]
            (missing,) = found["missing_ranks"]
            assert (missing["rank"], missing["pid"]) == (1, ranks[1].pid)
            assert missing["status"] == {"unresponsive": True, "considered_dead": dead}
            assert "INCOMPLETE" in ncclras(port)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_commands_are_not_case_sensitive_and_unknown_ones_are_answered(port: int) -> None:
    client = Client(port)
    assert client.ask("client protocol 7\r") == "SERVER PROTOCOL 2\n"
    assert client.ask("timeout soon") == "ERROR: Invalid timeout value soon\n"
    assert client.ask("Set Format XML") == "ERROR: Invalid format XML\n"
    assert client.ask("MONITOR all").startswith("ERROR: MONITOR")
    assert client.ask("DANCE") == "ERROR: Unknown command DANCE\n"
    assert client.ask("\x1b[31m\u202e\0") == "ERROR: Unknown command \\x1b[31m\\u202e\\x00\n"
    assert client.ask("TIMEOUT -1") == "ERROR: Invalid timeout value -1\n"
    assert client.ask("") == "ERROR: Unknown command \n"
    assert client.ask("set format JSON") == "OK\n"
    assert json.loads(client.rest("verbose status"))["communicators"] == []


def test_a_line_without_an_end_ends_the_connection(port: int) -> None:
    assert Client(port).rest("x" * 5000) == ""


def test_one_client_too_many_ends_the_oldest(port: int) -> None:
    silent = [socket.create_connection(("127.0.0.1", port), TIMEOUT) for _ in range(33)]
    assert silent[0].recv(1) == b""
    assert status(port)["communicators"] == []
    for each in silent:
        each.close()


def test_a_port_that_is_taken_is_refused(port: int) -> None:
    taken = f"cannot listen at port {port} of 127.0.0.1: Address already in use"
    with pytest.raises(ResourceError, match=re.escape(taken)), ras.serve(f"127.0.0.1:{port}"):
        pass


@pytest.mark.parametrize("address", ["localhost:70000", "localhost:ras"])
def test_a_wrong_address_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"^--ras: expected HOST:PORT"), ras.serve(address):
        pass
    monkeypatch.setenv("NCCL_RAS_ADDR", address)
    with pytest.raises(ArgumentError, match=r"^NCCL_RAS_ADDR: "), ras.serve(""):
        pass


def test_the_daemon_answers_at_the_address_of_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_RAS_ADDR", "127.0.0.1:0")
    with running_daemon(tmp_path / "daemon.sock", "--ras") as daemon:
        said = re.compile(r"answered at 127\.0\.0\.1:(\d+)")
        wait_for(lambda: said.search(daemon.log) is not None, "it says where")
        where = said.search(daemon.log)
        assert where is not None
        assert status(int(where[1]))["communicators"] == []
