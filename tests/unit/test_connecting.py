"""Connections to hosts of several addresses."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from proxyccl.proxy.connecting import NoAddressError, connect_to_any


def test_an_address_of_a_family_that_the_kernel_lacks_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def with_another_family(*arguments: Any, **options: Any) -> list[Any]:
        found = resolve(*arguments, **options)
        return [(socket.AF_APPLETALK, *found[0][1:]), *found]

    monkeypatch.setattr(socket, "getaddrinfo", with_another_family)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with connect_to_any([("127.0.0.1", port)], time.monotonic() + 10) as connection:
            assert connection.getpeername() == ("127.0.0.1", port)
    with pytest.raises(NoAddressError, match=f"127.0.0.1 port {port}: Connection refused"):
        connect_to_any([("127.0.0.1", port)], time.monotonic() + 10)
