"""Reads the records of agents' transfers for `proxyccl trace`."""

from __future__ import annotations

import time

from msgspec import Struct

from proxyccl.channels.transfers.published import AgentSeen, find_agents
from proxyccl.channels.transfers.transfer import State
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.proxy._transfers import ffi, lib

_ROOM = 1024
_STATES = {state.value: state.name.lower() for state in State}


class TracedTransfer(Struct, frozen=True):
    """A transfer that ended while it was traced.

    Attributes:
        peer, path: the peer's name, and the name of the path.
        writes: whether the transfer wrote to the peer, rather than read.
        nbytes, blocks: the transfer's total bytes, and its number of blocks.
        posted_ns, ended_ns: the times when the transfer was started and when it ended, in ns of CLOCK_MONOTONIC.
        end: how the transfer ended, such as "done" or "canceled".
    """

    peer: str
    path: str
    writes: bool
    nbytes: int
    blocks: int
    posted_ns: int
    ended_ns: int
    end: str


class AgentTrace(Struct, frozen=True):
    """The transfers of one agent.

    Attributes:
        agent: the agent.
        transfers: the transfers, in the order in which they ended.
        lost: the number of records that the agent overwrote before the tracer read them.
    """

    agent: AgentSeen
    transfers: list[TracedTransfer]
    lost: int


class AgentTracer:
    """Traces the transfers of one agent. Only one thread may use a tracer. Several tracers may trace the same agent.

    Args:
        agent: the agent.
        seconds: how long the agent records its transfers.

    Raises:
        ArgumentError: the agent has ended, or this container can't map its records.
    """

    def __init__(self, agent: AgentSeen, seconds: float) -> None:
        self._agent = agent
        self._memory = SharedMemory.open(agent.log)
        self._log = ffi.cast("ProxycclTransferLog *", self._memory.ptr)
        self._next = ffi.new("uint64_t *", self._log.count)
        self._records = ffi.new("ProxycclTransferRecord[]", _ROOM)
        self._taken: list[tuple[int, ...]] = []
        self._lost = 0
        self._log.until = max(self._log.until, time.monotonic_ns() + int(seconds * 1e9))

    def fetch(self) -> None:
        """Fetches new records. Call `fetch` often, because an agent keeps only its last 4,095 records."""
        lost = ffi.new("uint64_t *")
        while True:
            count = lib.proxyccl_transfer_log_read(self._log, self._next, self._records, _ROOM, lost)
            self._lost += lost[0]
            for index in range(count):
                each = self._records[index]
                self._taken.append(
                    (each.label, each.writes, each.bytes, each.blocks, each.posted, each.ended, each.state)
                )
            if count < _ROOM:
                return

    def stop(self) -> AgentTrace:
        """Returns the recorded transfers, and closes the tracer."""
        self.fetch()
        # Reads the agent's file again, because the agent may have new peers and paths.
        now = [each for each in find_agents() if (each.pid, each.log) == (self._agent.pid, self._agent.log)]
        agent = now[0] if now else self._agent
        names = {number: (label.peer, label.path) for number, label in enumerate(agent.labels)}
        transfers = [
            TracedTransfer(
                *names.get(label, ("unknown", "unknown")), bool(writes), nbytes, blocks, posted, ended, _STATES[state]
            )
            for label, writes, nbytes, blocks, posted, ended, state in self._taken
        ]
        self._memory.close()
        return AgentTrace(agent, transfers, self._lost)
