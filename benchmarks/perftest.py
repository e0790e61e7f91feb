"""Runs perftest's ib_write_bw between two RDMA devices of this machine, and parses its output."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from proxyccl.device.errors import ProxyCCLError

_TIMEOUT = 60.0
_PORT = 18515  # TCP port of the server


def bandwidth_of(output: str) -> float:
    """Returns the average bandwidth in bytes per second, from the output of ib_write_bw.

    Raises:
        ValueError: the output does not show exactly one message size.
    """
    lines = [line.split() for line in output.splitlines()]
    titles = next((i for i, words in enumerate(lines) if words[:1] == ["#bytes"]), len(lines))
    rows = [words for words in lines[titles + 1 :] if words and words[0].isdigit()]
    if len(rows) != 1 or "BW average[MB/sec]" not in output:
        raise ValueError(f"no bandwidth in the output of ib_write_bw: {output.strip() or 'it is empty'}")
    _, _, _, average, *_ = rows[0]
    return float(average) * (1 << 20)  # perftest calls a MiB a "MB"


class Perftest:
    """Runs ib_write_bw as two processes, one for each device. The process on the first device writes.

    Args:
        program: path of ib_write_bw.
        names: the two devices.
        gid_index: index of the GID to use, on both devices.
        depth: the maximum number of outstanding work requests.
    """

    def __init__(self, program: str, names: tuple[str, str], gid_index: int, depth: int) -> None:
        self._names = names
        self._command = [program, "-F", "-q", "1", "-t", str(depth), "-x", str(gid_index), "-p", str(_PORT)]

    def __call__(self, nbytes: int, count: int) -> float:
        """Returns the seconds that `count` writes of `nbytes` bytes take."""
        near, far = ([*self._command, "-s", str(nbytes), "-n", str(count), "-d", name] for name in self._names)
        with subprocess.Popen(far, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
            try:
                self._wait_for(server)
                done = subprocess.run(
                    [*near, "127.0.0.1"], capture_output=True, text=True, timeout=_TIMEOUT, check=False
                )
                if done.returncode:
                    raise ProxyCCLError(f"ib_write_bw ended with {done.returncode}: {done.stdout}{done.stderr}")
                server.communicate(timeout=_TIMEOUT)
            finally:
                server.kill()
        return nbytes * count / bandwidth_of(done.stdout)

    def _wait_for(self, server: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + _TIMEOUT
        listening = f":{_PORT:04X} 00000000:0000 0A"
        while listening not in Path("/proc/net/tcp").read_text():
            if server.poll() is not None or time.monotonic() > deadline:
                raise ProxyCCLError("ib_write_bw's server does not listen")
            time.sleep(0.05)

    def version(self) -> str:
        command = [self._command[0], "--version"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        return done.stdout.replace("Version:", "").strip()
