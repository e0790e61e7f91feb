"""Defines functions whose implementation differs between NVIDIA, AMD and Triton's interpreter, as platform.h does in
C++. In a compiled program, scalar loads and inline assembly run in every thread. A scalar store or atomic runs in one
thread; all threads get an atomic's result by a barrier.

An ``if`` at module level chooses each implementation, because Triton before 3.9 looks up all attributes that a function
names, even in branches that are not compiled.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from proxyccl.triton.basics import INTERPRETED, jit
from triton.language import core

# -- all synchronising accesses of this package ---

if hasattr(tl, "atomic_load") and not INTERPRETED:

    @jit
    def _load(p, sem: tl.constexpr, scope: tl.constexpr):
        return tl.atomic_load(p, sem=sem, scope=scope)

    @jit
    def _store(p, value, sem: tl.constexpr, scope: tl.constexpr):
        tl.atomic_store(p, value.to(p.dtype.element_ty), sem=sem, scope=scope)

    @jit
    def load_packets(p, mask):
        return tl.where(mask, tl.atomic_load(p, mask=mask, sem="relaxed", scope="sys"), 0)

    @jit
    def store_packets(p, words, mask):
        tl.atomic_store(p, words, mask=mask, sem="relaxed", scope="sys")

    # An atomic load with acquire order is a fence in every thread, which is too expensive for every poll of a wait. So
    # polls are relaxed, and one acquire load follows the last poll.
    @jit
    def load_awaited(p):
        return _load(p, "relaxed", "sys")

    @jit
    def acquire_awaited(p):
        _load(p, "acquire", "sys")

else:  # before Triton 3.9, and in the interpreter

    @jit
    def _load(p, sem: tl.constexpr, scope: tl.constexpr):
        return tl.atomic_add(p, 0, sem=sem, scope=scope)

    @jit
    def _store(p, value, sem: tl.constexpr, scope: tl.constexpr):
        tl.atomic_xchg(p, value.to(p.dtype.element_ty), sem=sem, scope=scope)

    @jit
    def load_packets(p, mask):
        return tl.load(p, mask=mask, other=0, volatile=True)  # on NVIDIA, this is a relaxed load at system scope

    @jit
    def store_packets(p, words, mask):
        tl.store(p, words, mask=mask, cache_modifier=".wt")

    # Without Triton's atomic loads, every poll is an acquire load, which compiles to a single load. The compiler would
    # drop a further acquire load after the polls, because the value of that load is unused.
    @jit
    def load_awaited(p):
        return _load(p, "acquire", "sys")

    @jit
    def acquire_awaited(p):
        """Does nothing, because `load_awaited` has acquired the stores."""


@jit
def load_acquire_system(p):
    return _load(p, "acquire", "sys")


@jit
def load_relaxed_system(p):
    return _load(p, "relaxed", "sys")


@jit
def load_acquire_device(p):
    return _load(p, "acquire", "gpu")


@jit
def load_relaxed_device(p):
    return _load(p, "relaxed", "gpu")


@jit
def store_release_system(p, value):
    _store(p, value, "release", "sys")


@jit
def store_relaxed_system(p, value):
    _store(p, value, "relaxed", "sys")


@jit
def store_release_device(p, value):
    _store(p, value, "release", "gpu")


@jit
def store_relaxed_device(p, value):
    _store(p, value, "relaxed", "gpu")


# -- operations that Triton's language lacks ---

if INTERPRETED:
    from proxyccl.triton import turns

    nanoseconds, pause, pass_on = turns.nanoseconds, turns.pause, turns.pass_on

    SPINS_PER_CHECK = tl.constexpr(8)

    def sync_threads_system() -> None:
        """Does nothing, because an interpreted program has one thread."""

    def spin_for_packets(p: Any, words: Any, flag: Any, mask: Any) -> Any:
        """Returns the contents unchanged, because in the interpreter no other program runs while a program spins."""
        return words

    def store_trigger(slot: Any, word0: Any, word1: Any) -> None:
        store_relaxed_system(slot, word0)
        store_release_system(slot + 1, word1)

else:
    SPINS_PER_CHECK = tl.constexpr(1024)

    @core.builtin
    def _on_amd(_semantic=None):
        # Tests the compilation's target, unlike target_info.is_cuda(), which tests this machine's device.
        return core.constexpr(_semantic.builder.options.backend_name == "hip")

    @core.builtin
    def _on_gfx90a(_semantic=None):
        return core.constexpr(_semantic.builder.options.arch == "gfx90a")

    @core.builtin
    def _has_b128(_semantic=None):
        arch = _semantic.builder.options.arch  # "sm90"
        return core.constexpr(arch.startswith("sm") and int(arch[2:].rstrip("af")) >= 90)

    @core.builtin
    def _threads(_semantic=None):
        options = _semantic.builder.options
        return core.constexpr(options.num_warps * getattr(options, "warp_size", 32))

    @jit
    def pause(spins):
        """Does nothing on a GPU. The interpreter's `pause` lets other programs run between two polls."""

    pass_on = pause

    @jit
    def nanoseconds():
        """Returns the clock's time in nanoseconds, the same in all threads of a program."""
        # Threads read the clock at different times. If threads branched on different times, some threads would miss a
        # barrier. So all threads use the latest of the times.
        lane = tl.arange(0, _threads())
        if _on_amd():  # the constant-rate counter runs at 100 MHz on every CDNA part
            now = tl.inline_asm_elementwise(
                "s_memrealtime $0\n\ts_waitcnt lgkmcnt(0)", "=s,v", [lane], dtype=tl.int64, is_pure=False, pack=1
            )
            return tl.max(now, 0) * 10
        else:  # noqa: RET505  (Triton must compile only one branch)
            now = tl.inline_asm_elementwise(
                "mov.u64 $0, %globaltimer;", "=l,r", [lane], dtype=tl.int64, is_pure=False, pack=1
            )
            return tl.max(now, 0)

    @jit
    def _write_back(assembly: tl.constexpr):
        tl.inline_asm_elementwise(assembly, "=v", [], dtype=tl.int32, is_pure=False, pack=1)

    @jit
    def sync_threads_system():
        """Makes the program's threads wait for each other. Later pushes or signals release all threads' stores."""
        if _on_amd():
            # The barrier does not complete stores, and a wave's release covers only the wave's own stores. So each wave
            # writes back its stores before the barrier.
            if _on_gfx90a():
                _write_back("buffer_wbl2\n\ts_waitcnt vmcnt(0)\n\tv_mov_b32 $0, 0")
            else:
                _write_back("buffer_wbl2 sc0 sc1\n\ts_waitcnt vmcnt(0)\n\tv_mov_b32 $0, 0")
        tl.debug_barrier()

    @jit
    def spin_for_packets(p, words, flag, mask):
        """Reloads packets until each packet has the flag, at most 16 times, and returns the packets' contents. `words`
        are the contents that were loaded before. Each thread waits only for its own packets, because a check by the
        whole program takes several barriers. On AMD, returns `words`.
        """
        if _on_amd():
            return words
        return tl.inline_asm_elementwise(
            """{
            .reg .pred done; .reg .u32 low, high, spins; .reg .b64 packet;
            mov.b64 packet, $1;
            mov.u32 spins, 0;
            setp.eq.u32 done, $4, 0;
            @done bra END;
            SPIN:
            mov.b64 {low, high}, packet;
            setp.eq.u32 done, high, $3;
            @done bra END;
            ld.relaxed.sys.global.b64 packet, [$2];
            add.u32 spins, spins, 1;
            setp.lt.u32 done, spins, 16;
            @done bra SPIN;
            END:
            mov.b64 $0, packet;
            }""",
            "=l,l,l,r,r",
            [words, p, flag, mask.to(tl.int32)],
            dtype=tl.uint64,
            is_pure=False,
            pack=1,
        )

    @jit
    def store_trigger(slot, word0, word1):
        """Stores a trigger's two words into a slot, with release order. From sm_90 on, makes one store of 16 bytes.
        Before sm_90, such a store may be torn, so the word with the parity bit is stored last, by a second store.
        """
        if _has_b128():
            # Inline assembly runs in all threads of the program, so a predicate selects the thread that stores.
            tl.inline_asm_elementwise(
                """{
                .reg .pred first; .reg .u32 thread; .reg .b128 trigger;
                mov.u32 thread, %tid.x;
                setp.eq.u32 first, thread, 0;
                mov.b128 trigger, {$2, $3};
                @first fence.acq_rel.sys;
                @first st.relaxed.sys.global.b128 [$1], trigger;
                mov.u32 $0, 0;
                }""",
                "=r,l,l,l",
                [slot, word0, word1],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            store_relaxed_system(slot, word0)
            store_release_system(slot + 1, word1)
