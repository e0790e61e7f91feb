/* Memory that another library allocates and frees through two C functions, and that communicators offer to peers.
 *
 * A library's caching allocator calls the two functions with its own lock held, possibly without the GIL. Code that
 * waited for the GIL in such a call could deadlock with a Python thread that waits for the allocator. So no code in
 * this file is Python, and each allocation, called a segment, is only recorded. Python reads the records when it needs
 * them.
 *
 * A communicator that offers a segment to its peers holds it. A segment that the library frees returns to the driver
 * immediately if there is no hold on it, otherwise when the last hold ends.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Exported by name; all other symbols are hidden. */
#define PROXYCCL_EXPORTED extern "C" __attribute__((visibility("default")))

enum { PROXYCCL_POOL_DEVICES = 64 }; /* devices are numbered from 0 */

/* The driver's calls for a device. The driver offers either `allocate` or `allocate_with_flags`. */
typedef struct ProxycclPoolCalls {
  /* cuMemAlloc, proxyccl_host_allocate */
  int (*allocate)(uint64_t* ptr, size_t bytes);
  /* hipExtMallocWithFlags */
  int (*allocate_with_flags)(void** ptr, size_t bytes, unsigned flags);
  unsigned flags;
  /* cuMemFree, hipFree, proxyccl_host_free: waits for the device */
  int (*free)(uintptr_t ptr);
  /* Stores the thread's current context (cuCtxGetCurrent, hipGetDevice); NULL if there is none. */
  int (*current)(uint64_t* context);
  /* cuCtxSetCurrent, hipSetDevice; NULL if there is no context. */
  int (*make_current)(uintptr_t context);
  uint64_t context; /* the device's context */
  /* Exchanges the thread's capture mode (cuThreadExchangeStreamCaptureMode and HIP's); NULL if there is none. */
  int (*exchange_capture_mode)(int* mode);
  int relaxed; /* the capture mode in which allocating is allowed */
} ProxycclPoolCalls;

typedef struct ProxycclSegment {
  uint64_t number; /* unique to this segment; numbers count up from 1 */
  uint64_t ptr;
  uint64_t bytes;
  uint32_t freed; /* 1: the library has freed the segment, and a hold remains */
} ProxycclSegment;

/* Makes a device's segments come from these calls. Returns 0, or -1 if the number is not a device's or the device has
 * other calls. */
int proxyccl_pool_configure(int device, const ProxycclPoolCalls* calls);

/* For the library, by name; the signatures are those of torch.cuda.memory.CUDAPluggableAllocator. `stream` is not used:
 * memory may be used on all streams, and freeing waits for all of them. */
PROXYCCL_EXPORTED void* proxyccl_pool_allocate(ssize_t bytes, int device, void* stream); /* NULL: out of memory */
PROXYCCL_EXPORTED void proxyccl_pool_free(void* ptr, ssize_t bytes, int device, void* stream);

/* Returns the number of changes of a device's segments so far. */
uint64_t proxyccl_pool_changes(int device);
/* Copies the segments, at most `room` of them. Returns how many there are. */
size_t proxyccl_pool_segments(int device, ProxycclSegment* segments, size_t room);
/* Holds a segment: the segment's memory stays allocated even if the library frees it. Returns 0 if the library had
 * freed it before. */
int proxyccl_pool_hold(int device, uint64_t number);
/* Ends a hold. Returns the segment's address if the caller must now free it, else 0. */
uint64_t proxyccl_pool_release(int device, uint64_t number);
