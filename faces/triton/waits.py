"""Implements waits with a time-out, as wait.h does in C++. Every wait regularly checks the clock, and the abort word by
which other ranks end this rank's waits.

The first wait that gives up writes the error record and sets the abort words of all ranks of the host. A wait that
gives up returns, so that the kernel runs to its end.
"""

from __future__ import annotations

import triton.language as tl
from proxyccl.triton import layout as c
from proxyccl.triton.basics import jit, longs_at, out_of_line, u32, u64, words_at
from proxyccl.triton.target import (
    SPINS_PER_CHECK,
    acquire_awaited,
    load_acquire_system,
    load_awaited,
    load_relaxed_system,
    nanoseconds,
    pause,
    store_relaxed_system,
    store_release_system,
)


@jit
def _spread_abort(control, code):
    # Tells the CPUs of all ranks of the host that this rank has failed, then sets the abort words of these ranks, and
    # last this rank's own; see spreadAbort() of wait.h.
    words = words_at(control)
    peers = longs_at(load_relaxed_system(longs_at(control) + c.CONTROL_PEERS_8))
    count = load_relaxed_system(words + c.CONTROL_PEER_COUNT_4).to(tl.int32)
    own_name = load_relaxed_system(words + c.CONTROL_RANK_4) + 1
    for i in range(count):
        failed_rank = words_at(load_relaxed_system(peers + i)) + c.CONTROL_FAILED_RANK_4
        if load_relaxed_system(failed_rank) == 0:
            store_release_system(failed_rank, own_name)
    for i in range(count):
        store_release_system(words_at(load_relaxed_system(peers + i)) + c.CONTROL_ABORT_4, code)
    store_release_system(words + c.CONTROL_ABORT_4, code)


@out_of_line
def record_error(control, code, kind, peer, channel, expected, seen, operation, offset, size):
    """Writes the error record, unless another wait has written it before, and ends the waits of all ranks of the host.

    `control` is the control block's address. `expected`, `seen`, `offset` and `size` have 64 bits, the others 32.
    """
    words = words_at(control)
    longs = longs_at(control)
    state = tl.atomic_cas(
        words + c.CONTROL_ERROR_STATE_4, u32(c.RECORD_EMPTY), u32(c.RECORD_CLAIMED), sem="acq_rel", scope="sys"
    )
    if state == c.RECORD_EMPTY:
        store_relaxed_system(words + c.CONTROL_ERROR_CODE_4, code)
        store_relaxed_system(words + c.CONTROL_ERROR_RANK_4, load_relaxed_system(words + c.CONTROL_RANK_4))
        store_relaxed_system(words + c.CONTROL_ERROR_PEER_4, peer)
        store_relaxed_system(words + c.CONTROL_ERROR_WAIT_4, kind)
        store_relaxed_system(words + c.CONTROL_ERROR_CHANNEL_4, channel)
        store_relaxed_system(words + c.CONTROL_ERROR_OPERATION_4, operation)
        store_relaxed_system(longs + c.CONTROL_ERROR_EXPECTED_8, expected)
        store_relaxed_system(longs + c.CONTROL_ERROR_SEEN_8, seen)
        store_relaxed_system(longs + c.CONTROL_ERROR_OFFSET_8, offset)
        store_relaxed_system(longs + c.CONTROL_ERROR_SIZE_8, size)
        # Pairs with the acquire load of `state` by the CPU that reads the record.
        store_release_system(words + c.CONTROL_ERROR_STATE_4, u32(c.RECORD_VALID))
    _spread_abort(control, code)


@jit
def _describe_wait(control, question, kind, peer, channel, expected, seen):
    # Stores a description of this wait for the CPU. The CPU requests descriptions of a kernel's waits by setting a new
    # request number, here `question`. If several waits for one peer see the request, only the first one is described.
    place = tl.where(peer != c.NO_PEER, peer % c.WAIT_PEERS, kind + c.WAIT_PEERS).to(tl.int64)
    longs = longs_at(control) + c.CONTROL_WAITS_8 + place * c.WAIT_WORDS
    words = longs.to(tl.pointer_type(tl.uint32))
    claimed = load_relaxed_system(words + c.WAIT_CLAIMED_4)
    if claimed != question:
        if tl.atomic_cas(words + c.WAIT_CLAIMED_4, claimed, question, sem="acq_rel", scope="sys") == claimed:
            store_relaxed_system(words + c.WAIT_KIND_4, kind)
            store_relaxed_system(words + c.WAIT_PEER_4, peer)
            store_relaxed_system(words + c.WAIT_CHANNEL_4, channel)
            store_relaxed_system(longs + c.WAIT_EXPECTED_8, expected)
            store_relaxed_system(longs + c.WAIT_SEEN_8, seen)
            # Pairs with the acquire load of `answered` by the CPU that asked.
            store_release_system(words + c.WAIT_ANSWERED_4, question)


@out_of_line
def check_wait(control, kind, peer, channel, expected, seen, started):
    """Checks the abort word and the clock for a wait that has spun for long. Returns 0 if the wait must give up,
    otherwise the time when the wait began. The first check passes 0 as `started`, later checks the previous result.
    """
    words = words_at(control)
    abort = load_acquire_system(words + c.CONTROL_ABORT_4)
    asked = load_relaxed_system(words + c.CONTROL_ASKED_4)
    if (abort != 0) | (asked != 0):
        question = tl.where(abort != 0, u32(c.LAST_QUESTION), asked)
        _describe_wait(control, question, kind, peer, channel, expected, seen)
    began = started
    if abort != 0:
        began = began * 0
    else:
        now = u64(nanoseconds())
        if began == 0:
            began = began + now
        else:
            bound = load_relaxed_system(longs_at(control) + c.CONTROL_TIMEOUT_NS_8)
            # A wait for other programs of the grid has twice the time-out. Another program may be waiting for a peer,
            # and should give up first, because that program's error names the peer.
            bound = bound + tl.where(kind == c.WAIT_GRID, bound, bound * 0)
            if now - began > bound:
                # Describes the wait first, because `record_error` makes other ranks stop.
                _describe_wait(control, u32(c.LAST_QUESTION), kind, peer, channel, expected, seen)
                record_error(control, u32(c.ERROR_TIMEOUT), kind, peer, channel, expected, seen, u32(0), u64(0), u64(0))
                began = began * 0
    return began


@jit
def wait_at_least(word, target, control, kind, peer, channel):
    """Spins until a 64-bit word is at least `target`. After the wait, all threads of the program see the stores that
    were released before the word reached the target.

    Returns 0 if the communicator has ended or the time-out passed, else 1.
    """
    seen = load_awaited(word)
    spins = tl.full([], 0, tl.int32)
    started = tl.full([], 0, tl.uint64)
    waits = tl.full([], 1, tl.int32)
    while (seen < target) & (waits != 0):
        spins += 1
        pause(spins)
        if spins % SPINS_PER_CHECK == 0:
            started = check_wait(control, kind, peer, channel, target, seen, started)
            waits = tl.where(started == 0, 0, 1).to(tl.int32)
        seen = load_awaited(word)
    if waits != 0:
        acquire_awaited(word)
    tl.debug_barrier()
    return waits


@jit
def aborted(control):
    """Returns whether the communicator has ended, so that the kernel's own loops must end. Reads host memory."""
    pause(0)  # the kernel's loop may wait for another program
    return load_acquire_system(words_at(control) + c.CONTROL_ABORT_4) != 0
