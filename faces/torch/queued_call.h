/* A call that is queued on a stream of a GPU: what its Work needs, made in few steps. */
#ifndef PROXYCCL_TORCH_QUEUED_CALL_H
#define PROXYCCL_TORCH_QUEUED_CALL_H

#include "on_gpu.h"

/* Adds the type to the module. 0, or -1 with an exception. */
int proxyccl_add_queued_call(PyObject* module);
/* See QueuedCall in _device_calls.pyi. NULL with an exception. */
PyObject* proxyccl_queued_call(Gpu* gpu, PyObject* x, PyObject* out, uintptr_t stream, int keeps, int blocks,
                               PyObject* source);
/* Marks the end of a call, of whose stream nothing was asked since. The mark is borrowed; NULL without an exception if
 * that failed, which is then the call's error. */
PyObject* proxyccl_mark_end(PyObject* call);

#endif
