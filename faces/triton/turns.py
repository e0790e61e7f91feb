"""Runs the programs of interpreted kernels alternately, so that a program can wait for another program of its grid or
of another rank in the process.

Triton's interpreter keeps the index of the running program in a global variable, so only the thread that holds the lock
`_turn` runs a program. A program that waits releases the lock; when it has the lock again, it restores its index.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from proxyccl.device.process.threads import Thread
from triton.runtime.interpreter import interpreter_builder

_PATIENT_SPINS = 16
_PAUSE_SECONDS = 50e-6
_turn = threading.Lock()
_launches: dict[int, Launch] = {}
"""Maps a thread's id to the launch whose program the thread runs."""

Grid = tuple[int, int, int]


def nanoseconds() -> int:
    return time.monotonic_ns()


def pause(spins: Any) -> None:
    """Lets other programs run between two polls of a wait. Raises RuntimeError if a program has raised an exception."""
    pass_on(spins)
    launch = _launches.get(threading.get_ident())
    if launch is not None:
        launch.require_all()


def pass_on(spins: Any) -> None:
    """Lets other programs run between two polls of a wait, and does not raise an error even if another program of the
    launch has failed. A push calls this function after it has taken a ticket: if the push gave up, the proxy would wait
    forever for the ticket's trigger.
    """
    launch = _launches.get(threading.get_ident())
    if launch is None:
        return
    place = interpreter_builder.grid_idx
    launch.begin_another()
    _turn.release()
    try:
        time.sleep(0 if int(spins) < _PATIENT_SPINS else _PAUSE_SECONDS)
    finally:
        _turn.acquire()
        launch.enter(place)


class Launch:
    """The programs of one launch. A program begins once all earlier programs have ended or are waiting. The function
    `program` runs the program whose index is in the interpreter's state.
    """

    def __init__(self, program: Callable[[], None], grid: Grid) -> None:
        self._program = program
        self._grid = grid
        self._places: Iterator[Grid] = product(range(grid[0]), range(grid[1]), range(grid[2]))
        self._next: Grid | None = next(self._places, None)
        self._threads: list[Thread] = []
        self._beginning = False
        self._error: BaseException | None = None

    def run(self) -> None:
        """Runs all programs. Raises the exception of the first program that failed.

        All programs have ended when `run` returns or raises. If a signal handler raises an exception, all programs end
        at their next wait, and `run` waits for them; if the handler raises again, `run` raises immediately.
        """
        if threading.current_thread() is threading.main_thread():
            # In the main thread, a signal handler's exception could end a program in the middle of a push, which can't
            # be undone. So other threads run the programs.
            self.begin_another()
        else:
            self._work()
        try:
            self._join()
        except BaseException as interrupt:
            self._error = self._error or interrupt
            self._join()
        if self._error is not None:
            raise self._error

    def _join(self) -> None:
        for thread in self._threads:  # running programs may add threads
            thread.join()

    def enter(self, place: Any) -> None:
        """Sets the index of the running program in the interpreter's state."""
        interpreter_builder.set_grid_dim(*self._grid)
        interpreter_builder.set_grid_idx(*place)

    def require_all(self) -> None:
        """Raises RuntimeError if a program of the launch has failed: the caller may be waiting for that program."""
        if self._error is not None:
            raise RuntimeError("another program of the launch has failed")

    def begin_another(self) -> None:
        """If programs have not begun, starts a thread that runs them: the current program may wait for one of them."""
        if self._next is not None and not self._beginning:
            self._beginning = True
            thread = Thread(self._work, "proxyccl-interpreter")
            thread.start()
            self._threads.append(thread)

    def _work(self) -> None:
        thread = threading.get_ident()
        with _turn:
            _launches[thread], self._beginning = self, False
            try:
                while self._next is not None and self._error is None:
                    place, self._next = self._next, next(self._places, None)
                    self.enter(place)
                    self._program()
            except BaseException as error:
                self._error = self._error or error
            finally:
                del _launches[thread]
