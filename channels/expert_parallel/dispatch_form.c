/* A form of dispatches: a dispatch that Python prepared for certain kinds of arrays. Python has checked everything that
 * is the same in all calls of a form, and has chosen the kernel. This code fills in the arguments that differ from call
 * to call, and issues the call. */
#include <string.h>

#include "layer_form.h"
#include "stream_operations.h"

enum { ROWS, SCALES, IDS, WEIGHTS, SCATTER, ARRAYS };
enum { NONE_BEFORE, QUANTIZES_BEFORE, PACKS_BEFORE };
/* The modes in which a form makes its calls. WHOLE uses one launch. HALVES splits a call in two halves. STORED uses one
 * launch, which stores the rows in an output buffer. COUNTED uses several launches, between which Python waits for the
 * number of rows. AGAIN uses the routing of an earlier dispatch. A WHOLE call returns its rows, their weights and the
 * descriptor; the first half of HALVES returns a SentCall; all other calls return the result of `proceed`. */
enum { WHOLE, HALVES, STORED, COUNTED, AGAIN };

/* The fields are in the order of the constructor's arguments. */
typedef struct {
  LayerForm form;
  int way;
  Py_ssize_t topk, max_tokens;
  int grows; /* whether all ranks are notified if a rank has more than max_tokens tokens */
  ProxycclDispatch* call;
  int before;                  /* which kernel, if any, runs before the dispatch and makes the rows to send */
  ProxycclCombine* quantizing; /* the arguments of a kernel that quantizes tokens before the dispatch */
  uint64_t* packing[2];        /* the arguments of a kernel that packs float8 rows before the dispatch */
  uint32_t* packed_tokens;
  const char* packed; /* the rows that a kernel makes before the dispatch */
  PyObject* new_lost; /* new_lost(tokens): returns a function that makes `lost_slots`; None if no ids are replaced */
  uint64_t *replaced_ids, *lost_slots; /* ids and lost slots, for the kernel that replaces ids */
  uint32_t* replaced;                  /* the number of ids, for the kernel that replaces ids */
  const char* kept_ids;                /* the places that the kernel stores instead of ids */
  ProxycclStreamStep* clearing;        /* the launch that fills a table before rows are received; NULL if not needed */
  int cleared;                         /* which of ProxycclExpertLayout's tables `clearing` fills */
  uint32_t phases, send_phases, receive_phases;
  /* A new descriptor gets `not_received` as its field `missing`, and `context` as its owner. */
  PyObject *descriptor_type, *not_received, *context, *numbers;
  PyObject *tables, *new_tables; /* the `Tables` of a call, and a function that makes their array */
  const uint64_t* offsets;       /* the tables' offsets in their array */
  Py_ssize_t most_rows;          /* rows of the output; -1 if unknown when the call begins */
  int counts_rows;
  Py_ssize_t received;                           /* offset of the number of received rows in the tables */
  uint32_t scale_bytes, scale_column;            /* see ProxycclDispatch */
  PyObject *new_rows, *new_scales, *new_weights; /* functions that make the output's arrays; None for missing parts */
  PyObject* begun; /* begun(like, stream, given): returns the output buffer of a call that `proceed` completes */
  /* Completes a call: proceed(desc, buffer, weights) for STORED, (desc, arrays) for COUNTED, (desc, stream, out,
   * arrays) for AGAIN, and (sent, stream) for a second half whose number of rows is not known. */
  PyObject* proceed;
  char* buffers; /* the output buffers; NULL if rows do not go to output buffers */
  Py_ssize_t buffer_bytes, scales_offset;
} Form;

/* Fills in the tokens' address and number in the arguments of the dispatch, and of a kernel that makes the rows to
 * send. If there are too many tokens and the layer `grows`, the dispatch sends none. `expected` is the number of tokens
 * that the call must have; a negative number accepts any number. Returns whether the number of tokens is valid. */
