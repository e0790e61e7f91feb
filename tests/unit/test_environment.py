"""Misspelt environment variables are reported; the list of known variables agrees with the code and the
documentation.
"""

from __future__ import annotations

import dataclasses
import re
import warnings

import pytest

from proxyccl.device import environment
from proxyccl.proxy.remote_options import FabricOptions, RdmaOptions
from support.paths import ROOT
from support.running import run_ranks

ROOMS = ("device", "proxy", "channels", "faces", "tools", "src")


def told() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        environment.warn_of_unknown()
    return [str(warning.message) for warning in caught]


def test_a_misspelt_variable_is_told_once_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_TIMEUOT", "5")
    monkeypatch.setenv("PROXYCCL_XYZZY", "5")
    assert sorted(told()) == [
        "ignored: ProxyCCL has no variable PROXYCCL_TIMEUOT; did you mean PROXYCCL_TIMEOUT?",
        "ignored: ProxyCCL has no variable PROXYCCL_XYZZY",
    ]
    assert told() == []


def test_a_communicator_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_RUNTIM", "host")
    with pytest.warns(RuntimeWarning, match="no variable PROXYCCL_RUNTIM; did you mean PROXYCCL_RUNTIME"):
        run_ranks(1, lambda comm: None)


def test_known_variables_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*environment.VARIABLES, *environment.OLD_VARIABLES, *environment.OF_TESTS):
        monkeypatch.setenv(name, "")
    assert told() == []


def test_all_variables_that_the_code_reads_are_known() -> None:
    read = set()
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            if path.name != "environment.py":
                lines = path.read_text().splitlines()
                read |= {name for line in lines for name in re.findall(r'(?:environ.*|= )"(PROXYCCL_[A-Z_]+)"', line)}
    assert read == set(environment.VARIABLES)
    of_options = {
        f"PROXYCCL_{prefix}_{field.name.upper()}"
        for prefix, options in (("RDMA", RdmaOptions), ("FABRIC", FabricOptions))
        for field in dataclasses.fields(options)
    }
    assert of_options >= set(environment.OLD_VARIABLES)


def test_the_page_has_all_variables() -> None:
    page = (ROOT / "docs/reference/environment.md").read_text()
    table = {
        name for line in page.splitlines() if line.startswith("|") for name in re.findall(r"`(PROXYCCL_\w+)`", line)
    }
    assert table == set(environment.VARIABLES)
