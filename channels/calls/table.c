/* Makes every call of a group: finds the form by the call's signature, or lets Python prepare it; fills in the arrays'
 * addresses; and has the engine log, compare and launch the call.
 *
 * The code is in C, because the core's caches and branch predictors become cold between two calls, and a cold
 * interpreter takes several times as long as in a tight loop.
 *
 * The code reads Python objects, so it uses CPython's limited API instead of cffi.
 */
#include "calls.h"
#include "kept_forms.h"
#include "launch.h"
#include "stream_order.h"

enum { LEAST_LENT_BYTES = 1 << 20, MOST_NOTES = 256, MOST_WANTED = 16 };
enum { MOST_OPTIONS = 10 };

/* An array that calls could use in place if peers could access the array. */
typedef struct Note {
  uintptr_t at;
  size_t bytes;
} Note;

typedef struct Calls {
  PyObject ob_base;
  PyObject* arguments;         /* the constructor's arguments, which own the objects that other fields borrow */
  PyObject *acquire, *release; /* owned references */
  ArrayTypes types;
  Py_ssize_t rank;
  PyTypeObject* current_stream;
  PyObject *refuse, *turn, *context, *keep;
  int direct;       /* 1 if C may issue a call on `stream` without calling `turn` */
  uintptr_t stream; /* the stream of the latest call */
  int on_host;
  const ProxycclStreamOrder* order; /* the functions that order streams; NULL on the host */
  uintptr_t event, thread_stream;
  Reach reach;
  KeptForms forms;
  uint64_t changes; /* counts the changes of state on which forms depend */
  unsigned long long made, prepared;
  Note notes[MOST_NOTES]; /* notes since the last take_notes; when full, new notes are dropped */
  size_t note_count;
  Note wanted[MOST_WANTED]; /* arrays to lend: the next call with one of them passes it to `lend` */
  size_t wanted_count;
  PyObject* lend;
} Calls;

/* -- streams --- */

static int call_turn(Calls* self, PyObject* stream, uintptr_t* handle) {
  *handle = proxyccl_take_address(PyObject_CallFunctionObjArgs(self->turn, stream, NULL)); /* calls set_stream */
  return PyErr_Occurred() != NULL ? -1 : 0;
}

/* Orders a call's stream after the latest call, and stores the stream's handle. The caller holds the lock. Returns 0,
 * or -1 with an exception. */
static int turn_to(Calls* self, PyObject* stream, uintptr_t* handle) {
  if (stream == Py_None && self->on_host && self->direct) {
    *handle = self->stream;
    return 0;
  }
  if (!PyLong_Check(stream) || PyBool_Check(stream)) return call_turn(self, stream, handle);
  *handle = (uintptr_t)PyLong_AsUnsignedLongLong(stream);
  if (PyErr_Occurred() != NULL) {
    PyErr_Clear(); /* `turn` raises the proper error */
    return call_turn(self, stream, handle);
  }
  if (self->on_host || !self->direct || *handle == self->thread_stream) return call_turn(self, stream, handle);
  if (proxyccl_stream_capture(self->order, *handle) != 0) return call_turn(self, stream, handle);
  if (self->stream == *handle) return 0;
  if (proxyccl_stream_follow(self->order, self->event, self->stream, *handle, 1) == 0) {
    self->stream = *handle;
    return 0;
  }
  return call_turn(self, stream, handle);
}

/* -- issuing --- */

/* Issues a call, with the lock held; if it was `logged` before, only launches it. Returns the driver's status, or a
 * status of calls.h. */
static int issue(const PreparedCall* prepared, int logged, uintptr_t stream) {
  int status;
  Py_BEGIN_ALLOW_THREADS;
  status = prepared->issue(prepared->callers, logged ? NULL : prepared->call, prepared->launch, stream);
  Py_END_ALLOW_THREADS;
  return status;
}

/* Calls `issue`; if the device's context is not current, makes it current and calls `issue` again. Returns 0 and stores
 * the status, or -1 with an exception. */
