/* Combines of one form, whole or in two halves. One kernel makes a combine, after a copy of rows that peers are to load
 * but can't reach where they lie. */
#include <string.h>

#include "forms.h"
#include "issuer.h"
#include "sent_call.h"
#include "stream_operations.h"

enum { ROWS, WEIGHTS, SLOT_WEIGHTS, ORDER, ADDED, MOST_ADDED = 2, ARRAYS = ADDED + MOST_ADDED };

/* See CombineForm in _calls.pyi. */
typedef struct {
  ListedForm listed;
  Issuer issuer;
  PreparedCall first, second, after_copy; /* of the whole call or its first half; of the second; after a copy */
  PyObject* element; /* of the kind of the rows, whose elements are those of results; NULL before the first call … */
  char format[PROXYCCL_LONGEST_FORMAT];               /* … and so is this */
  Py_ssize_t hidden, row_bytes, experts, padded_rows; /* the last two are 0 but with padded rows */
  int spare_rows;                                     /* whether a call ignores further rows */
  int halves;
  ProxycclCombine* call;
  ProxycclStreamStep* copy;
  PyObject* buffers;    /* a dict: the number of the output buffer at an address; None if peers load no rows */
  Py_ssize_t passing;   /* the number of the buffer that other rows pass; 0 if there is none … */
  uintptr_t passing_at; /* … and where it begins */
  PyObject *context, *new_output, *check_desc, *check_output;
  PyObject* make_latest; /* makes outputs like the latest, of this many tokens */
  Py_ssize_t latest_tokens;
} Form;

static PyTypeObject* form_type; /* of the process's one module */

typedef struct {
  const ListedArray* given;
  PyObject* out; /* NULL for the first half of a call */
} Arrays;

static PyObject* arrays_of(const void* of) {
  const Arrays* arrays = of;
  PyObject* owners = PyTuple_New(ARRAYS + 1);
  for (int i = 0; owners != NULL && i <= ARRAYS; ++i) {
    PyObject* array = i < ARRAYS ? arrays->given[i].object : arrays->out;
    if (PyTuple_SetItem(owners, i, Py_NewRef(array == NULL ? Py_None : array)) != 0) Py_CLEAR(owners);
  }
  return owners;
}

static Py_ssize_t bytes_of(const Form* self, Py_ssize_t rows) { return rows * self->row_bytes; }

/* A new array for the result, and its address. NULL with an exception. */
static PyObject* new_output(Form* self, Py_ssize_t tokens, uintptr_t* at) {
  PyObject* maker = self->latest_tokens == tokens ? Py_XNewRef(self->make_latest) : NULL;
  if (maker == NULL) {
    if ((maker = PyObject_CallFunction(self->new_output, "n", tokens)) == NULL) return NULL;
    PyObject* old = self->make_latest;
    self->make_latest = Py_NewRef(maker), self->latest_tokens = tokens;
    Py_XDECREF(old);
  }
  PyObject* made = proxyccl_new_array(&self->issuer, maker, tokens == 0, at);
  Py_DECREF(maker);
  return made;
}

/* Finds where the caller's array for the result lies. 1; 0 if Python must look at the array, or -1 with an exception of
 * the program's. */
static int find_output(const Form* self, Py_ssize_t tokens, PyObject* out, uintptr_t* at) {
  ListedArray listed;
  const int read = proxyccl_read_listed(proxyccl_types_of(self->issuer.calls), out, &listed);
  if (read <= 0) return read;
  const ArrayKind* kind = &listed.array.kind;
  const int same = kind->element == self->element && memcmp(kind->format, self->format, sizeof self->format) == 0;
  const int fits =
      same && !kind->readonly && kind->dimensions == 2 && listed.extent == tokens && kind->shape[1] == self->hidden;
  *at = listed.at;
  proxyccl_release_array(&listed.array);
  return fits;
}

/* The caller's array for the result, a reference, and its address; or a new array for None. NULL with an exception, as
 * where an array does not fit, or overlaps the rows. */
