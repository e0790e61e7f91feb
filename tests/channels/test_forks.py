"""The calls and the exit of a forked child do not affect the parent's communicator."""

from __future__ import annotations

import os
import socket

import pytest

from proxyccl.device.process import forks
from support.paths import TESTS
from support.processes import run_processes


@pytest.mark.host_only(reason="a driver of a GPU does not work in a fork's child")
@pytest.mark.parametrize("place", ["thread", "process"])
def test_a_child_of_a_fork_leaves_the_communicator_alone(place: str) -> None:
    ends = run_processes(2, TESTS / "support" / "programs" / "forks.py", env={"PROXYCCL_PROXY": place})
    for end in ends:
        assert end.returncode == 0, end.stderr
        assert end.stdout.endswith("went on\n")


def test_a_child_closes_the_sockets_that_tell_of_the_parents_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        forks.keep_from_children(ours)
        told = os.pipe()
        if (child := os.fork()) == 0:
            os.write(told[1], b"closed" if ours.fileno() < 0 else b"open")
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(told[0], 10) == b"closed"
        ours.send(b"x")  # `send` would raise if the child had shut down the socket
        assert theirs.recv(1) == b"x"
        for descriptor in told:
            os.close(descriptor)


def test_a_child_of_a_child_closes_nothing_that_the_child_has_closed() -> None:
    """The number of a closed descriptor may be that of another file by then."""

    class File:
        closed = 0

        def close(self) -> None:
            self.closed += 1

    file, told = File(), os.pipe()
    forks.keep_from_children(file)
    if (child := os.fork()) == 0:
        if (grandchild := os.fork()) == 0:
            os.write(told[1], b"%d" % file.closed)
            os._exit(0)
        os.waitpid(grandchild, 0)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(told[0], 10) == b"1"
    for descriptor in told:
        os.close(descriptor)
