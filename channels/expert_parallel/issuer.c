#include "issuer.h"

int proxyccl_read_issuer(PyObject* given, Issuer* issuer) {
  PyObject *calls, *current, *stream_type, *stream_of, *queue, *device, *address;
  unsigned long long number;
  if (!PyArg_ParseTuple(given, "OpOOOOOKO", &calls, &issuer->on_host, &current, &stream_type, &stream_of, &queue,
                        &device, &number, &address) ||
      !proxyccl_require_calls(calls))
    return -1;
  issuer->calls = Py_NewRef(calls), issuer->current = Py_NewRef(current), issuer->device = Py_NewRef(device);
  issuer->stream_type = Py_NewRef(stream_type), issuer->stream_of = Py_NewRef(stream_of);
  issuer->queue = Py_NewRef(queue), issuer->number = (uint64_t*)(uintptr_t)number;
  issuer->address = Py_NewRef(address);
  return 0;
}

int proxyccl_read_prepared(PyObject* given, PreparedCall* call) {
  PyObject* kept;
  unsigned long long issue, callers, fields, launch;
  if (!PyArg_ParseTuple(given, "KKKKO", &issue, &callers, &fields, &launch, &kept)) return -1;
  *call = (PreparedCall){(Issue)(uintptr_t)issue, (void*)(uintptr_t)callers, (void*)(uintptr_t)fields,
                         (void*)(uintptr_t)launch, Py_NewRef(kept)};
  return 0;
}

#define REFERENCES(apply)                                                                                  \
  apply(calls) apply(current) apply(stream_type) apply(latest) apply(stream_of) apply(queue) apply(device) \
      apply(address)

int proxyccl_visit_issuer(const Issuer* self, visitproc visit, void* arg) {
  REFERENCES(PROXYCCL_VISIT)
  return 0;
}

void proxyccl_clear_issuer(Issuer* self){REFERENCES(PROXYCCL_CLEAR)}

PyObject* proxyccl_stream(Issuer* issuer, PyObject* x, PyObject* given) {
  if (given == Py_None && issuer->on_host) return Py_NewRef(Py_None);
  if (given != Py_None || issuer->current == Py_None)
    return PyObject_CallFunctionObjArgs(issuer->stream_of, x, given, NULL);
  PyObject* handle = PyObject_CallFunctionObjArgs(issuer->current, issuer->device, NULL);
  if (handle == NULL) return NULL;
  const int same = issuer->latest == NULL ? 0 : PyObject_RichCompareBool(issuer->latest, handle, Py_EQ);
  if (same == 0) {
    PyObject* made = PyObject_CallFunctionObjArgs(issuer->stream_type, handle, NULL);
    PyObject* old = issuer->latest;
    if (made != NULL) {
      issuer->latest = made;
      Py_XDECREF(old);
    }
  }
  Py_DECREF(handle);
  return PyErr_Occurred() != NULL ? NULL : Py_NewRef(issuer->latest);
}

/* Whether a stream is torch's current one, and the dispatch was on the same: then memory is used again in order. -1
 * with an exception. */
static int is_in_order(const Issuer* issuer, const Descriptor* desc, PyObject* stream) {
  PyObject* const kind = issuer->stream_type;
  if (desc->stream == NULL || (PyObject*)Py_TYPE(stream) != kind || (PyObject*)Py_TYPE(desc->stream) != kind) return 0;
  return PyObject_RichCompareBool(desc->stream, stream, Py_EQ);
}

int proxyccl_issue(const Issuer* issuer, const PreparedCall* call, const Descriptor* desc, PyObject* stream,
                   PyObject* (*owners)(const void* of), const void* of) {
  *issuer->number = (uint64_t)desc->number % (1u << 31);
  const int in_order = is_in_order(issuer, desc, stream);
  if (in_order < 0) return -1;
  if (in_order || (stream == Py_None && issuer->on_host)) {
    const int issued = proxyccl_issue_prepared(issuer->calls, call, in_order ? stream : NULL);
    if (issued != 0) return issued < 0 ? -1 : 0;
  }
  PyObject* kept = owners(of);
  PyObject* queued = kept == NULL
                         ? NULL
                         : PyObject_CallFunctionObjArgs(issuer->queue, (PyObject*)desc, call->kept, stream, kept, NULL);
  Py_XDECREF(kept);
  Py_XDECREF(queued);
  return queued == NULL ? -1 : 0;
}

PyObject* proxyccl_new_array(const Issuer* issuer, PyObject* maker, int may_be_empty, uintptr_t* at) {
  static PyObject* data_ptr;
  if (data_ptr == NULL && (data_ptr = PyUnicode_InternFromString("data_ptr")) == NULL) return NULL;
  PyObject* made = PyObject_CallNoArgs(maker);
  if (made == NULL) return NULL;
  PyObject* found = issuer->address == Py_None ? PyObject_CallMethodObjArgs(made, data_ptr, NULL)
                                               : PyObject_CallFunctionObjArgs(issuer->address, made, NULL);
  *at = found == NULL ? 0 : (uintptr_t)PyLong_AsUnsignedLongLong(found);
  Py_XDECREF(found);
  if (*at == 0 && !may_be_empty && PyErr_Occurred() == NULL)
    PyErr_SetString(PyExc_MemoryError, "a new array has no memory");
  if (PyErr_Occurred() != NULL) Py_CLEAR(made);
  return made;
}
