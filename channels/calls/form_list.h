/* The forms of one call whose arrays may have any first extent, such as experts' calls. A form is found by the kinds of
 * a call's arrays, or prepared by Python. */
#ifndef PROXYCCL_FORM_LIST_H
#define PROXYCCL_FORM_LIST_H

#include "arrays.h"

enum { PROXYCCL_MOST_GIVEN = 6 };
/* The address that stands for an array without elements. Kernels distinguish it from NULL (no array), and never read
 * it. */
enum { PROXYCCL_EMPTY = 64 };

/* One array of a call. If it is None, `kind` is all zeros, and so are the numbers. */
typedef struct ListedArray {
  PyObject* object;  /* as the caller passed it: borrowed */
  GivenArray array;  /* its kind omits the first extent, and everything else in which arrays of one form may differ */
  Py_ssize_t extent; /* the first */
  uintptr_t at;      /* PROXYCCL_EMPTY for an array without elements */
} ListedArray;

/* The base of each type of forms. */
typedef struct ListedForm {
  PyObject ob_base;
  /* Makes a call with arrays of the form's kinds; `further` are the arguments after the arrays. NULL with an exception,
   * or without one if first extents do not fit: then nothing was done, and Python refuses the call. */
  PyObject* (*call)(PyObject* form, const ListedArray* given, PyObject* const* further);
} ListedForm;

extern PyTypeObject* proxyccl_listed_form;

/* Adds the type FormList to the module, and makes the type of ListedForm. 0, or -1 with an exception. */
int proxyccl_add_form_list(PyObject* module);
/* Reads an array of a call, which is not None. 1 with references to release; 0 if C can't read it, or -1 with an
 * exception of the program's. */
int proxyccl_read_listed(const ArrayTypes* types, PyObject* x, ListedArray* array);

#endif
