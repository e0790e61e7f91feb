/* Dispatches of one form. What differs from call to call is filled in and issued here; everything else was checked, and
 * the kernel chosen, when the form was prepared. */
#include <string.h>

#include "forms.h"
#include "given_arrays.h"
#include "issuer.h"
#include "stream_operations.h"

enum { ROWS, SCALES, IDS, WEIGHTS, SCATTER, KINDS };
enum { NONE_BEFORE, QUANTIZES_BEFORE, PACKS_BEFORE };
enum { PARSED = 14 }; /* objects that `make` is given */

/* See DispatchForm in _calls.pyi. */
typedef struct {
  PyObject ob_base;
  Issuer issuer;
  PreparedCall first, second; /* of the whole call or its first half; of what follows */
  Kind kinds[KINDS];
  Py_ssize_t hidden, scales, topk, max_tokens, row_bytes, slot_bytes, weight_bytes;
  int grows;          /* whether all ranks are told of more tokens than that … */
  PyObject* too_many; /* … or too_many(tokens) raises */
  ProxycclDispatch* call;
  int before;                  /* whether a kernel before makes the rows that are sent … */
  ProxycclCombine* quantizing; /* … its arguments … */
  uint64_t* packing[2];        /* … which are these for rows that are in float8 already … */
  uint32_t* packed_tokens;
  uintptr_t packed;                      /* … and where it puts them */
  PyObject* new_lost;                    /* None but where ranks are lost. Then a kernel before renumbers ids … */
  uint64_t *renumbered_ids, *lost_slots; /* … from here, and says here which slots were lost ranks'; … */
  uint32_t* renumbered;                  /* … this is their number, … */
  uintptr_t kept_ids;                    /* … and this is where it puts the ids */
  ProxycclStreamStep* clearing;          /* fills a table of rows before rows are received; NULL: none … */
  int cleared;                           /* … the table's number in ProxycclExpertLayout */
  uint32_t phases, send_phases, receive_phases;
  PyObject *descriptor_type, *not_received, *context, *numbers;
  PyObject *tables, *new_tables, *address;
  const uint64_t* offsets;
  Py_ssize_t most_rows; /* rows of the output; -1 if they are not known when the call begins */
  int counts_rows;
  Py_ssize_t received;                           /* offset of the number of received rows in the tables */
  uint32_t scale_bytes, scale_column;            /* see ProxycclDispatch */
  PyObject *new_rows, *new_scales, *new_weights; /* None: there are none */
  PyObject *begun, *receive_counted;
  uintptr_t buffers_at; /* the output buffers, if rows go there */
  size_t buffer_bytes, scales_offset;
} Form;

/* A dispatch whose first half is queued. */
typedef struct {
  PyObject ob_base;
  Form* form;
  PyObject *desc, *rows, *weights, *owners, *recorded;
  uintptr_t at[3]; /* of rows, scales and weights */
} Sent;

static PyTypeObject *form_type, *sent_type; /* of the process's one module */

/* The caller's arrays of a call, and those of its result. */
typedef struct {
  PyObject *x, *ids, *weight, *scatter, *rows, *weights;
} Arrays;

static PyObject* arrays_of(const void* of) {
  const Arrays* arrays = of;
  return PyTuple_Pack(6, arrays->x, arrays->ids, arrays->weight, arrays->scatter, arrays->rows, arrays->weights);
}

static PyObject* like_of(PyObject* x) { return PyTuple_Check(x) ? PyTuple_GetItem(x, 0) : x; }

/* Whether tokens are of the form's kinds. -1 with an exception. */
static int has_tokens(const Form* self, PyObject* x) {
  const int is_pair = self->kinds[SCALES].type != NULL;
  if (is_pair != PyTuple_Check(x) || (is_pair && PyTuple_Size(x) != 2)) return 0;
  const int fits = proxyccl_is_of_kind(&self->kinds[ROWS], like_of(x));
  return fits > 0 && is_pair ? proxyccl_is_of_kind(&self->kinds[SCALES], PyTuple_GetItem(x, 1)) : fits;
}

/* Whether a call's arrays are of the form's kinds. -1 with an exception. */
static int is_of_form(const Form* self, const Arrays* inputs) {
  int fits = has_tokens(self, inputs->x);
  if (fits > 0) fits = proxyccl_is_of_kind(&self->kinds[IDS], inputs->ids);
  if (fits > 0) fits = proxyccl_is_of_kind(&self->kinds[WEIGHTS], inputs->weight);
  return fits > 0 ? proxyccl_is_of_kind(&self->kinds[SCATTER], inputs->scatter) : fits;
}

