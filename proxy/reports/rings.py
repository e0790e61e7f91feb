"""A ring in a report: the result of `RingMemory.snapshot`, in numbers and words."""

from __future__ import annotations

from dataclasses import asdict

from proxyccl.proxy.codec import Message
from proxyccl.proxy.ring import RingContents
from proxyccl.proxy.trigger import Trigger, operation_name

TRIGGERS = 32
"""The number of triggers that a report shows of those waiting in a ring, and of those taken out of it."""


class RingTrigger(Message, frozen=True):
    """A trigger in a ring: its ticket, and its operation in words."""

    ticket: int
    channel: int
    operation: str
    size: int
    src_memory: int
    src_offset: int
    dst_memory: int
    dst_offset: int
    value: int | None = None

    @classmethod
    def of(cls, ticket: int, trigger: Trigger) -> RingTrigger:
        """A trigger with its ticket."""
        values = asdict(trigger)
        values["operation"] = operation_name(trigger.operation)
        return cls(ticket, **values)


class Ring(Message, frozen=True):
    """A ring of triggers; see `RingContents`."""

    size: int
    taken: int
    full: int
    waiting: list[RingTrigger]
    recent: list[RingTrigger]

    @classmethod
    def of(cls, contents: RingContents) -> Ring:
        """A ring as it was seen."""
        waiting, recent = ([RingTrigger.of(*item) for item in items] for items in (contents.waiting, contents.recent))
        return cls(contents.size, contents.taken, contents.full, waiting, recent)
