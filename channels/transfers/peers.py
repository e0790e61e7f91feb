"""The state that an agent keeps for each agent that it has added."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING

from proxyccl.channels.transfers.device_memory import Reached
from proxyccl.channels.transfers.errors import ActiveError
from proxyccl.channels.transfers.fabric import Keys
from proxyccl.channels.transfers.ledger import Ledger
from proxyccl.channels.transfers.metadata import Metadata, Place
from proxyccl.channels.transfers.regions import Region, Regions
from proxyccl.channels.transfers.transfer import Transfer, has_ended
from proxyccl.device.errors import ClosedError

if TYPE_CHECKING:
    from proxyccl.channels.transfers.paths import Link

_LONGEST_SECONDS = 30.0


class Peer:
    """An agent that this agent has added, its regions, and the link to it."""

    def __init__(self, token: bytes, place: Place) -> None:
        self.token, self.place = token, place
        self.regions = Regions()
        self.internal: set[Region] = set()  # the peer's regions that its program has not registered
        self.ledger: Ledger | None = None
        self._ended = -1  # `Ledger.count` at the last check
        self.link: Link | None = None
        self.connecting = threading.Lock()  # held while a thread connects to the peer
        self.removed = False
        self.reached = Reached()
        self.keys = Keys(0 if place.fabric is None else len(place.fabric.addresses))
        self._lock = threading.Lock()
        self._to_cancel: weakref.WeakSet[Transfer] = weakref.WeakSet()

    def keep(self, transfer: Transfer) -> Transfer:
        """Records a transfer, so that it is canceled before the peer's memory is unmapped. Returns the transfer."""
        with self._lock:
            self._to_cancel.add(transfer)
        return transfer

    def _kept(self) -> list[Transfer]:
        with self._lock:
            return list(self._to_cancel)

    def know(self, message: Metadata) -> None:
        """Adds the regions of metadata, with their shares and keys. Removes the shares and keys of known regions that
        overlap the added regions, because the peer may have freed their memory.
        """
        regions, columns = message.regions(), message.columns
        fresh = dict(zip(regions, range(len(regions)), strict=True))
        for region in self.regions.among(fresh):
            if columns[3, fresh[region]] < self.regions.number(region):  # the known metadata are newer
                del fresh[region]
        columns = columns[:, list(fresh.values())]
        replaced = self.regions.overlapping(columns)
        self.regions.know(fresh, columns)
        self.reached.add((share for share in message.shares if share.region in fresh), replaced)
        self.keys.add((key for key in message.keys if key.region in fresh), replaced)
        self._ended = -1

    def forget_ended(self) -> Collection[Region]:
        """If the peer is on this host, removes the regions that the peer has deregistered, and returns these regions.
        Mapped regions stay mapped while transfers use them.
        """
        ledger = self.ledger
        if ledger is None:
            return []
        count = ledger.count
        if count == self._ended:
            return []
        ended = self.regions.ended(ledger.words)
        self.regions.forget(ended)
        self.reached.add((), ended)
        self.keys.add((), ended)
        self._ended = count
        return ended

    def unmap_lost(self) -> None:
        """Unmaps the peer's memory and its ledger if its link is lost, because otherwise the memory of a killed process
        would not be freed. If a transfer of the peer is still active after 30 s, the memory stays mapped until `leave`.
        """
        if self.link is None or not self.link.lost:
            return
        self.ledger = None  # the link stays lost, so only prepared transfers still check the ledger
        deadline = time.monotonic() + _LONGEST_SECONDS
        if all(has_ended(transfer, max(0.0, deadline - time.monotonic())) for transfer in self._kept()):
            self.reached.close()

    def leave(self) -> None:
        """Closes the link, cancels all transfers, and then unmaps the peer's memory. The transfers access no memory
        afterwards, even if they are started again, because their link is lost.

        Raises:
            ActiveError: libfabric has not completed all requests of a transfer. All other transfers have been canceled.
        """
        if self.link is not None:
            self.link.end()
        active = None
        for transfer in self._kept():
            try:
                with contextlib.suppress(ClosedError):
                    transfer.cancel()
            except ActiveError as error:
                active = error
        self.reached.close()
        ledger = self.ledger  # `unmap_lost` may set it to None at any moment
        if ledger is not None:
            ledger.close()
        if active is not None:
            raise active
