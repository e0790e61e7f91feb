/* Combines of one form, whole or in two halves. One kernel makes a combine, after a copy of rows that peers are to load
 * but can't reach where they lie. */
#include <string.h>

#include "forms.h"
#include "given_arrays.h"
#include "issuer.h"
#include "stream_operations.h"

enum { ROWS, WEIGHTS, SLOT_WEIGHTS, ORDER, ADDED, MOST_ADDED = 2, KINDS = ADDED + MOST_ADDED };

/* See CombineForm in _calls.pyi. */
typedef struct {
  PyObject ob_base;
  Issuer issuer;
  PreparedCall first, second, after_copy; /* of the whole call or its first half; of the second; after a copy */
  Kind kinds[KINDS];
  Py_ssize_t hidden, topk, row_bytes, experts, padded_rows; /* the last two are 0 but with padded rows */
  int halves;
  ProxycclCombine* call;
  ProxycclStreamStep* copy;
  PyObject* buffers;    /* a dict: the number of the output buffer at an address; None if peers load no rows */
  Py_ssize_t passing;   /* the number of the buffer that other rows pass; 0 if there is none … */
  uintptr_t passing_at; /* … and where it begins */
  Py_ssize_t added;     /* the number of arrays with which sums begin */
  PyObject *context, *new_output, *address, *check_desc, *check_output;
  PyObject* make_latest; /* makes outputs like the latest, of this many tokens */
  Py_ssize_t latest_tokens;
} Form;

/* A combine whose first launch is queued. */
typedef struct {
  PyObject ob_base;
  Form* form;
  PyObject *desc, *stream, *x, *owners, *recorded;
  uintptr_t at, slots_at; /* of the rows, and of the weights of slots */
} Sent;

static PyTypeObject *form_type, *sent_type; /* of the process's one module */

typedef struct {
  PyObject *arrays[KINDS], *out; /* None for arrays that there are not */
} Inputs;

static PyObject* inputs_of(const void* of) {
  const Inputs* inputs = of;
  PyObject* owners = PyTuple_New(KINDS + 1);
  for (int i = 0; owners != NULL && i <= KINDS; ++i)
    if (PyTuple_SetItem(owners, i, Py_NewRef(i < KINDS ? inputs->arrays[i] : inputs->out)) != 0) Py_CLEAR(owners);
  return owners;
}

static Py_ssize_t bytes_of(const Form* self, Py_ssize_t rows) { return rows * self->row_bytes; }

/* A new array for the result, and its address. NULL with an exception. */
static PyObject* new_output(Form* self, Py_ssize_t tokens, uintptr_t* at) {
  if (self->make_latest == NULL || self->latest_tokens != tokens) {
    PyObject* old = self->make_latest;
    self->make_latest = PyObject_CallFunction(self->new_output, "n", tokens), self->latest_tokens = tokens;
    Py_XDECREF(old);
    if (self->make_latest == NULL) return NULL;
  }
  PyObject* made = PyObject_CallNoArgs(self->make_latest);
  if (made != NULL && proxyccl_address(&self->kinds[ROWS], made, self->address, bytes_of(self, tokens), at) != 0)
    Py_CLEAR(made);
  return made;
}

/* The caller's array for the result, a reference, and its address; or a new array for None. NULL with an exception, as
 * where an array does not fit, or overlaps the rows. Arrays of other libraries than torch may be read-only. */
