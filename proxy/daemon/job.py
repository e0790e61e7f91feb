"""Connects a rank to its job's own daemon, found by a socket name; the first rank that needs the daemon starts it."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
import time
from pathlib import Path

from proxyccl.device.errors import ProtocolError, RuntimeUnavailableError
from proxyccl.device.memory.descriptors import EXHAUSTED, naming_exhaustion, out_of_descriptors
from proxyccl.device.process import forks
from proxyccl.proxy.codec import Codec, Message
from proxyccl.proxy.daemon.hello import DaemonAddress, introduce
from proxyccl.proxy.daemon.listeners import BACKLOG, abstract
from proxyccl.proxy.daemon.protocol import limit_waits
from proxyccl.proxy.processes import start_of

_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
"""Variables by which a launcher shows each rank only its own device."""
_LIMITING = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_COPY_CONNECTIONS")
"""Variables that limit a device's queues for a process. Megatron sets the first to 1, to order its own kernels."""
_PART_OF_DEVICE = "MIG"
"""The prefix of names of a GPU's parts. CUDA shows only one part, by default the first, so such a name is kept."""
_PROGRAM = Path(__file__).with_name("job_main.py")
_START_SECONDS = 30.0
"""The start may take this number of seconds even if the communicator's time-out is shorter: the time-out is meant for
peers' answers, and a busy machine starts processes slowly.
"""
_POLL_SECONDS = 0.002
_MOST_WORDS = 2000
_served: dict[str, tuple[int, int | None]] = {}
"""For each name, the process id and start time of the daemon that this process last used under that name."""
_WAY_OUT = "PROXYCCL_PROXY=thread runs the proxies in the ranks instead"


class JobOptions(Message, frozen=True):
    """Options of a daemon for its clients' proxies."""

    threads: int  # number of threads that run the workers of all clients
    cores: list[int] | None  # cores that these threads may run on; None for `affinity`
    affinity: list[int]  # cores that the process may run on
    programs: int  # number of ranks; their programs run on the same cores


JOB_OPTIONS = Codec(JobOptions, 1 << 20)


def new_name() -> str:
    """Returns a unique name that can't be guessed."""
    return f"proxyccl-{os.urandom(16).hex()}"


class JobDaemon(DaemonAddress):
    """The address of a job's own daemon. See `DaemonAddress` for the methods.

    Args:
        name: the daemon's name, which is the same on all ranks that share the daemon.
        options: the options with which this process starts the daemon if no other process has started it.
    """

    def __init__(self, name: str, options: JobOptions) -> None:
        self._name = name
        self._options = options
        self._errors: int | None = None

    def __str__(self) -> str:
        return f"@{self._name}"

    def connect(self, timeout: float) -> tuple[socket.socket, int]:
        """See `DaemonAddress.connect`. Starts the daemon if it is not running."""
        start_seconds = max(timeout, _START_SECONDS)
        deadline = time.monotonic() + start_seconds
        while True:
            patience = timeout if self._runs() else start_seconds
            try:
                connection, answer = introduce(abstract(self._name), patience)
            except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError) as error:
                if time.monotonic() > deadline:
                    raise _no_daemon(f"none answered within {start_seconds:g} s: {error}") from None
                if not self._start(start_seconds):
                    time.sleep(_POLL_SECONDS)
            except BlockingIOError:
                raise _no_daemon(f"it has not answered within {patience:g} s; is its process stopped?") from None
            except (OSError, ProtocolError) as error:
                raise _no_daemon(str(error)) from None
            else:
                limit_waits(connection, timeout, 0)
                _served[self._name] = answer.pid, start_of(answer.pid)
                # SO_PEERCRED would name the process that called listen(): the rank that started the daemon.
                with contextlib.suppress(OSError):
                    self._errors = os.open(f"/proc/{answer.pid}/fd/2", os.O_RDONLY | os.O_CLOEXEC)
                return connection, answer.pid

    def _runs(self) -> bool:
        """Whether the daemon that this process has used before is still running, so that no start is needed."""
        pid, started = _served.get(self._name, (0, None))
        return started is not None and start_of(pid) == started

    def _start(self, timeout: float) -> bool:
        with naming_exhaustion("the socket of the job's own node daemon"):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        forks.keep_from_children(listener)  # a forked child would keep the socket open
        with listener:
            try:
                listener.bind(abstract(self._name))
                listener.listen(BACKLOG)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return False
                raise _no_daemon(f"cannot listen at {self}: {error}") from None
            _launch(listener, self._options, timeout)
        return True

    def last_words(self) -> str:
        """Returns the last line that the daemon wrote to stderr; "" if this process can't read such a line."""
        if self._errors is None:
            return ""
        lines = _text_of(self._errors).splitlines()
        return lines[-1] if lines else ""

    def close(self) -> None:
        if self._errors is not None:
            os.close(self._errors)
            self._errors = None


def _no_daemon(reason: str) -> RuntimeUnavailableError:
    return RuntimeUnavailableError(f"the job's own node daemon: {reason}; {_WAY_OUT}")


def _launch(listener: socket.socket, options: JobOptions, timeout: float) -> None:
    import subprocess  # imported here: the import is slow, and only the rank that starts the daemon needs the module

    if not sys.executable:
        raise _no_daemon("this process does not know its Python interpreter (sys.executable is empty)")
    command = [sys.executable, "-P", str(_PROGRAM), str(listener.fileno())]
    with naming_exhaustion("what the job's own node daemon writes"):
        errors = os.memfd_create("proxyccl-stderr", os.MFD_CLOEXEC)
    try:
        process = subprocess.Popen(
            [*command, JOB_OPTIONS.encode(options).decode(), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C must not end the daemon: ranks may still need their proxies
            env=_environment(),
        )
        try:
            code = process.wait(timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise _no_daemon(f"it did not start within {timeout:g} s") from None
            raise
        if code:
            words = _text_of(errors).strip() or "it wrote nothing"
            raise _no_daemon(f"it ended while it started, with status {code}: {words}")
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise out_of_descriptors("the start of the job's own node daemon", error.errno) from None
        raise _no_daemon(f"cannot start {sys.executable}: {error}") from None
    finally:
        os.close(errors)


def _environment() -> dict[str, str]:
    """Returns this process's environment and module path, without the variables that hide devices or limit queues."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LIMITING and (name not in _HIDING or value.startswith(_PART_OF_DEVICE))
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path if entry)}


def _text_of(file: int) -> str:
    size = os.fstat(file).st_size
    return os.pread(file, _MOST_WORDS, max(0, size - _MOST_WORDS)).decode(errors="replace")
