"""The callers' request for a collective's algorithm. All ranks make the same request; the call log checks this."""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

from proxyccl.channels.collectives.selection import ALGORITHMS_BY_COLLECTIVE, require_algorithm
from proxyccl.channels.execution_plans.plan import ExecutionPlan
from proxyccl.channels.segment.calls import ANY_ALGORITHM, register_names
from proxyccl.device.arguments.flags import as_flag
from proxyccl.device.arguments.texts import as_choice
from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.codec import Message

CtaPolicy = Literal["default", "efficiency", "zero"]
"""How many multiprocessors a collective's blocks (CTAs) may occupy. "default": the number that is fastest.
"efficiency": a small number, which makes the collective only slightly slower. "zero": none. The names are those of
NCCL_CTA_POLICY_DEFAULT, _EFFICIENCY and _ZERO.
"""
CTA_POLICIES: tuple[CtaPolicy, ...] = ("default", "efficiency", "zero")

_ZERO, _SYMMETRIC = f"{ANY_ALGORITHM}, cta_policy zero", f"{ANY_ALGORITHM}, symmetric"
_ALGORITHMS = dict.fromkeys(name for names in ALGORITHMS_BY_COLLECTIVE.values() for name in names)


class Request(NamedTuple):
    """The algorithm or policy that the callers of a collective request."""

    name: str = ANY_ALGORITHM  # a text that describes the other fields; the call log compares it
    # The algorithm that the callers chose, or the name of an execution plan; None for the library's choice.
    algorithm: str | None = None
    cta_policy: CtaPolicy = "default"  # limits the library's choice
    # Whether the callers promise that all ranks' arrays are symmetric memory. The promise affects only the choice of an
    # algorithm.
    symmetric: bool = False


CTA_POLICY = "PROXYCCL_CTA_POLICY"
INVARIANT = "PROXYCCL_INVARIANT"
SUSPENDABLE = "PROXYCCL_SUSPENDABLE"


class Standing(Message, frozen=True):
    """A communicator's settings for all of its calls; the same on all ranks."""

    # The policy of calls that name neither a policy nor an algorithm; None if the program named none.
    cta_policy: CtaPolicy | None = None
    # Whether the bits of each reduced element must depend only on the ranks' values of that element.
    invariant: bool = False
    suspendable: bool = False  # whether `Communicator.suspend` may be called


def request_for(plan: ExecutionPlan) -> Request:
    return Request(plan.call_name, plan.call_name)


def flag_from(argument: bool | None, name: str, variable: str) -> bool:
    """Returns the argument called `name`. If the argument is None, returns the value of an environment variable, whose
    default is 0.

    Raises:
        ArgumentError: the argument is neither true nor false, or the variable neither 0 nor 1.
    """
    if argument is not None:
        return as_flag(argument, name)
    text = os.environ.get(variable) or "0"
    if text not in ("0", "1"):
        raise ArgumentError(variable, f"must be 0 or 1, not {text!r}")
    return text == "1"


def request_of(
    collective: str, algorithm: str | None, cta_policy: str | None, symmetric: bool, standing: CtaPolicy | None
) -> Request:
    """Returns the request of a call.

    Args:
        algorithm, cta_policy, symmetric: the caller's arguments.
        standing: the communicator's policy, for calls that name neither an algorithm nor a policy; None for "default".

    Raises:
        ArgumentError: one of the caller's arguments is wrong, or two of them contradict each other.
    """
    if algorithm is not None and not isinstance(algorithm, str):
        raise ArgumentError("algorithm", f"must be a name or None, not {algorithm!r}")
    named = None if cta_policy is None else as_choice(cta_policy, "cta_policy", CTA_POLICIES)
    if not isinstance(symmetric, bool):
        raise ArgumentError("symmetric", f"must be True or False, not {symmetric!r}")
    policy: CtaPolicy = named or standing or "default"
    if algorithm is not None:
        require_algorithm(algorithm, collective)
        if named == "zero" and algorithm != "proxy":
            raise ArgumentError(
                "algorithm", f"{algorithm!r} occupies multiprocessors; with cta_policy 'zero' expected None or 'proxy'"
            )
        return _with_policy(Request(algorithm, algorithm), policy)
    if policy == "zero":
        return Request(_ZERO, cta_policy="zero")
    return _with_policy(Request(_SYMMETRIC, symmetric=True) if symmetric else Request(), policy)


def _with_policy(request: Request, policy: CtaPolicy) -> Request:
    return request._replace(name=_efficient(request.name), cta_policy=policy) if policy == "efficiency" else request


def _efficient(name: str) -> str:
    return f"{name}, cta_policy efficiency"


register_names(_ZERO, _SYMMETRIC, *map(_efficient, (ANY_ALGORITHM, _SYMMETRIC, *_ALGORITHMS)))