static PyObject* take_output(Form* self, const Descriptor* desc, PyObject* x, uintptr_t rows_at, PyObject* out,
                             uintptr_t* at) {
  if (out == Py_None) return new_output(self, desc->tokens, at);
  const Kind* kind = &self->kinds[ROWS];
  const Py_ssize_t shape[] = {desc->tokens, self->hidden};
  const int is_like = kind->is_torch ? proxyccl_is_of_kind(kind, out) : 0;
  if (is_like < 0) return NULL;
  *at = is_like ? proxyccl_find(kind, out, shape, 2, self->row_bytes) : 0;
  if (PyErr_Occurred() != NULL) return NULL;
  const int overlaps =
      *at < rows_at + (uintptr_t)bytes_of(self, desc->rows) && rows_at < *at + (uintptr_t)bytes_of(self, desc->tokens);
  if (*at != 0 && !overlaps) return Py_NewRef(out);
  PyObject* checked = PyObject_CallFunctionObjArgs(self->check_output, x, (PyObject*)desc, out, NULL);
  unsigned long long found = 0;
  const int fits = checked != NULL && PyArg_ParseTuple(checked, "OK", &out, &found);
  *at = (uintptr_t)found;
  PyObject* taken = fits ? Py_NewRef(out) : NULL;
  Py_XDECREF(checked);
  return taken;
}

static int number_at(const Form* self, uintptr_t at, Py_ssize_t* number) {
  PyObject* key = PyLong_FromUnsignedLongLong(at);
  if (key == NULL) return -1;
  PyObject* found = PyDict_GetItemWithError(self->buffers, key);
  Py_DECREF(key);
  *number = found == NULL ? 0 : PyLong_AsSsize_t(found);
  return PyErr_Occurred() == NULL ? 0 : -1;
}

/* The arguments of a call that fits. */
typedef struct {
  uintptr_t at, slots_at, target_at;
  PyObject *stream, *target; /* references; `target` is NULL for halves */
  const PreparedCall* prepared;
} Begun;

/* Whether arrays are of the form's kinds. -1 with an exception. */
static int is_of_form(const Form* self, const Inputs* inputs) {
  int fits = 1;
  for (int i = 0; fits > 0 && i < KINDS; ++i) fits = proxyccl_is_of_kind(&self->kinds[i], inputs->arrays[i]);
  return fits;
}

/* Fills in the arrays of a call, but not its result. 0, or -1 with an exception. */
static int fill_arrays(Form* self, const Inputs* inputs, const Descriptor* desc, Begun* begun, uintptr_t* weights_at) {
  const int padded = self->padded_rows != 0;
  const Py_ssize_t rows[] = {padded ? self->experts : desc->rows, padded ? self->padded_rows : self->hidden,
                             self->hidden};
  const Py_ssize_t tokens[] = {desc->tokens, self->hidden}, slots[] = {desc->tokens, self->topk};
  const Py_ssize_t each = padded ? self->padded_rows : 1; /* rows of an entry */
  const Kind* kinds = self->kinds;
  uintptr_t order_at, added_at[MOST_ADDED];
  if (proxyccl_place(&kinds[ROWS], inputs->arrays[ROWS], rows, 2 + padded, each * self->row_bytes, NULL, &begun->at) !=
          0 ||
      proxyccl_place(&kinds[WEIGHTS], inputs->arrays[WEIGHTS], rows, 1 + padded, 4 * each, NULL, weights_at) != 0 ||
      proxyccl_place(&kinds[SLOT_WEIGHTS], inputs->arrays[SLOT_WEIGHTS], slots, 2, 4 * self->topk, NULL,
                     &begun->slots_at) != 0)
    return -1;
  for (int i = 0; i < MOST_ADDED; ++i)
    if (proxyccl_place(&kinds[ADDED + i], inputs->arrays[ADDED + i], tokens, 2, self->row_bytes, NULL, &added_at[i]) !=
        0)
      return -1;
  const Py_ssize_t id_bytes = (Py_ssize_t)self->call->id_bytes;
  if (proxyccl_place(&kinds[ORDER], inputs->arrays[ORDER], slots, 2, id_bytes * self->topk, NULL, &order_at) != 0)
    return -1;
  proxyccl_expert_combine_order(self->call, added_at[0], added_at[1], order_at, self->call->id_bytes);
  return 0;
}

