/* Calls that were prepared before, issued from C on the streams of one group. */
#ifndef PROXYCCL_PREPARED_CALLS_H
#define PROXYCCL_PREPARED_CALLS_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <structmember.h>

#include "python_errors.h"

/* For the references of an object: REFERENCES(apply) is apply(member) for each of them. */
#define PROXYCCL_VISIT(member) Py_VISIT(self->member);
#define PROXYCCL_CLEAR(member) Py_CLEAR(self->member);

/* Frees an object of a type that the garbage collector knows, by its tp_clear. */
static inline void proxyccl_free(PyObject* object, inquiry clear) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  clear(object);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

/* proxyccl_calls_issue, proxyccl_calls_ring (calls.h), or a function like them. */
typedef int (*Issue)(void* callers, void* call, void* launch, uintptr_t stream);

typedef struct PreparedCall {
  Issue issue;
  void *callers, *call, *launch; /* its arguments */
  PyObject* kept;                /* what must live as long as these; see PreparedCalls in _prepared_calls.pyi */
} PreparedCall;

/* Adds the type PreparedCalls to the module. 0, or -1 with an exception. */
int proxyccl_add_prepared_calls(PyObject* module);
/* Whether an object is a PreparedCalls; if not, with an exception. */
int proxyccl_require_prepared_calls(PyObject* object);
/* Issues a call on a stream, after the group's earlier ones; NULL: on the stream of the latest call. Returns 1 if it
 * was issued; 0 if nothing was done, as no call can be repeated there now; -1 with an exception. */
int proxyccl_issue_prepared(PyObject* prepared_calls, const PreparedCall* call, PyObject* stream);

#endif
