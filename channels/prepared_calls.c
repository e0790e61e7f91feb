/* Keeps calls that were made before, so that a repeated one takes next to no Python: it is found by its arrays and
 * options, and issued by one call of the engine.
 *
 * Ranks take turns on the cores, so a rank's next call runs from caches and branch predictors that others have used.
 * There the interpreter takes several times as long as in a tight loop.
 *
 * This is an extension that uses CPython's limited API, not cffi, because it looks into Python objects.
 */
#include "prepared_calls.h"

#include <string.h>

#include "launch.h"
#include "stream_order.h"

enum { CHAINS = 512, MOST_KEPT = 2048, MOST_DIMENSIONS = 6, MOST_OPTIONS = 6, LONGEST_FORMAT = 8 };

/* An array's identity for a call: equal for two arrays only if every call treats them alike. No padding: compared by
 * memcmp. */
typedef struct {
  PyTypeObject* type;
  PyObject* identity; /* of an array that has one, see PreparedCalls, and a tensor's dtype; otherwise NULL */
  void* first;
  Py_ssize_t bytes, dimensions, shape[MOST_DIMENSIONS];
  uint64_t readonly;
  char format[LONGEST_FORMAT]; /* padded with zeros */
} Described;

typedef int (*Hold)(const void* guard);

/* The arrays of a call: input and output, or a tuple of arrays for either. */
typedef struct {
  Py_ssize_t inputs, count; /* of the arrays, the first are inputs */
  Described* each;
} Arrays;

/* While a call is looked for: an array that is not in a tuple may be a buffer, which is held meanwhile. */
typedef struct {
  Arrays arrays;
  Described few[2];
  Py_buffer views[2];
} Given;

/* A call that is kept: in the chain of its hash, and in the order of use. */
typedef struct Entry {
  struct Entry *next, *older, *newer;
  uint64_t hash;
  Arrays arrays;
  Py_ssize_t count;
  PyObject* options[MOST_OPTIONS];
  Hold holds; /* whether the arrays are still those that they were; NULL if nothing need tell */
  const void* guard;
  PreparedCall prepared;
} Entry;

/* The attributes of tensors that are read. */
enum { IS_GPU, DTYPE, SHAPE, IS_CONTIGUOUS, IS_NEGATIVE, IS_CONJUGATE, ADDRESS, NAMES };
static const char* const kNames[NAMES] = {"is_cuda", "dtype",   "shape",   "is_contiguous",
                                          "is_neg",  "is_conj", "data_ptr"};

typedef struct {
  PyObject ob_base;
  PyTypeObject* identified;
  PyObject *identity_name, *acquire, *release, *refuse, *turn, *tensor_types;
  PyObject* names[NAMES];
  int repeats;                      /* 0: no call is repeated at present */
  uintptr_t stream;                 /* the one that calls are on */
  const ProxycclStreamOrder* order; /* NULL: `turn` orders streams */
  uintptr_t event, thread_stream;
  Entry** chains;
  Entry *oldest, *newest; /* by when they were used */
  Py_ssize_t count;       /* of them */
} PreparedCalls;

/* A tensor's attribute, or with `call` the result of its method. NULL with an exception: it may have no memory. */
static PyObject* ask(const PreparedCalls* self, PyObject* x, int name, int call) {
  return call ? PyObject_CallMethodObjArgs(x, self->names[name], NULL) : PyObject_GetAttr(x, self->names[name]);
}

/* Whether it is True or False, as expected. If not, perhaps with an exception. */
static int answers(const PreparedCalls* self, PyObject* x, int name, int call, PyObject* expected) {
  PyObject* found = ask(self, x, name, call);
  Py_XDECREF(found); /* True and False are never freed */
  return found == expected;
}

/* 1; 0 if it can't be described, perhaps with an exception. */
static int describe_shape(PyObject* shape, Described* described) {
  if (shape == NULL || !PyTuple_Check(shape) || PyTuple_Size(shape) > MOST_DIMENSIONS) return 0;
  described->dimensions = PyTuple_Size(shape);
  for (Py_ssize_t i = 0; i < described->dimensions; ++i) {
    described->shape[i] = PyLong_AsSsize_t(PyTuple_GetItem(shape, i));
    if (described->shape[i] == -1) return 0; /* with an error for a symbol */
  }
  return 1;
}

/* Of a tensor on a GPU whose memory holds its elements in order. 1; 0 if it can't be described, perhaps with an
 * exception. */
