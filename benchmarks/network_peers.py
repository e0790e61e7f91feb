"""What a network carries by others' measure: iperf3's one stream of TCP, and libfabric's own fi_pingpong.

Both are Debian's packages (iperf3, libfabric-bin). A server runs beside its client, on the interface of an address.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PORT = 47592  # both programs', one after the other
_SECONDS = 2
_MESSAGES = 2000
_LIMIT = 60.0
_TRIES = 50  # of a client, until the server listens


def missing_peers() -> list[str]:
    """The programs that are not installed."""
    return [program for program in ("iperf3", "fi_pingpong") if shutil.which(program) is None]


@contextmanager
def _server(*command: str) -> Iterator[None]:
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        server.kill()
        server.wait()


def _client(result: str, *command: str) -> str:
    """The output of a client once it has a certain text: before, the server does not listen."""
    for _ in range(_TRIES):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT)
        if done.returncode == 0 and result in done.stdout:
            return done.stdout
        time.sleep(0.1)
    raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")


def iperf3_bytes_per_second(address: str) -> float:
    """Bytes a second of one TCP stream, as received."""
    with _server("iperf3", "-s", "-B", address, "-p", str(_PORT)):
        told = json.loads(_client("sum_received", "iperf3", "-c", address, "-p", str(_PORT), "-t", str(_SECONDS), "-J"))
    return float(told["end"]["sum_received"]["bits_per_second"]) / 8


def pingpong_seconds(address: str, provider: str, nbytes: int) -> float:
    """Seconds of a message one way: half a round trip of messages of that size."""
    common = ("-p", provider, "-e", "rdm", "-S", str(nbytes), "-I", str(_MESSAGES))
    with _server("fi_pingpong", *common, "-B", str(_PORT)):
        told = _client("usec/xfer", "fi_pingpong", *common, "-P", str(_PORT), address)
    header, row = (line.split() for line in told.splitlines() if re.match(r"bytes|\d", line))
    return float(row[header.index("usec/xfer")]) / 1e6
