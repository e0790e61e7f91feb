"""A rank's RDMA in the node daemon: the same methods as in its own process, asked for over the socket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.daemon.protocol import Fields
from proxyccl.proxy.interface import Connection, RdmaEnd, RdmaMemory
from proxyccl.proxy.verbs.options import RdmaOptions


class DaemonRdma:
    """See `proxyccl.proxy.interface.RdmaContext` for the methods.

    Args:
        ask: sends a request to the daemon and gives its answer.
        is_open: whether there is still a daemon to ask.
        timeout: in seconds, of what registers memory.
    """

    def __init__(self, ask: Callable[..., Fields], is_open: Callable[[], bool], timeout: float) -> None:
        self._ask = ask
        self._is_open = is_open
        self._timeout = timeout

    def open(self, options: RdmaOptions, signals: range, *, near: int | None, local_rank: int) -> None:
        """Has the daemon open a device. See `Proxy.open_rdma`."""
        self._ask(
            "open_rdma",
            options=asdict(options),
            signals=[signals.start, signals.stop],
            near=near,
            local_rank=local_rank,
        )

    def refusal(self) -> str:
        """Why the device can't register the memory of the rank's GPU; empty if it can."""
        return self._ask("rdma_refusal").text("refusal")

    def make_end(self, peer: int, transport: str) -> RdmaEnd:
        """This rank's end of a way to a peer."""
        return RdmaEnd.decode(self._ask("make_end", peer=peer, transport=transport).values("end"))

    def connect_end(self, peer: int, theirs: RdmaEnd, timeout: float) -> None:
        """Makes the end ready to send to the peer's."""
        self._ask("connect_end", takes=timeout, peer=peer, end=theirs.encode(), timeout=timeout)

    def open_connection(self, peer: int) -> Connection:
        """The daemon's way to a peer, over a connected end."""
        answer = self._ask("connect_rdma", peer=peer)
        return Connection(answer.integer("number"), answer.integer("worker"), peer, answer.text("transport"))

    def expose(self, ptr: int, nbytes: int, transport: str, handle: bytes) -> RdmaMemory:
        """Lets peers reach memory of this process, which the daemon maps."""
        if not handle:
            raise ArgumentError("memory", "the node daemon reaches memory by a handle alone, and this has none")
        answer = self._ask("expose", takes=self._timeout, handle=handle.hex(), nbytes=nbytes, transport=transport)
        return RdmaMemory(
            transport,
            answer.integer("address"),
            answer.integer("key"),
            answer.integer("local_key"),
            answer.flag("copied"),
            answer.integer("number"),
        )

    def withdraw(self, memory: RdmaMemory) -> None:
        """Ends `expose`."""
        if self._is_open():
            self._ask("withdraw", number=memory.owner)

    def close(self) -> None:
        """Does nothing: the daemon frees it with the proxy."""
