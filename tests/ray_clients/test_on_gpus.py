"""Ray's direct transport of tensors on GPUs, in Ray's order of calls (see test_transport.py)."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu_only
torch = pytest.importorskip("torch")

OBJECTS = 4

SOURCE = """
import pickle, sys
import torch
from proxyccl.ray.transport import ProxyCCLTransport
transport = ProxyCCLTransport()
device = f"cuda:{torch.cuda.device_count() - 1}"
for number in range(int(sys.argv[1])):
    tensors = [torch.full((1 << 20,), number, device=device), torch.full((3, 5), number + 0.5, device=device)]
    meta = transport.extract_tensor_transport_metadata(str(number), tensors)
    sys.stdout.buffer.write(pickle.dumps(meta))
    sys.stdout.buffer.flush()
    assert sys.stdin.readline() == "read\\n"
    transport.garbage_collect(str(number), meta, tensors)
    del tensors
    torch.cuda.empty_cache()  # what the destination has mapped of it is gone, and its address may be used again
"""


def test_a_process_reads_tensors_that_another_makes_and_frees(stand_in: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    from proxyccl.ray.transport import ProxyCCLTransport

    destination = ProxyCCLTransport()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(stand_in), os.environ.get("PYTHONPATH", "")))}
    with subprocess.Popen(
        [sys.executable, "-c", SOURCE, str(OBJECTS)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as source:
        assert source.stdin is not None
        assert source.stdout is not None
        for number in range(OBJECTS):
            meta = pickle.load(source.stdout)
            assert meta.tensor_device == "cuda"
            assert meta.generation == number
            found = destination.recv_multiple_tensors(str(number), meta, None)
            assert [each.device.type for each in found] == ["cuda", "cuda"]
            assert torch.equal(found[0], torch.full((1 << 20,), number, device=found[0].device))
            assert torch.equal(found[1], torch.full((3, 5), number + 0.5, device=found[1].device))
            on_host = [torch.empty(1 << 20, dtype=torch.int64), torch.empty(3, 5)]
            destination.recv_multiple_tensors(str(number), meta, None, on_host)
            assert bool((on_host[0] == number).all())
            source.stdin.write(b"read\n")
            source.stdin.flush()
    assert source.returncode == 0
