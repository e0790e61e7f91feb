"""`proxyccl top --web`: requests that the server refuses, its events and traces, and the page in a browser."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from proxyccl import Communicator, CommunicatorError, ResourceError
from proxyccl.tools import trace
from proxyccl.tools.web import server
from support import browser
from support.daemons import running_daemon
from support.observing import KERNELS, channels_of, command
from support.ranks import Ranks
from support.running import TIMEOUT, wait_for

pytestmark = pytest.mark.own_proxy(reason="looks in its own directory")

INTERVAL = 0.1


@pytest.fixture(autouse=True)
def _directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PROXYCCL_REPORT_DIR", str(tmp_path / "reports"))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server.serve("127.0.0.1:0", INTERVAL) as url:
        yield url


def ask(url: str, *, path: str = "/", method: str = "GET", query: str | None = None, host: str = "") -> tuple[int, str]:
    """Sends a request, with the page's token unless a query is given. Returns the answer's status and text."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT)
    headers = {"Host": host} if host else {}
    connection.request(method, f"{path}?{parts.query if query is None else query}", headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def events(url: str) -> Iterator[Any]:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT)
    connection.request("GET", f"/events?{parts.query}")
    with connection.getresponse() as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        for line in answer:
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))
    connection.close()


def put(comm: Communicator) -> None:
    comm.compile(KERNELS, "mixed")(1, 1, channels_of(comm), 7, 5, 3)
    comm.synchronize()
    comm.barrier()


def test_without_the_token_there_is_nothing(url: str) -> None:
    for path, method in (("/", "GET"), ("/events", "GET"), ("/trace", "POST")):
        for query in ("", "token=", "token=%C3%A9", "token=x"):
            status, text = ask(url, path=path, method=method, query=query)
            assert status == 403
            assert "token" in text
    assert ask(url)[0] == 200
    assert ask(url, path="/other")[0] == 404
    assert ask(url, path="/trace")[0] == 404  # a GET must not start a trace


def test_the_host_header_names_this_machine(url: str) -> None:
    for host in ("attacker.example", "attacker.example:80", "127.0.0.1.attacker.example", "", "[::1"):
        status, text = ask(url, host=host or " ")
        assert (status, "Host header" in text) == (403, True), host
    for host in ("localhost", "localhost:8000", "[::1]:8000", "127.0.0.1"):
        assert ask(url, host=host)[0] == 200, host


def test_the_page_loads_nothing_from_elsewhere(url: str) -> None:
    _, text = ask(url)
    assert re.findall(r"""(?:src|href)=["'](?!data:)""", text) == []
    assert "{nonce}" not in text


def test_the_events_have_ranks_calls_and_rates(url: str) -> None:
    with Ranks(2) as ranks:
        ranks.run(put)
        states = events(url)
        next(states)  # the first state has no rates, which need two samples
        state = next(states)
        (found,) = state["communicators"]
        assert [(line["rank"], line["pid"], line["state"]) for line in found["ranks"]] == [
            (0, os.getpid(), "runs"),
            (1, os.getpid(), "runs"),
        ]
        assert found["ranks"][0]["last"].startswith("barrier #")
        assert found["waits"] == []
        assert [(service["rank"], service["channels"][0]["peer"]) for service in state["services"]] == [(0, 1), (1, 0)]
        assert state["services"][0]["job"] == found["name"]


def test_a_rank_that_is_behind_is_waited_for(url: str) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            each = (found["waits"] for state in events(url) for found in state["communicators"])
            waits = next(waits for waits in each if waits)
            assert [(wait["rank"], wait["peer"]) for wait in waits] == [(1, 0)]
            assert re.fullmatch(r"rank 1 has called barrier #\d+; rank 0 has made \d+ calls?", waits[0]["text"])
        comm.barrier()

    with Ranks(2) as ranks:
        ranks.run(body)


def test_a_failure_is_shown_with_the_words_of_doctor(url: str) -> None:
    def fail(comm: Communicator) -> None:
        comm.barrier()
        comm.timeout = 0.2
        if comm.rank == 0:
            with pytest.raises(CommunicatorError):
                comm.barrier()

    with Ranks(2) as ranks:
        ranks.run(fail)
        both = [0, 1]
        state = next(state for state in events(url) if state["failures"] and both in state["failures"][0]["reported"])
        assert [line["state"] for line in state["communicators"][0]["ranks"]] == ["failed", "failed"]
        assert "waited too long" in state["communicators"][0]["ranks"][0]["failure"]
        assert state["failures"][0]["findings"][0]["text"] == "Rank 0 waits for rank 1."


