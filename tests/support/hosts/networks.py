"""Emulates hosts for tests: network namespaces with their own host names, joined by veth pairs to one switch.

The library treats processes in different namespaces as ranks on different hosts.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import pytest

from proxyccl.proxy._engine import lib
from support.forked import Forks, PipedFork
from support.hosts.secure_shell import SecureShell
from support.packages.debian import UnavailableError
from support.packages.fabric import PACKAGES, environment, unavailable_reason
from support.paths import ROOT

INTERFACE = "eth0"
_STEP_SECONDS = 30
_BY_NAME = {"PROXYCCL_HOSTS": "name"}  # distinguishes hosts by name, because the hosts share a PID namespace
_TESTS = str(ROOT / "tests")
_NETWORK = 0x40000000  # CLONE_NEWNET
_TEMPLATE = Path(__file__).with_name("template.py")


class Hosts:
    """Emulated hosts, as a context manager.

    Args:
        count: number of hosts.
        ipv4: whether the hosts have IPv4 addresses in addition to IPv6 ones.
        interfaces: number of interfaces of each host, eth0, eth1, …, each on its own network.
        secure_shell: directory for the keys of sshd, which then runs on each host; None for no sshd.

    Raises:
        UnavailableError: this process may not make namespaces, or programs are missing.
    """

    def __init__(self, count: int, *, ipv4: bool = True, interfaces: int = 1, secure_shell: Path | None = None) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        self._environment = {**environment(), **_BY_NAME}
        self._secure_shell: SecureShell | None = None
        self._forks: list[Forks] = []
        for tool in ("unshare", "nsenter"):
            if shutil.which(tool) is None:
                raise UnavailableError(f"there is no {tool} (util-linux)")
        try:
            switch = self._hold("switch")
            for index in range(interfaces):  # on one bridge, a host's interface may answer for the other interfaces
                self._ip(switch, "link", "add", f"bridge{index}", "type", "bridge")
                self._ip(switch, "link", "set", f"bridge{index}", "up")
            for number in range(count):
                self._add(switch, number, interfaces, ipv4=ipv4)
                self._forks.append(Forks(self._with_tests(self._environment), self.inside(number), _TEMPLATE))
            if secure_shell is not None:
                self._secure_shell = SecureShell([self.inside(host) for host in range(count)], secure_shell)
        except BaseException:
            self.close()
            raise

    def _hold(self, name: str) -> int:
        """Starts a process that holds a host's namespaces until its standard input is closed. Returns the process's
        index in `_holders`.
        """
        script = f"hostname {name} && echo made && exec cat"
        holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != b"made\n":
            raise UnavailableError(f"no network namespaces: {holder.stderr.read().decode().strip()}")
        return len(self._holders) - 1

    def _add(self, switch: int, number: int, interfaces: int, *, ipv4: bool) -> None:
        host = self._hold(f"host{number}")
        self._ip(host, "link", "set", "lo", "up")
        for index in range(interfaces):
            port, name, namespace = _port(number, index), f"eth{index}", str(self._holders[host].pid)
            self._ip(switch, *f"link add {port} type veth peer name {name} netns {namespace}".split())
            self._ip(switch, *f"link set {port} master bridge{index} up".split())
            if ipv4:
                self._ip(host, *f"addr add {self.address(number, index)}/24 dev {name}".split())
            self._ip(host, *f"addr add fd77:{index}::{number + 1}/64 dev {name} nodad".split())
            self._ip(host, "link", "set", name, "up")

    def _ip(self, place: int, *arguments: str) -> None:
        self._tool("ip", place, *arguments)

    def _tool(self, tool: str, place: int, *arguments: str) -> str:
        done = subprocess.run(
            [*self._inside(place), PACKAGES.program(tool), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=_STEP_SECONDS,
            env=self._environment,
        )
        if done.returncode:
            raise UnavailableError(f"{tool} {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def _inside(self, place: int) -> list[str]:
        return ["nsenter", "--net", "--uts", "--target", str(self._holders[place].pid), "--"]

    @property
    def environment(self) -> dict[str, str]:
        """An environment in which programs find libfabric."""
        return self._environment

    def inside(self, host: int) -> list[str]:
        """Returns a command prefix that executes a command on a host."""
        return self._inside(host + 1)

    def enter(self, host: int) -> None:
        """Moves the calling thread, with the threads that it starts afterwards, to a host's network."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/proc/{self._holders[host + 1].pid}/ns/net") as namespace:
            if libc.setns(namespace.fileno(), _NETWORK):
                raise OSError(ctypes.get_errno(), "setns failed")

    def start(self, host: int, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts Python on a host, with libfabric on the library path, and stdout and stderr in one pipe."""
        return self._run(host, [sys.executable, *arguments], {**self._environment, **(env or {})})

    def fork(self, host: int, program: str, *arguments: str, env: dict[str, str]) -> PipedFork:
        """Starts a program like `start`, but as a fork (forked.py)."""
        return PipedFork([program, *arguments], {**self._environment, **env}, self._forks[host])

    @staticmethod
    def _with_tests(environment: Mapping[str, str]) -> dict[str, str]:
        """Returns an environment in which Python also finds the modules of tests/support."""
        return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, (_TESTS, environment.get("PYTHONPATH"))))}

    def _run(self, host: int, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.inside(host), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._with_tests(environment),
        )

    @staticmethod
    def address(host: int, interface: int = 0) -> str:
        """Returns the IPv4 address of a host's interface."""
        return f"10.77.{interface}.{host + 1}"

    def mpiexec(
        self, ranks: Sequence[int], command: Sequence[str], directory: Path, *, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Starts MPICH's mpiexec on the first host. The option ``-f hosts`` starts `ranks[i]` ranks on host i by ssh.

        The ranks use MPI's own libfabric.
        """
        assert self._secure_shell is not None, "made without secure_shell"
        hosts = directory / "hosts"
        hosts.write_text("".join(f"{self.address(host)}:{count}\n" for host, count in enumerate(ranks)))
        mpiexec = str(Path(sys.executable).with_name("mpiexec"))
        launcher = ("-launcher", "ssh", "-launcher-exec", str(self._secure_shell.client))
        whole = [mpiexec, "-f", str(hosts), *launcher, "-n", str(sum(ranks)), *command]
        return self._run(0, whole, {**os.environ, **_BY_NAME, **(env or {})})

    def choose_congestion_control(self, name: str) -> None:
        """Sets the TCP congestion control of all hosts, such as ``cubic``."""
        for place in range(1, len(self._holders)):
            self._tool("sh", place, "-c", f"echo {name} > /proc/sys/net/ipv4/tcp_congestion_control")

    def cut(self, host: int, interface: int = 0) -> None:
        """Disconnects a host's interface from the switch."""
        self._ip(0, "link", "set", _port(host, interface), "down")

    def lose(self, host: int, interface: int = 0) -> None:
        """Loses all packets from and to a host's interface, whose link stays up."""
        self._ip(0, "link", "set", _port(host, interface), "nomaster")

    def join(self, host: int, interface: int = 0) -> None:
        """Reconnects a host's interface to the switch after `cut` or `lose`."""
        self._ip(0, "link", "set", _port(host, interface), "master", f"bridge{interface}", "up")

    def received(self, host: int, interface: int = 0) -> int:
        """Returns the number of bytes that a host has received by an interface."""
        shown = json.loads(self._tool("ip", 0, "-json", "-stats", "link", "show", _port(host, interface)))
        return int(shown[0]["stats64"]["tx"]["bytes"])

    def disturb(self, host: int, *discipline: str, interface: int = 0) -> None:
        """Sets a queueing discipline of `tc`, such as ``tbf``, for packets to a host's interface."""
        self._tool("tc", 0, "qdisc", "add", "dev", _port(host, interface), "root", *discipline)

    def calm(self, host: int) -> None:
        """Removes the queueing discipline that `disturb` added."""
        self._tool("tc", 0, "qdisc", "del", "dev", _port(host, 0), "root")

    def close(self) -> None:
        """Ends the processes that hold the namespaces, which ends the namespaces."""
        try:
            if self._secure_shell is not None:
                self._secure_shell.close()
            for forks in self._forks:
                forks.close()
        finally:
            for holder in self._holders:
                holder.terminate()  # closing the holder's stdin may not suffice: ranks may keep the pipe open
                holder.communicate(timeout=_STEP_SECONDS)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _port(host: int, interface: int) -> str:
    """Returns the name of the switch's port for a host's interface."""
    return f"port{host}.{interface}"


def hosts_or_skip(count: int, *, ipv4: bool = True, interfaces: int = 1, secure_shell: Path | None = None) -> Hosts:
    """Returns `count` emulated hosts. Skips the test if namespaces or libfabric are not available."""
    if not lib.proxyccl_fabric_built():
        require_fabric("this build has no fabric transport: libfabric's headers were not there")
    reason = unavailable_reason()
    if reason:
        require_fabric(f"there is no libfabric: {reason}")
    try:
        return Hosts(count, ipv4=ipv4, interfaces=interfaces, secure_shell=secure_shell)
    except UnavailableError as error:
        return require_fabric(str(error))


def require_fabric(reason: str) -> NoReturn:
    """Skips the test for a reason, or fails it if ``PROXYCCL_REQUIRE_FABRIC`` is 1."""
    if os.environ.get("PROXYCCL_REQUIRE_FABRIC") == "1":
        pytest.fail(f"PROXYCCL_REQUIRE_FABRIC is 1, and {reason}")
    pytest.skip(reason)
