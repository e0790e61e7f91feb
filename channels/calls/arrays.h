/* Reads the arrays of a call, which are Python objects of several libraries: their memory and their kinds. */
#ifndef PROXYCCL_ARRAYS_H
#define PROXYCCL_ARRAYS_H

#include "python_objects.h"

enum { PROXYCCL_MOST_DIMENSIONS = 8, PROXYCCL_LONGEST_FORMAT = 8 };

/* The types that `proxyccl_read_array` takes, in addition to types that support the buffer protocol. */
typedef struct ArrayTypes {
  PyTypeObject *array, *view; /* Array and ArrayView (device/arrays) */
  PyObject* place;            /* the `device` that views must have */
  PyObject* tensors;          /* a dict: from a type of torch's tensors to the capsule of its DLPack functions */
  Py_ssize_t device;          /* the number of the tensors' GPU; -1 for the CPU */
} ArrayTypes;

/* The properties of an array on which a form depends. The struct has no padding, because memcmp compares kinds. */
typedef struct ArrayKind {
  PyTypeObject* type;
  PyObject* element; /* the dtype of an Array, an ArrayView or a tensor of integers below 8 bits; or NULL */
  PyObject* runtime; /* the runtime of an Array; NULL for other arrays */
  Py_ssize_t dimensions, shape[PROXYCCL_MOST_DIMENSIONS];
  uint32_t alignment; /* the address modulo 16 */
  uint16_t readonly;
  uint16_t reach;                       /* how peers can access the array (reach.h) */
  char format[PROXYCCL_LONGEST_FORMAT]; /* a buffer's format or DLPack's type, padded with zeros */
} ArrayKind;

typedef struct GivenArray {
  ArrayKind kind;
  uintptr_t at;
  size_t bytes;
  Py_buffer buffer; /* held until `proxyccl_release_array`; `obj` is NULL for arrays without buffers */
} GivenArray;

/* Take or drop the references that a kept kind holds. */
static inline void proxyccl_keep_kind(const ArrayKind* kind) {
  Py_XINCREF((PyObject*)kind->type);
  Py_XINCREF(kind->element);
  Py_XINCREF(kind->runtime);
}
static inline void proxyccl_drop_kind(const ArrayKind* kind) {
  Py_XDECREF((PyObject*)kind->type);
  Py_XDECREF(kind->element);
  Py_XDECREF(kind->runtime);
}
#define PROXYCCL_VISIT_KIND(kind)   \
  Py_VISIT((PyObject*)(kind).type); \
  Py_VISIT((kind).element);         \
  Py_VISIT((kind).runtime);

/* Releases a Python number, and returns it as an address or a handle. Returns 0 with an exception if `number` is NULL
 * or not such a number. */
static inline uintptr_t proxyccl_take_address(PyObject* number) {
  const uintptr_t value = number == NULL ? 0 : (uintptr_t)PyLong_AsUnsignedLongLong(number);
  Py_XDECREF(number);
  return PyErr_Occurred() != NULL ? 0 : value;
}
/* Returns 0, or -1 with an exception. */
int proxyccl_name_array_attributes(void);
/* A converter for PyArg_ParseTuple: reads the tuple of `array_types` (launches.py) into an ArrayTypes, which borrows
 * the tuple's references. */
int proxyccl_as_array_types(PyObject* given, void* types);
/* Reads a C-contiguous array. Returns 1 with references to release; 0 if C can't read the array, so that `as_view` must
 * read or refuse it; or -1 with an exception that the program raised (python_errors.h).
 */
int proxyccl_read_array(const ArrayTypes* types, PyObject* x, GivenArray* array);
void proxyccl_release_array(GivenArray* array);

#endif
