"""The codec of all data that processes exchange: in the bootstrap, with the daemon, over links between hosts, in
observed memory and in report files.

A `Message` declares its fields and their ranges. A `Codec` encodes a message as bytes of a bounded length and decodes
them. Decoding raises a `ProtocolError` for bytes that are not a valid message; the error names the sender, the field,
the received value and the expected value.

The encoding is JSON rather than MessagePack, because people and other tools read these bytes in report files, in shared
memory and on sockets, and because no use of the codec moves enough data to profit from a binary encoding. Values of
type ``bytes`` are encoded in base64. Integers have 64 bits: from -2^63 to 2^64 - 1.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from typing import Annotated, Any, Generic, TypeVar, overload

import msgspec
from msgspec import Meta, Struct, inspect

from proxyccl.device.errors import ProtocolError

__all__ = ["Codec", "Message", "ProtocolError", "Uint32", "Uint64"]

Uint32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Uint64 = Annotated[int, Meta(ge=0)]
"""`Codec` itself refuses values of more than 64 bits: msgspec takes no bound above 2^63 - 1."""

_SHOWN = 100  # errors show at most this many characters of a wrong value
_LOCATED = re.compile(r"(?P<what>.*?)(?: - at `(?P<key>key` in `)?\$(?P<path>.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
# An integer with fewer digits fits in 64 bits. The character before the integer lets the search skip long texts fast.
_LONG_NUMBER = re.compile(rb"[:,\[]\s*(-[0-9]{19,}|[0-9]{20,})")
_INTEGERS = range(-(2**63), 2**64)
_MOST_DIGITS = 20  # maximum number of characters of a 64-bit integer, with its sign

T = TypeVar("T")


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of the messages that a `Codec` encodes. A message is immutable, and is built and compared like a
    frozen dataclass.

    Decoding refuses an unknown field, and a missing field that has no default. `__post_init__` may raise
    ValueError for conditions that types and ranges can't express.
    """


class Codec(Generic[T]):
    """Encodes values of one type as bytes, and decodes them.

    Args:
        kind: a `Message`, or a type made of messages and plain values, such as a tagged union, a list or a dict.
        limit: maximum length of an encoded value in bytes.
        name: the name of a value of `kind` in errors; the type's name by default.
        error: the exception to raise for bytes that do not encode a value of `kind`.
    """

    @overload
    def __init__(
        self, kind: type[T], limit: int, name: str = "", error: type[ProtocolError] = ProtocolError
    ) -> None: ...

    @overload  # unions need this overload, because a union is not a `type[T]`: Codec[A | B](A | B, ...)
    def __init__(self, kind: Any, limit: int, name: str = "", error: type[ProtocolError] = ProtocolError) -> None: ...

    def __init__(self, kind: Any, limit: int, name: str = "", error: type[ProtocolError] = ProtocolError) -> None:
        self._kind = kind
        self._error = error
        self.limit = limit
        self.name = name or getattr(kind, "__name__", str(kind))

    @functools.cached_property
    def _decoder(self) -> msgspec.json.Decoder[T]:  # made lazily: a process uses few decoders
        _require_strict(self._kind)
        return msgspec.json.Decoder(self._kind)

    def encode(self, value: T, *, indent: int = 0) -> bytes:
        """Encodes a value. Characters that UTF-8 cannot encode, such as some in file names, become backslash escapes.

        Args:
            value: a value of the codec's type, which is not checked.
            indent: number of spaces by which each level is indented, with each item on its own line; 0 to encode
                everything on one line.

        Raises:
            ProtocolError: the encoding takes more than `limit` bytes.
        """
        try:
            data = msgspec.json.encode(value)
        except UnicodeEncodeError:
            data = msgspec.json.encode(_escape_surrogates(msgspec.to_builtins(value)))
        if indent:
            data = msgspec.json.format(data, indent=indent)
        if len(data) > self.limit:
            raise ProtocolError(f"{self.name} of {len(data)} bytes; expected at most {self.limit}")
        return data

    def decode(self, data: bytes | bytearray | memoryview, source: str) -> T:
        """Decodes bytes that came from `source`, such as "rank 3".

        Raises:
            ProtocolError, or the codec's `error`: the bytes do not encode a value of this type, or are longer than
                `limit`.
            TypeError: the type contains a dataclass or a Struct that would let unknown fields pass.
        """
        if len(data) > self.limit:
            raise self._error(f"{self.name} of {len(data)} bytes from {source}; expected at most {self.limit}")
        try:
            value: T = self._decoder.decode(data)
            _require_64_bits(data)
        except msgspec.ValidationError as error:
            problem = _explain(str(error), self._kind, data)
        except _WideIntegerError as error:
            problem = f"{_prefix(error.path)}expected an integer of at most 64 bits, got {_show(error.value)}"
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            problem = _no_json(data, error)
        else:
            return value
        raise self._error(f"invalid {self.name} from {source}: {problem}")


class _WideIntegerError(Exception):
    def __init__(self, path: str, value: int) -> None:
        super().__init__(path, value)
        self.path = path
        self.value = value


