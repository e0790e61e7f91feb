/* The base of the forms of a layer's calls: the stream of a call, how it is issued, and where new arrays lie; and a
 * call whose first half is queued. */
#ifndef PROXYCCL_LAYER_FORM_H
#define PROXYCCL_LAYER_FORM_H

#include "../calls/form_list.h"
#include "descriptor.h"

/* A dispatch or a combine whose first half is queued. */
typedef struct SentCall {
  PyObject ob_base;
  PyObject *form, *desc, *stream, *rows, *weights, *owners, *recorded;
  uintptr_t at[3]; /* of a dispatch's rows, scales and weights; of a combine's rows and weights of slots */
} SentCall;

typedef struct LayerForm {
  ListedForm listed;
  /* Makes the second half of a call on a stream, with `out` for the result of a combine or None. NULL with an
   * exception. */
  PyObject* (*receive)(SentCall* sent, PyObject* stream, PyObject* out);
  PyObject* arguments;             /* of the constructor: it has the references of a form, whose fields borrow them … */
  PyObject* latest_stream;         /* … except for a CurrentStream (launches.py), NULL at first, … */
  PyObject *element, *make_latest; /* … and two of combine_form.c */
  PyObject* calls;                 /* Calls of the group */
  int on_host;                     /* calls without a stream wait for their end there */
  PyObject* current;               /* current(device): the handle of torch's current stream; None for other libraries */
  PyObject* stream_type;           /* CurrentStream */
  PyObject* stream_of;             /* stream_of(x, given): the stream of any other call */
  PyObject* queue; /* queue(desc, prepared, stream, owners): issues a call that is not on such a stream */
  PyObject* device;
  uint64_t* number;           /* the field of the call that names its dispatch */
  PyObject* address;          /* address(array) of an array that the layer made; None if these are torch's */
  PreparedCall first, second; /* of the whole call or its first half; of its other parts */
} LayerForm;

/* The arrays of a part of a call: the caller's, and those of the result; NULL for none. */
typedef struct CallArrays {
  const ListedArray* given;
  int count;
  PyObject *rows, *weights;
} CallArrays;

/* Each adds its types to the module. 0, or -1 with an exception. */
int proxyccl_add_sent_call(PyObject* module);
int proxyccl_add_dispatch_form(PyObject* module);
int proxyccl_add_combine_form(PyObject* module);

/* A new form of a type; the first argument is `CallForm.common` (call_form.py). NULL with an exception. */
PyObject* proxyccl_new_form(PyTypeObject* type, PyObject* arguments);
int proxyccl_visit_form(PyObject* object, visitproc visit, void* arg);
void proxyccl_end_form(PyObject* object);
/* Converters of PyArg_ParseTuple: an address to a pointer of any type, and `CallForm.prepared` or None to a
 * PreparedCall, whose references the arguments have. */
int proxyccl_as_pointer(PyObject* number, void* pointer);
int proxyccl_as_prepared(PyObject* given, void* call);
/* A half of a call. It takes the reference of `owners`, which may be NULL with an exception. NULL with an exception. */
PyObject* proxyccl_sent_call(LayerForm* form, const Descriptor* desc, PyObject* stream, PyObject* rows,
                             PyObject* weights, PyObject* owners, const uintptr_t* at);
/* The stream of a call: the caller's, or the one where torch works now; None on the host runtime. NULL with an
 * exception. */
PyObject* proxyccl_stream(LayerForm* form, PyObject* x, PyObject* given);
/* Issues a part of a call for a dispatch on a stream. The arrays are those that it uses, for other streams than torch's
 * current one. Returns 0, or -1 with an exception. */
int proxyccl_issue(const LayerForm* form, const PreparedCall* call, const Descriptor* desc, PyObject* stream,
                   const CallArrays* arrays);
/* The array that a function without arguments makes, and its address, which is not 0 unless the array may be empty.
 * NULL with an exception. */
PyObject* proxyccl_new_array(const LayerForm* form, PyObject* maker, int may_be_empty, uintptr_t* at);
/* A tuple of a call's arrays. NULL with an exception. */
PyObject* proxyccl_owners(const CallArrays* arrays);

#endif
