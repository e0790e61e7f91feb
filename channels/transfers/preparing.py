"""The choice of a transfer's path: what the two sides' memory is, and who reaches it."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from proxyccl.channels.transfers.blocks import Rows, sides
from proxyccl.channels.transfers.copier import Copier
from proxyccl.channels.transfers.device_memory import Devices, Pinned, Reached
from proxyccl.channels.transfers.errors import DisconnectedError, NoPathError, NotRegisteredError
from proxyccl.channels.transfers.fabric import AgentFabric
from proxyccl.channels.transfers.link import Link
from proxyccl.channels.transfers.paths import SHARED, Path, device_path, fabric_path, staged_path
from proxyccl.channels.transfers.peers import Peer
from proxyccl.channels.transfers.regions import DRAM, VRAM, Region, Regions, View
from proxyccl.channels.transfers.transfer import Transfer
from proxyccl.device.errors import ArgumentError, RuntimeUnavailableError
from proxyccl.proxy._transfers import lib

if TYPE_CHECKING:
    from proxyccl.proxy._transfers import ProxycclAgentPointer


class Side(Struct, frozen=True, eq=False):
    """Registered memory of one kind and of one agent, at the time at which blocks were found to lie in it.

    Attributes:
        name: the agent's.
        peer: the agent; None: this one.
        kind: of memory.
        view: its regions.
    """

    name: str
    peer: Peer | None
    kind: str
    view: View

    def holders(self, addresses: Rows, now: Regions) -> tuple[list[Region], Rows]:
        """`View.holders` of blocks.

        Args:
            addresses: of the blocks.
            now: the agent's regions by now.

        Raises:
            NotRegisteredError: a region was deregistered since, or registered anew.
        """
        regions, rows = self.view.holders(addresses)
        if now.view(self.kind) is not self.view:
            for region, (number, address) in zip(regions, rows.tolist(), strict=True):
                if now.number(region) != number:
                    whose = "this agent" if self.peer is None else f"agent {self.name}"
                    raise NotRegisteredError(f"{whose} has deregistered its memory at {address:#x}", self.name)
        return regions, rows


def kind_of(regions: Regions, addresses: Rows, nbytes: Rows, side: str, peer: str) -> str:
    """The kind of memory that all blocks of one side belong to.

    Args:
        regions: of that side.
        addresses, nbytes: of the blocks.
        side: "local" or "remote", for errors.
        peer: the other agent's name; "" for the local side.

    Raises:
        ArgumentError: they are of both kinds.
        NotRegisteredError: a block lies outside registered memory.
    """
    outside = regions.find_outside(addresses, nbytes)
    if outside is None:
        return DRAM
    of_devices = regions.find_outside(addresses, nbytes, VRAM)
    if of_devices is None:
        return VRAM
    first = max(outside, of_devices)
    address, number = int(addresses[first]), int(nbytes[first])
    if regions.find_outside(addresses[first : first + 1], nbytes[first : first + 1]) is None or (
        regions.find_outside(addresses[first : first + 1], nbytes[first : first + 1], VRAM) is None
    ):
        raise ArgumentError(
            "blocks", f"block {first} at {side} address {address:#x} is of another kind of memory than those before"
        )
    raise NotRegisteredError(
        f"block {first}: {number} bytes at {side} address {address:#x} are not registered"
        + (f" by agent {peer}" if side == "remote" else ""),
        peer,
    )


class Preparer:
    """Makes transfers of one agent. Any thread may use it.

    Attributes:
        paths: those that its transfers may take.

    Args:
        name: the agent's.
        handle: the engine's.
        devices, reached, pinned: of its transfers with devices.
        fabric: its endpoint of libfabric.
        paths: those that its transfers may take.
    """

    def __init__(
        self,
        name: str,
        handle: ProxycclAgentPointer,
        devices: Devices,
        reached: Reached,
        pinned: Pinned,
        fabric: AgentFabric | None,
        paths: frozenset[str],
    ) -> None:
        self._name, self._handle = name, handle
        self._devices, self._reached, self._pinned = devices, reached, pinned
        self._fabric, self.paths = fabric, paths
        self._warned: set[str] = set()

    def warn_once(self, what: str, reason: str, stacklevel: int) -> None:
        """Warns of a slower path, unless its reason is empty, or was given before."""
        if reason and reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"agent {self._name} {what}: {reason}", RuntimeWarning, stacklevel=stacklevel)

    def prepare(
        self,
        link: Link | None,
        known: Peer | None,
        peer: str,
        writes: bool,
        rows: Rows,
        kinds: tuple[str, str],
        holders: tuple[list[Region], list[Region]],
    ) -> Transfer:
        """A transfer by the best path.

        Args:
            link, known: to the peer, and the peer; None: within the agent.
            peer: its name.
            writes: whether data moves to it.
            rows: shape (N, 3): local address, remote address, bytes; registered memory.
            kinds: of memory, here and there.
            holders: the regions that hold the blocks, here and there.

        Raises:
            DisconnectedError: the peer has gone.
            NoPathError: no device of this process reaches both sides, and no socket leads to the peer.
        """
        if VRAM in kinds and (rows[:, 2] > 0).any():
            return self._on_device(link, known, peer, writes, rows[rows[:, 2] > 0], kinds, holders)
        path = Path("self") if link is None else link.path
        requests = None
        if link is not None and known is not None and SHARED in self.paths and known.ledger is not None:
            mapped, memories, reason = known.mapped.find(rows[:, 1], rows[:, 2], holders[1])
            self.warn_once(f"can't map memory of agent {peer}", reason, 4)
            if mapped is not None:
                lists, way = sides(np.column_stack((rows[:, 0], mapped, rows[:, 2]))), lib.PROXYCCL_BY_MAPPING
                path = Path(SHARED)
                return known.keep(
                    Transfer(self._handle, link, peer, writes, lists, path, self._devices, way=way, kept=memories)
                )
        if self._fabric is not None and known is not None and known.number is not None:
            try:
                requests = self._fabric.requests(rows, known.keys, known.number)
            except NoPathError as error:
                assert link is not None
                path = Path(link.carrier, str(error))
                self.warn_once(f"moves data to and from agent {peer} through a socket", path.reason, 4)
        transfer = Transfer(self._handle, link, peer, writes, sides(rows), path, self._devices, requests=requests)
        return transfer if requests is None or known is None else known.keep(transfer)

    def _on_device(
        self,
        link: Link | None,
        known: Peer | None,
        peer: str,
        writes: bool,
        rows: Rows,
        kinds: tuple[str, str],
        holders: tuple[list[Region], list[Region]],
    ) -> Transfer:
        """Of memory of devices, on one side or both."""
        if link is not None and link.carrier == "tcp" and not link.pid:  # another host, or as if it were one
            return self._between_hosts(link, known, peer, writes, rows, kinds)
        in_process = link is None or link.pid == os.getpid()
        if kinds[1] == DRAM and not in_process and link is not None:
            return self._staged(link, writes, peer, rows)
        if link is not None and known is not None and known.ledger is None:
            reason = "its registrations can't be looked at from here"
            return self._by_socket(link, writes, peer, rows, kinds, reason)
        theirs = self._reached if known is None else known.reached
        if kinds[0] == VRAM:
            copier = self._local_copier(rows)
        else:
            try:
                copier = self._devices.nearest(theirs.share_at(rows[:, 1], rows[:, 2]))
            except (NoPathError, RuntimeUnavailableError) as error:
                if link is None:
                    raise
                return self._by_socket(link, writes, peer, rows, kinds, str(error))
        mapped = rows.copy()
        kept: list[object] = []
        ways, unpinned = [], ""
        for column, kind, reached in ((0, kinds[0], self._reached), (1, kinds[1], theirs)):
            if kind == VRAM:
                try:
                    mapped[:, column], memories, way = reached.map(copier, rows[:, column], rows[:, 2], holders[column])
                except NoPathError as error:
                    if link is None or reached is self._reached:
                        raise
                    if link.look():
                        raise DisconnectedError(f"agent {peer}: {link.lost}", peer) from None
                    return self._by_socket(link, writes, peer, rows, kinds, f"agent {peer}: {error}")
                ways.append(way if column == 1 and not in_process else "")
            else:
                memories, unpinned = self._pinned.pin(copier, holders[column])
                ways.append("pinned memory" if memories else "")
            kept.append(memories)
        lists = local, remote = sides(mapped)
        to, source = (remote, local) if writes else (local, remote)
        plan = copier.plan(np.column_stack((to[:, 0], source)), kernels_reach=not unpinned, kept=kept)
        path = device_path(plan.by, ways, unpinned)
        transfer = Transfer(self._handle, link, peer, writes, lists, path, self._devices, (copier, plan))
        if known is not None:
            known.keep(transfer)
        what = "copies between the host's memory and a device by way of the driver's buffers"
        self.warn_once(what, path.reason, 4)
        return transfer

    def _local_copier(self, rows: Rows) -> Copier:
        """The device of the local blocks."""
        return self._devices.of(self._reached.share_at(rows[:, 0], rows[:, 2]))

    def _mapped_here(self, rows: Rows) -> tuple[Copier, Rows]:
        """The device of the local blocks, and rows with the addresses at which it reaches them."""
        copier = self._local_copier(rows)
        mapped = rows.copy()
        mapped[:, 0], _, _ = self._reached.map(copier, rows[:, 0], rows[:, 2])
        return copier, mapped

    def _between_hosts(
        self, link: Link, known: Peer | None, peer: str, writes: bool, rows: Rows, kinds: tuple[str, str]
    ) -> Transfer:
        """By the adapters, if they reach both sides' memory, else by way of pinned memory and a socket."""
        reason = ""
        if self._fabric is not None and known is not None and known.number is not None:
            try:
                requests = self._fabric.requests(rows, known.keys, known.number)
            except NoPathError as error:
                reason = str(error)
                if kinds[1] == VRAM:
                    return known.keep(self._staged_by_fabric(self._fabric, link, writes, peer, rows, kinds, reason))
            else:
                path = Path(fabric_path(self._fabric.provider, of_devices=True))
                lists = sides(rows)
                made = Transfer(self._handle, link, peer, writes, lists, path, self._devices, requests=requests)
                return known.keep(made)
        return self._by_socket(link, writes, peer, rows, kinds, reason)

    def _staged_by_fabric(
        self, fabric: AgentFabric, link: Link, writes: bool, peer: str, rows: Rows, kinds: tuple[str, str], reason: str
    ) -> Transfer:
        """By way of pinned memory on both sides, between which the peer's adapter moves the data."""
        path = staged_path(Path(fabric_path(fabric.provider)), kinds, reason)
        if kinds[0] == VRAM:
            copier, rows = self._mapped_here(rows)
        else:
            copier = self._devices.copier(0, "host")  # its CPU fills and empties the stages
        self.warn_once("stages memory of devices through pinned memory", reason, 5)
        return Transfer(
            self._handle,
            link,
            peer,
            writes,
            sides(rows),
            path,
            self._devices,
            (copier, None),
            lib.PROXYCCL_BY_FABRIC,
            stages=fabric.stages,
        )

    def _staged(self, link: Link, writes: bool, peer: str, rows: Rows) -> Transfer:
        """Between this process's device memory and another process's memory of the host."""
        if not link.pid:
            return self._by_socket(link, writes, peer, rows, (VRAM, DRAM))
        copier, mapped = self._mapped_here(rows)
        reason = "a device does not reach another process's memory of the host"
        path = Path("copy engine and process_vm, staged", reason)
        return Transfer(self._handle, link, peer, writes, sides(mapped), path, self._devices, (copier, None))

    def _by_socket(
        self, link: Link, writes: bool, peer: str, rows: Rows, kinds: tuple[str, str], reason: str = ""
    ) -> Transfer:
        """Between memory of devices, on one side or both, and a socket."""
        path = staged_path(Path(link.carrier, link.path.reason), kinds, reason)
        on_device = None
        if kinds[0] == VRAM:
            copier, rows = self._mapped_here(rows)
            on_device = copier, None
        self.warn_once("stages memory of devices through a socket", reason, 4)
        return Transfer(
            self._handle, link, peer, writes, sides(rows), path, self._devices, on_device, lib.PROXYCCL_BY_SOCKET
        )