def test_a_trace_is_recorded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on, record = threading.Event(), threading.Event(), trace.record

    def held(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert may_go_on.wait(TIMEOUT)
        return record(*arguments, **options)

    assert ask(url, path="/trace", method="POST")[0] == 409  # no proxy runs
    with Ranks(2) as ranks:
        ranks.run(put)
        query = urllib.parse.urlsplit(url).query
        for seconds in ("0", "61", "nan", "many"):
            assert ask(url, path="/trace", method="POST", query=f"{query}&seconds={seconds}")[0] == 400, seconds
        monkeypatch.setattr(trace, "record", held)
        with ThreadPoolExecutor(1) as pool:
            recording = pool.submit(ask, url, path="/trace", method="POST", query=f"{query}&seconds=0.1")
            assert begun.wait(TIMEOUT)
            assert ask(url, path="/trace", method="POST")[0] == 409  # a second trace at the same time is refused
            may_go_on.set()
            status, text = recording.result(TIMEOUT)
        assert status == 200
        assert {event["ph"] for event in json.loads(text)["traceEvents"]} >= {"M"}


def test_one_page_too_many_ends_the_oldest(url: str) -> None:
    parts = urllib.parse.urlsplit(url)
    assert parts.port is not None
    silent = [socket.create_connection(("127.0.0.1", parts.port), TIMEOUT) for _ in range(33)]
    assert silent[0].recv(1) == b""
    assert ask(url)[0] == 200
    for each in silent:
        each.close()


def test_a_port_that_is_taken_is_refused(url: str) -> None:
    port = urllib.parse.urlsplit(url).port
    with pytest.raises(ResourceError, match=f"cannot listen at port {port}"), server.serve(f"127.0.0.1:{port}", 1.0):
        pass


def test_the_page_in_a_browser(url: str, tmp_path: Path) -> None:
    with browser.opened(tmp_path) as page, Ranks(2) as ranks:
        ranks.run(put)
        page.go(url)
        page.wait_for("document.querySelectorAll('.ranks tbody tr').length === 2")
        page.wait_for("document.querySelectorAll('.heat tbody td').length === 4")
        assert re.match(r"0\s+\d+\s+0\s+runs\s+\d+\s+barrier #\d+\s", page.text(".ranks tbody tr"))
        assert page.text(".heat thead tr").split() == ["to", "rank", "0", "1"]
        assert page.text(".waits") == "No rank is seen to wait for another."
        page.run("document.querySelector('#unit').value = 'triggers'; document.querySelector('#unit').onchange()")
        assert "triggers a second" in page.text(".communicator")
        page.run("document.querySelector('#seconds').value = 0.2; document.querySelector('#record').click()")
        saved = tmp_path / "proxyccl-trace.json"
        wait_for(saved.exists, "the trace is saved")
        page.wait_for("document.querySelector('#recorded').innerText.startsWith('saved')")
        wait_for(lambda: saved.stat().st_size > 0, "it is written")
        assert "traceEvents" in json.loads(saved.read_text())


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Lets SIGINT end processes that the test starts, because a shell's background jobs ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_the_commands_say_where_the_page_is(tmp_path: Path) -> None:
    said = re.compile(r"http://localhost:\d+/\?token=\S+")
    with running_daemon(tmp_path / "daemon.sock", "--web") as daemon:
        wait_for(lambda: said.search(daemon.log) is not None, "it says where")
        found = said.search(daemon.log)
        assert found is not None
        assert next(events(found[0]))["communicators"] == []
    top = command("top", "--web", "localhost:0", "--interval", "0.05")
    try:
        assert top.stdout is not None
        first = top.stdout.readline()
        assert said.fullmatch(first.strip()), first
        assert ask(first.strip())[0] == 200
        top.send_signal(signal.SIGINT)
        assert top.wait(TIMEOUT) == 0
    finally:
        top.kill()
        top.communicate()