/* Fills in the tokens, as many as `expected` or any number, and the launch of a kernel that makes the rows that are
 * sent. Of too many for a layer that grows, none are sent. The number of given tokens; -1 with an exception. */
static Py_ssize_t fill_tokens(const Form* self, PyObject* x, Py_ssize_t expected) {
  const Py_ssize_t shape[] = {expected, self->hidden};
  Py_ssize_t tokens = 0;
  uintptr_t at, scales_at = 0;
  if (proxyccl_place(&self->kinds[ROWS], like_of(x), shape, 2, self->row_bytes, &tokens, &at) != 0) return -1;
  if (self->kinds[SCALES].type != NULL) {
    const Py_ssize_t of_scales[] = {tokens, self->scales};
    if (proxyccl_place(&self->kinds[SCALES], PyTuple_GetItem(x, 1), of_scales, 2, 4 * self->scales, NULL, &scales_at) !=
        0)
      return -1;
  }
  const int wanted = tokens > self->max_tokens;
  if (wanted && !self->grows) {
    Py_XDECREF(PyObject_CallFunction(self->too_many, "n", tokens));
    if (PyErr_Occurred() == NULL) PyErr_SetString(PyExc_RuntimeError, "too many tokens");
    return -1;
  }
  const uint32_t sent = wanted ? 0 : (uint32_t)tokens;
  self->call->tokens = sent, self->call->wanted_tokens = wanted ? (uint32_t)tokens : 0;
  self->call->input = (const char*)(self->before == NONE_BEFORE ? at : self->packed);
  if (self->before == QUANTIZES_BEFORE) {
    self->quantizing->tokens = sent, self->quantizing->rows = (const char*)at;
  } else if (self->before == PACKS_BEFORE) {
    *self->packing[0] = at, *self->packing[1] = scales_at, *self->packed_tokens = sent;
  }
  return tokens;
}

/* Fills in the arrays of a call. 1; 0 if they are of other kinds, or -1 with an exception. */
static int fill_inputs(const Form* self, const Arrays* inputs) {
  const int fits = is_of_form(self, inputs);
  if (fits <= 0) return fits;
  const Py_ssize_t tokens = fill_tokens(self, inputs->x, PROXYCCL_ANY_EXTENT);
  if (tokens < 0) return -1;
  const Py_ssize_t slots[] = {tokens, self->topk}, of_all[] = {PROXYCCL_ANY_EXTENT, self->topk};
  Py_ssize_t scattered = 0;
  uintptr_t ids, weights, scatter;
  if (proxyccl_place(&self->kinds[IDS], inputs->ids, slots, 2, self->slot_bytes, NULL, &ids) != 0 ||
      proxyccl_place(&self->kinds[WEIGHTS], inputs->weight, slots, 2, self->weight_bytes, NULL, &weights) != 0 ||
      proxyccl_place(&self->kinds[SCATTER], inputs->scatter, of_all, 2, 4 * self->topk, &scattered, &scatter) != 0)
    return -1;
  ProxycclDispatch* call = self->call;
  if (self->new_lost != Py_None)
    *self->renumbered_ids = ids, *self->renumbered = call->tokens * (uint32_t)self->topk, ids = self->kept_ids;
  call->expert_ids = (const char*)ids, call->weights = (const char*)weights;
  call->scatter = (const int32_t*)scatter, call->scatter_tokens = (uint32_t)scattered;
  return 1;
}

/* Adds what only some descriptors have: the indices that were given, and the slots that lost ranks had. 0, or -1 with
 * an exception. */
static int add_slots(const Form* self, Descriptor* desc, PyObject* scatter) {
  if (scatter != Py_None && PyObject_SetAttrString((PyObject*)desc, "_scatter", scatter) != 0) return -1;
  if (self->new_lost == Py_None) return 0;
  PyObject* lost = PyObject_CallFunction(self->new_lost, "n", desc->tokens);
  uintptr_t at = 0;
  const int made = lost != NULL &&
                   proxyccl_address(&self->kinds[ROWS], lost, self->address, desc->tokens * self->topk, &at) == 0 &&
                   PyObject_SetAttrString((PyObject*)desc, "lost_slots", lost) == 0;
  *self->lost_slots = at;
  Py_XDECREF(lost);
  return made ? 0 : -1;
}

