/* CPython's limited API, as the extensions that are written by hand use it. */
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <structmember.h>

#include "python_errors.h"

/* Visits the references of an object: REFERENCES(apply) expands to apply(member) for each reference. */
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

/* Whether a call has this many arguments; sets an exception if not. `call` is the call's signature. */
static inline int proxyccl_has_arguments(Py_ssize_t count, Py_ssize_t wanted, const char* call) {
  if (count == wanted) return 1;
  PyErr_Format(PyExc_TypeError, "%s takes %zd arguments", call, wanted);
  return 0;
}
