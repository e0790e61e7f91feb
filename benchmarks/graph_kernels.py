"""Finds out how many multiprocessors the calls in a CUDA graph can occupy. The module reads the graph's nodes, so it
works for kernels of any library.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def _ask(driver: Any, name: str, *arguments: Any) -> Any:
    status, *values = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name} failed: {status}")
    return values[0] if len(values) == 1 else values


def _grids(driver: Any, graph: Any) -> Iterator[int]:
    _, count = _ask(driver, "cuGraphGetNodes", graph, 0)
    nodes, _ = _ask(driver, "cuGraphGetNodes", graph, count) if count else ([], 0)
    for node in nodes:
        kind = _ask(driver, "cuGraphNodeGetType", node)
        if kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            kernel = _ask(driver, "cuGraphKernelNodeGetParams", node)
            yield kernel.gridDimX * kernel.gridDimY * kernel.gridDimZ
        elif kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH:
            yield from _grids(driver, _ask(driver, "cuGraphChildGraphNodeGetGraph", node))


def multiprocessors_used(driver: Any, graph: int, available: int) -> int:
    """Returns the number of blocks of the largest kernel in a graph, but at most the device's number of
    multiprocessors.

    The result is 0 for a graph without kernels. Copies between devices are not counted, because they occupy copy
    engines instead of multiprocessors.

    Args:
        driver: `cuda.bindings.driver`.
        graph: a `CUgraph`.
        available: the number of the device's multiprocessors.

    Raises:
        RuntimeError: a call of the driver failed.
    """
    return min(available, max(_grids(driver, driver.CUgraph(graph)), default=0))
