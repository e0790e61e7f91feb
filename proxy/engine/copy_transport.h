/* Copies by a runtime's copy engine, in one stream for each peer; short ones between pinned memories by the CPU. */
#ifndef PROXYCCL_COPY_TRANSPORT_H
#define PROXYCCL_COPY_TRANSPORT_H

#include <stdint.h>

/* Longest put that the CPU copies, in bytes. A core copies this many from outside its caches in about 10 us, which a
 * GPU's copy engine takes for any length. The worker serves no other connection during the copy. */
enum { PROXYCCL_CPU_COPY_BYTES = 65536 };

/* The caller owns the stream and the event, which no other connection may use. */
typedef struct ProxycclCopyOptions {
  void *stream;
  void *event;
  const char *shorts; /* in the device's memory, all values of 16 bits in order; NULL if no value is put */
} ProxycclCopyOptions;

#endif
