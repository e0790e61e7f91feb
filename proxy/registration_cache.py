"""A cache of memory registrations: users share a range's registration, which outlives them for a while."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from proxyccl.device.errors import ArgumentError
from proxyccl.device.memory.lease_cache import LeaseCache


class Registered(Protocol):
    """A registered range of memory."""

    @property
    def ptr(self) -> int:
        """Its address in this process."""
        ...

    @property
    def nbytes(self) -> int:
        """Its size."""
        ...

    @property
    def allocation(self) -> Hashable:
        """Identifies the range's allocation among all others; None if the range stays registered only while in use."""
        ...


Registration = TypeVar("Registration", bound=Registered)


class RegistrationCache(Generic[Registration]):
    """The registrations of a device. Threads may share it.

    Unused ranges stay registered for reuse if the caller names their allocation, which tells them from a later
    allocation at the same address. The least recently used ranges are deregistered first. A registered range keeps its
    memory occupied, even freed memory of a GPU.

    Args:
        deregister: ends a registration.
        keep: the number of unused ranges that stay registered.
        keep_bytes: the total size of the unused ranges that stay registered.
    """

    def __init__(
        self, deregister: Callable[[Registration], object], *, keep: int = 64, keep_bytes: int = 1 << 30
    ) -> None:
        self._made: LeaseCache[tuple[int, int, Hashable], Registration] = LeaseCache(
            deregister, keep=keep, weigh=lambda made: made.nbytes, keep_weight=keep_bytes
        )

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._made.closed

    def acquire(self, ptr: int, nbytes: int, allocation: Hashable, make: Callable[[], Registration]) -> Registration:
        """Returns the registration of a range, which `make` creates if necessary. Each call is paired with a `release`.

        Raises:
            ArgumentError: the range is empty or invalid.
        """
        if not isinstance(ptr, int) or not 0 < ptr < 1 << 64:
            raise ArgumentError("ptr", f"must be an address, not {ptr!r}")
        if not isinstance(nbytes, int) or nbytes <= 0:
            raise ArgumentError("nbytes", f"must be positive, not {nbytes!r}")
        return self._made.acquire((ptr, nbytes, allocation), make)

    def release(self, registration: Registration) -> None:
        """Ends one use of a registration. After the last use, requests must no longer name it.

        Raises:
            ArgumentError: the registration is not in use.
        """
        key = (registration.ptr, registration.nbytes, registration.allocation)
        try:
            self._made.release(key, keep=registration.allocation is not None)
        except KeyError:
            raise ArgumentError("registration", f"{registration} is not in use") from None

    def close(self) -> None:
        """Deregisters everything. No transfers may be in flight from or to it."""
        self._made.close()
