"""The example of RDMA between two devices reports success, and its data crosses the wire."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from proxyccl import ThreadBootstrap
from support.paths import EXAMPLES
from support.soft_roce.wire import INTERFACES, packets_sent

sys.path.insert(0, str(EXAMPLES))

from gpu_data_interchange import main

pytestmark = pytest.mark.slow

REPORT = r"""=== Simple GPU Data Interchange Example ===
Transferring 1024 bytes with value 42

Step 1: Initializing RDMA context\.\.\.
  Found 2 RDMA device\(s\)
Step 2: Getting RDMA devices\.\.\.
  Found 2 active device port\(s\)
Step 3: Creating device contexts\.\.\.
  Device contexts created
Step 4: Creating RDMA endpoints\.\.\.
  Endpoints created \(QPN: send=\d+, recv=\d+\)
Step 5: Connecting endpoints\.\.\.
  Endpoints connected
Step 6: Allocating and registering GPU buffers\.\.\.
  Buffers allocated and registered
Step 7: Launching GPU kernel for data interchange\.\.\.
Success! All 1024 bytes verified with value 42
  Kernel execution completed
Step 8: Cleaning up resources\.\.\.
  Resources cleaned up

=== Example completed successfully! ===
"""


def test_interchange_reports_its_steps_and_devices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROXYCCL_TIMEOUT", "60")
    before = [packets_sent(interface) for interface in INTERFACES]
    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(main, ThreadBootstrap.create(2), timeout=120)) == [0, 0]
    output = capsys.readouterr().out
    assert re.fullmatch(REPORT, output), output
    assert all(packets_sent(interface) > sent for interface, sent in zip(INTERFACES, before, strict=True))
