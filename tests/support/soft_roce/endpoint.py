"""Runs a queue pair on a Soft-RoCE device by pyverbs, without ProxyCCL.

python endpoint.py END DESCRIPTOR      serves requests from a pipe
"""

from __future__ import annotations

import ipaddress
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from pyverbs import enums
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

from support.soft_roce.wire import ADDRESSES, DEVICES

ACCESS = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
BYTES = 128 << 10
MTU = 4096
TIMEOUT = 60.0
"""Time limit of waits in seconds."""


def gid(address: str) -> str:
    """Returns the GID of an IPv4 address."""
    return ipaddress.IPv6Address(f"::ffff:{address}").exploded


def gid_index(context: Context, address: str) -> int:
    """Returns the index of an IPv4 address's GID in the device's table."""
    table = [str(context.query_gid(1, index)) for index in range(4)]
    return table.index(gid(address))


class Endpoint:
    """A queue pair on device `end`, with 2 * BYTES bytes of memory. Writes copy the first half into the second half of
    the peer's memory.
    """

    def __init__(self, end: int) -> None:
        self._context = Context(name=DEVICES[end])
        self._gid_index = gid_index(self._context, ADDRESSES[end])
        self._domain = PD(self._context)
        self._completions = CQ(self._context, 4)
        self._memory = MR(self._domain, 2 * BYTES, ACCESS)
        capacity = QPCap(max_send_wr=4, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        init = QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=self._completions, rcq=self._completions, cap=capacity)
        self._queue_pair = QP(self._domain, init)
        self.address = {
            "gid": gid(ADDRESSES[end]),
            "queue_pair": self._queue_pair.qp_num,
            "memory": self._memory.buf + BYTES,
            "rkey": self._memory.rkey,
        }

    def connect(self, peer: dict[str, Any]) -> None:
        self._peer = peer
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = ACCESS
        self._queue_pair.to_init(attributes)
        attributes.path_mtu = self._context.query_port(1).active_mtu
        attributes.dest_qp_num = peer["queue_pair"]
        route = GlobalRoute(dgid=GID(peer["gid"]), sgid_index=self._gid_index)
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        self._queue_pair.to_rtr(attributes)
        attributes.timeout = 14
        attributes.retry_cnt = 6  # 7 means infinite retries in Soft-RoCE
        self._queue_pair.to_rts(attributes)

    def write(self, data: bytes) -> int:
        """Writes data into the peer's memory. Returns the completion's status."""
        self._memory.write(data, len(data))
        source = SGE(self._memory.buf, len(data), self._memory.lkey)
        request = SendWR(opcode=enums.IBV_WR_RDMA_WRITE, num_sge=1, sg=[source], send_flags=enums.IBV_SEND_SIGNALED)
        request.set_wr_rdma(self._peer["rkey"], self._peer["memory"])
        self._queue_pair.post_send(request)
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            count, completions = self._completions.poll(1)
            if count:
                return int(completions[0].status)
        raise TimeoutError("no completion")

    def received(self) -> bytes:
        return bytes(self._memory.read(BYTES, BYTES))


def serve(end: int, pipe: Connection) -> None:
    """Makes an endpoint, and calls its methods on requests (method, *arguments) from the pipe."""
    endpoint = Endpoint(end)
    pipe.send(endpoint.address)
    while request := pipe.recv():
        method, *arguments = request
        pipe.send(getattr(endpoint, method)(*arguments))


if __name__ == "__main__":
    serve(int(sys.argv[1]), Connection(int(sys.argv[2])))
