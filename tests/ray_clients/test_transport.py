"""Ray's direct tensor transport over ProxyCCL's agents, in Ray's order of calls.

The order is that of Ray 2.60: python/ray/experimental/rdt/rdt_store.py (add_object_primary, __ray_recv__,
__ray_abort_transport__, __ray_free__) and rdt_manager.py (fetch_multiple_tensors of all objects, then
wait_fetch_complete).
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxyccl.transfer import CanceledError, DisconnectedError, NotRegisteredError
from support.running import TIMEOUT

pytestmark = pytest.mark.host_only("agents move the host's memory, whatever the runtime")


@pytest.fixture
def transports() -> tuple[Any, Any]:
    """Returns the transports of a source and of a destination."""
    from proxyccl.ray.transport import ProxyCCLTransport

    return ProxyCCLTransport(), ProxyCCLTransport()


def described(source: Any, name: str, tensors: list[Any]) -> Any:
    """Returns an object's metadata as the destination receives it. Like Ray, keeps the tensors alive."""
    vars(source).setdefault("kept", []).append(tensors)
    return pickle.loads(pickle.dumps(source.extract_tensor_transport_metadata(name, tensors)))


def same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        a.dtype == b.dtype and a.shape == b.shape and (a == b).all() for a, b in zip(found, expected, strict=True)
    )


def test_it_is_registered_once_under_our_name() -> None:
    from ray.experimental import registered

    import proxyccl.ray
    from proxyccl.ray.transport import ProxyCCLTransport

    proxyccl.ray.register(np.ndarray)
    assert registered["PROXYCCL"] == (["cuda", "cpu"], ProxyCCLTransport, np.ndarray)
    with pytest.raises(ValueError, match="already registered"):
        proxyccl.ray.register(np.ndarray)


def test_ray_is_told_what_it_asks(transports: tuple[Any, Any]) -> None:
    source, _ = transports
    assert source.tensor_transport_backend() == "PROXYCCL"
    assert source.is_one_sided()
    assert source.can_abort_transport()
    assert source.actor_has_tensor_transport(object())
    assert type(source.get_communicator_metadata(object(), object())).__name__ == "CommunicatorMetadata"
    with pytest.raises(NotImplementedError):
        source.send_multiple_tensors([], None, None)


def test_a_destination_reads_an_object_and_both_let_go_of_it(transports: tuple[Any, Any]) -> None:
    source, destination = transports
    tensors = [np.arange(1 << 19), np.float16([[1, 2], [3, 4]]), np.array(7), np.zeros((0, 3)), np.arange(1 << 19)]
    tensors[0].flags.writeable = False  # arrays from Ray's object store are read-only
    meta = described(source, "one", tensors)
    assert (meta.tensor_device, len(meta.tensor_meta)) == ("cpu", 5)
    assert same(destination.recv_multiple_tensors("one", meta, source.get_communicator_metadata(None, None)), tensors)
    gc.collect()
    assert destination.agent.regions == []
    assert len(source.agent.regions) == 5
    source.garbage_collect("one", meta, tensors)
    assert source.agent.regions == []
    source.garbage_collect("one", meta, tensors)  # Ray may call garbage_collect() twice