static int fill_tokens(const Form* self, const ListedArray* given, Py_ssize_t expected) {
  const Py_ssize_t tokens = given[ROWS].extent;
  const int wanted = tokens > self->max_tokens;
  if ((expected >= 0 && tokens != expected) || (wanted && !self->grows)) return 0;
  if (given[SCALES].object != Py_None && given[SCALES].extent != tokens) return 0;
  const uint32_t sent = wanted ? 0 : (uint32_t)tokens;
  const uintptr_t at = given[ROWS].at;
  self->call->tokens = sent, self->call->wanted_tokens = wanted ? (uint32_t)tokens : 0;
  self->call->input = self->before == NONE_BEFORE ? (const char*)at : self->packed;
  if (self->before == QUANTIZES_BEFORE) {
    self->quantizing->tokens = sent, self->quantizing->rows = (const char*)at;
  } else if (self->before == PACKS_BEFORE) {
    *self->packing[0] = at, *self->packing[1] = given[SCALES].at, *self->packed_tokens = sent;
  }
  return 1;
}

/* Fills in the arrays of a call. Returns whether the arrays' first extents fit. */
static int fill_inputs(const Form* self, const ListedArray* given) {
  const Py_ssize_t tokens = given[ROWS].extent;
  if (given[IDS].extent != tokens || (given[WEIGHTS].object != Py_None && given[WEIGHTS].extent != tokens) ||
      !fill_tokens(self, given, -1))
    return 0;
  ProxycclDispatch* call = self->call;
  const char* ids = (const char*)given[IDS].at;
  if (self->new_lost != Py_None)
    *self->replaced_ids = given[IDS].at, *self->replaced = call->tokens * (uint32_t)self->topk, ids = self->kept_ids;
  call->expert_ids = ids, call->weights = (const char*)given[WEIGHTS].at;
  call->scatter = (const int32_t*)given[SCATTER].at, call->scatter_tokens = (uint32_t)given[SCATTER].extent;
  return 1;
}

/* Adds to a descriptor the parts that only some descriptors have: the caller's indices and the slots of lost ranks.
 * Returns 0, or -1 with an exception set. */
static int add_slots(const Form* self, Descriptor* desc, PyObject* scatter) {
  if (scatter != Py_None && PyObject_SetAttrString((PyObject*)desc, "_scatter", scatter) != 0) return -1;
  if (self->new_lost == Py_None) return 0;
  PyObject* maker = PyObject_CallFunction(self->new_lost, "n", desc->tokens);
  uintptr_t at = 0;
  PyObject* lost = maker == NULL ? NULL : proxyccl_new_array(&self->form, maker, desc->tokens == 0, &at);
  const int set = lost == NULL ? -1 : PyObject_SetAttrString((PyObject*)desc, "lost_slots", lost);
  *self->lost_slots = at;
  Py_XDECREF(maker);
  Py_XDECREF(lost);
  return set;
}

/* Returns a new descriptor with its tables; the dispatch's number is set later. Returns NULL with an exception set on
 * failure. */
static Descriptor* new_descriptor(const Form* self, const ListedArray* given, PyObject* stream) {
  uintptr_t at = 0;
  PyObject* tables = proxyccl_new_array(&self->form, self->new_tables, 0, &at);
  Descriptor* desc = tables == NULL ? NULL : (Descriptor*)PyType_GenericAlloc((PyTypeObject*)self->descriptor_type, 0);
  if (desc != NULL) {
    desc->owner = Py_NewRef(self->context), desc->like = Py_NewRef(given[ROWS].object);
    desc->stream = Py_NewRef(stream), desc->missing = Py_NewRef(self->not_received);
    desc->tokens = (Py_ssize_t)self->call->tokens, desc->rows = self->most_rows < 0 ? 0 : self->most_rows;
    desc->counts_rows = (char)self->counts_rows;
    if (proxyccl_add_block(desc, tables, at, self->tables, self->offsets) != 0 ||
        add_slots(self, desc, given[SCATTER].object) != 0) {
      Py_DECREF((PyObject*)desc);
      desc = NULL;
    }
  }
  Py_XDECREF(tables);
  return desc;
}

