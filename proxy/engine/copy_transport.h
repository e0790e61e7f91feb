/* Copies by a runtime's copy engine, in one stream for each peer; short ones between pinned memories by the CPU. */
#ifndef PROXYCCL_COPY_TRANSPORT_H
#define PROXYCCL_COPY_TRANSPORT_H

#include <stdint.h>

/* Longest put that the CPU copies, in bytes. A core copies this many from outside its caches in about the 10 us that a
 * GPU's copy engine takes for any. Its worker serves no other connection meanwhile. */
enum { PROXYCCL_CPU_COPY_BYTES = 65536 };

/* They belong to the caller, and no other connection may use them. */
typedef struct ProxycclCopyOptions {
  void *stream;
  void *event;
  const char *shorts; /* in the device's memory, all values of 16 bits in order; NULL if no value is put */
} ProxycclCopyOptions;

#endif
