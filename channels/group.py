"""`Group`: one rank of a communicator, on which the other modules of this directory build."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from proxyccl.channels.calls.launches import Launches
from proxyccl.channels.device_memory import DeviceMemory
from proxyccl.channels.handles import Inventory
from proxyccl.channels.joining.bootstrap import Bootstrap
from proxyccl.channels.joining.exchange import FLAG
from proxyccl.channels.joining.meeting import Meeting, board_of, link_hosts, meet_apart, meet_survivors, regroup
from proxyccl.channels.joining.one_caller import OneCaller
from proxyccl.channels.joining.survivors import MOST_GROWTHS, settle_growth
from proxyccl.channels.lent_memory import LentMemory
from proxyccl.channels.liveness.aftermath import Aftermath
from proxyccl.channels.liveness.failure import FailureState, Observer
from proxyccl.channels.liveness.host_links import HostLink
from proxyccl.channels.liveness.watcher import Watcher, WatchThread
from proxyccl.channels.peer_links import PeerLinks
from proxyccl.channels.segment.call_log import CallLog
from proxyccl.channels.segment.calls import CollectiveCall, register_names
from proxyccl.channels.segment.control import Presence
from proxyccl.channels.segment.published import Neighbour, Published
from proxyccl.channels.semaphore_words import SemaphoreWords
from proxyccl.channels.symmetric import SymmetricMemory
from proxyccl.channels.vain_waits import VainWaits
from proxyccl.device.driver import LOST_CONTEXT
from proxyccl.device.errors import (
    ArgumentError,
    ClosedError,
    CommunicatorError,
    DriverError,
    KernelError,
    ProxyCCLError,
    ResourceError,
    RuntimeUnavailableError,
    SuspendedError,
    WaitTimeoutError,
)
from proxyccl.device.memory.descriptors import naming_exhaustion
from proxyccl.device.memory.handle_cache import HandleCache
from proxyccl.device.memory.machine_memory import free_memory
from proxyccl.device.process import forks
from proxyccl.device.process.interrupts import in_handler
from proxyccl.device.process.threads import Thread
from proxyccl.device.runtime import StreamLike
from proxyccl.proxy.codec import Codec, Message, Uint64
from proxyccl.proxy.observe.publications import Description

_CIRCLE_SECONDS = 0.1
"""Seconds after which a peer that waits for the end of another communicator is assumed to wait for this rank."""
_POLL_SECONDS = 0.0005
_LOOK_SECONDS = 0.25
"""Seconds between the watcher's calls of `Group._look`."""


class Shared(Protocol):
    """An owner of memory that peers' kernels or proxies access."""

    def close(self) -> None:
        """Frees the memory, which no rank may use any longer."""


class StreamWaits(Protocol):
    """Words in this rank's memory that no proxy writes and on which this rank's streams wait."""

    def look_for_timeouts(self, now: float) -> None:
        """Aborts the communicator if a stream has waited for too long; `now` is a time of `time.monotonic`."""

    def release_streams(self) -> None:
        """Sets the words so that no stream waits for them, now or later."""


class _Blocks(Message, frozen=True):
    """The addresses of a rank's blocks, the token of the rank's process, and why the rank can't suspend or resume the
    blocks, "" if it can.
    """

    process: bytes
    bases: list[Uint64]
    lack: str = ""
    saved: Uint64 = 0  # bytes of host memory that the rank needs for saved contents


_BLOCKS = Codec(_Blocks, 16 << 20, name="suspended blocks")
_SUSPENDS = {
    (True, False): "suspend",
    (False, False): "suspend(save=False)",
    (True, True): "suspend(resume_on_call=True)",
    (False, True): "suspend(save=False, resume_on_call=True)",
}
"""The names of `suspend` in the call log, by `save` and `resume_on_call`."""
register_names(*_SUSPENDS.values())


def _of_ranks(reasons: list[str]) -> str:
    return "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)