/* Fills in a call, and makes its result. 0, or -1 with an exception. */
static int fill(Form* self, const Inputs* inputs, const Descriptor* desc, PyObject* given, Begun* begun) {
  PyObject* const x = inputs->arrays[ROWS];
  uintptr_t weights_at;
  if (fill_arrays(self, inputs, desc, begun, &weights_at) != 0) return -1;
  begun->target = NULL, begun->target_at = 0;
  begun->stream = proxyccl_stream(&self->issuer, x, given);
  if (begun->stream == NULL) return -1;
  if (!self->halves) {
    begun->target = take_output(self, desc, x, begun->at, inputs->out, &begun->target_at);
    if (begun->target == NULL) goto failed;
  }
  uintptr_t rows_at = begun->at;
  Py_ssize_t buffer = 0;
  begun->prepared = &self->first;
  if (desc->output_buffer != 0 && self->buffers != Py_None) {
    if (number_at(self, begun->at, &buffer) != 0) goto failed;
    if (buffer == 0 && self->passing != 0) { /* a copy here takes less time than sending */
      buffer = self->passing, rows_at = self->passing_at, begun->prepared = &self->after_copy;
      self->copy->dst = rows_at, self->copy->src = begun->at, self->copy->bytes = (uint64_t)bytes_of(self, desc->rows);
    }
  }
  proxyccl_expert_combine_fill(self->call,
                               self->halves ? PROXYCCL_EXPERT_SEND : PROXYCCL_EXPERT_SEND | PROXYCCL_EXPERT_RECEIVE,
                               (uint32_t)desc->tokens, rows_at, (uint32_t)buffer, weights_at,
                               self->halves ? 0 : begun->slots_at, begun->target_at);
  proxyccl_place_tables(desc, &self->call->layout);
  return 0;
failed:
  Py_XDECREF(begun->target);
  Py_DECREF(begun->stream);
  return -1;
}

static PyObject* sent_of(Form* self, const Inputs* inputs, PyObject* desc, const Begun* begun) {
  PyObject* object = PyType_GenericAlloc(sent_type, 0);
  if (object == NULL) return NULL;
  Sent* sent = (Sent*)object;
  sent->form = (Form*)Py_NewRef((PyObject*)self), sent->desc = Py_NewRef(desc),
  sent->x = Py_NewRef(inputs->arrays[ROWS]);
  sent->stream = Py_NewRef(begun->stream), sent->at = begun->at, sent->slots_at = begun->slots_at;
  if ((sent->owners = inputs_of(inputs)) == NULL || (sent->recorded = PyTuple_New(0)) == NULL) Py_CLEAR(object);
  return object;
}

/* Reads start's arguments. 1; 0 if there is another number of arrays to add, or -1 with an exception. */
static int take_inputs(const Form* self, PyObject* const* arguments, Py_ssize_t count, Inputs* inputs) {
  if (count != 8 || !PyTuple_Check(arguments[7])) {
    PyErr_SetString(PyExc_TypeError,
                    "expected rows, descriptor, weights, topk_weights, out, stream, order_ids and a tuple of arrays");
    return -1;
  }
  if (PyTuple_Size(arguments[7]) != self->added) return 0;
  *inputs = (Inputs){{arguments[0], arguments[2], arguments[3], arguments[6]}, arguments[4]};
  for (int i = 0; i < MOST_ADDED; ++i)
    inputs->arrays[ADDED + i] = i < self->added ? PyTuple_GetItem(arguments[7], i) : Py_None;
  return 1;
}

/* The object as a descriptor whose rows this form can combine; NULL with an exception. */
static Descriptor* take_descriptor(const Form* self, PyObject* object) {
  Descriptor* desc = proxyccl_received(object, self->context);
  if (desc != NULL && (self->padded_rows == 0 || desc->rows == self->experts * self->padded_rows)) return desc;
  PyObject* refused = PyObject_CallFunctionObjArgs(self->check_desc, object, NULL);
  Py_XDECREF(refused);
  if (refused != NULL) PyErr_SetString(PyExc_RuntimeError, "the descriptor is of another form");
  return NULL;
}

