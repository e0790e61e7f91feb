"""Chooses the daemon for a rank's proxy: the first of several daemons that can access the rank's device.

A daemon needs a second or two to start and to create its device contexts. A rank that connects before it uses the proxy
can run its program during this time.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from proxyccl.device.errors import ArgumentError, ProxyCCLError, ProxyLostError, ResourceError
from proxyccl.device.process.threads import Thread
from proxyccl.proxy.daemon.connection import prepare_device
from proxyccl.proxy.daemon.hello import DaemonAddress


@dataclass(frozen=True)
class _Prepared:
    address: DaemonAddress
    connection: socket.socket
    process: int

    @property
    def is_lost(self) -> bool:
        poll = select.poll()
        # The daemon sends nothing before a request, so any input means that the connection has ended.
        poll.register(self.connection, select.POLLIN | select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        self.connection.close()
        self.address.close()


class ChosenDaemon(DaemonAddress):
    """A connection to the first daemon of `addresses` that can access the rank's device. Only one thread at a time may
    call methods. `peers` are the `device_id`s of the peers.
    """

    def __init__(
        self, addresses: Callable[[], Sequence[DaemonAddress]], runtime: str, device_id: str, peers: list[str]
    ) -> None:
        self._addresses = addresses
        self._device = runtime, device_id, peers
        self._chosen: DaemonAddress | None = None
        self._early: Future[_Prepared] | None = None
        self._dropped = False

    def __str__(self) -> str:
        return str(self._chosen)

    def begin(self, timeout: float) -> None:
        """Starts a thread that connects to the daemon, with at most `timeout` seconds for each step. `connect` will use
        the thread's connection, or raise the thread's error.
        """
        early: Future[_Prepared] = Future()

        def prepare() -> None:
            try:
                early.set_result(self._prepare(timeout))
            except BaseException as error:
                early.set_exception(error)

        try:
            Thread(prepare, "proxyccl-early-start").start()
        except ResourceError:  # the proxy's first use raises this error again
            return
        self._early = early

    def drop(self) -> None:
        """Closes the unused connection of `begin`, as soon as `begin`'s thread has made it. Does not wait."""
        self._dropped = True
        early, self._early = self._early, None
        if early is not None:
            early.add_done_callback(_close_made)

    def connect(self, timeout: float) -> tuple[socket.socket, int]:
        """See `DaemonAddress.connect`. Also raises ArgumentError if no daemon can access the device or if the daemon
        refuses an option, and ProxyLostError if the daemon does not answer.
        """
        prepared = self._made_early() or self._prepare(timeout)
        self._chosen = prepared.address
        return prepared.connection, prepared.process

    def _made_early(self) -> _Prepared | None:
        early, self._early = self._early, None
        if early is None:
            return None
        try:
            prepared = early.result()  # each step of the thread has a time-out, so the wait ends
        except ProxyLostError:
            return None
        if prepared.is_lost:
            prepared.close()
            return None
        return prepared

    def _prepare(self, timeout: float) -> _Prepared:
        *others, last = self._addresses()
        for address in others:
            try:
                return self._prepare_at(address, timeout)
            except ArgumentError as error:
                if error.argument != "device":
                    raise
        return self._prepare_at(last, timeout)

    def _prepare_at(self, address: DaemonAddress, timeout: float) -> _Prepared:
        connection, process = address.connect(timeout)
        prepared = _Prepared(address, connection, process)
        try:
            if not self._dropped:
                prepare_device(connection, timeout, *self._device)
        except ProxyCCLError:
            prepared.close()
            raise
        return prepared

    def last_words(self) -> str:
        return "" if self._chosen is None else self._chosen.last_words()

    def close(self) -> None:
        if self._chosen is not None:
            self._chosen.close()


def _close_made(early: Future[_Prepared]) -> None:
    if early.exception() is None:
        early.result().close()
