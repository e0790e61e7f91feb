#include "queued_call.h"

typedef struct {
  PyObject ob_base;
  Gpu* gpu;
  PyObject *x, *out; /* a tensor each, or a list or tuple of them */
  PyObject *mark, *error, *future, *source;
  unsigned long long stream;
  char unrecorded, blocks;
} QueuedCall;

static PyTypeObject* call_type; /* of the process's one module */

PyObject* proxyccl_queued_call(Gpu* gpu, PyObject* x, PyObject* out, uintptr_t stream, int keeps, int blocks,
                               PyObject* source) {
  PyObject* object = PyType_GenericAlloc(call_type, 0);
  if (object == NULL) return NULL;
  QueuedCall* self = (QueuedCall*)object;
  self->gpu = (Gpu*)Py_NewRef((PyObject*)gpu);
  self->x = Py_NewRef(x), self->out = Py_NewRef(out), self->source = Py_NewRef(source);
  self->stream = stream, self->unrecorded = (char)keeps, self->blocks = (char)blocks;
  return object;
}

static void replace(PyObject** member, PyObject* value) {
  PyObject* old = *member;
  *member = value;
  Py_XDECREF(old);
}

/* Keeps the exception that is set, unless it is the program's, such as KeyboardInterrupt. */
static void keep_error(QueuedCall* self) {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return;
  PyObject *type, *error, *traceback;
  PyErr_Fetch(&type, &error, &traceback);
  PyErr_NormalizeException(&type, &error, &traceback);
  replace(&self->error, error);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
}

PyObject* proxyccl_mark_end(PyObject* object) {
  QueuedCall* self = (QueuedCall*)object;
  PyObject* mark = proxyccl_mark(self->gpu, (uintptr_t)self->stream);
  if (mark == NULL) {
    keep_error(self);
    return NULL;
  }
  replace(&self->mark, mark);
  return mark;
}

static PyObject* mark_end(PyObject* object, PyObject* Py_UNUSED(nothing)) {
  if (proxyccl_mark_end(object) == NULL && PyErr_Occurred() != NULL) return NULL;
  Py_RETURN_NONE;
}

static PyObject* check(PyObject* object, PyObject* Py_UNUSED(nothing)) {
  const QueuedCall* self = (const QueuedCall*)object;
  if (self->error == NULL || self->error == Py_None) return PyObject_CallNoArgs(self->gpu->check);
  PyErr_SetObject((PyObject*)Py_TYPE(self->error), self->error);
  return NULL;
}

static PyObject* hold(PyObject* object, PyObject* Py_UNUSED(nothing)) {
  QueuedCall* self = (QueuedCall*)object;
  PyObject* checked = check(object, NULL);
  if (checked == NULL) return NULL;
  Py_DECREF(checked);
  if (proxyccl_hold_current(self->gpu, self->mark == NULL ? Py_None : self->mark) != 0) return NULL;
  self->unrecorded = 0;
  Py_RETURN_NONE;
}

static int extend(PyObject* list, PyObject* tensors) {
  if (!PyList_Check(tensors) && !PyTuple_Check(tensors)) return PyList_Append(list, tensors);
  const Py_ssize_t end = PyList_Size(list);
  return PyList_SetSlice(list, end, end, tensors);
}

static PyObject* outputs(PyObject* object, PyObject* Py_UNUSED(nothing)) {
  PyObject* list = PyList_New(0);
  if (list != NULL && extend(list, ((const QueuedCall*)object)->out) != 0) Py_CLEAR(list);
  return list;
}

static PyObject* all_tensors(PyObject* object) {
  const QueuedCall* self = (const QueuedCall*)object;
  PyObject* list = outputs(object, NULL);
  if (list != NULL && self->x != self->out && extend(list, self->x) != 0) Py_CLEAR(list);
  return list;
}

/* What the caller's stream does not wait for may still be used when its memory is free for another tensor. */
static void record(PyObject* object) {
  QueuedCall* self = (QueuedCall*)object;
  if (!self->unrecorded) return;
  self->unrecorded = 0;
  PyObject *type, *error, *traceback;
  PyErr_Fetch(&type, &error, &traceback);
  PyObject* tensors = all_tensors(object);
  PyObject* recorded = tensors == NULL ? NULL : PyObject_CallFunction(self->gpu->record, "OK", tensors, self->stream);
  if (recorded == NULL) PyErr_WriteUnraisable(self->gpu->record);
  Py_XDECREF(recorded);
  Py_XDECREF(tensors);
  PyErr_Restore(type, error, traceback);
}

/* The garbage collector clears the first two, without which a call still works; the others stay until its end. */
#define OPTIONAL(apply) apply(error) apply(future)
#define REQUIRED(apply) apply(gpu) apply(x) apply(out) apply(mark) apply(source)

static int traverse(PyObject* object, visitproc visit, void* arg) {
  QueuedCall* self = (QueuedCall*)object;
  Py_VISIT(Py_TYPE(object));
  OPTIONAL(PROXYCCL_VISIT)
  REQUIRED(PROXYCCL_VISIT)
  return 0;
}

static int let_go(PyObject* object) {
  QueuedCall* self = (QueuedCall*)object;
  record(object);
  OPTIONAL(PROXYCCL_CLEAR)
  return 0;
}

static int let_all_go(PyObject* object) {
  QueuedCall* self = (QueuedCall*)object;
  let_go(object);
  REQUIRED(PROXYCCL_CLEAR)
  return 0;
}

static void end(PyObject* object) { proxyccl_free(object, let_all_go); }

static PyObject* make(PyTypeObject* Py_UNUSED(type), PyObject* arguments, PyObject* Py_UNUSED(keywords)) {
  PyObject *gpu, *x, *out, *source;
  unsigned long long stream;
  int keeps, blocks;
  if (!PyArg_ParseTuple(arguments, "O!OOKppO", proxyccl_gpu_type, &gpu, &x, &out, &stream, &keeps, &blocks, &source))
    return NULL;
  return proxyccl_queued_call((Gpu*)gpu, x, out, (uintptr_t)stream, keeps, blocks, source);
}

static PyMethodDef methods[] = {
    {"mark_end", mark_end, METH_NOARGS, NULL},
    {"check", check, METH_NOARGS, NULL},
    {"hold", hold, METH_NOARGS, NULL},
    {"outputs", outputs, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef members[] = {
    {"gpu", T_OBJECT, offsetof(QueuedCall, gpu), READONLY, NULL},
    {"mark", T_OBJECT, offsetof(QueuedCall, mark), READONLY, NULL},
    {"error", T_OBJECT, offsetof(QueuedCall, error), 0, NULL},
    {"future", T_OBJECT, offsetof(QueuedCall, future), 0, NULL},
    {"source", T_OBJECT, offsetof(QueuedCall, source), READONLY, NULL},
    {"stream", T_ULONGLONG, offsetof(QueuedCall, stream), READONLY, NULL},
    {"blocks", T_BOOL, offsetof(QueuedCall, blocks), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, end},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, let_go},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};
static PyType_Spec spec = {
    .name = "proxyccl.torch._device_calls.QueuedCall",
    .basicsize = sizeof(QueuedCall),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

int proxyccl_add_queued_call(PyObject* module) {
  if (call_type == NULL) call_type = (PyTypeObject*)PyType_FromSpec(&spec);
  return call_type == NULL ? -1 : PyModule_AddObjectRef(module, "QueuedCall", (PyObject*)call_type);
}
