/* Places: equal parts of one memory, which another library's caching allocator allocates and frees as if they were
 * whole allocations. So the allocator decides when a place is free again, because it knows on which streams its arrays
 * are used.
 *
 * A thread chooses the places that its next allocations come from. If all places are taken, an allocation gets an
 * unmapped address, which the caller recognises and frees immediately. Each such address is unique, because the library
 * identifies its allocations by address. A failure would make the library free its cached memory and wait for the
 * device.
 *
 * The library calls with its own lock held, so no code in this file is Python (memory_pool.h). Kernels that it queued
 * may still use a place that it has freed; where drivers free memory, they wait for such kernels. So a freed place is
 * idle until a caller that has waited for the device renews it.
 */
#pragma once

#include "memory_pool.h"

typedef struct ProxycclPlaces ProxycclPlaces;

/* Makes `count` places of `bytes` bytes each, from `start` on. Returns NULL if memory has run out. */
ProxycclPlaces* proxyccl_places_open(uint64_t start, uint64_t bytes, uint32_t count);
/* Sets the places that this thread's allocations come from; NULL for none. */
void proxyccl_places_choose(ProxycclPlaces* places);
/* Frees are numbered. Returns the number of the last free of a place that was not renewed since; 0 if there is no such
 * place. */
uint64_t proxyccl_places_idle(ProxycclPlaces* places);
/* Makes the places of all frees up to number `last` available again. The caller must have waited for the device after
 * that free. */
void proxyccl_places_renew(ProxycclPlaces* places, uint64_t last);
/* Closes the places if the library uses none of them, and returns whether they are closed. No thread may have chosen
 * these places. */
int proxyccl_places_close(ProxycclPlaces* places);

/* For the library, by name; the signatures are those of torch.cuda.memory.CUDAPluggableAllocator. */
PROXYCCL_EXPORTED void* proxyccl_place_allocate(ssize_t bytes, int device, void* stream); /* NULL: too many bytes */
PROXYCCL_EXPORTED void proxyccl_place_free(void* ptr, ssize_t bytes, int device, void* stream);
