"""The calls of vLLM's and SGLang's connectors with caches in the memory of devices, kind VRAM.

See `test_clients.py` for the versions and files of these clients.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import nixl._bindings as nb
import numpy as np
import pytest
from nixl._api import nixl_agent, nixl_agent_config

from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import as_dtype
from support.devices import rank_runtime

LAYERS, BLOCKS, BLOCK = 3, 40, 256


class Worker:
    """An agent with a cache of each layer on a device, and a host buffer of the same shape."""

    def __init__(self, number: int) -> None:
        runtime = rank_runtime(number)
        self.contents = np.random.default_rng(number).integers(0, 256, (LAYERS, BLOCKS, BLOCK), np.uint8)
        self.layers = [
            Array(runtime, runtime.allocate(BLOCKS * BLOCK), (BLOCKS, BLOCK), as_dtype("uint8")) for _ in range(LAYERS)
        ]
        for layer, contents in zip(self.layers, self.contents, strict=True):
            layer.upload(contents)
        self.device = runtime.device
        self.host = np.zeros((LAYERS, BLOCKS, BLOCK), np.uint8)
        self.agent = nixl_agent(str(uuid.uuid4()), nixl_agent_config(num_threads=4, capture_telemetry=True))
        regions = [(layer.ptr, layer.nbytes, self.device, "") for layer in self.layers]
        self.registered = self.agent.register_memory(self.agent.get_reg_descs(regions, "VRAM"), backends=["UCX"])
        self.agent.register_memory([(self.host.ctypes.data, self.host.nbytes, 0, "")], "DRAM")

    def strided(self) -> Any:
        return np.array([(layer.ptr, BLOCK, self.device, BLOCK, BLOCKS) for layer in self.layers], np.uint64)

    def staged(self) -> Any:
        return np.array([(layer.ctypes.data, BLOCK, 0, BLOCK, BLOCKS) for layer in self.host], np.uint64)

    def cache(self) -> Any:
        return np.stack([layer.numpy() for layer in self.layers])


def over_layers(blocks: list[int]) -> Any:
    return np.concatenate([np.array(blocks) + layer * BLOCKS for layer in range(LAYERS)])


def move(worker: Worker, operation: str, local: Any, ours: list[int], remote: Any, theirs: list[int]) -> Any:
    """Moves blocks of all layers, and returns the telemetry."""
    agent = worker.agent
    handle = agent.make_prepped_xfer(operation, local, over_layers(ours), remote, over_layers(theirs), b"request:1")
    state, deadline = agent.transfer(handle), time.monotonic() + 60
    while state == "PROC" and time.monotonic() < deadline:
        state = agent.check_xfer_state(handle)
    assert state == "DONE"
    telemetry = agent.get_xfer_telemetry(handle)
    agent.release_xfer_handle(handle)
    return telemetry


def notified(worker: Worker) -> list[bytes]:
    deadline = time.monotonic() + 60
    while not (notes := worker.agent.get_new_notifs()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return [each for messages in notes.values() for each in messages]


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
@pytest.mark.parametrize("buffer", ["VRAM", "DRAM"])
def test_blocks_of_caches(operation: str, buffer: str) -> None:
    """Blocks move between two devices, or between host memory and a device (vLLM's `kv_buffer_device="cpu"`)."""
    near, far = Worker(0), Worker(1)
    local = near.agent.prep_xfer_dlist(
        "NIXL_INIT_AGENT", near.strided() if buffer == "VRAM" else near.staged(), mem_type=buffer
    )
    name = near.agent.add_remote_agent(far.agent.get_agent_metadata())
    remote = near.agent.prep_xfer_dlist(name, far.strided(), mem_type="VRAM")
    before = near.cache() if buffer == "VRAM" else near.host.copy()
    ours, theirs = [5, 6, 30], [7, 2, 39]
    telemetry = move(near, operation, local, ours, remote, theirs)
    after = near.cache() if buffer == "VRAM" else near.host
    if operation == "READ":
        before[:, ours] = far.contents[:, theirs]
        np.testing.assert_array_equal(after, before)
    else:
        wanted = far.contents.copy()
        wanted[:, theirs] = before[:, ours]
        np.testing.assert_array_equal(far.cache(), wanted)
    assert (telemetry.totalBytes, telemetry.descCount) == (3 * LAYERS * BLOCK, 3 * LAYERS)
    assert telemetry.path.startswith("kernel")
    assert notified(far) == [b"request:1"]
    for handle in (local, remote):
        near.agent.release_dlist_handle(handle)
    near.agent.remove_remote_agent(name)
    near.agent.deregister_memory(near.registered)


def test_a_list_is_of_its_kind_of_memory() -> None:
    near, far = Worker(0), Worker(1)
    name = near.agent.add_remote_agent(far.agent.get_agent_metadata())
    with pytest.raises(nb.nixlNotFoundError):
        near.agent.prep_xfer_dlist(name, far.strided(), mem_type="DRAM")
    with pytest.raises(nb.nixlNotFoundError):
        near.agent.prep_xfer_dlist("", near.staged(), mem_type="VRAM")
    with pytest.raises(nb.nixlBackendError):
        near.agent.register_memory([(near.host.ctypes.data, near.host.nbytes, near.device, "")], "VRAM")


@pytest.mark.gpu_only("the host runtime has no tensors of torch")
def test_tensors_of_devices() -> None:
    """A tensor's descriptor names the tensor's kind of memory and device."""
    torch = pytest.importorskip("torch")
    near, far = Worker(0), Worker(1)
    theirs = torch.arange(4096, dtype=torch.int32, device=f"cuda:{far.device}")
    ours = torch.zeros_like(theirs, device=f"cuda:{near.device}")
    for worker, tensor in ((near, ours), (far, theirs)):
        assert worker.agent.register_memory([tensor])
    torch.cuda.synchronize(theirs.device)
    name = near.agent.add_remote_agent(far.agent.get_agent_metadata())
    lists = near.agent.get_xfer_descs([ours]), far.agent.get_xfer_descs([theirs])
    handle = near.agent.initialize_xfer("READ", *lists, name)
    state, deadline = near.agent.transfer(handle), time.monotonic() + 60
    while state == "PROC" and time.monotonic() < deadline:
        state = near.agent.check_xfer_state(handle)
    assert state == "DONE"
    assert torch.equal(ours.cpu(), theirs.cpu())
