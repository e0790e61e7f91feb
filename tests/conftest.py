"""Settings for all tests: which tests a runtime skips, and the directories of compiled kernels."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.daemons import running_daemon
from support.devices import ON_HOST, RUNTIME
from support.once import shared_directory
from support.processor_time import ProcessorTime

PLACE = os.environ.get("PROXYCCL_PROXY", "")
IN_DAEMON = PLACE == "daemon"
collect_ignore = [
    "rdma/soft_roce",  # make test-rdma runs these tests in a virtual machine
    "sglang_plugin",  # make test-sglang runs these tests in an environment with SGLang
]
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}
"""Settings for Open MPI that MPICH does not need: run as root, with more ranks than cores, bound to no core.
Versions 4 and 5 have different names for it.
"""
NUMPY = {"OPENBLAS_NUM_THREADS": "1"}
"""Restricts OpenBLAS to one thread, because its threads would compete with a test's ranks for the cores."""
KERNELS = {"PROXYCCL_CXXFLAGS": "-O0"}
"""Compiles the host runtime's kernels without optimization: tests make only a few short calls of most kernels, and g++
takes three times as long with the default -O3. `collectives/test_same_bits.py` uses -O3, and so does a part of
`make test-all`.
"""

IN_RANKS = {"CUDA_MODULE_LOADING": "EAGER"}
"""Settings for proxies that are threads of their ranks. Otherwise torch's first launch of a kernel waits for the
device, and with it the proxy that the device waits for.
"""


@pytest.fixture(autouse=True, scope="session")
def _private_directories(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps compiled kernels and reports of the test run out of the user's directories. pytest-xdist's workers share
    the kernels. Tests use the directory that PROXYCCL_CACHE names, whose kernels serve later runs too, unless the
    directory contains measured tables: the library would choose algorithms by these tables.
    """
    named = os.environ.get("PROXYCCL_CACHE")
    if not named or any(Path(named, "tuning").glob("*.json")):
        os.environ["PROXYCCL_CACHE"] = str(shared_directory(tmp_path_factory) / "cache")
    os.environ["PROXYCCL_REPORT_DIR"] = str(tmp_path_factory.mktemp("reports"))


@pytest.fixture(autouse=True, scope="session")
def _node_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """If PROXYCCL_PROXY is "daemon" and no socket is named, runs one daemon for all ranks of this process's tests."""
    if not IN_DAEMON or "PROXYCCL_DAEMON_SOCKET" in os.environ:
        yield
        return
    with running_daemon(tmp_path_factory.mktemp("daemon") / "socket") as daemon:
        os.environ["PROXYCCL_DAEMON_SOCKET"] = str(daemon.path)
        yield
        del os.environ["PROXYCCL_DAEMON_SOCKET"]
    assert daemon.ended == 0, daemon.log


@pytest.fixture(autouse=True)
def _own_proxy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("own_proxy") is not None:
        monkeypatch.setenv("PROXYCCL_PROXY", "thread")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")
    parser.addoption("--full", action="store_true", help="run the tests marked slow or full too")
    parser.addoption("--processor-seconds", metavar="FILE", help="write what each test and shared fixture cost")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProcessorTime())
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import settings

        settings.register_profile("busy", deadline=None)
        settings.load_profile("busy")
    for name, value in {**OPEN_MPI, **NUMPY, **KERNELS, **(IN_RANKS if PLACE == "thread" else {})}.items():
        os.environ.setdefault(name, value)


def pytest_collection_finish() -> None:
    """Excludes modules and tests from garbage collections, because tests of memory make hundreds of collections."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    places = {"thread": "their ranks", "process": "a daemon of the job's own", "daemon": "the node daemon"}
    return f"runtime: {RUNTIME}, proxies in {places.get(PLACE, 'the default place')}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests that do not make sense on this runtime, so that pytest reports their number."""

    def belongs(item: pytest.Item) -> bool:
        if PLACE in {"process", "daemon"} and item.get_closest_marker("own_proxy"):
            return False
        further = item.get_closest_marker("full") or (IN_DAEMON and item.get_closest_marker("no_proxy"))
        if further and not config.getoption("--full"):
            return False
        if item.get_closest_marker("slow") and not (config.getoption("--slow") or config.getoption("--full")):
            return False
        return item.get_closest_marker("gpu_only" if ON_HOST else "host_only") is None

    deselected = [item for item in items if not belongs(item)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if belongs(item)]
