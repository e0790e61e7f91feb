/* The state of a GPU for one process group's calls, and a call that is queued on a stream of the GPU, with what the
   call's Work needs. Events mark points in streams. See _device_calls.pyi. */
#ifndef PROXYCCL_TORCH_QUEUED_CALL_H
#define PROXYCCL_TORCH_QUEUED_CALL_H

#include "python_objects.h"
#include "stream_order.h"

typedef struct Gpu {
  PyObject ob_base;
  const ProxycclStreamOrder* order;
  PyObject* idle; /* events for reuse */
  PyObject *more, *finish;
  PyObject *owner, *current, *check, *record; /* the owner, and the owner's attributes of these names */
} Gpu;

/* The type Gpu, made once for the process. */
extern PyTypeObject* proxyccl_gpu_type;

/* Makes a type, once for the process, and adds it to the module. Returns 0, or -1 with an
   exception. */
int proxyccl_add_type(PyObject* module, PyTypeObject** type, PyType_Spec* spec, const char* name);
/* Adds the types Gpu, StreamMark and QueuedCall to the module. Returns 0, or -1 with an exception. */
int proxyccl_add_queued_call(PyObject* module);
/* Marks a stream's current end. Returns NULL with an exception. */
PyObject* proxyccl_mark(Gpu* self, uintptr_t stream);
/* Makes later work of `then` wait for work queued on `first`. Returns 0, or -1 with an exception. */
int proxyccl_follow(Gpu* self, uintptr_t first, uintptr_t then);
/* Makes a QueuedCall. Returns NULL with an exception. */
PyObject* proxyccl_queued_call(Gpu* gpu, PyObject* x, PyObject* out, uintptr_t stream, int keeps, int blocks,
                               PyObject* source);
/* Marks the end of a call, on whose stream nothing was queued since. Returns a borrowed mark. If marking failed,
   returns NULL without an exception, and the call keeps the error. */
PyObject* proxyccl_mark_end(PyObject* call);

#endif
