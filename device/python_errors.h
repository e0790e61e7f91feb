/* Exceptions in extensions that look into objects of other libraries. Include it after Python.h. */
#pragma once

/* After a look at an object, whose exception means only that the object is of another kind: clears an Exception. One
 * that is the program's own stays, such as KeyboardInterrupt, as Python's code may have run. Returns 0, or -1 if one
 * stays. */
static inline int proxyccl_clear_exception(void) {
  if (PyErr_Occurred() == NULL) return 0;
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
  PyErr_Clear();
  return 0;
}
