/* The caller's arrays in calls of a layer: whether they are of a form's kinds, and where they lie. */
#ifndef PROXYCCL_GIVEN_ARRAYS_H
#define PROXYCCL_GIVEN_ARRAYS_H

#include "../calls/calls.h"

/* An argument's type, element type and place: one that was checked when the form was prepared stands for all others of
 * its kind. */
typedef struct Kind {
  PyTypeObject* type; /* NULL: the argument is None */
  int is_torch;
  PyObject* dtype; /* of torch's tensors, with the device's number */
  long device;
  Py_ssize_t itemsize;
  PyObject *kind, *kind_of, *memory; /* of other arrays: `kind`, what returned it, and `memory` of their library */
  PyObject* check;                   /* check(x, shape) returns an address and the first extent, or refuses the array */
} Kind;

enum { PROXYCCL_MOST_EXTENTS = 3, PROXYCCL_ANY_EXTENT = -1 };
/* The address of an array without elements. Kernels tell it from none (NULL), and never read it. */
enum { PROXYCCL_EMPTY = 64 };

/* 0, or -1 with an exception. */
int proxyccl_name_attributes(void);
/* Reads a kind from what `describe_kind` (call_form.py) returned. 0, or -1 with an exception. */
int proxyccl_read_kind(PyObject* described, Kind* kind);
int proxyccl_visit_kind(const Kind* kind, visitproc visit, void* arg);
void proxyccl_clear_kind(Kind* kind);
/* Whether an argument is of a kind. It looks at neither shape nor memory. -1 with an exception, which is then the
 * program's own (python_errors.h). */
int proxyccl_is_of_kind(const Kind* kind, PyObject* x);
/* The address of an array of this kind and shape, as below; 0 where only `check` can tell, perhaps with an exception of
 * the program's. */
uintptr_t proxyccl_find(const Kind* kind, PyObject* x, const Py_ssize_t* shape, int dimensions, Py_ssize_t row_bytes);
/* Stores the address of an array of this kind; NULL for None. It must have a shape, whose first extent may be
 * PROXYCCL_ANY_EXTENT and is then stored, and `row_bytes` for each entry of that. `check` decides about an array of
 * another shape, and one whose memory can't be found here. 0, or -1 with an exception. */
int proxyccl_place(const Kind* kind, PyObject* x, const Py_ssize_t* shape, int dimensions, Py_ssize_t row_bytes,
                   Py_ssize_t* first, uintptr_t* at);
/* Stores the address of an array that was just made, by the library of this kind's arrays; one of no bytes may have
 * none. 0, or -1 with an exception. */
int proxyccl_address(const Kind* kind, PyObject* made, PyObject* address, Py_ssize_t nbytes, uintptr_t* at);

#endif
