"""The calls by which vLLM and SGLang move cache blocks through NIXL, in these programs' order, on numpy arrays.

- vLLM 0.33.0 (2026-11-01), vllm/distributed/kv_transfer/kv_connector/v1/nixl: base_worker.py, which both
  modes share; pull_worker.py, in which a decoder reads; push_worker.py, in which a decoder asks a prefiller to write.
- SGLang 0.5.23 (2026-10-30), python/sglang/srt/disaggregation/nixl/conn.py: a prefiller writes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

pytestmark = pytest.mark.host_only("the clients' memory is the host's")
LAYERS, BLOCKS, BLOCK = 3, 40, 256


class Cache:
    """The caches of all layers, in one array."""

    def __init__(self, seed: int) -> None:
        self.bytes = np.random.default_rng(seed).integers(0, 256, (LAYERS, BLOCKS, BLOCK), np.uint8)

    def regions(self) -> list[tuple[int, int, int, str]]:
        return [(layer.ctypes.data, layer.nbytes, 0, "") for layer in self.bytes]

    def strided(self, offset: int = 0, nbytes: int = BLOCK) -> Any:
        """Returns strided descriptors of the blocks of each layer, or of a part of each block."""
        return np.array([(layer.ctypes.data + offset, nbytes, 0, BLOCK, BLOCKS) for layer in self.bytes], np.uint64)


def over_layers(blocks: list[int], dtype: Any = np.int64) -> Any:
    return np.concatenate([np.array(blocks, dtype) + layer * BLOCKS for layer in range(LAYERS)])


def soon(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


# -- vLLM


class Worker:
    def __init__(self, seed: int) -> None:
        self.cache = Cache(seed)
        self.agent = nixl_agent(str(uuid.uuid4()), nixl_agent_config(num_threads=4, capture_telemetry=True))
        self.registered = self.agent.get_reg_descs(self.cache.regions(), "DRAM")
        self.peers: list[Any] = []
        self.handles: list[Any] = []
        self.register()

    def register(self) -> None:
        self.agent.register_memory(self.registered, backends=["UCX"])
        self.local = self.prepare("NIXL_INIT_AGENT", self.cache.strided())

    def prepare(self, agent: Any, strided: Any) -> Any:
        handle = self.agent.prep_xfer_dlist(agent, strided, mem_type="DRAM")
        self.handles.append(handle)
        return handle

    def handshake(self, other: Worker) -> Any:
        self.peers.append(self.agent.add_remote_agent(other.agent.get_agent_metadata()))
        return self.peers[-1]

    def move(self, operation: str, local: Any, ours: list[int], remote: Any, theirs: list[int], message: bytes) -> Any:
        handle = self.agent.make_prepped_xfer(
            operation, local, over_layers(ours), remote, over_layers(theirs), notif_msg=message
        )
        self.agent.transfer(handle)
        assert soon(lambda: self.agent.check_xfer_state(handle) == "DONE")
        telemetry = self.agent.get_xfer_telemetry(handle)
        self.agent.release_xfer_handle(handle)
        return telemetry

    def notified(self) -> list[bytes]:
        return soon(lambda: [each for notes in self.agent.get_new_notifs().values() for each in notes])

    def forget_peers(self) -> None:
        for handle in self.handles:
            self.agent.release_dlist_handle(handle)
        for peer in self.peers:
            assert self.agent.check_remote_metadata(peer)
            self.agent.remove_remote_agent(peer)
        self.handles, self.peers = [], []

    def sleep(self) -> None:
        """Makes the calls of a worker that goes to sleep or exits."""
        self.forget_peers()
        self.agent.deregister_memory(self.registered)


def test_vllms_decoder_reads_blocks() -> None:
    prefill, decode = Worker(1), Worker(2)
    remote = decode.prepare(decode.handshake(prefill), prefill.cache.strided())
    decode.agent.send_notif(decode.peers[0], notif_msg=b"HB:request-1,request-2")
    assert prefill.notified() == [b"HB:request-1,request-2"]
    kept = decode.cache.bytes.copy()
    telemetry = decode.move("READ", decode.local, [5, 6, 30], remote, [7, 2, 39], b"request-1:1")
    kept[:, [5, 6, 30]] = prefill.cache.bytes[:, [7, 2, 39]]
    assert np.array_equal(decode.cache.bytes, kept)
    assert (telemetry.totalBytes, telemetry.descCount) == (3 * LAYERS * BLOCK, 3 * LAYERS)
    assert telemetry.xferDuration >= telemetry.postDuration > 0
    assert prefill.notified() == [b"request-1:1"]
    for worker in (decode, prefill):
        worker.sleep()


def test_vllms_decoders_share_the_heads_of_a_prefiller() -> None:
    """Each of two decoders reads its half of every block into the first half of its own block."""
    prefill, half = Worker(1), BLOCK // 2
    for rank in range(2):
        decode = Worker(2)
        local = decode.prepare("NIXL_INIT_AGENT", decode.cache.strided(0, half))
        remote = decode.prepare(decode.handshake(prefill), prefill.cache.strided(rank * half, half))
        decode.move("READ", local, [0, 1], remote, [8, 9], b"request:2")
        part = prefill.cache.bytes[:, 8:10, rank * half : (rank + 1) * half]
        assert np.array_equal(decode.cache.bytes[:, :2, :half], part)
        assert prefill.notified() == [b"request:2"]


def test_vllms_prefiller_writes_blocks_on_request() -> None:
    prefill, decode = Worker(1), Worker(2)
    asked = b"PUSH_REG:" + b"\x81\xaarequest_id\xa3abc"
    decode.agent.send_notif(decode.handshake(prefill), notif_msg=asked)
    assert prefill.notified() == [asked]
    remote = prefill.prepare(prefill.handshake(decode), decode.cache.strided())
    prefill.move("WRITE", prefill.local, [3], remote, [0], b"abc:1")
    assert decode.notified() == [b"abc:1"]
    assert np.array_equal(decode.cache.bytes[:, 0], prefill.cache.bytes[:, 3])


def test_vllms_prefiller_sleeps_and_wakes() -> None:
    prefill, decode = Worker(1), Worker(2)
    decode.prepare(decode.handshake(prefill), prefill.cache.strided())
    prefill.sleep()
    decode.forget_peers()
    decode.local = decode.prepare("NIXL_INIT_AGENT", decode.cache.strided())
    prefill.register()
    remote = decode.prepare(decode.handshake(prefill), prefill.cache.strided())
    decode.move("READ", decode.local, [1], remote, [2], b"request:1")
    assert np.array_equal(decode.cache.bytes[:, 1], prefill.cache.bytes[:, 2])


# -- SGLang


class Manager:
    def __init__(self, seed: int, threads: int) -> None:
        self.cache, self.small = Cache(seed), np.full((8, 16), seed, np.int32)
        config = nixl_agent_config(
            backends=[], num_threads=threads, sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        self.agent = nixl_agent(str(uuid.uuid4()), config)
        self.agent.create_backend("UCX", {"num_threads": str(threads)} if threads else {})
        assert "UCX" in self.agent.get_plugin_list()
        assert self.agent.register_memory(self.cache.regions(), "DRAM")
        assert self.agent.register_memory([(self.small.ctypes.data, self.small.nbytes, 0, "")], "DRAM")

    def row(self, number: int) -> list[tuple[int, int, int]]:
        return [(self.small[number].ctypes.data, self.small[number].nbytes, 0)]


def test_sglangs_prefiller_writes_blocks_and_small_arrays() -> None:
    prefill, decode = Manager(1, 8), Manager(2, 0)
    name, metadata = decode.agent.name, decode.agent.get_agent_metadata()
    prefill.agent.add_remote_agent(metadata)
    source = prefill.agent.prep_xfer_dlist("", prefill.cache.strided(), "DRAM")
    target = prefill.agent.prep_xfer_dlist(name, decode.cache.strided(), "DRAM")
    blocks = prefill.agent.make_prepped_xfer(
        "WRITE", source, over_layers([4, 5], np.int32), target, over_layers([11, 10], np.int32)
    )
    rows = prefill.agent.get_xfer_descs(prefill.row(3), "DRAM"), prefill.agent.get_xfer_descs(decode.row(6), "DRAM")
    small = prefill.agent.initialize_xfer("WRITE", *rows, name)
    for handle in (blocks, small):
        assert handle
        assert prefill.agent.transfer(handle) in ("PROC", "DONE")
    assert soon(lambda: all(prefill.agent.check_xfer_state(handle) == "DONE" for handle in (blocks, small)))
    assert np.array_equal(decode.cache.bytes[:, [11, 10]], prefill.cache.bytes[:, [4, 5]])
    assert np.array_equal(decode.small[6], prefill.small[3])
    assert (decode.small[:6] == 2).all()
    assert prefill.agent.check_remote_metadata(name)
    prefill.agent.remove_remote_agent(name)
    assert not prefill.agent.check_remote_metadata(name)
    prefill.agent.add_remote_agent(metadata)  # SGLang adds the agent again after a failure
    assert prefill.agent.check_remote_metadata(name)
