"""How other processes observe ranks: finding ranks, their calls, and their failures."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from proxyccl import ArgumentError, Communicator, CommunicatorError
from proxyccl.channels.segment.published import find_ranks
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.tools.communicators import RankView, communicators, rank_view
from support.ranks import Ranks

pytestmark = pytest.mark.no_proxy


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which this test's ranks publish."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "proxyccl"


def views() -> list[RankView]:
    """Returns all ranks, as another process sees them."""
    return [rank for each in communicators() for rank in each.ranks]


def some_calls(comm: Communicator) -> None:
    x = comm.empty(8, "float32")
    for _ in range(3):
        comm.all_reduce(x, out=x)
    comm.all_gather(x)
    comm.synchronize()


def test_ranks_publish_the_number_of_their_calls() -> None:
    with Ranks(2) as ranks:
        ranks.run(some_calls)
        both = views()
        assert [view.rank for view in both] == [0, 1]
        for view in both:
            assert view.calls == {"all_reduce": 3, "all_gather": 1}
            assert view.made == 4
            assert view.last == "all_gather #4"
            assert (view.state, view.failure, view.failure_code, view.leaving) == ("runs", "", 0, False)
            assert view.pid == os.getpid()
        assert len(communicators()) == 1
    assert find_ranks() == []


def test_calls_beyond_the_counted_kinds_are_counted_together() -> None:
    from proxyccl.channels.segment.call_log import CallLog, counts_in, encode_fields
    from proxyccl.channels.segment.control import create_segment
    from proxyccl.device.host import HostRuntime
    from proxyccl.proxy._engine import lib

    segment = create_segment(HostRuntime(), 0, 1.0)
    log = CallLog(segment, {}, 0)
    kinds = lib.PROXYCCL_CALL_KINDS + 2
    for _ in range(2):
        for kind in range(1, kinds + 1):
            assert log.agree(encode_fields((kind, 0, 0, 0, 0, 0, 0))) == 0
    counts = counts_in(segment)
    assert counts.pop(0) == 4
    assert counts == dict.fromkeys(range(1, kinds - 1), 2)
    segment.close()


def test_a_failure_is_seen_until_the_communicator_is_closed() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.abort("enough")
        with pytest.raises(CommunicatorError):
            comm.barrier()

    with Ranks(2) as ranks:
        ranks.run(some_calls)
        ranks.run(body)
        for view in views():
            assert "enough" in view.failure
            assert view.failure_code > 0


def test_a_rank_of_another_version_is_left_alone(directory: Path) -> None:
    with Ranks(2) as ranks:
        ranks.run(some_calls)
        path, _ = find_ranks()[0]
        path.write_text(re.sub(r'"layout":\d+', '"layout":1', path.read_text()))
        assert [publication.description.rank for _, publication in find_ranks()] == [1]
        assert path.exists()


@pytest.mark.parametrize(
    "wrong", [{"segment": "not hexadecimal"}, {"segment": "0"}, {"neighbours": []}], ids=["text", "half a byte", "none"]
)
def test_a_file_that_does_not_fit_a_rank_is_left_alone(wrong: dict[str, object], directory: Path) -> None:
    with Ranks(2) as ranks:
        ranks.run(some_calls)
        path, _ = directory.glob("*.rank")
        path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
        assert len(find_ranks()) == 1
        (found,) = communicators()
        assert (len(found.present), len(found.missing)) == (1, 1)


def test_a_segment_of_something_else_is_refused() -> None:
    with Ranks(2) as ranks:
        ranks.run(some_calls)
        publication = find_ranks()[0][1]
        memory = SharedMemory.allocate(4 << 20)
        for byte in (0xFF, 0x81, 0x01):
            ctypes.memset(memory.ptr, byte, memory.nbytes)
            found = replace(publication, segment=memory.handle.hex())
            with contextlib.suppress(ArgumentError):
                rank_view(found)  # some bytes are valid values, which raise nothing
        memory.close()


def test_a_rank_that_has_gone_is_refused() -> None:
    with Ranks(2) as ranks:
        ranks.run(some_calls)
        (_, publication), _ = find_ranks()
    with pytest.raises(ArgumentError):
        rank_view(publication)
