#include "sent_call.h"

static PyTypeObject* sent_type; /* of the process's one module */

SentCall* proxyccl_sent_call(PyObject* form, PyObject* desc, PyObject* stream, PyObject* rows, PyObject* weights,
                             PyObject* owners) {
  SentCall* self = owners == NULL ? NULL : (SentCall*)PyType_GenericAlloc(sent_type, 0);
  if (self == NULL) {
    Py_XDECREF(owners);
    return NULL;
  }
  self->form = Py_NewRef(form), self->desc = Py_NewRef(desc), self->stream = Py_NewRef(stream);
  self->rows = Py_NewRef(rows), self->weights = Py_NewRef(weights);
  self->owners = owners, self->recorded = PyTuple_New(0);
  if (self->recorded != NULL) return self;
  Py_DECREF((PyObject*)self);
  return NULL;
}

static PyObject* receive(PyObject* object, PyObject* arguments) {
  SentCall* self = (SentCall*)object;
  PyObject *stream, *out = Py_None;
  if (!PyArg_ParseTuple(arguments, "O|O", &stream, &out)) return NULL;
  return self->receive(self, stream, out);
}

#define REFERENCES(apply) apply(form) apply(desc) apply(stream) apply(rows) apply(weights) apply(owners) apply(recorded)

static int traverse(PyObject* object, visitproc visit, void* arg) {
  SentCall* self = (SentCall*)object;
  Py_VISIT(Py_TYPE(object));
  REFERENCES(PROXYCCL_VISIT)
  return 0;
}

static int let_go(PyObject* object) {
  SentCall* self = (SentCall*)object;
  REFERENCES(PROXYCCL_CLEAR)
  return 0;
}

static void end(PyObject* object) { proxyccl_free(object, let_go); }

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
    {Py_tp_dealloc, end},     {Py_tp_traverse, traverse}, {Py_tp_clear, let_go},
    {Py_tp_methods, methods}, {Py_tp_members, members},   {0, NULL},
};
static PyType_Spec spec = {
    .name = "proxyccl.channels.calls._calls.SentCall",
    .basicsize = sizeof(SentCall),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

int proxyccl_add_sent_call(PyObject* module) {
  if (sent_type == NULL) sent_type = (PyTypeObject*)PyType_FromSpec(&spec);
  return sent_type == NULL ? -1 : PyModule_AddObjectRef(module, "SentCall", (PyObject*)sent_type);
}
