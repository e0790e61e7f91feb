"""Two ranks in two machines joined by a wire: the RDMA example, a collective, an abort, and a lost peer.

python tests/rdma/soft_roce/two_machines.py in both machines: machine.py --nodes 2 -- ...

Everything except the lost peer runs without and with a node daemon in each machine.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent.parent / "examples"))

import gpu_data_interchange
import numpy as np

from proxyccl import AbortedError, Communicator, PeerLostError, ProxyCCLError, WaitTimeoutError
from support.daemons import running_daemon
from support.soft_roce.kernels import KERNELS

PORT = 7471
TIMEOUT = 60.0


class PairBootstrap:
    """A bootstrap of two ranks over TCP; rank 0 listens. Raises OSError if the ranks do not connect in time."""

    world_size = 2

    def __init__(self, rank: int, own: str, peer: str) -> None:
        self.rank = rank
        made = self._accept(own) if rank == 0 else self._connect(peer)
        made.setblocking(True)
        self._connection = Connection(made.detach())

    @staticmethod
    def _accept(own: str) -> socket.socket:
        with socket.create_server((own, PORT)) as listener:
            listener.settimeout(TIMEOUT)
            return listener.accept()[0]

    @staticmethod
    def _connect(peer: str) -> socket.socket:
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                return socket.create_connection((peer, PORT), timeout=TIMEOUT)
            except OSError:  # the peer does not listen yet
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    def all_gather(self, data: bytes, timeout: float, give_up: Callable[[], None]) -> list[bytes]:
        deadline = time.monotonic() + timeout
        self._connection.send_bytes(data)
        while not self._connection.poll(0.02):
            give_up()
            if time.monotonic() > deadline:
                raise WaitTimeoutError("the other rank did not come in time", rank=self.rank, operation="bootstrap")
        theirs = self._connection.recv_bytes()
        return [data, theirs] if self.rank == 0 else [theirs, data]

    def close(self) -> None:
        self._connection.close()


def sent_packets() -> int:
    device = os.environ["SOFT_ROCE_DEVICES"]
    return int(Path("/sys/class/infiniband", device, "ports/1/hw_counters/sent_pkts").read_text())


def example(bootstrap: PairBootstrap) -> None:
    before = sent_packets()
    assert gpu_data_interchange.main(bootstrap) == 0
    assert sent_packets() > before


def collectives(bootstrap: PairBootstrap) -> None:
    with Communicator(bootstrap) as comm:
        assert comm.topology.spans_hosts
        assert [comm.topology.node_count, comm.local_world_size] == [2, 1]
        assert comm.transport(1 - comm.rank) == "verbs"
        x = np.arange(5003, dtype=np.int64) * (comm.rank + 1)
        comm.all_reduce(x)
        assert np.array_equal(x, 3 * np.arange(5003))


def ended_by(bootstrap: PairBootstrap, end: Callable[[Communicator], None]) -> ProxyCCLError | None:
    """Lets rank 1 end a communicator while a kernel of rank 0 waits for rank 1. Returns rank 0's error."""
    comm = Communicator(bootstrap)
    channels = comm.proxy_channels(comm.empty(8, "uint8"))
    if comm.rank == 0:
        comm.compile(KERNELS, "wait")(1, 1, channels)
    bootstrap.all_gather(b"", TIMEOUT, lambda: None)
    told = None
    try:
        if comm.rank == 0:
            comm.synchronize()
        else:
            end(comm)
    except ProxyCCLError as error:
        told = error
    comm.close()
    return told


def abort(bootstrap: PairBootstrap) -> None:
    told = ended_by(bootstrap, lambda comm: comm.abort("enough"))
    if bootstrap.rank == 0:
        assert isinstance(told, AbortedError), told
        assert told.rank == 1


def lost_peer(bootstrap: PairBootstrap) -> None:
    told = ended_by(bootstrap, lambda _: os._exit(0))
    assert isinstance(told, PeerLostError), told
    assert told.peer == 1


def in_daemon(bootstrap: PairBootstrap) -> None:
    """Runs the example, collectives and an abort with a node daemon in each machine."""
    with tempfile.TemporaryDirectory() as directory, running_daemon(Path(directory, "socket")) as daemon:
        os.environ |= {"PROXYCCL_PROXY": "daemon", "PROXYCCL_DAEMON_SOCKET": str(daemon.path)}
        for step in (example, collectives, abort):
            step(bootstrap)
        del os.environ["PROXYCCL_PROXY"]
    assert daemon.ended == 0, daemon.log


def main() -> None:
    os.environ["PROXYCCL_TIMEOUT"] = str(TIMEOUT)  # emulated machines are slow, so waits get a long time-out
    rank = int(os.environ["SOFT_ROCE_NODE"])
    bootstrap = PairBootstrap(rank, os.environ["SOFT_ROCE_ADDRESSES"], os.environ["SOFT_ROCE_PEER"])
    for step in (example, collectives, abort, in_daemon, lost_peer):  # lost_peer is the last, because it ends rank 1
        step(bootstrap)
        print(f"OK: {step.__name__}", flush=True)


if __name__ == "__main__":
    main()
