/* A GPU as one process group's calls use it, and a call that is queued on a stream there: what its Work needs, made in
 * few steps. Points in streams are marked by events. See _device_calls.pyi. */
#ifndef PROXYCCL_TORCH_QUEUED_CALL_H
#define PROXYCCL_TORCH_QUEUED_CALL_H

#include "python_objects.h"
#include "stream_order.h"

typedef struct Gpu {
  PyObject ob_base;
  const ProxycclStreamOrder* order;
  PyObject* idle; /* events that nothing uses */
  PyObject *more, *finish;
  PyObject *owner, *current, *check, *record; /* of the owner */
} Gpu;

/* The type Gpu, of the process's one module. */
extern PyTypeObject* proxyccl_gpu_type;

/* Makes a type of the process's one module unless it was made, and adds it. 0, or -1 with an exception. */
int proxyccl_add_type(PyObject* module, PyTypeObject** type, PyType_Spec* spec, const char* name);
/* Adds the types Gpu, StreamMark and QueuedCall to the module. 0, or -1 with an exception. */
int proxyccl_add_queued_call(PyObject* module);
/* Marks a stream's current end. NULL with an exception. */
PyObject* proxyccl_mark(Gpu* self, uintptr_t stream);
/* Makes later work of `then` wait for work queued on `first`. 0, or -1 with an exception. */
int proxyccl_follow(Gpu* self, uintptr_t first, uintptr_t then);
/* Makes a QueuedCall. NULL with an exception. */
PyObject* proxyccl_queued_call(Gpu* gpu, PyObject* x, PyObject* out, uintptr_t stream, int keeps, int blocks,
                               PyObject* source);
/* Marks the end of a call, of whose stream nothing was asked since. The mark is borrowed; NULL without an exception if
 * that failed, which is then the call's error. */
PyObject* proxyccl_mark_end(PyObject* call);

#endif