static int describe_tensor(const PreparedCalls* self, PyObject* x, Described* described) {
  if (!answers(self, x, IS_GPU, 0, Py_True) || !answers(self, x, IS_CONTIGUOUS, 1, Py_True) ||
      !answers(self, x, IS_NEGATIVE, 1, Py_False) || !answers(self, x, IS_CONJUGATE, 1, Py_False))
    return 0;
  PyObject* address = ask(self, x, ADDRESS, 1);
  if (address == NULL) return 0;
  described->first = PyLong_AsVoidPtr(address);
  Py_DECREF(address);
  if (described->first == NULL) return 0;
  PyObject* shape = ask(self, x, SHAPE, 0);
  const int has_shape = describe_shape(shape, described);
  Py_XDECREF(shape);
  described->identity = has_shape ? ask(self, x, DTYPE, 0) : NULL;
  return described->identity != NULL;
}

/* `describe`, with any exception left set. */
static int look_at(const PreparedCalls* self, PyObject* x, Described* described, Py_buffer* view) {
  memset(described, 0, sizeof *described);
  view->obj = NULL;
  described->type = Py_TYPE(x);
  if (described->type == self->identified) {
    described->identity = PyObject_GetAttr(x, self->identity_name);
    if (described->identity == Py_None) Py_CLEAR(described->identity);
    return described->identity != NULL;
  }
  const int is_tensor = PySet_Contains(self->tensor_types, (PyObject*)described->type); /* -1: it has no hash */
  if (is_tensor != 0) return is_tensor > 0 && describe_tensor(self, x, described);
  if (!PyObject_CheckBuffer(x)) return 0;
  if (PyObject_GetBuffer(x, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
    view->obj = NULL; /* it is not contiguous, or buffers do not support its type */
    return 0;
  }
  const size_t format = view->format == NULL ? LONGEST_FORMAT : strlen(view->format);
  if (view->ndim > MOST_DIMENSIONS || format >= LONGEST_FORMAT) {
    PyBuffer_Release(view);
    return 0;
  }
  described->first = view->buf, described->bytes = view->len, described->dimensions = view->ndim;
  if (view->ndim > 0) memcpy(described->shape, view->shape, view->ndim * sizeof *view->shape);
  memcpy(described->format, view->format, format);
  described->readonly = view->readonly != 0;
  return 1;
}

/* Describes an array. Returns 1, with a reference to `identity` or with `view` to be released; 0 if it can't be
 * described; -1 with an exception of the program's. */
static int describe(const PreparedCalls* self, PyObject* x, Described* described, Py_buffer* view) {
  return look_at(self, x, described, view) ? 1 : proxyccl_clear_exception();
}

static void release(Given* given) {
  for (Py_ssize_t i = 0; i < given->arrays.count; ++i) Py_CLEAR(given->arrays.each[i].identity);
  if (given->arrays.each != given->few) PyMem_Free(given->arrays.each);
  for (int i = 0; i < 2; ++i) PyBuffer_Release(&given->views[i]); /* does nothing without an object */
}

/* Adds the descriptions of an argument's arrays. As `describe`: no buffers in tuples. */
static int add_described(const PreparedCalls* self, PyObject* argument, Given* given, Py_buffer* view) {
  Arrays* arrays = &given->arrays;
  if (!PyTuple_Check(argument)) {
    const int described = describe(self, argument, &arrays->each[arrays->count], view);
    if (described > 0) arrays->count += 1;
    return described;
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(argument); ++i) {
    Py_buffer buffer;
    const int described = describe(self, PyTuple_GetItem(argument, i), &arrays->each[arrays->count], &buffer);
    if (described <= 0) return described;
    PyBuffer_Release(&buffer);
    if (arrays->each[arrays->count].identity == NULL) return 0;
    arrays->count += 1;
  }
  return 1;
}

static Py_ssize_t size_of(PyObject* argument) { return PyTuple_Check(argument) ? PyTuple_Size(argument) : 1; }

/* Describes a call's arrays. Returns 1, with the references to release; 0 if they can't be described; -1 with an
 * exception of the program's. */
static int describe_call(const PreparedCalls* self, PyObject* x, PyObject* out, Given* given) {
  const Py_ssize_t count = size_of(x) + size_of(out);
  memset(&given->views, 0, sizeof given->views);
  given->arrays.count = 0;
  given->arrays.each = count <= 2 ? given->few : PyMem_Malloc((size_t)count * sizeof(Described));
  if (given->arrays.each == NULL) return 0;
  int described = add_described(self, x, given, &given->views[0]);
  given->arrays.inputs = given->arrays.count;
  if (described > 0 && out == x && !PyTuple_Check(x) && given->views[0].obj == NULL) {
    given->few[1] = given->few[0];
    Py_XINCREF(given->few[1].identity);
    given->arrays.count = 2;
  } else if (described > 0) {
    described = add_described(self, out, given, &given->views[1]);
  }
  if (described <= 0) release(given);
  return described;
}

static uint64_t hash_of(const Arrays* arrays, PyObject* options) {
  uint64_t hash = 0;
  for (Py_ssize_t i = 0; i < arrays->count; ++i) {
    const Described* each = &arrays->each[i];
    hash = hash * 31 + ((uintptr_t)each->first ^ (uintptr_t)each->identity ^ (uint64_t)each->bytes);
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(options); ++i) hash = hash * 31 + (uintptr_t)PyTuple_GetItem(options, i);
  return hash * 0x9E3779B97F4A7C15u;
}

static Entry** chain_of(const PreparedCalls* self, uint64_t hash) {
  return &self->chains[hash >> 55]; /* 9 bits: CHAINS */
}

static int has_options(const Entry* entry, PyObject* options) {
  if (PyTuple_Size(options) != entry->count) return 0;
  for (Py_ssize_t i = 0; i < entry->count; ++i)
    if (PyTuple_GetItem(options, i) != entry->options[i]) return 0;
  return 1;
}

static int is_of(const Entry* entry, const Arrays* arrays, PyObject* options) {
  return entry->arrays.count == arrays->count && entry->arrays.inputs == arrays->inputs &&
         memcmp(entry->arrays.each, arrays->each, (size_t)arrays->count * sizeof(Described)) == 0 &&
         has_options(entry, options);
}

/* The call that is kept for these arrays and options; NULL if there is none. */
static Entry* find(const PreparedCalls* self, const Arrays* arrays, PyObject* options, uint64_t hash) {
  Entry* entry = *chain_of(self, hash);
  while (entry != NULL && !(entry->hash == hash && is_of(entry, arrays, options))) entry = entry->next;
  return entry;
}

static void leave_order(PreparedCalls* self, Entry* entry) {
  *(entry->older != NULL ? &entry->older->newer : &self->oldest) = entry->newer;
  *(entry->newer != NULL ? &entry->newer->older : &self->newest) = entry->older;
}

static void become_newest(PreparedCalls* self, Entry* entry) {
  entry->older = self->newest, entry->newer = NULL;
  *(self->newest != NULL ? &self->newest->newer : &self->oldest) = entry;
  self->newest = entry;
}

static void insert(PreparedCalls* self, Entry* entry) {
  Entry** chain = chain_of(self, entry->hash);
  entry->next = *chain;
  *chain = entry;
  become_newest(self, entry);
  self->count += 1;
}

/* Takes a call out, and only then frees it: releasing an object may run Python. */
static void drop(PreparedCalls* self, Entry* entry) {
  Entry** at = chain_of(self, entry->hash);
  while (*at != entry) at = &(*at)->next;
  *at = entry->next;
  leave_order(self, entry);
  self->count -= 1;
  for (Py_ssize_t i = 0; i < entry->count; ++i) Py_DECREF(entry->options[i]);
  for (Py_ssize_t i = 0; i < entry->arrays.count; ++i) {
    Py_XDECREF((PyObject*)entry->arrays.each[i].type);
    Py_XDECREF(entry->arrays.each[i].identity);
  }
  Py_DECREF(entry->prepared.kept);
  PyMem_Free(entry->arrays.each);
  PyMem_Free(entry);
}

/* With the lock held: has calls be on a stream from now on. Returns 1 if they are, 0 if not, -1 with an exception. */
static int turn_to(PreparedCalls* self, PyObject* stream) {
  const uintptr_t handle = (uintptr_t)PyLong_AsUnsignedLongLong(stream);
  if (PyErr_Occurred()) return -1;
  if (self->turn == Py_None) { /* the calls order streams themselves */
    self->stream = handle;
    return self->repeats;
  }
  if (self->repeats && self->stream == handle) return 1;
  if (self->repeats && self->order != NULL && handle != self->thread_stream &&
      proxyccl_stream_follow(self->order, self->event, self->stream, handle, 1) == 0) {
    self->stream = handle;
    return 1;
  }
  PyObject* turned = PyObject_CallFunctionObjArgs(self->turn, stream, NULL); /* it calls set_stream */
  if (turned == NULL) return -1;
  Py_DECREF(turned);
  return self->repeats && self->stream == handle;
}

/* With the lock held: issues a call on the stream that calls are on. Returns 1 if it was issued, 0 if nothing was done,
 * -1 with an exception. */
static int issue_here(PreparedCalls* self, const PreparedCall* prepared) {
  const uintptr_t stream = self->stream;
  int status;
  Py_BEGIN_ALLOW_THREADS;
  status = prepared->issue(prepared->callers, prepared->call, prepared->launch, stream);
  Py_END_ALLOW_THREADS;
  if (status == PROXYCCL_OTHER_CONTEXT) return 0;
  PyObject* refused = status == 0 ? NULL : PyObject_CallFunction(self->refuse, "iO", status, prepared->kept);
  Py_XDECREF(refused);
  return PyErr_Occurred() == NULL ? 1 : -1;
}

/* With the lock held. Returns 1 if the call was issued, 0 if it is not kept, -1 with an exception. */
static int issue_kept(PreparedCalls* self, const Arrays* arrays, PyObject* options, PyObject* on) {
  const uint64_t hash = hash_of(arrays, options);
  Entry* entry = find(self, arrays, options, hash);
  if (entry == NULL) return 0;
  if (on != NULL) {
    const int turned = turn_to(self, on);
    if (turned <= 0) return turned;
    entry = find(self, arrays, options, hash); /* that may have run Python */
    if (entry == NULL) return 0;
  }
  if (!self->repeats || (entry->holds != NULL && !entry->holds(entry->guard))) return 0;
  if (entry != self->newest) {
    leave_order(self, entry);
    become_newest(self, entry);
  }
  const PreparedCall prepared = entry->prepared;
  Py_INCREF(prepared.kept); /* the entry may be dropped during the call */
  const int issued = issue_here(self, &prepared);
  Py_DECREF(prepared.kept);
  return issued;
}

/* Calls `issue` with the lock held. Returns its result, or -1 with an exception. */
static int locked(PreparedCalls* self, int (*issue)(PreparedCalls* self, const void* argument), const void* argument) {
  if (self->acquire == NULL) return 0; /* the garbage collector has cleared the calls */
  PyObject* locked = PyObject_CallNoArgs(self->acquire);
  if (locked == NULL) return -1;
  Py_DECREF(locked);
  int issued = issue(self, argument);
  PyObject *error_type, *error, *traceback; /* of a call that was refused */
  PyErr_Fetch(&error_type, &error, &traceback);
  PyObject* released = PyObject_CallNoArgs(self->release);
  if (released != NULL) {
    PyErr_Restore(error_type, error, traceback);
    Py_DECREF(released);
    return issued;
  }
  Py_XDECREF(error_type);
  Py_XDECREF(error);
  Py_XDECREF(traceback);
  return -1;
}

typedef struct {
  const Arrays* arrays;
  PyObject *options, *on;
} Sought;

static int issue_sought(PreparedCalls* self, const void* argument) {
  const Sought* sought = argument;
  return issue_kept(self, sought->arrays, sought->options, sought->on);
}

typedef struct {
  const PreparedCall* call;
  PyObject* on;
} Prepared;

static int issue_given(PreparedCalls* self, const void* argument) {
  const Prepared* given = argument;
  if (given->on != NULL) {
    const int turned = turn_to(self, given->on);
    if (turned <= 0) return turned;
  }
  return self->repeats ? issue_here(self, given->call) : 0;
}

int proxyccl_issue_prepared(PyObject* calls, const PreparedCall* call, PyObject* stream) {
  PreparedCalls* self = (PreparedCalls*)calls;
  if (!self->repeats && stream == NULL) return 0;
  const Prepared prepared = {call, stream};
  return locked(self, issue_given, &prepared);
}

static PyObject* repeat(PreparedCalls* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count < 3 || count > 4 || !PyTuple_Check(arguments[2]) || PyTuple_Size(arguments[2]) == 0) {
    PyErr_SetString(PyExc_TypeError, "repeat(x, out, options, stream=) takes a tuple of options");
    return NULL;
  }
  PyObject* const on = count == 4 ? arguments[3] : NULL;
  if (!self->repeats && on == NULL) Py_RETURN_FALSE;
  Given given;
  const int described = describe_call(self, arguments[0], arguments[1], &given);
  if (described < 0) return NULL;
  if (described == 0) Py_RETURN_FALSE;
  const Sought sought = {&given.arrays, arguments[2], on};
  const int issued = locked(self, issue_sought, &sought);
  release(&given);
  return issued < 0 ? NULL : PyBool_FromLong(issued);
}

