/* The list of the forms of one kind of call, such as an experts' dispatch, whose arrays may have any first extent. A
 * form is found by the kinds of a call's arrays; if there is none, Python prepares it. */
#ifndef PROXYCCL_FORM_LIST_H
#define PROXYCCL_FORM_LIST_H

#include "arrays.h"

enum { PROXYCCL_MOST_GIVEN = 6 };
/* The address that stands for an array without elements. Kernels distinguish it from NULL (no array), and never read
 * it. */
enum { PROXYCCL_EMPTY = 64 };

/* One array of a call. For None, `kind` and all numbers are zeros. */
typedef struct ListedArray {
  PyObject* object;  /* a borrowed reference to the caller's object */
  GivenArray array;  /* the array's kind without the properties in which arrays of one form may differ */
  Py_ssize_t extent; /* the first extent */
  uintptr_t at;      /* PROXYCCL_EMPTY for an array without elements */
} ListedArray;

/* The base type of forms that are kept in a list. */
typedef struct ListedForm {
  PyObject ob_base;
  /* Makes a call with arrays of the form's kinds; `further` are the arguments after the arrays. Returns NULL with an
   * exception, or NULL without an exception if the arrays' first extents do not match; then the call had no effect, and
   * Python raises the error. */
  PyObject* (*call)(PyObject* form, const ListedArray* given, PyObject* const* further);
} ListedForm;

extern PyTypeObject* proxyccl_listed_form;

/* Adds the type FormList to the module, and makes the type of ListedForm. Returns 0, or -1 with an exception. */
int proxyccl_add_form_list(PyObject* module);
/* Reads an array of a call, which is not None. Returns 1 with references to release; 0 if C can't read the array, or -1
 * with an exception that the program raised. */
int proxyccl_read_listed(const ArrayTypes* types, PyObject* x, ListedArray* array);

#endif
