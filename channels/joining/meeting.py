"""Meetings: the steps by which ranks become a group.

New ranks meet over a bootstrap. If ranks of a group form a new group, for example after a failure, they meet in the
control segments that they have mapped.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from msgspec import Struct
from msgspec.structs import replace

from proxyccl.channels.joining.bootstrap import Bootstrap
from proxyccl.channels.joining.exchange import HANDLE, Exchange
from proxyccl.channels.joining.proxy_place import ProxyOptions, ProxyPlace, choose_place
from proxyccl.channels.joining.survivors import MOST_ATTEMPTS, Board, SegmentBoard, Survivors
from proxyccl.channels.joining.topology import (
    RANK_INFO,
    RankInfo,
    Topology,
    TransportChoice,
    chosen_local_world_size,
    encode_choice,
)
from proxyccl.channels.joining.whereabouts import WHEREABOUTS, Whereabouts, find_hosts, open_ways
from proxyccl.channels.liveness.host_links import OFFER, HostLink, Listener
from proxyccl.channels.segment.control import ControlSegment, create_segment
from proxyccl.channels.segment.process_descriptors import PeerProcess
from proxyccl.channels.segment.rendezvous import Mailboxes, key_of, wait_until
from proxyccl.device.errors import (
    AbortedError,
    ArgumentError,
    CommunicatorError,
    MismatchError,
    PeerLostError,
    ProxyCCLError,
    ResourceError,
    RuntimeUnavailableError,
    WaitTimeoutError,
    raise_in_place_of,
    renumbered,
)
from proxyccl.device.memory.descriptors import naming_exhaustion
from proxyccl.device.runtime import Runtime
from proxyccl.device.runtimes import open_runtime, require_suspendable
from proxyccl.proxy.codec import Codec
from proxyccl.proxy.daemon.connection import missing_in_daemon
from proxyccl.proxy.daemon.introduced import is_offered
from proxyccl.proxy.daemon.protocol import socket_path
from proxyccl.proxy.remote_options import TransportOptions
from proxyccl.proxy.transports.table import missing_transports

_NAME = Codec(str, 4096, "name")
_PART = Codec[tuple[list[int], str]](tuple[list[int], str], 1 << 20, name="split")


class Options(Struct, frozen=True):
    """The options that the caller passed to `Communicator`. Groups that are made from a group have its options."""

    proxy: ProxyOptions
    transports: TransportOptions
    transport: TransportChoice
    local_world_size: int | None
    linger: float | None
    suspendable: bool = False


class Meeting(Struct, frozen=True):
    """One rank's state after the ranks of a group have met."""

    runtime: Runtime  # this rank's runtime
    exchange: Exchange  # all-gathers between all ranks
    control: ControlSegment  # this rank's control segment
    segments: dict[int, ControlSegment]  # the mapped segments of the host's other ranks
    processes: Mapping[int, PeerProcess]  # by rank, the other processes of this host; empty for a group made by `split`
    topology: Topology  # the ranks' hosts, nodes and transports
    job: str  # the group's name, the same on all ranks
    place: ProxyPlace  # where this rank's proxy runs
    options: Options  # the caller's options
    bootstrap: Bootstrap  # the bootstrap over which the ranks met
    owns_bootstrap: bool  # whether closing the group closes the bootstrap
    members: tuple[int, ...] = ()  # if the group was made from an old group, its ranks' numbers in the old group
    # For each rank of this host whose descriptors this rank can't open in /proc, the kind of socket over which the two
    # ranks pass descriptors.
    ways: dict[int, str] = {}
    crosses_namespaces: bool = False  # whether `ways` is not empty, or this rank's daemon is in another PID namespace


