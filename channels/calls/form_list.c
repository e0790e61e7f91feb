#include "form_list.h"

#include <string.h>

#include "calls.h"

enum { MOST_FORMS = 16 }; /* a new form beyond this number replaces the oldest */

typedef struct Listed {
  PyObject* form;
  ArrayKind kinds[PROXYCCL_MOST_GIVEN];
} Listed;

/* See FormList in _calls.pyi. */
typedef struct FormList {
  PyObject ob_base;
  PyObject* arguments; /* the constructor's arguments, which own the objects that the next fields borrow */
  PyObject* calls;     /* the group's Calls */
  PyObject *widths, *view, *prepare;
  Py_ssize_t further; /* number of arguments after the arrays */
  Py_ssize_t count;
  Listed listed[MOST_FORMS]; /* the oldest first */
} FormList;

/* Drops an entry's references. The caller has removed the entry from the list, because dropping references may run
 * Python code. */
static void release(Listed listed) {
  for (int i = 0; i < PROXYCCL_MOST_GIVEN; ++i) proxyccl_drop_kind(&listed.kinds[i]);
  Py_XDECREF(listed.form);
}

/* Returns whether an array's address is a multiple of its element size. */
static int is_aligned(const GivenArray* array) {
  size_t count = 1;
  for (Py_ssize_t i = 0; i < array->kind.dimensions; ++i) count *= (size_t)array->kind.shape[i];
  return array->bytes == 0 || array->at % (array->bytes / count) == 0;
}

int proxyccl_read_listed(const ArrayTypes* types, PyObject* x, ListedArray* listed) {
  GivenArray* const array = &listed->array;
  listed->object = x;
  const int read = proxyccl_read_array(types, x, array);
  if (read <= 0) return read;
  if (!is_aligned(array)) {
    proxyccl_release_array(array);
    return 0;
  }
  listed->extent = array->kind.shape[0], listed->at = array->bytes == 0 ? PROXYCCL_EMPTY : array->at;
  array->kind.shape[0] = 0, array->kind.alignment = 0;
  return 1;
}

/* Reads an array; if C can't, reads the view that Python makes of the array. Returns 1; 0 if neither the array nor the
 * view can be read; -1 with an exception. */
static int read_or_view(const FormList* self, Py_ssize_t argument, PyObject* x, ListedArray* listed) {
  const ArrayTypes* const types = proxyccl_types_of(self->calls);
  int read = proxyccl_read_listed(types, x, listed);
  if (read != 0) return read;
  const int known = PyDict_Contains(types->tensors, (PyObject*)Py_TYPE(x)); /* -1 if the type is unhashable */
  if (known < 0) PyErr_Clear();
  PyObject* view = PyObject_CallFunction(self->view, "nO", argument, x);
  if (view == NULL) return -1;
  if (known == 0 && PyDict_Contains(types->tensors, (PyObject*)Py_TYPE(x)) > 0) /* calling `view` registered the type */
    read = proxyccl_read_listed(types, x, listed);
  if (read == 0 && (read = proxyccl_read_listed(types, view, listed)) > 0)
    listed->object = x, listed->array.kind.type = Py_TYPE(x);
  Py_DECREF(view); /* `x` keeps the memory alive */
  return read;
}

/* Returns whether a tuple has a valid number of arrays: at most `width`, or exactly -`width` if `width` is negative; no
 * array may be None. */
static int is_wide(PyObject* tuple, Py_ssize_t width) {
  const Py_ssize_t count = PyTuple_Size(tuple);
  for (Py_ssize_t i = 0; i < count; ++i)
    if (PyTuple_GetItem(tuple, i) == Py_None) return 0;
  return width < 0 ? count == -width : count <= width;
}

/* Reads a call's arrays, and stores their `count`. Returns 1; 0 if Python must refuse the arrays; -1 with an
 * exception. */
static int read_all(const FormList* self, PyObject* const* arguments, ListedArray* given, int* count) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(self->widths); ++i) {
    const Py_ssize_t width = PyLong_AsSsize_t(PyTuple_GetItem(self->widths, i));
    PyObject* const argument = arguments[i];
    const int several = width != 1 && PyTuple_Check(argument);
    if (several && !is_wide(argument, width)) return 0;
    for (Py_ssize_t k = 0; k < Py_ABS(width); ++k, ++*count) {
      ListedArray* listed = &given[*count];
      PyObject* x = several && k < PyTuple_Size(argument) ? PyTuple_GetItem(argument, k) : Py_None;
      if (!several && k == 0) x = argument;
      memset(&listed->array.kind, 0, sizeof listed->array.kind);
      listed->object = Py_None, listed->array.buffer.obj = NULL, listed->array.bytes = 0;
      listed->extent = 0, listed->at = 0;
      if (x == Py_None) continue;
      const int read = read_or_view(self, i, x, listed);
      if (read <= 0) return read;
    }
  }
  return 1;
}

static PyObject* call_prepare(const FormList* self, PyObject* const* arguments, Py_ssize_t count) {
  PyObject* tuple = PyTuple_New(count);
  for (Py_ssize_t i = 0; tuple != NULL && i < count; ++i)
    if (PyTuple_SetItem(tuple, i, Py_NewRef(arguments[i])) != 0) Py_CLEAR(tuple);
  PyObject* made = tuple == NULL ? NULL : PyObject_Call(self->prepare, tuple, NULL);
  Py_XDECREF(tuple);
  return made;
}

