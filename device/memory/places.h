/* Places are equal parts of one memory, each of which another library's caching allocator, such as torch's, uses as a
 * whole allocation. The allocator frees only unused places, because the allocator knows on which streams arrays are
 * used.
 *
 * A thread chooses the set of places for its next allocations. If all places are taken, an allocation returns a unique
 * unmapped address, which the caller must recognise and free immediately. If the allocation returned NULL, the library
 * would free its cached memory and wait for the device.
 *
 * The functions here never take the GIL, because the library calls them with its own lock held (memory_pool.h). When
 * the library frees a place, queued kernels may still use the place. So a freed place is idle, and not allocated again
 * until a caller has waited for the device and renewed the place.
 */
#pragma once

#include "memory_pool.h"

typedef struct ProxycclPlaces ProxycclPlaces;

/* Makes `count` places of `bytes` bytes each, from address `start` on. Returns NULL if host memory has run out. */
ProxycclPlaces* proxyccl_places_open(uint64_t start, uint64_t bytes, uint32_t count);
/* Sets the places from which the calling thread allocates; NULL for none. */
void proxyccl_places_choose(ProxycclPlaces* places);
/* Returns the number of the latest free of a place that is still idle; 0 if no place is idle. Frees are numbered from
 * 1. */
uint64_t proxyccl_places_idle(ProxycclPlaces* places);
/* Makes the places that are idle since free number `last` or earlier available again. The caller must have waited for
 * the device after free `last`. */
void proxyccl_places_renew(ProxycclPlaces* places, uint64_t last);
/* Closes the places if the library uses none of them. Returns whether the places are closed. No thread may have chosen
 * these places. */
int proxyccl_places_close(ProxycclPlaces* places);

/* The functions that the library calls, with the signatures of torch.cuda.memory.CUDAPluggableAllocator. */
PROXYCCL_EXPORTED void* proxyccl_place_allocate(ssize_t bytes, int device, void* stream); /* NULL if too large */
PROXYCCL_EXPORTED void proxyccl_place_free(void* ptr, ssize_t bytes, int device, void* stream);
