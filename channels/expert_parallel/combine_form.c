/* A form of combines (a combine prepared for certain kinds of arrays), whose calls are whole or in two halves. A
 * combine is one kernel. If peers load the rows, but can't access the memory that holds the rows, the rows are first
 * copied to an output buffer. */
#include <string.h>

#include "layer_form.h"
#include "stream_operations.h"

enum { ROWS, WEIGHTS, SLOT_WEIGHTS, ORDER, ADDED, MOST_ADDED = 2, ARRAYS = ADDED + MOST_ADDED };

typedef struct {
  uintptr_t at;
  size_t bytes;
} Memory;

/* See CombineForm in _calls.pyi for the order of the constructor's arguments. */
typedef struct {
  LayerForm form;                                     /* `element` and `format`: the element type of rows and results */
  char format[PROXYCCL_LONGEST_FORMAT];               /* the string that `form.format` points to */
  PreparedCall after_copy;                            /* launches a whole call that first copies its rows to a buffer */
  Py_ssize_t hidden, row_bytes, experts, padded_rows; /* experts and padded_rows are 0 unless rows are padded */
  int spare_rows;                                     /* whether a call ignores rows after the last received row */
  int halves;
  ProxycclCombine* call;
  ProxycclStreamStep* copy;
  PyObject* buffers;        /* a dict from an output buffer's address to its number; None if peers don't load rows */
  Py_ssize_t passing;       /* the number of the buffer to which rows outside buffers are copied; 0 for none */
  uintptr_t passing_at;     /* the address of buffer `passing` */
  PyObject* context;        /* the DispatchCombineContext that made the descriptors */
  PyObject* new_output;     /* new_output(tokens): returns a function that makes outputs of this many tokens */
  PyObject* check_desc;     /* check_desc(desc): raises an error if the descriptor can't be combined */
  PyObject* check_output;   /* check_output(desc, out, overlaps): returns the address of `out`, or raises an error */
  Memory inputs[ARRAYS];    /* the arrays that the call under way reads */
  Py_ssize_t latest_tokens; /* number of tokens of the outputs that form.make_latest makes */
} Form;

static Py_ssize_t bytes_of(const Form* self, Py_ssize_t rows) { return rows * self->row_bytes; }

/* Makes a new array for the result, and finds its address. Returns NULL with an exception set on failure. */
static PyObject* new_output(Form* self, Py_ssize_t tokens, uintptr_t* at) {
  PyObject* maker = self->latest_tokens == tokens ? Py_XNewRef(self->form.make_latest) : NULL;
  if (maker == NULL) {
    if ((maker = PyObject_CallFunction(self->new_output, "n", tokens)) == NULL) return NULL;
    PyObject* old = self->form.make_latest;
    self->form.make_latest = Py_NewRef(maker), self->latest_tokens = tokens;
    Py_XDECREF(old);
  }
  PyObject* made = proxyccl_new_array(&self->form, maker, tokens == 0, at);
  Py_DECREF(maker);
  return made;
}

/* Finds the address of the caller's array for the result. Returns 1 if the array fits, 0 if Python must check the
 * array, or -1 with an exception set. */
static int find_output(const Form* self, Py_ssize_t tokens, PyObject* out, uintptr_t* at) {
  ListedArray listed;
  const int read = proxyccl_read_listed(proxyccl_types_of(self->form.calls), out, &listed);
  if (read <= 0) return read;
  const ArrayKind* kind = &listed.array.kind;
  const int same = kind->element == self->form.element && memcmp(kind->format, self->format, sizeof self->format) == 0;
  const int fits =
      same && !kind->readonly && kind->dimensions == 2 && listed.extent == tokens && kind->shape[1] == self->hidden;
  *at = listed.at;
  proxyccl_release_array(&listed.array);
  return fits;
}

/* Returns whether a result would overlap an array that the call reads. The result may be one of the arrays to add,
 * because each thread reads these arrays' elements before it writes their sums. */
