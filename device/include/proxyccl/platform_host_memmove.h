/* A memmove by which CPUs copy array data. The copy avoids `rep movsb` on CPUs on which that instruction is slow.
 *
 * From about 2 KiB to the size of a core's cache, glibc copies with `rep movsb` if the CPU reports that this
 * instruction is fast. AMD's Zen 3 and Zen 4 report a fast `rep movsb`, although the instruction is 4 to 15 times
 * slower on these CPUs if the target has a slightly higher offset in its page than the source
 * (https://sourceware.org/bugzilla/show_bug.cgi?id=30994). numpy's arrays have such offsets relative to our memory,
 * because malloc puts large blocks 16 bytes after the start of a page. The header is plain C, because the engine also
 * includes it.
 */
#pragma once

#include "proxyccl/types.h"

typedef uint64_t ProxycclCopiedVector __attribute__((vector_size(16), aligned(1), may_alias));

static inline void proxyccl_memmove(void* dst, const void* src, size_t bytes) {
  enum { kPage = 4096, kClose = 64, kShort = 2048, kAtOnce = 8 * sizeof(ProxycclCopiedVector) };
  const size_t distance = (size_t)((uintptr_t)dst - (uintptr_t)src);
  size_t done = 0;
  /* The loop copies upwards, so the target must not begin inside the source. */
  if (bytes >= kShort && distance >= bytes && distance % kPage < kClose) {
    for (; done + kAtOnce <= bytes; done += kAtOnce) {
      const ProxycclCopiedVector* from = (const ProxycclCopiedVector*)((const char*)src + done);
      ProxycclCopiedVector* to = (ProxycclCopiedVector*)((char*)dst + done);
      /* The loads precede the stores, because a load after a store to the same offset in a page would wait for that
       * store. */
      const ProxycclCopiedVector a = from[0], b = from[1], c = from[2], d = from[3];
      const ProxycclCopiedVector e = from[4], f = from[5], g = from[6], h = from[7];
      to[0] = a, to[1] = b, to[2] = c, to[3] = d;
      to[4] = e, to[5] = f, to[6] = g, to[7] = h;
    }
  }
  __builtin_memmove((char*)dst + done, (const char*)src + done, bytes - done);
}
