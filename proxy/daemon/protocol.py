"""The protocol between a client and the node daemon: the daemon's address, the frames, the messages and the methods.

The client and the daemon first identify their builds, by `Hello` and `HelloAnswer`. Then the client calls methods: the
functions of the daemon's `Session` and `SessionService` that have the decorator `method`. A function completely defines
its method: the request, the checks of arguments, the session's dispatch and the client's call follow from the
function's name and types. The daemon answers requests in order, and each answer has the request's number. The daemon
sends an event when a worker fails, when the program must be warned, when the daemon connects another process to the
client, and when the daemon ends.

A frame is one packet on a Unix socket; it holds one message and the file descriptors that belong to the message.
"""

from __future__ import annotations

import inspect
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_type_hints

import msgspec
from msgspec import Raw, Struct

from proxyccl.device._native import ffi as native
from proxyccl.device.errors import (
    ArgumentError,
    ProtocolError,
    ProxyCCLError,
    ProxyLostError,
    ResourceError,
    RuntimeUnavailableError,
    TransportError,
)
from proxyccl.device.memory.descriptors import receive_with_descriptors, send_with_descriptors
from proxyccl.proxy._engine import ffi as engine
from proxyccl.proxy.codec import Codec, Message, Uint64
from proxyccl.proxy.interface import ProxyFailure
from proxyccl.proxy.shared_words import SharedWords
from proxyccl.proxy.workers import MAX_RINGS

VERSION = 19
LONGEST_FRAME = 64 * 1024
MOST_DESCRIPTORS = MAX_RINGS + 1
"""The highest number of descriptors in a frame: one for the control segment, and one for each ring."""
DAEMON = "the node daemon"

CONTROL_BYTES = int(native.sizeof("ProxycclControl"))
LAYOUT = [CONTROL_BYTES, SharedWords.BYTES, int(engine.sizeof("ProxycclObserved"))]
"""Sizes of the structs in shared memory, which must be equal in the builds of both ends."""

Descriptors: TypeAlias = Annotated[Sequence[int], "descriptors"]
"""Descriptors in a message's frame. A method takes descriptors as its first parameter, or returns descriptors."""

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


# -- messages ---


class Hello(Message, frozen=True):
    """A client's first frame, with the same fields in all versions of the protocol; `hello` is the client's version."""

    hello: Uint64
    layout: list[Uint64]


class HelloAnswer(Message, frozen=True, omit_defaults=True):
    """The daemon's first frame: the daemon's version and process, or the reason why the daemon refuses the client. The
    fields of `HelloAnswer` are the same in every version of the protocol.
    """

    version: Uint64 = 0
    pid: Uint64 = 0
    error: str = ""
    message: str = ""


class Request(Message, frozen=True, omit_defaults=True, kw_only=True, tag_field="do"):
    """A client's request. The tag is the method's name, `request` is a number; subclasses add the arguments."""

    request: Uint64 | None = None

    @property
    def method(self) -> Method:
        return METHODS[str(self.__struct_config__.tag)]


class Reply(
    Message, frozen=True, omit_defaults=True, kw_only=True, tag_field="kind", tag=lambda class_name: class_name.lower()
):
    """Base class of answers, which carry the number of their request, and of events, whose `request` is None."""

    request: Uint64 | None = None


class Answer(Reply, frozen=True):
    """The result of a completed request, encoded by its method's codec."""

    result: Raw


_Kind: TypeAlias = Literal["argument", "resource", "protocol", "unavailable", "transport", "other"]
_KINDS: dict[_Kind, type[ProxyCCLError]] = {
    "resource": ResourceError,
    "protocol": ProtocolError,
    "unavailable": RuntimeUnavailableError,
    "transport": TransportError,
}


class Refused(Reply, frozen=True):
    """The answer to a request that the daemon did not carry out."""

    # The kind of exception that the client raises. With the kind "protocol", the daemon also closes the connection.
    error: _Kind
    message: str  # the reason
    argument: str = ""  # the argument's name, if `error` is "argument"

    @classmethod
    def of(cls, error: ProxyCCLError) -> Refused:
        """Returns the answer to a request that raised `error`."""
        text = str(error)
        if isinstance(error, ArgumentError):
            return cls("argument", text.removeprefix(f"{error.argument}: "), error.argument)
        return cls(next((kind for kind, each in _KINDS.items() if isinstance(error, each)), "other"), text)

    def exception(self) -> ProxyCCLError:
        match self.error:
            case "argument":
                return ArgumentError(self.argument, self.message)
            case "protocol":
                return ProxyLostError(f"{DAEMON} refuses this process: {self.message}", operation="proxy")
            case "transport":
                return TransportError(self.message, operation="connect")
            case "other":
                return ProxyCCLError(f"{DAEMON}: {self.message}")
            case kind:
                return _KINDS[kind](self.message)


class Failed(Reply, frozen=True):
    """An event: an error ended a worker of the client's service."""

    failure: ProxyFailure


class Warned(Reply, frozen=True):
    """An event: the client's process must issue a warning."""

    text: str


class Introduced(Reply, frozen=True):
    """An event: a process has connected to the client's server of descriptors; the frame carries the client's end."""


class Ending(Reply, frozen=True):
    """An event: the daemon is ending."""


AnyReply: TypeAlias = Answer | Refused | Failed | Warned | Introduced | Ending

HELLOS = Codec(Hello, LONGEST_FRAME)
HELLO_ANSWERS = Codec(HelloAnswer, LONGEST_FRAME, name="answer to Hello")
REPLIES = Codec[AnyReply](AnyReply, LONGEST_FRAME, name="reply")


