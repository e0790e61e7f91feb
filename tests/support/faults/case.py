"""A case of the campaign: ranks, their work and a fault, all determined by a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

FAULTS = (
    "none",
    "kill",
    "stop",
    "pause",
    "slow",
    "exit",
    "exception",
    "wrong arguments",
    "garbage",
    "fork",
    "signals",
    "few descriptors",
    "little memory",
    "no directory",
    "full disk",
    "clock jumps",
    "daemon killed",
    "daemon stopped",
)
"""Faults of one rank (the victim), or of the daemon that runs the ranks' proxies:

- kill: SIGKILL; stop: stopped for longer than the time-out; pause: stopped for less than the time-out
- slow: the victim sleeps between calls; exit: another thread ends the process; exception: the program raises one
- wrong arguments: the victim makes one call with another count; garbage: the victim sends one message with other bytes
- fork: the victim forks children that end at once, in different ways; signals: a handler runs every millisecond
- few descriptors, little memory: the victim's limits are lowered while it works; no directory: the victim can't write
  reports and the cache
- full disk: the victim's reports and cache are on a full file system; clock jumps: the victim's time of day jumps at
  every reading
"""
LINK_FAULTS = ("link cut", "link pause", "link loss")
"""Faults of the link between two hosts: it is cut, permanently or for less than the time-out, or it loses packets."""
HARMLESS = ("none", "pause", "slow", "fork", "signals", "no directory", "full disk", "clock jumps", *LINK_FAULTS[1:])
"""Faults that no rank may notice."""
LASTING_DESCRIPTORS = 3
"""The number of descriptors that a process opens for its first communicator and never closes: one wakes the thread that
reports on a signal; the others are of the cache's directory and of the directory that replaces an unwritable cache.
"""
_TIMEOUT_SECONDS = 3.0
_HARMLESS_TIMEOUT_SECONDS = 15.0
"""The time-out in cases with harmless faults, which must not time out although compiling a kernel takes seconds on a
busy machine.
"""
_WORK_SECONDS = 1.2
_BRIEF = 0.3
"""The factor of a brief case's delays."""
_DAEMON_STARTS_SECONDS = 60.0
"""The time allowed for the starts of two daemons, the first one and the one after a shrink; `proxyccl.proxy.daemon.job`
allows half of this time for each.
"""


@dataclass(frozen=True)
class Case:
    """A case of the campaign.

    Attributes:
        seed: the seed that determines the case.
        ranks: number of ranks.
        place: where the ranks' proxies run ("thread" or "process").
        nodes: number of ranks per node; None if all ranks are on one node.
        hosts: whether the ranks are on two hosts that communicate by libfabric over TCP.
        fault: one of FAULTS.
        victim: the rank that has the fault.
        delay: seconds between the moment when all ranks are ready and the fault.
        timeout: time-out of every wait, in seconds.
        work: seconds that the ranks work, unless the fault ends them earlier.
        repeats: whether the ranks repeat prepared calls, for which only streams, not threads, wait for the daemon.
        brief: whether the delays before the fault and before the end are shorter than by default.
    """

    seed: int
    ranks: int
    place: str
    nodes: int | None
    hosts: bool
    fault: str
    victim: int
    delay: float
    timeout: float
    work: float
    repeats: bool
    brief: bool

    @classmethod
    def of(cls, seed: int, fault: str | None = None, *, hosts: bool = False, brief: bool = False) -> Case:
        """Returns the case of a seed. If no fault is named, the seed chooses one."""
        rng = random.Random(seed)
        faults = FAULTS + LINK_FAULTS if hosts else FAULTS
        fault = faults[seed % len(faults)] if fault is None else fault
        ranks = rng.randint(2, 4)
        place = "process" if fault.startswith("daemon") else rng.choice(["thread", "process"])
        nodes = 2 if ranks == 4 and rng.random() < 0.3 and not hosts else None
        timeout = _HARMLESS_TIMEOUT_SECONDS if fault in HARMLESS else _TIMEOUT_SECONDS
        victim, moment = rng.randrange(ranks), rng.uniform(0, 1.0)
        pace = _BRIEF if brief else 1.0
        return cls(
            seed=seed,
            ranks=ranks,
            place=place,
            nodes=nodes,
            hosts=hosts,
            fault=fault,
            victim=victim,
            delay=pace * moment,
            timeout=timeout,
            work=pace * _WORK_SECONDS,
            repeats=fault == "daemon stopped" and moment > 0.4,
            brief=brief,
        )

    @property
    def arguments(self) -> list[str]:
        """The arguments of rank.py that reproduce this case."""
        flags = {"hosts": self.hosts, "brief": self.brief}
        return [str(self.seed), self.fault, *(name for name, wanted in flags.items() if wanted)]

    def host(self, rank: int) -> int:
        """Returns a rank's host: 0 for the first half of the ranks, 1 for the second."""
        return 2 * rank // self.ranks

    @property
    def bound(self) -> float:
        """Seconds within which every process must have ended. The bound covers a wait, two shrinks and the program's
        end, each with its time-out, and the start of processes on busy cores.
        """
        return 90 + 8 * self.timeout + (_DAEMON_STARTS_SECONDS if self.place == "process" else 0)

    def __str__(self) -> str:
        nodes = ", two hosts" if self.hosts else f", nodes of {self.nodes}" if self.nodes else ""
        what = f"{self.fault} of rank {self.victim}"
        if self.fault == "none" or self.fault in LINK_FAULTS:
            what = self.fault.replace("none", "no fault")
        return f"seed {self.seed}: {self.ranks} ranks, proxy in a {self.place}{nodes}, {what} after {self.delay:.3f} s"