def meet(
    bootstrap: Bootstrap,
    runtime: Runtime | str | None,
    options: Options,
    *,
    owns_bootstrap: bool,
    timeout: float,
    device: int | None = None,
    give_up: Callable[[], None] = lambda: None,
) -> Meeting:
    """Forms a group of all ranks of a bootstrap. All of these ranks call `meet` together. Takes the arguments and
    raises the errors of `Communicator`. `give_up` is called while this rank waits; it raises to end the wait early.
    Closes the bootstrap on failure if `owns_bootstrap` is true.
    """
    exchange = Exchange(bootstrap, timeout, give_up)
    # If this rank fails, it reports the failure to the other ranks before it frees what it has made.
    with contextlib.ExitStack() as undo, exchange.telling():
        if owns_bootstrap:
            undo.callback(bootstrap.close)
        rank, world_size = bootstrap.rank, bootstrap.world_size
        if options.suspendable:
            require_suspendable(runtime)
        places = exchange.all_gather(Whereabouts.own(), WHEREABOUTS, "hosts")
        hosts = find_hosts(places)
        of_host = [peer for peer in range(world_size) if peer != rank and hosts[peer] == hosts[rank]]
        exchange.processes = _others({peer: places[peer].process for peer in of_host})
        ways = open_ways(places, hosts, rank, timeout)
        if runtime is None or isinstance(runtime, str):
            runtime = open_runtime(runtime, device, local_rank=hosts[:rank].count(hosts[rank]))
        runtime.activate()
        control = create_segment(runtime, rank, timeout, world_size)
        undo.callback(control.close)
        place = choose_place(options.proxy.where, runtime.name, hosts[rank], exchange)
        in_daemon = place.where == "daemon"
        daemon_missing, missing = missing_in_daemon(timeout) if in_daemon else ("", missing_transports())
        crosses_namespaces = bool(ways) or (in_daemon and is_offered(socket_path()))
        if crosses_namespaces:
            runtime.share_across_namespaces()
        own = replace(
            RankInfo.own(runtime),
            host=hosts[rank],
            missing=missing,
            transport=encode_choice(options.transport, world_size),
            local_world_size=chosen_local_world_size(options.local_world_size, world_size),
            daemon_missing=daemon_missing,
        )
        infos = exchange.all_gather(own, RANK_INFO, "topology")
        topology = Topology.find(rank, infos, runtime)
        # If a pair of ranks has no transport, all ranks raise an error here, before they map memory or wait for each
        # other.
        topology.has_remote_pairs()
        handles = exchange.all_gather(control.memory.handle, HANDLE, "control segments")
        segments: dict[int, ControlSegment] = {}
        for peer in of_host:
            try:
                segments[peer] = ControlSegment(runtime.open_pinned(handles[peer]))
            except ArgumentError:
                exchange.require_processes("control segments")
                raise
            undo.callback(segments[peer].close)
        control.introduce(segments)
        # No rank leaves this exchange before all ranks have mapped all segments, so no segment is freed too early. A
        # rank that could not map a segment reports this failure in the exchange.
        job = exchange.all_gather(os.urandom(4).hex(), _NAME, "job")[0]
        if not topology.spans_hosts:
            exchange.carry_over(_mailboxes(rank, control, segments))
        undo.pop_all()
        return Meeting(
            runtime,
            exchange,
            control,
            segments,
            exchange.processes,
            topology,
            job,
            place,
            options,
            bootstrap,
            owns_bootstrap,
            ways=ways,
            crosses_namespaces=crosses_namespaces,
        )


def _others(processes: Mapping[int, PeerProcess]) -> dict[int, PeerProcess]:
    """Returns the processes of a host's ranks, by rank, without this process."""
    return {peer: process for peer, process in processes.items() if not process.is_here}


def regroup(
    whole: Meeting, bootstrap: Bootstrap, timeout: float, give_up: Callable[[], None], *, owns_bootstrap: bool
) -> Meeting:
    """Forms a group of the ranks of a bootstrap. In the new group this rank keeps the runtime and options of its old
    group. See `meet`."""
    topology = whole.topology
    transport, of_node = topology.forced_for_all or topology.forced, topology.ranks[topology.rank].local_world_size
    options = replace(whole.options, transport=transport, local_world_size=of_node)
    return meet(bootstrap, whole.runtime, options, owns_bootstrap=owns_bootstrap, timeout=timeout, give_up=give_up)


