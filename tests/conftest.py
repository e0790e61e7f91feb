"""What pytest shall do for all tests: which ones a runtime has, and where they keep what they compile."""

from __future__ import annotations

import os

import pytest
from devices import ON_HOST, RUNTIME

HOST_ONLY_FILES = {
    "test_emulator.py": "the host runtime's own",
    "test_nvrtc.py": "a compiler alone",
    "test_packet_epochs.py": "writes the kernels' counters, which only the host runtime's CPU can",
    "test_sanitizer.py": "the host runtime's own",
    "test_verbs_transport.py": "a device of its own, in the CPU's memory",
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
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiled kernels of the test run stay out of the user's cache; a directory that is named is kept for the next."""
    os.environ.setdefault("PROXYCCL_CACHE", str(tmp_path_factory.mktemp("cache")))


def pytest_configure(config: pytest.Config) -> None:
    os.environ.update({name: value for name, value in OPEN_MPI.items() if name not in os.environ})
    config.addinivalue_line("markers", "host_only(reason): makes sense on the host runtime alone")
    config.addinivalue_line("markers", "gpu_only: needs a GPU, or what stands in for one")


def pytest_report_header() -> str:
    return f"runtime: {RUNTIME}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects, and so counts, what does not make sense on this runtime."""

    def belongs(item: pytest.Item) -> bool:
        if ON_HOST:
            return item.get_closest_marker("gpu_only") is None
        return item.get_closest_marker("host_only") is None and item.path.name not in HOST_ONLY_FILES

    deselected = [item for item in items if not belongs(item)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if belongs(item)]
