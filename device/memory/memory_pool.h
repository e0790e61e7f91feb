/* Memory that another library, such as torch, allocates and frees through two C functions, and that communicators share
 * with peers.
 *
 * A library's caching allocator calls the two functions with its own lock held, possibly without the GIL. If these
 * functions waited for the GIL, they could deadlock with a Python thread that waits for the allocator. So they use no
 * Python: they record each allocation, called a segment, and Python reads the records later.
 *
 * A communicator that shares a segment with peers holds the segment. When the library frees a segment, its memory is
 * freed if there is no hold, otherwise when the last hold ends.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* PROXYCCL_EXPORTED symbols are visible; all others are hidden. */
#define PROXYCCL_EXPORTED extern "C" __attribute__((visibility("default")))

enum { PROXYCCL_POOL_DEVICES = 64 }; /* device numbers are below this */

/* The driver's calls for a device. The driver offers either `allocate` or `allocate_with_flags`. */
typedef struct ProxycclPoolCalls {
  /* cuMemAlloc, proxyccl_host_allocate */
  int (*allocate)(uint64_t* ptr, size_t bytes);
  /* hipExtMallocWithFlags */
  int (*allocate_with_flags)(void** ptr, size_t bytes, unsigned flags);
  unsigned flags;
  /* cuMemFree, hipFree, proxyccl_host_free: waits for the device */
  int (*free)(uintptr_t ptr);
  /* Stores the calling thread's current context (cuCtxGetCurrent, hipGetDevice); NULL on the host. */
  int (*current)(uint64_t* context);
  /* cuCtxSetCurrent, hipSetDevice; NULL on the host */
  int (*make_current)(uintptr_t context);
  uint64_t context; /* the device's context */
  /* cuThreadExchangeStreamCaptureMode, hipThreadExchangeStreamCaptureMode; NULL on the host */
  int (*exchange_capture_mode)(int* mode);
  int relaxed; /* the capture mode in which allocating is allowed */
} ProxycclPoolCalls;

typedef struct ProxycclSegment {
  uint64_t number; /* from 1 on, never reused */
  uint64_t ptr;
  uint64_t bytes;
  uint32_t freed; /* 1 if the library has freed the segment, but a hold remains */
} ProxycclSegment;

/* Sets the driver's calls for a device. Returns 0, or -1 if the device's number is too large or the device's calls were
 * already set to different ones. */
int proxyccl_pool_configure(int device, const ProxycclPoolCalls* calls);

/* The functions that the library calls, with the signatures of torch.cuda.memory.CUDAPluggableAllocator. `stream` is
 * ignored, because freeing waits for all streams. */
PROXYCCL_EXPORTED void* proxyccl_pool_allocate(ssize_t bytes, int device, void* stream); /* or NULL */
PROXYCCL_EXPORTED void proxyccl_pool_free(void* ptr, ssize_t bytes, int device, void* stream);

/* Returns a number that grows with every change of a device's segments. */
uint64_t proxyccl_pool_changes(int device);
/* Copies at most `room` segments. Returns the number of all segments. */
size_t proxyccl_pool_segments(int device, ProxycclSegment* segments, size_t room);
/* Holds a segment, so that its memory stays allocated even if the library frees the segment. Returns 0, without a hold,
 * if the library has already freed the segment. */
int proxyccl_pool_hold(int device, uint64_t number);
/* Ends a hold. Returns the segment's address if the caller must now free it, else 0. */
uint64_t proxyccl_pool_release(int device, uint64_t number);
