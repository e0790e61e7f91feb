#include "given_arrays.h"

#include <string.h>

enum { SHAPE, DTYPE, DEVICE, CONTIGUOUS, NEGATIVE, CONJUGATE, OFFSET, STORAGE, BYTES, ADDRESS, NAMES };
static const char* const kNames[NAMES] = {"shape",   "dtype",          "get_device",      "is_contiguous", "is_neg",
                                          "is_conj", "storage_offset", "untyped_storage", "nbytes",        "data_ptr"};
static PyObject* names[NAMES]; /* of the process's one module */

int proxyccl_name_attributes(void) {
  for (int i = 0; i < NAMES; ++i)
    if (names[i] == NULL && (names[i] = PyUnicode_InternFromString(kNames[i])) == NULL) return -1;
  return 0;
}

int proxyccl_read_kind(PyObject* described, Kind* kind) {
  memset(kind, 0, sizeof *kind);
  if (described == Py_None) return 0;
  PyObject *type, *dtype, *known, *kind_of, *memory, *check;
  if (!PyArg_ParseTuple(described, "O!pOlnOOOO", &PyType_Type, &type, &kind->is_torch, &dtype, &kind->device,
                        &kind->itemsize, &known, &kind_of, &memory, &check))
    return -1;
  kind->type = (PyTypeObject*)Py_NewRef(type), kind->dtype = Py_NewRef(dtype), kind->kind = Py_NewRef(known);
  kind->kind_of = Py_NewRef(kind_of), kind->memory = Py_NewRef(memory), kind->check = Py_NewRef(check);
  return 0;
}

#define REFERENCES(apply) apply(type) apply(dtype) apply(kind) apply(kind_of) apply(memory) apply(check)

int proxyccl_visit_kind(const Kind* self, visitproc visit, void* arg) {
  REFERENCES(PROXYCCL_VISIT)
  return 0;
}

void proxyccl_clear_kind(Kind* self) { REFERENCES(PROXYCCL_CLEAR) }

/* A number that a method of an array returns; -1 with an exception. */
static Py_ssize_t number_of(PyObject* x, int name) {
  PyObject* found = PyObject_CallMethodObjArgs(x, names[name], NULL);
  if (found == NULL) return -1;
  const Py_ssize_t number = PyLong_AsSsize_t(found);
  Py_DECREF(found);
  return number;
}

static int answers(PyObject* x, int name, PyObject* expected) {
  PyObject* found = PyObject_CallMethodObjArgs(x, names[name], NULL);
  Py_XDECREF(found); /* True and False are never freed */
  return found == expected;
}

static int has_shape(PyObject* x, const Py_ssize_t* shape, int dimensions, Py_ssize_t* first) {
  PyObject* given = PyObject_GetAttr(x, names[SHAPE]);
  int fits = given != NULL && PyTuple_Check(given) && PyTuple_Size(given) == dimensions;
  for (int i = 0; fits && i < dimensions; ++i) {
    const Py_ssize_t extent = PyLong_AsSsize_t(PyTuple_GetItem(given, i)); /* an error for a symbol */
    if (i == 0) *first = extent;
    fits = i == 0 && shape[0] == PROXYCCL_ANY_EXTENT ? extent >= 0 : extent == shape[i];
  }
  Py_XDECREF(given);
  return fits;
}

static int has_kind(const Kind* kind, PyObject* x) {
  if (!kind->is_torch) {
    PyObject* found = PyObject_CallFunctionObjArgs(kind->kind_of, x, NULL);
    const int same = found != NULL && PyObject_RichCompareBool(found, kind->kind, Py_EQ) > 0;
    Py_XDECREF(found);
    return same;
  }
  PyObject* dtype = PyObject_GetAttr(x, names[DTYPE]);
  Py_XDECREF(dtype); /* torch's types are never freed */
  if (dtype != kind->dtype) return 0;
  const Py_ssize_t device = number_of(x, DEVICE); /* -1 is the host's */
  return device == kind->device && (device != -1 || PyErr_Occurred() == NULL);
}