static int issue_in_context(Calls* self, const PreparedCall* prepared, int logged, uintptr_t stream, int* status) {
  *status = issue(prepared, logged, stream);
  if (*status != PROXYCCL_OTHER_CONTEXT) return 0;
  PyObject* context = proxyccl_enter_context(self->context);
  if (context == NULL) return -1;
  *status = issue(prepared, logged, stream);
  return proxyccl_leave_context(context);
}

static int refuse(Calls* self, int status, PyObject* kept) {
  PyObject* refused = status == 0 ? NULL : PyObject_CallFunction(self->refuse, "iO", status, kept);
  Py_XDECREF(refused);
  return PyErr_Occurred() != NULL ? -1 : 0;
}

static int take_lock(Calls* self) { return proxyccl_take_result(PyObject_CallNoArgs(self->acquire)); }

/* The state of a call while it is being made. */
typedef struct Making {
  PyObject *x, *out, *options, *stream;
  GivenArray arrays[PROXYCCL_MOST_ARRAYS];
  Signature signature;
  CallForm* form;
  uintptr_t handle;
  int kept_alone, logged;
} Making;

/* Stores in the call and its signature how peers can access the arrays. Returns the output's range that all kernels can
 * access, or NULL. */
static const ReachedRange* look_up_reach(const Calls* self, Making* call) {
  const ReachedRange* last = NULL;
  for (size_t i = 0; i < call->signature.count; ++i) {
    GivenArray* array = &call->arrays[i];
    array->kind.reach = (uint16_t)proxyccl_find_reached(&self->reach, array->at, array->bytes, &last);
  }
  proxyccl_hash_signature(&call->signature);
  return PyTuple_Check(call->out) ? NULL : last;
}

/* Prepares a form in Python, without the lock, and keeps it. `reached`: whether kernels of all ranks can access the
 * output. Returns 0, or -1 with an exception. */
static int prepare(Calls* self, Making* call, int reached) {
  const size_t count = call->signature.count;
  const uint64_t changes = self->changes; /* if this count changes during the preparation, the form may be outdated */
  PyObject* made = PyObject_CallFunctionObjArgs(PyTuple_GetItem(call->options, 0), call->x, call->out, call->options,
                                                reached ? Py_True : Py_False, call->logged ? Py_True : Py_False, NULL);
  if (made == NULL) return -1;
  if (!proxyccl_is_form(made)) {
    PyErr_Format(PyExc_TypeError, "expected a Form, not %R", (PyObject*)Py_TYPE(made));
    Py_DECREF(made);
    return -1;
  }
  call->form = (CallForm*)made, call->logged = 1;
  self->prepared += 1;
  for (size_t i = 0; i < call->form->relocation_count; ++i)
    if (call->form->relocations[i].array >= count) {
      PyErr_SetString(PyExc_ValueError, "the form has an address in an array that the call does not have");
      return -1;
    }
  return changes == self->changes ? proxyccl_keep_form(&self->forms, &call->signature, call->form) : 0;
}

/* Returns whether a form that was prepared without the lock is still valid: during the preparation, arrays may have
 * become unreachable for peers. */
static int still_fits(const Making* call, const ArrayKind* before, const ReachedRange* output) {
  for (size_t i = 0; i < call->signature.count; ++i)
    if (before[i].reach & ~call->arrays[i].kind.reach) return 0;
  return call->form->peers_words == NULL || output != NULL;
}

/* Notes the array that is announced to peers if calls use it often; if the array is in `wanted`, passes it to `lend`.
 * The caller has issued the call and keeps its arrays, because this function may fail. Returns 0, or -1 with an
 * exception. */
static int note_lent(Calls* self, const Making* call) {
  if (call->form->lent < 0) return 0;
  const size_t last = call->signature.count - 1, lent = (size_t)call->form->lent;
  const GivenArray* array = &call->arrays[lent < last ? lent : last];
  if (array->kind.reach != 0 || array->bytes < LEAST_LENT_BYTES) return 0;
  for (size_t i = 0; i < self->wanted_count; ++i) {
    if (self->wanted[i].at != array->at || self->wanted[i].bytes != array->bytes) continue;
    self->wanted[i] = self->wanted[--self->wanted_count];
    PyObject* lend = Py_NewRef(self->lend); /* `want` may replace self->lend during the call */
    const int lent = proxyccl_take_result(
        PyObject_CallFunction(lend, "KK", (unsigned long long)array->at, (unsigned long long)array->bytes));
    Py_DECREF(lend);
    return lent;
  }
  if (self->note_count < MOST_NOTES) self->notes[self->note_count++] = (Note){array->at, array->bytes};
  return 0;
}

