"""The machine's Soft-RoCE devices, and the wire between them, which tests can disturb and cut."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

IN_MACHINE = "SOFT_ROCE_DEVICES" in os.environ
DEVICES = tuple(os.environ.get("SOFT_ROCE_DEVICES", "").split(","))
INTERFACES = tuple(os.environ.get("SOFT_ROCE_INTERFACES", "").split(","))
ADDRESSES = tuple(os.environ.get("SOFT_ROCE_ADDRESSES", "").split(","))
WIRE_SCRIPT = Path(__file__).with_name("wire.sh")


def run(*command: str) -> str:
    """Returns the output of a command. Raises CalledProcessError, with the output in a note, if the command fails."""
    try:
        done = subprocess.run(command, check=True, timeout=30, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        error.add_note(error.stdout + error.stderr)
        raise
    return done.stdout


def packets_sent(interface: str) -> int:
    """Returns the number of packets sent on an interface since the machine started."""
    return int(Path("/sys/class/net", interface, "statistics/tx_packets").read_text())


def add_wire(first: int) -> None:
    """Adds a pair of devices, such as rxe2 and rxe3 if `first` is 2, and the wire between them, until `remove_wire`."""
    run("sh", str(WIRE_SCRIPT), "wire", str(first))


def remove_wire(first: int) -> None:
    for end in (first, first + 1):
        run("rdma", "link", "delete", f"rxe{end}")
        run("ip", "rule", "delete", "pref", "1", "iif", f"veth{end}")
        run("ip", "rule", "delete", "to", f"10.9.{first}.{end - first + 1}")
    run("ip", "link", "delete", f"veth{first}")


class Wire:
    """The wire between two devices. End n is at device n. `first` is the number of the first end's interface: 0 for the
    wire that the machine has from its start, otherwise that of `add_wire`.
    """

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._interfaces = [f"veth{first}", f"veth{first + 1}"] if first else INTERFACES
        self._disturbed: set[str] = set()
        self._cut = False

    def disturb(self, *netem: str) -> None:
        """Disturbs both ends by netem, with the arguments of tc, such as disturb("loss", "3%", "delay", "1ms")."""
        for interface in self._interfaces:
            run("tc", "qdisc", "replace", "dev", interface, "root", "netem", *netem)
            self._disturbed.add(interface)

    def lose_all(self) -> None:
        """Loses all packets, until `restore`. The ports stay active, and both devices report failures of requests. In
        contrast, a Soft-RoCE device whose port is down does not always report that a request fails.
        """
        self.disturb("loss", "100%")

    def cut(self, end: int) -> None:
        """Sets the interface of one end down, until `restore`.

        The ports of both devices go down. Requests of device `end` fail immediately; requests of the other device are
        lost.
        """
        run("ip", "link", "set", self._interfaces[end], "down")
        self._cut = True

    def restore(self) -> None:
        """Removes disturbances, and sets both ends up. Returns when both devices are active."""
        while self._disturbed:
            run("tc", "qdisc", "del", "dev", self._disturbed.pop(), "root")
        if self._cut:
            run("sh", str(WIRE_SCRIPT), "restore", str(self._first))
            self._cut = False
