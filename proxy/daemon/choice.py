"""Chooses the daemon of a rank's proxy: the first of several that sees the rank's device.

A rank may connect to the daemon before it uses the proxy. A daemon's start, and its device contexts, take a second or
two, which then overlap with the program.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proxyccl.device.errors import ArgumentError, ProxyCCLError, ProxyLostError, ResourceError
from proxyccl.device.process.threads import Thread
from proxyccl.proxy.daemon.connection import DaemonAddress, prepare_device


@dataclass(frozen=True)
class _Prepared:
    """A connection to a daemon that has prepared the device."""

    address: DaemonAddress
    connection: socket.socket
    process: int

    @property
    def is_lost(self) -> bool:
        """Whether the daemon has hung up."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN | select.POLLRDHUP)  # any input is its end
        return bool(poll.poll(0))

    def close(self) -> None:
        self.connection.close()
        self.address.close()


class ChosenDaemon:
    """See `proxyccl.proxy.daemon.connection.DaemonAddress` for the methods. Each method is for one thread at a time.

    Args:
        addresses: returns the daemons' addresses in order of preference.
        runtime: name of the runtime.
        device_id: the rank's device.
        peers: device_ids of the peers' devices.
    """

    def __init__(
        self, addresses: Callable[[], Sequence[DaemonAddress]], runtime: str, device_id: str, peers: list[str]
    ) -> None:
        self._addresses = addresses
        self._device = runtime, device_id, peers
        self._chosen: DaemonAddress | None = None
        self._early: Thread | None = None
        self._lock = threading.Lock()
        self._prepared: _Prepared | None = None
        self._error: ProxyCCLError | None = None
        self._dropped = False

    def __str__(self) -> str:
        return str(self._chosen)

    def begin(self, timeout: float) -> None:
        """Starts a thread that connects. `connect` then uses that connection, or raises the thread's error.

        Args:
            timeout: seconds for each step.
        """
        self._early = Thread(self._prepare_early, "proxyccl-early-start", timeout)
        try:
            self._early.start()
        except ResourceError:  # the first use will report the lack of threads
            self._early = None

    @property
    def is_ready(self) -> bool:
        """Whether `connect` would return without waiting for the thread of `begin`."""
        early = self._early
        return early is None or not early.is_alive()

    def _prepare_early(self, timeout: float) -> None:
        try:
            prepared = self._prepare(timeout)
        except ProxyLostError:  # the first use makes another connection
            return
        except ProxyCCLError as error:
            self._error = error
            return
        with self._lock:
            if not self._dropped:
                self._prepared = prepared
                return
        prepared.close()

    def drop(self) -> None:
        """Closes an unused connection that `begin` made or is making. Does not wait."""
        with self._lock:
            self._dropped = True
            prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.close()

    def connect(self, timeout: float) -> tuple[socket.socket, int]:
        """See `DaemonAddress.connect`.

        Raises:
            ArgumentError: no daemon sees the device, or an option of the daemon is wrong.
            ProxyLostError: the daemon does not answer.
        """
        prepared = self._made_early()
        if prepared is None:
            prepared = self._prepare(timeout)
        self._chosen = prepared.address
        return prepared.connection, prepared.process

    def _made_early(self) -> _Prepared | None:
        """Returns the connection that `begin` has made, if any. Raises the error of the attempt."""
        if self._early is None:
            return None
        self._early.join()  # each step of the thread is bounded
        self._early = None
        if self._error is not None:
            raise self._error
        with self._lock:
            prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.is_lost:
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
