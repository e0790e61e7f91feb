"""What pytest shall do for all tests: which ones a runtime has, and where they keep what they compile."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from daemons import running_daemon
from devices import ON_HOST, RUNTIME

HOST_ONLY_FILES = {
    "test_emulator.py": "the host runtime's own",
    "test_nvrtc.py": "a compiler alone",
    "test_packet_epochs.py": "writes the kernels' counters, which only the host runtime's CPU can",
    "test_sanitizer.py": "the host runtime's own",
    "test_verbs_transport.py": "a device of its own, in the CPU's memory",
}
IN_DAEMON = os.environ.get("PROXYCCL_PROXY") == "daemon"
OWN_PROXY_FILES = {
    "test_observe.py": "looks in a directory of its own, and starts a daemon where it wants one",
    "test_trace.py": "the same",
    "test_proxy_thread.py": "services of its own",
    "test_staged_transport.py": "the same",
    "test_verbs_transport.py": "the same",
    "test_sanitizer.py": "sees one process",
    "test_rdma_bring_up.py": "a stand-in for RDMA, in its own process",
}
collect_ignore = ["rdma"]  # runs in a machine of its own: make test-rdma
# Open MPI wants to be told what MPICH does unasked: run as root, on more ranks than cores, bound to no core. Versions 4
# and 5 have different names for it.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


@pytest.fixture(autouse=True, scope="session")
def _private_directories(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiled kernels of the test run stay out of the user's cache; a directory that is named is kept for the next.
    So do reports.
    """
    os.environ.setdefault("PROXYCCL_CACHE", str(tmp_path_factory.mktemp("cache")))
    os.environ["PROXYCCL_REPORT_DIR"] = str(tmp_path_factory.mktemp("reports"))


@pytest.fixture(autouse=True, scope="session")
def _node_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """With PROXYCCL_PROXY=daemon, and none named to use, one daemon serves all ranks of the test run."""
    if not IN_DAEMON or "PROXYCCL_DAEMON_SOCKET" in os.environ:
        yield
        return
    with running_daemon(tmp_path_factory.mktemp("daemon") / "socket") as daemon:
        os.environ["PROXYCCL_DAEMON_SOCKET"] = str(daemon.path)
        yield
        del os.environ["PROXYCCL_DAEMON_SOCKET"]
    assert daemon.ended == 0, daemon.log


def pytest_configure(config: pytest.Config) -> None:
    os.environ.update({name: value for name, value in OPEN_MPI.items() if name not in os.environ})
    config.addinivalue_line("markers", "host_only(reason): makes sense on the host runtime alone")
    config.addinivalue_line("markers", "own_proxy(reason): makes sense for a proxy in the rank's process alone")
    config.addinivalue_line("markers", "gpu_only: needs a GPU, or what stands in for one")


def pytest_report_header() -> str:
    return f"runtime: {RUNTIME}, proxies in {'the node daemon' if IN_DAEMON else 'their ranks'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects, and so counts, what does not make sense on this runtime."""

    def belongs(item: pytest.Item) -> bool:
        if IN_DAEMON and (item.get_closest_marker("own_proxy") or item.path.name in OWN_PROXY_FILES):
            return False
        if ON_HOST:
            return item.get_closest_marker("gpu_only") is None
        return item.get_closest_marker("host_only") is None and item.path.name not in HOST_ONLY_FILES

    deselected = [item for item in items if not belongs(item)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if belongs(item)]