class Group:
    """One rank of a communicator.

    All ranks make their groups together, then `open` them. A `Communicator` holds a group, and adds the public methods.

    Attributes:
        rank, world_size: this rank's number, and the number of ranks.
        timeout: bound of every wait, in seconds.
        thread: number of the thread that made the group.
        topology: the placement of the ranks.
        runtime, exchange, control, job, ways, members: as for `Meeting`.
        linger: how long the exiting process waits for peers, in seconds; None for the time-out.
        parent: the group from which this group was split, or None; this group fails or closes with its parent.
        failure: whether the group can still be used.
        launches: orders this rank's launches.
        links: this rank's proxy, and its connections.
        mappings: the memory of peers that this process has mapped.
        stream_waits: objects that own words that no proxy writes and on which this rank's streams wait.
        vain_waits: makes the group fail if this rank waits for peers that make no more calls.
        inventory: the channels and semaphores in use.
        device_memory: allocates this rank's device memory, by purpose.
        semaphore_words: the words in which peers' kernels store counts of signals.
        symmetric: this rank's arrays that peers' kernels can access.
        lent_memory: memory of other allocators that peers can access.
        kept: the memory that `keep` keeps alive, the oldest first.
    """

    def __init__(self, meeting: Meeting, parent: Group | None = None, mapped: HandleCache | None = None) -> None:
        try:
            with meeting.exchange.telling():
                self._begin(meeting, parent, mapped)
        except BaseException:
            meeting.control.set_presence(Presence.LEFT)  # peers then don't wait for kernels of this rank
            self.discard()
            raise

    def _begin(self, meeting: Meeting, parent: Group | None, mapped: HandleCache | None) -> None:
        self._closing = threading.RLock()
        self._released = True  # keeps `discard` from freeing anything until all fields are set
        self._meeting = meeting
        self.parent = parent
        self._shrunk = ""  # the advice in the error that a second `shrink` raises
        self._next_look = 0.0
        self._children: list[Group] = []
        self._splits: Counter[tuple[int, ...]] = Counter()
        self._one_caller = OneCaller()
        self._growths = 0
        self.linger, self.ways, self.members = meeting.options.linger, meeting.ways, meeting.members
        self._numbers: dict[str, tuple[int, ...]] = {}  # ranks' former numbers, by name of a former group
        self.exchange = exchange = meeting.exchange
        self.rank, self.world_size, self.timeout = exchange.rank, exchange.world_size, exchange.timeout
        self.thread = threading.get_ident()
        self.runtime, self.control, self.job = meeting.runtime, meeting.control, meeting.job
        self.failure: FailureState = FailureState(self.rank, self.control, None if parent is None else parent.failure)
        self._segments = meeting.segments
        self._mapped = HandleCache(self.runtime.open) if mapped is None else mapped.hold()
        self.mappings = HandleCache(self._mapped.lease, below=self._mapped)
        call_log = CallLog(self.control, self._segments, self.rank)
        self.launches = Launches(self.runtime, self.failure, call_log, self.rank, self.world_size)
        self.vain_waits = VainWaits(meeting, self.failure, self.launches)
        self.inventory = Inventory()
        self.device_memory = DeviceMemory(self.runtime, self.control, suspendable=meeting.options.suspendable)
        self.symmetric = SymmetricMemory(meeting, self.mappings, self.launches.calls, self.device_memory)
        self.lent_memory = LentMemory(self.runtime, self.symmetric, self.launches.calls)
        self.kept: list[Shared] = []
        self.semaphore_words = SemaphoreWords(self.runtime, self.device_memory, self.mappings, exchange, self.keep)
        self.stream_waits: list[StreamWaits] = []
        self._aftermath = Aftermath(
            self.rank,
            self.control,
            self._segments,
            {peer: meeting.topology.ranks[peer].process for peer in self._segments},
            lambda: self.timeout,
        )
        self._watcher: Watcher
        self.runtime.in_flight.follow(self.launches)
        self._description = Description.of_this_program(self.rank, self.world_size, self.job, meeting.ways)
        of_parent = None if parent is None else parent.links
        self.links: PeerLinks = PeerLinks(meeting, self.failure, self.device_memory, self._description, of_parent)
        self._published: Published | None = None
        self._host_links: dict[int, HostLink] = {}
        self._end_pins = self.runtime.keep_pins()
        self._released = False
        self.links.bring_up()
        self.topology = self.links.topology
        self._host_links = link_hosts(self.topology, exchange)

    def split(self, members: Sequence[int], timeout: float, bootstrap: Bootstrap | None) -> Group:
        """Makes a group of `members`, numbered by their index in the list. Only the members call this, and then `open`
        the new group.

        The new group fails or closes with this group. Raises the errors of `meet_apart`; and ConcurrentCallError if
        another thread splits the same ranks, unless each thread passes its own `bootstrap` of the members.
        """
        check = self.failure.require_usable
        alone = self._one_caller.only("split", tuple(sorted(members)))
        with alone if bootstrap is None else contextlib.nullcontext():
            meeting = meet_apart(
                self._meeting, self.topology, members, self._splits, timeout, check, self.mapping_of, bootstrap
            )
            return Group(meeting, self, self._mapped)

    def shrink(self, excluded: Collection[int], timeout: float) -> Group:
        """Makes a group of the remaining ranks. Only the remaining ranks call this, once, and then `open` the new
        group, which outlives this group.

        If a rank arrives too late, this group fails, because its later calls would wait for that rank again.

        Raises the errors of `meet_survivors`; and ClosedError if this rank has called `shrink` before.
        """
        with self._closing:
            if self._shrunk:
                raise ClosedError(f"the communicator was shrunk before; {self._shrunk}")
            self._shrunk = "shrink the communicator that the first call returned"
        self._stop_work()
        try:
            with naming_exhaustion("this rank's part of the communicator"):
                meeting = meet_survivors(self._meeting, self.topology, excluded, self._watcher.has_ended, timeout)
        except ProxyCCLError as error:  # refuses a retry, which would find the failed attempt's notes on the board
            self._shrunk = f"that failed ({type(error).__name__}): make a new Communicator over a bootstrap"
            raise
        for peer in set(range(self.world_size)) - {*meeting.members, *excluded}:
            if not self._watcher.has_ended(peer):
                self.late(peer, "shrink", "come", timeout)
        shrunk = Group(meeting, mapped=self._mapped)
        earlier = {job: tuple(numbers[member] for member in meeting.members) for job, numbers in self._numbers.items()}
        shrunk._numbers = {self.job: meeting.members, **earlier}
        return shrunk

    def numbers_in(self, whole: Group) -> tuple[int, ...] | None:
        """Returns the ranks' numbers in a group from which this group was shrunk, in one or several steps; None if
        this group was not shrunk from `whole`.
        """
        return self._numbers.get(whole.job)

    def grow(self, bootstrap: Bootstrap, timeout: float, *, owns_bootstrap: bool) -> Group:
        """Makes a group of the ranks of a bootstrap, including this rank. The new group outlives this group. Raises the
        errors of `meet`; this group's failure, if this group fails during the call; or ResourceError if this group has
        grown too often.
        """
        if self._growths == MOST_GROWTHS:
            raise ResourceError(f"grow: a communicator grows at most {MOST_GROWTHS} times")
        with self._one_caller.only("grow"):
            check = self.failure.require_usable
            meeting = regroup(self._meeting, bootstrap, timeout, check, owns_bootstrap=owns_bootstrap)
            return Group(meeting, mapped=self._mapped)

    def all_have_grown(self, timeout: float, *, joined: bool) -> bool:
        """Returns whether all ranks of this group have joined a grown group; the same on all ranks, even if some of
        them end during the call. Between hosts, a bootstrap without a board can't keep ranks from getting different
        results if a rank ends in the middle of this call.

        Args:
            timeout: the time-out of the grown group's waits, for which other ranks may still wait for new ranks.
            joined: whether this rank has joined.
        """
        try:
            longest = self.timeout + timeout
            everyone: list[bool] = self.exchange.all_gather(joined, FLAG, "grow", longest)
            if not all(everyone):
                return False
        except CommunicatorError:  # other ranks may have got all messages of this exchange
            joined = False
        number, self._growths = self._growths, self._growths + 1
        if self.topology.spans_hosts and not hasattr(self._meeting.bootstrap, "board"):
            return joined
        return settle_growth(board_of(self._meeting, self.topology), number, grown=joined)

    def _stop_work(self) -> None:
        """Waits for this rank's kernels and proxy. After a failure, also stops this rank's proxy, so that this rank no
        longer accesses its peers' memory.
        """
        self._end_kernels()
        with contextlib.suppress(CommunicatorError):
            self.links.drain()
        if self.failure.aborted:
            self.failure.observer.close()  # waits for a running report, which reads the proxy's state
            if self.links.close():
                self.control.set_presence(Presence.STOPPED)

    def _end_kernels(self) -> None:
        self.launches.wait_for_launchers()
        try:
            self.runtime.synchronize()
        except KernelError as error:
            _logger.warning("rank %d: a kernel failed, as the end of its communicator found: %s", self.rank, error)

    def open(self, observer: Observer) -> None:
        """Opens the group: begins to detect failures, to tell the peers about them, and to report them. If `open`
        raises an error, the caller calls `discard`.
        """
        # `Collectives.start` makes another exchange, so no kernel waits for a peer before all ranks have opened their
        # groups.
        try:
            self._begin_watching(observer)
        except BaseException:
            observer.close()
            raise
        with open_lock:
            orphan = self.parent is not None and self.parent.failure.closed
            if not orphan:
                open_groups.append(self)
                if self.parent is not None:
                    self.parent._children.append(self)
        if orphan:
            self.failure.abort("the communicator that it was split from was closed")
            self.release(healthy=False)
            raise ClosedError("the communicator was closed meanwhile")

    def _begin_watching(self, observer: Observer) -> None:
        def each_turn() -> int:
            self.symmetric.update()
            self.lent_memory.update()
            now = time.monotonic()
            for waits in tuple(self.stream_waits):
                waits.look_for_timeouts(now)
            self.vain_waits.look(now, lambda: not self.peers_present())
            if self.control.take_report_request():
                observer.asked()
            if (proxy := self.links.proxy_if_started) is not None:
                proxy.check_turns(self.timeout)
            if now >= self._next_look:
                self._next_look = now + _LOOK_SECONDS
                self._look()
            return self.launches.log.count

        def end_waits() -> None:
            if (proxy := self.links.proxy_if_started) is not None:
                proxy.end_waits()
            for waits in tuple(self.stream_waits):
                waits.release_streams()

        def stopped_proxy() -> str:
            proxy = self.links.proxy_if_started
            return proxy.stopped() if proxy is not None else ""

        def failed() -> None:
            self.failure.find_cause()
            observer.failed()

        self._watcher = Watcher(
            self.rank,
            self.control,
            self._segments,
            self._meeting.processes,
            self._host_links,
            on_abort=failed,
            each_turn=each_turn,
            end_waits=end_waits,
            on_error=lambda error: self.failure.abort(f"its watcher has failed: {type(error).__name__}: {error}"),
            parent=None if self.parent is None else self.parent._watcher,
            members=self._meeting.members,
        )
        self._aftermath.begin()
        self.failure.watch(self._watcher, observer, stopped_proxy)
        self.exchange.guard(self.failure, self._watcher)
        self._published = self._publish()

    def _look(self) -> None:
        """Publishes the account of device memory. Queries the driver whether an error has destroyed this process's GPU
        context; if so, the group fails."""
        self.device_memory.publish()
        if self.parent is None:
            try:
                self.launches.default_stream.query()
            except DriverError as error:  # `_file` ignores the errors that the driver returns while the process exits
                self._file(error)

    def _publish(self) -> Published:
        ranks = self.topology.ranks
        own = ranks[self.rank]
        neighbours = tuple(
            Neighbour(rank, ranks[rank].process.pid, ranks[rank].process.started or 0)
            for rank in range(self.world_size)
            if self.topology.same_host(rank) and (rank == self.rank or ranks[rank].process.is_visible)
        )
        return Published(self.control, self._description, own.host, own.runtime, self.runtime.device, neighbours)

    @property
    def crosses_namespaces(self) -> bool:
        """Whether ranks of this host, or the daemon of this rank's proxy, are in PID namespaces other than this
        rank's.
        """
        return self._meeting.crosses_namespaces

    @property
    def schedules_need_registration(self) -> bool:
        """Whether schedules use only memory that all ranks have registered together (schedules/memory.py)."""
        return self.topology.has_remote_pairs() or not self.symmetric.offered

    def set_timeout(self, seconds: float) -> None:
        """Sets the time-out of this rank's later waits. Raises ClosedError in a forked child."""
        self.failure.require_own_process()
        self.timeout = self.exchange.timeout = seconds
        self.control.set_timeout(seconds)

    def synchronize(self, stream: StreamLike = None) -> None:
        """Waits for a stream (None: for all streams), and raises errors of the stream's work or of the group."""
        if self.failure.closed:
            self.failure.check()  # raises an error in a forked child
        try:
            if stream is not None:
                self.runtime.synchronize_stream(stream)
            else:
                self.runtime.synchronize()
        except KernelError as error:
            self._file(error)
            if self.failure.aborted:
                raise self.failure.exception() from error
            raise
        self.failure.check()

    def _file(self, error: KernelError) -> None:
        if isinstance(error, DriverError) and error.status in LOST_CONTEXT:
            self.failure.file_lost_context(error.status)

    def wake_peers(self) -> None:
        """Makes the watchers of the other ranks of this host map, at once, the memory that this rank has announced."""
        self._watcher.wake_peers()

    @contextlib.contextmanager
    def mapping_of(self, peer: int) -> Iterator[None]:
        """Returns a context for mapping a peer's memory. If the mapping fails because the peer has failed, raises the
        peer's failure.
        """
        try:
            yield
        except ArgumentError:
            self._watcher.check_for_end(peer)
            self.failure.check()
            raise

    # -- memory that peers access ---

    def keep(self, shared: Shared) -> None:
        """Keeps memory alive until the group is released or `let_go` is called, because peers may still access memory
        that this rank has dropped.
        """
        self.kept.append(shared)

    def let_go(self, shared: Shared, *owned: object) -> None:
        """Undoes `keep`. After a failure, the memory stays alive until no kernel of a peer can access it.

        Args:
            shared: the argument of `keep`.
            owned: resources of `shared` to keep alive with it.
        """
        self.kept.remove(shared)
        if self.failure.aborted:
            self._aftermath.keep(shared, *owned)

    def request_reports(self) -> None:
        """Asks the other ranks of this host to write their reports."""
        for segment in self._segments.values():
            segment.request_report()

    # -- giving memory back for a while ---

    def suspend(self, *, save: bool, resume_on_call: bool) -> None:
        """Gives this group's device memory back on all ranks, which call this together. See `Communicator.suspend`."""
        self.failure.require_usable()
        if not self.device_memory.suspendable:
            raise RuntimeUnavailableError(
                "suspend: expected a communicator that was made with suspendable=True (a torch group: with "
                "pg_options=proxyccl.torch.Options(suspendable=True)), or with PROXYCCL_SUSPENDABLE=1"
            )
        if self.topology.has_remote_pairs():
            raise RuntimeUnavailableError("suspend: memory that network devices have registered can't be given back")
        self.launches.agree(CollectiveCall(_SUSPENDS[save, resume_on_call]))
        self.failure.suspend()
        with contextlib.ExitStack() as undo:
            undo.callback(self._wake)
            with self._failing("suspend"):
                self.launches.recheck_next_call()
                self.launches.wait_for_launchers()
                self.device_memory.choose()
                self.synchronize()
                self.links.drain()
                processes = {rank.process.token for rank in self.topology.ranks}
                refusal, saved = self.device_memory.claim(processes), self.device_memory.saved_bytes(arrays=save)
                own = _Blocks(forks.here().token, self.device_memory.open_blocks(), refusal, saved)
                left = free_memory()  # precedes the exchange, because ranks allocate memory after it
                every = self.exchange.all_gather(own, _BLOCKS, "suspend: all work is done")
                refusals = [blocks.lack for blocks in every]
                lacks: list[str] = []
                if not any(refusals):
                    self.symmetric.update(wait=True)  # maps all announced memory: suspended memory can't be mapped
                    lack = ""
                    try:
                        of_host = sum(blocks.saved for blocks in every)
                        self.device_memory.save(arrays=save, of_host=of_host, left=left)
                    except ResourceError as error:
                        lack = str(error)
                    told = self.exchange.all_gather_bytes(lack.encode(), "suspend: contents are saved")
                    lacks = [each.decode() for each in told]
            if any(refusals):
                raise ArgumentError("memory", f"suspend: {_of_ranks(refusals)}")
            if any(lacks):
                raise ResourceError(f"suspend: the communicator stays usable; {_of_ranks(lacks)}")
            undo.pop_all()
        with self._failing("suspend"):
            for other in groups_beyond(processes):
                other.symmetric.withdraw_if(lambda announced: self.device_memory.has_chosen(announced.start))
            self.links.suspend()
            self._set_mapped(every, False)
            self.exchange.barrier("suspend: all ranks have unmapped it")
            self.device_memory.suspend()
        if resume_on_call:
            self.failure.resume_on_call = self._resume_for_call

    def _resume_for_call(self) -> None:
        """Resumes the group, unless the calling thread captures a graph: saved contents are not copied in a graph."""
        try:
            self.runtime.stream_handle(None)
        except ArgumentError:  # raised while the thread captures a stream
            return
        self.resume()

    def resume(self) -> None:
        """Undoes `suspend` on all ranks, which call this together. See `Communicator.resume`."""
        self.failure.check()
        if not self.failure.suspended:
            self.failure.require_usable()
            raise SuspendedError("the communicator is not suspended")
        lack = ""
        with self._failing("resume"):
            try:
                self.device_memory.resume()
            except ResourceError as error:
                lack = str(error)
            own = _Blocks(forks.here().token, self.device_memory.open_blocks(), lack)
            every = self.exchange.all_gather(own, _BLOCKS, "resume: memory is allocated")
            lacks = [blocks.lack for blocks in every]
            if not any(lacks):
                self._set_mapped(every, True)
                # This call precedes the barrier, because after it peers may announce memory to this rank's proxy.
                self.links.resume()
                self.exchange.barrier("resume: all ranks have mapped it")
            elif not lack:
                self.device_memory.suspend()
        if any(lacks):
            raise ResourceError(f"resume: the communicator stays suspended; {_of_ranks(lacks)}")
        self._wake()

    def _wake(self) -> None:
        """Makes this rank's arrays and calls usable again."""
        self.device_memory.finish()
        self.failure.resume()
        self.launches.recheck_next_call()

    def _set_mapped(self, every: list[_Blocks], mapped: bool) -> None:
        """Unmaps or maps the ranks' blocks in this process, and in the proxies' process, where other groups of this
        process may use the blocks.
        """
        with open_lock:
            others = [group for group in open_groups if not group.failure.suspended]
        for blocks in every:
            self.runtime.set_mapped(blocks.process, blocks.bases, mapped)
            for other in others:
                other.links.set_mapped(blocks.process, blocks.bases, mapped)

    @contextlib.contextmanager
    def _failing(self, operation: str) -> Iterator[None]:
        """Returns a context in which an error makes the group fail, because other ranks may have completed the step."""
        try:
            yield
        except BaseException as error:
            if not self.failure.aborted:
                self.failure.abort(f"{operation}: {type(error).__name__}: {error}")
            raise

    # -- the end ---

    def discard(self) -> None:
        """Frees a group that could not be made or opened. The caller must have notified the peers, and launched no
        kernel.
        """
        with self._closing:
            if self._released:
                return
            if self.failure.state != "opening":  # the group's watcher runs, so the group was opened
                self.release(healthy=False)
                return
            self._released = True
            self.exchange.end()
            self.failure.close()
            self.control.set_presence(Presence.LEFT)
            for link in self._host_links.values():
                link.close()
            try:
                self.links.close()
                self._free_memory(healthy=True)
            finally:
                self._end_pins()

    def close(self, *, reason: str = "", wait: bool = True) -> None:
        """Closes the group and the groups that were split from it. Further calls do nothing.

        Memory that peers access is freed once all peers have closed the communicator. The call waits for the peers
        unless the group has failed. If the missing peers are closing other communicators, the call returns and a
        background thread waits, so ranks may close communicators in different orders. If a signal handler that
        interrupts a wait calls `close`, the call only aborts the group on all ranks; a later call of `close` does the
        rest.

        Args:
            reason: if not empty, the call aborts the group on all ranks with this reason.
            wait: whether the call waits for the peers; if False, a thread waits.

        Raises:
            WaitTimeoutError: a peer did not close the group within the time-out.
            CommunicatorError: a rank failed during the call.
        """
        if in_handler():  # the interrupted code will continue to use the group's memory
            self.failure.abort("a signal handler closed the communicator")
            return
        if self.failure.closed:  # checked without the lock, which a forked child may inherit locked
            return
        with self._closing:
            if self.failure.closed:
                return
            if not self.leave(reason):
                self.release(healthy=False)
                return
            healthy = False
            try:
                healthy = wait and self._wait_for_peers()
            except CommunicatorError:
                self.release(healthy=False)
                raise
            except BaseException:  # raised by a signal handler after this rank announced that it leaves
                self._release_later()
                raise
            if healthy:
                self.release(healthy=True)
            else:
                self._release_later()

    def leave(self, reason: str = "") -> bool:
        """Waits for this rank's work, and announces to the peers that this rank leaves. Returns False if the group
        failed before or during this call.
        """
        children = list(self._children)
        # `begin` precedes any wait, because a wait for one group waits for all work on the device.
        for each in (self, *children):
            each.vain_waits.begin()
        for child in children:
            child._leave_with_parent(reason)
        if not self.failure.usable:
            return False
        if reason:  # skips the wait, because queued work may wait for the other ranks
            self.failure.abort(reason)
            return False
        try:
            self.runtime.synchronize()
        except KernelError as error:
            self._file(error)
            self.failure.abort(f"its work failed: {error}")
            return False
        self.links.drain_for_peers()
        self.vain_waits.end()
        if not self.failure.usable:
            return False
        self._watcher.announce(Presence.LEFT, self.exchange.made)
        return True

    def _leave_with_parent(self, reason: str) -> None:
        """Announces that this rank leaves the group, because the parent group closes. The parent's release also
        releases this group."""
        with self._closing:
            if not self.failure.closed:
                self.leave(reason)
                self._close_for_use()

    def has_left(self, peer: int | None) -> bool:
        """Returns whether a peer (None: any peer) has closed the communicator, and so makes no further calls."""
        peers = range(self.world_size) if peer is None else [peer]
        with self._closing:  # keeps the peers' segments from being freed during the loop
            if self._released:
                return False
            return any(each != self.rank and self._watcher.presence(each) is Presence.LEFT for each in peers)

    def peers_present(self) -> dict[int, Presence]:
        peers = {peer: self._watcher.presence(peer) for peer in range(self.world_size) if peer != self.rank}
        return {peer: presence for peer, presence in peers.items() if presence is not Presence.LEFT}

    def _wait_for_peers(self) -> bool:
        """Waits until all peers have left the group. Returns False if the missing peers are closing other
        communicators."""
        deadline = time.monotonic() + self.timeout
        waiting_elsewhere_since: float | None = None
        with self._announced_elsewhere():
            while present := self.peers_present():
                self.failure.check()
                now = time.monotonic()
                if any(presence is Presence.PRESENT for presence in present.values()):
                    waiting_elsewhere_since = None
                elif waiting_elsewhere_since is None:
                    waiting_elsewhere_since = now
                elif now > waiting_elsewhere_since + _CIRCLE_SECONDS:
                    return False
                if now > deadline:
                    raise self.late(min(present), "close", "close the communicator", self.timeout)
                time.sleep(_POLL_SECONDS)
        return True

    @contextlib.contextmanager
    def _announced_elsewhere(self) -> Iterator[None]:
        """Tells the peers of this thread's other groups that this thread is closing another group."""
        with open_lock:
            others = [
                other
                for other in open_groups
                if other is not self and other.thread == threading.get_ident() and other.failure.usable
            ]
        for other in others:
            other._watcher.announce(Presence.CLOSING_ANOTHER)
        try:
            yield
        finally:
            for other in others:
                other._watcher.announce(Presence.PRESENT)

    def late(self, peer: int, operation: str, what: str, timeout: float) -> CommunicatorError:
        """Makes the group fail with a time-out error that names the peer, and the action for which this rank waited.
        Returns the exception.
        """
        late = WaitTimeoutError(
            f"{operation}: rank {peer} did not {what} within {timeout:g} s",
            rank=self.rank,
            peer=peer,
            operation=operation,
        )
        return self.failure.file_exchange_failure(late)

    def _release_later(self) -> None:
        self._close_for_use()

        def wait() -> None:
            while True:
                with self._closing:
                    if self._released:
                        return
                    if self.failure.aborted or not self.peers_present():
                        self.release(healthy=True)
                        return
                time.sleep(WatchThread.INTERVAL_MS / 1000)

        thread = Thread(wait, f"proxyccl-close-{self.rank}", failed=lambda _: _abandoned.append(self))
        with open_lock:
            releasing[:] = [*(other for other in releasing if other[0].is_alive()), (thread, self.linger or 0.0)]
            thread.start()

    def _close_for_use(self) -> None:
        self.failure.close()
        if self._published is not None:
            self._published.withdraw()
        self.launches.recheck_next_call()
        with open_lock:
            if self in open_groups:
                open_groups.remove(self)

    def release(self, *, healthy: bool) -> None:
        """Frees the group's resources; further calls do nothing. If `healthy` is False or a rank has failed, keeps
        memory that peers may still access.
        """
        try:
            with self._closing:
                if not self._released:
                    self._released = True
                    healthy = healthy and not self.failure.aborted
                    self._close_for_use()
                    for child in list(self._children):
                        child.release(healthy=healthy)
                    try:
                        self._free(healthy=healthy)
                    finally:
                        self._end_pins()
        finally:
            if self.parent is not None:
                with open_lock, contextlib.suppress(ValueError):
                    self.parent._children.remove(self)

    def _free(self, *, healthy: bool) -> None:
        self.exchange.end()
        self._watcher.finish()
        self.failure.observer.close()
        if not healthy:
            self._watcher.end_waits()
        self._end_kernels()  # running kernels may use the memory that is freed below
        if not healthy:
            self._aftermath.watch_processes()
        self._watcher.close()
        if not self.links.close():
            _abandoned.append(self)  # a Python handler of triggers still runs, and may use the memory
            return
        self._free_memory(healthy=healthy)

    def _free_memory(self, *, healthy: bool) -> None:
        self.launches.close()
        self.lent_memory.close()
        reached = [*self.kept, *self.symmetric.memories(), *self._segments.values()]
        self.symmetric.close()
        self.semaphore_words.close()
        if healthy:
            self._aftermath.end()
        else:  # a peer's kernel may still write to this rank's memory
            # This rank no longer accesses peers' memory, so ranks that shrink the communicator need not wait for it.
            self.control.set_presence(Presence.LEFT)
            self._aftermath.follow(reached)
            self.kept.clear()
        del reached
        self.mappings.close()
        self._mapped.close()
        if healthy:
            while self.kept:
                self.kept.pop().close()
        if self._aftermath.over:
            for segment in self._segments.values():
                segment.close()
        self.runtime.release_control(self.control.device_pointer)
        self.control.close()
        if self._meeting.owns_bootstrap:
            self._meeting.bootstrap.close()


_logger = logging.getLogger("proxyccl")
_abandoned: list[Group] = []
"""Groups that could not be released; their resources are kept until the process ends."""
open_groups: list[Group] = []
"""The groups that this process has open."""
releasing: list[tuple[Thread, float]] = []
"""Threads that wait for peers, each with its group's `linger`."""
open_lock = threading.Lock()
"""Held while `open_groups` or `releasing` is changed."""
forks.hold_while_forking(open_lock)


def groups_beyond(processes: set[bytes]) -> list[Group]:
    """Returns this process's open groups that have a rank in a process other than those with the given tokens. Such a
    process can't take part in `resume`, and would keep the former memory of blocks mapped.
    """
    with open_lock:
        return [group for group in open_groups if {rank.process.token for rank in group.topology.ranks} - processes]