/* `libraries[type].memory`, here for torch. */
static uintptr_t memory_of(const Kind* kind, PyObject* x, Py_ssize_t nbytes) {
  if (!kind->is_torch) {
    PyObject* found = PyObject_CallFunction(kind->memory, "On", x, nbytes);
    const uintptr_t at = found == NULL ? 0 : (uintptr_t)PyLong_AsUnsignedLongLong(found);
    Py_XDECREF(found);
    return PyErr_Occurred() == NULL ? at : 0;
  }
  if (!answers(x, CONTIGUOUS, Py_True) || !answers(x, NEGATIVE, Py_False) || !answers(x, CONJUGATE, Py_False)) return 0;
  /* Not by its address alone: a view of a storage that was freed has its offset as address. */
  const Py_ssize_t offset = number_of(x, OFFSET);
  PyObject* storage = offset < 0 ? NULL : PyObject_CallMethodObjArgs(x, names[STORAGE], NULL);
  const Py_ssize_t held = storage == NULL ? -1 : number_of(storage, BYTES);
  Py_XDECREF(storage);
  if (held < offset * kind->itemsize + nbytes) return 0;
  PyObject* address = PyObject_CallMethodObjArgs(x, names[ADDRESS], NULL);
  const uintptr_t at = address == NULL ? 0 : (uintptr_t)PyLong_AsUnsignedLongLong(address);
  Py_XDECREF(address);
  return PyErr_Occurred() != NULL || at % (uintptr_t)kind->itemsize != 0 ? 0 : at;
}

int proxyccl_is_of_kind(const Kind* kind, PyObject* x) {
  if (kind->type == NULL) return x == Py_None;
  if (Py_TYPE(x) != kind->type) return 0;
  const int same = has_kind(kind, x);
  return same ? 1 : proxyccl_clear_exception();
}

/* The address by `check`. */
static int check(const Kind* kind, PyObject* x, const Py_ssize_t* shape, int dimensions, Py_ssize_t* first,
                 uintptr_t* at) {
  PyObject* expected = PyTuple_New(dimensions);
  for (int i = 0; expected != NULL && i < dimensions; ++i) {
    PyObject* extent = PyLong_FromSsize_t(shape[i]);
    if (extent == NULL || PyTuple_SetItem(expected, i, extent) != 0) Py_CLEAR(expected);
  }
  PyObject* found = expected == NULL ? NULL : PyObject_CallFunctionObjArgs(kind->check, x, expected, NULL);
  unsigned long long address = 0;
  const int parsed = found != NULL && PyArg_ParseTuple(found, "Kn", &address, first);
  Py_XDECREF(expected);
  Py_XDECREF(found);
  *at = (uintptr_t)address;
  return parsed ? 0 : -1;
}

static uintptr_t find(const Kind* kind, PyObject* x, const Py_ssize_t* shape, int dimensions, Py_ssize_t row_bytes,
                      Py_ssize_t* first) {
  uintptr_t at = 0;
  if (has_shape(x, shape, dimensions, first))
    at = *first * row_bytes == 0 ? PROXYCCL_EMPTY : memory_of(kind, x, *first * row_bytes);
  if (at == 0) (void)proxyccl_clear_exception();
  return at;
}

uintptr_t proxyccl_find(const Kind* kind, PyObject* x, const Py_ssize_t* shape, int dimensions, Py_ssize_t row_bytes) {
  Py_ssize_t first = 0;
  return find(kind, x, shape, dimensions, row_bytes, &first);
}

int proxyccl_place(const Kind* kind, PyObject* x, const Py_ssize_t* shape, int dimensions, Py_ssize_t row_bytes,
                   Py_ssize_t* first, uintptr_t* at) {
  Py_ssize_t extent = 0;
  *at = 0;
  if (kind->type != NULL) {
    *at = find(kind, x, shape, dimensions, row_bytes, &extent);
    if (*at == 0 && (PyErr_Occurred() != NULL || check(kind, x, shape, dimensions, &extent, at) != 0)) return -1;
  }
  if (first != NULL) *first = extent;
  return 0;
}

int proxyccl_address(const Kind* kind, PyObject* made, PyObject* address, Py_ssize_t nbytes, uintptr_t* at) {
  PyObject* found = kind->is_torch ? PyObject_CallMethodObjArgs(made, names[ADDRESS], NULL)
                                   : PyObject_CallFunctionObjArgs(address, made, NULL);
  *at = found == NULL ? 0 : (uintptr_t)PyLong_AsUnsignedLongLong(found);
  Py_XDECREF(found);
  if (*at == 0 && nbytes != 0 && PyErr_Occurred() == NULL)
    PyErr_SetString(PyExc_MemoryError, "a new array has no memory");
  return PyErr_Occurred() == NULL ? 0 : -1;
}
