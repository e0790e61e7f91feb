"""The ranks that a buffer excludes: lost ranks and masked ranks."""

from __future__ import annotations

from proxyccl.channels.communicator import Communicator
from proxyccl.deep_ep.arguments import refuse
from proxyccl.device.errors import PeerLostError


class Masks:
    """Ranks that are lost, and ranks that the caller masked since the last dispatch, among the original `ranks`, by
    their original numbers.

    Attributes:
        lost: the ranks that the buffer's communicator no longer has, in order.
        pending: the ranks that the caller masked, which the next dispatch excludes.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.lost: tuple[int, ...] = ()
        self.pending: set[int] = set()

    def update(self, rank: int, *, masked: bool) -> None:
        if rank not in self.lost:
            (self.pending.add if masked else self.pending.discard)(rank)
        elif not masked:
            raise self._refuse_return([rank])

    def clean(self) -> None:
        if self.lost:
            raise self._refuse_return(self.lost)
        self.pending.clear()

    def of(self, communicator: Communicator) -> set[int]:
        """All masked ranks, and the rank whose loss ended the communicator, if known."""
        masked = {*self.lost, *self.pending}
        failure = communicator.group.failure
        if failure.aborted:
            error = failure.exception()
            if isinstance(error, PeerLostError) and error.peer is not None:
                masked.add(self._present()[error.peer])
        return masked

    def numbers_in(self, communicator: Communicator) -> list[int]:
        """The pending ranks' numbers in the communicator."""
        return [number for number, rank in enumerate(self._present()) if rank in self.pending]

    def lose_all_but(self, shrunk: Communicator) -> None:
        """Records that only the ranks of a shrunk communicator remain."""
        present = self._present()
        left = {present[member] for member in shrunk.members}
        self.lost = tuple(rank for rank in range(self._ranks) if rank not in left)
        self.pending -= set(self.lost)

    def _present(self) -> list[int]:
        return [rank for rank in range(self._ranks) if rank not in self.lost]

    @staticmethod
    def _refuse_return(ranks: object) -> NotImplementedError:
        return refuse("unmasking of lost ranks", f"make a new buffer on a group that has {ranks} again")
