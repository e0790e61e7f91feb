"""The library's threads start, or fail with a named error."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest

from proxyccl import ResourceError
from proxyccl.device.process import threads
from proxyccl.device.process.threads import Thread


def test_a_thread_that_has_begun_has_its_name_and_its_arguments() -> None:
    seen: list[object] = []
    thread = Thread(lambda *arguments: seen.extend((threading.current_thread().name, *arguments)), "worker", 1, "two")
    thread.start()
    thread.join(30)
    assert seen == ["worker", 1, "two"]
    assert thread.daemon


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RuntimeError("can't start new thread"), "can't start new thread"), (MemoryError(), "out of memory")],
)
def test_a_thread_that_cannot_be_made_is_an_error_by_name(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise error

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ResourceError, match=f"can't start thread worker: .*{reason}"):
        Thread(lambda: None, "worker").start()


class Late(Thread):
    """A thread that begins to run only after `start` has timed out."""

    may_begin, ended = threading.Event(), threading.Event()

    def _bootstrap(self) -> None:
        self.may_begin.wait(30)
        super()._bootstrap()  # type: ignore[misc]
        self.ended.set()


def test_a_thread_that_does_not_begin_is_an_error_and_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_BEGIN_SECONDS", 0.05)
    ran = threading.Event()
    thread, used = Late(ran.set, "worker"), weakref.ref(ran)
    with pytest.raises(ResourceError, match=r"can't start thread worker: the thread did not begin within 0\.05 s"):
        thread.start()
    thread.may_begin.set()
    assert thread.ended.wait(30)
    assert not ran.is_set()
    del ran
    gc.collect()
    assert used() is None  # Python still keeps the thread object


def test_a_thread_that_an_error_ends_says_so(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[BaseException] = []

    def fail() -> None:
        sys.exit("lost")  # a thread that raises SystemExit usually ends without a message

    thread = Thread(fail, "worker", failed=heard.append)
    thread.start()
    thread.join(30)
    assert [type(error) for error in heard] == [SystemExit]
    assert "the thread worker has failed" in caplog.text
    assert "SystemExit" in caplog.text