# -- methods ---


class Method(Struct, frozen=True, kw_only=True):
    """A method that clients may call."""

    request: type[Request]  # the type of the method's requests, whose fields are the function's parameters
    result: Codec[Any]  # the codec of the method's results
    takes_descriptors: bool  # whether the request's frame carries descriptors
    returns_descriptors: bool  # whether the answer's frame carries descriptors instead of a result
    # The method may take this many times its argument `timeout`; 0 if the method has no such argument.
    timeouts: int = 0
    # Whether the method may open a device or register memory; if so, the client waits one more time-out for the answer.
    opens: bool = False
    # Whether the client gives up if the client's workers do not poll their rings during a time-out.
    needs_turns: bool = False
    # Whether the method only frees objects that the daemon holds for the client. The objects are also freed when the
    # daemon or the connection ends, so a later call does nothing.
    releases: bool = False
    answered: bool = True  # whether the daemon answers the request

    @property
    def name(self) -> str:
        return self.request.__name__

    def call(self, target: object, request: Request, descriptors: Sequence[int]) -> Any:
        """Calls the method on `target` for a request, with the descriptors in the request's frame."""
        arguments = [getattr(request, name) for name in self.request.__struct_fields__ if name != "request"]
        return getattr(target, self.name)(*[descriptors][: self.takes_descriptors], *arguments)

    def request_of(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Request, Sequence[int]]:
        """Returns the request for a call with these arguments, and the descriptors to send with it."""
        descriptors = arguments[0] if self.takes_descriptors else ()
        return self.request(*arguments[self.takes_descriptors :], **named), descriptors


METHODS: dict[str, Method] = {}
"""All methods, by name. The table is complete once `proxyccl.proxy.daemon.session` is imported."""


def method(**properties: Any) -> Callable[[F], F]:
    """Returns a decorator that makes a function of `Session` or `SessionService` a method. `properties` are the
    attributes of `Method` that have defaults.
    """

    def mark(function: F) -> F:
        name, hints = function.__name__, get_type_hints(function, include_extras=True)
        result = hints.pop("return")
        takes_descriptors, returns_descriptors = Descriptors in hints.values(), result == Descriptors
        parameters = inspect.signature(function).parameters
        defaults = {each: (field.default,) for each, field in parameters.items() if field.default is not field.empty}
        fields = [(each, hint, *defaults.get(each, ())) for each, hint in list(hints.items())[takes_descriptors:]]
        request: Any = msgspec.defstruct(name, fields, bases=(Request,), tag=name, frozen=True)
        METHODS[name] = Method(
            request=request,
            result=Codec(None if returns_descriptors else result, LONGEST_FRAME, name=f"answer to {name}"),
            takes_descriptors=takes_descriptors,
            returns_descriptors=returns_descriptors,
            **properties,
        )
        return function

    return mark


# -- frames ---


def send(
    connection: socket.socket, codec: Codec[T], message: T, descriptors: Sequence[int] = (), flags: int = 0
) -> None:
    """Sends a frame. Raises ProtocolError if the message is too long for a frame, and the errors of the socket."""
    send_with_descriptors(connection, codec.encode(message), descriptors, flags)


def receive(connection: socket.socket, codec: Codec[T], source: str, flags: int = 0) -> tuple[T, list[int]] | None:
    """Receives a frame. Returns the frame's message and its descriptors, which the caller closes. Returns None if the
    sender has closed the connection. Raises ProtocolError if `source` sent an invalid frame, and the socket's OSErrors.
    """
    frame, descriptors, came = receive_with_descriptors(connection, LONGEST_FRAME, MOST_DESCRIPTORS, flags)
    try:
        if not frame and not descriptors:
            return None
        _require_whole(came, source)
        return codec.decode(frame, source), descriptors
    except ProtocolError:
        close_all(descriptors)
        raise


def _require_whole(flags: int, source: str) -> None:
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise ProtocolError(
            f"a frame from {source} did not arrive whole: it has more than {LONGEST_FRAME} bytes, more than "
            f"{MOST_DESCRIPTORS} descriptors, or more than this process may still open (ulimit -n)"
        )


def close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def limit_waits(connection: socket.socket, send_seconds: float, receive_seconds: float) -> None:
    """Sets time-outs in seconds for a socket's sends and receives; 0 means no time-out. Uses the kernel's time-outs,
    because with Python's time-outs even a send with MSG_DONTWAIT would wait.
    """
    for option, seconds in ((socket.SO_SNDTIMEO, send_seconds), (socket.SO_RCVTIMEO, receive_seconds)):
        parts = divmod(int(seconds * 1e6), 1_000_000)
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *parts))


def socket_path(path: str | os.PathLike[str] | None = None) -> Path:
    """Returns the path of the daemon's socket: `path` if it is given, else ``PROXYCCL_DAEMON_SOCKET``, else this user's
    default. Raises ArgumentError if the path is too long for a socket.
    """
    chosen = path or os.environ.get("PROXYCCL_DAEMON_SOCKET")
    if not chosen:
        runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
        chosen = f"{runtime_dir}/proxyccl.sock" if runtime_dir else f"/tmp/proxyccl-{os.geteuid()}/daemon.sock"
    if len(os.fsencode(chosen)) > 107:
        raise ArgumentError("socket", f"{os.fspath(chosen)!r} is longer than the 107 bytes that a socket may have")
    return Path(chosen)
