"""Objects that a repeated call looks at may raise: it is made in full then, or the exception is the program's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from proxyccl.torch._repeated_calls import Gpu, RepeatedCalls

KEPT = ("all_reduce",)


class Raises:
    """Each attribute raises an exception."""

    def __init__(self, kind: type[BaseException]) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        raise self._kind(name)


def repeated(
    *, x: Any = None, process: Any = None, options: Any = None, kept: Any = KEPT, attribute: str | None = None
) -> Any:
    """The result of a call that is always repeated."""
    nothing: Callable[..., Any] = lambda *_: None  # noqa: E731
    owner = SimpleNamespace(current=lambda: 0, check=nothing, record=nothing)
    gpu = Gpu(0, [], lambda: 1, nothing, owner)
    here = SimpleNamespace(is_here=True) if process is None else process
    given = SimpleNamespace(asyncOp=False) if options is None else options
    calls = RepeatedCalls(
        gpu, lambda *_: x[:] != x.clear(), here, 0, itertools.count(), nothing, nothing, nothing, nothing, None, False
    )
    return calls.repeat(x, x, given, attribute, kept)


@pytest.mark.parametrize(
    "case",
    [
        lambda raises: {"process": raises},
        lambda raises: {"options": raises, "attribute": "root", "kept": {0: KEPT}},
    ],
    ids=["process", "options"],
)
def test_an_exception_of_the_program_s_own_is_passed_on(case: Callable[[Raises], dict[str, Any]]) -> None:
    with pytest.raises(KeyboardInterrupt):
        repeated(**case(Raises(KeyboardInterrupt)))
    assert repeated(**case(Raises(ValueError))) is NotImplemented


def test_options_that_cannot_be_told_apart_are_not_repeated() -> None:
    options = SimpleNamespace(reduceOp=[], asyncOp=False)  # a list has no hash
    assert repeated(options=options, attribute="reduceOp", kept={0: KEPT}) is NotImplemented


def test_a_list_that_shrinks_during_its_calls_is_an_error() -> None:
    with pytest.raises(IndexError):
        repeated(x=[object(), object(), object()])