/* Returns the form that is listed for the kinds of a call's arrays, as a new reference; NULL if no form is listed. */
static PyObject* find(const FormList* self, const ListedArray* given, int count) {
  for (Py_ssize_t i = 0; i < self->count; ++i) {
    int k = 0;
    while (k < count && memcmp(&self->listed[i].kinds[k], &given[k].array.kind, sizeof(ArrayKind)) == 0) ++k;
    if (k == count) return Py_NewRef(self->listed[i].form);
  }
  return NULL;
}

static void add(FormList* self, PyObject* form, const ListedArray* given, int count) {
  Listed listed = {.form = Py_NewRef(form)}, oldest = {0};
  for (int i = 0; i < count; ++i) {
    listed.kinds[i] = given[i].array.kind;
    proxyccl_keep_kind(&listed.kinds[i]);
  }
  if (self->count == MOST_FORMS) {
    oldest = self->listed[0];
    memmove(self->listed, self->listed + 1, --self->count * sizeof *self->listed);
  }
  self->listed[self->count++] = listed;
  release(oldest);
}

/* Finds or prepares the form of a call, and makes the call. */
static PyObject* find_and_call(FormList* self, PyObject* const* arguments, const ListedArray* given, int count) {
  const Py_ssize_t arrays = PyTuple_Size(self->widths);
  PyObject* form = find(self, given, count);
  if (form == NULL) {
    form = call_prepare(self, arguments, arrays + self->further);
    if (form == NULL) return NULL;
    if (!PyObject_TypeCheck(form, proxyccl_listed_form)) {
      PyErr_Format(PyExc_TypeError, "expected a ListedForm, not %R", (PyObject*)Py_TYPE(form));
      Py_DECREF(form);
      return NULL;
    }
    proxyccl_count(self->calls, 0, 1);
    add(self, form, given, count);
  }
  PyObject* result = ((ListedForm*)form)->call(form, given, arguments + arrays);
  if (result != NULL) proxyccl_count(self->calls, 1, 0);
  Py_DECREF(form);
  return result;
}

static PyObject* call(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  FormList* self = (FormList*)object;
  if (count != PyTuple_Size(self->widths) + self->further) {
    PyErr_SetString(PyExc_TypeError,
                    "call: expected one argument for each array of the list and each further argument");
    return NULL;
  }
  ListedArray given[PROXYCCL_MOST_GIVEN];
  int read = 0;
  const int fits = read_all(self, arguments, given, &read);
  PyObject* result = fits > 0 ? find_and_call(self, arguments, given, read) : NULL;
  for (int i = 0; i < read; ++i) proxyccl_release_array(&given[i].array);
  if (result != NULL || PyErr_Occurred() != NULL) return result;
  PyObject* refused = call_prepare(self, arguments, count);
  if (refused != NULL) PyErr_SetString(PyExc_RuntimeError, "a call was prepared for arrays that can't be used");
  Py_XDECREF(refused);
  return NULL;
}

static int traverse(PyObject* object, visitproc visit, void* arg) {
  FormList* self = (FormList*)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->arguments);
  for (Py_ssize_t i = 0; i < self->count; ++i) {
    for (int k = 0; k < PROXYCCL_MOST_GIVEN; ++k) {
      PROXYCCL_VISIT_KIND(self->listed[i].kinds[k])
    }
    Py_VISIT(self->listed[i].form);
  }
  return 0;
}

/* Leaves `arguments`: every reference cycle through them also has an object that can be cleared. */
static int let_go(PyObject* object) {
  FormList* self = (FormList*)object;
  while (self->count > 0) release(self->listed[--self->count]);
  return 0;
}

static int let_all_go(PyObject* object) {
  let_go(object);
  Py_CLEAR(((FormList*)object)->arguments);
  return 0;
}

static void end(PyObject* object) { proxyccl_free(object, let_all_go); }

static PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* Py_UNUSED(keywords)) {
  PyObject* object = PyType_GenericNew(type, NULL, NULL);
  FormList* self = (FormList*)object;
  if (object == NULL) return NULL;
  self->arguments = Py_NewRef(arguments);
  Py_ssize_t all = 0;
  if (PyArg_ParseTuple(arguments, "OO!nOO", &self->calls, &PyTuple_Type, &self->widths, &self->further, &self->view,
                       &self->prepare) &&
      proxyccl_require_calls(self->calls))
    for (Py_ssize_t i = 0; i < PyTuple_Size(self->widths); ++i)
      all += Py_ABS(PyLong_AsSsize_t(PyTuple_GetItem(self->widths, i)));
  if (all > PROXYCCL_MOST_GIVEN) PyErr_Format(PyExc_ValueError, "expected at most %d arrays", PROXYCCL_MOST_GIVEN);
  if (PyErr_Occurred() != NULL) Py_CLEAR(object);
  return object;
}

static PyMethodDef methods[] = {
    {"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, make},     {Py_tp_dealloc, end},     {Py_tp_traverse, traverse},
    {Py_tp_clear, let_go}, {Py_tp_methods, methods}, {0, NULL},
};

/* Types that derive from ListedForm add slots. */
static PyType_Slot form_slots[] = {{0, NULL}};

PyTypeObject* proxyccl_listed_form;

int proxyccl_add_form_list(PyObject* module) {
  static PyTypeObject* list_type;
  if (proxyccl_add_type(module, &proxyccl_listed_form, NULL, "proxyccl.channels.calls._calls.ListedForm",
                        sizeof(ListedForm), Py_TPFLAGS_BASETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION, form_slots) != 0)
    return -1;
  return proxyccl_add_type(module, &list_type, NULL, "proxyccl.channels.calls._calls.FormList", sizeof(FormList),
                           Py_TPFLAGS_HAVE_GC, slots);
}
