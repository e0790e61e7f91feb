#include "on_gpu.h"

PyTypeObject* proxyccl_gpu_type;
static PyTypeObject* mark_type; /* of the process's one module */

/* Takes an event that nothing uses. 0 with an exception. */
static uintptr_t take_event(const Gpu* self) {
  const Py_ssize_t last = PyList_Size(self->idle) - 1;
  PyObject* event;
  if (last >= 0) {
    event = Py_NewRef(PyList_GetItem(self->idle, last));
    if (PyList_SetSlice(self->idle, last, last + 1, NULL) != 0) Py_CLEAR(event);
  } else {
    event = PyObject_CallNoArgs(self->more);
  }
  if (event == NULL) return 0;
  const uintptr_t taken = (uintptr_t)PyLong_AsUnsignedLongLong(event);
  Py_DECREF(event);
  return PyErr_Occurred() != NULL ? 0 : taken;
}

/* Never an exception; keeps one that is set. */
static void give_event(const Gpu* self, uintptr_t event) {
  PyObject *type, *error, *traceback;
  PyErr_Fetch(&type, &error, &traceback);
  PyObject* number = PyLong_FromUnsignedLongLong(event);
  if (number == NULL || PyList_Append(self->idle, number) != 0) PyErr_Clear(); /* an event less */
  Py_XDECREF(number);
  PyErr_Restore(type, error, traceback);
}

/* After a call of stream_order.h: 0 if its status is 0, or if `finish` ends it well; otherwise -1 with an exception. */
static int finished(const Gpu* self, int status, const char* name, const uintptr_t* arguments, int count) {
  if (status == 0) return 0;
  PyObject* given = PyTuple_New(count);
  for (int i = 0; given != NULL && i < count; ++i) {
    PyObject* number = PyLong_FromUnsignedLongLong(arguments[i]);
    if (number == NULL || PyTuple_SetItem(given, i, number) != 0) Py_CLEAR(given);
  }
  PyObject* done = given == NULL ? NULL : PyObject_CallFunction(self->finish, "isO", status, name, given);
  Py_XDECREF(given);
  Py_XDECREF(done);
  return done == NULL ? -1 : 0;
}

PyObject* proxyccl_mark(Gpu* self, uintptr_t stream) {
  const uintptr_t event = take_event(self);
  if (event == 0) return NULL;
  const uintptr_t arguments[] = {event, stream};
  StreamMark* mark = NULL;
  if (finished(self, proxyccl_stream_mark(self->order, event, stream), "event record", arguments, 2) == 0)
    mark = PyObject_New(StreamMark, mark_type);
  if (mark == NULL) {
    give_event(self, event);
    return NULL;
  }
  mark->gpu = (Gpu*)Py_NewRef((PyObject*)self), mark->event = event;
  return (PyObject*)mark;
}

int proxyccl_follow(Gpu* self, uintptr_t first, uintptr_t then) {
  const uintptr_t event = take_event(self);
  if (event == 0) return -1;
  const uintptr_t arguments[] = {event, first, then, 0};
  const int status = proxyccl_stream_follow(self->order, event, first, then, 0);
  const int failed = finished(self, status, "order of streams", arguments, 4);
  give_event(self, event); /* the wait is for this record, whatever the event records later */
  return failed;
}

static int hold_stream(const StreamMark* mark, PyObject* stream) {
  const uintptr_t handle = (uintptr_t)PyLong_AsUnsignedLongLong(stream);
  if (PyErr_Occurred() != NULL) return -1;
  const uintptr_t arguments[] = {handle, mark->event};
  const int status = proxyccl_stream_wait(mark->gpu->order, handle, mark->event);
  return finished(mark->gpu, status, "stream wait", arguments, 2);
}

int proxyccl_hold_current(Gpu* self, PyObject* mark) {
  if (Py_TYPE(mark) != mark_type) {
    PyErr_SetString(PyExc_TypeError, "mark: expected a StreamMark");
    return -1;
  }
  PyObject* stream = PyObject_CallNoArgs(self->current);
  if (stream == NULL) return -1;
  const int failed = hold_stream((const StreamMark*)mark, stream);
  Py_DECREF(stream);
  return failed;
}

