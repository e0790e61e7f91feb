#include "layer_form.h"

#include <string.h>

int proxyccl_as_prepared(PyObject* given, void* call) {
  PreparedCall* self = call;
  return given == Py_None || PyArg_ParseTuple(given, "O&O&O&O&O", PROXYCCL_AT(issue), PROXYCCL_AT(callers),
                                              PROXYCCL_AT(call), PROXYCCL_AT(launch), &self->kept);
}

PyObject* proxyccl_new_form(PyTypeObject* type, PyObject* arguments) {
  PyObject* object = PyType_GenericNew(type, NULL, NULL);
  PyObject* common = object == NULL ? NULL : PyTuple_GetItem(arguments, 0);
  LayerForm* form = (LayerForm*)object;
  if (object != NULL) form->arguments = Py_NewRef(arguments);
  if (common != NULL &&
      PyArg_ParseTuple(common, "OpOOOOOO&OO&O&", &form->calls, &form->on_host, &form->current, &form->stream_type,
                       &form->stream_of, &form->queue, &form->device, proxyccl_as_pointer, &form->number,
                       &form->address, proxyccl_as_prepared, &form->first, proxyccl_as_prepared, &form->second) &&
      proxyccl_require_calls(form->calls))
    return object;
  Py_XDECREF(object);
  return NULL;
}

#define FORM_REFERENCES(apply) apply(arguments) apply(latest_stream) apply(element) apply(make_latest)

/* form_clear is not the type's tp_clear. Forms, like tuples, need no tp_clear, because every reference cycle through a
 * form contains another object that can be cleared. */
PROXYCCL_COLLECT_ALL(form, LayerForm, FORM_REFERENCES)

int proxyccl_add_layer_form(PyObject* module, PyTypeObject** type, const char* name, size_t size, newfunc make,
                            PyMethodDef* methods) {
  PyType_Slot slots[] = {
      {Py_tp_new, make}, {Py_tp_dealloc, form_end}, {Py_tp_traverse, form_traverse}, {Py_tp_methods, methods},
      {0, NULL},
  };
  if (methods == NULL) slots[3] = (PyType_Slot){0, NULL};
  return proxyccl_add_type(module, type, proxyccl_listed_form, name, size, Py_TPFLAGS_HAVE_GC, slots);
}

PyObject* proxyccl_owners(const CallArrays* arrays) {
  const int given = arrays->count;
  PyObject* owners = PyTuple_New(given + 2);
  for (int i = 0; owners != NULL && i < given + 2; ++i) {
    PyObject* array = i < given ? arrays->given[i].object : i == given ? arrays->rows : arrays->weights;
    if (PyTuple_SetItem(owners, i, Py_NewRef(array == NULL ? Py_None : array)) != 0) Py_CLEAR(owners);
  }
  return owners;
}

PyObject* proxyccl_stream(LayerForm* form, PyObject* x, PyObject* given) {
  if (given == Py_None && form->on_host) return Py_NewRef(Py_None);
  if (given != Py_None || form->current == Py_None)
    return PyObject_CallFunctionObjArgs(form->stream_of, x, given, NULL);
  PyObject* handle = PyObject_CallFunctionObjArgs(form->current, form->device, NULL);
  if (handle == NULL) return NULL;
  const int same = form->latest_stream == NULL ? 0 : PyObject_RichCompareBool(form->latest_stream, handle, Py_EQ);
  if (same == 0) {
    PyObject* made = PyObject_CallFunctionObjArgs(form->stream_type, handle, NULL);
    PyObject* old = form->latest_stream;
    if (made != NULL) {
      form->latest_stream = made;
      Py_XDECREF(old);
    }
  }
  Py_DECREF(handle);
  return PyErr_Occurred() != NULL ? NULL : Py_NewRef(form->latest_stream);
}

/* Returns whether a stream is both torch's current stream, in whose order torch reuses memory, and the dispatch's
 * stream; or returns -1 with an exception set. */
static int is_in_order(const LayerForm* form, const Descriptor* desc, PyObject* stream) {
  PyObject* const kind = form->stream_type;
  if (desc->stream == NULL || (PyObject*)Py_TYPE(stream) != kind || (PyObject*)Py_TYPE(desc->stream) != kind) return 0;
  return PyObject_RichCompareBool(desc->stream, stream, Py_EQ);
}