def _require_64_bits(data: bytes | bytearray | memoryview) -> None:
    is_nested = bytes(memoryview(data)[:1]) in (b"{", b"[")  # `data` may also be a msgspec.Raw
    if is_nested and all(len(each) <= _MOST_DIGITS and int(each) in _INTEGERS for each in _LONG_NUMBER.findall(data)):
        return
    for path, value in _leaves(msgspec.json.decode(data), "$"):
        if isinstance(value, int) and value not in _INTEGERS:
            raise _WideIntegerError(path, value)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}[{i}]")
    else:
        yield path, value


def _escape_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escape_surrogates(key): _escape_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape_surrogates(item) for item in value]
    return value


def _require_strict(kind: Any) -> None:
    seen: set[int] = set()
    pending = [inspect.type_info(kind)]
    while pending:
        found = pending.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, inspect.DataclassType | inspect.TypedDictType | inspect.NamedTupleType):
            raise TypeError(f"{found.cls.__name__} is not a Message: unknown fields would be ignored")
        if isinstance(found, inspect.StructType):
            if not found.forbid_unknown_fields:
                raise TypeError(f"{found.cls.__name__} is not a Message: unknown fields would be ignored")
            pending += [field.type for field in found.fields]
        for name in ("item_type", "key_type", "value_type"):
            if hasattr(found, name):
                pending.append(getattr(found, name))
        pending += getattr(found, "types", ()) or getattr(found, "item_types", ())


def _no_json(data: bytes | bytearray | memoryview, error: Exception) -> str:
    return f"expected JSON, got {_show(bytes(data[: _SHOWN + 1]))} ({error})"


def _explain(text: str, kind: Any, data: bytes | bytearray | memoryview) -> str:
    try:
        whole = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _no_json(data, error)
    match = _LOCATED.fullmatch(text)
    assert match is not None  # any text matches
    what, path = match["what"], match["path"] or ""
    steps = [name or index for name, index in _STEP.findall(path)]
    value, expected = _follow(steps, whole, inspect.type_info(kind))
    return _prefix(path) + _describe(what, value, expected, steps[-1:], is_key=match["key"] is not None)


def _describe(what: str, value: Any, expected: inspect.Type, last: list[str], *, is_key: bool) -> str:
    if what.startswith("Object missing required field"):
        return f"field {_quoted(what)} is missing"
    if what.startswith("Object contains unknown field"):
        chosen = _variant(value, _structs(expected))
        names = [field.encode_name for field in chosen.fields] if chosen is not None else []
        return f"unknown field {_quoted(what)}; expected {', '.join(names)}"
    if what.startswith(("Invalid value", "Invalid enum value")):
        tags = [struct.tag for struct in _structs(expected) if [struct.tag_field] == last and struct.tag is not None]
        literals = (option.values for option in _options(expected) if isinstance(option, inspect.LiteralType))
        choices = list(map(str, tags or itertools.chain(*literals)))
        one_of = "one of " if len(choices) > 1 else ""
        return f"unknown value {_show(value)}; expected {one_of}{', '.join(choices)}"
    if what.startswith("Expected"):
        wanted = re.sub(r", got `.*`$", "", what).replace("`", "").removeprefix("Expected ")
        return f"expected {wanted}{' as a key' if is_key else ''}, got {_show(value)}"
    return f"{what}, got {_show(value)}"


def _follow(steps: list[str], value: Any, expected: inspect.Type) -> tuple[Any, inspect.Type]:
    """Returns the value at a path, and the type that the codec expects of this value.

    If the path ends in a dict's entry, returns the dict and its type, because msgspec does not name the entry. If the
    path ends in a union's tag, returns the tag's value and the union's type.
    """
    for step in steps:
        if isinstance(value, dict):
            if step not in value:
                break
            structs = _structs(expected)
            if any(struct.tag_field == step for struct in structs):
                return value[step], expected
            chosen = _variant(value, structs)
            if chosen is not None:
                expected = next((field.type for field in chosen.fields if field.encode_name == step), expected)
            value = value[step]
        elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
            for option in _options(expected):
                expected = getattr(option, "item_type", expected)
            value = value[int(step)]
        else:
            break
    return value, expected


def _options(expected: inspect.Type) -> tuple[inspect.Type, ...]:
    return expected.types if isinstance(expected, inspect.UnionType) else (expected,)


def _structs(expected: inspect.Type) -> list[inspect.StructType]:
    return [option for option in _options(expected) if isinstance(option, inspect.StructType)]


def _variant(value: dict[str, Any], structs: list[inspect.StructType]) -> inspect.StructType | None:
    if len(structs) == 1:
        return structs[0]
    return next((struct for struct in structs if value.get(struct.tag_field or "") == struct.tag), None)


def _prefix(path: str) -> str:
    name = path.removeprefix("$").removeprefix(".")
    return f"{name}: " if name else ""


def _quoted(text: str) -> str:
    return repr(text.split("`", 1)[1].rstrip("`")[:_SHOWN])


def _show(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # repr fails on huge integers and deeply nested lists
        text = f"a value of type {type(value).__name__} too long to print"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
