/* Issues torch's calls on a GPU, if the communicator keeps a prepared launch for the call.
 *
 * This extension uses CPython's limited API. The extension reads torch's objects through Python attributes, so it needs
 * none of torch's headers and works with any version of torch. A *mark* is an event that marks a point in a stream. */
#include "queued_call.h"

enum { ADDED_BETWEEN = 128 };

/* Issues calls of one process group on one GPU; see _device_calls.pyi for the members. */
typedef struct {
  PyObject ob_base;
  Gpu* gpu;
  PyObject* make_call; /* the method of Calls or FlowCalls that makes a call */
  PyObject* process;   /* tells whether this process is a forked child, which issues no calls */
  PyObject *own, *numbers, *log, *forget, *work, *hand_out, *source;
  uintptr_t own_stream;
  int blocks;
  unsigned long long count;         /* calls issued */
  unsigned long long marks, waited; /* number of calls with a mark, and on the current stream */
} CallIssuer;

static PyObject *is_here, *async_op, *work_call, *unwaited; /* attributes' names as Python strings, made on import */

/* Returns an attribute of torch's options, or NULL if the attribute does not exist. */
static PyObject* option(PyObject* options, PyObject* name) {
  PyObject* found = PyObject_GetAttr(options, name);
  if (found == NULL) (void)proxyccl_clear_exception();
  return found;
}

/* Returns the tuple (call's name, options for `make_call`). If `name` is None, `named` itself is the tuple. Otherwise
 * `named` is a dict from values of the attribute `name` of torch's options to such tuples. If the dict has no entry for
 * the value, returns NULL. */
static PyObject* find_named(PyObject* options, PyObject* name, PyObject* named) {
  if (name == Py_None) return Py_NewRef(named);
  if (!PyDict_Check(named)) return NULL;
  PyObject* value = options == Py_None ? PyLong_FromLong(0) : option(options, name); /* 0 is torch's default */
  PyObject* found = NULL;
  if (value != NULL && !PyLong_CheckExact(value)) { /* the hash of a ReduceOp is its operator's number */
    const Py_hash_t kind = PyObject_Hash(value);    /* -1 if an exception is set */
    Py_DECREF(value);
    value = kind == -1 ? NULL : PyLong_FromSsize_t(kind);
  }
  if (value != NULL) found = Py_XNewRef(PyDict_GetItemWithError(named, value));
  Py_XDECREF(value);
  if (found == NULL) (void)proxyccl_clear_exception();
  return found;
}

/* Makes one call on a stream for each tensor of a list, and stops before the first call that C can't make. Returns the
 * number of calls made, or -1 with an exception. */
static Py_ssize_t make_calls(CallIssuer* self, PyObject* x, PyObject* out, PyObject* named, PyObject* stream) {
  PyObject* const options = PyTuple_GetItem(named, 1);
  if (options == NULL) return -1;
  const int several = PyList_Check(x);
  const Py_ssize_t count = several ? PyList_Size(x) : 1;
  if (several && (!PyList_Check(out) || PyList_Size(out) != count)) return 0;
  Py_ssize_t done = 0;
  for (; done < count; ++done) {
    /* Other threads may run during a call and change the lists. */
    PyObject* source = Py_XNewRef(several ? PyList_GetItem(x, done) : x);
    PyObject* target = source == NULL ? NULL : Py_XNewRef(several ? PyList_GetItem(out, done) : out);
    PyObject* made =
        target == NULL ? NULL : PyObject_CallFunctionObjArgs(self->make_call, source, target, options, stream, NULL);
    Py_XDECREF(source);
    Py_XDECREF(target);
    if (made == NULL) return -1;
    Py_DECREF(made);
    if (made != Py_True) break;
  }
  self->count += (unsigned long long)done;
  return done;
}

/* Records a call as in progress. If `mark` is not None, the call has ended once the stream has passed the mark. Returns
 * 0, or -1 with an exception. */
static int log_call(CallIssuer* self, PyObject* number, PyObject* name, PyObject* mark) {
  PyObject* entry = PyTuple_Pack(3, number, name, mark);
  PyObject* logged = entry == NULL ? NULL : PyObject_CallFunctionObjArgs(self->log, entry, NULL);
  Py_XDECREF(entry);
  Py_XDECREF(logged);
  if (logged == NULL || mark == Py_None || ++self->marks % ADDED_BETWEEN != 0) return logged == NULL ? -1 : 0;
  PyObject* forgotten = PyObject_CallNoArgs(self->forget);
  Py_XDECREF(forgotten);
  return forgotten == NULL ? -1 : 0;
}

