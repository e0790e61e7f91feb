"""Connections to hosts that have several addresses."""

from __future__ import annotations

import errno
import socket
import time
from typing import Any

import pytest

from proxyccl.proxy.connecting import NoAddressError, connect_to_any


@pytest.mark.parametrize("first", [True, False])
def test_an_address_of_a_family_that_the_kernel_lacks_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    resolve = socket.getaddrinfo

    def with_another_family(*arguments: Any, **options: Any) -> list[Any]:
        found = resolve(*arguments, **options)
        lacking = (socket.AF_APPLETALK, *found[0][1:4], ("65280.1", found[0][4][1]))
        return [lacking, *found] if first else [*found, lacking]

    monkeypatch.setattr(socket, "getaddrinfo", with_another_family)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with connect_to_any([("127.0.0.1", port)], time.monotonic() + 10) as connection:
            assert connection.getpeername() == ("127.0.0.1", port)
    with pytest.raises(NoAddressError) as error:
        connect_to_any([("127.0.0.1", port)], time.monotonic() + 10)
    assert error.value.failures["127.0.0.1", port].errno == errno.ECONNREFUSED  # whichever failed last
    assert error.value.failures["65280.1", port].errno == errno.EAFNOSUPPORT