/* Gives a dispatch its number, as the last step before the launch. Returns 0, or -1 with an exception set. */
static int number_call(const Form* self, Descriptor* desc) {
  PyObject* number = PyIter_Next(self->numbers);
  if (number == NULL) return -1;
  desc->number = PyLong_AsSsize_t(number);
  Py_DECREF(number);
  if (desc->number == -1) return -1;
  ProxycclDispatch* call = self->call;
  call->ticket = (uint64_t)desc->number, call->output_buffer = (uint32_t)desc->output_buffer;
  proxyccl_place_tables(desc, &call->layout);
  return 0;
}

/* Returns the address of a table; 0 if the descriptor lacks the table. */
static uintptr_t place_of(const Descriptor* desc, int table) {
  for (int i = 0; i < desc->count; ++i)
    if (desc->blocks[i].offsets[table] != PROXYCCL_NO_TABLE) return desc->blocks[i].at + desc->blocks[i].offsets[table];
  return 0;
}

static void fill_output(const Form* self, const Descriptor* desc, uint32_t phases, Py_ssize_t rows,
                        const uintptr_t* at) {
  ProxycclDispatch* call = self->call;
  const int scaled = at[1] != 0;
  call->phases = phases, call->capacity = (uint32_t)rows;
  call->scale_bytes = scaled ? self->scale_bytes : 0, call->scale_column = scaled ? self->scale_column : 0;
  call->output = (char*)at[0], call->output_scales = (char*)at[1], call->output_weights = (char*)at[2];
  call->received = self->counts_rows ? (int32_t*)(desc->blocks[0].at + (uintptr_t)self->received) : NULL;
  if (self->clearing != NULL) {
    self->clearing->dst = rows != 0 ? place_of(desc, self->cleared) : 0;
    self->clearing->bytes = (uint64_t)rows * sizeof(int32_t);
  }
}

/* Makes a new array and finds its address. Returns None and the address 0 if `maker` is None, or NULL with an exception
 * set on failure. */
static PyObject* new_array(const Form* self, PyObject* maker, uintptr_t* at) {
  *at = 0;
  return maker == Py_None ? Py_NewRef(Py_None) : proxyccl_new_array(&self->form, maker, 0, at);
}

/* Makes the arrays of the output: rows, or a pair of rows and scales, and weights. Returns 0, or -1 with an exception
 * set. */
static int new_output(const Form* self, uintptr_t* at, CallArrays* arrays) {
  if ((arrays->rows = new_array(self, self->new_rows, &at[0])) == NULL ||
      (arrays->weights = new_array(self, self->new_weights, &at[2])) == NULL)
    return -1;
  PyObject* scales = new_array(self, self->new_scales, &at[1]);
  if (scales != NULL && scales != Py_None) {
    PyObject* rows = arrays->rows;
    arrays->rows = PyTuple_Pack(2, rows, scales);
    Py_DECREF(rows);
  }
  Py_XDECREF(scales);
  return scales == NULL || arrays->rows == NULL ? -1 : 0;
}

static void mark_received(Descriptor* desc) {
  PyObject* old = desc->missing;
  desc->missing = Py_NewRef(Py_None);
  Py_XDECREF(old);
}

/* Makes a whole call, or the first half of a call. */
static PyObject* issue_first(Form* self, Descriptor* desc, CallArrays* arrays) {
  uintptr_t at[3];
  if (new_output(self, at, arrays) != 0 || number_call(self, desc) != 0) return NULL;
  const int halves = self->way == HALVES;
  const uintptr_t nowhere[] = {0, 0, 0};
  fill_output(self, desc, halves ? self->send_phases : self->phases, halves ? 0 : self->most_rows,
              halves ? nowhere : at);
  if (halves) self->call->received = NULL;
  if (proxyccl_issue(&self->form, &self->form.first, desc, desc->stream, arrays) != 0) return NULL;
  if (halves)
    return proxyccl_sent_call(&self->form, desc, desc->stream, arrays->rows, arrays->weights, proxyccl_owners(arrays),
                              at);
  mark_received(desc);
  return PyTuple_Pack(3, arrays->rows, arrays->weights, (PyObject*)desc);
}

