"""An agent whose calls of `epoll_ctl` fail, as they do when a user exceeds fs.epoll.max_user_watches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.host_only("agents move the host's memory, whatever the runtime")

_REFUSES = """
#include <errno.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>
int refused = 0; /* the operation */
int epoll_ctl(int set, int operation, int descriptor, struct epoll_event *event) {
  if (operation == refused) {
    errno = ENOSPC;
    return -1;
  }
  return (int)syscall(SYS_epoll_ctl, set, operation, descriptor, event);
}
"""

_PROGRAM = """
import ctypes, os, sys, time
import numpy as np
from proxyccl.device.errors import ResourceError
from proxyccl.transfer import Agent, DisconnectedError
refused = ctypes.c_int.in_dll(ctypes.CDLL(sys.argv[1]), "refused")
ADD, MODIFY = 1, 3

def count():
    return len(os.listdir("/proc/self/fd"))

def fails(call, error):
    before = count()
    try:
        call()
    except error as raised:
        print(type(raised).__name__, raised)
    end = time.monotonic() + 30
    while count() != before and time.monotonic() < end:  # the peer's thread closes its end
        time.sleep(0.001)
    print(count() - before)

memory = np.zeros(64 << 20, np.uint8)
with Agent("a", paths=["unix"]) as a, Agent("b") as b:
    ours, theirs = a.register(memory), b.register(np.ones(64 << 20, np.uint8))
    a.add(b.metadata())
    refused.value = ADD
    fails(lambda: Agent("c"), ResourceError)
    fails(lambda: a.connect("b"), ResourceError)
    refused.value = 0
    write = a.prepare("write", "b", [(ours.address, theirs.address, 64 << 20)])
    write.start().wait()
    refused.value = MODIFY
    try:
        write.start().wait()
    except DisconnectedError as error:
        print(type(error).__name__)
    refused.value = 0
    a.remove("b")
    a.add(b.metadata())
    a.read("b", [(ours.address, theirs.address, 100)]).wait()
"""


def test_a_socket_that_is_not_watched_is_refused(tmp_path: Path) -> None:
    library = tmp_path / "refuses.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=_REFUSES, text=True, check=True)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(library)],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    agent, kept, link, left, lost = result.stdout.splitlines()
    assert (agent, kept) == ("ResourceError an agent can't be started: No space left on device", "0")
    assert (link, left) == ("ResourceError the link to agent b can't be watched: No space left on device", "0")
    assert lost == "DisconnectedError"
