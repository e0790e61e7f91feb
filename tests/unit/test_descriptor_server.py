"""Descriptors handed from one process to another by a name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxyccl.device.memory.descriptor_server import NAME_BYTES, DescriptorServer, fetch_descriptors

OTHER_PROCESS = """
import os, sys
from proxyccl.device.memory.descriptor_server import fetch_descriptors
for number, descriptor in fetch_descriptors(bytes.fromhex(sys.argv[1]), sys.argv[2].encode()):
    print(number, os.pread(descriptor, 100, 0).decode())
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def name(directory: Path) -> bytes:

    def supply(request: bytes) -> Iterator[tuple[int, int]]:
        for number in range(int(request)):
            if number == 5:
                raise ValueError("there is no sixth")
            (directory / str(number)).write_text(f"file {number}")
            yield number, os.open(directory / str(number), os.O_RDONLY)

    return DescriptorServer(supply, (ValueError,)).name


def test_another_process_gets_files_that_this_one_opened(name: bytes) -> None:
    out = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, name.hex(), "3"], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.splitlines() == ["0 file 0", "1 file 1", "2 file 2"]


def open_files(directory: Path) -> list[Path]:
    """The server's files that this process, the server's own, has open."""
    descriptors = Path("/proc/self/fd")
    targets = [Path(os.readlink(link)) for link in descriptors.iterdir() if link.is_symlink()]
    return [target for target in targets if target.parent == directory]


@pytest.mark.parametrize("request_", [b"6", b"nonsense"])
def test_a_request_that_cant_be_served_leaves_nothing_open(name: bytes, directory: Path, request_: bytes) -> None:
    with pytest.raises(OSError, match=r"there is no sixth|invalid literal"):
        fetch_descriptors(name, request_)
    assert open_files(directory) == []
    assert fetch_descriptors(name, b"0") == []


def test_a_name_that_nobody_has_is_refused() -> None:
    with pytest.raises(ConnectionRefusedError):
        fetch_descriptors(bytes(NAME_BYTES), b"1")
