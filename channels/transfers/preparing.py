"""Chooses the path of each transfer, from those in `_PATHS`, and makes the transfer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from proxyccl.channels.transfers.blocks import Rows, sides
from proxyccl.channels.transfers.copier import Copier
from proxyccl.channels.transfers.device_memory import Devices, NotSharedError, Pinned, Reached
from proxyccl.channels.transfers.errors import DisconnectedError, NoPathError, NotRegisteredError
from proxyccl.channels.transfers.fabric import AgentFabric
from proxyccl.channels.transfers.paths import SHARED, Link, Path, device_path, fabric_path, staged_path
from proxyccl.channels.transfers.peers import Peer
from proxyccl.channels.transfers.regions import DRAM, VRAM, Region, Regions, View
from proxyccl.channels.transfers.transfer import Transfer
from proxyccl.device.errors import ArgumentError, RuntimeUnavailableError
from proxyccl.proxy._transfers import ffi, lib

if TYPE_CHECKING:
    from proxyccl.proxy._transfers import ProxycclAgentPointer


class Side(Struct, frozen=True, eq=False):
    """A snapshot of one agent's registered memory of one kind, in which a caller has found blocks.

    Attributes:
        name: the agent's name.
        peer: the agent if it is another agent; None for this agent.
        kind: `DRAM` or `VRAM`.
    """

    name: str
    peer: Peer | None
    kind: str
    view: View

    def holders(self, addresses: Rows, now: Regions) -> tuple[list[Region], Rows]:
        """Returns the regions that contain blocks, and their rows (`View.holders`). Raises NotRegisteredError if one of
        these regions was deregistered after the snapshot, even if it was registered again. `now` has the agent's
        current regions.
        """
        rows, regions = self.view.holders(addresses), []
        for number, address in rows.tolist():
            region = now.find(number)
            if region is None:
                whose = "this agent" if self.peer is None else f"agent {self.name}"
                raise NotRegisteredError(f"{whose} has deregistered its memory at {address:#x}", self.name)
            regions.append(region)
        return regions, rows


def kind_of(regions: Regions, addresses: Rows, nbytes: Rows, side: str, peer: str) -> str:
    """Returns the kind of memory of all blocks of one side. `side` is "local" or "remote" and `peer` the other agent's
    name or "", for error messages.

    Raises:
        ArgumentError: some blocks are in device memory and some in host memory.
        NotRegisteredError: a block lies outside registered memory.
    """
    first = 0
    for kind in (DRAM, VRAM):
        outside = regions.view(kind).find_outside(addresses, nbytes)
        if outside is None:
            return kind
        first = max(first, outside)
    address, number, one = int(addresses[first]), int(nbytes[first]), slice(first, first + 1)
    if any(regions.view(kind).find_outside(addresses[one], nbytes[one]) is None for kind in (DRAM, VRAM)):
        raise ArgumentError(
            "blocks", f"block {first} at {side} address {address:#x} is in another kind of memory than block 0"
        )
    raise NotRegisteredError(
        f"block {first}: {number} bytes at {side} address {address:#x} are not registered"
        + (f" by agent {peer}" if side == "remote" else ""),
        peer,
    )


class Pair(Struct, frozen=True, eq=False):
    """The two sides of a transfer. `link` and `known` are None for a transfer within the agent. `rows` are (local
    address, remote address, bytes) of registered blocks. No block is empty. `kinds` and `holders` are the kinds of
    memory and the regions that contain the blocks: (local, remote). In a transfer of device memory, `apart` has the
    indexes of these regions for each block. Blocks of different regions are not joined, because the regions may be
    separate allocations, and a driver's copy must not extend over two allocations. `is_granted_write` says whether the
    transfer is a write with a grant."""

    link: Link | None
    known: Peer | None
    peer: str
    writes: bool
    rows: Rows
    kinds: tuple[str, str]
    holders: tuple[list[Region], list[Region]]
    apart: Rows | None
    is_granted_write: bool = False

    @property
    def of_devices(self) -> bool:
        return VRAM in self.kinds

    @property
    def is_apart(self) -> bool:  # whether the peer is treated as one on another host
        return self.link is not None and self.link.carrier == "tcp" and not self.link.pid

    @property
    def rails(self) -> int:  # the number of the link's libfabric endpoints
        return 0 if self.link is None else self.link.rails

    @property
    def is_in_process(self) -> bool:
        return self.link is None or self.link.pid == os.getpid()


class Preparer(Struct, eq=False):
    """Makes the transfers of one agent, by the allowed paths in `paths`. Any thread may call a preparer's methods."""

    _name: str
    _handle: ProxycclAgentPointer
    _devices: Devices
    _reached: Reached
    _pinned: Pinned
    _fabric: AgentFabric | None
    paths: frozenset[str]
    _warned: set[str] = set()

    def warn_once(self, what: str, reason: str, stacklevel: int = 6) -> None:
        """Warns that a slower path is used, unless `reason` is empty or this agent has warned of it before."""
        if reason and reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"agent {self._name} {what}: {reason}", RuntimeWarning, stacklevel=stacklevel)

    def prepare(self, pair: Pair) -> Transfer:
        """Makes a transfer by the fastest usable path.

        Raises:
            DisconnectedError: the link to the peer was lost.
            NoPathError: no device of this process can access both sides' memory, and no socket connects to the peer;
                or the path of a write with a grant is not one of `_BY_THREADS`.
        """
        reason = ""
        for path in _BY_THREADS if pair.is_granted_write else _PATHS:
            made = path(self, pair, reason)
            if isinstance(made, Transfer):
                return made
            reason = made or reason
        if pair.is_granted_write:
            link = Path("self") if pair.link is None else pair.link.path
            reason = (
                "a write with a grant needs a path on which threads of this process write the peer's host memory "
                f'("shared_memory", "process_vm" or "self"), not {link} from {pair.kinds[0]} to {pair.kinds[1]}'
            )
        raise NoPathError(reason, pair.peer)

    # Each of the following methods implements one path. The method returns a transfer, or the reason why the path can't
    # be used, or "" if the path is for other kinds of memory. `reason` is the reason why faster paths can't be used.

    def _by_mapping(self, pair: Pair, reason: str) -> Transfer | str:
        """The path "shared_memory": this process maps the peer's host memory, and the CPU copies."""
        known = pair.known
        if pair.of_devices or SHARED not in self.paths or known is None or known.ledger is None:
            return ""
        if not known.reached.of(pair.holders[1][:1]):  # the usual case, because most memory isn't shared
            return ""
        try:
            mapped, memories, _ = known.reached.map(None, pair.rows[:, 1], pair.holders[1])
        except NotSharedError:
            return ""
        except NoPathError as error:
            self.warn_once(f"can't map memory of agent {pair.peer}", str(error))
            return ""
        pair = replace(pair, rows=np.column_stack((pair.rows[:, 0], mapped, pair.rows[:, 2])))
        made = self._of_blocks(pair, Path(SHARED), lib.proxyccl_transfer_create, ffi.NULL, 0, kept=memories)
        return known.keep(made)

    def _by_fabric(self, pair: Pair, reason: str) -> Transfer | str:
        """The path by libfabric, where the hosts' adapters access the blocks directly."""
        known = pair.known
        if self._fabric is None or known is None or pair.link is None or not pair.rails:
            return ""
        try:
            requests = self._fabric.requests(pair.rows, pair.holders[0], known.keys, pair.rails)
        except NoPathError as error:
            return str(error)
        path = Path(fabric_path(self._fabric.rails.provider, of_devices=True)) if pair.of_devices else pair.link.path
        rows = ffi.cast("uint64_t *", requests.ctypes.data)
        handle = lib.proxyccl_transfer_create_by_fabric(
            self._handle, pair.link.handle, pair.writes, rows, len(requests)
        )
        return known.keep(self._made(pair, handle, path, sides(pair.rows, pair.apart), kept=requests))

    def _staged_by_fabric(self, pair: Pair, reason: str) -> Transfer | str:
        """The path by libfabric with staging: each side with a device copies between the device and pinned
        memory. If both sides have pinned memory, the peer's adapter copies between the two; if the peer's blocks are in
        host memory, this agent's adapter copies between these blocks and its pinned memory."""
        fabric, known = self._fabric, pair.known
        if fabric is None or known is None or not pair.rails or not pair.is_apart or not pair.of_devices:
            return ""
        if pair.kinds[0] == VRAM:
            copier, pair = self._mapped_here(pair)
        else:
            copier = self._devices.copier(0, "host")  # the CPU copies to and from the stages
        keys = None
        if pair.kinds[1] == DRAM:
            _, remote = sides(pair.rows, pair.apart)
            found = known.keys.find(remote[:, 0], remote[:, 1], pair.rails)
            if found is None:
                return ""
            keys = np.column_stack(found)
        self.warn_once("stages memory of devices through pinned memory", reason)
        path = staged_path(Path(fabric_path(fabric.rails.provider)), pair.kinds, reason)
        staging, staged = copier.staging(fabric.stages)
        create = lib.proxyccl_transfer_create_staged
        words = ffi.NULL if keys is None else ffi.cast("uint64_t *", keys.ctypes.data)
        options = staging, keys is None, words
        return known.keep(self._of_blocks(pair, path, create, *options, copier=copier, kept=(staged, keys)))

    def _by_kernel(self, pair: Pair, reason: str) -> Transfer | str:
        """The paths "process_vm", where the kernel copies between processes, and "self", where the CPU copies within
        the agent."""
        link = pair.link
        if pair.of_devices or reason or (link is not None and not link.pid):
            return reason
        path, pid = (Path("self"), 0) if link is None else (link.path, link.pid)
        return self._of_blocks(pair, path, lib.proxyccl_transfer_create, ffi.NULL, pid)

    def _staged_by_kernel(self, pair: Pair, reason: str) -> Transfer | str:
        """The path "copy engine and process_vm", between this process's device memory and another process's host
        memory, by way of pinned memory."""
        pid = 0 if pair.link is None or pair.is_in_process else pair.link.pid
        if not pid or pair.kinds != (VRAM, DRAM):
            return ""
        copier, pair = self._mapped_here(pair)
        why = "a device does not reach another process's memory of the host"
        path = Path("copy engine and process_vm, staged", why)
        staging, staged = copier.staging()
        return self._of_blocks(pair, path, lib.proxyccl_transfer_create, staging, pid, copier=copier, kept=staged)

    def _on_device(self, pair: Pair, reason: str) -> Transfer | str:
        """The path where a device of this process copies, because it can access both sides' memory."""
        link, known, rows, kinds = pair.link, pair.known, pair.rows, pair.kinds
        if not pair.of_devices or pair.is_apart or (kinds[1] == DRAM and not pair.is_in_process):
            return ""
        if known is not None and known.ledger is None:
            return "its registrations can't be looked at from here"
        theirs = self._reached if known is None else known.reached
        if kinds[0] == VRAM:
            copier = self._local_copier(pair)
        else:
            try:
                copier = self._devices.nearest(theirs.share(pair.holders[1][0]))
            except (NoPathError, RuntimeUnavailableError) as error:
                if link is None:
                    raise
                return str(error)
        mapped = rows.copy()
        kept: list[object] = []
        ways, unpinned = [], ""
        for column, kind, reached in ((0, kinds[0], self._reached), (1, kinds[1], theirs)):
            if kind == VRAM:
                try:
                    mapped[:, column], memories, way = reached.map(copier, rows[:, column], pair.holders[column])
                except NoPathError as error:
                    if link is None or reached is self._reached:
                        raise
                    if link.look():
                        raise DisconnectedError(f"agent {pair.peer}: {link.lost}", pair.peer) from None
                    return f"agent {pair.peer}: {error}"
                ways.append(way if column == 1 and not pair.is_in_process else "")
            else:
                memories, unpinned = self._pinned.pin(copier, pair.holders[column])
                ways.append("pinned memory" if memories else "")
            kept.append(memories)
        lists = local, remote = sides(mapped, pair.apart)
        to, source = (remote, local) if pair.writes else (local, remote)
        copies, by, planned = copier.plan(np.column_stack((to[:, 0], source)), kernels_reach=not unpinned)
        path = device_path(by, ways, unpinned)
        over = ffi.NULL if link is None else link.handle
        handle = lib.proxyccl_transfer_create_on_device(self._handle, over, pair.writes, copier.calls, copies)
        made = self._made(pair, handle, path, lists, copier=copier, is_queued=True, kept=(kept, planned))
        what = "copies between the host's memory and a device by way of the driver's buffers"
        self.warn_once(what, path.reason)
        return made if known is None else known.keep(made)

    def _by_socket(self, pair: Pair, reason: str) -> Transfer | str:
        """The path through the link's socket. Local device memory is copied by way of pinned memory."""
        link = pair.link
        if link is None:
            return ""
        if pair.of_devices:
            what = "stages memory of devices through a socket"
            path = staged_path(Path(link.carrier, link.path.reason), pair.kinds, reason)
        else:
            what = f"moves data to and from agent {pair.peer} through a socket"
            path = Path(link.carrier, reason) if reason else link.path
        if pair.known is None or pair.known.internal.isdisjoint(pair.holders[1]):  # a ledger has no libfabric key
            self.warn_once(what, reason)
        if pair.kinds[0] == DRAM:
            return self._of_blocks(pair, path, lib.proxyccl_transfer_create_by_socket)
        copier, pair = self._mapped_here(pair)
        staging, staged = copier.staging()
        create = lib.proxyccl_transfer_create_staged
        return self._of_blocks(pair, path, create, staging, 0, ffi.NULL, copier=copier, kept=staged)

    def _local_copier(self, pair: Pair) -> Copier:
        return self._devices.of(self._reached.share(pair.holders[0][0]))

    def _mapped_here(self, pair: Pair) -> tuple[Copier, Pair]:
        """Returns the copier of the local blocks' device, and a copy of `pair` with the blocks' addresses on this
        device."""
        copier, mapped = self._local_copier(pair), pair.rows.copy()
        mapped[:, 0], _, _ = self._reached.map(copier, mapped[:, 0], pair.holders[0])
        return copier, replace(pair, rows=mapped)

    def _of_blocks(self, pair: Pair, path: Path, create: Callable[..., Any], *options: object, **how: Any) -> Transfer:
        lists = local, remote = sides(pair.rows, pair.apart)
        addresses = (ffi.cast("uint64_t *", each.ctypes.data) for each in lists)
        blocks = ffi.new("ProxycclBlocks *", [pair.writes, *addresses, len(local)])
        handle = create(self._handle, ffi.NULL if pair.link is None else pair.link.handle, blocks, *options)
        return self._made(pair, handle, path, (local, remote), **how)

    def _made(self, pair: Pair, handle: Any, path: Path, lists: tuple[Rows, Rows], **how: Any) -> Transfer:
        return Transfer(handle, pair.link, pair.peer, pair.writes, lists, path, self._devices, **how)


_PATHS = (
    Preparer._by_mapping,
    Preparer._by_fabric,
    Preparer._staged_by_fabric,
    Preparer._by_kernel,
    Preparer._staged_by_kernel,
    Preparer._on_device,
    Preparer._by_socket,
)
"""The paths of transfers, the best first."""

_BY_THREADS = (Preparer._by_mapping, Preparer._by_kernel, Preparer._staged_by_kernel)
"""The paths on which threads of this process write the peer's memory. Only on these paths, no byte arrives after the
transfer has ended, even if it was canceled or its process was killed. A socket and an adapter may hold data that
arrives later, and a device may copy for some time after its process has ended.
"""
