"""The collectives that C makes for a process group on one GPU: their options, as `TensorCalls` takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxyccl.channels.collectives.request import CTA_POLICIES, CtaPolicy
from proxyccl.channels.collectives.tensor_calls import TensorCalls
from proxyccl.torch._device_calls import CallIssuer
from proxyccl.torch.reductions import PLAIN_OPS

Named = tuple[str, tuple[Any, ...]]
"""The name of a call, and its options."""


class DeviceCalls:
    """The collectives of one process group on one GPU, by the names of `ProcessGroupProxyCCL._issue_in_c`.

    Args:
        calls: the communicator's.
        ranks: number of ranks.
        issuer: makes the issuer of calls that a function such as `TensorCalls.call_kept` makes; with `blocks` the CPU
            waits for them.

    Attributes:
        collectives, barriers: issue the calls that consist of no transfers.
        named: a call's options by its name, which is followed by a policy for calls that have one; of reductions by the
            number of the operator's kind, of broadcasts by the root.
    """

    def __init__(self, calls: TensorCalls, ranks: int, issuer: Callable[..., CallIssuer]) -> None:
        self.collectives, self.barriers = issuer(calls.call_kept), issuer(calls.call_kept, blocks=True)
        self._calls, self._issuer = calls, issuer
        self._exchanges: CallIssuer | None = None

        def named(name: str, **options: Any) -> Named:
            return name, calls.options(name, **options)

        def reductions(name: str, root: int | None = None, cta_policy: CtaPolicy | None = None) -> dict[int, Named]:
            options = {"root": root, "cta_policy": cta_policy}
            return {kind.value: named(name, op=op, **options) for kind, op in PLAIN_OPS.items()}

        self.named: dict[str, Any] = {
            "broadcast": {root: named("broadcast", root=root) for root in range(ranks)},
            "barrier": named("barrier"),
            **{reduce_to(root): reductions("reduce", root) for root in range(ranks)},
        }
        for policy in (None, *CTA_POLICIES):
            suffix = "" if policy is None else f", {policy}"
            for name in ("all_reduce", "reduce_scatter"):
                self.named[name + suffix] = reductions(name, cta_policy=policy)
            for name in ("all_gather", "all_to_all"):
                self.named[name + suffix] = named(name, cta_policy=policy)

    @property
    def exchanges(self) -> CallIssuer | None:
        """Issues the calls that consist of transfers; None until the ranks have made what these need."""
        if self._exchanges is None and (call := self._calls.call_transfers) is not None:
            self._exchanges = self._issuer(call)
        return self._exchanges

    @property
    def all(self) -> list[CallIssuer]:
        """All of these that were made."""
        return [self.collectives, self.barriers, *([] if self._exchanges is None else [self._exchanges])]


def reduce_to(root: int) -> str:
    """The name of reductions on a rank."""
    return f"reduce to rank {root}"