/* Makes a whole call whose rows go to an output buffer, by one launch. Python then waits for the number of rows, if
 * that number is not known, and makes arrays in the buffer. */
static PyObject* issue_stored(Form* self, Descriptor* desc, PyObject* taken, CallArrays* arrays) {
  uintptr_t at[3];
  arrays->rows = Py_NewRef(taken), arrays->weights = new_array(self, self->new_weights, &at[2]);
  if (arrays->weights == NULL || number_call(self, desc) != 0) return NULL;
  at[0] = (uintptr_t)(self->buffers + (desc->output_buffer - 1) * self->buffer_bytes);
  at[1] = self->scale_bytes != 0 ? at[0] + (uintptr_t)self->scales_offset : 0;
  fill_output(self, desc, self->phases, self->most_rows, at);
  if (proxyccl_issue(&self->form, &self->form.first, desc, desc->stream, arrays) != 0) return NULL;
  mark_received(desc);
  return PyObject_CallFunctionObjArgs(self->proceed, (PyObject*)desc, taken, arrays->weights, NULL);
}

/* Takes the output buffer of a call, and finds the buffer's number. Returns NULL with an exception set on failure. */
static PyObject* take_buffer(const Form* self, const ListedArray* given, PyObject* stream, PyObject* of_caller,
                             Py_ssize_t* number) {
  PyObject* taken = PyObject_CallFunctionObjArgs(self->begun, given[ROWS].object, stream, of_caller, NULL);
  PyObject* found = taken == NULL ? NULL : PyObject_GetAttrString(taken, "number");
  *number = found == NULL ? -1 : PyLong_AsSsize_t(found);
  Py_XDECREF(found);
  if (*number < 0) Py_CLEAR(taken);
  return taken;
}

/* Begins a call that Python completes when the CPU knows the number of rows. */
static PyObject* begin_counted(Form* self, Descriptor* desc, const CallArrays* arrays) {
  if (number_call(self, desc) != 0) return NULL;
  PyObject* owners = proxyccl_owners(arrays);
  PyObject* result = owners == NULL ? NULL : PyObject_CallFunctionObjArgs(self->proceed, (PyObject*)desc, owners, NULL);
  Py_XDECREF(owners);
  return result;
}

/* Makes a call with the routing of an earlier dispatch. */
static PyObject* call_again(Form* self, const ListedArray* given, PyObject* const* further) {
  PyObject *const desc = further[0], *const of_caller = further[1], *const out = further[2];
  if (!fill_tokens(self, given, ((Descriptor*)desc)->tokens)) return NULL;
  PyObject* stream = proxyccl_stream(&self->form, given[ROWS].object, of_caller);
  if (stream == NULL) return NULL;
  PyObject *result = NULL, *owners = PyTuple_Pack(2, given[ROWS].object, given[SCALES].object);
  if (owners != NULL) result = PyObject_CallFunctionObjArgs(self->proceed, desc, stream, out, owners, NULL);
  Py_XDECREF(owners);
  Py_DECREF(stream);
  return result;
}

static PyObject* call(PyObject* object, const ListedArray* given, PyObject* const* further) {
  Form* self = (Form*)object;
  if (self->way == AGAIN) return call_again(self, given, further);
  if (!fill_inputs(self, given)) return NULL;
  PyObject* stream = proxyccl_stream(&self->form, given[ROWS].object, further[0]);
  if (stream == NULL) return NULL;
  CallArrays arrays = {given, ARRAYS, NULL, NULL};
  const int begins = self->way == STORED || self->way == COUNTED;
  Py_ssize_t buffer = 0;
  PyObject *result = NULL, *taken = begins ? take_buffer(self, given, stream, further[0], &buffer) : NULL;
  Descriptor* desc = begins && taken == NULL ? NULL : new_descriptor(self, given, stream);
  if (desc != NULL) {
    desc->output_buffer = buffer;
    result = self->way == STORED    ? issue_stored(self, desc, taken, &arrays)
             : self->way == COUNTED ? begin_counted(self, desc, &arrays)
                                    : issue_first(self, desc, &arrays);
  }
  Py_XDECREF((PyObject*)desc);
  Py_XDECREF(taken);
  Py_XDECREF(arrays.rows);
  Py_XDECREF(arrays.weights);
  Py_DECREF(stream);
  return result;
}