static PyObject* hold(PyObject* mark, PyObject* stream) {
  if (hold_stream((const StreamMark*)mark, stream) != 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject* query(PyObject* object, PyObject* Py_UNUSED(nothing)) {
  const StreamMark* mark = (const StreamMark*)object;
  const int status = proxyccl_event_query(mark->gpu->order, mark->event);
  if (status == PROXYCCL_NOT_READY) Py_RETURN_FALSE;
  if (finished(mark->gpu, status, "event query", &mark->event, 1) != 0) return NULL;
  Py_RETURN_TRUE;
}

static PyObject* call_query(PyObject* mark, PyObject* Py_UNUSED(arguments), PyObject* Py_UNUSED(keywords)) {
  return query(mark, NULL);
}

static void end_mark(PyObject* object) {
  StreamMark* mark = (StreamMark*)object;
  PyTypeObject* type = Py_TYPE(object);
  give_event(mark->gpu, mark->event);
  Py_DECREF(mark->gpu);
  PyObject_Free(object);
  Py_DECREF(type);
}

static PyObject* mark_of(PyObject* self, PyObject* stream) {
  const uintptr_t handle = (uintptr_t)PyLong_AsUnsignedLongLong(stream);
  return PyErr_Occurred() != NULL ? NULL : proxyccl_mark((Gpu*)self, handle);
}

#define REFERENCES(apply) apply(idle) apply(more) apply(finish) apply(owner) apply(current) apply(check) apply(record)

static int traverse(PyObject* object, visitproc visit, void* arg) {
  Gpu* self = (Gpu*)object;
  Py_VISIT(Py_TYPE(object));
  REFERENCES(PROXYCCL_VISIT)
  return 0;
}

/* Not the type's tp_clear: calls and marks use a Gpu until they are freed. */
static int let_go(PyObject* object) {
  Gpu* self = (Gpu*)object;
  REFERENCES(PROXYCCL_CLEAR)
  return 0;
}

static void end(PyObject* object) { proxyccl_free(object, let_go); }

static PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* Py_UNUSED(keywords)) {
  PyObject *idle, *more, *finish, *owner;
  unsigned long long order;
  if (!PyArg_ParseTuple(arguments, "KO!OOO", &order, &PyList_Type, &idle, &more, &finish, &owner)) return NULL;
  PyObject* object = PyType_GenericNew(type, NULL, NULL);
  if (object == NULL) return NULL;
  Gpu* self = (Gpu*)object;
  self->order = (const ProxycclStreamOrder*)(uintptr_t)order;
  self->idle = Py_NewRef(idle), self->more = Py_NewRef(more), self->finish = Py_NewRef(finish);
  self->owner = Py_NewRef(owner);
  self->current = PyObject_GetAttrString(owner, "current");
  self->check = self->current == NULL ? NULL : PyObject_GetAttrString(owner, "check");
  self->record = self->check == NULL ? NULL : PyObject_GetAttrString(owner, "record");
  if (self->record != NULL) return object;
  Py_DECREF(object);
  return NULL;
}

static PyMethodDef gpu_methods[] = {{"mark", mark_of, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static PyMemberDef gpu_members[] = {{"owner", T_OBJECT, offsetof(Gpu, owner), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot gpu_slots[] = {{Py_tp_new, make},
                                  {Py_tp_dealloc, end},
                                  {Py_tp_traverse, traverse},
                                  {Py_tp_methods, gpu_methods},
                                  {Py_tp_members, gpu_members},
                                  {0, NULL}};
static PyType_Spec gpu_spec = {
    .name = "proxyccl.torch._device_calls.Gpu",
    .basicsize = sizeof(Gpu),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = gpu_slots,
};
static PyMethodDef mark_methods[] = {
    {"query", query, METH_NOARGS, NULL}, {"hold", hold, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static PyType_Slot mark_slots[] = {
    {Py_tp_dealloc, end_mark}, {Py_tp_call, call_query}, {Py_tp_methods, mark_methods}, {0, NULL}};
static PyType_Spec mark_spec = {
    .name = "proxyccl.torch._device_calls.StreamMark",
    .basicsize = sizeof(StreamMark),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = mark_slots,
};

int proxyccl_add_gpu_types(PyObject* module) {
  if (proxyccl_gpu_type == NULL) proxyccl_gpu_type = (PyTypeObject*)PyType_FromSpec(&gpu_spec);
  if (mark_type == NULL) mark_type = (PyTypeObject*)PyType_FromSpec(&mark_spec);
  if (proxyccl_gpu_type == NULL || mark_type == NULL) return -1;
  if (PyModule_AddObjectRef(module, "StreamMark", (PyObject*)mark_type) != 0) return -1;
  return PyModule_AddObjectRef(module, "Gpu", (PyObject*)proxyccl_gpu_type);
}
