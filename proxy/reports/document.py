"""A report as JSON: a dataclass whose fields are checked when it is read back, perhaps by another machine and much
later.

A class for reports has a `format` and a `version`, which say what its file is.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxyccl.device.errors import ProxyCCLError

MOST_BYTES = 64 << 20
"""Of a file that is read: many times what the largest report takes."""


class ReportError(ProxyCCLError):
    """A file is no report, or can't be read. The message names it."""


@dataclass(frozen=True)
class Member:
    """Where a process runs.

    Attributes:
        host: its host's name and boot id.
        pid: its number there.
        started: when it did (`proxyccl.proxy.processes.start_of`), which tells it from a later one of that number; None
            if it had ended when it was looked at. Not compared.
    """

    host: str
    pid: int
    started: int | None = dataclasses.field(compare=False)


def encode(report: Any) -> str:
    """As text for a file."""
    return json.dumps(dataclasses.asdict(report), indent=1) + "\n"


def load(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ReportError."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror or error}") from error
    if len(text) > MOST_BYTES:
        raise ReportError(f"{path}: longer than any report")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path}: no report: {error}") from error
    if not isinstance(data, dict):
        raise ReportError(f"{path}: no report of ProxyCCL")
    return data


def decode(kind: Any, version: int, data: dict[str, Any]) -> Any:
    """A report of a class and version from its JSON object. Raises ValueError that says what is wrong."""
    if data.get("version") != version:
        raise ValueError(f"it is of version {data.get('version')!r}, and this is for version {version}")
    return _value(kind, data, "")


def _value(kind: Any, data: Any, where: str) -> Any:
    """The data as what an annotation names. Raises ValueError that says where it is something else."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:  # one kind, or None
        return None if data is None else _value(arguments[0], data, where)
    if origin is list and isinstance(data, list):
        return [_value(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data)]
    if origin is dict and isinstance(data, dict):
        return {key: _value(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if dataclasses.is_dataclass(kind) and isinstance(data, dict):
        hints = typing.get_type_hints(kind)
        for name in hints:
            if name not in data:
                raise ValueError(f"{where}: no {name}" if where else f"no {name}")
        fields = {name: _value(hint, data[name], f"{where}.{name}".lstrip(".")) for name, hint in hints.items()}
        return typing.cast(Any, kind)(**fields)
    if kind is float and type(data) is int:
        return float(data)
    if type(data) is not kind:
        raise ValueError(f"{where}: {data!r:.40} where {getattr(kind, '__name__', kind)} is wanted")
    return data
