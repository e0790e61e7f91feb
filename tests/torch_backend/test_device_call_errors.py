"""If an object that C reads for a call on a GPU raises an exception, either Python makes the call, or the program gets
the exception.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from proxyccl.torch._device_calls import CallIssuer, Gpu

NAMED = ("all_reduce", ())


class Raises:
    """An object whose attributes raise an exception when they are read."""

    def __init__(self, kind: type[BaseException]) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        raise self._kind(name)


def issued(
    *, x: Any = None, process: Any = None, options: Any = None, named: Any = NAMED, attribute: str | None = None
) -> Any:
    """Makes a call that C issues unless one of the objects raises an exception. Returns C's result."""
    nothing: Callable[..., Any] = lambda *_: None  # noqa: E731
    owner = SimpleNamespace(current=lambda: 0, check=nothing, record=nothing)
    gpu = Gpu(0, [], lambda: 1, nothing, owner)
    here = SimpleNamespace(is_here=True) if process is None else process
    given = SimpleNamespace(asyncOp=False) if options is None else options
    calls = CallIssuer(
        gpu, lambda *_: x[:] != x.clear(), here, 0, itertools.count(), nothing, nothing, nothing, nothing, None, False
    )
    return calls.issue(x, x, given, attribute, named)


@pytest.mark.parametrize(
    "case",
    [
        lambda raises: {"process": raises},
        lambda raises: {"options": raises, "attribute": "root", "named": {0: NAMED}},
    ],
    ids=["process", "options"],
)
def test_an_exception_of_the_program_s_own_is_passed_on(case: Callable[[Raises], dict[str, Any]]) -> None:
    with pytest.raises(KeyboardInterrupt):
        issued(**case(Raises(KeyboardInterrupt)))
    assert issued(**case(Raises(ValueError))) is NotImplemented


def test_a_call_whose_options_cannot_be_told_apart_is_left_to_python() -> None:
    options = SimpleNamespace(reduceOp=[], asyncOp=False)  # a list is not hashable
    assert issued(options=options, attribute="reduceOp", named={0: NAMED}) is NotImplemented


def test_a_list_that_shrinks_during_its_calls_is_an_error() -> None:
    with pytest.raises(IndexError):
        issued(x=[object(), object(), object()])
