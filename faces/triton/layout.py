"""The offsets of the shared structs' fields, as the C compiler reports them (handles.h, control.h, trigger.h).

Offsets count in words of 32 bits (``_4``) or 64 bits (``_8``), for pointers to such words.
"""

from __future__ import annotations

from typing import Any, Final

import triton.language as tl
from proxyccl.device._native import ffi, lib


def _words(size: int, struct: str, *path: str) -> Any:
    offset: int = ffi.offsetof(struct, *path)
    if offset % size:
        raise AssertionError(f"{struct}.{'.'.join(path)} lies at {offset}, which is not a multiple of {size}")
    return tl.constexpr(offset // size)


def _constant(name: str) -> Any:
    return tl.constexpr(int(getattr(lib, f"PROXYCCL_{name}")))


_PROXY: Final = "ProxycclProxyChannel"
PROXY_WORDS = tl.constexpr(ffi.sizeof(_PROXY) // 8)
SLOTS_8 = _words(8, _PROXY, "fifo", "slots")
TAIL_8 = _words(8, _PROXY, "fifo", "tail")
HEAD_8 = _words(8, _PROXY, "fifo", "head")
TAIL_CACHE_8 = _words(8, _PROXY, "fifo", "tail_cache")
REFRESH_LOCK_8 = _words(8, _PROXY, "fifo", "refresh_lock")
SIZE_LOG2_4 = _words(4, _PROXY, "fifo", "size_log2")
INBOUND_8 = _words(8, _PROXY, "semaphore", "inbound")
EXPECTED_8 = _words(8, _PROXY, "semaphore", "expected")
FLUSHED_8 = _words(8, _PROXY, "flushed")
COMPLETED_8 = _words(8, _PROXY, "completed")
MEMORY_LIMITS_8 = _words(8, _PROXY, "memory_limits")
CONTROL_8 = _words(8, _PROXY, "control")
CHANNEL_4 = _words(4, _PROXY, "channel")
PEER_4 = _words(4, _PROXY, "peer")
DST_MEMORY_4 = _words(4, _PROXY, "dst_memory")
SRC_MEMORY_4 = _words(4, _PROXY, "src_memory")

_SM: Final = "ProxycclSmChannel"
SM_WORDS = tl.constexpr(ffi.sizeof(_SM) // 8)
SM_INBOUND_8 = _words(8, _SM, "semaphore", "inbound")
SM_EXPECTED_8 = _words(8, _SM, "semaphore", "expected")
SM_REMOTE_INBOUND_8 = _words(8, _SM, "semaphore", "remote_inbound")
SM_OUTBOUND_8 = _words(8, _SM, "semaphore", "outbound")
SM_DST_8 = _words(8, _SM, "dst")
SM_PACKET_BUFFER_8 = _words(8, _SM, "packet_buffer")
SM_CONTROL_8 = _words(8, _SM, "control")
SM_DST_BYTES_8 = _words(8, _SM, "dst_bytes")
SM_PACKET_BUFFER_BYTES_8 = _words(8, _SM, "packet_buffer_bytes")
SM_PEER_4 = _words(4, _SM, "peer")
SM_CHANNEL_4 = _words(4, _SM, "channel")

_CONTROL: Final = "ProxycclControl"
ABORT_4 = _words(4, _CONTROL, "abort")
ASKED_4 = _words(4, _CONTROL, "asked")
RANK_4 = _words(4, _CONTROL, "rank")
FAILED_RANK_4 = _words(4, _CONTROL, "failed_rank")
TIMEOUT_8 = _words(8, _CONTROL, "timeout_ns")
PEERS_8 = _words(8, _CONTROL, "peers")
PEER_COUNT_4 = _words(4, _CONTROL, "peer_count")

ERROR_STATE_4 = _words(4, _CONTROL, "error", "state")
ERROR_CODE_4 = _words(4, _CONTROL, "error", "code")
ERROR_RANK_4 = _words(4, _CONTROL, "error", "rank")
ERROR_PEER_4 = _words(4, _CONTROL, "error", "peer")
ERROR_WAIT_4 = _words(4, _CONTROL, "error", "wait")
ERROR_OPERATION_4 = _words(4, _CONTROL, "error", "operation")
ERROR_CHANNEL_4 = _words(4, _CONTROL, "error", "channel")
ERROR_EXPECTED_8 = _words(8, _CONTROL, "error", "expected")
ERROR_SEEN_8 = _words(8, _CONTROL, "error", "seen")
ERROR_OFFSET_8 = _words(8, _CONTROL, "error", "offset")
ERROR_SIZE_8 = _words(8, _CONTROL, "error", "size")

# The offsets of a wait's entry in ProxycclControl.waits, from the start of the array.
_WAIT: Final = "ProxycclWait"
WAITS_8 = _words(8, _CONTROL, "waits")
WAIT_WORDS = tl.constexpr(ffi.sizeof(_WAIT) // 8)
WAIT_CLAIMED_4 = _words(4, _WAIT, "claimed")
WAIT_ANSWERED_4 = _words(4, _WAIT, "answered")
WAIT_KIND_4 = _words(4, _WAIT, "kind")
WAIT_PEER_4 = _words(4, _WAIT, "peer")
WAIT_CHANNEL_4 = _words(4, _WAIT, "channel")
WAIT_EXPECTED_8 = _words(8, _WAIT, "expected")
WAIT_SEEN_8 = _words(8, _WAIT, "seen")
WAIT_PEERS = _constant("WAIT_PEERS")
LAST_QUESTION = _constant("LAST_QUESTION")

NO_PEER = _constant("NO_PEER")
NO_CHANNEL = _constant("NO_CHANNEL")
ERROR_TIMEOUT = _constant("ERROR_TIMEOUT")
ERROR_BAD_TRIGGER = _constant("ERROR_BAD_TRIGGER")
ERROR_OUT_OF_RANGE = _constant("ERROR_OUT_OF_RANGE")
ERROR_INVALID_FLAG = _constant("ERROR_INVALID_FLAG")
ERROR_SHARED_WAIT = _constant("ERROR_SHARED_WAIT")
ERROR_SIGNAL_VALUE = _constant("ERROR_SIGNAL_VALUE")
RECORD_EMPTY = _constant("RECORD_EMPTY")
RECORD_CLAIMED = _constant("RECORD_CLAIMED")
RECORD_VALID = _constant("RECORD_VALID")
WAIT_RING_ROOM = _constant("WAIT_RING_ROOM")
WAIT_FLUSH = _constant("WAIT_FLUSH")
WAIT_COMPLETION = _constant("WAIT_COMPLETION")
WAIT_SM_SIGNAL = _constant("WAIT_SM_SIGNAL")
WAIT_PROXY_SIGNAL = _constant("WAIT_PROXY_SIGNAL")
WAIT_PACKET = _constant("WAIT_PACKET")
WAIT_GRID = _constant("WAIT_GRID")
SM_PUT_PACKETS = _constant("SM_PUT_PACKETS")
SM_GET_PACKETS = _constant("SM_GET_PACKETS")
SM_PEER_MEMORY = _constant("SM_PEER_MEMORY")
SM_OWN_MEMORY = _constant("SM_OWN_MEMORY")
SM_PACKET_BUFFER = _constant("SM_PACKET_BUFFER")

OP_DATA = _constant("OP_DATA")
OP_SIGNAL = _constant("OP_SIGNAL")
OP_FLUSH = _constant("OP_FLUSH")
OP_GET = _constant("OP_GET")
OP_MASK = tl.constexpr((1 << lib.PROXYCCL_OP_BITS) - 1)
OFFSET_BITS = _constant("OFFSET_BITS")
WINDOW_BYTES = _constant("WINDOW_BYTES")
MAX_TRIGGER_BYTES = _constant("MAX_TRIGGER_BYTES")
MAX_MEMORIES = _constant("MAX_MEMORIES")
# The memory ids after the last real one stand for values of 1, 2, 4 and 8 bytes.
VALUE_1_BYTE = MAX_MEMORIES
VALUE_8_BYTES = tl.constexpr(int(lib.PROXYCCL_MAX_MEMORIES) + 3)
SRC_OFFSET_SHIFT = _constant("SRC_OFFSET_SHIFT")
SRC_MEMORY_SHIFT = _constant("SRC_MEMORY_SHIFT")
DST_MEMORY_SHIFT = _constant("DST_MEMORY_SHIFT")
OP_SHIFT = _constant("OP_SHIFT")
GET_SHIFT = _constant("GET_SHIFT")
CHANNEL_SHIFT = _constant("CHANNEL_SHIFT")
PARITY_SHIFT = _constant("PARITY_SHIFT")

# A grid barrier (grid_barrier.py), which only Triton's kernels use.
BARRIER_ARRIVED_8 = tl.constexpr(0)
BARRIER_GENERATION_8 = tl.constexpr(1)
BARRIER_CONTROL_8 = tl.constexpr(2)
BARRIER_BYTES = 24
