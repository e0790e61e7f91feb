/* Exceptions in extensions that look into objects of other libraries. Include it after Python.h. */
#pragma once

/* Called after an access to an object that may be of another kind: clears a pending Exception, which only means that
 * the object is of another kind. An exception of the program, such as KeyboardInterrupt, stays, because the access may
 * have run Python code. Returns 0, or -1 if an exception stays. */
static inline int proxyccl_clear_exception(void) {
  if (PyErr_Occurred() == NULL) return 0;
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
  PyErr_Clear();
  return 0;
}
