/* The base of the forms of a layer's calls; a form is a call that was prepared for certain kinds of arrays. The base
 * finds a call's stream, issues the call, and makes new arrays. SentCall is a call whose first half is queued. */
#ifndef PROXYCCL_LAYER_FORM_H
#define PROXYCCL_LAYER_FORM_H

#include "../calls/form_list.h"
#include "descriptor.h"

/* A dispatch or a combine whose first half is queued. */
typedef struct SentCall {
  PyObject ob_base;
  PyObject *form, *desc, *stream, *rows, *weights, *owners, *recorded;
  uintptr_t at[3]; /* addresses of a dispatch's rows, scales and weights, or a combine's rows and slot weights and their
                      bytes */
} SentCall;

typedef struct LayerForm {
  ListedForm listed;
  /* Makes the second half of a call on a stream. `out`: the array for a combine's result, or None. Returns NULL with an
   * exception set on failure. */
  PyObject* (*receive)(SentCall* sent, PyObject* stream, PyObject* out);
  PyObject* arguments;             /* the constructor's arguments, which own the objects that other fields borrow */
  PyObject* latest_stream;         /* an owned reference to a CurrentStream (launches.py); NULL at first */
  PyObject *element, *make_latest; /* owned references, because combine_form.c replaces these fields */
  PyObject* calls;                 /* the group's Calls */
  int on_host;                     /* whether this is the host runtime, where calls without a stream are synchronous */
  PyObject* current;     /* current(device): returns the handle of torch's current stream; None for other libraries */
  PyObject* stream_type; /* CurrentStream */
  PyObject* stream_of; /* stream_of(x, given): returns the stream of a call that does not use torch's current stream */
  PyObject* queue;     /* queue(desc, prepared, stream, owners): issues a call on the stream that stream_of returned */
  PyObject* device;
  uint64_t* number;           /* where the number of the call's dispatch is stored */
  PyObject* address;          /* returns the address of an array that the layer made; None if torch made the arrays */
  PreparedCall first, second; /* first: a whole call or a call's first half; second: the call's other parts */
} LayerForm;

/* The arrays of one part of a call. `given` are the caller's arrays; `rows` and `weights` are the arrays of the result.
 * Missing arrays are NULL. */
typedef struct CallArrays {
  const ListedArray* given;
  int count;
  PyObject *rows, *weights;
} CallArrays;

/* Each of these functions adds a type to the module, and returns 0, or -1 with an exception set. */
int proxyccl_add_sent_call(PyObject* module);
int proxyccl_add_dispatch_form(PyObject* module);
int proxyccl_add_combine_form(PyObject* module);

/* Returns a new form of a type, or NULL with an exception set. The first argument is the result of `CallForm.common`
 * (call_form.py). */
PyObject* proxyccl_new_form(PyTypeObject* type, PyObject* arguments);
/* Adds a type of forms to the module, once per process. Returns 0, or -1 with an exception set. `methods` may be NULL.
 */
int proxyccl_add_layer_form(PyObject* module, PyTypeObject** type, const char* name, size_t size, newfunc make,
                            PyMethodDef* methods);
/* A converter for PyArg_ParseTuple: reads a result of `CallForm.prepared`, or None, into a PreparedCall, which borrows
 * the arguments' references. */
int proxyccl_as_prepared(PyObject* given, void* call);
/* Returns a SentCall, or NULL with an exception set. Steals the reference to `owners`, which may be NULL with an
 * exception set. */
PyObject* proxyccl_sent_call(LayerForm* form, const Descriptor* desc, PyObject* stream, PyObject* rows,
                             PyObject* weights, PyObject* owners, const uintptr_t* at);
/* Returns the stream of a call: the caller's, or torch's current stream; None on the host runtime. Returns NULL with an
 * exception set on failure. */
PyObject* proxyccl_stream(LayerForm* form, PyObject* x, PyObject* given);
/* Issues one part of a call on a stream. On a stream other than torch's current stream, keeps `arrays` until the launch
 * has run. Returns 0, or -1 with an exception set. */
int proxyccl_issue(const LayerForm* form, const PreparedCall* call, const Descriptor* desc, PyObject* stream,
                   const CallArrays* arrays);
/* Calls `maker` for a new array, and finds the array's address, which is 0 only if the array may be empty. Returns NULL
 * with an exception set on failure. */
PyObject* proxyccl_new_array(const LayerForm* form, PyObject* maker, int may_be_empty, uintptr_t* at);
/* Returns a tuple of a call's arrays, or NULL with an exception set. */
PyObject* proxyccl_owners(const CallArrays* arrays);

#endif