static PyObject* take_output(Form* self, const Descriptor* desc, PyObject* x, uintptr_t rows_at, PyObject* out,
                             uintptr_t* at) {
  if (out == Py_None) return new_output(self, desc->tokens, at);
  const int found = find_output(self, desc->tokens, out, at);
  if (found < 0) return NULL;
  if (found && (*at >= rows_at + (uintptr_t)bytes_of(self, desc->rows) ||
                rows_at >= *at + (uintptr_t)bytes_of(self, desc->tokens)))
    return Py_NewRef(out);
  PyObject* checked = PyObject_CallFunctionObjArgs(self->check_output, x, (PyObject*)desc, out, NULL);
  unsigned long long address = 0;
  const int fits = checked != NULL && PyArg_ParseTuple(checked, "OK", &out, &address);
  *at = (uintptr_t)address;
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

/* Whether an array, or none, has as many entries as the call needs. */
static int has_extent(const ListedArray* array, Py_ssize_t extent) {
  return array->object == Py_None || array->extent == extent;
}

/* Whether the first extents of a call's arrays are right for a dispatch. */
static int fits(const Form* self, const ListedArray* given, const Descriptor* desc) {
  const Py_ssize_t rows = self->padded_rows != 0 ? self->experts : desc->rows;
  const int spare = self->spare_rows && given[ROWS].extent > rows;
  int right = (spare || given[ROWS].extent == rows) && has_extent(&given[WEIGHTS], rows);
  for (int i = SLOT_WEIGHTS; i < ARRAYS; ++i) right = right && has_extent(&given[i], desc->tokens);
  return right;
}

/* Fills in a call whose result lies at an address, and finds its launch. 0, or -1 with an exception. */
static int fill(Form* self, const ListedArray* given, const Descriptor* desc, uintptr_t target_at,
                const PreparedCall** prepared) {
  uintptr_t rows_at = given[ROWS].at;
  Py_ssize_t buffer = 0;
  *prepared = &self->first;
  if (desc->output_buffer != 0 && self->buffers != Py_None) {
    if (number_at(self, rows_at, &buffer) != 0) return -1;
    if (buffer == 0 && self->passing != 0) { /* a copy here takes less time than sending */
      self->copy->dst = self->passing_at, self->copy->src = rows_at;
      self->copy->bytes = (uint64_t)bytes_of(self, desc->rows);
      buffer = self->passing, rows_at = self->passing_at, *prepared = &self->after_copy;
    }
  }
  ProxycclCombine* call = self->call;
  call->phases = self->halves ? PROXYCCL_EXPERT_SEND : PROXYCCL_EXPERT_SEND | PROXYCCL_EXPERT_RECEIVE;
  call->tokens = (uint32_t)desc->tokens, call->output = (char*)target_at;
  call->rows = (const char*)rows_at, call->rows_buffer = (uint32_t)buffer;
  call->weights = (const float*)given[WEIGHTS].at, call->order_ids = (const char*)given[ORDER].at;
  call->slot_weights = self->halves ? NULL : (const float*)given[SLOT_WEIGHTS].at;
  for (int i = 0; i < MOST_ADDED; ++i) call->added[i] = (const char*)given[ADDED + i].at;
  proxyccl_place_tables(desc, &call->layout);
  return 0;
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

static PyObject* pair_of(const void* of) {
  PyObject* const* objects = of;
  return PyTuple_Pack(2, objects[0], objects[1]);
}

/* Makes the second half of a call. */
static PyObject* receive(SentCall* sent, PyObject* stream, PyObject* out) {
  Form* form = (Form*)sent->form;
  Descriptor* desc = (Descriptor*)sent->desc;
  uintptr_t at = 0;
  PyObject* target = take_output(form, desc, sent->rows, sent->at[0], out, &at);
  if (target == NULL) return NULL;
  form->call->phases = PROXYCCL_EXPERT_RECEIVE;
  form->call->slot_weights = (const float*)sent->at[1], form->call->output = (char*)at;
  PyObject* const kept[] = {sent->owners, target};
  if (proxyccl_issue(&form->issuer, &form->second, desc, stream, pair_of, kept) != 0) Py_CLEAR(target);
  return target;
}

static PyObject* sent_of(Form* self, const Arrays* arrays, PyObject* desc, PyObject* stream) {
  const ListedArray* given = arrays->given;
  SentCall* sent = proxyccl_sent_call((PyObject*)self, desc, stream, given[ROWS].object, Py_None, arrays_of(arrays));
  if (sent == NULL) return NULL;
  sent->receive = receive, sent->at[0] = given[ROWS].at, sent->at[1] = given[SLOT_WEIGHTS].at;
  return (PyObject*)sent;
}

/* Makes a call or, of a call in halves, the first half. */
static PyObject* call(PyObject* object, const ListedArray* given, PyObject* const* further) {
  Form* self = (Form*)object;
  Descriptor* desc = take_descriptor(self, further[0]);
  if (desc == NULL || !fits(self, given, desc)) return NULL;
  if (self->element == NULL) self->element = Py_XNewRef(given[ROWS].array.kind.element);
  memcpy(self->format, given[ROWS].array.kind.format, sizeof self->format);
  PyObject* stream = proxyccl_stream(&self->issuer, given[ROWS].object, further[2]);
  if (stream == NULL) return NULL;
  uintptr_t at = 0;
  Arrays arrays = {given, NULL};
  const PreparedCall* prepared;
  PyObject* result = NULL;
  if (!self->halves) arrays.out = take_output(self, desc, given[ROWS].object, given[ROWS].at, further[1], &at);
  if ((self->halves || arrays.out != NULL) && fill(self, given, desc, at, &prepared) == 0 &&
      proxyccl_issue(&self->issuer, prepared, desc, stream, arrays_of, &arrays) == 0)
    result = self->halves ? sent_of(self, &arrays, further[0], stream) : Py_NewRef(arrays.out);
  Py_XDECREF(arrays.out);
  Py_DECREF(stream);
  return result;
}

#define REFERENCES(apply)                                                                                  \
  apply(first.kept) apply(second.kept) apply(after_copy.kept) apply(element) apply(buffers) apply(context) \
      apply(new_output) apply(check_desc) apply(check_output) apply(make_latest)

static int traverse(PyObject* object, visitproc visit, void* arg) {
  Form* self = (Form*)object;
  Py_VISIT(Py_TYPE(object));
  REFERENCES(PROXYCCL_VISIT)
  return proxyccl_visit_issuer(&self->issuer, visit, arg);
}

static int let_go(PyObject* object) {
  Form* self = (Form*)object;
  REFERENCES(PROXYCCL_CLEAR)
  proxyccl_clear_issuer(&self->issuer);
  return 0;
}

static void end(PyObject* object) { proxyccl_free(object, let_go); }

static PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* Py_UNUSED(keywords)) {
  PyObject* object = PyType_GenericNew(type, NULL, NULL);
  if (object == NULL) return NULL;
  Form* self = (Form*)object;
  PyObject *issuer, *first, *second, *after_copy, *buffers, *context, *maker, *check_desc;
  PyObject* check_output;
  unsigned long long call_at, copy, passing_at;
  if (!PyArg_ParseTuple(arguments, "OOOO(nnnn)ppK(OnKK)OO(OO)", &issuer, &first, &second, &after_copy, &self->hidden,
                        &self->row_bytes, &self->experts, &self->padded_rows, &self->spare_rows, &self->halves,
                        &call_at, &buffers, &self->passing, &passing_at, &copy, &context, &maker, &check_desc,
                        &check_output)) {
    Py_DECREF(object);
    return NULL;
  }
  self->call = (ProxycclCombine*)(uintptr_t)call_at, self->copy = (ProxycclStreamStep*)(uintptr_t)copy;
  self->buffers = Py_NewRef(buffers), self->passing_at = (uintptr_t)passing_at, self->context = Py_NewRef(context);
  self->new_output = Py_NewRef(maker), self->check_desc = Py_NewRef(check_desc);
  self->check_output = Py_NewRef(check_output);
  self->listed.call = call;
  if (proxyccl_read_issuer(issuer, &self->issuer) == 0 && proxyccl_read_prepared(first, &self->first) == 0 &&
      proxyccl_read_prepared(second, &self->second) == 0 &&
      (after_copy == Py_None || proxyccl_read_prepared(after_copy, &self->after_copy) == 0))
    return object;
  Py_DECREF(object);
  return NULL;
}

static PyType_Slot slots[] = {
    {Py_tp_new, make}, {Py_tp_dealloc, end}, {Py_tp_traverse, traverse}, {Py_tp_clear, let_go}, {0, NULL},
};
static PyType_Spec spec = {
    .name = "proxyccl.channels.calls._calls.CombineForm",
    .basicsize = sizeof(Form),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

int proxyccl_add_combine_form(PyObject* module) {
  if (form_type == NULL) form_type = (PyTypeObject*)PyType_FromSpecWithBases(&spec, (PyObject*)proxyccl_listed_form);
  return form_type == NULL ? -1 : PyModule_AddObjectRef(module, "CombineForm", (PyObject*)form_type);
}
