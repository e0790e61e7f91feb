/* The transport `copy` copies with the GPU's copy engines, in one stream for each peer. The CPU makes short copies
 * between pinned memories. */
#pragma once

#include <stdint.h>

/* Longest put that the CPU copies, in bytes. If the bytes are not in a core's caches, the core copies this many bytes
 * in about 10 us; a GPU's copy engine takes 10 us even for a short copy. The worker serves no other connection during
 * the copy. */
enum { PROXYCCL_CPU_COPY_BYTES = 65536 };

/* The caller owns the stream and the event, which no other connection may use. */
typedef struct ProxycclCopyOptions {
  void *stream;
  void *event;
  const char *shorts; /* the device's table of all uint16_t values, the sources of copies that store a trigger's value;
                         NULL if no trigger carries a value */
} ProxycclCopyOptions;