/* A descriptor with its tables, without a number yet. NULL with an exception. */
static Descriptor* new_descriptor(const Form* self, const Arrays* inputs, PyObject* stream) {
  PyObject *const like = like_of(inputs->x), *tables = PyObject_CallNoArgs(self->new_tables);
  uintptr_t at = 0;
  const int placed = tables != NULL && proxyccl_address(&self->kinds[ROWS], tables, self->address, 1, &at) == 0;
  Descriptor* desc = placed ? (Descriptor*)PyType_GenericAlloc((PyTypeObject*)self->descriptor_type, 0) : NULL;
  if (desc != NULL) {
    desc->owner = Py_NewRef(self->context), desc->like = Py_NewRef(like), desc->stream = Py_NewRef(stream);
    desc->missing = Py_NewRef(self->not_received);
    desc->tokens = (Py_ssize_t)self->call->tokens, desc->rows = self->most_rows < 0 ? 0 : self->most_rows;
    desc->counts_rows = (char)self->counts_rows;
    if (proxyccl_add_block(desc, tables, at, self->tables, self->offsets) != 0 ||
        add_slots(self, desc, inputs->scatter) != 0) {
      Py_DECREF((PyObject*)desc);
      desc = NULL;
    }
  }
  Py_XDECREF(tables);
  return desc;
}

/* Gives a dispatch its number, the last step before it is issued. 0, or -1 with an exception. */
static int number_call(const Form* self, Descriptor* desc) {
  PyObject* number = PyIter_Next(self->numbers);
  if (number == NULL) return -1;
  desc->number = PyLong_AsSsize_t(number);
  Py_DECREF(number);
  if (desc->number == -1) return -1;
  ProxycclDispatch* call = self->call;
  call->ticket = (uint64_t)desc->number, call->output_buffer = (uint32_t)desc->output_buffer;
  memset(&call->layout, 0, sizeof call->layout);
  proxyccl_place_tables(desc, &call->layout);
  return 0;
}

/* The address of a table; 0 if the descriptor lacks it. */
static uintptr_t place_of(const Descriptor* desc, int table) {
  for (int i = 0; i < desc->count; ++i)
    if (desc->blocks[i].offsets[table] != PROXYCCL_NO_TABLE) return desc->blocks[i].at + desc->blocks[i].offsets[table];
  return 0;
}

static void fill_output(const Form* self, const Descriptor* desc, uint32_t phases, Py_ssize_t rows,
                        const uintptr_t* at) {
  const uintptr_t received = self->counts_rows ? desc->blocks[0].at + (uintptr_t)self->received : 0;
  proxyccl_expert_dispatch_receive(self->call, phases, (uint32_t)rows, at[1] != 0 ? self->scale_bytes : 0, at[0], at[1],
                                   at[2], received);
  self->call->scale_column = at[1] != 0 ? self->scale_column : 0;
  if (self->clearing != NULL) {
    self->clearing->dst = rows != 0 ? place_of(desc, self->cleared) : 0;
    self->clearing->bytes = (uint64_t)rows * sizeof(int32_t);
  }
}

/* A new array and its address; None and 0 if there is none. NULL with an exception. */
static PyObject* new_array(const Form* self, PyObject* maker, uintptr_t* at) {
  *at = 0;
  if (maker == Py_None) return Py_NewRef(Py_None);
  PyObject* made = PyObject_CallNoArgs(maker);
  if (made != NULL && proxyccl_address(&self->kinds[ROWS], made, self->address, 1, at) != 0) Py_CLEAR(made);
  return made;
}

/* Makes the arrays of the output: rows, or a pair of them and their scales, and weights. 0, or -1 with an exception. */
static int new_output(const Form* self, uintptr_t* at, Arrays* arrays) {
  PyObject* rows = new_array(self, self->new_rows, &at[0]);
  PyObject* weights = rows == NULL ? NULL : new_array(self, self->new_weights, &at[2]);
  PyObject* scales = weights == NULL ? NULL : new_array(self, self->new_scales, &at[1]);
  if (scales != NULL && scales != Py_None) {
    PyObject* pair = PyTuple_Pack(2, rows, scales);
    Py_DECREF(rows);
    rows = pair;
  }
  const int made = scales != NULL && rows != NULL;
  Py_XDECREF(scales);
  if (made) {
    arrays->rows = rows, arrays->weights = weights;
    return 0;
  }
  Py_XDECREF(rows);
  Py_XDECREF(weights);
  return -1;
}

