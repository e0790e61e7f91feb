"""Runs a command in a small virtual machine with Soft-RoCE devices and this machine's files, without root.

    python tests/support/soft_roce/machine.py -- COMMAND...            one machine with two devices, joined by a wire
    python tests/support/soft_roce/machine.py --nodes 2 -- COMMAND...  two machines, one device each, joined by a wire

The command runs in the current directory. This machine's files have the same paths in the virtual machine, which
discards all changes to them. Debian's RDMA packages are installed in the virtual machine, and PYTHONPATH contains
pyverbs for virtual environments. The packages are fetched on first use.

This program prints the command's output, and exits with the command's status, or, with two machines, the first nonzero
status. Status 124 means that the time limit was reached, and 125 that a machine did not start.

In the machine:
    SOFT_ROCE_DEVICES        names of the RDMA devices, separated by commas; not set outside the machine
    SOFT_ROCE_INTERFACES     names of the devices' network interfaces, separated by commas
    SOFT_ROCE_ADDRESSES      the interfaces' addresses, separated by commas
    SOFT_ROCE_NODE           this machine's number, 0 or 1, if there are two machines
    SOFT_ROCE_PEER           the other machine's address, if there are two machines
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from fetch_machine import DIRECTORY, fetch
from initramfs import Initramfs

from support.packages.debian import UnavailableError

HERE = Path(__file__).resolve().parent
ROOT = DIRECTORY / "root"
LIBRARIES = ROOT / "usr/lib/x86_64-linux-gnu"
TIMED_OUT = 124
FAILED = 125
ADDRESSES = ("10.9.0.1", "10.9.0.2")  # wire.sh must use the same addresses


@dataclass(frozen=True)
class Wiring:
    """How a machine is connected: the argument of wire.sh, QEMU's options, and the command's environment."""

    script: str
    options: tuple[str, ...]
    environment: dict[str, str]


def pair() -> Wiring:
    """Returns the wiring of two devices in one machine."""
    return Wiring(
        "pair",
        (),
        {
            "SOFT_ROCE_DEVICES": "rxe0,rxe1",
            "SOFT_ROCE_INTERFACES": "veth0,veth1",
            "SOFT_ROCE_ADDRESSES": ",".join(ADDRESSES),
        },
    )


def node(number: int, directory: Path) -> Wiring:
    """Returns the wiring of machine `number` of two, which are joined by sockets in `directory`."""
    ends = {"local": number, "remote": 1 - number}
    sockets = [f"{end}.type=unix,{end}.path={directory}/wire{owner}" for end, owner in ends.items()]
    return Wiring(
        f"node {number}",
        (
            *("-netdev", f"dgram,id=wire,{','.join(sockets)}"),
            *("-device", f"virtio-net-pci,netdev=wire,mac=52:54:00:00:00:0{number + 1}"),
        ),
        {
            "SOFT_ROCE_DEVICES": "rxe0",
            "SOFT_ROCE_INTERFACES": "eth0",
            "SOFT_ROCE_ADDRESSES": ADDRESSES[number],
            "SOFT_ROCE_NODE": str(number),
            "SOFT_ROCE_PEER": ADDRESSES[1 - number],
        },
    )


def installed(program: str) -> str:
    """Returns the path of a program, fetched or installed."""
    found = shutil.which(program, path=os.pathsep.join((str(ROOT / "usr/bin"), os.environ.get("PATH", os.defpath))))
    if found is None:
        raise UnavailableError(f"Debian's packages no longer have {program}")
    return found


def first_file_system(command: list[str], environment: dict[str, str]) -> bytes:
    """Returns the initramfs: busybox, modules, init, and the command that init runs."""
    archive = Initramfs()
    for directory in ("bin", "dev", "proc", "sys", "modules", "host", "packages", "writable", "new"):
        archive.directory(directory)
    archive.console()
    archive.file("bin/busybox", Path(installed("busybox")).read_bytes(), executable=True)
    archive.file("init", (HERE / "init").read_bytes(), executable=True)
    archive.file("wire.sh", (HERE / "wire.sh").read_bytes())
    for module in sorted((DIRECTORY / "modules").iterdir()):
        archive.file(f"modules/{module.name}", module.read_bytes())
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    script = [*exports, f"cd {shlex.quote(os.getcwd())} || exit {FAILED}", f"exec {shlex.join(command)}"]
    archive.file("command", "\n".join((*script, "")).encode())
    return archive.finish()


class Machine:
    """A virtual machine, started by the constructor, with its files in `directory`."""

    def __init__(
        self, directory: Path, command: list[str], wiring: Wiring, *, memory: int, cores: int, name: str | None = None
    ) -> None:
        self._name = name
        self._console = directory / "console"
        self._status = directory / "status"
        initramfs = directory / "initramfs"
        environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(Path.home()),
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(DIRECTORY / "python"),
            **wiring.environment,
        }
        initramfs.write_bytes(first_file_system(command, environment))
        # panic=-1 reboots a kernel that panics, and -no-reboot makes QEMU exit at a reboot. tsc=reliable is needed with
        # two cores, because the kernel would otherwise read clocks from a slow device.
        kernel = f'console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable WIRE="{wiring.script}"'
        self._process = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL"),  # kills the machine when this program ends in any manner
                installed("qemu-system-x86_64"),
                *("-L", str(ROOT / "usr/share/qemu"), "-L", str(ROOT / "usr/share/seabios")),
                *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
                *("-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max"),
                *("-smp", str(cores), "-m", f"{memory}M"),
                *("-kernel", str(DIRECTORY / "kernel"), "-initrd", str(initramfs), "-append", kernel),
                *("-serial", f"file:{self._console}"),
                *("-device", "virtio-serial-pci"),
                *("-chardev", "file,id=output,path=/dev/stdout", "-device", "virtserialport,nr=1,chardev=output"),
                *("-chardev", f"file,id=status,path={self._status}", "-device", "virtserialport,nr=2,chardev=status"),
                *self._share("host", Path("/")),
                *self._share("packages", ROOT),
                *wiring.options,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, "LD_LIBRARY_PATH": str(LIBRARIES)},
        )

    def copy_output(self) -> None:
        """Prints the command's output until the machine ends. If the machine has a name, the name precedes each
        line.
        """
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        for piece in iter(lambda: os.read(output, 1 << 16), b"") if self._name is None else self._process.stdout:
            sys.stdout.buffer.write(piece if self._name is None else f"[{self._name}] ".encode() + piece)
            sys.stdout.buffer.flush()

    def wait(self, deadline: float) -> int:
        """Waits until the machine ends. Returns the command's exit status, or TIMED_OUT or FAILED."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return self._explain(TIMED_OUT, "did not end in time")
        status = self._status.read_text().strip() if self._status.exists() else ""
        return int(status) if status else self._explain(FAILED, "ended before its command did")

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    @staticmethod
    def _share(tag: str, path: Path) -> tuple[str, ...]:
        """Returns QEMU options that share a directory with the machine, read-only."""
        local = f"local,id={tag},path={path},security_model=none,readonly=on,multidevs=remap"
        return ("-fsdev", local, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}")

    def _explain(self, status: int, what: str) -> int:
        """Writes the console's last error to stderr. Returns `status`."""
        lines = self._console.read_text(errors="replace").splitlines() if self._console.exists() else []
        told = [line for line in lines if "Kernel panic" in line or line.startswith("init: ")]
        name = "the machine" if self._name is None else f"machine {self._name}"
        sys.stderr.write(f"machine.py: {name} {what}; {told[-1] if told else 'it told no cause'}\n")
        sys.stderr.write("The last lines of its console:\n" + "".join(f"  {line}\n" for line in lines[-15:]))
        return status


