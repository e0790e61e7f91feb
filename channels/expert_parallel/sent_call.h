/* A dispatch or a combine whose first half is queued. */
#ifndef PROXYCCL_SENT_CALL_H
#define PROXYCCL_SENT_CALL_H

#include "descriptor.h"

typedef struct SentCall {
  PyObject ob_base;
  /* Makes the second half on a stream, with `out` for the result of a combine or None. NULL with an exception. */
  PyObject* (*receive)(struct SentCall* self, PyObject* stream, PyObject* out);
  PyObject *form, *desc, *stream, *rows, *weights, *owners, *recorded;
  uintptr_t at[3]; /* of a dispatch's rows, scales and weights; of a combine's rows and weights of slots */
} SentCall;

/* Adds the type to the module. 0, or -1 with an exception. */
int proxyccl_add_sent_call(PyObject* module);
/* Makes one. It takes the reference of `owners`, which may be NULL with an exception. NULL with an exception. */
SentCall* proxyccl_sent_call(PyObject* form, PyObject* desc, PyObject* stream, PyObject* rows, PyObject* weights,
                             PyObject* owners);

#endif