def test_all_fetches_of_a_call_are_begun_before_any_is_waited_for(
    transports: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxyccl.ray.transport._MOST_KNOWN", 3)
    source, destination = transports
    objects = {f"object {number}": [np.full(1 << 18, number), np.array([number])] for number in range(8)}
    metas = {name: described(source, name, tensors) for name, tensors in objects.items()}
    fetches = {name: destination.fetch_multiple_tensors(name, meta, None, None) for name, meta in metas.items()}
    for name, fetch in fetches.items():
        assert same(destination.wait_fetch_complete(fetch), objects[name])
        assert same(destination.wait_fetch_complete(fetch, 0), objects[name])
    assert len(destination.agent.regions_of(source.agent.name)) <= 2 * 3


def test_sources_that_end_are_forgotten(transports: tuple[Any, Any]) -> None:
    from proxyccl.ray.transport import ProxyCCLTransport

    first, destination = transports
    second = ProxyCCLTransport()
    destination.recv_multiple_tensors("one", described(first, "one", [np.arange(10)]), None)
    first.agent.close()
    deadline = time.monotonic() + TIMEOUT
    while not destination.agent.lost(first.agent.name):
        assert time.monotonic() < deadline
    destination.recv_multiple_tensors("two", described(second, "two", [np.arange(10)]), None)
    assert destination.agent.peers == [second.agent.name]


def test_of_many_sources_those_used_last_are_known(
    transports: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from proxyccl.ray.transport import ProxyCCLTransport

    monkeypatch.setattr("proxyccl.ray.transport._MOST_PEERS", 2)
    _, destination = transports
    sources = [ProxyCCLTransport() for _ in range(3)]
    for number, known in ((0, [0]), (1, [0, 1]), (0, [0, 1]), (2, [0, 2]), (1, [1, 2])):
        meta = described(sources[number], "one", [np.full(10, number)])
        assert same(destination.recv_multiple_tensors("one", meta, None), [np.full(10, number)])
        assert set(destination.agent.peers) == {sources[each].agent.name for each in known}


def test_a_fetch_may_be_dropped_anywhere_and_is_ended_by_the_next_call(transports: tuple[Any, Any]) -> None:
    """A garbage collection may drop a fetch's last reference in a thread that holds the agent's lock."""
    source, destination = transports
    meta = described(source, "one", [np.arange(1 << 19)])
    dropped = [destination.fetch_multiple_tensors("one", meta, None)]
    with ThreadPoolExecutor(1) as threads, destination.agent._lock:
        threads.submit(dropped.clear).result(TIMEOUT)
    assert len(destination.agent.regions) == 1
    destination.garbage_collect("another", meta, [])
    assert destination.agent.regions == []


def test_a_fetch_that_has_ended_keeps_no_tensor(transports: tuple[Any, Any]) -> None:
    source, destination = transports
    meta = described(source, "one", [np.arange(1 << 19)])
    (found,) = destination.recv_multiple_tensors("one", meta, None)
    alive = weakref.ref(found)
    del found
    assert alive() is None


def test_an_abort_while_a_fetch_begins_cancels_it(transports: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = transports
    meta = described(source, "one", [np.arange(1 << 19)])
    prepare = destination.agent.prepare

    def abort_and_prepare(*arguments: Any) -> Any:
        destination.abort_transport("one", None)
        return prepare(*arguments)

    with monkeypatch.context() as beginning:
        beginning.setattr(destination.agent, "prepare", abort_and_prepare)
        with pytest.raises(CanceledError):
            destination.fetch_multiple_tensors("one", meta, None)
    assert destination.agent.regions == []
    assert same(destination.recv_multiple_tensors("one", meta, None), [np.arange(1 << 19)])


def test_a_fetch_that_fails_to_begin_leaves_nothing(
    transports: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = transports
    meta = described(source, "one", [np.arange(1 << 19)])

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as failing:
        failing.setattr("proxyccl.channels.transfers.transfer.Transfer.start", fail)
        with pytest.raises(MemoryError):
            destination.fetch_multiple_tensors("one", meta, None)
    assert destination.agent.regions == []
    assert same(destination.recv_multiple_tensors("one", meta, None), [np.arange(1 << 19)])


def test_it_reads_into_buffers(transports: tuple[Any, Any]) -> None:
    source, destination = transports
    meta = described(source, "one", [np.arange(10), np.arange(4.0)])
    buffers = [np.zeros(10, int), np.zeros(4)]
    found = destination.recv_multiple_tensors("one", meta, None, buffers)
    assert found[0] is buffers[0]
    assert same(buffers, [np.arange(10), np.arange(4.0)])
    with pytest.raises(ValueError, match="another size"):
        destination.recv_multiple_tensors("one", meta, None, [np.zeros(10, int), np.zeros(5)])
    with pytest.raises(ValueError, match="not contiguous"):
        destination.recv_multiple_tensors("one", meta, None, [np.zeros(20, int)[::2], np.zeros(4)])
    assert destination.agent.regions == []


def test_an_object_may_have_no_tensors(transports: tuple[Any, Any]) -> None:
    source, destination = transports
    meta = described(source, "none", [])
    assert meta.tensor_meta == []
    assert destination.recv_multiple_tensors("none", meta, None) == []
    source.garbage_collect("none", meta, [])


def test_an_actor_reads_its_own_object(transports: tuple[Any, Any]) -> None:
    source, _ = transports
    meta = described(source, "one", [np.arange(10)])
    assert same(source.recv_multiple_tensors("one", meta, None), [np.arange(10)])


def test_tensors_that_are_not_contiguous_are_refused(transports: tuple[Any, Any]) -> None:
    source, _ = transports
    with pytest.raises(ValueError, match="not contiguous"):
        source.extract_tensor_transport_metadata("one", [np.zeros((4, 4))[:, :2]])
    assert source.agent.regions == []


def test_a_transfer_that_is_aborted_before_it_begins_is_canceled(transports: tuple[Any, Any]) -> None:
    source, destination = transports
    meta = described(source, "one", [np.arange(10)])
    for each in transports:
        each.abort_transport("one", None)
    with pytest.raises(CanceledError, match="object one was aborted"):
        destination.recv_multiple_tensors("one", meta, None)
    assert same(destination.recv_multiple_tensors("one", meta, None), [np.arange(10)])  # a later try


SOURCE = """
import pickle, sys
import numpy as np
from proxyccl.ray.transport import ProxyCCLTransport
transport = ProxyCCLTransport()
tensors = [np.arange(1 << 20)]
sys.stdout.buffer.write(pickle.dumps(transport.extract_tensor_transport_metadata("one", tensors)))
sys.stdout.buffer.flush()
sys.stdin.read()
"""


@pytest.fixture
def process(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a source in another process. Data goes through a socket, so both processes take part."""
    monkeypatch.setenv("PROXYCCL_TRANSFER_PATHS", "unix")
    environment = {**os.environ, "PYTHONPATH": str(stand_in)}
    source = subprocess.Popen(
        [sys.executable, "-c", SOURCE], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    yield source
    source.kill()
    source.communicate()


def test_a_source_that_is_lost_or_stopped(process: subprocess.Popen[bytes], transports: tuple[Any, Any]) -> None:
    _, destination = transports
    assert process.stdout is not None
    meta = pickle.load(process.stdout)
    assert same(destination.recv_multiple_tensors("one", meta, None), [np.arange(1 << 20)])

    process.send_signal(signal.SIGSTOP)
    fetch = destination.fetch_multiple_tensors("one", meta, None)
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError):
            destination.wait_fetch_complete(fetch, timeout)
    destination.abort_transport("one", None)
    with pytest.raises(CanceledError):
        destination.wait_fetch_complete(fetch)

    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    with pytest.raises(DisconnectedError):
        destination.recv_multiple_tensors("one", meta, None)
    del fetch
    gc.collect()
    assert destination.agent.regions == []


def test_memory_that_the_source_has_let_go_of_is_refused(
    transports: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROXYCCL_TRANSFER_PATHS", "unix")
    source, destination = transports
    meta = described(source, "one", [np.arange(10)])
    source.garbage_collect("one", meta, [])
    with pytest.raises(NotRegisteredError):
        destination.recv_multiple_tensors("one", meta, None)
