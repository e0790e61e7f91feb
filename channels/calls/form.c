#include "form.h"

#include <string.h>

static PyTypeObject* form_type; /* the type is made once per process */

int proxyccl_is_form(PyObject* object) { return Py_TYPE(object) == form_type; }

void proxyccl_fill_form(const CallForm* form, const GivenArray* arrays, size_t count, const ReachedRange* output) {
  for (size_t i = 0; i < form->relocation_count; ++i) {
    const Relocation* relocation = &form->relocations[i];
    *(uintptr_t*)(uintptr_t)relocation->word = arrays[relocation->array].at + relocation->offset;
  }
  if (form->peers_words == NULL || output == NULL) return;
  const uintptr_t at = arrays[count - 1].at;
  for (size_t rank = 0; rank < form->ranks; ++rank)
    form->peers_words[rank] = rank == form->rank ? at : output->bases[rank] + (at - output->start);
}

/* Reads a list of tuples of `width` numbers. Returns an array of structs of `width` members of type uint64_t, which the
 * caller frees; or NULL with an exception. */
static void* read_rows(PyObject* list, size_t width, size_t* count) {
  *count = (size_t)PyList_Size(list);
  uint64_t* numbers = PyMem_Calloc(*count * width + 1, sizeof *numbers);
  if (numbers == NULL) return PyErr_NoMemory();
  for (size_t i = 0; i < *count * width && PyErr_Occurred() == NULL; ++i) {
    PyObject* number = PyTuple_GetItem(PyList_GetItem(list, (Py_ssize_t)(i / width)), (Py_ssize_t)(i % width));
    if (number != NULL) numbers[i] = PyLong_AsUnsignedLongLong(number);
  }
  if (PyErr_Occurred() == NULL) return numbers;
  PyMem_Free(numbers);
  return NULL;
}

int proxyccl_as_pointer(PyObject* number, void* pointer) {
  void* const address = PyLong_AsVoidPtr(number);
  memcpy(pointer, &address, sizeof address);
  return PyErr_Occurred() == NULL;
}

int proxyccl_leave_lock(PyObject* release, int result) {
  PyObject *error_type, *error, *traceback;
  PyErr_Fetch(&error_type, &error, &traceback);
  PyObject* released = PyObject_CallNoArgs(release);
  if (released != NULL) {
    PyErr_Restore(error_type, error, traceback);
    Py_DECREF(released);
    return result;
  }
  Py_XDECREF(error_type);
  Py_XDECREF(error);
  Py_XDECREF(traceback);
  return -1;
}

PyObject* proxyccl_enter_context(PyObject* make) {
  PyObject* context = PyObject_CallNoArgs(make);
  PyObject* entered = context == NULL ? NULL : PyObject_CallMethod(context, "__enter__", NULL);
  if (entered == NULL) Py_CLEAR(context);
  Py_XDECREF(entered);
  return context;
}

int proxyccl_leave_context(PyObject* context) {
  const int left = proxyccl_take_result(PyObject_CallMethod(context, "__exit__", "OOO", Py_None, Py_None, Py_None));
  Py_DECREF(context);
  return left;
}

static int traverse(PyObject* object, visitproc visit, void* arg) {
  CallForm* self = (CallForm*)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->prepared.kept);
  return 0;
}

static int let_go(PyObject* object) {
  CallForm* self = (CallForm*)object;
  self->prepared.launch = NULL; /* releasing `kept` may free the launch */
  self->relocation_count = 0, self->peers_words = NULL;
  Py_CLEAR(self->prepared.kept);
  return 0;
}

static int let_all_go(PyObject* object) {
  CallForm* self = (CallForm*)object;
  PyMem_Free(self->relocations);
  PyMem_Free(self->ranges);
  return let_go(object);
}

static void end(PyObject* object) { proxyccl_free(object, let_all_go); }

static PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* Py_UNUSED(keywords)) {
  PyObject *kept, *relocations, *ranges;
  unsigned long long issue, callers, call, launch, peers_words;
  Py_ssize_t ranks, rank, lent;
  int names_memory;
  if (!PyArg_ParseTuple(arguments, "(KKKK)OO!(Knn)O!np", &issue, &callers, &call, &launch, &kept, &PyList_Type,
                        &relocations, &peers_words, &ranks, &rank, &PyList_Type, &ranges, &lent, &names_memory))
    return NULL;
  PyObject* object = PyType_GenericNew(type, NULL, NULL);
  if (object == NULL) return NULL;
  CallForm* self = (CallForm*)object;
  self->prepared = (PreparedCall){(Issue)(uintptr_t)issue, (void*)(uintptr_t)callers, (void*)(uintptr_t)call,
                                  (void*)(uintptr_t)launch, Py_NewRef(kept)};
  self->peers_words = (uintptr_t*)(uintptr_t)peers_words;
  self->ranks = (size_t)ranks, self->rank = (size_t)rank, self->lent = lent, self->names_memory = names_memory;
  self->relocations = read_rows(relocations, 3, &self->relocation_count);
  self->ranges = self->relocations == NULL ? NULL : read_rows(ranges, 2, &self->range_count);
  if (self->ranges == NULL) Py_CLEAR(object);
  return object;
}

static PyType_Slot slots[] = {
    {Py_tp_new, make}, {Py_tp_dealloc, end}, {Py_tp_traverse, traverse}, {Py_tp_clear, let_go}, {0, NULL},
};

int proxyccl_add_form(PyObject* module) {
  return proxyccl_add_type(module, &form_type, NULL, "proxyccl.channels.calls._calls.Form", sizeof(CallForm),
                           Py_TPFLAGS_HAVE_GC, slots);
}