/* Makes the call or, of a call in halves, the first half. */
static PyObject* start(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  Form* self = (Form*)object;
  Inputs inputs;
  int fits = take_inputs(self, arguments, count, &inputs);
  if (fits > 0) fits = is_of_form(self, &inputs);
  if (fits == 0) Py_RETURN_NONE;
  Descriptor* desc = fits < 0 ? NULL : take_descriptor(self, arguments[1]);
  Begun begun;
  if (desc == NULL || fill(self, &inputs, desc, arguments[5], &begun) != 0) return NULL;
  if (begun.target != NULL) inputs.out = begun.target;
  PyObject* result = NULL;
  if (proxyccl_issue(&self->issuer, begun.prepared, desc, begun.stream, inputs_of, &inputs) == 0)
    result = self->halves ? sent_of(self, &inputs, arguments[1], &begun) : Py_NewRef(begun.target);
  Py_XDECREF(begun.target);
  Py_DECREF(begun.stream);
  return result;
}

/* `out`, or a new array, and its address. */
static PyObject* output(PyObject* object, PyObject* out) {
  const Sent* self = (const Sent*)object;
  uintptr_t at = 0;
  PyObject* taken = take_output(self->form, (const Descriptor*)self->desc, self->x, self->at, out, &at);
  PyObject* result = taken == NULL ? NULL : Py_BuildValue("OK", taken, (unsigned long long)at);
  Py_XDECREF(taken);
  return result;
}

typedef struct {
  const Sent* sent;
  PyObject* output;
} Received;

static PyObject* owners_of(const void* of) {
  const Received* received = of;
  return PyTuple_Pack(2, received->sent->owners, received->output);
}

/* Makes the second half on a stream. Returns the output. */
static PyObject* receive(PyObject* object, PyObject* arguments) {
  const Sent* self = (const Sent*)object;
  PyObject *made, *stream;
  unsigned long long at;
  if (!PyArg_ParseTuple(arguments, "OKO", &made, &at, &stream)) return NULL;
  const Form* form = self->form;
  const Received received = {self, made};
  form->call->phases = PROXYCCL_EXPERT_RECEIVE;
  form->call->slot_weights = (const float*)self->slots_at, form->call->output = (char*)(uintptr_t)at;
  if (proxyccl_issue(&form->issuer, &form->second, (const Descriptor*)self->desc, stream, owners_of, &received) != 0)
    return NULL;
  return Py_NewRef(made);
}

#define FORM_REFERENCES(apply)                                                                                \
  apply(first.kept) apply(second.kept) apply(after_copy.kept) apply(buffers) apply(context) apply(new_output) \
      apply(address) apply(check_desc) apply(check_output) apply(make_latest)

static int traverse(PyObject* object, visitproc visit, void* arg) {
  Form* self = (Form*)object;
  Py_VISIT(Py_TYPE(object));
  FORM_REFERENCES(PROXYCCL_VISIT)
  int visited = proxyccl_visit_issuer(&self->issuer, visit, arg);
  for (int i = 0; visited == 0 && i < KINDS; ++i) visited = proxyccl_visit_kind(&self->kinds[i], visit, arg);
  return visited;
}

static int let_go(PyObject* object) {
  Form* self = (Form*)object;
  FORM_REFERENCES(PROXYCCL_CLEAR)
  for (int i = 0; i < KINDS; ++i) proxyccl_clear_kind(&self->kinds[i]);
  proxyccl_clear_issuer(&self->issuer);
  return 0;
}

static void end(PyObject* object) { proxyccl_free(object, let_go); }

static PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* Py_UNUSED(keywords)) {
  PyObject* object = PyType_GenericNew(type, NULL, NULL);
  if (object == NULL) return NULL;
  Form* self = (Form*)object;
  PyObject *issuer, *first, *second, *after_copy, *kinds[KINDS], *buffers, *context, *maker, *address, *check_desc;
  PyObject* check_output;
  unsigned long long call, copy, passing_at;
  if (!PyArg_ParseTuple(arguments, "OOOO(OOOOOO)(nnnnnn)pK(OnKK)O(OO)(OO)", &issuer, &first, &second, &after_copy,
                        &kinds[ROWS], &kinds[WEIGHTS], &kinds[SLOT_WEIGHTS], &kinds[ORDER], &kinds[ADDED],
                        &kinds[ADDED + 1], &self->hidden, &self->topk, &self->row_bytes, &self->experts,
                        &self->padded_rows, &self->added, &self->halves, &call, &buffers, &self->passing, &passing_at,
                        &copy, &context, &maker, &address, &check_desc, &check_output)) {
    Py_DECREF(object);
    return NULL;
  }
  self->call = (ProxycclCombine*)(uintptr_t)call, self->copy = (ProxycclStreamStep*)(uintptr_t)copy;
  self->buffers = Py_NewRef(buffers), self->passing_at = (uintptr_t)passing_at, self->context = Py_NewRef(context);
  self->new_output = Py_NewRef(maker), self->address = Py_NewRef(address), self->check_desc = Py_NewRef(check_desc);
  self->check_output = Py_NewRef(check_output);
  int made = proxyccl_read_issuer(issuer, &self->issuer) == 0 && proxyccl_read_prepared(first, &self->first) == 0 &&
             proxyccl_read_prepared(second, &self->second) == 0;
  if (made && after_copy != Py_None) made = proxyccl_read_prepared(after_copy, &self->after_copy) == 0;
  for (int i = 0; made && i < KINDS; ++i) made = proxyccl_read_kind(kinds[i], &self->kinds[i]) == 0;
  if (made) return object;
  Py_DECREF(object);
  return NULL;
}

static PyMethodDef methods[] = {
    {"start", (PyCFunction)(void (*)(void))start, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, make},     {Py_tp_dealloc, end},     {Py_tp_traverse, traverse},
    {Py_tp_clear, let_go}, {Py_tp_methods, methods}, {0, NULL},
};
static PyType_Spec spec = {
    .name = "proxyccl.channels.calls._calls.CombineForm",
    .basicsize = sizeof(Form),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

#define SENT_REFERENCES(apply) apply(form) apply(desc) apply(stream) apply(x) apply(owners) apply(recorded)

static int traverse_sent(PyObject* object, visitproc visit, void* arg) {
  Sent* self = (Sent*)object;
  Py_VISIT(Py_TYPE(object));
  SENT_REFERENCES(PROXYCCL_VISIT)
  return 0;
}

static int let_sent_go(PyObject* object) {
  Sent* self = (Sent*)object;
  SENT_REFERENCES(PROXYCCL_CLEAR)
  return 0;
}

static void end_sent(PyObject* object) { proxyccl_free(object, let_sent_go); }

static PyMethodDef sent_methods[] = {
    {"output", output, METH_O, NULL},
    {"receive", receive, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef sent_members[] = {
    {"desc", T_OBJECT, offsetof(Sent, desc), READONLY, NULL},
    {"stream", T_OBJECT, offsetof(Sent, stream), READONLY, NULL},
    {"x", T_OBJECT, offsetof(Sent, x), READONLY, NULL},
    {"recorded", T_OBJECT, offsetof(Sent, recorded), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot sent_slots[] = {
    {Py_tp_dealloc, end_sent},     {Py_tp_traverse, traverse_sent}, {Py_tp_clear, let_sent_go},
    {Py_tp_methods, sent_methods}, {Py_tp_members, sent_members},   {0, NULL},
};
static PyType_Spec sent_spec = {
    .name = "proxyccl.channels.calls._calls.SentCombine",
    .basicsize = sizeof(Sent),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = sent_slots,
};

int proxyccl_add_combine_form(PyObject* module) {
  if (form_type == NULL) form_type = (PyTypeObject*)PyType_FromSpec(&spec);
  if (sent_type == NULL) sent_type = (PyTypeObject*)PyType_FromSpec(&sent_spec);
  if (form_type == NULL || sent_type == NULL) return -1;
  if (PyModule_AddObjectRef(module, "CombineForm", (PyObject*)form_type) != 0) return -1;
  return PyModule_AddObjectRef(module, "SentCombine", (PyObject*)sent_type);
}
