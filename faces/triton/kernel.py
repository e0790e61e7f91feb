"""Compiles and launches Triton kernels that use a communicator's channels, and chooses configurations by measuring."""

from __future__ import annotations

import inspect
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import triton
from proxyccl.channels.communicator import Communicator
from proxyccl.device.arguments.integers import as_integer, find_extents, find_items
from proxyccl.device.arrays.array import current_stream
from proxyccl.device.errors import ArgumentError
from proxyccl.device.gpu.runtime import GpuRuntime
from proxyccl.device.runtime import StreamLike
from proxyccl.triton import interpreter
from proxyccl.triton.arguments import CONSTEXPR, Argument, annotated, as_argument
from proxyccl.triton.basics import INTERPRETED
from proxyccl.triton.compiled import Variant
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import KernelParam

Grid = int | Sequence[int] | Callable[[dict[str, Any]], Any]
_MEASURED_LAUNCHES = 5


class TritonKernel:
    """A kernel in Triton's language, launched as ``kernel(*args, stream=None, **constants)``. The kernel may call the
    functions of `proxyccl.triton`.

    Each rank makes its kernel without the other ranks. The first call compiles the kernel. On the host runtime,
    Triton's interpreter runs the kernel; ``TRITON_INTERPRET=1`` must be set before triton is imported.

    Args:
        comm: the communicator, on whose device the kernel runs.
        kernel: a function decorated by ``@triton.jit``. The arguments of a ``@triton.autotune`` decorator are the
            defaults of `configs` and `key`.
        grid: the number of programs in each dimension: one to three integers, or a function that takes a dict of the
            arguments by name and returns one to three integers.
        num_warps: the number of warps of a program.
        num_stages: the number of stages of software pipelining; None for Triton's default.
        configs: the ``triton.Config`` objects to choose from. All ranks measure the configurations together, and choose
            the configuration with the shortest time of the slowest rank.
        key: names of arguments. The ranks choose a configuration for each combination of these arguments' values.

    Attributes:
        chosen: the chosen configurations, by the values of the `key` arguments.

    Raises:
        ArgumentError: an argument is wrong, ``TRITON_INTERPRET`` is set for a GPU, or it is not set for the host
            runtime.
    """

    def __init__(
        self,
        comm: Communicator,
        kernel: Any,
        *,
        grid: Grid,
        num_warps: int = 4,
        num_stages: int | None = None,
        configs: Sequence[triton.Config] = (),
        key: Sequence[str] = (),
    ) -> None:
        comm.group.failure.require_usable()
        if isinstance(kernel, Autotuner):
            _require_no_hooks(kernel)
            configs, key, kernel = configs or kernel.configs, key or kernel.keys, kernel.fn
        self._communicator = comm
        self._runtime = comm.runtime
        self._kernel = _require_kernel(kernel, self._runtime.name)
        self._grid = grid
        self._options = {"num_warps": num_warps} | ({} if num_stages is None else {"num_stages": num_stages})
        self._configs, self._key = _require_configs(configs), tuple(key)
        # `fn` is the Python function, whether Triton compiles or interprets the kernel.
        self._signature = inspect.signature(self._kernel.fn)
        self._constants = {
            name for name, each in self._signature.parameters.items() if "constexpr" in str(each.annotation)
        }
        self._annotations = {
            name: KernelParam(0, each, False, False).annotation_type
            for name, each in self._signature.parameters.items()
        }
        for name in self._key:
            if name not in self._signature.parameters:
                raise ArgumentError("key", f"{self.name} has no parameter {name!r}")
        self._variants: dict[tuple[Any, ...], Variant] = {}
        self.chosen: dict[tuple[Any, ...], triton.Config] = {}

    @property
    def name(self) -> str:
        """The function's name."""
        return str(self._kernel.__name__)

    def __repr__(self) -> str:
        return f"<TritonKernel {self.name} on {self._runtime.name}>"

    def __call__(self, *args: Any, stream: StreamLike = None, **kwargs: Any) -> None:
        """Queues the kernel on a stream and returns. The arguments are kept alive until the kernel has run.

        The first call with arguments of certain types compiles the kernel for these types, waits for this rank's work
        in flight, and loads the kernel. A kernel can't be loaded while a graph is captured, so make the first call
        before the capture. With `configs`, the first call for each combination of `key` values, which all ranks must
        make, launches the kernel several times with each configuration.

        Args:
            args: the function's arguments, each an array (anything that `as_view` takes), a channel, a set of channels,
                a `GridBarrier`, a number or None.
            stream: the stream for the kernel. If None, the kernel runs on torch's current stream if an argument is a
                tensor, otherwise on the calling thread's default stream.
            kwargs: further arguments by name, including compile-time constants.

        Raises:
            ArgumentError: an argument is wrong, the grid is invalid, or the stream is being captured and the kernel is
                not loaded.
            CompileError: Triton can't compile the kernel.
            KernelError: the driver refused the launch, or in the interpreter a program raised an exception.
        """
        self._communicator.group.failure.require_usable()
        if stream is None:
            found = (current_stream(value) for value in (*args, *kwargs.values()))
            stream = next((each for each in found if each is not None), None)
        config = self._config(args, kwargs, stream)
        self._launch(self._arguments(args, kwargs, config), self._options_of(config), stream)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compiles and loads the kernel for the types of the given arguments, and returns when all ranks have done so.
        All ranks must call this function. Takes the arguments of a call, without `stream`, and raises the same errors.
        """
        self._communicator.group.failure.require_usable()
        configs = self._configs or (None,)
        for config in configs:
            self._variant(self._arguments(args, kwargs, config), self._options_of(config))
        self._communicator.all_gather_bytes(self.name.encode(), "triton: compiled")

    # -- arguments ---

    def _arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], config: triton.Config | None
    ) -> dict[str, Argument]:
        constants = {} if config is None else config.kwargs
        for name in kwargs.keys() & constants.keys():
            raise ArgumentError(name, f"the configurations of kernel {self.name} set this parameter; don't pass it")
        try:
            bound = self._signature.bind(*args, **kwargs, **constants)
        except TypeError as error:
            raise ArgumentError("args", f"kernel {self.name}: {error}") from None
        bound.apply_defaults()
        return {
            name: Argument(CONSTEXPR, value) if name in self._constants else self._argument(name, value)
            for name, value in bound.arguments.items()
        }

    def _argument(self, name: str, value: Any) -> Argument:
        where = f"{name} of kernel {self.name}"
        found = as_argument(value, where, self._runtime.name, self._runtime.device)
        return annotated(found, self._annotations[name], where)

    def _programs(self, arguments: dict[str, Argument]) -> tuple[int, int, int]:
        grid = self._grid
        if callable(grid):
            grid = grid({name: each.value if each.owner is None else each.owner for name, each in arguments.items()})
        expected = "must be one to three positive integers"
        shape = find_extents(grid) or []
        if not 1 <= len(shape) <= 3:
            raise ArgumentError("grid", f"{expected}, not {grid!r}")
        x, y, z = [as_integer(extent, "grid", expected, 1, (1 << 31) - 1) for extent in (*shape, 1, 1)[:3]]
        return x, y, z

    def _options_of(self, config: triton.Config | None) -> dict[str, Any]:
        if config is None:
            return self._options
        return {name: value for name, value in config.all_kwargs().items() if name not in config.kwargs}

    # -- launches ---

    def _launch(self, arguments: dict[str, Argument], options: dict[str, Any], stream: StreamLike) -> None:
        grid = self._programs(arguments)
        if INTERPRETED:
            self._finish(stream)
            interpreter.run(self._kernel, arguments, grid)
            return
        variant = self._variant(arguments, options, stream)
        assert variant is not None
        variant(grid, arguments, stream)

    def _finish(self, stream: StreamLike) -> None:
        event = self._runtime.create_event()
        event.record(stream)
        event.synchronize()

    def _variant(
        self, arguments: dict[str, Argument], options: dict[str, Any], stream: StreamLike = None
    ) -> Variant | None:
        if INTERPRETED:
            return None
        assert isinstance(self._runtime, GpuRuntime)
        specialised = {name: self._specialised(name, argument) for name, argument in arguments.items()}
        key = (*((each.type, each.aligned, each.constant_key) for each in specialised.values()), *options.items())
        if key not in self._variants:
            self._require_no_capture(stream)
            self._variants[key] = Variant(self._runtime, self._kernel, specialised, options)
        return self._variants[key]

    def _require_no_capture(self, stream: StreamLike) -> None:
        if self._runtime.capture_of(self._runtime.stream_handle(stream)):
            raise ArgumentError(
                "args", f"kernel {self.name} was not called with such arguments before; call it once before the capture"
            )

    def _specialised(self, name: str, argument: Argument) -> Argument:
        """Specialises an argument as Triton does: makes an integer 1 a constant, and removes `aligned` if the kernel
        forbids specialisation for this parameter.
        """
        parameter = self._kernel.params[self._kernel.arg_names.index(name)]
        if argument.type == CONSTEXPR:
            return argument
        if parameter.do_not_specialize or (argument.aligned and parameter.do_not_specialize_on_alignment):
            return Argument(argument.type, argument.value, argument.owner)
        is_one = argument.type in ("i32", "i64") and argument.value == 1
        return Argument(CONSTEXPR, 1) if is_one and not self._annotations[name] else argument

    # -- the choice of a configuration ---

    def _config(self, args: tuple[Any, ...], kwargs: dict[str, Any], stream: StreamLike) -> triton.Config | None:
        if not self._configs:
            return None
        first = self._arguments(args, kwargs, self._configs[0])
        key = tuple(first[name].value for name in self._key)
        if key not in self.chosen:
            self._require_no_capture(stream)
            self.chosen[key] = self._measure(args, kwargs, stream)
        return self.chosen[key]

    def _measure(self, args: tuple[Any, ...], kwargs: dict[str, Any], stream: StreamLike) -> triton.Config:
        """Returns the configuration with the shortest time of the slowest rank, so all ranks return the same."""
        self.prepare(*args, **kwargs)
        seconds = []
        for config in self._configs:
            arguments, options = self._arguments(args, kwargs, config), self._options_of(config)
            self._launch(arguments, options, stream)
            self._finish(stream)
            self._communicator.all_gather_bytes(b"", "triton: measure")
            began = time.perf_counter()
            for _ in range(_MEASURED_LAUNCHES):
                self._launch(arguments, options, stream)
            self._finish(stream)
            seconds.append(time.perf_counter() - began)
            self._communicator.check()
        packed = struct.pack(f"<{len(seconds)}d", *seconds)
        gathered = self._communicator.all_gather_bytes(packed, "triton: measured")
        slowest = [max(times) for times in zip(*(struct.unpack(f"<{len(seconds)}d", g) for g in gathered), strict=True)]
        return self._configs[slowest.index(min(slowest))]


compile = TritonKernel
"""The public name of `TritonKernel`."""


def _require_configs(configs: Any) -> tuple[triton.Config, ...]:
    items = find_items(configs)
    if items is None or not all(isinstance(each, triton.Config) and each.pre_hook is None for each in items):
        raise ArgumentError("configs", f"expected a sequence of triton.Config without a pre_hook, not {configs!r}")
    return tuple(items)


def _require_no_hooks(tuner: Autotuner) -> None:
    """Raises ArgumentError if @triton.autotune has hooks, because a TritonKernel does not call them."""
    hooks = {
        "reset_to_zero": tuner.reset_to_zero,
        "restore_value": tuner.restore_value,
        "pre_hook": tuner.user_defined_pre_hook,
        "post_hook": tuner.user_defined_post_hook,
        "prune_configs_by": tuner.early_config_prune,
    }
    for name, given in hooks.items():
        if given:
            raise ArgumentError("kernel", f"its @triton.autotune has {name}, which is not supported")


def _require_kernel(kernel: Any, runtime: str) -> Any:
    expected = InterpretedFunction if INTERPRETED else triton.JITFunction
    if not isinstance(kernel, expected):
        raise ArgumentError("kernel", f"expected a function decorated by @triton.jit, not {type(kernel).__name__}")
    if runtime == "host" and not INTERPRETED:
        raise ArgumentError(
            "kernel",
            "the host runtime runs it in Triton's interpreter: set TRITON_INTERPRET=1 before triton is imported",
        )
    if runtime != "host" and INTERPRETED:
        raise ArgumentError("kernel", f"TRITON_INTERPRET is set, but the communicator uses the runtime {runtime}")
    return kernel
