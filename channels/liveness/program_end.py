"""Determines whether the program failed: whether it ends by an exception or with a nonzero exit status.

Python does not pass the exit status to exit handlers. This module therefore replaces `sys.exit` and `exit` by functions
that raise a subclass of SystemExit. If Python reads this exception's `code` when no frame of the program is left, the
program is ending, and the exception records the exit status. Under `python -m mpi4py`, mpi4py reports the status,
whatever the program raised. A SystemExit that the program raises itself, without `sys.exit` and without `python -m
mpi4py`, is treated as a normal end.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from proxyccl.channels.segment.error_record import raised

_CODE: Any = SystemExit.__dict__["code"]  # CPython's descriptor of the attribute `code`
_status = 0


def failure() -> str:
    """Returns a text that says how the program failed; "" if it did not fail."""
    if (error := getattr(sys, "last_value", None)) is not None:
        return raised(error)
    return f"its program exited with status {_status}" if _status else ""


def _note(code: object) -> None:
    global _status  # noqa: PLW0603  the status is global because a program ends once
    _status = code if isinstance(code, int) else int(code is not None)


class _ProgramExit(SystemExit):
    """A SystemExit that records its status when it ends the program."""

    @property
    def code(self) -> Any:
        code = _CODE.__get__(self)
        if sys._getframe().f_back is None:
            _note(code)
        return code

    @code.setter
    def code(self, value: Any) -> None:
        _CODE.__set__(self, value)


def _noting(leave: Callable[..., object]) -> Callable[..., NoReturn]:
    """Wraps a function that raises SystemExit, so that it raises `_ProgramExit`. Threads other than the main thread
    still raise SystemExit, which ends only the thread that raises it.
    """

    @functools.wraps(leave)
    def raise_noting(*arguments: Any) -> NoReturn:
        try:
            leave(*arguments)
        except SystemExit as error:
            if threading.current_thread() is not threading.main_thread() or _runs_thread():
                raise
            raise _ProgramExit(*error.args) from None
        raise AssertionError("it returned")

    return raise_noting


def _runs_thread() -> bool:
    """Returns whether `threading` started this thread. Does not use `threading.main_thread`, because in a forked child
    the main thread is the thread that called fork."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "threading"


@functools.cache
def watch() -> None:
    """Replaces `sys.exit` and `exit`, so that `failure` knows the exit status."""
    sys.exit = _noting(sys.exit)
    if (site := sys.modules.get("_sitebuiltins")) is not None:  # the module that defines `exit` and `quit`
        site.Quitter.__call__ = _noting(site.Quitter.__call__)


@functools.cache
def watch_mpi(mpi: Any) -> None:
    """Makes `failure` know the exit status of a program run by `python -m mpi4py`. `mpi` is the module mpi4py.MPI."""
    tell = mpi._set_abort_status

    def note(status: int) -> None:
        _note(status)
        tell(status)

    mpi._set_abort_status = note
