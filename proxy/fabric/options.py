"""Options of the transport `fabric`: libfabric's provider, interface and settings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from proxyccl.device.arguments.integers import as_integer, find_integer
from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.environment_options import named_options
from proxyccl.proxy.gpu_writes import GPU_WRITES
from proxyccl.proxy.staging import MOST_WIRES, STAGING_BYTES, STAGING_CHUNK

SIGNALS = ("auto", "ordered", "delivered")

_PREFIX = "PROXYCCL_FABRIC_"
_RANGES = {
    "depth": range(2, 4097),
    "staging_bytes": STAGING_BYTES,
    "staging_chunk": STAGING_CHUNK,
    "streams": range(1, MOST_WIRES + 1),
}
_CHOICES = {"signal": SIGNALS, "gpu_writes": GPU_WRITES}


@dataclass(frozen=True)
class FabricOptions:
    """The libfabric provider to use, and its settings.

    Attributes:
        provider: its name, such as "efa", "cxi" or "tcp;ofi_rxm", or a part of that between semicolons, such as "tcp";
            None for the first that libfabric prefers and that reaches other hosts (`choose_offer`).
        interface: the interfaces, by libfabric's names of their domains, such as "eth0" or "rdmap0s6": a
            comma-separated list of prefixes. A leading "=" gives whole names; a leading "^" or "^=" gives names to
            exclude. None for any but the loopback.
        depth: the most outstanding writes of a connection, 2 to 4096; fewer if the provider takes fewer.
        signal: when a signal is written: "ordered", right after its data, which needs a provider that keeps the
            order of writes; "delivered", when its data has been delivered; "auto" for the first if the provider can,
            and in the same message where that is stored in order.
        gpu_writes: "auto" to write to a GPU's memory only if the device says that it orders RDMA writes before signals
            in host memory; "ordered" if the caller promises it. Otherwise the transport is "staged_fabric".
        staging_bytes: bytes of pinned memory per peer and direction of the transport "staged_fabric", 4 KiB to 64 MiB;
            two ranks use the smaller of their values. None for 4 MiB, or 2 MiB for each of more streams; less for the
            peers of a rank that has many.
        staging_chunk: the most bytes of a put that are staged at a time, 64 bytes to 32 MiB; at most half of
            `staging_bytes`.
        streams: the connections over which staged data goes to a peer, each with a thread of its own, 1 to 16; two
            ranks use the smaller of their values. None for the provider's and the machine's: 1 where the provider is
            not one over sockets, else as many as the rank's share of half of the machine's cores.

    Raises:
        ArgumentError: a value is out of range; the error names the field.
    """

    provider: str | None = None
    interface: str | None = None
    depth: int = 256
    signal: str = "auto"
    gpu_writes: str = "auto"
    staging_bytes: int | None = None
    staging_chunk: int = 512 << 10
    streams: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is not None or field.default is not None:
                _check(field.name, field.name, getattr(self, field.name))
            if field.name in _RANGES and getattr(self, field.name) is not None:
                object.__setattr__(self, field.name, find_integer(getattr(self, field.name)))

    @classmethod
    def from_environment(cls, **arguments: Any) -> FabricOptions:
        """Options from ``PROXYCCL_FABRIC_PROVIDER``, ``PROXYCCL_FABRIC_INTERFACE``, …; arguments that are not None take
        precedence.

        Raises:
            ArgumentError: a variable or an argument is out of range, and the error names it; or an argument is not the
                name of an option.
        """
        texts = [field.name for field in fields(cls) if field.name not in _RANGES]
        return cls(**named_options(cls, "the fabric", arguments, _PREFIX, texts, _check))


def _check(field: str, shown: str, value: object) -> None:
    if field in _RANGES:
        allowed = _RANGES[field]
        as_integer(value, shown, f"must be a whole number from {allowed[0]} to {allowed[-1]}", allowed[0], allowed[-1])
    elif field in _CHOICES:
        if not isinstance(value, str) or value not in _CHOICES[field]:
            raise ArgumentError(shown, f"must be one of {', '.join(_CHOICES[field])}, not {value!r}")
    elif not isinstance(value, str) or not value.strip("=^,"):
        raise ArgumentError(shown, f"must be a name, not {value!r}")
