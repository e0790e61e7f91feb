"""Another agent, as its metadata describe it, and this process's resources for it."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from proxyccl.channels.transfers.device_memory import Reached
from proxyccl.channels.transfers.errors import ActiveError
from proxyccl.channels.transfers.fabric import Keys
from proxyccl.channels.transfers.host_memory import Mapped
from proxyccl.channels.transfers.metadata import Place
from proxyccl.channels.transfers.regions import Regions

if TYPE_CHECKING:
    from proxyccl.channels.transfers.link import Link
    from proxyccl.channels.transfers.transfer import Transfer


class Peer:
    """Another agent, as its metadata describe it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.regions = Regions()
        self.link: Link | None = None
        self.connecting = threading.Lock()  # one thread connects, and the others wait for it
        self.removed = False
        self.reached = Reached()
        self.mapped = Mapped()
        self.keys = Keys()
        self.number: int | None = None  # of the endpoint, if the link's path is by libfabric
        self.to_close: weakref.WeakSet[Transfer] = weakref.WeakSet()

    def keep(self, transfer: Transfer) -> Transfer:
        """Closes a transfer before the peer's memory is unmapped, or its address forgotten."""
        self.to_close.add(transfer)
        return transfer

    def leave(self) -> None:
        """Ends the link, and then unmaps the peer's memory.

        Raises:
            ActiveError: a transfer by libfabric has not ended. Everything else has.
        """
        if self.link is not None:
            self.link.end()
        active = None
        for transfer in list(self.to_close):
            try:
                transfer.close()
            except ActiveError as error:
                active = error
        self.reached.close()
        self.mapped.close()
        if active is not None:
            raise active
