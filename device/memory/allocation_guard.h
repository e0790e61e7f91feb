/* Checks that addresses are still in the same allocations, by the allocations' numbers. The driver may reuse an
 * address, but never a number. */
#pragma once

#include <stdint.h>

typedef struct ProxycclAllocation {
  uint64_t ptr;         /* an address in the allocation */
  uint64_t id;          /* the allocation's expected number */
  const uint64_t* word; /* holds the number of memory that this process suspends and resumes, which changes the driver's
                         * number, and 0 once the memory is freed; null to query the driver */
} ProxycclAllocation;

typedef struct ProxycclAllocationGuard {
  /* cuPointerGetAttribute, hipPointerGetAttribute, proxyccl_host_pointer_attribute */
  int (*pointer_attribute)(void* data, int attribute, uint64_t ptr);
  int attribute; /* CU_POINTER_ATTRIBUTE_BUFFER_ID or HIP's equivalent: selects a 64-bit number */
  const ProxycclAllocation* allocations; /* several adjacent allocations, in ascending order */
  uint32_t count;
} ProxycclAllocationGuard;

/* Reads the numbers of the allocations that contain a range. Returns 1 if all numbers are as expected; 0 if one
 * differs or a query fails. */
static inline int proxyccl_allocations_hold(const ProxycclAllocationGuard* self, uint64_t start, uint64_t end) {
  const ProxycclAllocation* all = self->allocations;
  for (uint32_t i = 0; i < self->count && all[i].ptr < end; ++i) {
    if (i + 1 < self->count && all[i + 1].ptr <= start) continue;
    uint64_t id = 0;
    if (all[i].word != 0) {
      id = __atomic_load_n(all[i].word, __ATOMIC_RELAXED);
    } else if (self->pointer_attribute(&id, self->attribute, all[i].ptr) != 0) {
      return 0;
    }
    if (id != all[i].id) return 0;
  }
  return 1;
}
