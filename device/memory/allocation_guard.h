/* Checks that addresses are still in the same allocations, by the driver's allocation numbers. The driver may reuse an
 * address, but never a number. */
#pragma once

#include <stdint.h>

typedef struct ProxycclAllocationGuard {
  /* cuPointerGetAttribute, hipPointerGetAttribute, proxyccl_host_pointer_attribute */
  int (*pointer_attribute)(void* data, int attribute, uint64_t ptr);
  int attribute;        /* CU_POINTER_ATTRIBUTE_BUFFER_ID or HIP's, a 64-bit allocation number */
  const uint64_t* ptrs; /* one address in each of several adjacent allocations, ascending */
  const uint64_t* ids;  /* the expected number for each address */
  uint32_t count;
} ProxycclAllocationGuard;

/* Queries the numbers of the allocations that contain a range. Returns 1 if all numbers are as expected; 0 if one
 * differs or a query fails. */
static inline int proxyccl_allocations_hold(const ProxycclAllocationGuard* self, uint64_t start, uint64_t end) {
  for (uint32_t i = 0; i < self->count && self->ptrs[i] < end; ++i) {
    if (i + 1 < self->count && self->ptrs[i + 1] <= start) continue;
    uint64_t id = 0;
    if (self->pointer_attribute(&id, self->attribute, self->ptrs[i]) != 0 || id != self->ids[i]) return 0;
  }
  return 1;
}