/* Makes and returns one Work for all calls that were just made on a stream. Unless a graph captures the calls, records
 * them as in progress. */
static PyObject* work_of(CallIssuer* self, PyObject* number, PyObject* name, PyObject* x, PyObject* out,
                         uintptr_t stream, int captured) {
  const int blocks = self->blocks && !captured;
  PyObject* call = proxyccl_queued_call(self->gpu, x, out, stream, captured, blocks, self->source);
  if (call == NULL) return NULL;
  PyObject* mark = proxyccl_mark_end(call);
  PyObject* work = mark == NULL && PyErr_Occurred() != NULL ? NULL : PyObject_CallNoArgs(self->work);
  if (work != NULL && (PyObject_SetAttr(work, work_call, call) != 0 || PyObject_SetAttr(work, unwaited, Py_None) != 0))
    Py_CLEAR(work);
  if (work != NULL && !captured && log_call(self, number, name, mark == NULL ? Py_None : mark) != 0) Py_CLEAR(work);
  Py_DECREF(call);
  if (work == NULL) return NULL;
  PyObject* handed_out = PyObject_CallFunctionObjArgs(self->hand_out, work, NULL);
  Py_DECREF(work);
  return handed_out;
}

/* Records a call on the current stream as in progress. Only one in ADDED_BETWEEN calls has a mark; once the stream has
 * passed that mark, the earlier calls have ended as well. Returns None, or NULL with an exception. */
static PyObject* log_waited(CallIssuer* self, PyObject* number, PyObject* name, uintptr_t stream) {
  PyObject* mark = ++self->waited % ADDED_BETWEEN == 0 ? proxyccl_mark(self->gpu, stream) : Py_NewRef(Py_None);
  const int failed = mark == NULL || log_call(self, number, name, mark) != 0;
  Py_XDECREF(mark);
  return failed ? NULL : Py_NewRef(Py_None);
}

/* Records the calls that were just made on a stream as in progress. Returns the calls' Work, or None if the calls are
 * synchronous and `blocks` is 0. */
static PyObject* record(CallIssuer* self, PyObject* named, PyObject* x, PyObject* out, uintptr_t stream, int waits) {
  PyObject* const name = PyTuple_GetItem(named, 0);
  PyObject* number = name == NULL ? NULL : PyIter_Next(self->numbers);
  if (number == NULL) return NULL;
  const int captured = proxyccl_stream_capture(self->gpu->order, stream) != 0;
  PyObject* work;
  if (!waits || self->blocks)
    work = work_of(self, number, name, x, out, stream, captured);
  else
    work = captured ? Py_NewRef(Py_None) : log_waited(self, number, name, stream);
  Py_DECREF(number);
  return work;
}

/* Returns NotImplemented, after which Python makes the call; if an exception is set, returns NULL. */
static PyObject* not_issued(void) { return PyErr_Occurred() != NULL ? NULL : Py_NewRef(Py_NotImplemented); }

static PyObject* issue_named(CallIssuer* self, PyObject* x, PyObject* out, PyObject* options, PyObject* named) {
  PyObject* here = option(self->process, is_here);
  Py_XDECREF(here); /* True and False are never freed */
  if (here != Py_True) return not_issued();
  PyObject* continues = options == Py_None ? NULL : option(options, async_op);
  Py_XDECREF(continues);
  if (continues == NULL && PyErr_Occurred() != NULL) return NULL;
  const int waits = continues == Py_False;
  PyObject* current = PyObject_CallNoArgs(self->gpu->current);
  if (current == NULL) return NULL;
  const uintptr_t first = (uintptr_t)PyLong_AsUnsignedLongLong(current), handle = waits ? first : self->own_stream;
  const int ordered = PyErr_Occurred() == NULL && (waits || proxyccl_follow(self->gpu, first, handle) == 0);
  const Py_ssize_t done = ordered ? make_calls(self, x, out, named, waits ? current : self->own) : -1;
  Py_DECREF(current);
  if (done < 0) return NULL;
  if (done == 0) Py_RETURN_NOTIMPLEMENTED;
  if (!PyList_Check(x)) return record(self, named, x, out, handle, waits);
  PyObject* first_x = PyList_GetSlice(x, 0, done);
  PyObject* first_out = out == x ? Py_XNewRef(first_x) : PyList_GetSlice(out, 0, done);
  PyObject* work = first_x == NULL || first_out == NULL ? NULL : record(self, named, first_x, first_out, handle, waits);
  PyObject* result = NULL;
  if (work != NULL) result = done == PyList_Size(x) ? Py_NewRef(work) : Py_BuildValue("nO", done, work);
  Py_XDECREF(first_x);
  Py_XDECREF(first_out);
  Py_XDECREF(work);
  return result;
}

