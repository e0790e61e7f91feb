"""Agents as `proxyccl info` and `top` see them."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from proxyccl.channels.transfers import published
from proxyccl.channels.transfers.published import agents_text, find_agents
from proxyccl.channels.transfers.tracing import AgentTracer
from proxyccl.device.process.user_directories import runtime_directory
from proxyccl.tools.info import findings, show
from proxyccl.tools.trace import write_trace
from proxyccl.transfer import Agent
from support.agents import Pair, child, force_path

pytestmark = pytest.mark.host_only("agents move the host's memory, whatever the runtime")


def seen(name: str, pid: int | None = None) -> list[str]:
    """Returns the peers and paths of agents with this name in process `pid`, by default this process. Other processes
    run concurrent tests, which also have agents.
    """
    return [each.reaches for each in find_agents() if (each.name, each.pid) == (name, pid or os.getpid())]


def test_each_links_path_is_named(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    assert seen("a") == ["no peer so far"]
    force_path(pair.a, "tcp")
    with caplog.at_level(logging.INFO, "proxyccl.transfer"):
        pair.a.connect("b")
    assert "agent a reaches agent b by tcp" in caplog.messages
    assert seen("a") == ["b by tcp"]
    assert any(found.name == "a" and "reaches b by tcp" in found.detail for found in findings()["Agents"])
    assert "agent a: reaches b by tcp" in agents_text()
    pair.a.remove("b")
    assert seen("a") == ["no peer so far"]
    pair.a.close()
    assert seen("a") == []


def test_names_of_other_programs_stay_on_their_lines() -> None:
    name = "a\nagent fake: reaches nobody\x1b[31m\u202e"
    with Agent(name) as a, Agent("b") as b:
        b.add(a.metadata())
        b.connect(name)
        out = io.StringIO()
        show({"Agents": [found for found in findings()["Agents"] if f"process {os.getpid()}" in found.detail]}, out)
        lines = [*out.getvalue().splitlines(), *agents_text().splitlines()]
    assert all(line.isprintable() for line in lines)
    assert not any(line.lstrip(" +").startswith("agent fake") for line in lines)
    escaped = r"a\nagent fake: reaches nobody\x1b[31m\u202e"
    assert any(line.startswith(f"agent b: reaches {escaped} by ") for line in lines)


def test_a_trace_lists_transfers_and_their_paths(pair: Pair, tmp_path: Path) -> None:
    (agent,) = [each for each in find_agents() if each.name == "a" and each.pid == os.getpid()]
    transfer = pair.a.prepare("write", "b", pair.blocks((0, 0, 100), (200, 300, 100)))
    transfer.start().wait()  # before anybody traces
    tracer = AgentTracer(agent, 60)
    transfer.start().wait()
    read = pair.a.prepare("read", "b", pair.whole())
    read.start().wait()
    tracer.fetch()
    for _ in range(5000):  # more transfers than the agent's trace holds
        transfer.start().wait()
    traced = tracer.stop()
    first, second = traced.transfers[:2]
    assert (first.peer, first.path, first.writes, first.nbytes, first.blocks, first.end) == (
        *("b", "process_vm", True, 200, 2),
        "done",
    )
    assert (second.writes, second.nbytes, second.blocks) == (False, len(pair.ours), 1)
    assert 0 < first.posted_ns < first.ended_ns < second.ended_ns
    assert traced.lost == 5000 - 4095
    assert len(traced.transfers) == 2 + 4095
    file = tmp_path / "trace.json"
    write_trace(file, [], [traced])
    events = json.loads(file.read_text())["traceEvents"]
    names = [each["args"]["name"] for each in events if each["ph"] == "M" and "name" in each["args"]]
    assert any(name.startswith("agent a (") for name in names)
    assert "agent b by process_vm" in names
    spans = [each for each in events if each["ph"] == "X"]
    assert {"write 200 B in 2 blocks", "read 1 MiB"} == {each["name"] for each in spans}
    assert all(each["args"]["path"] == "process_vm" for each in spans)


def test_a_killed_agents_file_is_removed() -> None:
    def body(connection: socket.socket) -> None:
        agent = Agent("to be killed", listen=())
        agent.register(np.zeros(1, np.uint8))
        connection.send(b"ready")
        connection.recv(1)

    with child(body) as process:
        process.receive()
        assert seen("to be killed", process.pid)
        process.kill()
        assert seen("to be killed", process.pid) == []
        assert not list(runtime_directory().glob(f"{process.pid}-*.agent"))


def test_an_agent_that_is_not_closed_leaves_no_file() -> None:
    program = "import os; from proxyccl.transfer import Agent; agent = Agent('open', listen=()); print(os.getpid())"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120)
    pid = done.stdout.strip()
    assert not list(runtime_directory().glob(f"{pid}-*.agent"))


def test_an_agent_works_where_its_process_cannot_be_looked_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(published, "this_process", refuse)
    with Agent("unseen", listen=()) as agent:
        agent.register(np.zeros(10, np.uint8))
    assert "cannot see agent unseen" in caplog.text


@pytest.mark.parametrize("removes", [True, False])
def test_former_peers_leave_neither_descriptors_nor_more_labels(removes: bool) -> None:
    with Agent("meets many") as agent:
        memory = np.zeros(8, np.uint8)
        region = agent.register(memory)
        before = len(os.listdir("/proc/self/fd"))
        for number in range(200):
            with Agent(f"peer {number}") as peer:
                there = peer.register(memory)
                agent.add(peer.metadata())
                agent.read(peer.name, [(region.address, there.address, 0)]).wait()
                if removes:
                    agent.remove(peer.name)
        deadline = time.monotonic() + 20.0
        while (seen("meets many") != ["no peer so far"] or len(os.listdir("/proc/self/fd")) > before + 20) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.01)
        assert seen("meets many") == ["no peer so far"]
        assert len(os.listdir("/proc/self/fd")) <= before + 20
        (found,) = [each for each in find_agents() if each.name == "meets many" and each.pid == os.getpid()]
        assert len(found.labels) < 100
        assert any(label.peer == "peer 199" for label in found.labels)
