/* A list of the prepared forms of one function, such as an experts' dispatch. The first dimension of the function's
 * arrays may have any extent. A form is found by the kinds of a call's arrays; if no form is listed for these kinds,
 * Python prepares a form. */
#ifndef PROXYCCL_FORM_LIST_H
#define PROXYCCL_FORM_LIST_H

#include "arrays.h"

enum { PROXYCCL_MOST_GIVEN = 6 };
/* The address of every array without elements; kernels never read from it. NULL means that there is no array. */
enum { PROXYCCL_EMPTY = 64 };

/* One array of a call. If the caller passed None, `kind` and all numbers are 0. */
typedef struct ListedArray {
  PyObject* object; /* a borrowed reference to the caller's object */
  GivenArray array; /* `kind` has first extent 0 and alignment 0, because a form accepts any extent and any alignment */
  Py_ssize_t extent; /* the first extent */
  uintptr_t at;      /* PROXYCCL_EMPTY for an array without elements */
} ListedArray;

/* The base type of forms that are kept in a list. */
typedef struct ListedForm {
  PyObject ob_base;
  /* Makes a call with arrays of the form's kinds; `further` are the arguments after the arrays. Returns NULL with an
   * exception; or NULL without an exception and without effect if the arrays' first extents do not match, so that
   * Python raises the error. */
  PyObject* (*call)(PyObject* form, const ListedArray* given, PyObject* const* further);
} ListedForm;

extern PyTypeObject* proxyccl_listed_form;

/* Adds the types ListedForm and FormList to the module. Returns 0, or -1 with an exception. */
int proxyccl_add_form_list(PyObject* module);
/* Reads an array, which must not be None. Returns 1 with references to release; 0 if C can't read the array, or -1 with
 * an exception that the program raised. */
int proxyccl_read_listed(const ArrayTypes* types, PyObject* x, ListedArray* array);

#endif
