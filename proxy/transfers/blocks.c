/* Implements lists of memory blocks. See parts.h. */
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "parts.h"

uint64_t blocks_parts(const struct iovec *blocks, uint64_t count, Position at, uint64_t most_bytes, uint32_t most_parts,
                      struct iovec *parts, uint32_t *part_count) {
  uint64_t bytes = 0;
  uint32_t used = 0;
  while (used < most_parts && bytes < most_bytes && at.index < count) {
    const uint64_t rest = blocks[at.index].iov_len - at.offset;
    const uint64_t part = rest < most_bytes - bytes ? rest : most_bytes - bytes;
    parts[used++] = (struct iovec){(char *)blocks[at.index].iov_base + at.offset, part};
    bytes += part;
    at = (Position){at.index + 1, 0};
  }
  *part_count = used;
  return bytes;
}

void blocks_advance(const struct iovec *blocks, Position *at, uint64_t bytes) {
  while (bytes > 0) {
    const uint64_t rest = blocks[at->index].iov_len - at->offset;
    if (bytes < rest) {
      at->offset += bytes;
      return;
    }
    bytes -= rest;
    *at = (Position){at->index + 1, 0};
  }
}

int is_mapped(const void *address) {
  unsigned char resident;
  const uintptr_t page = (uintptr_t)address & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1);
  return mincore((void *)page, 1, &resident) == 0 || errno != ENOMEM;
}