static int overlaps(const Form* self, uintptr_t at, size_t bytes) {
  for (int i = 0; i < ARRAYS; ++i) {
    const Memory* input = &self->inputs[i];
    if (input->bytes != 0 && at < input->at + input->bytes && input->at < at + bytes &&
        !(i >= ADDED && input->at == at))
      return 1;
  }
  return 0;
}

/* Returns a new reference to the caller's array for the result, or to a new array if `out` is None, and its address.
 * Returns NULL with an exception set on failure, such as an array that does not fit or overlaps another array. */
static PyObject* take_output(Form* self, const Descriptor* desc, PyObject* out, uintptr_t* at) {
  if (out == Py_None) return new_output(self, desc->tokens, at);
  int found = find_output(self, desc->tokens, out, at);
  while (found >= 0) {
    const int overlap = found && overlaps(self, *at, (size_t)bytes_of(self, desc->tokens));
    if (found && !overlap) return Py_NewRef(out);
    PyObject* checked = PyObject_CallFunction(self->check_output, "OOi", desc, out, overlap);
    *at = checked == NULL ? 0 : (uintptr_t)PyLong_AsUnsignedLongLong(checked);
    found = checked == NULL || PyErr_Occurred() != NULL ? -1 : 1;
    Py_XDECREF(checked);
  }
  return NULL;
}

static int number_at(const Form* self, uintptr_t at, Py_ssize_t* number) {
  PyObject* key = PyLong_FromUnsignedLongLong(at);
  if (key == NULL) return -1;
  PyObject* found = PyDict_GetItemWithError(self->buffers, key);
  Py_DECREF(key);
  *number = found == NULL ? 0 : PyLong_AsSsize_t(found);
  return PyErr_Occurred() == NULL ? 0 : -1;
}

/* Returns whether an optional array is absent or has exactly the number of entries that the call needs. */
static int has_extent(const ListedArray* array, Py_ssize_t extent) {
  return array->object == Py_None || array->extent == extent;
}

/* Returns whether the first extents of a call's arrays match those of the descriptor's dispatch. */
static int fits(const Form* self, const ListedArray* given, const Descriptor* desc) {
  const Py_ssize_t rows = self->padded_rows != 0 ? self->experts : desc->rows;
  const int spare = self->spare_rows && given[ROWS].extent > rows;
  int right = (spare || given[ROWS].extent == rows) && has_extent(&given[WEIGHTS], rows);
  for (int i = SLOT_WEIGHTS; i < ARRAYS; ++i) right = right && has_extent(&given[i], desc->tokens);
  return right;
}

/* Fills in the arguments of a call whose result goes to target_at, and selects the call's launch. Returns 0, or -1 with
 * an exception set. */
