/* Includes CPython's limited API, for extensions that do not use cffi. */
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#include "python_errors.h"

/* For tp_traverse and tp_clear: a type defines REFERENCES(apply), which applies one of these macros to each member that
 * is a reference. */
#define PROXYCCL_VISIT(member) Py_VISIT(self->member);
#define PROXYCCL_CLEAR(member) Py_CLEAR(self->member);

/* Implements tp_dealloc of a type with garbage collection. `clear` releases all references and resources. */
static inline void proxyccl_free(PyObject* object, inquiry clear) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  clear(object);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

/* Defines name_traverse, which visits REFERENCES, and name_clear, which releases them. */
#define PROXYCCL_COLLECT(name, Type, REFERENCES)                             \
  static int name##_traverse(PyObject* object, visitproc visit, void* arg) { \
    Type* self = (Type*)object;                                              \
    Py_VISIT(Py_TYPE(object));                                               \
    REFERENCES(PROXYCCL_VISIT)                                               \
    return 0;                                                                \
  }                                                                          \
  static int name##_clear(PyObject* object) {                                \
    Type* self = (Type*)object;                                              \
    REFERENCES(PROXYCCL_CLEAR)                                               \
    return 0;                                                                \
  }

/* Also defines name_end: tp_dealloc of a type that owns nothing else. */
#define PROXYCCL_COLLECT_ALL(name, Type, REFERENCES) \
  PROXYCCL_COLLECT(name, Type, REFERENCES)           \
  static void name##_end(PyObject* object) { proxyccl_free(object, name##_clear); }

/* Adds a type to a module, under the last part of `name`. Makes the type first if `*type` is NULL, so that there is one
 * type per process. `base` is NULL if the type has no other base than object. `flags` are added to Py_TPFLAGS_DEFAULT.
 * Returns 0, or -1 with an exception set. */
static inline int proxyccl_add_type(PyObject* module, PyTypeObject** type, PyTypeObject* base, const char* name,
                                    size_t size, unsigned long flags, PyType_Slot* slots) {
  PyType_Spec spec = {name, (int)size, 0, (unsigned)(Py_TPFLAGS_DEFAULT | flags), slots};
  if (*type == NULL) *type = (PyTypeObject*)PyType_FromSpecWithBases(&spec, (PyObject*)base);
  return *type == NULL ? -1 : PyModule_AddObjectRef(module, strrchr(name, '.') + 1, (PyObject*)*type);
}

/* Returns 1 if a call has `wanted` arguments; otherwise sets a TypeError, whose text begins with `call`, and returns
 * 0. */
static inline int proxyccl_has_arguments(Py_ssize_t count, Py_ssize_t wanted, const char* call) {
  if (count == wanted) return 1;
  PyErr_Format(PyExc_TypeError, "%s takes %zd arguments", call, wanted);
  return 0;
}
