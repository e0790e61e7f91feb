"""The machine itself: two devices, a wire that packets cross, and disturbances of that wire."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from typing import Any

import pytest
from pyverbs import enums
from pyverbs.device import Context

from support.soft_roce import endpoint
from support.soft_roce.endpoint import BYTES, MTU, TIMEOUT, Endpoint, gid_index
from support.soft_roce.wire import ADDRESSES, DEVICES, INTERFACES, Wire, packets_sent


class Other:
    """A process with the other endpoint."""

    def __init__(self, end: int) -> None:
        self._pipe, far = multiprocessing.Pipe()
        command = [sys.executable, endpoint.__file__, str(end), str(far.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[far.fileno()])
        far.close()
        self.address = self._answer()

    def call(self, *request: Any) -> Any:
        self._pipe.send(request)
        return self._answer()

    def close(self) -> None:
        self._pipe.send(None)
        assert self._process.wait(TIMEOUT) == 0

    def _answer(self) -> Any:
        assert self._pipe.poll(TIMEOUT), "the other process hangs"
        return self._pipe.recv()


def connected() -> tuple[Endpoint, Other]:
    """Returns two connected endpoints: one in this process, the other in another process on the other device."""
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


@pytest.mark.parametrize(
    "netem",
    [(), pytest.param(("loss", "3%", "delay", "1ms"), marks=pytest.mark.full)],
    ids=["undisturbed", "lossy"],
)
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


@pytest.mark.full  # test_failure.py cuts the wire during a collective
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