static PyObject* issue(CallIssuer* self, PyObject* const* arguments, Py_ssize_t count) {
  if (!proxyccl_has_arguments(count, 5, "issue(x, out, opts, attribute, named)")) return NULL;
  if (self->make_call == NULL) Py_RETURN_NOTIMPLEMENTED; /* the garbage collector has cleared this issuer */
  PyObject* named = find_named(arguments[2], arguments[3], arguments[4]);
  PyObject* work = named == NULL || !PyTuple_Check(named)
                       ? not_issued()
                       : issue_named(self, arguments[0], arguments[1], arguments[2], named);
  Py_XDECREF(named);
  return work;
}

#define REFERENCES(apply)                                                                                   \
  apply(gpu) apply(make_call) apply(process) apply(own) apply(numbers) apply(log) apply(forget) apply(work) \
      apply(hand_out) apply(source)

PROXYCCL_COLLECT_ALL(issuer, CallIssuer, REFERENCES)

static PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* Py_UNUSED(keywords)) {
  PyObject *gpu, *make_call, *process, *own, *numbers, *log, *forget, *work, *hand_out, *source;
  int blocks;
  if (!PyArg_ParseTuple(arguments, "O!OOO!OOOOOOp", proxyccl_gpu_type, &gpu, &make_call, &process, &PyLong_Type, &own,
                        &numbers, &log, &forget, &work, &hand_out, &source, &blocks))
    return NULL;
  const unsigned long long own_stream = PyLong_AsUnsignedLongLong(own);
  if (PyErr_Occurred() != NULL) return NULL;
  PyObject* object = PyType_GenericNew(type, NULL, NULL);
  if (object == NULL) return NULL;
  CallIssuer* self = (CallIssuer*)object;
  self->gpu = (Gpu*)Py_NewRef(gpu), self->make_call = Py_NewRef(make_call), self->process = Py_NewRef(process);
  self->own = Py_NewRef(own), self->own_stream = (uintptr_t)own_stream, self->numbers = Py_NewRef(numbers);
  self->log = Py_NewRef(log), self->forget = Py_NewRef(forget), self->work = Py_NewRef(work);
  self->hand_out = Py_NewRef(hand_out), self->source = Py_NewRef(source), self->blocks = blocks;
  return object;
}

static PyMethodDef methods[] = {
    {"issue", (PyCFunction)(void (*)(void))issue, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef members[] = {
    {"count", T_ULONGLONG, offsetof(CallIssuer, count), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, issuer_end},
    {Py_tp_traverse, issuer_traverse},
    {Py_tp_clear, issuer_clear},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

static int intern_names(void) {
  is_here = PyUnicode_InternFromString("is_here");
  async_op = PyUnicode_InternFromString("asyncOp");
  work_call = PyUnicode_InternFromString("_call");
  unwaited = PyUnicode_InternFromString("_unwaited");
  return is_here != NULL && async_op != NULL && work_call != NULL && unwaited != NULL ? 0 : -1;
}

static int add_types(PyObject* module) {
  if (intern_names() != 0) return -1;
  if (PyModule_AddIntConstant(module, "ADDED_BETWEEN", ADDED_BETWEEN) != 0) return -1;
  if (proxyccl_add_queued_call(module) != 0) return -1;
  static PyTypeObject* type;
  return proxyccl_add_type(module, &type, NULL, "proxyccl.torch._device_calls.CallIssuer", sizeof(CallIssuer),
                           Py_TPFLAGS_HAVE_GC, slots);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, add_types}, {0, NULL}};
static PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_device_calls",
    .m_size = 0,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__device_calls(void) { return PyModuleDef_Init(&module); }
