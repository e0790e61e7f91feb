/* Handles exceptions in accesses to objects of other libraries. Include this header after Python.h. */
#pragma once

/* To be called after an attempt to access an object that may have an unexpected type. Clears a pending exception of
 * class Exception, which only means that the object has another type, and returns 0. Other exceptions, such as
 * KeyboardInterrupt, stay pending, and -1 is returned. */
static inline int proxyccl_clear_exception(void) {
  if (PyErr_Occurred() == NULL) return 0;
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
  PyErr_Clear();
  return 0;
}