def meet_apart(
    whole: Meeting,
    topology: Topology,
    members: Sequence[int],
    meetings: Counter[tuple[int, ...]],
    timeout: float,
    give_up: Callable[[], None],
    mapping_of: Callable[[int], AbstractContextManager[None]],
    own: Bootstrap | None,
) -> Meeting:
    """Forms a new group of some ranks of a group, numbered in the order of `members`. The ranks in `members` call
    `meet_apart` together.

    Args:
        whole: the meeting of all ranks.
        topology: the topology of all ranks.
        members: the ranks of the new group; the same list on all of them.
        meetings: for each list of ranks, the number of their calls of `meet_apart` without `own`, which this function
            increments.
        timeout: the longest that each wait of the new group may take, in seconds.
        give_up: called while waiting; it raises to end the wait early.
        mapping_of: returns a context for mapping a rank's memory; if the mapping fails because the rank has failed, the
            context raises the rank's failure (`Group.mapping_of`).
        own: a bootstrap of the members, which the caller must close. If `own` is None, the members meet in their
            control segments, under a key made from their numbers and the number of their earlier meetings.

    Raises:
        WaitTimeoutError: not all members called this within `timeout`.
        AbortedError: a member can't take part.
        ResourceError: this rank has no file descriptor left.
        MismatchError: members passed different lists.
        RuntimeUnavailableError: the members are on several hosts, and the bootstrap has no `subset`.
    """
    whole.runtime.activate()
    part = topology.part(members)
    ranks = tuple(sorted(members))
    key = key_of("split", list(ranks), meetings[ranks])
    bootstrap = own
    if own is None and part.spans_hosts:
        bootstrap = _subset(whole.bootstrap, members, key)
    if bootstrap is None:
        refusals = _Refusals(whole, members, meetings[ranks], give_up)
        telling = refusals.telling()
        explaining: Callable[[], AbstractContextManager[None]] = refusals.explaining
    else:
        exchange = Exchange(bootstrap, timeout, give_up)
        telling, explaining = exchange.telling(), contextlib.nullcontext
    counting = _counted(meetings, ranks, bootstrap) if own is None else contextlib.nullcontext()
    # If this rank fails, it reports the failure to the other members before it frees what it has made.
    with contextlib.ExitStack() as undo, telling, counting:
        control = create_segment(whole.runtime, part.rank, timeout, len(members))
        undo.callback(control.close)
        if bootstrap is not None:
            with _naming_as_in_whole(members, give_up):
                offered = exchange.all_gather(control.memory.handle, HANDLE, "control segments")
            handles = {peer: offered[peer] for peer in range(len(members)) if part.same_host(peer)}
        else:
            place = whole.control.rendezvous.invite(key, control.memory.handle)
            undo.callback(whole.control.rendezvous.withdraw, place)
            handles = _find_handles(whole, members, key, timeout, refusals.check)
        segments: dict[int, ControlSegment] = {}
        for peer, handle in handles.items():
            if peer != part.rank:
                with mapping_of(members[peer]), explaining():
                    segments[peer] = ControlSegment(whole.runtime.open_pinned(handle))
                undo.callback(segments[peer].close)
        control.introduce(segments)
        if bootstrap is None:
            bootstrap = _mailboxes(part.rank, control, segments)
            exchange = Exchange(bootstrap, timeout, refusals.check)
        # After this exchange all members have mapped all segments, so the invitation can be withdrawn.
        with _naming_as_in_whole(members, give_up):
            answers = exchange.all_gather((list(members), os.urandom(4).hex()), _PART, "split")
        for peer, (theirs, _) in enumerate(answers):
            if theirs != list(members):
                raise MismatchError(
                    f"ranks: {list(members)} here, {theirs} on rank {members[peer]}",
                    argument="ranks",
                    rank=whole.exchange.rank,
                    peer=members[peer],
                )
        undo.pop_all()
        if own is not None and not part.spans_hosts:
            bootstrap = _mailboxes(part.rank, control, segments)
            exchange.carry_over(bootstrap)
        elif not part.spans_hosts:
            whole.control.rendezvous.withdraw(place)
    return replace(
        whole,
        exchange=exchange,
        control=control,
        segments=segments,
        processes={},
        topology=part,
        job=answers[0][1],
        bootstrap=bootstrap,
        owns_bootstrap=bootstrap is not own,
        members=tuple(members),
        ways=_ways_of(whole, members),
    )


