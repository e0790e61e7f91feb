"""A server passes file descriptors to another process, which finds the server by name."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from proxyccl.device.errors import ResourceError
from proxyccl.device.memory import sockets
from proxyccl.device.memory.descriptor_server import (
    DescriptorServer,
    fetch_descriptor,
    fetch_descriptors,
    serve,
    supply,
)
from proxyccl.device.memory.sockets import TOKEN_BYTES, UnreachableError
from proxyccl.device.process import forks

KIND = b"?"

OTHER_PROCESS = """
import os, sys
from proxyccl.device.memory.descriptor_server import fetch_descriptors
for number, descriptor in fetch_descriptors(bytes.fromhex(sys.argv[1]), b"?", sys.argv[2].encode()):
    print(number, os.pread(descriptor, 100, 0).decode())
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def name(directory: Path) -> bytes:

    def make(request: bytes) -> Iterator[tuple[int, int]]:
        for number in range(int(request)):
            if number == 5:
                raise ValueError("there is no sixth")
            (directory / str(number)).write_text(f"file {number}")
            yield number, os.open(directory / str(number), os.O_RDONLY)

    supply(KIND, make, (ValueError,))
    serve()
    return forks.here().token


def test_another_process_gets_files_that_this_one_opened(name: bytes) -> None:
    out = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, name.hex(), "3"], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.splitlines() == ["0 file 0", "1 file 1", "2 file 2"]


def open_files(directory: Path) -> list[Path]:
    """Returns the files in `directory` that this process has open. The server runs in this process."""
    descriptors = Path("/proc/self/fd")
    targets = [Path(os.readlink(link)) for link in descriptors.iterdir() if link.is_symlink()]
    return [target for target in targets if target.parent == directory]


@pytest.mark.parametrize("request_", [b"6", b"nonsense"])
def test_a_request_that_cant_be_served_leaves_nothing_open(name: bytes, directory: Path, request_: bytes) -> None:
    with pytest.raises(OSError, match=r"there is no sixth|invalid literal"):
        fetch_descriptors(name, KIND, request_)
    assert open_files(directory) == []
    assert fetch_descriptors(name, KIND, b"0") == []


def test_a_connection_that_cant_be_accepted_does_not_end_the_server() -> None:
    class Refusing:
        def accept(self) -> Any:
            raise OSError(errno.ENOMEM, "no memory for a socket")

    serve()._accept(cast("socket.socket", Refusing()))


def test_a_name_that_nobody_has_is_refused() -> None:
    with pytest.raises(UnreachableError, match=r"its process has ended, or can't be reached .*: not in this network"):
        fetch_descriptors(bytes(TOKEN_BYTES), KIND, b"1")


def test_a_kind_that_nobody_supplies_is_refused(name: bytes) -> None:
    with pytest.raises(OSError, match="it has no descriptors of kind b'!'"):
        fetch_descriptors(name, b"!", b"1")


@pytest.fixture
def socket_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes a directory with a short path, for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        monkeypatch.setenv("PROXYCCL_SOCKETS", made)
        yield Path(made)


def test_another_network_namespace_is_served_in_the_directory(
    name: bytes, socket_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (socket_directory / f"{bytes(TOKEN_BYTES).hex()}.descriptors").touch()  # this file must stay
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        killed.bind(str(socket_directory / "killed.descriptors"))
    monkeypatch.setattr(sockets, "_abstract", lambda _: bytes(16))  # simulates another network namespace
    with pytest.raises(UnreachableError, match=f"not in {socket_directory}"):
        fetch_descriptor(name, KIND, b"1")
    serve().listen_in_directory()
    serve().listen_in_directory()
    os.close(fetch_descriptor(name, KIND, b"1"))
    found = {path.name for path in socket_directory.iterdir()}
    assert found == {f"{token.hex()}.descriptors" for token in (name, bytes(TOKEN_BYTES))}


def test_a_directory_that_takes_no_socket_is_not_offered(
    socket_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = socket_directory.stat()
    assert sockets.usable_directory() == (f"directory {info.st_dev}:{info.st_ino}", "")
    long = socket_directory / ("x" * 80)
    long.mkdir()
    for place, reason in (
        (f"{socket_directory}/missing/dir", f"{socket_directory}/missing/dir: No such file or directory"),
        (__file__, f"{__file__} is not a directory"),
        (str(long), f"{long} is too long for the path of a socket in it"),
    ):
        monkeypatch.setenv("PROXYCCL_SOCKETS", place)
        assert sockets.usable_directory() == ("", reason)
    monkeypatch.setenv("PROXYCCL_SOCKETS", str(socket_directory))
    monkeypatch.setattr(os, "access", lambda *_: False)  # simulates a read-only file system
    assert sockets.usable_directory() == ("", f"{socket_directory} can't be written")


@pytest.mark.parametrize("refused", ["os.pipe2", "sockets.listen_in_network", "Thread"])
def test_a_server_that_does_not_start_keeps_no_descriptor(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> object:
        if refused == "Thread":
            raise ResourceError("no thread can be started")
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    listen = sockets.listen_in_network
    # an unused name
    monkeypatch.setattr(sockets, "listen_in_network", lambda _: listen(os.urandom(TOKEN_BYTES)))
    monkeypatch.setattr(f"proxyccl.device.memory.descriptor_server.{refused}", refuse)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ResourceError, match=r"no thread|no file descriptor is left for the server of descriptors"):
            DescriptorServer()
    assert len(os.listdir("/proc/self/fd")) == before