static PyObject* keep(PreparedCalls* self, PyObject* arguments) {
  PyObject *x, *out, *options, *kept;
  unsigned long long issue, callers, call, launch, holds = 0, guard = 0;
  if (!PyArg_ParseTuple(arguments, "OOO!KKKKO|KK", &x, &out, &PyTuple_Type, &options, &issue, &callers, &call, &launch,
                        &kept, &holds, &guard))
    return NULL;
  const Py_ssize_t count = PyTuple_Size(options);
  if (count == 0 || count > MOST_OPTIONS) {
    PyErr_Format(PyExc_ValueError, "expected 1 to %d options, not %zd", MOST_OPTIONS, count);
    return NULL;
  }
  Given given;
  const int described = describe_call(self, x, out, &given);
  if (described < 0) return NULL;
  if (described == 0) Py_RETURN_NONE;
  const size_t size = (size_t)given.arrays.count * sizeof(Described);
  Entry* made = PyMem_Calloc(1, sizeof(Entry));
  Described* each = PyMem_Malloc(size);
  if (made == NULL || each == NULL) {
    PyMem_Free(made);
    PyMem_Free(each);
    release(&given);
    return PyErr_NoMemory();
  }
  memcpy(each, given.arrays.each, size);
  for (Py_ssize_t i = 0; i < given.arrays.count; ++i) {
    Py_INCREF((PyObject*)each[i].type);
    Py_XINCREF(each[i].identity);
  }
  made->arrays = (Arrays){.inputs = given.arrays.inputs, .count = given.arrays.count, .each = each};
  release(&given); /* a description does not reference the array */
  made->hash = hash_of(&made->arrays, options);
  made->count = count;
  for (Py_ssize_t i = 0; i < count; ++i) {
    made->options[i] = PyTuple_GetItem(options, i);
    Py_INCREF(made->options[i]);
  }
  made->holds = (Hold)(uintptr_t)holds, made->guard = (const void*)(uintptr_t)guard;
  made->prepared = (PreparedCall){.issue = (Issue)(uintptr_t)issue,
                                  .callers = (void*)(uintptr_t)callers,
                                  .call = (void*)(uintptr_t)call,
                                  .launch = (void*)(uintptr_t)launch,
                                  .kept = kept};
  Py_INCREF(kept);
  Entry* before = find(self, &made->arrays, options, made->hash);
  insert(self, made);
  if (before != NULL)
    drop(self, before);
  else if (self->count > MOST_KEPT)
    drop(self, self->oldest);
  Py_RETURN_NONE;
}