/* Finds or prepares the form, and issues the call. Returns 1; 0 if no form is kept and `kept_alone` is set; -1 with an
 * exception. */
static int find_and_issue(Calls* self, Making* call) {
  if (take_lock(self) != 0) return -1;
  if (turn_to(self, call->stream, &call->handle) != 0) return proxyccl_leave_lock(self->release, -1);
  const ReachedRange* output = look_up_reach(self, call);
  while ((call->form = proxyccl_find_form(&self->forms, &call->signature)) == NULL) {
    if (proxyccl_leave_lock(self->release, 0) != 0) return -1;
    if (call->kept_alone) return 0;
    if (prepare(self, call, output != NULL) != 0 || take_lock(self) != 0) return -1;
    if (turn_to(self, call->stream, &call->handle) != 0) return proxyccl_leave_lock(self->release, -1);
    ArrayKind before[PROXYCCL_MOST_ARRAYS];
    for (size_t i = 0; i < call->signature.count; ++i) before[i] = call->arrays[i].kind;
    output = look_up_reach(self, call);
    if (still_fits(call, before, output)) break;
    Py_CLEAR(call->form);
  }
  proxyccl_fill_form(call->form, call->arrays, call->signature.count, output);
  int status;
  if (issue_in_context(self, &call->form->prepared, call->logged, call->handle, &status) != 0)
    return proxyccl_leave_lock(self->release, -1);
  if (refuse(self, status, call->form->prepared.kept) != 0) return proxyccl_leave_lock(self->release, -1);
  self->made += 1;
  return proxyccl_leave_lock(self->release, 1);
}

/* Reads an array, or the arrays of a tuple. Returns the same values as `read_arrays`. */
static int read_given(const Calls* self, Making* call, PyObject* given) {
  Signature* signature = &call->signature;
  const int is_tuple = PyTuple_Check(given);
  const Py_ssize_t count = is_tuple ? PyTuple_Size(given) : 1;
  if (signature->count + (size_t)count > PROXYCCL_MOST_ARRAYS) {
    PyErr_Format(PyExc_TypeError, "expected at most %d arrays", PROXYCCL_MOST_ARRAYS);
    return -1;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* array = is_tuple ? PyTuple_GetItem(given, i) : given;
    const int read = proxyccl_read_array(&self->types, array, &call->arrays[signature->count]);
    if (read <= 0) return read;
    signature->count += 1;
  }
  return 1;
}

/* Reads the arrays. Returns 1; 0 if an array can't be read, or -1 with an exception that the program raised. */
static int read_arrays(const Calls* self, Making* call) {
  Signature* signature = &call->signature;
  const int read = read_given(self, call, call->x);
  if (read <= 0) return read;
  if (call->out == call->x && !PyTuple_Check(call->x)) { /* x and out are one array, which is read once */
    signature->relations = TOGETHER;
    return 1;
  }
  const int read_out = read_given(self, call, call->out);
  if (read_out > 0 && proxyccl_relate(signature, (size_t)self->rank))
    call->kept_alone = 0; /* Python raises the error */
  return read_out;
}

static int make_call(Calls* self, Making* call) {
  if (!PyTuple_Check(call->options) || PyTuple_Size(call->options) == 0 || PyTuple_Size(call->options) > MOST_OPTIONS) {
    PyErr_Format(PyExc_TypeError, "options: expected a tuple of 1 to %d", MOST_OPTIONS);
    return -1;
  }
  call->signature = (Signature){.options = call->options, .arrays = call->arrays};
  const int read = read_arrays(self, call);
  int made = read;
  if (read > 0) made = find_and_issue(self, call);
  for (size_t i = 0; i < call->signature.count; ++i) proxyccl_release_array(&call->arrays[i]);
  return made;
}

