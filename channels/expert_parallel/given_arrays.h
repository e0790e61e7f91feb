/* The caller's arrays in calls of a layer: whether they are like those of an earlier call, and where they lie. */
#ifndef PROXYCCL_GIVEN_ARRAYS_H
#define PROXYCCL_GIVEN_ARRAYS_H

#include "../prepared_calls.h"

/* An argument's type, element type and place: one that was checked stands for all others of its kind. */
typedef struct Kind {
  PyTypeObject* type; /* NULL: the argument is None */
  int is_torch;
  PyObject* dtype; /* of torch's tensors, with the device's number */
  long device;
  Py_ssize_t itemsize;
  PyObject *kind, *kind_of, *memory; /* of other arrays: `kind`, what returned it, and `memory` of their library */
} Kind;

enum { PROXYCCL_MOST_EXTENTS = 3, PROXYCCL_ANY_EXTENT = -1 };

/* 0, or -1 with an exception. */
int proxyccl_name_attributes(void);
/* Reads a kind from what `describe_kind` (repeated_call.py) returned. 0, or -1 with an exception. */
int proxyccl_read_kind(PyObject* described, Kind* kind);
int proxyccl_visit_kind(const Kind* kind, visitproc visit, void* arg);
void proxyccl_clear_kind(Kind* kind);
/* The address of an array of this kind and shape, whose first extent may be PROXYCCL_ANY_EXTENT and is then stored, and
 * which has `row_bytes` for each entry of that. 0 if it is empty, of another kind or shape, or if only another check
 * can tell. Then perhaps with an exception, if that is the program's own (python_errors.h). */
uintptr_t proxyccl_place(const Kind* kind, PyObject* x, const Py_ssize_t* shape, int dimensions, Py_ssize_t row_bytes,
                         Py_ssize_t* first);
/* The address of an array that was just made like one of this kind; 0 with an exception. */
uintptr_t proxyccl_address(const Kind* kind, PyObject* made, PyObject* address);

#endif
