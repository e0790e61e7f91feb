"""Invalid and foreign requests to the library's local HTTP servers get answers that reveal nothing."""

from __future__ import annotations

import http.client
import io
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from proxyccl.proxy.observe import metrics
from proxyccl.proxy.observe.bounded_server import is_here
from proxyccl.tools import ras
from proxyccl.tools.web import server
from support.running import TIMEOUT

pytestmark = pytest.mark.own_proxy(reason="looks in its own directory")

HERE = b"Host: localhost\r\n\r\n"
MALFORMED = {
    "empty line": b"\r\n",
    "one word": b"GET\r\n" + HERE,
    "version without a minor number": b"GET / HTTP/1\r\n" + HERE,
    "version that is not a number": b"GET / HTTP/x.y\r\n" + HERE,
    "superscript digits": "GET / HTTP/¹.¹\r\n".encode("latin-1") + HERE,
    "later version": b"GET / HTTP/9.9\r\n" + HERE,
    "HTTP/0.9": b"GET /\r\n\r\n",
    "POST of HTTP/0.9": b"POST /\r\n\r\n",
    "binary": bytes(range(128, 256)) + b"\r\n\r\n",
    "bracket in a URL": b"GET http://[/ HTTP/1.1\r\n" + HERE,
    "URL of another host": b"GET http://attacker.example/ HTTP/1.1\r\n" + HERE,
    "target without a slash": b"GET metrics HTTP/1.1\r\n" + HERE,
    "asterisk": b"OPTIONS * HTTP/1.1\r\n" + HERE,
    "bad percent encoding": b"GET /%zz%?token=%f%%ff%00 HTTP/1.1\r\n" + HERE,
    "path that climbs": b"GET /../../etc/passwd HTTP/1.1\r\n" + HERE,
    "unknown method": b"<b> / HTTP/1.1\r\n" + HERE,
    "HEAD": b"HEAD / HTTP/1.1\r\n" + HERE,
    "long line": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n" + HERE,
    "long header": b"GET / HTTP/1.1\r\nX: " + b"a" * 200_000 + b"\r\n" + HERE,
    "many headers": b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: 1\r\n" % i for i in range(200)) + HERE,
    "header without a colon": b"GET /none HTTP/1.1\r\nnonsense\r\n" + HERE,
    "no host": b"GET /metrics HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: attacker.example\r\n\r\n",
    "unfinished address": b"GET /metrics HTTP/1.1\r\nHost: [::1\r\n\r\n",
    "body that is not read": b"POST /none HTTP/1.1\r\nContent-Length: 200000\r\n" + HERE + b"b" * 200_000,
    "length below zero": b"POST /none HTTP/1.1\r\nContent-Length: -5\r\n" + HERE,
}


@contextmanager
def _metrics() -> Iterator[str]:
    with metrics.serve(0, dict) as where:
        yield where.removeprefix("metrics at ")


@pytest.fixture(params=["page", "metrics"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Starts each of the servers, and yields a URL that the server serves."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PROXYCCL_REPORT_DIR", str(tmp_path / "reports"))
    with _metrics() if request.param == "metrics" else server.serve("127.0.0.1:0", 0.1) as url:
        yield url


def sent(url: str, request: bytes) -> bytes:
    """Sends the bytes of a request, and returns the answer."""
    port = urllib.parse.urlsplit(url).port
    assert port is not None
    with socket.create_connection(("127.0.0.1", port), TIMEOUT) as connection:
        sending = threading.Thread(target=connection.sendall, args=(request,))
        sending.start()
        answer = bytearray()
        while received := connection.recv(1 << 16):
            answer += received
        sending.join(TIMEOUT)
    return bytes(answer)


def status_of(url: str, host: str, method: str = "GET") -> int:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT)
    connection.request(method, f"{parts.path}?{parts.query}", headers={"Host": host})
    status = connection.getresponse().status
    connection.close()
    return status


def test_each_malformed_request_has_an_answer(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    for name, request in MALFORMED.items():
        head = sent(url, request).split(b"\r\n")[0]
        assert head.startswith((b"HTTP/1.0 4", b"HTTP/1.0 5")), (name, head)
    assert status_of(url, "localhost") == 200
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
def test_a_page_of_another_host_is_refused_whatever_it_asks(url: str, method: str) -> None:
    for host in ("attacker.example", "attacker.example:80", "localhost.attacker.example", "127.0.0.1.attacker.example"):
        assert status_of(url, host, method) == 403, host


def test_a_host_is_an_address_or_a_name_of_this_machine() -> None:
    assert all(is_here(host, "node7") for host in ("localhost:80", "127.0.0.1", "[::1]:80", "10.0.0.1:9", "NODE7"))
    assert not any(is_here(host, "node7") for host in ("", " ", "node8", "[::1", "[localhost]", "localhost:80:9"))


def test_a_page_in_a_browser_cannot_ask_for_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with ras.serve("127.0.0.1:0") as where:
        request = b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\nSTATUS\n"
        answer = io.BytesIO(sent(f"http://{where.rpartition(' ')[2]}", request))
    assert answer.readlines() == [b"ERROR: expected a client of NCCL RAS, not of HTTP\n"]
