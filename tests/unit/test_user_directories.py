"""The directory of a user's files, also if the home directory is missing or can't be used."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from proxyccl import UntrustedPathError
from proxyccl.device.process.user_directories import user_directory
from proxyccl.proxy.reports import files

STRANGER = 54321


@pytest.fixture
def fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return tmp_path / "tmp" / f"proxyccl-{os.geteuid()}-cache"


def cache() -> Path:
    return user_directory("XDG_CACHE_HOME", ".cache", "cache")


@pytest.mark.usefixtures("fallback")
def test_xdg_names_the_directory_or_it_is_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache() == tmp_path / ".cache" / "proxyccl"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache() == Path("/elsewhere/proxyccl")


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_a_user_without_an_entry_has_a_directory(
    home: str | None, fallback: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_entry(user: int) -> pwd.struct_passwd:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    if home is None:
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", home)
    assert cache() == fallback


@pytest.mark.parametrize("home", ["/nonexistent", "/proc", "/dev/null"])
def test_a_home_where_nothing_can_be_made_is_not_used(
    home: str, fallback: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith("/proc"))
    assert cache() == fallback


@pytest.mark.usefixtures("fallback")
def test_a_directory_in_a_home_that_can_not_be_written_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache" / "proxyccl").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert cache() == tmp_path / ".cache" / "proxyccl"


def test_reports_go_to_such_a_directory_too_unless_others_can_change_it(
    fallback: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PROXYCCL_REPORT_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    state = fallback.with_name(f"proxyccl-{os.geteuid()}-state")
    path = files.write("00000000", "rank0", 1, "{}")
    assert path.parent == state / "reports"
    for directory in (state, path.parent):
        directory.chmod(0o777)
        with pytest.raises(UntrustedPathError, match=f"other users can write to {directory} "):
            files.write("00000000", "rank0", 2, "{}")
        directory.chmod(0o700)


PROGRAM = """
import numpy as np
from proxyccl import Communicator, ThreadBootstrap
from proxyccl.__main__ import main
with Communicator(ThreadBootstrap.create(1)[0]) as comm:
    out = comm.empty(1, np.int32)
    comm.compile('extern "C" __global__ void kernel(int* out) { *out = 5; }')(1, 1, out)
    comm.synchronize()
    assert np.asarray(out)[0] == 5
main(["info"])
main(["doctor"])
"""


AS_STRANGER = ["unshare", "--user", f"--map-user={STRANGER}", f"--map-group={STRANGER}"]
"""Runs a command in a namespace where this user has another id, and so no entry."""


@pytest.mark.host_only("compiles for the CPU")
@pytest.mark.parametrize("home", [None, "/proc"])
def test_a_container_may_run_as_any_user(home: str | None, tmp_path: Path) -> None:
    able = subprocess.run([*AS_STRANGER, "true"], capture_output=True, text=True, check=False, timeout=120)
    if able.returncode:
        pytest.skip(f"no user namespace can be made here: {able.stderr.strip()}")
    removed = ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "PROXYCCL_CACHE", "PROXYCCL_REPORT_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    environment |= {"TMPDIR": str(tmp_path), "PROXYCCL_PROXY": "thread", **({"HOME": home} if home else {})}
    command = [*AS_STRANGER, sys.executable, "-W", "error", "-c", PROGRAM]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert f"{tmp_path}/proxyccl-{STRANGER}-cache: 1 files" in result.stdout, result.stderr
    # The doctor must say in which directory it found no report.
    assert f"{tmp_path}/proxyccl-{STRANGER}-state/reports" in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [f"proxyccl-{STRANGER}-cache"]
