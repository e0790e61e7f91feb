/* Operations of a stream, issued in order by one call: writes of words, waits for words, copies and launches. */
#pragma once

#include <stdint.h>

#include "launch.h"

/* The values are those of CU_STREAM_MEM_OP_WAIT_VALUE_64 and CU_STREAM_MEM_OP_WRITE_VALUE_64. */
typedef enum {
  PROXYCCL_STREAM_WAIT = 4, /* waits until the word is at least `value` */
  PROXYCCL_STREAM_WRITE = 5 /* writes after all earlier work of the stream, whose stores are visible first */
} ProxycclStreamOperationKind;

/* An operation on a word, laid out as a CUstreamBatchMemOpParams. */
typedef struct ProxycclStreamOperation {
  uint32_t kind; /* ProxycclStreamOperationKind */
  uint32_t reserved0;
  uint64_t address; /* the device address of an aligned 8-byte word */
  uint64_t value;   /* below 2^63, because drivers compare larger values differently */
  uint32_t flags;   /* must be 0 */
  uint32_t reserved1;
  uint64_t reserved2[2];
} ProxycclStreamOperation;

/* A step is one of: operations on words; else a launch; else a copy. A copy from NULL sets all bits, and a copy of
 * memory to itself issues nothing. */
typedef struct ProxycclStreamStep {
  uint32_t words;               /* the number of operations on words, which the steps take in order */
  const ProxycclLaunch* launch; /* a launch in the context that the streams belong to */
  uint64_t dst, src, bytes;     /* device addresses */
} ProxycclStreamStep;

/* The steps, in order, and the driver's functions. A driver has either `batch`, or `write64` and `wait64`. */
typedef struct ProxycclStreamOperations {
  /* cuStreamBatchMemOp, proxyccl_host_stream_operations */
  int (*batch)(void* stream, unsigned count, ProxycclStreamOperation* operations, unsigned flags);
  /* hipStreamWriteValue64 */
  int (*write64)(void* stream, uint64_t* address, uint64_t value, unsigned flags);
  /* hipStreamWaitValue64 */
  int (*wait64)(void* stream, uint64_t* address, uint64_t value, unsigned flags, uint64_t mask);
  /* cuMemcpyAsync, hipMemcpyDtoDAsync, proxyccl_host_copy */
  int (*copy)(uint64_t dst, uint64_t src, size_t bytes, void* stream);
  /* cuMemsetD8Async, hipMemsetD8Async, proxyccl_host_set */
  int (*set)(uint64_t dst, int value, size_t bytes, void* stream);
  /* cuStreamGetCaptureInfo_v2, hipStreamGetCaptureInfo_v2; NULL if there are no graphs */
  int (*capture_info)(void* stream, int* status, uint64_t* id, void*, void*, void*);
  /* Stores the calling thread's current context (cuCtxGetCurrent, hipGetDevice); NULL on the host. */
  int (*current)(uint64_t* context);
  uint64_t context; /* the context that the streams belong to */
  ProxycclStreamOperation* words;
  const ProxycclStreamStep* steps;
  uint32_t count;    /* number of steps */
  uint32_t captured; /* 1 if a graph contains the steps and may run them at any time */
  const ProxycclSleepers* const*
      wakes; /* NULL-terminated list of the sleepers of the proxies that the steps notify; or NULL */
} ProxycclStreamOperations;

static inline int proxyccl_stream_issue_words(const ProxycclStreamOperations* self, ProxycclStreamOperation* words,
                                              uint32_t count, void* stream) {
  if (self->batch != 0) return self->batch(stream, count, words, 0);
  for (uint32_t i = 0; i < count; ++i) {
    uint64_t* address = (uint64_t*)(uintptr_t)words[i].address;
    const int status = words[i].kind == PROXYCCL_STREAM_WRITE ? self->write64(stream, address, words[i].value, 0)
                                                              : self->wait64(stream, address, words[i].value, 0, ~0ull);
    if (status != 0) return status;
  }
  return 0;
}

/* Issues the steps. Returns the first driver status that is not 0. After a step that the driver refuses, later steps
 * are still issued, because a stream that has started a schedule of the proxy must also wait for the schedule. */
static inline int proxyccl_stream_issue_current(ProxycclStreamOperations* self, uintptr_t stream) {
  ProxycclStreamOperation* words = self->words;
  int first = 0, capturing = 0;
  if (self->capture_info != 0 && self->capture_info((void*)stream, &capturing, 0, 0, 0, 0) == 0 && capturing != 0)
    self->captured = 1;
  proxyccl_wake_all(self->wakes);
  for (uint32_t i = 0; i < self->count; ++i) {
    const ProxycclStreamStep* step = &self->steps[i];
    int status;
    if (step->words != 0)
      status = proxyccl_stream_issue_words(self, words, step->words, (void*)stream);
    else if (step->launch != 0)
      status = proxyccl_launch_current(step->launch, stream);
    else if (step->bytes == 0 || step->dst == step->src)
      status = 0;
    else if (step->src != 0)
      status = self->copy(step->dst, step->src, step->bytes, (void*)stream);
    else
      status = self->set(step->dst, 0xff, step->bytes, (void*)stream);
    words += step->words;
    if (first == 0) first = status;
  }
  return first;
}

/* Issues the steps and returns the driver's status. Does nothing and returns PROXYCCL_OTHER_CONTEXT if
 * another context is current. */
static inline int proxyccl_stream_issue(ProxycclStreamOperations* self, uintptr_t stream) {
  if (!proxyccl_is_current(self->current, self->context)) return PROXYCCL_OTHER_CONTEXT;
  return proxyccl_stream_issue_current(self, stream);
}
