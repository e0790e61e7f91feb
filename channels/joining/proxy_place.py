"""Decides where the proxies of a communicator's ranks run. All ranks of a host use the same default."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct, structs

from proxyccl.device.arguments.integers import find_integer
from proxyccl.device.arguments.texts import choice_from
from proxyccl.device.errors import RuntimeUnavailableError
from proxyccl.device.process.namespaces import proc_view
from proxyccl.proxy.codec import Codec, Message, Uint64
from proxyccl.proxy.ring import require_ring_size
from proxyccl.proxy.thread import IdlePolicy
from proxyccl.proxy.workers import MAX_RINGS, require_rings

if TYPE_CHECKING:
    from proxyccl.channels.joining.exchange import Exchange

Where = Literal["thread", "process", "daemon"]
PLACES: tuple[Where, ...] = ("thread", "process", "daemon")

_lock = threading.Lock()
_known_name = ""


class ProxyPlace(Struct, frozen=True):
    # "thread" (in the rank's process), "process" (in the job's own daemon), or "daemon" (in the node daemon).
    where: Where
    job_daemon: str = ""  # the name of the job's own daemon; "" if no rank of the host uses it
    chosen: bool = True  # whether the caller or the environment chose `where`; False if `where` is the default


class ProxyOptions(Struct, frozen=True):
    """The options that a caller passed to `Communicator` for a rank's proxy."""

    where: Where | None
    fifos: int | str
    threads: int
    fifo_size: int
    idle: IdlePolicy | None
    cores: str | None

    def __post_init__(self) -> None:
        require_rings(self.threads if self._by_peer else self.fifos, self.threads)
        require_ring_size(self.fifo_size)
        for name in ("fifos", "threads", "fifo_size"):  # messages to a daemon can't encode numpy's integers
            if (number := find_integer(getattr(self, name))) is not None:
                structs.force_setattr(self, name, number)

    @property
    def _by_peer(self) -> bool:
        return isinstance(self.fifos, str) and self.fifos == "peer"

    def rings(self, world_size: int) -> dict[str, Any]:
        """Returns the options for the rings and threads of a proxy, for a communicator of `world_size` ranks."""
        fifos = min(MAX_RINGS, max(self.threads, world_size)) if self._by_peer else self.fifos
        return {
            "fifos": fifos,
            "threads": self.threads,
            "fifo_size": self.fifo_size,
            "ring_per_connection": self._by_peer,
        }


class Wish(Message, frozen=True):
    """A rank's message to the other ranks about its proxy."""

    host: str  # the rank's host
    where: Where | None  # where the caller or the environment wants the proxy to run; None without such a request
    default: Where  # where the proxy runs without a request
    name: str  # a name that the rank proposes for the job's own daemon
    view: Uint64 = 0  # the `proc_view` of the rank's process. Ranks with the same `proc_view` share a daemon.


_WISH = Codec(Wish, 4096, "proxy")


def requested_place(argument: str | None) -> Where | None:
    """Returns where the caller or else ``PROXYCCL_PROXY`` wants the proxy to run; None if neither is given. Raises
    ArgumentError for a value that is not one of `PLACES`.
    """
    return choice_from(argument, "proxy", "PROXYCCL_PROXY", PLACES)


def default_place(runtime: str) -> Where:
    """Returns where this rank's proxy runs by default.

    Args:
        runtime: the name of the rank's runtime.
    """
    if runtime == "host":
        return "thread"
    # Imports these modules only if needed, because importing them takes longer than the rest of the function.
    from proxyccl.proxy.daemon.connection import daemon_process
    from proxyccl.proxy.daemon.protocol import socket_path

    try:
        daemon_process(socket_path())
    except RuntimeUnavailableError:
        return "process"
    return "daemon"


def agree(wishes: Sequence[Wish], rank: int) -> ProxyPlace:
    """Computes, from all ranks' messages, where the proxy of rank `rank` runs. Those ranks of a host that request no
    place for their proxies get the same result.
    """
    own = wishes[rank]
    of_host = [wish for wish in wishes if wish.host == own.host]
    defaults = {wish.default for wish in of_host if wish.where is None}
    shared: Where = "process" if len(defaults) > 1 else own.default
    beside = next(wish for wish in of_host if wish.view == own.view)
    return ProxyPlace(own.where or shared, beside.name, own.where is not None)


def choose_place(where: Where | None, runtime: str, host: str, exchange: Exchange) -> ProxyPlace:
    """Returns where this rank's proxy runs. All ranks of the group call `choose_place` together.

    Args:
        where: the result of `requested_place`.
        runtime: the name of the rank's runtime.
        host: the name of this rank's host, which is the same on all ranks of the host.
    """
    from proxyccl.proxy.daemon.job import new_name

    global _known_name  # noqa: PLW0603  one daemon serves all communicators of the process
    default = default_place(runtime) if where is None else where
    wish = Wish(host, where, default, _known_name or new_name(), proc_view())
    place = agree(exchange.all_gather(wish, _WISH, "proxies"), exchange.rank)
    with _lock:
        _known_name = _known_name or place.job_daemon
    return place