/* Initializes a call from its four arguments, except for the large arrays in `call`. */
static void begin(Making* call, PyObject* const* arguments, int kept_alone) {
  call->x = arguments[0], call->out = arguments[1], call->options = arguments[2], call->stream = arguments[3];
  call->form = NULL, call->logged = 0, call->kept_alone = kept_alone;
}

static PyObject* call_kept(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  if (!proxyccl_has_arguments(count, 4, "call_kept(x, out, options, stream)")) return NULL;
  Making call;
  begin(&call, arguments, 1);
  int made = make_call((Calls*)object, &call);
  if (made > 0 && note_lent((Calls*)object, &call) != 0) made = -1;
  Py_XDECREF((PyObject*)call.form);
  return made < 0 ? NULL : PyBool_FromLong(made);
}

static PyObject* make_any(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  if (!proxyccl_has_arguments(count, 4, "call(x, out, options, stream)")) return NULL;
  Calls* self = (Calls*)object;
  Making call;
  begin(&call, arguments, 0);
  int made = make_call(self, &call);
  if (made > 0 && call.stream != Py_None && Py_TYPE(call.stream) != self->current_stream &&
      proxyccl_take_result(PyObject_CallFunction(self->keep, "(OOO)OK", call.x, call.out, (PyObject*)call.form,
                                                 call.stream, (unsigned long long)call.handle)) != 0)
    made = -1;
  if (made > 0 && note_lent(self, &call) != 0) made = -1;
  Py_XDECREF((PyObject*)call.form);
  return made < 0 ? NULL : PyBool_FromLong(made);
}

int proxyccl_issue_prepared(PyObject* calls, const PreparedCall* call, PyObject* stream) {
  Calls* self = (Calls*)calls;
  if (!self->direct && stream == NULL) return 0;
  if (take_lock(self) != 0) return -1;
  if (!self->direct && stream == NULL) return proxyccl_leave_lock(self->release, 0);
  uintptr_t handle = self->stream;
  if (stream != NULL && turn_to(self, stream, &handle) != 0) return proxyccl_leave_lock(self->release, -1);
  int status;
  PyObject* kept = Py_NewRef(call->kept);
  int issued = issue_in_context(self, call, 0, handle, &status);
  if (issued == 0) issued = refuse(self, status, kept);
  Py_DECREF(kept);
  return proxyccl_leave_lock(self->release, issued != 0 ? -1 : 1);
}

/* -- the object --- */

static PyObject* clear(PyObject* object, PyObject* Py_UNUSED(nothing)) {
  Calls* self = (Calls*)object;
  self->changes += 1;
  proxyccl_drop_all_forms(&self->forms);
  Py_RETURN_NONE;
}

static PyObject* forget(PyObject* object, PyObject* arguments) {
  Calls* self = (Calls*)object;
  unsigned long long start, end;
  if (!PyArg_ParseTuple(arguments, "KK", &start, &end)) return NULL;
  self->changes += 1;
  proxyccl_drop_forms_of(&self->forms, (uintptr_t)start, (uintptr_t)end);
  Py_RETURN_NONE;
}