static PyObject* clear(PreparedCalls* self, PyObject* Py_UNUSED(nothing)) {
  while (self->oldest != NULL) drop(self, self->oldest);
  Py_RETURN_NONE;
}

static PyObject* set_stream(PreparedCalls* self, PyObject* stream) {
  const uintptr_t handle = stream == Py_None ? 0 : (uintptr_t)PyLong_AsUnsignedLongLong(stream);
  if (PyErr_Occurred()) return NULL;
  self->stream = handle;
  self->repeats = stream != Py_None;
  Py_RETURN_NONE;
}

static PyObject* order_by(PreparedCalls* self, PyObject* arguments) {
  unsigned long long order, event, thread_stream;
  if (!PyArg_ParseTuple(arguments, "KKK", &order, &event, &thread_stream)) return NULL;
  self->order = (const ProxycclStreamOrder*)(uintptr_t)order;
  self->event = (uintptr_t)event, self->thread_stream = (uintptr_t)thread_stream;
  Py_RETURN_NONE;
}

static PyObject* stream_of_calls(PyObject* object, void* Py_UNUSED(closure)) {
  const PreparedCalls* self = (const PreparedCalls*)object;
  if (!self->repeats) Py_RETURN_NONE;
  return PyLong_FromUnsignedLongLong(self->stream);
}

