"""Files of tables that `Communicator.tune` measured, for later communicators on machines of the same kind."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from proxyccl.channels.collectives.selection import Case, Selector, SizeTable
from proxyccl.device.build.compile_cache import cache_dir
from proxyccl.device.errors import ArgumentError, ProtocolError, UntrustedPathError
from proxyccl.device.process.cores import usable_cores
from proxyccl.device.process.cpu import cpu_name
from proxyccl.device.process.private_directories import open_private, read_private, write_private
from proxyccl.proxy.codec import Codec, Message, Uint64

if TYPE_CHECKING:
    from proxyccl.channels.group import Group

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]


class Machine(Message, frozen=True):
    """The properties of a machine on which a measurement depends, from rank 0's view. Machines with equal properties
    are of the same kind.
    """

    cpu: str  # the CPU's name
    cores: _Count  # number of the machine's cores
    runtime: str
    device: str  # the name of rank 0's device, which usually implies the kind of links ("H100 PCIe")
    nodes: tuple[_Count, ...]  # number of ranks of each node
    # How many of rank 0's peers are reached by each kind of link: "mapped", or a transport's name.
    links: dict[str, _Count]
    proxy: str  # where rank 0's proxy runs: "thread", "process" or "daemon"

    @classmethod
    def of(cls, group: Group) -> Machine:
        """Returns the kind of machine that a group runs on. Only the group's rank 0 calls this."""
        topology, runtime = group.topology, group.runtime
        transports = topology.transports()
        links = Counter("mapped" if topology.accessible[peer] else name for peer, name in transports.items())
        return cls(
            cpu=cpu_name(),
            cores=usable_cores(),
            runtime=runtime.name,
            device=runtime.device_name,
            nodes=tuple(len(members) for members in topology.node_members()),
            links=dict(sorted(links.items())),
            proxy=group.links.place.where,
        )

    def __str__(self) -> str:
        links = ", ".join(f"{count} {kind}" for kind, count in self.links.items())
        nodes = " + ".join(map(str, self.nodes))
        return f"{self.runtime} runtime, {nodes} ranks on {self.device}, links {links}, proxy {self.proxy}"


class NamedTable(Message, frozen=True):
    """A `SizeTable` without execution plans, as files store it."""

    limits: tuple[tuple[Uint64, str], ...]
    beyond: str

    def __post_init__(self) -> None:
        self.table()  # raises an error if a decoded table is invalid

    def table(self) -> SizeTable:
        return SizeTable(self.limits, self.beyond)


class TableOfCase(Message, frozen=True):
    """One row of a tuning file, or of the message by which rank 0 sends its tables to the other ranks."""

    case: Case
    table: NamedTable


class Tuned(Message, frozen=True):
    """The contents of a tuning file."""

    version: str  # the version of the library that measured
    measured: str  # when the tables were measured, in UTC
    machine: Machine  # the kind of machine
    tables: tuple[TableOfCase, ...]  # one for each case


_CODEC = Codec(Tuned, 1 << 20, "tuning file")


def rows_of(selector: Selector) -> tuple[TableOfCase, ...]:
    """Converts a selector's tables to rows.

    Raises:
        ArgumentError: the selector holds execution plans, which belong to the program that loads them.
    """
    if selector.plans:
        raise ArgumentError("selector", f"holds {selector.plans[0]!r}; plans can't be saved in files")
    return tuple(
        TableOfCase(case, NamedTable(tuple((limit, str(name)) for limit, name in table.limits), str(table.beyond)))
        for case, table in selector.tables.items()
    )


def selector_of(rows: tuple[TableOfCase, ...]) -> Selector:
    """Converts rows to a selector; this is the inverse of `rows_of`. Raises ArgumentError as `Selector` does."""
    return Selector({row.case: row.table.table() for row in rows})


def directory() -> Path:
    """Returns the directory of tuning files, which is ``tuning`` in the directory of compiled kernels."""
    return cache_dir() / "tuning"


def path_of(machine: Machine) -> Path:
    """Returns the path of the file for a kind of machine. The path does not depend on the library's version, so a new
    version's measurement replaces the file.
    """
    digest = hashlib.sha256(msgspec.json.encode(machine)).hexdigest()[:20]
    return directory() / f"{digest}.json"


def files() -> list[Path]:
    """Returns the paths of all complete tuning files, sorted by name. Raises OSError."""
    where = directory()
    found = where.iterdir() if where.is_dir() else ()
    return sorted(path for path in found if path.suffix == ".json" and not path.name.startswith("."))


def save(machine: Machine, selector: Selector) -> Path:
    """Writes the tuning file for a kind of machine atomically.

    Raises:
        OSError: the file can't be written.
        UntrustedPathError: other users can change the directory.
        ArgumentError: as `rows_of`.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    data = _CODEC.encode(Tuned(_version(), now, machine, rows_of(selector)), indent=2)
    path = path_of(machine)
    with _opened(path.parent, make=True) as descriptor:
        write_private(descriptor, path, data + b"\n")
    return path


@contextlib.contextmanager
def _opened(where: Path, *, make: bool = False) -> Iterator[int]:
    descriptor = open_private(where, "cache", make=make)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read(path: Path) -> Tuned:
    """Returns the contents of a tuning file.

    Raises:
        OSError: the file can't be read.
        UntrustedPathError: other users can change the file.
        ProtocolError: the file is invalid, belongs to another version of the library, or has another machine's name.
    """
    with _opened(path.parent) as descriptor:
        data = read_private(descriptor, path, _CODEC.limit + 1, argument="cache")
    tuned = _CODEC.decode(data, str(path))
    if tuned.version != _version():
        raise ProtocolError(f"{path} was measured with version {tuned.version}; expected {_version()}")
    if path_of(tuned.machine).name != path.name:
        raise ProtocolError(f"{path} is of another machine: {tuned.machine}")
    try:
        selector_of(tuned.tables)
    except ArgumentError as error:
        raise ProtocolError(f"{path}: {error}") from error
    return tuned


def load(group: Group) -> Selector | None:
    """Returns the tables that were measured on this kind of machine, or None if there are none. Only rank 0 calls this
    function.

    Warns if this version can't use the file.
    """
    try:
        if not files():  # checked first, because `Machine.of` queries the system
            return None
        return selector_of(read(path_of(Machine.of(group))).tables)
    except FileNotFoundError:
        return None
    except (OSError, UntrustedPathError, ProtocolError) as error:
        warnings.warn(f"{error}; the default tables are used. Communicator.tune measures new ones.", stacklevel=4)
        return None


def keep(group: Group, selector: Selector) -> None:
    """Saves measured tables, or warns if they can't be saved. Only rank 0 calls this."""
    try:
        save(Machine.of(group), selector)
    except (OSError, UntrustedPathError) as error:
        warnings.warn(f"the measured tables are used, but could not be saved: {error}", stacklevel=3)


def _version() -> str:
    from importlib.metadata import version  # imported here, because the import takes long

    return version("proxyccl")
