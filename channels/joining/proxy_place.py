"""Where the proxies of a communicator's ranks run, and with which rings and threads. The ranks of a host decide
together where their proxies run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct, structs

from proxyccl.device.arguments.integers import find_integer
from proxyccl.device.errors import ArgumentError, RuntimeUnavailableError
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
    """Where a rank's proxy runs.

    Attributes:
        where: "thread" (in the rank's process), "process" (in the job's own daemon), or "daemon" (in the node daemon).
        job_daemon: name of the job's own daemon; empty if no rank of the host uses it.
        chosen: whether the caller or the environment named the place; otherwise it is the default.
    """

    where: Where
    job_daemon: str = ""
    chosen: bool = True


class ProxyOptions(Struct, frozen=True):
    """The requested place of a rank's proxy, and its rings and threads. See `Communicator`."""

    where: Where | None
    fifos: int | str
    threads: int
    fifo_size: int
    idle: IdlePolicy | None
    cores: str | None

    def __post_init__(self) -> None:
        require_rings(self.threads if self._by_peer else self.fifos, self.threads)
        require_ring_size(self.fifo_size)
        for name in ("fifos", "threads", "fifo_size"):  # messages to a daemon can encode only Python's integers
            if (number := find_integer(getattr(self, name))) is not None:
                structs.force_setattr(self, name, number)

    @property
    def _by_peer(self) -> bool:
        return isinstance(self.fifos, str) and self.fifos == "peer"

    def rings(self, world_size: int) -> dict[str, Any]:
        """Returns the options that set the rings and threads of the proxy of a communicator of this size."""
        fifos = min(MAX_RINGS, max(self.threads, world_size)) if self._by_peer else self.fifos
        return {
            "fifos": fifos,
            "threads": self.threads,
            "fifo_size": self.fifo_size,
            "ring_per_connection": self._by_peer,
        }


class Wish(Message, frozen=True):
    """A rank's message to the others about its proxy.

    Attributes:
        host: the rank's host.
        where: the place that the caller or the environment requests, or None.
        default: the place that the rank would choose.
        name: the rank's proposal for the name of the job's own daemon.
        view: the `proc_view` of the rank's process, because each container has its own daemon.
    """

    host: str
    where: Where | None
    default: Where
    name: str
    view: Uint64 = 0


_WISH = Codec(Wish, 4096, "proxy")


def requested_place(argument: str | None) -> Where | None:
    """Returns the place that the caller or ``PROXYCCL_PROXY`` names; None if neither names one.

    Raises:
        ArgumentError: the named place does not exist.
    """
    name = "proxy"
    if argument is None:
        argument, name = os.environ.get("PROXYCCL_PROXY") or None, "PROXYCCL_PROXY"
    if argument is None:
        return None
    for place in PLACES:
        if isinstance(argument, str) and argument == place:
            return place
    raise ArgumentError(name, f"{argument!r} is not one of {', '.join(map(repr, PLACES))}")


def default_place(runtime: str) -> Where:
    """Returns the default place of a proxy, as far as this rank can tell.

    Args:
        runtime: the name of the rank's runtime.
    """
    if runtime == "host":
        return "thread"
    # Imported only if it is needed, because the import takes longer than the rest of this function.
    from proxyccl.proxy.daemon.connection import daemon_process
    from proxyccl.proxy.daemon.protocol import socket_path

    try:
        daemon_process(socket_path())
    except RuntimeUnavailableError:
        return "process"
    return "daemon"


def agree(wishes: Sequence[Wish], rank: int) -> ProxyPlace:
    """Returns the place of a rank's proxy, from all ranks' messages; the same for all ranks of a host that request no
    place.
    """
    own = wishes[rank]
    of_host = [wish for wish in wishes if wish.host == own.host]
    defaults = {wish.default for wish in of_host if wish.where is None}
    shared: Where = "process" if len(defaults) > 1 else own.default
    beside = next(wish for wish in of_host if wish.view == own.view)
    return ProxyPlace(own.where or shared, beside.name, own.where is not None)


def choose_place(where: Where | None, runtime: str, host: str, exchange: Exchange) -> ProxyPlace:
    """Returns where this rank's proxy runs. All ranks call this together.

    Args:
        where: the result of `requested_place`.
        runtime: the name of the rank's runtime.
        host: the name that the ranks agree on for this rank's host.
        exchange: the exchange between all ranks.
    """
    from proxyccl.proxy.daemon.job import new_name

    global _known_name  # noqa: PLW0603  one daemon serves all communicators of the process
    default = default_place(runtime) if where is None else where
    wish = Wish(host, where, default, _known_name or new_name(), proc_view())
    place = agree(exchange.all_gather(wish, _WISH, "proxies"), exchange.rank)
    with _lock:
        _known_name = _known_name or place.job_daemon
    return place
