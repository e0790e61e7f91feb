"""Packs arguments of compiled kernels, and launches the kernels.

Before a launch, Python values are converted to the kernel's parameter types, or refused, by a table of sizes and kinds
that each kernel exports (kernel.h).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from proxyccl.device._native import ffi, lib
from proxyccl.device.arguments.integers import as_integer, find_extents, find_integer
from proxyccl.device.arrays.array import as_view
from proxyccl.device.base_runtime import StreamLike
from proxyccl.device.errors import ArgumentError, HandleTypeError, KernelError
from proxyccl.device.ffi_types import set_functions
from proxyccl.device.in_flight import LaunchRuntime
from proxyccl.device.sleepers import wakes

if TYPE_CHECKING:
    from proxyccl.device._native import VoidPointer  # defined only in the type stub

BYTES, INTEGER, FLOAT, POINTER = range(4)  # kernel.h, ParameterKind
_FLOAT_FORMAT = {4: "<f", 8: "<d"}

Shape = int | Sequence[int]

_HANDLES = {
    lib.PROXYCCL_HANDLE_SM_CHANNEL: "SmChannels",
    lib.PROXYCCL_HANDLE_PROXY_CHANNEL: "ProxyChannels",
    lib.PROXYCCL_HANDLE_SEMAPHORE: "semaphores",
    lib.PROXYCCL_HANDLE_SM_SEMAPHORE: "semaphores of SmChannels",
    lib.PROXYCCL_HANDLE_PROXY_SEMAPHORE: "semaphores of ProxyChannels",
    lib.PROXYCCL_HANDLE_FIFO: "a ring of triggers (`fifo` of ProxyChannels)",
}
_SEMAPHORES = (lib.PROXYCCL_HANDLE_SM_SEMAPHORE, lib.PROXYCCL_HANDLE_PROXY_SEMAPHORE)


class Parameter(NamedTuple):
    """A kernel's parameter."""

    size: int  # bytes of the parameter
    kind: int  # BYTES, INTEGER, FLOAT or POINTER
    handle: int = 0  # the ProxycclHandleKind that the parameter takes, by value or by pointer; 0 if it takes no handles


def parameters_of(table: Any) -> list[Parameter]:
    """Returns the parameters in a kernel's table (kernel.h), which has their number and then a word for each."""
    words = [int(table[1 + i]) for i in range(table[0])]
    return [Parameter(word >> 8, word & 3, word >> 2 & 63) for word in words]


def find_range(ranges: Sequence[tuple[int, int]], address: int) -> int | None:
    """Returns the index of the first range, (address, size), that contains an address; None if no range does."""
    return next((i for i, (start, size) in enumerate(ranges) if start <= address < start + max(size, 1)), None)


def _dimensions(shape: Shape, argument: str) -> tuple[int, int, int]:
    expected = "must be one to three positive 32-bit integers"
    given = find_extents(shape) or []
    if not 1 <= len(given) <= 3:
        raise ArgumentError(argument, f"{expected}, not {shape!r}")
    x, y, z = [as_integer(extent, argument, expected, 1, (1 << 32) - 1) for extent in (*given, 1, 1)[:3]]
    return x, y, z