static PyObject* set_reached(PyObject* object, PyObject* arguments) {
  Calls* self = (Calls*)object;
  unsigned long long start, end, holds, guard;
  PyObject *bases, *kept;
  long number;
  int proxies;
  if (!PyArg_ParseTuple(arguments, "lKKOiKKO", &number, &start, &end, &bases, &proxies, &holds, &guard, &kept))
    return NULL;
  ReachedRange range = {.number = number, .start = (uintptr_t)start, .end = (uintptr_t)end};
  range.reached = (unsigned)proxies;
  range.holds = (int (*)(const void*, uint64_t, uint64_t))(uintptr_t)holds, range.guard = (const void*)(uintptr_t)guard;
  if (bases != Py_None) {
    const Py_ssize_t ranks = PyList_Size(bases);
    if (ranks < 0 || (range.bases = PyMem_Calloc((size_t)ranks + 1, sizeof *range.bases)) == NULL)
      return ranks < 0 ? NULL : PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < ranks; ++i)
      range.bases[i] = (uintptr_t)PyLong_AsUnsignedLongLong(PyList_GetItem(bases, i));
    range.reached |= PROXYCCL_REACHED_BY_KERNELS;
    if (PyErr_Occurred() != NULL) {
      PyMem_Free(range.bases);
      return NULL;
    }
  }
  range.kept = Py_NewRef(kept);
  self->changes += 1;
  if (proxyccl_set_reached(&self->reach, &range) != 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject* unset_reached(PyObject* object, PyObject* number) {
  Calls* self = (Calls*)object;
  const long range = PyLong_AsLong(number);
  if (PyErr_Occurred() != NULL) return NULL;
  self->changes += 1;
  proxyccl_unset_reached(&self->reach, range);
  Py_RETURN_NONE;
}

static PyObject* take_notes(PyObject* object, PyObject* Py_UNUSED(nothing)) {
  Calls* self = (Calls*)object;
  PyObject* taken = PyList_New(0);
  for (size_t i = 0; taken != NULL && i < self->note_count; ++i) {
    PyObject* note =
        Py_BuildValue("(KK)", (unsigned long long)self->notes[i].at, (unsigned long long)self->notes[i].bytes);
    if (note == NULL || PyList_Append(taken, note) != 0) Py_CLEAR(taken);
    Py_XDECREF(note);
  }
  self->note_count = 0;
  return taken;
}

static PyObject* want(PyObject* object, PyObject* arguments) {
  Calls* self = (Calls*)object;
  unsigned long long at, bytes;
  PyObject* lend;
  if (!PyArg_ParseTuple(arguments, "KKO", &at, &bytes, &lend)) return NULL;
  PyObject* before = self->lend;
  self->lend = Py_NewRef(lend);
  Py_XDECREF(before);
  if (self->wanted_count == MOST_WANTED) self->wanted_count = 0; /* calls that use the arrays again note them again */
  self->wanted[self->wanted_count++] = (Note){(uintptr_t)at, (size_t)bytes};
  Py_RETURN_NONE;
}

static PyObject* reach_of(PyObject* object, PyObject* arguments) {
  unsigned long long at, bytes;
  const ReachedRange* range;
  if (!PyArg_ParseTuple(arguments, "KK", &at, &bytes)) return NULL;
  return PyLong_FromUnsignedLong(proxyccl_find_reached(&((Calls*)object)->reach, (uintptr_t)at, (size_t)bytes, &range));
}

static PyObject* set_stream(PyObject* object, PyObject* stream) {
  Calls* self = (Calls*)object;
  const uintptr_t handle = stream == Py_None ? 0 : (uintptr_t)PyLong_AsUnsignedLongLong(stream);
  if (PyErr_Occurred() != NULL) return NULL;
  self->stream = handle;
  self->direct = stream != Py_None;
  Py_RETURN_NONE;
}

static PyObject* order_by(PyObject* object, PyObject* arguments) {
  Calls* self = (Calls*)object;
  unsigned long long order, event, thread_stream;
  if (!PyArg_ParseTuple(arguments, "KKK", &order, &event, &thread_stream)) return NULL;
  self->order = (const ProxycclStreamOrder*)(uintptr_t)order;
  self->event = (uintptr_t)event, self->thread_stream = (uintptr_t)thread_stream;
  Py_RETURN_NONE;
}

static PyObject* stream_of_calls(PyObject* object, void* Py_UNUSED(closure)) {
  const Calls* self = (const Calls*)object;
  if (!self->direct) Py_RETURN_NONE;
  return PyLong_FromUnsignedLongLong(self->stream);
}

#define REFERENCES(apply) apply(arguments) apply(acquire) apply(release) apply(lend)

static int traverse(PyObject* object, visitproc visit, void* arg) {
  Calls* self = (Calls*)object;
  Py_VISIT(Py_TYPE(object));
  REFERENCES(PROXYCCL_VISIT)
  const int visited = proxyccl_visit_reach(&self->reach, visit, arg);
  return visited != 0 ? visited : proxyccl_visit_forms(&self->forms, visit, arg);
}

/* Leaves the objects of `arguments`: every reference cycle through them also has an object that can be cleared. */
static int let_go(PyObject* object) {
  Calls* self = (Calls*)object;
  self->direct = 0;
  proxyccl_drop_all_forms(&self->forms);
  proxyccl_clear_reach(&self->reach);
  self->wanted_count = 0; /* only calls with a wanted array use `lend` */
  Py_CLEAR(self->lend);
  return 0;
}

static int let_all_go(PyObject* object) {
  Calls* self = (Calls*)object;
  let_go(object);
  REFERENCES(PROXYCCL_CLEAR)
  return 0;
}

static void end(PyObject* object) { proxyccl_free(object, let_all_go); }

static PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* Py_UNUSED(keywords)) {
  PyObject *object = PyType_GenericNew(type, NULL, NULL), *lock;
  Calls* self = (Calls*)object;
  if (object == NULL) return NULL;
  self->arguments = Py_NewRef(arguments);
  if (PyArg_ParseTuple(arguments, "O&nOO!(OOOO)", proxyccl_as_array_types, &self->types, &self->rank, &lock,
                       &PyType_Type, &self->current_stream, &self->refuse, &self->turn, &self->context, &self->keep) &&
      (self->acquire = PyObject_GetAttrString(lock, "acquire")) != NULL)
    self->release = PyObject_GetAttrString(lock, "release");
  self->on_host = self->types.device < 0;
  if (self->release != NULL) return object;
  Py_DECREF(object);
  return NULL;
}