@contextlib.contextmanager
def _naming_as_in_whole(members: Sequence[int], give_up: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except CommunicatorError as error:
        give_up()  # if the old group failed, raises the old group's error, with that group's rank numbers
        raise_in_place_of(error, renumbered(error, members))


@contextlib.contextmanager
def _counted(meetings: Counter[tuple[int, ...]], ranks: tuple[int, ...], bootstrap: Bootstrap | None) -> Iterator[None]:
    """Returns a context that adds 1 to `meetings[ranks]`, unless the meeting ends by a time-out. A meeting's key
    contains this count, so a retry after a time-out has the same key, and late ranks can join the retry.

    Args:
        bootstrap: the bootstrap over which the ranks meet; None if they meet in control segments.
    """
    try:
        yield
    except WaitTimeoutError:
        withdraw: Callable[[], None] | None = getattr(bootstrap, "withdraw", None)
        if withdraw is not None:
            withdraw()
        raise
    except Exception:
        meetings[ranks] += 1
        raise
    meetings[ranks] += 1


def meet_survivors(
    whole: Meeting, topology: Topology, excluded: Collection[int], has_ended: Callable[[int], bool], timeout: float
) -> Meeting:
    """Forms a new group of the remaining ranks of a group, in the order of their numbers. Each remaining rank calls
    `meet_survivors` once.

    Args:
        whole: the meeting of all ranks.
        topology: the topology of all ranks.
        excluded: ranks that must not be in the new group; the same on all callers.
        has_ended: returns whether a rank can no longer take part.
        timeout: the time-out of the new group, and the longest wait for other ranks, in seconds. Ranks that arrive
            after the wait are excluded.

    Raises:
        ExcludedError: this rank came too late, so the new group does not include it.
        MismatchError: another rank passed a different `excluded`.
        PeerLostError: ranks were lost in every attempt.
        ResourceError: this rank has no file descriptor left. The other ranks form the new group without this rank.
        RuntimeUnavailableError: the ranks are on several hosts, and the bootstrap has no board.
    """
    whole.runtime.activate()
    rank, world_size = topology.rank, topology.world_size
    survivors = Survivors(board_of(whole, topology), rank, world_size, excluded, has_ended, timeout)
    for attempt in range(MOST_ATTEMPTS):
        with contextlib.ExitStack() as undo:
            control = create_segment(whole.runtime, rank, timeout, world_size)
            undo.callback(control.close)
            assembly = survivors.assemble(attempt, control.memory.handle)
            part = topology.part(assembly.members)
            segments: dict[int, ControlSegment] = {}
            try:
                for peer, member in enumerate(assembly.members):
                    if peer != part.rank and part.same_host(peer):
                        handle = assembly.notes[member]
                        segments[peer] = ControlSegment(whole.runtime.open_pinned(handle))
                        undo.callback(segments[peer].close)
                joined = True
            except ResourceError:  # this rank failed, so the other ranks continue without it
                raise
            except ProxyCCLError:  # a member has ended since `assemble`
                joined = False
            if not survivors.all_joined(assembly, joined=joined):
                continue
            undo.pop_all()
            control.initialise(part.rank, timeout)
            control.introduce(segments)
            if part.spans_hosts:
                bootstrap = _subset(whole.bootstrap, assembly.members, int(assembly.token, 16))
            else:
                bootstrap = _mailboxes(part.rank, control, segments)
            return replace(
                whole,
                exchange=Exchange(bootstrap, timeout),
                control=control,
                segments=segments,
                processes=_others({peer: part.ranks[peer].process for peer in segments}),
                topology=part,
                job=assembly.token,
                bootstrap=bootstrap,
                owns_bootstrap=True,
                members=assembly.members,
                ways=_ways_of(whole, assembly.members),
            )
    raise PeerLostError(f"shrink: ranks were lost in each of {MOST_ATTEMPTS} attempts", rank=rank, operation="shrink")


def link_hosts(topology: Topology, exchange: Exchange) -> dict[int, HostLink]:
    """Connects this rank to the ranks of other hosts, and returns the connections by rank. All ranks of a group call
    `link_hosts` together."""
    others = [peer for peer in range(topology.world_size) if not topology.same_host(peer)]
    if not others:
        return {}
    with contextlib.closing(Listener(topology.rank)) as listener:
        offers = exchange.all_gather(listener.offer(len(others)), OFFER, "links between hosts")
        return listener.join(others, offers, exchange.timeout)


def _ways_of(whole: Meeting, members: Sequence[int]) -> dict[int, str]:
    return {peer: whole.ways[member] for peer, member in enumerate(members) if member in whole.ways}


def board_of(whole: Meeting, topology: Topology) -> Board:
    """Returns the board of a group. Raises RuntimeUnavailableError if the bootstrap of several hosts has none."""
    if not topology.spans_hosts:
        segments = {topology.rank: whole.control, **whole.segments}
        return SegmentBoard(topology.rank, {peer: segment.rendezvous for peer, segment in segments.items()})
    board: Callable[[], Board] | None = getattr(whole.bootstrap, "board", None)
    if board is None:
        raise RuntimeUnavailableError(
            f"the ranks are on several hosts, and {type(whole.bootstrap).__name__} has no board"
        )
    return board()


class _Refusals:
    """Reports to the members of a new group on one host that a member can't take part. The failed member writes the
    reason to its old control segment, which the other members check while they wait.
    """

    def __init__(self, whole: Meeting, members: Sequence[int], number: int, give_up: Callable[[], None]) -> None:
        self._whole, self._give_up = whole, give_up
        self._key = key_of("refused", sorted(members), number)
        self._others = [member for member in members if member in whole.segments]

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Returns a context for this rank's part of the split: if it fails, the other members raise an error with the
        reason.

        Raises:
            ResourceError: no file descriptor is left.
        """
        try:
            with naming_exhaustion("this rank's part of the split"):
                yield
        except CommunicatorError:
            raise
        except Exception as error:
            self._whole.control.rendezvous.refuse(self._key, f"{type(error).__name__}: {error}")
            raise

    def check(self) -> None:
        self._give_up()
        for member in self._others:
            reason = self._whole.segments[member].rendezvous.find(self._key)
            if reason is not None:
                raise AbortedError(
                    f"split: rank {member} can't take part: {reason.decode(errors='replace')}",
                    rank=member,
                    operation="split",
                )

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        try:
            yield
        except ArgumentError:
            self.check()
            raise


def _find_handles(
    whole: Meeting, members: Sequence[int], key: int, timeout: float, give_up: Callable[[], None]
) -> dict[int, bytes]:
    """Waits for the other members' invitations under `key`, and returns their segments' handles, by index in
    `members`."""
    own = whole.exchange.rank
    missing = {peer: number for number, peer in enumerate(members) if peer != own}
    handles: dict[int, bytes] = {}

    def look() -> bool:
        for peer, number in list(missing.items()):
            if (handle := whole.segments[peer].rendezvous.find(key)) is not None:
                handles[number] = handle
                del missing[peer]
        return not missing

    def late() -> WaitTimeoutError:
        message = f"split: ranks {sorted(missing)} did not come within {timeout:g} s"
        return WaitTimeoutError(message, rank=own, peer=min(missing), operation="split")

    wait_until(look, time.monotonic() + timeout, give_up, late)
    return handles


def _mailboxes(rank: int, control: ControlSegment, segments: Mapping[int, ControlSegment]) -> Mailboxes:
    return Mailboxes(rank, control.rendezvous, {peer: segment.rendezvous for peer, segment in segments.items()})


def _subset(bootstrap: Bootstrap, members: Sequence[int], key: int) -> Bootstrap:
    subset: Callable[[Sequence[int], int], Bootstrap] | None = getattr(bootstrap, "subset", None)
    if subset is None:
        raise RuntimeUnavailableError(
            f"split: the ranks are on several hosts, and {type(bootstrap).__name__} can't join some of its ranks alone"
        )
    return subset(members, key)