/* Takes the arguments of a call, which are arrays and a stream or None, and fills the arrays in. `stream` becomes a
 * reference to the call's stream. 1; 0 if the arrays are of other kinds, or -1 with an exception. */
static int take(Form* self, PyObject* const* arguments, Py_ssize_t count, Arrays* arrays, PyObject** stream) {
  if (count != 5) {
    PyErr_SetString(PyExc_TypeError, "expected tokens, ids, weights, indices and a stream");
    return -1;
  }
  *arrays = (Arrays){arguments[0], arguments[1], arguments[2], arguments[3], NULL, NULL};
  const int fits = fill_inputs(self, arrays);
  if (fits <= 0) return fits;
  *stream = proxyccl_stream(&self->issuer, like_of(arrays->x), arguments[4]);
  return *stream == NULL ? -1 : 1;
}

/* Begins a call whose number of rows, if it is to be known then, is known: its arrays are filled in, and those of the
 * result made. 1; 0 if it does not fit, or -1 with an exception. */
static int begin_known(Form* self, PyObject* const* arguments, Py_ssize_t count, Arrays* arrays, Descriptor** desc,
                       uintptr_t* at) {
  PyObject* stream;
  const int fits = take(self, arguments, count, arrays, &stream);
  if (fits <= 0) return fits;
  *desc = new_descriptor(self, arrays, stream);
  Py_DECREF(stream);
  if (*desc == NULL) return -1;
  if (new_output(self, at, arrays) == 0) {
    if (number_call(self, *desc) == 0) return 1;
    Py_DECREF(arrays->rows);
    Py_DECREF(arrays->weights);
  }
  Py_DECREF((PyObject*)*desc);
  return -1;
}

/* Marks a descriptor's rows as received. */
static void mark_received(Descriptor* desc) {
  PyObject* old = desc->missing;
  desc->missing = Py_NewRef(Py_None);
  Py_XDECREF(old);
}

static PyObject* run(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  Form* self = (Form*)object;
  Arrays arrays;
  Descriptor* desc;
  uintptr_t at[3];
  const int begun = begin_known(self, arguments, count, &arrays, &desc, at);
  if (begun == 0) Py_RETURN_NONE;
  if (begun < 0) return NULL;
  fill_output(self, desc, self->phases, self->most_rows, at);
  PyObject* result = NULL;
  if (proxyccl_issue(&self->issuer, &self->first, desc, desc->stream, arrays_of, &arrays) == 0) {
    mark_received(desc);
    result = PyTuple_Pack(3, arrays.rows, arrays.weights, (PyObject*)desc);
  }
  Py_DECREF(arrays.rows);
  Py_DECREF(arrays.weights);
  Py_DECREF((PyObject*)desc);
  return result;
}

static PyObject* sent_of(Form* self, const Arrays* arrays, Descriptor* desc, const uintptr_t* at) {
  PyObject* object = PyType_GenericAlloc(sent_type, 0);
  if (object == NULL) return NULL;
  Sent* sent = (Sent*)object;
  sent->form = (Form*)Py_NewRef((PyObject*)self), sent->desc = Py_NewRef((PyObject*)desc);
  sent->rows = Py_NewRef(arrays->rows), sent->weights = Py_NewRef(arrays->weights);
  memcpy(sent->at, at, sizeof sent->at);
  if ((sent->owners = arrays_of(arrays)) == NULL || (sent->recorded = PyTuple_New(0)) == NULL) Py_CLEAR(object);
  return object;
}

static PyObject* send(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  Form* self = (Form*)object;
  Arrays arrays;
  Descriptor* desc;
  uintptr_t at[3];
  const int begun = begin_known(self, arguments, count, &arrays, &desc, at);
  if (begun == 0) Py_RETURN_NONE;
  if (begun < 0) return NULL;
  const uintptr_t nowhere[] = {0, 0, 0};
  fill_output(self, desc, self->send_phases, 0, nowhere);
  self->call->received = NULL;
  PyObject* sent = NULL;
  if (proxyccl_issue(&self->issuer, &self->first, desc, desc->stream, arrays_of, &arrays) == 0)
    sent = sent_of(self, &arrays, desc, at);
  Py_DECREF(arrays.rows);
  Py_DECREF(arrays.weights);
  Py_DECREF((PyObject*)desc);
  return sent;
}

