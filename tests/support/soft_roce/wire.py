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
    """Runs a tool and returns its output. Raises CalledProcessError, with the output in a note, if it fails."""
    try:
        done = subprocess.run(command, check=True, timeout=30, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        error.add_note(error.stdout + error.stderr)
        raise
    return done.stdout


def packets_sent(interface: str) -> int:
    """Returns the number of packets sent on an interface since the machine started."""
    return int(Path("/sys/class/net", interface, "statistics/tx_packets").read_text())


class Wire:
    """The wire between the two devices. End n is at device n."""

    def __init__(self) -> None:
        self._disturbed: set[str] = set()
        self._cut = False

    def disturb(self, *netem: str) -> None:
        """Disturbs both ends by netem, with the arguments of tc, such as disturb("loss", "3%", "delay", "1ms")."""
        for interface in INTERFACES:
            run("tc", "qdisc", "replace", "dev", interface, "root", "netem", *netem)
            self._disturbed.add(interface)

    def cut(self, end: int) -> None:
        """Sets the interface of one end down, until `restore`.

        The ports of both devices go down. Requests of device `end` fail immediately; requests of the other device are
        lost.
        """
        run("ip", "link", "set", INTERFACES[end], "down")
        self._cut = True

    def restore(self) -> None:
        """Removes disturbances, and sets both ends up. Returns when both devices are active."""
        while self._disturbed:
            run("tc", "qdisc", "del", "dev", self._disturbed.pop(), "root")
        if self._cut:
            run("sh", str(WIRE_SCRIPT), "restore")
            self._cut = False