static int traverse(PyObject* object, visitproc visit, void* arg) {
  PreparedCalls* self = (PreparedCalls*)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT((PyObject*)self->identified);
  Py_VISIT(self->acquire);
  Py_VISIT(self->release);
  Py_VISIT(self->refuse);
  Py_VISIT(self->turn);
  Py_VISIT(self->tensor_types);
  for (const Entry* entry = self->oldest; entry != NULL; entry = entry->newer) {
    for (Py_ssize_t k = 0; k < entry->count; ++k) Py_VISIT(entry->options[k]);
    for (Py_ssize_t k = 0; k < entry->arrays.count; ++k) {
      Py_VISIT((PyObject*)entry->arrays.each[k].type);
      Py_VISIT(entry->arrays.each[k].identity);
    }
    Py_VISIT(entry->prepared.kept);
  }
  return 0;
}

static int let_go(PyObject* object) {
  PreparedCalls* self = (PreparedCalls*)object;
  self->repeats = 0;
  while (self->oldest != NULL) drop(self, self->oldest);
  Py_CLEAR(self->acquire);
  Py_CLEAR(self->release);
  Py_CLEAR(self->refuse);
  Py_CLEAR(self->turn);
  return 0;
}

static int let_all_go(PyObject* object) {
  PreparedCalls* self = (PreparedCalls*)object;
  let_go(object);
  PyMem_Free(self->chains);
  Py_XDECREF((PyObject*)self->identified);
  Py_XDECREF(self->identity_name);
  Py_XDECREF(self->tensor_types);
  for (int i = 0; i < NAMES; ++i) Py_XDECREF(self->names[i]);
  return 0;
}

