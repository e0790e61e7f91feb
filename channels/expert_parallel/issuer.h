/* What the forms of a layer's calls share: the stream of a call, how it is issued, and where new arrays lie. */
#ifndef PROXYCCL_ISSUER_H
#define PROXYCCL_ISSUER_H

#include "descriptor.h"

typedef struct Issuer {
  PyObject* calls;       /* Calls of the group */
  int on_host;           /* calls without a stream wait for their end there */
  PyObject* current;     /* current(device): the handle of torch's current stream; None for other libraries */
  PyObject* stream_type; /* CurrentStream (launches.py) … */
  PyObject* latest;      /* … and the latest of them; NULL at first */
  PyObject* stream_of;   /* stream_of(x, given): the stream of any other call */
  PyObject* queue;       /* queue(desc, prepared, stream, owners): issues what is not on such a stream */
  PyObject* device;
  uint64_t* number;  /* the field of the call that names its dispatch */
  PyObject* address; /* address(array) of an array that the layer made; None if these are torch's */
} Issuer;

/* Reads `CallForm.issuer` (call_form.py). 0, or -1 with an exception. */
int proxyccl_read_issuer(PyObject* given, Issuer* issuer);
/* Reads `CallForm.prepared`. 0, or -1 with an exception. */
int proxyccl_read_prepared(PyObject* given, PreparedCall* call);
int proxyccl_visit_issuer(const Issuer* issuer, visitproc visit, void* arg);
void proxyccl_clear_issuer(Issuer* issuer);
/* The stream of a call: the caller's, or the one where torch works now; None on the host runtime. NULL with an
 * exception. */
PyObject* proxyccl_stream(Issuer* issuer, PyObject* x, PyObject* given);
/* Issues a call for a dispatch on a stream. `owners` makes a tuple of the arrays that it uses, for other streams than
 * torch's current one. Returns 0, or -1 with an exception. */
int proxyccl_issue(const Issuer* issuer, const PreparedCall* call, const Descriptor* desc, PyObject* stream,
                   PyObject* (*owners)(const void* of), const void* of);
/* The array that a function without arguments makes, and its address, which is not 0 unless the array may be empty.
 * NULL with an exception. */
PyObject* proxyccl_new_array(const Issuer* issuer, PyObject* maker, int may_be_empty, uintptr_t* at);

#endif