int proxyccl_issue(const LayerForm* form, const PreparedCall* call, const Descriptor* desc, PyObject* stream,
                   const CallArrays* arrays) {
  *form->number = (uint64_t)desc->number % (1u << 31);
  const int in_order = is_in_order(form, desc, stream);
  if (in_order < 0) return -1;
  if (in_order || (stream == Py_None && form->on_host)) {
    const int issued = proxyccl_issue_prepared(form->calls, call, in_order ? stream : NULL);
    if (issued != 0) return issued < 0 ? -1 : 0;
  }
  PyObject* kept = proxyccl_owners(arrays);
  PyObject* queued =
      kept == NULL ? NULL : PyObject_CallFunctionObjArgs(form->queue, (PyObject*)desc, call->kept, stream, kept, NULL);
  Py_XDECREF(kept);
  Py_XDECREF(queued);
  return queued == NULL ? -1 : 0;
}

PyObject* proxyccl_new_array(const LayerForm* form, PyObject* maker, int may_be_empty, uintptr_t* at) {
  static PyObject* data_ptr;
  if (data_ptr == NULL && (data_ptr = PyUnicode_InternFromString("data_ptr")) == NULL) return NULL;
  PyObject* made = PyObject_CallNoArgs(maker);
  if (made == NULL) return NULL;
  PyObject* found = form->address == Py_None ? PyObject_CallMethodObjArgs(made, data_ptr, NULL)
                                             : PyObject_CallFunctionObjArgs(form->address, made, NULL);
  *at = found == NULL ? 0 : (uintptr_t)PyLong_AsUnsignedLongLong(found);
  Py_XDECREF(found);
  if (*at == 0 && !may_be_empty && PyErr_Occurred() == NULL)
    PyErr_SetString(PyExc_MemoryError, "a new array has no memory");
  if (PyErr_Occurred() != NULL) Py_CLEAR(made);
  return made;
}

/* -- calls whose first half is queued --- */

static PyTypeObject* sent_type; /* the type is made once per process */

PyObject* proxyccl_sent_call(LayerForm* form, const Descriptor* desc, PyObject* stream, PyObject* rows,
                             PyObject* weights, PyObject* owners, const uintptr_t* at) {
  SentCall* self = owners == NULL ? NULL : (SentCall*)PyType_GenericAlloc(sent_type, 0);
  if (self == NULL) {
    Py_XDECREF(owners);
    return NULL;
  }
  self->form = Py_NewRef((PyObject*)form), self->desc = Py_NewRef((PyObject*)desc), self->stream = Py_NewRef(stream);
  self->rows = Py_NewRef(rows), self->weights = Py_NewRef(weights);
  self->owners = owners, self->recorded = PyTuple_New(0);
  memcpy(self->at, at, sizeof self->at);
  if (self->recorded != NULL) return (PyObject*)self;
  Py_DECREF((PyObject*)self);
  return NULL;
}

static PyObject* receive(PyObject* object, PyObject* arguments) {
  SentCall* self = (SentCall*)object;
  PyObject *stream, *out = Py_None;
  if (!PyArg_ParseTuple(arguments, "O|O", &stream, &out)) return NULL;
  return ((LayerForm*)self->form)->receive(self, stream, out);
}

#define SENT_REFERENCES(apply) \
  apply(form) apply(desc) apply(stream) apply(rows) apply(weights) apply(owners) apply(recorded)
PROXYCCL_COLLECT_ALL(sent, SentCall, SENT_REFERENCES)

static PyMethodDef methods[] = {
    {"receive", receive, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef members[] = {
    {"desc", T_OBJECT, offsetof(SentCall, desc), READONLY, NULL},
    {"stream", T_OBJECT, offsetof(SentCall, stream), READONLY, NULL},
    {"rows", T_OBJECT, offsetof(SentCall, rows), READONLY, NULL},
    {"owners", T_OBJECT, offsetof(SentCall, owners), READONLY, NULL},
    {"recorded", T_OBJECT, offsetof(SentCall, recorded), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_dealloc, sent_end}, {Py_tp_traverse, sent_traverse}, {Py_tp_clear, sent_clear},
    {Py_tp_methods, methods},  {Py_tp_members, members},        {0, NULL},
};

int proxyccl_add_sent_call(PyObject* module) {
  return proxyccl_add_type(module, &sent_type, NULL, "proxyccl.channels.calls._calls.SentCall", sizeof(SentCall),
                           Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots);
}
