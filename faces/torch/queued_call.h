/* Declares the types Gpu (a process group's state of a GPU) and QueuedCall (a call that is queued on a stream). A
 * *mark* is an event that marks a point in a stream. See _device_calls.pyi. */
#pragma once

#include "python_objects.h"
#include "stream_order.h"

typedef struct Gpu {
  PyObject ob_base;
  const ProxycclStreamOrder* order;
  PyObject* idle; /* events for reuse */
  PyObject *more, *finish;
  PyObject *owner, *current, *check, *record; /* the Python object of the GPU, and three of its attributes */
} Gpu;

extern PyTypeObject* proxyccl_gpu_type;

/* Adds the types Gpu, StreamMark and QueuedCall to the module. Returns 0, or -1 with an exception. */
int proxyccl_add_queued_call(PyObject* module);
/* Returns a new mark after the work that has been queued on a stream, or NULL with an exception. */
PyObject* proxyccl_mark(Gpu* self, uintptr_t stream);
/* Makes later work on the stream `then` wait for the work that has been queued on `first`. Returns 0, or -1 with an
 * exception. */
int proxyccl_follow(Gpu* self, uintptr_t first, uintptr_t then);
/* Returns a new QueuedCall, or NULL with an exception. */
PyObject* proxyccl_queued_call(Gpu* gpu, PyObject* x, PyObject* out, uintptr_t stream, int captured, int blocks,
                               PyObject* source);
/* Marks the end of a call, which must be the latest work on its stream. Returns a borrowed reference to the mark. If an
 * Exception is raised, stores it in the call and returns NULL without an exception set. */
PyObject* proxyccl_mark_end(PyObject* call);
