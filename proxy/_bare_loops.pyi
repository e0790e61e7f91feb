"""Made by device/build_stubs.py from build_bare_loops.py. To change it, run: make stubs."""

from collections.abc import Sequence
from typing import Literal, overload

from proxyccl.device._cdata import Array as Array
from proxyccl.device._cdata import BaseFFI as BaseFFI
from proxyccl.device._cdata import CData as CData
from proxyccl.device._cdata import Initial as Initial
from proxyccl.device._cdata import ItemPointer as ItemPointer
from proxyccl.device._cdata import Number as Number
from proxyccl.device._cdata import Passed as Passed

class _ProxycclVerbsBareWrites:
    qp: int
    cq: int
    local: int
    remote: int
    lkey: int
    rkey: int
    bytes: int
    depth: int
    chain: int
    signal_every: int
    count: int
    timeout_ns: int

class ProxycclVerbsBareWrites(_ProxycclVerbsBareWrites, CData): ...
class ProxycclVerbsBareWritesPointer(_ProxycclVerbsBareWrites, ItemPointer[ProxycclVerbsBareWrites]): ...

class _ProxycclFabricBareWrites:
    endpoint: int
    queue: int
    peer: int
    local: int
    remote: int
    descriptor: int
    key: int
    bytes: int
    depth: int
    complete_every: int
    count: int
    timeout_ns: int

class ProxycclFabricBareWrites(_ProxycclFabricBareWrites, CData): ...
class ProxycclFabricBareWritesPointer(_ProxycclFabricBareWrites, ItemPointer[ProxycclFabricBareWrites]): ...

class Lib:
    def proxyccl_bare_drain(self, slots: int, tail: int, size_log2: int, count: int, timeout_ns: int, /) -> int: ...
    def proxyccl_bare_produce(
        self,
        slots: int,
        tail: int,
        size_log2: int,
        first_ticket: int,
        count: int,
        word0: int,
        word1: int,
        timeout_ns: int,
        /,
    ) -> int: ...
    def proxyccl_verbs_bare_writes(self, options: Passed[ProxycclVerbsBareWritesPointer], /) -> int: ...
    def proxyccl_fabric_bare_writes(self, options: Passed[ProxycclFabricBareWritesPointer], /) -> int: ...
    def proxyccl_fabric_bare_serve(self, queue: int, for_ns: int, /) -> int: ...

class FFI(BaseFFI):
    @overload
    def new(
        self, cdecl: Literal["ProxycclVerbsBareWrites *"], init: Initial[ProxycclVerbsBareWrites] = ..., /
    ) -> ProxycclVerbsBareWritesPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclVerbsBareWrites[]"], init: int | Sequence[Initial[ProxycclVerbsBareWrites]], /
    ) -> Array[ProxycclVerbsBareWrites, ProxycclVerbsBareWritesPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclFabricBareWrites *"], init: Initial[ProxycclFabricBareWrites] = ..., /
    ) -> ProxycclFabricBareWritesPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclFabricBareWrites[]"], init: int | Sequence[Initial[ProxycclFabricBareWrites]], /
    ) -> Array[ProxycclFabricBareWrites, ProxycclFabricBareWritesPointer]: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclVerbsBareWrites *"], value: CData | int, /
    ) -> ProxycclVerbsBareWritesPointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclFabricBareWrites *"], value: CData | int, /
    ) -> ProxycclFabricBareWritesPointer: ...
    @overload
    def cast(self, cdecl: Literal["uintptr_t"], value: CData | int, /) -> Number: ...
    def sizeof(self, cdecl: CData | Literal["ProxycclVerbsBareWrites", "ProxycclFabricBareWrites"], /) -> int: ...
    def offsetof(self, cdecl: str, field: str, /) -> int: ...

ffi: FFI
lib: Lib
