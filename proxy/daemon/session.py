"""What the daemon does for one client: a proxy service over the client's own rings and memories.

A client is not trusted beyond its user. It names only what it was given, its memories are mapped before they are used,
and stay mapped as long as its worker may be using them, whatever the client says meanwhile. What goes wrong ends this
session alone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from proxyccl.device.errors import ArgumentError, ProxyCCLError, ResourceError, RuntimeUnavailableError, TransportError
from proxyccl.device.handle_cache import HandleCache
from proxyccl.device.runtime import Memory, PinnedMemory, Runtime
from proxyccl.device.shared_memory import SharedMemory
from proxyccl.proxy.daemon.protocol import (
    LAYOUT,
    VERSION,
    Fields,
    ProtocolError,
    limit_waits,
    peer_credentials,
    receive,
    send,
)
from proxyccl.proxy.daemon.session_rdma import SessionRdma, address_of_word
from proxyccl.proxy.fifo import Ring, ring_bytes
from proxyccl.proxy.interface import Connection, ProxyFailure
from proxyccl.proxy.observe.publications import Description
from proxyccl.proxy.service import MAX_RINGS, ProxyService, SharedWords
from proxyccl.proxy.thread import ProxyThread
from proxyccl.proxy.trigger import MAX_CHANNELS, MAX_MEMORIES
from proxyccl.proxy.verbs.devices import missing as missing_for_rdma

HELLO_SECONDS = 10
_ANSWER_SECONDS = 10
_LONGEST_DRAIN = 1e9
_QUIET_SECONDS = 0.05
_REST_SECONDS = 4.0  # a request takes two of them at most, and clients wait for 10 s
_MOST_RETIRED = 4096
_END_SECONDS = 10.0
_KEYS = (1 << 32) - 1

log = logging.getLogger("proxyccl.daemon")

Deal = Callable[[int], Sequence[ProxyThread]]
"""Gives threads for so many workers."""


def require_user(user: int, own: int) -> None:
    """Raises ProtocolError for another user than the daemon's own."""
    if user != own:
        raise ProtocolError(f"this daemon serves user {own}, not {user}")


def _description_in(fields: Fields) -> Description | None:
    if "job" not in fields:
        return None
    rank, world_size = (fields.integer(name, high=1 << 31) for name in ("rank", "world_size"))
    return Description(rank, world_size, fields.text("job"), fields.text("program"))


