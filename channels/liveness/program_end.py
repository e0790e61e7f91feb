"""Whether the program ends by a failure: by an exception, or by an exit with a nonzero status.

Python does not pass the status to exit handlers. So `sys.exit` and `exit` are replaced to raise a SystemExit that notes
when it has left the program: Python then asks the exception for its code while no frame of the program is left.
If mpi4py's runner runs the program, the runner reports how the program ended, whatever was raised. A SystemExit raised
without `sys.exit` and without that runner is not noticed: peers see a normal end, and their later calls are refused,
because this rank makes none.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from proxyccl.channels.segment.error_record import raised

_CODE: Any = SystemExit.__dict__["code"]  # Python's descriptor of the C struct's field `code`
_status = 0


def failure() -> str:
    """Returns in words how the ended program failed; "" if it did not fail."""
    if (error := getattr(sys, "last_value", None)) is not None:
        return raised(error)
    return f"its program exited with status {_status}" if _status else ""


def _note(code: object) -> None:
    """Records how the program ended: `code` is as for `sys.exit`."""
    global _status  # noqa: PLW0603  a program ends once
    _status = code if isinstance(code, int) else int(code is not None)


class _ProgramExit(SystemExit):
    """A SystemExit that notes how the program ends."""

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
    """Wraps a function that raises SystemExit, so that the exception notes the program's end. In threads other than the
    main thread, the exception only ends the thread, as usual.
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
    """Whether the caller is a thread of `threading`. In a forked child, the thread that forked is the main thread."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "threading"


@functools.cache
def watch() -> None:
    """From now on, notes how the program ends."""
    sys.exit = _noting(sys.exit)
    if (site := sys.modules.get("_sitebuiltins")) is not None:  # the module that defines `exit` and `quit`
        site.Quitter.__call__ = _noting(site.Quitter.__call__)


@functools.cache
def watch_mpi(mpi: Any) -> None:
    """Does what `watch` does, for programs that mpi4py's runner runs. `mpi` is the module mpi4py.MPI."""
    tell = mpi._set_abort_status

    def note(status: int) -> None:
        _note(status)
        tell(status)

    mpi._set_abort_status = note