static PyObject* owners_of_sent(const void* of) { return Py_NewRef(((const Sent*)of)->owners); }

static PyObject* receive(PyObject* object, PyObject* stream) {
  Sent* self = (Sent*)object;
  Form* form = self->form;
  Descriptor* desc = (Descriptor*)self->desc;
  if (form->most_rows < 0) return PyObject_CallFunctionObjArgs(form->receive_counted, object, stream, NULL);
  fill_output(form, desc, form->receive_phases, desc->rows, self->at);
  if (proxyccl_issue(&form->issuer, &form->second, desc, stream, owners_of_sent, self) != 0) return NULL;
  mark_received(desc);
  return PyTuple_Pack(3, self->rows, self->weights, self->desc);
}

/* A call that `dispatch_form.py` goes on with, and the output buffer that it takes, both references. */
typedef struct {
  Descriptor* desc;
  PyObject* taken;
} Started;

/* Fills in a call and makes its descriptor. 1; 0 if it does not fit, or -1 with an exception. */
static int start(Form* self, PyObject* const* arguments, Py_ssize_t count, Arrays* arrays, Started* started) {
  PyObject* stream;
  int status = take(self, arguments, count, arrays, &stream);
  if (status <= 0) return status;
  PyObject* taken = PyObject_CallFunctionObjArgs(self->begun, like_of(arrays->x), stream, arguments[4], NULL);
  status = -1;
  if (taken != NULL) {
    PyObject* number = PyObject_GetAttrString(taken, "number");
    const Py_ssize_t buffer = number == NULL ? -1 : PyLong_AsSsize_t(number);
    Py_XDECREF(number);
    Descriptor* desc = buffer < 0 ? NULL : new_descriptor(self, arrays, stream);
    if (desc != NULL) {
      desc->output_buffer = buffer;
      *started = (Started){desc, Py_NewRef(taken)};
      status = 1;
    }
  }
  Py_DECREF(stream);
  Py_XDECREF(taken);
  return status;
}

/* Begins a call for `dispatch_form.py`, which goes on with it. */
static PyObject* begin(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  Form* self = (Form*)object;
  Arrays arrays;
  Started started;
  const int status = start(self, arguments, count, &arrays, &started);
  if (status == 0) Py_RETURN_NONE;
  if (status < 0) return NULL;
  PyObject* result = NULL;
  if (number_call(self, started.desc) == 0) result = Py_NewRef((PyObject*)started.desc);
  Py_DECREF((PyObject*)started.desc);
  Py_DECREF(started.taken);
  return result;
}

/* Makes a whole call whose rows go to an output buffer, by one launch. */
static PyObject* store(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  Form* self = (Form*)object;
  Arrays arrays;
  Started started;
  const int status = start(self, arguments, count, &arrays, &started);
  if (status == 0) Py_RETURN_NONE;
  if (status < 0) return NULL;
  Descriptor* desc = started.desc;
  uintptr_t at[3];
  PyObject *result = NULL, *weights = new_array(self, self->new_weights, &at[2]);
  at[0] = self->buffers_at + (uintptr_t)(desc->output_buffer - 1) * self->buffer_bytes;
  at[1] = self->scale_bytes != 0 ? at[0] + self->scales_offset : 0;
  if (weights != NULL && number_call(self, desc) == 0) {
    fill_output(self, desc, self->phases, self->most_rows, at);
    arrays.rows = started.taken, arrays.weights = weights;
    if (proxyccl_issue(&self->issuer, &self->first, desc, desc->stream, arrays_of, &arrays) == 0) {
      mark_received(desc);
      result = PyTuple_Pack(3, (PyObject*)desc, started.taken, weights);
    }
  }
  Py_XDECREF(weights);
  Py_DECREF((PyObject*)desc);
  Py_DECREF(started.taken);
  return result;
}

static PyObject* owners_given(const void* of) { return Py_NewRef((PyObject*)of); }