class Session:
    """One connection of a client, from its hello to its end.

    Args:
        connection: the socket; the session closes it.
        open_runtime: gives the runtime of a name and a device_id.
        deal_threads: gives the threads that the client's workers run on.
        report: called with a job and a cause when a client wants the daemon to report; it must not wait.

    Attributes:
        name: who the client is, in words.
        pid: its process.
        description: who its proxy works for; None until it opens one, or where it does not say.
        device_id: of its device.
        since: time.monotonic() when it came.
        request: what it asked for that is under way, and time.monotonic() when it asked.
        failure: why its last worker that failed did.
        served: its proxy; still there, to be looked at, when that is closed.
        threads: which run its workers.
    """

    def __init__(
        self,
        connection: socket.socket,
        open_runtime: Callable[[str, str], Runtime],
        deal_threads: Deal,
        report: Callable[[str, str], None],
    ) -> None:
        self._connection = connection
        self._hung_up = select.poll()
        self._hung_up.register(connection, select.POLLRDHUP)
        self._open_runtime = open_runtime
        self._deal_threads = deal_threads
        self._report = report
        self._runtime: Runtime | None = None
        self._service: ProxyService | None = None
        self._segment: PinnedMemory | None = None
        self._mappings: HandleCache | None = None
        self._rdma: SessionRdma | None = None
        self._connections: list[Connection] = []
        self._channels: dict[int, Connection | None] = {}  # None: a handler of the client's own
        self._words: dict[int, PinnedMemory] = {}
        self._memories: dict[int, tuple[int, bytes]] = {}  # size and handle, by first id
        self._retired: list[Callable[[], None]] = []  # unmaps what the worker may still be using
        self._end_within: float | None = None
        self.threads: Sequence[ProxyThread] = ()
        self.name = "a client"
        self.pid: int | None = None
        self.description: Description | None = None
        self.device_id = ""
        self.since = time.monotonic()
        self.request: tuple[str, float] | None = None
        self.failure: ProxyFailure | None = None
        self.served: ProxyService | None = None

    # -- the conversation ---

    def run(self) -> None:
        """Serves the client until it leaves, says nonsense, or `end` is called."""
        try:
            try:
                self._greet()
                while (message := receive(self._connection)) is not None:
                    answer = self._answer(*message)
                    if answer is not None:
                        send(self._connection, answer)
                if self._end_within is not None:
                    self._say_farewell(self._end_within)
            except ProtocolError as error:
                log.warning("%s is sent away: %s", self.name, error)
                with contextlib.suppress(OSError):
                    send(self._connection, _refusal(error), flags=socket.MSG_DONTWAIT)
            except OSError as error:
                log.info("%s is lost: %s", self.name, error)
        finally:
            self._close()

    def _greet(self) -> None:
        limit_waits(self._connection, _ANSWER_SECONDS, HELLO_SECONDS)
        self.pid, user = peer_credentials(self._connection)
        self.name = f"process {self.pid}"
        message = receive(self._connection)  # before a refusal: with it unread, the client would not get that
        if message is None:
            return
        fields, descriptors = message
        _close_all(descriptors)
        require_user(user, os.geteuid())
        version = fields.integer("hello")
        if version != VERSION:
            raise ProtocolError(f"version: the daemon speaks {VERSION}, the client {version}")
        if fields.integers("layout") != LAYOUT:
            raise ProtocolError("layout: the daemon and the client are of different builds of ProxyCCL")
        send(self._connection, {"version": VERSION, "pid": os.getpid()})
        limit_waits(self._connection, _ANSWER_SECONDS, 0)

    def _answer(self, fields: Fields, descriptors: list[int]) -> dict[str, Any] | None:
        """Does what is asked, or says why not. None where the client waits for no answer."""
        try:
            number = {"request": fields.optional("request")} if "request" in fields else {}
            answer = self._do(fields, descriptors)
        except ProtocolError:
            raise
        except ProxyCCLError as error:
            answer = _refusal(error)
        except OSError as error:  # no descriptor is left, say: the client is not to blame
            answer = _refusal(ResourceError(f"the node daemon can't do that: {error}"))
        finally:
            self.request = None
            _close_all(descriptors)
        return None if answer is None else answer | number

    def _do(self, fields: Fields, descriptors: list[int]) -> dict[str, Any] | None:
        requests = {
            "rdma_missing": self._tell_missing,
            "add_memory": self._add_memory,
            "add_keyed_memory": self._add_keyed_memory,
            "remove_memory": self._remove_memory,
            "connect_copy": self._connect_copy,
            "connect_rdma": self._connect_rdma,
            "reserve_channel": self._reserve_channel,
            "reserve_handler": self._reserve_handler,
            "set_channel": self._set_channel,
            "free_channels": self._free_channels,
            "drain": self._drain,
            "close": self._end_service,
            **(self._rdma.requests if self._rdma is not None else {}),
        }
        name = fields.text("do")
        if name == "report":
            self._pass_on(fields)
            return None
        self.request = name, time.monotonic()
        if name == "open":
            return self._open(fields, descriptors)
        return requests.get(name, self._refuse)(fields)

    # -- requests ---

    def _refuse(self, fields: Fields) -> dict[str, Any]:
        raise ProtocolError(f"do: there is no {fields.text('do')!r:.100}")

    def _tell_missing(self, fields: Fields) -> dict[str, Any]:
        return {"missing": missing_for_rdma() or ""}

    @property
    def _proxy(self) -> ProxyService:
        if self._service is None:
            raise ProtocolError("do: nothing is open")
        return self._service

    def _open(self, fields: Fields, offered: list[int]) -> dict[str, Any]:
        if self._service is not None:
            raise ProtocolError("open: it is open")
        size = fields.integer("fifo_size", 2, 1 << 20)
        threads = fields.integer("threads", 1, MAX_RINGS)
        offset = fields.integer("shared_offset", LAYOUT[0], 1 << 30)
        if offset % 128:
            raise ProtocolError("shared_offset: it is not aligned")
        if not threads < len(offered) <= MAX_RINGS + 1:
            raise ProtocolError(f"open: {len(offered)} descriptors, for a segment and at least {threads} rings")
        whose = _description_in(fields)
        runtime = self._open_runtime(fields.text("runtime"), fields.text("device_id"))
        with contextlib.ExitStack() as undo:
            segment = runtime.adopt_pinned(os.dup(offered[0]), offset + SharedWords.BYTES)
            undo.callback(segment.close)
            rings = []
            for descriptor in offered[1:]:
                # The engine alone looks at a ring here: it is the client's device that must reach it.
                rings.append(Ring(SharedMemory.adopt(os.dup(descriptor), ring_bytes(size)), size))
                undo.callback(rings[-1].close)
            self.threads = self._deal_threads(threads)
            self._service = ProxyService(
                runtime,
                segment.host_ptr,
                segment,
                shared_offset=offset,
                shared_threads=self.threads,
                rings=rings,
                on_failure=self._tell,
                description=whose,
            )
            undo.pop_all()
        self._runtime, self._segment, self._mappings = runtime, segment, HandleCache(runtime.open)
        self._rdma = SessionRdma(self._service, self)
        self.served, self.description, self.device_id = self._service, whose, runtime.device_id
        self.name += f" (rank {whose.rank} of job {whose.job})" if whose is not None else ""
        log.info("%s: %d rings of %d slots on %s", self.name, len(rings), size, runtime.device_id)
        return {"observed": self._service.observed_handle.hex()}

    def _add_memory(self, fields: Fields) -> dict[str, Any]:
        handle, nbytes = fields.data("handle"), fields.integer("nbytes", 0, 1 << 62)
        key = fields.integer("key", high=_KEYS)
        if nbytes == 0:
            return self._add(0, self._proxy.add_memory, 0, 0, key)
        memory = self.map(handle, nbytes)
        try:
            return self._add(nbytes, self._proxy.add_memory, memory.ptr, nbytes, key, handle=handle)
        except ProxyCCLError:
            self.unmap(handle)
            raise

    def _add_keyed_memory(self, fields: Fields) -> dict[str, Any]:
        address, nbytes = fields.integer("address"), fields.integer("nbytes", 0, 1 << 62)
        return self._add(nbytes, self._proxy.add_keyed_memory, address, nbytes, fields.integer("key", high=_KEYS))

    def _add(
        self, nbytes: int, add: Callable[[int, int, int], int], *entry: int, handle: bytes = b""
    ) -> dict[str, Any]:
        with self._proxy.paused(_REST_SECONDS):  # a trigger may name an id before the client was told of it
            first = add(*entry)
        self._memories[first] = nbytes, handle
        return {"first": first}

    def map(self, handle: bytes, nbytes: int) -> Memory:
        """At least so many bytes of the memory that a handle names. Paired with an `unmap`.

        Raises:
            ArgumentError: it can't be mapped, or is smaller.
        """
        proxy, mappings = self._proxy, self._mappings
        assert mappings is not None
        try:
            memory = mappings.acquire(handle)
        except ArgumentError:
            # A driver may refuse what took the place of memory that its owner has freed, as long as that is mapped.
            if not self._retired or not proxy.drain(_REST_SECONDS):
                raise
            self._unmap_retired()
            memory = mappings.acquire(handle)
        if memory.nbytes < nbytes:
            self.unmap(handle)
            raise ArgumentError("nbytes", f"{nbytes} bytes of a memory of {memory.nbytes}")
        return memory

    def unmap(self, handle: bytes) -> None:
        """Ends `map`. Nothing uses the memory any more."""
        assert self._mappings is not None
        self._mappings.release(handle)

    def _remove_memory(self, fields: Fields) -> dict[str, Any]:
        first = fields.integer("first", 0, MAX_MEMORIES - 1)
        if first not in self._memories:
            raise ProtocolError(f"first: memory {first} is none of this client's")
        nbytes, handle = self._memories[first]
        with self._proxy.paused(_REST_SECONDS):
            self._proxy.remove_memory(first, nbytes)
        del self._memories[first]
        if handle:
            self.retire(functools.partial(self.unmap, handle))
        return {}

    def _connect_copy(self, fields: Fields) -> dict[str, Any]:
        return self._tell_connection(self._proxy.connect_copy(peer=fields.optional("peer", high=1 << 31)))

    def _connect_rdma(self, fields: Fields) -> dict[str, Any]:
        if self._rdma is None:
            raise ProtocolError("do: nothing is open")
        return self._tell_connection(self._rdma.open_connection(fields))

    def _tell_connection(self, connection: Connection) -> dict[str, Any]:
        self._connections.append(connection)
        return {"number": connection.number, "worker": connection.worker, "transport": connection.transport}

    def _find_connection(self, fields: Fields) -> Connection:
        number = fields.integer("connection")
        if number >= len(self._connections):
            raise ProtocolError(f"connection: {number} is none of this client's")
        return self._connections[number]

    def _reserve_channel(self, fields: Fields) -> dict[str, Any]:
        connection = self._find_connection(fields)
        channel = self._proxy.reserve_channel(connection)
        self._channels[channel] = connection
        return {"channel": channel, "ring": self._proxy.ring_of(channel)}

    def _reserve_handler(self, fields: Fields) -> dict[str, Any]:
        channel = self._proxy.reserve_handler()
        self._channels[channel] = None
        return {"channel": channel}

    def _require_channel(self, channel: int, connection: Connection) -> None:
        if self._channels.get(channel) is not connection:
            raise ProtocolError(f"channel: {channel} is none of connection {connection.number}")

    def _set_channel(self, fields: Fields) -> dict[str, Any]:
        channel, connection = fields.integer("channel", 0, MAX_CHANNELS - 1), self._find_connection(fields)
        self._require_channel(channel, connection)
        if connection.transport != "copy":
            address = address_of_word(fields)
            with self._proxy.paused(_REST_SECONDS):
                self._proxy.set_channel(channel, connection, address)
            return {}
        assert self._runtime is not None
        word = self._runtime.open_pinned(fields.data("word"))
        if word.nbytes != 8 or word.host_ptr % 8:
            word.close()
            raise ArgumentError("word", "a semaphore is a word of 8 bytes, aligned to 8")
        try:
            with self._proxy.paused(_REST_SECONDS):
                self._proxy.set_channel(channel, connection, word.host_ptr)
        except ProxyCCLError:
            word.close()
            raise
        self._retire_word(channel)
        self._words[channel] = word
        return {}

    def _retire_word(self, channel: int) -> None:
        if channel in self._words:
            self.retire(self._words.pop(channel).close)

    def _free_channels(self, fields: Fields) -> dict[str, Any]:
        channels, connection = fields.integers("channels", MAX_CHANNELS - 1), self._find_connection(fields)
        for channel in channels:
            self._require_channel(channel, connection)
            with self._proxy.paused(_REST_SECONDS):
                self._proxy.free_channels([channel], connection)
            del self._channels[channel]
            self._retire_word(channel)
        return {}

    def retire(self, unmap: Callable[[], None]) -> None:
        """Unmaps when the worker is seen with nothing to do: until then copies may be under way."""
        self._retired.append(unmap)
        if self._proxy.drain(_QUIET_SECONDS):
            self._unmap_retired()
        elif len(self._retired) > _MOST_RETIRED:
            raise ProtocolError("it removes memory while its rings are never empty")

    def _unmap_retired(self) -> None:
        with contextlib.ExitStack() as each:  # the others too where one can't be
            while self._retired:
                each.callback(self._retired.pop())

    def has_left(self) -> bool:
        """Whether the client has hung up."""
        return bool(self._hung_up.poll(0))

    def _drain(self, fields: Fields) -> dict[str, Any]:
        return {"drained": self._proxy.drain(fields.number("timeout", 0, _LONGEST_DRAIN), self.has_left)}

    def _end_service(self, fields: Fields) -> dict[str, Any]:
        proxy, timeout = self._proxy, fields.number("timeout", 0, _LONGEST_DRAIN)
        proxy.drain(timeout, self.has_left)
        return {"ended": self._free(timeout)}

    def _pass_on(self, fields: Fields) -> None:
        job = self.description.job if self.description is not None else self.name
        self._report(job, f"{self.name}: {fields.text('cause'):.200}")

    # -- the end ---

    def _tell(self, failure: ProxyFailure) -> None:
        """Called in a thread that others' workers share: it must not wait for this client to read."""
        words = failure.trigger.encode() if failure.trigger is not None else ()
        log.warning("%s: its proxy failed: %s", self.name, failure.reason)
        self.failure = failure
        message = {
            "event": "failed",
            "code": failure.code,
            "channel": failure.channel,
            "trigger": list(words),
            "status": failure.status,
            "reason": failure.reason,
            "peer": failure.peer,
        }
        self._send_event(message)

    def _send_event(self, message: dict[str, Any]) -> None:
        try:
            send(self._connection, message, flags=socket.MSG_DONTWAIT)
        except OSError:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def end(self, timeout: float) -> None:
        """Ends the session, in its own thread: what the client's rings hold is done first. From any thread."""
        self._end_within = timeout
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)

    def _say_farewell(self, timeout: float) -> None:
        if self._service is not None and not self._service.drain(timeout):
            log.warning("%s: what its rings hold was not done within %g s", self.name, timeout)
        self._send_event({"event": "ending"})

    def _close(self) -> None:
        self.request = "leave", time.monotonic()
        try:
            if not self._free(_END_SECONDS):
                log.error("%s: its worker does not end; what it uses is kept", self.name)
        except ProxyCCLError as error:
            log.warning("%s: not all that it used could be freed: %s", self.name, error)
        finally:
            self._connection.close()
        log.log(logging.INFO if self.threads else logging.DEBUG, "%s has left", self.name)

    def _free(self, timeout: float) -> bool:
        """Ends the workers at once and unmaps everything. False if a worker did not end: then all is kept."""
        if self._service is None:
            return True
        if not self._service.close(timeout, drained=False):
            return False
        assert self._rdma is not None
        assert self._mappings is not None
        assert self._segment is not None
        with contextlib.ExitStack() as steps:  # from the last to the first, each whatever becomes of the others
            steps.callback(self._forget)
            steps.callback(self._segment.close)
            steps.callback(self._mappings.close)
            for word in self._words.values():
                steps.callback(word.close)
            steps.callback(self._rdma.close)
            steps.callback(self._unmap_retired)
        return True

    def _forget(self) -> None:
        self._service = self._rdma = self._mappings = self._segment = None
        for table in (self._words, self._channels, self._connections, self._memories):
            table.clear()


def _refusal(error: ProxyCCLError) -> dict[str, Any]:
    kinds = {
        ArgumentError: "argument",
        ResourceError: "resource",
        ProtocolError: "protocol",
        RuntimeUnavailableError: "unavailable",
        TransportError: "transport",
    }
    kind = next((name for type_, name in kinds.items() if isinstance(error, type_)), "other")
    answer = {"error": kind, "message": str(error)}
    if isinstance(error, ArgumentError):
        answer |= {"argument": error.argument, "message": str(error).removeprefix(f"{error.argument}: ")}
    return answer


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
