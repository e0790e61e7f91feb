"""The machine itself: two devices, a wire that packets cross, and what the other tests here do to that wire."""

from __future__ import annotations

import ipaddress
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
from pyverbs import enums
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

from support.soft_roce.wire import ADDRESSES, DEVICES, INTERFACES, Wire, packets_sent

ACCESS = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
BYTES = 128 << 10
MTU = 4096
TIMEOUT = 60.0
"""Bound of every wait, in seconds."""


def gid(address: str) -> str:
    """The GID that is made of an IPv4 address."""
    return ipaddress.IPv6Address(f"::ffff:{address}").exploded


def gid_index(context: Context, address: str) -> int:
    """Where the device's table has it."""
    table = [str(context.query_gid(1, index)) for index in range(4)]
    return table.index(gid(address))


class Endpoint:
    """A queue pair on device `end`, and memory of 2 * BYTES: its first half is written into the other's second half."""

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
        attributes.timeout = 14  # 67 ms
        attributes.retry_cnt = 6  # Soft-RoCE takes 7 for endless
        self._queue_pair.to_rts(attributes)

    def write(self, data: bytes) -> int:
        """Writes into the other's memory; the completion's status."""
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
        """What the other wrote."""
        return bytes(self._memory.read(BYTES, BYTES))


def serve(end: int, pipe: Connection) -> None:
    """The other process: does with its endpoint what comes through the pipe, (method, arguments)."""
    endpoint = Endpoint(end)
    pipe.send(endpoint.address)
    while request := pipe.recv():
        method, *arguments = request
        pipe.send(getattr(endpoint, method)(*arguments))


class Other:
    """The endpoint of another process."""

    def __init__(self, end: int) -> None:
        processes = multiprocessing.get_context("fork")
        self._pipe, far = processes.Pipe()
        self._process = processes.Process(target=serve, args=(end, far), daemon=True)
        self._process.start()
        far.close()
        self.address = self._answer()

    def call(self, *request: Any) -> Any:
        self._pipe.send(request)
        return self._answer()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(TIMEOUT)
        assert self._process.exitcode == 0

    def _answer(self) -> Any:
        assert self._pipe.poll(TIMEOUT), "the other process hangs"
        return self._pipe.recv()


def connected() -> tuple[Endpoint, Other]:
    """Two endpoints: one here, the other in another process on the other device."""
    other = Other(1)
    here = Endpoint(0)
    here.connect(other.address)
    other.call("connect", here.address)
    return here, other


def test_both_devices_are_active() -> None:
    assert len(DEVICES) == 2
    for device, address in zip(DEVICES, ADDRESSES, strict=True):
        context = Context(name=device)
        assert context.query_port(1).state == enums.IBV_PORT_ACTIVE
        assert gid_index(context, address) >= 0


@pytest.mark.parametrize("netem", [(), ("loss", "3%", "delay", "1ms")], ids=["undisturbed", "lossy"])
def test_processes_write_to_each_other_across_the_wire(wire: Wire, netem: tuple[str, ...]) -> None:
    here, other = connected()
    if netem:
        wire.disturb(*netem)
    messages = [bytes((7 * i + end) % 251 for i in range(BYTES)) for end in range(2)]
    before = [packets_sent(interface) for interface in INTERFACES]
    assert here.write(messages[0]) == enums.IBV_WC_SUCCESS
    assert other.call("write", messages[1]) == enums.IBV_WC_SUCCESS
    assert other.call("received") == messages[0]
    assert here.received() == messages[1]
    for interface, sent in zip(INTERFACES, before, strict=True):
        assert packets_sent(interface) - sent >= BYTES // MTU
    other.close()


def test_a_cut_wire_fails_writes_until_it_is_restored(wire: Wire) -> None:
    here, other = connected()
    wire.cut(end=1)
    assert here.write(b"lost") == enums.IBV_WC_RETRY_EXC_ERR
    other.close()
    wire.restore()
    here, other = connected()
    assert here.write(b"kept") == enums.IBV_WC_SUCCESS
    assert other.call("received").startswith(b"kept")
    other.close()
