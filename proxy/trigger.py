"""Encodes and decodes triggers. The layout of a trigger comes from trigger.h, through the compiled module."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Any

from proxyccl.device._native import lib
from proxyccl.device.arguments.integers import as_integer, find_integer
from proxyccl.device.errors import ArgumentError

MAX_MEMORIES: int = lib.PROXYCCL_MAX_MEMORIES
MAX_CHANNELS: int = lib.PROXYCCL_MAX_CHANNELS
WINDOW_BYTES: int = lib.PROXYCCL_WINDOW_BYTES
PARITY_SHIFT: int = lib.PROXYCCL_PARITY_SHIFT
"""Position of the parity bit in a slot's second word. The bit belongs to the ring, not to the trigger."""


class Operation(enum.IntFlag):
    """A trigger's operation, a combination of bits; `CUSTOM` has no bits and goes to the channel's Python handler.

    `DATA` alone is a put; `DATA | GET` is a get.
    """

    CUSTOM = lib.PROXYCCL_OP_CUSTOM
    DATA = lib.PROXYCCL_OP_DATA
    SIGNAL = lib.PROXYCCL_OP_SIGNAL
    FLUSH = lib.PROXYCCL_OP_FLUSH
    GET = lib.PROXYCCL_OP_GET


_TRANSFER = Operation.DATA | Operation.GET


@functools.cache  # cached, because a trace contains many operations
def operation_name(operation: Operation) -> str:
    """Returns an operation as text, such as "data+signal" or "get+flush"."""
    transfer = [Operation.GET] if operation & Operation.GET else list(operation & Operation.DATA)
    return "+".join(str(flag.name).lower() for flag in (*transfer, *(operation & ~_TRANSFER))) or "custom"


# For each field: the word that holds it, its shift, and its number of bits. The size of a put or get has only SIZE_BITS
# bits; the next bit is set for a get.
_FIELDS = {
    "size": (0, lib.PROXYCCL_SIZE_SHIFT, 32),
    "src_offset": (0, lib.PROXYCCL_SRC_OFFSET_SHIFT, lib.PROXYCCL_OFFSET_BITS),
    "dst_offset": (1, lib.PROXYCCL_DST_OFFSET_SHIFT, lib.PROXYCCL_OFFSET_BITS),
    "src_memory": (1, lib.PROXYCCL_SRC_MEMORY_SHIFT, lib.PROXYCCL_MEMORY_BITS),
    "dst_memory": (1, lib.PROXYCCL_DST_MEMORY_SHIFT, lib.PROXYCCL_MEMORY_BITS),
    "operation": (1, lib.PROXYCCL_OP_SHIFT, lib.PROXYCCL_OP_BITS),
    "channel": (1, lib.PROXYCCL_CHANNEL_SHIFT, lib.PROXYCCL_CHANNEL_BITS),
}


def full_parity(ticket: Any, size_log2: int) -> Any:
    """Returns the parity bit of a slot that holds the trigger with this ticket, in a ring of 2**size_log2 slots
    (trigger.h).

    `ticket` is a number or an array of numbers.
    """
    return ~(ticket >> size_log2) & 1


@dataclass(frozen=True)
class Trigger:
    """A trigger that a kernel pushed into a ring.

    Attributes:
        operation: the trigger's operation.
        channel: channel id, 0 to 1023.
        size: number of bytes to move, below 2 GiB; 1, 2, 4 or 8 for a value; any 32-bit number if `operation` lacks
            `DATA`.
        src_memory: memory id of the source, 0 to 507; 508 to 511 if the trigger carries a value of 1, 2, 4 or 8 bytes.
        src_offset: byte offset in the source, below 4 GiB; 0 for a value.
        dst_memory: memory id of the destination, 0 to 511.
        dst_offset: byte offset in the destination, below 4 GiB.
        value: the value that the trigger carries, as a 64-bit number whose lower `size` bytes are stored; None if the
            trigger has a source.
    """

    operation: Operation
    channel: int = 0
    size: int = 0
    src_memory: int = 0
    src_offset: int = 0
    dst_memory: int = 0
    dst_offset: int = 0
    value: int | None = None

    def encode(self) -> tuple[int, int]:
        """Encodes the trigger as two 64-bit words, with the parity bit 0.

        Raises:
            ArgumentError: a field does not fit its bits; the trigger has both a value and a source, or neither; or
                `GET` is set without `DATA` or with a value.
        """
        given = {name: as_integer(getattr(self, name), name, "must be an integer from 0 on", 0) for name in _FIELDS}
        carries, operation = given["src_memory"] >= MAX_MEMORIES, given["operation"]
        carried = find_integer(self.value) if carries else 0
        if carries != (self.value is not None) or carried is None or not 0 <= carried < 1 << 64:
            expected = "64 bits" if carries else "None"
            raise ArgumentError("value", f"is {self.value!r}; expected {expected} with src_memory {self.src_memory}")
        is_get, transfers = bool(operation & Operation.GET), bool(operation & Operation.DATA) and not carries
        if is_get and not transfers:
            raise ArgumentError("operation", "is a get; expected DATA with it, and no value")
        words = [carried or is_get << lib.PROXYCCL_GET_SHIFT, 0]
        for name, (word, shift, bits) in _FIELDS.items():
            if carries and word == 0:
                continue
            value = given[name]
            if name == "operation":
                value &= ~Operation.GET.value
            if not 0 <= value < 1 << (lib.PROXYCCL_SIZE_BITS if name == "size" and transfers else bits):
                raise ArgumentError(name, f"{value} does not fit in {bits} bits")
            words[word] |= value << shift
        return words[0], words[1]

    @classmethod
    def decode(cls, word0: int, word1: int) -> Trigger:
        """Decodes a trigger from two words. The parity bit is ignored."""
        words = (word0, word1)
        values: dict[str, Any] = {
            name: words[w] >> shift & ((1 << bits) - 1) for name, (w, shift, bits) in _FIELDS.items()
        }
        values["operation"] = Operation(values["operation"])
        if values["src_memory"] >= MAX_MEMORIES:
            values |= {"value": word0, "size": 1 << (values["src_memory"] - MAX_MEMORIES), "src_offset": 0}
        elif values["operation"] & Operation.DATA and values["size"] >> lib.PROXYCCL_GET_SHIFT:
            values["operation"] |= Operation.GET
            values["size"] -= 1 << lib.PROXYCCL_GET_SHIFT
        return cls(**values)
