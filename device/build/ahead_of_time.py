"""Compiles kernels before a call needs them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from proxyccl.device.build.compile_cache import compiled_image, image_is_there, shipped_options, shipped_source
from proxyccl.device.driver import Compiler

Shipped = tuple[str, str, str | None, str | None]
"""File, kernel, element type and operation: the arguments of `Runtime.shipped`."""


def compile_kernels(compiler: Compiler, architecture: str, kernels: Sequence[Shipped], threads: int) -> tuple[int, int]:
    """Compiles kernels of a GPU into the cache. Raises CompileError if the compiler failed, for example because it does
    not know the architecture.

    Args:
        compiler: the GPU's compiler.
        architecture: the GPU's architecture.
        kernels: the kernels, in the order in which compilations start.
        threads: the number of threads that compile.

    Returns:
        The number of images that were compiled, and the number that were already in the cache.
    """
    options = shipped_options(compiler, architecture)
    sources = list(dict.fromkeys(shipped_source(*kernel) for kernel in kernels))  # kernels may share a source
    missing = [source for source in sources if not image_is_there(compiler, source, options)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda source: compiled_image(compiler, source, options), missing))
    return len(missing), len(sources) - len(missing)
