#include "queued_call.h"

/* A point in a stream, marked by an event. The event is reused when the mark is freed. */
typedef struct {
  PyObject ob_base;
  Gpu* gpu;
  uintptr_t event;
} StreamMark;

typedef struct {
  PyObject ob_base;
  Gpu* gpu;
  PyObject *x, *out; /* one tensor, or a list or tuple of tensors */
  PyObject *mark, *error, *future, *source;
  unsigned long long stream;
  char captured, unrecorded, blocks;
} QueuedCall;

PyTypeObject* proxyccl_gpu_type;
static PyTypeObject *mark_type, *call_type; /* the types StreamMark and QueuedCall */

/* Returns an unused event, or 0 with an exception. */
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

/* Gives an event back for reuse. Sets no exception, and preserves an exception that is set. */
static void give_event(const Gpu* self, uintptr_t event) {
  PyObject *type, *error, *traceback;
  PyErr_Fetch(&type, &error, &traceback);
  PyObject* number = PyLong_FromUnsignedLongLong(event);
  if (number == NULL || PyList_Append(self->idle, number) != 0) PyErr_Clear(); /* the event is lost */
  Py_XDECREF(number);
  PyErr_Restore(type, error, traceback);
}

/* Checks the status of a call of stream_order.h. If the status is not 0, calls `finish`, which completes the call or
 * raises an error. Returns 0, or -1 with an exception. */
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
  give_event(self, event); /* recording the event again does not change what the stream waits for */
  return failed;
}

static int hold_stream(const StreamMark* mark, PyObject* stream) {
  const uintptr_t handle = (uintptr_t)PyLong_AsUnsignedLongLong(stream);
  if (PyErr_Occurred() != NULL) return -1;
  const uintptr_t arguments[] = {handle, mark->event};
  const int status = proxyccl_stream_wait(mark->gpu->order, handle, mark->event);
  return finished(mark->gpu, status, "stream wait", arguments, 2);
}

