"""Starts processes in milliseconds, as forks of a template process that has imported the library.

    python forked.py DESCRIPTOR      serves the socket with this number until its other end is closed

A fork behaves like a new interpreter: it has no threads, communicators or descriptors of another process, runs a
program as `__main__`, and exits as an interpreter exits.
"""

from __future__ import annotations

import atexit
import functools
import gc
import io
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

_MOST_BYTES = 1 << 20  # bytes of the largest message to or from the template


class Forks:
    """Starts processes as forks of a template process, which starts with the first fork.

    Args:
        environment: environment of the template process. ProxyCCL's own variables are removed, because each started
                process gets those of its test.
        prefix: a command prefix that executes the template elsewhere, such as in a namespace.
        template: the template's program, which takes the same argument as this file.

    Attributes:
        processor_seconds: processor time of the processes that have ended, in seconds.
    """

    def __init__(
        self, environment: Mapping[str, str], prefix: Sequence[str] = (), template: Path = Path(__file__)
    ) -> None:
        self.processor_seconds = 0.0
        self._environment = {name: value for name, value in environment.items() if not name.startswith("PROXYCCL_")}
        self._prefix = prefix
        self._template = str(template)
        self._connection: socket.socket | None = None
        self._ended: dict[int, int] = {}
        self._lock = threading.Lock()
        self.close: Callable[[], object] = lambda: None  # ends the template

    def begin_here(self) -> None:
        """Makes the template a fork of this process, so that the template need not import the library again. This
        process must not have other threads yet.
        """
        import_all()
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            connection.close()
            be_the_template(theirs)
        theirs.close()
        self._connect(connection, lambda: os.waitpid(pid, 0))

    def start(self, command: Sequence[str], env: dict[str, str], stdout: IO[str], stderr: IO[str]) -> int:
        """Starts a program with its arguments. Returns the program's process id."""
        with self._lock:
            connection = self._connected()
            request = pickle.dumps((list(command), env, os.getcwd()))
            socket.send_fds(connection, [request], [stdout.fileno(), stderr.fileno()])
            while not isinstance(answer := self._receive(connection), int):
                self._note(*answer)
            return answer

    def wait(self, pid: int, timeout: float) -> int | None:
        """Returns the exit status of a process, as in `Popen.returncode`, or None if it has not ended in time."""
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                if pid in self._ended:
                    return self._ended.pop(pid)
                if select.select([self._connected()], [], [], 0)[0]:
                    self._note(*self._receive(self._connected()))
                    continue
            if (remaining := deadline - time.monotonic()) <= 0:
                return None
            select.select([self._connected()], [], [], min(remaining, 0.1))  # another thread may receive the status

    def _note(self, pid: int, status: int, seconds: float) -> None:
        self._ended[pid] = status
        self.processor_seconds += seconds

    @staticmethod
    def _receive(connection: socket.socket) -> Any:
        return pickle.loads(connection.recv(_MOST_BYTES))

    def _connected(self) -> socket.socket:
        if self._connection is None:
            connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                template = subprocess.Popen(
                    [*self._prefix, sys.executable, self._template, str(theirs.fileno())],
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            self._connect(connection, lambda: template.wait(60))
        assert self._connection is not None
        return self._connection

    def _connect(self, connection: socket.socket, wait: Callable[[], object]) -> None:
        def end() -> None:
            connection.close()
            wait()

        self._connection = connection
        self.close = atexit.register(end)


FORKS = Forks(os.environ)


class ForkedProcess:
    """A program in a fork. The class has the attributes and methods of `Popen`."""

    def __init__(
        self, command: Sequence[str], env: dict[str, str], stdout: IO[str], stderr: IO[str], forks: Forks = FORKS
    ) -> None:
        self._forks = forks
        self.returncode: int | None = None
        self.pid = forks.start(command, env, stdout, stderr)

    def poll(self) -> int | None:
        """Returns the process's status, or None if it has not ended."""
        if self.returncode is None:
            self.returncode = self._forks.wait(self.pid, 0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Waits until the process has ended, and returns its status. Raises TimeoutExpired."""
        if self.returncode is None:
            self.returncode = self._forks.wait(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a fork", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends the process a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class PipedFork(ForkedProcess):
    """A program in a fork, with stdout and stderr in one pipe. `stdout` reads the pipe unbuffered."""

    def __init__(self, command: Sequence[str], env: dict[str, str], forks: Forks) -> None:
        reader, writer = os.pipe()
        self.stdout = io.FileIO(reader)
        with os.fdopen(writer, "w") as output:
            super().__init__(command, env, output, output, forks)

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Waits until the process has ended, and returns its remaining output and None. Raises TimeoutExpired."""
        deadline = time.monotonic() + timeout
        pieces = []
        with self.stdout:
            while select.select([self.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                if not (piece := self.stdout.read(1 << 16)):
                    self.wait(deadline - time.monotonic())
                    return b"".join(pieces).decode(errors="replace"), None
                pieces.append(piece)
        raise subprocess.TimeoutExpired("a fork", timeout, b"".join(pieces))


@functools.cache
def _code(program: str) -> types.CodeType:
    return compile(Path(program).read_bytes(), program, "exec")


def import_all() -> None:
    """Imports the library and the modules that most programs need."""
    import tempfile  # noqa: F401

    import ml_dtypes  # noqa: F401
    import numpy as np  # noqa: F401

    import proxyccl
    from proxyccl.device.host import HostRuntime  # noqa: F401  (most forks use HostRuntime)
    from proxyccl.proxy.daemon import command  # noqa: F401  (forked daemons run this module)

    for name in proxyccl.__all__:
        getattr(proxyccl, name)


def _serve(connection: socket.socket) -> tuple[list[str], dict[str, str], str]:
    """Forks a child for each request. Returns only in the children, with the command, environment and working directory
    of the request.
    """
    children: dict[int, int] = {}
    events = select.poll()
    events.register(connection, select.POLLIN)
    while True:
        for ready, _ in events.poll():
            if ready in children:
                pid = children.pop(ready)
                events.unregister(ready)
                os.close(ready)
                _, status, usage = os.wait4(pid, 0)
                seconds = usage.ru_utime + usage.ru_stime
                connection.send(pickle.dumps((pid, os.waitstatus_to_exitcode(status), seconds)))
                continue
            request, outputs, *_ = socket.recv_fds(connection, _MOST_BYTES, 2)
            if not request:
                sys.exit()
            command, env, directory = pickle.loads(request)
            _code(command[0])  # compile in the template, so that later children reuse the code
            pid = os.fork()
            if pid == 0:
                connection.close()
                for child in children:
                    os.close(child)
                for number, output in enumerate(outputs, 1):
                    os.dup2(output, number)
                    os.close(output)
                return command, env, directory
            for output in outputs:
                os.close(output)
            children[os.pidfd_open(pid)] = pid
            events.register(list(children)[-1], select.POLLIN)
            connection.send(pickle.dumps(pid))


def be_the_template(connection: socket.socket | None = None) -> NoReturn:
    """Serves fork requests from a connection: the given socket, or the descriptor in the program's argument. Each child
    runs its program and exits.
    """
    connection = connection or socket.socket(fileno=int(sys.argv[1]))
    gc.collect()
    gc.freeze()
    sys.argv, environment, working_directory = _serve(connection)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(working_directory)
    sys.path[0] = str(Path(sys.argv[0]).parent)
    main = types.ModuleType("__main__")
    main.__file__ = sys.argv[0]
    sys.modules["__main__"] = main
    exec(_code(sys.argv[0]), main.__dict__)
    sys.exit()


if __name__ == "__main__":
    import_all()
    be_the_template()