/* Issues a part of a call that `begin` began. */
static PyObject* issue(PyObject* object, PyObject* arguments) {
  Form* self = (Form*)object;
  PyObject *desc, *stream, *owners;
  int first, phases;
  Py_ssize_t rows;
  unsigned long long at[3];
  if (!PyArg_ParseTuple(arguments, "OOOpin(KKK)", &desc, &stream, &owners, &first, &phases, &rows, &at[0], &at[1],
                        &at[2]))
    return NULL;
  const uintptr_t places[] = {(uintptr_t)at[0], (uintptr_t)at[1], (uintptr_t)at[2]};
  memset(&self->call->layout, 0, sizeof self->call->layout);
  proxyccl_place_tables((Descriptor*)desc, &self->call->layout);
  fill_output(self, (Descriptor*)desc, (uint32_t)phases, rows, places);
  if (proxyccl_issue(&self->issuer, first ? &self->first : &self->second, (Descriptor*)desc, stream, owners_given,
                     owners) != 0)
    return NULL;
  Py_RETURN_NONE;
}

/* The stream of a call that `issue` issues. */
static PyObject* find_stream(PyObject* object, PyObject* arguments) {
  PyObject *x, *given;
  if (!PyArg_ParseTuple(arguments, "OO", &x, &given)) return NULL;
  return proxyccl_stream(&((Form*)object)->issuer, x, given);
}

/* Fills in the tokens of a call by an earlier dispatch's routing. None if they are of other kinds. */
static PyObject* fill(PyObject* object, PyObject* arguments) {
  PyObject* x;
  Py_ssize_t tokens;
  if (!PyArg_ParseTuple(arguments, "On", &x, &tokens)) return NULL;
  const int fits = has_tokens((Form*)object, x);
  if (fits == 0) Py_RETURN_NONE;
  if (fits < 0 || fill_tokens((Form*)object, x, tokens) < 0) return NULL;
  Py_RETURN_TRUE;
}

