/* A GPU as one process group's calls use it: torch's current stream there, and points in streams that events mark. */
#ifndef PROXYCCL_TORCH_ON_GPU_H
#define PROXYCCL_TORCH_ON_GPU_H

#include "python_objects.h"
#include "stream_order.h"

typedef struct Gpu {
  PyObject ob_base;
  const ProxycclStreamOrder* order;
  PyObject* idle; /* events that nothing uses */
  PyObject *more, *finish;
  PyObject *owner, *current, *check, *record; /* of the owner */
} Gpu;

/* The point in a stream that an event marks. The event is used again when the mark is freed. */
typedef struct StreamMark {
  PyObject ob_base;
  Gpu* gpu;
  uintptr_t event;
} StreamMark;

/* The type Gpu, of the process's one module. */
extern PyTypeObject* proxyccl_gpu_type;

/* Adds the types to the module. 0, or -1 with an exception. */
int proxyccl_add_gpu_types(PyObject* module);
/* Marks a stream's current end. NULL with an exception. */
PyObject* proxyccl_mark(Gpu* self, uintptr_t stream);
/* Makes later work of `then` wait for work queued on `first`. 0, or -1 with an exception. */
int proxyccl_follow(Gpu* self, uintptr_t first, uintptr_t then);
/* Makes later work of torch's current stream wait for a mark. 0, or -1 with an exception. */
int proxyccl_hold_current(Gpu* self, PyObject* mark);

#endif