static PyObject* receive(SentCall* sent, PyObject* stream, PyObject* Py_UNUSED(out)) {
  Form* form = (Form*)sent->form;
  Descriptor* desc = (Descriptor*)sent->desc;
  if (form->most_rows < 0) return PyObject_CallFunctionObjArgs(form->proceed, (PyObject*)sent, stream, NULL);
  fill_output(form, desc, form->receive_phases, desc->rows, sent->at);
  const CallArrays arrays = {.rows = sent->owners};
  if (proxyccl_issue(&form->form, &form->form.second, desc, stream, &arrays) != 0) return NULL;
  mark_received(desc);
  return PyTuple_Pack(3, sent->rows, sent->weights, sent->desc);
}

/* Issues one part of a call that Python completes. */
static PyObject* issue(PyObject* object, PyObject* arguments) {
  Form* self = (Form*)object;
  PyObject *desc, *stream;
  CallArrays arrays = {0};
  int first, phases;
  Py_ssize_t rows;
  uintptr_t at[3];
  if (!PyArg_ParseTuple(arguments, "OOOpin(O&O&O&)", &desc, &stream, &arrays.rows, &first, &phases, &rows,
                        proxyccl_as_pointer, &at[0], proxyccl_as_pointer, &at[1], proxyccl_as_pointer, &at[2]))
    return NULL;
  proxyccl_place_tables((Descriptor*)desc, &self->call->layout);
  fill_output(self, (Descriptor*)desc, (uint32_t)phases, rows, at);
  const PreparedCall* part = first ? &self->form.first : &self->form.second;
  if (proxyccl_issue(&self->form, part, (Descriptor*)desc, stream, &arrays) != 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* Py_UNUSED(keywords)) {
  PyObject *object = proxyccl_new_form(type, arguments), *common;
  Form* self = (Form*)object;
  if (object == NULL) return NULL;
  self->form.listed.call = call, self->form.receive = receive;
  if (PyArg_ParseTuple(arguments, "Oi(nnp)O&(iO&O&O&O&O&)(OO&O&O&O&)(O&i)(III)(OOOOOOO&)(nin)(II)(OOO)OO(O&nn)",
                       &common, &self->way, &self->topk, &self->max_tokens, &self->grows, PROXYCCL_AT(call),
                       &self->before, PROXYCCL_AT(quantizing), PROXYCCL_AT(packing[0]), PROXYCCL_AT(packing[1]),
                       PROXYCCL_AT(packed_tokens), PROXYCCL_AT(packed), &self->new_lost, PROXYCCL_AT(replaced_ids),
                       PROXYCCL_AT(lost_slots), PROXYCCL_AT(replaced), PROXYCCL_AT(kept_ids), PROXYCCL_AT(clearing),
                       &self->cleared, &self->phases, &self->send_phases, &self->receive_phases, &self->descriptor_type,
                       &self->not_received, &self->context, &self->numbers, &self->tables, &self->new_tables,
                       PROXYCCL_AT(offsets), &self->most_rows, &self->counts_rows, &self->received, &self->scale_bytes,
                       &self->scale_column, &self->new_rows, &self->new_scales, &self->new_weights, &self->begun,
                       &self->proceed, PROXYCCL_AT(buffers), &self->buffer_bytes, &self->scales_offset))
    return object;
  Py_DECREF(object);
  return NULL;
}

static PyMethodDef methods[] = {
    {"issue", issue, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
int proxyccl_add_dispatch_form(PyObject* module) {
  static PyTypeObject* type;
  return proxyccl_add_layer_form(module, &type, "proxyccl.channels.calls._calls.DispatchForm", sizeof(Form), make,
                                 methods);
}