static void end(PyObject* object) { proxyccl_free(object, let_all_go); }

static PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* Py_UNUSED(keywords)) {
  PyObject *identified, *name, *lock, *refuse, *turn, *tensor_types;
  if (!PyArg_ParseTuple(arguments, "O!UOOOO!", &PyType_Type, &identified, &name, &lock, &refuse, &turn, &PySet_Type,
                        &tensor_types))
    return NULL;
  PyObject* object = PyType_GenericNew(type, NULL, NULL);
  if (object == NULL) return NULL;
  PreparedCalls* self = (PreparedCalls*)object;
  Py_INCREF(identified);
  self->identified = (PyTypeObject*)identified;
  Py_INCREF(name);
  PyUnicode_InternInPlace(&name);
  self->identity_name = name;
  Py_INCREF(refuse);
  self->refuse = refuse;
  Py_INCREF(turn);
  self->turn = turn;
  Py_INCREF(tensor_types);
  self->tensor_types = tensor_types;
  int named = 1;
  for (int i = 0; i < NAMES; ++i) named &= (self->names[i] = PyUnicode_InternFromString(kNames[i])) != NULL;
  if (!named) {
    Py_DECREF(object);
    return NULL;
  }
  self->acquire = PyObject_GetAttrString(lock, "acquire");
  self->release = self->acquire == NULL ? NULL : PyObject_GetAttrString(lock, "release");
  self->chains = self->release == NULL ? NULL : PyMem_Calloc(CHAINS, sizeof(Entry*));
  if (self->chains != NULL) return object;
  if (self->release != NULL) PyErr_NoMemory();
  Py_DECREF(object);
  return NULL;
}

static PyMethodDef methods[] = {
    {"repeat", (PyCFunction)(void (*)(void))repeat, METH_FASTCALL, NULL},
    {"keep", (PyCFunction)keep, METH_VARARGS, NULL},
    {"clear", (PyCFunction)clear, METH_NOARGS, NULL},
    {"set_stream", (PyCFunction)set_stream, METH_O, NULL},
    {"order_by", (PyCFunction)order_by, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef attributes[] = {
    {"stream", stream_of_calls, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, end},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, let_go},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {0, NULL},
};
static PyType_Spec spec = {
    .name = "proxyccl.channels._prepared_calls.PreparedCalls",
    .basicsize = sizeof(PreparedCalls),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

static PyTypeObject* calls_type; /* of the process's one module */

int proxyccl_require_prepared_calls(PyObject* object) {
  if (PyObject_TypeCheck(object, calls_type)) return 1;
  PyErr_SetString(PyExc_TypeError, "expected PreparedCalls");
  return 0;
}

int proxyccl_add_prepared_calls(PyObject* module) {
  if (calls_type == NULL) calls_type = (PyTypeObject*)PyType_FromSpec(&spec);
  if (calls_type == NULL || PyModule_AddIntConstant(module, "MOST_KEPT", MOST_KEPT) != 0) return -1;
  return PyModule_AddObjectRef(module, "PreparedCalls", (PyObject*)calls_type);
}