#define FORM_REFERENCES(apply)                                                                                         \
  apply(first.kept) apply(second.kept) apply(descriptor_type) apply(not_received) apply(context) apply(numbers)        \
      apply(tables) apply(new_tables) apply(address) apply(new_rows) apply(new_scales) apply(new_weights) apply(begun) \
          apply(receive_counted) apply(new_lost) apply(too_many)

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
  PyObject *issuer, *first, *second, *kinds[KINDS], *parsed[PARSED] = {NULL};
  unsigned long long call, before, packing[2], packed_tokens, packed, offsets;
  unsigned long long buffers_at, buffer_bytes, scales_offset, renumbering[4], clearing;
  const int taken = PyArg_ParseTuple(
      arguments, "OOO(OOOOO)(nnnnnnn)(pO)K(iKKKKK)(OKKKK)(Ki)(III)(OOOOOOKO)(nin)(II)(OOO)OO(KKK)", &issuer, &first,
      &second, &kinds[ROWS], &kinds[SCALES], &kinds[IDS], &kinds[WEIGHTS], &kinds[SCATTER], &self->hidden,
      &self->scales, &self->topk, &self->max_tokens, &self->row_bytes, &self->slot_bytes, &self->weight_bytes,
      &self->grows, &parsed[12], &call, &self->before, &before, &packing[0], &packing[1], &packed_tokens, &packed,
      &parsed[13], &renumbering[0], &renumbering[1], &renumbering[2], &renumbering[3], &clearing, &self->cleared,
      &self->phases, &self->send_phases, &self->receive_phases, &parsed[0], &parsed[1], &parsed[2], &parsed[3],
      &parsed[4], &parsed[5], &offsets, &parsed[6], &self->most_rows, &self->counts_rows, &self->received,
      &self->scale_bytes, &self->scale_column, &parsed[7], &parsed[8], &parsed[9], &parsed[10], &parsed[11],
      &buffers_at, &buffer_bytes, &scales_offset);
  if (taken) {
    PyObject** members[] = {&self->descriptor_type, &self->not_received, &self->context, &self->numbers,
                            &self->tables,          &self->new_tables,   &self->address, &self->new_rows,
                            &self->new_scales,      &self->new_weights,  &self->begun,   &self->receive_counted,
                            &self->too_many,        &self->new_lost};
    for (int i = 0; i < PARSED; ++i) *members[i] = Py_NewRef(parsed[i]);
    self->call = (ProxycclDispatch*)(uintptr_t)call, self->quantizing = (ProxycclCombine*)(uintptr_t)before;
    for (int i = 0; i < 2; ++i) self->packing[i] = (uint64_t*)(uintptr_t)packing[i];
    self->packed_tokens = (uint32_t*)(uintptr_t)packed_tokens, self->packed = (uintptr_t)packed;
    self->offsets = (const uint64_t*)(uintptr_t)offsets;
    self->renumbered_ids = (uint64_t*)(uintptr_t)renumbering[0],
    self->lost_slots = (uint64_t*)(uintptr_t)renumbering[1];
    self->renumbered = (uint32_t*)(uintptr_t)renumbering[2], self->kept_ids = (uintptr_t)renumbering[3];
    self->clearing = (ProxycclStreamStep*)(uintptr_t)clearing;
    self->buffers_at = (uintptr_t)buffers_at, self->buffer_bytes = (size_t)buffer_bytes;
    self->scales_offset = (size_t)scales_offset;
  }
  int made = taken && proxyccl_read_issuer(issuer, &self->issuer) == 0 &&
             proxyccl_read_prepared(first, &self->first) == 0 && proxyccl_read_prepared(second, &self->second) == 0;
  for (int i = 0; made && i < KINDS; ++i) made = proxyccl_read_kind(kinds[i], &self->kinds[i]) == 0;
  if (made) return object;
  Py_DECREF(object);
  return NULL;
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL, NULL},
    {"send", (PyCFunction)(void (*)(void))send, METH_FASTCALL, NULL},
    {"begin", (PyCFunction)(void (*)(void))begin, METH_FASTCALL, NULL},
    {"store", (PyCFunction)(void (*)(void))store, METH_FASTCALL, NULL},
    {"issue", issue, METH_VARARGS, NULL},
    {"fill", fill, METH_VARARGS, NULL},
    {"stream", find_stream, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, make},     {Py_tp_dealloc, end},     {Py_tp_traverse, traverse},
    {Py_tp_clear, let_go}, {Py_tp_methods, methods}, {0, NULL},
};
static PyType_Spec spec = {
    .name = "proxyccl.channels.calls._calls.DispatchForm",
    .basicsize = sizeof(Form),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

#define SENT_REFERENCES(apply) apply(form) apply(desc) apply(rows) apply(weights) apply(owners) apply(recorded)

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

/* Itself, with its rows and weights, if they are known already. */
static PyObject* output_of(PyObject* object, void* Py_UNUSED(closure)) {
  const Sent* self = (const Sent*)object;
  return Py_NewRef(self->form->most_rows < 0 ? Py_None : object);
}

static PyObject* stream_of(PyObject* object, void* Py_UNUSED(closure)) {
  return Py_NewRef(((const Descriptor*)((const Sent*)object)->desc)->stream);
}

static PyMethodDef sent_methods[] = {
    {"receive", receive, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef sent_members[] = {
    {"desc", T_OBJECT, offsetof(Sent, desc), READONLY, NULL},
    {"rows", T_OBJECT, offsetof(Sent, rows), READONLY, NULL},
    {"weights", T_OBJECT, offsetof(Sent, weights), READONLY, NULL},
    {"owners", T_OBJECT, offsetof(Sent, owners), READONLY, NULL},
    {"recorded", T_OBJECT, offsetof(Sent, recorded), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyGetSetDef sent_attributes[] = {
    {"output", output_of, NULL, NULL, NULL},
    {"stream", stream_of, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot sent_slots[] = {
    {Py_tp_dealloc, end_sent},
    {Py_tp_traverse, traverse_sent},
    {Py_tp_clear, let_sent_go},
    {Py_tp_methods, sent_methods},
    {Py_tp_members, sent_members},
    {Py_tp_getset, sent_attributes},
    {0, NULL},
};
static PyType_Spec sent_spec = {
    .name = "proxyccl.channels.calls._calls.SentDispatch",
    .basicsize = sizeof(Sent),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = sent_slots,
};

int proxyccl_add_dispatch_form(PyObject* module) {
  if (proxyccl_name_attributes() != 0 || proxyccl_add_descriptor(module) != 0) return -1;
  if (form_type == NULL) form_type = (PyTypeObject*)PyType_FromSpec(&spec);
  if (sent_type == NULL) sent_type = (PyTypeObject*)PyType_FromSpec(&sent_spec);
  if (form_type == NULL || sent_type == NULL) return -1;
  if (PyModule_AddObjectRef(module, "DispatchForm", (PyObject*)form_type) != 0) return -1;
  return PyModule_AddObjectRef(module, "SentDispatch", (PyObject*)sent_type);
}
