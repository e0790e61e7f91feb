"""Compiles kernels for a GPU with Triton. ProxyCCL's runtime loads them, because Triton's own launch needs torch."""

from __future__ import annotations

from typing import Any

import triton
from proxyccl.device.errors import ArgumentError, CompileError, RuntimeUnavailableError
from proxyccl.device.gpu.runtime import GpuRuntime
from proxyccl.device.kernel import POINTER, Kernel
from proxyccl.triton.arguments import CONSTEXPR, Argument
from proxyccl.triton.basics import VERSION
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_OLDEST_FOR_AMD = (3, 9)
_SCRATCH_PARAMETERS = 2
"""The number of pointers that Triton adds to a kernel's parameters: the compiler's and a profiler's scratch memory."""


def target_of(architecture: str) -> GPUTarget:
    """Returns Triton's target for an architecture such as "sm_90" or "gfx942:sramecc+". Ignores the part after the
    colon. Raises RuntimeUnavailableError if this version of Triton is too old for the architecture.
    """
    if architecture.startswith("sm_"):
        return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    if VERSION < _OLDEST_FOR_AMD:
        raise RuntimeUnavailableError(f"proxyccl.triton needs Triton 3.9 or later on AMD, not {triton.__version__}")
    return GPUTarget("hip", architecture.split(":", maxsplit=1)[0], 64)


def compile_kernel(kernel: Any, arguments: dict[str, Argument], target: GPUTarget, options: dict[str, Any]) -> Any:
    """Compiles a ``@triton.jit`` function, and returns Triton's compiled kernel. Raises CompileError if Triton can't
    compile the function.

    Args:
        kernel: the function.
        arguments: the arguments by their parameters' names.
        target: the target.
        options: Triton's options, such as num_warps."""
    positions = {name: i for i, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature={name: argument.type for name, argument in arguments.items()},
        constexprs={(positions[name],): each.value for name, each in arguments.items() if each.type == CONSTEXPR},
        attrs={(positions[name],): [["tt.divisibility", 16]] for name, each in arguments.items() if each.aligned},
    )
    try:
        return triton.compile(source, target=target, options=options)
    except Exception as error:  # Triton's passes raise errors of many kinds
        # If the fault is in a function that the kernel calls, only the first exception in the chain of causes states
        # the reason.
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        reason = "" if first is error else "\n" + str(first).rpartition("\n")[2]
        raise CompileError(f"Triton can't compile {kernel.__name__} for {target.arch}: {error}{reason}") from error


class Variant:
    """A loaded kernel that was compiled for certain types of arguments. A call of the object launches the kernel."""

    def __init__(
        self, runtime: GpuRuntime, kernel: Any, arguments: dict[str, Argument], options: dict[str, Any]
    ) -> None:
        target = target_of(runtime.info.architecture)
        compiled = compile_kernel(kernel, arguments, target, options)
        metadata = compiled.metadata
        self._runtime = runtime
        self._threads: int = metadata.num_warps * target.warp_size
        self._shared: int = metadata.shared
        if getattr(metadata, "num_ctas", 1) != 1:
            raise ArgumentError(
                "num_ctas", f"clusters of programs can't be launched; expected 1, not {metadata.num_ctas}"
            )
        if getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "profile_scratch_size", 0):
            raise ArgumentError("kernel", f"{kernel.__name__} needs Triton's scratch memory, which is not supported")
        self._passed = [name for name, argument in arguments.items() if argument.type != CONSTEXPR]
        parameters = [arguments[name].parameter for name in self._passed]
        parameters += [(8, POINTER)] * _SCRATCH_PARAMETERS
        image = compiled.asm["cubin" if target.backend == "cuda" else "hsaco"]
        self._kernel: Kernel = runtime.load_kernel(image, metadata.name, parameters, self._shared)

    def __call__(self, grid: tuple[int, int, int], arguments: dict[str, Argument], stream: Any) -> None:
        values = [arguments[name].launched for name in self._passed] + [None] * _SCRATCH_PARAMETERS
        self._kernel(grid, self._threads, *values, stream=stream, shared=self._shared)
        self._runtime.in_flight.add(
            [argument.owner for argument in arguments.values()], stream, self._runtime.stream_handle(stream)
        )
