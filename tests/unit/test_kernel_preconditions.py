"""Shipped kernels meet the preconditions for a relaxed store of a flag after loads (device/include/MEMORY_ORDER.md).

Kernels must not begin before the previous kernel in their stream has ended, so launches must not overlap. Each loaded
value must have arrived in a register, so asynchronous copies are not allowed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.host_only(reason="reads sources")

KERNELS = [path for folder in ("device/include", "device/kernels") for path in sorted((ROOT / folder).rglob("*.h*"))]
SOURCES = [
    path
    for folder in ("device", "proxy", "channels")
    for ending in ("py", "c", "cpp", "h")
    for path in sorted((ROOT / folder).rglob(f"*.{ending}"))
]

ASYNCHRONOUS = r"cp\.async|cp\.reduce|red\.async|tensormap|fence\.proxy|cuda::(ptx|memcpy_async)"
"""Names that start copies by the asynchronous proxy: TMA, and copies into shared memory. st.async does not copy,
because it stores a register, in which the loaded values have arrived.
"""

OVERLAPPING = r"griddepcontrol|[gG]ridDependency|[pP]rogrammaticLaunch"
"""Names in a kernel that begins before the previous one has ended."""

ATTRIBUTES = r"cuLaunchKernelEx|LAUNCH_ATTRIBUTE|PROGRAMMATIC|hipDrvLaunchKernelEx|hipLaunchKernelEx"
"""Names by which a launch may overlap. cuLaunchKernel and hipModuleLaunchKernel take no attributes."""


def found(pattern: str, paths: list[Path]) -> list[str]:
    """Returns the lines that match a pattern, as path:line."""
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]


def test_kernels_make_no_copies_that_no_register_waits_for() -> None:
    assert len(KERNELS) > 50
    assert found(ASYNCHRONOUS, KERNELS) == []


def test_kernels_do_not_begin_before_the_one_before_has_ended() -> None:
    assert found(OVERLAPPING, KERNELS) == []


def test_launches_have_no_attributes() -> None:
    assert found("cuLaunchKernel|hipModuleLaunchKernel", SOURCES) != []
    assert found(ATTRIBUTES, SOURCES) == []


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (ASYNCHRONOUS, 'asm("cp.async.bulk.shared::cluster.global.mbarrier");'),
        (OVERLAPPING, 'asm("griddepcontrol.wait;");'),
        (OVERLAPPING, "cudaGridDependencySynchronize();"),
        (ATTRIBUTES, "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"),
    ],
)
def test_the_search_finds_what_it_looks_for(pattern: str, line: str) -> None:
    assert re.search(pattern, line)