/* Makes later work of torch's current stream wait for a mark. Returns 0, or -1 with an exception. */
static int hold_current(Gpu* self, PyObject* mark) {
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

static PyObject* hold_mark(PyObject* mark, PyObject* stream) {
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

#define GPU_REFERENCES(apply) \
  apply(idle) apply(more) apply(finish) apply(owner) apply(current) apply(check) apply(record)

/* gpu_clear is not the type's tp_clear, because calls and marks use their Gpu until they are freed themselves. */
PROXYCCL_COLLECT_ALL(gpu, Gpu, GPU_REFERENCES)

static PyObject* make_gpu(PyTypeObject* type, PyObject* arguments, PyObject* Py_UNUSED(keywords)) {
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
static PyType_Slot gpu_slots[] = {{Py_tp_new, make_gpu},          {Py_tp_dealloc, gpu_end},
                                  {Py_tp_traverse, gpu_traverse}, {Py_tp_methods, gpu_methods},
                                  {Py_tp_members, gpu_members},   {0, NULL}};
static PyMethodDef mark_methods[] = {
    {"query", query, METH_NOARGS, NULL}, {"hold", hold_mark, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static PyType_Slot mark_slots[] = {
    {Py_tp_dealloc, end_mark}, {Py_tp_call, call_query}, {Py_tp_methods, mark_methods}, {0, NULL}};

/* -- calls -- */

PyObject* proxyccl_queued_call(Gpu* gpu, PyObject* x, PyObject* out, uintptr_t stream, int captured, int blocks,
                               PyObject* source) {
  PyObject* object = PyType_GenericAlloc(call_type, 0);
  if (object == NULL) return NULL;
  QueuedCall* self = (QueuedCall*)object;
  self->gpu = (Gpu*)Py_NewRef((PyObject*)gpu);
  self->x = Py_NewRef(x), self->out = Py_NewRef(out), self->source = Py_NewRef(source);
  self->stream = stream, self->captured = (char)captured, self->unrecorded = 1, self->blocks = (char)blocks;
  return object;
}

static void replace(PyObject** member, PyObject* value) {
  PyObject* old = *member;
  *member = value;
  Py_XDECREF(old);
}

/* If an Exception is set, moves it into the call's `error`. Other exceptions, such as KeyboardInterrupt, stay set. */
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
  if (hold_current(self->gpu, self->mark == NULL ? Py_None : self->mark) != 0) return NULL;
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

/* Returns 0 for a captured call, because a query of a captured event would invalidate the capture. */
static int has_ended(const QueuedCall* self) {
  if (self->captured || self->mark == NULL) return 0;
  return proxyccl_event_query(self->gpu->order, ((const StreamMark*)self->mark)->event) == 0;
}

/* Tells torch's allocator that the call's stream uses the tensors, so that their memory is not reused before the call
 * has ended. If the call has ended, or the caller's stream has waited for the call, does nothing. */
static void record(PyObject* object) {
  QueuedCall* self = (QueuedCall*)object;
  if (!self->unrecorded) return;
  self->unrecorded = 0;
  if (has_ended(self)) return;
  PyObject *type, *error, *traceback;
  PyErr_Fetch(&type, &error, &traceback);
  PyObject* tensors = all_tensors(object);
  PyObject* recorded = tensors == NULL ? NULL : PyObject_CallFunction(self->gpu->record, "OK", tensors, self->stream);
  if (recorded == NULL) PyErr_WriteUnraisable(self->gpu->record);
  Py_XDECREF(recorded);
  Py_XDECREF(tensors);
  PyErr_Restore(type, error, traceback);
}

/* The garbage collector clears the OPTIONAL members, which a call can do without. The REQUIRED members are cleared when
 * the call is freed. */
#define OPTIONAL(apply) apply(error) apply(future)
#define REQUIRED(apply) apply(gpu) apply(x) apply(out) apply(mark) apply(source)

static int traverse_call(PyObject* object, visitproc visit, void* arg) {
  QueuedCall* self = (QueuedCall*)object;
  Py_VISIT(Py_TYPE(object));
  OPTIONAL(PROXYCCL_VISIT)
  REQUIRED(PROXYCCL_VISIT)
  return 0;
}

static int clear_call(PyObject* object) {
  QueuedCall* self = (QueuedCall*)object;
  record(object);
  OPTIONAL(PROXYCCL_CLEAR)
  return 0;
}

static int clear_all(PyObject* object) {
  QueuedCall* self = (QueuedCall*)object;
  clear_call(object);
  REQUIRED(PROXYCCL_CLEAR)
  return 0;
}

static void end_call(PyObject* object) { proxyccl_free(object, clear_all); }

static PyObject* make_call(PyTypeObject* Py_UNUSED(type), PyObject* arguments, PyObject* Py_UNUSED(keywords)) {
  PyObject *gpu, *x, *out, *source;
  unsigned long long stream;
  int captured, blocks;
  if (!PyArg_ParseTuple(arguments, "O!OOKppO", proxyccl_gpu_type, &gpu, &x, &out, &stream, &captured, &blocks, &source))
    return NULL;
  return proxyccl_queued_call((Gpu*)gpu, x, out, (uintptr_t)stream, captured, blocks, source);
}

static PyMethodDef call_methods[] = {
    {"mark_end", mark_end, METH_NOARGS, NULL},
    {"check", check, METH_NOARGS, NULL},
    {"hold", hold, METH_NOARGS, NULL},
    {"outputs", outputs, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef call_members[] = {
    {"gpu", T_OBJECT, offsetof(QueuedCall, gpu), READONLY, NULL},
    {"mark", T_OBJECT, offsetof(QueuedCall, mark), READONLY, NULL},
    {"error", T_OBJECT, offsetof(QueuedCall, error), 0, NULL},
    {"future", T_OBJECT, offsetof(QueuedCall, future), 0, NULL},
    {"source", T_OBJECT, offsetof(QueuedCall, source), READONLY, NULL},
    {"stream", T_ULONGLONG, offsetof(QueuedCall, stream), READONLY, NULL},
    {"blocks", T_BOOL, offsetof(QueuedCall, blocks), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot call_slots[] = {
    {Py_tp_new, make_call},
    {Py_tp_dealloc, end_call},
    {Py_tp_traverse, traverse_call},
    {Py_tp_clear, clear_call},
    {Py_tp_methods, call_methods},
    {Py_tp_members, call_members},
    {0, NULL},
};

int proxyccl_add_queued_call(PyObject* module) {
  if (proxyccl_add_type(module, &proxyccl_gpu_type, NULL, "proxyccl.torch._device_calls.Gpu", sizeof(Gpu),
                        Py_TPFLAGS_HAVE_GC, gpu_slots) != 0 ||
      proxyccl_add_type(module, &mark_type, NULL, "proxyccl.torch._device_calls.StreamMark", sizeof(StreamMark),
                        Py_TPFLAGS_DISALLOW_INSTANTIATION, mark_slots) != 0)
    return -1;
  return proxyccl_add_type(module, &call_type, NULL, "proxyccl.torch._device_calls.QueuedCall", sizeof(QueuedCall),
                           Py_TPFLAGS_HAVE_GC, call_slots);
}
