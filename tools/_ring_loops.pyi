"""Made by device/build_stubs.py from build_ring_loops.py. To change it, run: make stubs."""

from proxyccl.device._cdata import BaseFFI as BaseFFI

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

class FFI(BaseFFI): ...

ffi: FFI
lib: Lib