def run(command: list[str], *, nodes: int, timeout: float, memory: int, cores: int) -> int:
    """Runs a command in one machine or in each of two machines. Returns the first nonzero exit status, or 0."""
    fetch(DIRECTORY)
    deadline = time.monotonic() + timeout
    machines: list[Machine] = []
    with tempfile.TemporaryDirectory(prefix="soft-roce-") as temporary:
        try:
            for number in range(nodes):
                directory = Path(temporary, str(number))
                directory.mkdir()
                wiring = pair() if nodes == 1 else node(number, Path(temporary))
                name = None if nodes == 1 else str(number)
                machines.append(Machine(directory, command, wiring, memory=memory, cores=cores, name=name))
            copying = [threading.Thread(target=machine.copy_output) for machine in machines]
            for thread in copying:
                thread.start()
            statuses = [machine.wait(deadline) for machine in machines]
        finally:
            for machine in machines:
                machine.kill()
        for thread in copying:
            thread.join()
    return next((status for status in statuses if status), 0)


def end(signal_number: int, frame: FrameType | None) -> None:
    """Exits by an exception, so that `run` kills the machines."""
    sys.exit(128 + signal_number)


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=1, help="machines (default 1)")
    parser.add_argument("--timeout", type=float, default=840, metavar="S", help="seconds for the whole (default 840)")
    parser.add_argument("--memory", type=int, default=2048, metavar="MiB", help="of each machine (default 2048)")
    parser.add_argument("--cores", type=int, default=2, help="of each machine (default 2)")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="what to run, after --")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, end)
    try:
        return run(
            options.command,
            nodes=options.nodes,
            timeout=options.timeout,
            memory=options.memory,
            cores=options.cores,
        )
    except UnavailableError as error:
        sys.stderr.write(f"machine.py: {error}\n")
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
