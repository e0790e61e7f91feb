"""Made by device/build_stubs.py from build_ring_loops.py."""


from proxyccl.device._cdata import BaseFFI as BaseFFI

class Lib:
    def proxyccl_bare_drain(lib, slots: int, tail: int, size_log2: int, count: int, timeout_ns: int, /) -> int: ...
    def proxyccl_bare_produce(lib, slots: int, tail: int, size_log2: int, first_ticket: int, count: int, word0: int, word1: int, timeout_ns: int, /) -> int: ...
class FFI(BaseFFI): ...
ffi: FFI
lib: Lib