static int fill(Form* self, const ListedArray* given, const Descriptor* desc, uintptr_t target_at,
                const PreparedCall** prepared) {
  uintptr_t rows_at = given[ROWS].at;
  Py_ssize_t buffer = 0;
  *prepared = &self->form.first;
  if (desc->output_buffer != 0 && self->buffers != Py_None) {
    if (number_at(self, rows_at, &buffer) != 0) return -1;
    if (buffer == 0 && self->passing != 0) { /* copies the rows to a buffer, which is faster than sending them */
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

/* Returns the object as a descriptor whose rows this form can combine, or NULL with an exception set. */
static Descriptor* take_descriptor(const Form* self, PyObject* object) {
  Descriptor* desc = proxyccl_received(object, self->context);
  if (desc != NULL && (self->padded_rows == 0 || desc->rows == self->experts * self->padded_rows)) return desc;
  PyObject* refused = PyObject_CallFunctionObjArgs(self->check_desc, object, NULL);
  Py_XDECREF(refused);
  if (refused != NULL) PyErr_SetString(PyExc_RuntimeError, "the descriptor is of another form");
  return NULL;
}

static PyObject* receive(SentCall* sent, PyObject* stream, PyObject* out) {
  Form* self = (Form*)sent->form;
  Descriptor* desc = (Descriptor*)sent->desc;
  uintptr_t at = 0;
  memset(self->inputs, 0, sizeof self->inputs); /* a later call of this form may have set them */
  self->inputs[ROWS] = (Memory){sent->at[0], (size_t)bytes_of(self, desc->rows)};
  self->inputs[SLOT_WEIGHTS] = (Memory){sent->at[1], sent->at[2]};
  PyObject* target = take_output(self, desc, out, &at);
  if (target == NULL) return NULL;
  self->call->phases = PROXYCCL_EXPERT_RECEIVE;
  self->call->slot_weights = (const float*)sent->at[1], self->call->output = (char*)at;
  const CallArrays arrays = {.rows = sent->owners, .weights = target};
  if (proxyccl_issue(&self->form, &self->form.second, desc, stream, &arrays) != 0) Py_CLEAR(target);
  return target;
}

/* Makes a whole call or, for a form in halves, the first half. */
static PyObject* call(PyObject* object, const ListedArray* given, PyObject* const* further) {
  Form* self = (Form*)object;
  Descriptor* desc = take_descriptor(self, further[0]);
  if (desc == NULL || !fits(self, given, desc)) return NULL;
  if (self->form.element == NULL) self->form.element = Py_XNewRef(given[ROWS].array.kind.element);
  memcpy(self->format, given[ROWS].array.kind.format, sizeof self->format);
  PyObject* stream = proxyccl_stream(&self->form, given[ROWS].object, further[2]);
  if (stream == NULL) return NULL;
  uintptr_t at = 0;
  CallArrays arrays = {given, ARRAYS, NULL, NULL};
  const PreparedCall* prepared;
  PyObject* result = NULL;
  for (int i = 0; i < ARRAYS; ++i) self->inputs[i] = (Memory){given[i].at, given[i].array.bytes};
  self->inputs[ROWS].bytes = (size_t)bytes_of(self, desc->rows); /* the result may overlap the rows after these */
  if (!self->halves) arrays.rows = take_output(self, desc, further[1], &at);
  if ((self->halves || arrays.rows != NULL) && fill(self, given, desc, at, &prepared) == 0 &&
      proxyccl_issue(&self->form, prepared, desc, stream, &arrays) == 0) {
    const uintptr_t at_sent[3] = {given[ROWS].at, given[SLOT_WEIGHTS].at, given[SLOT_WEIGHTS].array.bytes};
    result = self->halves ? proxyccl_sent_call(&self->form, desc, stream, given[ROWS].object, Py_None,
                                               proxyccl_owners(&arrays), at_sent)
                          : Py_NewRef(arrays.rows);
  }
  Py_XDECREF(arrays.rows);
  Py_DECREF(stream);
  return result;
}

static PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* Py_UNUSED(keywords)) {
  PyObject *object = proxyccl_new_form(type, arguments), *common;
  Form* self = (Form*)object;
  if (object == NULL) return NULL;
  self->form.listed.call = call, self->form.receive = receive;
  if (PyArg_ParseTuple(arguments, "OO&(nnnn)ppO&(OnO&O&)OO(OO)", &common, proxyccl_as_prepared, &self->after_copy,
                       &self->hidden, &self->row_bytes, &self->experts, &self->padded_rows, &self->spare_rows,
                       &self->halves, PROXYCCL_AT(call), &self->buffers, &self->passing, PROXYCCL_AT(passing_at),
                       PROXYCCL_AT(copy), &self->context, &self->new_output, &self->check_desc, &self->check_output))
    return object;
  Py_DECREF(object);
  return NULL;
}

int proxyccl_add_combine_form(PyObject* module) {
  static PyTypeObject* type;
  return proxyccl_add_layer_form(module, &type, "proxyccl.channels.calls._calls.CombineForm", sizeof(Form), make, NULL);
}
