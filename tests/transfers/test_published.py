"""Agents as `proxyccl info` and `top` see them."""

from __future__ import annotations

import logging
import os
import socket

import numpy as np
import pytest

from proxyccl.channels.transfers.published import find_agents
from proxyccl.proxy.observe.publications import publications_directory
from proxyccl.tools.info import _agents
from proxyccl.tools.top import agents_text
from proxyccl.transfer import Agent
from support.agents import Pair, child, force_path

pytestmark = pytest.mark.host_only("agents move the host's memory, whatever the runtime")


def seen(name: str, pid: int | None = None) -> list[str]:
    """A process's agents of a name, by default this one's: other tests run beside it."""
    return [each.reaches for each in find_agents() if (each.name, each.pid) == (name, pid or os.getpid())]


def test_each_links_path_is_named(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    assert seen("a") == ["no peer so far"]
    force_path(pair.a, "tcp")
    with caplog.at_level(logging.INFO, "proxyccl.transfer"):
        pair.a.connect("b")
    assert "agent a reaches agent b by tcp" in caplog.messages
    assert seen("a") == ["b by tcp"]
    assert any(found.name == "a" and "reaches b by tcp" in found.detail for found in _agents())
    assert "agent a: reaches b by tcp" in agents_text()
    pair.a.remove("b")
    assert seen("a") == ["no peer so far"]
    pair.a.close()
    assert seen("a") == []


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
        assert not list(publications_directory().glob(f"{process.pid}-*.agent"))