class Launch:
    """A launch with packed arguments. Calling the object launches the kernel.

    Before the launch, the proxies of all channels among the arguments are woken (`sleepers`).
    """

    def __init__(self, kernel: Kernel, grid: Shape, block: Shape, args: tuple[Any, ...], shared: int) -> None:
        self._kernel, self._arguments = kernel, args
        self._runtime = kernel.runtime
        shared = as_integer(shared, "shared", "expected a number of bytes from 0 to 2**32 - 1", 0, (1 << 32) - 1)
        self._values, self._kept = kernel.pack(args)
        self._parameters = ffi.new("void *[]", [*map(ffi.from_buffer, self._values), ffi.NULL])
        calls = kernel.runtime.calls
        self.prepared = ffi.new("ProxycclLaunch *")  # the ProxycclLaunch (launch.h), for callers in C
        set_functions(ffi, self.prepared, calls, "current", call="launch")
        self.prepared.context, self.prepared.function = calls.context, kernel.function
        self.prepared.grid, self.prepared.block = _dimensions(grid, "grid"), _dimensions(block, "block")
        self.prepared.shared_bytes, self.prepared.parameters = shared, self._parameters
        self._sleepers = [getattr(value, "sleepers", None) for value in args]
        self.prepared.wakes = self._wakes = wakes(self._sleepers)

    def replace(self, index: int, raw: bytes) -> None:
        """Changes a struct argument for later launches. Launches that are already queued are not affected."""
        self._values[index][:] = raw

    def copy(self) -> Launch:
        """Returns a new launch with the same grid, block and arguments, which are packed again."""
        prepared = self.prepared
        return Launch(self._kernel, tuple(prepared.grid), tuple(prepared.block), self._arguments, prepared.shared_bytes)

    def pointers_into(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Finds the words of the packed arguments that point into given ranges of memory.

        Args:
            ranges: address and size in bytes of each range.

        Returns:
            For each word: its address, the index of the range, and the offset in the range.
        """
        found = []
        for index, (argument, parameter) in enumerate(zip(self._arguments, self._kernel.parameters, strict=True)):
            offsets = (0,) if parameter.kind == POINTER else getattr(argument, "pointers", ())
            for offset in offsets:
                value = struct.unpack_from("<Q", self._values[index], offset)[0]
                number = find_range(ranges, value)
                if number is not None:
                    word = int(ffi.cast("uintptr_t", self.packed(index))) + offset
                    found.append((word, number, value - ranges[number][0]))
        return found

    @property
    def peers_words(self) -> int:
        """The address of the words, in a packed argument, in which C stores each rank's address of the call's output
        (`ProxiedStruct.peers_words`); 0 if no argument has such words.
        """
        for index, argument in enumerate(self._arguments):
            offset: int | None = getattr(argument, "peers_words", None)
            if offset is not None:
                return int(ffi.cast("uintptr_t", self.packed(index))) + offset
        return 0

    def packed(self, index: int) -> VoidPointer:
        """Returns the address of a packed argument. A write there changes later launches, but not queued ones."""
        return ffi.cast("void *", ffi.from_buffer(self._values[index]))

    def __call__(self, stream: StreamLike = None) -> None:
        handle = self._runtime.stream_handle(stream)
        status = lib.proxyccl_launch(self.prepared, handle)
        if status == lib.PROXYCCL_OTHER_CONTEXT:
            with self._runtime.current():
                status = lib.proxyccl_launch(self.prepared, handle)
        self.check(status)

    def check(self, status: int) -> None:
        """Raises KernelError if `status`, which the driver returned for this launch, is not 0."""
        if status:
            grid, block = tuple(self.prepared.grid), tuple(self.prepared.block)
            try:
                self._runtime.check(status, "launch")
            except KernelError as error:
                raise KernelError(
                    f"kernel {self._kernel.name} with grid {grid}, block {block} and {self.prepared.shared_bytes} "
                    f"bytes of shared memory was refused: {error}"
                ) from None


class Kernel:
    """A kernel of a module, launched as ``kernel(grid, block, *args, stream=None, shared=0)``.

    Arguments for pointers are arrays of any library, registered memories, integer addresses, or None for NULL.
    Arguments for integers and floats are numbers. Arguments for structs are channel handles, or bytes of the struct's
    size. Arguments for pointers to handles are sets of channels, or their `semaphores`; arguments for handles are
    channels, or their `semaphore` or `fifo`.
    """

    def __init__(
        self, runtime: LaunchRuntime, name: str, function: VoidPointer, parameters: Sequence[Parameter], module: object
    ) -> None:
        self.runtime = runtime
        self.name = name
        self.function = function
        self._module = module  # keeps the module loaded
        self.parameters = tuple(parameters)

    def __repr__(self) -> str:
        return f"<Kernel {self.name} with {len(self.parameters)} parameters on {self.runtime.name}>"

    def __call__(self, grid: Shape, block: Shape, *args: Any, stream: StreamLike = None, shared: int = 0) -> None:
        """Queues the kernel on the stream and returns. The arguments are kept alive until the kernel has run.

        Raises:
            ArgumentError: an argument does not fit its parameter, `grid` or `block` is not a shape, or the calling
                thread captures another stream into a graph.
            HandleTypeError: an argument is a handle of the wrong kind, such as a ProxyChannel where the parameter is an
                SmChannel.
            KernelError: the driver refused the launch.
        """
        launch = Launch(self, grid, block, args, shared)
        handle = self.runtime.stream_handle(stream)
        launch(handle)
        self.runtime.in_flight.add(launch, stream, handle)

    def prepare(self, grid: Shape, block: Shape, *args: Any, shared: int = 0) -> Launch:
        """Packs the arguments once, for many launches. The returned object keeps the arguments alive."""
        return Launch(self, grid, block, args, shared)

    def pack(self, args: tuple[Any, ...]) -> tuple[list[bytearray], list[object]]:
        """Returns each argument's bytes, and the objects that must live until the kernel has run."""
        if len(args) != len(self.parameters):
            raise ArgumentError("args", f"kernel {self.name} takes {len(self.parameters)} arguments, not {len(args)}")
        kept: list[object] = []
        values = [
            bytearray(self._convert(i, value, parameter, kept))
            for i, (value, parameter) in enumerate(zip(args, self.parameters, strict=True))
        ]
        return values, kept

    def _convert(self, index: int, value: Any, parameter: Parameter, kept: list[object]) -> bytes:
        size, kind, handle = parameter
        argument = f"args[{index}] of kernel {self.name}"
        if handle:
            _require_handle(value, handle, argument)
        if kind == POINTER:
            kept.append(value)
            return struct.pack("<Q", self._address(value, argument))
        if kind == FLOAT:
            if not hasattr(value, "__float__"):
                raise ArgumentError(argument, f"expected a number, not {type(value).__name__}")
            try:
                return struct.pack(_FLOAT_FORMAT[size], float(value))
            except OverflowError:
                raise ArgumentError(argument, f"{value} does not fit in a float of {size} bytes") from None
            except (TypeError, ValueError) as error:  # for example, an array of several numbers
                raise ArgumentError(argument, f"expected a number: {error}") from error
        if kind == INTEGER:
            number, bits = int(value) if isinstance(value, bool | np.bool_) else find_integer(value), 8 * size
            if number is None:
                raise ArgumentError(argument, f"expected an integer, not {type(value).__name__}")
            if not -(1 << (bits - 1)) <= number < 1 << bits:
                raise ArgumentError(argument, f"{number} does not fit in {bits} bits")
            return int(number & ((1 << bits) - 1)).to_bytes(size, "little")
        if hasattr(value, "device_pointer") and hasattr(value, "__getitem__"):
            raise ArgumentError(
                argument, f"expected a struct of {size} bytes, not a {type(value).__name__}; pass one of its elements"
            )
        try:
            raw = bytes(memoryview(getattr(value, "device_handle", value)))
        except TypeError:
            raise ArgumentError(argument, f"expected a struct of {size} bytes, not {type(value).__name__}") from None
        if len(raw) != size:
            given = f"{len(raw)} bytes of a {type(value).__name__}"
            raise ArgumentError(argument, f"expected a struct of {size} bytes, not {given}")
        return raw

    def _address(self, value: Any, argument: str) -> int:
        if value is None:
            return 0
        if isinstance(value, int | np.integer):  # checked before buffers, because a numpy number is also a buffer
            return as_integer(value, argument, "expected an address from 0 to 2**64 - 1", 0, (1 << 64) - 1)
        address = getattr(value, "device_pointer", None)
        if isinstance(address, int):
            return address
        view = as_view(value, argument, gpu=self.runtime.name)
        if view.device[0] != self.runtime.name or view.device[1] not in (-1, self.runtime.device):
            raise ArgumentError(
                argument,
                f"the array lies on {view.place}, the kernel runs on {self.runtime.name}:{self.runtime.device}",
            )
        return view.ptr


def _require_handle(value: Any, expected: int, argument: str) -> None:
    """Raises HandleTypeError for a handle of the wrong kind. Addresses, arrays and bytes are not checked."""
    given = getattr(value, "handle_kind", 0)
    if given in (0, expected) or (expected == lib.PROXYCCL_HANDLE_SEMAPHORE and given in _SEMAPHORES):
        return
    raise HandleTypeError(argument, f"expected {_HANDLES[expected]}, not {_HANDLES[given]}")


class Module:
    """The kernels of one compiled source, as attributes or by name.

    A module with a single kernel can be called as that kernel.
    """

    def __init__(self, kernels: dict[str, Kernel]) -> None:
        self._kernels = kernels

    def __getitem__(self, name: str) -> Kernel:
        if not isinstance(name, str) or name not in self._kernels:
            raise ArgumentError(
                "name", f"unknown kernel {name!r}; this source has {', '.join(self._kernels) or 'none'}"
            )
        return self._kernels[name]

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("_") or name not in self._kernels:
            raise AttributeError(f"unknown kernel {name!r}; this source has {', '.join(self._kernels) or 'none'}")
        return self._kernels[name]

    def __iter__(self) -> Iterator[Kernel]:
        return iter(self._kernels.values())

    def __len__(self) -> int:
        return len(self._kernels)

    def __repr__(self) -> str:
        return f"<Module with {', '.join(self._kernels)}>"

    def __call__(self, grid: Shape, block: Shape, *args: Any, stream: StreamLike = None, shared: int = 0) -> None:
        """Launches the module's only kernel; see `Kernel.__call__`."""
        if len(self._kernels) != 1:
            raise ArgumentError(
                "name", f"this source has {len(self._kernels)} kernels; say which: {', '.join(self._kernels)}"
            )
        next(iter(self._kernels.values()))(grid, block, *args, stream=stream, shared=shared)
