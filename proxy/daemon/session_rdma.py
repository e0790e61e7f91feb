"""What the daemon does for one client's RDMA: a device opened for it alone, whose keys are worth nothing to others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields as fields_of
from typing import Any, Protocol

from proxyccl.device.errors import ArgumentError, ProxyCCLError
from proxyccl.device.runtime import Memory
from proxyccl.proxy.daemon.protocol import Fields, ProtocolError
from proxyccl.proxy.interface import Connection, RdmaEnd, RdmaMemory
from proxyccl.proxy.service import ProxyService
from proxyccl.proxy.verbs.context import VerbsContext
from proxyccl.proxy.verbs.options import RdmaOptions

_LONGEST_CONNECT = 1e9
_RANKS = 1 << 31


class Keeper(Protocol):
    """What maps a client's memory, and unmaps it when nothing uses it any more."""

    def map(self, handle: bytes, nbytes: int) -> Memory:
        """At least so many bytes of the memory that a handle names. Paired with an `unmap`, retired or not."""
        ...

    def unmap(self, handle: bytes) -> None:
        """Ends `map`."""
        ...

    def retire(self, end: Callable[[], None]) -> None:
        """Calls `end` when the worker is seen with nothing to do."""
        ...

    def has_left(self) -> bool:
        """Whether the client has hung up."""
        ...


class SessionRdma:
    """The requests of a client about RDMA, each a method of its fields that gives the answer's.

    Args:
        proxy: the client's service.
        keeper: of the client's memory.
    """

    def __init__(self, proxy: ProxyService, keeper: Keeper) -> None:
        self._proxy = proxy
        self._keeper = keeper
        self._context: VerbsContext | None = None
        self._exposed: dict[int, tuple[RdmaMemory, bytes]] = {}  # with the handle, by number
        self._next = 0
        self.requests = {
            "open_rdma": self._open,
            "rdma_refusal": self._refusal,
            "make_end": self._make_end,
            "connect_end": self._connect_end,
            "expose": self._expose,
            "withdraw": self._withdraw,
        }

    @property
    def _opened(self) -> VerbsContext:
        if self._context is None:
            raise ProtocolError("do: no RDMA device is open")
        return self._context

    def _open(self, fields: Fields) -> dict[str, Any]:
        if self._context is not None:
            raise ProtocolError("open_rdma: a device is open")
        options, signals = fields.values("options"), fields.integers("signals", 1 << 40)
        if options.keys() != {field.name for field in fields_of(RdmaOptions)} or len(signals) != 2:
            raise ProtocolError("options or signals: they are not of this build of ProxyCCL")
        self._context = self._proxy.open_rdma(
            RdmaOptions(**options),
            range(*signals),
            near=fields.optional("near", high=1 << 16),
            local_rank=fields.integer("local_rank", high=_RANKS),
        )
        return {}

    def _refusal(self, fields: Fields) -> dict[str, Any]:
        return {"refusal": self._opened.refusal()}

    def _make_end(self, fields: Fields) -> dict[str, Any]:
        end = self._opened.make_end(fields.integer("peer", high=_RANKS), fields.text("transport"))
        return {"end": end.encode()}

    def _connect_end(self, fields: Fields) -> dict[str, Any]:
        theirs, timeout = RdmaEnd.decode(fields.values("end")), fields.number("timeout", 0, _LONGEST_CONNECT)
        self._opened.connect_end(fields.integer("peer", high=_RANKS), theirs, timeout, self._keeper.has_left)
        return {}

    def open_connection(self, fields: Fields) -> Connection:
        """The connection that is asked for, which is the session's to number."""
        return self._opened.open_connection(fields.integer("peer", high=_RANKS))

    def _expose(self, fields: Fields) -> dict[str, Any]:
        handle, nbytes, transport = (
            fields.data("handle"),
            fields.integer("nbytes", 1, 1 << 62),
            fields.text("transport"),
        )
        context = self._opened
        memory = self._keeper.map(handle, nbytes)
        try:
            # Registered for as long as it is used: the mapping goes then, and with it what its address means.
            exposed = context.expose(memory.ptr, nbytes, transport, b"")
        except ProxyCCLError:
            self._keeper.unmap(handle)
            raise
        number, self._next = self._next, self._next + 1
        self._exposed[number] = exposed, handle
        told = {"address": exposed.address, "key": exposed.key, "local_key": exposed.local_key}
        return {"number": number, "copied": exposed.copied, **told}

    def _withdraw(self, fields: Fields) -> dict[str, Any]:
        number = fields.integer("number")
        if number not in self._exposed:
            raise ProtocolError(f"number: {number} is none of this client's memories")
        exposed, handle = self._exposed.pop(number)
        if exposed.transport == "staged":
            self._opened.withdraw(exposed)  # peers' data is refused from now on; what is on its way is waited for
            self._keeper.retire(functools.partial(self._keeper.unmap, handle))
        else:
            self._keeper.retire(functools.partial(self._forget, exposed, handle))
        return {}

    def _forget(self, exposed: RdmaMemory, handle: bytes) -> None:
        self._opened.withdraw(exposed)
        self._keeper.unmap(handle)

    def close(self) -> None:
        """Frees it all. The service must have ended; the keeper unmaps what is left."""
        context, self._context = self._context, None
        if context is not None:
            context.close()


def address_of_word(fields: Fields) -> int:
    """The address, as a peer knows it, of a word that is signalled by RDMA."""
    address = fields.integer("address")
    if address == 0 or address % 8:
        raise ArgumentError("address", "a semaphore is a word of 8 bytes, aligned to 8")
    return address
