/* Orders streams by events, with direct calls of the driver's functions. */
#pragma once

#include <stdint.h>

#include "launch.h"

enum { /* status codes of CUDA and HIP */
       PROXYCCL_NOT_READY = 600,
       PROXYCCL_CAPTURE_IMPLICIT = 906 /* status of the legacy default stream while a blocking stream is captured */
};

typedef struct ProxycclStreamOrder {
  int (*record)(void* event, void* stream);               /* cuEventRecord, hipEventRecord */
  int (*wait)(void* stream, void* event, unsigned flags); /* cuStreamWaitEvent, hipStreamWaitEvent */
  int (*query)(void* event);                              /* cuEventQuery, hipEventQuery */
  /* cuStreamGetCaptureInfo_v2, hipStreamGetCaptureInfo_v2; NULL on the host */
  int (*capture_info)(void* stream, int* status, uint64_t* id, void*, void*, void*);
  int (*exchange_capture_mode)(int* mode); /* cuThreadExchangeStreamCaptureMode, hip's */
  int (*current)(uint64_t* context);       /* cuCtxGetCurrent, hipGetDevice; NULL on the host */
  int relaxed;                             /* the capture mode that allows queries of events */
  uint64_t context;                        /* the context that the streams and events belong to */
} ProxycclStreamOrder;

/* Whether the streams' context is current, on which the meaning of a default stream's handle depends. */
static inline int proxyccl_order_is_current(const ProxycclStreamOrder* self) {
  return proxyccl_is_current(self->current, self->context);
}

/* Stores the number of the capture that records the stream's work into a graph; 0 if the stream is not captured. Each
 * capture of the process has a different number. Returns the driver's status. */
static inline int proxyccl_stream_find_capture(const ProxycclStreamOrder* self, uintptr_t stream, uint64_t* capture) {
  int captures = 0;
  *capture = UINT64_MAX; /* the result if the driver gives no number */
  const int status =
      self->capture_info == NULL ? 0 : self->capture_info((void*)stream, &captures, capture, NULL, NULL, NULL);
  if (status == PROXYCCL_CAPTURE_IMPLICIT) return 0;
  if (captures == 0) *capture = 0;
  return status;
}

/* Returns the number of the stream's capture; 0 if the stream is not captured or the driver reports an error. */
static inline uint64_t proxyccl_stream_capture(const ProxycclStreamOrder* self, uintptr_t stream) {
  uint64_t capture;
  return proxyccl_stream_find_capture(self, stream, &capture) == 0 ? capture : 0;
}

/* Stores the number of the stream's capture. Returns the driver's status; does nothing and returns
 * PROXYCCL_OTHER_CONTEXT if another context is current. */
static inline int proxyccl_stream_ask_capture(const ProxycclStreamOrder* self, uintptr_t stream, uint64_t* capture) {
  return proxyccl_order_is_current(self) ? proxyccl_stream_find_capture(self, stream, capture) : PROXYCCL_OTHER_CONTEXT;
}

/* Records an event on a stream. This function and the next two return the driver's status; they do nothing and return
 * PROXYCCL_OTHER_CONTEXT if another context is current. */
static inline int proxyccl_stream_mark(const ProxycclStreamOrder* self, uintptr_t event, uintptr_t stream) {
  return proxyccl_order_is_current(self) ? self->record((void*)event, (void*)stream) : PROXYCCL_OTHER_CONTEXT;
}

static inline int proxyccl_stream_wait(const ProxycclStreamOrder* self, uintptr_t stream, uintptr_t event) {
  return proxyccl_order_is_current(self) ? self->wait((void*)stream, (void*)event, 0) : PROXYCCL_OTHER_CONTEXT;
}

/* Makes later work of stream `then` wait for the work queued so far on stream `first`. Nothing else may use `event`
 * during the call. With `alike`, does nothing if a capture records only one of the streams. */
static inline int proxyccl_stream_follow(const ProxycclStreamOrder* self, uintptr_t event, uintptr_t first,
                                         uintptr_t then, int alike) {
  if (!proxyccl_order_is_current(self)) return PROXYCCL_OTHER_CONTEXT;
  if (alike && proxyccl_stream_capture(self, then) != proxyccl_stream_capture(self, first)) return 0;
  const int status = self->record((void*)event, (void*)first);
  return status != 0 ? status : self->wait((void*)then, (void*)event, 0);
}

/* Returns the driver's status, which is 0 if the work before the event is done. The query does not break captures. */
static inline int proxyccl_event_query(const ProxycclStreamOrder* self, uintptr_t event) {
  int mode = self->relaxed;
  const int exchanged = self->exchange_capture_mode(&mode);
  if (exchanged != 0) return exchanged;
  const int status = self->query((void*)event);
  self->exchange_capture_mode(&mode);
  return status;
}
