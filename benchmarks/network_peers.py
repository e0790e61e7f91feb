"""Measures a network with other programs: iperf3, with one TCP stream, and libfabric's fi_pingpong.

The programs are in Debian's packages iperf3 and libfabric-bin. Server and client both run on this machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PORT = 47592  # the TCP port of both programs, which do not run at the same time
_SECONDS = 2
_MESSAGES, _MOST_BYTES = 2000, 256 << 20  # number of messages in each direction
_LIMIT = 60.0
_TRIES = 50  # number of attempts of a client to connect to the server


class NetworkPeers:
    """Runs iperf3 and fi_pingpong.

    Args:
        unpacked: a directory into which the packages were unpacked; None if they are installed.

    Attributes:
        missing: the programs that are not installed.
    """

    def __init__(self, unpacked: Path | None = None) -> None:
        self._environment = dict(os.environ)
        if unpacked is not None:
            libraries = [str(path) for path in unpacked.glob("usr/lib/*-linux-gnu")]
            for name, added in (("PATH", [str(unpacked / "usr/bin")]), ("LD_LIBRARY_PATH", libraries)):
                self._environment[name] = os.pathsep.join(filter(None, (*added, os.environ.get(name))))
        path = self._environment.get("PATH")
        self.missing = [program for program in ("iperf3", "fi_pingpong") if shutil.which(program, path=path) is None]

    def iperf3_bytes_per_second(self, address: str) -> float:
        """Returns iperf3's rate of one TCP stream at the receiver, in bytes per second."""
        common = ("-p", str(_PORT))
        with self._server("iperf3", "-s", "-B", address, *common):
            told = json.loads(self._client("sum_received", "iperf3", "-c", address, *common, "-t", str(_SECONDS), "-J"))
        return float(told["end"]["sum_received"]["bits_per_second"]) / 8

    def pingpong_seconds(self, address: str, provider: str, nbytes: int) -> float:
        """Returns half of fi_pingpong's round trip, in seconds."""
        messages = min(_MESSAGES, _MOST_BYTES // nbytes)
        common = ("-p", provider, "-e", "rdm", "-S", str(nbytes), "-I", str(messages))
        with self._server("fi_pingpong", *common, "-B", str(_PORT)):
            told = self._client("usec/xfer", "fi_pingpong", *common, "-P", str(_PORT), address)
        header, row = (line.split() for line in told.splitlines() if re.match(r"bytes|\d", line))
        return float(row[header.index("usec/xfer")]) / 1e6

    @contextmanager
    def _server(self, *command: str) -> Iterator[None]:
        nowhere = subprocess.DEVNULL
        server = subprocess.Popen(command, stdout=nowhere, stderr=nowhere, env=self._environment)
        try:
            yield
        finally:
            server.kill()
            server.wait()

    def _client(self, result: str, *command: str) -> str:
        """Runs a client repeatedly until its output contains a text, because the server may not listen yet. Returns the
        output.
        """
        for _ in range(_TRIES):
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_LIMIT, env=self._environment
            )
            if done.returncode == 0 and result in done.stdout:
                return done.stdout
            time.sleep(0.1)
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
