"""Opens a TCP connection to a host that has several addresses, some of which may not answer."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping

from proxyccl.device.memory.descriptors import EXHAUSTED

_STAGGER_SECONDS = 0.25


class NoAddressError(OSError):
    """Raised if a host could not be reached at any of its addresses.

    Attributes:
        failures: for each numeric address (or unresolved name) and port, the error; TimeoutError if the address did not
            answer.
    """

    def __init__(self, failures: Mapping[tuple[object, ...], OSError]) -> None:
        reasons = (f"{host} port {port}: {error.strerror or error}" for (host, port), error in failures.items())
        super().__init__("; ".join(reasons) or "there is no address")
        self.failures = failures


def connect_to_any(addresses: Iterable[tuple[str, int]], deadline: float, *, greeting: bytes = b"") -> socket.socket:
    """Connects to the first address that answers with the greeting, if there is one.

    A new attempt begins every quarter of a second, or immediately after a failed attempt, while earlier attempts
    continue (RFC 8305). So an address that drops packets does not delay the later addresses.

    Args:
        addresses: hosts and ports, the preferred pair first; a host name may have several addresses.
        deadline: value of `time.monotonic` at which the function gives up.
        greeting: the bytes that the wanted host sends first. Another program may listen at one of the addresses, for
            example because hosts in different networks have equal addresses. The returned connection has no more bytes
            of the greeting to receive.

    Raises:
        NoAddressError: no address has answered by the deadline.
        OSError: the process is out of descriptors.
    """
    failures: dict[tuple[object, ...], OSError] = {}
    waiting = deque(_resolve(addresses, failures))
    attempts: dict[int, tuple[socket.socket, tuple[object, ...], bytes]] = {}  # the bytes are the awaited greeting
    poll = select.poll()
    next_at = time.monotonic()
    with contextlib.ExitStack() as undo:
        while waiting or attempts:
            now = time.monotonic()
            if waiting and (now >= next_at or not attempts):
                family, place = waiting.popleft()
                try:
                    attempt = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                except OSError as error:  # EAFNOSUPPORT: the kernel may lack IPv6
                    if error.errno in EXHAUSTED:
                        raise
                    failures[place[:2]] = error
                    continue
                attempt.setblocking(False)
                status = attempt.connect_ex(place)
                if status not in (0, errno.EINPROGRESS):
                    failures[place[:2]] = OSError(status, os.strerror(status))
                    attempt.close()
                    continue
                attempts[attempt.fileno()] = attempt, place[:2], greeting
                poll.register(attempt, select.POLLOUT)
                next_at = now + _STAGGER_SECONDS
            until = min(deadline, next_at) if waiting else deadline
            ended = poll.poll(max(0, int(1000 * (until - time.monotonic())) + 1))
            for descriptor, _ in ended:
                attempt, address, awaited = attempts.pop(descriptor)
                try:
                    awaited = _receive(attempt, awaited)
                except OSError as error:
                    failures[address] = error
                    poll.unregister(descriptor)
                    attempt.close()
                    next_at = now
                    continue
                if not awaited:
                    connected = socket.socket(attempt.family, attempt.type, fileno=attempt.detach())
                    connected.setblocking(True)
                    return connected
                attempts[descriptor] = attempt, address, awaited
                poll.modify(descriptor, select.POLLIN)
            if not ended and time.monotonic() >= deadline:
                failures |= {address: TimeoutError("timed out") for _, address, _ in attempts.values()}
                break
    raise NoAddressError(failures)


def _receive(attempt: socket.socket, awaited: bytes) -> bytes:
    """Returns the bytes of an awaited greeting that have not arrived yet. Raises OSError if the attempt has failed, or
    if the other side has sent other bytes.
    """
    status = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if status:
        raise OSError(status, os.strerror(status))
    try:
        received = attempt.recv(len(awaited)) if awaited else b""
    except BlockingIOError:
        return awaited
    if awaited and not (received and awaited.startswith(received)):
        raise OSError(errno.ECONNREFUSED, "another program listens there")
    return awaited[len(received) :]


def _resolve(
    addresses: Iterable[tuple[str, int]], failures: dict[tuple[object, ...], OSError]
) -> Iterable[tuple[socket.AddressFamily, tuple[object, ...]]]:
    for host, port in addresses:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            failures[host, port] = error
            continue
        except ValueError as error:  # the host name contains invalid characters
            failures[host, port] = OSError(errno.EINVAL, str(error))
            continue
        for family, _, _, _, place in found:
            yield family, place