static PyMethodDef methods[] = {
    {"call", (PyCFunction)(void (*)(void))make_any, METH_FASTCALL, NULL},
    {"call_kept", (PyCFunction)(void (*)(void))call_kept, METH_FASTCALL, NULL},
    {"clear", clear, METH_NOARGS, NULL},
    {"forget", forget, METH_VARARGS, NULL},
    {"set_reached", set_reached, METH_VARARGS, NULL},
    {"unset_reached", unset_reached, METH_O, NULL},
    {"reach_of", reach_of, METH_VARARGS, NULL},
    {"take_notes", take_notes, METH_NOARGS, NULL},
    {"want", want, METH_VARARGS, NULL},
    {"set_stream", set_stream, METH_O, NULL},
    {"order_by", order_by, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef members[] = {
    {"made", T_ULONGLONG, offsetof(Calls, made), READONLY, NULL},
    {"prepared", T_ULONGLONG, offsetof(Calls, prepared), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyGetSetDef attributes[] = {
    {"stream", stream_of_calls, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, make},        {Py_tp_dealloc, end},     {Py_tp_traverse, traverse}, {Py_tp_clear, let_go},
    {Py_tp_methods, methods}, {Py_tp_members, members}, {Py_tp_getset, attributes}, {0, NULL},
};

static PyTypeObject* calls_type;

int proxyccl_require_calls(PyObject* object) {
  if (PyObject_TypeCheck(object, calls_type)) return 1;
  PyErr_SetString(PyExc_TypeError, "expected Calls");
  return 0;
}

const ArrayTypes* proxyccl_types_of(PyObject* calls) { return &((Calls*)calls)->types; }

void proxyccl_count(PyObject* calls, int made, int prepared) {
  ((Calls*)calls)->made += (unsigned)made, ((Calls*)calls)->prepared += (unsigned)prepared;
}

int proxyccl_add_calls(PyObject* module) {
  if (PyModule_AddIntConstant(module, "MOST_FORMS", PROXYCCL_MOST_FORMS) != 0 ||
      PyModule_AddIntConstant(module, "MOST_DIMENSIONS", PROXYCCL_MOST_DIMENSIONS) != 0 ||
      PyModule_AddIntConstant(module, "LEAST_LENT_BYTES", LEAST_LENT_BYTES) != 0 ||
      PyModule_AddIntConstant(module, "NAMED_BY_PROXIES", PROXYCCL_NAMED_BY_PROXIES) != 0 ||
      PyModule_AddIntConstant(module, "RECEIVED_BY_PROXIES", PROXYCCL_RECEIVED_BY_PROXIES) != 0)
    return -1;
  return proxyccl_add_type(module, &calls_type, NULL, "proxyccl.channels.calls._calls.Calls", sizeof(Calls),
                           Py_TPFLAGS_HAVE_GC, slots);
}
